"""Networks of all kinds: which way scores them, and that it is right."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hyperkron as hk


def loss(model, batch):
    return hk.losses.cross_entropy(model(batch[0]), batch[1]) + hk.losses.l2(model, 1e-2)


def made(rows=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(rows, 5), torch.randint(0, 3, (rows,))
    return model, (x, y), (x[:4], y[:4])


class Plain(nn.Module):
    """Two layers; subclasses compute the same in other ways."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Reentrant(Plain):
    def forward(self, x):
        return self.last(checkpoint(lambda z: torch.tanh(self.first(z)), x.requires_grad_(), use_reentrant=True))


class Recomputed(Plain):
    def forward(self, x):
        return self.last(checkpoint(lambda z: torch.tanh(self.first(z)), x, use_reentrant=False))


class Keywords(Plain):
    def forward(self, x):
        return self.last(input=torch.tanh(self.first(input=x)))


class InPlace(Plain):
    def forward(self, x):
        return self.last(self.first(x).tanh_())


class Functional(Plain):
    def forward(self, x):
        return F.linear(torch.tanh(self.first(x)), self.last.weight, self.last.bias)


class Twice(Plain):
    """A weight that is used by its layer and once more outside it."""

    def forward(self, x):
        return super().forward(x) + 0.1 * (x @ self.first.weight.T)[:, :3]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (Reentrant, "layers"),
        (Recomputed, "layers"),
        (Keywords, "layers"),
        (InPlace, "layers"),
        (Functional, "forward"),
        (Twice, "forward"),
    ],
)
def test_scores_do_not_depend_on_how_a_network_is_written(kind, way):
    _, train, queries = made(12)
    method = hk.identity()
    found = hk.attribute(loss, kind(), train, queries, method=method, batch_size=5)
    assert found.stats["way"] == way
    if kind is not Twice:
        wanted = hk.attribute(loss, Plain(), train, queries, method=method, batch_size=5).scores
    else:
        wanted = hk.attribute(loss, kind(), train, queries, method=method, way="forward").scores
    assert torch.allclose(found.scores, wanted, rtol=1e-4, atol=1e-7)
    if way == "forward":
        with pytest.raises(hk.HyperkronError, match=r"does not see all of the gradient of .*use way='forward'"):
            hk.attribute(loss, kind(), train, queries, method=method, way="layers")


def test_statistics_of_the_batch_mix_examples():
    _, train, queries = made(12)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3))
    for way in ("layers", "forward", "auto"):
        with pytest.raises(hk.HyperkronError, match="1 normalises by the statistics of the batch"):
            hk.attribute(loss, model, train, queries, method=hk.identity(), aggregate=True, way=way)


def test_a_loss_without_the_model_is_refused():
    model, train, queries = made(12)
    with pytest.raises(hk.HyperkronError, match="does not depend on the model's parameters"):
        hk.attribute(lambda m, b: b[0].mean(), model, train, queries, method=hk.identity())
    with pytest.raises(hk.HyperkronError, match=r"^query_loss does not depend on the model's parameters"):
        hk.attribute(loss, model, train, queries, query_loss=lambda m, b: b[0].mean())


def test_the_cheaper_way_is_taken():
    model, train, queries = made()
    assert hk.attribute(loss, model, train, queries).stats["way"] == "layers"
    assert hk.attribute(loss, model, train, queries, aggregate=True).stats["way"] == "layers"  # on a CPU
    model.extra = nn.Parameter(torch.zeros(()))

    def moved(model, batch):
        return loss(model, (batch[0] + model.extra, batch[1]))

    assert hk.attribute(moved, model, train, queries).stats["way"] == "layers"  # for it is left out
    assert hk.attribute(moved, model, train, queries, method=hk.identity()).stats["way"] == "forward"


