"""Running an algorithm: ``fit``, projections of λ, callbacks, checkpoints and the history."""

from hyperkron.training.callbacks import Callback, Checkpoint, EarlyStopping, Every
from hyperkron.training.encoding import CheckpointError, DamagedCheckpoint
from hyperkron.training.fit import Run, fit
from hyperkron.training.history import History
from hyperkron.training.inner import InnerLoop
from hyperkron.training.projection import Ball, Box, Simplex
from hyperkron.training.signals import Interrupted

__all__ = [
    "InnerLoop",
    "Ball",
    "Box",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpoint",
    "EarlyStopping",
    "Every",
    "History",
    "Interrupted",
    "Run",
    "Simplex",
    "fit",
]
