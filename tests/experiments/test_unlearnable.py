"""Unlearnable examples: the hypergradient through the generator against a dense oracle, the pieces, and the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
import oracles
from experiments import records
from experiments.paper import unlearnable, unlearnable_attack, unlearnable_page, unlearnable_victims
from experiments.paper.recipe import Job, Result, Verdict
from experiments.paper.unlearnable import Row
from experiments.paper.unlearnable_attack import PROBLEM, Attack, least_likely
from experiments.paper.unlearnable_networks import SampleNoise, UNet, cnn, crop_and_flip, published
from experiments.paper.unlearnable_victims import Case, Data
from experiments.pieces import Cells
from inline_workers import use_threads

DOUBLE = torch.float64
DAMPING = 0.3
Batch = tuple[Tensor, Tensor, Tensor]


# --- the true inner problem ---------------------------------------------------------------------------------


def batch(seed: int, count: int = 4, label: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 3, 8, 8, generator=generator, dtype=DOUBLE)
    y = torch.randint(3, (count,), generator=generator) if label is None else torch.full((count,), label)
    return x, y, torch.arange(count)


def dense_case(model: nn.Module, noise: nn.Module, inner: Batch, outer: Batch) -> Any:
    """The problem in plain torch, as the oracle takes it: perturbed and clamped images, the largest other loss."""

    def plain_inner() -> Tensor:
        x, y, index = inner
        return F.cross_entropy(model((x + noise(x, index)).clamp(0, 1)), y)

    def plain_outer() -> Tensor:
        x, y, _ = outer
        logs = -model(x).log_softmax(1)
        return logs.masked_fill(F.one_hot(y, 3).bool(), -1e9).amax(1).mean()

    return SimpleNamespace(model=model, hyper=noise, plain_inner=plain_inner, plain_outer=plain_outer)


def linear(weight: float) -> nn.Module:
    """A linear classifier; with weight 0 all images have the same probabilities, so KFAC is the Hessian."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(12, 3)).double()
    with torch.no_grad():
        model[2].weight.mul_(weight)
    return model


def unet() -> nn.Module:
    torch.manual_seed(1)
    return UNet(0.2, width=1).double()


def noise_of_each() -> nn.Module:
    torch.manual_seed(2)
    return SampleNoise(4, (3, 8, 8), 0.2).double()


@pytest.mark.parametrize("make", [unet, noise_of_each])
def test_exact_curvature_gives_the_dense_hypergradient(make: Any) -> None:
    """Through the CNN, its ReLUs and pooling, the clamp and the generator with its BatchNorm."""
    torch.manual_seed(1)
    model, noise, inner, outer = cnn(8, 1, 4, classes=3).double(), make(), batch(5), batch(6)
    case = dense_case(model, noise, inner, outer)
    curvature = oracles.hessian(case.plain_inner, list(model.parameters()))
    damping = DAMPING - float(torch.linalg.eigvalsh(curvature)[0].clamp(max=0.0))
    method = hk.Implicit(hk.curvature.Hessian(damping), hk.solvers.CG(200, tolerance=1e-13))
    found = method.compute(PROBLEM, model, noise, inner, outer).grads
    wanted = oracles.implicit(case, curvature, damping=damping)
    assert oracles.flat(wanted).norm() > 1e-8
    assert oracles.relative(found, wanted) < 1e-8


@pytest.mark.parametrize(("weight", "exact"), [(0.0, True), (1.0, False)])
def test_kfac_gives_it_where_kfac_is_the_hessian(weight: float, exact: bool) -> None:
    model, noise, inner, outer = linear(weight), unet(), batch(5), batch(6)
    case = dense_case(model, noise, inner, outer)
    curvature = hk.curvature.KFAC(DAMPING, fisher="type-2", split="exact")
    found = hk.Implicit(curvature, hk.solvers.Direct()).compute(PROBLEM, model, noise, inner, outer).grads
    wanted = oracles.implicit(case, oracles.hessian(case.plain_inner, list(model.parameters())), damping=DAMPING)
    assert (oracles.relative(found, wanted) < 1e-8) is exact


