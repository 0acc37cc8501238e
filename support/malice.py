"""Checkpoints, logs, datasets, configurations and run folders made to do harm: the cases of ``arena``, all of them.

Those of checkpoints and logs are in ``malice_checkpoints``; datasets, configurations, run folders and pages are here.
"""

from __future__ import annotations

import gzip
import html.parser
import io
import json
import struct
import zipfile
from typing import Any

import torch

import hyperkron as hk
import malice_checkpoints
from arena import CASES, Arena, Payload, case, harm

__all__ = ["CASES", "Arena", "harm", "malice_checkpoints"]

# --- datasets ----------------------------------------------------------------------------------------------


@case
def _(arena: Arena) -> Any:
    """an IDX file whose header claims 4 EiB."""
    path = arena.folder / "train-images-idx3-ubyte"
    path.write_bytes(bytes([0, 0, 0x0E, 3]) + struct.pack(">3I", 2**31, 2**31, 2**7) + bytes(100))
    from hyperkron.cleaning.data import read_idx

    return read_idx(path)


@case
def _(arena: Arena) -> Any:
    """a gzip bomb as IDX file."""
    from hyperkron.cleaning.data import read_idx

    path = arena.folder / "train-images-idx3-ubyte.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(bytes([0, 0, 8, 1]) + struct.pack(">I", 10))
        for _ in range(300):
            file.write(bytes(2**20))
    return read_idx(path, 2**24)


@case
def _(arena: Arena) -> Any:
    """an array of pickled objects."""
    import numpy as np

    from hyperkron.cleaning.data import read_pair

    path = arena.folder / "a.npz"
    objects = np.array([Payload(arena.trace)] * 4, dtype=object)
    np.savez(path, x=objects, y=np.array([0, 1, 0, 1]))
    return read_pair(path, path)


@case
def _(arena: Arena) -> Any:
    """an npz bomb."""
    import numpy as np

    from hyperkron.cleaning.data import ReadOptions, read_pair

    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (300 * 2**20,)})
    path = arena.folder / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as member:
            member.write(head.getvalue())
            for _ in range(300):
                member.write(bytes(2**20))
        archive.writestr("y.npy", b"")
    return read_pair(path, path, options=ReadOptions(max_bytes=2**24))


@case
def _(arena: Arena) -> Any:
    """a table of images whose paths lead elsewhere."""
    from hyperkron.cleaning.data import read_pair

    rows = "".join(f"../elsewhere/secret.txt,{i % 2}\n{arena.secret},{i % 2}\n" for i in range(4))
    (arena.folder / "data").mkdir()
    path = arena.folder / "data" / "a.csv"
    path.write_text(f"image,label\n{rows}")
    return read_pair(path, path, image="image", label="label")


# --- configurations and run folders ------------------------------------------------------------------------


def _configure(arena: Arena, text: str) -> Any:
    """What `hyperkron clean --config` makes of a file; its refusal is a mistake of the command, code 2."""
    from hyperkron.cli.config import read_config
    from hyperkron.cli.output import UsageError

    path = arena.folder / "mine.yaml"
    path.write_text(text)
    try:
        return read_config(path)
    except UsageError as error:
        raise hk.HyperkronError(str(error)) from error


@case
def _(arena: Arena) -> Any:
    """a YAML tag that calls a function, as a value of a configuration."""
    return _configure(arena, f"text: !!python/object/apply:os.mkdir ['{arena.trace}']\n")


@case
def _(arena: Arena) -> Any:
    """a YAML tag that makes an object, as the whole configuration."""
    return _configure(arena, f"!!python/object/new:os.mkdir ['{arena.trace}']\n")


@case
def _(arena: Arena) -> Any:
    """a configuration that names code to run."""
    return _configure(arena, "model: os:mkdir\n")


@case
def _(arena: Arena) -> Any:
    """a configuration whose aliases grow a thousand million times."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    return _configure(arena, "\n".join(lines) + "\nfeatures: *a8\n")


@case
def _(arena: Arena) -> Any:
    """pickle in place of a finished stage of `clean`."""
    from hyperkron.cleaning.stages import Stages

    stages = Stages(arena.run)
    stages("experts", lambda: {"asked": torch.ones(2)})
    for name in ("experts.safetensors", "experts.json"):
        (arena.run / name).write_bytes(arena.pickle)
    return "left alone" if stages.find("experts") is None else "read"


@case
def _(arena: Arena) -> Any:
    """a stage of `clean` that is a link to a file elsewhere."""
    from hyperkron.cleaning.stages import Stages

    stages = Stages(arena.run)
    stages("experts", lambda: {"asked": torch.ones(2)})
    (arena.run / "experts.json").unlink()
    (arena.run / "experts.json").symlink_to(arena.secret)
    return "not followed" if stages.find("experts") is None else "read"


# --- pages -------------------------------------------------------------------------------------------------

HOSTILE = "</script></title><script>window.__owned=1</script><img src=x onerror=alert(1)>{{7*7}}\u2028\"'"


class _Elements(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        active = [name for name in names if name.startswith("on")]
        links = [v for n, v in names.items() if n in ("src", "href") and (v or "").split(":")[0] not in ("data", "")]
        if active or (tag in ("img", "iframe", "object", "embed") and links and not str(links[0]).startswith("#")):
            self.bad.append(f"<{tag} {names}>")

    def handle_data(self, data: str) -> None:
        if self.get_starttag_text() == "<script>" and "__owned" in data and "JSON" not in data:
            self.bad.append(data[:60])


@case
def _(arena: Arena) -> Any:
    """HTML and script in the names, texts and classes of a report."""
    import run_folder
    from hyperkron.cleaning.report import write_report

    run_folder.write_run_folder(arena.run, rows=40, classes=(HOSTILE, "b", "c"), verdict=HOSTILE, command=HOSTILE)
    suspects = [json.loads(line) for line in (arena.run / "suspects.jsonl").read_text("utf-8").splitlines()]
    run_folder.write_suspects(arena.run, [{**s, "text": HOSTILE, "suggested": HOSTILE} for s in suspects])
    page = write_report(arena.run).read_text("utf-8")
    found = _Elements()
    found.feed(page)
    assert not found.bad, f"markup of the data is markup of the page: {found.bad[:2]}"
    assert HOSTILE not in page, "the text is in the page as it is"
    assert page.lower().count("<script") == 2, "a script was added"
    return "shown as text"
