"""Progress that is shown where somebody looks: on a terminal and in a notebook."""

from __future__ import annotations

import sys
from typing import Any

from hyperkron.cleaning.config import Progress, SilentProgress


class BarProgress:
    """A bar by tqdm, with messages above it."""

    def __init__(self) -> None:
        self._bar: Any = None

    def start(self, total: int) -> None:
        """Show the bar, or change its length."""
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, leave=False, bar_format="{desc} {percentage:3.0f}%|{bar}| {remaining} left")
        self._bar.total = total

    def advance(self, steps: int, stage: str) -> None:
        """Move it."""
        if self._bar is not None:
            self._bar.set_description_str(stage, refresh=False)
            self._bar.update(min(steps, self._bar.total - self._bar.n))

    def message(self, text: str) -> None:
        """Say it above the bar."""
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def shown_progress(asked: Progress | bool | None) -> Progress:
    """The progress to use: the one given; for None or True one that fits the place, for False none."""
    if isinstance(asked, bool) or asked is None:
        watched = asked or (asked is None and (sys.stderr.isatty() or _in_notebook()))
        return BarProgress() if watched else SilentProgress()
    return asked


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
