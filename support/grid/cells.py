"""One cell of the grid: a hypergradient is computed and judged.

**What is right.** With v the solution that the result itself carries, ∂_λ J_out − grads must be the oracle's
X(v) = ∂_λ⟨∂_θ J_in, v⟩, to an error relative to ‖X(v)‖ of

    ================  =======  =====================  ======================================
    cross mode        float64  float32 (also inside)  why
    ================  =======  =====================  ======================================
    reverse, forward  1e-6     1e-3                   exact
    auto              1e-6     0.05                   what ``hk.Implicit`` promises
    difference        1e-5     0.05                   O(radius²), radius 1e-4 (float32: 1e-2)
    sama, α = 1e-3    1e-3     0.05                   O(α²)
    sama, α = 0.1     0.05     0.1                    O(α²)
    ================  =======  =====================  ======================================

Where nothing is stopped SAMA may also be the finite difference that defines it, to the same error: at kinks that lies
apart from X(v). v must be what the method says it is (``methods``), to 1e-6 (float32: 1e-3), and a system that is
solved must leave a residual of at most that part of ‖b‖. Unrolled methods have no v: dΦ/dλ must be that of one graph
through all steps, to 1e-6 (1e-3). J_out must be the oracle's. Where the blocks of KFAC or EKFAC cover less than half of
θ, a warning or ``stats["coverage"]`` must say so. In bfloat16 cosines count: 0.99 for X(v), and for v against the
method in float32. There the model's own arithmetic rounds ∂_λ J_out, perhaps by more than the size of X(v); so X(v) is
read from the rounded one, which must have a cosine of 0.99 to the oracle's. Where b = 0, v must be 0.

**Outcomes.** RIGHT: every check holds. REFUSED: a ``HyperkronError``. WARNED: a check fails, and a
``HyperkronWarning`` names what is wrong, or, where it is v, the status is not ``ok``. SILENTLY WRONG: a check fails
without a word. CRASHED: any other exception. NO EFFECT: X(v) is zero by the oracle though b is not, so that the cell
shows nothing. ORACLE IN DOUBT: its second derivatives are not the differences of its first ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import solution

from .hypers import HYPERS, INNER, OUTER, Kind, Library, module
from .kronecker import Blocks
from .methods import METHODS, Method, Setting
from .models import LENGTH, MODELS, VOCABULARY, Spec
from .truth import Truth, flat, relative

RIGHT, REFUSED, WARNED, NO_EFFECT = "right", "refused", "warned", "no effect"
SILENT, CRASHED, DOUBTFUL = "SILENTLY WRONG", "CRASHED", "ORACLE IN DOUBT"
BAD = (SILENT, CRASHED, DOUBTFUL)
OUTCOMES = (RIGHT, REFUSED, WARNED, NO_EFFECT, *BAD)
SEED = 17

EXCUSES = {
    "cross": ("cross", "finite-difference", "finite difference", "detach"),
    "v": ("damping", "second derivative", "differentiated twice", "double backward"),
    "coverage": ("covered", "coverage"),
    "gradient": ("cancel",),
    "outer loss": (),
    "direct": (),
}
"""Words of a warning that speak of a failed check."""


@dataclass
class Record:
    """What came of a cell."""

    model: str
    hyper: str
    method: str
    outcome: str
    errors: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    words: str = ""

    @property
    def name(self) -> str:
        """The cell, as ``--only`` takes it."""
        return f"{self.model} | {self.hyper} | {self.method}"

    @property
    def bad(self) -> bool:
        """Whether no cell may end so."""
        return self.outcome in BAD


def batches(spec: Spec, dtype: torch.dtype) -> tuple[Any, Any]:
    """An inner and an outer batch of (x, y, index)."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for count in (INNER, OUTER):
        if spec.inputs == "tokens":
            x = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
        else:
            x = torch.randn(count, *spec.width, generator=generator).bfloat16().to(dtype)
        shape = (count, LENGTH) if spec.lengthwise else (count,)
        made.append((x, torch.randint(0, spec.classes, shape, generator=generator), torch.arange(count)))
    return made[0], made[1]


