"""What the report refuses: folders without a result, damaged files, a missing package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hyperkron.cleaning.report import write_report
from hyperkron.solution import HyperkronError
from run_folder import write_run_folder


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(HyperkronError, match=r"run_folder='.*nowhere' is not a folder; name one"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(HyperkronError, match=r"no result.json: it holds no run; name a folder"):
        write_report(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HyperkronError, match=r"no result.json: the run has not finished; .*hyperkron resume"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"result.json is not JSON .*'\{'; restore the file"),
        ("[1]", r"its content=\[1\] is not an object; restore"),
        ("[" * 100_000, "is not JSON"),
        ("{}", r"format=None is not one that this version reads \(1\); use the version"),
        ('{"format": 2}', "format=2 is not one"),
        ('{"format": true}', "format=True is not one"),
        ('{"format": 1, "noise": {"rate": "much"}}', "noise.rate='much' is not a number; restore"),
        ('{"format": 1, "noise": 3}', "noise=3 is not an object"),
        ('{"format": 1, "candidates": [{"name": 4}]}', r"candidates\[0\].name=4 is not a string"),
        ('{"format": 1, "candidates": [{"rows": -1}]}', r"candidates\[0\].rows=-1.0 is not a whole number"),
        ('{"format": 1, "candidates": [{"chosen": "no"}]}', r"candidates\[0\].chosen='no' is not true or false"),
        ('{"format": 1, "candidates": {}}', r"candidates=\{\} is not a list"),
        ('{"format": 1, "peak_memory_mb": 1' + "0" * 400 + "}", "peak_memory_mb=.* is not a number of float64"),
        ('{"format": 1, "noise": {"matrix": [[1, 0]]}}', r"noise.matrix has 1 rows of \[2\] numbers"),
        ('{"format": 1, "data": {"classes": ["a"]}, "noise": {"matrix": [[1, 0], [0, 1]]}}', "there are 1 classes"),
    ],
)
def test_a_damaged_result_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "result.json").write_text(content, "utf-8")
    with pytest.raises(HyperkronError, match=words):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


HEADER = b"row,given,suggested,error_probability,weight,suspect\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("result.json", b"\xff\xfe", "result.json cannot be read as UTF-8"),
        ("config.json", b"[]", r"config.json: its content=\[\] is not an object"),
        ("suspects.jsonl", b'{"row": 1}\n{"row":\n', "suspects.jsonl, line 2, is not JSON"),
        ("suspects.jsonl", b'{"row": 1}\n{"row": "x"}\n', "line 2.row='x' is not a number"),
        ("rows.csv", b"row,given\n1,a\n", "rows.csv: its header lacks suggested, error_probability, weight, suspect"),
        ("rows.csv", b"", "rows.csv: its header lacks row"),
        ("rows.csv", HEADER + b"0,a,b,0.1,0.9,true\n1,a,b,0.1,x,true\n", "rows.csv:3 is not a line of a run"),
        ("rows.csv", HEADER + b"0,a,b,0.1,0.9,maybe\n", "rows.csv:2 is not a line of a run"),
        ("rows.csv", HEADER + b"0,a\n", "rows.csv:2 is not a line of a run"),
    ],
)
def test_another_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    folder = write_run_folder(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(HyperkronError, match=words):
        write_report(folder)


def test_a_missing_jinja2_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(HyperkronError, match=r"pip install 'hyperkron\[report\]'"):
        write_report(write_run_folder(tmp_path))
