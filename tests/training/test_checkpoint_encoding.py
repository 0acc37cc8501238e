"""What a checkpoint makes of a state: any state comes back bit for bit, and what is not a state is refused."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.training import checkpoint, files
from hyperkron.training.encoding import DTYPES, join, split


def same(x: Any, y: Any) -> bool:
    """Equal in type, bits and, for tensors, memory layout."""
    if type(x) is not type(y):
        return False
    if isinstance(x, Tensor):
        alike = x.dtype == y.dtype and x.shape == y.shape and (not x.numel() or x.stride() == y.stride())
        return alike and _bits(x) == _bits(y)
    if isinstance(x, float):
        return struct.pack(">d", x) == struct.pack(">d", y)
    if isinstance(x, dict):
        return list(x) == list(y) and [type(k) for k in x] == [type(k) for k in y] and all(same(x[k], y[k]) for k in x)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(same(a, b) for a, b in zip(x, y, strict=True))
    return bool(x == y)


def _bits(x: Tensor) -> list[int]:
    return x.contiguous().view(-1).view(torch.uint8).tolist()


def round_trip(state: Any) -> Any:
    """Through JSON text and tensors, without files."""
    tree, tensors = split(state)
    return join(json.loads(json.dumps(tree, allow_nan=False)), lambda name: tensors[name].clone())


@st.composite
def some_tensor(draw: st.DrawFn) -> Tensor:
    """Any dtype with any bits, any small shape, any order of the dimensions in memory, perhaps a view."""
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
    x = flat.view(dtype).reshape(shape) if count or shape else torch.zeros((), dtype=dtype)
    x = x.permute(draw(st.permutations(range(x.dim()))))
    return x.expand(2, *x.shape)[1] if draw(st.booleans()) else x


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack(">d", data)[0]),  # every NaN there is
    st.text(st.characters(), max_size=10),  # lone surrogates included
    st.text(max_size=3).map(lambda text: (text or "é") * 3000),
    some_tensor(),
)
KEYS = st.one_of(st.text(max_size=4), st.sampled_from(["$tensor", "$tuple", "__metadata__", "a.b", ""]))
STATES = st.recursive(
    LEAVES,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(KEYS, inside, max_size=4),
        st.dictionaries(st.one_of(KEYS, st.integers()), inside, max_size=3),
        st.dictionaries(KEYS, inside, max_size=3).map(OrderedDict),
        st.dictionaries(st.integers(0, 9), st.integers(0, 9), max_size=3).map(Counter),
    ),
    max_leaves=8,
)


@given(STATES)
def test_any_state_comes_back_bit_for_bit(state: Any) -> None:
    assert same(round_trip(state), state)


@given(st.dictionaries(KEYS, STATES, max_size=3))
def test_any_state_comes_back_from_the_disk(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    path = checkpoint.write(tmp_path_factory.mktemp("state"), 7, state)
    assert same(checkpoint.read(path).state, state)


def test_one_tensor_in_two_places_is_stored_once_and_stays_one() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    tree, tensors = split({"a": x, "b": x.view(3, 4), "row": x[1], "column": x[:, 1], "wide": x[:1].expand(3, 4)})
    assert len(tensors) == 4
    found = join(tree, lambda name: tensors[name].clone())
    found["a"][0, 0] = 100.0
    assert found["b"][0, 0] == 100.0
    assert torch.equal(found["column"], x[:, 1]) and torch.equal(found["wide"], x[:1].expand(3, 4))


def test_parameters_and_numpy_numbers_are_stored_as_what_they_are() -> None:
    numpy = pytest.importorskip("numpy")
    found = round_trip({"p": nn.Parameter(torch.ones(2)), "x": numpy.float64(0.1)})
    assert same(found, {"p": torch.ones(2), "x": 0.1})


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex64), "torch.complex64"),
        (torch.ones(2, device="meta"), "meta device"),
        (hk.Status.DIRECT, "Status"),
        (lambda: None, "function"),
        ({(1, 2): 3}, "tuple"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_types_are_refused_by_place_and_name(bad: Any, named: str) -> None:
    with pytest.raises(hk.training.CheckpointError, match=r"state\['inner'\]\['1'\]") as caught:
        split({"inner": [0, bad]})
    assert named in str(caught.value)


def test_a_state_that_holds_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(hk.training.CheckpointError, match="deeper"):
        split(state)


@pytest.mark.parametrize(
    "tree",
    [
        {"$unknown": 1},
        {"$tensor": "absent"},
        {"$tensor": "x", "shape": [2, 3], "stride": [100, 1]},
        {"$tensor": "x", "shape": [-6, -1], "stride": [1, 1]},
        {"$tensor": "x", "shape": [10**12], "stride": [0]},
        {"$float": "zz"},
        {"$float": "00"},
        {"$int": "one"},
        {"$tuple": 3},
        {"$dict": [[[1], 2]]},
        {"$text": "x"},
        {"$tensor": "x", "device": "nowhere"},
    ],
)
def test_malformed_trees_are_refused(tree: Any) -> None:
    tensors = {"x": torch.full((6,), 255, dtype=torch.uint8)}
    with pytest.raises(hk.training.CheckpointError):
        join({"a": tree}, tensors.__getitem__)


def test_tensor_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 4),
        "random": torch.get_rng_state(),
        "wide": torch.randn(7, dtype=torch.float64),
        "ü": torch.arange(4),
    }
    record = files.write_tensors(tmp_path / "a.safetensors", tensors)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys() and all(same(found[name], x) for name, x in tensors.items())
    assert record["size"] == (tmp_path / "a.safetensors").stat().st_size
