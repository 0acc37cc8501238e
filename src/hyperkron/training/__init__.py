"""Running an algorithm: ``fit``, projections of λ, callbacks, checkpoints and the history."""

from hyperkron.algorithms.inner_loop import InnerLoop
from hyperkron.training.accumulation import Accumulated
from hyperkron.training.callback import Callback
from hyperkron.training.callbacks import Checkpoint, EarlyStopping, Evaluate
from hyperkron.training.data_parallel import DataParallel
from hyperkron.training.encoding import CheckpointError, DamagedCheckpoint
from hyperkron.training.fit import fit
from hyperkron.training.guards import HalveOnOutOfMemory, SkipFailures, WatchInverses, WatchWeights, default_guards
from hyperkron.training.history import History
from hyperkron.training.projection import Ball, Box, Simplex
from hyperkron.training.run import Run, advance_all
from hyperkron.training.signals import Interrupted
from hyperkron.training.tracking import MLflow, RichProgress, TensorBoard, Tracker, Trackio, WandB

__all__ = [
    "Accumulated",
    "InnerLoop",
    "Ball",
    "Box",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpoint",
    "DataParallel",
    "EarlyStopping",
    "Evaluate",
    "HalveOnOutOfMemory",
    "History",
    "Interrupted",
    "MLflow",
    "RichProgress",
    "Run",
    "Simplex",
    "SkipFailures",
    "TensorBoard",
    "Tracker",
    "Trackio",
    "WandB",
    "WatchInverses",
    "WatchWeights",
    "advance_all",
    "default_guards",
    "fit",
]
