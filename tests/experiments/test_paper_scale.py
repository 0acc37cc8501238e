"""Experiments 2, 3, 4 and 7: runs cut short, relative steps, texts, memory, and what each verdict rests on.

That every recipe runs at smoke scale is tested with all others in ``test_paper_experiments.py``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import paper
from experiments.paper import encoder_cleaning, encoder_settings, memory, texts
from experiments.paper.entries import Entry, Stage, compete
from experiments.paper.recipe import Job
from experiments.paper.text_cleaning import WARM, TextCase, TextRates, TextTrial, _rows, order_auc, text_methods
from experiments.pieces import Cells, OutOfTime
from experiments.trial import MEASURED
from hyperkron.algorithms import AID, InnerOnly, inner_loop
from hyperkron.cleaning.models import TextEncoder
from hyperkron.hypergradient import cg, kfac
from hyperkron.solution import HyperkronError, HyperkronWarning

CPU = torch.device("cpu")


# --- as far as the time allows -----------------------------------------------------------------------------


class Log:
    """Entries that write down what is asked of them, and a job that ends after so many cells."""

    def __init__(self, folder: Path, seeds: tuple[int, ...] = (1, 2)) -> None:
        self.folder, self.seeds, self.done = folder, seeds, list[str]()
        self.job = self.fresh()

    def fresh(self) -> Job:
        return Job("smoke", None, self.seeds, CPU, Cells(self.folder / "x.jsonl", {}))

    def entry(self, name: str, stop_after: str = "") -> Entry:
        def note(what: str) -> None:
            self.done.append(what)
            if what == stop_after:
                self.job.deadline = -math.inf

        def score(setting: dict[str, float]) -> float:
            note(f"tune {name} {setting['a']:g}")
            return abs(setting["a"] - 2)

        def final(setting: dict[str, float], seed: int) -> dict[str, Any]:
            note(f"{name} {setting['a']:g} seed {seed}")
            return {"seed": seed}

        return Entry(name, {"a": (1.0, 2.0, 3.0)}, score, final)


def test_stages_are_worked_off_in_order_and_seed_by_seed(tmp_path: Path) -> None:
    log = Log(tmp_path)
    stages = [Stage("one", [log.entry("A"), log.entry("B")]), Stage("two", [log.entry("A")])]
    found = compete(log.job, stages, 3)
    trials = [f"tune {name} {a}" for name in "AB" for a in (1, 2, 3)]
    first = ["A 2 seed 1", "B 2 seed 1", "A 2 seed 2", "B 2 seed 2"]
    assert log.done == [*trials, *first, *trials[:3], "A 2 seed 1", "A 2 seed 2"]
    assert not found.cut_short
    assert found.stages["one"]["B"] == {"setting": {"a": 2.0}, "edge": [], "runs": [{"seed": 1}, {"seed": 2}]}


def test_a_run_cut_short_gives_what_it_has_and_goes_on_later(tmp_path: Path) -> None:
    log = Log(tmp_path)
    stages = [Stage("one", [log.entry("A", "A 2 seed 2"), log.entry("B")]), Stage("two", [log.entry("A")])]
    found = compete(log.job, stages, 3)
    assert found.cut_short and set(found.stages) == {"one"}
    assert [len(x["runs"]) for x in found.stages["one"].values()] == [2, 1]
    log.done.clear()
    log.job = log.fresh()
    assert not compete(log.job, stages, 3).cut_short
    assert log.done[0] == "B 2 seed 2"
    log.job = Job("smoke", None, (1,), CPU, Cells(tmp_path / "y.jsonl", {}), deadline=-math.inf)
    with pytest.raises(OutOfTime, match="before the first run"):
        compete(log.job, stages, 3)


def test_a_stage_may_have_fewer_seeds_and_trials(tmp_path: Path) -> None:
    log = Log(tmp_path, (1, 2, 3))
    found = compete(log.job, [Stage("one", [log.entry("A")], seeds=2), Stage("two", [log.entry("B")], trials=1)], 3)
    assert [len(found.stages[x][y]["runs"]) for x, y in (("one", "A"), ("two", "B"))] == [2, 3]
    assert not found.cut_short and sum(x.startswith("tune B") for x in log.done) == 1


def test_both_of_two_values_are_at_an_edge(tmp_path: Path) -> None:
    log = Log(tmp_path, (1,))
    two = Entry("A", {"a": (1.0, 2.0), "b": (1.0, 2.0, 3.0)}, lambda x: x["a"] + x["b"], lambda x, seed: {"seed": seed})
    assert compete(log.job, [Stage("one", [two])], 6).stages["one"]["A"]["edge"] == ["a", "b"]


def test_a_partial_recipe_is_incomplete_until_all_is_there(tmp_path: Path) -> None:
    log = Log(tmp_path)

    def work(job: Job) -> dict[str, Any]:
        log.job = job
        found = compete(job, [Stage("one", [log.entry("A", "A 2 seed 1")])], 3)
        return {"runs": len(found.stages["one"]["A"]["runs"]), "cut_short": found.cut_short}

    recipe = replace(paper.recipes()["encoder"], work=work)
    result = recipe.run("smoke", 2, folder=tmp_path)
    assert (result.figures["runs"], result.complete) == (1, False)
    result = recipe.run("smoke", 2, folder=tmp_path)
    assert (result.figures["runs"], result.complete) == (2, True)


def test_the_list_of_parts_may_change_and_the_rest_may_not(tmp_path: Path) -> None:
    recipe = paper.recipes()["encoder"]
    settings = recipe.settings["smoke"]

    def mark(**changes: Any) -> str:
        changed = replace(recipe, settings={"smoke": replace(settings, **changes)})
        return changed.job("smoke", 1, CPU, tmp_path).cells.mark

    assert mark(parts=settings.parts[:1]) == mark() != mark(deep_steps=2)
    assert mark(case=replace(settings.case, batch=17)) != mark()


def test_deep_runs_have_their_own_number_of_steps(tmp_path: Path) -> None:
    settings = replace(encoder_settings.MINILM["smoke"], deep_steps=2)
    job = Job("smoke", settings, (1,), CPU, Cells(tmp_path / "x.jsonl", {}))
    source = encoder_cleaning.source_of(job, texts.MADE_UP)
    method = text_methods(settings.rates)["Baseline"]
    for layers, steps in ((1, settings.case.steps), (2, 2)):
        entry = encoder_cleaning._entry(job, source, settings.parts[0], layers, method)
        assert entry.final({"inner": 1e-2}, 1)["last"]["step"] == steps


# --- texts -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return texts.encoder(texts.MADE_UP, None, CPU)


@pytest.fixture(scope="module")
def easy(encoder: TextEncoder) -> tuple[texts.Corpus, tuple[Any, Any, Any]]:
    """Words give the class away; 40 % of 300 labels are wrong, and always in the same way."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> tuple[list[str], torch.Tensor]:
        y = torch.randint(3, (count,), generator=generator)
        words = 10 * y[:, None] + torch.randint(10, (count, 6), generator=generator)
        return [" ".join(f"w{i}" for i in row) for row in words.tolist()], y

    (train, a), (valid, b), (test, c) = part(360), part(60), part(60)
    weak = torch.where(torch.rand(360, generator=generator) < 0.4, (a + 1) % 3, a)
    corpus = texts.Corpus(train, valid, test, weak, (a, b, c), 3)
    return corpus, tuple(encoder.prefix(x, 1, max_length=16) for x in (train, valid, test))  # type: ignore[return-value]


