"""Models whose parameters are sharded (``torch.distributed.fsdp.fully_shard``).

They are evaluated without FSDP's own hooks, which support only first derivatives. Every module that was given to
``fully_shard`` gathers its parameters when it is called and frees them afterwards. The backward pass gathers them again
instead of keeping them. Gathering has derivatives of every order (:mod:`hyperkron.sharded_functions`), so gradients,
Hessian products, cross terms and hooks work as with any model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.forward_ad import make_dual

from hyperkron.collectives import Group
from hyperkron.sharded_functions import gathered
from hyperkron.sharding import is_sharded
from hyperkron.solution import HyperkronError, warn_once

Owner = tuple[nn.Module, str]
"""A module, and the name of a parameter in it."""


def units(model: nn.Module) -> list[nn.Module]:
    """The modules that were given to ``fully_shard``."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None:
        return []
    return [m for m in model.modules() if isinstance(m, module.FSDPModule) or m in _PLAIN]


def dual(p: Tensor, v: Tensor) -> Tensor:
    """p as a dual number with tangent v; if p is sharded, both are gathered when p is used."""
    if not is_sharded(p):
        return make_dual(p.detach(), v)
    made: Any = p.detach()
    made.tangent = v
    return made


def gathered_duals(group: Group, tensors: list[Tensor]) -> list[Tensor]:
    """All rows of sharded tensors, with the tangents that :func:`dual` gave them."""
    found = gathered(group, tensors)
    moving = [i for i, x in enumerate(tensors) if hasattr(x, "tangent")]
    if moving:
        tangents = group.gather_rows([tensors[i].tangent for i in moving])  # type: ignore[attr-defined]
        for i, v in zip(moving, tangents, strict=True):
            found[i] = make_dual(found[i].detach(), v)
    return found


def check(model: nn.Module, hyper: nn.Module | None, group: Group | None) -> bool:
    """Whether parameters of ``model`` are sharded; refuses what cannot be trained here, by name and with a remedy.

    ``group`` has the processes of the problem; ``None`` if it is not divided among processes.
    """
    if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warn_once(
            "processes-not-divided",
            f"there are {dist.get_world_size()} processes, but problem is not divided among them: each computes its "
            "own λ and gradient. Use hyperkron.training.DataParallel(problem), unless this is intended.",
        )
    if "torch.distributed.tensor" not in sys.modules or not dist.is_initialized() or not isinstance(model, nn.Module):
        return False
    for name, p in hyper.named_parameters() if isinstance(hyper, nn.Module) and group is None else ():
        if is_sharded(p):
            raise HyperkronError(
                f"hyper parameter {name} is sharded, but problem is not a DataParallel; use "
                "hyperkron.training.DataParallel(problem)."
            )
    reshard(model)
    found = {name: p for name, p in model.named_parameters() if is_sharded(p)}
    if not found:
        return False
    made = units(model)
    inside = {id(p) for unit in made for p in unit.parameters()}
    for name, p in found.items():
        spec = p._spec  # type: ignore[attr-defined]
        if id(p) not in inside:
            raise HyperkronError(
                f"model parameter {name} is a DTensor ({', '.join(map(str, spec.placements))}) that fully_shard has "
                "not made: tensor-parallel layers (parallelize_module) are not supported; use fully_shard or plain "
                "parameters, with hyperkron.training.DataParallel(problem)."
            )
        if spec.mesh.ndim != 1 or [str(x) for x in spec.placements] != ["S(0)"]:
            raise HyperkronError(
                f"model parameter {name} is sharded as {spec.placements} over a mesh of shape "
                f"{tuple(spec.mesh.shape)}; only rows over one dimension are supported: use fully_shard with a mesh of "
                "one dimension (no HSDP, no tensor parallelism) and without shard_placement_fn."
            )
        if group is None:
            raise HyperkronError(
                f"model parameter {name} is sharded among {spec.mesh.size()} processes by fully_shard, but problem is "
                "not a DataParallel; use hyperkron.training.DataParallel(problem)."
            )
        if spec.mesh.size() != group.size:
            raise HyperkronError(
                f"model parameter {name} is sharded among {spec.mesh.size()} processes, the problem among "
                f"{group.size}; give fully_shard(mesh=…) and DataParallel(group=…) the same ones."
            )
    for unit in made:
        _check_policies(unit)
    return True


def reshard(model: nn.Module) -> None:
    """A forward pass without gradients, as an evaluation makes, leaves the parameters of the root whole: they would be
    taken for plain ones, and their changes be lost."""
    for unit in units(model):
        if unit not in _PLAIN:
            unit.reshard()  # type: ignore[operator]


