"""Experiment 7: hypercleaning of weakly labelled texts with a tuned encoder (figure 4, table 7)."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.paper import texts
from experiments.paper.encoder_answer import answer
from experiments.paper.encoder_page import NOTE_BASE, NOTE_MINILM, plot, tables, verdict, weights
from experiments.paper.encoder_settings import BASE, MINILM, Part, Settings
from experiments.paper.entries import Entry, Stage, compete
from experiments.paper.recipe import Job, Recipe, Scale
from experiments.paper.side_by_side import fill
from experiments.paper.text_cleaning import TextMethod, TextTrial, text_methods
from experiments.paper.texts import TextSplit
from experiments.paper.tuning import Setting
from experiments.pieces import OutOfTime
from experiments.trial import tensor_cores
from hyperkron.cleaning.models.encoder import TextEncoder
from hyperkron.cleaning.models.encoder_head import EncoderHead, Hidden
from hyperkron.solution import HyperkronError


class Source:
    """The encoder, and the states of every dataset and depth, each made when it is first asked for.

    Args:
        name: of the encoder.
        data: the folder of encoders and datasets.
        device: of everything.
        tokens: after which a text is cut.
    """

    def __init__(self, name: str, data: Path | None, device: torch.device, tokens: int) -> None:
        self.name, self.data, self.device, self.tokens = name, data, device, tokens
        self._corpora: dict[str, texts.Corpus] = {}
        self._states: tuple[tuple[str, int], tuple[Hidden, Hidden, Hidden]] | None = None
        self._splits: dict[tuple[Any, ...], TextSplit] = {}

    @cached_property
    def encoder(self) -> TextEncoder:
        """The encoder, loaded."""
        return texts.encoder(self.name, self.data, self.device)

    def corpus(self, dataset: str) -> texts.Corpus:
        """The texts of a dataset."""
        if dataset not in self._corpora:
            self._corpora[dataset] = texts.corpus(dataset, self.data)
        return self._corpora[dataset]

    def split(self, part: Part, layers: int, seed: int) -> TextSplit:
        """The rows of a part; states of one dataset and depth are kept at a time."""
        found, key = self.corpus(part.dataset), (part.dataset, layers)
        if self._states is None or self._states[0] != key:
            train, valid, test = (
                self._on_device(self.encoder.prefix(rows, layers, batch_size=256, max_length=self.tokens))
                for rows in (found.train, found.valid, found.test)
            )
            self._states, self._splits = (key, (train, valid, test)), {}
        place = (part.trusted, part.noise, seed)
        if place not in self._splits:
            self._splits[place] = texts.split(found, self._states[1], seed, part.trusted, part.noise)
        return self._splits[place]

    def _on_device(self, hidden: Hidden) -> Hidden:
        return Hidden(hidden.values.to(self.device), hidden.starts.to(self.device))

    def model(self, classes: int, layers: int, seed: int) -> EncoderHead:
        """The tuned layers and a head with the initial weights of ``seed``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = self.encoder.with_head(classes, layers)
            bound = 1 / math.sqrt(made.head.in_features)
            with torch.no_grad():  # drawn on the CPU, so that a seed means the same on every device
                for p in made.head.parameters():
                    p.copy_(torch.empty(p.shape).uniform_(-bound, bound))
        return made.to(self.device)


def source_of(job: Job, name: str) -> Source:
    """The source of a job, with an encoder."""
    return Source(name, job.data, job.device, job.settings.case.tokens)


