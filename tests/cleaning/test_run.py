"""``clean`` on small made-up data: every kind of source, detection, determinism, alternatives, what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from blobs import Blobs, Watch, blobs, quicken
from hyperkron.cleaning import ALTERNATIVES, OURS, CleanConfig, CleanResult, budget, clean, resume, run
from hyperkron.cleaning.data import read_pair
from hyperkron.solution import HyperkronError
from hyperkron.training import Interrupted

NONE = CleanConfig(epochs=1, compare=())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture(scope="module")
def data() -> Blobs:
    return blobs()


@pytest.fixture(scope="module")
def compared(data: Blobs) -> CleanResult:
    """With every alternative, and tested."""
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        return clean(data.train, data.trusted, test=data.test, config=CleanConfig(epochs=1))


@pytest.fixture(scope="module")
def treeless(data: Blobs) -> tuple[CleanResult, Watch]:
    """Where scikit-learn is not installed, and what was said meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        patch.setattr("hyperkron.cleaning.models.trees.installed", lambda: False)
        return clean(data.train, data.trusted, config=NONE, progress=(watch := Watch())), watch


def auroc(scores: Tensor, wrong: Tensor) -> float:
    """How often a wrong row scores higher than a right one."""
    pairs = scores[wrong][:, None] - scores[~wrong][None]
    return float((pairs > 0).double().mean() + (pairs == 0).double().mean() / 2)


def same(a: CleanResult, b: CleanResult) -> bool:
    """Bit by bit, on the rows that were used."""
    weights = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    scores = [
        [
            torch.as_tensor(found[torch.as_tensor(r.used).numpy()])
            for found in (r.weights, r.error_probability, r.suggested)
        ]
        for r in (a, b)
    ]
    return all(torch.equal(v, w) for v, w in [*zip(*scores, strict=True), *weights])


# --- what it finds ------------------------------------------------------------------------------------------


def test_wrong_labels_are_found_and_put_right(data: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, least=60, forest=12)
    found = clean(data.train, data.trusted, config=CleanConfig(epochs=3, compare=()))
    assert auroc(found.error_probability, data.wrong) > 0.97
    assert float((found.suggested == data.true).double().mean()) > 0.95
    assert float((found.error_probability[found.suspects].diff() <= 0).double().mean()) == 1  # most suspicious first
    assert set(found.suspects.tolist()) == set((found.error_probability > 0.5).nonzero()[:, 0].tolist())
    assert found.summary["noise"]["rate"] == pytest.approx(float(data.wrong.double().mean()), abs=0.1)
    matrix = torch.tensor(found.summary["noise"]["matrix"])
    assert torch.allclose(matrix.sum(1), torch.ones(3), atol=1e-5)
    assert torch.allclose(matrix.diagonal(), torch.full((3,), 0.7), atol=0.15)
    assert float(found.weights.min()) >= 0 and float(found.weights.max()) <= 1
    assert not found.model.training and found.folder is None and found.chosen == OURS
    assert sum(found.summary["weights"]["counts"]) == 200


def test_the_seed_decides_everything_and_nothing_else_does(data: Blobs) -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    config = CleanConfig(epochs=1, compare=("sama",), seed=3)
    one = clean(data.train, data.trusted, model=dropping, config=config)
    torch.manual_seed(99)  # whatever the program drew before
    state = torch.get_rng_state()
    two = clean(data.train, data.trusted, model=dropping, config=config)
    assert same(one, two)
    for a, b in zip(one.candidates, two.candidates, strict=True):
        assert a | {"seconds": None} == b | {"seconds": None}
    assert torch.equal(torch.get_rng_state(), state)  # nor does it disturb what is drawn after
    other = clean(data.train, data.trusted, model=dropping, config=CleanConfig(epochs=1, compare=("sama",), seed=4))
    assert not same(one, other)


@pytest.mark.long
def test_every_kind_of_source_gives_the_same(data: Blobs) -> None:
    pandas = pytest.importorskip("pandas")

    def frame(part: tuple[Tensor, Tensor]) -> Any:
        return pandas.DataFrame({"a": part[0][:, 0].numpy(), "b": part[0][:, 1].numpy(), "label": part[1].numpy()})

    wanted = clean(data.train, data.trusted, config=NONE)
    assert same(wanted, clean(TensorDataset(*data.train), TensorDataset(*data.trusted), config=NONE))
    arrays = [tuple(t.numpy() for t in part) for part in (data.train, data.trusted)]
    assert same(wanted, clean(*arrays, config=NONE))
    labelled = read_pair(*({"x": x, "y": y} for x, y in arrays))
    assert same(wanted, clean(*labelled, config=NONE))
    assert same(wanted, clean(frame(data.train), frame(data.trusted), config=NONE))
    both = tuple(torch.cat([a, b]) for a, b in zip(data.train, data.trusted, strict=True))
    marked = frame(both)  # type: ignore[arg-type]
    marked["checked"] = [False] * 200 + [True] * 24
    assert same(wanted, clean(marked, trusted_column="checked", config=NONE))