def test_layers_over_flattened_tokens_go_the_other_way():
    torch.manual_seed(0)

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.first(x.reshape(-1, 4)).reshape(x.shape).mean(1))

    x, y = torch.randn(8, 5, 4), torch.randint(0, 3, (8,))
    method = hk.kfac(1e-2, fisher="type-2")
    found = hk.attribute(loss, Flat(), (x, y), (x[:3], y[:3]), method=method)
    assert found.stats["way"] == "forward"


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def test_queries_with_masked_tokens_are_scored_as_if_alone():
    torch.manual_seed(0)
    model, x, y = Tagger().double(), torch.randn(12, 4, 5, dtype=torch.float64), torch.randint(0, 3, (12, 4))
    queries = x[:3], y[:3].clone()
    queries[1][1, 2:] = -100  # not of the first, so that it shows only in the batch
    method = hk.kfac(1e-2, fisher="type-2")
    found = hk.attribute(loss, model, (x, y), queries, method=method).scores
    for q in range(3):
        alone = hk.attribute(loss, model, (x, y), [part[q : q + 1] for part in queries], method=method).scores
        torch.testing.assert_close(found[q : q + 1], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("told", [True, False])
def test_all_queries_go_through_one_pass_whether_or_not_the_loss_says_that_none_is_masked(told, monkeypatch):
    monkeypatch.setattr("hyperkron.losses.classification.answers_at_once", lambda _: told)  # on a GPU it does not say
    model, train, _ = made()
    queries, passes = tuple(part[:20] for part in train), []

    def counted(model, batch):
        passes.append(len(batch[0]))
        return loss(model, batch)

    hk.attribute(loss, model, train, queries, query_loss=counted)
    assert passes.count(20) == 1 and len(passes) <= 3  # with two of a single query, to see that it can be done


class Placed(nn.Module):
    """Token embeddings plus those of their positions, which are looked up once for all examples."""

    def __init__(self, length):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(7, 4), nn.Embedding(length, 4), nn.Linear(4, 3)
        self.length = length

    def forward(self, x):
        return self.head(torch.tanh(self.tokens(x) + self.places(torch.arange(self.length))).mean(1))


def test_as_many_positions_as_examples_are_no_examples():
    """Sums over the batch would agree with autograd's, but the gradients of single examples would not be theirs."""
    torch.manual_seed(0)
    model, x, y = Placed(6).double(), torch.randint(0, 7, (6, 6)), torch.randint(0, 3, (6,))
    arguments = loss, model, (x, y), (x[:4].flip(1), y[:4])
    found = hk.attribute(*arguments, method=hk.identity())
    wanted = hk.attribute(*arguments, method=hk.identity(), way="forward")
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-10, atol=1e-12)
    with pytest.raises(hk.HyperkronError, match="rows are not the examples"):
        hk.attribute(*arguments, method=hk.identity(), way="layers")


class Padded(nn.Module):
    """The output layer has the weight of the embedding, whose padding gets no gradient by being looked up."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))


def test_tangents_of_padding_are_not_taken_for_gradients():
    torch.manual_seed(0)
    model, x, y = Padded().double(), torch.randint(0, 5, (20, 3)), torch.randint(0, 5, (20, 3))
    nn.init.normal_(model.embed.weight)
    arguments = loss, model, (x, y), (x[:2].flip(1), y[:2])
    found = hk.attribute(*arguments, method=hk.identity())
    wanted = []
    for rows in [(x[n : n + 1], y[n : n + 1]) for n in range(20)]:
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(rows[0])[0], rows[1][0]), model.embed.weight)
        wanted.append(gradient)
    queries = [
        torch.autograd.grad(loss(model, (a[None], b[None])).terms[0].row_losses.mean(), model.embed.weight)[0]
        for a, b in zip(x[:2].flip(1), y[:2], strict=True)
    ]
    exact = torch.stack([torch.stack([(q * g).sum() for g in wanted]) for q in queries]) / 20
    torch.testing.assert_close(found.scores, exact, rtol=1e-10, atol=1e-12)
    with pytest.raises(hk.HyperkronError, match="stops gradients"):
        hk.attribute(*arguments, method=hk.identity(), way="forward")


class Positions(nn.Module):
    """Tokens with an embedding of positions, which sees T rows, whatever the number of examples is."""

    def __init__(self, length):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position, self.last = nn.Embedding(7, 4), nn.Embedding(length, 4), nn.Linear(4, 7)

    def forward(self, x):
        return self.last(torch.tanh(self.token(x) + self.position(torch.arange(x.shape[1]))))


class Sorted(Plain):
    """A layer that is given the rows in another order, as by a router."""

    def forward(self, x):
        order = x[:, 0].argsort()
        return self.last(torch.tanh(self.first(x[order]))[order.argsort()])


class TimeFirst(Plain):
    """A layer whose first dimension is time."""

    def forward(self, x):
        return self.last(torch.tanh(self.first(x.transpose(0, 1))).mean(0))


@pytest.mark.parametrize("kind", ["positions", "flattened", "sorted", "time first"])
def test_as_many_rows_as_examples_are_not_taken_for_them(kind):
    count = 16  # examples of the first batch, and positions
    torch.manual_seed(0)
    model, x = Positions(count), torch.randint(0, 7, (count, count))
    if kind == "sorted":
        model, x = Sorted(), torch.randn(count, 5)
    elif kind == "time first":
        model, x = TimeFirst(), torch.randn(count, count, 5)
    train = x, torch.randint(0, 3, (count,) if kind in ("sorted", "time first") else x.shape)

    def criterion(model, batch):
        logits, y = model(batch[0]), batch[1]
        return hk.losses.cross_entropy(logits, y)

    def flattened(model, batch):
        return hk.losses.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    queries, method = tuple(t[:4] for t in train), hk.identity()
    wanted = hk.attribute(criterion, model, train, queries, method=method, way="forward").scores
    if kind == "flattened":
        with pytest.raises(hk.HyperkronError, match="16 examples has 256 rows in the loss"):
            hk.attribute(flattened, model, train, queries, method=method)
    else:
        found = hk.attribute(criterion, model, train, queries, method=method)
        assert found.stats["way"] == "forward"
        assert torch.allclose(found.scores, wanted, rtol=1e-4, atol=1e-7)
    selves = hk.attribution.self_influence(criterion, model, train, method=method, batch_size=count)
    assert torch.allclose(selves[:4], wanted.diagonal()[:4], rtol=1e-4, atol=1e-7)
    with pytest.raises(hk.HyperkronError, match=r"rows are not the examples in their order; use way='forward'"):
        hk.attribute(criterion, model, train, queries, method=method, way="layers")


def test_tokens_may_be_rows_of_the_loss():
    torch.manual_seed(0)
    model, x, y = Tagger(), torch.randn(12, 4, 5), torch.randint(0, 3, (12, 4))
    method = hk.identity()
    wanted = hk.attribute(loss, model, (x, y), (x[:3], y[:3]), method=method).scores

    def flattened(model, batch):
        return hk.losses.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    found = hk.attribute(flattened, model, (x, y), (x[:3], y[:3]), method=method)
    assert found.stats["way"] == "layers"
    assert torch.allclose(found.scores, wanted, rtol=1e-4, atol=1e-7)


class Scale(nn.Module):
    """A norm of the user's own, which KFAC does not know."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x / x.norm(dim=-1, keepdim=True)


