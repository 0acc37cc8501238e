"""What users bring: probabilities, embeddings and an estimator; how each is found, checked, used and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobs import Blobs, blobs, quicken
from hyperkron.cleaning import CleanConfig, clean, load, resume
from hyperkron.cleaning.arguments import read_parts
from hyperkron.cleaning.own import EstimatorModel, Own, fit_estimator
from hyperkron.solution import HyperkronError

NONE = CleanConfig(epochs=1, compare=())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, forest=12)


@pytest.fixture(scope="module")
def data() -> Blobs:
    return blobs()


def opinions(data: Blobs, sure: float = 0.9) -> torch.Tensor:
    """What somebody knows who knows the truth, of training and trusted rows."""
    true = torch.cat([data.true, data.trusted[1]])
    return sure * torch.nn.functional.one_hot(true, 3) + (1 - sure) / 3


# --- probabilities ---------------------------------------------------------------------------------------------


def test_rows_are_found_in_one_source_and_in_two() -> None:
    one = {"a": [1.0, 2.0, 3.0, 4.0, 5.0], "label": ["x", None, "y", "x", "y"], "ok": [0, 0, 0, 1, 1]}
    p = np.linspace(0.1, 0.5, 5)
    p = np.stack([p, 1 - p], 1)
    parts = read_parts(one, None, None, {"trusted_column": "ok"})
    found = Own.of(parts, probabilities=p).probabilities
    assert found is not None and torch.allclose(found[:, 0], torch.tensor([0.1, 0.3, 0.4, 0.5]))
    two = read_parts(
        {"x": [[1.0], [2.0], [3.0]], "y": ["x", None, "y"]}, {"x": [[4.0], [5.0]], "y": ["x", "y"]}, None, {}
    )
    found = Own.of(two, probabilities=p).probabilities
    assert found is not None and torch.allclose(found[:, 0], torch.tensor([0.1, 0.3, 0.4, 0.5]))


def test_a_file_may_name_the_classes(tmp_path: Path, data: Blobs) -> None:
    parts, p = read_parts(data.train, data.trusted, None, {}), opinions(data)
    np.save(tmp_path / "p.npy", p.numpy())
    text = "2,0,1\n" + "".join(f"{c},{a},{b}\n" for a, b, c in p.tolist())
    (tmp_path / "p.csv").write_text(text)
    for name in ("p.npy", "p.csv"):
        found = Own.of(parts, probabilities=tmp_path / name).probabilities
        assert found is not None and torch.allclose(found, p)


def test_a_file_may_name_true_and_false_as_pandas_does(tmp_path: Path) -> None:
    parts = read_parts({"x": [[1.0], [2.0]], "y": [True, False]}, {"x": [[3.0], [4.0]], "y": [True, True]}, None, {})
    (tmp_path / "p.csv").write_text("True,False\n0.1,0.9\n0.2,0.8\n0.3,0.7\n0.4,0.6\n")
    found = Own.of(parts, probabilities=tmp_path / "p.csv").probabilities
    assert parts[0].classes == ("false", "true")
    assert found is not None and torch.allclose(found[:, 1], torch.tensor([0.1, 0.2, 0.3, 0.4]))


@pytest.mark.long
def test_a_good_expert_helps(data: Blobs) -> None:
    alone = clean(data.train, data.trusted, config=NONE)
    helped = clean(data.train, data.trusted, config=NONE, probabilities=opinions(data, 0.98))

    def right(result: Any) -> float:
        return float((result.suggested == data.true).double().mean())

    assert right(helped) > 0.97 and right(helped) >= right(alone)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.ones((10, 3)) / 3, "probabilities has 10 rows, but the data has 200 training .* 24 trusted; give one"),
        (np.ones((224, 4)) / 4, "probabilities has 4 columns, but there are 3 classes; .* in this order: 0, 1, 2"),
        (np.ones((224, 3)), r"probabilities\[0\]=.* are not probabilities; .* sum to 1"),
        (np.full((224, 3), np.nan), r"probabilities\[0\] holds a missing or infinite number; fill it in"),
        (np.ones(224), "probabilities has shape .*224.*; give a matrix"),
        ("p.txt", r"p.txt' does not exist"),
    ],
)
def test_what_is_no_set_of_probabilities(data: Blobs, given: Any, said: str) -> None:
    with pytest.raises(HyperkronError, match=said):
        clean(data.train, data.trusted, probabilities=given)


@pytest.mark.parametrize("name", ["probabilities", "embeddings"])
def test_files_that_hold_something_else(tmp_path: Path, data: Blobs, name: str) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(HyperkronError, match=rf"{name}=.*objects.npy' is not an array .*numpy.save"):
        clean(data.train, data.trusted, **dict[str, Any]({name: tmp_path / "objects.npy"}))
    (tmp_path / "some.txt").write_text("1\n")
    with pytest.raises(HyperkronError, match=rf"{name}=.*some.txt' must be a .npy .*save it"):
        clean(data.train, data.trusted, **dict[str, Any]({name: tmp_path / "some.txt"}))


# --- embeddings --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_embeddings_take_the_place_of_inputs_and_the_run_can_go_on(tmp_path: Path, data: Blobs) -> None:
    """Texts that say nothing, with vectors that say all."""
    for name, y in (("train", data.noisy), ("trusted", data.trusted[1])):
        lines = "".join(f"some words here {i},{'ABC'[k]}\n" for i, k in enumerate(y.tolist()))
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{lines}".replace("some", f"some {name}"))
    vectors = torch.cat([data.x, data.trusted[0]])
    np.save(tmp_path / "vectors.npy", torch.cat([vectors, torch.ones(len(vectors), 1)], 1).numpy())  # one is constant
    out = tmp_path / "run"
    files: list[Any] = [tmp_path / "train.csv", tmp_path / "trusted.csv"]
    result = clean(*files, embeddings=tmp_path / "vectors.npy", out=out, config=CleanConfig(epochs=3, compare=()))
    assert float((result.suggested == data.true).double().mean()) > 0.9
    new = torch.cat([data.test[0], torch.ones(len(data.test[0]), 1)], 1)
    assert float((result.predict(new).argmax(1) == data.test[1]).double().mean()) > 0.9
    assert torch.equal(load(out).predict(new), result.predict(new))
    assert "words" in (out / "suspects.jsonl").read_text()  # people see the text
    assert torch.equal(resume(out).suggested, result.suggested)
    np.save(tmp_path / "vectors.npy", np.zeros((224, 2)) + np.arange(2))
    with pytest.raises(HyperkronError, match=r"no column can be used|is not what the run"):
        resume(out)


def test_an_encoder_beside_embeddings_is_refused(data: Blobs) -> None:
    vectors = torch.cat([data.x, data.trusted[0]])
    with pytest.raises(HyperkronError, match="encoder='x' is for texts"):
        clean(data.train, data.trusted, embeddings=vectors, config=CleanConfig(encoder="x"))


# --- an estimator ------------------------------------------------------------------------------------------------


def test_any_classifier_becomes_a_model() -> None:
    pytest.importorskip("sklearn")
    from sklearn.linear_model import LogisticRegression, Perceptron
    from sklearn.neighbors import KNeighborsClassifier

    x, y = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
    x[:, 0] += 4 * y
    weight = torch.where(torch.arange(60) < 30, 1.0, 0.1)
    for kind in (LogisticRegression, Perceptron, KNeighborsClassifier):
        model = fit_estimator(kind(), x, 2 * y, weight, 3)  # class 1 does not occur
        assert isinstance(model, EstimatorModel) and not hasattr(kind(), "classes_")
        answers = model(x).softmax(1)
        assert answers.shape == (60, 3) and float((answers.argmax(1) == 2 * y).double().mean()) > 0.9
        assert float(answers[:, 1].max()) < 1e-6
    few = fit_estimator(KNeighborsClassifier(), x, 2 * y, weight, 3)
    assert isinstance(few, EstimatorModel) and few.estimator.n_samples_fit_ == 30  # it takes no weights


@pytest.mark.parametrize("given", [object(), "forest", dict])
def test_what_is_no_estimator(data: Blobs, given: Any) -> None:
    with pytest.raises(HyperkronError, match=r"estimator=.* such as RandomForestClassifier"):
        clean(data.train, data.trusted, estimator=given)
