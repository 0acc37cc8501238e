"""Convolution and batch norm with derivatives of their own: the same numbers as torch's, to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

import hyperkron as hk
from hyperkron.kernels import second_order, selection
from hyperkron.kernels.execution import Execution
from hyperkron.kernels.second_order import batch_norm, convolution
from hyperkron.kernels.selection import Kernels

torch.manual_seed(0)


def own() -> Kernels:
    return Kernels(second_order=True, channels_last=False, always=True)


def doubles(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize(("stride", "padding", "dilation", "groups"), [(1, 0, 1, 1), (2, 1, 1, 1), (1, 2, 2, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_derivatives(
    spatial: int, stride: int, padding: int, dilation: int, groups: int, bias: bool
) -> None:
    x, weight, shift = doubles((2, 2, *[6] * spatial), (4, 2 // groups, *[2] * spatial), (4,))
    shape = ([stride] * spatial, [padding] * spatial, [dilation] * spatial, groups)

    def function(x: Tensor, weight: Tensor, *shift: Tensor) -> Tensor:
        return convolution(x, weight, shift[0] if shift else None, shape)

    inputs = (x, weight, shift) if bias else (x, weight)
    conv = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    torch.testing.assert_close(
        function(*inputs), conv(x, weight, shift if bias else None, stride, padding, dilation, groups)
    )
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("shape", [(5, 3), (3, 2, 4), (3, 2, 3, 2), (2, 2, 2, 2, 2)])
@pytest.mark.parametrize("running", [True, False])
def test_batch_norm_derivatives(shape: tuple[int, ...], running: bool) -> None:
    x, weight, bias = doubles(shape, (shape[1],), (shape[1],))

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        statistics = (torch.zeros(shape[1]).double(), torch.ones(shape[1]).double()) if running else (None, None)
        return batch_norm(x, *statistics, weight, bias, True)

    assert "_BatchNorm" in function(x, weight, bias).grad_fn.name()
    torch.testing.assert_close(function(x, weight, bias), F.batch_norm(x, None, None, weight, bias, True))
    assert torch.autograd.gradcheck(function, (x, weight, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (x, weight, bias))


class Net(nn.Module):
    """Convolutions with and without bias, batch norm, a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, stride=2, padding="valid")
        self.c, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4)
        self.last, self.head = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.a(x)))
        x = torch.tanh(self.last(self.c(x)) + x)
        return self.head(torch.tanh(self.b(x)).mean((2, 3)))


def problem() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(3)
    return Net().double().train(), torch.randn(5, 2, 6, 6).double(), torch.arange(5) % 3


def products(net: Net, x: Tensor, y: Tensor) -> list[Tensor]:
    """∂θ J, H v, and the tangents of every example along v."""
    params = dict(net.named_parameters())
    generator = torch.Generator().manual_seed(5)
    v = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in params.values()]
    found = torch.autograd.grad(F.cross_entropy(net(x), y), list(params.values()), create_graph=True)
    second = torch.autograd.grad(found, list(params.values()), v)
    with fw.dual_level():
        duals = {n: fw.make_dual(p.detach(), d) for (n, p), d in zip(params.items(), v, strict=True)}
        each = F.cross_entropy(functional_call(net, duals, (x,)), y, reduction="none")
        tangent = fw.unpack_dual(each).tangent
    return [x.detach() for x in (*found, *second, tangent)]


def test_a_whole_network_under_the_mode() -> None:
    net, x, y = problem()
    before = {n: b.clone() for n, b in net.named_buffers()}
    plain = products(net, x, y)
    moved = {n: b.clone() for n, b in net.named_buffers()}
    net.load_state_dict({**net.state_dict(), **before})
    with own():
        mine = products(net, x, y)
    torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dict(net.named_buffers()), moved)  # running statistics too


def test_the_mode_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, y = problem()
    calls: list[str] = []
    for name in ("_convolution_pullback", "_norm_pullback"):
        function = getattr(second_order, name)
        monkeypatch.setattr(second_order, name, lambda *a, f=function, n=name: calls.append(n) or f(*a))
    with own():
        products(net, x, y)
    assert {"_convolution_pullback", "_norm_pullback"} == set(calls)


