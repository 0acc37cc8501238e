"""Resuming a run of ``clean`` with another network, encoder or setting than it began with: refused, never mixed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blobs import Watch, blobs, quicken, write_csv
from hyperkron.cleaning import CleanConfig, clean, recorded, resume
from hyperkron.cleaning.api import assist
from hyperkron.cleaning.fields import Fields
from hyperkron.cleaning.folder import RunFolder
from hyperkron.cleaning.models import HASHED, TextEncoder
from hyperkron.cli import main
from hyperkron.cli.options import CLEAN, RECORDED
from hyperkron.solution import HyperkronError
from hyperkron.training import Interrupted

CONFIG = CleanConfig(epochs=1, compare=("noisy",), seed=3, budget=500.0, device="cpu")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, least=8)


class Net(nn.Module):
    """A network whose activation and scale do not show in its parameters."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(2, 4), nn.Linear(4, 3), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale * torch.relu(self.first(x)))


def mine() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))


def other() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


class Late(Watch):
    """Stops in the training, not in the embedding."""

    def advance(self, steps: int, stage: str) -> None:
        if stage == "noisy expert":
            self.stop_after = 0
        super().advance(steps, stage)


class Stopped:
    """Interrupted runs, one with the default network and one with a network of its own, each with stages done."""

    def __init__(self, folder: Path) -> None:
        data = blobs(rows=60)
        self.train = write_csv(folder / "train.csv", data.train)
        self.trusted = write_csv(folder / "trusted.csv", data.trusted)
        self.test = write_csv(folder / "test.csv", data.test)
        self.folder = folder
        for name, model in (("default", None), ("own", mine)):
            with pytest.raises(Interrupted):
                clean(
                    self.train,
                    self.trusted,
                    test=self.test,
                    out=folder / name,
                    model=model,
                    config=CONFIG,
                    progress=Late(),
                    label="label",
                )
            assert list((folder / name / "stages").glob("*.json"))

    def copy(self, name: str, to: Path) -> Path:
        return shutil.copytree(self.folder / name, to)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch, least=8)
        return Stopped(tmp_path_factory.mktemp("stopped"))


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the log, which keeps the time that was spent."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "log.jsonl")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def refused(folder: Path, attempt: Callable[[], Any]) -> str:
    """What an attempt to go on is told; it leaves the run as it was."""
    before = contents(folder)
    with pytest.raises(HyperkronError) as error:
        attempt()
    assert contents(folder) == before
    return str(error.value)


# --- options -----------------------------------------------------------------------------------------------

OTHER = {
    "--trusted": ["train.csv"],
    "--trusted-column": ["ok"],
    "--test": ["trusted.csv"],
    "--text": ["across"],
    "--image": ["across"],
    "--features": ["up"],
    "--label": ["up"],
    "--id": ["up"],
    "--charset": ["latin-1"],
    "--annotators": ["up,across"],
    "--annotator": ["up"],
    "--probabilities": ["p.npy"],
    "--embeddings": ["e.npy"],
    "--encoder": ["some/encoder"],
    "--layers": ["2"],
    "--epochs": ["2"],
    "--budget": ["1h"],
    "--compare": ["all"],
    "--seed": ["4"],
    "--device": ["cuda"],
}
"""Another value of every option that a run records."""
SAME = {
    "--trusted": "trusted.csv",
    "--test": "test.csv",
    "--label": "label",
    "--layers": "0",
    "--epochs": "1",
    "--budget": "500s",
    "--compare": "noisy",
    "--seed": "3",
    "--device": "cpu",
}
NEUTRAL = {"train", "model", "out", "overwrite", "no_report", "tensorboard", "json", "quiet", "debug"}
NEUTRAL |= {"config", "print_config"}
"""Options that are positional, about the output, or have tests of their own."""


def test_every_option_of_clean_is_either_recorded_or_neutral() -> None:
    assert {option.key for option in CLEAN} - NEUTRAL == {option.key for option in RECORDED}
    assert {option.name for option in RECORDED} == set(OTHER)
    settings = set(asdict(CONFIG)) - {option.key for option in RECORDED}
    assert settings == set()


@pytest.mark.parametrize("option", OTHER)
def test_an_option_that_contradicts_the_record_is_refused(
    stopped: Stopped, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stopped.folder)
    before = contents(stopped.folder / "default")
    assert main(["resume", "default", option, *OTHER[option], "--no-report", "--quiet"]) == 1
    told = capsys.readouterr().err
    key = option[2:].replace("-", "_")
    kept = json.loads((stopped.folder / "default" / "config.json").read_text())
    began = kept["source"].get(key, {**kept["source"]["reading"], **kept["config"]}.get(key))
    assert f"{option}=" in told and (repr(began) if began is not None else "left out") in told
    assert "the run began with" in told and "leave it out to continue that run, or begin a new one" in told
    assert contents(stopped.folder / "default") == before


