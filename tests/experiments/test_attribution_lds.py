"""The experiment that judges attributions, at a size at which the answer is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.attribution import development, draws, early, explicit, lds, networks, peers, settings, study, text
from experiments.paper import texts
from experiments.pieces import Cells, Lines


def tiny() -> settings.Setting:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=random)
    y = (x[:, 0] > 0).long()
    return settings.Setting("tiny", lambda: nn.Linear(4, 2), (x[:32], y[:32]), (x[32:], y[32:]), 60, 0.5, batch=8)


def test_a_method_that_knows_the_losses_scores_one_and_a_random_one_nothing() -> None:
    masks = lds.halves(32, 20)
    assert masks.sum(1).tolist() == [16] * 20
    scores = torch.randn(5, 32)
    losses = -(masks.float() @ scores.T)
    assert lds.lds(scores, masks, losses)[0] > 0.999
    assert abs(lds.lds(torch.randn(5, 32), masks, losses)[0]) < 0.5


def test_vectors_of_the_spectrum_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where images have many positions, one way draws other vectors than the other; the record says nothing of tiny."""
    base = tiny()
    train, queries = ((x.reshape(-1, 1, 2, 2), y) for x, y in (base.train, base.queries))
    network = lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 2))  # noqa: E731
    setting = dataclasses.replace(base, network=network, train=train, queries=queries, epochs=5)
    monkeypatch.setattr(draws, "retrained", lambda name: torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))
    monkeypatch.setattr(draws, "find_spec", lambda name: None)
    monkeypatch.setitem(draws.SETTINGS, "tiny", lambda data: setting)
    monkeypatch.setattr(draws, "BATCH", 8)
    draws.main(["--settings", "tiny", "--seeds", "2", "--out", str(tmp_path / "draws.jsonl")])
    (found,) = Lines(tmp_path / "draws.jsonl").rows
    assert 0 < found["shared"]["distance"] != found["own"]["distance"] > 0


def test_several_networks_are_scored_once_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks by two groups of methods; a repeated call trains and scores nothing."""
    retrained = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    trained = []

    def train(setting: settings.Setting, rows: list[torch.Tensor], seeds: list[int]) -> list[nn.Module]:
        trained.extend(seeds)
        return settings.train_many(setting, rows, seeds)

    monkeypatch.setattr(networks, "retrained", lambda name: retrained)
    monkeypatch.setattr(networks, "train_many", train)
    monkeypatch.setattr(networks, "BY_ROWS", ("tiny",))
    monkeypatch.setitem(networks.SETTINGS, "tiny", lambda data: dataclasses.replace(tiny(), epochs=5))
    given = ["--settings", "tiny", "--seeds", "1", "2", "--out", str(tmp_path / "networks.jsonl"), "--groups"]
    networks.main([*given, "EKFAC", "gradients"])
    networks.main([*given, "EKFAC", "gradients"])
    assert trained == [1, 2]
    networks.main([*given, "PCG-3"])
    assert trained == [1, 2, 1, 2]
    cells = Cells(tmp_path / "networks.jsonl", networks.VERSION)
    assert len(cells.found) == 6 and len(cells.lines.rows) == 8  # two runs wrote down what they were
    found = networks.correlations(cells, "tiny")
    assert all(each.shape == (8,) for by_seed in found.values() for each in by_seed.values())
    assert networks.SHRUNK[3] in networks.table(cells)


def test_the_interval_of_a_difference_is_over_networks() -> None:
    """Networks of which one method is ahead by 0.1 and 0.3: Student's t with one degree of freedom."""
    base = {1: torch.zeros(4), 2: torch.zeros(4), 3: torch.zeros(4)}
    found = {"a": {1: torch.full((4,), 0.1), 2: torch.full((4,), 0.3)}, "b": base}
    assert networks.difference(found, "a", "b") == f"+0.200 ± {12.706 * 0.1:.3f} (0.000)"
    assert networks.difference({"a": {1: base[1]}, "b": base}, "a", "b") == ""


@pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning")
def test_scores_with_several_dampings_are_those_of_each() -> None:
    pytest.importorskip("kronfluence")
    base = tiny()
    setting = dataclasses.replace(base, network=lambda: nn.Sequential(nn.Linear(4, 2)), epochs=5)
    (model,) = settings.train_many(setting, [torch.arange(32)], [0])
    scores = []
    for dampings in ([None, 1e-3], [1e-3]):
        torch.manual_seed(0)
        scores.append(peers.kronfluence_with(dampings)(model, setting))
    torch.manual_seed(0)
    torch.testing.assert_close(scores[0][1e-3], scores[1][1e-3])
    torch.testing.assert_close(scores[0][None], peers.kronfluence(None)(model, setting))


def test_retrained_networks_are_on_record() -> None:
    assert draws.retrained("cifar_cnn").shape == (80, 100)


@pytest.mark.long
def test_curvature_foretells_the_losses_of_a_convex_model() -> None:
    setting, masks = tiny(), lds.halves(32, 16)
    losses = lds.losses_after_retraining(setting, masks, repeats=1, together=16)
    (model,) = settings.train_many(setting, [torch.arange(32)], [0])
    found = {
        name: lds.lds(peers.methods("small")[name](model, setting), masks, losses)[0]
        for name in peers.methods("small")
        if name in ("EKFAC, δ=0.001", "TRAK, one network", "gradient cosine")
    }
    assert len(found) == 3
    assert found["EKFAC, δ=0.001"] > 0.7
    assert found["EKFAC, δ=0.001"] > found["gradient cosine"]


