"""Running an algorithm: ``fit``, projections of λ, callbacks and the history."""

from hyperkron.training.callbacks import Callback, EarlyStopping, Every
from hyperkron.training.fit import Run, fit
from hyperkron.training.history import History
from hyperkron.training.inner import InnerLoop
from hyperkron.training.projection import Ball, Box, Simplex

__all__ = ["InnerLoop", "Ball", "Box", "Callback", "EarlyStopping", "Every", "History", "Run", "Simplex", "fit"]
