"""Running an algorithm: ``fit``, projections of λ, callbacks and the history."""

from hyperkron.training.callbacks import Callback, EarlyStopping, Every
from hyperkron.training.fit import Run, fit
from hyperkron.training.history import History
from hyperkron.training.projection import Ball, Box, Simplex

__all__ = ["Ball", "Box", "Callback", "EarlyStopping", "Every", "History", "Run", "Simplex", "fit"]
