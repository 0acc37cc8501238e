"""The benchmark of language models, at the size of a toy: every line is written, and bfloat16 is exact enough."""

from __future__ import annotations

import argparse
import json
from typing import Any

import language_models
import pytest


@pytest.mark.long
def test_a_line_for_every_method_and_the_cosine_in_bfloat16() -> None:
    rows: list[dict[str, Any]] = []
    args = argparse.Namespace(
        device="cpu", small=True, methods=["SAMA", "KFAC reduce"], repeats=1, stages=["KFAC reduce"], cosine=True
    )
    language_models.rows_of("llama07", args, rows.append)
    json.dumps(rows)
    assert not [row for row in rows if "error" in row]
    timed = [row for row in rows if "ratio" in row]
    assert [row["method"] for row in timed] == args.methods
    assert all(row["ratio"] > 1 and row["memory_over_sama"] > 0 for row in timed)
    assert {"outer gradient", "solve", "cross term"} <= {s for row in rows for s in row.get("stages_ms", ())}
    exact = [row for row in rows if "cosine" in row]
    assert len(exact) == 3
    assert all(row["cross"] == "adjoint" and row["cosine"] > 0.99 for row in exact)
