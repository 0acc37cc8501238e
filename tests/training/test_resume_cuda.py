"""Resuming on a GPU: the same bits are restored where they were; kernels need not repeat themselves to the bit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import hyperkron as hk
from resuming import CLASSES, EXAMPLES, FEATURES, Network, digest, inner, outer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

METHODS = {
    "KFAC": lambda: hk.AID(hk.kfac(1e-2, refresh_every=3, ema=0.5), inner_steps=2),
    "EKFAC": lambda: hk.AID(hk.ekfac(1e-2, refresh_every=2), inner_steps=2),
    "CG": lambda: hk.AID(hk.cg(3, curvature=hk.curvature.GGN(1e-2), warm_start=True), inner_steps=2),
    "SAMA": lambda: hk.algorithms.SAMA(2),
    "SABA": lambda: hk.algorithms.SABA(),
}


def start(method: str, steps: int = 0, scaler: bool = False) -> hk.Run:
    torch.manual_seed(3)
    model, weights = Network().cuda(), hk.SampleWeights(EXAMPLES).cuda()
    generator = torch.Generator().manual_seed(1)
    x, y = (
        torch.randn(EXAMPLES, FEATURES, generator=generator),
        torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    )
    tensors = x.cuda(), y.cuda(), torch.arange(EXAMPLES, device="cuda")
    data = [hk.algorithms.Examples(*tensors, batch_size=8, seed=seed) for seed in (1, 2)]
    options: dict[str, Any] = {}
    if scaler:
        adam = torch.optim.AdamW(model.parameters(), lr=0.02)
        grad_scaler = torch.amp.GradScaler("cuda", growth_interval=3)
        options["inner_optimizer"] = hk.algorithms.Updates(adam, clip=1.0, autocast=torch.float16, scaler=grad_scaler)
    problem = hk.BilevelProblem(inner, outer)
    return hk.fit(problem, model, weights, METHODS[method](), *data, steps=steps, projection=hk.Box(), **options)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_continues_from_the_same_bits(method: str, tmp_path: Path) -> None:
    run = start(method, 3)
    run.save(tmp_path)
    saved = digest(run.state_dict(), tmp_path)
    whole = run.advance(3)
    resumed = start(method)
    torch.cuda.manual_seed_all(99)
    resumed.resume(tmp_path)
    assert digest(resumed.state_dict(), tmp_path) == saved
    assert all(p.is_cuda for p in resumed.state.params.values())
    resumed.advance(3)
    torch.testing.assert_close(resumed.state.hypers, whole.state.hypers, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(resumed.state.params, whole.state.params, rtol=1e-4, atol=1e-5)


def test_a_scaler_is_resumed(tmp_path: Path) -> None:
    run = start("KFAC", 3, scaler=True)
    run.save(tmp_path)
    resumed = start("KFAC", scaler=True).resume(tmp_path)
    assert digest(resumed.state_dict(), tmp_path) == digest(run.state_dict(), tmp_path)
    assert resumed.state.inner.scaler.get_scale() == run.state.inner.scaler.get_scale()


def test_real_memory_runs_out_and_the_step_is_repeated_in_pieces() -> None:
    """A batch whose activations do not fit into what torch may use; they are nearly all that a step needs."""

    def make(callbacks: Any) -> hk.Run:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 2)).cuda().double()
        x, y = torch.randn(2**17, 64, dtype=torch.float64).cuda(), torch.zeros(2**17, dtype=torch.long).cuda()
        problem = hk.BilevelProblem(
            lambda m, h, b: h().exp() * hk.losses.cross_entropy(m(b[0]), b[1]),
            lambda m, h, b: hk.losses.cross_entropy(m(b[0]), b[1]),
        )
        hyper = hk.as_hyper(torch.zeros((), dtype=torch.float64)).cuda()
        method = hk.AID(hk.kfac(1e-2, cross="reverse"), inner_steps=1)
        return hk.fit(problem, model, hyper, method, (x, y), (x[:64], y[:64]), steps=1, callbacks=callbacks)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    expected = float(make([]).state.hyper.value.detach())
    needed = torch.cuda.max_memory_allocated() - before
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 0.7 * needed) / total)
    try:
        with pytest.warns(hk.HyperkronWarning, match="out of memory at step 0"):
            run = make([hk.training.HalveOnOutOfMemory()])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert run.callbacks[0].micro_batch < 2**17
    assert float(run.state.hyper.value.detach()) == pytest.approx(expected, rel=0.05)  # other Monte-Carlo draws
