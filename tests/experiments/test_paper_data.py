"""Data of the paper's recipes: where they are found, and how images, texts and packed encoders are read."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from experiments.paper import datasets, texts
from hyperkron.solution import HyperkronError


def test_data_are_found_by_argument_variable_and_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for root in ("given", "named", "data"):
        (tmp_path / root / "mnist").mkdir(parents=True)
    monkeypatch.setenv("HYPERKRON_DATA", str(tmp_path / "named"))
    assert datasets.find("mnist", "given") == Path("given/mnist")
    assert datasets.find("mnist") == tmp_path / "named" / "mnist"
    monkeypatch.delenv("HYPERKRON_DATA")
    assert datasets.find("mnist") == Path("data/mnist")
    with pytest.raises(HyperkronError, match=r"'cifar10' were not found \(looked at data"):
        datasets.find("cifar10")


def _idx(shape: tuple[int, ...], elements: bytes) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + elements


def _write_mnist(folder: Path, labels: bytes = b"\x07\x02") -> None:
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(_idx((2, 2, 2), bytes([0, 255, 51, 0, 0, 0, 0, 102])))
        packed = gzip.compress(_idx((len(labels),), labels))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(packed)


def test_mnist_compressed_or_not(tmp_path: Path) -> None:
    _write_mnist(tmp_path)
    data = datasets.read_mnist(tmp_path)
    torch.testing.assert_close(data.train[0], torch.tensor([[0, 1, 0.2, 0], [0, 0, 0, 0.4]]))
    assert data.test[1].tolist() == [7, 2]
    assert data.train[1].dtype is torch.int64


def test_mnist_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(HyperkronError, match="has neither train-images"):
        datasets.read_mnist(tmp_path)
    _write_mnist(tmp_path, b"\x01")
    with pytest.raises(HyperkronError, match="2 images but 1 labels"):
        datasets.read_mnist(tmp_path)


def test_cifar_sheets_are_cut_into_tiles_in_order(tmp_path: Path) -> None:
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    folder = tmp_path / "cifar10"
    folder.mkdir()
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (6, 10_000, 2, 2, 3), dtype=np.uint8)  # sheet, tile, row, column, channel
    for name, tiles in zip([*(f"train_{i}" for i in range(5)), "test"], pixels, strict=True):
        sheet = tiles.reshape(100, 100, 2, 2, 3).transpose(0, 2, 1, 3, 4).reshape(200, 200, 3)
        image.fromarray(sheet).save(folder / f"{name}.webp", lossless=True, exact=True, quality=0, method=0)
    np.savez(folder / "labels.npz", train=np.arange(50_000) % 10, test=np.arange(10_000) % 7)
    found = datasets.cifar10(tmp_path)
    expected = torch.from_numpy(pixels).permute(0, 1, 4, 2, 3).float() / 255
    torch.testing.assert_close(found.train[0], expected[:5].flatten(0, 1))
    torch.testing.assert_close(found.test[0], expected[5])
    assert found.train[1].tolist() == [i % 10 for i in range(50_000)]
    assert found.test[1].tolist() == [i % 7 for i in range(10_000)]


def test_an_encoder_packed_in_int8_is_unpacked_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    matrix, bias = torch.randn(6, 8), torch.randn(6)
    scale = (matrix.abs().amax(1, keepdim=True) / 127).half()
    whole = (matrix / scale.float()).round().to(torch.int8)
    save_file({"m|q": whole, "m|s": scale}, tmp_path / "mpnet_int8_0.safetensors")
    save_file({"b": bias.half()}, tmp_path / "mpnet_int8_1.safetensors")
    texts.unpack(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(found["m"].float(), matrix, rtol=0, atol=float(scale.max()))
    torch.testing.assert_close(found["b"], bias.half())
    folder = tmp_path / "data" / "mpnet"
    folder.mkdir(parents=True)
    with pytest.raises(HyperkronError, match="none of the encoders mpnet, minilm"):
        texts.available(("mpnet", "minilm"), tmp_path / "data")
    (folder / "model.safetensors").touch()
    assert texts.available(("mpnet", "minilm"), tmp_path / "data") == "mpnet"


def test_wrench_is_read_with_its_majority_vote(tmp_path: Path) -> None:
    folder = tmp_path / "wrench" / "toy"
    folder.mkdir(parents=True)
    (folder / "label.json").write_text(json.dumps({"0": "a", "1": "b"}))
    rows = [("x", 1, [1, 1, 0]), ("y", 0, [-1, -1, -1]), ("z", 1, [0, -1, -1])]
    lines = [json.dumps({"text": t, "label": y, "weak_labels": w}) for t, y, w in rows]
    for part in ("train", "valid", "test"):
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    found = texts.corpus("toy", tmp_path)
    assert found.train == ["x", "y", "z"] and found.classes == 2
    assert found.weak.tolist() == [1, 0, 0] and found.gold[0].tolist() == [1, 0, 1]


def test_cifar_is_read_from_the_sheets_there_are(tmp_path: Path) -> None:
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    folder = tmp_path / "cifar10"
    folder.mkdir()
    np.savez(folder / "labels.npz", train=np.arange(50_000) // 5_000, test=np.zeros(10_000, dtype=int))
    image.fromarray(np.full((100, 100, 3), 200, dtype="uint8")).save(folder / "test.webp", lossless=True)
    with pytest.raises(HyperkronError, match=r"holds none of train_0\.webp"):
        datasets.cifar10(tmp_path)
    for name, shade in (("train_1", 50), ("train_3", 100)):
        image.fromarray(np.full((100, 100, 3), shade, dtype="uint8")).save(folder / f"{name}.webp", lossless=True)
    found = datasets.cifar10(tmp_path)
    assert found.train[1].unique().tolist() == [2, 3, 6, 7] and len(found.train[1]) == 20_000
    assert [round(float(found.train[0][i].mean() * 255)) for i in (0, 9_999, 10_000, -1)] == [50, 50, 100, 100]
