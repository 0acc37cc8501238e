"""What attribution holds at once, counted in vectors as long as the parameters."""

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.attribution import layer_calls, task
from hyperkron.solvers import Direct
from storages import Storages

NUMBERS = 5050  # of the parameters


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def attributed(queries: int, rows: int, method: hk.Implicit | None = None) -> float:
    """The peak of memory while this many rows are scored, all of them in one batch."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(100, 50), torch.randn(300, 100), torch.randint(0, 50, (300,))
    with Storages([x, y, *model.parameters()]) as count:
        hk.attribute(loss, model, (x[:rows], y[:rows]), (x[:queries], y[:queries]), method=method, batch_size=512)
    return count.peak / (4 * NUMBERS)


@pytest.mark.parametrize("method", [None, hk.identity()], ids=["default", "identity"])
def test_vectors_are_held_once(monkeypatch: pytest.MonkeyPatch, method: hk.Implicit | None) -> None:
    monkeypatch.setattr(task, "MAX_QUERIES", 8)
    assert 200 < attributed(200, 16, method) < 300


def test_gradients_of_one_piece_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "MAX_QUERIES", 8)
    monkeypatch.setitem(layer_calls.PIECE, "cpu", 100 * NUMBERS)
    assert 201 < attributed(101, 300, hk.identity()) < 250


@pytest.mark.parametrize(("numbers", "together"), [(1, 1), (3 * NUMBERS, 3), (2**25, 32)])
def test_fewer_queries_are_solved_for_at_once_where_a_model_is_large(
    monkeypatch: pytest.MonkeyPatch, numbers: int, together: int
) -> None:
    sizes, solve = [], Direct.solve_stacked

    def noted(solver, operator, b, **options):
        sizes.append(len(next(iter(b.values()))))
        return solve(solver, operator, b, **options)

    monkeypatch.setattr(Direct, "solve_stacked", noted)
    monkeypatch.setattr(task, "MAX_NUMBERS", numbers)
    attributed(40, 16)
    assert max(sizes) == together
    assert sum(sizes) == 40


def test_the_progress_of_few_queries_ends_with_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Their only part is the whole, after which no more is asked for."""
    torch.manual_seed(0)
    data = torch.randn(16, 3), torch.randint(0, 2, (16,))
    hk.attribute(loss, nn.Linear(3, 2), data, (data[0][:5], data[1][:5]), progress=True)
    assert "5/5" in capsys.readouterr().err
