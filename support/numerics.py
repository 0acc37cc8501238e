"""Numbers that go wrong on purpose: the status each ends in, and the λ it leaves, against closed forms.

The model is linear, J_in = mean_n σ_n ½‖Wx_n − y_n‖² with σ = ½, so that A = ½ I ⊗ mean xxᵀ is both the Hessian and
KFAC's matrix, and J_out is another mean square. θ does not move (its rate is 0), and λ moves along the hypergradient:

    λ₁ = λ₀ − γ (∂_λ J_out − X(v)),    ∂_λ J_out = 0,    X(v)_n = (Wx_n − y_n)ᵀ V x_n / N .
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hyperkron as hk
import resuming
from hyperkron.solution import Status

N, D, C = 8, 4, 2
RATE = 1e-3
"""γ, so small that no weight leaves [0, 1] in a few steps."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        wanted, seen: the documented status and the one in the history.
        error: the largest deviation of λ from where it must be, relative to how far it moved; 0 is bit for bit.
        claim: what λ is compared with.
    """

    wanted: Status
    seen: str
    error: float
    claim: str

    @property
    def right(self) -> bool:
        """Whether the status is the documented one and λ is where it must be."""
        return self.seen == self.wanted.name and self.error <= 1e-6


class Setting:
    """The linear problem, with its closed forms."""

    def __init__(self, dtype: torch.dtype = torch.float64, rate: float = RATE) -> None:
        self.rate = rate
        generator = torch.Generator().manual_seed(0)
        self.x, self.y, self.x2, self.y2 = (
            torch.randn(N, size, generator=generator, dtype=torch.float64).to(dtype) for size in (D, C, D, C)
        )
        torch.manual_seed(0)
        self.model, self.hyper = nn.Linear(D, C, bias=False).to(dtype), hk.SampleWeights(N, init=0.5).to(dtype)
        self.problem = hk.BilevelProblem(self.inner, self.outer)

    @staticmethod
    def inner(model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
        return hk.losses.mse(model(batch[0]), batch[1], weight=hyper(torch.arange(len(batch[0]))))

    @staticmethod
    def outer(model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
        return hk.losses.mse(model(batch[0]), batch[1])

    def a(self, x: Tensor) -> Tensor:
        """mean xxᵀ."""
        return x.double().T @ x.double() / len(x)

    def b(self) -> Tensor:
        """∂_θ J_out."""
        w = self.model.weight.detach().double()
        return (self.x2.double() @ w.T - self.y2.double()).T @ self.x2.double() / N

    def moved(self, before: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """λ₁ for a given v."""
        w = self.model.weight.detach().double()
        residual = x.double() @ w.T - self.y.double()
        crossed = ((residual @ v) * x.double()).sum(1) / N
        return before.double() + self.rate * crossed

    def run(self, method: hk.Implicit, batches: list[tuple[Tensor, Tensor]], callbacks: Any = ()) -> hk.Run:
        """A run of which every step takes two inner batches (one for θ, which does not move) of ``batches``."""
        given = iter([batch for batch in batches for _ in range(2)])
        return hk.fit(
            self.problem,
            self.model,
            self.hyper,
            hk.AID(method, inner_steps=1, inner_rate=0.0, outer_rate=self.rate),
            lambda: next(given),
            (self.x2, self.y2),
            steps=0,
            callbacks=callbacks,
        )


def deviation(found: Tensor, wanted: Tensor, before: Tensor) -> float:
    """The largest error of λ relative to its largest movement."""
    if not bool(torch.isfinite(found).all()):
        return math.inf
    size = float((wanted - before.double()).abs().max()) or 1.0
    return float((found.double() - wanted).abs().max()) / size


def _status(run: hk.Run) -> str:
    return str(run.history[-1].get("status", ""))


@contextlib.contextmanager
def guards(**options: Any) -> Iterator[list[Any]]:
    """A guard whose notes go to a folder that is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        yield [hk.training.SkipFailures(folder=folder, **options)]


CASES: dict[str, list[Callable[[], Outcome]]] = {}


def case(name: str) -> Callable[[Callable[[], Outcome]], Callable[[], Outcome]]:
    """Add a variant to a case."""

    def add(function: Callable[[], Outcome]) -> Callable[[], Outcome]:
        CASES.setdefault(name, []).append(function)
        return function

    return add


# --- NaN and infinity, in every algorithm ------------------------------------------------------------------


