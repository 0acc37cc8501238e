"""Figure 3 with ResNet-18: KFAC and CG by size of batches, from runs of the paper's length."""

from __future__ import annotations

from collections.abc import Mapping

from experiments import records
from experiments.paper.image_contest import OWN, Contest, plan_of, result_of
from experiments.paper.recipe import Judgement, Verdict, by_cases
from experiments.paper.resnet_length_page import cells_of, judged, losses, refused
from experiments.paper.visits import MOST
from experiments.pieces import Lines
from experiments.seeds import Difference, clearly_below

SIZES = (250, 500, 1250, 2500, 5000)
"""Of batches, which divide all parts; the printed ones are 256, 512, 1024, 2048 and 5000. With 1000 in place of 1250
about a fifth of the weights would be left at the step at which the runs with 500 and 2500 have their lowest loss.
"""


def verdict(contests: Mapping[int, Contest]) -> Judgement:
    """Figure 3 with ResNet-18, at 12.5 updates of a weight, with batches of 250 at 1000 steps; contests by batch size.
    Reproduced: KFAC's test loss is clearly below CG-3's (95 % interval over three seeds) at all five sizes. In trend:
    at more than half. Not reproduced: otherwise. A size counts as not below where it was not run, or where more than
    20 % of the weights had not been updated at the look that counts. No verdict with fewer than three other sizes.
    """
    told, below, judged_at = [], [], []
    for size in SIZES:
        found = judged(contests[size])
        ours, theirs = (found.get(name, []) for name in ("AID-KFAC", "AID-CG-3"))
        early = refused(found, ("AID-KFAC", "AID-CG-3"))
        counts = bool(ours and theirs) and not early
        judged_at += [size] if counts else []
        below.append(counts and clearly_below(losses(ours), losses(theirs)))
        if ours and theirs:
            told.append(
                f"{size} {Difference.of(losses(theirs), losses(ours)):.3f}{' (too few weights updated)' * bool(early)}"
            )
    if len(judged_at) < 3:
        why = f"Only with batches of {' and '.join(map(str, judged_at)) or 'no size'} had {1 - MOST:.0%} of the weights"
        return Judgement(Verdict.REFUSED, f"{why} been updated at the look that counts in three seeds of both methods.")
    return by_cases(below, f"KFAC's test loss less CG-3's by size of batches: {'; '.join(told)}.")


def by_size() -> dict[int, Contest]:
    """The recorded runs of ResNet-18 by size of batches."""
    return {size: Contest(Lines(result_of(size)).rows, plan_of(size)) for size in SIZES}


def table(contests: Mapping[int, Contest]) -> str:
    """KFAC and CG-3 by size of batches."""
    columns = ("test loss", "KFAC's less it", "at step", "visits then", "not updated then", "seeds")
    lines = []
    for size, contest in contests.items():
        for name in ("AID-KFAC", "AID-CG-3"):
            if any(not row["failed"] for row in contest.results(name)):
                cells = cells_of(contest, name, OWN, {})
                lines.append([str(size), name, *(cells[column] for column in columns)])
    return records.markdown(["rows of a batch", "method", *columns], lines)
