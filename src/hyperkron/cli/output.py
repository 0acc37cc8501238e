"""What is printed: text without control characters, progress on stderr, results on stdout."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from hyperkron.cli.options import as_options

SECONDS_BETWEEN_LINES = 10.0
"""How often a progress without a terminal says where it is."""
SECONDS_BEFORE_FIT = 2.0
"""How soon after a line it says that trees are fitted, of which nothing more is heard until that is done."""
SHARE_BEFORE_GUESS = 0.05
"""The share of the steps that must be done before the time left is guessed: the first steps are the slowest."""
_UNSEEN = dict.fromkeys(map(ord, "\ufeff\u200b\u2060\u00ad"))


def printable(text: str) -> str:
    """The text without characters that could move the cursor, colour the screen or turn the reading order.

    Marks that nobody sees anyway, such as a byte order mark, are left out.

    Example:
        >>> printable("a\\x1b[31mred\\tb\\nc\\ufeff") == "a\\ufffd[31mred b\\nc"
        True
    """
    text = text.translate(_UNSEEN)
    kept = (" " if c == "\t" else c if c == "\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return "".join(kept)


class UsageError(Exception):
    """A command that cannot be meant so; it ends with the code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names what was perhaps meant, or nothing.

    Example:
        >>> nearest("--lable", ["--label", "--text"])
        '; did you mean --label?'
        >>> nearest("--bogus", ["--out"])
        ''
    """
    bare = {one.lstrip("-"): one for one in known}  # dashes alone make no likeness
    found = difflib.get_close_matches(name.lstrip("-"), bare, 1, 0.6)
    return f"; did you mean {bare[found[0]]}?" if found else ""


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, on stderr unless told otherwise, at once."""
    aside = stream is None or stream is sys.stderr
    stream = sys.stderr if stream is None else stream
    shown = printable(text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(shown.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
    except OSError:
        if not aside:
            raise
        silence(sys.stderr)  # nobody reads what is said on the way; the work goes on


def silence(stream: TextIO) -> None:
    """Let what is written to stdout or stderr from now on go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)


def ensure_streams() -> None:
    """Give a stream closed before the start (``2>&-``) the null device, or the next file opened takes its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is the one that was closed
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def say_json(value: Any) -> None:
    """Print one JSON object on stdout; what is not finite is null."""
    print(json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, default=str), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def lasting(seconds: float) -> str:
    """A time for people.

    Example:
        >>> lasting(8.2), lasting(95), lasting(4000)
        ('8 s', '1 min 35 s', '1 h 6 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


class Lines:
    """A progress for files and pipes: messages at once, and a line with the time left every ten seconds.

    What makes no steps for a while, as trees do, is announced when it begins.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._total, self._done, self._begin = 0, 0, clock()
        self._last, self._stage = self._begin, ""

    def start(self, total: int) -> None:
        """This many steps in all; those done stay done, unless it was stopped in between."""
        if not self._done:
            self._begin = self._clock()
        self._total = total

    def advance(self, steps: int, stage: str) -> None:
        """Count, and say so if it is time."""
        self._done += steps
        now = self._clock()
        silent = not steps and stage != self._stage
        if now - self._last >= (SECONDS_BEFORE_FIT if silent else SECONDS_BETWEEN_LINES):
            self._last, self._stage = now, stage
            elapsed = now - self._begin
            text = f"[{lasting(elapsed)}] {stage}: step {self._done}"
            if self._total > 0:
                left = elapsed / max(self._done, 1) * max(self._total - self._done, 0)
                share = min(self._done / self._total, 1)
                text += f" of {self._total} ({share:.0%})"
                text += f", about {lasting(left)} left" if share >= SHARE_BEFORE_GUESS else ""
            say(text)

    def message(self, text: str) -> None:
        """Say it."""
        say(as_options(text))

    def stop(self) -> None:
        """Begin from nothing at the next start."""
        self._total = self._done = 0


def progress(quiet: bool) -> Any:
    """The progress that fits: none where it is to be quiet, a bar on a terminal, lines elsewhere."""
    from hyperkron.cleaning.progress import BarProgress, SilentProgress

    if quiet:
        return SilentProgress()
    return BarProgress(lambda text: printable(as_options(text))) if sys.stderr.isatty() else Lines()