def test_images_of_a_dataset() -> None:
    true = torch.arange(80) % 2
    x = (torch.rand(80, 1, 8, 8) * 60 + true[:, None, None, None] * 120).to(torch.uint8)
    noisy = torch.where(torch.arange(60) % 5 == 0, 1 - true[:60], true[:60])
    found = clean(TensorDataset(x[:60], noisy), TensorDataset(x[60:], true[60:]), config=NONE)
    assert found.summary["data"]["kind"] == "image" and found.weights.shape == (60,)
    assert found.model(torch.zeros(2, 1, 8, 8)).shape == (2, 2)


def test_a_model_of_ones_own_whose_batch_statistics_never_meet_a_single_row(data: Blobs) -> None:
    """17 trusted rows in batches of 16 would leave one over."""
    few = (data.trusted[0][:17], data.trusted[1][:17])
    build = lambda: nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))  # noqa: E731
    found = clean(data.train, few, model=build, config=NONE)
    assert len(found.weights) == len(data.noisy)
    assert [type(layer) for layer in found.model.children()] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert found.model(torch.zeros(1, 2)).shape == (1, 3)


def test_the_stages_are_said(treeless: tuple[CleanResult, Watch]) -> None:
    found, watch = treeless
    assert set(found.summary["evidence"]) == {"experts", "label", "belief"}
    assert watch.messages[0] == "200 training rows, 24 trusted rows" and watch.stops == 1
    assert list(dict.fromkeys(watch.stages)) == [
        "trusted expert",
        "noisy expert",
        "noise-matrix expert",
        "fold models",
        "training hyperkron",
        "judging hyperkron",
    ]


# --- the comparison -----------------------------------------------------------------------------------------


def test_every_alternative_is_trained_judged_and_tested(data: Blobs, compared: CleanResult) -> None:
    pytest.importorskip("cleanlab")
    found = compared
    assert [c["name"] for c in found.candidates] == [OURS, *ALTERNATIVES]
    for c in found.candidates:
        assert c["rows"] == 24 and 0 <= c["low"] <= c["accuracy"] <= c["high"] <= 1 and c["description"]
        assert c["test_accuracy"] > 0.4
    assert [c["name"] for c in found.candidates if c["chosen"]] == [found.chosen]
    ours = found.candidates[0]
    assert ours["test_accuracy"] > 0.9
    spent = {c["name"]: c["seconds"] for c in found.candidates}
    seconds = found.summary["seconds"]
    assert spent[OURS] >= seconds["cleaning"] - 0.02 and all(t >= 0 for t in spent.values())
    assert sum(t for name, t in spent.items() if name != OURS) <= seconds["comparison"] + 0.1
    parts = ("preparation", "network", "comparison")
    assert seconds["total"] <= spent[OURS] + sum(seconds[name] for name in parts) + 0.1  # candidates count once
    alone = clean(data.train, data.trusted, config=NONE)
    assert [c["name"] for c in alone.candidates] == [OURS] and alone.candidates[0]["test_accuracy"] is None
    assert torch.equal(alone.weights, found.weights)  # neither the alternatives nor the test rows have a say
    assert 0.8 < alone.candidates[0]["accuracy"] <= 1


