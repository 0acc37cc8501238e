"""The closed forms of ``benchmarks/cost_model.py`` against operations counted by torch, and a small scaling study.

``FlopCounterMode`` knows products (mm, addmm, bmm) but neither Cholesky, triangular solves, nor attention as the CPU
fuses it. So linear layers and Gram matrices are counted in whole hypergradients, attention in the unfused kernel, and
the operations of a factorisation by halves by counting its products and its leaves apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cost_model as model
import pytest
import scaling
import torch
import workloads
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, bmm_flop

import hyperkron as hk
from hyperkron.evaluation.point import Point
from hyperkron.kernels import linalg

PRIMAL = model.Encoder(width=32, depth=2, batch=4, tokens=33, classes=5, vocab=50)
WIDE = model.Encoder(width=128, depth=1, batch=5, tokens=60, classes=5, vocab=50)  # rows 300: dual where d is 4w
FEW = model.Encoder(width=64, depth=2, batch=3, tokens=7, classes=5, vocab=50)  # everything but the head is dual
RATES = {64: 1e9, 256: 4e9}
MACHINE = model.Machine(RATES, RATES, RATES, 1e9, 1e-6)


def counted(function: Callable[[], Any]) -> tuple[float, float]:
    """Operations of plain products, and of batched ones."""
    in_place = {torch.ops.aten.baddbmm_: lambda _, a, b, **options: bmm_flop(a, b)}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        function()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    batched = sum(n for op, n in counts.items() if "bmm" in op)
    return sum(counts.values()) - batched, batched


def linear(works: list[model.Work], e: model.Encoder) -> float:
    """Operations of all works, those of attention left out."""
    return model.flops(w for w in works if w not in [model.attention(e, n) for n in (2, 5)])


def run(work: scaling.Workload, method: hk.hypergradient.Hypergradient) -> hk.HypergradientResult:
    """One hypergradient."""
    return method.backward(work.problem, work.model, work.hyper, work.batches[0], work.outer_batch)


@pytest.mark.parametrize(("rows", "d"), [(50, 64), (300, 128), (64, 256)])
def test_gram(rows: int, d: int) -> None:
    side = model.Side(model.Layer(rows, d, 3), d, d, 3, 1, dual=False)
    plain, _ = counted(lambda: linalg.gram(torch.randn(1, rows, d)))
    assert plain == model.flops(model.gram(side, "cpu"))
    assert plain == (5 / 8 if d >= 128 else 1) * 2 * rows * d**2
    assert model.flops(model.gram(side, "cuda")) == 2 * rows * d**2


@pytest.mark.parametrize("e", [PRIMAL, WIDE])
def test_forward_and_backward(e: model.Encoder) -> None:
    work = scaling.make(e, "cpu")
    x, y, _ = work.batches[0]
    with sdpa_kernel(SDPBackend.MATH):
        loss: list[torch.Tensor] = []
        plain, batched = counted(lambda: loss.append(torch.nn.functional.cross_entropy(work.model(x), y)))
        assert plain + batched == model.flops(model.forward(e))
        assert batched == model.attention(e, 2).flops
        plain, batched = counted(lambda: loss[0].backward())
    assert plain == linear(model.backward(e), e)
    assert batched == model.attention(e, 4).flops  # the fused kernel computes QKᵀ once more: five


@pytest.mark.parametrize("e", [PRIMAL, WIDE, FEW])
def test_stages_of_a_kfac_hypergradient(e: model.Encoder) -> None:
    work, stages = scaling.make(e, "cpu"), model.stages(e, "cpu")
    curvature = hk.curvature.KFAC(damping=1e-2)
    with Point(work.problem, work.model, work.hyper, work.batches[0], work.outer_batch) as point:
        made: list[Any] = []
        plain, batched = counted(lambda: made.append(curvature.operator(point, curvature.init())))
        assert plain == linear([*stages["passes of the factors"], *stages["Gram matrices"]], e)
        assert batched == 0
        plain, _ = counted(lambda: made.append(scaling.outer_gradients(point)[1]))
        assert plain == linear(stages["outer gradient"], e)
        plain, batched = counted(lambda: made.append(made[0].solve(made[1])))
        assert plain + batched == model.flops(w for w in stages["solves"] if w.kind == "matmul")
        plain, _ = counted(lambda: scaling.difference(point, made[2], 1e-2))
        assert plain == linear(stages["cross term"], e)


def test_conjugate_gradients() -> None:
    work = scaling.make(PRIMAL, "cpu")
    method = hk.cg(3, curvature=hk.curvature.GGN(1e-1), cross="difference")
    results: list[Any] = []
    run(work, method)  # the first call also looks for autocast
    plain, _ = counted(lambda: results.append(run(work, method)))
    assert results[0].stats["products"] == 3
    expected = linear(model.conjugate_gradients(PRIMAL), PRIMAL)
    assert expected == 20 * linear(model.forward(PRIMAL), PRIMAL)
    assert plain == expected


def test_factorisation_by_halves() -> None:
    n, leaf = 512, 16
    m = torch.eye(n)[None] + 1e-3
    plain, batched = counted(lambda: linalg._halved(m.clone(), leaf))
    assert plain == 0
    assert batched == pytest.approx(model.factorisation_flops(n, "cuda"), rel=2 * leaf / n)
    assert model.factorisation_flops(n, "cpu") == n**3 / 3
    made, _ = linalg._halved(m.clone(), leaf)
    _, batched = counted(lambda: made.solve(torch.ones(1, n, 10)))
    side = model.Side(model.Layer(1000, n, 10), n, n, 10, 1, dual=False)
    assert batched == pytest.approx(model.flops(model.solve(side)), rel=2 * leaf / n)


@pytest.mark.parametrize("e", [PRIMAL, WIDE, FEW])
def test_strategies_and_parameters_are_those_of_the_library(e: model.Encoder) -> None:
    work = scaling.make(e, "cpu")
    found = run(work, hk.kfac(1e-2, cross="difference"))
    assert found.stats["curvature_strategy"] == e.strategies
    assert sum(p.numel() for p in work.model.parameters()) == e.parameters
    assert len(list(work.model.parameters())) == e.tensors


def test_activations_are_what_autograd_keeps() -> None:
    work = scaling.make(WIDE, "cpu")
    own = {p.untyped_storage().data_ptr() for p in work.model.parameters()}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = work.model(work.batches[0][0]).sum()
    assert loss.requires_grad
    assert sum(kept.values()) == pytest.approx(model.activations(WIDE), rel=0.02)


class Calls(TorchDispatchMode):
    """Counts operations that are not views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("e", [PRIMAL, WIDE, FEW])
