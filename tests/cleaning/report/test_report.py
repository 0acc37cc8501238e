"""The report as text: what it says and what it escapes. test_browser.py opens it in Chromium."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperkron.cleaning.arguments import read_parts
from hyperkron.cleaning.report import page, wording, write_report
from hyperkron.cleaning.report.folder import read_run
from hyperkron.cli.summary import summary
from run_folder import CLASSES, make_rows, picture, write_json, write_run_folder, write_suspects

ROOT = Path(__file__).parents[3]
COUNT = sum(row["suspect"] for row in make_rows(CLASSES, 300, 0.4))


class _Reader(HTMLParser):
    """Elements, their attributes, and the visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self._within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = tag
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        elif self._within != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).replace("\u00a0", " ").split())

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(next(text for kind, text in self.scripts if kind == "application/json"))


def read(file: Path) -> _Reader:
    reader = _Reader()
    reader.feed(file.read_text("utf-8"))
    reader.close()
    return reader


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> _Reader:
    return read(write_report(write_run_folder(tmp_path_factory.mktemp("run") / "mine")))


# --- what it says ------------------------------------------------------------------------------------------


def test_the_parts_stand_in_their_order(report: _Reader) -> None:
    found = [attributes.get("id") for tag, attributes in report.elements if tag == "section"]
    assert found == ["accuracy", "suspects", "weights", "noise", "cost", "messages", "configuration"]


def test_report_and_command_say_what_kind_of_model_it_is(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path / "mine")
    result = json.loads((folder / "result.json").read_text("utf-8"))
    write_json(folder / "result.json", {**result, "learner": "random forest"})
    (folder / "model.safetensors").touch()
    assert wording.reason(read_run(folder)).startswith("The cleaned model (random forest) is chosen unless")
    assert f"model   {folder / 'model.safetensors'} (random forest)\n" in summary(folder)


@pytest.mark.parametrize(
    "said",
    [
        "Use the cleaned model.",
        "Labels that look wrong 38.0% to 43.0% 95% interval; estimate 40.0%",
        f"Suspects {COUNT} of 300 training rows; 85% stay the same with other seeds and trusted rows",
        "The cleaned model is right on 88.4% to 94.4% of new rows",
        "evaluated on 60 trusted rows that it was not trained on. The cleaned model is chosen unless an alternative is "
        "significantly better on the same rows; none is.",
        "88.4% to 94.4% 91.4% – 90.6%",
        "85.7% to 91.7% 88.7% −2.7, not significant 87.9%",
        "−17.3, significant",
        "Test accuracy",
        "2.5 × one plain training",
        "1 min 11 s",
        "812 MB",
        "12 rows without a label were left out",
        "hyperkron clean train.csv --trusted trusted.csv",
        "outer_steps 200",
        "source: train train.csv",
        "torch 2.8.0",
        "Held-out accuracy 88.4% to 94.4%",
    ],
)
def test_it_says(report: _Reader, said: str) -> None:
    assert said in report.text


def test_percentages_are_written_in_one_way(report: _Reader) -> None:
    assert "91.4%" in report.text and not re.search(r"\s%", report.text)


def test_suspects_are_handed_to_the_script(report: _Reader, tmp_path: Path) -> None:
    first = report.data["suspects"][0]
    assert len(report.data["suspects"]) == COUNT and report.data["page_size"] == 50
    lines = (write_run_folder(tmp_path) / "suspects.jsonl").read_text("utf-8").splitlines()
    expected = json.loads(lines[0])
    assert {key: first[key] for key in ("row", "given", "suggested", "text", "weight")} == {
        key: expected[key] for key in ("row", "given", "suggested", "text", "weight")
    }
    assert first["probability"] == expected["error_probability"] and first["rank"] == 1
    assert (first["first"], first["last"]) == (expected["weights"][0], expected["weights"][-1])
    assert len(first["spark"].split()) == len(expected["weights"])


def test_without_test_accuracies_there_is_no_such_column(tmp_path: Path) -> None:
    candidates = [{"name": "a", "accuracy": 0.5, "test_accuracy": None}]
    reader = read(write_report(write_run_folder(tmp_path, candidates=candidates, chosen="a")))
    assert "Test accuracy" not in reader.text and "Accuracy on the test set" not in reader.text


