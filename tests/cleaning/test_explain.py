"""Predictions explained by training rows: in Python, as a page, and as a command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobs import blobs, quicken, write_csv
from hyperkron.attribution import Attribution
from hyperkron.cleaning import CleanConfig, alternatives, clean, explain
from hyperkron.cleaning.api import reopened
from hyperkron.cleaning.config import FOREST, NETWORK
from hyperkron.cleaning.explain import Explained, Explanation, Witness
from hyperkron.cleaning.report import write_explanation
from hyperkron.cli.app import main
from hyperkron.solution import HyperkronError, Status


def quick_network(patch: pytest.MonkeyPatch, least: int = 24) -> None:
    quicken(patch, least)
    patch.setattr(alternatives, "chosen_learner", lambda *_: NETWORK)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_network(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, data = tmp_path_factory.mktemp("explain"), blobs(rows=120)
    for name in ("train", "trusted", "test"):
        write_csv(folder / f"{name}.csv", getattr(data, name))
    with pytest.MonkeyPatch.context() as patch:
        quick_network(patch, least=200)
        config = CleanConfig(compare=())
        clean(folder / "train.csv", folder / "trusted.csv", out=folder / "run", config=config)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_queries_may_be_a_folder_of_images_without_classes(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    for part, count in (("train/a", 12), ("train/b", 12), ("trusted/a", 6), ("trusted/b", 6), ("new", 3)):
        (tmp_path / part).mkdir(parents=True)
        for i in range(count):
            pixels = random.integers(0, 120, (8, 8)) + 120 * part.endswith("b")
            image.fromarray(pixels.astype(np.uint8)).save(tmp_path / part / f"{i}.png")
    config = CleanConfig(compare=(), epochs=1)
    clean(tmp_path / "train", tmp_path / "trusted", out=tmp_path / "run", config=config)
    assert len(explain(tmp_path / "run", tmp_path / "new").queries) == 3


@pytest.fixture(scope="module")
def labelled(folder: Path) -> Explanation:
    """The explanation of the test rows, which has changed nothing."""
    before = files_of(folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        quick_network(patch)
        found = explain(folder / "run", folder / "test.csv", count=3)
    assert files_of(folder / "run") == before
    return found


def test_rows_near_a_query_speak_for_it_and_nothing_is_changed(labelled: Explanation) -> None:
    found = labelled
    assert len(found.queries) == 60 and found.attribution.scores.shape == (60, 144)
    strongest = [query.helpful[0] for query in found.queries]
    same = sum(x.learnt == query.prediction for x, query in zip(strongest, found.queries, strict=True))
    assert same > 50
    for query in found.queries:
        assert all(x.score > 0 for x in query.helpful) and all(x.score < 0 for x in query.harmful)
        assert sorted(query.helpful, key=lambda x: -x.score) == query.helpful and len(query.helpful) <= 3
    trusted = {x.row for query in found.queries for x in query.helpful if x.trusted}
    assert trusted and max(trusted) < 24


def test_a_query_needs_no_label(folder: Path, labelled: Explanation, tmp_path: Path) -> None:
    lines = (folder / "test.csv").read_text().splitlines()
    place = lines[0].split(",").index("label")
    bare = tmp_path / "bare.csv"
    bare.write_text("\n".join(",".join(c for i, c in enumerate(x.split(",")) if i != place) for x in lines))
    found = explain(folder / "run", bare, count=3)
    assert torch.equal(found.attribution.scores, labelled.attribution.scores)
    assert [replace(query, label=None) for query in labelled.queries] == found.queries
    assert any("without their labels" in message and "'label'" in message for message in found.messages)
    page = write_explanation(found, tmp_path / "page.html").read_text("utf-8")
    assert "labelled <bdi>" not in page and "None" not in page
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(HyperkronError, match=r"other.csv lacks the column.* that the model needs"):
        explain(folder / "run", other)


def test_every_query_is_explained_also_without_a_label_or_with_a_strange_one(folder: Path, tmp_path: Path) -> None:
    lines = [line.split(",") for line in (folder / "test.csv").read_text().splitlines()[:5]]
    place = lines[0].index("label")
    given = [line[place] for line in lines[1:]]
    lines[2][place], lines[3][place] = "", "strange"
    (tmp_path / "some.csv").write_text("\n".join(map(",".join, lines)))
    found = explain(folder / "run", tmp_path / "some.csv", count=1)
    assert [query.row for query in found.queries] == [0, 1, 2, 3]
    assert [query.label for query in found.queries] == [given[0], None, None, given[3]]
    assert found.messages == [
        "Queries shown without a label (none is given, training lacks it, or the row has no text or feature): "
        "rows 1, 2."
    ]


@pytest.mark.long
def test_a_run_with_annotators_is_explained(tmp_path: Path) -> None:
    data = blobs(rows=60)
    write_csv(tmp_path / "trusted.csv", data.trusted)
    write_csv(tmp_path / "train.csv", data.train)
    lines = [line.split(",") for line in (tmp_path / "train.csv").read_text().splitlines()]
    place = lines[0].index("label")
    twice = [[*line[:place], *line[place + 1 :], *([line[place]] * 2)] for line in lines]
    twice[0][-2:] = ["ann", "bob"]
    (tmp_path / "train.csv").write_text("\n".join(map(",".join, twice)))
    options: dict[str, Any] = {"annotators": ["ann", "bob"], "out": tmp_path / "run"}
    clean(tmp_path / "train.csv", tmp_path / "trusted.csv", config=CleanConfig(compare=()), **options)
    found = explain(tmp_path / "run", tmp_path / "trusted.csv", count=1)
    assert len(found.queries) == len(data.trusted[1]) and all(query.label for query in found.queries)
    assert found.messages == ["trusted.csv: columns that the model does not use: 'label'."]


def test_a_page_shows_everything_and_runs_nothing(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    nothing: dict[str, Any] = {"image": None, "features": None}
    witness = Witness(7, bad, "b", True, 0.5, {"text": bad, **nothing})
    against = Witness(8, "b", "b", False, -0.25, {"text": None, "image": None, "features": {bad: 1.5}})
    query = Explained(3, "b", bad, 0.75, {"text": bad, **nothing}, [witness], [against, against])
    alone = Explained(4, "b", "b", 0.5, {"text": "x" * 5000, **nothing}, [], [])
    stats = {"status": Status.MORE_DAMPING}
    found = Explanation(bad, "text", [query, alone], [bad], Attribution(torch.zeros(2, 9), stats))
    page = write_explanation(found, tmp_path / "page.html").read_text("utf-8")
    assert "<script" not in page and page.count("&lt;script&gt;") >= 7
    assert "script-src &#39;none&#39;" in page and "default-src &#39;none&#39;" in page
    assert (
        "trusted row 7" in page
        and "learnt as <bdi>b</bdi>" in page
        and "no row" in page
        and "The scores may be inexact" in page
    )
    assert "x" * 1000 + "…" in page and "x" * 1001 not in page


def test_the_command_writes_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(folder / "run")
    target = folder / "page.html"
    assert main(["attribute", run, "--query", str(folder / "test.csv"), "--count", "2", "-o", str(target)]) == 0
    assert capsys.readouterr().out.strip() == str(target) and target.read_text().count("<section") == 60
    assert main(["attribute", run, "--query", str(folder / "test.csv"), "--json", "-o", str(target)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["page"] == str(target) and len(told["queries"]) == 60
    assert set(told["queries"][0]) >= {"prediction", "probability", "helpful", "harmful"}


def _unfinished(folder: Path) -> Path:
    (folder / "begun").mkdir(exist_ok=True)
    (folder / "begun" / "config.json").write_text("{}")
    return folder / "begun"


@pytest.mark.parametrize(
    ("place", "more", "code", "message"),
    [
        (lambda f: f / "nothing", [], 1, "is not a folder; name one that `hyperkron clean` wrote"),
        (_unfinished, [], 1, "has not finished; continue it with `hyperkron resume"),
        (lambda f: f / "run", ["--count", "0"], 2, "--count=0 must be at least 1"),
        (lambda f: f / "run", ["--query", "nowhere.csv"], 1, "--query='nowhere.csv' does not exist"),
        (lambda f: f / "run", ["--out", "query.csv"], 2, "--out='query.csv' must end in .html"),
    ],
)
def test_what_cannot_be_explained_is_refused(
    folder: Path, place: Callable[[Path], Path], more: list[str], code: int, message: str, capsys: Any
) -> None:
    assert main(["attribute", str(place(folder)), "--query", str(folder / "test.csv"), *more]) == code
    told = capsys.readouterr().err
    assert message in told and "training rows," not in told  # said before the run is read again


def test_a_query_file_is_needed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", str(folder / "run")]) == 2
    assert "attribute needs --query" in capsys.readouterr().err
    with pytest.raises(HyperkronError, match="count=0"):
        explain(folder / "run", folder / "test.csv", count=0)


def test_many_queries_are_cut_with_a_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hyperkron.cleaning.explain"], "MAX_QUERIES", 5)
    found = explain(folder / "run", folder / "test.csv")
    assert len(found.queries) == 5 and found.messages == ["The first 5 of 60 queries are explained."]


def test_reopening_gives_the_result_that_was(folder: Path) -> None:
    told = json.loads((folder / "run" / "result.json").read_text())
    assert reopened(folder / "run", None, None, writes=False).result().verdict == told["verdict"]


@pytest.mark.long
def test_where_trees_have_won_a_network_is_explained(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternatives, "chosen_learner", lambda *_: FOREST)
    run = tmp_path / "run"
    result = clean(folder / "train.csv", folder / "trusted.csv", out=run, config=CleanConfig(compare=()))
    assert not list(result.model.parameters())
    before = files_of(run)
    found = explain(run, folder / "test.csv", count=3)
    assert files_of(run) == before and len(found.queries) == 60
    assert any("a network was trained on the cleaned labels" in message for message in found.messages)
    assert sum(query.prediction == query.label for query in found.queries) > 40
