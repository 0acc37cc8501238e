"""Checkpoints, logs, datasets, configurations and run folders made to do harm, and what became of them.

A case builds something hostile in a folder and hands it to the library, which must refuse it by a ``HyperkronError`` or
make nothing of it. Harmed is who runs its code (a trace appears), reads or writes a file elsewhere (the secret is in
what is returned, or altered), or needs more memory than the file deserves (the caller's limit).
"""

from __future__ import annotations

import gzip
import html.parser
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hyperkron as hk
import resuming
from hyperkron.training import checkpoint, files
from hyperkron.training.jsonl import JSONLog

SECRET = "the words that must not leave their file"
TENSORS, STATE, MANIFEST = "tensors-rank00000.safetensors", "state-rank00000.json", "manifest.json"


class _Payload:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


class Arena:
    """A folder with a run's checkpoint to be tampered with, a secret beside it, and the place of a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.elsewhere = folder, folder / "run", folder / "elsewhere"
        self.trace, self.secret = folder / "trace", folder / "elsewhere" / "secret.txt"
        self.elsewhere.mkdir(parents=True)
        self.secret.write_text(SECRET)
        self.pickle = pickle.dumps(_Payload(self.trace))

    def saved(self) -> Path:
        """A true checkpoint."""
        return resuming.start("KFAC", steps=1).save(self.run)

    def forge(self, change: Callable[[dict[str, Any]], None] | None = None, **contents: bytes) -> Path:
        """A checkpoint with other files, whose hashes agree with them."""
        path = self.saved()
        manifest = json.loads((path / MANIFEST).read_text())
        del manifest["sha256"]
        for name, data in contents.items():
            name = {"state": STATE, "tensors": TENSORS}[name]
            (path / name).unlink()
            manifest["files"][name] = files.write_bytes(path / name, data)
        if change is not None:
            change(manifest)
        (path / MANIFEST).write_bytes(checkpoint._sealed(manifest))
        return path

    def forge_state(self, change: Callable[[dict[str, Any]], None]) -> Path:
        """A checkpoint whose state was edited as JSON, with hashes that agree."""
        tree = json.loads((self.saved() / STATE).read_text())
        change(tree)
        return self.forge(state=json.dumps(tree).encode())

    def resume(self) -> Any:
        """What a user does with a folder of checkpoints."""
        return resuming.start("KFAC").resume(self.run)


CASES: dict[str, Callable[[Arena], Any]] = {}


def case(function: Callable[[Arena], Any]) -> Callable[[Arena], Any]:
    """Name a case by its docstring."""
    CASES[(function.__doc__ or "").strip().rstrip(".")] = function
    return function


# --- checkpoints: code -------------------------------------------------------------------------------------


@case
def _(arena: Arena) -> Any:
    """pickle in place of safetensors."""
    arena.forge(tensors=arena.pickle)
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """torch.save archive in place of safetensors."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("archive/data.pkl", arena.pickle)
        archive.writestr("archive/version", "3\n")
    arena.forge(tensors=data.getvalue())
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """pickle named state.json."""
    arena.forge(state=arena.pickle)
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """pickle named manifest.json."""
    (arena.saved() / MANIFEST).write_bytes(arena.pickle)
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """YAML tags in the state."""
    arena.forge(state=f'!!python/object/apply:os.mkdir ["{arena.trace}"]'.encode())
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """marks that name code to call."""
    call = {"$call": "os.mkdir", "args": [str(arena.trace)]}
    arena.forge_state(lambda tree: tree["state"].update(step=call))
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """a configuration that names a class to make."""
    arena.forge(lambda manifest: manifest["config"].update({"algorithm": "os.mkdir", "class_path": "os.mkdir"}))
    return arena.resume()


# --- checkpoints: places -----------------------------------------------------------------------------------


@case
def _(arena: Arena) -> Any:
    """path traversal in the names of the manifest."""
    record = {"size": len(SECRET), "sha256": files.hashlib.sha256(SECRET.encode()).hexdigest()}
    arena.forge(lambda manifest: manifest.update(files={"../../elsewhere/secret.txt": record}))
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """absolute paths in the names of the manifest."""
    record = {"size": len(SECRET), "sha256": files.hashlib.sha256(SECRET.encode()).hexdigest()}
    arena.forge(lambda manifest: manifest["files"].update({str(arena.secret): record}))
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """a file of the checkpoint is a link to one elsewhere."""
    path = arena.saved() / STATE
    path.rename(arena.elsewhere / STATE)
    path.symlink_to(arena.elsewhere / STATE)
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """a checkpoint is a link to a folder elsewhere."""
    path = arena.saved()
    path.rename(arena.elsewhere / path.name)
    path.symlink_to(arena.elsewhere / path.name)
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """links to folders elsewhere where old checkpoints are deleted."""
    arena.saved().rename(arena.elsewhere / "step-00000009")
    (arena.run / "step-00000009").symlink_to(arena.elsewhere / "step-00000009")
    (arena.run / ".tmp-link").symlink_to(arena.elsewhere)
    resuming.start("KFAC", [hk.Checkpoint(arena.run, every=1, keep=1)], 3)
    assert (arena.elsewhere / "step-00000009" / MANIFEST).exists(), "files elsewhere were deleted"
    return "left alone"


