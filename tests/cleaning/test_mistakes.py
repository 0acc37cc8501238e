# ruff: noqa: E501  (one line a mistake)
"""Mistakes that users make: each is answered by a message that names it and a remedy, never by a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hyperkron.cleaning import CleanConfig, clean
from hyperkron.cleaning.arguments import read_parts
from hyperkron.cleaning.data import ReadOptions
from hyperkron.cli import main
from hyperkron.solution import HyperkronError

TEXT = "text,label\n" + "".join(f"{'good nice' if i % 2 else 'bad poor'} thing {i},{'pn'[i % 2]}\n" for i in range(12))
OK = "text,label\n" + "".join(f"{'fine good' if i % 2 else 'awful bad'} one {i},{'pn'[i % 2]}\n" for i in range(6))
TABLE = "age,town,label\n" + "".join(f"{20 + i},{'Rome' if i % 3 else 'Oslo'},{'pn'[i % 2]}\n" for i in range(30))
CLEAN = ["clean", "train.csv", "--trusted", "trusted.csv"]


class Mistake(NamedTuple):
    """What is done (files beside a good train.csv and trusted.csv, and a command), and what must be said."""

    said: str
    remedy: str
    command: list[str] = CLEAN
    files: Mapping[str, str | bytes] | None = None


COMMANDS = {
    # --- the command
    "no such file": Mistake("trian.csv' does not exist", "Did you mean 'train.csv'?", ["clean", "trian.csv"]),
    "no such trusted file": Mistake("--trusted='ok.csv' does not exist", "Check the path", [*CLEAN[:3], "ok.csv"]),
    "no such test file": Mistake("--test='test.csv' does not exist", "Did you mean 'trusted.csv'?", [*CLEAN, "--test", "test.csv"]),
    "no trusted rows": Mistake("name a second source with rows whose labels are right (--trusted ...)", "--trusted-column", CLEAN[:2]),
    "both kinds of trusted rows": Mistake("are both given", "give one", [*CLEAN, "--trusted-column", "label"]),
    "misspelt option": Mistake("unrecognized arguments: --trustd", "did you mean --trusted?", [*CLEAN[:2], "--trustd", "x"]),
    "misspelt command": Mistake("invalid choice: 'claen'", "did you mean clean?", ["claen"]),
    "no command": Mistake("name a command", "clean, report", []),
    "no rows named": Mistake("TRAIN is missing", "name the file or folder", ["clean"]),
    "epochs in words": Mistake("--epochs='many'", "must be a whole number", [*CLEAN, "--epochs", "many"]),
    "no epochs": Mistake("--epochs=0", "must be a whole number ≥ 1", [*CLEAN, "--epochs", "0"]),
    "negative seed": Mistake("--seed=-1", "whole number ≥ 0", [*CLEAN, "--seed", "-1"]),
    "a budget in words": Mistake("--budget='soon'", "such as 90, 90s, 5m or 1h", [*CLEAN, "--budget", "soon"]),
    "unknown rival": Mistake("--compare='magic' is unknown", "choose from noisy", [*CLEAN, "--compare", "magic"]),
    "a GPU that is not there": Mistake("--device='cuda:99' is not here", "use auto or cpu", [*CLEAN, "--device", "cuda:99"]),
    "no such device": Mistake("--device='gpu' is unknown", "use auto, cpu or cuda", [*CLEAN, "--device", "gpu"]),
    "layers of a table": Mistake("--layers=2 is for texts", "leave it out", [*CLEAN, "--layers", "2"], {"train.csv": TABLE, "trusted.csv": TABLE[:60].rpartition("\n")[0] + "\n99,Oslo,p\n98,Rome,n\n"}),
    "model without a colon": Mistake("--model='mymodel' must read", "module:callable", [*CLEAN, "--model", "mymodel"]),
    "model that is not there": Mistake("cannot be imported", "PYTHONPATH", [*CLEAN, "--model", "no_such_module:build"]),
    "a run folder that is a file": Mistake("is a file, but a run is a folder", "choose another name", [*CLEAN, "--out", "train.csv"]),
    "a run folder that is taken": Mistake("--out='taken' holds a run that was interrupted", "hyperkron resume taken", [*CLEAN, "--out", "taken"], {"taken/config.json": "{}"}),
    "report of nothing": Mistake("RUN='nothing' is not a folder", "name one that `hyperkron clean` wrote", ["report", "nothing"]),
    "report of a folder without a run": Mistake("has no result.json: it holds no run", "name a folder that `hyperkron clean` wrote", ["report", "taken"], {"taken/notes.txt": ""}),
    "report of a run that has not finished": Mistake("has no result.json", "hyperkron resume taken", ["report", "taken"], {"taken/config.json": "{}"}),
    "resume of nothing": Mistake("RUN='nothing' holds no run", "hyperkron clean", ["resume", "nothing"]),
    "predict without a run": Mistake("is not a folder", "name one that", ["predict", "nothing", "train.csv"]),
    "predict without rows": Mistake("predict needs NEW", "the new rows", ["predict", "nothing"]),
    "export without a file": Mistake("export needs --out", "the file to write", ["export", "taken", "--drop", "suspects"]),
    "export of everything": Mistake("export needs one of --drop", "--decisions", ["export", "taken", "-o", "a.csv"]),
    "a threshold in per cent": Mistake("--threshold=90.0", "between 0 and 1", ["export", "x", "--drop", "suspects", "--threshold", "90", "-o", "a.csv"]),
    "configuration with a typing error": Mistake("the key 'lable' is unknown", "did you mean label?", [*CLEAN, "--config", "c.json"], {"c.json": '{"lable": "y"}'}),
    # --- the columns
    "wrong label column": Mistake("--label='lable' is not a column of train.csv", "Did you mean 'label'?", [*CLEAN, "--label", "lable"]),
    "wrong text column": Mistake("--text='Text' is not a column", "Did you mean 'text'?", [*CLEAN, "--text", "Text"]),
    "wrong id column": Mistake("--id[0]='nr' is not a column", "Columns: 'text', 'label'", [*CLEAN, "--id", "nr"]),
    "wrong feature": Mistake("--features[1]='size' is not a column", "Columns:", [*CLEAN, "--features", "text", "size"]),
    "the label as text": Mistake("--label='label' is also named as another column's role", "cannot be an input", [*CLEAN, "--label", "label", "--text", "label"]),
    "no label column": Mistake("has no column called label", "name the one that holds the labels with --label", CLEAN, {"train.csv": TEXT.replace("label", "tag")}),
    "text and features": Mistake("contradict each other", "name one of text, image and features", [*CLEAN, "--text", "text", "--features", "text"]),
    "a flag of strings": Mistake("--trusted-column='ok' must hold true/false", "give the trusted rows as a second file", ["clean", "train.csv", "--trusted-column", "ok"], {"train.csv": "text,label,ok\na b c,x,perhaps\nd e f,y,no\n"}),
    "a flag that flags nothing": Mistake("flags none of the 2 rows", "flag some", ["clean", "train.csv", "--trusted-column", "ok"], {"train.csv": "text,label,ok\na b c,x,0\nd e f,y,0\n"}),
    "several texts": Mistake("has several columns of text", "name one with --text", CLEAN, {"train.csv": "title,words,label\n" + "".join(f"this is title {i},and these words {i},{'xy'[i % 2]}\n" for i in range(9))}),
    "only a label": Mistake("has no column beside the label", "to learn from", CLEAN, {"train.csv": "label\nx\ny\n"}),
    "two columns of one name": Mistake("names more than one column 'text'", "rename them", CLEAN, {"train.csv": "text,text,label\na,b,x\n"}),
    "trusted rows with another column": Mistake("is not a column of trusted.csv", "Columns: 'words', 'label'", CLEAN, {"trusted.csv": OK.replace("text", "words", 1)}),
    # --- the files
    "an empty file": Mistake("is empty: it has no header", "must name the columns", CLEAN, {"train.csv": ""}),
    "a header alone": Mistake("train.csv is empty: it has no rows", "written to its end", CLEAN, {"train.csv": "text,label\n"}),
    "no header": Mistake("has no header", "Add a line that names the columns", CLEAN, {"train.csv": "1,2\n3,4\n"}),
    "no header, with words": Mistake("has no column called label", "add a line that names the columns", CLEAN, {"train.csv": "5.1,3.5,setosa\n4.9,3.0,setosa\n6.2,2.9,versi\n"}),
    "ragged rows": Mistake("line 3 has 3", "Put quotes around fields that contain ','", CLEAN, {"train.csv": "text,label\na,x\nb,c,y\n"}),
    "latin-1": Mistake("is not encoded as --charset='utf-8'", "pass --charset cp1252", CLEAN, {"train.csv": TEXT.replace("good", "g\xfct").encode("latin-1")}),
    "an encoding nobody knows": Mistake("--charset='utf-9' is not an encoding", "try 'utf-8' or 'latin-1'", [*CLEAN, "--charset", "utf-9"]),
    "a pickle": Mistake("may be a pickle", "np.savez", ["clean", "train.pkl", *CLEAN[2:]], {"train.pkl": b"\x80\x04"}),
    "a Word document": Mistake("suffix that says nothing about its format", "Known: .csv", ["clean", "train.docx", *CLEAN[2:]], {"train.docx": "x"}),
    "Excel without openpyxl": Mistake("openpyxl is needed here", "pip install 'hyperkron[excel]'", ["clean", "train.xlsx", *CLEAN[2:]], {"train.xlsx": "x"}),
    "a folder of nothing": Mistake("is a folder in no known form", "Known:", ["clean", "taken", *CLEAN[2:]], {"taken/notes.txt": "x"}),
    "half a JSON line": Mistake("line 2 is not JSON", "Expecting", ["clean", "train.jsonl", *CLEAN[2:]], {"train.jsonl": '{"text": "a", "label": "x"}\n{"text": \n'}),
    # --- the labels
    "one class": Mistake("has a single class, 'p'", "at least two are needed. Check --label", CLEAN, {"train.csv": TEXT.replace(",n\n", ",p\n")}),
    "one class everywhere": Mistake("has a single class", "at least two", CLEAN, {"train.csv": TEXT.replace(",n\n", ",p\n"), "trusted.csv": OK.replace(",n\n", ",p\n")}),
    "labels in another language": Mistake("share no label", "Use the same spelling in both", CLEAN, {"trusted.csv": OK.replace(",p\n", ",ja\n").replace(",n\n", ",nein\n")}),
    "a number as label": Mistake("classes in", "Name the right one with --label", [*CLEAN, "--label", "age"], {"train.csv": TABLE, "trusted.csv": "age,town,label\n1,Rome,q\n2,Oslo,q\n"}),
    "no labels": Mistake("has no usable row left", "without a label", CLEAN, {"train.csv": "text,label\na b c,\nd e f,\n"}),
    "the same file twice": Mistake("every row of train.csv is also in the trusted set", "give another trusted set", ["clean", "train.csv", "--trusted", "train.csv"]),
    "one trusted row": Mistake("trusted has 1 usable row;", "at least 2 are needed, better 10 of each class", CLEAN, {"trusted.csv": "text,label\nsome words here,p\n"}),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_on_the_command_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mistake = COMMANDS[name]
    for file, content in {"train.csv": TEXT, "trusted.csv": OK, **(mistake.files or {})}.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(mistake.command) in (1, 2)
    told = capsys.readouterr()
    assert mistake.said in told.err and mistake.remedy in told.err, told.err
    assert "Traceback" not in told.err and told.out == "" and not Path("runs").exists()


# --- in Python ---------------------------------------------------------------------------------------------

X, Y = np.arange(24.0).reshape(12, 2), [i % 2 for i in range(12)]
TRUSTED = (X[:4] + 0.5, Y[:4])
NONE = CleanConfig(epochs=1, compare=())


def pandas_split() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"], "label": [0]})})


PYTHON: dict[str, tuple[Callable[[], Any], str, str]] = {
    "nothing is trusted": (lambda: clean((X, Y)), "trusted=None", "trusted_column=..."),
    "x and y of other lengths": (lambda: clean((X, Y[:5]), TRUSTED), "x has 12 rows but y has 5", "train"),
    "labels with three dimensions": (lambda: clean((X, X[:, None]), TRUSTED), "y has shape (12, 1, 2)", "one number or name a row"),
    "a list of numbers": (lambda: clean([1, 2, 3], TRUSTED), "whose items are not pairs", "give (x, y)"),
    "a set": (lambda: clean({1, 2}, TRUSTED), "cannot read rows from a set", "give a path, a DataFrame"),
    "a dictionary of splits": (lambda: clean(pandas_split(), TRUSTED), "has several splits (train)", "dataset['train']"),
    "columns of other lengths": (lambda: clean({"text": ["a", "b"], "label": ["x"]}, TRUSTED), "different lengths", "text"),
    "another number of columns": (lambda: clean((X, Y), (X[:4, :1], Y[:4])), "train has 2 columns but trusted has 1", "give both the same columns"),
    "standardised pictures": (lambda: clean((np.random.randn(4, 8, 8), Y[:4]), TRUSTED), "pixels of x run from", "0 to 255, or 0 to 1"),
    "a network that does not fit": (lambda: clean((X, Y), TRUSTED, config=NONE, model=lambda: __import__("torch").nn.Linear(3, 2)), "model does not take inputs of shape (2,)", "mat"),
    "a network of other classes": (lambda: clean((X, Y), TRUSTED, config=NONE, model=lambda: __import__("torch").nn.Linear(2, 5)), "model gives an output of shape (2, 5)", "one logit for each of the 2 classes"),
    "features as one text": (lambda: clean({"a": X[:, 0], "label": Y}, {"a": X[:4, 0] + 9, "label": Y[:4]}, features="a"), "must be a list of names", "['a']"),
    "a misspelt argument": (lambda: clean((X, Y), TRUSTED, lable="y"), "clean has no argument 'lable'", "Did you mean 'label'?"),
    "a setting as argument": (lambda: clean((X, Y), TRUSTED, epochs=3), "epochs is a setting", "hyperkron.CleanConfig(epochs=3)"),
    "settings as a dictionary": (lambda: clean((X, Y), TRUSTED, config={"epochs": 3}), "config={'epochs': 3} is a dict", "CleanConfig("),
    "a network in place of a function": (lambda: clean((X, Y), TRUSTED, model=__import__("torch").nn.Linear(2, 2)), "model is a Linear", "pass a function"),
    "how to read what was read": (lambda: clean(read_parts((X, Y), TRUSTED, None, {})[0], TRUSTED, label="y"), "label='y' is for reading", "leave it out"),
    "an unknown setting": (lambda: CleanConfig(compare=("forests",)), "compare='forests' is unknown", "choose from"),
    "a column of infinities": (lambda: clean((X * np.inf, Y), TRUSTED), "holds no number between", "rescale the column"),
    "a matrix too sparse to fill": (lambda: clean((pytest.importorskip("scipy.sparse").csr_matrix((10**6, 10**4)), Y), TRUSTED), "is a sparse matrix of 1000000 × 10000", "TruncatedSVD"),
}  # fmt: skip


@pytest.mark.parametrize("name", PYTHON)
def test_a_mistake_in_python(name: str) -> None:
    call, said, remedy = PYTHON[name]
    with pytest.raises(HyperkronError) as error:
        call()
    told = str(error.value)
    assert said in told and remedy in told and "--" not in told, told  # in the words of Python


def test_there_are_sixty() -> None:
    assert len(COMMANDS) + len(PYTHON) + len(SUSPECTED) >= 60
    assert len({m.said + m.remedy for m in COMMANDS.values()}) >= len(COMMANDS) - 2


# --- what is only suspected: said, and nothing is refused ----------------------------------------------------

ROWS = 40
LABELS = ["yes" if i % 2 else "no" for i in range(ROWS)]


def table(labels: list[str] | None = None, **columns: Any) -> dict[str, Any]:
    return {"size": [float(i * i % 17) for i in range(ROWS)], **columns, "label": labels or LABELS}


SUSPECTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "decimal commas": (table(price=[f"{i},5" for i in range(ROWS)]), "'39,5' is read as 39.5", "column 'price'"),
    "commas between thousands": (table(price=[f"{i + 1},250,000" for i in range(ROWS)]), "is read as 40250000", "'40,250,000'"),
    "dates": (table(day=[f"{1 + i % 28}/12/2023" for i in range(ROWS)]), "holds dates", "'28/12/2023' is 2023-12-28"),
    "days with points": (table(day=[f"0{1 + i % 9}.11.2023" for i in range(ROWS)]), "holds dates", "is 2023-11-0"),
    "a few odd cells": (table(age=["unknown" if i % 6 == 0 else i * 1.5 for i in range(ROWS)]), "holds numbers but for 7 values", "'unknown'"),
    "customer numbers": (table(customer_no=[1000 + 3 * i for i in range(ROWS)]), "looks like a number that identifies rows", "pass id=['customer_no']"),
    "a running number": (table(unnamed=list(range(ROWS))), "identifies rows: all 40 values differ", "id=['unnamed']"),
    "the label again": (table(code=[7 + i % 2 for i in range(ROWS)]), "column 'code' tells the label of every row", "pass id=['code']"),
    "infinite numbers": (table(speed=[float("inf") if i == 3 else i for i in range(ROWS)]), "extreme values in 1 column, taken as missing: 'speed' (1, such as inf)", "correct these, or rescale"),
    "a column that never changes": (table(year=[2023] * ROWS), "column 'year' is 2023 in every training row", "left out"),
    "several labels in a cell": (table(["yes", "no", "yes, no", "no"] * 10), "'yes, no' (10 rows) look like several labels in one cell", "keep the main label"),
    "a misspelt label": (table(["positive", "negative"] * 19 + ["positve", "negative"]), "the label 'positve' (1 row) looks like a misspelling of 'positive'", "Correct it if it is one"),
    "a stray capital": (table(["yes", "no"] * 19 + ["Yes ", "no"]), "the labels 'Yes', 'yes' differ only in how they are written", "use one spelling"),
}  # fmt: skip


@pytest.mark.parametrize("name", SUSPECTED)
def test_what_looks_like_a_mistake_is_said(name: str) -> None:
    train, said, remedy = SUSPECTED[name]
    labels = sorted({str(label).strip() for label in train["label"] if "," not in label})[:2]
    trusted = {key: [values[i] for i in (1, 2)] for key, values in train.items()} | {
        "size": [91.5, 92.5],
        "label": labels,
    }
    messages = " ".join(read_parts(train, trusted, None, {})[0].messages)
    assert said in messages and remedy in messages, messages


def test_plain_tables_are_not_suspected() -> None:
    random = np.random.default_rng(0)
    train = table(
        height=random.normal(size=ROWS), count=random.integers(0, 9, ROWS), town=["Rome", "Rome", "Oslo", "Oslo"] * 10
    )
    trusted = {key: list(values[:4]) for key, values in train.items()} | {"size": [91.5, 92.5, 93.5, 94.5]}
    assert read_parts(train, trusted, None, {})[0].messages == ()


def test_a_column_that_tells_all_labels_by_chance_is_not_suspected() -> None:
    rare = {"size": [0.0] * 30 + [float(i) for i in range(1, 11)], "label": ["no"] * 39 + ["yes"]}
    trusted = {"size": [91.5, 92.5], "label": ["no", "yes"]}
    assert not any("tells the label" in told for told in read_parts(rare, trusted, None, {})[0].messages)


def test_conflicting_labels_show_one_row_of_each() -> None:
    train = {"text": ["a"] * 5 + ["b"], "label": ["x", "x", "x", "x", "y", "x"]}
    messages = " ".join(read_parts(train, {"text": ["c", "d"], "label": ["x", "y"]}, None, {})[0].messages)
    assert "rows 0 'x' / 4 'y'" in messages


# --- files that were refused once and are read now ----------------------------------------------------------


def test_utf16_and_other_encodings_are_read_and_exported_alike(tmp_path: Path) -> None:
    from hyperkron.cleaning.data import export_rows, read

    for charset, given in (("utf-16", None), ("cp1252", "cp1252"), ("utf-8-sig", None)):
        path = tmp_path / f"{charset}.csv"
        path.write_bytes("text,label\ncafé au lait,x\nthé vert,y\n".encode(charset))
        assert read(path, charset=given).inputs == ["café au lait", "thé vert"]
        how = ReadOptions() if given is None else ReadOptions(charset=given)
        out = export_rows(path, [1], tmp_path / f"out-{charset}.csv", ["x"], options=how)
        assert out.read_bytes().decode(charset) == "text,label\nthé vert,x\n"


def test_a_sheet_that_is_not_there_is_refused_with_the_names_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened by stand-ins: openpyxl is not needed by the tests."""
    import sys
    import types
    import zipfile

    from hyperkron.cleaning.data import read

    pandas = pytest.importorskip("pandas")
    with zipfile.ZipFile(tmp_path / "book.xlsx", "w") as archive:
        archive.writestr("xl/workbook.xml", "")

    def missing(path: Path, **more: Any) -> None:
        raise ValueError(f"Worksheet named {more['sheet_name']!r} not found")

    monkeypatch.setitem(sys.modules, "openpyxl", types.ModuleType("openpyxl"))
    monkeypatch.setattr(pandas, "read_excel", missing)
    closed: list[bool] = []

    @contextlib.contextmanager
    def book(path: Path) -> Iterator[types.SimpleNamespace]:
        yield types.SimpleNamespace(sheet_names=["Rows", "Checked"])
        closed.append(True)

    monkeypatch.setattr(pandas, "ExcelFile", book)
    wanted = r"has no sheet 'Cheked'\. Did you mean 'Checked'\? Its sheets are 'Rows', 'Checked'\."
    with pytest.raises(HyperkronError, match=wanted):
        read(f"{tmp_path / 'book.xlsx'}:Cheked")
    assert closed == [True]


