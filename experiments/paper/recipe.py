"""An experiment of the paper as a typed recipe: what it runs, what it found, and whether that agrees with the paper."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from experiments import records
from experiments.paper.visits import Visits, refusal
from experiments.pieces import Cells, OutOfTime
from hyperkron.solution import HyperkronError
from hyperkron.validation import check_whole

Scale = Literal["smoke", "small", "paper"]
"""``smoke``: seconds on a CPU, made-up data; ``small``: real data, minutes; ``paper``: the size that was printed."""

SCALES: tuple[Scale, ...] = get_args(Scale)


class Verdict(Enum):
    """Whether a result agrees with the paper; the value is what a person reads."""

    REPRODUCED = "reproduced"
    TREND = "reproduced in trend"
    FAILED = "not reproduced"
    REFUSED = "no verdict"
    UNJUDGED = "not judged at this scale"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Judgement:
    """A verdict and the figures it rests on, in a sentence."""

    verdict: Verdict
    because: str


def by_cases(holds: Sequence[bool | None], because: str, *, first: bool = True, also: bool = True) -> Judgement:
    """The rule of every comparison in several cases. Reproduced: the claim clearly holds in all of them, and ``also``
    what else it says. In trend: it clearly holds in more than half of them. Not reproduced: otherwise, or where
    ``first``, without which it means nothing, does not hold. No verdict: where cases that cannot tell (``None``) would
    decide between these.

    Example:
        >>> by_cases([True, True, False], "").verdict.value, by_cases([True, False], "").verdict.value
        ('reproduced in trend', 'not reproduced')
        >>> by_cases([True, False, None], "").verdict.value, by_cases([False, False, None], "").verdict.value
        ('no verdict', 'not reproduced')
    """

    def verdict(guess: bool) -> Verdict:
        known = [guess if x is None else x for x in holds]
        if first and all(known) and also:
            return Verdict.REPRODUCED
        return Verdict.TREND if first and sum(known) > len(known) / 2 else Verdict.FAILED

    if verdict(True) is verdict(False):
        return Judgement(verdict(True), because)
    vague = sum(x is None for x in holds)
    return Judgement(Verdict.REFUSED, f"Too few seeds to tell in {vague} of {len(holds)} cases. {because}")


@dataclass(frozen=True)
class Table:
    """A table of the page: text cells under headings."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


LISTED = {"listed": True}
"""For a field of settings that lists what is run, so that a change leaves the finished cells valid: the key of a cell
must then name all that the cell depends on in that field.
"""


@dataclass(frozen=True)
class Result:
    """What a recipe found, with everything needed to make it again.

    Attributes:
        name, scale, seeds: of the run; ``seeds`` are those that were completed.
        figures: the recipe's own numbers, by name.
        settings: the recipe's settings at this scale.
        seconds: spent in all cells, also those of earlier, interrupted runs.
        busy: the processor time of that; with one thread, what ``seconds`` would be on a machine that nobody else uses.
            ``None`` where it was not recorded.
        complete: false where a time limit ended the run before all seeds were done.
    """

    name: str
    scale: Scale
    seeds: tuple[int, ...]
    figures: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    seconds: float = 0.0
    busy: float | None = None
    complete: bool = True
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def write(self, folder: str | Path) -> Path:
        """Write ``folder/NAME-SCALE.json`` and return its path."""
        path = Path(folder) / f"{self.name}-{self.scale}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = records.rounded(records.plain(asdict(self)))
        path.write_text(records.dumps(content) + "\n", "utf-8")
        return path

    @staticmethod
    def read(path: str | Path) -> Result:
        """The result in a file that :meth:`write` has made."""
        try:
            content = json.loads(Path(path).read_text("utf-8"))
            return Result(**{**content, "seeds": tuple(content["seeds"])})
        except (ValueError, TypeError, KeyError) as error:
            raise HyperkronError(f"{str(path)!r} is no result of a recipe ({error}); run the recipe again.") from error


