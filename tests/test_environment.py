"""The environment, what the package ships and imports, and the examples of the README."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hyperkron
from blobs import blobs, quicken, write_csv
from hyperkron.cleaning import CleanConfig
from scripts import loaded

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "hyperkron"
SOURCES = sorted(SRC.rglob("*.py"))

HEAVY = ("sklearn", "transformers", "datasets", "pandas", "matplotlib", "optuna")

# --- the environment ---------------------------------------------------------------------------------------


def test_torchvision_is_absent() -> None:
    """PyPI's torchvision breaks the CPU build of torch, so nothing may pull it in."""
    assert importlib.util.find_spec("torchvision") is None, (
        "torchvision is installed. Remove it (pip uninstall torchvision), find what brought it in "
        "and install that with --no-deps."
    )


def test_torchvision_is_named_by_no_requirement() -> None:
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt", *(ROOT / "requirements").glob("*.txt")]
    for file in files:
        wanted = [line for line in file.read_text("utf-8").splitlines() if not line.lstrip().startswith("#")]
        assert "torchvision" not in "\n".join(wanted), f"{file.name} asks for torchvision"


def test_installed_versions_are_the_pinned_ones() -> None:
    """Every pin of constraints.txt that is installed has the version it says; so do the peers."""
    from packaging.requirements import Requirement

    lines = [*(ROOT / "constraints.txt").open(encoding="utf-8")]
    lines += (ROOT / "requirements" / "peers.txt").open(encoding="utf-8")
    pins = [Requirement(line) for line in map(str.strip, lines) if line and not line.startswith("#")]
    assert len(pins) > 50
    wrong = []
    for pin in pins:
        if pin.marker is not None and not pin.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(pin.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # belongs to an extra that is not installed
        if not pin.specifier.contains(version, prereleases=True):
            wrong.append(f"{pin.name} {version}, pinned {pin.specifier}")
    assert not wrong, f"run `make venv`: {wrong}"


def _pinned(path: Path) -> dict[tuple[str, str], str]:
    """The version of every (name, marker) of a file of pins; hashes are left out."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = path.read_text("utf-8").replace("\\\n", " ").splitlines()
    pins = [Requirement(line.split("--hash")[0].strip()) for line in lines if line.strip() and line[0] != "#"]
    return {(canonicalize_name(pin.name), str(pin.marker)): str(pin.specifier) for pin in pins}


def test_everything_that_is_installed_but_torch_is_locked_with_hashes() -> None:
    """lock.txt has the versions of constraints.txt, a hash for each, and all that ``hyperkron[dev]`` needs here."""
    lock = ROOT / "requirements" / "lock.txt"
    entries = [line for line in lock.read_text("utf-8").replace("\\\n", " ").splitlines() if line[0] != "#"]
    assert len(entries) > 80 and all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for entry in entries)
    pins, locked = _pinned(ROOT / "constraints.txt"), _pinned(lock)
    assert {key: pins.get(key) for key in locked} == locked, "run requirements/lock.py"
    names, missing = {name for name, _ in locked}, []
    module = loaded(ROOT / "requirements" / "lock.py")
    for name in module.needed("hyperkron[dev]") - {"hyperkron"}:
        if name not in names and not module.UNHASHED.fullmatch(name):
            missing.append(name)
    assert missing == [], "add them to constraints.txt and run requirements/lock.py"
    assert {name for name, _ in _pinned(ROOT / "requirements" / "peers.txt")} <= names


# --- the package -------------------------------------------------------------------------------------------


def test_metadata() -> None:
    metadata = importlib.metadata.metadata("hyperkron")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert hyperkron.__version__ == metadata["Version"]
    core = [r for r in importlib.metadata.requires("hyperkron") or [] if "extra ==" not in r]
    assert sorted(r.split(">=")[0] for r in core) == ["safetensors", "torch", "tqdm"]
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert extras >= {"data", "text", "report", "track", "sweep", "cli", "dev"}


def test_the_wheel_ships_all_sources_types_and_licence(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "hyperkron/py.typed" in names
    assert {f"hyperkron/{path.relative_to(SRC).as_posix()}" for path in SOURCES} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"hyperkron", f"hyperkron-{hyperkron.__version__}.dist-info"}


def test_the_sdist_ships_experiments_and_tests(tmp_path: Path) -> None:
    from hatchling.builders.sdist import SdistBuilder

    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"experiments/paper/__main__.py", "experiments/results/kfac_fallback.json", "support/resuming.py"} <= names
    assert {"conftest.py", "tests/test_environment.py"} <= names  # the tests run there, too


def test_import_is_light() -> None:
    """`import hyperkron` pulls in none of the heavy extras."""
    program = f"import sys, hyperkron; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


# --- the README --------------------------------------------------------------------------------------------


def test_the_readme_examples_run_and_find_the_wrong_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    quicken(monkeypatch)
    monkeypatch.setattr(hyperkron, "clean", partial(hyperkron.clean, config=CleanConfig(epochs=1, compare=("noisy",))))
    data = blobs(rows=60)
    for name, rows in (("train", data.train), ("trusted", data.trusted), ("new", data.test)):
        write_csv(tmp_path / f"{name}.csv", rows)
    names: dict[str, Any] = {}
    for example in examples:  # each goes on where the one before it ended
        exec(compile(example, "README.md", "exec"), names)
    assert len(examples) == 4 and names["run"].history.to_rows()
    weights = names["weights"](torch.arange(64)).detach()
    assert weights[:16].mean() < weights[16:].mean() - 0.2
    assert names["result"].status.value in capsys.readouterr().out