class Pair:
    """A model and a λ with their oracle, for all methods."""

    def __init__(self, model: str, hyper: str) -> None:
        self.names = model, hyper
        self.spec, self.kind = MODELS[model], HYPERS[hyper]
        self.model, self.twin = self.spec.make()
        self.half = self.spec.dtype == torch.bfloat16
        self.inner, self.outer = batches(self.spec, self.spec.dtype)
        self.dtype = torch.float32 if self.half else self.spec.dtype  # of λ
        made = functools.partial(module, self.kind, self.spec, self.twin, self.inner[1], seed=2)
        self.hyper = made(dtype=self.dtype)
        double = made(dtype=torch.float64)
        double.load_state_dict(self.hyper.state_dict())
        self.truth = Truth(self.kind, self.twin, double, *batches(self.spec, torch.float64), SEED)
        self.problem = problem(self.kind)

    @functools.cached_property
    def blocks(self) -> Blocks:
        """KFAC's reference."""
        return Blocks(self.truth)

    @functools.cached_property
    def single(self) -> tuple[nn.Module, nn.Module, Any, Any]:
        """The same in float32, for a model in bfloat16."""
        model, _ = dataclasses.replace(self.spec, dtype=torch.float32).make()
        model.load_state_dict(self.model.state_dict())
        return model, self.hyper, *batches(self.spec, torch.float32)

    @functools.cached_property
    def direct(self) -> Tensor:
        """∂_λ J_out as the model's own arithmetic has it."""
        torch.manual_seed(SEED)
        hypers = [p for p in self.hyper.parameters() if p.requires_grad]
        value = self.problem.outer(self.model, self.hyper, self.outer).value
        found = torch.autograd.grad(value, hypers, allow_unused=True)
        return flat(found, self.truth.hypers)

    def doubt(self) -> float:
        """How far the oracle is from differences of its own first derivatives; 0 where they must differ."""
        if self.kind.stops or self.spec.stops or self.spec.coarse or not bool(self.truth.b.any()):
            return 0.0
        return self.truth.doubt(self.truth.b)

    def run(self, method: str, made: Method | None = None) -> Record:
        """Compute and judge one cell."""
        record = Record(*self.names, method, CRASHED)
        how = made or METHODS[method]
        solution._warned.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = self._compute(how, self.model, self.hyper, self.inner, self.outer)
            except hk.HyperkronError as error:
                record.outcome, record.words = REFUSED, str(error)
                return record
            except Exception as error:
                record.words = f"{type(error).__name__}: {error}"
                return record
        told = [str(w.message) for w in caught if issubclass(w.category, hk.HyperkronWarning)]
        Judge(self, how, result, told, record).judge()
        return record

    def _compute(self, how: Method, *arguments: Any) -> hk.HypergradientResult:
        method = how.make(Setting(arguments[0], self.truth))
        for _ in range(how.calls):
            torch.manual_seed(SEED)
            result = method.compute(self.problem, *arguments)
        if how.blocks is not None:
            self.covered = method.curvature.coverage(arguments[0])  # type: ignore[attr-defined]
        return result


def problem(kind: Kind) -> hk.BilevelProblem:
    """The problem in the library's losses."""
    return hk.BilevelProblem(
        lambda model, hyper, batch: kind.inner(Library, model, hyper, batch),
        lambda model, hyper, batch: kind.outer(Library, model, hyper, batch),
    )