def _check_policies(unit: Any) -> None:
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    low = group.mp_policy.param_dtype
    if low is not None and any(p.sharded_param.dtype != low for p in group.fsdp_params):
        raise HyperkronError(
            f"mp_policy=MixedPrecisionPolicy(param_dtype={low}) of fully_shard is not used by hypergradients; leave it "
            "out, and train under torch.autocast, or hold the model in that dtype."
        )
    if type(group.offload_policy).__name__ != "OffloadPolicy":
        raise HyperkronError(
            f"offload_policy={type(group.offload_policy).__name__} of fully_shard is not supported; leave it out."
        )


@contextmanager
def plain_modules(model: nn.Module) -> Iterator[None]:
    """Inside the block, modules given to ``fully_shard`` have their original class and no FSDP hooks."""
    held = [(unit, type(unit), _hooks(unit)) for unit in units(model) if unit not in _PLAIN]
    try:
        for unit, kind, hooks in held:
            _PLAIN.add(unit)
            unit.__class__ = kind.__mro__[2]  # FSDPLinear, FSDPModule, Linear
            for table, key, _ in hooks:
                del table[key]
        yield
    finally:
        for unit, kind, hooks in held:
            _PLAIN.discard(unit)
            unit.__class__ = kind
            for table, key, hook in hooks:
                table[key] = hook
                table.move_to_end(key, last=False)


_PLAIN: set[nn.Module] = set()
"""The units that are :func:`plain_modules` now."""


def _hooks(unit: nn.Module) -> list[tuple[Any, int, Any]]:
    """FSDP's own hooks, and where they are registered."""
    tables = (unit._forward_pre_hooks, unit._forward_hooks)
    own = "torch.distributed.fsdp"
    return [(t, key, hook) for t in tables for key, hook in t.items() if str(hook.__module__).startswith(own)]


@contextmanager
def gathering(model: nn.Module, group: Group) -> Iterator[None]:
    """Inside the block, every unit gathers all rows of its parameters when it is called and in the backward pass."""
    made = units(model)
    if not made:
        yield
        return
    kept: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Any:
        rows = kept.get(x.untyped_storage().data_ptr()) if kept and not is_sharded(x) else None
        return x if rows is None else (rows, x.size(), x.stride(), x.storage_offset())

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        rows, *layout = saved
        return group.gather_rows([rows])[0].as_strided(*layout)

    with plain_modules(model), ExitStack() as stack:
        for unit in made:
            stack.callback(_Unit(unit, set(made) - {unit}, group, kept).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        yield


class _Unit:
    """A module given to ``fully_shard``, with hooks that gather its parameters and free them again.

    ``kept`` maps the memory address of each gathered tensor to this process's rows of it.
    """

    def __init__(self, unit: nn.Module, others: set[nn.Module], group: Group, kept: dict[int, Tensor]) -> None:
        self.owners = list(_owners(unit, others))
        self.group, self.kept = group, kept
        self.stack: list[tuple[list[Any], list[int]]] = []
        self.handles = (
            unit.register_forward_pre_hook(self.before, prepend=True),
            unit.register_forward_hook(self.after, always_call=True),
        )

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def before(self, *_: object) -> None:
        rows: list[Any] = [module._parameters[name] for module, name in self.owners]
        distinct = {id(x): x for x in rows if is_sharded(x)}  # none if the unit calls itself
        whole = gathered_duals(self.group, list(distinct.values())) if distinct else []
        by_id = dict(zip(distinct, whole, strict=True))
        addresses = [full.untyped_storage().data_ptr() for full in whole]
        self.kept.update(zip(addresses, (x.detach() for x in distinct.values()), strict=True))
        self.stack.append((rows, addresses))
        for (module, name), x in zip(self.owners, rows, strict=True):
            module._parameters[name] = by_id.get(id(x), x)

    def after(self, *_: object) -> None:
        if not self.stack:  # gathering has failed
            return
        rows, addresses = self.stack.pop()
        for (module, name), x in zip(self.owners, rows, strict=True):
            module._parameters[name] = x
        for address in addresses:  # another tensor may use this memory from now on
            self.kept.pop(address, None)


def _owners(module: nn.Module, others: set[nn.Module]) -> Iterator[Owner]:
    """The sharded parameters of a unit, without those of units inside it."""
    yield from ((module, name) for name, p in module._parameters.items() if is_sharded(p))
    for child in module.children():
        if child not in others:
            yield from _owners(child, others)
