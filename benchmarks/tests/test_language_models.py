"""The benchmarks of language models, at the size of a toy: every line is written, and bfloat16 is exact enough."""

from __future__ import annotations

import argparse
import json
from typing import Any

import exactness
import language_models
import pytest
from workloads import LANGUAGE


@pytest.mark.long
def test_a_line_for_every_method() -> None:
    rows: list[dict[str, Any]] = []
    methods = ["SAMA", "KFAC reduce", "KFAC reduce, passes"]
    args = argparse.Namespace(device="cpu", small=True, methods=methods, repeats=1, stages=["KFAC reduce"], most=1.1)
    language_models.rows_of("llama07", args, rows.append)
    json.dumps(rows)
    assert not [row for row in rows if "error" in row]
    assert rows[0]["method"] == "ten steps"
    allowed = [row["allowed_gib"] for row in rows if "allowed_gib" in row]
    assert allowed == [pytest.approx(1.1 * next(row["reserved_gib"] for row in rows if row.get("method") == "SAMA"))]
    timed = [row for row in rows if "ratio" in row]
    assert [row["method"] for row in timed] == args.methods
    assert all(row["ratio"] > 1 and row["reserved_over_sama"] > 0 for row in timed)
    assert {"outer gradient", "solve", "cross term"} <= {s for row in rows for s in row.get("stages_ms", ())}


@pytest.mark.long
def test_the_cosine_in_bfloat16_and_what_the_labels_have_to_do_with_it() -> None:
    work = LANGUAGE["llama07"]("cpu", True)
    for _ in range(3):
        work.inner_steps()
    comparison = exactness.Comparison(work, "cpu")
    found = comparison.compared(work.batches[0], True)
    json.dumps(found)
    rows = {name: (hypergradient, v) for name, (hypergradient, v) in found["rows"].items()}
    other = rows.pop("KFAC in float32, other draws")
    rows.pop("KFAC")  # some of its labels may be others
    assert len(rows) == 6 and all(min(pair) > 0.99 for pair in rows.values()), rows
    assert other[1] < 0.95  # so that labels matter
    assert 0 <= found["changed"] < 0.1
