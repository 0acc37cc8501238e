"""Scores against a dense float64 oracle, and the two ways of computing them against each other."""

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import hyperkron as hk
from hyperkron.curvature import GGN, Hessian
from hyperkron.solvers import CG

DECAY = 1e-2


class Tokens(nn.Module):
    """Embedding, attention-free token mixing, norm and a tied-free head; a prediction for the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(7, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.mix(self.embed(tokens)))).mean(1))


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(12, 5)


def cnn() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 2, 2, stride=2),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    net[2].running_mean.normal_()
    return net, torch.randn(12, 2, 4, 4)


def tokens() -> tuple[nn.Module, Tensor]:
    return Tokens(), torch.randint(0, 7, (12, 5))


NETWORKS = {"mlp": mlp, "cnn": cnn, "tokens": tokens}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1]) + hk.losses.l2(model, DECAY)


def made(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    model = model.double()
    x = x.double() if x.is_floating_point() else x
    y = torch.randint(0, 3, (12,))
    return model, (x[:9], y[:9]), (x[9:], y[9:])


def oracle(model: nn.Module, train: tuple[Tensor, Tensor], queries: tuple[Tensor, Tensor], damping: float) -> Tensor:
    """1/N ⟨(H + δI)⁻¹ ∂f_q, ∂c_n⟩ from dense derivatives; no part of the library is used."""
    model.eval()
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    sizes = [p.numel() for p in model.parameters()]
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def losses(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = {n: v.reshape(s) for n, v, s in zip(names, flat.split(sizes), shapes, strict=True)}
        return nn.functional.cross_entropy(functional_call(model, parts, (x,)), y, reduction="none")

    hessian = torch.autograd.functional.hessian(lambda t: losses(t, *train).mean() + DECAY * t.square().sum(), theta)
    a = hessian + damping * torch.eye(len(theta), dtype=theta.dtype)
    rows = torch.autograd.functional.jacobian(lambda t: losses(t, *train), theta)
    asked = torch.autograd.functional.jacobian(lambda t: losses(t, *queries), theta)
    return torch.linalg.solve(a, asked.T).T @ rows.T / len(rows)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("way", "batch_size"),
    [("layers", 4), ("layers", 9), ("forward", 4), pytest.param("forward", 9, marks=pytest.mark.long)],
)
def test_exact_curvature_gives_the_oracles_scores(name, way, batch_size):
    model, train, queries = made(name)
    method = hk.Implicit(Hessian(5.0), CG(400, 1e-13))  # damping large enough to be definite away from a minimum
    found = hk.attribute(loss, model, train, queries, method=method, way=way, batch_size=batch_size)
    wanted = oracle(model, train, queries, 5.0)
    assert found.scores.shape == (3, 9)
    assert found.stats["way"] == way
    assert torch.allclose(found.scores, wanted, rtol=1e-8, atol=1e-8 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", [hk.kfac(1e-2), hk.ekfac(1e-2, fisher="type-2"), hk.identity()])
def test_both_ways_agree(name, method):
    model, train, queries = made(name)
    layers, forward = (
        hk.attribute(loss, model, train, queries, method=method, way=w).scores for w in ("layers", "forward")
    )
    assert torch.allclose(layers, forward, rtol=1e-10, atol=1e-12)


def penalised(model, batch):
    x = batch[0].clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return hk.losses.cross_entropy(output, batch[1]) + hk.losses.mse(slope, torch.zeros_like(slope))


def attacked(model, batch):
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), batch[1]), x)
    return hk.losses.cross_entropy(model(batch[0] + 0.1 * slope.sign()), batch[1])


@pytest.mark.parametrize("made_of", [penalised, attacked])
@pytest.mark.parametrize("way", ["auto", "forward"])
def test_losses_may_be_made_of_gradients(made_of, way, tmp_path):
    model, train, queries = made("mlp")

    def gradients(data):
        each = [made_of(model, [part[n : n + 1] for part in data]).value for n in range(len(data[0]))]
        return torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(x, model.parameters())]) for x in each])

    options = {"method": hk.identity(), "way": way, "batch_size": 4}
    wanted = gradients(queries) @ gradients(train).T / 9
    found = hk.attribute(made_of, model, train, queries, **options).scores
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    stored = hk.attribute(made_of, model, train, queries, **options, out=tmp_path).scores
    torch.testing.assert_close(stored, wanted.float(), rtol=1e-5, atol=1e-7)


def test_a_plain_penalty_is_named_where_forward_mode_cannot_tell_it_from_examples():
    model, train, queries = made("mlp")

    def summed(model, batch):
        return loss(model, batch) + sum(p.square().sum() for p in model.parameters())

    with pytest.raises(hk.HyperkronError, match=r"a plain tensor is added to the loss, .* l2\(\.\.\.\) as a penalty"):
        hk.attribute(summed, model, train, queries, way="forward", method=hk.identity())


class Root(nn.Module):
    """A square root, with an infinite derivative at 0."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.layer(x).abs().sqrt()


