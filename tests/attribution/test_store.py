"""Scores on disk: interruptions, folders of other calls, damage, and two writers."""

import errno
import json
import os

import pytest
import torch
from torch import nn

import hyperkron as hk
from hyperkron.attribution import inner_products
from hyperkron.attribution.store import Store


def loss(model, batch):
    return hk.losses.cross_entropy(model(batch[0]), batch[1]) + hk.losses.l2(model, 1e-2)


def made(rows=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(rows, 5), torch.randint(0, 3, (rows,))
    return model, (x, y), (x[:4], y[:4])


def test_scores_on_disk_are_those_in_memory(tmp_path):
    model, train, queries = made()
    memory = hk.attribute(loss, model, train, queries, batch_size=7).scores
    disk = hk.attribute(loss, model, train, queries, batch_size=7, out=tmp_path)
    assert torch.equal(disk.scores, memory)
    assert disk.helpful(1, 3) == hk.Attribution(memory).helpful(1, 3)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupted_call_continues_to_the_same_bits(tmp_path, monkeypatch, after):
    model, train, queries = made()
    method = hk.ekfac(1e-3)  # draws at random: a second measurement would give other factors
    whole = hk.attribute(loss, model, train, queries, method=method, batch_size=7, out=tmp_path / "a").scores.clone()
    real, calls = inner_products.LayerProducts.__call__, []

    def dies(self, batch, vectors, count):
        if len(calls) == after:
            raise Killed
        calls.append(1)
        return real(self, batch, vectors, count)

    monkeypatch.setattr(inner_products.LayerProducts, "__call__", dies)
    with pytest.raises(Killed):
        hk.attribute(loss, model, train, queries, method=method, batch_size=7, out=tmp_path / "b")
    done = []
    monkeypatch.setattr(inner_products.LayerProducts, "__call__", lambda *a: done.append(1) or real(*a))
    found = hk.attribute(loss, model, train, queries, method=method, batch_size=7, out=tmp_path / "b")
    assert torch.equal(found.scores, whole)
    assert len(done) == 6 - after


def test_several_models_are_averaged_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("hyperkron.attribution.store.BLOCK", 40)
    first, train, queries = made()
    models, method = [first, nn.Sequential(nn.Linear(5, 3))], hk.kfac(1e-2, fisher="type-2")
    memory = hk.attribute(loss, models, train, queries, method=method).scores
    for _ in range(2):  # the second call finds all done
        disk = hk.attribute(loss, models, train, queries, method=method, out=tmp_path)
        assert torch.equal(disk.scores, memory)
    assert disk.stats["models"] == 2


def moved(model):
    with torch.no_grad():
        model[0].weight.add_(1e-3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda given: moved(given["model"]), "weights.0.weight"),
        (lambda given: given["train"][0][17].add_(1.0), "train.0"),
        (lambda given: given["queries"][1].zero_(), "queries.1"),
        (lambda given: given.update(query_loss=lambda m, b: m(b[0]).mean()), "query_loss"),
        (lambda given: given.update(curvature_data=given["queries"]), "curvature_data"),
        (lambda given: given.update(method=hk.ekfac(1e-2)), "method.curvature.damping"),
        (lambda given: given.update(batch_size=5), "batch_size"),
    ],
)
def test_the_folder_of_another_call_is_refused(tmp_path, change, named):
    model, train, queries = made()
    given = {"model": model, "train": train, "queries": queries, "method": hk.ekfac(1e-3), "batch_size": 7}
    hk.attribute(loss, **given, out=tmp_path)
    hk.attribute(loss, **given, out=tmp_path)  # the same call finds its own
    change(given)
    with pytest.raises(hk.HyperkronError, match=f"another call:(.|\n)*call {named}"):
        hk.attribute(loss, **given, out=tmp_path)


@pytest.mark.parametrize("when", ["before the vectors", "after the vectors"])
def test_an_early_kill_does_not_hide_whose_folder_it_is(tmp_path, monkeypatch, when):
    model, train, queries = made()
    keep = Store.keep

    def dies(self, *given):
        if when == "after the vectors":
            keep(self, *given)
        raise Killed

    monkeypatch.setattr(Store, "keep", dies)
    with pytest.raises(Killed):
        hk.attribute(loss, model, train, queries, out=tmp_path)
    monkeypatch.setattr(Store, "keep", keep)
    moved(model)
    with pytest.raises(hk.HyperkronError, match="another call"):
        hk.attribute(loss, model, train, queries, out=tmp_path)


def test_a_full_disk_is_told_before_scores_are_written(tmp_path, monkeypatch):
    """Writing to a memory map would end the process without a word. A file without its room gets it when it goes on."""
    if not hasattr(os, "posix_fallocate"):
        pytest.skip("room cannot be reserved here")
    store, reserve = Store(tmp_path / "a", (100, 3000), {}), os.posix_fallocate

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        with pytest.raises(hk.HyperkronError, match=r"scores.npy' cannot be written: the disk is full"), store:
            pass
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    with store:
        found = (tmp_path / "a" / "scores.npy").stat()
        assert found.st_blocks * 512 >= found.st_size > 100 * 3000 * 4


def test_a_second_writer_is_refused(tmp_path):
    model, train, queries = made()
    with Store(tmp_path, (4, 40), {}), pytest.raises(hk.HyperkronError, match="is being written by process"):
        hk.attribute(loss, model, train, queries, out=tmp_path)


def spoil_progress(folder):
    (folder / "progress.json").write_text("{")


def spoil_vectors(folder):
    path = folder / "vectors.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def spoil_scores(folder):
    (folder / "scores.npy").write_bytes(b"nothing")


def shorten_scores(folder):
    import numpy

    numpy.save(folder / "scores.npy", numpy.zeros((4, 3), numpy.float32))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_progress, "is damaged .progress.json is not JSON"),
        (spoil_vectors, "is damaged .vectors.safetensors has another SHA-256"),
        (lambda folder: (folder / "vectors.safetensors").unlink(), "is damaged .vectors.safetensors cannot be read"),
        (spoil_scores, "scores.npy is damaged"),
        (shorten_scores, r"instead of float32 \[4, 40\]"),
        (lambda folder: (folder / "scores.npy").unlink(), "scores.npy is missing"),
        (lambda folder: (folder / "progress.json").unlink(), "vectors.safetensors but no progress.json"),
    ],
)
def test_a_damaged_folder_is_refused_with_a_remedy(tmp_path, spoil, message):
    model, train, queries = made()
    hk.attribute(loss, model, train, queries, out=tmp_path)
    kept = json.loads((tmp_path / "progress.json").read_text())
    (tmp_path / "progress.json").write_text(json.dumps(kept | {"done": 20}))
    spoil(tmp_path)
    with pytest.raises(hk.HyperkronError, match=f"{message}(.|\n)*choose another"):
        hk.attribute(loss, model, train, queries, out=tmp_path)