def _trial(encoder: TextEncoder, split: texts.TextSplit, name: str, steps: int, **setting: float) -> TextTrial:
    torch.manual_seed(1)
    case = TextCase(batch=60, inner_steps=3, steps=steps, looks=2)
    values = {"inner": 1e-2, "outer": 0.05, "damping": 0.1, "step": 0.1, "alpha": 0.1} | setting
    return TextTrial(case, split, encoder.with_head(3, 1), text_methods(TextRates())[name], values, 1, steps)


def test_a_split_of_texts_has_disjoint_parts_and_the_labels_it_says(easy: Any) -> None:
    corpus, parts = easy
    split = texts.split(corpus, parts, 1)
    assert [len(x) for x in (split.train, split.trusted, split.second, split.test)] == [300, 60, 60, 60]
    order = torch.randperm(360, generator=torch.Generator().manual_seed(1))
    assert torch.equal(split.second.labels, corpus.gold[0][order[:60]])
    assert torch.equal(split.train.labels, corpus.weak[order[60:]])
    assert torch.equal(split.clean, corpus.weak[order[60:]] == corpus.gold[0][order[60:]])
    row = parts[0].batch([int(order[60])])[0]
    torch.testing.assert_close(split.train.hidden.batch([0])[0], row)
    assert len(texts.split(corpus, parts, 1, 8).trusted) == 8
    uniform = texts.split(corpus, parts, 1, noise="uniform")
    assert 0.55 < float(uniform.clean.float().mean()) < 0.78  # 1 − ½·⅔
    with pytest.raises(HyperkronError, match=r"trusted=61 must lie between 1 and 60"):
        texts.split(corpus, parts, 1, 61)
    with pytest.raises(HyperkronError, match="noise='other' is unknown"):
        texts.split(corpus, parts, 1, noise="other")  # type: ignore[arg-type]


