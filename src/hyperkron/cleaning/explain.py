"""``explain``: which training rows speak for, and which against, what the network of a finished run predicts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron import losses
from hyperkron.attribution import Attribution, attribute
from hyperkron.cleaning.api import reopened
from hyperkron.cleaning.data import InputForm, Labelled, NewRows, ReadOptions, read
from hyperkron.cleaning.data.arrow import PREFIX
from hyperkron.cleaning.data.files import existing, listing
from hyperkron.cleaning.data.sources import split_source
from hyperkron.cleaning.fields import read_result, resume_command
from hyperkron.cleaning.folder import shown
from hyperkron.cleaning.progress import Progress
from hyperkron.cleaning.trainer import Inputs, TrainingTargets, predict, train
from hyperkron.hypergradient import Implicit
from hyperkron.losses import Loss
from hyperkron.solution import HyperkronError
from hyperkron.validation import check_whole

MAX_QUERIES = 200
"""Queries that are explained at once; of more, the first."""


@dataclass(frozen=True)
class Witness:
    """A training row that speaks for or against a prediction.

    Attributes:
        row: its place in the source of the training rows, or of the trusted ones.
        label: as it was given.
        learnt: what the network learnt the row as: the class with the most evidence.
        trusted: whether it is a trusted row.
        score: by how much the loss of the prediction would rise if the row were left out.
        shown: its text, picture or features.
    """

    row: int
    label: str
    learnt: str
    trusted: bool
    score: float
    shown: dict[str, Any]


@dataclass(frozen=True)
class Explained:
    """A query, what the network predicts for it, and the training rows behind that, the strongest first.

    ``label`` is None where the queries have none.
    """

    row: int
    label: str | None
    prediction: str
    probability: float
    shown: dict[str, Any]
    helpful: list[Witness]
    harmful: list[Witness]


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found: the queries, how the scores were computed, and what a person should know."""

    name: str
    kind: str
    queries: list[Explained]
    messages: list[str]
    attribution: Attribution


def explain(
    out: str | Path,
    queries: Any,
    *,
    count: int = 5,
    method: Implicit | None = None,
    model: Callable[[], nn.Module] | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Explain the predictions of a finished run by its training rows.

    Where trees have won, a network is trained on the cleaned labels and explained in their place.

    The loss of query q is −log f(prediction). Its hypergradient in the weight of a training row is what the row did for
    the prediction (:func:`hyperkron.attribute`). Nothing in the folder is changed.

    Args:
        out: the folder of a finished run that was made from files.
        queries: rows with the columns of the training rows; a label is shown beside the prediction, but not needed.
        count: rows for and rows against each prediction. Default: 5.
        method: how A⁻¹ is applied; the default is that of ``attribute``.
        model: the same function as for ``clean``, if the run used one.
        progress: object that shows progress; None shows a bar on a terminal and in a notebook.
    """
    check_whole("count", count)
    out = Path(out)
    if read_result(out).items("unfinished"):
        raise HyperkronError(f"the run in {str(out)!r} has not finished; continue it with {resume_command(out)}.")
    if isinstance(queries, (str, os.PathLike)) and not os.fspath(queries).startswith(PREFIX):
        existing(split_source(os.fspath(queries))[0], "queries")  # told before the run is read again
    run = reopened(out, model, progress, writes=False)
    result = run.result()
    learnt, work, transform = run.learnt(result.chosen), run.work, run.prepared.transform
    network, reading = result.model, run.folder.read_config().child("source").child("reading").raw
    rows, labels, messages = _read(queries, run.parts[0], transform.form, reading)
    if not any(True for _ in network.parameters()):
        network = train(work.build, work.inputs, learnt, work.plan, seed=work.config.seed)
        messages.append(
            "The model of this run is a tree ensemble, which has no gradients: a network was trained on the cleaned "
            "labels and is explained in its place. Its predictions may differ from those of the trees."
        )
    if len(rows.rows) > MAX_QUERIES:
        messages.append(f"The first {MAX_QUERIES} of {len(rows.rows)} queries are explained.")
    device = next(network.parameters()).device
    asked = transform(rows.inputs[:MAX_QUERIES], device)
    found, predicted = _scores(network, work.inputs, learnt, asked, method)
    explained = []
    for q, (probability, best) in enumerate(zip(*predicted.max(1), strict=True)):
        sides = [_witnesses(side(q, count), run.parts, learnt) for side in (found.helpful, found.harmful)]
        said, content = result.classes[int(best)], shown(run.parts[0], rows, q)
        explained.append(Explained(int(rows.rows[q]), labels[q], said, float(probability), content, *sides))
    return Explanation(out.resolve().name, run.parts[0].kind, explained, messages, found)


def _read(
    queries: Any, train: Labelled, form: InputForm, reading: Mapping[str, Any]
) -> tuple[NewRows, list[str | None], list[str]]:
    """Queries, their labels (None where they have none that a training row has), and messages."""
    named: dict[str, Any] = {name: reading.get(name) for name in ("text", "image", "features", "charset")}
    rows = form.read(queries, options=ReadOptions(charset=named["charset"] or ReadOptions.charset))
    messages, known = [*rows.messages], dict[int, str]()
    try:
        found = read(queries, like=train, label=reading.get("label") or train.roles.label, **named)
        known = {row: found.classes[k] for row, k in zip(found.rows.tolist(), found.labels.tolist(), strict=True)}
    except HyperkronError as problem:
        messages.append(f"The queries are explained without their labels, which could not be read: {problem}")
    asked = rows.rows.tolist()
    if known and (without := [row for row in asked if row not in known]):
        messages.append(
            "Queries shown without a label (none is given, training lacks it, or the row has no text or feature): "
            f"rows {listing(without)}."
        )
    return rows, [known.get(row) for row in asked], messages


def _scores(
    network: nn.Module, inputs: Inputs, learnt: TrainingTargets, asked: Inputs, method: Implicit | None
) -> tuple[Attribution, Tensor]:
    """The scores of the rows that the network learnt from, and the probabilities it gives to queries."""
    predicted = predict(network, asked, torch.arange(len(asked), device=learnt.rows.device))
    answers = predicted.argmax(1)

    def query_loss(model: nn.Module, part: Tensor) -> Loss:
        return losses.cross_entropy(model(*asked.batch(part)), answers[part])

    def training_loss(model: nn.Module, part: Tensor) -> Loss:
        return learnt.objective(model(*inputs.batch(learnt.rows[part])), part)

    positions, queries = torch.arange(len(learnt.rows)), torch.arange(len(asked))
    found = attribute(training_loss, network, positions, queries, query_loss=query_loss, method=method)
    return found, predicted.cpu()


def _witnesses(pairs: list[tuple[int, float]], parts: Sequence[Labelled], learnt: TrainingTargets) -> list[Witness]:
    """Positions in what the network learnt from, as rows of the sources."""
    (noisy, trusted), found = parts[:2], list[Witness]()
    for position, score in pairs:
        i = int(learnt.rows[position])
        part, i = (noisy, i) if i < len(noisy) else (trusted, i - len(noisy))
        label, learnt_as = int(part.labels[i]), int(learnt.evidence[position].argmax())
        names = part.classes[label], part.classes[learnt_as]
        found.append(Witness(int(part.rows[i]), *names, part is trusted, score, shown(part, part, i)))
    return found
