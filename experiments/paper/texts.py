"""Texts for the encoder experiments: weakly labelled rows as states of a frozen lower part, and the encoders.

The rows with weak labels are WRENCH's training rows, labelled by majority vote (ties and rows without a vote go to the
class of lowest number); the trusted rows are its validation rows. WRENCH has no second validation part, so that as many
rows as it has validation rows are taken out of training, with their true labels, to tune and to choose where to stop.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from experiments.paper.datasets import find
from experiments.paper.networks import seeded
from hyperkron.cleaning.data import ReadOptions
from hyperkron.cleaning.data.labelled import Place
from hyperkron.cleaning.data.wrench import read_wrench
from hyperkron.cleaning.models.encoder import TextEncoder
from hyperkron.cleaning.models.encoder_head import Hidden
from hyperkron.solution import HyperkronError

MADE_UP = "made-up"
"""The name of the encoder with random weights and of the data made for it."""


Noise = Literal["weak", "uniform"]
"""``weak``: the majority vote; ``uniform``: the true labels, half of them drawn anew."""


@dataclass(frozen=True)
class Corpus:
    """Texts of the three parts, true labels, and the weak labels of the training part."""

    train: list[str]
    valid: list[str]
    test: list[str]
    weak: Tensor
    gold: tuple[Tensor, Tensor, Tensor]
    classes: int


def corpus(name: str, folder: Path | None) -> Corpus:
    """A WRENCH dataset by name, or made-up texts."""
    if name == MADE_UP:
        return _made_up()
    where = find(f"wrench/{name}", folder)
    vote = ReadOptions(abstain="first")
    places = (Place("name", name, where, part, vote, gold=False) for part in ("train", "valid", "test"))
    train, valid, test = map(read_wrench, places)
    number = {label: i for i, label in enumerate(train.classes or ())}

    def labels(of: Any) -> Tensor:
        return torch.tensor([number[label] for label in of])

    gold = (labels(train.gold), labels(valid.gold), labels(test.gold))
    parts = [list(part.inputs) for part in (train, valid, test)]
    return Corpus(parts[0], parts[1], parts[2], labels(train.labels), gold, len(number))


def _made_up(classes: int = 3) -> Corpus:
    """Ten words a text, half of them of its class; 40 % of the training labels are wrong."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> tuple[list[str], Tensor]:
        y = torch.randint(classes, (count,), generator=generator)
        own = 10 * y[:, None] + torch.randint(10, (count, 5), generator=generator)
        words = torch.cat([own, torch.randint(10 * classes, (count, 5), generator=generator)], 1)
        return [" ".join(f"w{i}" for i in row) for row in words.tolist()], y

    (train, a), (valid, b), (test, c) = part(80), part(20), part(40)
    wrong = torch.rand(len(a), generator=generator) < 0.4
    weak = torch.where(wrong, (a + 1) % classes, a)
    return Corpus(train, valid, test, weak, (a, b, c), classes)


