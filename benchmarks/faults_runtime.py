"""The rows of ``faults.py`` about runs that are resumed with something changed, and about steps that are skipped.

A mismatch is survived if the resume is refused with the changed thing named (versions: a warning that names both), a
legitimate one if it continues without a word.
"""

from __future__ import annotations

import argparse
import functools
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forks import Child, written
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hyperkron as hk
from hyperkron.training import checkpoint

EXAMPLES, FEATURES = 12, 4
SCALE = 1.0
OPTIONS = argparse.Namespace(temperature=1.0, steps=2)


# --- a small run with one of everything --------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self, activation: nn.Module, dropout: float, slope: float, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, 1)
        self.activation, self.dropout, self.slope, self.calls = activation, nn.Dropout(dropout), slope, 0
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # changes while the run goes on, so it says nothing about the run
        x = self.dropout(self.activation(self.first(x)))
        return self.last(nn.functional.leaky_relu(self.second(x), self.slope))


class Relu(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.activation(self.first(x)))
        return self.last(nn.functional.relu(self.second(x)))


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.note = x, y, "not read by any code"

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]

    def __len__(self) -> int:
        return len(self.x)


@dataclass
class Penalty:
    """A callable with a field."""

    strength: float

    def __call__(self, model: nn.Module) -> hk.losses.Loss:
        return hk.losses.l2(model, self.strength)


def residual(x: Tensor, power: float) -> Tensor:
    return x * power


def halved(x: Tensor, power: float) -> Tensor:
    return x * power / 2


def objectives(alpha: float, beta: float, strength: float, helper: Callable[..., Tensor], teacher: nn.Module) -> Any:
    penalty = Penalty(strength)

    def inner(model: nn.Module, hyper: nn.Module, batch: Any, offset: float = beta) -> hk.losses.Loss:
        x, y = batch
        target = alpha * SCALE * y / OPTIONS.temperature + offset + hyper() + teacher(x).detach()
        return hk.losses.mse(helper(model(x)), target) + penalty(model)

    return inner, lambda model, hyper, batch: hk.losses.mse(model(batch[0]), batch[1])


def start(
    *,
    activation: type[nn.Module] = nn.Tanh,
    network: type[Network] = Network,
    dropout: float = 0.1,
    slope: float = 0.1,
    tied: bool = False,
    frozen: bool = False,
    evaluation: bool = False,
    alpha: float = 0.5,
    beta: float = 0.1,
    strength: float = 1e-3,
    power: float = 1.0,
    helper: Callable[..., Tensor] = residual,
    teacher: int = 7,
    seed: int = 1,
    inner_shift: float = 0.0,
    outer_shift: float = 0.0,
    swapped: bool = False,
    batch_size: int = 4,
    algorithm: Any = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = 0.05,
    decay: float = 0.9,
    bound: float = 1.0,
    weights: int = 3,
    folder: Path | None = None,
    resume: Path | None = None,
    steps: int = 0,
    model: nn.Module | None = None,
    allow_changes: bool = False,
) -> hk.Run:
    """A run of which every argument changes one thing."""
    torch.manual_seed(teacher)
    guide = nn.Linear(FEATURES, 1)
    torch.manual_seed(weights)
    if model is None:
        model = network(activation(), dropout, slope, tied)
        model.second.bias.requires_grad_(not frozen)
        model.train(not evaluation)
    hyper = hk.as_hyper(torch.zeros(1))
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, EXAMPLES, FEATURES, generator=generator), torch.randn(2, EXAMPLES, 1, generator=generator)
    y[0, 0] += inner_shift
    y[1, -1] += outer_shift
    rows = Rows(x[0], y[0].flip(0) if swapped else y[0])
    inner, outer = objectives(alpha, beta, strength, functools.partial(helper, power=power), guide)
    adam = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)
    return hk.fit(
        hk.BilevelProblem(inner, outer),
        model,
        hyper,
        algorithm or hk.AID(hk.cg(2, curvature=hk.curvature.GGN(1e-2)), inner_steps=1),
        DataLoader(rows, batch_size, shuffle=True),
        (x[1], y[1]),
        steps=steps,
        inner_optimizer=hk.algorithms.Updates(adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda t: decay**t)),
        projection=lambda value: value.clamp(-bound, bound),
        callbacks=[] if folder is None else [hk.Checkpoint(folder, every=1, keep=3)],
        resume=resume,
        allow_changes=allow_changes,
        clock=lambda: 0.0,  # so that the checkpoints of two runs are the same bytes
    )


