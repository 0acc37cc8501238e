"""What comes out of ``clean``: the result in Python, and the summary that result.json holds."""

from __future__ import annotations

import datetime
import html
import platform
import resource
import sys
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.cleaning.annotators import label_matrix, reliability
from hyperkron.cleaning.choice import Noise
from hyperkron.cleaning.config import OURS, CleanConfig
from hyperkron.cleaning.data import Labelled, NewRows
from hyperkron.cleaning.evidence import of_label
from hyperkron.cleaning.fields import FORMAT
from hyperkron.cleaning.given import USED, Given
from hyperkron.cleaning.method import Outcome
from hyperkron.cleaning.prepare import InputTransform
from hyperkron.cleaning.recorded import installed_version
from hyperkron.cleaning.trainer import TrainingPlan, device_of, predict
from hyperkron.cleaning.work import Work
from hyperkron.solution import HyperkronError, HyperkronWarning

SUSPECT_THRESHOLD = 0.5
"""A row whose label is more likely wrong than right is a suspect."""
SHOWN_SUSPECTS = 5
"""Suspects that a notebook shows."""


@dataclass(repr=False)
class CleanResult:
    """What ``clean`` found.

    N is the number of training rows as they were given, and positions are those of the given rows, also where some
    rows were left out (no label, no input, also in the trusted set, flagged as trusted). Arrays of N numbers are
    tensors, or pandas Series with the index of the rows where these came with one.

    Attributes:
        weights: how far each given label is believed, 1 − error_probability; for a weighted training of your own (N,).
            NaN for rows left out and without a label.
        error_probability: of each training label (N,); NaN for rows left out and without a label.
        suspects: positions of the rows whose label is more likely wrong than right, most suspicious first.
        suggested: the most likely class of each training row (N,), a position in ``classes``; −1 for rows left out.
        status: ``"used"``, ``"unlabelled"`` (no annotator voted on the row; it has a suggestion), or why a row was left
            out (N,).
        model: the network that won, in evaluation mode.
        candidates: every candidate on trusted rows it had not seen.
        chosen: the name of the winner.
        verdict: a sentence or two for a person.
        classes: names of the classes.
        summary: what result.json holds.
        folder: where the run lies, or None.
    """

    weights: Any
    error_probability: Any
    suspects: Tensor
    suggested: Any
    status: Any
    model: nn.Module
    candidates: list[dict[str, Any]]
    chosen: str
    verdict: str
    classes: tuple[str, ...]
    summary: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    transform: InputTransform | None = None

    @classmethod
    def of(
        cls,
        given: Given,
        scores: dict[str, Tensor],
        summary: dict[str, Any],
        model: nn.Module,
        **more: Any,
    ) -> CleanResult:
        """Of error_probability, suggested and suspect (a mask) of the rows that were used."""
        probability, spread = scores["error_probability"], given.spread
        order = probability.argsort(descending=True, stable=True)
        return cls(
            spread(1 - probability, float("nan"), "weight"),
            spread(probability, float("nan"), "error_probability"),
            given.rows[order[scores["suspect"][order]]],
            spread(scores["suggested"], -1, "suggested"),
            given.status(),
            model,
            summary["candidates"],
            summary["chosen"],
            summary["verdict"],
            tuple(summary["data"]["classes"]),
            summary,
            **more,
        )

    def __repr__(self) -> str:
        where = "" if self.folder is None else f", folder={str(self.folder)!r}"
        about = f"rows={len(self.weights)}, suspects={len(self.suspects)}, chosen={self.chosen!r}{where}"
        return f"CleanResult({about})\n{self.verdict}"

    def _repr_html_(self) -> str:
        """The verdict, the candidates and the first suspects, for a notebook."""
        lines = [
            [c["name"], f"{c['low']:.1%} to {c['high']:.1%}", "" if (t := c["test_accuracy"]) is None else f"{t:.1%}"]
            for c in sorted(self.candidates, key=lambda c: -c["accuracy"])
        ]
        positions = self.suspects[:SHOWN_SUSPECTS]
        probability, suggested = (torch.as_tensor(list(x)) for x in (self.error_probability, self.suggested))
        rows = [[int(i), self.classes[int(suggested[i])], _sure(float(probability[i]))] for i in positions]
        return (
            f"<p><b>{html.escape(self.verdict)}</b></p>"
            + _html_table(["candidate", "held-out accuracy", "test accuracy"], lines)
            + _html_table(["suspect (position)", "suggested", "error probability"], rows)
        )

    @property
    def used(self) -> Any:
        """Which of the given rows were used and have a label: a mask (N,)."""
        mask = self.status == USED
        return mask if hasattr(mask, "iloc") else torch.from_numpy(mask)

    @property
    def sources(self) -> list[dict[str, Any]]:
        """How far each annotator or labelling function can be relied on; empty where every row has a single label.

        Each has ``name``, ``votes``, ``right`` (the share of its votes that are right) with the interval ``low`` to
        ``high``, and its most frequent mistake: it ``said`` one class and ``meant`` another, ``mistakes`` times.
        """
        return list(self.summary.get("sources", []))

    @property
    def suspect_labels(self) -> Any:
        """The labels of the suspects in the pandas index of the given rows; None where these have none."""
        index = getattr(self.weights, "index", None)
        return None if isinstance(self.weights, Tensor) or index is None else index[self.suspects.numpy()]

    def predict(self, rows: Any) -> Any:
        """Class probabilities (n, C) of new rows: a tensor, or a DataFrame with the index of the rows.

        Rows that cannot be read, such as a damaged picture, have NaN. What is unusual about the rows is a warning.

        Args:
            rows: a DataFrame or a dictionary of columns, named as in training (further columns are ignored); a matrix
                of features; a list of texts; pictures (n, C, H, W) of 0 to 255; or a path.

        Example:
            >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
            >>> from hyperkron.cleaning import clean
            >>> config = CleanConfig(epochs=1, compare=())
            >>> result = clean((x[:40], x[:40, 0] > 0), (x[40:], x[40:, 0] > 0), config=config)
            >>> probabilities = result.predict(x[:3])
            >>> [result.classes[k] for k in probabilities.argmax(1)] == [str(bool(v > 0)).lower() for v in x[:3, 0]]
            True
        """
        found, probabilities = self.predicted(rows)
        for message in found.messages:
            warnings.warn(message, HyperkronWarning, stacklevel=2)
        index = getattr(rows, "index", None)
        if not hasattr(rows, "iloc") or index is None:
            return probabilities
        import pandas

        return pandas.DataFrame(probabilities.numpy(), index=index, columns=list(self.classes))

    def predicted(self, rows: Any, **reading: Any) -> tuple[NewRows, Tensor]:
        """New rows as they were read, and the class probabilities (n, C) of all of them, as by :meth:`predict`.

        ``reading`` is ``id=`` and ``options=`` for :meth:`hyperkron.cleaning.data.InputForm.read`.
        """
        if self.transform is None:
            raise HyperkronError("this result has no model to predict with.")
        found = self.transform.form.read(rows, **reading)
        probabilities = torch.full((found.count, len(self.classes)), torch.nan)
        device = device_of(self.model)
        if len(found.rows):
            inputs = self.transform(found.inputs, device)
            answers = predict(self.model, inputs, torch.arange(len(inputs), device=device)).cpu()
            probabilities[torch.as_tensor(found.rows)] = answers
        return found, probabilities


