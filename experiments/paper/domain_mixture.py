"""A causal language model whose sources are mixed by learned weights, judged on a target domain (beyond the paper).

    J_in = mean_n 4 p_d(n) CE(text n) ,   p = softmax(λ) over four sources ,   J_out = mean CE on held-out target texts

The sources are the texts of ChemProt, ACL-ARC and HyperPartisan and sentences from papers on computer science; the
target is SciERC (abstracts on artificial intelligence). Marks of entities are taken out of all texts. A batch has as
many texts of each source. ``uniform`` keeps p equal, ``proportional`` sets it to the sizes, SAMA and KFAC learn it
from equal weights by Adam. λ's step size is chosen on the held-out texts; test texts are scored once, at the end.

    python -m experiments.paper.domain_mixture            # runs what is missing (minutes on a CPU)
    python -m experiments.paper.domain_mixture --table    # the recorded runs
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments import records
from experiments.paper.networks import seeded
from experiments.paper.pretraining_data import read_task
from experiments.paper.texts import MADE_UP
from experiments.pieces import Lines
from experiments.seeds import shown
from hyperkron import losses
from hyperkron.algorithms import AID, InnerOnly
from hyperkron.hyper import DomainWeights
from hyperkron.hypergradient import Hypergradient, kfac, sama
from hyperkron.problem import BilevelProblem
from hyperkron.training import fit

RESULT = records.RESULTS / "paper" / "domain-mixture.jsonl"
SOURCES = ("ChemProt", "ACL-ARC", "HyperPartisan", "computer science")
METHODS: dict[str, Callable[[torch.optim.Optimizer, int], Hypergradient] | None] = {
    "uniform": None,
    "proportional": None,
    "SAMA": lambda optimizer, seed: sama(optimizer, alpha=0.1),
    "KFAC": lambda optimizer, seed: kfac(1e-3, seed=seed),
    **{f"mostly {source}": None for source in SOURCES},
}
"""How each learns; ``None`` for fixed proportions. The last four show what there is to gain."""
MOSTLY = 0.7
"""The proportion of one source in these; the others share the rest."""
OUTER = (0.003, 0.01, 0.03, 0.1, 0.3)
PADDING, UNKNOWN = 0, 1


@dataclass(frozen=True)
class Size:
    """Of the model, the texts and the runs; a step of λ comes after ``inner_steps`` of θ."""

    words: int = 1000
    length: int = 32
    width: int = 48
    layers: int = 2
    batch: int = 4
    inner_steps: int = 4
    steps: int = 100
    rate: float = 3e-3


@dataclass(frozen=True)
class Corpus:
    """Token ids (N, L) of every source and of the target's held-out and test texts."""

    sources: list[Tensor]
    held_out: Tensor
    test: Tensor


def corpus(data: Path | None, size: Size) -> Corpus:
    """Texts as numbers of the most frequent words; with :data:`MADE_UP` as folder, made-up words."""
    if str(data) == MADE_UP:
        made = torch.Generator().manual_seed(0)
        draw = [torch.randint(2 + 10 * d, 12 + 10 * d, (60, size.length), generator=made) for d in range(4)]
        return Corpus(draw, draw[3][:20], draw[3][20:40])
    names = ("chemprot", "citation_intent", "hyperpartisan", "sciie")
    texts = [read_task(name, data) for name in names]
    sources = [[text for text, _ in of.parts["train"]] for of in texts[:3]] + [texts[3].domain]
    counts = Counter(word for source in sources for text in source for word in _words(text))
    number = {word: i + 2 for i, (word, _) in enumerate(counts.most_common(size.words - 2))}

    def ids(lines: list[str]) -> Tensor:
        rows = [[number.get(word, UNKNOWN) for word in _words(line)][: size.length] for line in lines]
        return torch.tensor([row + [PADDING] * (size.length - len(row)) for row in rows if len(row) > 1])

    held_out, test = ([text for text, _ in texts[3].parts[part]] for part in ("dev", "test"))
    return Corpus([ids(source) for source in sources], ids(held_out), ids(test))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[^a-z\s]", re.sub(r"<<|>>|\[\[|\]\]", " ", text.lower()))


def language_model(size: Size, seed: int) -> nn.Module:
    """A small GPT-2 with random weights, without dropout."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": size.words,
        "n_positions": size.length,
        "n_embd": size.width,
        "n_layer": size.layers,
    }
    none: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    none |= {"bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager"}
    config = transformers.GPT2Config(**sizes, n_head=2, **none)
    return seeded(lambda: transformers.GPT2LMHeadModel(config), seed)


def token_loss(model: nn.Module, ids: Tensor, weight: Tensor | None = None) -> losses.Loss:
    """Cross-entropy of the next word, averaged over words; padding does not count."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return losses.cross_entropy(logits, ids[:, 1:], weight=weight, ignore_index=PADDING)


