"""Losses that know their own curvature.

Each function returns a :class:`Loss`: the scalar J with its graph, and for every criterion in it a :class:`Term`
that can be asked for vectors whose outer products make up the Hessian of J with respect to the model's output
(Monte-Carlo, exact or empirical), and for products with that Hessian. So value and curvature of the inner problem
come from the same call.

    J = Σ_n (σ_n / N) c_n(f_n) + α‖θ‖²

Losses can be added and scaled: ``cross_entropy(f, y, weight=σ) + 0.1 * mse(g, z) + l2(model, α)``.
"""

from hyperkron.losses.base import DRAWN, L2, BatchPlace, Fisher, Loss, Term, as_loss
from hyperkron.losses.classification import cross_entropy
from hyperkron.losses.elementwise import binary_cross_entropy, mse
from hyperkron.losses.penalty import l2

__all__ = [
    "DRAWN",
    "L2",
    "Fisher",
    "Loss",
    "BatchPlace",
    "Term",
    "as_loss",
    "binary_cross_entropy",
    "cross_entropy",
    "l2",
    "mse",
]
