"""What a checkpoint knows of the program that wrote it: changes are refused by name, the same program never is."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import hyperkron as hk
from hyperkron.training import contents
from hyperkron.training.contents import Contents
from hyperkron.training.program import BYTECODE, MOVING, Program, differences

LETTERS = {"a", "b", "c", "d"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What another process, with other hashes of strings, finds."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    program = (
        "import sys\n"
        "from hyperkron.training.program import Program\n"
        "found = Program({'x': [lambda x: x in {'a', 'b', 'c', 'd'}, {'a', 'b', 'c', 'd'}]}, []).lines()\n"
        "open(sys.argv[1] + '.txt', 'w').write(str([found['x.0'], found['x.1']]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(hk.__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", program, str(folder)], env=environment, check=True)
    return folder


# --- what is seen ------------------------------------------------------------------------------------------


def lines(x: Any, *own: nn.Module) -> dict[str, str]:
    return Program({"x": x}, own).lines()


def changes(x: Any, y: Any) -> list[str]:
    return [line.split(":")[0] for line in differences("", lines(x), lines(y))]


def scaled(rate: float) -> Callable[[Tensor], Tensor]:
    return lambda x: rate * x


class Box:
    """Methods that reach each other and constants of a class."""

    factor = 2.0

    def __init__(self, size: float) -> None:
        self.size, self.label, self.me = size, "unread", self

    def __call__(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return x * self.size * self.factor

    def unused(self) -> float:
        return 1.0


def test_closures_partials_methods_and_decorated_functions_are_followed() -> None:
    assert changes(scaled(1.0), scaled(1.0)) == []
    assert changes(scaled(1.0), scaled(2.0)) == [" x.rate"]
    assert changes(functools.partial(scaled(1.0), 3), functools.partial(scaled(1.0), 4)) == [" x.args.0"]
    assert changes(Box(1.0), Box(2.0)) == [" x.size"]
    assert changes(Box(1.0).helper, Box(2.0).helper) == [" x.self.size"]
    assert changes(torch.no_grad()(scaled(1.0)), torch.no_grad()(scaled(2.0))) == [" x.func.rate"]
    assert changes(functools.lru_cache(scaled(1.0)), functools.lru_cache(scaled(2.0))) == [" x.wrapped.rate"]
    assert changes(torch.tanh, torch.relu) == [" x"]


def test_methods_count_where_they_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Program({"x": Box(1.0)}, []).lines()
    monkeypatch.setattr(Box, "unused", lambda self: 2.0)
    assert Program({"x": Box(1.0)}, []).lines() == before
    monkeypatch.setattr(Box, "helper", lambda self, x: x)
    monkeypatch.setattr(Box, "factor", 3.0)
    now = Program({"x": Box(1.0)}, []).lines()
    assert before["x.Box.helper"] != now["x.Box.helper"]
    assert before["x.Box.factor"] == "2.0" and "x.Box.factor" not in now


def test_a_method_that_an_objective_calls_is_part_of_the_model() -> None:
    class Regular(nn.Linear):
        def penalty(self) -> Tensor:
            return self.weight.square().sum()

    model = Regular(2, 1)
    found = Program({"objective": lambda m: m.penalty(), "model": model}, [model]).lines()
    assert found["model.Regular.penalty"].startswith("penalty, code ")
    assert "model.Regular.penalty" not in Program({"model": model}, [model]).lines()


def test_constants_of_modules_of_the_user_are_seen() -> None:
    settings, space = types.ModuleType("settings"), {"__name__": "mine"}
    settings.ALPHA, settings.OTHER = 0.5, 1.0  # type: ignore[attr-defined]
    exec("def f(x):\n    return settings.ALPHA * x", space | {"settings": settings}, space)
    space["settings"] = settings  # type: ignore[assignment]
    f = types.FunctionType(space["f"].__code__, space)  # type: ignore[attr-defined]
    found = lines(f)
    assert found["x.settings.ALPHA"] == "0.5" and "x.settings.OTHER" not in found


def test_recursion_and_cycles_end() -> None:
    def down(n: int) -> int:
        return 0 if n == 0 else up(n - 1)

    def up(n: int) -> int:
        return down(n - 1)

    box = Box(1.0)
    nested: Any = [box]
    for _ in range(40):
        nested = [nested, box]
    nested[0].append(nested)
    assert lines([down, box, nested])["x.0"].startswith("down, code ")


def test_nothing_depends_on_addresses_or_hashes(saved: Path) -> None:
    """A set of strings has another order in every process; the text of an object may hold its address."""
    found = lines([lambda x: x in {"a", "b", "c", "d"}, LETTERS, object(), nn.Linear(1, 1), iter([1]), Box(1.0)])
    assert " at 0x" not in str(found)
    assert Path(f"{saved}.txt").read_text() == str([found["x.0"], found["x.1"]])


# --- data --------------------------------------------------------------------------------------------------


def test_the_content_of_tensors_and_arrays_is_seen() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    digest = Contents()
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64):
        before = digest(x.to(dtype))
        changed = x.to(dtype)
        changed[2, 3] += 1
        assert digest(changed) != before == digest(x.to(dtype).T.contiguous().T)
    assert digest(numpy.arange(3.0)) == digest(torch.arange(3.0, dtype=torch.float64))
    for values in (["a", "b"], [1, "b"], ["2026-01-01", "2026-01-02"]):
        kinds = (object,) if 1 in values else (object, None) if values[0] == "a" else ("datetime64[D]",)
        for kind in kinds:
            assert digest(numpy.array(values, kind)) == digest(numpy.array(values, kind))
            assert digest(numpy.array(values, kind)) != digest(numpy.array(values[::-1], kind))


def test_a_digest_follows_what_is_written_into_a_tensor() -> None:
    x, digest = torch.zeros(3), Contents()
    before = digest(x)
    x[1] = 1
    assert digest(x) != before


@pytest.mark.parametrize("shape", [(4096, 8), (2, 16384), (32768,)])
def test_large_tensors_are_sampled_from_end_to_end(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """64 blocks that fill the room: changes of the first and the last rows, and of every 64th part, are seen."""
    monkeypatch.setattr(contents, "WHOLE", 2**14)
    x = torch.arange(32768.0).reshape(shape)
    before = Contents()(x)
    assert sum(part.numel() * 4 for part in contents._sample(x, 2**14)) <= 2**14
    for change in (x.flip(0), x + 1, torch.cat([x[:-1], x[-1:] + 1]), torch.cat([x[:1] + 1, x[1:]])):
        assert Contents()(change) != before
    assert Contents()(x.clone()) == before


def test_loaders_and_datasets_are_described_by_what_they_hold() -> None:
    def loader(shift: float, rows: list[int]) -> DataLoader[Any]:
        data = TensorDataset(torch.arange(6.0) + shift, torch.arange(6))
        return DataLoader(Subset(data, rows), batch_size=2)

    assert changes(loader(0, [0, 1, 2]), loader(0, [0, 1, 2])) == []
    assert changes(loader(0, [0, 1, 2]), loader(1, [0, 1, 2])) == [" x.dataset.dataset.tensors.0"]
    assert changes(loader(0, [0, 1, 2]), loader(0, [0, 1, 3])) == [" x.dataset.indices.2"]


def test_frames_and_hub_datasets_are_seen() -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    for make in (pandas.DataFrame, datasets.Dataset.from_dict):
        first, same, other = (make({"text": ["a", "b"], "label": [0, last]}) for last in (1, 1, 2))
        assert changes(first, same) == [] != changes(first, other)


# --- what a run changes itself -----------------------------------------------------------------------------


def test_values_that_a_run_changes_are_not_compared() -> None:
    count = {"calls": 0, "rate": 0.1}
    program = Program({"x": count}, [])
    count["calls"] = 5
    count["new"] = 1
    found = program.lines()
    assert found["x.calls"] == found["x.new"] == MOVING and found["x.rate"] == "0.1"
    now = {**found, "x.calls": "9", "x.new.inside": "3", "x.rate": "0.2"}
    assert differences("", found, now) == [" x.rate: 0.1 in the checkpoint, 0.2 in this run"]


def test_code_is_not_compared_between_interpreters_but_constants_are() -> None:
    first, second = lines(scaled(1.0)), lines(scaled(2.0))
    second |= {BYTECODE: "other", "x": "<lambda>, code 0123456789abcdef"}
    assert differences("", first, second) == [" x.rate: 1.0 in the checkpoint, 2.0 in this run"]


def test_values_of_the_runs_own_parameters_are_not_part_of_it() -> None:
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    assert lines([first, first.weight], first) == lines([second, second.weight], second)
    assert lines(first) != lines(second)  # as a teacher they are data


# --- objects that are hard to look at ----------------------------------------------------------------------


def test_compiled_models_and_functions_are_those_they_were_made_of() -> None:
    def compiled(rate: float, dropout: float) -> list[Any]:
        model = torch.compile(nn.Sequential(nn.Linear(1, 1), nn.Dropout(dropout)), backend="eager")
        for p in model.parameters():
            nn.init.ones_(p)
        return [model, torch.compile(scaled(rate), backend="eager")]

    assert changes(compiled(1.0, 0.1), compiled(1.0, 0.1)) == []
    assert changes(compiled(1.0, 0.1), compiled(2.0, 0.2)) == [" x.0._orig_mod.1", " x.1.compiled.rate"]


def test_an_object_that_refuses_to_be_looked_at_does_not_stop_a_run() -> None:
    class Shy:
        def __getattribute__(self, name: str) -> Any:
            if name in ("__class__", "__call__"):
                return object.__getattribute__(self, name)
            raise RuntimeError("do not look")

    assert "not described (RuntimeError)" in lines([Shy()])["x.0"]


def test_a_subclass_of_a_library_is_described_whole() -> None:
    """What its base reads is not named by any code that is described."""

    class Named(hk.algorithms.Examples):
        pass

    first, second = (Named(torch.zeros(3) + i, batch_size=2) for i in (0, 1))
    assert changes(first, second) == [" x.tensors.0"]
