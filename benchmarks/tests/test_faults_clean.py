"""Runs of `clean` that are resumed with other options: one row of the benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import faults_clean
import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks"),
]


def test_every_resume_of_clean_with_other_options_is_refused(tmp_path: Path) -> None:
    """For the reason that is meant, and the run is left as it was."""
    row = faults_clean.faults(tmp_path)[0]()
    assert row["survived"] == row["tries"] > 15, row["note"]
