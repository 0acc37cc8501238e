"""The problems of experiments/suite/tuned.py: what is minimised, where it starts, how it is scored.

*logistic* and *sized*: one penalty for each feature of a logistic regression, J_in = mean loss + ½ Σ_j exp(λ_j) θ_j² on
training data, J_out = mean loss on validation data, scored by the suboptimality h(λ) − h* of the value function. Both
have synthetic data (IJCNN1 must be downloaded): *logistic* is small, with features of different scales and
validation labels noisier than the training labels, so that the best penalties are finite; *sized* has IJCNN1's numbers
of features and examples and those of its traits that are known. *digits* and *covtype* are the same with real data.

*cleaning*: weights σ(λ_n) of MNIST examples of which half have random labels, J_in = mean(σ(λ) · CE) + 0.2 ‖θ‖²,
λ₀ = −2, θ₀ = 0; the score is the validation loss at (λ, θ), with the test error, which the published figure shows,
beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hyperkron as hk
from experiments.paper.cleaning import loss_and_error, noisy_split
from experiments.paper.datasets import read_mnist

FLOOR = 1e-16
"""What a suboptimality within rounding of zero, or below, is written as."""
Scores = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A bilevel problem, where it starts, how it is scored, and the grid of its step sizes."""

    name: str
    problem: hk.BilevelProblem
    start: Callable[[], tuple[nn.Module, nn.Module]]
    inner: tuple[Tensor, ...]
    outer: tuple[Tensor, ...]
    score: Callable[[nn.Module, nn.Module], Scores]
    steps: tuple[float, ...]
    ratios: tuple[float, ...]


