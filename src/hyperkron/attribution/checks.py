"""What attribution asks of its arguments: a loss that is a mean over examples, a whole model, and one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperkron.attribution.data import COMPARED, Parts
from hyperkron.attribution.example_losses import without_penalties
from hyperkron.attribution.forward_products import agreement
from hyperkron.attribution.inner_products import LayerProducts
from hyperkron.attribution.layer_calls import UnsuitableError
from hyperkron.evaluation.point import Level, Point
from hyperkron.hypergradient import Implicit
from hyperkron.kernels.split_products import full_precision
from hyperkron.losses import Loss, as_loss
from hyperkron.problem import rows, shares
from hyperkron.sharding import is_sharded
from hyperkron.solution import HyperkronError, HyperkronWarning, Status, warn_once
from hyperkron.trees import Tree
from hyperkron.validation import check_callable, check_takes


def checked_loss(name: str, loss: Callable[[nn.Module, Any], Loss | Tensor]) -> Callable[[nn.Module, Any], Loss]:
    """``loss``, made to return a :class:`Loss`; refused if it cannot be called."""
    check_callable(name, loss, "pass a function (model, batch) -> loss")
    check_takes(name, loss, "model", "batch")
    return lambda model, batch: as_loss(loss(model, batch), name)


def check_mean(name: str, point: Point, level: Level, parts: Parts) -> None:
    """Refuse a loss that is not a mean over the examples of a batch, and the inner one if it has them in another order:
    compare a few of them with their halves, in which they are in reverse.

    What draws random numbers cannot be compared, nor what refuses a half (all of it masked).
    """
    for module_name, module in point.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise HyperkronError(
                f"{module_name} normalises by the statistics of the batch, which mixes its examples; use "
                "track_running_stats=True."
            )
    count = min(COMPARED, parts.size, len(parts.rows))
    if count < 2:
        return
    few, last = parts.rows.chosen([i * len(parts.rows) // count for i in range(count)]), count // 2 - 1

    def looked_at(some: slice) -> _Looked:
        return _looked_at(point, level, few(some), len(range(count)[some]))

    try:
        whole, halves = looked_at(slice(None)), [looked_at(slice(last, None, -1)), looked_at(slice(None, last, -1))]
        weights = shares([half.rows for half in halves])
    except HyperkronError:
        return
    mean = sum(share * half.value for share, half in zip(weights, halves, strict=True))
    most = max(abs(whole.value), *(abs(half.value) for half in halves))
    is_mean = abs(whole.value - mean) <= whole.near * most + whole.rounding
    if whole.drew or (is_mean and (level == "outer" or _in_order(whole, halves))):
        return
    if looked_at(slice(None)).value != whole.value:  # batches are made at random
        return
    if is_mean:
        raise HyperkronError(
            f"{name} has the examples of a batch in another order than they have in the data, or layers do not get one "
            "row for each of them in their order, so scores would be given to other rows; do not sort, shuffle or flip "
            "the examples of a batch in the loss, in the model or in collate, and let their dimension come first."
        )
    raise HyperkronError(
        f"{name} is {whole.value:.6g} on {count} examples and {mean:.6g} on average over two halves of them: it "
        "is not a mean over examples, and scores would depend on batch_size; divide sums by the number of "
        "examples, take means over tokens by hk.losses.cross_entropy, which counts them, and do not mix the "
        "examples of a batch (weights normalised over it, in-batch negatives)."
    )


class _Looked(NamedTuple):
    """A loss without its graph: over how many rows its means run, what tells its examples apart, whether it drew, and
    how exact it is."""

    value: float
    rows: tuple[float, ...]
    examples: list[Tensor]
    drew: bool
    near: float
    rounding: float


def _looked_at(point: Point, level: Level, batch: Any, count: int) -> _Looked:
    with full_precision():
        loss = point.evaluate(level, batch)
    near, rounding = agreement(point, loss.value)
    largest = max((float(term.output.detach().abs().max()) for term in loss.terms), default=1.0)
    value, counted = float(without_penalties(loss).detach()), rows(loss.terms, count)
    drew = point.drawn(anywhere=True)
    examples = [] if level == "outer" else _of_examples(point, level, batch, loss, count)
    return _Looked(value, counted, examples, drew, near, rounding * largest)


def _of_examples(point: Point, level: Level, batch: Any, loss: Loss, count: int) -> list[Tensor]:
    """Numbers of every example: its losses or, if the loss does not tell them, the sizes of gradients at layers."""
    if not loss.opaque and all(len(term.row_losses) == count for term in loss.terms):
        return [term.row_losses.detach().reshape(count, -1).sum(1) for term in loss.terms]
    untold = loss.opaque or not loss.terms  # then weights of examples tell nothing, and are not compared
    try:
        calls = LayerProducts(point, level, compared=untold).calls(batch, count)
    except UnsuitableError:
        return []
    sizes = torch.stack([call.g.reshape(count, -1).norm(dim=1) for call in calls])
    return [sizes.sum(0) * rows(loss.terms, count)[0]]  # in halves other layers may be called, as of experts


def _in_order(whole: _Looked, halves: list[_Looked]) -> bool:
    """Whether the examples of the whole are those of the halves, each in reverse."""
    if any(len(half.examples) < len(whole.examples) for half in halves):  # as many positions as examples, by chance
        return False
    for whole_batch, *apart in zip(whole.examples, *(half.examples for half in halves), strict=False):
        gaps = (torch.cat([part.flip(0) for part in apart]) - whole_batch).abs()
        if bool((gaps > whole.near * whole_batch.abs().max() + whole.rounding).any()):
            return False
    return True


def check_processes(params: Tree) -> None:
    """Refuse a model of which this process has a part, and say that several processes do not share the work."""
    for name, p in params.items():
        if is_sharded(p):
            raise HyperkronError(
                f"model parameter {name} is sharded (fully_shard), and attribution needs the whole "
                "model: load its state_dict into a plain copy on one process."
            )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warn_once(
            "attribution processes",
            f"there are {dist.get_world_size()} processes, but attribution does not share work among them: each that "
            "calls it computes all scores. Call it on one process (rank 0), or give each its own queries.",
        )


def warn_of_status(status: Status) -> None:
    """Say where a solve was not the one asked for."""
    if not status.ok:
        warnings.warn(f"attribution, {status.name}: {status.value}", HyperkronWarning, stacklevel=4)


def warn_of_reduced(method: Implicit, model: nn.Module) -> None:
    """Say that ``sharing="reduce"`` does not rank examples well where weights are shared over positions."""
    if getattr(method.curvature, "sharing", "") != "reduce" or not isinstance(model, nn.Module):
        return
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()):
        warn_once(
            "attribution reduce",
            "sharing='reduce' with convolutions ranked training examples no better than products of gradients in our "
            "measurements (docs/attribution.md); use sharing='expand', the default.",
        )


@contextmanager
def group_norms_checked(model: nn.Module) -> Iterator[None]:
    """Refuse an input of GroupNorm without gradient, as behind frozen layers: on a CPU, if its channels are last, the
    backward pass of torch (2.13) ends the process."""

    def check(module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and not given[0].requires_grad:
            raise RuntimeError("the input of GroupNorm has no gradient")

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.GroupNorm):
                hooks.enter_context(module.register_forward_pre_hook(check))
        yield