def test_times_of_candidates_stand_there_where_they_are_known(tmp_path: Path, report: _Reader) -> None:
    assert "Test accuracy Time" in report.text and "9.50 s" in report.text and "no network had to be" not in report.text
    some = [{"name": "a", "accuracy": 0.5, "seconds": 3.0, "rows": 60}, {"name": "b", "accuracy": 0.4, "rows": 60}]
    reader = read(write_report(write_run_folder(tmp_path, candidates=some)))
    assert "3.00 s" in reader.text and "– if the cleaning already gave its predictions" in reader.text
    reader = read(write_report(write_run_folder(tmp_path, candidates=[c | {"seconds": None} for c in some])))
    assert "from the chosen" in reader.text and "chosen Time" not in reader.text and "Time to train" not in reader.text


def test_suspects_that_depend_on_chance_are_said_to(tmp_path: Path, report: _Reader) -> None:
    assert "of the suspects stay the same" not in report.text
    suspects = {"cut": 0.5, "count": COUNT, "stable": 0.52}
    assert "Only 52% of the suspects stay" in read(write_report(write_run_folder(tmp_path, suspects=suspects))).text


def test_the_test_accuracy_has_its_interval(tmp_path: Path, report: _Reader) -> None:
    assert "Accuracy on the test set 90.6% never used for choosing" in report.text  # of how many rows is not known
    per_class = [{"name": "a", "test_rows": 50, "test_right": 44}, {"name": "b", "test_rows": 50, "test_right": 46}]
    winner = {"name": "hyperkron", "accuracy": 0.9, "low": 0.8, "high": 0.95, "rows": 60, "test_accuracy": 0.9}
    text = read(write_report(write_run_folder(tmp_path, candidates=[winner], per_class=per_class))).text
    assert "test set 82.6% to 94.5% 95% interval; 90.0% of 100 rows, never used for choosing" in text  # Wilson's
    assert "Test accuracy: on 100 rows (never used for choosing)" in text
    assert "Accuracy: on trusted rows, each class counted as often" in text
    blind = read(write_report(write_run_folder(tmp_path, candidates=[winner | {"rows": 0}], per_class=per_class))).text
    assert "each class counted as often" not in blind


def test_test_rows_that_were_learnt_from_are_not_said_to_be_unseen(tmp_path: Path) -> None:
    x, y = np.arange(40.0)[:, None], np.arange(40) % 2
    *_, test = read_parts((x[:20], y[:20]), (x[20:], y[20:]), (x[20:], y[20:]), {})
    folder = write_run_folder(tmp_path)
    content = json.loads((folder / "result.json").read_text("utf-8"))
    content["data"]["messages"] += test.messages
    write_json(folder / "result.json", content)
    text = read(write_report(folder)).text
    assert "20 rows with the input of a trusted row" in text and "never used for choosing" not in text
    assert "Accuracy on the test set 90.6% some were also learnt from, see The data" in text


def test_the_reason_for_an_alternative_and_for_none(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, chosen="cleanlab")
    said = "“cleanlab” was chosen because it is significantly better than the cleaned model on the same rows."
    assert said in read(write_report(folder)).text
    config = json.loads((folder / "config.json").read_text("utf-8"))
    write_json(folder / "config.json", config | {"rules": config["rules"] - 1})  # had another rule
    text = read(write_report(folder)).text
    assert "was chosen because" not in text


def test_annotators_have_a_tile(tmp_path: Path) -> None:
    sources = [{"name": name, "votes": 9, "right": right} for name, right in zip("abc", (0.6, 0.9, None), strict=True)]
    text = read(write_report(write_run_folder(tmp_path, sources=sources))).text
    assert "Annotators 3 right on 60% to 90% of their votes" in text


def test_fields_of_earlier_versions_are_ignored(tmp_path: Path, report: _Reader) -> None:
    old = {"collapsed": True, "curves": [{"name": "loss", "x_label": "step", "x": [0], "y": [1.0]}]}
    texts = [read(write_report(write_run_folder(tmp_path / "mine", **old))).text, report.text]
    assert len({re.sub(r"export \S+/mine", "export mine", text) for text in texts}) == 1


def test_all_suspects_are_listed_and_examples_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run_folder(tmp_path, rows=2000)
    count = json.loads((folder / "result.json").read_text("utf-8"))["suspects"]["count"]
    assert count > 500 and len(read(write_report(folder)).data["suspects"]) == count
    monkeypatch.setattr(page, "MAX_EXAMPLES", 5000)
    told = [s["text"] for s in read(write_report(folder)).data["suspects"]]
    assert len(told) == count and told[0] and 0 < sum(map(len, told)) <= 5000 and not told[-1]


