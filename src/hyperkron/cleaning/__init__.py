"""From noisy labels and a few trusted ones to clean labels and a better model."""

from hyperkron.cleaning.api import clean, resume
from hyperkron.cleaning.config import ALTERNATIVES, OURS, CleanConfig
from hyperkron.cleaning.explain import Explanation, explain
from hyperkron.cleaning.loading import load
from hyperkron.cleaning.progress import Progress
from hyperkron.cleaning.result import CleanResult

__all__ = [
    "ALTERNATIVES",
    "OURS",
    "CleanConfig",
    "CleanResult",
    "Explanation",
    "Progress",
    "clean",
    "explain",
    "load",
    "resume",
]