def test_calls_are_about_what_the_dispatcher_counts(e: model.Encoder) -> None:
    work = scaling.make(e, "cpu")
    methods = [hk.kfac(1e-1, cross="difference"), hk.cg(3, curvature=hk.curvature.GGN(1e-1), cross="difference")]
    kfac, cg = (lambda m=m: run(work, m) for m in methods)
    stages = model.stages(e, "cpu")
    params = list(work.model.parameters())

    def outer() -> None:
        torch.autograd.grad(workloads.outer(work.model, work.hyper, work.batches[0]).value, params)

    for function, works in (
        (outer, [*model.forward(e), *model.backward(e)]),
        (lambda: work.inner_step(0), model.inner_step(e, "cpu")),
        (kfac, [w for stage in stages.values() for w in stage]),
        (cg, model.conjugate_gradients(e)),
    ):
        function()
        with Calls() as calls:
            function()
        assert sum(w.calls for w in works) == pytest.approx(calls.count, rel=0.15)


@pytest.mark.parametrize("e", [PRIMAL, WIDE, FEW, model.Encoder(width=64, depth=3, batch=16, tokens=32)])
def test_memory_is_what_storages_tell(e: model.Encoder) -> None:
    work = scaling.make(e, "cpu")
    method = hk.kfac(1e-2, cross="difference")
    run(work, method)
    found = scaling.peak(lambda: run(work, method), "cpu", work)
    assert max(model.kfac_memory(e, "cpu").values()) == pytest.approx(found, rel=0.15)


