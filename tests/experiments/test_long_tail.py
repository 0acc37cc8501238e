"""Long-tailed images: the hypergradient of the true inner problem against dense matrices; data, losses, plan, page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hyperkron as hk
import oracles
from experiments.paper import long_tail, long_tail_page
from experiments.paper.long_tail_data import Augmented, counts, decoded, keep_decoded, long_tailed
from experiments.paper.long_tail_training import METHODS, Case, Training, accuracies, effective_weights, plain, weighted
from experiments.paper.networks import resnet32
from experiments.paper.recipe import Job, Result, Verdict
from experiments.pieces import Cells
from hyperkron.curvature import GGN
from hyperkron.solution import HyperkronError

DOUBLE = torch.float64
Batch = tuple[Tensor, Tensor]


# --- the hypergradient ---------------------------------------------------------------------------------------------


def _rows(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _inner(model: nn.Module, net: Any, batch: Batch) -> Tensor:
    """J_in in plain torch: the weights are a function of λ and of losses that are constants."""
    rows = _rows(model, batch)
    raw = net.net(rows.detach()[:, None])[:, 0].sigmoid()
    return (raw / raw.mean() * rows).mean()


def _problem(model: nn.Module, shape: tuple[int, ...], count: int = 6) -> tuple[Any, Batch, Batch]:
    """A weight network away from its kinks, an inner batch and a meta batch."""
    torch.manual_seed(3)
    net = hk.MetaWeightNet(5, normalise=True).to(DOUBLE)
    model.to(DOUBLE)
    inner, outer = ((torch.randn(count, *shape, dtype=DOUBLE), torch.arange(count) % 3) for _ in range(2))
    return net, inner, outer


def _dense(model: nn.Module, net: nn.Module, inner: Batch, outer: Batch, curvature: Tensor) -> oracles.Tree:
    """−∂²_λθ J_in · A⁻¹ · ∂_θ J_out with every matrix written out."""
    params, hypers = list(model.parameters()), list(net.parameters())
    b = oracles.gradient(_rows(model, outer).mean(), params).detach()
    crossed = oracles.hessian(lambda: _inner(model, net, inner), hypers, params)
    return oracles.tree(-crossed @ torch.linalg.solve(curvature, b), oracles.trainable(net))


def _tiny() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    return {
        "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
        "resnet": (lambda: resnet32(3, width=2, blocks=1), (3, 8, 8)),
    }


@pytest.mark.parametrize(("name", "curvature"), [("mlp", "hessian"), ("mlp", "ggn"), ("resnet", "ggn")])
def test_exact_curvature_gives_the_dense_hypergradient(name: str, curvature: str) -> None:
    """Weights of detached losses, batch norm in training mode: CG to the end is the dense solve."""
    torch.manual_seed(1)
    make, shape = _tiny()[name]
    model = make()
    net, inner, outer = _problem(model, shape)
    params = list(model.parameters())
    if curvature == "hessian":
        matrix, damping = oracles.hessian(lambda: _inner(model, net, inner), params), 2.0
        method = hk.cg(400, damping, tolerance=1e-14)
    else:
        weights = _weights_of(model, net, inner)
        matrix = oracles.ggn(model(inner[0]), lambda f: (weights * _each(f, inner[1])).mean(), params)
        damping, method = 1e-2, hk.cg(400, curvature=GGN(1e-2), tolerance=1e-14)
    lowest = torch.linalg.eigvalsh(matrix)[0] + damping
    assert lowest > 1e-3  # else CG would have nothing to converge to
    wanted = _dense(model, net, inner, outer, matrix + damping * torch.eye(len(matrix), dtype=DOUBLE))
    found = method.compute(hk.BilevelProblem(weighted, plain), model, net, inner, outer)
    assert oracles.relative(found.grads, wanted) < 1e-6
    assert oracles.flat(wanted).norm() > 1e-6


def test_a_difference_that_moves_the_weights_would_be_noticed() -> None:
    """The oracle with attached losses is another one: the test above can fail."""
    torch.manual_seed(1)
    make, shape = _tiny()["mlp"]
    model = make()
    net, inner, _ = _problem(model, shape)

    def attached(model: nn.Module, net: Any, batch: Batch) -> Tensor:
        rows = _rows(model, batch)
        raw = net.net(rows[:, None])[:, 0].sigmoid()
        return (raw / raw.mean() * rows).mean()

    params, hypers = list(model.parameters()), list(net.parameters())
    right, wrong = (
        oracles.hessian(lambda f=f: f(model, net, inner), hypers, params)  # type: ignore[misc]
        for f in (_inner, attached)
    )
    assert oracles.relative(wrong, right) > 0.05


def _weights_of(model: nn.Module, net: Any, batch: Batch) -> Tensor:
    raw = net.net(_rows(model, batch).detach()[:, None])[:, 0].sigmoid()
    return (raw / raw.mean()).detach()


@pytest.mark.parametrize("method", ["kfac, empirical", "kfac, type-2", "ekfac, empirical"])
def test_kfac_where_it_is_exact(method: str) -> None:
    """A linear layer and examples that differ in their labels only: B ⊗ A is the weighted Fisher matrix itself."""
    torch.manual_seed(2)
    model = nn.Linear(4, 3)
    net, (x, y), outer = _problem(model, (4,))
    inner = (x[:1].expand(len(x), -1).contiguous(), y)
    damping, params, weights = 0.05, list(model.parameters()), _weights_of(model, net, inner)
    assert weights.std() > 1e-3
    if method == "kfac, type-2":
        matrix = oracles.ggn(model(inner[0]), lambda f: (weights * _each(f, y)).mean(), params)
    else:
        vectors = torch.autograd.grad(_each(logits := model(inner[0]), y).sum(), logits, retain_graph=True)[0]
        matrix = oracles.fisher(logits, [vectors * (weights / len(y)).sqrt()[:, None]], params)
    made: dict[str, Any] = {
        "kfac, empirical": lambda: hk.kfac(damping, fisher="empirical", split="exact"),
        "kfac, type-2": lambda: hk.kfac(damping, fisher="type-2", split="exact"),
        "ekfac, empirical": lambda: hk.ekfac(damping, fisher="empirical"),
    }
    found = made[method]().compute(hk.BilevelProblem(weighted, plain), model, net, inner, outer)
    wanted = _dense(model, net, inner, outer, matrix + damping * torch.eye(len(matrix), dtype=DOUBLE))
    assert oracles.relative(found.grads, wanted) < 1e-6
    assert oracles.flat(wanted).norm() > 1e-6


def _each(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


# --- data ----------------------------------------------------------------------------------------------------------


def _images(each: int = 60, classes: int = 4) -> tuple[Batch, Batch]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(each * classes) % classes
    x = torch.randint(0, 256, (len(y), 3, 8, 8), generator=generator).to(torch.uint8)
    return (x, y), (x[:40], y[:40])


def test_the_counts_are_the_published_ones() -> None:
    assert counts(4990, 100, 10)[0] == 4990 and counts(4990, 100, 10)[-1] == 49
    assert counts(5000, 200, 10)[-1] == 25 and counts(5000, 10, 10)[-1] == 500


def test_parts_share_no_images_and_have_their_sizes() -> None:
    train, test = _images()
    data = long_tailed(train, test, 10, meta=5, held_out=10, seed=1)
    assert data.counts == tuple(counts(45, 10, 4)) and data.train[1].bincount().tolist() == list(data.counts)
    assert data.meta[1].bincount().tolist() == [5] * 4 and data.held_out[1].bincount().tolist() == [10] * 4
    rows = torch.cat([part[0] for part in (data.train, data.meta, data.held_out)]).flatten(1)
    assert len(rows.unique(dim=0)) == len(rows)
    torch.testing.assert_close(data.train[0].mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    other = long_tailed(train, test, 10, meta=5, held_out=10, seed=2)
    assert not torch.equal(other.meta[0], data.meta[0])
    with pytest.raises(HyperkronError, match="class 0 has 60 images: too few for meta=50"):
        long_tailed(train, test, 10, meta=50, held_out=10)


def test_augmentation_shifts_and_flips_and_an_epoch_has_every_image_once() -> None:
    """Each image is its own colour, so that it can be told; pixels are those of the mirrored image at some shift."""
    x = torch.arange(10.0)[:, None, None, None] * 1000 + torch.arange(36.0).reshape(1, 1, 6, 6)
    source = Augmented((x, torch.arange(10)), 5, shift=2, seed=3)
    assert len(source) == 2
    batches = [source.next() for _ in range(2)]
    images, labels = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    assert labels.sort().values.tolist() == list(range(10))
    assert torch.equal((images / 1000).floor().amin((1, 2, 3)).long(), labels)
    padded = F.pad(x, (2,) * 4, "reflect")
    places = []
    for image, label in zip(images, labels, strict=True):
        options = {
            (i, j, flip): crop.flip(-1) if flip else crop
            for i in range(5)
            for j in range(5)
            for flip in (False, True)
            for crop in [padded[label, :, i : i + 6, j : j + 6]]
        }
        places.append(next(place for place, option in options.items() if torch.equal(option, image)))
    assert len({p[:2] for p in places}) > 3 and {p[2] for p in places} == {False, True}


def test_decoded_images_come_back(tmp_path: Path) -> None:
    parts = _images()
    keep_decoded(parts, tmp_path / "made")
    (x, y), (u, v) = decoded("made", tmp_path)
    assert torch.equal(x, parts[0][0]) and torch.equal(y, parts[0][1])
    assert torch.equal(u, parts[1][0]) and torch.equal(v, parts[1][1])


# --- losses --------------------------------------------------------------------------------------------------------


def _loss(name: str, value: float, late: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    make = METHODS[name].loss
    assert make is not None
    return make((50, 10, 2), value, torch.tensor(late))


def test_losses_for_imbalance() -> None:
    logits, y = torch.randn(7, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 0, 0, 1, 1, 2, 2])
    each, p = F.cross_entropy(logits, y, reduction="none"), logits.softmax(1)[torch.arange(7), y]
    torch.testing.assert_close(_loss("Focal", 2.0)(logits, y), ((1 - p) ** 2 * each).mean())
    torch.testing.assert_close(_loss("Focal", 0.0)(logits, y), each.mean())
    weights = effective_weights((50, 10, 2), 0.9, torch.device("cpu"))
    by_hand = torch.tensor([0.1 / (1 - 0.9**n) for n in (50, 10, 2)])
    torch.testing.assert_close(weights, by_hand / by_hand.mean())
    balanced = (weights[y] * each).sum() / weights[y].sum()
    torch.testing.assert_close(_loss("Class-balanced", 0.9)(logits, y), balanced)
    torch.testing.assert_close(_loss("Deferred re-weighting", 0.9, 0.0)(logits, y), each.mean())
    torch.testing.assert_close(_loss("Deferred re-weighting", 0.9, 1.0)(logits, y), balanced)
    shift = (torch.tensor([50, 10, 2]) / 62).log()
    torch.testing.assert_close(_loss("Logit adjustment", 2.0)(logits, y), F.cross_entropy(logits + 2 * shift, y))


def test_resnet32_has_the_usual_size_and_no_weights_in_its_shortcuts() -> None:
    model = resnet32()
    assert sum(p.numel() for p in model.parameters()) == 464_154
    assert not any("shortcut" in name for name, _ in model.named_parameters())
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 31
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


# --- runs ----------------------------------------------------------------------------------------------------------

CASE = Case(batch=20, width=2, blocks=1, shift=1, looks=2, inner_steps=3, hidden=6)


def _data() -> Any:
    return long_tailed(*_images(), 5, meta=3, held_out=5, seed=0)


def test_a_run_leaves_out_the_test_images_where_it_must_and_records_what_weights_did() -> None:
    data = _data()
    trial = Training(CASE, data, METHODS["MWN + KFAC-emp"], 1e-2, 1, 1)
    found = trial.train(test=False)
    assert not {"test", "per_class", "best_test"} & found.keys() and len(found["curve"]["held_out"]) == 2
    assert found["moved"] > 0 and found["outer_steps"] == trial.steps == round(len(trial.batches) / 3)
    full = Training(CASE, data, METHODS["MWN + KFAC-emp"], 1e-2, 1, 1).train(test=True)
    assert full["held_out"] == found["held_out"]  # looking at more changes nothing
    assert full["test"] == pytest.approx(sum(full["per_class"]) / 4)
    assert "moved" not in Training(CASE, data, METHODS["Base"], 0.0, 1, 1).train(test=False)


def test_the_step_size_drops_twice_and_deferred_weights_begin_at_the_first() -> None:
    made = Training(CASE, _data(), METHODS["Deferred re-weighting"], 0.99, 10, 1)
    rates: list[tuple[float, float]] = []
    watch = hk.training.Evaluate(lambda run: rates.append((run.state.inner.lr, float(made.late))), every=1)
    fit = made._fit
    made._fit = lambda steps, callbacks, **options: fit(steps, callbacks=[*callbacks, watch], **options)  # type: ignore
    made.train(test=False)
    assert {round(rate, 6) for rate, _ in rates} == {0.1, 0.01, 0.001}
    first = next(i for i, (_, late) in enumerate(rates) if late)
    assert len(rates) == made.steps == 17 and first == 12  # after the 13th step
    assert sum(rate > 0.05 for rate, _ in rates) == 13  # θ's 40th of 51 steps lies in the 14th


def test_accuracies_are_by_class() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :3]

    part = (torch.eye(3)[[0, 1, 1, 2]].reshape(4, 3, 1, 1), torch.tensor([0, 1, 2, 2]))
    assert accuracies(First(), part).tolist() == [1.0, 1.0, 0.5]


# --- the plan ------------------------------------------------------------------------------------------------------


def _job(tmp_path: Path) -> Job:
    return Job("small", long_tail.Settings(), (1, 2), torch.device("cpu"), Cells(tmp_path / "x.jsonl", {}))


def test_trials_come_before_the_runs_that_need_them_and_the_best_is_taken(tmp_path: Path) -> None:
    job = _job(tmp_path)
    first = list(long_tail.missing(job))
    assert first[0] == (100, long_tail_page.KFAC, 1e-5, 100, 1) and len(first) == len(set(first))
    own = [t for t in first if t.method == long_tail_page.KFAC and t.epochs == 100]
    assert {t.value for t in own} == {1e-5}  # only the printed number is known
    for i, trial in enumerate(long_tail.trials(job, long_tail_page.KFAC)):
        assert trial.seed == 0 and trial.epochs == 20
        job.cells.put([*trial], {"failed": "", "held_out": [0.5, 0.6, 0.6, 0.1][i], "held_out_loss": 2.0 - i}, 1.0)
    assert long_tail.chosen(job, long_tail_page.KFAC) == 1e-3  # equal accuracy, lower loss
    later = [t for t in long_tail.missing(job) if t.method == long_tail_page.KFAC]
    assert {t.value for t in later} == {1e-5, 1e-3} and {t.seed for t in later} == {1, 2}
    assert {t.imbalance for t in later} == {200, 100, 50, 20, 10}


def test_what_the_verdict_compares_comes_first_and_plain_losses_have_published_numbers(tmp_path: Path) -> None:
    job = _job(tmp_path)
    judged = job.settings.imbalances[: long_tail.LEAST_CASES]
    order = [*dict.fromkeys((t.imbalance, t.method) for t in long_tail.missing(job) if t.epochs == 100)]
    compared = [(x, name) for x in judged for name in long_tail.COMPARED]
    assert order[: len(compared)] == compared  # before plain runs and losses
    rest = order[len(compared) :]
    assert rest[: len(judged)] == [(x, "Base") for x in judged]
    assert rest[len(judged) :][: len(long_tail.LOSSES)] == [(100, name) for name in long_tail.LOSSES]
    losses = {t.method: t.value for t in long_tail.missing(job) if METHODS[t.method].make is None}
    assert losses == {name: METHODS[name].usual for name in ("Base", *long_tail.LOSSES)}


def test_only_what_the_verdict_compares_gets_more_than_three_seeds(tmp_path: Path) -> None:
    job = replace(_job(tmp_path), seeds=(1, 2, 3, 4))
    of = {seed: {t.method for t in long_tail.missing(job) if t.seed == seed and t.epochs == 100} for seed in job.seeds}
    assert of[4] == {*long_tail.COMPARED} and of[3] > of[4]


@pytest.mark.long
def test_an_interrupted_run_continues_where_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: batches, weights of deferred re-weighting, λ, and the looks of the first part."""

    class Interrupted(Exception):
        pass

    for name, value in (("MWN + KFAC-emp", 1e-2), ("Deferred re-weighting", 0.99)):
        whole = Training(CASE, _data(), METHODS[name], value, 5, 1).train(test=False)
        cut = Training(CASE, _data(), METHODS[name], value, 5, 1)

        def stop(run: Any, report: Any, at: int = cut.steps - 2) -> None:
            if run.state.step == at:
                raise Interrupted

        with monkeypatch.context() as patch:
            patch.setattr(hk.Checkpoint, "on_end", lambda self, run: None)  # as if the process had been killed
            patch.setattr(hk.Checkpoint, "on_step", lambda self, run, report, stop=stop: stop(run, report))
            with pytest.raises(Interrupted):
                cut.train(test=False, folder=tmp_path / name)
        again = Training(CASE, _data(), METHODS[name], value, 5, 1).train(test=False, folder=tmp_path / name)
        assert again == whole


