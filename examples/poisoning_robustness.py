"""How much can a few bad training rows cost a model, and does cleaning help? A worst case, measured beforehand.

λ is a network g_λ that rewrites a share ε of added rows (TGDA; Lu, Kamath & Yu, TMLR 2022); `hk.clean` looks for them:
    max_λ J_val(θ*(λ))    subject to    θ*(λ) = argmin_θ  mean CE over clean rows (x, y) and added rows (g_λ(x'), y')
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hyperkron as hk

DATA, SHARE = "digits", 0.1  # "data/mnist" for MNIST's IDX files in that folder; ε


def rows() -> tuple[Tensor, Tensor]:
    x, y = (torch.tensor(z) for z in load_digits(return_X_y=True))
    if DATA != "digits":
        found = hk.cleaning.data.read(DATA)
        x, y = torch.tensor(found.inputs).flatten(1) / 255 * 16, torch.tensor(found.labels)
    order = torch.randperm(len(x))[:1797]
    return x[order].float() / 8 - 1, y[order]


class Rewrite(nn.Sequential):  # g_λ(x) = x + MLP(x), cut off at ±1
    def forward(self, x: Tensor) -> Tensor:
        return (x + super().forward(x)).clamp(-1, 1)


def train(x: Tensor, y: Tensor) -> nn.Module:
    model = hk.cleaning.models.linear(x.shape[1], 10)
    problem = hk.BilevelProblem(lambda m, _, batch: hk.losses.cross_entropy(m(batch[0]), batch[1]))
    hk.fit(problem, model, None, hk.algorithms.InnerOnly(inner_rate=0.1), (x, y), steps=300)
    return model


def main(steps: int = 60) -> dict[str, float]:
    torch.manual_seed(0)
    (x, val, known, test), (y, y_val, y_known, y_test) = (z.split([900, 300, 150, 447]) for z in rows())
    added, size, model = int(SHARE * len(x)), x.shape[1], train(x, y)
    labels, rewrite = torch.cat([y, y[:added]]), Rewrite(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, size))
    problem = hk.BilevelProblem(
        lambda m, g, batch: hk.losses.cross_entropy(m(torch.cat([batch, g(batch[:added])])), labels),
        lambda m, g, batch: -hk.losses.cross_entropy(m(batch), y_val),
    )
    sgd, adam = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(rewrite.parameters(), lr=3e-3)
    tgda = hk.algorithms.TGDA(hk.kfac(1e-3, fisher="empirical"))
    hk.fit(problem, model, rewrite, tgda, x, val, steps=steps, inner_optimizer=sgd, outer_optimizer=adam)
    every = torch.cat([x, rewrite(x[:added]).detach()])
    found = hk.clean((every, labels), (known, y_known), config=hk.cleaning.CleanConfig(compare=()))
    kept = torch.ones(len(every), dtype=torch.bool).index_fill(0, found.suspects, False)
    sets = {"clean": (x, y), "poisoned": (every, labels), "cleaned": (every[kept], labels[kept])}
    scores = {name: float((train(*part)(test).argmax(1) == y_test).float().mean()) for name, part in sets.items()}
    print("test accuracy by training rows:", ", ".join(f"{name} {score:.1%}" for name, score in scores.items()))
    print(f"{int((found.suspects >= len(x)).sum())} of {added} added rows are among {len(found.suspects)} suspects")
    return scores


if __name__ == "__main__":
    assert (scores := main())["poisoned"] < scores["clean"], "the added rows did no harm"