def test_the_winner_is_what_comes_out(
    data: Blobs, treeless: tuple[CleanResult, Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = treeless
    monkeypatch.setattr("hyperkron.cleaning.models.trees.installed", lambda: False)
    monkeypatch.setattr(run, "choose", lambda table: "trusted")
    found = clean(data.train, data.trusted, config=CleanConfig(epochs=1, compare=("trusted", "noisy")))
    assert found.chosen == "trusted" and found.verdict.startswith("Train on the trusted set alone")
    assert not torch.equal(found.model.state_dict()["1.weight"], plain.model.state_dict()["1.weight"])


def test_without_cleanlab_it_is_left_out_and_said(data: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "cleanlab" else find(name, *a))
    watch = Watch()
    config = CleanConfig(epochs=1, compare=("trusted", "cleanlab"))
    found = clean(data.train, data.trusted, config=config, progress=watch)
    assert [c["name"] for c in found.candidates] == [OURS, "trusted"]
    wanted = "cleanlab is not installed, so it is left out of the comparison: pip install 'hyperkron[compare]'."
    assert wanted in found.summary["data"]["messages"] and wanted in watch.messages


@pytest.mark.long
def test_a_budget_shortens_training_then_leaves_out_alternatives(data: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "seconds_per_step", lambda work: 1.0)
    monkeypatch.setattr(budget, "seconds_of", lambda fits, measured: 0.0)
    config = CleanConfig(epochs=3, compare=("noisy", "sama"), budget=30.0)
    watch = Watch()
    found = clean(data.train, data.trusted, config=config, progress=watch)
    messages = found.summary["data"]["messages"]
    assert [m.split(" to stay")[0] for m in messages[:3]] == [
        "Training is shortened to 1.0 epochs",
        "'sama' is left out of the comparison",
        "'noisy' is left out of the comparison",
    ]
    assert messages[3].startswith("This will still take about") and set(messages) <= set(watch.messages)
    assert [c["name"] for c in found.candidates] == [OURS] and found.summary["config"]["epochs_used"] == 1.0
    monkeypatch.setattr(budget, "seconds_per_step", lambda work: 1e-6)
    found = clean(data.train, data.trusted, config=config)
    assert found.summary["data"]["messages"] == [] and len(found.candidates) == 3
    assert found.summary["config"]["epochs_used"] == 3


# --- what goes wrong ----------------------------------------------------------------------------------------


def test_what_the_reader_noticed_is_said_and_kept(data: Blobs) -> None:
    def part(rows: tuple[Tensor, Tensor], gaps: int) -> dict[str, Any]:
        labels = [None if i < gaps else "ABC"[y] for i, y in enumerate(rows[1].tolist())]
        return {"x": rows[0].numpy(), "y": labels}

    parts = [part(rows, gaps) for rows, gaps in ((data.train, 2), (data.trusted, 3), (data.test, 5))]
    found = clean(parts[0], parts[1], test=parts[2], config=NONE, progress=(watch := Watch()))
    messages = found.summary["data"]["messages"]
    assert [m.partition(" without a label")[0] for m in messages] == [
        f"{name}: {count} rows" for name, count in (("train", 2), ("trusted", 3), ("test", 5))
    ]
    assert watch.messages[1:4] == messages
    with pytest.raises(HyperkronError, match=r"test='gone\.csv' does not exist"):
        clean(parts[0], parts[1], test="gone.csv", config=NONE)


def test_what_is_refused(data: Blobs, tmp_path: Path) -> None:
    few = (data.trusted[0][:1], data.trusted[1][:1])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"config": CleanConfig(device="warp")}, "device='warp' is unknown; use auto, cpu or cuda"),
        ({"config": CleanConfig(layers=1)}, "layers=1 is for texts, but these are table inputs"),
        ({"config": CleanConfig(encoder="e")}, "encoder='e' is for texts, but these are table inputs"),
        ({"trusted": few}, "trusted has 1 usable row; at least 2 are needed"),
        ({"train": 7}, "cannot read rows from a int"),
    ]
    for given, message in cases:
        arguments = {"train": data.train, "trusted": data.trusted, "config": NONE, **given}
        with pytest.raises(HyperkronError) as error:
            clean(arguments["train"], arguments["trusted"], config=arguments["config"], out=tmp_path / "run")
        assert message in str(error.value)
        assert not (tmp_path / "run" / "config.json").exists()  # so that the next try is not in its own way