def test_seconds_take_the_slower_of_computing_and_moving() -> None:
    assert MACHINE.rate("matmul", 128) == pytest.approx(2e9)
    assert MACHINE.rate("matmul", 1) == 1e9
    assert MACHINE.rate("matmul", 9999) == 4e9
    assert MACHINE.seconds([model.Work("matmul", 4e9, 1.0, 256, 0)]) == pytest.approx(1.0)
    assert MACHINE.seconds([model.Work("matmul", 4e9, 3e9, 256, 0)]) == pytest.approx(3.0)
    assert MACHINE.seconds([model.passes(0, 10)]) == pytest.approx(1e-5)


def test_the_ratio_depends_on_width_over_rows() -> None:
    """KFAC/F = 7 + 10/3 + 6.9 w/R on a GPU and 7 + 25/12 + 5.9 w/R on a CPU, but for head, biases and attention."""
    e = model.Encoder(width=1024, depth=48, batch=1, tokens=3072)
    f = linear(model.forward(e), e)
    for device, constant, slope in (("cuda", 10 / 3, 69 / 24 + 4), ("cpu", 25 / 12, 46 / 24 + 4)):
        found = sum(linear(works, e) for works in model.stages(e, device).values()) / f
        assert found == pytest.approx(7 + constant + slope / 3, rel=5e-3)


def test_dual_form_wins_below_half_the_dimension_by_operations() -> None:
    assert model.crossover(512, 512, "cpu") == pytest.approx(0.51, abs=0.02)
    assert model.crossover(512, 128, "cpu") > model.crossover(512, 512, "cpu") > model.crossover(512, 2048, "cpu")


def test_primal_and_dual_form_agree_and_cross_once() -> None:
    torch.manual_seed(0)
    rows, v = torch.randn(1, 20, 30, dtype=torch.float64), torch.randn(1, 30, 4, dtype=torch.float64)
    torch.testing.assert_close(scaling.primal(rows, v), scaling.dual(rows, v))
    assert scaling.crossing([(0.25, -1.0), (0.5, -0.5), (1.0, 0.5)]) == pytest.approx(0.75)
    assert scaling.crossing([(0.25, 0.1), (0.5, 0.5)]) is None


TINY = scaling.Grid(
    model.Encoder(width=16, depth=1, batch=3, tokens=4, vocab=20),
    {"width": (16, 32), "depth": (1,)},
    (8, 16),
    (8,),
    1,
    0.0,
)


@pytest.mark.long
def test_a_study_is_written_limited_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "SMALL", TINY)
    out = tmp_path / "scaling.json"
    scaling.main(["--small", "--limit", "0", "--axes", "width", "--out", str(out)])
    first = json.loads(out.read_text("utf-8"))
    assert all("are left" in row["skipped"] for row in first["axes"]["width"])
    assert "skipped" in capsys.readouterr().out
    scaling.main(["--small", "--out", str(out)])
    second = json.loads(out.read_text("utf-8"))
    assert [row["encoder"]["width"] for row in second["axes"]["width"]] == [16, 32]
    for row in (row for rows in second["axes"].values() for row in rows):
        assert row["measured"]["strategies"] == model.Encoder(**row["encoder"]).strategies
        assert row["measured"]["kfac_s"] > 0 < row["predicted"]["kfac_s"]
        assert row["measured"]["parts_s"].keys() == row["predicted"]["parts_s"].keys()
    assert len(second["strategy"]) == 3
    monkeypatch.setattr(scaling, "measure", lambda *_, **__: pytest.fail("measured again"))
    scaling.main(["--small", "--resume", "--out", str(out)])
    assert json.loads(out.read_text("utf-8"))["axes"] == second["axes"]


def test_sizes_that_do_not_fit_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "available", lambda device: 1e6)
    row = scaling.one_size(WIDE, MACHINE, 1e9, 1)
    assert "GiB are free" in row["skipped"] and "measured" not in row
