"""Data poisoning: its hypergradient against dense oracles, its rows, its methods, and every verdict of its rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracles
from experiments import records
from experiments.paper import poisoning, poisoning_attacks, poisoning_curve, poisoning_page, poisoning_problem
from experiments.paper.entries import missing
from experiments.paper.poisoning_problem import Case, Leader, Split, Starts
from experiments.paper.recipe import Result, Verdict
from experiments.pieces import Lines
from hyperkron.cleaning.models import mlp
from hyperkron.curvature import Hessian
from hyperkron.hypergradient import Implicit, cg, ekfac, kfac
from hyperkron.solvers import CG

SHARE = 0.5


@dataclass
class Tiny:
    """The task's own inner problem on 4 clean rows and 2 made by a leader, in float64."""

    model: nn.Module
    hyper: nn.Module
    inner: tuple[Tensor, ...]
    outer: tuple[Tensor, Tensor]

    @staticmethod
    def make(hidden: tuple[int, ...], added: int = 2) -> Tiny:
        torch.manual_seed(0)
        model, lead = mlp(3, 10, hidden).double(), Leader(3).double()
        x, y = torch.randn(4, 3).double(), torch.tensor([0, 3, 7, 1])
        origin, labels = torch.randn(added, 3).double(), torch.randint(10, (added,))
        return Tiny(model, lead, (x, y, origin, labels), (torch.randn(5, 3).double(), torch.randint(10, (5,))))

    def plain_inner(self) -> Tensor:
        """J_in as it is written in the paper, by torch alone."""
        x, y, origin, labels = self.inner
        of_clean = nn.functional.cross_entropy(self.model(x), y)
        of_added = nn.functional.cross_entropy(self.model(self.hyper(origin, labels)), labels)
        return (of_clean + SHARE * of_added) / (1 + SHARE)

    def plain_outer(self) -> Tensor:
        """J_out: the attacker wants a large validation loss."""
        return -nn.functional.cross_entropy(self.model(self.outer[0]), self.outer[1])

    def hypergradient(self, method: Implicit) -> dict[str, Tensor]:
        """By the library, through the experiment's own objectives."""
        for p in self.hyper.parameters():
            p.grad = None
        method.backward(poisoning_problem.problem(SHARE), self.model, self.hyper, self.inner, self.outer)
        return {name: p.grad for name, p in self.hyper.named_parameters() if p.grad is not None}

    def hessian(self) -> Tensor:
        """∂²J_in/∂θ², dense."""
        return oracles.hessian(self.plain_inner, list(self.model.parameters()))


@pytest.mark.parametrize(("hidden", "added"), [((), 2), ((3,), 2), ((3,), 5)])
def test_the_hypergradient_with_exact_curvature_is_the_dense_one(hidden: tuple[int, ...], added: int) -> None:
    """Also where there are more added rows in the batch than their share of J_in."""
    case, damping = Tiny.make(hidden, added), 2.0
    wanted = oracles.implicit(case, case.hessian(), damping=damping)
    found = case.hypergradient(Implicit(Hessian(damping), CG(200, 1e-14)))
    assert oracles.flat(wanted).norm() > 1e-6
    assert oracles.relative(found, wanted) < 1e-9


@pytest.mark.parametrize(
    "method", [kfac(1e-2, fisher="type-2", split="exact"), ekfac(1e-2, fisher="type-2")], ids=["KFAC", "EKFAC"]
)
def test_kronecker_factors_are_exact_where_all_rows_have_one_output_hessian(method: Implicit) -> None:
    """A linear model that begins at zero: ∇² J_in = mean(aaᵀ) ⊗ (diag p − ppᵀ), one Kronecker product."""
    case = Tiny.make(())
    wanted = oracles.implicit(case, case.hessian(), damping=1e-2)
    assert oracles.flat(wanted).norm() > 1e-6
    assert oracles.relative(case.hypergradient(method), wanted) < 1e-9
    assert oracles.relative(case.hypergradient(cg(1, 1e-2)), wanted) > 1e-3  # the test can fail


# --- rows and methods --------------------------------------------------------------------------------------

CASE = replace(poisoning.TINY, steps=12, inner_steps=5, epochs=25)


@pytest.fixture(scope="module")
def split() -> Split:
    return poisoning_problem.split_of(CASE, poisoning_problem.load(CASE), 1)


@pytest.fixture(scope="module")
def starts(split: Split) -> Starts:
    return Starts(CASE, lambda seed: split)