def test_ids_are_on_the_page(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path)
    write_suspects(folder, [{"row": 3, "id": {"customer": "<b>C-7</b>"}, "given": "a", "suggested": "b"}])
    assert read(write_report(folder)).data["suspects"][0]["ids"] == [["customer", "<b>C-7</b>"]]


def test_the_heading_says_what_to_do_and_few_trusted_rows_show_nothing(tmp_path: Path) -> None:
    for name, said in (("hyperkron", "Use the cleaned model."), ("trusted", "Train on the trusted rows alone.")):
        assert said in read(write_report(write_run_folder(tmp_path, chosen=name))).text
    whole = [{"name": "hyperkron", "accuracy": 1.0, "low": 0.94, "high": 1.0, "rows": 60}]
    reader = read(write_report(write_run_folder(tmp_path, chosen="hyperkron", candidates=whole)))
    assert "Held-out accuracy at least 94.0% 95% interval; all 60 rows" in reader.text
    data = json.loads((tmp_path / "result.json").read_text("utf-8"))["data"] | {"trusted_rows": 29}
    reader = read(write_report(write_run_folder(tmp_path, chosen="hyperkron", candidates=whole, data=data)))
    assert "Held-out accuracy not known too few trusted rows to tell" in reader.text


def test_each_class_has_a_line(tmp_path: Path) -> None:
    classes = ("a", "b")
    lines = [{"name": "a", "suspects": 3, "right": 9}, {"name": "b", "suspects": 5, "right": 1}]
    more = [line | {"test_rows": 50, "test_right": 40} for line in lines]
    data = {"classes": classes, "train_per_class": [40, 60], "trusted_per_class": [10, 2], "trusted_rows": 12}
    for per_class, end in ((lines, ""), (more, " 40 of 50")):
        result = {"data": data, "per_class": per_class}
        text = read(write_report(write_run_folder(tmp_path, classes=classes, **result))).text
        assert f"a 40 3 9 of 10{end} b 60 5 1 of 2, too few to tell{end}" in text


def test_many_classes_show_the_noisiest_twenty(tmp_path: Path) -> None:
    classes = tuple(f"c{i}" for i in range(30))
    reader = read(write_report(write_run_folder(tmp_path, classes=classes)))
    assert "The 20 of 30 classes with most noise are shown" in reader.text and "adds up the other 10" in reader.text


def test_writing_again_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path)
    before = sorted(p.name for p in folder.iterdir())
    (folder / "report.html").write_text("old", "utf-8")
    assert write_report(str(folder)) == folder / "report.html"
    assert sorted(p.name for p in folder.iterdir()) == sorted([*before, "report.html"])
    assert (folder / "report.html").read_text("utf-8").startswith("<!doctype html>")


# --- nothing is fetched, nothing foreign is run ------------------------------------------------------------


def test_no_address_leads_outside(report: _Reader) -> None:
    for tag, attributes in report.elements:
        for name in ("src", "href", "action", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes)
    styles = (ROOT / "src/hyperkron/cleaning/report/report.css").read_text("utf-8")
    assert "url(" not in styles and "@import" not in styles


