"""The alternatives: what each learns from, trees among them, and a user's own estimator from end to end."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blobs import Blobs, Watch, blobs, quicken, write_csv
from hyperkron import solution
from hyperkron.cleaning import ALTERNATIVES, OURS, CleanConfig, alternatives, clean, load, resume, run
from hyperkron.cleaning.alternatives import GOLD_SHARE, TREES, available, fitted, targets_for
from hyperkron.cleaning.config import BOOSTED, FOREST, NETWORK
from hyperkron.cleaning.filters import neighbour_votes
from hyperkron.cleaning.method import Opinion, Outcome
from hyperkron.cleaning.models import linear, trees
from hyperkron.cleaning.models.trees import TreeEnsemble
from hyperkron.cleaning.own import EstimatorModel
from hyperkron.cleaning.stages import Stages
from hyperkron.cleaning.trainer import Dense, TrainingPlan
from hyperkron.cleaning.work import Work
from hyperkron.solution import HyperkronError, HyperkronWarning

NOISY, TRUSTED = torch.arange(20), torch.arange(20, 26)
GIVEN = torch.cat([torch.arange(20) % 2, torch.tensor([0, 0, 0, 1, 1, 1])])
ALONE = CleanConfig(epochs=1, compare=())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


def views(**more: Any) -> tuple[Work, Outcome]:
    """Two classes on a line, of which every fifth noisy row lies on the wrong side."""
    x = torch.where(GIVEN == 0, -2.0, 2.0) + torch.linspace(0, 0.5, 26)
    x[:20:5] *= -1
    build, plan = partial(linear, 1, 2), TrainingPlan(least=24, epochs=1)
    work = Work(
        Dense(x[:, None]), GIVEN, NOISY, TRUSTED, 2, torch.arange(26) % 2, build, plan, CleanConfig(), Stages(None),
        lambda *_: None, **more,
    )  # fmt: skip
    right = torch.stack([x < 0, x > 0], 1).float() * 0.8 + 0.1
    nothing: Any = None
    opinion = Opinion(nothing, nothing, nothing, right[:20].log(), torch.zeros(20, 2), right[:20])
    experts = dict.fromkeys(("trusted", "noisy", "matrix", "forest", "fold models", "cleaned forest"), right)
    return work, Outcome(opinion, opinion, experts, (0.35, 1.0, 0.3), right[:20].log())


def test_sama_warns_of_no_optimizer_that_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it use up the warning about a user's own."""
    monkeypatch.setattr(solution, "_warned", set())
    work, outcome = views()
    with warnings.catch_warnings():
        warnings.simplefilter("error", HyperkronWarning)
        targets_for("sama", work, outcome)
    assert solution._warned == set()


def test_gold_loss_correction_by_hand() -> None:
    work, outcome = views()
    shown = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.8, 0.2], [0.4, 0.6], [0.4, 0.6], [0.1, 0.9]])
    outcome.experts["noisy"][TRUSTED] = shown
    matrix = torch.tensor([[0.8, 0.2], [0.3, 0.7]])
    found = targets_for("gold-loss", work, outcome)
    assert torch.equal(found.rows, torch.arange(26))
    assert torch.allclose(found.evidence[:20].exp(), matrix[:, GIVEN[:20]].T, atol=1e-4)
    assert torch.equal(found.evidence[20:].argmax(1), GIVEN[20:])
    assert found.weight is not None
    assert torch.allclose(found.weight.mean(), torch.tensor(1.0))
    share = float(found.weight[20:].sum() / found.weight[:20].sum())
    assert share == pytest.approx(max(GOLD_SHARE, 6 / 20))  # here there are enough of them


def test_few_trusted_rows_are_weighted_up() -> None:
    work, outcome = views()
    work.trusted = TRUSTED[[0, 3]]
    found = targets_for("gold-loss", work, outcome)
    assert found.weight is not None
    assert float(found.weight[20:].sum() / found.weight[:20].sum()) == pytest.approx(GOLD_SHARE)


