"""Recordings on a real GPU, where a stand-in would prove nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hyperkron as hk
from hyperkron import solution

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def trying() -> Iterator[None]:
    """cuDNN tries its algorithms out, in TF32, which cannot be done while recording."""
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = flags


@pytest.mark.usefixtures("trying")
@pytest.mark.parametrize(
    "build",
    [lambda **o: hk.kfac(fisher="type-2", **o), hk.identity, lambda **o: hk.cg(3, 0.1, **o)],
    ids=["kfac", "identity", "cg"],
)
def test_algorithms_are_tried_out_before_recording(build: Any) -> None:
    """A recording takes channels last also where an ordinary step of a small model does not."""
    solution._warned.clear()
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 24, 5, stride=2), nn.BatchNorm2d(24), nn.Tanh(), nn.Conv2d(24, 24, 3), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(24 * 16, 4)).cuda()
    weights = hk.SampleWeights(16).cuda()
    batch = torch.randn(16, 3, 15, 15).cuda(), torch.arange(16).cuda() % 4, torch.arange(16).cuda()
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])) + hk.losses.l2(m, 0.1),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    method, plain = build(graph=True), build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # torch, where its first product is in a thread
        for _ in range(4):
            found = method.compute(problem, model, weights, batch, batch).grads["weight"]
    expected = plain.compute(problem, model, weights, batch, batch).grads["weight"]
    assert method._replays._served >= 2 and not method._replays._given_up
    assert torch.nn.functional.cosine_similarity(found, expected, dim=0) > 0.98  # TF32
