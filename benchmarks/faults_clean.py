"""The rows of ``faults.py`` about `clean`: runs resumed with something else, and datasets that name images elsewhere.

A mismatched resume is survived if it is refused and the run is left as it was; an image that a dataset does not own if
the dataset is refused by name. Whatever is accepted counts as silent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forks import written
from torch import Tensor, nn

Case = Callable[[Path], Any]
"""Something that must be refused, given the folder of a run or of data."""

REFUSALS = (
    "the run began with",
    "is not what the run in",
    "The run began with",
    "the run used your own model",
    "began with; begin a new run",
    "was computed with other data, settings",
    "leads out of the folder",
)
"""What the refusals meant here say."""
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "very", "film", "the", "a", "was", "not")


def faults(scratch: Path) -> list[Callable[[], dict[str, Any]]]:
    """The rows, each made when it is asked for."""
    groups = {
        "resume of clean with other options": _options,
        "resume of clean with another network": _networks,
        "resume of clean with another encoder": _encoders,
        "images that a dataset does not own": _images,
    }
    return [partial(_row, name, cases, scratch / f"clean-{i}") for i, (name, cases) in enumerate(groups.items())]


def _row(fault: str, group: Callable[[Path], dict[str, Case]], scratch: Path) -> dict[str, Any]:
    scratch.mkdir()

    def attempt() -> str:
        return json.dumps({name: _refused(case, scratch, i) for i, (name, case) in enumerate(group(scratch).items())})

    told: dict[str, str] = json.loads(written(attempt, scratch / "told") or '{"all": "the process died"}')
    wrong = [f"{name}: {what}" for name, what in told.items() if what]
    note = f"{len(wrong)} silent; {'; '.join(wrong) or str(group.__doc__).lower().rstrip('.')}"
    return {"fault": fault, "tries": len(told), "survived": len(told) - len(wrong), "note": note}


def _refused(case: Case, scratch: Path, number: int) -> str:
    """What went wrong; nothing if it was refused and the run is as before."""
    from hyperkron.solution import HyperkronError

    folder = scratch / f"case-{number}"
    shutil.copytree(scratch / "run", folder, symlinks=True)
    before = _contents(folder)
    try:
        case(folder)
    except HyperkronError as error:
        if not any(words in str(error) for words in REFUSALS):
            return f"refused for another reason ({error})"
        return "" if _contents(folder) == before else "refused, but the run was changed"
    return "accepted"


def _contents(folder: Path) -> dict[str, bytes]:
    """All files but the log, which keeps the time that was spent."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "log.jsonl")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- interrupted runs --------------------------------------------------------------------------------------


class _Stop(Exception):
    """Ends a run on the way."""


class _Stopping:
    """A progress that ends the run when the first stage is done."""

    def start(self, total: int) -> None: ...

    def message(self, text: str) -> None: ...

    def stop(self) -> None: ...

    def advance(self, steps: int, stage: str) -> None:
        if stage == "pooled expert":
            raise _Stop