# --- verdicts ------------------------------------------------------------------------------------------------------


def _result(
    kfac: list[float], sama: list[float], *, moved: float = 0.5, base: float = 0.0, imbalances: int = 3
) -> Result:
    def cell(accuracy: list[float], **more: Any) -> dict[str, Any]:
        run = {"failed": "", "held_out": 0.5, "per_class": [0.9, 0.4], **more}
        runs = [{"seed": seed, **run, "test": x} for seed, x in enumerate(accuracy, start=1)]
        return {"value": 1e-5, "edge": False, "runs": runs}

    curves = {"first_weights": [1.0] * 41, "last_weights": [1.5] * 41, "class_weights": [0.5, 2.0], "outer_steps": 9}
    learned = {"moved": moved, **curves}
    found = {
        imbalance: {
            "Base, own": cell([base or printed_base]),
            "MWN + KFAC-emp, own": cell(kfac, **learned),
            "MWN + KFAC-emp, printed": cell(kfac, **learned),
            "MWN + SAMA, printed": cell(sama, **learned),
        }
        for imbalance, printed_base in [("100", 0.70), ("200", 0.65), ("10", 0.86)][:imbalances]
    }
    prices = {name: {"seconds": 0.1, "inner_steps": 10, "update": 0.01} for name in ("MWN + SAMA", "MWN + KFAC-emp")}
    one = {"held_out": 0.5, "moved": 0.2, "class_weights": [0.5, 2.0], "last_weights": [1.0] * 41}
    trials = {"MWN + KFAC-emp": {"0.0001": one}, "Focal": {"1": {"held_out": 0.4}, "2": None}}
    figures = {"found": found, "trials": trials, "prices": prices, "cut_short": False}
    return Result("long-tail", "small", (1, 2), figures)


