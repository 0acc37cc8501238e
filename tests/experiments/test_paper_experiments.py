"""The pieces of the experiments against dense oracles, and a smoke run of every recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments import paper, trial
from experiments.paper import amortization, batch_size, cleaning, compare, diagnostic, inverses, networks
from experiments.paper.cleaning import Budget, Case, Split
from experiments.paper.methods import Method, Rates, methods
from experiments.paper.recipe import Job
from experiments.paper.references import KINDS, references, rows_of
from experiments.paper.tuning import Search
from experiments.pieces import Cells
from hyperkron.solution import HyperkronError

RATES = Rates(inner=(0.1,), outer=(100.0,), momentum=(0.0,), damping=(0.1,), step=(0.1,), own=(0.1,))


# --- errors of inverses ------------------------------------------------------------------------------------


def _dense(d: int, examples: int) -> tuple[inverses.Spectrum, torch.Tensor, torch.Tensor]:
    x = torch.randn(examples, d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    h = x.T @ x / examples
    damping = 1e-2
    return inverses.spectrum(x, damping), h, torch.linalg.inv(h + damping * torch.eye(d, dtype=h.dtype))


def _dense_error(matrix: torch.Tensor, exact: torch.Tensor) -> float:
    """min_α of the relative operator norm, by singular values on a fine grid of α."""
    best = float(torch.linalg.matrix_norm(exact, 2) / torch.linalg.matrix_norm(matrix, 2))
    norm = torch.linalg.matrix_norm(exact, 2)
    return min(
        float(torch.linalg.matrix_norm(best * scale * matrix - exact, 2) / norm) for scale in torch.linspace(0, 2, 2001)
    )


@pytest.mark.parametrize(("d", "examples"), [(6, 40), (12, 5)])
def test_the_error_of_a_function_of_h(d: int, examples: int) -> None:
    of, h, exact = _dense(d, examples)
    matrix = torch.eye(d, dtype=h.dtype) + h @ h
    values = 1 + of.padded(0.0) ** 2
    assert inverses.function_error(values, of.exact()) == pytest.approx(_dense_error(matrix, exact), abs=1e-3)
    assert inverses.function_error(of.exact(), of.exact()) < 1e-9


def _cg(h: torch.Tensor, count: int, inverse: torch.Tensor | None = None) -> torch.Tensor:
    """The matrix of CG on unit vectors, column by column, as in a textbook."""
    columns = []
    for b in torch.eye(len(h), dtype=h.dtype):
        v, r = torch.zeros_like(b), b
        z = r if inverse is None else inverse @ r
        p = z
        for _ in range(count):
            step = (r @ z) / (p @ h @ p)
            v, after = v + step * p, r - step * (h @ p)
            next_z = after if inverse is None else inverse @ after
            p, r, z = next_z + (after @ next_z) / (r @ z) * p, after, next_z
        columns.append(v)
    return torch.stack(columns, 1)


@pytest.mark.parametrize(("d", "examples"), [(6, 40), (12, 5)])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_the_error_of_conjugate_gradients(d: int, examples: int, preconditioned: bool) -> None:
    of, h, exact = _dense(d, examples)
    inverse = torch.linalg.inv(h + 0.5 * torch.eye(d, dtype=h.dtype)) if preconditioned else None
    values = 1 / (of.padded(0.0) + 0.5) if preconditioned else None
    damped = h + of.damping * torch.eye(d, dtype=h.dtype)
    for count, ratios in inverses.cg_columns(of, (1, 3), values).items():
        expected = _dense_error(_cg(damped, count, inverse), exact)
        assert inverses.columns_error(of, ratios) == pytest.approx(expected, abs=1e-3)


def test_the_least_norm_is_exact_and_needs_few_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    lanczos = inverses.largest_eigenvalue
    monkeypatch.setattr(inverses, "largest_eigenvalue", lambda f, size: (counted.append(size), lanczos(f, size))[1])
    of, h, exact = _dense(40, 25)
    matrix = _cg(h + of.damping * torch.eye(40, dtype=h.dtype), 3)
    norm = float(torch.linalg.matrix_norm(exact, 2))
    expected = inverses.best_scale(lambda a: float(torch.linalg.matrix_norm(a * matrix - exact, 2)) / norm, 10.0)[1]
    [ratios] = inverses.cg_columns(of, (3,)).values()
    assert inverses.columns_error(of, ratios) == pytest.approx(expected, rel=1e-9)
    assert len(counted) < 15  # a golden section to as many digits takes over forty
    unscaled = float(torch.linalg.matrix_norm(1e-3 * matrix - exact, 2)) / norm
    assert inverses.columns_error(of, ratios, most=1e-3) == pytest.approx(unscaled, rel=1e-9)
    own = of.exact()[:, None].expand(-1, 40)
    assert inverses.columns_error(of, 3 * own) < 1e-12  # a multiple of the inverse itself


@pytest.mark.parametrize(("d", "examples"), [(8, 50), (40, 20)])
def test_ekfac_is_the_same_in_the_coordinates_of_the_eigenvectors(d: int, examples: int) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(examples, d, generator=generator, dtype=torch.float64)
    y = torch.randn(examples, 1, generator=generator, dtype=torch.float64)
    of = inverses.spectrum(x, 1e-3)
    plain, turned = (diagnostic.corrected(x, y, of, 1e-3, 2, turned=turned) for turned in (False, True))
    assert list(plain) == ["EKFAC", "EKFAC, exact Fisher"]
    for name, (values, gap) in plain.items():
        torch.testing.assert_close(turned[name][0], values, rtol=1e-8, atol=0)
        assert gap < 1e-9 and turned[name][1] < 1e-9
    assert not torch.allclose(plain["EKFAC"][0], plain["EKFAC, exact Fisher"][0], rtol=1e-2)


def test_the_shortcuts_agree_with_the_library_and_kfac_is_exact_up_to_scale() -> None:
    for d, examples in ((8, 50), (40, 20)):
        found = diagnostic.errors(d, examples, 1e-5, seed=1)
        assert found["departure"] < 1e-6
        assert found["errors"]["KFAC"] < 1e-3 and found["errors"]["EKFAC, exact Fisher"] < 1e-9
        assert found["errors"]["Identity"] > 0.1


def test_an_inverse_that_is_no_function_of_h_is_noticed() -> None:
    of, _, _ = _dense(6, 40)
    diagonal = torch.linspace(1, 2, 6, dtype=torch.float64)
    assert diagnostic.values_on(of, lambda b: diagonal * b)[1] > 1e-2


# --- cleaning ----------------------------------------------------------------------------------------------


def _split(seed: int = 1) -> Split:
    return cleaning.noisy_split(cleaning.made_up((20,), 600, 100), (300, 150, 150), seed)


def test_half_of_the_labels_are_drawn_anew_and_inputs_are_standardised() -> None:
    data = cleaning.made_up((20,), 4000, 100)
    split = cleaning.noisy_split(data, (3000, 500, 500), 1)
    assert abs(float(split.clean.double().mean()) - 0.55) < 0.04  # a tenth of the new labels is right by chance
    torch.testing.assert_close(split.train[0].mean(0), torch.zeros(20), atol=1e-5, rtol=0)
    torch.testing.assert_close(split.train[0].std(0), torch.ones(20), atol=1e-3, rtol=0)
    assert [len(part[0]) for part in (split.validation, split.second, split.test)] == [500, 500, 100]
    other = cleaning.noisy_split(data, (3000, 500, 500), 2)
    assert not torch.equal(split.train[1], other.train[1])
    with pytest.raises(HyperkronError, match="add up to 5000, but there are 4000"):
        cleaning.noisy_split(data, (4000, 500, 500), 1)


def test_the_parts_do_not_share_examples() -> None:
    data = cleaning.made_up((1,), 300, 10)
    split = cleaning.noisy_split(data, (100, 100, 100), 1)
    values = torch.cat([part[0] for part in (split.train, split.validation, split.second)]).flatten()
    assert len(values.unique()) == 300


def test_tuning_never_touches_the_test_part(monkeypatch: pytest.MonkeyPatch) -> None:
    split = _split()
    seen: list[int] = []
    original = cleaning.loss_and_error

    def watched(model: nn.Module, part: cleaning.Part, chunk: int = 2500) -> tuple[float, float]:
        seen.append(id(part))
        return original(model, part, chunk)

    monkeypatch.setattr(cleaning, "loss_and_error", watched)
    method = methods(RATES)["AID-KFAC"]
    setting = {name: values[0] for name, values in method.grid.items()}
    cleaning.tuning_loss(Case(batch=100), split, method, setting, Budget(60.0, 4, 2))
    assert seen and set(seen) == {id(split.second)}
    cleaning.final(Case(batch=100), split, method, setting, Budget(60.0, 4, 2), 1)
    assert id(split.test) in seen


def test_the_figure_that_counts_is_chosen_by_the_second_validation_part(monkeypatch: pytest.MonkeyPatch) -> None:
    split = _split()
    method = methods(RATES)["AID-CG-3"]
    setting = {name: values[0] for name, values in method.grid.items()}
    losses = {id(split.second): iter([3.0, 1.0, 2.0, 2.5]), id(split.test): iter([3.0, 2.0, 0.5, 1.0])}
    monkeypatch.setattr(cleaning, "loss_and_error", lambda model, part: (next(losses[id(part)]), 0.5))
    found = cleaning.final(Case(batch=100), split, method, setting, Budget(60.0, 6, 3), 1)
    assert found["curve"]["step"] == [0, 2, 4, 6] and found["steps"] == 6
    assert (found["best"]["step"], found["best"]["second_loss"], found["best"]["test_loss"]) == (2, 1.0, 2.0)
    assert found["lowest_test_loss"] == 0.5  # as the paper reports it, beside ours


@pytest.mark.long
def test_every_method_runs_from_the_same_start_and_moves_its_weights() -> None:
    split, case = _split(), Case(batch=100)
    for name, method in methods(RATES).items():
        run = cleaning.prepare(case, split, method, {key: values[0] for key, values in method.grid.items()}, seed=1)
        torch.testing.assert_close(run.state.model.weight, cleaning.start(case, split, 1).weight)
        run.advance(3)
        assert run.failure is None and run.state.step == 3, name
        weights = run.state.hyper.weight.detach()
        moved = float((weights - 0.5).abs().max()) > 0
        assert moved or name == "BOME", name  # whose barrier does not act yet: both levels pull θ the same way
        assert float(weights.min()) >= 0 and float(weights.max()) <= 1, name


def test_the_start_is_trained_once_and_never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = networks.make
    monkeypatch.setattr(networks, "make", lambda *args: (made.append(args[2]), make(*args))[1])
    split, case = _split(), Case(batch=50)
    first = cleaning.start(case, split, 0)
    weights = [p.clone() for p in first.parameters()]
    with torch.no_grad():
        for p in first.parameters():
            p.zero_()
    second = cleaning.start(case, split, 0)
    assert all(torch.equal(p, w) for p, w in zip(second.parameters(), weights, strict=True)) and made == [0]
    other = cleaning.start(Case(batch=100), split, 0)
    assert made == [0, 0] and not torch.equal(next(other.parameters()), weights[0])  # other batches, another start
    cleaning.start(case, split, 1)
    cleaning.start(case, _split(2), 0)
    assert made == [0, 0, 1, 0]


def test_a_run_that_diverges_has_no_loss() -> None:
    def algorithm(setting: dict[str, float], seed: int) -> Any:
        return methods(RATES)["AID-CG-3"].algorithm(setting, seed)

    method = Method("AID-CG-3", {}, algorithm)
    setting = {"inner": 1e30, "outer": 1.0, "momentum": 0.0, "damping": 0.1}
    assert cleaning.final(Case(batch=100), _split(), method, setting, Budget(60.0, 20, 2), 1)["failed"]


def test_a_budget_of_time_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    method = methods(RATES)["AID-identity"]
    now = iter(x / 2 for x in range(10_000))  # every reading is half a second later
    monkeypatch.setattr(trial, "clock_of", lambda device: lambda: next(now))
    setting = {"inner": 0.1, "outer": 1.0, "momentum": 0.0}
    run, rows = cleaning.run(Case(batch=100), _split(), method, setting, Budget(3.0, looks=3), 1, test=False)
    assert run.state.step == 6 and [row["step"] for row in rows] == [0, 2, 4, 6]
    assert [row["seconds"] for row in rows] == [0.0, 1.0, 2.0, 3.0]


def test_references_train_on_the_rows_they_name(tmp_path: Path) -> None:
    split = _split()
    sizes = [len(rows_of(split, kind)[0]) for kind in KINDS]
    assert sizes == [150, 450, 150 + int(split.clean.sum())]
    x, y = rows_of(split, "trusted + correct")
    torch.testing.assert_close(x[150:], split.train[0][split.clean])
    assert torch.equal(y[150:], split.train[1][split.clean])
    job = Job("smoke", None, (1,), torch.device("cpu"), Cells(tmp_path / "x.jsonl", {}))
    grid = {"inner": (0.1, 0.3), "momentum": (0.9,)}
    splits = {0: _split(0), 1: split}
    found = references(job, Case(batch=50), splits, grid, Search(4, 1, 0.5), Budget(60.0, 20, 4))
    loss = {kind: rows[0]["best"]["test_loss"] for kind, rows in found.items()}
    assert loss["trusted + correct"] < loss["trusted + noisy"]


@pytest.mark.parametrize("network", ["linear", "cnn", "resnet18", "tiny"])
def test_networks_have_the_weights_of_their_seed(network: networks.Network) -> None:
    state = torch.get_rng_state()
    one, same, other = (networks.make(network, 12, seed, 4) for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    first = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (one, same, other)]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2]) == (network == "linear")
    x = torch.zeros(2, 12) if network == "linear" else torch.zeros(2, 3, 8, 8)
    assert one(x).shape == (2, 10)


def test_a_cached_run_needs_no_data(tmp_path: Path) -> None:
    contest = compare.Contest("mnist", (10, 5, 5), Case(), RATES, Search(1, 1), Budget(1.0))
    job = Job("small", contest, (1,), torch.device("cpu"), Cells(tmp_path / "x.jsonl", {}), data=tmp_path)
    splits = compare.Splits(job, contest)  # nothing is read yet
    with pytest.raises(HyperkronError, match="the data 'mnist' were not found"):
        splits[1]


def test_clearly_below() -> None:
    below = compare.clearly_below
    assert not below([1.0], [2.0]) and not below([2.0], [1.0])  # one seed decides nothing
    assert below([1.0, 1.0], [2.0, 2.0]) and not below([1.0, 1.0], [1.0, 1.0])
    assert below([1.0, 5.0], [2.0, 6.0])  # seed by seed, although their ranges overlap
    assert not below([1.0, 5.0], [2.0, 5.1])
    assert below([1.0], [None]) and not below([None], [1.0]) and not below([None], [None])


def test_steps_of_the_weights_are_in_proportion_to_the_batch() -> None:
    contest = compare.Contest("vectors", (10, 5, 5), Case(batch=100), RATES, Search(1, 1), Budget(1.0))
    other = contest.with_batch(250)
    assert other.case.batch == 250 and other.rates.outer == (250.0,) and other.rates.inner == RATES.inner


def test_a_setting_tuned_at_one_batch_serves_the_others(tmp_path: Path) -> None:
    contest = compare.Contest("vectors", (200, 100, 100), Case(batch=50), RATES, Search(1, 1), Budget(60.0, 2, 1))
    settings = batch_size.Settings((50, 100), contest, tuned_at=50)
    job = Job("smoke", settings, (1,), torch.device("cpu"), Cells(tmp_path / "x.jsonl", {}))
    found = batch_size.work(job)["found"]
    for name in (batch_size.KFAC, batch_size.CG):
        assert [found[batch][name]["setting"]["outer"] for batch in ("50", "100")] == [100.0, 200.0]
    keys = [row["key"] for row in job.cells.found.values()]
    assert {key[1] for key in keys if key[0] == "tune"} == {50}


@pytest.mark.parametrize("module", [batch_size, amortization])
def test_a_relative_step_serves_all_batches_and_intervals(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = compare.Contest("vectors", (200, 100, 100), Case(batch=50), RATES, Search(1, 1), Budget(60.0, 2, 1))
    if module is batch_size:
        settings: Any = batch_size.Settings((50, 100), contest, tuned_at=50, inner_steps=3, relative=True)
    else:
        settings = amortization.Settings(contest, (1, 2), 2, inner_steps=3, relative=True)
    kinds, inner = set(), set()
    for name in ("tuning_loss", "final"):
        original = getattr(cleaning, name)

        def watched(
            case: Any, split: Any, method: Any, setting: Any, *rest: Any, original: Any = original, **named: Any
        ):
            kinds.add(named["relative"])
            inner.add((case.batch, setting["outer"], method.algorithm(setting, 0).inner_steps))
            return original(case, split, method, setting, *rest, **named)

        monkeypatch.setattr(cleaning, name, watched)
    job = Job("smoke", settings, (1,), torch.device("cpu"), Cells(tmp_path / "x.jsonl", {}))
    module.work(job)
    assert kinds == {True}
    assert inner == {(batch, 100.0, 3) for batch in ((50, 100) if module is batch_size else (50,))}


def test_a_failed_seed_makes_the_mean_infinite() -> None:
    assert compare.mean([1.0, 2.0]) == 1.5 and compare.mean([1.0, None]) == math.inf and compare.mean([]) == math.inf


# --- smoke -------------------------------------------------------------------------------------------------


QUICK = ("linear-mnist", "encoder-frozen", "ema")
"""Recipes whose smoke run takes a few seconds; they stand for the others in `make test`."""


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in paper.recipes()]
)
def test_smoke(name: str, tmp_path: Path) -> None:
    """Every recipe runs at smoke scale, leaves a result, and does nothing the second time."""
    said: list[str] = []
    result = paper.run(name, "smoke", 1, "cpu", tmp_path, say=said.append)
    assert result.complete and result.figures and said
    said.clear()
    again = paper.run(name, "smoke", 1, "cpu", tmp_path, say=said.append)
    assert again.figures == result.figures and said == []
    recipe = paper.recipes()[name]
    judgement = recipe.judge(result)
    assert isinstance(judgement.because, str) and judgement.because
    if recipe.judged == ("smoke", "small", "paper"):
        assert judgement.verdict in (paper.Verdict.REPRODUCED, paper.Verdict.TREND)
    written = paper.report(tmp_path, tmp_path / "out")
    assert recipe.title in written[0].read_text("utf-8")
    tables = recipe.tables(result)  # also of a result that is not judged
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
