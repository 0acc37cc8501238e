"""Trees as tensors: equal to scikit-learn's answers, stored without pickle, refused when damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hyperkron.cleaning.models import trees
from hyperkron.cleaning.models.trees import as_tensors, boosted, forest, rebuilt, soft_boosted
from hyperkron.solution import HyperkronError

ensemble = pytest.importorskip("sklearn.ensemble")


def rows(classes: int, count: int = 120) -> tuple[Tensor, Tensor]:
    """Inputs, some on thresholds' grid and some not, and labels that depend on them."""
    random = torch.Generator().manual_seed(classes)
    x = torch.randn(count, 5, generator=random)
    x[:, 1] = (4 * x[:, 1]).round() / 4
    return x, ((x[:, 0] + x[:, 1] + 0.5 * torch.randn(count, generator=random)) * classes / 4).long() % classes


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("RandomForestClassifier", {"n_estimators": 7}),
        ("ExtraTreesClassifier", {"n_estimators": 7, "max_depth": 4}),
        ("HistGradientBoostingClassifier", {"max_iter": 6, "min_samples_leaf": 4}),
    ],
)
def test_equal_to_scikit_learn(kind: str, options: dict[str, Any], classes: int) -> None:
    x, y = rows(classes)
    fitted = getattr(ensemble, kind)(random_state=0, **options).fit(x.numpy(), y.numpy())
    found = as_tensors(fitted, classes)
    assert found is not None
    wanted = torch.from_numpy(fitted.predict_proba(x.numpy()))
    assert torch.allclose(found(x).double().softmax(1), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("labels", [(0, 2), (0, 2, 3)])
@pytest.mark.parametrize("kind", ["RandomForestClassifier", "HistGradientBoostingClassifier"])
def test_classes_that_were_not_met_have_no_probability(kind: str, labels: tuple[int, ...]) -> None:
    x, y = rows(len(labels))
    fitted = getattr(ensemble, kind)(random_state=0).fit(x.numpy(), torch.tensor(labels)[y].numpy())
    found = as_tensors(fitted, 5)
    assert found is not None
    p = found(x).double().softmax(1)
    assert torch.allclose(p[:, list(labels)], torch.from_numpy(fitted.predict_proba(x.numpy())), atol=1e-6, rtol=0)
    assert float(p.sum(1).sub(p[:, list(labels)].sum(1)).max()) < 1e-6


def test_a_forest_of_soft_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "TREES", 40)
    x, y = rows(3)
    q = 0.8 * torch.nn.functional.one_hot(y, 3) + 0.2 / 3
    weight = torch.linspace(0.1, 1, len(x))
    found, out_of_bag = forest(x, q, weight, seed=5)
    other = ensemble.RandomForestRegressor(40, max_features="sqrt", oob_score=True, random_state=5)
    other.fit(x.numpy(), q.double().numpy(), sample_weight=weight.double().numpy())
    wanted = torch.from_numpy(other.predict(x.numpy()))
    assert torch.allclose(found(x).double().softmax(1), wanted, atol=1e-6, rtol=0)
    assert torch.allclose(out_of_bag.double(), torch.from_numpy(other.oob_prediction_), atol=1e-6, rtol=0)
    in_sample = found(x).softmax(1)
    assert float((in_sample.argmax(1) == y).double().mean()) > float((out_of_bag.argmax(1) == y).double().mean())


def test_many_rows_make_smaller_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows(3)
    q = torch.nn.functional.one_hot(y, 3).float()
    monkeypatch.setattr(trees, "TREES", 3)  # so that some rows are in every bag
    whole, out_of_bag = forest(x, q)
    assert torch.allclose(out_of_bag.sum(1), torch.ones(len(x)), atol=1e-5)
    monkeypatch.setattr(trees, "MAX_SAMPLE", 20)
    monkeypatch.setattr(trees, "MAX_VALUES", 80)
    assert len(forest(x, q)[0].value) < len(whole.value) / 4


def test_boosted_trees_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "ROUNDS", 10)
    x, y = rows(2)
    found = boosted(x, y, 2)
    assert float((found(x).argmax(1) == y).double().mean()) > 0.8