def test_sheets_data_frames_datasets_and_sparse_matrices_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    import types
    import zipfile

    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    sparse = pytest.importorskip("scipy.sparse")
    frame = pandas.DataFrame(
        {"day": pandas.date_range("2020-01-01", periods=6), "n": [1, None, 3, 4, 5, 6], "label": list("xyxyxy")}
    )
    with zipfile.ZipFile(tmp_path / "book.xlsx", "w") as archive:
        archive.writestr("xl/workbook.xml", "")
    asked: list[Any] = []
    monkeypatch.setitem(sys.modules, "openpyxl", types.ModuleType("openpyxl"))  # pandas itself is not asked here
    monkeypatch.setattr(pandas, "read_excel", lambda path, **more: asked.append(more) or frame.astype(object))
    from hyperkron.cleaning.data import export_rows, read

    found = read(f"{tmp_path / 'book.xlsx'}:Sheet2")
    assert asked[0]["sheet_name"] == "Sheet2" and found.encoding is not None
    assert found.encoding.names == ("day", "n") and found.inputs[0].tolist() == [18262.0, 1.0]
    text = export_rows(tmp_path / "book.xlsx", [1, 2], tmp_path / "out.csv", ["x", None]).read_text()
    assert text == "day,n,label\n2020-01-02 00:00:00,,x\n2020-01-03 00:00:00,3.0,x\n"
    dataset = datasets.Dataset.from_dict({"text": [f"words here {i}" for i in range(6)], "label": [0, 1] * 3})
    dataset = dataset.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    parts = read_parts(dataset.select(range(4)), dataset.select(range(4, 6)), None, {})
    assert parts[0].classes == ("no", "yes") and len(parts[0]) == 4
    matrix = sparse.csr_matrix(np.diag(np.arange(1.0, 7.0)))
    parts = read_parts((matrix[:4], [0, 1, 0, 1]), (matrix[4:], [0, 1]), None, {})
    assert parts[0].kind == "table" and parts[0].inputs.shape[0] == 4
    names = read_parts((frame[["day", "n"]][:4], list("xyxy")), (frame[["day", "n"]][4:], list("xy")), None, {})
    assert names[0].roles.features == ("day", "n")