class Logistic:
    """Regularisation selection on small synthetic data, in double precision, with its value function."""

    name: ClassVar[str] = "logistic"
    steps: ClassVar[tuple[float, ...]] = (0.04, 0.1, 0.25, 0.6, 1.5)
    ratios: ClassVar[tuple[float, ...]] = (0.1, 0.03, 0.01, 0.003)

    def __init__(self, features: int = 10, train: int = 1024, validation: int = 512, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def sample(count: int, noise: float) -> tuple[Tensor, Tensor]:
            x = torch.randn(count, features, generator=generator, dtype=torch.float64)
            chance = (1 - noise) * torch.sigmoid(0.9 * x @ signs) + noise / 2
            return x * scales, (torch.rand(count, generator=generator, dtype=x.dtype) < chance).to(x.dtype)

        scales = 3 * torch.logspace(0, -0.5, features, dtype=torch.float64)  # the covariance has condition number 10
        signs = 2 * torch.randint(2, (features,), generator=generator).double() - 1
        self.train, self.validation = sample(train, 0.0), sample(validation, 0.4)

    def case(self) -> Case:
        def loss(model: nn.Module, batch: Any) -> hk.losses.Loss:
            return hk.losses.binary_cross_entropy(model(batch[0]).squeeze(1), batch[1])

        def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
            return loss(model, batch) + hk.losses.l2(model, 0.5 * hyper().exp())

        problem = hk.BilevelProblem(inner, lambda model, hyper, batch: loss(model, batch))
        features = self.train[0].shape[1]

        def start() -> tuple[nn.Module, nn.Module]:
            model = nn.Linear(features, 1, bias=False, dtype=torch.float64)
            nn.init.zeros_(model.weight)
            return model, hk.as_hyper(torch.zeros(1, features, dtype=torch.float64))

        def score(model: nn.Module, hyper: nn.Module) -> Scores:
            return {"suboptimality": max(float(self.value(hyper().detach()[0])[0] - self.best), FLOOR)}

        return Case(self.name, problem, start, self.train, self.validation, score, self.steps, self.ratios)

    def value(self, log_penalty: Tensor) -> tuple[Tensor, Tensor]:
        """h(λ) and its gradient, −exp(λ) θ ⊙ H⁻¹∂f, at the inner minimum found by Newton's method."""
        x, y = self.train
        penalty, theta = log_penalty.exp(), torch.zeros_like(log_penalty)
        for _ in range(100):
            p = torch.sigmoid(x @ theta)
            gradient = x.T @ (p - y) / len(x) + penalty * theta
            hessian = (x.T * (p * (1 - p))) @ x / len(x) + torch.diag(penalty)
            move = torch.linalg.solve(hessian, gradient)
            if float(gradient @ move) < 1e-28:  # twice what is left to gain: its scale does not depend on the penalties
                break
            theta = theta - move
        x, y = self.validation
        output = x @ theta
        b = x.T @ (torch.sigmoid(output) - y) / len(x)
        h = nn.functional.binary_cross_entropy_with_logits(output, y)
        return h, -penalty * theta * torch.linalg.solve(hessian, b)

    @cached_property
    def best(self) -> Tensor:
        """h*."""
        return self.value(self.optimum())[0]

    def optimum(self) -> Tensor:
        """argmin h, by L-BFGS on exact values and gradients."""
        point = torch.zeros(self.train[0].shape[1], dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [point], max_iter=500, tolerance_grad=1e-9, tolerance_change=0.0, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            h, point.grad = self.value(point.detach())
            return h

        optimizer.step(closure)
        return point.detach()


class Sized(Logistic):
    """The same on synthetic data of IJCNN1's size: 22 features, 49 990 training and 91 701 validation examples.

    A row is what that data set has of an engine: which of ten cylinders fires (one-hot), speed and load, and a window
    of ten accelerations. The label, a misfire, is positive for 9.7 %, by a rule of which a linear model finds a part.
    """

    name = "sized"
    steps = (0.03, 0.125, 0.5, 2.0)
    ratios = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)

    def __init__(self, train: int = 49_990, validation: int = 91_701, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        def sample(count: int) -> tuple[Tensor, Tensor]:
            cylinder = torch.randint(10, (count,), generator=generator)
            speed = 2 * torch.rand(count, generator=generator, dtype=torch.float64) - 1
            load, a = torch.tanh(0.6 * normal(count)), normal(count, 10)
            for t in range(1, 10):
                a[:, t] = 0.6 * a[:, t - 1] + 0.8 * a[:, t]
            a = torch.tanh(0.4 * a * (1 + 0.5 * speed)[:, None])
            crossed = (
                3 * a[:, 4] * a[:, 5] * (1 - speed) - 2 * speed * load + 2 * of_cylinder.flip(0)[cylinder] * a[:, 6]
            )
            score = 0.6 * (a @ of_window + of_cylinder[cylinder] + 0.5 * load) + crossed + 0.3 * normal(count)
            rows = [nn.functional.one_hot(cylinder, 10).to(a.dtype), speed[:, None], load[:, None], a]
            return torch.cat(rows, dim=1), score

        of_cylinder, of_window = 0.5 * normal(10), normal(10)
        (x, score), (y, other) = sample(train), sample(validation)
        level = score.quantile(0.903)
        self.train, self.validation = (x, (score > level).to(x.dtype)), (y, (other > level).to(x.dtype))

    def optimum(self) -> Tensor:
        """argmin h, by L-BFGS-B in the penalties exp(λ) ≥ 0: most are zero there, where the gradient in λ vanishes."""
        from scipy.optimize import minimize  # type: ignore[import-untyped]

        unit, features = 1e-4, self.train[0].shape[1]

        def function(x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            point = torch.from_numpy(x * unit).clamp(min=1e-300).log()
            h, slope = self.value(point)
            return float(h) / unit, (slope / point.exp()).numpy()

        options = {"maxiter": 3000, "maxfun": 3000, "ftol": 1e-15, "gtol": 1e-9}
        start, bounds = np.ones(features), [(0, None)] * features
        found = minimize(function, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        return torch.from_numpy(found.x * unit).clamp(min=1e-300).log()


class Long(Sized):
    """The same problem under a name of its own, for the runs with fast loops."""

    name = "long"


class Ijcnn1(Long):
    """IJCNN1 itself: LIBSVM's files ``ijcnn1`` and ``ijcnn1.t``, for training and for validation as in the suite."""

    def __init__(self, folder: str | Path, features: int = 22) -> None:
        files = [_libsvm(Path(folder) / name) for name in ("ijcnn1", "ijcnn1.t")]
        from sklearn.datasets import load_svmlight_file

        parts = [load_svmlight_file(file, n_features=features) for file in files]
        self.train, self.validation = (
            (torch.from_numpy(x.toarray()), torch.from_numpy(y > 0).double()) for x, y in parts
        )


def _libsvm(file: Path) -> str:
    """A file of LIBSVM's collection, as it is or packed by bzip2."""
    packed = file.with_name(f"{file.name}.bz2")
    return str(packed if packed.is_file() else _found(file, "LIBSVM's; --ijcnn1 names its folder"))


def _found(file: Path, remedy: str) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there: it is {remedy}.")
    return file


class Digits(Sized):
    """The same on real data of about that shape: is a digit of MNIST a nine, by its first 21 principal components?

    9.9 % are. All 70 000 images, divided at random as IJCNN1 is; components are within [−1, 1], and a constant is the
    22nd feature.
    """

    name = "digits"

    def __init__(self, folder: str | Path, train: int = 24_700, count: int = 21, seed: int = 0) -> None:
        data = read_mnist(folder)
        images = torch.cat([data.train[0], data.test[0]]).double()
        labels = (torch.cat([data.train[1], data.test[1]]) == 9).double()
        centred = images - images.mean(0)
        values, vectors = torch.linalg.eigh(centred.T @ centred)
        components = centred @ vectors[:, values.argsort(descending=True)[:count]]
        x = torch.cat([components / components.abs().max(), torch.ones(len(images), 1, dtype=images.dtype)], dim=1)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        self.train, self.validation = ((x[i], labels[i]) for i in (order[:train], order[train:]))


class Covtype(Sized):
    """The same on real data of the suite: is a cell of covtype of class 2, by its ten measurements and four areas?

    As in LIBSVM's binary form class 2 is positive and features are within [0, 1]. The forty soil types are left out,
    since some are so rare that only one label has them, and the best weights infinite. There are as many examples as in
    IJCNN1, drawn at random. ``file`` is UCI's covtype.data, or the same with a header and named .csv.
    """

    name = "covtype"

    def __init__(self, file: str | Path, train: int = 49_990, validation: int = 91_701, seed: int = 0) -> None:
        file = _found(Path(file), "UCI's covtype.data, or that with a header; --covtype names it")
        table = np.loadtxt(file, delimiter=",", skiprows=int(file.suffix == ".csv"), dtype=np.float64)
        x, labels = torch.from_numpy(table[:, :14]), torch.from_numpy(table[:, -1] == 2).double()
        low, high = x.min(0).values, x.max(0).values
        x = (x - low) / torch.where(high > low, high - low, 1.0)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: train + validation]
        self.train, self.validation = ((x[i], labels[i]) for i in (order[:train], order[train:]))


def cleaning(
    folder: str | Path,
    noise: float = 0.5,
    train: int = 2048,
    validation: int = 1024,
    clip: float = 10.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Hypercleaning of MNIST with a linear model; ``noise`` is the share of training labels drawn anew."""
    split = noisy_split(read_mnist(folder), (train, validation, 0), 0, noise, clip)
    training, validating, testing = ((x.to(dtype), y) for x, y in (split.train, split.validation, split.test))

    def inner(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights(batch[2])) + hk.losses.l2(model, 0.2)

    def outer(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    def start() -> tuple[nn.Module, nn.Module]:
        model = nn.Linear(training[0].shape[1], 10, bias=False, dtype=dtype)
        nn.init.zeros_(model.weight)
        half = float(torch.sigmoid(torch.tensor(-2.0, dtype=torch.float64)))
        return model, hk.SampleWeights(train, "sigmoid", init=half).to(dtype)

    def score(model: nn.Module, weights: nn.Module) -> Scores:
        loss, _ = loss_and_error(model, validating)
        return {"validation loss": loss, "test error": loss_and_error(model, testing)[1]}

    rows = (*training, torch.arange(train))
    problem = hk.BilevelProblem(inner, outer)
    grid = {"steps": (0.015, 0.05, 0.15, 0.3, 0.6, 1.0), "ratios": (1e-3, 1e-4, 1e-5, 1e-6)}
    return Case("cleaning", problem, start, rows, validating, score, **grid)