ABOVE, BELOW = [0.73, 0.731, 0.732], [0.70, 0.70, 0.70]
CASES = {Verdict.REPRODUCED: _result(ABOVE, BELOW), Verdict.FAILED: _result(BELOW, ABOVE)}


@pytest.mark.parametrize("verdict", CASES)
def test_verdicts(verdict: Verdict) -> None:
    assert long_tail_page.verdict(CASES[verdict]).verdict is verdict


def test_trials_alone_are_shown_without_a_verdict(tmp_path: Path) -> None:
    result = _result([0.73], [0.70])
    result.figures["found"] = {}
    judged = long_tail_page.verdict(result)
    assert judged.verdict is Verdict.NOT_RUN and "MWN + KFAC-emp 50.0 % (0.0001)" in judged.because
    titles = [table.title for table in long_tail_page.tables(result)]
    assert any("Trials" in title for title in titles)
    assert "<svg" in long_tail_page.plot(result, tmp_path)[0].read_text("utf-8")


def test_no_verdict_without_seeds_or_motion_and_none_for_a_base_that_is_far_off() -> None:
    for few in (_result([0.73], [0.70]), _result(ABOVE[:2], BELOW[:2]), _result(ABOVE, BELOW, imbalances=2)):
        judged = long_tail_page.verdict(few)
        assert judged.verdict is Verdict.REFUSED and "Fewer than three imbalances" in judged.because
    scattered = long_tail_page.verdict(_result([0.70, 0.72, 0.71], [0.71, 0.70, 0.72]))
    assert scattered.verdict is Verdict.REFUSED and "Too few seeds to tell in 3 of 3 cases" in scattered.because
    still = long_tail_page.verdict(_result(ABOVE, BELOW, moved=0.01))
    assert still.verdict is Verdict.REFUSED and "initial weight network" in still.because
    assert long_tail_page.verdict(_result(ABOVE, BELOW, base=0.6)).verdict is Verdict.FAILED