def test_parts_do_not_overlap_and_poison_is_made_of_training_rows(split: Split) -> None:
    rows = torch.cat([x for x, _ in (split.train, split.validation, split.held_out, split.test)])
    assert len(rows.unique(dim=0)) == len(rows) == 300 + 100 + 100 + 400
    assert float(rows.min()) == -1.0 and float(rows.max()) == 1.0
    assert len(split.origin[0]) == 12 and torch.equal(split.origin[0], split.train[0][:12])
    picture = poisoning_problem.split_of(replace(CASE, network="cnn"), poisoning_problem.load(CASE), 1)
    assert torch.equal(picture.train[0].flatten(1), split.train[0])


def test_batches_visit_every_row_once_an_epoch() -> None:
    rows = torch.arange(10), torch.arange(10)
    batches = poisoning_problem.Shuffled(rows, 5, seed=0)
    seen = torch.cat([batches()[0] for _ in range(batches.epochs(2))])
    assert torch.equal(seen.sort().values, torch.arange(10).repeat_interleave(2))
    odd = poisoning_problem.Shuffled(rows, 4, seed=0)  # two rows do not fill a batch
    assert odd.epochs(3) == 6 and all(len(set(odd()[1].tolist()) | set(odd()[1].tolist())) == 8 for _ in range(3))


@pytest.mark.parametrize("done", [1, 2, 4])
def test_an_interrupted_attack_continues_as_if_nothing_had_happened(done: int, split: Split, tmp_path: Path) -> None:
    """Also while the unit of λ's step is being measured, which takes two steps."""
    case = replace(CASE, steps=6)
    starts = Starts(case, lambda seed: split)
    how: Any = (case, split, starts, "TGDA-KFAC-EMP", {"inner": 0.1, "outer": 1e-3, "damping": 1e-3}, 1)
    whole = poisoning_attacks.bilevel(*how, relative=True)
    poisoning_attacks.prepare(*how, relative=True, folder=tmp_path).advance(done)
    found = poisoning_attacks.bilevel(*how, relative=True, folder=tmp_path)
    assert found.facts == whole.facts and found.facts["moved"] > 0
    assert torch.equal(found.rows[0], whole.rows[0])


def test_rows_kept_for_the_steps_of_theta_are_those_that_lambda_makes(split: Split, starts: Starts) -> None:
    """J_in and its gradient to θ are the problem's own, also after steps of λ."""
    setting = {"inner": 0.1, "outer": 3e-2, "damping": 1e-2}
    run = poisoning_attacks.prepare(CASE, split, starts, "TGDA-CG", setting, 1, relative=True)
    batch, model, lead = poisoning_problem.Both(split, CASE, 1).next(), run.state.model, run.state.hyper
    fixed = poisoning_problem.FixedRows(starts(1)[0], split.origin, CASE.share)

    def derivatives(inner: Any) -> list[Tensor]:
        value = inner(model, lead, batch)
        value = value if isinstance(value, Tensor) else value.value
        return [value.detach(), *torch.autograd.grad(value, list(model.parameters()))]

    for _ in range(2):
        torch.testing.assert_close(derivatives(run.state.loop._objective), derivatives(run.state.problem.inner))
        run.advance(4)
    first, now = float(derivatives(fixed.inner)[0]), float(derivatives(run.state.problem.inner)[0])
    assert abs(first - now) > 1e-4  # λ has moved: rows that were not made again would be seen


def test_flipped_labels_are_all_wrong(split: Split) -> None:
    x, y = poisoning_attacks.flipped(split).rows
    assert torch.equal(x, split.origin[0]) and not bool((y == split.origin[1]).any())


def test_error_maximising_noise_stays_in_its_bound_and_raises_the_loss(split: Split, starts: Starts) -> None:
    rows, labels = poisoning_attacks.error_maximising(CASE, split, starts, 0.3, 1).rows
    _, follower = starts(1)
    assert float((rows - split.origin[0]).abs().max()) <= 0.3 + 1e-6 and float(rows.abs().max()) <= 1
    before, after = (float(nn.functional.cross_entropy(follower(x), labels).detach()) for x in (split.origin[0], rows))
    assert after > before + 0.1