def test_rows_whose_neighbours_disagree_are_left_out() -> None:
    work, outcome = views()
    found = targets_for("neighbours", work, outcome)
    kept = [n for n in range(20) if n % 5] + TRUSTED.tolist()
    assert found.rows.tolist() == kept and found.weight is None
    votes = neighbour_votes(work.inputs.batch(NOISY)[0], GIVEN[NOISY], 2)
    assert set(kept[:16]) == set((votes.argmax(1) == GIVEN[NOISY]).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("name", TREES)
def test_trees_are_grown_from_the_rows_that_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    seen: list[Tensor] = []
    original = getattr(trees, {"forest": "forest", "boosted": "boosted"}[name])

    def spy(x: Tensor, *more: Any, **options: Any) -> Any:
        seen.append(x)
        return original(x, *more, **options)

    monkeypatch.setattr(trees, name, spy)
    work, outcome = views()
    [model] = fitted(name, [work], [outcome], "stage")
    kept = [n for n in range(20) if n % 5] + TRUSTED.tolist()
    assert torch.equal(seen[0], work.inputs.batch(torch.tensor(kept))[0])
    assert isinstance(model, TreeEnsemble) and model(seen[0]).shape == (22, 2)
    with pytest.raises(HyperkronError, match="is not a candidate with a network"):
        targets_for(name, work, outcome)


def test_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    names, messages = available(ALTERNATIVES, table=False, vectors=False)
    assert not {"forest", "boosted", "neighbours"} & set(names) and not messages
    names, messages = available(("forest", "pooled"), table=False)
    assert names == ["pooled"] and "'forest' is left out" in messages[0]
    monkeypatch.setattr(trees, "installed", lambda: False)
    names, messages = available(("forest", "pooled"))
    assert names == ["pooled"] and "pip install 'hyperkron[data]'" in messages[0]


# --- from end to end -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> Blobs:
    return blobs()


@pytest.mark.long
@pytest.mark.parametrize("kind", [FOREST, BOOSTED])
def test_trees_that_are_delivered_can_be_loaded_and_resumed(
    kind: str, data: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(alternatives, "chosen_learner", lambda work, _: kind if work.tree_model else NETWORK)
    train, trusted = write_csv(tmp_path / "a.csv", data.train), write_csv(tmp_path / "b.csv", data.trusted)
    found = clean(train, trusted, out=tmp_path / "run", config=CleanConfig(epochs=1, compare=("forest",)))
    assert isinstance(found.model, TreeEnsemble)
    told = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found.summary["learner"] == told["learner"] == kind
    assert next(c for c in told["candidates"] if c["name"] == OURS)["learner"] == kind
    columns = {"across": data.test[0][:, 0].numpy(), "up": data.test[0][:, 1].numpy()}
    answers = found.predict(columns)
    assert float((answers.argmax(1) == data.test[1]).double().mean()) > 0.85
    for again in (load(tmp_path / "run"), resume(tmp_path / "run")):
        assert torch.equal(again.predict(columns), answers)
    network = clean(train, trusted, model=partial(linear, 2, 3), config=ALONE)
    assert not isinstance(network.model, TreeEnsemble) and network.summary["learner"] == NETWORK


def test_an_estimator_of_ones_own(data: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    from sklearn.neighbors import KNeighborsClassifier

    monkeypatch.setattr(run, "choose", lambda table: "estimator")
    watch = Watch()
    estimator = KNeighborsClassifier(15)
    train, trusted = write_csv(tmp_path / "a.csv", data.train), write_csv(tmp_path / "b.csv", data.trusted)
    found = clean(train, trusted, estimator=estimator, out=tmp_path / "run", config=ALONE, progress=watch)
    assert [c["name"] for c in found.candidates] == [OURS, "estimator", "estimator-cleaned"]
    assert isinstance(found.model, EstimatorModel) and found.summary["learner"] == "KNeighborsClassifier"
    assert float((found.predict(data.test[0]).argmax(1) == data.test[1]).double().mean()) > 0.85
    assert any("model.safetensors holds the cleaned model" in message for message in watch.messages)
    assert not isinstance(load(tmp_path / "run").model, EstimatorModel)
    with pytest.raises(HyperkronError, match="estimator=KNeighborsClassifier, which is not kept"):
        resume(tmp_path / "run")