@pytest.mark.parametrize(("label", "exact"), [(1, True), (None, False)])
def test_the_printed_empirical_kfac_is_the_empirical_fisher_matrix_of_one_class(label: int | None, exact: bool) -> None:
    model, noise, inner, outer = linear(0.0), unet(), batch(5, label=label), batch(6)
    case = dense_case(model, noise, inner, outer)
    x, y, index = inner
    output = model((x + noise(x, index)).clamp(0, 1))
    vectors = (output.detach().softmax(1) - F.one_hot(y, 3)) / len(y) ** 0.5
    dense = oracles.fisher(output, [vectors], list(model.parameters()))
    curvature = hk.curvature.KFAC(DAMPING, fisher="empirical", split="exact")
    found = hk.Implicit(curvature, hk.solvers.Direct()).compute(PROBLEM, model, noise, inner, outer).grads
    assert (oracles.relative(found, oracles.implicit(case, dense, damping=DAMPING)) < 1e-8) is exact


def test_the_surrogate_is_the_largest_loss_of_another_class_and_bounded() -> None:
    z = torch.tensor([[0.0, 2.0, 1.0], [50.0, 0.0, -50.0]], dtype=DOUBLE)
    y = torch.tensor([0, 2])
    each = torch.stack([F.cross_entropy(z, torch.full((2,), k), reduction="none") for k in range(3)], 1)
    wanted = torch.stack([each[0, [1, 2]].max(), each[1, [0, 1]].max()]).mean()
    assert float(least_likely(z, y)) == pytest.approx(float(wanted), abs=1e-12)


# --- perturbations ------------------------------------------------------------------------------------------


def test_published_images_stay_near_and_do_not_depend_on_their_batch() -> None:
    torch.manual_seed(0)
    x = torch.rand(60, 3, 8, 8)
    for noise in (UNet(0.1, 2), SampleNoise(60, (3, 8, 8), 0.1)):
        before = {name: value.clone() for name, value in noise.state_dict().items()}
        made = published(noise, x)
        assert float((made - x).abs().max()) <= 0.1 + 1e-6 and float(made.min()) >= 0 and float(made.max()) <= 1
        assert float((made - x).abs().mean()) > 0.01
        assert all(torch.equal(value, before[name]) for name, value in noise.state_dict().items())
    assert published(None, x) is x


def test_crops_and_mirror_images_are_those_of_a_loop() -> None:
    x, padding = torch.rand(40, 2, 4, 4), 1
    made = crop_and_flip(x, padding, torch.Generator().manual_seed(0))
    padded = F.pad(x, (1, 1, 1, 1))
    kinds = set()
    for image, big in zip(made, padded, strict=True):
        cuts = {(i, j): big[:, i : i + 4, j : j + 4] for i in range(3) for j in range(3)}
        [kind] = [(i, j, m) for (i, j), c in cuts.items() for m in (0, 1) if torch.equal(image, c.flip(2) if m else c)]
        kinds.add(kind)
    assert len(kinds) > 10


def test_error_minimising_noise_lowers_the_training_loss_within_its_radius() -> None:
    case, data = replace(TINY, width=8, hidden=32), tiny()
    run = unlearnable_attack.start(case, data, Attack("EM", "own", 0.0, 0.1, seed=1))
    run.advance(3 * run.algorithm.pass_length)  # type: ignore[attr-defined]
    noise, model = run.state.hyper, run.state.model
    index = torch.arange(len(data.train[1]))
    after = float(unlearnable_attack.inner(model, noise, (*data.train, index)))
    fresh = SampleNoise(len(index), (3, 8, 8), 0.1)
    before = float(unlearnable_attack.inner(model, fresh, (*data.train, index)))
    assert after < 0.8 * before
    assert float(noise.noise.detach().abs().max()) <= 0.1 + 1e-7  # type: ignore[operator, union-attr]


def test_batches_go_through_all_images_with_their_labels() -> None:
    x, y = torch.arange(12.0).reshape(12, 1, 1, 1).expand(12, 1, 4, 4).contiguous(), torch.arange(12)
    for padding in (0, 1):
        draw = unlearnable_victims.Sampled((x, y), 5, seed=0, padding=padding)
        for _ in range(2):
            found = [draw() for _ in range(2)]
            assert len(torch.cat([index for _, _, index in found]).unique()) == 10
            for images, labels, index in found:
                assert torch.equal(labels, y[index]) and torch.equal(images.amax((1, 2, 3)), index.float())