@pytest.mark.long
def test_the_options_it_began_with_are_welcome(
    stopped: Stopped, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped.copy("default", tmp_path / "run")
    monkeypatch.chdir(stopped.folder)
    same = [text for option in SAME.items() for text in option]
    assert main(["resume", str(tmp_path / "run"), *same, "--no-report", "--quiet"]) == 0, capsys.readouterr().err
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.parametrize("name", sorted(asdict(CONFIG)))
def test_a_record_that_was_altered_is_refused(stopped: Stopped, name: str, tmp_path: Path) -> None:
    """Its stages know which settings they were computed with."""
    changed: dict[str, Any] = {"seed": 4, "epochs": 2, "budget": 600.0, "compare": [], "device": "auto"}
    changed |= {"encoder": None, "layers": 0, "hypergradient": "none"}
    out = stopped.copy("default", tmp_path / "run")
    kept = json.loads((out / "config.json").read_text())
    if kept["config"][name] == changed[name]:
        return  # for texts only, and refused at the start for a table
    kept["config"][name] = changed[name]
    (out / "config.json").write_text(json.dumps(kept))
    with pytest.raises(HyperkronError, match=r"was computed with other data, settings.*restore config\.json"):
        resume(out)


# --- networks ----------------------------------------------------------------------------------------------


def test_another_network_is_refused(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    own, default = stopped.folder / "own", stopped.folder / "default"
    told = refused(own, lambda: resume(own, model=other))
    assert ":other'" in told and ":mine'" in told and "give that one to continue" in told
    told = refused(default, lambda: resume(default, model=mine))
    assert ":mine'" in told and "began with the default network; leave it out" in told
    assert "used your own model" in refused(own, lambda: resume(own))
    changed = other
    monkeypatch.setattr(changed, "__qualname__", "mine")  # the same name, edited since
    assert "restore that one, or begin a new run" in refused(own, lambda: resume(own, model=changed))


def test_the_command_refuses_another_network(
    stopped: Stopped, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(stopped.folder / "own")
    assert main(["resume", str(stopped.folder / "own"), "--model", f"{__name__}:other", "--no-report"]) == 1
    assert "--model=" in capsys.readouterr().err and contents(stopped.folder / "own") == before


def test_what_makes_a_network_another_one() -> None:
    class Edited(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.scale * torch.tanh(self.first(x)))

    builders: list[Callable[[], nn.Module]] = [mine, other, Net, lambda: Net(2.0), Edited]
    builders += [
        lambda: nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Linear(4, 3)),
        lambda: nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2), nn.Linear(4, 3)),
    ]
    state = torch.get_rng_state()
    found = [recorded.network_identity(build, CPU) for build in builders]
    assert len(set(found)) == len(builders)
    assert found == [recorded.network_identity(build, CPU) for build in builders]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.long
def test_other_versions_are_said(stopped: Stopped, tmp_path: Path) -> None:
    out = stopped.copy("default", tmp_path / "run")
    kept = json.loads((out / "config.json").read_text())
    kept["environment"]["torch"] = "1.0"
    (out / "config.json").write_text(json.dumps(kept))
    [told] = [m for m in resume(out).summary["data"]["messages"] if "The run began with" in m]
    assert f"torch 1.0 (now {torch.__version__.partition('+')[0]}" in told


# --- encoders ----------------------------------------------------------------------------------------------


