"""A command that torchrun has started several times: who does what.

``clean`` and ``resume``: the first process does what it does alone, and the others compute stages of its run.
``sweep``: each process is a worker. Other commands are carried out by the first process.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from hyperkron.cli.output import say, silence

START = timedelta(minutes=5)
"""How long a process tries to reach the store of torchrun."""
SECONDS_BETWEEN_LOOKS = 0.2
"""How often a process looks whether the first one has read and prepared the data."""
FOLDER = "folder"
"""What the entry of the store is called."""


def processes() -> tuple[int, int]:
    """The number of this process and how many there are, as torchrun says; alone 0 and 1."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # a scheduler may set the others for programs of its own
        return 0, 1
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


def run(command: Callable[[Any], int], options: Any) -> int:
    """The part of this process in a command, and its exit code."""
    rank, size = processes()
    shares, sweeps = options.command in ("clean", "resume"), options.command == "sweep"
    if rank > 0:
        silence(sys.stdout)
        options.quiet = True
        if (sweeps and options.function == "show") or not (shares or sweeps):
            return 0
    elif not (shares or sweeps):
        say(f"hyperkron {options.command} uses one of the {size} processes.")
    _choose_gpu()
    if not shares:
        options.out = getattr(options, "out", None) if rank == 0 else None
        return command(options)
    with Meeting(rank, size) as meeting:
        if rank > 0:
            return _assist(meeting.folder(), size, options)
        from hyperkron.cleaning.run import Sharing

        options.shared = {"sharing": Sharing(size, meeting.tell)}
        return command(options)


def _assist(folder: str | None, size: int, options: Any) -> int:
    if folder is None:  # the first process has ended, and says why
        return 0
    from hyperkron.cleaning.api import assist
    from hyperkron.cli.cleaning import expected_settings, load_model
    from hyperkron.solution import HyperkronWarning

    warnings.simplefilter("ignore", HyperkronWarning)  # the first process gives them
    expected = expected_settings(options) if options.command == "resume" else None
    assist(folder, size, model=load_model(options.model), expected=expected)
    return 0


def _choose_gpu() -> None:
    """Each process of a computer takes a GPU of its own, as far as there are some."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


class Meeting:
    """Where the first process tells the others the folder of its run, once they can work on it.

    It is an entry of torchrun's own store: nothing else is sent, results are met in the folder.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._told = rank, size, False

    def __enter__(self) -> Meeting:
        from torch.distributed import PrefixStore, rendezvous

        from hyperkron.solution import HyperkronError

        try:
            store, _, _ = next(iter(rendezvous("env://", self._rank, self._size, timeout=START)))
        except (RuntimeError, ValueError) as error:
            raise HyperkronError(
                f"the store of torchrun cannot be reached ({str(error)[:200]}); to run the command alone inside a "
                "program of torchrun, leave RANK and WORLD_SIZE out of its environment."
            ) from error
        self._store = PrefixStore(f"hyperkron-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        return self

    def __exit__(self, *reason: object) -> None:
        if self._rank == 0:
            with suppress(RuntimeError):  # they may have been ended too
                self.tell(None)

    def tell(self, folder: Path | None) -> None:
        """Tell the others, once: the folder, or that there is nothing to do."""
        if not self._told:
            self._told = True
            path = os.fsencode("" if folder is None else folder.resolve())
            self._store.set(FOLDER, path)  # type: ignore[arg-type]  # bytes are taken, too

    def folder(self) -> str | None:
        """What the first process tells, as soon as it does."""
        from hyperkron.solution import HyperkronError

        try:
            while not self._store.check([FOLDER]):
                time.sleep(SECONDS_BETWEEN_LOOKS)
            return os.fsdecode(self._store.get(FOLDER)) or None
        except RuntimeError as error:
            raise HyperkronError("the first process has ended; its message says why.") from error