# --- attacks ------------------------------------------------------------------------------------------------

TINY = replace(unlearnable.SETTINGS["smoke"].case, steps=3, looks=3)


def tiny() -> Data:
    job = SimpleNamespace(settings=unlearnable.SETTINGS["smoke"], data=None, device=torch.device("cpu"))
    return unlearnable.load(job)  # type: ignore[arg-type]


def test_the_attacker_that_is_best_on_held_out_images_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Tensor]] = []
    scores = iter([50.0, 20.0, 40.0])

    def judge(case: Case, data: Data, noise: nn.Module, seed: int) -> float:
        seen.append({name: x.clone() for name, x in noise.state_dict().items()})
        return next(scores)

    monkeypatch.setattr(unlearnable_attack, "judge", judge)
    noise, found = unlearnable_attack.attack(TINY, tiny(), Attack("AID-KFAC", "own", 1e-2, 25 / 255, seed=1))
    assert (found["held_out"], found["step"], found["steps"]) == (20.0, 2, 3)
    assert found["curve"] == [[1, 50.0], [2, 20.0], [3, 40.0]]
    assert all(torch.equal(x, seen[1][name]) for name, x in noise.state_dict().items())
    assert found["moved"] > 0 and found["noise_moved"] > 0 and found["failure"] is None