@contextmanager
def changed(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


# --- resumes -----------------------------------------------------------------------------------------------

MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "activation module": ({"activation": nn.ReLU}, "model.activation"),
    "activation in forward": ({"network": Relu}, "model"),
    "dropout rate": ({"dropout": 0.2}, "p=0.1"),
    "attribute of a module": ({"slope": 0.3}, "model.slope: 0.1"),
    "tied weights": ({"tied": True}, "model.second.weight"),
    "frozen parameter": ({"frozen": True}, "model.second.bias"),
    "evaluation mode": ({"evaluation": True}, "model.training"),
    "closure constant": ({"alpha": 0.6}, "problem.inner.alpha: 0.5"),
    "default argument": ({"beta": 0.2}, "problem.inner.offset: 0.1"),
    "field of a callable": ({"strength": 1e-2}, "problem.inner.penalty.strength: 0.001"),
    "argument of a partial": ({"power": 2.0}, "problem.inner.helper.keywords.power: 1.0"),
    "code of a helper": ({"helper": halved}, "problem.inner.helper.func: residual"),
    "weights of a teacher": ({"teacher": 8}, "problem.inner.teacher.weight"),
    "inner data, one label": ({"inner_shift": 1e-6}, "inner_data.iterable.dataset.y"),
    "inner data, another order": ({"swapped": True}, "inner_data.iterable.dataset.y"),
    "outer data, one target": ({"outer_shift": 1e-6}, "outer_data.batch.1"),
    "batch size": ({"batch_size": 6}, "inner_data.iterable.batch_size: 4"),
    "algorithm": ({"algorithm": hk.algorithms.SAMA(1)}, "algorithm: AID"),
    "solver": (
        {"algorithm": hk.AID(hk.cg(3, curvature=hk.curvature.GGN(1e-2)), inner_steps=1)},
        "solver.iterations: 2",
    ),
    "optimizer": ({"optimizer": torch.optim.Adagrad}, "inner.optimizer: SGD"),
    "learning rate": ({"lr": 0.1}, "inner.optimizer.lr: 0.05"),
    "schedule": ({"decay": 0.8}, "decay: 0.9"),
    "projection": ({"bound": 2.0}, "outer.project.bound: 1.0"),
}
"""What is changed, and what the refusal must name."""


def refusal(folder: Path, **changes: Any) -> str:
    """The message with which a changed run is refused; empty where it is not."""
    run = start(**changes)
    try:
        run.resume(folder)
    except hk.training.CheckpointError as error:
        return str(error)
    return ""


