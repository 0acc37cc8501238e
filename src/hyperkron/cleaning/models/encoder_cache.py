"""Embeddings kept on the disk as safetensors, with the SHA-256 of what they hold."""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hyperkron.solution import HyperkronError, HyperkronWarning
from hyperkron.training.files import write_tensors


def write_embeddings(path: Path, x: Tensor) -> None:
    """Write a file that is complete or absent."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(temporary, {"embeddings": x, "sha256": _sum(x)})
        os.replace(temporary, path)
    except OSError as error:
        raise HyperkronError(
            f"cache={str(path.parent)!r} cannot be written ({error.strerror}); give another folder, or none."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def read_embeddings(path: Path, shape: tuple[int, int]) -> Tensor | None:
    """What was kept, or None where nothing was; a file that is damaged is said to be so, and not used."""
    if not path.is_file():
        return None
    try:
        found = load_file(path)
        x = found["embeddings"]
        if x.shape == shape and x.dtype == torch.float32 and torch.equal(found["sha256"], _sum(x)):
            return x
        reason = "its content is not what was written"
    except (SafetensorError, OSError, KeyError) as error:
        reason = str(error)[:200]
    warnings.warn(f"{path} is damaged ({reason}); the embeddings are computed again.", HyperkronWarning, stacklevel=3)
    return None


def _sum(x: Tensor) -> Tensor:
    return torch.tensor(list(hashlib.sha256(x.contiguous().numpy().tobytes()).digest()), dtype=torch.uint8)
