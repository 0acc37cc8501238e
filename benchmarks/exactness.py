"""How near the hypergradient of a language model under bfloat16 comes to that in float32, and what is lost where.

    python benchmarks/exactness.py --device cuda --out exactness_h200.jsonl       # a minute
    python benchmarks/exactness.py --small                                        # a toy, in seconds

The cosine of hypergradients of four domain weights varies from batch to batch, so each line has its median, minimum and
all values over several inner batches. A drawn label may change with the rounding of logits, so there is also a row with
the labels that were drawn in float32; and rows with one part of the hypergradient in the other precision.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from bfloat16 import cosine
from common import freed, hardware, line_writer, versions
from torch import Tensor
from workloads import LANGUAGE, Workload, inner, outer

import hyperkron as hk
from hyperkron.curvature.kfac import kfac, kronecker
from hyperkron.losses import classification

Found = tuple[dict[str, Tensor], dict[str, Tensor]]
"""The hypergradient, and v."""


class Labels:
    """The labels that one run has drawn, for others to take them instead of their own."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []
        self.changed = 0.0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, labels are drawn and kept."""
        real = classification.drawn_classes
        self.drawn = []

        def draw(*given: Any) -> Tensor:
            self.drawn.append(real(*given))
            return self.drawn[-1]

        with patch.object(classification, "drawn_classes", draw):
            yield

    @contextmanager
    def given(self) -> Iterator[None]:
        """Inside, labels are those that were kept; the share of those that would have been others is counted."""
        real, left, other = classification.drawn_classes, list(self.drawn), list[float]()

        def draw(*given: Any) -> Tensor:
            mine = left.pop(0)
            other.append(float((real(*given) != mine).float().mean()))
            return mine

        with patch.object(classification, "drawn_classes", draw):
            yield
        self.changed = statistics.mean(other) if other else 0.0


@contextmanager
def factors_by(problem: hk.BilevelProblem) -> Iterator[None]:
    """Inside, KFAC's factors are measured on this problem, whatever else is."""
    real = kronecker.measure

    def measured(point: Any, *args: Any, **options: Any) -> Any:
        with patch.object(point, "problem", problem):
            return real(point, *args, **options)

    with patch.object(kronecker, "measure", measured):
        yield


class Comparison:
    """Hypergradients of one workload by row; a row's method decides about its cross term on the first batch only."""

    def __init__(self, work: Workload, device: str) -> None:
        self.work, self.device = work, device
        self.half, self.full = work.problem, hk.BilevelProblem(inner, outer)
        self.methods: dict[tuple[str, bool], hk.Implicit] = {}

    def found(self, row: str, problem: hk.BilevelProblem, batch: Any, *inside: Any, **options: Any) -> Found:
        """The hypergradient of a row on a batch, ``inside`` of these contexts."""
        make = hk.identity if row == "identity" else partial(hk.kfac, keep_previous=False)
        method = self.methods.setdefault((row, problem is self.full), make(**options))
        torch.set_float32_matmul_precision("highest" if problem is self.full else "high")
        with ExitStack() as stack:
            for context in inside:
                stack.enter_context(context)
            result = method.compute(problem, self.work.model, self.work.hyper, batch, self.work.outer_batch)
        assert result.solution is not None
        freed(self.device)
        return dict(result.grads), result.solution.value

    def compared(self, batch: Any, thorough: bool) -> dict[str, Any]:
        """Cosines of the hypergradients on one batch, and of their v, to those in float32, by row."""
        half, full, labels = self.half, self.full, Labels()
        exact = self.found("KFAC", full, batch, labels.kept())
        lines = {"KFAC": _cosines(self.found("KFAC", half, batch), exact)}

        def same_labels(what: str, problem: hk.BilevelProblem, *inside: Any) -> None:
            row = f"KFAC, same labels{what}"
            lines[row] = _cosines(self.found(row, problem, batch, labels.given(), *inside), exact)

        same_labels("", half)
        if thorough:
            same_labels(", solves in float32", half, patch.object(kfac, "tf32_products", lambda device: False))
            same_labels(", factors in float32", half, factors_by(full))
            same_labels(", only factors in bfloat16", full, factors_by(half))
            lines["KFAC in float32, other draws"] = _cosines(self.found("other draws", full, batch, seed=1), exact)
            for row, options in {"identity": {}, "KFAC, empirical": {"fisher": "empirical"}}.items():
                pair = [self.found(row, problem, batch, **options) for problem in (half, full)]
                lines[row] = _cosines(*pair)
        return {"rows": lines, "changed": labels.changed, "exact": [float(f"{x:.4g}") for x in _numbers(exact)]}


def _cosines(found: Found, exact: Found) -> list[float]:
    return [round(cosine(x, y), 5) for x, y in zip(found, exact, strict=True)]


def _numbers(found: Found) -> list[float]:
    return [x for g in found[0].values() for x in g.flatten().tolist()[:4]]


def main() -> None:
    """Train, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="a toy of the same structure")
    parser.add_argument("--workload", default="llama07", choices=list(LANGUAGE))
    parser.add_argument("--rounds", nargs="+", type=int, default=[10], help="of ten training steps, before comparing")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--thorough", type=int, default=2, help="batches that get all rows")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no other batch is begun after these")
    parser.add_argument("--out", help="file of JSON lines, which are appended")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    keep, done, begun = line_writer(args.out), 0, time.monotonic()
    keep({"hardware": hardware(), "versions": versions(), "seed": 0})
    work = LANGUAGE[args.workload](args.device, args.small)
    for rounds in args.rounds:
        while done < rounds:
            work.inner_steps()
            done += 1
        work.optimizer.zero_grad(set_to_none=True)
        lines, comparison = list[dict[str, Any]](), Comparison(work, args.device)
        for i, batch in enumerate(work.batches[: args.batches]):
            if i and time.monotonic() - begun > args.seconds:
                break
            lines.append(comparison.compared(batch, i < args.thorough))
            keep(
                {
                    "workload": work.name,
                    "steps": 10 * done,
                    "batch": i,
                    "seconds": time.monotonic() - begun,
                    **lines[-1],
                }
            )
        torch.set_float32_matmul_precision("high")
        for name in lines[0]["rows"]:
            values: list[list[float]] = [line["rows"][name] for line in lines if name in line["rows"]]
            cosines = sorted(round(x, 4) for x, _ in values)
            row = {"workload": work.name, "steps": 10 * done, "row": name, "median": statistics.median(cosines)}
            keep(
                {**row, "minimum": cosines[0], "cosines": cosines, "median_v": statistics.median(x for _, x in values)}
            )
        changed = statistics.mean(line["changed"] for line in lines)
        keep(
            {"workload": work.name, "steps": 10 * done, "labels_changed": changed, "exact": [x["exact"] for x in lines]}
        )


if __name__ == "__main__":
    main()
