"""`hyperkron report`, `export` and `doctor`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import run_folder
from fake_cleaning import write_table
from hyperkron.cleaning.data import row_hashes
from hyperkron.cleaning.folder import HASHES
from hyperkron.cleaning.loading import read_decisions
from hyperkron.cli import doctor as doctor_command
from hyperkron.cli import main

Captured = pytest.CaptureFixture[str]
RUN = Path("runs/mine")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """A finished run and its training rows; the lines of its rows.csv."""
    run_folder.write_run_folder(RUN, rows=40)
    write_table(Path("train.csv"))
    record_rows()
    return run_folder.make_rows(run_folder.CLASSES, 40, 0.4)


def record_rows(**config: Any) -> None:
    """Let the run say, as `clean` does, which rows train.csv holds now."""
    hashes = row_hashes("train.csv")
    (RUN / HASHES).write_bytes(hashes.each)
    kept = json.loads((RUN / "config.json").read_text()) | config
    rows = {"count": len(hashes), "sha256": hashes.sha256, "version": hashes.VERSION}
    run_folder.write_json(RUN / "config.json", kept | {"rows": rows})


# --- report ------------------------------------------------------------------------------------------------


def test_report_writes_the_page(rows: list[dict[str, Any]], capsys: Captured) -> None:
    assert main(["report", "runs/mine"]) == 0
    assert capsys.readouterr().out == "runs/mine/report.html\n" and (RUN / "report.html").stat().st_size > 1000
    assert main(["report", "runs/mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": "runs/mine/report.html"}


def test_report_of_what_is_no_run(capsys: Captured) -> None:
    assert main(["report", "runs/none"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hyperkron report: error: RUN='runs/none' is not a folder")


# --- export ------------------------------------------------------------------------------------------------


def test_dropping_suspects(rows: list[dict[str, Any]], capsys: Captured) -> None:
    assert main(["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv"]) == 0
    out, err = capsys.readouterr()
    source = Path("train.csv").read_text().splitlines(keepends=True)
    kept = [source[0]] + [source[1 + row["row"]] for row in rows if not row["suspect"]]
    assert Path("clean.csv").read_text() == "".join(kept) and 20 < len(kept) < 40
    assert out == "clean.csv\n" and f"{len(kept) - 1} rows written; {41 - len(kept)} suspects dropped" in err
    assert "left out when" not in err
    for gone, told in (
        ("", "1 row that was left out when the data was read is not included."),
        ("9,no text\n", "2 rows that"),
    ):
        Path("runs/mine/left_out.csv").write_text(f"row,why\n1,no label\n7,trusted\n{gone}")
        assert main(["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv", "--overwrite"]) == 0
        assert told in capsys.readouterr().err


def test_exporting_after_the_source_was_moved(rows: list[dict[str, Any]], capsys: Captured) -> None:
    Path("train.csv").rename("moved.csv")
    assert main(["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv"]) == 1
    told = capsys.readouterr().err
    assert "train.csv', where the training rows of the run in 'runs/mine' came from, is not there any more; put" in told


def test_relabelling_suspects(rows: list[dict[str, Any]], capsys: Captured) -> None:
    assert main(["export", "runs/mine", "--relabel", "suspects", "-o", "clean.csv", "--json"]) == 0
    with Path("clean.csv").open(newline="") as file:
        found = [line["label"] for line in csv.DictReader(file)]
    assert found == [row["suggested" if row["suspect"] else "given"] for row in rows]
    count = sum(row["suspect"] for row in rows)
    wanted = {"file": "clean.csv", "rows": 40, "trusted": 0, "relabelled": count, "warnings": []}
    assert json.loads(capsys.readouterr().out) == wanted


def test_relabelling_numbers_whose_names_the_trusted_rows_list(rows: list[dict[str, Any]]) -> None:
    source = Path("train.csv").read_text()
    for i, name in enumerate(run_folder.CLASSES):
        source = source.replace(f",{name},", f",{i},")
    Path("train.csv").write_text(source)
    record_rows()
    assert main(["export", "runs/mine", "--relabel", "suspects", "-o", "clean.csv"]) == 0
    with Path("clean.csv").open(newline="") as file:
        found = [run_folder.CLASSES[int(line["label"])] for line in csv.DictReader(file)]
    assert found == [row["suggested" if row["suspect"] else "given"] for row in rows]


def decide(**more: Any) -> list[dict[str, Any]]:
    """decisions.json: the first suspect is accepted, the second rejected, the third gets another label."""
    suspects = [row for row in run_folder.make_rows(run_folder.CLASSES, 40, 0.4) if row["suspect"]]
    made = zip(suspects, ("accept", "reject", "relabel"), strict=False)
    others = [name for name in run_folder.CLASSES if name not in (suspects[2]["given"], suspects[2]["suggested"])]
    labels = [suspects[0]["suggested"], suspects[1]["given"], others[0]]
    found = [{"row": s["row"], "decision": kind} for s, kind in made]
    entries = [entry | {"label": label} for entry, label in zip(found, labels, strict=True)]
    run_folder.write_json(Path("decisions.json"), {"format": 1, "run": "mine", "data": "", "decisions": entries} | more)
    return entries


def decision(kind: str, label: str) -> dict[str, Any]:
    """About the first suspect, whose label is the ``given`` or the ``suggested`` one."""
    suspect = next(row for row in run_folder.make_rows(run_folder.CLASSES, 40, 0.4) if row["suspect"])
    return {"row": suspect["row"], "decision": kind, "label": suspect[label]}


def test_decisions_are_applied(rows: list[dict[str, Any]], capsys: Captured) -> None:
    entries = {entry["row"]: entry["label"] for entry in decide()}
    rest = {"--drop": None, "--relabel": "suggested", "": "given"}
    for option, key in rest.items():
        more = [option, "suspects"] if option else []
        command = ["export", "runs/mine", "--decisions", "decisions.json", "-o", "clean.csv", "--overwrite", *more]
        assert main(command) == 0
        wanted = []
        for row in rows:
            if row["row"] in entries:
                wanted.append((row["row"], entries[row["row"]]))
            elif not row["suspect"]:
                wanted.append((row["row"], row["given"]))
            elif key is not None:
                wanted.append((row["row"], row[key]))
        with Path("clean.csv").open(newline="") as file:
            found = [(int(line["text"].split()[1]), line["label"]) for line in csv.DictReader(file)]
        assert found == wanted
    assert "40 rows written; 3 decided, 2 relabelled, 0 suspects dropped." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["true", "True"])
def test_decisions_about_true_and_false_may_be_booleans(tmp_path: Path, name: str) -> None:
    run_folder.write_json(tmp_path / "result.json", {"format": 1, "data": {"classes": [name, "no"]}})
    made = [{"row": 3, "decision": "accept", "label": True}]
    run_folder.write_json(tmp_path / "decisions.json", {"format": 1, "data": "", "decisions": made})
    assert read_decisions(tmp_path / "decisions.json", tmp_path) == {3: name}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"data": "other"},
            "are about other data (run 'mine') than the run in 'runs/mine'; save it again in the report",
        ),
        ({"format": 7}, "is not a file of decisions"),
        ({"decisions": [{"row": 1, "decision": "maybe", "label": "human"}]}, "'maybe'"),
        ({"decisions": [{"row": 1, "decision": "accept", "label": "nobody"}]}, "'nobody'"),
        ({"decisions": [{"row": 4000, "decision": "accept", "label": "human"}]}, "decide about row 4000, which is not"),
        ({"decisions": 3}, "decisions=3 is not a list"),
        ({"decisions": [decision("reject", "suggested")]}, "rejects the suggestion for row"),
        ({"decisions": [decision("accept", "suggested"), decision("reject", "given")]}, "two labels"),
    ],
)
def test_decisions_that_do_not_fit_are_refused(
    rows: list[dict[str, Any]], more: dict[str, Any], message: str, capsys: Captured
) -> None:
    decide(**more)
    assert main(["export", "runs/mine", "--decisions", "decisions.json", "-o", "clean.csv"]) == 1
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told and not Path("clean.csv").exists()
    assert main(["export", "runs/mine", "--decisions", "none.json", "-o", "clean.csv"]) == 1
    assert "--decisions='none.json' does not exist; save it in report.html" in capsys.readouterr().err


def test_the_label_column_of_the_run_is_the_one_relabelled(rows: list[dict[str, Any]]) -> None:
    lines = [line.split(",") for line in Path("train.csv").read_text().splitlines()]
    decoy = [f"{text},x,{mine}" for text, mine, _ in lines[1:]]
    Path("train.csv").write_text("\n".join(["text,label,mine", *decoy]) + "\n")
    record_rows(source={"train": "train.csv", "reading": {"label": "mine"}})
    assert main(["export", "runs/mine", "--relabel", "suspects", "-o", "clean.csv"]) == 0
    wanted = [f"x,{row['suggested' if row['suspect'] else 'given']}" for row in rows]
    assert [line.partition(",")[2] for line in Path("clean.csv").read_text().splitlines()[1:]] == wanted


def test_a_threshold_of_ones_own(rows: list[dict[str, Any]]) -> None:
    assert main(["export", "runs/mine", "--drop", "suspects", "--threshold", "0.85", "-o", "clean.csv"]) == 0
    kept = [f"text {row['row']}" for row in rows if row["error_probability"] < 0.85]
    assert [line.split(",")[0] for line in Path("clean.csv").read_text().splitlines()[1:]] == kept
    assert len(kept) > sum(not row["suspect"] for row in rows)


def test_a_file_is_not_overwritten_unless_asked(rows: list[dict[str, Any]], capsys: Captured) -> None:
    Path("clean.csv").write_text("mine")
    export = ["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv", "--quiet"]
    assert main(export) == 1 and Path("clean.csv").read_text() == "mine"
    assert "clean.csv" in capsys.readouterr().err
    assert main([*export, "--overwrite"]) == 0 and Path("clean.csv").read_text() != "mine"
    assert capsys.readouterr() == ("", "")


def test_trusted_rows_of_the_same_file_belong_to_the_clean_one(rows: list[dict[str, Any]], capsys: Captured) -> None:
    lines = Path("train.csv").read_text().splitlines()
    more = [f"checked {i},{name},yes" for i, name in enumerate(run_folder.CLASSES)]
    Path("train.csv").write_text("\n".join([*lines, *more]) + "\n")
    reading = {"text": "text", "label": "label", "image": None, "trusted_column": "checked"}
    record_rows(source={"train": "train.csv", "reading": reading})
    assert main(["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv"]) == 0
    written = Path("clean.csv").read_text().splitlines()
    assert written[-6:] == more and len(written) == 1 + 6 + sum(not row["suspect"] for row in rows)
    assert "6 of them trusted" in capsys.readouterr().err
    assert main(["export", "runs/mine", "--relabel", "suspects", "-o", "again.csv"]) == 0
    assert Path("again.csv").read_text().splitlines()[-6:] == more


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda: (RUN / "rows.csv").unlink(), "hyperkron resume runs/mine"),
        (lambda: (RUN / "config.json").unlink(), "holds no run (no config.json)"),
        (lambda: (RUN / "config.json").write_text('{"source": null}'), "data that was given in Python"),
        (lambda: (RUN / "rows.csv").write_text("row,given\n1,a\n"), "rows.csv: its header lacks suggested"),
        (
            lambda: (RUN / "rows.csv").write_text(
                "row,given,suggested,error_probability,weight,suspect\n1,a,b,nan,1,true\n"
            ),
            "rows.csv:2 is not a line of a run",
        ),
        (lambda: Path("train.csv").unlink(), "train.csv"),
    ],
)
def test_export_of_a_damaged_run(damage: Any, message: str, rows: list[dict[str, Any]], capsys: Captured) -> None:
    damage()
    assert main(["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv"]) == 1
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err and not Path("clean.csv").exists()


def _shuffled(lines: list[str]) -> list[str]:
    return [lines[0], *lines[:20:-1], *lines[1:21]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shuffled, "the same 40 rows stand in another order"),
        (lambda lines: [*lines[:8], "other,x,no\n", *lines[9:]], "1 row of 40 differs: row 7"),
        (lambda lines: [*lines, "more,x,no\n"], "there were 40 rows and are 41 now, 40 of them the same"),
        (lambda lines: lines[:-3], "there were 40 rows and are 37 now, 37 of them the same"),
        (lambda lines: [lines[0].replace("text", "words"), *lines[1:]], "the names of the columns"),
    ],
)
def test_rows_that_are_not_those_of_the_run_are_refused(
    change: Any, message: str, rows: list[dict[str, Any]], capsys: Captured
) -> None:
    """A file that was sorted after the run would lose rows that are no suspects, and keep those that are."""
    file = Path("train.csv")
    before = file.read_text()
    file.write_text("".join(change(before.splitlines(keepends=True))))
    for what in ("--drop", "--relabel"):
        assert main(["export", "runs/mine", what, "suspects", "-o", "clean.csv"]) == 1
        err = capsys.readouterr().err
        assert message in err and "hyperkron clean" in err and not Path("clean.csv").exists()
    (RUN / HASHES).unlink()
    assert main(["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv"]) == 1
    file.write_text(before.replace("\n", "\r\n"))  # the same rows, written otherwise
    assert main(["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv"]) == 0


@pytest.mark.parametrize("record", [None, {"count": 40, "sha256": "of an earlier version"}])
def test_a_run_that_did_not_record_its_rows_is_exported_with_a_warning(
    record: Any, rows: list[dict[str, Any]], capsys: Captured
) -> None:
    config = json.loads((RUN / "config.json").read_text())
    run_folder.write_json(RUN / "config.json", config | {"rows": record})
    assert main(["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv", "--quiet"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: the run in runs/mine was made by another version")
    assert "it is not known whether train.csv still holds its rows" in err


@pytest.mark.parametrize("what", ["keep", "escape", "refuse"])
def test_formulas(what: str, rows: list[dict[str, Any]], capsys: Captured) -> None:
    kept = next(row["row"] for row in rows if not row["suspect"])
    lines = Path("train.csv").read_text().splitlines(keepends=True)
    rest = lines[1 + kept].partition(",")[2]
    lines[1 + kept] = "=1+1," + rest
    Path("train.csv").write_text("".join(lines))
    record_rows()
    command = ["export", "runs/mine", "--drop", "suspects", "-o", "clean.csv", "--formulas", what, "--json"]
    assert main(command) == (1 if what == "refuse" else 0)
    out, err = capsys.readouterr()
    assert f"1 cell that a spreadsheet takes for a formula, such as '=1+1' in row {kept}, column 'text'" in err
    if what == "refuse":
        assert "pass --formulas escape" in err and not Path("clean.csv").exists()
        return
    assert len(json.loads(out)["warnings"]) == 1
    assert (("'=1+1," if what == "escape" else "=1+1,") + rest) in Path("clean.csv").read_text().splitlines(True)


# --- doctor ------------------------------------------------------------------------------------------------


def test_doctor_finds_everything_here(capsys: Captured) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    names = ["python", "disk", *doctor_command.EXTRAS, "torch", "device", "threads", "encoder", "self test"]
    found = [line[9:].strip() for line in out.splitlines() if line[:1] in "omB" and line[7:9] == "  "]
    assert [next(n for n in names if line.startswith(n)) for line in found] == names
    assert "agrees with a dense solve" in out and out.endswith("Everything needed is installed.\n")


def test_doctor_as_json_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(doctor_command, "find_spec", lambda name: None if name == "cleanlab" else object())
    monkeypatch.setenv("HYPERKRON_ENCODER", "no/such-encoder")
    assert main(["doctor", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["compare"]["state"] == "missing" and found["compare"]["remedy"] == "pip install 'hyperkron[compare]'"
    assert found["encoder"]["state"] == "missing" and "no/such-encoder" in found["encoder"]["detail"]
    assert found["data"]["state"] == found["self test"]["state"] == "ok"


@pytest.mark.parametrize("wrong", [1e-3, float("nan")])
def test_doctor_fails_where_the_mathematics_does(
    wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(doctor_command, "self_test", lambda: wrong)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["findings"][-1]["state"] == "bad"


def test_doctor_survives_what_it_looks_for(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def fail() -> float:
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(doctor_command, "self_test", fail)
    assert main(["doctor"]) == 1
    assert "RuntimeError: illegal instruction" in capsys.readouterr().out


def test_the_self_test_sees_a_wrong_hypergradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyperkron import hypergradient

    true = hypergradient.kfac
    assert doctor_command.self_test() < 1e-12
    monkeypatch.setattr(hypergradient, "kfac", lambda damping, **more: true(2 * damping, **more))
    assert doctor_command.self_test() > 1e-3


def test_the_extras_are_those_of_the_package() -> None:
    from importlib.metadata import metadata

    known = set(metadata("hyperkron").get_all("Provides-Extra") or [])
    assert set(doctor_command.EXTRAS) == known - {"wandb", "mlflow", "trackio", "dev"}