def test_pieces_are_carried_out_once_and_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "ROWS", {"tiny": 32})
    monkeypatch.setattr(study, "GROUP", 4)
    work = study.Worker(None, "cpu", {"tiny": lambda data: tiny()})
    cells = Cells(tmp_path / "pieces.jsonl", {})
    plan = study.Study(cells, ["tiny"], 8, 1, ["EKFAC, δ=0.0001", "PCG-3, δ"])
    done = []
    while task := next(plan.ready(), None):
        done.append(task[0])
        cells.put(task[0], work(task[1]), 0.0)
    assert [key[2] for key in done] == [0, 4, "PCG-3, δ by the rule", "EKFAC, δ=0.0001"]
    again = study.Study(Cells(tmp_path / "pieces.jsonl", {}), ["tiny"], 8, 1, ["EKFAC, δ=0.0001", "PCG-3, δ"])
    assert not list(again.ready())
    assert not list(study.Study(cells, ["tiny"], 8, 1, ["CG-50"]).ready(left=80.0))


def test_two_methods_are_compared_with_the_same_queries() -> None:
    masks = lds.halves(32, 8)
    losses = -(masks.float() @ torch.randn(32, 8))
    work = study.Worker(None, "cpu", {"tiny": lambda data: tiny()})
    pair = " | ".join(study.SOLVED)
    found = work((["paired", "tiny", pair], {"masks": masks, "losses": losses}))
    first, second = (found[method]["each"] for method in study.SOLVED)
    assert len(first) == len(second) == 8 and abs(sum(first) - sum(second)) < 0.1


@pytest.mark.long
def test_removing_helpful_rows_raises_the_loss_more_than_removing_any() -> None:
    work = study.Worker(None, "cpu", {"tiny": lambda data: tiny()})
    given = {"queries": 8, "repeats": 1}
    rise = {what: work((["removal", "tiny", what], given))["rise"] for what in (study.RANDOM, "PCG-10, δ by the rule")}
    assert sum(rise["PCG-10, δ by the rule"]) > sum(rise[study.RANDOM])


def test_the_last_layer_is_that_of_the_encoder() -> None:
    network, train, queries = text.load(None, 6, 3, texts.MADE_UP, texts.MADE_UP)
    encoder = texts.encoder(texts.MADE_UP, None, torch.device("cpu"))
    theirs = encoder.with_head(network.classes, 1)
    ours = network()
    theirs.head.load_state_dict(ours.head.state_dict())
    rows = texts.corpus(texts.MADE_UP, None).train[:6]
    hidden = encoder.prefix(rows, 1, max_length=text.TOKENS, dtype=torch.float32)
    assert train[0].shape[:2] == (6, text.TOKENS) and len(queries[1]) == 3
    torch.testing.assert_close(ours(train[0]), theirs(*hidden.batch(range(6))), rtol=1e-4, atol=1e-5)


def test_segments_of_a_training_have_equal_times() -> None:
    setting = tiny()
    rates, stops = early.rates(setting), early.ends(setting, 3)
    assert stops[-1] == len(rates) == 240
    times = [sum(rates[a:b]) for a, b in zip([0, *stops[:-1]], stops, strict=True)]
    assert max(times) - min(times) < 2 * setting.rate


def test_scores_by_segments_foretell_the_losses_of_a_convex_model_that_is_not_converged() -> None:
    setting, masks = dataclasses.replace(tiny(), epochs=3), lds.halves(32, 16)
    halved = dataclasses.replace(setting, epochs=6)
    losses = lds.losses_after_retraining(halved, masks, repeats=1, together=16)
    assert lds.lds(early.unrolled(setting, 2), masks, losses)[0] > 0.6


def test_solves_by_rows_are_those_of_the_library() -> None:
    setting = tiny()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    by_rows = explicit.solvers(model, setting)
    for name in ("PCG-3, shrunk, δ by the rule", "PCG-10, δ by the rule", "CG-50, δ by the rule"):
        wanted = peers.methods("all")[name](model, setting)
        torch.testing.assert_close(
            by_rows[name](model, setting), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())
        )


def test_damping_by_layer_is_that_of_ekfac_where_the_damping_is_the_same() -> None:
    """Without a share of the mean eigenvalue, δ stands for what δ and the penalty are together."""
    setting = tiny()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    wanted = peers.ours(None)(model, setting)
    torch.testing.assert_close(development.by_layer(1e-4 + 2 * settings.DECAY, 0.0)(model, setting), wanted)
    more = development.by_layer(1e-4 + 2 * settings.DECAY, 0.1)(model, setting)
    assert float(more.norm()) < 0.99 * float(wanted.norm())


@pytest.mark.long
def test_a_candidate_is_tried_on_other_rows(tmp_path: Path) -> None:
    only = "EKFAC type-2, δ=0.01"
    few = ["--subsets", "2", "--repeats", "1", "--queries", "3", "--only", only, "--out", str(tmp_path / "found.jsonl")]
    development.main(["--setting", "digits", *few])
    (row,) = Lines(tmp_path / "found.jsonl").rows
    assert row["method"] == only
    assert abs(row["lds"]) <= 1
    assert not torch.equal(settings.digits_mlp(None).queries[0], development.other_digits(None).queries[0])