PROBLEM = BilevelProblem(
    lambda model, mixture, batch: token_loss(model, batch[0], mixture(batch[1])),
    lambda model, mixture, batch: token_loss(model, batch),
)


def proportions(texts: Corpus, method: str) -> Tensor | None:
    """Of the sources at first; ``None`` for equal ones."""
    if method == "proportional":
        sizes = torch.tensor([float(len(source)) for source in texts.sources])
        return sizes / sizes.sum()
    if not method.startswith("mostly "):
        return None
    most = torch.tensor([f"mostly {source}" == method for source in SOURCES])
    return torch.where(most, MOSTLY, (1 - MOSTLY) / (len(SOURCES) - 1))


def run(texts: Corpus, size: Size, method: str, outer: float, seed: int) -> dict[str, Any]:
    """One training; the loss on held-out and test texts of the target, and the proportions at the end."""
    generator = torch.Generator().manual_seed(seed)

    def rows(of: Tensor, count: int) -> Tensor:
        return of[torch.randint(len(of), (count,), generator=generator)]

    domain = torch.arange(len(texts.sources)).repeat_interleave(size.batch)

    def mixed() -> tuple[Tensor, Tensor]:
        return torch.cat([rows(source, size.batch) for source in texts.sources]), domain

    mixture = DomainWeights(len(texts.sources), proportions(texts, method))
    model = language_model(size, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate)
    make = METHODS[method]
    options: dict[str, Any] = {}
    if make is not None:
        options["outer_data"] = lambda: rows(texts.held_out, len(domain))
        options["outer_optimizer"] = torch.optim.Adam(mixture.parameters(), lr=outer)
    algorithm = InnerOnly(size.inner_steps) if make is None else AID(make(optimizer, seed), size.inner_steps, seed=seed)
    fit(PROBLEM, model, mixture, algorithm, mixed, steps=size.steps, inner_optimizer=optimizer, seed=None, **options)
    with torch.no_grad():
        held_out, test = (token_loss(model, part).item() for part in (texts.held_out, texts.test))
    found = {"method": method, "outer": outer, "seed": seed, "held_out": held_out, "test": test}
    return {**found, "proportions": [round(float(p), 4) for p in mixture.proportions()]}


def chosen(rows: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    """The runs of a method with the step size of λ that is best on held-out texts with the first seed."""
    mine = [row for row in rows if row["method"] == method]
    if not mine:
        return []
    best = min((row for row in mine if row["seed"] == 0), key=lambda row: row["held_out"])
    return [row for row in mine if row["outer"] == best["outer"]]


def table(rows: list[dict[str, Any]]) -> str:
    """Loss per word on the target's test texts, and the mean proportions."""
    lines = []
    for method in METHODS:
        found = chosen(rows, method)
        if not found:
            continue
        edge = " (edge)" if found[0]["outer"] in (OUTER[0], OUTER[-1]) else ""
        rate = f"{found[0]['outer']:g}{edge}" if METHODS[method] else "–"
        means = [sum(row["proportions"][d] for row in found) / len(found) for d in range(len(SOURCES))]
        lines.append([method, rate, shown([row["test"] for row in found]), *(f"{mean:.2f}" for mean in means)])
    return records.markdown(["mixing", "step size of λ", "test loss", *SOURCES], lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is not recorded yet, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of the recorded runs")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the runs; finished ones are not repeated")
    parser.add_argument("--data", type=Path, default=None, help="folder that holds tapt/")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=Size.steps, help="steps of λ")
    options = parser.parse_args(arguments)
    lines, size = Lines(options.out), Size(steps=options.steps)
    if not options.table:
        texts = corpus(options.data, size)
        for seed in range(options.seeds):
            for method, make in METHODS.items():
                first = {row["outer"] for row in chosen(lines.rows, method)} if seed else OUTER
                for outer in first if make else (0.0,):
                    done = {(row["method"], row["outer"], row["seed"]) for row in lines.rows}
                    if (method, outer, seed) not in done:
                        found = run(texts, size, method, outer, seed)
                        lines.append({**found, "steps": size.steps, "hardware": records.hardware("cpu")["cpu"]})
                        print(
                            {key: found[key] for key in ("method", "outer", "seed", "test", "proportions")}, flush=True
                        )
    print(table(lines.rows))


if __name__ == "__main__":
    main()