@pytest.mark.parametrize("way", ["layers", "forward"])
@pytest.mark.parametrize("stored", [False, True])
def test_scores_that_are_not_finite_name_the_row(way, stored, tmp_path):
    _, (x, y), queries = made("mlp")
    model, x = Root().double(), x.index_fill(0, torch.tensor(7), 0.0)
    given = {"method": hk.identity(), "batch_size": 4, "out": tmp_path if stored else None}
    with pytest.raises(hk.HyperkronError, match="the scores of row 7 of train are not finite"):
        hk.attribute(loss, model, (x, y), queries, **given, way=way)
    with pytest.raises(hk.HyperkronError, match="the gradient of row 7 of train is not finite"):
        hk.attribution.self_influence(loss, model, (x, y), method=hk.identity())
    with pytest.raises(hk.HyperkronError, match="the gradient of row 7 of queries is not finite"):
        hk.attribute(loss, model, queries, (x, y), method=hk.identity(), way=way)
    with pytest.raises(hk.HyperkronError, match="the gradient of queries is not finite"):
        hk.attribute(loss, model, queries, (x, y), method=hk.identity(), way=way, aggregate=True)


def test_the_training_set_is_measured_as_a_whole():
    model, train, queries = made("mlp")
    method = hk.ekfac(1e-2, fisher="type-2")
    whole, parts = (hk.attribute(loss, model, train, queries, method=method, batch_size=b).scores for b in (9, 4))
    assert torch.allclose(whole, parts, rtol=1e-9)
    ggn = hk.Implicit(GGN(1e-2), CG(200, 1e-13))
    whole, parts = (hk.attribute(loss, model, train, queries, method=ggn, batch_size=b).scores for b in (9, 4))
    assert torch.allclose(whole, parts, rtol=1e-8)


@pytest.mark.parametrize("together", [1, 2, 32])
def test_gradients_of_many_queries_at_once_are_those_of_each(monkeypatch, together):
    model, train, queries = made("cnn")
    method = hk.ekfac(1e-2, fisher="type-2")
    wanted = hk.attribute(loss, model, train, queries, method=method).scores
    monkeypatch.setattr(sys.modules["hyperkron.attribution.task"], "MAX_QUERIES", together)
    for query_loss in (
        lambda m, b: hk.losses.cross_entropy(m(b[0]), b[1]) * float(len(b[1])),  # a sum over queries
        lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),  # no rows are known
        lambda m, b: hk.losses.cross_entropy(m(b[0]), b[1], ignore_index=7),
    ):
        found = hk.attribute(loss, model, train, queries, method=method, query_loss=query_loss).scores
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-14)


def test_an_aggregated_query_is_the_mean_of_the_queries():
    model, train, queries = made("mlp")
    apart = hk.attribute(loss, model, train, queries, method=hk.kfac(1e-2, fisher="type-2")).scores
    together = hk.attribute(
        loss, model, train, queries, method=hk.kfac(1e-2, fisher="type-2"), aggregate=True, batch_size=2
    )
    assert together.scores.shape == (1, 9)
    whole = hk.attribute(loss, model, train, queries, method=hk.kfac(1e-2, fisher="type-2"), aggregate=True)
    assert torch.allclose(whole.scores[0], apart.mean(0), rtol=1e-9)
    assert whole.stats["way"] == "layers"
    method = hk.kfac(1e-2, fisher="type-2")
    forward = hk.attribute(loss, model, train, queries, method=method, aggregate=True, way="forward")
    assert torch.allclose(whole.scores, forward.scores, rtol=1e-9)


def test_self_influence_is_the_diagonal():
    model, train, _ = made("cnn")
    method = hk.kfac(1e-2, fisher="type-2")
    scores = hk.attribute(loss, model, train, train, method=method, query_loss=plain, batch_size=4).scores
    found = hk.attribution.self_influence(plain_with_penalty, model, train, method=method, batch_size=4)
    assert torch.allclose(found, scores.diagonal(), rtol=1e-9)


def plain(model: nn.Module, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


plain_with_penalty = loss


@pytest.mark.filterwarnings("ignore:only 49.3 %")
def test_by_default_what_kfac_does_not_cover_is_left_out():
    """The scores are those of a model whose embedding and norm are frozen; both ways."""
    model, train, queries = made("tokens")
    layers, forward = (hk.attribute(loss, model, train, queries, way=w).scores for w in ("layers", "forward"))
    for part in (model.embed, model.norm):
        part.requires_grad_(False)
    frozen = hk.attribute(loss, model, train, queries).scores
    assert torch.allclose(layers, frozen, rtol=1e-9, atol=1e-12)
    assert torch.allclose(forward, frozen, rtol=1e-9, atol=1e-12)


class Packed(nn.Module):
    """A recurrent network over packed sequences, which neither way passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.head = nn.Linear(3, 3), nn.GRU(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x), lengths, batch_first=True)
        return self.head(self.cell(packed)[1][0])


def test_where_neither_way_works_the_error_has_both_reasons_and_the_default_works():
    torch.manual_seed(0)
    model, x, y = Packed(), torch.randn(6, 5, 3), torch.randint(3, (6,))

    def loss(model, batch):
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    def scores(**options):
        return hk.attribute(loss, model, (x, y), (x[:3], y[:3]), **options)

    with pytest.raises(hk.HyperkronError, match=r"(?s)neither way suits.*_pack_padded.*way='layers' does not see"):
        scores(method=hk.identity())
    assert scores().stats["way"] == "layers"
