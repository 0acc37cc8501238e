"""What KFAC measures without Kronecker factors: diagonals against dense Fisher matrices, and what J_in does not see."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import Case, Mean, make, random_weights
from hyperkron.curvature.kfac import diagonals
from recorded import nothing_read

Build = Callable[[], nn.Module]


# --- diagonals -----------------------------------------------------------------------------------------------------


class Bag(nn.Module):
    """Embeddings, in which no token occurs twice in an example."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        distinct = (x[:, :1] + 2 * torch.arange(4)) % 9
        return self.head(self.embed(distinct).tanh().mean(1))


def normed(*layers: nn.Module, head: int, mean: nn.Module | None = None) -> nn.Module:
    for layer in layers:
        for p in layer.parameters():
            nn.init.normal_(p)
    return nn.Sequential(*layers, nn.Tanh(), mean or nn.Identity(), nn.Linear(head, 2))


def twice(layer: nn.Module, mean: nn.Module | None = None) -> nn.Module:
    return normed(layer, nn.Tanh(), layer, head=4, mean=mean)


class Pairs(nn.Module):
    """Embeddings that are called on both halves of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.embed(x[:, :2]).tanh() + self.embed(x[:, 2:]).sin()).sum(1))


class OneByOne(nn.Module):
    """Calls a layer on one example at a time, without a dimension for examples."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(example) for example in x])


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the second dimension, as in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def test_a_norm_layer_with_a_forward_of_its_own_has_no_diagonal_of_the_usual_one() -> None:
    case = make(nn.Sequential(nn.Conv2d(1, 4, 1), ChannelNorm(4), Mean(True), nn.Linear(4, 2)), (1, 4, 4))
    rows = {row.parameter: row.curvature for row in hk.curvature.KFAC().coverage(case.model).rows}
    assert rows["1.weight"] == rows["1.bias"] == "scaled identity"
    found = case.measured("mc").diagonal["1.weight"]
    assert found.dim() == 0 and float(found) > 0


