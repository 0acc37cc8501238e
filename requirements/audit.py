"""Look for known vulnerabilities in the pinned versions, with pip-audit and the database of PyPI.

    .venv/bin/python requirements/audit.py

Exit code 1 if there are any. Where the database or pip-audit cannot be reached nothing is audited: that is said, and
the exit code is 0, because it says nothing about the packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP_AUDIT = "pip-audit==2.10.1"
PROBE = "https://pypi.org/pypi/jinja2/2.10/json"
"""A release with published vulnerabilities: a database that has none for it is not one."""


def unreachable() -> str:
    """Why the database cannot be used; empty if it can."""
    try:
        with urllib.request.urlopen(PROBE, timeout=20) as page:
            known = json.load(page).get("vulnerabilities")
    except (OSError, ValueError) as error:
        return f"{PROBE}: {error}"
    return "" if known else f"{PROBE} lists no vulnerabilities"


def tool() -> Path | None:
    """pip-audit in an environment of its own, so that it brings nothing into the one under test."""
    home = ROOT / ".venv" / "audit"
    program = home / "bin" / "pip-audit"
    if not program.exists():
        venv.create(home, with_pip=True, clear=True)
        install = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PIP_AUDIT]
        if subprocess.run(install, check=False).returncode != 0:
            return None
    return program


def main() -> int:
    """Audit, if that is possible."""
    reason = unreachable()
    program = None if reason else tool()
    if program is None:
        print(f"Not audited: {reason or f'{PIP_AUDIT} could not be installed'}.")
        return 0
    pins = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        torch = Path(folder) / "torch.txt"
        torch.write_text("\n".join(line for line in pins if line.startswith("torch==")), "utf-8")
        for file in (ROOT / "requirements" / "lock.txt", torch):
            command = [str(program), "--disable-pip", "--no-deps", "--requirement", str(file)]
            code = subprocess.run(command, check=False).returncode
            if code != 0:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
