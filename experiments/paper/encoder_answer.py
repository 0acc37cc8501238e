"""SAMA or KFAC for a text encoder? What the experiment says to someone who must choose, and what it does not say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from experiments.paper.encoder_page import BILEVEL, DATASETS, best_method, gaps, span, stage_steps, stage_text
from experiments.paper.printed import printed
from experiments.paper.recipe import Result
from experiments.seeds import Difference, mean

FEW = 3
"""Fewer seeds than this are called few."""


def differences(stages: dict[str, dict[str, dict[str, Any]]], key: str, unit: float = 1.0) -> dict[str, Difference]:
    """KFAC less SAMA by stage, of ``accuracy``, ``again`` and so on, times ``unit``."""
    found = {}
    for name, of in stages.items():
        if "SAMA" in of and "KFAC" in of:
            rows = [[None if x is None else unit * x for x in of[m].get(key, [])] for m in ("SAMA", "KFAC")]
            one = Difference.of(*rows)
            if one is not None:
                found[name] = one
    return found


def answer(result: Result) -> list[str]:
    """SAMA or KFAC, in plain words, every number from the result; the last entry says what it does not show."""
    stages = result.figures["stages"]
    found = differences(stages, "accuracy")
    if not found:
        return []
    compared = gaps(stages)
    said = [_choice(found, span(compared, "price")), *_tuned(stages, found)]
    said.append(f"KFAC's accuracy less SAMA's in points: {_list(found, list(found))}.")
    said.append(
        f"Give each a step size of λ of its own: to move λ as far, SAMA needs {span(compared, 'rate')} times KFAC's, "
        "so that one grid of absolute step sizes favours one of them."
    )
    return [text for text in (*said, _trusted(stages), _limits(result, found)) if text]


def _list(found: dict[str, Difference], names: Sequence[str]) -> str:
    return "; ".join(f"{stage_text(name)} {found[name]}" for name in names)


def _choice(found: dict[str, Difference], price: str) -> str:
    """Which to take, by how many intervals are on one side of zero."""
    above, below = ([name for name, x in found.items() if x.sign == sign] for sign in (1, -1))
    cost = f"a step of KFAC takes {price} times as long"
    facts = (
        f"KFAC's accuracy is clearly above SAMA's in {_named(found, 1)}, clearly below in {_named(found, -1)}; "
        f"{len(found) - len(above) - len(below)} of {len(found)} cases are open (clearly: the 95 % interval of the "
        "difference, seed by seed, is on that side of zero)."
    )
    if len(above) > len(found) / 2 and not below:
        return f"SAMA or KFAC? KFAC, if its price suits: {cost}. {facts}"
    if above:
        return f"SAMA or KFAC? It depends on the data, and {cost}. {facts}"
    return f"SAMA or KFAC? SAMA: no clear gain in accuracy pays for KFAC here, and {cost}. {facts}"


def _tuned(stages: dict[str, dict[str, dict[str, Any]]], found: dict[str, Difference]) -> list[str]:
    """Where one is clearly ahead and tuning let it move λ further, the lead may be tuning's."""
    suspects = []
    for name, x in found.items():
        sama, kfac = (stages[name][method].get("setting", {}).get("outer") for method in ("SAMA", "KFAC"))
        if x.sign and sama and kfac and (kfac - sama) * x.sign > 0:
            suspects.append(f"{stage_text(name)} ({sama:g} for SAMA, {kfac:g} for KFAC)")
    if not suspects:
        return []
    cases = "; ".join(suspects)
    return [
        f"Where it was clear, tuning had given the one ahead a larger relative step of λ, which may be why: {cases}."
    ]


def _named(found: dict[str, Difference], sign: int) -> str:
    """How many cases are clearly above (1) or below (−1), and which."""
    names = [stage_text(name) for name, x in found.items() if x.sign == sign]
    return f"{len(names)} ({'; '.join(names)})" if names else "none"


def _trusted(stages: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Where plain training on the trusted rows beats every bilevel method, and where not."""
    won: list[str] = []
    lost: list[str] = []
    for name, of in stages.items():
        if "trusted only" in of and any(method in of for method in BILEVEL):
            best = best_method(of)
            plain, weighted = mean(of["trusted only"]["accuracy"]), mean(of[best]["accuracy"])
            text = f"{stage_text(name)} {plain:.1f} % against {weighted:.1f} % ({best})"
            (won if plain > weighted else lost).append(text)
    parts = [f"it beats every bilevel method on {'; '.join(won)}"] if won else []
    parts += [f"it does not on {'; '.join(lost)}"] if lost else []
    return f"Before either, train plainly on the trusted rows alone: {', and '.join(parts)}." if parts else ""


def _limits(result: Result, found: dict[str, Difference]) -> str:
    """What the figures do not show."""
    few = [name for name, x in found.items() if x.seeds < FEW]
    said = []
    if few:
        wide = [found[name].half for name in few if not math.isnan(found[name].half)]
        steps = sorted({stage_steps(result, name) for name in few})
        reach = f", with intervals of ± {min(wide):.1f} to {max(wide):.1f} points" if wide else ""
        said.append(
            f"{len(few)} of {len(found)} cases ({'; '.join(map(stage_text, few))}) have fewer than {FEW} seeds and "
            f"{' or '.join(map(str, steps))} outer steps{reach}: too few to tell the two apart"
        )
    outside, inside = _beside_print(result, found)
    if outside:
        said.append(f"the printed gain lies above our whole interval on {'; '.join(outside)}")
    if inside:
        said.append(f"on {'; '.join(inside)} our interval is wide enough to hold the printed gain")
    encoder = result.figures["encoder"]
    said.append(
        f"the encoder is {encoder['name']} with {encoder['layers']} layers; nothing is said about larger ones or "
        "longer runs"
    )
    return f"What this does not show: {'. '.join(text[:1].upper() + text[1:] for text in said)}."


def _beside_print(result: Result, found: dict[str, Difference]) -> tuple[list[str], list[str]]:
    """The cases whose interval is below the printed gain, and those whose interval reaches it."""
    rows, depth = printed("table_bert_hypercleaning"), int(result.figures["encoder"]["layers"])
    outside: list[str] = []
    inside: list[str] = []
    for name, x in found.items():
        dataset, layers, *_ = name.split("/")
        if not name.endswith("/all/weak") or dataset not in DATASETS or math.isnan(x.half):
            continue
        of = rows[{1: "1_layer", depth: "12_layers"}.get(int(layers), "7_layers")]
        place = ["trec", "semeval", "youtube"].index(dataset)
        gain = of["KFAC"][place][0] - of["SAMA"][place][0]
        (outside if gain > x.mean + x.half else inside).append(f"{stage_text(name)} ({gain:+.1f})")
    return outside, inside
