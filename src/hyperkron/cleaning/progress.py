"""How a cleaning run tells what it is doing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol


class Progress(Protocol):
    """Receives what a person would like to see while waiting; units are training steps, or tokens while embedding."""

    def start(self, total: int) -> None:
        """Announce ``total`` steps; may be called again when the plan changes."""
        return None

    def advance(self, steps: int, stage: str) -> None:
        """This many steps of a stage were done."""
        return None

    def message(self, text: str) -> None:
        """A sentence for the user."""
        return None

    def stop(self) -> None:
        """Close the bar; a later start begins another one."""
        return None


class SilentProgress(Progress):
    """A progress that shows nothing."""


class BarProgress(Progress):
    """A bar by tqdm, with messages above it; ``wording`` is what becomes of a text before it is shown."""

    def __init__(self, wording: Callable[[str], str] = str) -> None:
        self._bar: Any = None
        self._wording = wording

    def start(self, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, leave=False, bar_format="{desc} {percentage:3.0f}%|{bar}| {remaining} left")
        self._bar.total = total

    def advance(self, steps: int, stage: str) -> None:
        if self._bar is not None:
            self._bar.set_description_str(stage, refresh=not steps)  # where nothing moves, say what is being done
            self._bar.update(min(steps, self._bar.total - self._bar.n))

    def message(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(self._wording(text), file=sys.stderr)

    def stop(self) -> None:
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


class EmbeddingBar:
    """A bar of its own while texts are embedded; its unit is tokens, and every list of texts begins again."""

    def __init__(self, progress: Progress, check: Callable[[], None]) -> None:
        self.progress, self.check = progress, check
        self.done, self.total = 0, 0

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` tokens are embedded."""
        if total != self.total or done < self.done:
            self.stop()
            self.progress.start(total)
            self.total = total
        self.progress.advance(done - self.done, "embedding texts")
        self.done = done
        self.check()

    def stop(self) -> None:
        """Close the bar, if there is one."""
        if self.total:
            self.progress.stop()
        self.done, self.total = 0, 0