class Language(nn.Module):
    """A language model with positions (1, T), as transformers have them, and a head that may be tied."""

    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position, self.norm = nn.Embedding(7, 4), nn.Embedding(6, 4), Scale(4)
        self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, x):
        z = self.token(x) + self.position(torch.arange(x.shape[1])[None])
        return self.head(torch.tanh(self.middle(self.norm(z))))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("batch_size", [16, 256])
def test_language_models_go_by_layers_where_the_method_leaves_out_the_others(tied, batch_size):
    model, tokens = Language(tied).double(), torch.randint(0, 7, (40, 6), generator=torch.Generator().manual_seed(0))

    def next_token(model, batch):
        return hk.losses.cross_entropy(model(batch)[:, :-1], batch[:, 1:])

    found, wanted = (
        hk.attribute(next_token, model, tokens, tokens[:5], batch_size=batch_size, way=way)
        for way in ("auto", "forward")
    )
    assert found.stats["way"] == "layers"
    assert torch.allclose(found.scores, wanted.scores, rtol=1e-9, atol=1e-14)
    everything = hk.attribute(next_token, model, tokens, tokens[:5], method=hk.identity())
    assert everything.stats["way"] == "forward"


class Own(nn.Module):
    """Weights outside layers."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.ParameterList([nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3)])
        self.last = nn.Parameter(torch.randn(64, 10) / 8)

    def forward(self, x):
        for weight in self.hidden:
            x = torch.tanh(x @ weight)
        return x @ self.last


def test_rounding_of_half_precision_is_not_taken_for_stopped_gradients():
    """The vectors are nearly orthogonal to the gradients of a trained model: their products are mostly rounding."""
    torch.manual_seed(0)
    model, x, y = Own(), torch.randn(64, 64), torch.randint(0, 10, (64,))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        loss(model, (x, y)).value.backward()
        optimizer.step()

    def coarse(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[0])
        return hk.losses.cross_entropy(logits.float(), batch[1])

    method = hk.Implicit(hk.curvature.GGN(damping=1e-6), hk.solvers.CG(40))
    found = hk.attribute(coarse, model, (x, y), (torch.randn(4, 64), y[:4]), method=method, batch_size=64)
    assert found.stats["way"] == "forward" and bool(found.scores.isfinite().all())
