"""Mismatched resumes of ``fit``: none is silent, and what may be resumed is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import faults_runtime
import pytest

import hyperkron as hk
from hyperkron.training import checkpoint

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that another process has written, with other hashes of strings."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    program = "import sys, faults_runtime; faults_runtime.start(steps=2).save(sys.argv[1])"
    paths = [str(Path(hk.__file__).parent.parent), str(ROOT / "benchmarks")]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, check=True)
    return folder


def test_no_change_is_silent(saved: Path) -> None:
    """Structure, code, constants, data, algorithm, optimizers and versions: each is named, old and new."""
    assert len(faults_runtime.ALL_MISMATCHES) >= 25
    assert [name for name in faults_runtime.ALL_MISMATCHES if not faults_runtime.mismatch(saved, name)] == []


def test_no_legitimate_resume_is_refused(saved: Path) -> None:
    assert len(faults_runtime.LEGITIMATE) >= 8
    assert [name for name in faults_runtime.LEGITIMATE if not faults_runtime.legitimate(saved, name)] == []


def test_a_checkpoint_without_a_record_of_its_program_is_refused(saved: Path, tmp_path: Path) -> None:
    read = checkpoint.newest(saved)
    about = checkpoint.About(read.about.model, read.about.hyper, read.about.config)
    checkpoint.write(tmp_path, read.step, read.state, about)
    with pytest.raises(hk.HyperkronError, match=r"program .*: only in this run"):
        faults_runtime.start().resume(tmp_path)
