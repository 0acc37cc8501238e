"""Worker processes of an experiment as threads of the test's own process, so that a test need not start any."""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

import pytest

from experiments import workers


class _Thread(threading.Thread):
    pid: int | None = None
    exitcode = None

    def start(self) -> None:
        self.pid = os.getpid()
        super().start()

    def kill(self) -> None:
        pass


class _Context:
    Queue = queue.Queue

    @staticmethod
    def Process(target: Any, args: Any, daemon: bool) -> _Thread:
        return _Thread(target=target, args=args, daemon=True)


def use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have :func:`experiments.workers.share` start threads."""
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda kind: _Context)
    monkeypatch.setattr(workers.signal, "signal", lambda *args: None)
