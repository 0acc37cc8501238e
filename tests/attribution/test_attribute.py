"""What a user meets: results on disk, interruptions, several models, and arguments that make no sense."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hyperkron as hk
from hyperkron.attribution import attribute, inner_products


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


def test_scores_on_disk_are_those_in_memory(tmp_path):
    model, train, queries = made()
    memory = hk.attribute(loss, model, train, queries, batch_size=7).scores
    disk = hk.attribute(loss, model, train, queries, batch_size=7, out=tmp_path)
    assert torch.equal(disk.scores, memory)
    assert disk.helpful(1, 3) == hk.Attribution(memory).helpful(1, 3)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupted_call_continues_to_the_same_bits(tmp_path, monkeypatch, after):
    model, train, queries = made()
    method = hk.ekfac(1e-3)  # draws at random: a second measurement would give other factors
    whole = hk.attribute(loss, model, train, queries, method=method, batch_size=7, out=tmp_path / "a").scores.clone()
    real, calls = inner_products.LayerProducts.__call__, []

    def dies(self, batch, vectors, count):
        if len(calls) == after:
            raise Killed
        calls.append(1)
        return real(self, batch, vectors, count)

    monkeypatch.setattr(inner_products.LayerProducts, "__call__", dies)
    with pytest.raises(Killed):
        hk.attribute(loss, model, train, queries, method=method, batch_size=7, out=tmp_path / "b")
    done = []
    monkeypatch.setattr(inner_products.LayerProducts, "__call__", lambda *a: done.append(1) or real(*a))
    found = hk.attribute(loss, model, train, queries, method=method, batch_size=7, out=tmp_path / "b")
    assert torch.equal(found.scores, whole)
    assert len(done) == 6 - after


def test_another_run_s_folder_is_refused(tmp_path):
    model, train, queries = made()
    hk.attribute(loss, model, train, queries, out=tmp_path)
    with torch.no_grad():
        model[0].weight.add_(1e-3)
    with pytest.raises(hk.HyperkronError, match="different: model"):
        hk.attribute(loss, model, train, queries, out=tmp_path)
    (tmp_path / "progress.json").write_text("{")
    with pytest.raises(hk.HyperkronError, match="cannot be read"):
        hk.attribute(loss, model, train, queries, out=tmp_path)


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


def test_the_cheaper_way_is_taken():
    model, train, queries = made()
    assert hk.attribute(loss, model, train, queries).stats["way"] == "layers"
    assert hk.attribute(loss, model, train, queries, aggregate=True).stats["way"] == "forward"
    model.extra = nn.Parameter(torch.zeros(()))
    used = hk.attribute(lambda m, b: loss(m, (b[0] + m.extra, b[1])), model, train, queries)
    assert used.stats["way"] == "forward"


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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "ekfac"}, "method='ekfac' does not solve"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"way": "sideways"}, "way='sideways'"),
        ({"model": []}, "model is an empty list"),
        ({"train": 3}, "train is a int"),
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
