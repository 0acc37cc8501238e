"""A command that torchrun has started several times: who does what.

``clean`` and ``resume``: the first process does what it does alone, and the others compute stages of its run.
``sweep``: each process is a worker. Other commands are carried out by the first process.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from hyperkron.cli.output import say, silence

START = timedelta(minutes=5)
"""How long processes wait for each other to start."""
PATIENCE = timedelta(days=7)
"""How long processes wait until the first one has read and prepared the data; they notice at once if it ends."""


def processes() -> tuple[int, int]:
    """The number of this process and how many there are, as torchrun says; alone 0 and 1."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # a scheduler may set the others for programs of its own
        return 0, 1
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


def run(command: Callable[[Any, list[str]], int], options: Any, given: list[str]) -> int:
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
        return command(options, given)
    with Meeting(rank, size) as meeting:
        if rank > 0:
            return _assist(meeting.folder(), size, options)
        options.sharing = meeting
        return command(options, given)


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

    It takes a process group of gloo, also with GPUs: nothing else is sent, results are met in the folder.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self._told = rank, size, False

    def __enter__(self) -> Meeting:
        import torch.distributed as dist

        from hyperkron.solution import HyperkronError

        if dist.is_initialized():
            raise HyperkronError(
                "this program has already started a process group (torch.distributed.init_process_group), and the "
                "command needs one of its own; call hyperkron.cleaning.clean or resume in one process of the program, "
                "or start the command by itself: torchrun … -m hyperkron clean …"
            )
        try:
            dist.init_process_group("gloo", timeout=START)
        except RuntimeError as error:
            raise HyperkronError(
                f"of the {self.size} processes of torchrun some have not started within {START}; to run the command "
                "alone inside a program of torchrun, leave RANK and WORLD_SIZE out of its environment."
            ) from error
        self._group = dist.new_group(timeout=PATIENCE)
        return self

    def __exit__(self, *reason: object) -> None:
        from hyperkron.solution import HyperkronError

        if self.rank == 0:
            with suppress(HyperkronError):  # they may have been ended too
                self.tell(None)

    def tell(self, folder: Path | None) -> None:
        """Tell the others, once: the folder, or that there is nothing to do."""
        if not self._told:
            self._told = True
            self._shared(None if folder is None else str(folder.resolve()))

    def folder(self) -> str | None:
        """What the first process tells."""
        return self._shared(None)

    def _shared(self, folder: str | None) -> str | None:
        import torch
        import torch.distributed as dist

        from hyperkron.solution import HyperkronError

        text = torch.tensor(list(os.fsencode(folder or "")), dtype=torch.uint8)
        length = torch.tensor(len(text))
        try:
            dist.broadcast(length, src=0, group=self._group)
            text.resize_(int(length))
            dist.broadcast(text, src=0, group=self._group)
        except RuntimeError as error:
            raise HyperkronError("the first process has ended; its message says why.") from error
        dist.destroy_process_group()
        return os.fsdecode(bytes(text.tolist())) or None
