"""The pieces of the experiments against dense oracles, and a smoke run of every recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import paper, trial
from experiments.paper import cleaning, diagnostic, inverses, networks
from experiments.paper.__main__ import main
from experiments.paper.cleaning import Case, Split
from experiments.paper.methods import Rates, methods
from experiments.paper.references import KINDS, rows_of, train
from experiments.pieces import Lines
from experiments.seeds import clearly_below, mean
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
    train = cleaning.pretrain
    monkeypatch.setattr(cleaning, "pretrain", lambda *args: (made.append(args[3]), train(*args))[1])
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


def test_a_run_that_diverges_has_failed() -> None:
    setting = {"inner": 1e30, "outer": 1.0, "momentum": 0.0, "damping": 0.1}
    run = cleaning.prepare(Case(batch=100), _split(), methods(RATES)["AID-CG-3"], setting, 1).advance(20)
    assert run.failure is not None


def test_references_train_on_the_rows_they_name() -> None:
    split = _split()
    sizes = [len(rows_of(split, kind)[0]) for kind in KINDS]
    assert sizes == [150, 450, 150 + int(split.clean.sum())]
    x, y = rows_of(split, "trusted + correct")
    torch.testing.assert_close(x[150:], split.train[0][split.clean])
    assert torch.equal(y[150:], split.train[1][split.clean])
    setting, loss = {"inner": 0.3, "momentum": 0.9}, {}
    for kind in KINDS:
        looks = trial.Looks({"test": split.test}, cleaning.loss_and_error, at={200})
        loss[kind] = train(Case(batch=50), split, kind, setting, 20, 1, looks)[-1]["test_loss"]
    assert loss["trusted + correct"] < loss["trusted + noisy"]


@pytest.mark.parametrize("make", [networks.cnn, networks.resnet32])
def test_networks_have_the_weights_of_their_seed(make: Any) -> None:
    state = torch.get_rng_state()
    one, same, other = (networks.seeded(lambda: make(width=4), seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    first = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (one, same, other)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


def test_clearly_below() -> None:
    below = clearly_below
    assert not below([1.0], [2.0]) and not below([2.0], [1.0])  # one seed decides nothing
    assert below([1.0, 1.0], [2.0, 2.0]) and not below([1.0, 1.0], [1.0, 1.0])
    assert below([1.0, 5.0], [2.0, 6.0])  # seed by seed, although their ranges overlap
    assert not below([1.0, 5.0], [2.0, 5.1])
    assert below([1.0], [None]) and not below([None], [1.0]) and not below([None], [None])


def test_a_failed_seed_makes_the_mean_infinite() -> None:
    assert mean([1.0, 2.0]) == 1.5 and mean([1.0, None]) == math.inf and mean([]) == math.inf


# --- smoke -------------------------------------------------------------------------------------------------


QUICK = ("encoder-frozen",)
"""Its smoke run takes a few seconds; it stands for the others in `make test`."""


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


@pytest.mark.long
@pytest.mark.parametrize("name", paper.programs())
def test_every_program_runs_at_smoke_scale(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And ends in words: what was run, where it is, and how the long runs are made."""
    assert main(["run", name, "--folder", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith(f"{name}: Everything ran (") and paper.programs()[name].command in told
    assert all(not row["failed"] for row in Lines(tmp_path / f"{name}-smoke.jsonl").rows)
