"""Find wrong labels on several processes: the same example weights, whatever their number.

    torchrun --nproc-per-node 2 examples/data_parallel.py runs/parallel     # or: python examples/data_parallel.py

40 % of the labels of scikit-learn's digits are random; a hundred trusted ones decide what each of the others weighs. A
run that is killed continues when it is started again, also with another number of processes.
"""

import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

import hyperkron as hk


def inner(model, weights, batch):
    return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights(batch[2])) + hk.losses.l2(model, 1e-4)


def outer(model, weights, batch):
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def main(folder: str, steps: int = 60) -> float:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    images, digits = (torch.as_tensor(x) for x in load_digits(return_X_y=True))
    x = (images / 16).double()
    given = torch.where(torch.rand(len(digits)) < 0.4, torch.randint(10, digits.shape), digits)
    train = TensorDataset(x[100:], given[100:], torch.arange(len(x) - 100))
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()
    weights = hk.SampleWeights(len(train)).double()
    run = hk.fit(
        hk.training.DataParallel(hk.BilevelProblem(inner, outer)),  # this line is all that several processes need
        model,
        weights,
        hk.AID(hk.kfac(1e-2), inner_steps=2),
        DataLoader(train, batch_size=256, shuffle=True, drop_last=True),
        (x[:100], digits[:100]),
        steps=steps,
        inner_optimizer=torch.optim.Adam(model.parameters(), lr=3e-3),
        outer_optimizer=torch.optim.Adam(weights.parameters(), lr=0.1),
        callbacks=[hk.Checkpoint(folder, every=5)],
        resume=folder,
    )
    found = float(roc_auc_score(given[100:] != digits[100:], -weights.weight.detach()))
    if run.group.rank == 0:
        print(f"{run.group.size} process(es): weights tell wrong labels from right ones with AUROC {found:.3f}")
    return found


if __name__ == "__main__":
    assert main(*sys.argv[1:2] or ["runs/parallel"]) > 0.85
