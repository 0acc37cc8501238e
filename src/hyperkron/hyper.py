"""λ modules: the most common hyperparameters."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hyperkron.collectives import Group
from hyperkron.losses import Loss, l2
from hyperkron.sharded_functions import sharded_over, taken
from hyperkron.sharding import own_rows
from hyperkron.solution import HyperkronError
from hyperkron.validation import check_interval, check_one_of, check_positive, check_whole

Squash = Literal["clip", "sigmoid", "softmax"]


_SHORT = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32)
"""Whole numbers that torch takes for a mask, or not for an index."""


def _rows(values: Tensor, index: Any, group: Group | None = None) -> Tensor:
    """``values[index]``, sharded over ``group`` if there is one, with an error that says which numbers there are."""
    try:
        if group is not None:
            return taken(group, values, index)
        if index is None:  # which adds a dimension
            raise IndexError("it is None")
        found: Tensor = values[index.long() if isinstance(index, Tensor) and index.dtype in _SHORT else index]
    except IndexError as error:
        raise HyperkronError(
            f"index does not fit {len(values)} rows of λ ({error}); give whole numbers from 0 to {len(values) - 1}."
        ) from error
    return found


def _tensor(name: str, values: Any) -> Tensor:
    """``values`` as a tensor; an error that names them where they cannot be one."""
    try:
        return torch.as_tensor(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise HyperkronError(f"{name}={values!r:.60} is not a tensor and cannot become one: {error}.") from error


class SampleWeights(nn.Module):
    """One learnable weight for every training example: σ_n = squash(λ_n).

    Args:
        count: the number of examples.
        squash: ``clip`` to [0, 1] (default, as in the paper), ``sigmoid``, or ``softmax`` over all examples times
            ``count``. With ``clip``, dσ_n/dλ_n = 1 everywhere (straight-through), so a λ_n outside [0, 1] can return;
            use the projection ``hk.Box(0, 1)`` to keep λ itself in [0, 1].
        init: the initial weight of every example. Default: 0.5; for ``softmax`` it is always 1.
        group: the processes that share λ, as ``DataParallel(problem).group``; not for ``softmax``. Each holds
            ⌈count/processes⌉ rows and their optimizer state, and ``weight`` is a ``DTensor``. Any process may ask for
            any examples: of each a number and a value are sent, whatever ``count`` is. ``None``: λ is not sharded.

    Example:
        >>> weights = SampleWeights(4)
        >>> weights(torch.tensor([0, 2]))
        tensor([0.5000, 0.5000], grad_fn=<AddBackward0>)
    """

    def __init__(
        self, count: int, squash: Squash = "clip", init: float | None = None, *, group: Group | None = None
    ) -> None:
        super().__init__()
        check_whole("count", count, remedy="it is the number of training examples")
        check_one_of("squash", squash, ("clip", "sigmoid", "softmax"))
        if squash == "softmax" and init is not None:
            raise HyperkronError(
                f"init={init!r} has no meaning for squash='softmax', whose weights have mean 1; use None."
            )
        start = 0.5 if init is None else init
        check_interval("init", start, 0, 1, remedy="it is the weight of every example at first")
        raw = {"clip": float(start), "softmax": 0.0}.get(squash)
        if raw is None:
            check_interval("init", start, 0, 1, brackets="()", remedy="a sigmoid lies strictly between 0 and 1")
            raw = float(torch.logit(torch.tensor(float(start), dtype=torch.float64, device="cpu")))
        if not isinstance(group, Group | None):
            raise HyperkronError(f"group={group!r:.60} is not a group of processes; pass DataParallel(problem).group.")
        if group is not None and squash == "softmax":
            raise HyperkronError("squash='softmax' needs all examples at once; use 'sigmoid' or 'clip' with group=.")
        self.squash = squash
        self._group = None if group is None or group.handle is None else group
        rows = slice(0, count) if self._group is None else own_rows(count, self._group.rank, self._group.size)
        values = torch.full((rows.stop - rows.start,), raw)
        self.weight = nn.Parameter(values if self._group is None else sharded_over(self._group, values, count))

    def forward(self, index: Tensor) -> Tensor:
        """The weights of the examples in ``index``."""
        if self.squash == "softmax":
            return _rows(self.weight.softmax(0), index) * self.weight.numel()
        raw = _rows(self.weight, index, self._group)
        if self.squash == "clip":
            return raw.detach().clamp(0.0, 1.0) + (raw - raw.detach())  # the difference is zero, its derivative one
        return raw.sigmoid()


class MetaWeightNet(nn.Module):
    """A small network from an example's loss to its weight: σ_n = scale · sigmoid(MLP(ℓ_n)).

    The size of λ does not depend on the number of examples, and the network can weight new examples. The losses are
    detached, so no gradient reaches θ through the weights.

    Args:
        hidden: units of the hidden layer.
        features: number of inputs per example; with 1 (default) the input is its loss.
        scale: the largest weight.
        normalise: divide the weights of a batch by their mean.

    Reference: Shu et al., "Meta-Weight-Net: learning an explicit mapping for sample weighting" (NeurIPS 2019).

    Example:
        >>> net = MetaWeightNet()
        >>> net(torch.tensor([0.1, 2.0, 0.5])).shape
        torch.Size([3])
    """

    def __init__(self, hidden: int = 100, *, features: int = 1, scale: float = 1.0, normalise: bool = False) -> None:
        super().__init__()
        check_whole("hidden", hidden)
        check_whole("features", features)
        check_positive("scale", scale, "it is the largest weight of an example")
        self.net = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.scale, self.normalise = scale, normalise

    def forward(self, losses: Tensor) -> Tensor:
        """The weights (N,) of examples with these losses (N,), or features (N, features)."""
        first: Any = self.net[0]
        if losses.ndim == 0 or math.prod(losses.shape[1:]) != first.in_features:
            raise HyperkronError(
                f"losses has shape {tuple(losses.shape)}, but this MetaWeightNet has features={first.in_features} for "
                "each example; give one loss per example, not their mean, or set features."
            )
        inputs = losses.detach().to(first.weight.dtype).reshape(len(losses), first.in_features)
        weights = self.scale * self.net(inputs).squeeze(1).sigmoid()
        if not self.normalise:
            return weights
        return weights / weights.mean().clamp(min=torch.finfo(weights.dtype).eps)


class DomainWeights(nn.Module):
    """One weight for every source of data: p = softmax(λ).

    Args:
        count: the number of sources.
        init: the initial proportions; ``None``: all equal.

    Example:
        >>> mixture = DomainWeights(4)
        >>> mixture.proportions()
        tensor([0.2500, 0.2500, 0.2500, 0.2500], grad_fn=<SoftmaxBackward0>)
        >>> mixture(torch.tensor([0, 3]))  # an average example weighs 1
        tensor([1., 1.], grad_fn=<MulBackward0>)
    """

    def __init__(self, count: int, init: Tensor | None = None) -> None:
        super().__init__()
        check_whole("count", count, remedy="it is the number of sources")
        given = torch.ones(count) if init is None else _tensor("init", init).detach()
        if given.shape != (count,) or not bool((given > 0).all() and given.isfinite().all()):
            raise HyperkronError(f"init={init!r} must hold {count} positive proportions.")
        self.logits = nn.Parameter(given.log())

    def proportions(self) -> Tensor:
        """p, one for each source, adding up to 1."""
        return self.logits.softmax(0)

    def forward(self, domain: Tensor) -> Tensor:
        """The weights of examples from these sources: count · p, so that equal proportions weigh 1."""
        return _rows(self.proportions(), domain) * len(self.logits)


class WeightDecay(nn.Module):
    """A learned L2 penalty on a model: Σ_p exp(λ_p) ‖p‖², with one λ for each tensor or for each entry.

    Args:
        model: the model whose parameters are penalised.
        init: the initial coefficient exp(λ).
        each: ``tensor``: one coefficient per parameter tensor; ``entry``: one per entry.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> decay = WeightDecay(model, init=1e-3)
        >>> len(list(decay.parameters())), decay(model)
        (2, Loss(..., terms=0, l2=2, opaque=False))
    """

    def __init__(self, model: nn.Module, init: float = 1e-3, each: Literal["tensor", "entry"] = "tensor") -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise HyperkronError(f"model={model!r:.60} is not a torch.nn.Module; pass the network itself.")
        check_positive("init", init, "it is exp(λ)")
        check_one_of("each", each, ("tensor", "entry"))
        self.log = nn.ParameterList(
            nn.Parameter(torch.full(p.shape if each == "entry" else (), math.log(init), dtype=p.dtype, device=p.device))
            for p in model.parameters()
        )

    def forward(self, model: nn.Module) -> Loss:
        """The penalty, to be added to the inner loss; its curvature is part of A."""
        count = sum(1 for _ in model.parameters())
        if count != len(self.log):
            raise HyperkronError(
                f"model has {count} parameters but this WeightDecay was made for {len(self.log)}; "
                "make it from the same model."
            )
        return l2(model, [log.exp() for log in self.log])


class LabelCorrection(nn.Module):
    """Learned labels: the target of example n is softmax(λ_n), which starts near its given label.

    Args:
        labels: the given classes (N,).
        classes: the number of classes.
        confidence: the initial probability of the given label.

    Reference: in the spirit of Algan & Ulusoy, "Meta soft label generation for noisy labels" (ICPR 2020).

    Example:
        >>> labels = LabelCorrection(torch.tensor([0, 2]), classes=3, confidence=0.8)
        >>> labels(torch.tensor([1])).detach()
        tensor([[0.1000, 0.1000, 0.8000]])
    """

    def __init__(self, labels: Tensor, classes: int, confidence: float = 0.9) -> None:
        super().__init__()
        check_whole("classes", classes, 2)
        check_interval("confidence", confidence, 1 / classes, 1, brackets="()", remedy="it is more than 1/classes")
        labels = _tensor("labels", labels)
        if labels.ndim != 1 or labels.is_floating_point():
            raise HyperkronError(
                f"labels must be a vector of class numbers, not {labels.dtype} of shape {tuple(labels.shape)}."
            )
        if wrong := [label for label in labels.unique().tolist() if not 0 <= label < classes]:
            raise HyperkronError(
                f"labels contains {wrong[0]}, but with classes={classes} they are 0..{classes - 1}; give every example "
                "one of these, such as the most frequent class where the label is not known."
            )
        other = (1 - confidence) / (classes - 1)
        hot = nn.functional.one_hot(labels.long(), classes).to(torch.get_default_dtype())
        self.logits = nn.Parameter(hot * math.log(confidence / other))

    def forward(self, index: Tensor) -> Tensor:
        """Soft targets (…, classes) of the examples in ``index``, for ``losses.cross_entropy``."""
        return _rows(self.logits, index).softmax(-1)

    def labels(self) -> Tensor:
        """The corrected class of every example."""
        return self.logits.detach().argmax(1)


class Augmentation(nn.Module):
    """Learned strengths of random contrast, brightness and noise, in the spirit of Augerino.

        x ↦ (1 + c·u₁)(x − mean(x)) + mean(x) + b·u₂ + s·ε ,    u uniform in [−1, 1] for each example, ε ~ N(0, 1)

    with c, b, s = exp(λ). It is smooth in λ, so every cross term works. The random numbers come from torch's random
    state, and are the same in all evaluations of one hypergradient.

    Args:
        init: the initial strength of all three.

    Reference: Benton et al., "Learning invariances in neural networks" (NeurIPS 2020).

    Example:
        >>> Augmentation(0.1)(torch.zeros(4, 1, 8, 8)).shape
        torch.Size([4, 1, 8, 8])
    """

    def __init__(self, init: float = 0.1) -> None:
        super().__init__()
        check_positive("init", init, "it is exp(λ)")
        self.log = nn.Parameter(torch.full((3,), math.log(init)))

    def forward(self, x: Tensor) -> Tensor:
        """A random augmentation of each example."""
        if not x.is_floating_point():
            raise HyperkronError(f"x has dtype {x.dtype}; use floating point images: x.float() / 255.")
        contrast, brightness, noise = self.log.exp()
        shape = (len(x), *(1,) * (x.ndim - 1))
        u1, u2 = (2 * torch.rand(shape, dtype=x.dtype, device=x.device) - 1 for _ in range(2))
        mean = x.mean(tuple(range(1, x.ndim)), keepdim=True) if x.ndim > 1 else x
        return (1 + contrast * u1) * (x - mean) + mean + brightness * u2 + noise * torch.randn_like(x)


class _Tensor(nn.Module):
    """A tensor as a module."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value.detach().clone())

    def forward(self) -> Tensor:
        """The tensor."""
        return self.value


def as_hyper(tensor: Tensor) -> _Tensor:
    """Make a tensor usable as λ: a module that returns it, with the tensor as its parameter ``value``.

    Example:
        >>> log_decay = as_hyper(torch.tensor(-3.0))
        >>> log_decay()
        Parameter containing:
        tensor(-3., requires_grad=True)
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        what = str(tensor.dtype) if isinstance(tensor, Tensor) else f"{tensor!r:.60}"
        raise HyperkronError(f"as_hyper needs a floating point tensor, not {what}; use torch.tensor(..., dtype=...).")
    return _Tensor(tensor)
