"""Unrolled hypergradients against full-graph autograd, closed forms and ``torch.optim``; their memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hyperkron import losses, trees
from hyperkron.hypergradient.steps import SGD, Adam, AdamW
from hyperkron.hypergradient.unrolled import Batches, Unrolled, one_step, truncated, unrolled
from hyperkron.problem import BilevelProblem
from unrolled_cases import DOUBLE, PROBLEM, STEPS, assert_same, every_step, inner, make, naive, outer


@every_step
@pytest.mark.parametrize("every", [1, 3, 10])
def test_equals_the_full_graph(name: str, every: int) -> None:
    case = make()
    step, _ = STEPS[name]
    result = unrolled(7, step, checkpoint_every=every).compute(PROBLEM, *case)
    assert_same(result.grads, naive(PROBLEM, *case, 7, step))
    assert result.status.ok
    assert result.solution is None
    assert result.stats["steps"] == result.stats["differentiated"] == 7


@every_step
@pytest.mark.parametrize("every", [1, 2])
def test_truncated_equals_the_full_graph_cut(name: str, every: int) -> None:
    case = make()
    step, _ = STEPS[name]
    result = truncated(8, 5, step, checkpoint_every=every).compute(PROBLEM, *case)
    assert_same(result.grads, naive(PROBLEM, *case, 8, step, constant=3))
    assert result.stats["differentiated"] == 5


@every_step
def test_equals_the_difference_quotient_of_training_with_torch_optim(name: str) -> None:
    """An oracle that shares no code: train with torch.optim at λ ± εu and compare J_out."""
    model, hyper, inner_batch, outer_batch = make()
    step, optimizer = STEPS[name]
    generator = torch.Generator().manual_seed(1)
    direction = trees.normal_like(dict(hyper.named_parameters()), generator)

    def objective(epsilon: float) -> float:
        trained, moved = copy.deepcopy(model), copy.deepcopy(hyper)
        with torch.no_grad():
            for n, p in moved.named_parameters():
                p += epsilon * direction[n]
        running = optimizer(trained.parameters())
        for _ in range(6):
            running.zero_grad()
            inner(trained, moved, inner_batch).backward()
            running.step()
        return outer(trained, moved, outer_batch).item()

    method = Unrolled(6, step)
    result = method.compute(PROBLEM, model, hyper, inner_batch, outer_batch)
    slope = (objective(1e-5) - objective(-1e-5)) / 2e-5
    assert float(trees.dot(result.grads, direction)) == pytest.approx(slope, rel=1e-7)
    assert result.outer_loss == pytest.approx(objective(0.0), rel=1e-12)
    ahead = method.lookahead(PROBLEM, model, hyper, inner_batch)
    assert outer(_with(model, ahead), hyper, outer_batch).item() == pytest.approx(objective(0.0), rel=1e-12)


def _with(model: nn.Module, params: dict[str, Tensor]) -> nn.Module:
    moved = copy.deepcopy(model)
    moved.load_state_dict(params, strict=False)
    return moved


def test_one_step_is_the_identity_curvature_formula() -> None:
    """∂_λ J_out(θ¹) − η ∂²_λθ J_in(θ⁰) ∂_θ J_out(θ¹): appendix C of the paper at T = 1."""
    model, hyper, inner_batch, outer_batch = make()
    lr = 0.2
    result = one_step(lr).compute(PROBLEM, model, hyper, inner_batch, outer_batch)
    params, hypers = list(model.parameters()), list(hyper.parameters())
    gradient = torch.autograd.grad(inner(model, hyper, inner_batch), params, create_graph=True)
    ahead = copy.deepcopy(model)
    with torch.no_grad():
        for p, g in zip(ahead.parameters(), gradient, strict=True):
            p -= lr * g
    loss = outer(ahead, hyper, outer_batch)
    vector = torch.autograd.grad(loss, list(ahead.parameters()), retain_graph=True)
    direct = torch.autograd.grad(loss, hypers, allow_unused=True)
    cross = torch.autograd.grad(gradient, hypers, vector)
    formula = {
        n: (0.0 if d is None else d) - lr * x
        for (n, _), d, x in zip(hyper.named_parameters(), direct, cross, strict=True)
    }
    assert_same(result.grads, formula, 1e-12)


class Ridge:
    """Weighted ridge regression, whose H, θ* and hypergradients are closed forms."""

    def __init__(self) -> None:
        self.model, self.hyper, self.inner_batch, self.outer_batch = make(nn.Linear(3, 2, bias=False))
        weight = self.model[0].weight  # type: ignore[index]

        def gradient(flat: Tensor, logits: Tensor, decay: Tensor) -> Tensor:
            x, y = self.inner_batch
            sigma = logits.sigmoid() / len(x)
            residual = x @ flat.view(2, 3).T - y
            return (2 * residual.T @ (sigma[:, None] * x)).reshape(-1) + 2 * decay.exp() * flat

        self.weight, self._gradient = weight, gradient
        hypers = (self.hyper.logits.detach(), self.hyper.decay.detach())
        zero = torch.zeros(6, dtype=DOUBLE)
        self.hessian = torch.func.jacrev(gradient)(zero, *hypers)
        self.minimum = torch.linalg.solve(self.hessian, -gradient(zero, *hypers))
        self.lr = 0.8 / float(torch.linalg.matrix_norm(self.hessian, 2))
        self.contraction = torch.eye(6, dtype=DOUBLE) - self.lr * self.hessian

    def descend(self, flat: Tensor) -> Tensor:
        return flat - self.lr * self._gradient(flat, self.hyper.logits.detach(), self.hyper.decay.detach())

    def hypergradient(self, final: Tensor, vectors: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """∂_λ J_out − Σ ∂²_λθ J_in(θ) v over the pairs (θ, v), where v may not depend on λ."""
        grads = {n: torch.zeros_like(p) for n, p in self.hyper.named_parameters()}
        grads["decay"] += 0.2 * self.hyper.decay.detach()
        for flat, v in vectors:
            logits, decay = torch.func.jacrev(self._gradient, (1, 2))(
                flat, self.hyper.logits.detach(), self.hyper.decay.detach()
            )
            grads["logits"] -= logits.T @ v
            grads["decay"] -= decay @ v
        return grads

    def outer_gradient(self, flat: Tensor) -> Tensor:
        x, y = self.outer_batch
        return torch.func.grad(lambda w: (x @ w.view(2, 3).T - y).abs().pow(1.5).mean())(flat)

    def place(self, flat: Tensor) -> None:
        with torch.no_grad():
            self.weight.copy_(flat.view(2, 3))

    def compute(self, method: Unrolled) -> dict[str, Tensor]:
        return method.compute(PROBLEM, self.model, self.hyper, self.inner_batch, self.outer_batch).grads


def test_at_a_fixed_point_it_is_the_neumann_series_and_tends_to_the_implicit_hypergradient() -> None:
    ridge = Ridge()
    ridge.place(ridge.minimum)
    b = ridge.outer_gradient(ridge.minimum)
    implicit = ridge.hypergradient(ridge.minimum, [(ridge.minimum, torch.linalg.solve(ridge.hessian, b))])
    errors = []
    for steps in (1, 5, 20, 40):
        powers = torch.linalg.matrix_power(ridge.contraction, steps)
        series = torch.linalg.solve(ridge.hessian, b - powers @ b)  # ηΣ_{k<T}(I−ηH)^k b = H⁻¹(I − (I−ηH)^T) b
        ours = ridge.compute(unrolled(steps, SGD(ridge.lr)))
        assert_same(ours, ridge.hypergradient(ridge.minimum, [(ridge.minimum, series)]))
        errors.append(float(trees.norm(trees.add(ours, implicit, alpha=-1.0))))
    rho = float(torch.linalg.eigvalsh(ridge.contraction).abs().max())
    assert rho < 1.0
    cross = ridge.hypergradient(ridge.minimum, [])  # the direct term alone, to bound the constant
    constant = float(trees.norm(trees.add(implicit, cross, alpha=-1.0))) * float(torch.linalg.cond(ridge.hessian))
    for steps, error in zip((1, 5, 20, 40), errors, strict=True):
        assert error <= 10 * constant * rho**steps  # geometric
    assert errors == sorted(errors, reverse=True)
    far = int(-26 / torch.log(torch.tensor(rho)))  # rho^far ~ 5e-12
    assert_same(ridge.compute(unrolled(far, SGD(ridge.lr), checkpoint_every=10)), implicit)


@pytest.mark.parametrize("last", [1, 3, 8])
def test_truncated_is_the_partial_sum(last: int) -> None:
    """−η Σ_{T−K≤t<T} ∂²_λθ J_in(θ^t) (I−ηH)^{T−1−t} b, away from the fixed point."""
    ridge, steps = Ridge(), 8
    path = [ridge.weight.detach().reshape(-1).clone()]
    for _ in range(steps):
        path.append(ridge.descend(path[-1]))
    b = ridge.outer_gradient(path[-1])
    terms = [
        (path[t], ridge.lr * torch.linalg.matrix_power(ridge.contraction, steps - 1 - t) @ b)
        for t in range(steps - last, steps)
    ]
    ours = ridge.compute(truncated(steps, last, SGD(ridge.lr)))
    assert_same(ours, ridge.hypergradient(path[-1], terms))


def test_one_batch_for_each_step() -> None:
    model, hyper, _, outer_batch = make()
    batches = Batches([make(seed=seed)[2] for seed in range(1, 5)])
    step = SGD(0.1, momentum=0.5)
    ours = unrolled(4, step, checkpoint_every=2).compute(PROBLEM, model, hyper, batches, outer_batch)
    assert_same(ours.grads, naive(PROBLEM, model, hyper, batches, outer_batch, 4, step))


def test_a_list_is_one_batch() -> None:
    """Data loaders give a batch as a list, so a list is never taken for a batch per step."""
    model, hyper, inner_batch, outer_batch = make()
    ours = unrolled(2).compute(PROBLEM, model, hyper, list(inner_batch), outer_batch).grads
    assert_same(ours, unrolled(2).compute(PROBLEM, model, hyper, inner_batch, outer_batch).grads)


def test_a_parameter_that_inner_does_not_use_stays() -> None:
    """As in torch.optim, it has no gradient and gets no weight decay; J_out may use it."""
    model, hyper, inner_batch, outer_batch = make()
    model.register_parameter("bonus", nn.Parameter(torch.tensor(2.0, dtype=DOUBLE)))

    def plain(model: Any, hyper: Any, batch: Any) -> Tensor:
        return (hyper.logits.sigmoid() * (model(batch[0]) - batch[1]).square().sum(-1)).mean()

    def using(model: Any, hyper: Any, batch: Any) -> Tensor:
        return outer(model, hyper, batch) * model.bonus

    problem = BilevelProblem(plain, using)
    method = unrolled(4, AdamW(0.1, weight_decay=0.5))
    ours = method.compute(problem, model, hyper, inner_batch, outer_batch)
    ahead = method.lookahead(problem, model, hyper, inner_batch)["bonus"]
    assert torch.equal(ahead, model.bonus)
    assert ahead.data_ptr() != model.bonus.data_ptr()  # the caller's own copy
    del model._parameters["bonus"]
    without = BilevelProblem(plain, lambda m, h, batch: 2.0 * outer(m, h, batch))
    assert_same(ours.grads, method.compute(without, model, hyper, inner_batch, outer_batch).grads, 1e-12)


def test_losses_that_know_their_curvature() -> None:
    """The objectives may return a Loss; its L2 penalty sees the parameters of the step."""
    case = make()

    def rich_inner(model: nn.Module, hyper: Any, batch: Any) -> Any:
        fit = losses.mse(model(batch[0]), batch[1], weight=hyper.logits.sigmoid())
        return fit + losses.l2(model, hyper.decay.exp())

    def rich_outer(model: nn.Module, hyper: Any, batch: Any) -> Any:
        return losses.mse(model(batch[0]), batch[1])

    plain = BilevelProblem(lambda *a: rich_inner(*a).value, lambda *a: rich_outer(*a).value)
    ours = unrolled(4).compute(BilevelProblem(rich_inner, rich_outer), *case).grads
    assert_same(ours, naive(plain, *case, 4, SGD(0.1)))
    assert float(ours["decay"].abs()) > 0.0


def test_tied_and_frozen_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))

    case = make(Tied())
    case[0][0].head.weight.requires_grad_(False)  # type: ignore[index]
    step = Adam(0.05, eps=1e-2)
    assert_same(unrolled(4, step).compute(PROBLEM, *case).grads, naive(PROBLEM, *case, 4, step))


def test_attention_is_differentiated_twice() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.head = nn.Linear(3, 12), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).view(1, 1, len(x), 12).chunk(3, dim=-1)
            return self.head(scaled_dot_product_attention(q, k, v).view(len(x), 4))

    case = make(Attention())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = naive(PROBLEM, *case, 3, SGD(0.1))
    assert_same(unrolled(3, SGD(0.1)).compute(PROBLEM, *case).grads, expected)


def test_a_dead_unit_under_adam_is_no_nan() -> None:
    model, hyper, inner_batch, outer_batch = make(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias[0] = -100.0  # type: ignore[index]

    def unpenalised(model: Any, hyper: Any, batch: Any) -> Tensor:
        return (hyper.logits.sigmoid() * (model(batch[0]) - batch[1]).square().sum(-1)).mean()

    problem = BilevelProblem(unpenalised, outer)
    grads = unrolled(3, Adam(0.05)).compute(problem, model, hyper, inner_batch, outer_batch).grads
    assert trees.is_finite(grads)
    assert float(grads["logits"].norm()) > 0.0


def test_backward_adds_to_grad() -> None:
    case = make()
    result = unrolled(2).backward(PROBLEM, *case)
    unrolled(2).backward(PROBLEM, *case)
    for n, p in case[1].named_parameters():
        torch.testing.assert_close(p.grad, 2 * result.grads[n])


@pytest.mark.parametrize("every", [1, 3])
def test_only_one_step_graph_is_alive(every: int) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    seen = []

    class Token:
        pass

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.token = Token()  # lives as long as the node of the graph
            alive.add(ctx.token)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g

    def probed(model: nn.Module, hyper: Any, batch: Any) -> Tensor:
        seen.append(len(alive))
        return inner(model, hyper, (Probe.apply(batch[0].requires_grad_()), batch[1]))

    case = make()
    result = unrolled(6, SGD(0.1, momentum=0.9), checkpoint_every=every).compute(BilevelProblem(probed, outer), *case)
    assert len(seen) == result.stats["inner_gradients"]
    assert seen == [0] * len(seen)  # no graph of an earlier step is left when the next begins
    assert not alive


def test_saved_activations_do_not_grow_with_the_steps() -> None:
    def peak(run: Callable[[], object]) -> int:
        alive: weakref.WeakSet[Any] = weakref.WeakSet()
        most = 0

        class Packed:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor = tensor

        def pack(tensor: Tensor) -> Packed:
            nonlocal most
            packed = Packed(tensor.detach())
            alive.add(packed)
            most = max(most, sum(p.tensor.numel() for p in alive))
            return packed

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
            run()
        return most

    case = make(size=20)
    few, many = (peak(lambda: unrolled(steps).compute(PROBLEM, *case)) for steps in (3, 12))  # noqa: B023
    assert many == few
    full = [peak(lambda: naive(PROBLEM, *case, steps, SGD(0.1))) for steps in (3, 12)]  # noqa: B023
    assert full[1] > 3 * full[0]


@pytest.mark.parametrize(("every", "kept", "gradients"), [(1, 15, 31), (4, 6, 42), (100, 15, 45)])
def test_checkpoints_trade_iterates_for_gradients(every: int, kept: int, gradients: int) -> None:
    stats = unrolled(16, SGD(0.01), checkpoint_every=every).compute(PROBLEM, *make()).stats
    assert stats["kept_iterates"] == kept
    assert stats["inner_gradients"] == gradients  # 15 forward, the last step, 15 backward, and those between
