"""`hyperkron clean` against what its user could have done instead: one table, the same defaults everywhere.

    python -m experiments.cleaning.compare                      # everything that the data at hand allows; resumable
    python -m experiments.cleaning.compare --only digits,trec --seeds 1
    python -m experiments.cleaning.compare --times              # only what the method takes; its figures come first
    python -m experiments.cleaning.compare --report             # only print the table of what was measured

Data: `digits` comes with scikit-learn; MNIST, Fashion-MNIST (idx files), CIFAR-10 (sheets) and WRENCH in the folder
`data` (or $HYPERKRON_DATA); texts are embedded once by `--prepare`. Test labels are used for the last figure only.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments import records
from experiments.cleaning.datasets import DATA, TEXTS, Problem, Setting, load, prepare, settings
from experiments.pieces import Lines
from experiments.workers import share
from hyperkron.cleaning import ALTERNATIVES, OURS, CleanConfig
from hyperkron.cleaning.alternatives import available, delivered, judged
from hyperkron.cleaning.choice import choose, judge
from hyperkron.cleaning.method import Outcome, clean_labels
from hyperkron.cleaning.models import default_model
from hyperkron.cleaning.stages import Stages
from hyperkron.cleaning.trainer import Dense, TrainingPlan, TrainingTargets, predict, train
from hyperkron.cleaning.work import Work, folds

RESULTS = records.RESULTS / "cleaning" / "runs.jsonl"
TIMES = RESULTS.with_name("times.jsonl")
WARM_UP = 20
"""Steps before anything is timed, so that libraries are loaded and algorithms chosen."""


def average_precision(wrong: torch.Tensor, score: torch.Tensor) -> float:
    """Of the ranking by ``score``, highest first."""
    hit = wrong[score.argsort(descending=True, stable=True)].double()
    return float((hit.cumsum(0) / torch.arange(1, len(hit) + 1) * hit).sum() / hit.sum())


def auroc(wrong: torch.Tensor, score: torch.Tensor) -> float:
    """The share of (wrong, right) pairs in the right order; ties count half."""
    values, rank = score.double().unique(return_inverse=True)
    count = torch.bincount(rank, minlength=len(values)).double()
    middle = (count.cumsum(0) - (count - 1) / 2)[rank]
    bad, good = int(wrong.sum()), int((~wrong).sum())
    return float((middle[wrong].sum() - bad * (bad + 1) / 2) / (bad * good))


def f1(wrong: torch.Tensor, flagged: torch.Tensor) -> float:
    """Of the flagged rows."""
    return float(2 * (wrong & flagged).sum() / (wrong.sum() + flagged.sum()).clamp(min=1))


def work_for(problem: Problem, seed: int, device: torch.device, config: CleanConfig) -> Work:
    """The problem as ``clean`` sees it."""
    given = torch.cat([problem.given, problem.trusted_y]).to(device)
    rows = torch.arange(len(given), device=device)
    noisy, trusted = rows[: len(problem.given)], rows[len(problem.given) :]
    hidden = 128 if problem.kind == "text" else None
    return Work(
        inputs=Dense(torch.cat([problem.x, problem.trusted_x]).to(device)),
        given=given,
        noisy=noisy,
        trusted=trusted,
        classes=problem.classes,
        fold=folds(given, [noisy, trusted], 2, seed),
        build=default_model(problem.kind, problem.x.shape[1:], problem.classes, hidden=hidden),  # type: ignore[arg-type]
        plan=TrainingPlan(),
        config=config,
        stages=Stages(None),
        tick=lambda stage, steps: None,
    )


def clock(device: torch.device) -> float:
    """Seconds, with the device idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass
class Cleaned:
    """A problem that was cleaned, the network that came out, a plain one, and how long both took."""

    problem: Problem
    work: Work
    outcome: Outcome
    ours: torch.nn.Module
    pooled: torch.nn.Module
    seconds: dict[str, float]


