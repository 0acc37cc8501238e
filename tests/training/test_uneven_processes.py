"""Two processes with data of their own: a run of theirs continues, and data that do not fit are named on both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyperkron as hk
import parallel_runs
from hyperkron.training.encoding import split


def _inner(model: nn.Module, weights: nn.Module, batch: Any) -> torch.Tensor:
    return (nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights(batch[2])).mean()


def _outer(model: nn.Module, weights: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _batch(count: int) -> tuple[torch.Tensor, ...]:
    return torch.ones(count, 4), torch.zeros(count, dtype=torch.int64), torch.arange(count)


def wrong_data(rank: int, folder: Path) -> None:
    """Writes down what process ``rank`` says; the second one is given the wrong data."""
    problem = hk.training.DataParallel(hk.BilevelProblem(_inner, _outer), divide=False)
    sharded = hk.SampleWeights(10, group=problem.group)
    for i, wrong in enumerate((torch.tensor([1, 10]), torch.tensor([0.5]), None, torch.ones(4, dtype=torch.bool))):
        message = parallel_runs.refused(lambda wrong=wrong: sharded(wrong if rank == 1 else torch.tensor([3])))  # type: ignore[misc]
        (folder / f"index {i} {rank}").write_text(message)
    other_dtypes = sharded(torch.tensor([9, 3], dtype=(torch.int32, torch.uint8)[rank]))
    mask = sharded(torch.arange(10) > 6 + rank)
    assert other_dtypes.shape == (2,) and mask.shape == (3 - rank,)
    torch.manual_seed(0)
    model, weights, counts = nn.Linear(4, 3), hk.SampleWeights(10), iter([6, 6, 6 - 6 * rank])
    (folder / f"empty {rank}").write_text(
        parallel_runs.refused(
            lambda: hk.fit(
                problem, model, weights, hk.AID(hk.identity(), 1), lambda: _batch(next(counts)), _batch(5), steps=3
            )
        )
    )


def continued(rank: int, folder: Path) -> None:
    """Writes down whether a run continues bit for bit, each process with order and random numbers of its own."""
    ends = []

    def noisy(examples: list[Any]) -> tuple[torch.Tensor, ...]:
        """An augmentation that draws more numbers on the second process."""
        x, y, index = torch.utils.data.default_collate(examples)
        return x + torch.randn(3 + rank, 4)[: len(x)], y, index

    for steps, saved in ((4, "whole"), (1, "run"), (4, "run")):
        torch.manual_seed(0)
        model, problem = nn.Linear(4, 3), hk.training.DataParallel(hk.BilevelProblem(_inner, _outer), divide=False)
        weights = hk.SampleWeights(10)
        rows = torch.randn(10, 4), torch.arange(10) % 3, torch.arange(10)
        data, order = torch.utils.data.TensorDataset(*rows), torch.Generator().manual_seed(rank)
        loader = torch.utils.data.DataLoader(data, 3, shuffle=True, generator=order, collate_fn=noisy)
        examples = hk.algorithms.Examples(*rows, batch_size=4, seed=rank)
        run = hk.fit(
            problem, model, weights, hk.AID(hk.identity(), 1), loader, examples, steps=steps, resume=folder / saved
        )
        run.save(folder / saved)
        ends.append(torch.cat([p.detach().flatten() for p in (*model.parameters(), *weights.parameters())]))
    (folder / f"continued {rank}").write_text(str(torch.equal(ends[0], ends[2])))


def kept_curvature(rank: int, folder: Path) -> None:
    """Writes down which tensors and statistics of a run that keeps its curvature differ after it was continued."""
    rows = torch.randn(10, 9), torch.arange(10) % 3, torch.arange(10)
    problem, differ = hk.training.DataParallel(hk.BilevelProblem(_inner, _outer), divide=False), []
    for i, kept in enumerate(({"refresh_every": 3}, {"refresh_every": 3, "split": "exact"}, {"basis_every": 3})):
        method = (hk.ekfac if i == 2 else hk.kfac)(0.1, fisher="empirical", ema=0.5, **kept)
        ends: list[dict[str, Any]] = []
        for steps, saved in ((3, "whole"), (2, "run"), (3, "run")):
            torch.manual_seed(0)
            weights, layers = hk.SampleWeights(10), [nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(5)]
            data = [hk.algorithms.Examples(*rows, batch_size=size, seed=rank) for size in (4, 5)]
            path, algorithm = folder / f"{i} {saved}", hk.AID(method.fresh(), 2)
            run = hk.fit(problem, nn.Sequential(*layers), weights, algorithm, *data, steps=steps, resume=path)
            run.save(path)
            ends.append(split(run.state.state_dict())[1] | {"statistic": run.history[-1]["curvature_strategy"]})
        alike = {name for name, x in ends[0].items() if name in ends[2] and same(x, ends[2][name])}
        differ += [f"{i} {name}" for name in (ends[0].keys() | ends[2].keys()) - alike]
    (folder / f"kept {rank}").write_text("\n".join(differ))


def running_statistics(rank: int, folder: Path) -> None:
    """Writes down whether statistics of BatchNorm, which are used in evaluation mode, are those of this process."""

    def outer(model: nn.Module, weights: nn.Module, batch: Any) -> torch.Tensor:
        model.eval()
        loss = _outer(model, weights, batch)
        model.train()
        return loss

    rows, found = (torch.randn(10, 4), torch.arange(10) % 3, torch.arange(10)), []
    for divide in (True, False):
        problem, ends = hk.training.DataParallel(hk.BilevelProblem(_inner, outer), divide=divide), []
        for steps, saved in ((3, "whole"), (2, "run"), (3, "run")):
            torch.manual_seed(0)
            model, weights = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), hk.SampleWeights(10)
            data = hk.algorithms.Examples(*rows, batch_size=5, seed=0 if divide else rank)
            path, method = folder / f"statistics {divide} {saved}", hk.AID(hk.identity(), 1)
            run = hk.fit(problem, model, weights, method, data, data, steps=steps, resume=path)
            run.save(path)
            ends.append(split(run.state.state_dict())[1])
        found.append(all(same(x, ends[2][name]) for name, x in ends[0].items()))
    (folder / f"statistics {rank}").write_text(f"{found} {ends[0]['model.1.running_mean'].tolist()}")


def same(x: Any, y: Any) -> bool:
    """Whether two values are the same, tensors in bits and layout."""
    return x.stride() == y.stride() and torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    here = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    code = (
        "import sys; from pathlib import Path; import torch, parallel_runs, test_uneven_processes as test\n"
        "torch.set_num_threads(1); folder = Path(sys.argv[1])\n"
        "def checks(rank):\n"
        "    for check in (test.continued, test.kept_curvature, test.running_statistics, test.wrong_data):\n"
        "        check(rank, folder)\n"
        "started = parallel_runs.started(2, checks, folder)\n"
        "sys.exit(any(parallel_runs.exit_codes(started)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env=here, text=True, timeout=300, check=False)
    assert done.returncode == 0, [(folder / f"errors-{rank}").read_text()[-2000:] for rank in range(2)]
    return folder


def test_each_process_continues_with_its_own_batches_and_random_numbers(said: Path) -> None:
    """All continued with those of the first one."""
    assert [(said / f"continued {rank}").read_text() for rank in range(2)] == ["True", "True"]


def test_curvature_that_is_kept_continues_bit_for_bit(said: Path) -> None:
    """The matrices of damped factors were saved, and factorised again."""
    assert [(said / f"kept {rank}").read_text() for rank in range(2)] == ["", ""]


def test_running_statistics_of_each_process_continue(said: Path) -> None:
    """All continued with those of the first one, which changed θ where an objective uses evaluation mode."""
    first, second = ((said / f"statistics {rank}").read_text() for rank in range(2))
    assert first.startswith("[True, True]") and second.startswith("[True, True]") and first != second


@pytest.mark.parametrize("case", range(4))
def test_an_index_that_does_not_fit_on_one_process_is_an_error_on_both(said: Path, case: int) -> None:
    why = ["index runs from 1 to 10", "torch.float32", "not a tensor", "mask"][case]
    first, second = ((said / f"index {case} {rank}").read_text() for rank in range(2))
    assert "another process was given an index that does not fit" in first
    assert "does not fit 10 rows of λ" in second and why in second


def test_an_empty_batch_on_one_process_says_what_to_give_instead(said: Path) -> None:
    """It was told to skip the batch, which would leave the others alone, or to look for nan."""
    first, second = ((said / f"empty {rank}").read_text() for rank in range(2))
    assert "process 1 was given an empty batch of inner" in second and "DistributedSampler" in second
    assert "another process has ended" in first and "its own message says why" in first
