"""What every algorithm is: a frozen configuration with ``init`` and ``step`` over an explicit state.

How to add one
--------------
1. One paper, one file in this folder. The class is a frozen dataclass derived from :class:`Algorithm`; its fields
   are the paper's constants (``inner_rate`` and ``outer_rate`` are inherited, override their defaults). Annotated
   ``Count``, ``Whole``, ``Positive``, ``Nonnegative``, ``Rate | float`` or ``Hypergradient`` they are checked.
2. The docstring holds the update equations in the notation of the library (v ≈ H⁻¹b, hypergradient ∂_λ f − X(v)),
   the reference, and what published code does differently.
3. ``step(state, batches)`` composes: batches from ``batches.inner()`` and ``batches.outer()``; gradients, products and
   hypergradients from :mod:`hyperkron.algorithms.derivatives` (never written here); directions handed to
   ``state.inner.step`` (θ) and ``state.outer.step`` (λ), so that any optimizer and projection works; then
   ``return state.finish(...)``, or ``state.follow(...)``, which moves λ too. θ lives in the model and λ in hyper;
   whatever else must survive a step goes into ``state.trees`` (vectors), ``state.numbers`` or ``state.twins`` (second
   points with an optimizer), set up in ``prepare(state)``; ``state.hypergradient`` is the field ``hypergradient``, or
   what ``method()`` returns. Then resuming, seeding, devices and dtypes take care of themselves.
4. Export it in ``algorithms/__init__.py``, add a case to ``tests/algorithms/test_accuracy.py`` with the point where
   it must come to rest (λ*, or its own point in closed form), and one to ``docs/make_algorithms_table.py``; run that.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hyperkron import trees
from hyperkron.algorithms.inner_loop import InnerLoop
from hyperkron.batches import BatchSources
from hyperkron.evaluation.point import trainable
from hyperkron.hypergradient import Hypergradient
from hyperkron.optimizers import LevelOptimizer, Project, Rate, Updates, as_rate, copies
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HypergradientResult, HyperkronError, NonFiniteError, Status
from hyperkron.trees import Tree
from hyperkron.validation import check_nonnegative, check_positive, check_whole

Count = int
"""The annotation of a field that must be a whole number ≥ 1."""
Whole = int
"""The annotation of a field that must be a whole number ≥ 0."""
Positive = float
"""The annotation of a field that must be a finite number > 0."""
Nonnegative = float
"""The annotation of a field that must be a finite number ≥ 0."""


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    Attributes:
        step: its number, from 0.
        outer_loss: J_out on the step's outer batch, before λ moved; ``None`` where λ does not move.
        inner_loss: J_in on the step's last inner batch, where the method evaluated it.
        direction: the norm of the direction along which λ moved.
        status: of the hypergradient, where there was one.
        stats: further figures, by name.
    """

    step: int
    outer_loss: float | None
    inner_loss: float | None
    direction: float
    status: Status | None = None
    stats: dict[str, float | int | str] = field(default_factory=dict)