class Warm(nn.BatchNorm2d):
    """BatchNorm in evaluation mode with running statistics of its own."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__(channels, eps)
        self.running_mean.normal_()  # type: ignore[union-attr]
        self.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
        self.eval()


DIAGONAL: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "layer norm": (lambda: normed(nn.LayerNorm(4), head=4), (4,), 0),
    "layer norm without bias": (lambda: normed(nn.LayerNorm(4, bias=False), head=4), (4,), 0),
    "layer norm over tokens": (lambda: normed(nn.LayerNorm(4), head=4, mean=Mean()), (3, 4), 0),
    "layer norm over two dimensions": (lambda: normed(nn.LayerNorm((3, 4)), head=4, mean=Mean()), (2, 3, 4), 0),
    "layer norm, one by one": (lambda: normed(OneByOne(nn.LayerNorm(4)), head=4), (4,), 0),
    "rms norm, one by one": (lambda: normed(OneByOne(nn.RMSNorm((3, 4))), head=4, mean=Mean()), (3, 4), 0),
    "rms norm": (lambda: normed(nn.RMSNorm(4), head=4, mean=Mean()), (3, 4), 0),
    "group norm": (lambda: normed(nn.GroupNorm(2, 4), head=4, mean=Mean(True)), (4, 2, 3), 0),
    "batch norm, evaluation": (lambda: normed(Warm(3), head=3, mean=Mean(True)), (3, 2, 2), 0),
    "batch norm 1d, training": (lambda: normed(nn.BatchNorm1d(4), head=4), (4,), 0),
    "batch norm 2d, training": (lambda: normed(nn.BatchNorm2d(3), head=3, mean=Mean(True)), (3, 2, 2), 0),
    "batch norms of two widths": (
        lambda: normed(Warm(3), nn.Tanh(), nn.Conv2d(3, 2, 1), Warm(2), head=2, mean=Mean(True)),
        (3, 2, 2),
        0,
    ),
    "batch norms of two eps": (
        lambda: normed(Warm(3, 0.5), nn.Tanh(), Warm(3), head=3, mean=Mean(True)),
        (3, 2, 2),
        0,
    ),
    "layer norm, twice": (lambda: twice(nn.LayerNorm(4)), (4,), 0),
    "rms norm over tokens, twice": (lambda: twice(nn.RMSNorm(4), mean=Mean()), (3, 4), 0),
    "batch norm, twice": (lambda: normed(warm := Warm(3), nn.Tanh(), warm, head=3, mean=Mean(True)), (3, 2, 2), 0),
    "layer norm, twice, alone": (lambda: twice(nn.LayerNorm(4))[:3], (4,), 0),
    "embedding": (Bag, (4,), 5),
    "embedding, twice": (Pairs, (4,), 5),
}


@pytest.mark.parametrize("fisher", ["type-2", "empirical", "mc"])
@pytest.mark.parametrize("name", DIAGONAL)
def test_diagonals_are_exact_per_example(name: str, fisher: str) -> None:
    """In training mode too: x̂ of a batch norm does not depend on its own weight and bias."""
    build, shape, tokens = DIAGONAL[name]
    case = make(build(), shape, loss="cross_entropy", tokens=tokens, hyper=random_weights(5))
    found = case.measured(fisher, samples=2).diagonal
    uncovered = {row.parameter: row for row in hk.curvature.KFAC().coverage(case.model).uncovered}
    assert set(found) == set(uncovered)
    term = case.inner(case.model, case.hyper, case.inner_batch).terms[0]
    vectors = list(term.vectors(fisher, 2, torch.Generator().manual_seed(0)))  # type: ignore[arg-type]
    for parameter, diagonal in found.items():
        assert uncovered[parameter].curvature == "diagonal"
        exact = oracles.fisher(term.output, vectors, [case.params[parameter]]).diagonal()
        assert oracles.relative(diagonal.reshape(-1), exact) < 1e-12
    ones = {n: torch.ones_like(p) for n, p in case.params.items()}
    for split, damped in (("pi", lambda d: (d.sqrt() + 0.3**0.5).square()), ("exact", lambda d: d + 0.3)):
        curvature = hk.curvature.KFAC(0.3, fisher=fisher, samples=2, split=split)  # type: ignore[arg-type]
        with case.point() as point:
            solved = curvature.operator(point, curvature.init()).solve(ones)
        for parameter, diagonal in found.items():
            assert oracles.relative(solved[parameter], 1 / damped(diagonal)) < 1e-14


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_sums_on_a_gpu_are_those_of_the_cpu(layout: torch.memory_format, training: bool) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(5).train(training)
    norm.running_mean, norm.running_var = torch.randn(5), torch.rand(5) + 0.5
    x, g = 3 + torch.randn(6, 5, 4, 3), torch.randn(6, 5, 4, 3)
    expected = diagonals.batch_norm_sums(norm, x, g)
    found = diagonals.batch_norm_sums(norm.cuda(), *(t.cuda().contiguous(memory_format=layout) for t in (x, g)))
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), its, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("waiting", [0, 30])
def test_batch_norms_need_not_wait_for_each_other(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape, _ = DIAGONAL["batch norms of two widths"]
    case = make(build(), shape, loss="cross_entropy", hyper=random_weights(5))
    together = case.measured("mc", samples=2).diagonal
    treated: list[int] = []
    whole = diagonals.batch_norm_squares
    monkeypatch.setattr(diagonals, "batch_norm_squares", lambda sums: treated.append(len(sums)) or whole(sums))
    monkeypatch.setattr(diagonals, "MAX_WAITING", waiting)
    alone = case.measured("mc", samples=2).diagonal
    assert treated == ([1, 1, 1, 1] if waiting == 0 else [2, 2])  # for each of two samples
    assert set(alone) == set(together)
    assert all(oracles.relative(alone[name], together[name]) < 1e-14 for name in together)


# --- what the inner loss does not see ------------------------------------------------------------------------------


class Unused(nn.Module):
    """Layers and parameters that the inner loss never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.layer, self.norm = nn.Linear(3, 2), nn.Linear(2, 2), nn.LayerNorm(2)
        self.raw = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def elsewhere(case: Case) -> hk.BilevelProblem:
    """An outer loss that also depends on the unused parameters, which changes no hypergradient."""

    def outer(model: nn.Module, hyper: nn.Module, batch: object) -> hk.losses.Loss:
        unused = [p for name, p in model.named_parameters() if not name.startswith("used")]
        return case.outer(model, hyper, batch) + hk.losses.l2(unused, 0.1)

    return hk.BilevelProblem(case.inner, outer)