def poisoned(method: str, level: str, value: float) -> Outcome:
    """A step on a bad batch, after two good ones."""
    with guards() as callbacks:
        run = resuming.start(method, callbacks, 2)
        before = run.state.hyper.weight.detach().clone()
        source = run.batches.sources[level]
        tensors = source.tensors if method == "SABA" else source.iterable.dataset.tensors
        tensors[0].view(-1)[:: resuming.FEATURES] = value
        source._iterator = None
        run.advance(1)
        error = float((run.state.hyper.weight.detach() - before).abs().max())
        return Outcome(Status.SKIPPED, _status(run), error, "λ unchanged")


for _level in ("inner", "outer"):
    for _value, _word in ((math.nan, "NaN"), (math.inf, "infinity")):
        for _method in resuming.ALGORITHMS:
            case(f"{_word} in an {_level} batch")(
                lambda method=_method, level=_level, value=_value: poisoned(method, level, value)
            )


@case("NaN in the hypergradient alone")
def _() -> Outcome:
    setting = Setting()

    def outer(model: Any, hyper: Any, batch: Any) -> Any:
        return Setting.outer(model, hyper, batch) + (0.0 * hyper.weight).square().sum().sqrt()  # 0·∞ in ∂_λ

    setting.problem = hk.BilevelProblem(Setting.inner, outer)
    with guards() as callbacks:
        before = setting.hyper.weight.detach().clone()
        run = setting.run(hk.kfac(1e-2), [(setting.x, setting.y)], callbacks).advance(1)
        return Outcome(
            Status.SKIPPED, _status(run), float((setting.hyper.weight.detach() - before).abs().max()), "λ unchanged"
        )


# --- factors -----------------------------------------------------------------------------------------------


def dead_feature(setting: Setting) -> Tensor:
    x = setting.x.clone()
    x[:, 0] = 0.0
    return x


KRONECKER: dict[str, Callable[[float], hk.Implicit]] = {
    "pi": lambda d: hk.kfac(d, fisher="type-2", cross="reverse"),
    "exact": lambda d: hk.kfac(d, fisher="type-2", split="exact", cross="reverse"),
    "ekfac": lambda d: hk.ekfac(d, fisher="type-2", cross="reverse"),
}


def singular_at_once(name: str) -> Outcome:
    setting = Setting()
    with guards() as callbacks:
        before = setting.hyper.weight.detach().clone()
        run = setting.run(KRONECKER[name](0.0), [(dead_feature(setting), setting.y)], callbacks).advance(1)
        return Outcome(
            Status.SKIPPED, _status(run), float((setting.hyper.weight.detach() - before).abs().max()), "λ unchanged"
        )


def singular_later(name: str) -> Outcome:
    setting = Setting()
    x = dead_feature(setting)
    run = setting.run(KRONECKER[name](0.0), [(setting.x, setting.y), (x, setting.y)]).advance(1)
    # the inverse of the first step, made with weights of ½, serves the second
    previous = torch.linalg.inv(setting.a(setting.x)) / 0.5
    before = setting.hyper.weight.detach().clone()
    run.advance(1)
    wanted = setting.moved(before, setting.b() @ previous, x)
    found = deviation(setting.hyper.weight.detach(), wanted, before)
    return Outcome(Status.KEPT_PREVIOUS, _status(run), found, "λ of the previous inverse")


for _name in KRONECKER:
    case("singular factors at the first step")(lambda name=_name: singular_at_once(name))
    case("singular factors later")(lambda name=_name: singular_later(name))


@case("Cholesky that fails until 100-fold damping")
def _() -> Outcome:
    setting, tried = Setting(), []
    true = torch.linalg.cholesky_ex

    def failing(matrices: Tensor) -> Any:
        factor, info = true(matrices)
        if matrices.shape[-1] == D and len(tried) < 3:
            tried.append(matrices)
            info = torch.ones_like(info)
        return factor, info

    run = setting.run(hk.kfac(1e-4, fisher="type-2", split="plain", cross="reverse"), [(setting.x, setting.y)])
    before = setting.hyper.weight.detach().clone()
    with _replaced(torch.linalg, "cholesky_ex", failing):
        run.advance(1)
    a = setting.a(setting.x) + 100 * 1e-2 * torch.eye(D, dtype=torch.float64)
    v = torch.linalg.solve(a, setting.b().T).T / (0.5 + 1e-2)
    wanted = setting.moved(before, v, setting.x)
    found = deviation(setting.hyper.weight.detach(), wanted, before)
    return Outcome(Status.MORE_DAMPING, _status(run), found, "λ of the damping used")


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    true = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, true)


