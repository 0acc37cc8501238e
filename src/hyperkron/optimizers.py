"""How θ and λ move: a direction becomes the ``.grad`` of a ``torch.optim`` optimizer.

An algorithm decides the direction; the optimizer, its schedule, clipping and the projection decide the step. So
momentum, Adam or a cosine schedule works with any algorithm; without them the paper's own rule is used.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hyperkron import trees
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.trees import Tree
from hyperkron.validation import check_interval, check_nonnegative, check_one_of, check_positive, first_of

Project = Callable[[Tensor], Tensor]
"""A projection of one parameter of λ onto its constraint set."""
DECOUPLED = ("AdamW", "Adafactor", "Lion", "Muon")
"""Parts of the names of optimizers whose weight decay is not added to the gradient."""


@dataclass(frozen=True)
class Rate:
    """A step size or weight that decays as scale / (t + 1)^exponent.

    Args:
        scale: c, the value at t = 0.
        exponent: e; 0 for a constant.

    Example:
        >>> Rate(0.1, 0.5)(3)
        0.05
    """

    scale: float
    exponent: float = 0.0

    def __post_init__(self) -> None:
        check_nonnegative("scale", self.scale, "it is the first rate; 0 moves nothing")
        check_interval("exponent", self.exponent, -math.inf, math.inf, brackets="()", remedy="0 is a constant rate")

    def __call__(self, t: int) -> float:
        """The value at step ``t``, counted from 0."""
        return self.scale / (t + 1) ** self.exponent


def as_rate(rate: Rate | float) -> Rate:
    """A number as a constant :class:`Rate`."""
    return rate if isinstance(rate, Rate) else Rate(rate)


@dataclass(frozen=True)
class Updates:
    """An optimizer with what belongs to it, where the bare optimizer is not enough.

    Args:
        optimizer: any ``torch.optim`` optimizer of the level's parameters.
        scheduler: any ``torch.optim.lr_scheduler`` of that optimizer (``ReduceLROnPlateau`` gets the outer loss).
        schedule: when the scheduler steps: after every ``"step"`` of the algorithm, or after every ``"update"`` of this
            level's parameters, of which a step of the algorithm may contain several.
        clip: the largest norm of a direction; longer ones are scaled down to it.
        autocast: θ's own steps evaluate J_in under autocast in this dtype (inner level only). Hypergradients do not.
        scaler: with ``torch.float16``, a ``torch.amp.GradScaler``: the loss of θ's own steps is scaled, its gradient
            unscaled at once, and a step whose gradient overflows is left out. Everything else, all second-order
            quantities among it, never meets the scale. Its state is part of every checkpoint.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> Updates(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10), clip=1.0).clip
        1.0
    """

    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | ReduceLROnPlateau | None = None
    clip: float | None = None
    autocast: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    schedule: Literal["step", "update"] = "step"

    def __post_init__(self) -> None:
        check_one_of("schedule", self.schedule, ("step", "update"))
        if self.schedule == "update" and isinstance(self.scheduler, ReduceLROnPlateau):
            raise HyperkronError("schedule='update' has no outer loss for ReduceLROnPlateau; use schedule='step'.")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise HyperkronError(f"autocast={self.autocast!r} must be torch.bfloat16, torch.float16 or None.")
        if self.scaler is not None and not isinstance(self.scaler, torch.amp.GradScaler):
            raise HyperkronError(f"scaler={self.scaler!r:.60} is not a torch.amp.GradScaler.")
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise HyperkronError(
                f"optimizer={self.optimizer!r:.60} is not a torch.optim.Optimizer; pass one over all parameters "
                "of this level (in groups, if they differ in settings), such as torch.optim.SGD(model.parameters(), "
                "lr=0.1), with a scheduler as hyperkron.algorithms.Updates(optimizer, scheduler)."
            )
        closure = inspect.signature(type(self.optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise HyperkronError(
                f"optimizer={type(self.optimizer).__name__} needs a closure to evaluate the loss itself, while an "
                "algorithm gives it one direction; use SGD, Adam or another optimizer that needs none."
            )
        if self.scheduler is not None and getattr(self.scheduler, "optimizer", None) is not self.optimizer:
            raise HyperkronError("scheduler belongs to another optimizer than the one it is given with.")
        if self.clip is not None:
            check_positive("clip", self.clip, "None does not clip", finite=False)


class LevelOptimizer:
    """The parameters of one level and the optimizer that moves them along a direction: by default descent at ``rate``.

    ``project`` is applied to every parameter after every step, and once now; ``level`` is how errors call it.
    """

    def __init__(
        self,
        params: Tree,
        given: torch.optim.Optimizer | Updates | None,
        rate: Rate,
        *,
        project: Project | None = None,
        level: str = "inner",
    ) -> None:
        self.params = params
        self.rate: Rate | None = rate if given is None else None
        self._plain = given is None and all(p.device.type == "cpu" for p in params.values())
        if given is None:
            given = torch.optim.SGD(list(params.values()) or [torch.zeros(0)], lr=rate(0))
        updates = given if isinstance(given, Updates) else Updates(given)
        self.optimizer, self.scheduler, self.clip = updates.optimizer, updates.scheduler, updates.clip
        self.autocast, self.scaler = updates.autocast, updates.scaler
        self.each_update = updates.schedule == "update" and self.scheduler is not None
        if level != "inner" and (self.autocast or self.scaler) is not None:
            raise HyperkronError(
                f"{level}_optimizer has autocast={self.autocast} and scaler={self.scaler!r:.40}, but λ moves along the "
                "hypergradient, which is never scaled; give them to inner_optimizer."
            )
        if isinstance(project, type):
            raise HyperkronError(f"projection={project.__name__} is a class; pass an instance, {project.__name__}(…).")
        if project is not None and not callable(project):
            raise HyperkronError(f"projection={project!r:.60} is not callable; pass hk.Box(0.0, 1.0) or a function.")
        self.project = project
        self.factor = 1.0
        self.origin: LevelOptimizer | None = None  # of which this is a twin, with its step sizes unless own_lr
        self.own_lr = False
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in params.items() if id(p) not in held]
        if missing:
            raise HyperkronError(
                f"{level}_optimizer does not hold {first_of(missing)}; give it all trainable "
                "parameters of this level, or freeze those with requires_grad_(False)."
            )
        if any(group.get("maximize") for group in self.optimizer.param_groups):
            raise HyperkronError(
                f"{level}_optimizer has maximize=True, but both levels minimise; return the negative of the loss from "
                f"{level}, with maximize=False."
            )
        if any(group.get("differentiable") for group in self.optimizer.param_groups):
            raise HyperkronError(
                f"{level}_optimizer has differentiable=True, which torch cannot do with trained parameters; set it to "
                "False, or use hyperkron.algorithms.Unroll to differentiate through steps."
            )
        self._project()

    def refuse(self, others: Tree, level: str) -> None:
        """Refuse to be the optimizer of this ``level`` and to move the parameters of the other one; those of neither
        are warned of, and a scheduler that was not given."""
        if self.scheduler is None and getattr(self.optimizer.step, "_wrapped_by_lr_sched", False):
            warn_once(
                f"{level}-scheduler",
                f"{level}_optimizer has a scheduler that the run does not step. Unless a callback steps it, the "
                "learning rate stays as it is; pass both as hyperkron.algorithms.Updates(optimizer, scheduler).",
            )
        held = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}
        whose, other = ("model", "hyper") if level == "inner" else ("hyper", "model")
        foreign, own = [name for name, p in others.items() if id(p) in held], {id(p) for p in self.params.values()}
        if foreign:
            both = id(others[foreign[0]]) in own
            what = "model and hyper both hold" if both else f"{level}_optimizer also holds"
            remedy = (
                "keep the model out of hyper, as objectives get both" if both else f"give it {whose}.parameters() alone"
            )
            raise HyperkronError(
                f"{what} {first_of(foreign)} of {other}; {remedy}: each level is moved by its own optimizer."
            )
        strangers = [tuple(p.shape) for key, p in held.items() if p.requires_grad and key not in own]
        if strangers and own:  # an algorithm that trains θ alone takes nothing of hyper
            warn_once(
                f"{level}-strangers {strangers}",
                f"{level}_optimizer also holds a parameter of shape {strangers[0]} (and {len(strangers) - 1} others) "
                f"that is not one of {whose}, so this run does not train it; to train it, pass as {whose} one module "
                "that holds it too, such as a criterion with parameters of its own.",
            )

    def warn_of_decay(self) -> None:
        """Say once that the optimizer decays θ by itself, which hypergradients, made of J_in, do not count."""
        groups, kind = self.optimizer.param_groups, type(self.optimizer).__name__
        decay = max(float(group.get("weight_decay") or 0.0) for group in groups)
        if decay == 0:
            return
        remedy = f"add hyperkron.losses.l2(model, {decay / 2:g}) to the inner loss and set weight_decay=0"
        if any(name in kind for name in DECOUPLED) or any(group.get("decoupled_weight_decay") for group in groups):
            remedy = (
                "set weight_decay=0, add hyperkron.losses.l2(model, ...) to the inner loss and tune its coefficient: "
                f"no penalty trains exactly like the decoupled decay of {kind}"
            )
        warn_once(
            "optimizer-decay",
            f"inner_optimizer has weight_decay={decay:g}, which is not part of the inner loss, so hypergradients "
            f"do not count it; {remedy} (harmless where it is small beside the damping).",
        )

    @property
    def lr(self) -> float:
        """The step size, now; an error if parameter groups have different ones."""
        rates = sorted({float(group.get("lr", math.nan)) for group in self.optimizer.param_groups})
        if len(rates) > 1 or math.isnan(rates[0]):
            raise HyperkronError(
                f"the parameter groups of inner_optimizer have the learning rates {rates}, but this algorithm needs "
                "one number: give all groups the same lr, or pass the number itself (DARTS: lookahead, T1T2: scale)."
            )
        return rates[0]

    def step(self, direction: Tree) -> None:
        """Move against ``direction``, as the optimizer moves against a gradient; then project.

        The optimizer gets a copy, which it may overwrite, as Nesterov's momentum and hooks that clip do.
        """
        for name, p in self.params.items():
            p.grad = direction[name].detach() if self._plain else direction[name].detach().clone()
        self.update()

    def update(self, step: Callable[[], object] | None = None) -> None:
        """Move against the gradients that are in ``.grad``; then project.

        ``step`` is another way to take the optimizer's step, such as replaying a recording of it.
        """
        if self.clip is not None:
            present = {name: p.grad for name, p in self.params.items() if p.grad is not None}
            gradients = {name: g.to_dense() if g.is_sparse else g for name, g in present.items()}
            ratio = self.clip / trees.norm(gradients).clamp(min=torch.finfo(torch.float32).tiny)
            for name, g in trees.scale(gradients, ratio.clamp(max=1.0)).items():
                self.params[name].grad = g
        if isinstance(self.optimizer, torch.optim.SparseAdam):  # it takes no dense gradient
            for p in self.params.values():
                p.grad = p.grad if p.grad is None or p.grad.is_sparse else p.grad.to_sparse(1)
        with self._current_rates():
            if self._plain:
                self._descend()
            elif self.scaler is None or not self.scaler.is_enabled():
                (self.optimizer.step if step is None else step)()
            else:
                self._scaled_step(self.scaler)
        if self.each_update and self.scheduler is not None:
            self.scheduler.step()
        self._project()

    @contextmanager
    def _current_rates(self) -> Iterator[None]:
        """Inside the block a twin has the settings of its origin, and step sizes are multiplied by ``factor``.

        A scheduler, which may compute the next step size from the last one or from the first, never sees the factor.
        """
        groups = self.optimizer.param_groups
        if self.origin is not None:
            own = {"params", "param_names", *(["lr"] if self.own_lr else [])}
            for group, its in zip(groups, self.origin.optimizer.param_groups, strict=True):
                group.update({key: its[key] for key in its if key not in own})
        rates = [] if self.factor == 1.0 else [(group, group["lr"]) for group in groups]
        try:
            for group, rate in rates:
                group["lr"] = rate * self.factor
            yield
        finally:
            for group, rate in rates:
                group["lr"] = rate

    def _descend(self) -> None:
        """What ``torch.optim.SGD`` does on the CPU, without its hooks, which cost more than a small step."""
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-group["lr"])

    def _scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        """The step, unless the gradient is not finite; the scale follows. Scales are powers of two: none is rounded."""
        for p in self.params.values():
            p.grad = None if p.grad is None else scaler.scale(p.grad)
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()

    def _project(self) -> None:
        if self.project is not None:
            for name, p in self.params.items():
                with torch.no_grad():
                    found = self.project(p)
                    shape = getattr(found, "shape", type(found).__name__)
                    if shape != p.shape:
                        raise HyperkronError(f"projection made {shape} of {name}; return a tensor of shape {p.shape}.")
                    p.copy_(found)
        torch.clear_autocast_cache()  # a loop that runs under autocast would continue with casts of the old values

    def place(self, values: Tree) -> None:
        """Set the parameters to ``values``, without a step."""
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(values[name])
        torch.clear_autocast_cache()

    def values(self) -> Tree:
        """A copy of the parameters."""
        return trees.map(lambda p: p.detach().clone(), self.params)

    def set_lr(self, lr: float) -> None:
        """Use this step size for all parameter groups, in a :meth:`twin` in place of those of its origin."""
        self.own_lr = True
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def rescale(self, factor: float) -> None:
        """Multiply this and all later step sizes by ``factor``, whatever rule or scheduler makes them."""
        if any("lr" not in group for group in self.optimizer.param_groups):
            raise HyperkronError("optimizer has no 'lr' in its parameter groups to lower; use one that has.")
        self.factor *= factor

    def tick(self, t: int, metric: float | None) -> None:
        """Step ``t`` of the algorithm is over: set the step sizes of the next one (``None``: it was skipped)."""
        if self.rate is not None:
            self.set_lr(self.rate(t + 1))
        if self.scheduler is None or self.each_update:
            return
        if not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        elif metric is not None:
            self.scheduler.step(metric)

    def twin(self, *, memory: bool = False) -> LevelOptimizer:
        """A copy of the parameters with a fresh optimizer of the same kind, which always has the settings of this one.

        Methods that follow a second point of the inner problem (F2SA's z, BOME's θ̂) move it this way. With ``memory``
        the optimizer begins with a copy of this one's state (moments, counted steps), and the scaler is this one's
        own, as in PZOBO's runs.
        """
        points: Tree = {name: nn.Parameter(p.detach().clone()) for name, p in self.params.items()}
        of = {id(p): points[name] for name, p in self.params.items()}
        groups = [{**g, "params": [of[id(p)] for p in g["params"] if id(p) in of]} for g in self.optimizer.param_groups]
        kind = type(self.optimizer)
        known = inspect.signature(kind).parameters
        settings = {key: value for key, value in self.optimizer.defaults.items() if key in known}
        try:
            optimizer = kind(groups, **settings)
        except Exception as error:
            raise HyperkronError(
                f"this algorithm moves a second point of θ by an optimizer like inner_optimizer, but {kind.__name__} "
                f"cannot be made from its parameter groups and defaults ({error!s:.100}); use one of torch.optim, or "
                "an algorithm without a second point, such as hyperkron.AID."
            ) from error
        if memory:
            optimizer.state.update({of[id(p)]: copies(self.optimizer.state.get(p, {})) for p in self.params.values()})
        updates = Updates(optimizer, clip=self.clip, scaler=self.scaler if memory else None)
        made = LevelOptimizer(points, updates, Rate(0.0))
        made._plain, made.origin = self._plain, self
        return made

    def state_dict(self) -> dict[str, Any]:
        """Optimizer and scheduler as nested dictionaries of tensors and plain values; not the parameters."""
        memory = self.optimizer.state_dict()
        scheduler = {} if self.scheduler is None else self.scheduler.state_dict()
        return {
            "state": {str(key): copies(value) for key, value in memory["state"].items()},
            "groups": {str(key): copies(group) for key, group in enumerate(memory["param_groups"])},
            "scheduler": {key: value for key, value in scheduler.items() if not callable(value)},
            "factor": self.factor,
            **({} if self.scaler is None else {"scaler": self.scaler.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        memory = {int(key): copies(value) for key, value in state["state"].items()}
        known = [n for n in self.optimizer.defaults if n in self.optimizer.param_groups[0]]  # loading may add defaults
        self.optimizer.load_state_dict({"state": memory, "param_groups": list(state["groups"].values())})
        if lacking := [name for name in known if name not in self.optimizer.param_groups[0]]:
            raise HyperkronError(f"the saved optimizer has no {first_of(lacking)}; use an optimizer of its kind.")
        for key, loaded in self.optimizer.state_dict()["state"].items():  # torch casts to the dtype of the parameter
            for name, x in memory.get(key, {}).items():
                if isinstance(x, Tensor) and name in loaded and loaded[name].dtype != x.dtype:
                    loaded[name] = x.to(loaded[name].device)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.factor = state["factor"]
        if self.scaler is not None:
            load_scaler(self.scaler, state.get("scaler", {}))


def load_scaler(scaler: torch.amp.GradScaler, state: dict[str, Any]) -> None:
    """Continue from a state of a scaler; from none at all where there was no scaler yet."""
    if state:
        scaler.load_state_dict(state)
    scaler._per_optimizer_states.clear()


def copies(tree: dict[str, Any]) -> dict[str, Any]:
    """The same nested dictionary with every tensor copied, so that a saved state does not move with the live one."""
    return {
        name: copies(x) if isinstance(x, dict) else x.detach().clone() if isinstance(x, Tensor) else x
        for name, x in tree.items()
    }