@dataclass(frozen=True)
class Rows:
    """States that enter the tuned layers, with labels, all on one device."""

    hidden: Hidden
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """States and mask; on a GPU padded to the longest text of all, so that every batch has the same shape."""
        return self.hidden.batch(rows) if rows.device.type == "cpu" else self.padded(rows, self.longest)

    def padded(self, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """States and mask, padded with zeros to ``length``; the device is not waited for."""
        begin, end = self.hidden.starts[rows], self.hidden.starts[rows + 1]
        position = torch.arange(length, device=rows.device)
        mask = position < (end - begin)[:, None]
        index = (begin[:, None] + position).clamp(max=len(self.hidden.values) - 1)
        return self.hidden.values[index].float() * mask.unsqueeze(-1), mask

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return int(self.hidden.starts.diff().max())

    def take(self, rows: Tensor, labels: Tensor | None = None) -> Rows:
        """Some rows, perhaps with other labels."""
        rows = rows.cpu()
        packed = Hidden(self.hidden.values.cpu(), self.hidden.starts.cpu()).select(rows)
        given = self.labels.cpu()[rows] if labels is None else labels.cpu()
        return Rows(packed, given).to(self.labels.device)

    def to(self, device: torch.device | str) -> Rows:
        """The same on another device."""
        moved = Hidden(self.hidden.values.to(device), self.hidden.starts.to(device))
        return Rows(moved, self.labels.to(device))


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of several parts, one after the other."""
    values = torch.cat([part.hidden.values for part in parts])
    lengths = torch.cat([part.hidden.starts.diff() for part in parts])
    starts = torch.cat([torch.zeros(1, dtype=torch.long, device=lengths.device), lengths.cumsum(0)])
    return Rows(Hidden(values, starts), torch.cat([part.labels for part in parts]))


@dataclass(frozen=True)
class TextSplit:
    """Rows of every role; ``train`` has weak labels, and ``clean`` says which of them are right."""

    train: Rows
    trusted: Rows
    second: Rows
    test: Rows
    clean: Tensor
    classes: int


def split(
    texts: Corpus,
    parts: tuple[Hidden, Hidden, Hidden],
    seed: int,
    trusted: int | None = None,
    noise: Noise = "weak",
) -> TextSplit:
    """Take the second validation part out of training, and perhaps only some of the trusted rows.

    Args:
        texts: their labels are used.
        parts: states of the training, validation and test texts.
        seed: of what is taken.
        trusted: how many trusted rows there are; ``None`` for all.
        noise: of the training labels.
    """
    train, valid, test = (
        Rows(hidden, gold.to(hidden.values.device)) for hidden, gold in zip(parts, texts.gold, strict=True)
    )
    count = len(valid) if trusted is None else trusted
    if not 1 <= count <= len(valid):
        raise HyperkronError(f"trusted={trusted!r} must lie between 1 and {len(valid)}, the trusted rows there are.")
    generator = torch.Generator().manual_seed(seed)
    second, kept = torch.randperm(len(train), generator=generator).split([len(valid), len(train) - len(valid)])
    some = torch.randperm(len(valid), generator=generator)[:count]
    weak = texts.weak[kept]
    if noise == "uniform":
        again = torch.rand(len(weak), generator=generator) < 0.5
        drawn = torch.randint(texts.classes, weak.shape, generator=generator)
        weak = torch.where(again, drawn, texts.gold[0][kept])
    elif noise != "weak":
        raise HyperkronError(f"noise={noise!r} is unknown; choose weak or uniform.")
    return TextSplit(
        train.take(kept, weak),
        valid.take(some),
        train.take(second),
        test,
        weak == texts.gold[0][kept],
        texts.classes,
    )


def depths(layers: int) -> dict[str, int]:
    """How many layers are tuned: one, the paper's seven of twelve, or all.

    Example:
        >>> depths(12), depths(6)
        ({'one': 1, 'middle': 7, 'all': 12}, {'one': 1, 'middle': 3, 'all': 6})
    """
    return {"one": 1, "middle": max(1, 7 * layers // 12), "all": layers}


def encoder(name: str, folder: Path | None, device: torch.device) -> TextEncoder:
    """An encoder from the data folder, or :data:`MADE_UP`: a BERT of two layers with random weights."""
    if name != MADE_UP:
        where = find(name, folder)
        unpack(where)
        return TextEncoder(where, device=device)
    with tempfile.TemporaryDirectory() as place:
        write_tiny(Path(place))
        return TextEncoder(place, device=device)


def available(names: Sequence[str], folder: Path | None) -> str:
    """The first of the encoders that is in the data folder."""
    for name in names:
        if name == MADE_UP:
            return name
        try:
            where = find(name, folder)
        except HyperkronError:
            continue
        if (where / "model.safetensors").is_file() or len(_packed(where)) == 2:
            return name
    raise HyperkronError(f"none of the encoders {', '.join(names)} is in the data folder; fetch one.")


def _packed(where: Path) -> list[Path]:
    return sorted(where.glob("*_int8_[01].safetensors"))


def unpack(where: Path) -> None:
    """Write ``model.safetensors`` from its int8 copy in two files, where that is all there is.

    A matrix ``name`` is kept as int8 rows ``name|q`` and one scale for each row ``name|s``; all else in float16. The
    file appears whole or not at all, also where several processes unpack at once.
    """
    target = where / "model.safetensors"
    if target.is_file() or not (files := _packed(where)):
        return
    packed: dict[str, Tensor] = {}
    for file in files:
        packed |= load_file(file)
    whole = {name: x.half() for name, x in packed.items() if "|" not in name}
    for name in {key.partition("|")[0] for key in packed if "|" in key}:
        whole[name] = (packed[f"{name}|q"].float() * packed[f"{name}|s"].float()).half()
    part = where / f"model.{os.getpid()}.part"
    save_file(whole, part, metadata={"format": "pt"})
    part.replace(target)


def write_tiny(place: Path) -> None:
    """A BERT with random weights and a tokenizer of thirty words."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
    except ImportError as error:
        raise HyperkronError(f"encoders need the package {error.name}; pip install 'hyperkron[text]'.") from error
    words = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(30))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(place)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    weights = seeded(lambda: BertModel(config, add_pooling_layer=False), 0).state_dict()
    config.save_pretrained(place)
    save_file({name: x.contiguous() for name, x in weights.items()}, place / "model.safetensors", {"format": "pt"})