@pytest.mark.parametrize("name", ["TGDA-CG", "TGDA-KFAC-EMP", "BOME"])
def test_a_bilevel_method_moves_the_leader_and_hurts_the_follower(name: str, split: Split, starts: Starts) -> None:
    def loss(model: nn.Module) -> float:
        return float(nn.functional.cross_entropy(model(split.validation[0]), split.validation[1]).detach())

    losses = {}
    for outer in (1e-20, 3e-3):
        setting = {"inner": 0.1, "outer": outer, "damping": 1e-2}
        run = poisoning_attacks.prepare(CASE, split, starts, name, setting, 1, relative=True).advance(CASE.steps)
        assert run.failure is None
        losses[outer] = loss(run.state.model)
    assert losses[3e-3] > losses[1e-20]


def test_a_run_that_fails_adds_the_copies_it_began_with(split: Split, starts: Starts) -> None:
    setting = {"inner": 1e38, "outer": 0.1, "damping": 1e-2}
    found = poisoning_attacks.bilevel(CASE, split, starts, "TGDA-CG", setting, 1, relative=False)
    assert found.facts["failed"] and found.facts["moved"] is None and found.facts["error"]
    torch.testing.assert_close(found.rows[0], poisoning_problem.made(starts(1)[0], split.origin))


def test_it_is_recorded_how_often_cg_met_a_negative_curvature(split: Split, starts: Starts) -> None:
    """Of a linear model J_in is convex: never; of an untrained network it is not."""
    setting = {"inner": 0.1, "outer": 1e-4, "damping": 1e-3}
    case = replace(CASE, network="mlp", steps=4)
    deep = Starts(replace(case, epochs=1), lambda seed: split)
    shares = [
        poisoning_attacks.bilevel(replace(case, network=net), split, start, "TGDA-CG", setting, 1, relative=True)
        for net, start in (("linear", starts), ("mlp", deep))
    ]
    assert shares[0].facts["indefinite"] == 0 < shares[1].facts["indefinite"]


# --- what the page says ------------------------------------------------------------------------------------


def _of(drop: list[float], moved: float | None = 0.3, edge: tuple[str, ...] = ()) -> dict[str, Any]:
    setting = {"outer": 1e-4} if moved is not None else {}
    count = len(drop)
    return {"setting": setting, "edge": list(edge), "drop": drop} | {
        key: [value] * count for key, value in (("moved", moved), ("pixels", 0.5), ("rate", 1.0), ("failed", False))
    }


def _result(kfac_drop: dict[str, float], moved: float = 0.3, cg_drop: float = 1.0) -> Result:
    def model(drop: float) -> dict[str, Any]:
        noise = [0.0, 0.01, -0.01]
        own = {
            "TGDA-CG": _of([cg_drop + x for x in noise]),
            "TGDA-KFAC-EMP": _of([drop + 2 * x for x in noise], moved, edge=("outer",)),
        }
        flip = {"label flip": _of([0.5, 0.6, 0.5], None)}
        defence = {"suspects": 9, "precision": 0.5, "recall": 0.25, "clean": 92.0, "poisoned": 91.0, "defended": 91.5}
        return {
            "clean": [92.0, 92.1, 92.2],
            "arms": {"reference": flip, "own": own, "printed": {"TGDA-CG": _of([0.2, 0.3, 0.2])}},
            "defence": {"label flip": defence},
        }

    figures = {
        "models": {name: model(drop) for name, drop in kfac_drop.items()},
        "prices": {
            name: {"steps of θ alone": 0.005, "TGDA-CG": 0.02, "TGDA-KFAC-EMP": 0.008, "BOME": 0.03, "TGDA-KFAC": None}
            for name in kfac_drop
        },
    }
    return Result("poisoning", "small", (1, 2, 3), figures)


def test_a_drop_that_is_not_known_well_enough_is_not_called_reproduced() -> None:
    """Where a small drop is printed, zero is near it, and only the width of the interval tells."""
    wide, narrow, off = [-1.78, 1.42], [0.1, 0.3, 0.1], [6.0, 9.0, 12.0]
    assert [poisoning_page.cell(x, 0.17) for x in (wide, narrow)] == [Verdict.REFUSED, Verdict.REPRODUCED]
    assert poisoning_page.cell([0.3, 0.1, 1.1], 0.05) is Verdict.REFUSED
    assert poisoning_page.cell(off, 0.17) is Verdict.TREND  # wide, but clearly larger


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        (_result({"LR": 3.0, "MLP": 2.0, "CNN": 2.5}), Verdict.REPRODUCED),
        (_result({"LR": 3.0, "MLP": 2.0, "CNN": 0.9}), Verdict.TREND),
        (_result({"LR": 3.0, "MLP": 0.9, "CNN": 0.9}), Verdict.FAILED),
        (_result({"LR": 0.4, "MLP": 0.4, "CNN": 0.4}, cg_drop=0.2), Verdict.TREND),  # label flipping costs more
        (_result({"LR": 3.0, "MLP": 2.0, "CNN": 2.5}, moved=0.001), Verdict.REFUSED),
    ],
)
def test_the_verdict_follows_the_rule(result: Result, wanted: Verdict) -> None:
    found = poisoning.RECIPES[0].judge(result)
    assert found.verdict is wanted
    assert "KFAC less CG" in found.because


