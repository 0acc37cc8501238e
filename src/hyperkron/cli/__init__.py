"""The command line: ``hyperkron clean``, ``report``, ``export``, ``resume`` and ``doctor``.

Nothing here imports torch before a command needs it, so that help and mistakes in the options answer at once.
"""

from hyperkron.cli.app import main

__all__ = ["main"]