def test_batches_of_one_shape_hold_the_same_states(easy: Any) -> None:
    corpus, parts = easy
    rows = texts.split(corpus, parts, 1).train
    chosen = torch.tensor([3, 0, 7])
    states, mask = rows.batch(chosen)
    wide, wide_mask = rows.padded(chosen, rows.longest + 2)
    assert wide.shape[1] == rows.longest + 2 and torch.equal(wide_mask.sum(1), mask.sum(1))
    torch.testing.assert_close(wide[:, : states.shape[1]], states)
    assert float(wide[:, states.shape[1] :].abs().sum()) == 0


def test_reference_lines_train_on_the_rows_they_name(easy: Any) -> None:
    split = texts.split(*easy, 1)
    right = int(split.clean.sum())
    sizes = [len(_rows(split, name)) for name in ("Baseline", "trusted only", "trusted + noisy", "trusted + correct")]
    assert sizes == [300, 60, 360, 60 + right]
    correct = _rows(split, "trusted + correct")
    assert torch.equal(correct.labels[60:], split.train.labels[split.clean])
    first = int(split.clean.nonzero()[0])
    torch.testing.assert_close(correct.hidden.batch([60])[0], split.train.hidden.batch([first])[0])


def test_all_methods_train_the_same_parameters_on_the_same_batches(encoder: TextEncoder, easy: Any) -> None:
    split = texts.split(*easy, 1)
    seen: dict[str, list[list[int]]] = {}
    for name, method in text_methods(TextRates()).items():
        if method.algorithm is None:
            continue
        trial = _trial(encoder, split, name, 3)
        assert len(trial.run.state.params) == sum(p.requires_grad for p in trial.model.parameters()) == 18, name
        source, seen[name] = trial.run.batches.inner, []

        def watched(source: Any = source, log: list[list[int]] = seen[name]) -> Any:
            batch = source()
            log.append(batch[3].tolist())
            return batch

        trial.run.batches.inner = watched  # type: ignore[method-assign]
        trial.advance(2)
        assert not trial.failed, name
    assert len(set(map(str, seen.values()))) == 1 and len(seen["SAMA"]) >= 2 * 2


@pytest.mark.long
def test_weights_learn_to_tell_right_from_wrong_labels(encoder: TextEncoder, easy: Any) -> None:
    split = texts.split(*easy, 1)
    for name in ("SAMA", "KFAC", "KFAC-EMP", "CG"):
        trial = _trial(encoder, split, name, 40)
        trial.advance(MEASURED)
        torch.testing.assert_close(trial.weights.weight, torch.full((300,), 0.5))
        trial.train(test=True)
        found = trial.figures()
        assert found["auc"] > 0.75, (name, found["auc"])
        assert found["outer_rate"] > 0 and len(found["curve"]["step"]) == 2


