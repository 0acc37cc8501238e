"""Find mislabelled digits and learn to ignore them: hypercleaning with a KFAC hypergradient.

40 % of the training labels are replaced at random. Every training row gets a weight λ_n in [0, 1], which falls if the
network predicts a hundred rows with trusted labels better without that row. So a low weight marks a wrong label.
    min_λ J_trusted(θ*(λ))    subject to    θ*(λ) = argmin_θ (1/N) Σ_n λ_n c(f_θ(x_n), y_n) + α‖θ‖²
"""

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import hyperkron as hk

DATA = None  # scikit-learn's digits; for MNIST's files in that folder: "data/mnist"


def images():
    found = None if DATA is None else hk.cleaning.data.read(DATA)
    x, y = load_digits(return_X_y=True) if found is None else (found.inputs, found.labels)
    order = torch.randperm(len(x))[:1797]
    return torch.tensor(x).float()[order].flatten(1) / x.max(), torch.tensor(y)[order]


def inner(model, weights, batch):  # J_in; hypergradients count the penalty too
    return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights(batch[2])) + hk.losses.l2(model, 1e-3)


def outer(model, weights, batch):  # J_out, on rows whose labels are trusted
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def train(algorithm, weights, x, y, held_out, test, **more):
    """The test accuracy of a new network at the step where its loss on the held-out rows is smallest."""
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    right = lambda: (model(test[0]).argmax(1) == test[1]).float().mean()  # noqa: E731
    scores = hk.training.Evaluate(lambda _: {"loss": outer(model, None, held_out).item(), "right": right()}, every=5)
    more |= {"inner_optimizer": torch.optim.Adam(model.parameters(), lr=3e-3), "callbacks": [scores]}
    hk.fit(hk.BilevelProblem(inner, outer), model, weights, algorithm, (x, y, torch.arange(len(y))), **more)
    return min(scores.rows, key=lambda row: row["loss"])["right"]


def main(seed=0, steps=40, training=250):
    torch.manual_seed(seed)
    trusted, *other, (x, y) = zip(*(part.split([100, 50, 500, 1147]) for part in images()), strict=True)
    given = torch.where(torch.rand(len(y)) < 0.4, torch.randint(10, y.shape), y)
    learned, aid = hk.SampleWeights(len(y)), hk.AID(hk.kfac(damping=0.1), inner_steps=10)
    move = {"outer_optimizer": torch.optim.SGD(learned.parameters(), lr=12.0), "projection": hk.Box(0.0, 1.0)}
    train(aid, learned, x, given, *other, outer_data=trusted, steps=steps, **move)
    weights, fixed = learned.weight.detach(), hk.SampleWeights(len(y) + 100, init=1.0)
    found = {"AUROC": float(roc_auc_score(given != y, -weights))}
    x, y = torch.cat([x, trusted[0]]), torch.cat([given, trusted[1]])
    for name, weight in {"all": 1.0, "trusted": 0.0, "weighted": weights}.items():
        fixed.weight.data[:-100] = weight
        found[name] = train(hk.algorithms.InnerOnly(), fixed, x, y, *other, steps=training)
    return found


if __name__ == "__main__":
    text = "test accuracy by training rows: all {all:.1%}, trusted {trusted:.1%}, weighted {weighted:.1%}; "
    print((text + "AUROC of wrong labels {AUROC:.1%}").format(**main()))