class Judge:
    """The checks of one result."""

    def __init__(self, pair: Pair, how: Method, result: Any, told: list[str], record: Record) -> None:
        self.pair, self.how, self.result, self.told, self.record = pair, how, result, told, record
        self.truth = pair.truth
        self.coarse = pair.spec.dtype != torch.float64 or pair.spec.coarse
        self.exact = 1e-3 if self.coarse else 1e-6

    def judge(self) -> None:
        """Fill in the record."""
        self.record.outcome = RIGHT
        grads = self._flat(self.result.grads, self.truth.hypers)
        gap = abs(self.result.outer_loss - self.truth.outer_value) / (abs(self.truth.outer_value) + 1e-3)
        if self.result.solution is not None:
            self._check("outer loss", gap, 0.05 if self.pair.half else self.exact)
            v = self._flat(self.result.solution.value, self.truth.params)
            if self.pair.half:
                self._compare("direct", self.pair.direct, self.truth.direct, self.exact)
            direct = self.pair.direct if self.pair.half else self.truth.direct
            self._crossed(direct - grads, v)
            self._solved(v)
        else:
            assert self.how.equals is not None
            wanted = self.how.equals(self.truth)
            self._effect(float((wanted - self.truth.direct).norm()), float(self.truth.b.norm()))
            self._compare("gradient", grads, wanted, self.exact)
        self._conclude()

    def _flat(self, tree: dict[str, Tensor], like: list[Tensor]) -> Tensor:
        return flat([x.detach() for x in tree.values()], like)

    def _check(self, what: str, error: float, tolerance: float) -> None:
        self.record.errors[what] = max(error, self.record.errors.get(what, 0.0))
        if not error <= tolerance and what not in self.record.failed:
            self.record.failed.append(what)

    def _compare(self, what: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
        """By the relative error, or the cosine in half precision."""
        if self.pair.half and bool(wanted.any()):
            cosine = float(found @ wanted / (found.norm() * wanted.norm()).clamp(min=1e-300))
            self._check(what, 1 - cosine, 0.01)
        else:
            self._check(what, relative(found, wanted), tolerance)

    def _effect(self, size: float, cause: float) -> None:
        if size <= 1e-12 * cause:
            self.record.outcome = NO_EFFECT if cause > 0 else RIGHT

    def _crossed(self, found: Tensor, v: Tensor) -> None:
        wanted = self.truth.cross(v)
        self._effect(float(wanted.norm()), float(self.truth.b.norm()))
        if self.how.mode == "sama":
            wide = self.how.radius > 0.01
            tolerance = (0.1 if wide else 0.05) if self.coarse else (0.05 if wide else 1e-3)
            if not (self.pair.kind.stops or self.pair.spec.stops) and bool(v.any()):
                defined = self.truth.difference(v, self.how.radius)
                wanted = min(wanted, defined, key=lambda x: relative(found, x))
        elif self.how.mode == "auto":
            tolerance = 0.05 if self.coarse else 1e-6
        elif self.how.mode == "difference":
            tolerance = 0.05 if self.coarse else 1e-5
        else:
            tolerance = self.exact
        self._compare("cross", found, wanted, tolerance)

    def _solved(self, v: Tensor) -> None:
        how, status = self.how, self.result.status
        if not bool(self.truth.b.any()):
            self._check("v", float(v.norm()), 0.0)
        elif self.pair.half:
            self._as_in_float32(v)
        elif how.solved is not None:
            left = (self.truth.damped(how.solved, v) - self.truth.b).norm() / self.truth.b.norm()
            if status is hk.Status.BUDGET:
                claimed = self.result.solution.residual
                self._check("v", max(0.0, float(left) - 1.5 * claimed), self.exact)
            else:
                self._check("v", float(left), self.exact)
        elif how.equals is not None:
            self._check("v", relative(v, how.equals(self.truth)), self.exact)
        elif how.blocks is not None:
            self._blocks(v)

    def _as_in_float32(self, v: Tensor) -> None:
        if self.how.random:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solution_ = self.pair._compute(self.how, *self.pair.single).solution
        assert solution_ is not None
        self._compare("v", v, self._flat(solution_.value, self.truth.params), 0.0)

    def _blocks(self, v: Tensor) -> None:
        assert self.how.blocks is not None
        damping, fisher, sharing, split = self.how.blocks
        claimed = {row.parameter.removeprefix("_orig_mod."): row.curvature for row in self.pair.covered.rows}
        if self.pair.covered.covered < 0.5 and "coverage" not in self.result.stats:
            told = any("cover" in words for words in self.told)
            self._check("coverage", 0.0 if told else 1 - self.pair.covered.covered, 0.0)
        if fisher == "mc" or self.pair.kind.open:
            return
        for name in self.pair.blocks.layers:
            parts = [f"{name}.{kind}" for kind in ("weight", "bias") if f"{name}.{kind}" in self.truth.named]
            missing = [part for part in parts if claimed.get(part) != "kronecker"]
            if missing or not self.pair.blocks.passes(fisher)[name]:
                continue
            if split == "ekfac":
                wanted = self.pair.blocks.ekfac(name, damping, fisher, sharing)
            else:
                wanted = self.pair.blocks.kfac(name, damping, fisher, sharing, split)
            if wanted is not None:
                self._check("v", relative(v[self.pair.blocks.order(name)], wanted), self.exact)

    def _conclude(self) -> None:
        record, failed = self.record, self.record.failed
        record.words = "; ".join(self.told)
        if any(not math.isfinite(x) for x in record.errors.values()):
            record.outcome = SILENT
        if not failed:
            return
        excused = not self.result.status.ok
        record.words = self.result.status.name + (f"; {record.words}" if record.words else "")
        for what in failed:
            named = any(word in words for word in EXCUSES[what] for words in self.told)
            if not named and not (excused and what == "v"):
                record.outcome = SILENT
                return
        record.outcome = WARNED


def run_pair(model: str, hyper: str, methods: list[str] | None = None) -> list[Record]:
    """All cells of a model and a λ; where the oracle itself is in doubt, one record that says so."""
    try:
        pair = Pair(model, hyper)
        doubt = pair.doubt()
        if not doubt <= 1e-4:
            return [Record(model, hyper, "oracle", DOUBTFUL, {"differences": doubt}, ["differences"])]
        return [pair.run(method) for method in methods or METHODS]
    except Exception:  # the oracle's own: those of a method are caught where it is called
        return [Record(model, hyper, "oracle", DOUBTFUL, words=traceback.format_exc()[-400:])]


def every_pair() -> list[tuple[str, str]]:
    """The rows of the grid."""
    return [(m, h) for m, spec in MODELS.items() for h, kind in HYPERS.items() if kind.fits(spec)]