def warned(folder: Path) -> str:
    """What is said while a checkpoint is resumed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start().resume(folder)
    return " ".join(str(w.message) for w in caught if w.category is hk.HyperkronWarning)


def refused_global(folder: Path) -> str:
    with changed(OPTIONS, "temperature", 2.0):
        temperature = refusal(folder)
    namespace = start.__globals__
    before, namespace["SCALE"] = namespace["SCALE"], 2.0
    try:
        scale = refusal(folder)
    finally:
        namespace["SCALE"] = before
    return temperature if "SCALE: 1.0" in scale else ""


def told_version(folder: Path, name: str) -> str:
    """The warning about a checkpoint that was written by another version."""
    elsewhere = folder.with_name(f"{folder.name}-{name}")
    other = {**checkpoint._versions(), name: "0.0.1"}
    with changed(checkpoint, "_versions", lambda: other):
        start(steps=2).save(elsewhere)
    told = warned(elsewhere)
    shutil.rmtree(elsewhere)
    return told


def mismatch(folder: Path, name: str) -> bool:
    """Whether a changed run is told by name."""
    if name in ("torch", "hyperkron", "python"):
        now = checkpoint._versions()[name]
        return all(text in told_version(folder, name) for text in (f"{name} 0.0.1", f"{name} {now}"))
    if name == "globals":
        return "OPTIONS.temperature: 1.0 in the checkpoint, 2.0 in this run" in refused_global(folder)
    changes, named = MISMATCHES[name]
    message = refusal(folder, **changes)
    return named in message and "allow_changes=True" in message


ALL_MISMATCHES = (*MISMATCHES, "globals", "torch", "hyperkron", "python")


def redefined(source: str) -> Any:
    """A helper made from text, as if its file had been edited above it."""
    space: dict[str, Any] = {"__name__": "edited", "Tensor": Tensor}
    exec(compile(source, "edited.py", "exec"), space)
    return space["residual"]


def reused(folder: Path) -> None:
    """The same network, which has counted its calls, in a second run of one process."""
    run = start(steps=2)
    elsewhere = folder.with_name(f"{folder.name}-reused")
    run.save(elsewhere)
    start(model=run.state.model).resume(elsewhere).advance(1)
    shutil.rmtree(elsewhere)


def unread(folder: Path) -> None:
    with changed(OPTIONS, "steps", 900):
        start().resume(folder)


SAME = '''


def residual(x: Tensor, power: float) -> Tensor:
    """Now with a docstring."""
    # and a comment, further down in the file
    return x * power
'''

LEGITIMATE: dict[str, Callable[[Path], object]] = {
    "the same program": lambda folder: start().resume(folder).advance(2),
    "by fit": lambda folder: start(resume=folder, steps=4),
    "more steps": lambda folder: start().resume(folder).advance(5),
    "other initial weights": lambda folder: start(weights=99).resume(folder),
    "functions defined again": lambda folder: start(helper=redefined(SAME)).resume(folder),
    "a moved and documented function": lambda folder: start(helper=redefined("\n" * 40 + SAME)).resume(folder),
    "an option that no objective reads": unread,
    "a network that was used before": reused,
    "changes that are allowed": lambda folder: start(alpha=0.6, resume=folder, allow_changes=True, steps=3),
}


def legitimate(folder: Path, name: str) -> bool:
    """Whether a run continues without an error or a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", hk.HyperkronWarning)
        try:
            LEGITIMATE[name](folder)
        except (hk.HyperkronError, hk.HyperkronWarning) as error:
            print(f"{name}: {error}")
            return False
    return True


# --- skipped steps -----------------------------------------------------------------------------------------


def skipped(folder: Path) -> bool:
    """Five bad batches in a row leave five files, each named after its step."""
    batches = iter([math.nan] * 5 + [1.0] * 9)
    model, hyper = nn.Linear(1, 1), hk.as_hyper(torch.zeros(1))
    problem = hk.BilevelProblem(
        lambda m, h, x: hk.losses.mse(m(x), h() + x), lambda m, h, x: hk.losses.mse(m(x), 2 * x)
    )
    guard = hk.training.SkipFailures(limit=6, folder=folder)
    ones = torch.ones(3, 1)
    algorithm = hk.AID(hk.identity(), inner_steps=1)
    hk.fit(problem, model, hyper, algorithm, ones, lambda: next(batches) * ones, steps=7, callbacks=[guard])
    return sorted(p.name for p in folder.iterdir()) == [f"failed-rank00000-step-{i:08d}.json" for i in range(5)]


# --- the rows ----------------------------------------------------------------------------------------------


def faults(scratch: Path) -> list[Callable[[], dict[str, Any]]]:
    """The rows, each a function that makes one."""

    def each(title: str, names: tuple[str, ...], right: Callable[[Path, str], bool], word: str) -> dict[str, Any]:
        folder = scratch / "resumed"
        Child(lambda: start(steps=2).save(folder)).wait()
        wrong = [n for n in names if written(lambda n=n: str(right(folder, n)), scratch / "told") != "True"]
        note = f"{len(wrong)} {word}" + (f": {', '.join(wrong)}" if wrong else f"; {', '.join(names)}")
        shutil.rmtree(folder)
        return {"fault": title, "tries": len(names), "survived": len(names) - len(wrong), "note": note}

    def files() -> dict[str, Any]:
        right = written(lambda: str(skipped(scratch / "skipped")), scratch / "told") == "True"
        return {
            "fault": "skipped steps in a row",
            "tries": 1,
            "survived": int(right),
            "note": "a file for each of five",
        }

    return [
        lambda: each("resumed with a change", ALL_MISMATCHES, mismatch, "silent"),
        lambda: each("resumed legitimately", tuple(LEGITIMATE), legitimate, "refused"),
        files,
    ]
