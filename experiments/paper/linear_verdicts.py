"""The rules that judge the linear model: figure 5, figure 6, figures 3 and 7, and table 2.

Each takes the figures of one study (:mod:`experiments.paper.linear_page`); its docstring is the rule that is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.paper.recipe import Judgement, Verdict, by_cases
from experiments.seeds import clearly_below, mean

Figures = Mapping[str, Any]
PAIRS = (("AID-CG-3", "AID-KFAC"), ("AmIGO", "AmIGO-KFAC"), ("MRBO", "MRBO-KFAC"))
KFAC, CG, EKFAC = "AID-KFAC", "AID-CG-3", "AID-EKFAC"


def methods(figures: Figures) -> Judgement:
    """KFAC lowers a method's test loss where the 95 % interval of the difference over seeds is below zero. Reproduced:
    it lowers those of AID, AmIGO and MRBO, and the lowest mean of all methods is one with KFAC. In trend: it lowers at
    least two of the three. Not reproduced: otherwise; a pair of which a run is missing counts as not lowered.
    """
    found = figures["found"]
    loss = {name: mean(x["test_loss"]) for name, x in found.items()}
    losses = {name: x["test_loss"] for name, x in found.items()}
    whole = [(x, y) for x, y in PAIRS if x in losses and y in losses and len(losses[x]) == len(losses[y])]
    better = [kfac for plain, kfac in whole if clearly_below(losses[kfac], losses[plain])]
    first = min(loss, key=lambda name: loss[name])
    pairs = ", ".join(f"{plain} {loss[plain]:.3f} → {loss[kfac]:.3f}" for plain, kfac in whole)
    text = f"Test loss without and with KFAC: {pairs}; clearly lower: {', '.join(better) or 'none'}; "
    text += f"lowest of all: {first} ({loss[first]:.3f})."
    return by_cases([kfac in better for _, kfac in PAIRS], text, also=first.endswith("KFAC"))


def batches(figures: Figures) -> Judgement:
    """KFAC is below CG where the 95 % interval of the difference of their test losses over seeds is. Reproduced: it is
    below at every batch size, and the gap at the smallest is larger than at the largest. In trend: it is below at the
    smallest and at more than half of them. Not reproduced: otherwise.
    """
    found = figures["found"]
    gaps = {batch: mean(x[CG]["test_loss"]) - mean(x[KFAC]["test_loss"]) for batch, x in found.items()}
    below = [clearly_below(x[KFAC]["test_loss"], x[CG]["test_loss"]) for x in found.values()]
    text = "CG's test loss less KFAC's: " + ", ".join(f"{gap:+.3f} at {batch}" for batch, gap in gaps.items())
    text += f"; clearly below at {sum(below)} of {len(below)}."
    smallest, *_, largest = gaps.values()
    return by_cases(below, text, first=below[0], also=smallest > largest)


def intervals(figures: Figures) -> Judgement:
    """EKFAC is below KFAC where the 95 % interval of the difference of their test losses over seeds is. Reproduced: a
    step of both is cheaper at the longest interval than at 1, EKFAC's step costs more than KFAC's at 1, EKFAC is below
    KFAC at every interval, and the mean loss of both is lower at 1 than at the longest. In trend: the first two, and
    EKFAC is below at more than half of the intervals. Not reproduced: otherwise.
    """
    taus, kinds = figures["intervals"], (KFAC, EKFAC)
    found = [figures["found"][str(tau)] for tau in taus]
    loss = {kind: [mean(x[kind]["test_loss"]) for x in found] for kind in kinds}
    seconds = {kind: [mean(x[kind]["step_seconds"]) for x in found] for kind in kinds}
    cheaper = all(seconds[kind][-1] < seconds[kind][0] for kind in kinds) and seconds[EKFAC][0] > seconds[KFAC][0]
    below = [clearly_below(x[EKFAC]["test_loss"], x[KFAC]["test_loss"]) for x in found]
    fresher = all(loss[kind][0] < loss[kind][-1] for kind in kinds)
    text = "; ".join(
        f"τ = {tau}: {loss[KFAC][i]:.3f} and {loss[EKFAC][i]:.3f}, {1e3 * seconds[KFAC][i]:.1f} and "
        f"{1e3 * seconds[EKFAC][i]:.1f} ms"
        for i, tau in enumerate(taus)
    )
    text = f"Test loss and time a step of KFAC and EKFAC: {text}. EKFAC clearly below at {sum(below)} of {len(below)}."
    return by_cases(below, text, first=cheaper, also=fresher)


def averages(figures: Figures) -> Judgement:
    """The gain is the mean test loss without averaging less that of the best decay; it is clear where the 95 %
    interval of the difference over seeds is above zero. Reproduced: with the small batch and the smallest damping
    it is clear and the largest of all, and with the large batch and the largest damping less than half of that. In
    trend: with the small batch and the smallest damping it is clear and larger than with the large batch and the
    largest damping. Not reproduced: otherwise.
    """
    found, gain = figures["found"], gains(figures)
    sizes, dampings = list(found), list(next(iter(found.values())))
    noisy, calm = gain[sizes[0], dampings[-1]], gain[sizes[-1], dampings[0]]
    row = found[sizes[0]][dampings[-1]]
    best = min((decay for decay in row if decay != "0"), key=lambda decay: mean(row[decay]["test_loss"]))
    clear = clearly_below(row[best]["test_loss"], row["0"]["test_loss"])
    text = "Gain from averaging: " + ", ".join(f"{x:+.4f} (batch {b}, damping {d})" for (b, d), x in gain.items())
    text += f"; with the small batch and the smallest damping it is {'clear' if clear else 'not clear'}."
    if clear and noisy == max(gain.values()) and abs(calm) < noisy / 2:
        return Judgement(Verdict.REPRODUCED, text)
    return Judgement(Verdict.TREND if clear and noisy > calm else Verdict.FAILED, text)


def gains(figures: Figures) -> dict[tuple[str, str], float]:
    """By how much the best averaging lowers the mean test loss, for each batch and damping."""
    gain = {}
    for batch, of in figures["found"].items():
        for damping, row in of.items():
            losses = {decay: mean(x["test_loss"]) for decay, x in row.items()}
            gain[batch, damping] = losses["0"] - min(loss for decay, loss in losses.items() if decay != "0")
    return gain