class Texts:
    """Reviews in files, two encoders, and runs that were interrupted after the first stage."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from tests.cleaning import test_run as test_cleaning_run

        self.folder = folder
        made = test_cleaning_run.Texts(folder, monkeypatch)
        self.encoder = made.encoder
        self.changed = shutil.copytree(self.encoder, folder / "changed")
        weights = TextEncoder(self.changed)._model
        with torch.no_grad():
            weights.encoder.layer[0].output.dense.bias += 0.5
        weights.save_pretrained(self.changed)
        for name, part in zip(("train", "trusted"), made.parts, strict=True):
            lines = [json.dumps({"text": x, "label": y}) for x, y in zip(part["x"], part["y"], strict=True)]
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    def begin(self, name: str, encoder: str | None, layers: int = 0) -> Path:
        config = CleanConfig(epochs=1, compare=(), encoder=encoder, layers=layers)
        files = self.folder / "train.jsonl", self.folder / "trusted.jsonl"
        with pytest.raises(Interrupted):
            clean(*files, out=self.folder / name, config=config, progress=Late())
        assert list((self.folder / name / "stages").glob("*.json"))
        return self.folder / name


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Texts:
    monkeypatch.delenv("HYPERKRON_ENCODER", raising=False)
    return Texts(tmp_path, monkeypatch)


def test_another_encoder_is_refused(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("HYPERKRON_ENCODER", str(texts.encoder))
        out = texts.begin("run", None)
    kept = json.loads((out / "config.json").read_text())["encoder"]
    assert kept == {"name": str(texts.encoder), "sha256": TextEncoder(texts.encoder).fingerprint}
    with monkeypatch.context() as patch:
        patch.setenv("HYPERKRON_ENCODER", str(texts.changed))
        told = refused(out, lambda: resume(out))
    assert str(texts.changed) in told and str(texts.encoder) in told and "or begin a new run" in told
    assert "is not the one" in refused(out, lambda: resume(out, expected={"encoder": str(texts.changed)}))
    assert "no encoder" in refused(out, lambda: resume(out, expected={"encoder": HASHED}))
    moved = texts.encoder.rename(texts.folder / "moved")
    told = refused(out, lambda: resume(out))
    assert f"The run began with the encoder {str(texts.encoder)!r}" in told and "is not a folder" in told
    helped = shutil.copytree(out, texts.folder / "again")
    assist(helped, 2, expected={"encoder": str(moved)})  # the same, elsewhere
    assert (helped / "stages" / "judged-hyperkron.json").exists()
    again = resume(helped, expected={"encoder": str(moved)})
    assert again.predict(["the film was good"]).shape == (1, 2)
    shutil.copytree(texts.changed, texts.encoder)  # another one in its place
    assert "is not the one" in refused(out, lambda: resume(out))


@pytest.mark.long
def test_hashed_ngrams_are_recorded_and_kept(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    out = texts.begin("run", HASHED)
    assert json.loads((out / "config.json").read_text())["encoder"] == {"name": HASHED, "sha256": None}
    assert "encoder=" in refused(out, lambda: resume(out, expected={"encoder": str(texts.encoder)}))
    monkeypatch.setenv("HYPERKRON_ENCODER", str(texts.encoder))  # the run named its own
    found = resume(out)
    rows = [json.loads(line)["text"] for line in (texts.folder / "trusted.jsonl").read_text().splitlines()]
    together = found.predict(rows)
    torch.testing.assert_close(torch.cat([found.predict([row]) for row in rows]), together, rtol=1e-4, atol=1e-5)


def test_predictions_use_the_encoder_of_the_run(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERKRON_ENCODER", str(texts.encoder))
    files = texts.folder / "train.jsonl", texts.folder / "trusted.jsonl"
    found = clean(*files, config=CleanConfig(epochs=1, compare=()))
    before = found.predict(["the film was good", "very bad"])
    monkeypatch.setenv("HYPERKRON_ENCODER", str(texts.changed))
    assert torch.equal(found.predict(["the film was good", "very bad"]), before)


def test_an_encoder_with_trained_layers_is_recorded(texts: Texts) -> None:
    out = texts.begin("run", str(texts.encoder), layers=1)
    shutil.rmtree(texts.encoder)
    shutil.copytree(texts.changed, texts.encoder)
    assert "is not the one" in refused(out, lambda: resume(out))


def test_the_fingerprint_of_an_encoder(texts: Texts) -> None:
    """Weights, settings and tokenizer count; where it lies, and what it has read, do not."""
    first = TextEncoder(texts.encoder)
    first.embed(["the film"])
    elsewhere = shutil.copytree(texts.encoder, texts.folder / "elsewhere")
    assert TextEncoder(elsewhere).fingerprint == first.fingerprint != TextEncoder(texts.changed).fingerprint
    tokens = elsewhere / "tokenizer.json"
    tokens.write_text(tokens.read_text().replace('"good"', '"gxxd"'))
    assert TextEncoder(elsewhere).fingerprint != first.fingerprint


def test_a_run_that_did_not_record_its_stages_is_refused(stopped: Stopped, tmp_path: Path) -> None:
    out = stopped.copy("default", tmp_path / "run")
    for path in (out / "stages").glob("*.json"):
        about = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in about.items() if key != "of"}))
    with pytest.raises(HyperkronError, match="or by a version that did not record them"):
        resume(out)


def test_settings_are_compared_by_value() -> None:
    source = {"train": "/a", "reading": {"features": ["a", "b"]}}
    kept = Fields({"config": asdict(replace(CONFIG)), "source": source}, Path("config.json"))
    recorded.refuse_other_settings(kept, {"features": ("a", "b"), "compare": ["noisy"], "train": "/a", "budget": 500})
    with pytest.raises(HyperkronError, match=r"features=\['a'\], but the run began with features \['a', 'b'\]"):
        recorded.refuse_other_settings(kept, {"features": ["a"]})


ODD = [
    (5, "encoder=5 is not an object"),
    ([1], r"encoder=\[1\] is not an object"),
    ("name", "encoder='name' is not an object"),
    ({"name": 7, "sha256": None}, "encoder.name=7 is not a string"),
    ({"name": "x", "sha256": [1]}, r"encoder.sha256=\[1\] is not a string"),
]


@pytest.mark.parametrize(("encoder", "message"), ODD)
def test_an_odd_record_of_the_encoder(encoder: Any, message: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, new=True)
    source = dict.fromkeys(("source", "model", "command"))
    folder.write_json("config.json", {"format": 1, **source, "data": "", "config": asdict(CONFIG), "encoder": encoder})
    kept = folder.read_config()
    with pytest.raises(HyperkronError, match=rf"config\.json: {message}; restore the file"):
        recorded.refuse_other_encoder(kept, {"name": recorded.encoder_to_load(kept, {}), "sha256": None})
