"""One run of ``clean``, stage by stage."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.cleaning import recorded
from hyperkron.cleaning.alternatives import DESCRIPTIONS, available, delivered, judged, targets_for
from hyperkron.cleaning.budget import steps_of, within
from hyperkron.cleaning.choice import Judged, Noise, choose, different, first_verdict, judge, noise_of, verdict
from hyperkron.cleaning.config import OURS, CleanConfig, Progress, SilentProgress
from hyperkron.cleaning.data import Labelled
from hyperkron.cleaning.folder import RunFolder
from hyperkron.cleaning.given import Given
from hyperkron.cleaning.method import Outcome, clean_labels
from hyperkron.cleaning.models import HASHED, EncoderUnavailable, TextEncoder, choose_encoder, load_encoder
from hyperkron.cleaning.prepare import Prepared, pick_device, prepare
from hyperkron.cleaning.progress import EmbeddingBar, stage_in_words
from hyperkron.cleaning.result import (
    SUSPECT_THRESHOLD,
    CleanResult,
    Learnt,
    about_run,
    history,
    per_class,
    scores_summary,
)
from hyperkron.cleaning.sources import model_name
from hyperkron.cleaning.stages import Stages
from hyperkron.cleaning.trainer import Dense, TrainingPlan, predict
from hyperkron.cleaning.work import Work, folds
from hyperkron.solution import HyperkronWarning
from hyperkron.training.locks import FolderLock
from hyperkron.training.signals import Interrupted, Signals

SECONDS_BETWEEN_RESULTS = 5.0
"""How often result.json is written while alternatives are compared."""


@dataclass
class CleaningRun:
    """One run: prepared inputs, the method, the alternatives, the choice, and what is written."""

    parts: list[Labelled]
    config: CleanConfig
    folder: RunFolder | None
    model: Callable[[], nn.Module] | None
    progress: Progress
    command: str | None
    given: Given
    encoder: str | None = None
    writes: bool = True
    on_result: Callable[[Path], None] | None = None
    messages: list[str] = field(default_factory=list, init=False)
    seconds: dict[str, float] = field(default_factory=dict, init=False)
    spent: dict[str, float] = field(default_factory=dict, init=False)  # on each candidate
    written: float = field(default=0.0, init=False)  # when result.json was
    noise: Noise | None = field(default=None, init=False)  # known once the views are
    stage: tuple[str, int] = field(default=("", 0), init=False)  # that is being computed, and its steps so far

    def __post_init__(self) -> None:
        self.device = pick_device(self.config.device)
        self.signals = Signals(active=self.folder is not None)

    def result(self) -> CleanResult:
        """Do everything that is not done yet; nobody else may write into the folder meanwhile."""
        with nullcontext() if self.folder is None else FolderLock(self.folder.path), self.signals:
            try:
                return self._run_stages()
            finally:
                self.progress.stop()

    def _run_stages(self) -> CleanResult:
        now = recorded.environment(self.device)
        self._record("environment", now, lambda began: self._say(recorded.environment_notes(began, now)))
        prepared = self._prepare()
        with _threads_for(prepared, self.device):
            return self._train(prepared)

    def _train(self, prepared: Prepared) -> CleanResult:
        work, names = self._work(prepared)
        total = steps_of(work, work.plan, names, prepared.test is not None)
        finished = [] if self.folder is None else self.folder.logged("stage")
        self.progress.start(max(1, total - sum(int(line["steps"]) for line in finished)))
        with self._timed("cleaning"):
            [outcome] = clean_labels([work])
        with self._timed("network"):
            networks = {OURS: delivered(OURS, work, outcome)}
        scores = self._scores(work, outcome)
        if self.folder is not None and self.writes:
            self.folder.write_rows(self.parts[0], scores, SUSPECT_THRESHOLD)
            self.folder.write_inputs(self._about_inputs(prepared), prepared.transform.tensors())
            self.folder.write_model(networks[OURS])
        with self._timed("comparison"):
            table: list[Judged] = []
            self._write_first(prepared, work, outcome, scores, table, networks, names)
            views, frequent = work.views(), outcome.final.posterior.mean(0)
            outcomes = clean_labels(views)
            doubts = [found.error_probability(work.given[work.noisy]).cpu() for found in outcomes]
            self.noise = noise_of(scores["error_probability"], doubts, SUSPECT_THRESHOLD)
            for name in (OURS, *names):
                with self._timed(name, "candidate"):
                    answers = judged(name, views, outcomes)[work.trusted]
                    table.append(judge(name, answers, work.given[work.trusted], frequent, len(views)))
                self._write_first(prepared, work, outcome, scores, table, networks, names)
            chosen = choose(table)
            wanted = names if prepared.test is not None else [name for name in names if name == chosen]
            for name in wanted:
                with self._timed(name, "candidate"):
                    networks[name] = delivered(name, work, outcome)
        summary = self._summary(prepared, work, outcome, scores, table, chosen, networks)
        learnt = partial(self._learnt, work, outcome, chosen)
        return self._finish(prepared, scores, summary, networks[chosen], learnt)

    def _prepare(self) -> Prepared:
        self.progress.message(f"{len(self.parts[0])} training rows, {len(self.parts[1])} trusted rows")
        self._say([message for part in self.parts for message in part.messages])
        cache = None if self.folder is None else self.folder.path / "embeddings"
        encoder = self._load_encoder() if self.parts[0].kind == "text" else None
        bar = EmbeddingBar(self.progress, self._check_signals)
        with self._timed("preparation"):
            found = prepare(
                self.parts, self.config, self.device, encoder=encoder, model=self.model, cache=cache, progress=bar
            )
        bar.stop()
        network = recorded.network_identity(found.build, self.device)
        self._record("network", network, lambda began: recorded.refuse_other_network(began, network))
        return found

    def _load_encoder(self) -> TextEncoder | None:
        """The encoder of the run, recorded before it is used; None for hashed n-grams."""
        encoder: TextEncoder | None
        notes: tuple[str, ...] = ()
        if (name := choose_encoder(self.encoder).name) != HASHED:
            self.progress.message(f"Loading the text encoder {name}")
        try:
            if self.config.layers:  # which cannot do without
                encoder = TextEncoder(self.encoder, device=self.device)
            else:
                encoder, notes = load_encoder(self.encoder, device=self.device)
        except EncoderUnavailable as error:
            began = None if self.folder is None else recorded.recorded_encoder(self.folder.read_config())
            if began is None:
                raise
            raise EncoderUnavailable(f"The run began with the encoder {began['name']!r}. {error}") from error
        identity = recorded.encoder_identity(encoder)
        self._record("encoder", identity, lambda began: recorded.refuse_other_encoder(began, identity))
        self._say(list(notes))
        for note in notes if isinstance(self.progress, SilentProgress) else ():
            warnings.warn_explicit(note, HyperkronWarning, "hyperkron", 1)  # who made it does not matter to a user
        count = sum(len(part) for part in self.parts)
        self.progress.message(f"Embedding {count} texts with {identity['name']}")
        return encoder

    def _record(self, name: str, found: Any, check: Callable[[Any], None]) -> None:
        """Put into config.json what the run works with; what is there already is checked."""
        if self.folder is None:
            return
        kept = self.folder.read_config()
        if name in kept:
            check(kept[name])
        else:
            self.folder.write_json("config.json", {**kept, name: found})

    def _work(self, prepared: Prepared) -> tuple[Work, list[str]]:
        labels = [torch.as_tensor(part.labels) for part in self.parts[:2]]
        given = torch.cat(labels).to(self.device)
        rows = torch.arange(len(given), device=self.device)
        noisy, trusted = rows[: len(labels[0])], rows[len(labels[0]) :]
        plan = TrainingPlan() if self.config.epochs is None else TrainingPlan(epochs=self.config.epochs)
        names, notes = available(self.config.compare)
        stages = Stages(None)
        if self.folder is not None:
            stages = Stages(self.folder.stages, recorded.digest(self.folder.read_config()), self.device)
        work = Work(
            prepared.inputs,
            given,
            noisy,
            trusted,
            len(self.parts[0].classes),
            folds(given, [noisy, trusted], 2, self.config.seed),
            prepared.build,
            plan,
            self.config,
            stages,
            self._tick,
        )
        if self.config.budget is not None:
            plan, names, more = self._budgeted(work, names, prepared.test is not None)
            work, notes = replace(work, plan=plan), notes + more
        self._say(notes)
        return work, names

    def _say(self, notes: list[str]) -> None:
        """To the user now, and in the result."""
        for note in notes:
            self.progress.message(note)
        self.messages += notes

    def _budgeted(self, work: Work, names: list[str], test: bool) -> tuple[TrainingPlan, list[str], list[str]]:
        """The plan that fits; decided once, so that a resumed run follows the same one."""
        kept = next(self.folder.logged("plan"), None) if self.folder is not None else None
        if kept is None:
            seconds = float(self.config.budget or 0)
            plan, names, notes = within(work, names, test, max(1.0, seconds - self.seconds.get("preparation", 0.0)))
            if self.folder is not None:
                self.folder.log("plan", epochs=plan.epochs, least=plan.least, compare=names, messages=notes)
            return plan, names, notes
        plan = replace(work.plan, epochs=kept["epochs"], least=kept["least"])
        return plan, kept["compare"], kept["messages"]

    def _tick(self, stage: str, steps: int) -> None:
        before, done = self.stage
        if self.folder is not None and before and stage != before:  # that one is finished and on the disk
            self.folder.log("stage", name=before, steps=done)
        self.stage = stage, steps + (done if stage == before else 0)
        self.progress.advance(steps, stage_in_words(stage))
        self._check_signals()

    def _check_signals(self) -> None:
        if self.signals.received is not None:
            raise Interrupted(self.signals.received)

    @contextmanager
    def _timed(self, name: str, event: str = "part") -> Iterator[None]:
        """Add to ``seconds`` of a part of the run, or to what was ``spent`` on a candidate; the log keeps it."""
        times = self.seconds if event == "part" else self.spent
        if name not in times:  # what an interrupted run had already spent
            before = [] if self.folder is None else self.folder.logged(event)
            times[name] = sum(float(line["seconds"]) for line in before if line["name"] == name)
        begin = time.perf_counter()
        try:
            yield
        finally:
            taken = time.perf_counter() - begin
            times[name] += taken
            if self.folder is not None and self.writes:
                self.folder.log(event, name=name, seconds=round(taken, 3))

    # --- what comes out

    def _learnt(self, work: Work, outcome: Outcome, chosen: str) -> Learnt:
        return Learnt(self.parts, work.inputs, targets_for(chosen, work, outcome))

    def _scores(self, work: Work, outcome: Outcome) -> dict[str, Tensor]:
        """What is known of every training row."""
        probability = outcome.error_probability(work.given[work.noisy]).cpu()
        return {
            "error_probability": probability,
            "weight": 1 - probability,
            "suggested": outcome.final.posterior.argmax(1).cpu(),
            "history": history(outcome, work).cpu(),
        }

    def _write_first(
        self,
        prepared: Prepared,
        work: Work,
        outcome: Outcome,
        scores: dict[str, Tensor],
        table: list[Judged],
        networks: dict[str, nn.Module],
        names: list[str],
    ) -> None:
        """result.json as far as it is known, before the alternatives and, now and then, between them."""
        now = time.monotonic()
        if self.folder is None or not self.writes or not names:
            return
        if table and now - self.written < SECONDS_BETWEEN_RESULTS:
            return
        summary = self._summary(prepared, work, outcome, scores, table, OURS, {OURS: networks[OURS]})
        done = [c.name for c in table]
        summary["unfinished"] = [name for name in names if name not in done]
        summary["verdict"] = first_verdict(summary["noise"]["rate"], summary["suspects"]["count"], len(names))
        self.folder.write_json("result.json", summary)
        if not table:
            self.progress.message(f"{summary['verdict']} The rows are in {self.folder.path / 'rows.csv'}.")
        if self.on_result is not None:
            self.on_result(self.folder.path)
        self.written = time.monotonic()

    def _summary(
        self,
        prepared: Prepared,
        work: Work,
        outcome: Outcome,
        scores: dict[str, Tensor],
        table: list[Judged],
        chosen: str,
        networks: dict[str, nn.Module],
    ) -> dict[str, Any]:
        """What result.json holds."""
        right = self._test_right(prepared, networks)
        won, mine = next((c for c in table if c.name == chosen), None), right.get(chosen)
        doubt, more = scores["error_probability"], dict[str, Any]()
        if won is not None:
            assert self.noise is not None
            test = None if mine is None else (int(mine.sum()), len(mine))
            more["verdict"] = verdict(chosen, table, self.noise, classes=work.classes, test=test)
            more["per_class"] = per_class(self.parts, doubt > SUSPECT_THRESHOLD, won.right, mine)
        return {
            **about_run(self.parts, self.config, work.plan, self.device, self.command, self.messages),
            "seconds": self._seconds(work),
            "chosen": chosen,
            **more,
            "candidates": self._candidates(table, chosen, right),
            **scores_summary(outcome, scores, self.noise),
        }

    def _finish(
        self,
        prepared: Prepared,
        scores: dict[str, Tensor],
        summary: dict[str, Any],
        network: nn.Module,
        learnt: Callable[[], Learnt],
    ) -> CleanResult:
        doubt = scores["error_probability"]
        order = doubt.argsort(descending=True)
        if self.folder is not None and self.writes:
            self.folder.write_model(network)
            self.folder.write_json("result.json", summary)
        spread = self.given.spread
        return CleanResult(
            spread(scores["weight"], float("nan"), "weight"),
            spread(doubt, float("nan"), "error_probability"),
            self.given.rows[order[doubt[order] > SUSPECT_THRESHOLD]],
            spread(scores["suggested"], -1, "suggested"),
            self.given.status(),
            network,
            summary["candidates"],
            summary["chosen"],
            summary["verdict"],
            self.parts[0].classes,
            summary,
            None if self.folder is None else self.folder.path,
            prepared.transform,
            learnt,
        )

    def _about_inputs(self, prepared: Prepared) -> dict[str, Any]:
        """What a later reader needs, beside tensors, to make inputs of new rows and to build the network."""
        vectors = prepared.transform.vectors
        return {
            **prepared.transform.form.to_json(),
            "classes": list(self.parts[0].classes),
            "input_shape": list(prepared.shape),
            "layers": self.config.layers,
            "encoder": recorded.encoder_identity(vectors) if isinstance(vectors, TextEncoder) else None,
            "model": None if self.model is None else model_name(self.model),
        }

    def _test_right(self, prepared: Prepared, networks: dict[str, nn.Module]) -> dict[str, Tensor]:
        """Which test rows each network answers rightly; empty without test rows."""
        if prepared.test is None:
            return {}
        rows, labels = torch.arange(len(prepared.test), device=self.device), torch.as_tensor(self.parts[2].labels)
        answers = {name: predict(network, prepared.test, rows).argmax(1).cpu() for name, network in networks.items()}
        return {name: answer == labels for name, answer in answers.items()}

    def _candidates(self, table: list[Judged], chosen: str, right: dict[str, Tensor]) -> list[dict[str, Any]]:
        won, found = next((c for c in table if c.name == chosen), None), []
        for c in table:
            found.append(
                {
                    "name": c.name,
                    "description": DESCRIPTIONS[c.name],
                    **{name: getattr(c, name) for name in ("accuracy", "low", "high", "rows")},
                    "seconds": self._spent_on(c.name),
                    "chosen": c.name == chosen,
                    "different": None if won is None or c is won else different(won, c, len(table) - 1),
                    "test_accuracy": float(right[c.name].float().mean()) if c.name in right else None,
                }
            )
        return found

    def _spent_on(self, name: str) -> float:
        """Seconds of training and judging a candidate."""
        ours = self.seconds["cleaning"] + self.seconds["network"] if name == OURS else 0.0
        return round(ours + self.spent[name], 2)

    def _seconds(self, work: Work) -> dict[str, float]:
        """Of the whole, of the method, and of one plain training, scaled from the network's by their steps."""
        rows = len(work.given)
        spent = {"total": sum(self.seconds.values()), **self.seconds}
        spent["cleaning"] = self.seconds["cleaning"] + self.seconds["network"]
        spent["plain"] = self.seconds["network"] * work.plan.steps(rows) / work.last.steps(rows)
        return {name: round(value, 2) for name, value in spent.items()}


@contextmanager
def _threads_for(prepared: Prepared, device: torch.device) -> Iterator[None]:
    """One thread for vectors, whose matrices are too small to share; images and encoders keep what there is."""
    before = torch.get_num_threads()
    small = device.type == "cpu" and isinstance(prepared.inputs, Dense) and prepared.inputs.values.dim() == 2
    torch.set_num_threads(1 if small else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
