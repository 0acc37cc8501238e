"""Protect published images: a small change of each class keeps networks from learning what helps on clean images.

λ is one change per class, at most ε a pixel. θ is a network trained on the changed images (J_in); λ moves along the
KFAC hypergradient so that θ fails on clean ones (J_out). Networks trained from scratch show what the change is worth.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.cleaning.data import read
from hyperkron.losses import Loss, cross_entropy

EPSILON = 0.3  # of pixels in [0, 1]; 8 / 255 is usual for photographs


def digits() -> tuple[Tensor, ...]:
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    return *(x.float().reshape(-1, 1, 8, 8) / 16).split((1300, 497)), *y.split((1300, 497))


def files(folder: str) -> tuple[Tensor, ...]:
    train = read(folder, part="train")
    parts = (train, read(folder, part="test", like=train))
    images = (torch.as_tensor(part.inputs).float() / 255 for part in parts)
    return *images, *(torch.as_tensor(part.labels) for part in parts)


def inner(model: nn.Module, change: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    return cross_entropy(model((batch[0] + EPSILON * change()[batch[1]].tanh()).clamp(0, 1)), batch[1])


def outer(model: nn.Module, change: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    output = model(batch[0])  # bounded: the loss of the least likely class other than the true one
    return cross_entropy(output, output.detach().scatter(1, batch[1][:, None], torch.inf).argmin(1))


def train(x: Tensor, y: Tensor, change: nn.Module, algorithm: hk.algorithms.Algorithm, steps: int) -> nn.Module:
    first = [nn.Conv2d(x.shape[1], 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    model = nn.Sequential(*first, nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    data, theta = hk.algorithms.Examples(x, y, batch_size=128), torch.optim.Adam(model.parameters(), 2e-3)
    moves = {"inner_optimizer": theta, "outer_optimizer": torch.optim.Adam(change.parameters(), 0.1)}
    hk.fit(hk.BilevelProblem(inner, outer), model, change, algorithm, data, data, steps=steps, **moves)
    return model


def main(steps: int = 100) -> list[float]:
    x, x_test, y, y_test = digits()  # or files("data/cifar10")
    change, plain = hk.as_hyper(torch.zeros(10, *x.shape[1:])), hk.algorithms.InnerOnly(2)
    models = [train(x, y, change, one, steps) for one in (plain, hk.AID(hk.kfac(1e-2), 1), plain)]
    found = [float((model(x_test).argmax(1) == y_test).double().mean()) for model in models[::2]]
    print("Clean test images right, by training images: clean {:.1%}, protected {:.1%}".format(*found))
    return found


if __name__ == "__main__":
    assert (found := main())[1] < found[0], "networks learn as well from the changed images"
