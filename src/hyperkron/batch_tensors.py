"""The tensors of a batch of any kind: dictionaries, tuples, lists and dataclasses, nested as they are."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from numbers import Number
from typing import Any

from torch import Tensor


def tensors_of(name: str, batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, by the expression that reaches them."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, x in batch.items():
            yield from tensors_of(f"{name}[{key!r}]", x)
    elif isinstance(batch, (list, tuple)):
        for i, x in enumerate(batch):
            yield from tensors_of(f"{name}[{i}]", x)
    else:
        for key, x in _fields(batch).items():
            yield from tensors_of(f"{name}.{key}", x)


def map_tensors(function: Callable[[Tensor], Any], batch: Any, texts: Callable[[Any], Any] = lambda x: x) -> Any:
    """A batch of the same structure and types, such as a tokenizer's output, of what ``function`` makes of its tensors
    and ``texts`` of its lists and tuples of strings.

    Example:
        >>> import torch
        >>> map_tensors(lambda x: x[:1], {"x": torch.arange(3), "name": "train"})
        {'x': tensor([0]), 'name': 'train'}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        made = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
        made.update({key: map_tensors(function, x, texts) for key, x in batch.items()})
        return made
    if isinstance(batch, (list, tuple)):
        if _holds_texts(batch):
            return texts(batch)
        parts = [map_tensors(function, x, texts) for x in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    fields = _fields(batch)
    made = copy.copy(batch) if fields else batch
    for key, x in fields.items():
        object.__setattr__(made, key, map_tensors(function, x, texts))  # also of a frozen one
    return made


def cut(batch: Any, count: int, part: slice) -> Any:
    """Some of the ``count`` examples of a batch: these rows of its tensors and of lists with a text for each example,
    which is a string or a list of them.

    Example:
        >>> import torch
        >>> cut((torch.arange(3), ["a", "b", "c"], "train"), 3, slice(1, 3))
        (tensor([1, 2]), ['b', 'c'], 'train')
    """

    def texts(x: Any) -> Any:
        if isinstance(x, str):
            return x
        return x[part] if len(x) == count else type(x)(map(texts, x))

    return map_tensors(lambda x: x[part] if x.dim() > 0 else x, batch, texts)


def shapes_of(batch: Any) -> Any:
    """What two batches have in common that differ in the values of their tensors alone; to be compared by ``==``.

    An object of which it is not known what it holds is like no other, itself included: it may have changed.
    """
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, Mapping):
        return type(batch), [(key, shapes_of(x)) for key, x in batch.items()]
    if isinstance(batch, (list, tuple)):
        return type(batch), [shapes_of(x) for x in batch]
    if fields := _fields(batch):
        return type(batch), [(key, shapes_of(x)) for key, x in fields.items()]
    return batch if batch is None or isinstance(batch, (Number, str, bytes)) else object()


def _holds_texts(batch: Any) -> bool:
    """Whether it is a list or tuple of strings, or of such lists."""
    plain = isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields")
    return plain and all(isinstance(x, str) or _holds_texts(x) for x in batch)


def _fields(batch: Any) -> dict[str, Any]:
    """Those of a dataclass."""
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        return {}
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
