"""What attribution asks of its arguments: a loss that is a mean over examples, a whole model, and one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from hyperkron.attribution.data import COMPARED, Parts, shares_of
from hyperkron.attribution.forward_products import AGREEMENT, HALF_AGREEMENT, HALF_ROUNDING
from hyperkron.attribution.inner_products import without_penalties
from hyperkron.evaluation.differentiation import in_half_precision
from hyperkron.evaluation.point import Level, Point
from hyperkron.hypergradient import Implicit
from hyperkron.kernels.split_products import full_precision
from hyperkron.sharding import is_sharded
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.trees import Tree


def check_mean(name: str, point: Point, level: Level, parts: Parts) -> None:
    """Refuse a loss that is not a mean over the examples of a batch: compare a few of them with their halves.

    A loss that draws random numbers cannot be compared, nor one that refuses a half (all of it masked).
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
    middle = count // 2
    try:
        with full_precision():
            whole = point.evaluate(level, parts.rows.batch(0, count))
            drew = point.drawn()
            halves = [point.evaluate(level, parts.rows.batch(*span)) for span in ((0, middle), (middle, count))]
        weights = shares_of(halves, [middle, count - middle])
    except HyperkronError:
        return
    values = [float(without_penalties(loss).detach()) for loss in (whole, *halves)]
    mean = sum(share * value for share, value in zip(weights, values[1:], strict=True))
    coarse = in_half_precision(whole.value)
    near = HALF_AGREEMENT if coarse else AGREEMENT.get(point.dtype, HALF_AGREEMENT)
    outputs = [float(term.output.detach().abs().max()) for term in whole.terms]
    rounding = HALF_ROUNDING if coarse else min(100 * torch.finfo(point.dtype).eps, HALF_ROUNDING)
    if not drew and abs(values[0] - mean) > near * max(map(abs, values)) + rounding * max(outputs, default=1.0):
        raise HyperkronError(
            f"{name} is {values[0]:.6g} on {count} examples and {mean:.6g} on average over two halves of them: it is "
            "not a mean over examples, and scores would depend on batch_size; divide sums by the number of examples, "
            "and do not mix the examples of a batch (weights normalised over it, in-batch negatives)."
        )


def check_processes(params: Tree) -> None:
    """Refuse a model of which this process has a part, and say that several processes do not share the work."""
    for name, p in params.items():
        if is_sharded(p):
            raise HyperkronError(
                f"model parameter {name} is divided among processes (fully_shard), and attribution needs the whole "
                "model: load its state_dict into a plain copy on one process."
            )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warn_once(
            "attribution processes",
            f"there are {dist.get_world_size()} processes, but attribution does not share work among them: each that "
            "calls it computes all scores for itself. Call it on one process (rank 0), or give each its own queries.",
        )


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
