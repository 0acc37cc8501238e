"""Checkpoints of sharded tensors: each process writes its rows, and any number of them can read.

folder/step-00000123/tensors-rank00001.safetensors    the rows of the second process, and so on
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.algorithms import State
from hyperkron.collectives import Group
from hyperkron.problem import Both
from hyperkron.sharded_functions import sharded_over
from hyperkron.sharding import is_sharded, own_rows, sharded_like
from hyperkron.training import files
from hyperkron.training.data_parallel import checksums
from hyperkron.training.encoding import CheckpointError, DamagedCheckpoint, join, sharded_rows, split

FILE = re.compile(r"tensors-rank(\d{5})\.safetensors\Z")


def holds_rows(*modules: nn.Module) -> bool:
    """Whether a parameter or buffer of these modules is sharded."""
    return any(is_sharded(x) for m in modules for x in m.state_dict().values())


# --- writing -----------------------------------------------------------------------------------------------


def write_rows(staging: Path, state: dict[str, Any], group: Group) -> dict[str, dict[str, Any]]:
    """Write the rows of every process but the first as a file in ``staging``; their sizes and SHA-256 by file."""
    record: dict[str, Any] = {"size": 0, "sha256": "0" * 64}
    failure = ""
    try:
        if group.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
    except OSError as error:
        failure = error.strerror or str(error)
    if group.all(not failure) and group.rank > 0:  # also waits until the folder is there
        try:
            record = files.write_tensors(staging / _file(group.rank), sharded_rows(state))
        except OSError as error:
            failure = error.strerror or str(error)
    words = [int(record["sha256"][i : i + 8], 16) for i in range(0, 64, 8)]
    table = group.numbers(bool(failure), record["size"], *words)
    if any(row[0] for row in table):
        raise CheckpointError(
            f"sharded rows could not be saved in {staging.parent} ({failure or 'another process says why'}). Earlier "
            "checkpoints are untouched; make room, or choose another folder that all processes can write."
        )
    return {
        _file(rank): {"size": int(size), "sha256": "".join(f"{int(word):08x}" for word in words)}
        for rank, (_, size, *words) in enumerate(table)
        if rank > 0
    }


def of_all_ranks(own: dict[str, Any], group: Group) -> dict[str, dict[str, Any]]:
    """For the first rank ``own`` of all ranks, by their numbers; nothing for the others."""
    tree, tensors = split(own)
    found = group.of_all({"tree": json.dumps(tree), "tensors": tensors})
    return {str(i): join(json.loads(x["tree"]), x["tensors"].__getitem__) for i, x in enumerate(found)}


def own_buffers(state: State, group: Group) -> dict[str, Tensor]:
    """The buffers that are not the same on all ranks, such as running statistics of BatchNorm, by name."""
    both = Both(state.model, state.hyper)
    saved, params = both.state_dict(), dict(both.named_parameters(remove_duplicate=False))
    found = {n: x for n, x in saved.items() if isinstance(x, Tensor) and n not in params and not is_sharded(x)}
    sums = zip(*group.numbers(*checksums(found)), strict=True) if found else ()
    return {name: x for (name, x), column in zip(found.items(), sums, strict=True) if len(set(column)) > 1}


def _file(rank: int) -> str:
    return f"tensors-rank{rank:05d}.safetensors"


# --- reading -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reader(
    path: Path, records: Mapping[str, dict[str, Any]], group: Group | None
) -> Iterator[Callable[[str, tuple[int, ...]], Any]]:
    """A function (name, shape) → a sharded tensor with the rows of this process, or the whole tensor."""
    names = sorted(name for name in records if FILE.match(name))
    with contextlib.ExitStack() as stack:
        opened: list[files.TensorFile] = []

        def rows(name: str, shape: tuple[int, ...]) -> Any:
            if not opened:
                opened.extend(stack.enter_context(files.TensorFile(path / n, records[n])) for n in names)
            wanted = slice(0, shape[0]) if group is None else own_rows(shape[0], group.rank, group.size)
            found = []
            for rank, file in enumerate(opened):
                have = own_rows(shape[0], rank, len(opened))
                begin, end = max(wanted.start, have.start), min(wanted.stop, have.stop)
                if begin < end:
                    found.append(file(name, slice(begin - have.start, end - have.start)))
            own = torch.cat(found) if found else opened[0](name, slice(0, 0))
            if own.shape != (wanted.stop - wanted.start, *shape[1:]):
                raise DamagedCheckpoint(f"{name} has rows of shape {tuple(own.shape)}, which do not fit {shape}")
            return own if group is None else sharded_over(group, own, shape[0])

        yield rows


def resharded(saved: dict[str, Any], state: State) -> dict[str, Any]:
    """A saved state of a run, with whole tensors sharded where those of ``state`` are."""
    live = {**state.params, **state.hypers, **state.model.state_dict(), **state.hyper.state_dict()}
    own = dict(saved["state"])
    own |= {name: _placed(own[name], live) for name in ("model", "hyper", "trees")}
    for name in ("inner", "outer"):
        own[name] = _moments(own[name], getattr(state, name).optimizer)
    own["twins"] = {
        name: {"params": _placed(twin["params"], live), "optimizer": _moments(twin["optimizer"], state.inner.optimizer)}
        for name, twin in own["twins"].items()
    }
    if own["hypergradient"].get("start"):
        own["hypergradient"] = {**own["hypergradient"], "start": _placed(own["hypergradient"]["start"], live)}
    return {**saved, "state": own}


def _placed(x: Any, live: Mapping[str, Any], name: str = "") -> Any:
    """Shards whole tensors that are sharded in ``live``."""
    if isinstance(x, dict):
        return type(x)({key: _placed(value, live, str(key)) for key, value in x.items()})
    like: Any = live.get(name)
    whole = is_sharded(like) and isinstance(x, Tensor) and not is_sharded(x) and x.shape == like.shape
    return sharded_like(x, like) if whole else x


def _moments(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    params = [p for g in optimizer.param_groups for p in g["params"]]
    own = {key: _placed(one, dict.fromkeys(one, params[int(key)])) for key, one in saved["state"].items()}
    return {**saved, "state": own}
