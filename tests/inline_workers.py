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
    """Tasks take turns: threads share torch's random state, which processes do not."""

    Queue = queue.Queue
    turn = threading.Lock()

    @classmethod
    def Process(cls, target: Any, args: Any, daemon: bool) -> _Thread:
        make, *rest = args

        def made() -> Any:
            carry_out = make()

            def in_turn(task: Any) -> Any:
                with cls.turn:
                    return carry_out(task)

            return in_turn

        return _Thread(target=target, args=(made, *rest), daemon=True)


def use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have :func:`experiments.workers.share` start threads."""
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda kind: _Context)
    monkeypatch.setattr(workers.signal, "signal", lambda *args: None)