class Texts:
    """Short reviews, some with the wrong label, and a tiny encoder that reads them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("transformers")
        from tests.cleaning.models import test_encoder as test_models_encoder

        monkeypatch.setitem(test_models_encoder.SIZES, "max_position_embeddings", 128)
        self.encoder = test_models_encoder.write_model(folder / "bert")
        settings = self.encoder / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 128}))
        words = (("good", "very good", "not bad"), ("bad", "very bad", "not good"))
        middles = ("the film was", "a film was", "film the was very", "was the film a")
        texts = [f"{middles[i // 2 % 4]} {words[i % 2][i // 8 % 3]} {'a ' * (i // 24)}film" for i in range(64)]
        true = [i % 2 for i in range(64)]
        noisy = [1 - y if i % 5 == 0 else y for i, y in enumerate(true[:48])]
        self.parts = {"x": texts[:48], "y": noisy}, {"x": texts[48:], "y": true[48:]}

    def config(self, layers: int) -> CleanConfig:
        return CleanConfig(epochs=1, compare=(), encoder=str(self.encoder), layers=layers)


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Texts:
    return Texts(tmp_path, monkeypatch)


def test_a_folder_that_cannot_be_written_to(data: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(HyperkronError, match=r"out='.*file' is a file, but a run is a folder; choose another name"):
        clean(data.train, data.trusted, config=NONE, out=tmp_path / "file")
    with pytest.raises(HyperkronError, match=r"out='.*' cannot be written to \(.*\); choose another folder"):
        clean(data.train, data.trusted, config=NONE, out=tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "mine"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(HyperkronError, match=r"cannot be written to \(Permission denied\)"):
        clean(data.train, data.trusted, config=NONE, out=tmp_path / "locked")


@pytest.mark.long
def test_an_encoder_whose_last_layer_is_trained(texts: Texts) -> None:
    config = texts.config(layers=1)
    found = clean(*texts.parts, test=texts.parts[1], config=config)
    assert found.summary["data"]["kind"] == "text" and len(found.weights) == len(found.error_probability) > 20
    assert hasattr(found.model, "upper") and all(c["test_accuracy"] is not None for c in found.candidates)
    assert same(found, clean(*texts.parts, test=texts.parts[1], config=config))


@pytest.mark.parametrize("layers", [0, 1])
def test_embedding_has_a_bar_of_its_own(texts: Texts, layers: int) -> None:
    """One for the training texts, one for the test texts; then that of the training."""
    watch = Watch()
    clean(*texts.parts, test=texts.parts[1], config=texts.config(layers), progress=watch)
    bars, calls = 2, watch.stages.count("embedding texts")
    assert calls > 1 and set(watch.stages[:calls]) == {"embedding texts"}
    assert len(watch.totals) == bars + 1 == watch.stops
    assert watch.by_bar[:bars] == watch.totals[:bars] and 0 < watch.by_bar[bars] <= watch.totals[bars]


@pytest.mark.long
def test_embedding_can_be_interrupted_and_resumed(texts: Texts, tmp_path: Path) -> None:
    for name, part in zip(("train", "trusted"), texts.parts, strict=True):
        lines = [json.dumps({"text": x, "label": y}) for x, y in zip(part["x"], part["y"], strict=True)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    files = tmp_path / "train.jsonl", tmp_path / "trusted.jsonl"
    with pytest.raises(Interrupted):
        clean(*files, out=tmp_path / "run", config=texts.config(0), progress=(stopped := Watch(1)))
    assert set(stopped.stages) == {"embedding texts"} and stopped.stops == 1
    again = resume(tmp_path / "run", progress=(watch := Watch()))
    assert same(again, clean(*files, config=texts.config(0))) and watch.stages[0] == "embedding texts"
    watch = Watch()
    resume(tmp_path / "run", progress=watch)  # embeddings are kept, so there is nothing to show
    assert watch.stages == [] and watch.stops == 1


def test_the_result_predicts_further_rows(data: Blobs, compared: CleanResult) -> None:
    probabilities = compared.predict(data.test[0].numpy())
    assert torch.allclose(probabilities.sum(1), torch.ones(len(data.test[0])), atol=1e-5)
    right = (probabilities.argmax(1) == data.test[1]).float().mean()
    [chosen] = [c for c in compared.candidates if c["chosen"]]
    assert float(right) == pytest.approx(chosen["test_accuracy"], abs=1e-6)


@pytest.mark.parametrize("network", [nn.Linear(2, 5), nn.Linear(7, 3)], ids=["outputs", "inputs"])
def test_a_network_that_does_not_fit_is_refused(data: Blobs, network: nn.Module) -> None:
    with pytest.raises(HyperkronError, match=r"model (gives an output of shape|does not take inputs of shape)"):
        clean(data.train, data.trusted, model=lambda: network, config=NONE)


def test_a_class_without_trusted_rows_is_not_taken_for_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of its rows was a suspect, because the trusted rows ruled the class out."""
    quicken(monkeypatch, least=100, forest=20)
    random, rows = torch.Generator().manual_seed(0), 600
    true = torch.arange(rows + 60) % 4
    x = (1.2 * torch.randn(4, 8, generator=random))[true] + torch.randn(len(true), 8, generator=random)
    again = torch.rand(rows, generator=random) < 0.2
    given = torch.where(again, torch.randint(4, (rows,), generator=random), true[:rows])
    trusted = torch.arange(rows, rows + 60)[true[rows:] != 3]
    result = clean((x[:rows], given), (x[trusted], true[trusted]), config=CleanConfig(compare=()))
    suspect, mine, wrong = (result.error_probability > 0.5).float(), given == 3, given != true[:rows]
    assert suspect[mine & ~wrong].mean() < 0.3 < 0.8 < suspect[mine & wrong].mean()
    assert suspect[~mine & ~wrong].mean() < 0.05
    assert "of classes that have trusted rows" in result.verdict and "'3'" in result.verdict
