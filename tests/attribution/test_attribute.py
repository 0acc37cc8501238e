"""What a user meets: several models, bad solves, and arguments that make no sense."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hyperkron as hk
from hyperkron.attribution import attribute, self_influence
from hyperkron.solution import Status


def loss(model, batch):
    return hk.losses.cross_entropy(model(batch[0]), batch[1]) + hk.losses.l2(model, 1e-2)


def made(rows=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(rows, 5), torch.randint(0, 3, (rows,))
    return model, (x, y), (x[:4], y[:4])


def test_the_model_is_left_as_it_was():
    model, train, queries = made()
    model[1].eval()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    hk.attribute(loss, model, train, queries)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_several_models_are_averaged():
    first, train, queries = made()
    torch.manual_seed(1)
    second = nn.Sequential(nn.Linear(5, 3))
    method = hk.kfac(1e-2, fisher="type-2")
    apart = [hk.attribute(loss, m, train, queries, method=method).scores for m in (first, second)]
    together = hk.attribute(loss, [first, second], train, queries, method=method).scores
    assert torch.allclose(together, (apart[0] + apart[1]) / 2)


def test_a_dataset_gives_the_scores_of_its_tensors():
    model, train, queries = made()
    method = hk.kfac(1e-2, fisher="type-2")
    wanted = hk.attribute(loss, model, train, queries, method=method).scores
    found = hk.attribute(loss, model, TensorDataset(*train), TensorDataset(*queries), method=method).scores
    assert torch.equal(found, wanted)


def test_self_influence_takes_several_models_and_any_network():
    first, train, _ = made(12)
    second = nn.Sequential(nn.Linear(5, 3))
    method = hk.kfac(1e-2, fisher="type-2")
    apart = [self_influence(loss, m, train, method=method) for m in (first, second)]
    together = self_influence(loss, [first, second], train, method=method)
    assert torch.allclose(together, (apart[0] + apart[1]) / 2)
    first.extra = nn.Parameter(torch.zeros(()))  # no layer: gradients one by one

    def shifted(model, batch):
        return loss(model, (batch[0] + model.extra, batch[1]))

    found = self_influence(shifted, first, train, method=method, batch_size=5)
    wanted = hk.attribute(shifted, first, train, train, method=method, batch_size=5)
    assert wanted.stats["way"] == "forward"
    assert torch.allclose(found, wanted.scores.diagonal(), rtol=1e-4)
    with pytest.raises(hk.HyperkronError, match="method='ekfac' does not solve"):
        self_influence(loss, first, train, method="ekfac")


def test_reduced_factors_of_convolutions_are_warned_of(monkeypatch):
    monkeypatch.setattr("hyperkron.solution._warned", set())
    x, y = torch.randn(6, 1, 4, 4), torch.randint(0, 3, (6,))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    with pytest.warns(hk.HyperkronWarning, match="use sharing='expand'"):
        hk.attribute(loss, model, (x, y), (x, y), method=hk.kfac(1e-2, sharing="reduce"))


def test_the_worst_status_of_all_solves_is_told():
    model, train, queries = made()
    plain = lambda m, b: hk.losses.cross_entropy(m(b[0]), b[1])  # noqa: E731
    with pytest.warns(hk.HyperkronWarning, match="NONPOSITIVE_CURVATURE"):
        found = hk.attribute(plain, model, train, queries, method=hk.cg(30, 0.0))
    assert found.stats["status"] is Status.NONPOSITIVE_CURVATURE


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "ekfac"}, "method='ekfac' does not solve"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"way": "sideways"}, "way='sideways'"),
        ({"model": []}, "model is an empty list"),
        ({"model": len}, "model is a builtin_function_or_method, not a torch.nn.Module"),
        ({"train": 3}, "train is a int"),
        ({"train": (torch.ones(3, 5), torch.ones(3), None)}, "train holds a NoneType beside .*leave out what is None"),
        ({"train": {"x": {"ids": torch.ones(3, 5)}}}, "train holds a dict beside or in place of tensors"),
        ({"queries": DataLoader(TensorDataset(torch.ones(3, 5)))}, "queries is a DataLoader; .* its .dataset"),
        ({"train": Stream()}, r"train is a Stream; .* a dataset with len\(\) and \[i\]"),
        ({"train": (torch.ones(3, 5), torch.ones(2))}, r"train has tensors of \[2, 3\] rows"),
        ({"queries": (torch.ones(0, 5), torch.ones(0))}, "queries has no examples"),
        ({"loss": 1.0}, "loss=1.0 is not callable"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changed, message):
    model, train, queries = made()
    given = {"loss": loss, "model": model, "train": train, "queries": queries} | changed
    with pytest.raises(hk.HyperkronError, match=message):
        attribute(**given)


def test_a_query_that_is_not_there():
    with pytest.raises(hk.HyperkronError, match="query=3 is not one of the 2 queries"):
        hk.Attribution(torch.zeros(2, 4)).helpful(3)
    with pytest.raises(hk.HyperkronError, match="count=-1 must be a whole number ≥ 0"):
        hk.Attribution(torch.zeros(2, 4)).harmful(0, -1)


def test_it_may_be_called_in_inference_mode():
    model, train, queries = made()
    wanted = hk.attribute(loss, model, train, queries).scores
    with torch.inference_mode():
        found = hk.attribute(loss, model, train, queries).scores.clone()
    assert torch.equal(found, wanted)


# --- mixed precision, and what is refused ------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("norm", [False, True])
def test_a_loss_under_autocast_has_scores_near_those_of_float32(count, norm):
    torch.manual_seed(0)
    middle = [nn.LayerNorm(16)] if norm else [nn.ReLU()]
    model = nn.Sequential(nn.Linear(8, 16), *middle, nn.Linear(16, 3))
    x, y = torch.randn(40, 8), torch.randint(3, (40,))

    def plain(model, batch):
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    def autocast(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch[0])
        return hk.losses.cross_entropy(output.float(), batch[1])

    method = hk.Implicit(hk.curvature.EKFAC(0.1, fisher="type-2"), hk.solvers.Direct())
    exact, found = (
        hk.attribute(loss, model, (x, y), (x[:count], y[:count]), method=method, way="layers").scores
        for loss in (plain, autocast)
    )
    assert torch.nn.functional.cosine_similarity(exact.flatten(), found.flatten(), dim=0) > 0.999


def test_numpy_arrays_and_bare_curvatures_are_refused_with_the_remedy():
    model, x, y = nn.Linear(4, 2), torch.randn(6, 4), torch.randint(2, (6,))

    def loss(model, batch):
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(hk.HyperkronError, match=r"train holds numpy arrays; pass tensors: torch.from_numpy"):
        hk.attribute(loss, model, (x.numpy(), y.numpy()), (x, y))
    with pytest.raises(hk.HyperkronError, match=r"is a curvature; pass hk.Implicit\(method, hk.solvers.Direct\(\)\)"):
        hk.attribute(loss, model, (x, y), (x, y), method=hk.curvature.EKFAC(1e-4))


def test_weights_used_outside_their_layers_are_noticed_under_autocast_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(40, 8), torch.randint(3, (40,))

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch[0] @ model[0].weight * 0.1)
        return hk.losses.cross_entropy(output.float(), batch[1])

    with pytest.raises(hk.HyperkronError, match=r"does not see all of the gradient of 0\.weight"):
        hk.attribute(loss, model, (x, y), (x[:5], y[:5]), way="layers")


def test_an_array_of_rows_is_a_dataset():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(6, 4)

    def loss(model, batch):
        return hk.losses.mse(model(batch), torch.zeros(len(batch), 2))

    tensors, rows = (hk.attribute(loss, model, given, given[:2]).scores for given in (x, x.numpy()))
    torch.testing.assert_close(rows, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_is_a_sum_over_queries_is_that_of_each_alone(dtype):
    model, (x, y), _ = made()
    model, x = model.to(dtype), x.to(dtype)

    def total(model, batch):
        return hk.losses.cross_entropy(model(batch[0]), batch[1]) * len(batch[1])

    options = {"query_loss": total, "method": hk.identity(), "way": "layers"}
    found = hk.attribute(loss, model, (x, y), (x[:4], y[:4]), **options)
    assert found.scores.dtype == torch.float32  # which numpy has
    for q in range(4):
        alone = hk.attribute(loss, model, (x, y), (x[q : q + 1], y[q : q + 1]), **options).scores[0]
        assert float((found.scores[q] - alone).norm()) < (1e-5 if dtype == torch.float32 else 0.05) * alone.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_self_influence_of_a_model_in_half_precision_is_summed_in_float32(dtype):
    model, (x, y), _ = made()
    model, x = model.to(dtype), x.to(dtype)

    def small(model, batch):
        return hk.losses.cross_entropy(model(batch[0]), batch[1]) * 1e-2

    found = self_influence(small, model, (x, y), method=hk.identity(), batch_size=4)
    wanted = self_influence(small, model.float(), (x.float(), y), method=hk.identity())
    assert found.dtype == torch.float32
    assert float((found - wanted).norm()) < 0.02 * wanted.norm()


@pytest.mark.parametrize("method", [None, hk.cg(3, curvature=hk.curvature.GGN(1e-2))])
def test_a_plain_loss_is_refused_by_the_name_of_the_argument(method):
    model, train, queries = made()
    with pytest.raises(hk.HyperkronError, match=r"^loss returned a plain scalar tensor"):
        hk.attribute(lambda m, b: loss(m, b).value, model, train, queries, method=method)


def test_several_processes_and_sharded_models_are_named(monkeypatch):
    model, train, queries = made()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(hk.solution, "_warned", set())
    with pytest.warns(hk.HyperkronWarning) as caught:
        hk.attribute(loss, model, train, queries, method=hk.identity())
    assert len(caught) == 1
    assert "attribution does not share work among them" in str(caught[0].message)
    monkeypatch.setattr("hyperkron.attribution.checks.is_sharded", lambda p: True)
    with pytest.raises(hk.HyperkronError, match=r"0.weight is sharded .* plain copy on one process"):
        hk.attribution.self_influence(loss, model, train)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.index_fill(0, torch.tensor([2]), torch.nan), r"{loss} is nan; {rows}\[0\] holds 4 nan"),
        (lambda x: x.float(), r"{loss} failed: {rows}\[0\] is torch.float32 but the model is torch.float64"),
    ],
)
@pytest.mark.parametrize("which", ["train", "queries"])
def test_bad_rows_are_named_as_the_argument_they_are_in(which, change, says):
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 2).double(), torch.randn(6, 4, dtype=torch.float64), torch.randint(2, (6,))
    data = {"train": (x, y), "queries": (x, y)}
    data[which] = (change(x), y)
    called = {"train": "loss", "queries": "query_loss"}[which]
    with pytest.raises(hk.HyperkronError, match=says.format(loss=called, rows=which)):
        hk.attribute(lambda m, b: hk.losses.cross_entropy(m(b[0]), b[1]), model, **data)