def _begin(scratch: Path, rows: list[dict[str, Any]], model: Any = None, **settings: Any) -> None:
    """An interrupted run of a few dozen rows, with a finished stage."""
    from hyperkron.cleaning import CleanConfig, clean, run
    from hyperkron.cleaning.trainer import TrainingPlan

    run.TrainingPlan = partial(TrainingPlan, least=8)  # trainings of a few steps
    for name, part in (("train", rows[:-16]), ("trusted", rows[-16:])):
        (scratch / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    try:
        clean(
            scratch / "train.jsonl",
            scratch / "trusted.jsonl",
            out=scratch / "run",
            model=model,
            config=CleanConfig(**{"epochs": 1, "compare": (), "device": "cpu", **settings}),
            progress=_Stopping(),
        )
    except _Stop:
        assert any((scratch / "run" / "stages").iterdir())


def _points() -> list[dict[str, Any]]:
    x = torch.randn(56, 2, generator=torch.Generator().manual_seed(0)).tolist()
    return [{"a": a + 4 * (i % 2), "b": b, "label": i % 2} for i, (a, b) in enumerate(x)]


def _reviews() -> list[dict[str, Any]]:
    ends = ("very good", "very bad")
    return [{"text": f"the film was {'a ' * (i // 2)}{ends[i % 2]}", "label": i % 2} for i in range(56)]


def _resume(folder: Path, model: Any = None, **expected: Any) -> None:
    from hyperkron.cleaning import resume

    resume(folder, model=model, expected=expected)


# --- options -----------------------------------------------------------------------------------------------

OTHER = {
    **{"train": "elsewhere.csv", "trusted": "elsewhere.csv", "test": "elsewhere.csv", "text": "a", "label": "b"},
    **{"image": "a", "features": ["a"], "trusted_column": "b", "seed": 1, "epochs": 2, "budget": 60.0},
    **{"compare": ("noisy",), "device": "auto", "encoder": "some/encoder", "layers": 1},
}
"""Another value for everything that a run of `clean` can be told."""


def _options(scratch: Path) -> dict[str, Case]:
    """Given to `resume`, or written into config.json between two sittings; and other data under the same name."""
    _begin(scratch, _points())
    cases: dict[str, Case] = {
        name: lambda folder, name=name, value=value: _resume(folder, **{name: value}) for name, value in OTHER.items()
    }
    for name in ("seed", "epochs", "budget", "compare"):
        cases[f"{name} altered in config.json"] = partial(_altered, name)
    cases["data of the same shape"] = partial(_other_data, scratch / "train.jsonl")
    return cases


def _altered(name: str, folder: Path) -> None:
    kept = json.loads((folder / "config.json").read_text())
    kept["config"][name] = OTHER[name]
    (folder / "config.json").write_text(json.dumps(kept))
    with _unchanged(folder):
        _resume(folder)


def _other_data(train: Path, folder: Path) -> None:
    before = train.read_text()
    lines = before.splitlines()
    train.write_text("\n".join([*lines[1:], lines[0]]) + "\n")  # the same rows in another order
    try:
        _resume(folder)
    finally:
        train.write_text(before)


class _unchanged:
    """A change of config.json that is taken back, so that only what the resume does is seen."""

    def __init__(self, folder: Path) -> None:
        self.file, self.original = folder / "config.json", folder.parent / "run" / "config.json"

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.file.write_bytes(self.original.read_bytes())


# --- networks ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A network whose activation and factor do not show in its parameters."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.first, self.last, self.factor = nn.Linear(2, 4), nn.Linear(4, 2), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.factor * torch.relu(self.first(x)))


class Edited(Net):
    """The same with another activation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.factor * torch.tanh(self.first(x)))


def _networks(scratch: Path) -> dict[str, Case]:
    """Under another name, or under the same name with another structure, activation, dropout or constant."""

    def build() -> nn.Module:
        return Net()

    def wider() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2))

    def dropping() -> nn.Module:
        return nn.Sequential(Net(), nn.Dropout(0.5))

    _begin(scratch, _points(), build)
    cases: dict[str, Case] = {"another builder": lambda folder: _resume(folder, Net), "no builder": _resume}
    changed = {"width": wider, "dropout": dropping, "activation": lambda: Edited(), "constant": lambda: Net(2.0)}
    for name, builder in changed.items():
        builder.__qualname__ = build.__qualname__
        cases[f"{name} under the same name"] = lambda folder, builder=builder: _resume(folder, builder)
    return cases


# --- encoders ----------------------------------------------------------------------------------------------


def _encoder(folder: Path, seed: int) -> Path:
    """A tiny random encoder of texts."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=128, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", model_max_length=128
    )
    tokenizer.save_pretrained(folder)
    return folder


