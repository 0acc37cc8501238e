"""Every hostile file of ``malice`` is refused or comes to nothing; ``make faults`` counts them under a memory limit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import malice


@pytest.mark.parametrize("act", malice.CASES.values(), ids=malice.CASES)
def test_hostile_files_do_no_harm(act: Callable[[malice.Arena], Any], tmp_path: Path) -> None:
    assert malice.harm(act, tmp_path / "arena") == ""


def test_there_are_twenty() -> None:
    assert len(malice.CASES) >= 20


def test_harm_would_be_seen(tmp_path: Path) -> None:
    """The judge itself: each kind of harm is found."""
    cases: dict[str, Callable[[malice.Arena], Any]] = {
        "its code was run": lambda arena: [pickle.loads(arena.pickle), _refuse("no")],
        "it read a file elsewhere": lambda arena: _refuse(arena.secret.read_text()),
        "it altered a file elsewhere": lambda arena: [arena.secret.write_text("other"), _refuse("no")],
        "it was accepted": lambda arena: arena.saved(),
        "it ended in a ZeroDivisionError": lambda arena: 1 / 0,
    }
    for i, (told, act) in enumerate(cases.items()):
        assert malice.harm(act, tmp_path / str(i)).startswith(told)


def _refuse(words: str) -> None:
    raise malice.hk.HyperkronError(words)