def cleaned(setting: Setting, seed: int, device: torch.device) -> Cleaned:
    """One setting under one seed, timed."""
    problem = load(setting, seed)
    work = work_for(problem, seed, device, CleanConfig(seed=1000 * seed))
    rows = torch.cat([work.noisy, work.trusted])
    train(work.build, work.inputs, TrainingTargets(rows, work.known(rows)), work.plan, seed=0, steps=WARM_UP)
    begin = clock(device)
    [outcome] = clean_labels([work])
    ours = delivered(OURS, work, outcome)
    middle = clock(device)
    pooled = delivered("pooled", work, outcome)
    seconds = {"cleaning": middle - begin, "plain": clock(device) - middle}
    return Cleaned(problem, work, outcome, ours, pooled, seconds)


def circumstances(setting: Setting, seed: int, device: torch.device) -> dict[str, Any]:
    """What was measured, and where."""
    return {
        "setting": str(setting),
        "dataset": setting.dataset,
        "noise": setting.noise,
        "per_class": setting.per_class,
        "seed": seed,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "command": records.command(),
        "hardware": records.hardware(device),
        "torch": torch.__version__,
    }


def timed(setting: Setting, seed: int, device_name: str) -> dict[str, Any]:
    """Times alone."""
    device = torch.device(device_name)
    return {**circumstances(setting, seed, device), "seconds": cleaned(setting, seed, device).seconds}


def measure(setting: Setting, seed: int, device_name: str, known: dict[str, float] | None = None) -> dict[str, Any]:
    """One setting under one seed; ``known`` test accuracies of alternatives are taken over, not measured again."""
    device = torch.device(device_name)
    found = cleaned(setting, seed, device)
    problem, work, outcome, ours, pooled = found.problem, found.work, found.outcome, found.ours, found.pooled
    test = Dense(problem.test_x.to(device))
    answers = torch.arange(len(test), device=device)

    def accuracy(network: torch.nn.Module) -> float:
        return float((predict(network, test, answers).argmax(1).cpu() == problem.test_y).float().mean())

    names, _ = available(ALTERNATIVES)
    scores = {OURS: accuracy(ours), "pooled": accuracy(pooled), **{n: v for n, v in (known or {}).items() if n != OURS}}
    for name in names:
        if name not in scores:
            scores[name] = accuracy(delivered(name, work, outcome))
    right = problem.given == problem.gold
    if "correct rows" not in scores:
        rows = torch.cat([work.noisy[right.to(device)], work.trusted])
        ideal = TrainingTargets(rows, work.known(rows))
        scores["correct rows"] = accuracy(train(work.build, work.inputs, ideal, work.last, seed=seed))
    views, frequent = work.views(), outcome.final.posterior.mean(0)
    outcomes, labels = clean_labels(views), work.given[work.trusted]
    answers_of = {name: judged(name, views, outcomes)[work.trusted] for name in (OURS, *names)}
    table = [judge(name, answer, labels, frequent) for name, answer in answers_of.items()]
    chosen = choose(table)
    return {
        **circumstances(setting, seed, device),
        "rows": len(problem.given),
        "trusted": len(problem.trusted_y),
        "test_rows": len(problem.test_y),
        "wrong": float((~right).float().mean()),
        "test": scores,
        "held_out": {c.name: c.accuracy for c in table},
        "chosen": chosen,
        **_detection(work, outcome, problem),
        "scale": outcome.scale,
        "seconds": found.seconds,
    }