def _encoders(scratch: Path) -> dict[str, Case]:
    """Named by the environment or on the command line, or changed, replaced or gone where the run found it."""
    from hyperkron.cleaning.models import HASHED

    mine, other = _encoder(scratch / "encoder", 0), _encoder(scratch / "other", 1)
    kept = shutil.copytree(mine, scratch / "kept")
    os.environ["HYPERKRON_ENCODER"] = str(mine)
    _begin(scratch, _reviews())
    del os.environ["HYPERKRON_ENCODER"]

    def with_variable(folder: Path) -> None:
        os.environ["HYPERKRON_ENCODER"] = str(other)
        try:
            _resume(folder)
        finally:
            del os.environ["HYPERKRON_ENCODER"]

    def in_place(change: Callable[[], object], folder: Path) -> None:
        change()
        try:
            _resume(folder)
        finally:
            shutil.rmtree(mine, ignore_errors=True)
            shutil.copytree(kept, mine)

    def other_tokens() -> None:
        file = mine / "tokenizer.json"
        file.write_text(file.read_text().replace('"good"', '"gone"'))

    def other_settings() -> None:
        file = mine / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "relu"}))

    return {
        "HYPERKRON_ENCODER": with_variable,
        "another folder": lambda folder: _resume(folder, encoder=str(other)),
        "none": lambda folder: _resume(folder, encoder=HASHED),
        "other weights": partial(in_place, lambda: shutil.copytree(other, mine, dirs_exist_ok=True)),
        "other tokens": partial(in_place, other_tokens),
        "another activation": partial(in_place, other_settings),
        "gone": partial(in_place, lambda: shutil.rmtree(mine)),
    }


# --- images ------------------------------------------------------------------------------------------------


def _images(scratch: Path) -> dict[str, Case]:
    """Paths that lead out of the dataset's folder: absolute, upwards, by a link; in every format that has paths."""
    import datasets
    from PIL import Image

    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = str(scratch / "cache")
    secret, cases = scratch / "secret.png", {}
    Image.new("L", (4, 4), 9).save(secret)
    ways = {"absolute": str(secret), "upwards": "../../secret.png", "link": "link.png", "device": "/dev/stdin"}
    for way, path in ways.items():
        folder = scratch / "run" / way
        for name in ("cats", "dogs"):
            (folder / name).mkdir(parents=True)
            Image.new("L", (4, 4), 5).save(folder / name / "own.png")
        (folder / "link.png").symlink_to(secret)
        for form, name in _written(folder, [path, "cats/own.png", "dogs/own.png"]).items():
            cases[f"{way} in {form}"] = partial(_read, form, f"{way}/{name}")
    (folder / "cats" / "link.png").symlink_to(secret)
    return cases | {"link in a folder of classes": partial(_read, "folder", folder.name)}


def _written(folder: Path, paths: list[str]) -> dict[str, str]:
    """A table of images in each format, by the name of the format: the file, or nothing for the folder itself."""
    import datasets
    import pyarrow.parquet as pq

    labels = [i % 2 for i in range(len(paths))]
    lines = [{"image": path, "label": label} for path, label in zip(paths, labels, strict=True)]
    (folder / "a.csv").write_text("image,label\n" + "".join(f"{line['image']},{line['label']}\n" for line in lines))
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": [{"bytes": None, "path": path} for path in paths], "label": labels}
    table = datasets.Dataset.from_dict(rows, features=features).with_format("arrow")[:]
    about = {"huggingface": json.dumps({"info": {"features": features.to_dict()}})}
    pq.write_table(table.replace_schema_metadata(about), folder / "train.parquet")
    return {"hf:": "train.parquet", "Parquet": "train.parquet", "CSV": "a.csv", "JSON lines": "a.jsonl"}


def _read(form: str, name: str, folder: Path) -> None:
    from hyperkron.cleaning.data import read

    if form == "folder":
        read(folder / name)
    elif form == "hf:":
        alone = folder.parent / f"{folder.name}-hub"  # where nothing but the table is the dataset
        shutil.copytree((folder / name).parent, alone, symlinks=True, ignore=shutil.ignore_patterns("a.*"))
        read(f"hf:{alone}", image="image", label="label")
    else:
        read(folder / name, image="image", label="label")