@pytest.mark.parametrize("method", ["AID-KFAC", "EM"])
def test_an_interrupted_attack_continues_as_if_nothing_had_happened(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the best attacker so far is remembered: the first look, before the interruption, is the best one."""
    looks: list[float] = []

    def judge(case: Case, data: Data, noise: nn.Module, seed: int) -> float:
        looks.append(20.0 + len(looks))
        if interrupted and len(looks) == 2:
            raise KeyboardInterrupt
        return looks[-1]

    given = Attack(method, "own", 1e-2, 25 / 255, seed=1)

    def attack(folder: Path | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        noise, found = unlearnable_attack.attack(TINY, tiny(), given, folder=folder)
        return noise.state_dict(), found

    monkeypatch.setattr(unlearnable_attack, "judge", judge)
    interrupted = False
    expected, whole = attack(None)
    looks, interrupted = [], True
    with pytest.raises(KeyboardInterrupt):
        attack(tmp_path)
    looks, interrupted = looks[:1], False
    found, continued = attack(tmp_path)
    assert continued == whole and whole["step"] < whole["steps"]
    assert all(torch.equal(x, found[name]) for name, x in expected.items())


def test_a_diverged_attack_is_recorded() -> None:
    """λ is as it began, and nothing is said about it."""
    noise, found = unlearnable_attack.attack(TINY, tiny(), Attack("AID-KFAC", "printed", 1e30, 25 / 255, seed=1))
    assert "NonFiniteError" in found["failure"] and found["steps"] < 3
    assert found["held_out"] is None and found["moved"] == found["noise_moved"] == 0
    assert bool(published(noise, tiny().train[0]).isfinite().all())


# --- the order of the pieces --------------------------------------------------------------------------------


def job(folder: Path, **changes: Any) -> Job:
    settings = replace(unlearnable.SETTINGS["smoke"], **changes)
    return Job("smoke", settings, (1,), torch.device("cpu"), Cells(folder / "x.jsonl", {}))


def test_pieces_wait_for_what_they_need(tmp_path: Path) -> None:
    rows = (Row(25, "AID-CG", "own", "CNN"), Row(0, "None", "own", "CNN"), Row(8, "AID-CG", "own", "CNN"))
    one = job(tmp_path, rows=(*rows, Row(25, "AID-CG", "own", "CNN", seed=2)), rates=(0.1, 1.0))
    first = [["tune", 25, "AID-CG", 0.1], ["tune", 25, "AID-CG", 1.0], ["judge", 0, "None"]]
    first.append(["victim", 0, "None", "own", 1, "CNN"])
    assert [piece.key for piece in unlearnable.ready(one)] == first
    for piece, score in zip(list(unlearnable.ready(one)), (60.0, 30.0, 0.0, 0.0), strict=True):
        one.cells.put(piece.key, {"held_out": score, "test": 80.0, "published": 90.0}, 1.0)
    attacks = [["attack", 25, "AID-CG", "own", 1], ["attack", 8, "AID-CG", "own", 1]]
    assert [piece.key for piece in unlearnable.ready(one)] == attacks
    assert unlearnable.chosen_rate(one, rows[0]) == 1.0 == unlearnable.chosen_rate(one, rows[2])
    assert unlearnable.chosen_rate(one, replace(rows[0], method="BOME", arm="printed")) == 0.1
    one.cells.put(attacks[0], {}, 1.0)
    assert [piece.key[0] for piece in unlearnable.ready(one)] == ["victim", "attack"]


def test_an_attacker_is_read_from_its_file_and_made_again_where_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unlearnable_attack, "judge", lambda *_: 50.0)  # its classifiers are trained elsewhere
    row = Row(25, "AID-CG", "printed", "CNN")
    work = unlearnable.Work(job(tmp_path, rows=(row,)))
    noise, _ = work.attack(row)
    again = work.noise(row)
    assert again is not None and oracles.relative(again.state_dict(), noise.state_dict()) == 0
    work.path(row).unlink()
    made = work.noise(row)
    assert made is not None and work.path(row).exists()
    assert oracles.relative(made.state_dict(), noise.state_dict()) == 0


def test_a_long_attack_has_the_step_size_of_the_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlearnable_attack, "judge", lambda *_: 50.0)
    row = Row(25, "AID-CG", "long", "CNN")
    one = job(tmp_path, rows=(row,), rates=(0.1, 1e-3), case=replace(TINY, steps=1, looks=1))
    for piece, score in zip(list(unlearnable.ready(one)), (60.0, 30.0), strict=True):
        one.cells.put(piece.key, {"held_out": score}, 1.0)
    found = unlearnable.Work(one).attack(row)[1]
    assert (found["rate"], found["steps"]) == (1e-3, round(unlearnable.LONG * one.settings.case.steps))
    small = unlearnable.SETTINGS["small"].case
    assert round(unlearnable.LONG * small.steps) == 4900


@pytest.mark.long
def test_processes_share_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    rows = (Row(0, "None", "own", "CNN"), Row(25, "AID-KFAC", "own", "CNN"))
    settings = replace(unlearnable.SETTINGS["smoke"], rows=rows)
    [recipe] = unlearnable.RECIPES
    shared = replace(recipe, settings={"smoke": settings})
    monkeypatch.setattr("experiments.paper.recipes", lambda: {"unlearnable": shared})
    monkeypatch.setattr(unlearnable, "PRICED", ("AID-KFAC",))
    result = shared.run("smoke", 1, "cpu", tmp_path / "many", workers=2)
    alone = shared.run("smoke", 1, "cpu", tmp_path / "one")
    assert result.complete and {name: x["test"] for name, x in result.figures["lines"].items()} == {
        name: x["test"] for name, x in alone.figures["lines"].items()
    }


# --- the page -----------------------------------------------------------------------------------------------


def result(own: dict[str, float], moved: float = 0.5, seeds: int = 1) -> Result:
    lines = {}
    for name, value in own.items():
        attacks = {str(i): {"noise_moved": moved, "failure": None} for i in range(seeds)}
        test = {victim: [value + 0.1 * i for i in range(seeds)] for victim in unlearnable_page.VICTIMS}
        lines[unlearnable_page.line(0 if name == "None" else 25, name, "own")] = {
            "test": test,
            "attack": {} if name == "None" else attacks,
        }
    cost = {"AID-KFAC": 0.01, "AID-CG": 0.02, "AID-CG-16": 0.1}
    return Result(
        "unlearnable", "small", (1,), {"lines": lines, "tried": {"BOME": [[1e-3, 40.0], [1e-2, 30.0]]}, "seconds": cost}
    )


AS_PRINTED = {"None": 90.0, "AID-KFAC": 30.0, "AID-CG": 60.0, "BOME": 40.0, "stocBiO": 70.0, "EM": 20.0}


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize(
    ("changes", "moved", "wanted"),
    [
        ({}, 0.5, Verdict.REPRODUCED),
        ({"EM": 35.0}, 0.5, Verdict.TREND),
        ({"BOME": 29.0}, 0.5, Verdict.TREND),
        ({"BOME": 29.0, "AID-CG": 25.0}, 0.5, Verdict.FAILED),
        ({}, 0.01, Verdict.REFUSED),
    ],
)
def test_verdicts(changes: dict[str, float], moved: float, wanted: Verdict, seeds: int) -> None:
    found = unlearnable_page.verdict(result({**AS_PRINTED, **changes}, moved, seeds))
    assert found.verdict is wanted
    assert "AID-KFAC 30." in found.because


def test_a_difference_of_one_seed_must_be_more_than_three_points() -> None:
    near = {**AS_PRINTED, "BOME": 32.0, "AID-CG": 32.0, "stocBiO": 32.0}
    assert unlearnable_page.verdict(result(near)).verdict is Verdict.FAILED
    assert unlearnable_page.verdict(result(near, seeds=3)).verdict is Verdict.REPRODUCED


def test_attacks_of_the_printed_length_are_judged_once_all_methods_have_them() -> None:
    short, long = result({**AS_PRINTED, "AID-KFAC": 80.0}), result(AS_PRINTED)
    bilevel = ("AID-KFAC", "AID-CG", "BOME", "stocBiO")
    for name in bilevel:
        assert unlearnable_page.verdict(short).verdict is Verdict.FAILED
        short.figures["lines"][unlearnable_page.line(25, name, "long")] = long.figures["lines"][f"25 {name} own"]
    assert unlearnable_page.verdict(short).verdict is Verdict.REPRODUCED
    assert unlearnable_page.cell(short, "AID-KFAC", "CNN") == unlearnable_page.cell(long, "AID-KFAC", "CNN")
    assert unlearnable_page.judged_arm(short, "EM") == "own"


def test_no_verdict_where_a_comparison_is_missing() -> None:
    found = unlearnable_page.verdict(result({name: x for name, x in AS_PRINTED.items() if name != "stocBiO"}))
    assert found.verdict is Verdict.REFUSED and "2 of 6 comparisons have not been run" in found.because


def test_cells_and_tables() -> None:
    found = result({**AS_PRINTED, "AID-KFAC": 23.0})
    assert unlearnable_page.cell(found, "AID-KFAC", "CNN") == "same"
    assert unlearnable_page.cell(found, "AID-KFAC", "ResNet-18") == "19 points lower"
    assert unlearnable_page.cell(result(AS_PRINTED, 0.01), "BOME", "CNN") == "no verdict"
    first, smaller, tried = unlearnable_page.tables(found)
    assert {row[-1] for row in tried.rows} == {"0.01 (edge)"}
    assert {len(row) for row in first.rows} == {len(first.columns)} and len(smaller.rows) == 6
    assert "0.50 of AID-CG's" in unlearnable_page.answer(found)[0]
    assert "EM for the CNN (20.0 %)" in unlearnable_page.answer(found)[1]


def test_the_picture_shows_images_above_their_perturbations(tmp_path: Path) -> None:
    x = torch.full((8, 3, 8, 8), 0.5)
    noise = SampleNoise(8, (3, 8, 8), 0.1)
    with torch.no_grad():
        noise.noise.fill_(0.1)
    one = result(AS_PRINTED)
    one.figures["lines"]["25 AID-KFAC own"]["picture"] = unlearnable_page.encoded(noise, x)
    [path] = unlearnable_page.plot(one, tmp_path)
    assert path.stat().st_size > 1000 and "AID-KFAC" in path.read_text("utf-8")
    assert unlearnable_page.plot(result(AS_PRINTED), tmp_path) == []


def test_the_page_has_the_recorded_figures() -> None:
    found = Result.read(records.RESULTS / "paper" / "unlearnable-small.json")
    text = (records.PAGES / "unlearnable.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    shown = {row[0].split(" (")[0]: row[1:] for row in rows if len(row) == 6}
    judged, shorter = unlearnable_page.tables(found)[:2]
    before = {row[0]: row[2] for row in shorter.rows}
    for method, resnet_printed, resnet, _, _, cnn_printed, ours, *_ in judged.rows[:6]:
        lengths = [before[method], ours] if method in before else [ours, ""]
        assert shown[method] == [cnn_printed, *lengths, resnet_printed, resnet]
    assert unlearnable.RECIPES[0].judge(found).verdict is Verdict.FAILED and "not reproduced" in text
