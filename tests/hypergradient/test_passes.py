"""Hypergradients whose passes are recorded are those of the ordinary way; without a GPU a stand-in writes into the same
memory."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import replaying
from hyperkron import solution
from hyperkron.batch_tensors import tensors_of
from hyperkron.curvature import GGN, KFAC
from hyperkron.curvature.kfac import factors, grams, half_inverses, inverse, kfac
from hyperkron.hypergradient import passes
from hyperkron.kernels import graphs, linalg, weight_casts
from hyperkron.kernels.execution import Execution
from hyperkron.losses import classification
from hyperkron.trees import HALF_TYPES
from replaying import PROBLEM, Batch, batch, close, network, outer, trained


class RerunRecording:
    """In place of a CUDA graph: the function is called again, and its results are written over the first ones.

    Recordings share their memory, so results and vectors of all others are spoilt.
    """

    made = 0
    all: ClassVar[list[RerunRecording]] = []

    def __init__(self, function: Callable[[], Any], *, generators: Any = (), pool: Any = None) -> None:
        type(self).made += 1
        self.all.append(self)
        held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self.function, self.point, self.pool = function, held["point"].cell_contents, None
        self.inputs: dict[str, Callable[[], Tensor]] = held["inputs"].cell_contents
        before = [(g, g.get_state()) for g in generators]
        self.outputs = function()
        for generator, state in before:
            generator.set_state(state)

    def replay(self) -> Any:
        for other in self.all:
            if other is not self:
                for x in (*_tensors(other.outputs), *(place() for place in other.inputs.values())):
                    x.detach().fill_(torch.nan if x.is_floating_point() else 0)
        with self.point:
            new = self.function()
        with torch.no_grad():
            for target, source in zip(_tensors(self.outputs), _tensors(new), strict=True):
                target.copy_(source)
        return self.outputs


def _tensors(value: Any) -> list[Tensor]:
    return [x for _, x in tensors_of("value", value)]


def _check_finite_later(self: Execution, value: Tensor, error: Callable[[str], Exception]) -> None:
    """As on a GPU: read when the step is over, when other passes have had the memory of this one."""
    self._finite.append((value.detach(), error))


@pytest.fixture(params=["cpu", replaying.GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    solution._warned.clear()
    RerunRecording.made, RerunRecording.all = 0, []
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "available", lambda device: True)
        monkeypatch.setattr(passes, "Recording", RerunRecording)
        monkeypatch.setattr(passes, "GeneratorCopies", replaying.Rewinds)
        monkeypatch.setattr(Execution, "queued", True)
        monkeypatch.setattr(Execution, "check_finite", _check_finite_later)
    else:
        real = passes.Recording

        def counted(*args: Any, **options: Any) -> Any:
            RerunRecording.made += 1
            return real(*args, **options)

        monkeypatch.setattr(passes, "Recording", counted)
    return str(request.param)


METHODS: dict[str, tuple[Callable[..., hk.Implicit], int]] = {
    "kfac": (lambda **o: hk.kfac(1e-2, **o), 3),
    "kfac, lean": (lambda **o: hk.kfac(1e-2, keep_previous=False, **o), 3),
    "kfac, every 3": (lambda **o: hk.kfac(1e-2, refresh_every=3, **o), 3),
    "kfac, reduce": (lambda **o: hk.kfac(1e-2, sharing="reduce", **o), 3),
    "kfac, exact": (lambda **o: hk.kfac(1e-2, split="exact", **o), 2),
    "kfac, average": (lambda **o: hk.kfac(1e-2, ema=0.5, **o), 2),
    "ekfac": (lambda **o: hk.ekfac(1e-2, basis_every=2, **o), 2),
    "identity": (lambda **o: hk.identity(**o), 2),
    "cg": (lambda **o: hk.cg(3, 0.1, **o), 1),
    "pcg": (lambda **o: hk.Implicit(GGN(0.1), hk.solvers.CG(4), preconditioner=KFAC(1e-2), **o), 3),
}


ALIKE = {"kfac, lean", "kfac, exact", "kfac, average"}
"""KFAC in the same two or three passes, with other inverses or an average of factors."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in METHODS]
)
def test_answers_are_those_of_the_ordinary_way(device: str, name: str) -> None:
    build, recordings = METHODS[name]
    expected = trained(build(), device)
    method = build(graph="passes")
    close(trained(method, device), expected)
    assert RerunRecording.made == recordings
    assert isinstance(method._replays, passes.RecordedPasses) and method._replays._served >= 6


