"""One run of ``clean``, stage by stage."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.cleaning import recorded
from hyperkron.cleaning.alternatives import TREES, available, delivered, judged, targets_for
from hyperkron.cleaning.arguments import model_name
from hyperkron.cleaning.budget import ONE_PROCESS, steps_of, tree_fits, within
from hyperkron.cleaning.choice import Judged, Noise, choose, different, first_verdict, judge, noise_of, verdict
from hyperkron.cleaning.config import DESCRIPTIONS, OURS, CleanConfig
from hyperkron.cleaning.data import Labelled
from hyperkron.cleaning.folder import RunFolder
from hyperkron.cleaning.given import Given
from hyperkron.cleaning.learners import name_of
from hyperkron.cleaning.method import clean_labels, error_probability
from hyperkron.cleaning.models import HASHED, EncoderUnavailable, TextEncoder, choose_encoder, load_encoder, trees
from hyperkron.cleaning.own import EstimatorModel, Own
from hyperkron.cleaning.prepare import Prepared, prepare
from hyperkron.cleaning.progress import EmbeddingBar, Progress, SilentProgress
from hyperkron.cleaning.result import (
    SUSPECT_THRESHOLD,
    CleanResult,
    about_run,
    candidate_seconds,
    history,
    per_class,
    run_seconds,
    scores_summary,
)
from hyperkron.cleaning.stages import in_turn
from hyperkron.cleaning.trainer import Dense, TrainingPlan, TrainingTargets, predict
from hyperkron.cleaning.work import Work, fit_steps, folds
from hyperkron.solution import HyperkronWarning
from hyperkron.training.signals import Interrupted, Signals
from hyperkron.validation import check_device

KEPT_MODEL = (
    "Your estimator is in result.model; it is not written to the run folder, which would need pickle. "
    "model.safetensors holds the cleaned model."
)
SECONDS_BETWEEN_RESULTS = 5.0
"""How often result.json is written while alternatives are compared."""


@dataclass(frozen=True)
class Sharing:
    """Other processes that compute stages of a run.

    Attributes:
        count: how many processes there are, with the one that writes the run.
        announce: called with the run folder once they can begin; None in these processes themselves.
    """

    count: int
    announce: Callable[[Path], None] | None = None


ALONE = Sharing(1)
"""No other processes."""


@dataclass
class CleaningRun:
    """One run: prepared inputs, the method, the alternatives, the choice, and what is written."""

    parts: list[Labelled]
    own: Own
    config: CleanConfig
    folder: RunFolder
    model: Callable[[], nn.Module] | None
    progress: Progress
    command: str | None
    given: Given
    encoder: str | None = None
    on_result: Callable[[Path], None] | None = None
    sharing: Sharing = ALONE
    messages: list[str] = field(default_factory=list, init=False)
    seconds: dict[str, float] = field(default_factory=dict, init=False)  # of each part of the run
    networks: dict[str, nn.Module] = field(default_factory=dict, init=False)
    table: list[Judged] = field(default_factory=list, init=False)  # the candidates judged so far
    written: float = field(default=0.0, init=False)  # when result.json was
    noise: Noise | None = field(default=None, init=False)  # known once the views are
    stage: tuple[str, int] = field(default=("", 0), init=False)  # that is being computed, and its steps so far
    owed: int = field(default=0, init=False)  # steps that the trees which are being fitted count for

    def __post_init__(self) -> None:
        self.device = check_device("device", self.config.device)
        self.signals = Signals(active=self.folder.kept)

    def result(self) -> CleanResult:
        """Do everything that is not done yet."""
        with self.folder.lock(), self.signals:
            try:
                now = recorded.environment(self.device)
                self.folder.record("environment", now, lambda began: self._say(recorded.environment_notes(began, now)))
                with self.working() as work:
                    return self._train(work)
            finally:
                self.progress.stop()

    def help(self) -> None:
        """Compute stages of a run that another process writes: the comparison first, which needs little of it."""
        with self.signals, self.working() as work:
            views = work.views()
            outcomes = clean_labels(views)
            for name in in_turn(work.stages, [*reversed(self.names), OURS], "judged-"):
                judged(name, views, outcomes)
            if self.prepared.test is not None:
                [outcome] = clean_labels([work])
                for name in in_turn(work.stages, self.names[::-1], "network-"):
                    delivered(name, work, outcome)

    @contextmanager
    def working(self) -> Iterator[Work]:
        """Prepare the inputs, and give what every stage needs."""
        self.prepared = self._prepare()
        with self.prepared.threads(self.device):
            yield self._make_work()

    def _train(self, work: Work) -> CleanResult:
        test = self.prepared.test is not None
        total = steps_of(work, work.plan, self.names, test)
        total += sum(fit_steps(*fit, work.classes) for fit in tree_fits(work, self.names, test))
        finished = sum(int(line["steps"]) for line in self.folder.logged("stage"))
        self.progress.start(max(1, (total - finished) // self.sharing.count))
        if self.sharing.announce is not None:
            self.sharing.announce(self.folder.path)
        with self._timed("cleaning"):
            [outcome] = clean_labels([work])
            self.outcome, self.posterior = outcome, outcome.final.posterior
        self._score_rows(write=not self.folder.finished)
        with self._timed("network"):
            self.networks[OURS] = delivered(OURS, work, outcome)
        self.folder.write_inputs(self._about_inputs(), self.prepared.transform.tensors())
        if not self.folder.finished:
            self.folder.write_model(self.networks[OURS])
        with self._timed("comparison"):
            self._write_first()
            views = work.views()
            outcomes = clean_labels(views)
            self.posterior = torch.stack([found.final.posterior for found in (outcome, *outcomes)]).mean(0)
            self._score_rows()
            doubts = [error_probability(found.final.posterior, work.given[work.noisy]).cpu() for found in outcomes]
            self.noise = noise_of(self.scores["error_probability"], doubts, SUSPECT_THRESHOLD)
            frequent = self.posterior.mean(0)
            order = [OURS, *self.names]
            for name in in_turn(work.stages, order, "judged-"):
                answers = judged(name, views, outcomes)[work.trusted]
                self.table.append(judge(name, answers, work.given[work.trusted], frequent, len(views)))
                self._write_first()
            self.table.sort(key=lambda c: order.index(c.name))
            chosen = choose(self.table)
            wanted = [name for name in self.names if self.prepared.test is not None or name == chosen]
            for name in in_turn(work.stages, wanted, "network-"):
                self.networks[name] = delivered(name, work, outcome)
        if self.folder.kept and isinstance(self.networks[chosen], EstimatorModel):
            self._say([KEPT_MODEL])
        return self._finish(chosen)

    def _prepare(self) -> Prepared:
        self.progress.message(f"{len(self.parts[0])} training rows, {len(self.parts[1])} trusted rows")
        self._say([message for part in self.parts for message in part.messages])
        cache = self.folder.path / "embeddings" if self.folder.kept else None
        encoder = self._load_encoder() if self.own.parts[0].kind == "text" else None
        bar = EmbeddingBar(self.progress, self._check_signals)
        with self._timed("preparation"):
            found = prepare(
                self.own.parts, self.config, self.device, encoder=encoder, model=self.model, cache=cache, progress=bar
            )
        bar.stop()
        network = recorded.network_identity(found.build, self.device)
        self.folder.record("network", network, lambda began: recorded.refuse_other_network(began, network))
        return found

    def _load_encoder(self) -> TextEncoder | None:
        """The encoder of the run, recorded before it is used; None for hashed n-grams."""
        if (name := choose_encoder(self.encoder).name) != HASHED:
            self.progress.message(f"Loading the text encoder {name}")
        try:
            encoder, notes = load_encoder(self.encoder, device=self.device, required=self.config.layers > 0)
        except EncoderUnavailable as error:
            began = self.folder.read_config().child("encoder").text("name") if self.folder.kept else ""
            if not began:
                raise
            raise EncoderUnavailable(f"The run began with the encoder {began!r}. {error}") from error
        identity = recorded.encoder_identity(encoder)
        self.folder.record("encoder", identity, lambda began: recorded.refuse_other_encoder(began, identity))
        self._say(list(notes))
        for note in notes if isinstance(self.progress, SilentProgress) else ():
            warnings.warn_explicit(note, HyperkronWarning, "hyperkron", 1)  # who made it does not matter to a user
        self.progress.message(f"Embedding {sum(map(len, self.parts))} texts with {identity['name']}")
        return encoder

    def _make_work(self) -> Work:
        """What every stage needs; ``names`` are the alternatives."""
        labels = [torch.as_tensor(part.labels) for part in self.parts[:2]]
        given = torch.cat(labels).to(self.device)
        noisy, trusted = torch.arange(len(given), device=self.device).split([len(part) for part in labels])
        plan = TrainingPlan() if self.config.epochs is None else TrainingPlan(epochs=self.config.epochs)
        table, dense = self.own.parts[0].kind == "table", isinstance(self.prepared.inputs, Dense)
        own = self.own.estimator is not None
        self.names, notes = available(self.config.compare, table=table, vectors=dense, estimator=own)
        self.work = Work(
            self.prepared.inputs,
            given,
            noisy,
            trusted,
            len(self.parts[0].classes),
            folds(given, [noisy, trusted], 2, self.config.seed),
            self.prepared.build,
            plan,
            self.config,
            self.folder.stages(self.device, self._check_signals if self.sharing.count > 1 else None),
            self._tick,
            table and trees.installed(),
            self.model is None,
            None if self.own.probabilities is None else self.own.probabilities.to(self.device),
            self.own.estimator,
            votes=None if self.parts[0].votes is None else torch.as_tensor(self.parts[0].votes).to(self.device),
        )
        if self.config.budget is not None:
            notes = notes + self._fit_budget(self.config.budget)
        self._say(notes)
        return self.work

    def _say(self, notes: list[str]) -> None:
        """To the user now, and in the result."""
        for note in notes:
            self.progress.message(note)
        self.messages += notes

    def _fit_budget(self, budget: float) -> list[str]:
        """Change plan and alternatives to fit; decided once, so that a resumed run follows the same plan."""
        kept = next(self.folder.logged("plan"), None)
        if kept is None:
            left = max(1.0, budget - self.seconds.get("preparation", 0.0))
            self.progress.message("Measuring how long trainings and trees take, to plan for the budget")
            kept = within(self.work, self.names, self.prepared.test is not None, left)
            self.folder.log("plan", **kept)
        plan = replace(self.work.plan, epochs=kept["epochs"], least=kept["least"])
        self.work = replace(self.work, plan=plan, trees=self.work.trees and kept.get("trees", True))
        self.names = kept["compare"]
        return [*kept["messages"], *([ONE_PROCESS] if self.sharing.count > 1 else [])]

    def _tick(self, stage: str, steps: int, owed: int = 0) -> None:
        """These steps are done; ``owed`` are those that trees which are fitted now count for, once they are there."""
        (before, done), owed, self.owed = self.stage, self.owed, owed
        if owed:  # the trees are there
            self.progress.advance(owed, before)
            done += owed
        if before and stage != before:  # that one is finished and on the disk
            self.folder.log("stage", name=before, steps=done)
        self.stage = stage, steps + (done if stage == before else 0)
        self.progress.advance(steps, stage)
        self._check_signals()

    def _check_signals(self) -> None:
        if self.signals.received is not None:
            raise Interrupted(self.signals.received)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add to ``seconds`` of a part of the run; the log keeps it."""
        if name not in self.seconds:  # what an interrupted run had already spent
            spent = [float(line["seconds"]) for line in self.folder.logged("part") if line["name"] == name]
            self.seconds[name] = sum(spent)
        begin = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - begin
            self.seconds[name] += taken
            self.folder.log("part", name=name, seconds=round(taken, 3))

    def _score_rows(self, write: bool = True) -> None:
        """Write what is known of every training row: by the method on the whole, later by its mean with the views."""
        probability = error_probability(self.posterior, self.work.given[self.work.noisy]).cpu()
        self.scores = {
            "error_probability": probability,
            "weight": 1 - probability,
            "suspect": probability > SUSPECT_THRESHOLD,
            "suggested": self.posterior.argmax(1).cpu(),
            "history": torch.cat([history(self.outcome, self.work).cpu(), 1 - probability[:, None]], 1),
        }
        if write:
            self.folder.write_rows(self.parts[0], self.scores)

    def _write_first(self) -> None:
        """result.json as far as it is known, before the alternatives and, now and then, between them."""
        done = [c.name for c in self.table]
        left = [name for name in self.names if name not in done]
        due = not done or time.monotonic() - self.written >= SECONDS_BETWEEN_RESULTS
        if not self.folder.writes or not due or not left or self.folder.finished:
            return
        summary = self._summary(OURS) | {"unfinished": left}
        summary["verdict"] = first_verdict(summary["noise"]["rate"], summary["suspects"]["count"], len(self.names))
        self.folder.write_json("result.json", summary)
        if not self.table:
            self.progress.message(f"{summary['verdict']} The rows are in {self.folder.path / 'rows.csv'}.")
        if self.on_result is not None:
            self.on_result(self.folder.path)
        self.written = time.monotonic()

    def _summary(self, chosen: str) -> dict[str, Any]:
        """What result.json holds."""
        right, learner = self._test_right(), name_of(self.networks[chosen])
        won, mine = next((c for c in self.table if c.name == chosen), None), right.get(chosen)
        suspect, more = self.scores["suspect"], dict[str, Any]()
        if won is not None:
            assert self.noise is not None
            test = None if mine is None else (int(mine.sum()), len(mine))
            unseen = [self.parts[0].classes[k] for k in self.work.unseen]
            more["verdict"] = verdict(
                chosen, self.table, self.noise, classes=self.work.classes, test=test, learner=learner, unseen=unseen
            )
            more["per_class"] = per_class(self.parts, suspect, won.right, mine)
        return {
            **about_run(self.parts, self.config, self.work.plan, self.device, self.command, self.messages),
            "seconds": run_seconds(self.seconds, self.work),
            "chosen": chosen,
            "learner": learner,
            **more,
            "candidates": [self._candidate(c, won, right) for c in self.table],
            **scores_summary(self.outcome.scale, self.posterior, self.scores, self.noise, self.work, self.parts[0]),
        }

    def _finish(self, chosen: str) -> CleanResult:
        summary, network = self._summary(chosen), self.networks[chosen]
        if not isinstance(network, EstimatorModel):
            self.folder.write_model(network)
        self.folder.write_json("result.json", summary)
        return CleanResult.of(
            self.given,
            self.scores,
            summary,
            network,
            folder=self.folder.path if self.folder.kept else None,
            transform=self.prepared.transform,
        )

    def learnt(self, chosen: str) -> TrainingTargets:
        """What the winner learnt from; trees, which select rows of their own, count as ours."""
        return targets_for(OURS if chosen in TREES else chosen, self.work, self.outcome)

    def _about_inputs(self) -> dict[str, Any]:
        """What a later reader needs, beside tensors, to make inputs of new rows and to build the network."""
        vectors = self.prepared.transform.vectors
        return {
            **self.prepared.transform.form.to_json(),
            "classes": list(self.parts[0].classes),
            "input_shape": list(self.prepared.shape),
            "layers": self.config.layers,
            "encoder": recorded.encoder_identity(vectors) if isinstance(vectors, TextEncoder) else None,
            "model": None if self.model is None else model_name(self.model),
        }

    def _test_right(self) -> dict[str, Tensor]:
        """Which test rows each network answers rightly; empty without test rows."""
        test = self.prepared.test
        if test is None:
            return {}
        rows, labels = torch.arange(len(test), device=self.device), torch.as_tensor(self.parts[2].labels)
        return {name: predict(x, test, rows).argmax(1).cpu() == labels for name, x in self.networks.items()}

    def _candidate(self, c: Judged, won: Judged | None, right: dict[str, Tensor]) -> dict[str, Any]:
        return {
            "name": c.name,
            "description": DESCRIPTIONS[c.name],
            **{name: getattr(c, name) for name in ("accuracy", "low", "high", "rows")},
            "seconds": candidate_seconds(c.name, self.seconds, self.work),
            "chosen": c is won,
            "different": None if won is None or c is won else different(won, c, len(self.table) - 1),
            "test_accuracy": float(right[c.name].float().mean()) if c.name in right else None,
            "learner": name_of(self.networks[c.name]) if c.name in self.networks else None,
        }
