"""Searches over the settings of a method: :func:`sweep`, on Optuna, with one or many workers."""

from hyperkron.sweeps.result import SweepResult, TrialRow, read_sweep
from hyperkron.sweeps.space import Range, parse_space
from hyperkron.sweeps.sweep import Trial, sweep

__all__ = ["sweep", "Range", "Trial", "SweepResult", "TrialRow", "read_sweep", "parse_space"]