def test_blocks_inverted_in_parts_are_those_of_all_together(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = METHODS["kfac, lean"][0]
    expected = trained(build(), device)
    monkeypatch.setattr(inverse, "PART_SIZE", 1)
    method, parts = build(graph="passes"), []
    real = inverse.split_blocks
    monkeypatch.setattr(kfac, "split_blocks", lambda *given: parts.append(real(*given)) or parts[-1])
    close(trained(method, device), expected)
    assert {len(part) for part in parts} == {2}
    bad = batch(3, device)
    bad[0][0] = float("nan")
    with pytest.raises(hk.NonFiniteError, match=r"inner_batch\[0\] holds 36 nan"):
        method.compute(PROBLEM, network(device), hk.SampleWeights(40).to(device), bad, batch(50, device))


@pytest.mark.parametrize(("setting", "parts"), [("", (3, 3)), ("expandable_segments:True", (2, 4))])
def test_parts_by_how_long_inverses_serve_and_by_allocator(
    setting: str, parts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    monkeypatch.setattr(inverse, "PART_SIZE", 1)
    factors = {str(i): (torch.eye(2)[None], torch.eye(2)[None]) for i in range(12)}
    for kept, count in zip((False, True), parts, strict=True):
        cut = inverse.split_blocks(factors, inverse.max_parts(kept))
        assert [len(part) for part in cut] == [12 // count] * count
        assert [name for part in cut for name in part] == list(factors)


def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Solves in half precision on small layers; for each of them whether it was in the memory of b."""
    sizes = ((factors, "MIN_SIZE", 8), (factors, "MIN_ROWS", 2), (half_inverses, "NARROWEST", 16))
    for module, name, value in sizes:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(kfac, "tf32_products", lambda device: True)
    monkeypatch.setattr(inverse, "factorize", lambda m, lean=False, overwrite=False: linalg._halved(m.clone(), 8))
    monkeypatch.setattr(grams, "_stays_half", lambda rows, dtype: rows.dtype in HALF_TYPES)
    monkeypatch.setattr(grams, "_plus_half_gram", lambda total, rows: grams.gram(rows.float()))
    used, real = list[bool](), half_inverses.solve_both_sides

    def noted(b: Any, a: Any, parts: list[Tensor], overwrite: bool = False) -> list[Tensor]:
        used.append(overwrite)
        return real(b, a, parts, overwrite)

    monkeypatch.setattr(factors, "solve_both_sides", noted)
    return used


class Summed(nn.Module):
    """Two layers on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


@pytest.mark.parametrize(
    ("stretch", "shared"),
    [
        (1, False),
        (2**28, True),
        pytest.param(1, True, marks=pytest.mark.long),
        pytest.param(2**28, False, marks=pytest.mark.long),
    ],
)
def test_v_is_solved_in_the_memory_of_b(
    device: str, stretch: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device != "cpu":
        pytest.skip("the sizes of this test are not those of a GPU")
    used = _as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(inverse, "PART_SIZE", stretch)

    def inner(model: Any, weights: Any, rows: Any) -> hk.losses.Loss:
        with torch.autocast("cpu", torch.bfloat16):
            return hk.losses.cross_entropy(
                model(rows[0]), rows[1], weight=None if weights is None else weights(rows[2])
            )

    def outer(model: Any, weights: Any, rows: Any) -> Any:
        if not shared:
            return inner(model, None, rows)
        return torch.tanh(model[2].one.weight + model[2].two.weight).mul(rows[0].sum()).sum()

    problem = hk.BilevelProblem(inner, outer, autocast=True)

    def answers(**options: Any) -> list[tuple[Tensor, dict[str, Tensor]]]:
        torch.manual_seed(0)
        first, last = nn.Linear(24, 32, bias=False), nn.Linear(32, 16)
        model = nn.Sequential(first, nn.Tanh(), Summed(), nn.Tanh(), last)
        weights, method = hk.SampleWeights(40), hk.kfac(1e-2, keep_previous=False, **options)
        found = []
        for step in range(5):
            g = torch.Generator().manual_seed(step)
            x, y = torch.randn(40, 24, generator=g), torch.randint(16, (40,), generator=g)
            both = (x, y, torch.arange(40))
            answer = method.compute(problem, model, weights, both, both)
            found.append((answer.grads["weight"].clone(), answer.solution.value))
        return found

    expected, plain = answers(), list(used)
    for (grad, v), (wanted, its) in zip(answers(graph="passes"), expected, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(v, its, rtol=2e-3, atol=1e-5)
    assert not any(plain) and any(used) is not shared


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_under_autocast_they_keep_no_casts_of_weights(
    device: str, sharing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, casts = [], Counter[str]()
    real = weight_casts._cast_again

    def seen(x: Tensor, known: set[int]) -> Any:
        cast = real(x, known)
        casts.update([str(cast and x.dtype)])
        return cast

    monkeypatch.setattr(weight_casts, "_cast_again", seen)

    def inner(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
        with torch.autocast(device, torch.bfloat16):
            return of_tokens(model, weights, b)

    problem = hk.BilevelProblem(inner, lambda m, w, b: inner(m, lambda i: None, b), autocast=True)
    for graph in (False, "passes"):
        torch.manual_seed(0)
        model, weights = Tokens().to(device), hk.DomainWeights(2).to(device)
        method, answers = hk.kfac(1e-2, keep_previous=False, sharing=sharing, graph=graph), []
        for i in range(4):
            draw = torch.Generator().manual_seed(i)
            x, y = torch.randn(8, 5, 6, generator=draw), torch.randint(3, (8, 5), generator=draw)
            given = x.to(device), y.to(device), (torch.arange(8) % 2).to(device)
            answers.append(method.compute(problem, model, weights, given, given))
        found.append([r.grads["logits"] for r in answers])
        assert all(r.stats["cross"] == "adjoint" for r in answers)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert casts["torch.bfloat16"] >= 6  # on a GPU only while passes are recorded


def test_dropout_masks_are_those_of_ordinary_steps(device: str) -> None:
    build = METHODS["kfac"][0]
    expected = trained(build(), device, dropout=0.5)
    close(trained(build(graph="passes"), device, dropout=0.5), expected)


def test_results_keep_their_values(device: str) -> None:
    found = trained(METHODS["identity"][0](graph="passes"), device)
    for name in ("grads", "solution"):
        values = [r.grads if name == "grads" else r.solution.value for r in found]
        assert len({round(float(next(iter(v.values())).norm()), 9) for v in values}) == len(found)


def test_batches_of_another_shape_take_the_ordinary_way_and_are_recorded_later(device: str) -> None:
    def size(i: int) -> int:
        return 5 if i == 3 else 8 if i < 6 else 6

    build = METHODS["kfac"][0]
    expected = trained(build(), device, steps=14, size=size)
    close(trained(build(graph="passes"), device, steps=14, size=size), expected)
    assert RerunRecording.made == 6


def test_what_is_not_finite_is_named_and_the_next_step_is_right(device: str) -> None:
    method, plain = METHODS["kfac"][0](graph="passes"), METHODS["kfac"][0]()
    model, weights = network(device), hk.SampleWeights(40).to(device)
    for one in (method, plain):
        for i in range(3):
            one.compute(PROBLEM, model, weights, batch(i, device), batch(50, device))
    bad = batch(3, device)
    bad[0][0] = float("nan")
    with pytest.raises(hk.NonFiniteError, match=r"inner_batch\[0\] holds 36 nan"):
        method.compute(PROBLEM, model, weights, bad, batch(50, device))
    assert all(x.isfinite().all() for x in method.compute(PROBLEM, model, weights, *pair(4, device)).grads.values())


def pair(i: int, device: str) -> tuple[Batch, Batch]:
    return batch(i, device), batch(50 + i, device)


class Tokens(nn.Module):
    """Layers of which two read one tensor, with a loss at every token."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        return self.head(self.one(y) * self.two(y))


def of_tokens(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(b[0]), b[1], weight=weights(b[2]))


@pytest.mark.parametrize("graph", [True, "passes"])
def test_tokens_that_are_masked_all_of_a_sudden_are_left_out(
    device: str, graph: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings.simplefilter("error", solution.HyperkronWarning)
    monkeypatch.setattr(classification, "answers_at_once", lambda x: False)  # as on a GPU
    if graph is True and device == "cpu":
        monkeypatch.setattr(replaying.replay, "Recording", replaying.Rerun)
        monkeypatch.setattr(replaying.replay, "GeneratorCopies", replaying.Rewinds)
    problem = hk.BilevelProblem(of_tokens, lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]))
    found = []
    for options in ({}, {"graph": graph}):
        torch.manual_seed(0)
        model, weights = Tokens().to(device), hk.SampleWeights(8).to(device)
        method = replaying.made(fisher="empirical", **options)
        answers = []
        for i in range(7):
            draw = torch.Generator().manual_seed(i)
            x, y = torch.randn(8, 5, 6, generator=draw), torch.randint(3, (8, 5), generator=draw)
            if i in (3, 5):
                y[:, 3:] = -100
            given = x.to(device), y.to(device), torch.arange(8).to(device)
            answers.append(method.compute(problem, model, weights, given, given).grads["weight"])
            state = method.state.curvature
            assert isinstance(state, hk.curvature.KroneckerState)
            assert state.unmasked is (i < 3)  # what is not so once is not taken for granted again
        found.append(answers)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_a_pass_that_cannot_be_recorded_is_said_once(device: str) -> None:
    def loud(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
        torch.rand(())  # on the CPU
        return outer(model, weights, b)

    method = hk.kfac(1e-2, graph="passes")
    model, weights = network(device), hk.SampleWeights(40).to(device)
    problem = hk.BilevelProblem(replaying.inner, loud)
    if device == "cuda":
        with pytest.warns(UserWarning, match="graph='passes' has no effect"):
            method.compute(problem, model, weights, *pair(0, device))
    assert method.compute(problem, model, weights, *pair(1, device)).status is hk.Status.DIRECT


def test_an_unknown_graph_is_refused() -> None:
    for graph in ("steps", 1):
        with pytest.raises(hk.HyperkronError, match=f"graph={graph!r} is unknown"):
            hk.kfac(graph=graph)  # type: ignore[arg-type]