def test_the_policy_names_the_script_and_the_style_by_hash(tmp_path: Path) -> None:
    text = write_report(write_run_folder(tmp_path)).read_text("utf-8")
    policy = read(tmp_path / "report.html").elements
    content = next(a["content"] for t, a in policy if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert content is not None and "unsafe" not in content and content.startswith("default-src 'none'; img-src data:;")
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in content


def test_the_script_uses_no_markup_of_strings() -> None:
    script = (ROOT / "src/hyperkron/cleaning/report/report.js").read_text("utf-8")
    banned = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch(")
    assert not [word for word in banned if word in script] and "</script" not in script


def test_embedded_json_cannot_leave_its_element() -> None:
    hostile = "</script><script>alert(1)</script> <!-- & \u2028 \u2029 \ud800 é"
    text = page.embed({hostile: [hostile]})
    assert text.isascii() and not set(text) & set("<>&")
    assert json.loads(text) == {hostile: [hostile]}


HOSTILE = "</script></title><script>window.__owned=1</script><img src=x onerror=alert(1)>{{7*7}}\u2028\u202e\"'"


def test_hostile_words_everywhere_stay_words(tmp_path: Path) -> None:
    classes = (HOSTILE, HOSTILE + "2", "plain")
    folder = write_run_folder(tmp_path, classes=classes)
    result = json.loads((folder / "result.json").read_text("utf-8"))
    for key in ("verdict", "command", "hardware", "created", "hyperkron"):
        result[key] = HOSTILE
    result["versions"] = {HOSTILE: HOSTILE}
    result["data"]["messages"] = [HOSTILE]
    for candidate in result["candidates"]:
        candidate["description"] = HOSTILE
    result["candidates"][0]["name"] = result["chosen"] = HOSTILE
    write_json(folder / "result.json", result)
    write_json(folder / "config.json", {HOSTILE: {HOSTILE: HOSTILE}})
    reader = read(write_report(folder))
    assert [kind for kind, _ in reader.scripts] == ["application/json", None]
    assert not [a for t, a in reader.elements if t == "img" or any(name.startswith("on") for name in a)]
    assert reader.text.count("{{7*7}}") > 10 and reader.data["givens"][0] == HOSTILE


@pytest.mark.parametrize(
    "address",
    [
        "data:image/svg+xml;base64," + base64.b64encode(b"<svg onload='alert(1)'/>").decode(),
        "data:image/png;base64,@@@@",
        "data:image/png;base64," + base64.b64encode(b"<svg onload='alert(1)'/>").decode(),
        "javascript:alert(1)",
        "https://example.com/a.png",
        picture(0) + "\n",
        picture(0) + '" onerror="alert(1)',
        " " + picture(0),
        picture(0)[:-1],
        picture(0).replace("png", "PNG"),
        picture(0) + "A" * 2**18,
    ],
)
def test_only_a_png_is_a_picture(tmp_path: Path, address: str) -> None:
    folder = write_run_folder(tmp_path)
    write_suspects(folder, [{"row": 0, "image": address}, {"row": 1, "image": picture(1)}])
    reader = read(write_report(folder))
    assert [s["picture"] for s in reader.data["suspects"]] == ["", picture(1)]
    assert "Pictures of 1 suspects are not shown" in reader.text


# --- what is absent ----------------------------------------------------------------------------------------


def test_a_bare_result_gives_a_page(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", {"format": 1})
    said = read(write_report(tmp_path)).text
    for part in ("No model was chosen", "compared no alternatives", "does not list the suspects", "kept no weights"):
        assert part in said
    for part in ("no noise matrix", "no suspects.jsonl", "has no configuration"):
        assert part in said


@pytest.mark.parametrize("name", ["config.json", "rows.csv", "suspects.jsonl", "log.jsonl"])
def test_each_other_file_may_be_absent(tmp_path: Path, name: str) -> None:
    folder = write_run_folder(tmp_path)
    (folder / name).unlink()
    assert f"Suspects {COUNT} of 300" in read(write_report(folder)).text


def test_no_suspects(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, suspects={"cut": 0.5, "count": 0})
    write_suspects(folder, [])
    said = read(write_report(folder)).text
    assert "Suspects 0 of 300 training rows" in said and "No row is a suspect." in said


def test_numbers_that_are_not_finite_are_not_known(tmp_path: Path) -> None:
    folder = write_run_folder(
        tmp_path,
        candidates=[{"name": "a", "accuracy": float("nan"), "low": float("-inf"), "high": None}],
        peak_memory_mb=float("inf"),
    )
    text = write_report(folder).read_text("utf-8")
    assert not re.search(r"\b(nan|inf)\b", text, flags=re.IGNORECASE)


def test_tables_and_pictures(tmp_path: Path) -> None:
    table = read(write_report(write_run_folder(tmp_path / "a", kind="table"))).data["suspects"][0]
    assert len(table["features"]) == 12 and table["features"][0][0] == "feature 0" and not table["text"]
    image = read(write_report(write_run_folder(tmp_path / "b", kind="image"))).data["suspects"][0]
    assert image["picture"].startswith("data:image/png;base64,") and not image["features"]


def test_long_texts_are_cut_and_that_is_counted(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path)
    write_suspects(folder, [{"row": 0, "text": "a" * 5000}])
    (suspect,) = read(write_report(folder)).data["suspects"]
    assert len(suspect["text"]) == 4000 and suspect["cut"] == 1000


# --- the package -------------------------------------------------------------------------------------------


def test_the_wheel_ships_template_style_and_script(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"hyperkron/cleaning/report/{name}" for name in ("template.html.j2", "report.css", "report.js")} <= names