class Elementary(TorchFunctionMode):
    """Batch norm by elementary operations: torch's own third derivative takes the statistics for constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        x = kwargs.pop("input", None) if not args else args[0]
        weight, bias = (kwargs[name] if name in kwargs else args[at] for at, name in ((3, "weight"), (4, "bias")))
        variance, mean = torch.var_mean(x, [0, 2, 3], correction=0, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * weight[:, None, None] + bias[:, None, None]


def test_third_derivatives() -> None:
    """As an inner loss with a penalty on its own gradient needs them."""
    net, x, y = problem()
    params = list(net.parameters())

    def third() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(F.cross_entropy(net(x), y), params, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), params, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in second), params)

    with Elementary():
        exact = third()
    with own():
        torch.testing.assert_close(third(), exact, rtol=1e-8, atol=1e-10)


def test_small_tensors_and_other_kinds_are_left_alone() -> None:
    net, x, _ = problem()
    with Kernels(second_order=True, channels_last=True, always=False):
        assert "ConvolutionBackward0" in net.a(x).grad_fn.name()
    with own():
        assert "_Convolution" in net.a(x).grad_fn.name()
        net.eval()
        assert "_BatchNorm" not in net.norm(net.a(x)).grad_fn.name()
        mapped = torch.func.vmap(lambda row: F.conv2d(row[None], net.a.weight, padding=1)[0])(x)
    torch.testing.assert_close(mapped, net.a(x))


def test_channels_last_changes_layout_not_values() -> None:
    net, x, _ = problem()
    net, x = net.float(), x.float()
    plain = net(x)
    with Kernels(second_order=False, channels_last=True, always=True) as mode:
        image = net.a(x)
        assert image.is_contiguous(memory_format=torch.channels_last) and mode.converted
        torch.testing.assert_close(net(x), plain, rtol=1e-5, atol=1e-6)


def test_only_gpus_and_models_with_such_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    net, gpu = Net(), torch.device("cuda")
    assert selection.chosen(net, torch.device("cpu"), 9, differentiable=True, recording=False) is None
    assert selection.chosen(nn.Linear(2, 2), gpu, 9, differentiable=True, recording=False) is None
    mode = selection.chosen(net, gpu, 9, differentiable=True, recording=True)
    assert mode is not None and (mode.second_order, mode.channels_last, mode.always) == (True, True, True)
    monkeypatch.setattr(selection, "_CONTIGUOUS_ONLY", {net})
    mode = selection.chosen(net, gpu, 9, differentiable=False, recording=False)
    assert mode is not None and (mode.second_order, mode.channels_last, mode.always) == (False, False, False)


class Flat(nn.Module):
    """Takes the layout for granted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).view(len(x), -1))


def test_a_model_that_takes_the_layout_for_granted_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: ``chosen`` is told that the CPU is one."""
    gpu, real = torch.device("cuda"), selection.chosen
    tried: list[bool] = []

    def pretending(model: nn.Module, _: torch.device, size: int, **how: bool):  # type: ignore[no-untyped-def]
        tried.append(model not in selection._CONTIGUOUS_ONLY)
        return real(model, gpu, size, **{**how, "recording": True})

    monkeypatch.setattr(selection, "chosen", pretending)
    monkeypatch.setattr(Execution, "queued", True)
    model, hyper = Flat(), hk.SampleWeights(6)
    batch = (torch.randn(6, 2, 6, 6), torch.arange(6) % 3, torch.arange(6))
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    result = hk.identity().compute(problem, model, hyper, batch, batch)
    assert tried[0] and not any(tried[1:])
    assert model in selection._CONTIGUOUS_ONLY
    with pytest.raises(RuntimeError, match="shape"):  # of which the layout is innocent
        hk.identity().compute(problem, model, hyper, (batch[0][:, :, :5], *batch[1:]), batch)
    assert model not in selection._CONTIGUOUS_ONLY
    monkeypatch.undo()
    plain = hk.identity().compute(problem, model, hyper, batch, batch)
    torch.testing.assert_close(result.grads, plain.grads)


def test_a_model_is_not_watched_where_that_was_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    net, gpu = Net(), torch.device("cuda")
    how = {"differentiable": False, "recording": False}

    def watched(size: int, **other: bool) -> bool:
        mode = selection.chosen(net, gpu, size, **{**how, **other})
        selection.evaluate(lambda: net(torch.randn(2, 2, 6, 6)), net, gpu, size, **{**how, **other})
        return mode is not None

    assert watched(10) and not watched(10)
    assert watched(11) and not watched(11)  # another size
    assert watched(10, differentiable=True) and watched(10, recording=True)  # these always pay
    monkeypatch.setattr(selection, "LARGE", 1)
    assert watched(12) and watched(12)  # it was not idle


@pytest.mark.parametrize(("stride", "converted"), [(1, True), (2, False), ((2, 1), True)])
def test_a_convolution_is_large_by_what_it_gives_or_takes(
    stride: Any, converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stem with stride 2 gives a quarter of the positions that it takes."""
    monkeypatch.setattr(selection, "LARGE", 8 * 64 // 2)
    monkeypatch.setattr(selection, "_coarse", lambda x: True)
    x, layer = torch.randn(1, 2, 8, 8), nn.Conv2d(2, 8, 3, stride=stride, padding=1)
    with Kernels(second_order=False, channels_last=True, always=False) as mode:
        layer(x)
    assert mode.converted is converted


def test_images_of_one_pixel_do_not_pass_for_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_coarse", lambda x: True)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, stride=2), nn.Conv2d(8, 8, 3, padding=1))
    for size, laid_out, converted in ((3, False, False), (7, False, False), (7, True, True)):
        x = torch.randn(2, 2, size, size)
        with Kernels(second_order=False, channels_last=True, always=False) as mode:
            model(x.contiguous(memory_format=torch.channels_last) if laid_out else x)
        assert mode.converted is converted
