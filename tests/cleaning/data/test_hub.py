"""Datasets of the Hugging Face Hub; the Hub itself is a stand-in."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hyperkron.cleaning.data import export_rows, read, read_pair
from hyperkron.solution import HyperkronError

datasets = pytest.importorskip("datasets")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[Any, ...]]]:
    def install(result: Any) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def load_dataset(path: str, name: str | None = None, split: str | None = None) -> Any:
            calls.append((path, name, split))
            if isinstance(result, Exception):
                raise result
            return result[split]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return install


def _texts(texts: list[str], labels: list[int]) -> Any:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    return datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)


def test_texts_with_class_names(hub: Callable[[Any], list[Any]], tmp_path: Path) -> None:
    calls = hub({"train": _texts(["a", "b", "c"], [1, 0, -1]), "test": _texts(["d", "e"], [0, 1])})
    train, trusted = read_pair("hf:org/some-name", "hf:org/some-name@config:test")
    assert calls == [("org/some-name", None, "train"), ("org/some-name", "config", "test")]
    assert (train.inputs, train.classes, train.labels.tolist()) == (["a", "b"], ("neg", "pos"), [1, 0])
    assert any("1 row without a label" in message for message in train.messages)
    assert trusted.labels.tolist() == [0, 1]
    export_rows("hf:org/some-name", [1], tmp_path / "b.parquet", ["pos"])
    assert pq.read_table(tmp_path / "b.parquet").to_pylist() == [{"text": "b", "label": 1}]


def _file(path: Path, names: list[str], labels: list[int], text: str = "row") -> Path:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    rows = {"text": [f"{text} {i}" for i in range(len(labels))], "label": labels}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return path


def test_a_parquet_file_of_hugging_face_has_the_names_of_its_classes(tmp_path: Path) -> None:
    source = _file(tmp_path / "a.parquet", ["bird", "cat", "dog"], [0, 1, 2, 2, -1])
    other = _file(tmp_path / "b.parquet", ["cat", "dog"], [0, 1], "other")  # 0 is another class here
    train, trusted = read_pair(source, other)
    assert [train.classes[k] for k in train.labels] == ["bird", "cat", "dog", "dog"]
    assert [trusted.classes[k] for k in trusted.labels] == ["cat", "dog"]
    export_rows(source, [0, 1], tmp_path / "c.parquet", ["dog", None])
    assert pq.read_table(tmp_path / "c.parquet")["label"].to_pylist() == [2, 1]
    assert read(tmp_path / "c.parquet").labels.tolist() == [2, 1]


@pytest.mark.parametrize(
    "metadata", [b"", b"[1]", b'{"info": {"features": [1]}}', b'{"info": {"features": {"label": 3}}}']
)
def test_other_metadata_says_nothing_of_classes(metadata: bytes, tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "label": [0, 1]})
    pq.write_table(table.replace_schema_metadata({b"huggingface": metadata}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet").classes == ("0", "1")


def test_numbers_are_those_of_the_names_that_another_source_has(tmp_path: Path) -> None:
    (tmp_path / "ok.csv").write_text("text,label\nx,1\ny,0\n")
    source = _file(tmp_path / "a.parquet", ["no", "yes"], [0, 1, 1])
    train, trusted = read_pair(source, tmp_path / "ok.csv")
    assert train.classes == trusted.classes == ("no", "yes") and trusted.labels.tolist() == [1, 0]
    ours, theirs = read_pair(tmp_path / "ok.csv", source)
    assert ours.classes == ("no", "yes") and ours.labels.tolist() == [1, 0] and theirs.labels.tolist() == [0, 1, 1]
    assert "taken as positions" not in str(train.messages)
    [told] = [message for message in trusted.messages if "taken as positions" in message]
    assert told.startswith("ok.csv: ") and "a.parquet: 0 is 'no', 1 is 'yes'." in told
    (tmp_path / "ok.csv").write_text("text,label\nx,1\ny,2\n")  # 1 to 2, where positions are 0 to 1
    with pytest.raises(HyperkronError, match="share no label"):
        read_pair(source, tmp_path / "ok.csv")
    stars = _file(tmp_path / "stars.parquet", ["1", "2"], [0, 1, 1])
    (tmp_path / "ok.csv").write_text("text,label\nx,1\ny,2\n")
    assert read_pair(stars, tmp_path / "ok.csv")[1].labels.tolist() == [0, 1]  # these are names


def test_numbers_with_names_elsewhere_are_tested_and_exported(tmp_path: Path) -> None:
    trusted = _file(tmp_path / "a.parquet", ["cat", "dog"], [0, 1, 1])
    (source := tmp_path / "train.csv").write_text("text,label\nx,0\ny,1\nz,0\n")
    (tmp_path / "test.csv").write_text("text,label\nu,1\nv,0\n")
    train, _ = read_pair(source, trusted)
    assert read(tmp_path / "test.csv", like=train).labels.tolist() == [1, 0]
    export_rows(source, [0, 1, 2], out := tmp_path / "out.csv", [None, None, "dog"], classes=train.classes)
    assert out.read_text() == "text,label\nx,0\ny,1\nz,1\n"
    (tmp_path / "named.csv").write_text("text,label\nx,cat\ny,dog\n")
    with pytest.raises(HyperkronError, match="all labels are unknown"):  # nothing says which of the classes is 0
        read(tmp_path / "test.csv", like=read(tmp_path / "named.csv"))


def test_votes_have_the_names_of_their_column_or_of_the_trusted_rows(tmp_path: Path) -> None:
    trusted = _file(tmp_path / "ok.parquet", ["cat", "dog"], [0, 1], "other")
    (tmp_path / "a.csv").write_text("text,one,two\nx,0,1\ny,1,1\nz,0,0\n")
    (tmp_path / "b.csv").write_text("id,text,who,label\n1,x,p,0\n1,x,q,1\n2,y,p,1\n2,y,q,1\n3,z,p,0\n3,z,q,0\n")
    for name, columns, asked in (
        ("a", ("one", "two"), {"annotators": ["one", "two"]}),
        ("b", ("label",), {"annotator": "who", "id": "id"}),
    ):
        names = datasets.ClassLabel(names=["dog", "cat"])
        table = datasets.Dataset.from_csv(str(tmp_path / f"{name}.csv"), cache_dir=str(tmp_path / "cache"))
        for column in columns:
            table = table.cast_column(column, names)
        table.to_parquet(own := tmp_path / f"{name}.parquet")
        for source, flipped in ((tmp_path / f"{name}.csv", False), (own, True)):
            train, _ = read_pair(source, trusted, **asked)  # type: ignore[arg-type]
            assert sorted(train.classes) == ["cat", "dog"] and train.votes is not None
            said = [[train.classes[k] == "dog" for k in row] for row in train.votes]
            assert said == [[k != flipped for k in row] for row in ([False, True], [True, True], [False, False])]


def test_images_are_decoded_within_our_limits(hub: Callable[[Any], list[Any]]) -> None:
    Image.new("L", (3, 2), 9).save(buffer := io.BytesIO(), "PNG")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    pictures = [{"bytes": buffer.getvalue(), "path": None}, {"bytes": b"broken", "path": None}] * 2
    hub({"train": datasets.Dataset.from_dict({"image": pictures, "label": [0, 1, 1, 0]}, features=features)})
    found = read("hf:pictures")
    assert found.inputs.shape == (2, 1, 2, 3) and found.rows.tolist() == [0, 2] and found.labels.tolist() == [0, 1]


class Local:
    """A dataset in a folder, whose rows name pictures by path or hold them as bytes; a secret lies beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.secret = folder / "dataset", folder / "secret.png"
        self.folder.mkdir()
        Image.new("L", (3, 2), 9).save(self.secret)
        Image.new("L", (3, 2), 5).save(self.folder / "own.png")
        (self.folder / "link.png").symlink_to(self.secret)
        (self.folder / "up").symlink_to(folder)
        Image.new("L", (3, 2), 7).save(buffer := io.BytesIO(), "PNG")
        self.bytes = buffer.getvalue()

    def write(self, path: str) -> str:
        """The source, with one row that names a path among three that hold bytes."""
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
        rows = [{"bytes": None, "path": path}] + 3 * [{"bytes": self.bytes, "path": "/etc/passwd"}]
        table = pa.table({"image": pa.array(rows, features["image"].pa_type), "label": [0, 1, 0, 1]})
        about = {"huggingface": json.dumps({"info": {"features": features.to_dict()}})}
        pq.write_table(table.replace_schema_metadata(about), self.folder / "train.parquet")
        return f"hf:{self.folder}"


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Local:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return Local(tmp_path)


