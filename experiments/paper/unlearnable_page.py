"""What the page says about unlearnable examples: tables beside the printed one, the verdict, and pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.paper import costs, plots
from experiments.paper.printed import printed
from experiments.paper.recipe import Judgement, Result, Table, Verdict, by_cases
from experiments.paper.unlearnable_networks import published
from experiments.seeds import clearly_below, shown

LARGE, SMALL = 25, 8
"""ε in 1/255: the paper's, and the usual one."""
VICTIMS = ("ResNet-18", "CNN")
RIVALS = ("AID-CG", "BOME", "stocBiO")
NEAR = 3.0
"""Points of accuracy within which two results count as the same, where there is one seed."""
STILL = 0.05
"""Perturbations that changed by less than this share of ε say nothing about a method."""
SHOWN = 6
"""Images in a picture."""

NOTE = (
    "The images of CIFAR-10 are published with perturbations of at most ε; a victim is trained on them from scratch "
    "with crops and mirror images, and its accuracy on clean test images is shown (lower is better protection). 5000 "
    "training images are held out: every few hundred steps a CNN is trained briefly on the published images, and the "
    "attacker on which it is worst on the held-out ones is kept; the test images are used once, at the end. Two arms: "
    "“as printed” moves λ by SGD at the printed step size (1; BOME 0.1), “own” by Adam, with the step size chosen for "
    "each method from a grid by short attacks. At small scale the U-Net has a quarter of its width (16-32-64-128), λ "
    "makes 4900 steps of batch 512 as printed, BOME, whose step has ten of a copy of θ, 1225 of batch 256; the second "
    "table has attacks of 1000 and 250 steps; the CNN is trained for 45 and ResNet-18 for 12 epochs in one "
    "cycle (printed: 100). The printed step size of the classifier is 0; ours is 0.03. A step of θ and one of λ take "
    "turns (printed: ten of each). AID-CG makes 3 iterations; EM makes 8 passes of 10 sign steps."
)


def line(radius: int, method: str, arm: str) -> str:
    """The name of a line among the figures."""
    return f"{radius} {method} {arm}"


def _values(result: Result, radius: int, method: str, arm: str, victim: str) -> list[float]:
    found = result.figures["lines"].get(line(0 if method == "None" else radius, method, arm), {})
    return list(found.get("test", {}).get(victim, []))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _printed() -> dict[tuple[str, str], float]:
    rows = printed("table_unlearnable")["rows"]
    return {(row[0], victim): row[1 + i] for row in rows for i, victim in enumerate(VICTIMS)}


def _attacks(result: Result, radius: int, method: str, arm: str) -> list[dict[str, Any]]:
    return list(result.figures["lines"].get(line(radius, method, arm), {}).get("attack", {}).values())


def judged_arm(result: Result, method: str) -> str:
    """The attacks by which a method is judged: those of the printed length once all bilevel methods have them (victims
    of each included). What is not bilevel has one length.
    """
    longer = all(_values(result, LARGE, name, "long", victim) for name in ("AID-KFAC", *RIVALS) for victim in VICTIMS)
    return "long" if longer and method in ("AID-KFAC", *RIVALS) else "own"


def cell(result: Result, method: str, victim: str) -> str:
    """The verdict on one printed number: what ours is against it."""
    arm = judged_arm(result, method)
    ours, theirs = _values(result, LARGE, method, arm, victim), _printed().get((method, victim))
    if not ours or theirs is None:
        return "–"
    if any(one["failure"] or one["noise_moved"] < STILL for one in _attacks(result, LARGE, method, arm)):
        return "no verdict"
    gap = _mean(ours) - theirs
    return "same" if abs(gap) <= NEAR else f"{abs(gap):.0f} points {'lower' if gap < 0 else 'higher'}"


