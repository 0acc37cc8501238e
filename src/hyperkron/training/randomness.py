"""The random states of torch, numpy and ``random``: seeded together, saved and restored together."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hyperkron.solution import HyperkronError, warn_once


def seed_all(seed: int) -> None:
    """Seed torch, ``random``, and numpy where it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """All global random states, as tensors and plain values."""
    version, words, gauss = random.getstate()
    found: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
    }
    if torch.cuda.is_available():
        found.update({f"cuda:{i}": x for i, x in enumerate(torch.cuda.get_rng_state_all())})
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        if kind == "MT19937":
            words = torch.tensor(keys.tolist(), dtype=torch.int64, device="cpu")
            found["numpy"] = {"words": words, "position": position, "has_gauss": has_gauss, "cached": cached}
        else:
            warn_once("numpy-generator", f"numpy's global generator is a {kind}, whose state is not saved.")
    return found


def set_random_state(state: dict[str, Any]) -> None:
    """Continue from a :func:`random_state`; the states of GPUs that are not here are left out."""
    torch.set_rng_state(state["cpu"])
    if "python" in state:
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    for name, value in state.items():
        if name.startswith("cuda:") and int(name.removeprefix("cuda:")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, int(name.removeprefix("cuda:")))
    if "numpy" in state:
        try:
            import numpy
        except ImportError as error:
            raise HyperkronError("the state holds numpy's random state; install numpy to continue the run.") from error
        saved = state["numpy"]
        keys = numpy.array(saved["words"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", keys, saved["position"], saved["has_gauss"], saved["cached"]))


@contextmanager
def kept_random_state() -> Iterator[None]:
    """After the block all global random states are what they were."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def same_random_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two :func:`random_state` are equal."""
    (mine, structure), (its, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return structure == other and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(mine, its, strict=True)
    )
