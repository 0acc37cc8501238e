"""Write ``requirements/lock.txt``: everything that ``make venv`` installs, with the SHA-256 of every file it may use.

    .venv/bin/python requirements/lock.py [--index https://pypi.org/simple]

Run it after a change of ``constraints.txt``, in an environment with the new versions. What is needed is found by
following the metadata of installed packages from ``hyperkron[dev]``; versions are those of ``constraints.txt``; hashes
are those of the index, for wheels of CPython 3.10 to 3.13 on Linux and macOS. ``torch`` and what only its CUDA build
brings have no hashes: they come in several builds of one version, from several indexes.
"""

from __future__ import annotations

import argparse
import html
import importlib.metadata
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PLATFORMS = ("linux", "darwin")
UNHASHED = re.compile(r"torch|triton|cuda-.*|nvidia-.*")
"""Packages that differ between the builds of torch."""
TAGS = {"py3", *(f"{kind}{version.replace('.', '')}" for version in PYTHONS for kind in ("py", "cp"))}
HEADER = """\
# Made by requirements/lock.py from constraints.txt: do not edit. All that `make venv` installs but torch, which has a
# build for every kind of machine, and what only its CUDA build brings: constraints.txt pins those by version.
# pip install --require-hashes --no-deps --only-binary :all: -r requirements/lock.txt
"""


def requirements(path: Path) -> list[Requirement]:
    """The requirements of a file of plain lines."""
    lines = (line.strip() for line in path.read_text("utf-8").splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def environments() -> Iterator[dict[str, str]]:
    """The values of markers in every environment that is supported."""
    for python in PYTHONS:
        for platform in PLATFORMS:
            system = {"linux": "Linux", "darwin": "Darwin"}[platform]
            yield {
                "python_version": python,
                "python_full_version": f"{python}.9",
                "sys_platform": platform,
                "platform_system": system,
                "os_name": "posix",
                "platform_machine": "x86_64",
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }


def wanted(requirement: Requirement, extra: str = "") -> bool:
    """Whether a requirement counts in any supported environment."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**where, "extra": extra}) for where in environments())


def needed(root: str) -> set[str]:
    """The names of everything a requirement brings with it, by the metadata of what is installed."""
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(root)]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            try:
                lines = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # for another version of Python or another system
            waiting += [r for r in map(Requirement, lines) if wanted(r, extra)]
    return {name for name, _ in found}


def files(index: str, name: str) -> dict[str, str]:
    """The files of a package and their SHA-256."""
    with urllib.request.urlopen(f"{index}/{name}/", timeout=60) as page:
        text = page.read().decode("utf-8")
    links = re.findall(r'href="[^"#]*#sha256=([0-9a-f]{64})"[^>]*>\s*([^<\s]+)\s*</a>', text)
    return {html.unescape(file): digest for digest, file in links}


def fits(file: str, version: str) -> bool:
    """Whether a file is a wheel of this version that a supported environment can use."""
    if not file.endswith(".whl") or f"-{version}-" not in file:
        return False  # also names of old files that no longer are valid ones
    _, found, _, tags = parse_wheel_filename(file)
    return str(found) == version and any(
        (tag.interpreter in TAGS or tag.abi == "abi3")
        and not tag.abi.endswith("t")
        and (tag.platform == "any" or tag.platform.startswith(("manylinux", "macosx")))
        for tag in tags
    )


def entries(index: str) -> Iterator[str]:
    """A line for each pin and file."""
    pins = requirements(ROOT / "constraints.txt")
    peers = {canonicalize_name(r.name) for r in requirements(ROOT / "requirements" / "peers.txt")}
    names = needed("hyperkron[dev]") | peers | {"hatchling"}
    elsewhere = {canonicalize_name(r.name) for r in pins} - {
        canonicalize_name(r.name) for r in pins if r.marker is None or r.marker.evaluate()
    }
    names = {name for name in names | elsewhere if not UNHASHED.fullmatch(name)} - {"hyperkron"}
    missing = names - {canonicalize_name(r.name) for r in pins}
    if missing:
        raise SystemExit(f"constraints.txt has no version of {', '.join(sorted(missing))}")
    with ThreadPoolExecutor(8) as pool:
        pages = dict(zip(names, pool.map(lambda name: files(index, name), names), strict=True))
    for pin in pins:
        name = canonicalize_name(pin.name)
        if name not in names:
            continue
        (version,) = (specifier.version for specifier in pin.specifier)
        hashes = sorted(digest for file, digest in pages[name].items() if fits(file, version))
        if not hashes:
            raise SystemExit(f"{index} has no wheel of {name} {version} for Python {', '.join(PYTHONS)}")
        yield " \\\n".join([str(pin), *(f"    --hash=sha256:{digest}" for digest in hashes)])


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", default="https://pypi.org/simple", help="a package index with hashes (PEP 503)")
    found = list(entries(parser.parse_args().index.rstrip("/")))
    path = ROOT / "requirements" / "lock.txt"
    path.write_text(HEADER + "\n".join(found) + "\n", "utf-8")
    print(f"{path.relative_to(ROOT)}: {len(found)} packages, {sum(x.count('--hash') for x in found)} hashes")


if __name__ == "__main__":
    main()