def test_any_seed_of_a_run_will_do() -> None:
    x, y = rows(2)
    q = torch.nn.functional.one_hot(y, 2).float()
    assert torch.equal(forest(x, q, trees=3, seed=2**32 + 1)[1], forest(x, q, trees=3, seed=1)[1])
    assert torch.equal(boosted(x, y, 2, rounds=2, seed=2**32 + 1)(x), boosted(x, y, 2, rounds=2, seed=1)(x))


def test_stored_and_built_from_what_is_stored(tmp_path: Path) -> None:
    x, y = rows(2)
    found = boosted(x, y, 2)
    save_file(found.state_dict(), tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(rebuilt(lambda: nn.Linear(5, 2), tensors)(x), found(x))
    network = nn.Linear(5, 2)
    assert torch.equal(rebuilt(lambda: nn.Linear(5, 2), network.state_dict())(x), network(x))


@pytest.mark.parametrize("name", ["branches", "roots", "feature", "value", "base"])
def test_damaged_trees_are_refused(name: str) -> None:
    """So that a file of a stranger can neither loop for ever nor read beyond its tensors."""
    tensors = boosted(*rows(2), 2).state_dict()
    harm = {
        "branches": torch.zeros_like(tensors["branches"]),
        "roots": tensors["roots"] + 10**6,
        "feature": tensors["feature"] - 10,
        "value": tensors["value"][:-1],
        "base": torch.zeros(7),
    }
    with pytest.raises(HyperkronError, match="take"):
        rebuilt(lambda: nn.Linear(5, 2), {**tensors, name: harm[name]})


def test_other_estimators_are_not_converted() -> None:
    x, y = rows(2)
    fitted = ensemble.GradientBoostingClassifier(n_estimators=2).fit(x.numpy(), y.numpy())
    assert as_tensors(fitted, 2) is None and as_tensors(object(), 2) is None
    bag = ensemble.BaggingClassifier(n_estimators=2).fit(x.numpy(), y.numpy())
    assert as_tensors(bag, 2) is None


@pytest.mark.parametrize("classes", [2, 4])
def test_boosting_of_certain_labels_is_that_of_soft_ones(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "ROUNDS", 8)
    x, y = rows(classes)
    q = nn.functional.one_hot(y, classes).float()
    soft, hard = soft_boosted(x, q, torch.ones(len(x))), boosted(x, y, classes)
    assert torch.allclose(soft(x), hard(x), atol=1e-5)


def test_boosted_trees_answer_with_the_weighted_mean_of_soft_labels() -> None:
    group = torch.arange(120) % 2
    q = torch.where(torch.arange(120)[:, None] < 60, torch.tensor([0.8, 0.2]), torch.tensor([0.3, 0.7]))
    weight = torch.where((torch.arange(120) < 60) == (group == 0), 1.0, 0.5)  # of group 0 the first half counts twice
    found = soft_boosted(group[:, None].float(), q, weight)(torch.tensor([[0.0], [1.0]])).softmax(1)[:, 1]
    assert torch.allclose(found, torch.tensor([(2 * 0.2 + 0.7) / 3, (0.2 + 2 * 0.7) / 3]), atol=1e-3)


def test_a_column_of_many_values_is_cut_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "BINS", 16)
    x = torch.linspace(-1, 1, 400)[:, None]
    model = soft_boosted(x, nn.functional.one_hot((x[:, 0] > 0.26).long(), 2).float(), torch.ones(400))
    assert float((model(x).argmax(1) == (x[:, 0] > 0.26)).float().mean()) > 0.95
    used = model.threshold[model.branches[:, 0] != torch.arange(len(model.branches))]
    assert len(used.unique()) <= 16 and not set(used.tolist()) & set(x[:, 0].tolist())


def test_boosting_where_a_single_class_is_likely() -> None:
    x, q = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0.04, 0.96, 0.0]).expand(40, 3)
    for classes in (2, 3):
        found = soft_boosted(x, q[:, :classes], torch.ones(40))(x).softmax(1)
        assert torch.equal(found, nn.functional.one_hot(torch.ones(40, dtype=torch.long), classes).float())