def _detection(work: Work, outcome: Outcome, problem: Problem) -> dict[str, Any]:
    """How well wrong labels are found: ours and the two rivals, from the same networks."""
    given = work.given[work.noisy]
    wrong = problem.given != problem.gold

    def doubt(p: torch.Tensor) -> torch.Tensor:
        return (1 - p[work.noisy].gather(1, given[:, None])[:, 0]).cpu()

    found = {
        OURS: outcome.error_probability(given).cpu(),
        "cleanlab": doubt(outcome.noisy_expert),
        "trusted": doubt(outcome.trusted_expert),
    }
    flags = {name: score > 0.5 for name, score in found.items()}
    if "cleanlab" in available(ALTERNATIVES)[0]:
        from cleanlab.filter import find_label_issues
        from cleanlab.rank import get_label_quality_scores

        expert = outcome.noisy_expert[work.noisy].double().cpu()
        p = (expert / expert.sum(1, keepdim=True)).numpy()
        labels = given.cpu().numpy()
        found["cleanlab"] = torch.tensor(1 - get_label_quality_scores(labels, p))
        if len(set(labels.tolist())) == problem.classes:
            flags["cleanlab"] = torch.tensor(find_label_issues(labels, p, n_jobs=1))
    return {
        "average_precision": {name: average_precision(wrong, score) for name, score in found.items()},
        "auroc": {name: auroc(wrong, score) for name, score in found.items()},
        "f1": {name: f1(wrong, flags[name]) for name in found},
    }


Job = tuple[Setting, int, str, dict[str, float] | None]


def _worker(times: bool) -> Callable[[Job], dict[str, Any]]:
    return lambda job: timed(*job[:3]) if times else measure(*job)


def main() -> None:
    """Measure what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated beginnings of settings, in order: digits,trec")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no new setting begins")
    parser.add_argument("--times", action="store_true", help="measure times alone")
    parser.add_argument("--out", type=Path, help="default: the file of the repository")
    parser.add_argument("--alternatives-from", type=Path, help="results whose alternatives' test accuracies still hold")
    parser.add_argument("--prepare", action="store_true", help="embed the texts of data/wrench and stop")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    if options.prepare:
        prepare()
        return
    options.out = options.out or (TIMES if options.times else RESULTS)
    lines = Lines(options.out)
    done = {(r["setting"], r["seed"]) for r in lines.rows if not r.get("earlier")}
    before = Lines(options.alternatives_from).rows if options.alternatives_from else []
    taken = {(r["setting"], r["seed"]): r["test"] for r in before}
    only = [o for o in options.only.split(",") if o]
    jobs = [
        (s, seed, options.device, taken.get((str(s), seed)))
        for seed in range(options.seeds)
        for s in settings()
        if (not only or any(str(s).startswith(o) for o in only)) and (str(s), seed) not in done and _present(s)
    ]
    first = {word: place for place, word in enumerate(only)}
    jobs.sort(key=lambda job: next((at for word, at in first.items() if str(job[0]).startswith(word)), 0))
    if not options.report:
        _run(jobs, lines, options)
    if not options.times:
        from experiments.cleaning.tables import table

        print(table(lines.rows, Lines(TIMES).rows))


def _present(setting: Setting) -> bool:
    place = DATA / "embeddings" / f"{setting.dataset}.npz" if setting.dataset in TEXTS else DATA / setting.dataset
    return setting.dataset == "digits" or place.exists()


def _run(jobs: list[Job], lines: Lines, options: argparse.Namespace) -> None:
    begin = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def missing() -> list[tuple[list[Any], Job]]:
        done = {(r["setting"], r["seed"]) for r in lines.rows if not r.get("earlier")}
        return [([str(job[0]), job[1]], job) for job in jobs if (str(job[0]), job[1]) not in done]

    def keep(key: list[Any], record: dict[str, Any], seconds: float, busy: float) -> None:
        lines.append(record)
        shown = record["seconds"] if options.times else record["test"]
        scores = {name: round(value if options.times else 100 * value, 1) for name, value in shown.items()}
        print(f"{time.monotonic() - begin:6.0f} s", *key, scores, flush=True)

    def late() -> bool:
        return time.monotonic() - begin > options.limit

    share(options.workers, partial(_worker, options.times), missing, keep, late=late)


if __name__ == "__main__":
    main()
