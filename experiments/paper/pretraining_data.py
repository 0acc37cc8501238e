"""The four tasks of continued pretraining as padded tokens, and the two streams of batches that training reads.

A task has labelled rows (``train``, ``dev``, ``test``) and an auxiliary corpus for masked-language modelling: its own
training texts and, where the folder has them, sentences of the domain. In the files some texts of ``test`` and ``dev``
are also in ``train`` (HyperPartisan: 51 of 65 test rows, with the same label). They are taken out of training, and
those of ``test`` out of ``dev``, unless ``leaky`` asks for the files as they are.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.paper.datasets import find
from experiments.paper.texts import MADE_UP
from hyperkron.solution import HyperkronError

PARTS = ("train", "dev", "test")
MASKED = 0.15
"""The share of tokens that masked-language modelling predicts (Devlin et al., 2019)."""
IGNORED = -100
"""The target of a position that does not count."""

Row = tuple[str, str]
"""A text and its label."""


@dataclass(frozen=True)
class Texts:
    """Rows of every part, sentences of the domain, and the names of the classes."""

    parts: dict[str, list[Row]]
    domain: list[str]
    classes: list[str]


def read_task(name: str, folder: Path | None, *, leaky: bool = False) -> Texts:
    """A task from ``tapt/NAME`` in the data folder, or made-up texts.

    Args:
        name: ``chemprot``, ``citation_intent``, ``sciie``, ``hyperpartisan``, or :data:`MADE_UP`.
        folder: of all data.
        leaky: keep training texts that are also in ``dev`` or ``test``.
    """
    if name == MADE_UP:
        return _made_up()
    where = find(f"tapt/{name}", folder)
    parts = {part: _rows(where / f"{part}.jsonl.gz") for part in PARTS}
    if not leaky:
        test = {text for text, _ in parts["test"]}
        parts["dev"] = [row for row in parts["dev"] if row[0] not in test]
        seen = test | {text for text, _ in parts["dev"]}
        parts["train"] = [row for row in parts["train"] if row[0] not in seen]
    extra = where / "domain_1x.txt.gz"
    domain = gzip.decompress(extra.read_bytes()).decode("utf-8").splitlines() if extra.is_file() else []
    classes = sorted({label for _, label in parts["train"]})
    unknown = {label for part in PARTS for _, label in parts[part]} - {*classes}
    if unknown:
        raise HyperkronError(f"{str(where)!r} has labels that no training row has: {sorted(unknown)}; check the files.")
    return Texts(parts, [line.strip() for line in domain if len(line.split()) >= 5], classes)


def _rows(path: Path) -> list[Row]:
    if not path.is_file():
        raise HyperkronError(f"the file {str(path)!r} is missing; copy the folder tapt/ of the shared data to data/.")
    lines = gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()
    return [(row["text"], str(row["label"])) for row in map(json.loads, lines)]


def _made_up(classes: int = 3) -> Texts:
    """Ten words a text, half of them of its class."""
    generator = torch.Generator().manual_seed(0)

    def part(count: int) -> list[Row]:
        y = torch.randint(classes, (count,), generator=generator)
        own = 10 * y[:, None] + torch.randint(10, (count, 5), generator=generator)
        words = torch.cat([own, torch.randint(10 * classes, (count, 5), generator=generator)], 1)
        rows = zip(words.tolist(), y.tolist(), strict=True)
        return [(" ".join(f"w{i}" for i in row), f"class {label}") for row, label in rows]

    parts = {"train": part(90), "dev": part(30), "test": part(40)}
    return Texts(parts, [text for text, _ in part(40)], [f"class {i}" for i in range(classes)])


@dataclass(frozen=True)
class Tokens:
    """N texts as tokens, padded to one length.

    Attributes:
        ids: (N, L).
        mask: (N, L), true at real tokens.
        special: (N, L), true where nothing may be masked: padding and the tokenizer's own tokens.
    """

    ids: Tensor
    mask: Tensor
    special: Tensor

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.ids.device

    def __len__(self) -> int:
        return len(self.ids)


def tokenize(tokenizer: Any, texts: Sequence[str], length: int, device: torch.device) -> Tokens:
    """Texts cut after ``length`` tokens and padded to it, so that every batch has one shape."""
    options = {"truncation": True, "max_length": length, "padding": "max_length", "return_tensors": "pt"}
    found = tokenizer(list(texts), **options)
    ids, mask = found["input_ids"], found["attention_mask"].bool()
    special = torch.isin(ids, torch.tensor([*tokenizer.all_special_ids])) | ~mask
    return Tokens(ids.to(device), mask.to(device), special.to(device))


@dataclass(frozen=True)
class Split:
    """What a run sees: rows that train θ, held-out training rows of J_out, dev, test, and the auxiliary corpus."""

    train: tuple[Tokens, Tensor]
    held_out: tuple[Tokens, Tensor]
    dev: tuple[Tokens, Tensor]
    test: tuple[Tokens, Tensor]
    auxiliary: Tokens
    classes: int


def split(texts: Texts, tokenizer: Any, length: int, seed: int, device: torch.device, share: float = 0.1) -> Split:
    """Hold out a ``share`` of the training rows (at least 16) for J_out.

    Args:
        texts: of a task.
        tokenizer: of the encoder.
        length: tokens of a row.
        seed: of the held-out rows.
        device: where all of it is kept.
        share: of the training rows.
    """
    number = {label: i for i, label in enumerate(texts.classes)}

    def part(rows: Sequence[Row]) -> tuple[Tokens, Tensor]:
        tokens = tokenize(tokenizer, [text for text, _ in rows], length, device)
        return tokens, torch.tensor([number[label] for _, label in rows], device=device)

    rows = texts.parts["train"]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    count = max(16, round(share * len(rows)))
    held, kept = ([rows[i] for i in of] for of in (order[:count], order[count:]))
    corpus = tokenize(tokenizer, [*(text for text, _ in kept), *texts.domain], length, device)
    return Split(part(kept), part(held), part(texts.parts["dev"]), part(texts.parts["test"]), corpus, len(number))


class Shuffled:
    """Row numbers in batches of one size, each epoch in a new order; what is left over joins the next epoch."""

    def __init__(self, count: int, size: int, seed: int, device: torch.device) -> None:
        self.count, self.size, self.device = count, min(size, count), device
        self.generator = torch.Generator().manual_seed(seed)
        self.left = torch.empty(0, dtype=torch.long, device=device)

    def __call__(self) -> Tensor:
        """The next rows."""
        if len(self.left) < self.size:
            self.left = torch.cat([self.left, torch.randperm(self.count, generator=self.generator).to(self.device)])
        chosen, self.left = self.left[: self.size], self.left[self.size :]
        return chosen


class Labelled:
    """Batches (ids, mask, labels) of labelled rows."""

    def __init__(self, part: tuple[Tokens, Tensor], size: int, seed: int) -> None:
        self.tokens, self.labels = part
        self.rows = Shuffled(len(self.labels), size, seed, self.tokens.device)

    def __call__(self) -> tuple[Tensor, ...]:
        """The next batch."""
        rows = self.rows()
        return self.tokens.ids[rows], self.tokens.mask[rows], self.labels[rows]


class Masked:
    """Batches (ids, mask, positions, targets) of masked-language modelling, masked again whenever a text is drawn.

    Of a text's ordinary tokens :data:`MASKED` are predicted, at least one: eight of ten become the mask token, one
    another token, one stays. ``positions`` and ``targets`` are (N, M) with M for the longest text; targets that do not
    count are :data:`IGNORED`. Nothing is read from the device.
    """

    def __init__(self, tokens: Tokens, tokenizer: Any, size: int, seed: int) -> None:
        self.tokens, self.rows = tokens, Shuffled(len(tokens), size, seed, tokens.device)
        mark = tokenizer.mask_token_id
        self.mark = int(tokenizer.unk_token_id if mark is None else mark)
        self.vocabulary = len(tokenizer)
        self.most = max(1, round(MASKED * tokens.ids.shape[1]))
        self.generator = torch.Generator(tokens.device).manual_seed(seed)

    def __call__(self) -> tuple[Tensor, ...]:
        """The next batch."""
        rows, device = self.rows(), self.tokens.device
        ids, mask, special = self.tokens.ids[rows], self.tokens.mask[rows], self.tokens.special[rows]
        order = torch.rand(ids.shape, generator=self.generator, device=device).masked_fill(special, -1.0)
        drawn, positions = order.topk(self.most, dim=1)
        wanted = (MASKED * (~special).sum(1)).round().clamp(min=1)
        counts = (torch.arange(self.most, device=device) < wanted[:, None]) & (drawn >= 0)
        original = ids.gather(1, positions)
        targets = original.masked_fill(~counts, IGNORED)
        coin = torch.rand(positions.shape, generator=self.generator, device=device)
        other = torch.randint(self.vocabulary, positions.shape, generator=self.generator, device=device)
        changed = torch.where(coin < 0.8, self.mark, torch.where(coin < 0.9, other, original))
        return ids.scatter(1, positions, torch.where(counts, changed, original)), mask, positions, targets


class Joined:
    """Batches of both streams, labelled rows first: (ids, mask, labels, positions, targets)."""

    def __init__(self, labelled: Labelled, masked: Masked) -> None:
        self.labelled, self.masked = labelled, masked

    def __call__(self) -> tuple[Tensor, ...]:
        """The next batch."""
        ids, mask, labels = self.labelled()
        more_ids, more_mask, positions, targets = self.masked()
        return torch.cat([ids, more_ids]), torch.cat([mask, more_mask]), labels, positions, targets
