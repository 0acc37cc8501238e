"""What the report draws and compares: plots, histograms, the noise matrix, and the differences."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hyperkron.cleaning.report import plots, wording, write_report
from hyperkron.cleaning.report.folder import Candidate, read_run
from run_folder import write_run_folder

# --- the plots ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.73, 0.95, 5, [0.75, 0.8, 0.85, 0.9, 0.95]),
        (-3, 7, 4, [0, 5]),
        (0, 3e-7, 3, [0, 1e-7, 2e-7, 3e-7]),
        (2, 2, 5, [2]),
    ],
)
def test_ticks(low: float, high: float, about: int, expected: list[float]) -> None:
    assert plots.ticks(low, high, about) == pytest.approx(expected)


def test_dots_stand_where_the_numbers_say(tmp_path: Path) -> None:
    limits = [{"accuracy": 0.75, "low": 0.7, "high": 0.8}, {"accuracy": 0.8, "low": 0.8, "high": 0.8}]
    folder = write_run_folder(tmp_path, candidates=[{"name": name, **x} for name, x in zip("ba", limits, strict=True)])
    assert plots.accuracy_axis(read_run(folder).candidates[:1])[:2] == pytest.approx((0.7, 0.8))
    drawn = write_report(folder).read_text("utf-8")
    assert re.findall(r'cx="([\d.]+)%"', drawn) == ["98", "50"]  # 2 % are left free at both ends; the best first
    assert 'x1="2%" x2="98%" y1="76" y2="76" class="interval"' in drawn
    assert ">75.0% (70.0 – 80.0%)</text>" in drawn


def test_the_histogram_counts_every_row() -> None:
    bars = plots.histogram([-1.0, 0.0, 0.49, 0.5, 1.0, 7.0, float("nan")], []).bars
    assert [(bar.low, bar.kept) for bar in bars if bar.kept] == [(0, 2), (0.45, 1), (0.5, 1), (0.95, 2)]
    bars = plots.histogram([0.1] * 4 + [0.99], [1.0] * 3).bars
    assert [(bar.tall, bar.tall_top) for bar in bars if bar.kept] == [(170, 0), (42.5, 127.5)]


def test_the_histogram_is_drawn_as_high_as_its_counts(tmp_path: Path) -> None:
    lines = [f"{i},a,b,0.1,{0.1 if i < 4 else 0.9},{'true' if i > 4 else 'false'}\n" for i in range(8)]
    folder = write_run_folder(tmp_path)
    (folder / "rows.csv").write_text(f"row,given,suggested,error_probability,weight,suspect\n{''.join(lines)}", "utf-8")
    drawn = write_report(folder).read_text("utf-8")
    heights = [float(h) for h in re.findall(r'height="([\d.]+)" class="bar', drawn)]
    assert [h for h in heights if h] == pytest.approx([170, 42.5, 127.5])
    assert "weight 0.9 to 0.95; rows: 4, suspects: 3" in drawn


def test_without_rows_there_is_no_histogram(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path)
    (folder / "rows.csv").unlink()
    assert "This run kept no weights." in write_report(folder).read_text("utf-8")


def test_plots_are_escaped(tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path, candidates=[{"name": "<b>", "accuracy": 0.5}])
    assert 'class="name"><title>&lt;b&gt;</title>&lt;b&gt;' in write_report(folder).read_text("utf-8")


def test_sparklines_share_one_scale() -> None:
    assert plots.sparkline([0.0, 1.0], 1.0) == "3,21 93,3"
    assert plots.sparkline([0.5], 1.0) == "3,12" and plots.sparkline([], 1.0) == ""


def test_the_noise_matrix_keeps_the_noisiest_classes_and_sums_the_rest() -> None:
    n = 22
    rows = [[0.5 if i == j else 0.5 / (n - 1) for j in range(n)] for i in range(n)]
    rows[3] = [float(j == 3) for j in range(n)]
    rows[7] = [0.9 if j == 7 else 0.1 if j == 3 else 0.0 for j in range(n)]
    table = plots.noise_table([str(i) for i in range(n)], rows)
    assert table.left_out == 2 and table.classes == [str(i) for i in range(n) if i not in (3, 7)]
    first = table.lines[0]
    assert len(first) == 21 and (first[0].text, first[0].shade) == ("50", "right")
    assert (first[1].text, first[-1].text, first[-1].shade) == ("2.4", "4.8", "heat9")
    assert first[-1].tip == "true 0, given a class that is not shown: 4.8%"


def test_a_matrix_without_noise_has_no_shade() -> None:
    table = plots.noise_table(["a", "b"], [[1.0, 0.0], [0.0, 1.0]])
    assert [[c.shade for c in line] for line in table.lines] == [["right", "heat0"], ["heat0", "right"]]


# --- the words ---------------------------------------------------------------------------------------------


def test_candidates_are_compared_with_the_chosen_one() -> None:
    forest = Candidate("forest", "", 0.9, 0.8, 0.95, 60, None, True, None)
    boosted = Candidate("boosted", "", 0.88, 0.8, 0.95, 60, None, False, None, different=False)
    ours = Candidate("hyperkron", "", 0.7, 0.6, 0.8, 60, None, False, None, different=True)
    found = [wording.difference(c, forest) for c in (forest, boosted, ours, replace(ours, different=None))]
    assert found == ["–", "−2.0, not significant", "−20.0, significant", "−20.0"]