@dataclass
class Job:
    """One run of a recipe, as its ``work`` function sees it.

    Attributes:
        scale, settings, seeds, device: what to run, and on what.
        data: the folder with real data, or ``None`` to look in the usual places.
    """

    scale: Scale
    settings: Any
    seeds: tuple[int, ...]
    device: torch.device
    cells: Cells
    data: Path | None = None
    deadline: float = float("inf")
    say: Callable[[str], None] = lambda message: None

    def cell(self, key: Sequence[Any], function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The value of one piece of work: from the cache, or by calling ``function`` and writing it down.

        The key names all that the piece depends on besides the settings: method, setting, seed, …
        """
        done = self.cells.get(key)
        if done is not None:
            return done
        self.check_time()
        begin, busy = time.monotonic(), time.process_time()
        value = function()
        spent, busy = time.monotonic() - begin, time.process_time() - busy
        self.say(f"{' '.join(str(x) for x in key)}: {spent:.1f} s")
        return self.cells.put(key, value, spent, busy)

    @property
    def place(self) -> tuple[Scale, int, torch.device, Path, Path | None]:
        """What :meth:`Recipe.job` needs to make this job again in another process."""
        return self.scale, len(self.seeds), self.device, self.cells.path.parent, self.data

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def check_time(self) -> None:
        """:class:`OutOfTime` where the deadline has passed."""
        if self.late:
            raise OutOfTime("the time limit was reached; run the same command again to continue.")


def _none_learned(result: Result) -> Sequence[Visits]:
    return ()


@dataclass(frozen=True)
class Recipe:
    """One experiment of the paper.

    Attributes:
        name: how the command line calls it.
        title: what a reader reads.
        place: where it stands in the paper, such as ``Table 1``.
        experiment: its number in the list of experiments.
        settings: a frozen dataclass of settings for each scale; a scale that is absent cannot be run. Cells of other
            settings are not used; a field with ``metadata=LISTED`` is no part of that.
        work: does the work cell by cell and returns the figures; it must depend on nothing but the job. It is called
            with the first seed, then with the first two, and so on, so that a run cut short has whole seeds.
        verdict: judges a result; the rule is in its docstring.
        tables: the printed numbers beside ours; with ``None`` the printed ones alone.
        plot: draws the figures of a result into a folder and returns their paths.
        note: how ours differs from the paper, for the page.
        answer: what a reader who must decide is told first, in plain words and with the result's numbers.
        judged: scales whose results say something about the paper's claim.
        weights: how often the weights of every run were updated, where weights are learned; a result whose runs are
            shorter than the paper's, or in which too many weights never were, gets no verdict.
        gpu: scales that need a GPU.
        seeds: how many by default at each scale.
        partial: ``work`` copes with the time limit itself: it is called once with all seeds, keeps its own order and
            returns what there was time for, with ``cut_short`` among the figures true where something is missing.
        stages: for a recipe whose times are measured beforehand: the stages that its ``work`` lets compete, and the
            number of trials, so that several processes can share the work; and
        fill: shares that among processes (:func:`experiments.paper.side_by_side.fill`).
    """

    name: str
    title: str
    place: str
    experiment: int
    settings: Mapping[Scale, Any]
    work: Callable[[Job], dict[str, Any]]
    verdict: Callable[[Result], Judgement]
    tables: Callable[[Result | None], list[Table]]
    plot: Callable[[Result, Path], list[Path]] | None = None
    note: str = ""
    answer: Callable[[Result], Sequence[str]] | None = None
    judged: tuple[Scale, ...] = ("small", "paper")
    weights: Callable[[Result], Sequence[Visits]] = _none_learned
    gpu: tuple[Scale, ...] = ()
    seeds: Mapping[Scale, int] = field(default_factory=lambda: {"smoke": 1, "small": 3, "paper": 5})
    partial: bool = False
    stages: Callable[[Job], tuple[Sequence[Any], int]] | None = None
    fill: Callable[[Job, Recipe, int], None] | None = None

    @property
    def scales(self) -> tuple[Scale, ...]:
        """The scales it can be run at."""
        return tuple(scale for scale in SCALES if scale in self.settings)

    def judge(self, result: Result | None) -> Judgement:
        """The verdict on a result; none at a scale that is not judged, “in trend” at most where it was cut short."""
        if result is None:
            return Judgement(Verdict.NOT_RUN, "There is no result.")
        if result.scale not in self.judged:
            text = f"Everything ran; results at {result.scale} scale, on made-up data, say nothing about the paper."
            return Judgement(Verdict.UNJUDGED, text)
        if refused := refusal(self.weights(result)):
            return Judgement(Verdict.REFUSED, f"{refused} What was measured: {self.verdict(result).because}")
        found = self.verdict(result)
        if result.complete or found.verdict is not Verdict.REPRODUCED:
            return found
        return Judgement(Verdict.TREND, f"{found.because} The run was cut short, so this counts as trend at most.")

    def run(
        self,
        scale: Scale,
        seeds: int | None = None,
        device: str | torch.device = "cpu",
        folder: str | Path = "runs/paper",
        *,
        data: str | Path | None = None,
        limit_minutes: float | None = None,
        workers: int = 1,
        command: str = "",
        say: Callable[[str], None] = lambda message: None,
    ) -> Result:
        """Run it, or continue an interrupted run, and write ``folder/NAME-SCALE.json``.

        Args:
            scale: one of :attr:`scales`.
            seeds: how many; they are 1, 2, …, tuning has seed 0. ``None`` for the recipe's own number.
            device: such as ``cuda``.
            folder: of results and of the cell cache beside them.
            data: folder with real data; see :mod:`experiments.paper.datasets`.
            limit_minutes: stop before the first cell that would begin after so long. Seeds that are complete by then
                are summarised in a result marked incomplete; where none is, :class:`OutOfTime` is raised.
            workers: processes that share the device, for recipes with :attr:`stages`.
            command: recorded in the result.
            say: called with a line after every cell.
        """
        self._check_workers(workers)
        job = self.job(scale, seeds, torch.device(device), Path(folder), None if data is None else Path(data))
        job.say = say
        if limit_minutes is not None:
            job.deadline = time.monotonic() + 60 * limit_minutes
        if workers > 1 and self.fill is not None:
            self.fill(job, self, workers)
        seeds_done, figures = self._work(job)
        result = Result(
            self.name,
            scale,
            seeds_done,
            figures,
            settings=records.plain(_as_dict(job.settings)),
            command=command,
            seconds=job.cells.seconds(),
            busy=job.cells.busy(),
            complete=seeds_done == job.seeds and not figures.get("cut_short", False),
            hardware=records.hardware(job.device),
            versions=records.versions(),
        )
        result.write(folder)
        return result

    def _check_workers(self, workers: int) -> None:
        check_whole("workers", workers, remedy="it is the number of processes that share the work")
        if workers > 1 and self.fill is None:
            raise HyperkronError(
                f"workers={workers}: {self.name} measures times while it runs, so its runs must have the device to "
                "themselves; use workers=1."
            )

    def job(self, scale: Scale, seeds: int | None, device: torch.device, folder: Path, data: Path | None = None) -> Job:
        """A run of it, with the cells of earlier ones."""
        if scale not in self.settings:
            raise HyperkronError(f"scale={scale!r} is not among {', '.join(self.scales)}, the scales of {self.name}.")
        if scale in self.gpu and device.type == "cpu":
            raise HyperkronError(f"device='cpu' is too slow for {self.name} at {scale} scale; use device='cuda'.")
        count = self.seeds.get(scale, 1) if seeds is None else seeds
        check_whole("seeds", count, remedy="it is the number of seeds to run")
        settings = self.settings[scale]
        kind = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
        cells = Cells(folder / f"{self.name}-{scale}.cells.jsonl", {"device": kind, "settings": _marking(settings)})
        return Job(scale, settings, tuple(range(1, count + 1)), device, cells, data)

    def _work(self, job: Job) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The seeds that are complete and their figures: all, or as many as there was time for.

        The first seed is worked out, then the first two (of which the first comes from the cache), and so on.
        """
        if self.partial:
            return job.seeds, dict(records.plain(self.work(job)))
        done: tuple[tuple[int, ...], dict[str, Any]] | None = None
        for count in range(1, len(job.seeds) + 1):
            part = replace(job, seeds=job.seeds[:count])
            try:
                done = part.seeds, dict(records.plain(self.work(part)))
            except OutOfTime:
                if done is None:
                    raise
                break
        assert done is not None
        return done


def _marking(settings: Any) -> Any:
    """The settings that cells depend on."""
    found = _as_dict(settings)
    listed = [x.name for x in fields(settings) if x.metadata.get("listed")] if isinstance(found, dict) else []
    return {name: value for name, value in found.items() if name not in listed} if listed else found


def _as_dict(settings: Any) -> Any:
    return asdict(settings) if is_dataclass(settings) and not isinstance(settings, type) else settings