@pytest.mark.parametrize("lost", ["failed", "missing"])
def test_runs_are_compared_with_those_of_the_same_seed(lost: str) -> None:
    result = _result([0.60, 0.70, 0.80, 0.90], [0.59, 0.69, 0.79, 0.89])
    for of in result.figures["found"].values():
        runs = of["MWN + SAMA, printed"]["runs"]
        runs[:1] = [{"seed": 1, "failed": "diverged"}] if lost == "failed" else []
    assert "IF 100 +1.0 ± 0.0 (3 seeds)" in long_tail_page.verdict(result).because


def test_cells_say_how_ours_compares() -> None:
    result = _result([0.73, 0.731], [0.70, 0.70])
    cell = result.figures["found"]["100"]["MWN + KFAC-emp, own"]
    assert long_tail_page.cell_text(cell, 73.1).endswith("agrees")
    assert long_tail_page.cell_text(cell, 60.0).endswith("higher")
    assert long_tail_page.cell_text(cell, 80.0).endswith("lower")
    assert long_tail_page.cell_text(None, 70.0) == "70.0 / –" and long_tail_page.cell_text(None, None) == "–"
    quiet = _result([0.73], [0.7], moved=0.0).figures["found"]["100"]["MWN + KFAC-emp, own"]
    assert long_tail_page.cell_text(quiet, 73.1).endswith("λ still")
    failed = {"runs": [{"failed": "diverged"}], "value": 1.0, "edge": True}
    assert long_tail_page.cell_text(failed, 73.1) == "73.1 / failed"


def test_tables_are_rectangular_and_the_figure_is_small(tmp_path: Path) -> None:
    result = CASES[Verdict.REPRODUCED]
    for given in (None, result):
        for table in long_tail_page.tables(given):
            assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    [path] = long_tail_page.plot(result, tmp_path)
    text = path.read_text("utf-8")
    assert "<svg" in text and len(text) < 200_000
    assert any("KFAC-emp takes 1.00 times" in line for line in long_tail_page.answer(result))
