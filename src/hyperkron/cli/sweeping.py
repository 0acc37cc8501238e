"""``hyperkron sweep``: search over settings, one more worker for a search that runs, and its table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hyperkron.cli.cleaning import SETTINGS, reading
from hyperkron.cli.config import read_config
from hyperkron.cli.output import UsageError, say, say_json
from hyperkron.cli.parser import parse


def sweep(options: Any) -> int:
    """Run trials until there are enough, and show the best ones."""
    from hyperkron import sweeps

    if options.function == "show":
        return _show(options, sweeps.read_sweep(options.storage, options.study))
    if not options.search:
        raise UsageError("--search is missing: name settings and their values, such as damping=1e-4..1e-1:log.")
    if options.workers < 1:
        raise UsageError(f"--workers={options.workers} must be at least 1.")
    function = _clean(options) if options.function == "clean" else _loaded(options.function)
    names = ("trials", "storage", "study", "retries", "heartbeat", "seed")
    settings = {name: getattr(options, name) for name in names} | {
        "maximize": options.maximize or options.function == "clean",
        "progress": not options.quiet,
    }
    command = [sys.executable, "-m", "hyperkron", *options.given, "--workers", "1", "--quiet"]
    others = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(options.workers - 1)]
    try:
        found = sweeps.sweep(function, sweeps.parse_space(options.search), **settings)
    except BaseException:
        for worker in others:
            worker.terminate()
        raise
    finally:
        codes = [worker.wait() for worker in others]
    if any(codes):
        say(f"warning: {sum(map(bool, codes))} of {options.workers} workers ended early; others did their trials.")
    return _show(options, found)


def _loaded(name: str) -> Callable[[Any], float]:
    from hyperkron.cleaning.models import load_callable
    from hyperkron.solution import HyperkronError

    try:
        return load_callable(name)
    except HyperkronError as error:
        raise HyperkronError(str(error).replace("model=", "function=").replace("a network", "a number")) from error


def _show(options: Any, found: Any) -> int:
    if options.out:
        found.write(options.out)
    if options.json:
        best = asdict(found.ranked[0]) if found.ranked else None
        say_json({"best": best, "trials": [asdict(trial) for trial in found.trials], "file": options.out})
    else:
        say(found.table(), stream=sys.stdout)
    return 0


def _clean(options: Any) -> Callable[[Any], float]:
    """A function of settings of `clean`: the accuracy on trusted rows that were held out."""
    if options.config is None:
        raise UsageError("--config is missing: `sweep clean` needs a file of `hyperkron clean --print-config`.")
    wanted = parse(["clean"], read_config(options.config))
    known = {name: getattr(wanted, name) for name in SETTINGS if name not in ("budget", "compare")}
    if strange := {text.partition("=")[0] for text in options.search} - {*known}:
        raise UsageError(f"--search={min(strange)!r} is not a setting of clean; search {', '.join(known)}.")

    def held_out(trial: Any) -> float:
        from hyperkron import cleaning

        config = cleaning.CleanConfig(compare=(), **{**known, **trial.settings})
        result = cleaning.clean(wanted.train, wanted.trusted, config=config, progress=False, **reading(wanted))
        return float(max(candidate["accuracy"] for candidate in result.candidates))

    return held_out