def _sure(probability: float) -> str:
    """A percentage that never claims to be certain."""
    return "over 99%" if probability >= 0.995 else f"{probability:.1%}"


def _html_table(header: list[str], lines: list[list[Any]]) -> str:
    def line(tag: str, cells: list[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line('th', header)}{''.join(line('td', cells) for cells in lines)}</table>"


def about_run(
    parts: list[Labelled],
    config: CleanConfig,
    plan: TrainingPlan,
    device: torch.device,
    command: str | None,
    messages: list[str],
) -> dict[str, Any]:
    """What was run, on what, with what."""
    train, trusted = parts[:2]
    return {
        "format": FORMAT,
        "hyperkron": installed_version("hyperkron"),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "versions": {name: installed_version(name) for name in ("torch", "numpy", "transformers", "cleanlab")},
        "hardware": _hardware(device),
        "peak_memory_mb": round(_peak_memory(), 1),
        "data": {
            "kind": train.kind,
            "train_rows": len(train),
            "left_out": {why: len(rows) for why, rows in train.left_out.items()},
            "trusted_rows": len(trusted),
            "classes": list(train.classes),
            "trusted_per_class": trusted.counts(),
            "train_per_class": train.counts(),
            "messages": messages,
        },
        "config": asdict(config) | {"epochs_used": plan.epochs},
    }


def scores_summary(
    scale: tuple[float, float, float],
    posterior: Tensor,
    scores: dict[str, Tensor],
    noise: Noise | None,
    work: Work,
    train: Labelled,
) -> dict[str, Any]:
    """The noise, the suspects, the sources of the labels, the weights and (κ, β, γ)."""
    probability, weight = (scores[name] for name in ("error_probability", "weight"))
    matrix = label_matrix(posterior, work.given[work.noisy])
    return {
        "noise": {
            "rate": float(probability.nanmean()),
            **({} if noise is None else {"low": noise.low, "high": noise.high}),
            "matrix": [[round(v, 6) for v in line] for line in matrix.cpu().tolist()],
        },
        "suspects": {
            "cut": SUSPECT_THRESHOLD,
            "count": int((probability > SUSPECT_THRESHOLD).sum()),
            **({} if noise is None else {"stable": noise.stable}),
        },
        "sources": [] if work.votes is None else reliability(posterior, work.votes, train.annotators, train.classes),
        "unlabelled": int(probability.isnan().sum()),
        "weights": {
            "edges": [round(i / 20, 2) for i in range(21)],
            "counts": torch.histc(weight[~weight.isnan()].float(), bins=20, min=0, max=1).long().tolist(),
        },
        "evidence": dict(zip(("experts", "label", "belief"), scale, strict=True)),
    }


def per_class(parts: list[Labelled], suspect: Tensor, right: Tensor, test_right: Tensor | None) -> list[dict[str, Any]]:
    """For every class its suspects, and how many held-out trusted rows and test rows the chosen model got right."""
    counted = [(parts[0], suspect, "suspects"), (parts[1], right, "right")]
    if test_right is not None:
        counted += [(parts[2], torch.ones_like(test_right), "test_rows"), (parts[2], test_right, "test_right")]
    found: list[dict[str, Any]] = [{"name": name} for name in parts[0].classes]
    for part, mask, key in counted:
        count = torch.bincount(torch.as_tensor(part.labels)[mask.cpu()], minlength=len(found)).tolist()
        for line, value in zip(found, count, strict=True):
            line[key] = value
    return found


def candidate_seconds(name: str, seconds: dict[str, float], work: Work) -> float:
    """Seconds of training and judging a candidate, in a run whose parts took ``seconds``."""
    ours = seconds["cleaning"] + seconds["network"] if name == OURS else 0.0
    stages = [f"judged-{name}", *([] if name == OURS else [f"network-{name}"])]
    return round(ours + sum(work.stages.seconds.get(stage, 0.0) for stage in stages), 2)


def run_seconds(seconds: dict[str, float], work: Work) -> dict[str, float]:
    """Of the whole, of the method, and of one plain training if known, scaled by steps from that of a network."""
    spent = {"total": sum(seconds.values()), **seconds}
    spent["cleaning"] = seconds["cleaning"] + seconds["network"]
    each = seconds["network"] / work.last.steps(len(work.given))
    if work.trees and work.tree_model:  # then trees were tried in that time; the noisy expert is two networks
        half = -(-len(work.noisy) // 2)
        each = work.stages.seconds.get("noisy-expert", 0.0) / 2 / work.quick(half).steps(half)
    spent |= {"plain": each * work.plan.steps(len(work.given))} if each else {}
    return {name: round(value, 2) for name, value in spent.items()}


def history(outcome: Outcome, work: Work) -> Tensor:
    """How much each row was believed along the way: 1 at first, then by each expert, then after the first pooling."""
    given = work.given[work.noisy]
    believed = [of_label(outcome.experts[name][work.noisy], given) for name in ("trusted", "noisy", "matrix")]
    pooled = of_label(outcome.first.posterior, given)
    return torch.stack([torch.ones_like(believed[0]), *believed, pooled], dim=1)


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'' if threads == 1 else 's'}"


def _peak_memory() -> float:
    """Of this process so far, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