def _entry(job: Job, source: Source, part: Part, layers: int, method: TextMethod) -> Entry:
    settings: Settings = job.settings
    steps = settings.steps(layers)

    def trial(setting: Setting, seed: int, steps: int) -> TextTrial:
        split = source.split(part, layers, seed)
        model = source.model(split.classes, layers, seed)
        return TextTrial(settings.case, split, model, method, setting, seed, steps)

    @tensor_cores()
    def score(setting: Setting) -> float:
        found = trial(setting, 0, math.ceil(steps * settings.short))
        found.train(test=False)
        best = min(found.rows, key=lambda row: (row["second_error"], row["second_loss"]))
        return best["second_error"] + 1e-4 * min(best["second_loss"], 100.0)  # the loss decides between equals

    def again(weights: Tensor, setting: Setting, seed: int) -> float:
        """Test accuracy of a fresh network trained as long with the final weights."""
        split = source.split(part, layers, seed)
        model, plain = source.model(split.classes, layers, seed + 100), TextMethod("Baseline", {}, None)
        found = TextTrial(settings.case, split, model, plain, {"inner": setting["inner"]}, seed + 100, steps)
        found.weights.weight.data.copy_(weights)
        found.train(test=True)
        return 100 * (1 - float(found.figures()["best"]["test_error"]))

    @tensor_cores()
    def final(setting: Setting, seed: int) -> dict[str, Any]:
        found = trial(setting, seed, steps)
        found.train(test=True)
        learnt = method.algorithm is not None and not found.failed and (layers == 1 or settings.again_deep)
        extra = {"again": again(found.weights.weight.detach(), setting, seed)} if learnt else {}
        return {**found.figures(), **extra}

    return Entry(method.name, method.grid, score, final)


def _name(part: Part, layers: int) -> str:
    """A stage is a dataset, a number of tuned layers, a number of trusted rows, and a kind of noise."""
    return f"{part.dataset}/{layers}/{'all' if part.trusted is None else part.trusted}/{part.noise}"


def prices(job: Job, source: Source, depths: dict[str, int]) -> dict[tuple[int, str], dict[str, Any]]:
    """What an outer step costs by tuned layers and method, each measured on its own before anything else is run:
    ``seconds``, and on a GPU ``bytes``, the most that was allocated; where it fails ``seconds`` is ``None`` and
    ``error`` says why.

    Time is taken here and nowhere else, so that the runs themselves may share a device. A method without a price, for
    which there was no time, is left out of the result; one whose price fails is not run.
    """
    settings: Settings = job.settings
    wanted = {
        (depths[part.depth], name): part
        for part in reversed(settings.parts)
        for name in (*part.methods, *settings.priced)
    }
    found = {}
    with tensor_cores():
        for (layers, name), part in sorted(wanted.items(), key=lambda pair: pair[0][0]):
            method = text_methods(settings.rates if layers == 1 else settings.deep)[name]
            key = "plain" if method.algorithm is None else name
            take = partial(_price, job, source, part, layers, method)
            try:
                found[layers, name] = job.cell(["price", layers, key], take)
            except OutOfTime:
                continue
    return found


def _price(job: Job, source: Source, part: Part, layers: int, method: TextMethod) -> dict[str, Any]:
    settings: Settings = job.settings
    split, setting = source.split(part, layers, 0), {name: values[0] for name, values in method.grid.items()}
    model, steps = source.model(split.classes, layers, 0), settings.steps(layers)
    gpu = job.device.type == "cuda"
    if gpu:
        gc.collect()  # what an earlier trial left must not count
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(job.device)
    try:
        seconds = TextTrial(settings.case, split, model, method, setting, 0, steps).price(settings.timed)
    except torch.OutOfMemoryError:
        return {"seconds": None, "error": "out of memory"}
    except HyperkronError:
        return {"seconds": None, "error": "a step failed"}
    return {"seconds": seconds, "bytes": torch.cuda.max_memory_allocated(job.device) if gpu else None}


class Prepared(NamedTuple):
    """The encoder, what a step costs, what competes, and the tuned layers of each stage."""

    facts: dict[str, Any]
    price: dict[tuple[int, str], dict[str, Any]]
    stages: list[Stage]
    layers_of: dict[str, int]