@case
def _(arena: Arena) -> Any:
    """the log of a run is a link to a file elsewhere."""
    arena.run.mkdir()
    (arena.run / "log-rank00000.jsonl").symlink_to(arena.secret)
    resuming.start("KFAC", [hk.Checkpoint(arena.run)], 1)
    return "not followed"


@case
def _(arena: Arena) -> Any:
    """a pipe in place of a file, at which a reader would wait."""
    path = arena.saved() / TENSORS
    path.unlink()
    os.mkfifo(path)
    log = arena.folder / "log-rank00000.jsonl"
    os.mkfifo(log)
    JSONLog(arena.folder).begin(hk.History())
    return arena.resume()


# --- checkpoints: size -------------------------------------------------------------------------------------


@case
def _(arena: Arena) -> Any:
    """a safetensors header of 8 EiB."""
    arena.forge(tensors=(2**63).to_bytes(8, "little") + b"{}")
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """a safetensors header that claims a tensor of 4 TB."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    arena.forge(tensors=len(header).to_bytes(8, "little") + header + bytes(64))
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """a tensor of 4 TB made of one number by its strides."""
    bomb = {"$tensor": "state.model.layers.0.weight", "shape": [10**12], "stride": [0]}
    arena.forge_state(lambda tree: tree["state"]["model"].update({"layers.0.weight": bomb}))
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """JSON nested 100 000 deep."""
    arena.forge(state=b"[" * 100_000 + b"]" * 100_000)
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """JSON nested 100 000 deep, as the history inside the tensor file."""
    tree, tensors = checkpoint.split(resuming.start("KFAC", steps=1).state_dict())
    tensors["bomb"] = torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8)
    tree["history"]["rows"] = {"$text": "bomb"}
    files.write_tensors(arena.folder / "made", tensors)
    arena.forge(tensors=(arena.folder / "made").read_bytes(), state=json.dumps(tree).encode())
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """a number of a million digits, and a manifest of 1 TB."""
    arena.forge(state=b'{"step": ' + b"9" * 10**6 + b"}")
    try:
        arena.resume()
    except hk.HyperkronError:
        with (arena.run / "step-00000001" / MANIFEST).open("r+b") as file:
            file.truncate(10**12)  # sparse: it takes no place on the disk
    return arena.resume()


@case
def _(arena: Arena) -> Any:
    """random states and counters of the wrong kind."""
    arena.forge_state(lambda tree: tree["random"].update(cpu=[1, 2, 3]))
    return arena.resume()


# --- datasets ----------------------------------------------------------------------------------------------


@case
def _(arena: Arena) -> Any:
    """an IDX file whose header claims 4 EiB."""
    path = arena.folder / "train-images-idx3-ubyte"
    path.write_bytes(bytes([0, 0, 0x0E, 3]) + struct.pack(">3I", 2**31, 2**31, 2**7) + bytes(100))
    from hyperkron.data import read_idx

    return read_idx(path)


@case
def _(arena: Arena) -> Any:
    """a gzip bomb as IDX file."""
    from hyperkron.data import read_idx

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

    from hyperkron.data import read_pair

    path = arena.folder / "a.npz"
    objects = np.array([_Payload(arena.trace)] * 4, dtype=object)
    np.savez(path, x=objects, y=np.array([0, 1, 0, 1]))
    return read_pair(path, path)


@case
def _(arena: Arena) -> Any:
    """an npz bomb."""
    import numpy as np

    from hyperkron.data import ReadOptions, read_pair

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
    from hyperkron.data import read_pair

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
    from hyperkron.tasks.cleaning.stages import Stages

    stages = Stages(arena.run)
    stages("experts", lambda: {"asked": torch.ones(2)})
    for name in ("experts.safetensors", "experts.json"):
        (arena.run / name).write_bytes(arena.pickle)
    return "left alone" if stages.find("experts") is None else "read"


@case
def _(arena: Arena) -> Any:
    """a stage of `clean` that is a link to a file elsewhere."""
    from hyperkron.tasks.cleaning.stages import Stages

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
    from hyperkron.report import write_report

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


def harm(act: Callable[[Arena], Any], folder: Path) -> str:
    """What harm a case has done; empty if it was refused, or came to nothing."""
    arena, told = Arena(folder), ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hk.HyperkronWarning)
            told = str(act(arena))
        expected = isinstance(told, str) and told in ("left alone", "not followed", "shown as text")
        if not expected:
            return f"it was accepted: {told[:100]}"
    except hk.HyperkronError as error:
        told = str(error)
    except AssertionError as error:
        return str(error)
    except BaseException as error:
        return f"it ended in a {type(error).__name__}: {str(error)[:100]}"
    if arena.trace.exists():
        return "its code was run"
    if SECRET in told:
        return "it read a file elsewhere"
    return "" if arena.secret.read_text() == SECRET else "it altered a file elsewhere"