def _noisy(result: Result, model: str) -> Result:
    """The same, with CG's drops in a model so far apart that the interval holds what is printed, and much else."""
    result.figures["models"][model]["arms"]["own"]["TGDA-CG"]["drop"] = [-2.6, 8.8, -0.5]
    return result


@pytest.mark.parametrize(("mlp", "wanted"), [(0.9, Verdict.REFUSED), (2.0, Verdict.REFUSED)])
def test_no_verdict_where_a_model_that_cannot_tell_would_decide(mlp: float, wanted: Verdict) -> None:
    found = poisoning_page.verdict(_noisy(_result({"LR": 3.0, "MLP": mlp, "CNN": 2.5}), "CNN"))
    assert found.verdict is wanted and "Too few seeds to tell in 1 of 3 cases" in found.because
    sure = poisoning_page.verdict(_noisy(_result({"LR": 0.9, "MLP": 0.9, "CNN": 2.5}), "CNN"))
    assert sure.verdict is Verdict.FAILED  # whatever the CNN would say


def test_no_verdict_without_a_model() -> None:
    result = _result({"LR": 3.0, "CNN": 2.0})
    del result.figures["models"]["CNN"]["arms"]["own"]
    found = poisoning_page.verdict(result)
    assert found.verdict is Verdict.REFUSED and "CNN is missing" in found.because


def test_tables_have_the_printed_drop_beside_ours() -> None:
    drops, prices, defence = poisoning_page.tables(_result({"LR": 3.0}))
    rows = {row[1]: row for row in drops.rows}
    assert rows["TGDA-KFAC-EMP"][2:6] == ["5.40", "–", "3.00 ± 0.05", "– / reproduced in trend"]
    assert rows["TGDA-CG"][2:6] == ["2.78", "0.23 ± 0.14", "1.00 ± 0.02", "not reproduced / not reproduced"]
    assert rows["TGDA-KFAC-EMP"][6:] == ["– / 30 %", "outer 0.0001 (edge of its grid)"]
    assert rows["label flip"][3:6] == ["0.53 ± 0.14", "0.53 ± 0.14", "not reproduced"]
    assert prices.rows == [["LR", "5.0", "30.0 (1.50)", "20.0 (1.00, 1.00)", "8.0 (0.40, 0.20)", "–"]]
    assert defence.rows == [["LR", "label flip", "9", "50.0 %", "25.0 %", "92.00", "91.00", "91.50"]]


def test_the_printed_length_has_a_table_of_its_own() -> None:
    result = _result({"LR": 3.0})
    result.figures["as_printed"] = {"LR": {"TGDA-KFAC-EMP": [5.0, 5.2], "TGDA-CG": [6.0, 6.4]}}
    as_printed = poisoning_page.tables(result)[1]
    assert "12 000" in as_printed.title
    assert as_printed.rows[0][:4] == ["LR", "TGDA-CG", "2.78", "6.00, 6.40"]
    assert as_printed.rows[1][2:4] == ["5.40", "5.00, 5.20"]
    assert as_printed.rows[2][:3] == ["LR", "KFAC less CG", "2.62"] and as_printed.rows[2][4].startswith("-1.10")