def prepared(job: Job) -> Prepared:
    """Prices, and every part in order; parts that differ only in their methods belong together."""
    settings: Settings = job.settings
    facts = job.cell(["encoder"], lambda: _facts(job, settings.encoders))
    source, depths = source_of(job, facts["name"]), texts.depths(facts["layers"])
    made = Prepared(facts, prices(job, source, depths), [], {})
    for part in settings.parts:
        layers = depths[part.depth]
        methods = text_methods(settings.rates if layers == 1 else settings.deep)
        able = [name for name in part.methods if "error" not in made.price.get((layers, name), {})]
        entries = [_entry(job, source, part, layers, methods[name]) for name in able]
        made.stages.append(Stage(_name(part, layers), entries, part.seeds))
        made.layers_of[made.stages[-1].name] = layers
    return made


def stages_of(job: Job) -> tuple[list[Stage], int]:
    """What competes, and over how many trials."""
    return prepared(job).stages, job.settings.trials


def work(job: Job) -> dict[str, Any]:
    """Prices, then every part, in order."""
    settings: Settings = job.settings
    facts, price, stages, layers_of = prepared(job)
    found = compete(job, stages, settings.trials)
    return {
        "encoder": facts,
        "steps": settings.case.steps,
        "stage_steps": {name: settings.steps(layers) for name, layers in layers_of.items() if name in found.stages},
        "stages": {
            name: {
                method: {
                    "setting": x["setting"],
                    "edge": x["edge"],
                    **_summary(x["runs"], price[layers_of[name], method]["seconds"]),
                }
                for method, x in of.items()
                if (layers_of[name], method) in price
            }
            for name, of in found.stages.items()
        },
        "prices": _by_layers(price),
        "cut_short": found.cut_short,
    }


def _by_layers(price: dict[tuple[int, str], dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Prices under the number of layers, as JSON wants its keys."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (layers, name), cost in price.items():
        found.setdefault(str(layers), {})[name] = cost
    return found


def _facts(job: Job, encoders: Sequence[str]) -> dict[str, Any]:
    name = texts.available(encoders, job.data)
    return {"name": name, "layers": texts.encoder(name, job.data, torch.device("cpu")).layers}


def _summary(runs: Sequence[dict[str, Any]], price: float) -> dict[str, Any]:
    """Seeds side by side; a time is a number of steps times the price of one."""
    curves = [
        {
            "seconds": [float(f"{price * step:.5g}") for step in run["curve"]["step"]],
            **{key: run["curve"][key] for key in ("second_error", "test_error")},
        }
        for run in runs
    ]
    return {
        "accuracy": [100 * (1 - run["best"]["test_error"]) for run in runs],
        "last_accuracy": [100 * (1 - run["last"]["test_error"]) for run in runs],
        "second_accuracy": [100 * (1 - run["best"]["second_error"]) for run in runs],
        "seconds": [price * run["last"]["step"] for run in runs],
        "step_seconds": [price for _ in runs],
        **{key: [run[key] for run in runs] for key in ("auc", "failed", "graph", "outer_rate")},
        "again": [run.get("again") for run in runs],
        "rows": [run["rows"] for run in runs if run.get("rows")],
        "curves": curves,
    }


def _recipe(name: str, encoder: str, settings: Mapping[Scale, Settings], note: str) -> Recipe:
    return Recipe(
        name=name,
        title=f"Hypercleaning with a tuned text encoder, {encoder}: TREC, Youtube, SemEval",
        place="Figure 4; Table 7",
        experiment=7,
        settings=settings,
        work=work,
        verdict=verdict,
        weights=weights,
        tables=tables,
        plot=plot,
        note=note,
        answer=answer,
        gpu=("small", "paper"),
        seeds={"smoke": 1, "small": 3, "paper": 5},
        partial=True,
        stages=stages_of,
        fill=fill,
    )


RECIPES = (
    _recipe("encoder", "MiniLM (6 layers)", MINILM, NOTE_MINILM),
    _recipe("encoder-base", "MPNet-base (12 layers)", BASE, NOTE_BASE),
)
