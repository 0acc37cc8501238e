"""Can a rule choose δ? The rules of ``damping_rules.py`` beside fixed values.

Cosines are those with a hypergradient whose linear system is solved to the end, with δ = 1/τ for the time τ that θ was
trained (steps · rate): where λ begins to move, and after 30 steps of λ with the identity. Runs train λ for 100 steps by
Adam, with the step size on record for KFAC. Rules were chosen on ``DEVELOPMENT``; the other problems were run once.

The problems' penalty is part of A, so a small δ cannot do much harm. So each is also taken without its penalty.

    python -m experiments.which_method.damping         # about 20 processor-minutes, continues where it stopped
    python -m experiments.which_method.damping_page    # the tables of its record
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import hyperkron as hk
from experiments import records
from experiments.attribution import settings
from experiments.pieces import Lines
from experiments.which_method import compare
from experiments.which_method.compare import STEPS, Map, Piece
from experiments.which_method.damping_rules import At, Curved, Eigenvalues, Ruled, Trials, by_layer, cosine, solved
from experiments.which_method.diagnosed import DAMPING, looks
from experiments.which_method.methods import INNER, Method
from experiments.which_method.problems import PROBLEMS, Task, digits, penalty
from hyperkron.curvature import EKFAC, KFAC

RESULT = records.RESULTS / "which_method_damping.jsonl"
GRID = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
SEEDS = (1, 2, 3)
MLP = "digits MLP"
DEVELOPMENT = ("example weights", "penalty per weight", "poisoning", "generator noise", MLP)
KINDS: dict[str, Curved] = {"KFAC": KFAC, "EKFAC": EKFAC}
MEANS, LARGEST = (1.0, 1e-1, 1e-2, 1e-3), (1e-1, 1e-2, 1e-3, 1e-4)
"""Shares of the mean and of the largest eigenvalue."""
CHOSEN = 1e-1
"""The share of the mean eigenvalue that was best on ``DEVELOPMENT``."""


class Case(NamedTuple):
    """A problem, with or without its penalty."""

    problem: str
    plain: bool

    def __str__(self) -> str:
        return self.problem + ", no penalty" * self.plain


def cases(problem: str) -> list[Case]:
    """The problem as it is, and without its penalty if that is not λ; the last one is trained with every rule."""
    both = problem != MLP and "penalty" not in problem
    return [Case(problem, False), Case(problem, True)] if both else [Case(problem, False)]


def task_of(case: Case, seed: int, data: Path | None) -> Task:
    """The problem; without its penalty if the case says so."""
    parts = digits(seed, data)
    torch.manual_seed(seed)
    task = PROBLEMS[case.problem](parts)
    if not case.plain:
        return task
    inner = task.problem.inner
    return replace(task, problem=hk.BilevelProblem(lambda m, h, b: inner(m, h, b) - penalty(m), task.problem.outer))


def points(case: Case, seed: int, data: Path | None) -> Iterator[tuple[int, At, float]]:
    """(steps of λ, where hypergradients are compared, δ of the reference)."""
    if case.problem == MLP:
        yield 0, *mlp(seed)
        return
    for look, at in looks(task_of(case, seed, data), seed):
        yield look, at, DAMPING


def mlp(seed: int) -> tuple[At, float]:
    """Example weights for the network of the attribution study, which has two hidden layers and a small penalty."""
    setting = settings.digits_mlp(None)
    (x, y), queries = setting.train, setting.queries
    (model,) = settings.train_many(setting, [torch.arange(len(x))], [seed])

    def inner(m: Any, weights: Any, batch: Any) -> hk.losses.Loss:
        loss = hk.losses.cross_entropy(m(batch[0]), batch[1], weight=weights(batch[2]))
        return loss + hk.losses.l2(m, settings.DECAY)

    problem = hk.BilevelProblem(inner, lambda m, _, batch: hk.losses.cross_entropy(m(batch[0]), batch[1]))
    return (problem, model, hk.SampleWeights(len(x)), (x, y, torch.arange(len(x))), queries), setting.damping


def cosines(case: Case, seed: int, data: Path | None = None) -> Iterator[dict[str, Any]]:
    """What every δ and every rule gives, at each look and for each curvature."""
    for look, at, delta in points(case, seed, data):
        wanted = hk.pcg(500, delta, tolerance=1e-6).compute(*at)

        def near(method: hk.Implicit, at: At = at, wanted: Any = wanted) -> float:
            return cosine(method.compute(*at).grads, wanted.grads)

        known = Eigenvalues(at)
        for name, kind in KINDS.items():
            found = {f"{d:g}": near(solved(kind, d)) for d in GRID}
            for unit, value, shares in (("mean", known.mean, MEANS), ("largest", known.largest, LARGEST)):
                for share in shares:
                    found[f"{share:g} · {unit}"] = near(solved(kind, share * value))
                    if kind is KFAC:
                        found[f"{share:g} · {unit} of the layer"] = near(by_layer(share, unit == "largest"))
            trials = Trials(at, kind, GRID)
            taken = {
                "model, 1/τ": trials.model(delta),
                "model, mean": trials.model(known.mean),
                "residual, mean": trials.residual(known.mean),
                "one product, mean": trials.one_product(known.mean),
                "Levenberg–Marquardt": trials.levenberg(),
            }
            found |= {rule: found[f"{d:g}"] for rule, d in taken.items()}
            if kind is KFAC:
                found |= {"identity": near(hk.identity()), **{f"pcg({n})": near(hk.pcg(n, delta)) for n in (1, 3)}}
            yield {
                **{"problem": case.problem, "plain": case.plain, "seed": seed, "look": look, "curvature": name},
                **{"residual": wanted.stats["residual"], "mean": known.mean, "largest": known.largest},
                **{"cosines": found, "taken": taken},
            }


def by_mean(at: At, call: int) -> float:
    """A share of the mean eigenvalue."""
    return CHOSEN * Eigenvalues(at).mean


def by_model(at: At, call: int) -> float:
    """The δ with the lowest quadratic model, damped by the mean eigenvalue."""
    return Trials(at, KFAC, RUNS, call).model(Eigenvalues(at).mean)


def by_time(at: At, call: int) -> float:
    """The same, damped by 1/τ."""
    return Trials(at, KFAC, RUNS, call).model(DAMPING)


RUNS = (1e-1, 1e-2, 1e-3, 1e-4)
"""Fixed values with which λ is trained."""
RULES: dict[str, Callable[[At, int], float]] = {
    **{f"{d:g}": lambda at, call, d=d: d for d in RUNS},  # type: ignore[misc]
    f"{CHOSEN:g} · mean": by_mean,
    "model, mean": by_model,
    "model, 1/τ": by_time,
}
DROPPED = ("model, mean",)
"""Rules that were not tried further after ``DEVELOPMENT``: they cost more there and were not better."""


def rules_of(problem: str) -> list[str]:
    """Those with which λ is trained."""
    return [rule for rule in RULES if problem in DEVELOPMENT or rule not in DROPPED]


def trained(case: Case, rule: str, seed: int, rate: float, data: Path | None = None) -> Iterator[dict[str, Any]]:
    """J_out on held-out rows, and what the user wanted, after λ was trained with a rule."""
    method = Method(lambda _: Ruled(RULES[rule]), lambda _: hk.AID(Ruled(RULES[rule]), INNER))
    found = compare.run(task_of(case, seed, data), Piece(case.problem, rule, rate, seed), STEPS, method)
    kept = {name: found[name] for name in ("before", "held", "wanted")}
    yield {"problem": case.problem, "plain": case.plain, "seed": seed, "rule": rule, "rate": rate, **kept}


def missing(problems: Sequence[str], done: list[dict[str, Any]]) -> Iterator[Callable[[Path | None], Iterator[Any]]]:
    """What is not recorded yet."""
    best = Map(Lines(compare.RESULT).rows, list(PROBLEMS)).best
    known = {(row["problem"], row["plain"], row["seed"], row.get("rule")) for row in done}
    for problem in problems:
        last = cases(problem)[-1]
        rate = None if problem == MLP else best(problem, "KFAC")
        for seed in SEEDS:
            yield from (partial(cosines, x, seed) for x in cases(problem) if (*x, seed, None) not in known)
            for rule in rules_of(problem):
                if rate is not None and (*last, seed, rule) not in known:
                    yield partial(trained, last, rule, seed, rate)


def main(arguments: list[str] | None = None) -> None:
    """Measure what is not recorded yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the results; finished ones are not repeated")
    parser.add_argument("--data", type=Path, default=None, help="folder with digits.npz, where scikit-learn is missing")
    parser.add_argument("--problems", nargs="+", default=[*PROBLEMS, MLP], choices=[*PROBLEMS, MLP])
    options = parser.parse_args(arguments)
    lines = Lines(options.out)
    torch.set_num_threads(1)
    for job in missing(options.problems, list(lines.rows)):
        start = time.process_time()
        made = list(job(options.data))
        for row in made:
            lines.append({**records.rounded(row), "seconds": round(time.process_time() - start, 1)})
        print(made[0]["problem"], made[0]["seed"], made[0].get("rule", ""), flush=True)


if __name__ == "__main__":
    main()