def test_long_attacks_take_the_step_size_of_the_short_ones_and_wait_for_it(tmp_path: Path) -> None:
    recipe, source = poisoning.RECIPES[0], poisoning.Source
    parts = (poisoning.Part("MLP", "own", ("TGDA-CG",)), poisoning.Part("MLP", "long", ("TGDA-CG",), 1))
    short = replace(poisoning.TINY, network="mlp", steps=1, inner_steps=1)
    settings = replace(poisoning.SETTINGS["smoke"], parts=parts, trials=2, cases={"MLP": short})
    job = replace(recipe, settings={"smoke": settings}).job("smoke", 1, torch.device("cpu"), tmp_path)
    own, long = poisoning._stages(job, source(job))
    assert own.entries and not long.entries
    keys = [key for key, task in missing(job, [own], 1) if task.seed is None]
    assert len(keys) == 2
    for key, loss in zip(keys, (90.0, 80.0), strict=True):
        job.cells.put(key, {"loss": loss}, 0.0)
    (entry,) = poisoning._stages(job, source(job))[1].entries
    assert entry.grid == {name: (value,) for name, value in keys[1][3].items()}
    assert entry.final(keys[1][3], 1)["steps"] == poisoning.LONG
    result = _result({"MLP": 2.0})
    result.figures["models"]["MLP"]["arms"]["long"] = {"TGDA-CG": _of([1.5])}
    assert poisoning_page.tables(result)[1].rows == [["MLP", "TGDA-CG", "1.48", "1.00", "1.50", "30 %", "1"]]


def test_a_part_may_try_finer_steps_of_every_method_and_keeps_what_is_recorded(tmp_path: Path) -> None:
    recipe, whole = poisoning.RECIPES[0], poisoning.SETTINGS["smoke"]
    plain = poisoning.Part("CNN", "own", poisoning.DECISIVE)

    def made(part: poisoning.Part) -> tuple[str, list[list[float]]]:
        settings = replace(whole, parts=(part,), trials=len(whole.outer))
        job = replace(recipe, settings={"smoke": settings}).job("smoke", 1, torch.device("cpu"), tmp_path)
        (stage,) = poisoning._stages(job, poisoning.Source(job))
        tried = [task for _, task in missing(job, [stage], 1)]
        return job.cells.mark, [[x.setting["outer"] for x in tried if x.entry == i] for i in (0, 1)]

    (mark, before), (again, after) = made(plain), made(replace(plain, finer=poisoning.FINER))
    assert mark == again and before == [list(whole.outer)] * 2
    assert after == [[*poisoning.FINER, *whole.outer]] * 2 and max(poisoning.FINER) < min(whole.outer)


def test_a_model_without_its_data_waits(tmp_path: Path) -> None:
    """Its stages are there but empty, so that tasks keep their numbers."""
    recipe = poisoning.RECIPES[0]
    settings = replace(poisoning.SETTINGS["smoke"], cases={**poisoning.SETTINGS["smoke"].cases, "CNN": poisoning.CNN})
    job = replace(recipe, settings={"smoke": settings}).job("smoke", 1, torch.device("cpu"), tmp_path)
    (tmp_path / "cifar10").mkdir()
    job.data = tmp_path
    for present, wanted in ((4, True), (5, False)):
        for i in range(present):
            (tmp_path / "cifar10" / f"train_{i}.webp").touch()
        assert poisoning.absent(job, "CNN") is wanted
        found = poisoning._stages(job, poisoning.Source(job))
        assert len(found) == len(settings.parts)
        short = [x for x in found if not x.name.endswith("/long")]
        assert [not x.entries for x in short] == [wanted and x.name.startswith("CNN") for x in short]


def test_a_curve_has_the_accuracy_of_every_look(tmp_path: Path, split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poisoning_curve, "EVERY", 1)
    poisoning_curve.main(["--toy", "--model", "LR", "--seed", "3", "--out", str(tmp_path / "x.jsonl")])
    (row,) = Lines(tmp_path / "x.jsonl").rows
    case = poisoning.TINY
    rows = poisoning_problem.split_of(case, poisoning_problem.load(case), 3)
    plain = poisoning_problem.trained(case, rows.clean, 103)  # what judges poison, without any
    assert len(row["held_out"]) == case.epochs == 2
    assert row["held_out"][-1] == poisoning_problem.accuracy(plain, rows.held_out) != row["held_out"][0]
    assert row["test"] == poisoning_problem.accuracy(plain, rows.test)


def test_the_page_has_the_recorded_curve() -> None:
    page = (records.PAGES / "poisoning.md").read_text("utf-8")
    (row,) = Lines(records.RESULTS / "paper" / "poisoning-curve.jsonl").rows
    best = max(row["held_out"])
    epochs = row["every"] * (row["held_out"].index(best) + 1)
    said = f"accuracy is {best:.1f} % after {epochs} of the 100 epochs and {row['held_out'][-1]:.1f} % at the end"
    assert said in page and f"{row['train']:.0f} % of its training rows right" in page


def test_the_cases_have_the_printed_share() -> None:
    for case in poisoning.SETTINGS["small"].cases.values():
        assert isinstance(case, Case) and case.share == 0.03