def eigh_failure(name: str, always: bool) -> Outcome:
    """In float32 alone, where float64 rescues it, or always, where the previous basis is kept."""
    setting = Setting() if always else Setting(torch.float32, rate=0.1)  # λ itself is rounded to seven digits
    true = torch.linalg.eigh

    def failing(matrix: Tensor) -> Any:
        if always or matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("it did not converge")
        return true(matrix)

    batch, damping = (setting.x, setting.y), 0.1
    run = setting.run(KRONECKER[name](damping), [batch, batch])
    inverse = torch.linalg.inv(0.5 * setting.a(setting.x) + damping * torch.eye(D, dtype=torch.float64))
    if always:
        run.advance(1)
    before = setting.hyper.weight.detach().clone()
    with _replaced(torch.linalg, "eigh", failing):
        run.advance(1)
    wanted = setting.moved(before, setting.b() @ inverse, setting.x)
    found = deviation(setting.hyper.weight.detach(), wanted, before)
    if not always and found < 3e-5:  # of float32's digits, the condition of A has taken two
        found = 0.0
    status = Status.KEPT_PREVIOUS if always else Status.MORE_DAMPING
    return Outcome(status, _status(run), found, "λ of the previous basis" if always else "λ of the dense solve")


for _name in ("exact", "ekfac"):
    case("eigh that fails in float32")(lambda name=_name: eigh_failure(name, False))
    case("eigh that always fails")(lambda name=_name: eigh_failure(name, True))


# --- iterations --------------------------------------------------------------------------------------------


def bowl(curvature: float, method: hk.Implicit, wanted: Status, v: float, callbacks: Any = ()) -> Outcome:
    """J_in = λθ₀² + (curvature/2)·θ₁² and J_out = θ₀ + θ₁ at λ = 1, so that b = (1, 1) and X(v) = 2θ₀v₀."""
    torch.manual_seed(0)
    model, hyper = nn.Linear(2, 1, bias=False).double(), hk.as_hyper(torch.tensor(1.0, dtype=torch.float64))

    def inner(model: Any, hyper: Any, batch: Any) -> Tensor:
        theta = model.weight[0]
        return hyper() * theta[0] ** 2 + 0.5 * curvature * theta[1] ** 2

    problem = hk.BilevelProblem(inner, lambda m, h, b: m.weight.sum())
    algorithm = hk.AID(method, inner_steps=1, inner_rate=0.0, outer_rate=1.0)
    run = hk.fit(problem, model, hyper, algorithm, None, None, steps=1, callbacks=callbacks)
    before, theta = torch.tensor(1.0, dtype=torch.float64), float(model.weight[0, 0].detach())
    target = before + 2 * theta * v
    claim = "λ unchanged" if wanted is Status.SKIPPED else "λ of the documented fallback"
    return Outcome(wanted, _status(run), deviation(hyper.value.detach(), target, before), claim)


def skipped(curvature: float, method: hk.Implicit, status: Status) -> Outcome:
    """The same with a guard that does not follow such hypergradients."""
    with guards(statuses={status}) as callbacks:
        return bowl(curvature, method, Status.SKIPPED, 0.0, callbacks)


NEGATIVE: dict[str, tuple[Callable[[], hk.Implicit], float]] = {
    "cg": (lambda: hk.cg(5, 0.0), 1.0),  # v = b
    "neumann": (lambda: hk.neumann(5, step=0.1), 0.1),  # v = ηb
    "gd": (lambda: hk.gradient_descent(5, step=0.1, warm_start=False), 0.1),
}

for _make, _v in NEGATIVE.values():
    case("indefinite Hessian")(
        lambda make=_make, v=_v: bowl(-6.0, make(), Status.NONPOSITIVE_CURVATURE, v)
    )  # fmt: skip
    case("indefinite Hessian, refused")(lambda make=_make: skipped(-6.0, make(), Status.NONPOSITIVE_CURVATURE))

case("Neumann series that diverges")(lambda: bowl(6.0, hk.neumann(20, step=10.0), Status.DIVERGED, 10.0))
case("Neumann series that diverges")(
    lambda: bowl(6.0, hk.gradient_descent(20, step=10.0, warm_start=False), Status.DIVERGED, 10.0)
)
case("Neumann series that diverges, refused")(lambda: skipped(6.0, hk.neumann(20, step=10.0), Status.DIVERGED))


def outcomes(name: str) -> list[Outcome]:
    """All variants of a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hk.HyperkronWarning)
        return [variant() for variant in CASES[name]]