def test_inner_steps_that_cannot_be_recorded_run_eagerly(
    encoder: TextEncoder, easy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    trial = _trial(encoder, texts.split(*easy, 1), "SAMA", 3)
    monkeypatch.setattr(inner_loop, "_Recorded", refuse)
    monkeypatch.setattr(trial.run.state.loop, "_wants_graph", True)
    with pytest.warns(HyperkronWarning, match="could not be recorded"):
        trial.train(test=False)
    assert trial.run.state.step == 3 and not trial.failed and not trial.figures()["graph"]


def test_tuning_does_not_touch_the_test_part(
    encoder: TextEncoder, easy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[int] = []
    from experiments.paper import text_cleaning

    original = text_cleaning.loss_and_error
    monkeypatch.setattr(
        text_cleaning, "loss_and_error", lambda model, part: seen.append(len(part)) or original(model, part)
    )
    settings = encoder_settings.MINILM["smoke"]
    job = Job("smoke", settings, (1,), CPU, Cells(tmp_path / "x.jsonl", {}))
    source = encoder_cleaning.source_of(job, texts.MADE_UP)
    method = text_methods(settings.rates)["SAMA"]
    entry = encoder_cleaning._entry(job, source, settings.parts[0], 1, method)
    setting = {key: values[0] for key, values in method.grid.items()}
    entry.score(setting)
    assert seen and set(seen) == {20}  # the rows set aside; the test part has 40
    entry.final(setting, 1)
    assert 40 in seen


def test_a_price_is_the_time_of_a_step_without_the_first_ones(encoder: TextEncoder, easy: Any) -> None:
    trial = _trial(encoder, texts.split(*easy, 1), "KFAC", 20)
    costs = [100.0] * WARM + [2.0, 4.0, 6.0]
    readings = iter([x for cost in costs for x in (0.0, cost)])
    trial.run.clock = lambda: next(readings)
    assert trial.price(3) == pytest.approx(4.0)
    trial.run.failure = HyperkronError("diverged")
    with pytest.raises(HyperkronError, match="KFAC failed"):
        trial.price(3)


def test_times_of_the_encoder_experiment_are_steps_times_prices() -> None:
    run = {"best": {"test_error": 0.25, "second_error": 0.5}, "last": {"test_error": 0.5, "step": 8.0}}
    run |= {"auc": 0.5, "failed": False, "graph": False, "outer_rate": 1.0}
    run["curve"] = {"step": [4.0, 8.0], "second_error": [0.5, 0.6], "test_error": [0.25, 0.5]}
    found = encoder_cleaning._summary([run], 0.25)
    assert found["seconds"] == [2.0] and found["step_seconds"] == [0.25] and found["accuracy"] == [75.0]
    assert found["curves"] == [{"seconds": [1.0, 2.0], "second_error": [0.5, 0.6], "test_error": [0.25, 0.5]}]


def test_a_fresh_network_is_trained_with_the_final_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = encoder_settings.MINILM["smoke"]
    job = paper.recipes()["encoder"].job("smoke", 1, CPU, tmp_path)
    source = encoder_cleaning.source_of(job, texts.MADE_UP)
    methods = text_methods(settings.rates)
    entries = {n: encoder_cleaning._entry(job, source, settings.parts[0], 1, methods[n]) for n in ("KFAC", "Baseline")}
    setting = {name: values[0] for name, values in entries["KFAC"].grid.items()}
    seen: list[Any] = []
    plain = TextTrial.train

    def train(self: TextTrial, test: bool) -> None:
        seen.append((self.name, self.weights.weight.detach().clone()))
        plain(self, test)

    monkeypatch.setattr(TextTrial, "train", train)
    found = entries["KFAC"].final(setting, 1)
    assert [name for name, _ in seen] == ["KFAC", "Baseline"] and 0 <= found["again"] <= 100
    assert not torch.equal(seen[1][1], torch.ones_like(seen[1][1]))  # it is given the weights that were learnt
    assert "again" not in entries["Baseline"].final({"inner": 1e-2}, 1)


def test_order_is_the_probability_of_a_right_order() -> None:
    weights, clean = torch.tensor([0.1, 0.5, 0.5, 0.9, 0.0]), torch.tensor([False, True, False, True, True])
    pairs = [(a > b) + 0.5 * (a == b) for a in weights[clean].tolist() for b in weights[~clean].tolist()]
    assert order_auc(weights, clean) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(order_auc(weights, torch.ones(5, dtype=torch.bool)))


# --- memory ------------------------------------------------------------------------------------------------


def test_storages_count_what_autograd_keeps() -> None:
    with memory.Storages() as count:
        x = torch.zeros(1000, requires_grad=True)
        assert count.now == 4000
        y = x.exp()  # kept for the backward pass
        z = y.sin()
        del y
        assert count.now == 12_000
        view = z.view(10, 100)
        assert count.now == 12_000
        del z, view
        assert count.now == 4000 and count.peak == 12_000


def test_the_hook_sees_the_backward_pass_and_ranks_methods() -> None:
    settings = memory.Settings(layers=(1,), batch=8, tokens=16, hidden=16, heads=2)

    def peak(make: Any) -> int:
        return memory.peak_bytes(CPU, lambda: memory._step(settings, 1, CPU, make()))[0]

    alone, with_kfac, with_cg = peak(InnerOnly), peak(lambda: AID(kfac(), 1)), peak(lambda: AID(cg(2), 1))
    assert alone < with_kfac < with_cg
