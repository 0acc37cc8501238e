"""Processes that are forked from the one that calls, for faults that would end it or change it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


class Child:
    """A forked process that runs a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                function()
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)

    def wait(self) -> int:
        """The exit code; minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def written(function: Callable[[], str], path: Path) -> str:
    """What a function returns in a child; empty if the child fails."""
    path.unlink(missing_ok=True)
    Child(lambda: path.write_text(function())).wait()
    return path.read_text() if path.exists() else ""