def _below(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether a is clearly below b: by the interval over seeds, or with one seed by more than :data:`NEAR`."""
    if not a or not b:
        return False
    several = len(a) > 1 and len(a) == len(b)
    return clearly_below(a, b) if several else _mean(b) - _mean(a) > NEAR


def verdict(result: Result) -> Judgement:
    """At ε = 25/255, each method at its own step size, with attacks of the printed length once all have them (this was
    added before any of those had been run). Reproduced: after AID-KFAC both victims are clearly less
    accurate than after AID-CG, BOME and stocBiO (the 95 % interval over seeds; with one seed by more than 3 points),
    and error-minimising noise is stronger still. In trend: in more than half of these six comparisons. Not reproduced:
    otherwise. No verdict: where a comparison is missing, or the perturbations of one of the four changed by less than
    5 % of ε.
    """
    names = ("AID-KFAC", *RIVALS)
    means = {
        (name, victim): values
        for victim in VICTIMS
        for name in ("None", *names, "EM")
        if (values := _values(result, LARGE, name, judged_arm(result, name), victim))
    }
    said = {
        victim: ", ".join(f"{name} {_mean(values):.1f}" for (name, of), values in means.items() if of == victim)
        for victim in VICTIMS
    }
    text = " ".join(f"{victim}: {line or 'not run'}." for victim, line in said.items())
    attacks = {name: _attacks(result, LARGE, name, judged_arm(result, name)) for name in names}
    still = [name for name, found in attacks.items() if any(one["noise_moved"] < STILL for one in found)]
    text = f"Clean test accuracy in %, {text}"
    if still:
        return Judgement(Verdict.REFUSED, f"The perturbations of {', '.join(still)} hardly moved. {text}")
    pairs = [(("AID-KFAC", victim), (rival, victim)) for victim in VICTIMS for rival in RIVALS]
    gone = sum(a not in means or b not in means for a, b in pairs)
    if gone:
        return Judgement(Verdict.REFUSED, f"{gone} of {len(pairs)} comparisons have not been run. {text}")
    holds = [_below(means[a], means[b]) for a, b in pairs]
    em = [means.get(("EM", victim), []) for victim in VICTIMS]
    kfac = [means.get(("AID-KFAC", victim), []) for victim in VICTIMS]
    also = all(a and b and _mean(a) < _mean(b) for a, b in zip(em, kfac, strict=True))
    return by_cases(holds, text, also=also)


def answer(result: Result) -> list[str]:
    """What a reader is told first."""
    cost = _seconds(result)
    said = []
    if cost.get("AID-KFAC") and cost.get("AID-CG"):
        said.append(
            f"A step of AID-KFAC takes {1e3 * cost['AID-KFAC']:.1f} ms, "
            f"{cost['AID-KFAC'] / cost['AID-CG']:.2f} of AID-CG's with 3 iterations"
            + (f" and {cost['AID-KFAC'] / cost['AID-CG-16']:.2f} of that with 16." if cost.get("AID-CG-16") else ".")
        )
    found = []
    for victim in VICTIMS:
        names = ("EM", "AID-KFAC", *RIVALS)
        tried = {name: _values(result, LARGE, name, judged_arm(result, name), victim) for name in names}
        if scores := {name: _mean(values) for name, values in tried.items() if values}:
            best = min(scores, key=lambda name: scores[name])
            found.append(f"{best} for the {victim} ({scores[best]:.1f} %)")
    return [*said, *([f"Strongest at ε = {LARGE}/255: {'; '.join(found)}."] if found else [])]


def tables(result: Result | None) -> list[Table]:
    """The printed table beside ours, the smaller radius, and the step sizes that were tried."""
    known = _printed()
    names = ("None", "AID-CG", "BOME", "stocBiO", "AID-KFAC", "EM")
    if result is None:
        rows = [[name, *(str(known[name, victim]) for victim in VICTIMS)] for name in names]
        return [Table("Printed test accuracy in %", ["method", *VICTIMS], rows)]
    more = ("AID-KFAC-mc", "AID-EKFAC", "Untrained generator")
    columns = ["method"]
    for victim in VICTIMS:
        columns += [f"{victim} printed", "ours", "verdict", "printed step"]
    columns += ["change of noise / ε", "ms a step"]
    rows = []
    for name in (*names, *more):
        row = [name]
        for victim in VICTIMS:
            row += [
                str(known.get((name, victim), "–")),
                _accuracy(result, LARGE, name, judged_arm(result, name), victim),
                cell(result, name, victim),
                _accuracy(result, LARGE, name, "printed", victim),
            ]
        cost = _seconds(result).get(name)
        row += [_moved(result, LARGE, name), f"{1e3 * cost:.1f}" if cost else "–"]
        rows.append(row)
    return [
        Table(f"Clean test accuracy in %, ε = {LARGE}/255 (lower: better protected)", columns, rows),
        *_other_length(result),
        _smaller(result, names),
        _tried(result),
        *costs.tables(result),
    ]


def _other_length(result: Result) -> list[Table]:
    """Attacks of the length by which the methods are not judged, where there are any."""
    judged = judged_arm(result, "AID-KFAC")
    arm, length = ("own", "1000") if judged == "long" else ("long", "the printed 4900")
    rows = [[name, *(_accuracy(result, LARGE, name, arm, x) for x in VICTIMS)] for name in ("AID-KFAC", *RIVALS)]
    found = [row for row in rows if set(row[1:]) != {"–"}]
    title = f"The same after attacks of {length} steps at small scale (BOME a quarter), ε = {LARGE}/255"
    return [Table(title, ["method", *VICTIMS], found)] if found else []


def _seconds(result: Result) -> dict[str, float]:
    """Of a step of λ with its step of θ, by method; with the GPU alone where that was measured."""
    own = costs.of(result, "unlearnable")
    return {**result.figures["seconds"], **{name: x["ms"] / 1000 for name, x in own.items()}}


def _accuracy(result: Result, radius: int, name: str, arm: str, victim: str) -> str:
    text = shown(_values(result, radius, name, arm, victim), 1)
    return f"{text} (failed)" if any(one["failure"] for one in _attacks(result, radius, name, arm)) else text


def _moved(result: Result, radius: int, name: str) -> str:
    own = judged_arm(result, name) if radius == LARGE else "own"
    arms = [_attacks(result, radius, name, arm) for arm in (own, "printed")]
    return " / ".join(f"{_mean([one['noise_moved'] for one in found]):.2f}" for found in arms if found) or "–"


def _smaller(result: Result, names: Sequence[str]) -> Table:
    rows = [
        [name, *(_accuracy(result, SMALL, name, "own", victim) for victim in VICTIMS), _moved(result, SMALL, name)]
        for name in names
    ]
    return Table(f"The same at ε = {SMALL}/255 (not printed)", ["method", *VICTIMS, "change of noise / ε"], rows)


def _tried(result: Result) -> Table:
    found = {method: dict(scores) for method, scores in result.figures["tried"].items()}
    rates = sorted({rate for scores in found.values() for rate in scores})
    rows = []
    for method, scores in found.items():
        known = {rate: score for rate, score in scores.items() if score is not None}
        best = min(known, key=lambda rate: known[rate])
        edge = " (edge)" if len(rates) > 1 and best in (rates[0], rates[-1]) else ""
        rows.append([method, *(f"{known[rate]:.1f}" if rate in known else "–" for rate in rates), f"{best:g}{edge}"])
    for name, x in result.figures["lines"].items():
        if "held_out" in x:
            rows.append([name.split(" ", 1)[1].rsplit(" ", 1)[0], *[f"{x['held_out']:.1f}"] * len(rates), "–"])
    columns = ["method", *(f"{rate:g}" for rate in rates), "chosen"]
    return Table(
        "Held-out accuracy in % after short attacks, by Adam's step size of λ (lower is chosen)", columns, rows
    )


def encoded(noise: nn.Module, images: Tensor) -> str:
    """The first images as they are published, with their perturbations below, as a small WebP file in base64."""
    from PIL import Image

    made = published(noise, images)[:SHOWN].float().cpu()
    change = (made - images[:SHOWN].float().cpu()) / (2 * float(noise.radius)) + 0.5  # type: ignore[arg-type]
    strip = torch.cat([torch.cat(list(part), 2) for part in (made, change)], 1)
    pixels = (255 * strip.clamp(0, 1)).round().byte().permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", quality=85)
    return base64.b64encode(file.getvalue()).decode()


def plot(result: Result, folder: Path) -> list[Path]:
    """Published images and perturbations of each method at the larger radius."""
    import numpy as np
    from PIL import Image

    found = {
        method: x["picture"]
        for name, x in result.figures["lines"].items()
        if "picture" in x and (method := _pictured(name)) is not None
    }
    if not found:
        return []
    strips = [np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")) for text in found.values()]
    height, gap = strips[0].shape[0], 6
    white = np.full((gap, strips[0].shape[1], 3), 255, np.uint8)

    def fill(axes: Any) -> None:
        stacked = np.concatenate([part for strip in strips for part in (strip, white)])
        axes[0].imshow(stacked, interpolation="none")
        places = [i * (height + gap) + height / 2 for i in range(len(strips))]
        axes[0].set_yticks(places, list(found))
        axes[0].set_xticks([])
        axes[0].set_frame_on(False)

    return [plots.draw(folder / "unlearnable.svg", 1, fill, height=1.3 * len(strips))]


def _pictured(name: str) -> str | None:
    """The method of a line whose perturbations are shown."""
    radius, rest = name.split(" ", 1)
    method, arm = rest.rsplit(" ", 1)
    return method if (int(radius), arm) == (LARGE, "own") else None
