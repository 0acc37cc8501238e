"""Progress that is shown where somebody looks: on a terminal and in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hyperkron.cleaning.config import Progress, SilentProgress


class BarProgress:
    """A bar by tqdm, with messages above it; ``wording`` is what becomes of a text before it is shown."""

    def __init__(self, wording: Callable[[str], str] = str) -> None:
        self._bar: Any = None
        self._wording = wording

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

        tqdm.write(self._wording(text), file=sys.stderr)

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


def stage_in_words(stage: str) -> str:
    """What a person is told of a stage.

    Example:
        >>> stage_in_words("network-small-loss"), stage_in_words("judge-small-loss"), stage_in_words("pooled expert")
        ('training small-loss', 'judging small-loss', 'pooled expert')
    """
    kind, _, name = stage.partition("-")
    doing = {"judge": "judging", "network": "training"}.get(kind)
    return stage if doing is None else f"{doing} {name}"


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
