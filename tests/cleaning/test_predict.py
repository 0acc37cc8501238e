"""A finished run is loaded again and answers about new rows, in Python and on the command line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hyperkron as hk
from blobs import Blobs, blobs, quicken
from hyperkron.cleaning import CleanConfig
from hyperkron.cleaning.data import read_pair
from hyperkron.cleaning.folder import RunFolder
from hyperkron.cleaning.models import HASHED
from hyperkron.cli import main
from hyperkron.solution import HyperkronError, HyperkronWarning

CONFIG = CleanConfig(epochs=1, compare=())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture(scope="module")
def data() -> Blobs:
    return blobs(rows=90)


def frame(data: Blobs) -> Any:
    pandas = pytest.importorskip("pandas")
    made = pandas.DataFrame({"across": data.x[:, 0], "up": data.x[:, 1]})
    made["side"] = np.where(data.x[:, 0] > 3, "right", "left")
    made["customer"] = [f"C-{i}" for i in range(len(made))]
    made["label"] = ["ABC"[k] for k in data.noisy.tolist()]
    return made


@pytest.fixture(scope="module")
def table(data: Blobs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, hk.CleanResult]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        rows = frame(data)
        rows[:70].to_csv(folder / "train.csv", index=False)
        rows["label"] = ["ABC"[k] for k in data.true.tolist()]
        rows[70:].to_csv(folder / "trusted.csv", index=False)
        out = folder / "run"
        return folder, hk.clean(folder / "train.csv", folder / "trusted.csv", out=out, config=CONFIG, id="customer")


def test_a_data_frame_is_answered_under_its_index(table: tuple[Path, hk.CleanResult], data: Blobs) -> None:
    folder, result = table
    asked = frame(data)[["side", "up", "across"]].iloc[::-1]  # in another order, without a label
    found = result.predict(asked)
    assert list(found.columns) == ["A", "B", "C"] and found.index.equals(asked.index)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    again = hk.load(folder / "run")
    np.testing.assert_array_equal(again.predict(asked), found)
    columns = {name: asked[name].tolist() for name in asked}
    np.testing.assert_array_equal(again.predict(columns), found)
    asked.to_csv(folder / "new.csv", index=False)
    np.testing.assert_allclose(again.predict(folder / "new.csv"), found, atol=1e-6)


def test_what_is_loaded_is_what_came_out(table: tuple[Path, hk.CleanResult]) -> None:
    folder, result = table
    again = hk.load(folder / "run")
    assert (again.chosen, again.verdict, again.classes) == (result.chosen, result.verdict, result.classes)
    assert torch.equal(again.suspects, result.suspects) and torch.equal(again.suggested, result.suggested)
    torch.testing.assert_close(again.error_probability, result.error_probability, atol=1e-6, rtol=0)
    assert list(again.status) == list(result.status) and again.candidates == result.candidates


def test_ids_are_in_every_file_and_not_learnt_from(table: tuple[Path, hk.CleanResult]) -> None:
    folder, _ = table
    lines = list(csv.DictReader((folder / "run" / "rows.csv").read_text().splitlines()))
    assert [line["customer"] for line in lines] == [f"C-{line['row']}" for line in lines]
    suspects = [json.loads(line) for line in (folder / "run" / "suspects.jsonl").read_text().splitlines()]
    assert suspects and all(s["id"] == {"customer": f"C-{s['row']}"} for s in suspects)
    assert "customer" not in json.loads((folder / "run" / "inputs.json").read_text())["roles"]["features"]


def test_a_missing_id_is_empty_in_every_file(table: tuple[Path, hk.CleanResult], tmp_path: Path) -> None:
    """None and NaN are no ids; the text NA is one, and one with a return stays in its cell."""
    ids, texts = [None, float("nan"), "NA", 7, "a\rb"], ["", "", "NA", "7", "a\rb"]
    new = [{"customer": id, "across": i, "up": i, "side": "left", "label": "AB"[i % 2]} for i, id in enumerate(ids)]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new))
    for out in ("p.csv", "p.jsonl"):
        assert main(["predict", str(table[0] / "run"), str(tmp_path / "new.jsonl"), "-o", str(tmp_path / out)]) == 0
    lines = (tmp_path / "p.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"]["customer"] for line in lines] == [None, None, "NA", 7, "a\rb"]
    scores = {"error_probability": torch.ones(5), "weight": torch.zeros(5), "history": torch.ones(5, 1)}
    scores |= {"suspect": torch.ones(5, dtype=torch.bool), "suggested": torch.zeros(5, dtype=torch.long)}
    folder = RunFolder(tmp_path / "run", new=True)
    trusted = {"up": [8, 9], "label": ["A", "B"]}
    folder.write_rows(read_pair(tmp_path / "new.jsonl", trusted, id="customer", features=["up"])[0], scores)
    for file in (tmp_path / "p.csv", tmp_path / "run" / "rows.csv"):
        found = csv.DictReader(io.StringIO(file.read_bytes().decode(), newline=""), strict=True)
        assert [line["customer"] for line in found] == texts
    suspects = [json.loads(line) for line in (tmp_path / "run" / "suspects.jsonl").read_text().splitlines()]
    assert [line["id"]["customer"] for line in suspects] == texts


def test_columns_that_are_missing_or_odd_are_named(table: tuple[Path, hk.CleanResult], data: Blobs) -> None:
    _, result = table
    rows = frame(data)
    with pytest.raises(HyperkronError, match=r"lacks the columns 'across', 'up' that the model needs. Columns: 'side'"):
        result.predict(rows[["side"]])
    with pytest.raises(HyperkronError, match=r"lacks the column 'up' that the model needs. Did you mean 'Up'\?"):
        result.predict(rows.rename(columns={"up": "Up"}))
    odd = rows.assign(up=["far", *rows["up"][1:]])
    with pytest.warns(HyperkronWarning, match="column 'up' holds 'far', taken as missing: numbers are expected"):
        found = result.predict(odd)
    assert np.isfinite(found.to_numpy()).all()
    with pytest.raises(HyperkronError, match=r"rows='nowhere.csv' does not exist"):
        result.predict("nowhere.csv")


@pytest.mark.long
def test_texts_with_hashed_ngrams(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    texts = [f"{'good nice fine' if i % 2 else 'bad poor awful'} thing {i}" for i in range(60)]
    labels = [i % 2 for i in range(60)]
    config = CleanConfig(epochs=1, compare=(), encoder=HASHED)
    result = hk.clean((texts[:40], labels[:40]), (texts[40:], labels[40:]), out=tmp_path / "run", config=config)
    asked = ["good nice fine thing", "bad poor awful and new"]
    found = result.predict(asked)
    assert found[0, 1] > found[1, 1]
    again = hk.load(tmp_path / "run")
    torch.testing.assert_close(again.predict(asked), found, atol=1e-5, rtol=1e-4)
    np.testing.assert_allclose(again.predict(pandas.DataFrame({"text": asked})), found, atol=1e-5)
    with pytest.raises(HyperkronError, match=r"rows\[1\] is a int, 3; give texts only"):
        again.predict(["a", 3])


@pytest.mark.long
def test_pictures_and_arrays(tmp_path: Path, data: Blobs) -> None:
    pictures = torch.randint(0, 255, (40, 1, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    labels = [i % 2 for i in range(40)]
    result = hk.clean((pictures[:30], labels[:30]), (pictures[30:], labels[30:]), out=tmp_path / "p", config=CONFIG)
    assert torch.equal(hk.load(tmp_path / "p").predict(pictures), result.predict(pictures.numpy()))
    np.savez(tmp_path / "new.npz", x=pictures.numpy())
    assert torch.equal(result.predict(tmp_path / "new.npz"), result.predict(pictures))
    with pytest.raises(HyperkronError, match=r"images of shape \(1, 7, 8\) but the training rows of shape \(1, 8, 8\)"):
        result.predict(pictures[:, :, :7])
    x = torch.cat([data.x, torch.ones(len(data.x), 1)], 1)  # a column that never changes is left out in training
    plain = hk.clean((x, data.noisy), (x[:9] + 0.01, data.true[:9]), out=tmp_path / "x", config=CONFIG)
    assert torch.equal(plain.predict(x), hk.load(tmp_path / "x").predict(x.numpy()))


def test_a_folder_of_pictures_needs_no_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for name in ("train/a", "train/b", "trusted/a", "trusted/b", "new"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(8):
            image.fromarray(random.integers(0, 255, (8, 8), dtype=np.uint8)).save(tmp_path / name / f"{i}.png")
    (tmp_path / "new" / "3.png").write_bytes(b"not a picture")
    result = hk.clean(tmp_path / "train", tmp_path / "trusted", out=tmp_path / "run", config=CONFIG)
    with pytest.warns(HyperkronWarning, match="cannot be read"):
        found = hk.load(tmp_path / "run").predict(tmp_path / "new")
    assert found.shape == (8, 2) and found.isnan().any(1).tolist() == [i == 3 for i in range(8)]
    assert result.classes == ("a", "b")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "new"), "-o", str(tmp_path / "p.csv")]) == 0
    assert "7 rows predicted; 1 without an answer." in capsys.readouterr().err


def other_network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.long
def test_a_network_of_ones_own_is_given_again(tmp_path: Path, data: Blobs) -> None:
    result = hk.clean(data.train, data.trusted, out=tmp_path / "run", model=other_network, config=CONFIG)
    with pytest.raises(HyperkronError, match="your own model"):
        hk.load(tmp_path / "run")
    again = hk.load(tmp_path / "run", model=other_network)
    assert torch.equal(again.predict(data.x), result.predict(data.x))


def test_damaged_files_are_named(tmp_path: Path, data: Blobs) -> None:
    run = tmp_path / "run"
    hk.clean(data.train, data.trusted, out=run, config=CONFIG)
    whole = (run / "inputs.safetensors").read_bytes()
    (run / "inputs.safetensors").write_bytes(whole[:-1] + b"x")
    with pytest.raises(HyperkronError, match=r"inputs.safetensors is damaged.*; restore the file or run"):
        hk.load(run)
    (run / "inputs.safetensors").write_bytes(whole)
    (run / "model.safetensors").write_bytes(b"")
    with pytest.raises(HyperkronError, match=r"model.safetensors is not the network of this run"):
        hk.load(run)
    (run / "inputs.json").unlink()
    with pytest.raises(HyperkronError, match=r"has no inputs.json: .*hyperkron resume"):
        hk.load(run)


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_writes_csv_and_json_lines(
    table: tuple[Path, hk.CleanResult], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, result = table
    new, run = str(folder / "train.csv"), str(folder / "run")
    assert main(["predict", run, new, "-o", str(tmp_path / "p.csv")]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(tmp_path / "p.csv") and "70 rows predicted." in told.err
    lines = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    expected = result.predict(folder / "train.csv")
    assert list(lines[0]) == ["row", "customer", "label", "probability", "p(A)", "p(B)", "p(C)"] and len(lines) == 70
    assert [line["label"] for line in lines] == ["ABC"[k] for k in expected.argmax(1)]
    assert [float(line["p(B)"]) for line in lines] == pytest.approx(expected[:, 1].tolist(), abs=1e-6)
    assert main(["predict", run, new, "-o", str(tmp_path / "p.csv")]) == 1
    assert "exists already; choose another name, or add --overwrite" in capsys.readouterr().err
    assert main(["predict", run, new, "-o", str(tmp_path / "p.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 70
    first = json.loads((tmp_path / "p.jsonl").read_text().splitlines()[0])
    assert first["id"] == {"customer": "C-0"} and set(first["probabilities"]) == set("ABC")
    assert main(["predict", run, new]) == 0
    assert capsys.readouterr().out == (tmp_path / "p.csv").read_text()
    assert main(["predict", run, new, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predictions"][0] == first and len(found["predictions"]) == found["rows"] == 70
    assert main(["predict", run, str(folder / "train.csv"), "--id", "label", "customer"]) == 0
    cells = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert cells[0] == ["row", "id label", "customer", "label", "probability", "p(A)", "p(B)", "p(C)"]
    given = [line["label"] for line in csv.DictReader((folder / "train.csv").read_text().splitlines())]
    assert [line[1] for line in cells[1:]] == given  # what the file says, beside what is predicted
    (tmp_path / "new.csv").write_bytes(before := (folder / "train.csv").read_bytes())
    assert main(["predict", run, str(tmp_path / "new.csv"), "-o", str(tmp_path / "new.csv"), "--overwrite"]) == 1
    assert "is NEW itself; choose another name" in capsys.readouterr().err
    assert (tmp_path / "new.csv").read_bytes() == before


def test_the_command_says_what_is_missing(
    table: tuple[Path, hk.CleanResult], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, _ = table
    (tmp_path / "new.csv").write_text("across,Up,side\n1,2,left\n")
    for arguments, said in (
        ([str(tmp_path / "new.csv")], "new.csv lacks the column 'up' that the model needs. Did you mean 'Up'?"),
        ([str(tmp_path / "none.csv")], "NEW='"),
        ([str(folder / "train.csv"), "--id", "client"], "lacks the column 'client' named as id."),
        ([str(folder / "train.csv"), "-o", "p.xls"], "--out='p.xls' must end in .csv or .jsonl"),
    ):
        assert main(["predict", str(folder / "run"), *arguments]) in (1, 2)
        told = capsys.readouterr().err
        assert said in told and "Traceback" not in told
