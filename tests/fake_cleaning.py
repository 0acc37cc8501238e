"""A stand-in for hyperkron.cleaning: remembers how it was called and writes a run folder without training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import run_folder

TEXT = "text,label,checked\n"


@dataclass
class FakeCleaning:
    """``clean`` and ``resume`` as the command line calls them; ``during`` happens after config.json is written."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    during: Callable[[], None] = lambda: None
    before: Callable[[], None] = lambda: None
    rows: int = 40

    def module(self) -> ModuleType:
        made = ModuleType("hyperkron.cleaning")
        made.CleanConfig = lambda **settings: settings  # type: ignore[attr-defined]
        made.clean, made.resume = self.clean, self.resume  # type: ignore[attr-defined]
        return made

    def clean(self, train: str, trusted: str | None = None, **more: Any) -> None:
        self.calls.append({"train": train, "trusted": trusted, **more})
        self.before()
        out = Path(more["out"])
        out.mkdir(parents=True, exist_ok=True)
        reading = {name: more[name] for name in ("label", "trusted_column") if name in more}
        config = {"seed": more["config"]["seed"], "source": {"train": train, "reading": reading}}
        run_folder.write_json(out / "config.json", config)
        self._work(out, more["progress"], config)

    def resume(self, out: Path, *, model: Any = None, expected: Any = None, progress: Any = None, **more: Any) -> None:
        self.calls.append({"out": out, "model": model, "expected": expected})
        self._work(Path(out), progress, json.loads((out / "config.json").read_text()))

    def _work(self, out: Path, progress: Any, config: dict[str, Any]) -> None:
        progress.start(10)
        progress.message("4 rows without a label were left out")
        progress.advance(5, "teacher")
        self.during()
        progress.start(20)
        progress.advance(15, "fold models")
        run_folder.write_run_folder(out, rows=self.rows)
        run_folder.write_json(out / "config.json", config)
        (out / "log.jsonl").write_text('{"event": "step", "step": 3, "loss": 0.5, "name": "x"}\n{"event": "end"}\n')


def install(monkeypatch: Any, fake: FakeCleaning) -> FakeCleaning:
    import hyperkron
    from hyperkron.cleaning import report

    module = fake.module()
    module.__path__ = hyperkron.cleaning.__path__  # data, models and report stay the real ones
    module.report = report  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hyperkron.cleaning", module)
    monkeypatch.setattr(hyperkron, "cleaning", module)
    return fake


def write_table(path: Path, rows: int = 40) -> Path:
    """The training rows that the fake run is about, with the labels of its rows.csv."""
    lines = run_folder.make_rows(run_folder.CLASSES, rows, 0.4)
    path.write_text(TEXT + "".join(f"text {x['row']},{x['given']},no\n" for x in lines), "utf-8")
    return path