@pytest.mark.parametrize(
    "path", ["{secret}", "../secret.png", "link.png", "up/secret.png", "{folder}/../secret.png", "/proc/self/fd/0"]
)
def test_pictures_outside_the_dataset_are_refused(local: Local, path: str) -> None:
    name = path.format(secret=local.secret, folder=local.folder)
    with pytest.raises(HyperkronError, match=r"image='image': .* leads out of the folder .*dataset"):
        read(local.write(name))


@pytest.mark.parametrize("path", ["own.png", "{folder}/own.png", "./own.png"])
def test_pictures_inside_the_dataset_are_read(local: Local, path: str) -> None:
    found = read(local.write(path.format(folder=local.folder)))
    assert found.inputs[:, 0, 0, 0].tolist() == [5, 7, 7, 7]


def test_a_dataset_of_the_hub_may_name_what_was_fetched_with_it(
    hub: Callable[[Any], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (blobs := tmp_path / "datasets--org--photos" / "blobs").mkdir(parents=True)
    (snapshot := tmp_path / "datasets--org--photos" / "snapshots" / "main").mkdir(parents=True)
    Image.new("L", (3, 2), 5).save(blobs / "0123", "PNG")
    (snapshot / "a.png").symlink_to("../../blobs/0123")
    Image.new("L", (3, 2), 9).save(tmp_path / "private.png")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})

    def rows(path: Path) -> Any:
        pictures = [{"bytes": None, "path": str(path)}] * 2
        return datasets.Dataset.from_dict({"image": pictures, "label": [0, 1]}, features=features)

    hub({"train": rows(snapshot / "a.png"), "test": rows(tmp_path / "private.png")})
    assert read("hf:org/photos").inputs[:, 0, 0, 0].tolist() == [5, 5]
    with pytest.raises(HyperkronError, match=r"leads out of the folder .*datasets--org--photos"):
        read("hf:org/photos:test")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (ConnectionError("Couldn't reach 'x' on the Hub (LocalEntryNotFoundError)"), "save the dataset as Parquet"),
        (ValueError("Config name is missing. Please pick one among: ['a', 'b']"), "Name a configuration"),
        (ValueError("Unknown split \"nope\". Should be one of ['train']."), "Name a split"),
        (RuntimeError("whatever"), "Check the name"),
    ],
)
def test_errors_name_the_remedy(hub: Callable[[Any], list[Any]], error: Exception, remedy: str) -> None:
    hub(error)
    with pytest.raises(HyperkronError, match=f"source='hf:x' could not be loaded .*{remedy}"):
        read("hf:x")


@pytest.mark.parametrize("source", ["hf:", "hf:a b", "hf:@c"])
def test_names_that_are_none(source: str) -> None:
    with pytest.raises(HyperkronError, match="must be hf:NAME"):
        read(source)