@pytest.mark.parametrize(
    "curvature", [hk.curvature.KFAC(0.1, fisher="type-2"), hk.curvature.EKFAC(0.1, fisher="type-2")]
)
def test_unused_parameters_get_zero(curvature: hk.curvature.KFAC | hk.curvature.EKFAC) -> None:
    case = make(Unused(), (3,))
    made = hk.Implicit(curvature, hk.solvers.Direct())
    result = made.compute(elsewhere(case), case.model, case.hyper, case.inner_batch, case.outer_batch)
    assert result.solution is not None
    for name, v in result.solution.value.items():
        assert bool((v == 0).all()) == (not name.startswith("used"))


@pytest.mark.parametrize(
    "curvature", [hk.curvature.KFAC(0.1, fisher="type-2", split="exact"), hk.curvature.EKFAC(0.1, fisher="type-2")]
)
def test_a_penalty_alone_is_curvature_too(curvature: hk.curvature.KFAC | hk.curvature.EKFAC) -> None:
    case = make(Unused(), (3,), decay={"layer.weight": 0.2, "norm.bias": 0.3, "raw": torch.tensor([0.1, 0.2, 0.3])})
    with case.point() as point:
        v = curvature.operator(point, curvature.init()).solve({n: torch.ones_like(p) for n, p in case.params.items()})
    assert float((v["layer.weight"] - 1 / (0.4 + 0.1)).abs().max()) < 1e-14
    assert float((v["norm.bias"] - 1 / (0.6 + 0.1)).abs().max()) < 1e-14
    assert float((v["raw"] - 1 / (2 * torch.tensor([0.1, 0.2, 0.3]) + 0.1)).abs().max()) < 1e-6
    assert float(v["layer.bias"].abs().max()) == 0.0


def test_preconditioner_reaches_what_kfac_does_not() -> None:
    """Without curvature somewhere KFAC's solution is zero there, but a preconditioner must be positive definite."""
    case = make(Unused(), (3,))
    made = hk.pcg(100, 0.1, preconditioner=hk.curvature.KFAC(0.1, fisher="type-2", fallback="zero"), tolerance=1e-10)
    result = made.compute(elsewhere(case), case.model, case.hyper, case.inner_batch, case.outer_batch)
    assert result.status is hk.Status.CONVERGED
    assert oracles.relative(result.grads, oracles.implicit(case, case.ggn(), damping=0.1)) < 1e-8


def test_a_model_without_any_kronecker_block() -> None:
    for curvature in (hk.curvature.KFAC(0.1), hk.curvature.KFAC(0.1, split="exact"), hk.curvature.EKFAC(0.1)):
        case = make(nn.LayerNorm(3), (3,))
        assert hk.Implicit(curvature, hk.solvers.Direct()).compute(*case.arguments).status is hk.Status.DIRECT


def test_sparse_embedding_gradients() -> None:
    grads = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 3, sparse=sparse), Mean(), nn.Linear(3, 2))
        case = make(model, (4,), loss="cross_entropy", tokens=6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            grads.append(hk.kfac(0.1, fisher="type-2").compute(*case.arguments).grads)
    assert oracles.relative(grads[1], grads[0]) < 1e-12


@pytest.mark.parametrize("shape", [(6, 5), (7,), (1, 1), (2, 3, 4)])
def test_the_diagonal_of_an_embedding_waits_for_nothing(shape: tuple[int, ...]) -> None:
    """Example by example against plain loops, with nothing read on the way, as a CUDA graph needs."""
    module = nn.Embedding(9, 3, padding_idx=0).double()
    index, g = torch.randint(4, shape), torch.randn(*shape, 3, dtype=torch.float64)
    with nothing_read():
        found = diagonals.embedding_squares(module, index, g)
    wanted = torch.zeros(9, 3, dtype=torch.float64)
    for rows, gradients in zip(index.reshape(shape[0], -1), g.reshape(shape[0], -1, 3), strict=True):
        for row in rows.unique().tolist():
            wanted[row] += gradients[rows == row].sum(0).square()
    wanted[0] = 0.0
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)
