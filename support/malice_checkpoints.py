"""Checkpoints and logs made to do harm: code, places elsewhere, and sizes; ``malice`` has them all."""

from __future__ import annotations

import io
import json
import os
import zipfile
from typing import Any

import torch

import hyperkron as hk
import resuming
from arena import MANIFEST, SECRET, STATE, TENSORS, Arena, case
from hyperkron.training import checkpoint, files
from hyperkron.training.history import JSONLog

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
    JSONLog(arena.folder).begin(hk.training.History())
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