class State:
    """Everything the next step depends on.

    Attributes:
        inner, outer: the optimizers of θ and λ.
        loop: θ's own steps on J_in, by ``inner``.
        hypergradient: the algorithm's own copy, with its caches.
        step: how many steps have been done.
        trees, numbers, twins: what the algorithm remembers: vectors, scalars, and second points of θ.
        generator: the algorithm's own randomness, on the device of θ.
    """

    def __init__(
        self,
        problem: BilevelProblem,
        model: nn.Module,
        hyper: nn.Module,
        inner: LevelOptimizer,
        outer: LevelOptimizer,
        seed: int,
        graph: bool = False,
    ) -> None:
        self.model, self.hyper = model, hyper
        self.inner, self.outer = inner, outer
        self.loop = InnerLoop(problem, model, hyper, inner, graph=graph)
        self.hypergradient: Hypergradient | None = None
        self.step = 0
        self.trees: dict[str, Tree] = {}
        self.numbers: dict[str, float] = {}
        self.twins: dict[str, LevelOptimizer] = {}
        device = next(iter(inner.params.values())).device
        self.generator = torch.Generator(device).manual_seed(seed)

    @property
    def problem(self) -> BilevelProblem:
        """The two objectives."""
        return self.loop.problem

    @problem.setter
    def problem(self, problem: BilevelProblem) -> None:
        self.loop.replace_problem(problem)

    @property
    def params(self) -> Tree:
        """θ: the model's trainable parameters."""
        return self.inner.params

    @property
    def hypers(self) -> Tree:
        """λ: the trainable parameters of hyper."""
        return self.outer.params

    def check_trainable(self) -> None:
        """Refuse parameters that were frozen or unfrozen since the optimizers were made."""
        for argument, module, level in (("model", self.model, self.inner), ("hyper", self.hyper, self.outer)):
            now = {name for name, p in module.named_parameters() if p.requires_grad}
            changed = sorted(now ^ level.params.keys()) if level.params else []
            if changed:
                what = "unfrozen" if changed[0] in now else "frozen"
                raise HyperkronError(
                    f"{argument} parameter {changed[0]} (and {len(changed) - 1} others) was {what} after the run was "
                    "made, but a run trains the parameters it began with; call fit again, which continues from the "
                    "present θ and λ (with an optimizer that holds the parameters that are to be trained)."
                )

    def finish(
        self,
        outer_loss: Tensor | float | None,
        direction: Tree,
        inner_loss: Tensor | float | None = None,
        *,
        status: Status | None = None,
        stats: dict[str, float | int | str] | None = None,
    ) -> StepReport:
        """Close the step: read its figures, refuse non-finite ones, advance the counter and the schedules."""
        report = StepReport(
            self.step,
            None if outer_loss is None else float(outer_loss),
            None if inner_loss is None else float(inner_loss),
            float(trees.norm(direction)) if direction else 0.0,
            status,
            stats or {},
        )
        for name in ("outer_loss", "inner_loss", "direction"):
            value = getattr(report, name)
            if value is not None and not math.isfinite(value):
                raise NonFiniteError(
                    f"{name} is {value} at step {self.step}; lower inner_rate or outer_rate (or the optimizers' "
                    "lr), clip with Updates(optimizer, clip=1.0), or look for nan in the batches."
                )
        self._advance(report.inner_loss if report.outer_loss is None else report.outer_loss)
        return report

    def follow(self, result: HypergradientResult, inner_loss: Tensor | float | None = None) -> StepReport:
        """One step of λ along a hypergradient, which closes the step."""
        self.outer.step(result.grads)
        return self.finish(result.outer_loss, result.grads, inner_loss, status=result.status, stats=result.stats)

    def skip(self) -> StepReport:
        """Count a skipped step: the counter and the schedules advance, θ, λ and all states stay."""
        report = StepReport(self.step, math.nan, None, 0.0, Status.SKIPPED)
        self._advance(None)
        return report

    def _advance(self, metric: float | None) -> None:
        self.inner.tick(self.step, metric)
        self.outer.tick(self.step, metric)
        self.step += 1

    def state_dict(self, *, copy_caches: bool = True) -> dict[str, Any]:
        """The whole state, with copies of θ and λ, as nested dictionaries of tensors, numbers, strings and None.

        ``copy_caches=False`` does not copy the tensors of the hypergradient (factors, inverses, warm starts), which are
        replaced and never written.
        """
        hypergradient = {} if self.hypergradient is None else self.hypergradient.state_dict()
        hypergradient = copies(hypergradient) if copy_caches else hypergradient
        return {
            "step": self.step,
            "model": copies(self.model.state_dict()),
            "hyper": copies(self.hyper.state_dict()),
            "inner": self.inner.state_dict(),
            "outer": self.outer.state_dict(),
            "hypergradient": hypergradient,
            "trees": {name: copies(tree) for name, tree in self.trees.items()},
            "numbers": dict(self.numbers),
            "twins": {
                name: {"params": twin.values(), "optimizer": twin.state_dict()} for name, twin in self.twins.items()
            },
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict` of the same algorithm, bit for bit."""
        if set(self.twins) != set(state["twins"]):
            raise HyperkronError(
                f"the state has second points {sorted(state['twins'])} but this algorithm keeps {sorted(self.twins)}; "
                "load it into the algorithm it was saved from."
            )
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.hyper.load_state_dict(state["hyper"])
        self.inner.load_state_dict(state["inner"])
        self.outer.load_state_dict(state["outer"])
        if self.hypergradient is not None:
            self.hypergradient.load_state_dict(copies(state["hypergradient"]))
        self.trees = {name: copies(tree) for name, tree in state["trees"].items()}
        self.numbers = dict(state["numbers"])
        for name, twin in self.twins.items():
            twin.place(state["twins"][name]["params"])
            twin.load_state_dict(state["twins"][name]["optimizer"])
        self.generator.set_state(state["generator"])
        torch.clear_autocast_cache()


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """A bilevel algorithm: configuration only; what it remembers is a :class:`State`.

    Args:
        inner_rate: step size of θ if no inner optimizer is given.
        outer_rate: step size of λ if no outer optimizer is given.
        seed: seed of the algorithm's own random numbers.
    """

    inner_rate: Rate | float = 0.1
    outer_rate: Rate | float = 0.1
    seed: Whole = 0

    moves_hyper: ClassVar[bool] = True
    """Whether λ moves; if not, ``hyper`` may be a module without parameters."""
    warns_of_decay: ClassVar[bool] = True
    """Whether a weight decay of the inner optimizer is warned of; not where the library itself has chosen it."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value, kinds = getattr(self, one.name), str(one.type).split(" | ")
            if value is None and "None" in kinds:
                continue
            if "Rate" in kinds and not isinstance(value, Rate):
                check_nonnegative(one.name, value, "give a number, of which 0 moves nothing, or a Rate")
            for kind, check in _CHECKS.items():
                if kind in kinds:
                    check(one.name, value)
        self.method()  # refuses arguments that do not fit

    def init(
        self,
        problem: BilevelProblem,
        model: nn.Module,
        hyper: nn.Module | None,
        *,
        inner: torch.optim.Optimizer | Updates | None = None,
        outer: torch.optim.Optimizer | Updates | None = None,
        project: Project | None = None,
        graph: bool = False,
    ) -> State:
        """A fresh state at the current θ and λ.

        Args:
            problem: the two objectives.
            model: holds θ.
            hyper: holds λ; may be ``None`` if λ does not move.
            inner: optimizer of θ; ``None`` for gradient descent with ``inner_rate``.
            outer: optimizer of λ; ``None`` for gradient descent with ``outer_rate``.
            project: the projection of λ, applied now and after every step.
            graph: replay θ's own steps as a CUDA graph; see :class:`InnerLoop`.
        """
        theta = LevelOptimizer(trainable(model, "model"), inner, as_rate(self.inner_rate))
        if hyper is None:
            hyper = nn.Module()
        hypers = trainable(hyper, "hyper") if self.moves_hyper else {}
        lam = LevelOptimizer(hypers, outer, as_rate(self.outer_rate), project=project, level="outer")
        theta.refuse(dict(hyper.named_parameters()), "inner")
        lam.refuse(theta.params, "outer")
        if self.moves_hyper and self.warns_of_decay:
            theta.warn_of_decay()
        state = State(problem, model, hyper, theta, lam, self.seed, graph)
        method = self.method()
        state.hypergradient = None if method is None else method.fresh()
        self.prepare(state)
        return state

    def method(self) -> Hypergradient | None:
        """The hypergradient of a new state; by default that of the field ``hypergradient``, if there is one."""
        return getattr(self, "hypergradient", None)

    def prepare(self, state: State) -> None:  # noqa: B027 - most algorithms remember nothing more
        """Add to ``state`` what this algorithm remembers between steps."""

    @abstractmethod
    def step(self, state: State, batches: BatchSources) -> StepReport:
        """Take one step of θ and λ, and update ``state``."""


def _check_hypergradient(name: str, value: object) -> None:
    if not isinstance(value, Hypergradient):
        raise HyperkronError(
            f"{name}={value!r:.60} is a {type(value).__name__}, not a hypergradient; pass "
            "hyperkron.kfac(), cg(), neumann(), … or Implicit(curvature, solver)."
        )


_CHECKS: dict[str, Callable[[str, object], None]] = {
    "Count": check_whole,
    "Whole": partial(check_whole, least=0),
    "Positive": check_positive,
    "Nonnegative": check_nonnegative,
    "Hypergradient": _check_hypergradient,
}
"""How a field is checked, by its annotation."""
