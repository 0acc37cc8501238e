"""The parser: argparse with the options of ``options.py``, and mistakes answered in a sentence."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from hyperkron.cli import options
from hyperkron.cli.options import Option
from hyperkron.cli.output import UsageError, nearest, printable
from hyperkron.cli.ranks import processes

_ABOUT = """Finds wrong labels in a training set with a few trusted rows, trains a better model, and reports both."""
_EXAMPLES = """examples:
  hyperkron clean train.csv --trusted trusted.csv --text text --label label --out runs/mine
  hyperkron report runs/mine
  hyperkron export runs/mine --drop suspects -o clean.csv
  hyperkron predict runs/mine new.csv -o predictions.csv
  hyperkron attribute runs/mine --query test.csv
  hyperkron resume runs/mine
  hyperkron sweep mine:train --search damping=1e-4..1e-1:log --trials 50
  hyperkron doctor

exit codes: 0 success, 1 error (message on stderr), 2 wrong usage,
130 and 143 interrupted by Ctrl-C and by SIGTERM"""
_CLEAN = """examples:
  hyperkron clean train.csv --trusted trusted.csv --text text --label label --out runs/mine
  hyperkron clean table.parquet --trusted-column checked --label diagnosis --budget 5m
  hyperkron clean photos/ --trusted checked_photos/ --compare none
  hyperkron clean train.csv --trusted trusted.csv --print-config > mine.yaml
  hyperkron clean --config mine.yaml --seed 1 --out runs/again"""
_EXPORT = """examples:
  hyperkron export runs/mine --drop suspects -o clean.csv
  hyperkron export runs/mine --relabel suspects --threshold 0.9 -o clean.csv
  hyperkron export runs/mine --decisions decisions.json -o clean.csv"""
_PREDICT = """examples:
  hyperkron predict runs/mine new.csv -o predictions.csv
  hyperkron predict runs/mine new.csv --id customer -o predictions.jsonl"""

_ATTRIBUTE = """example:
  hyperkron attribute runs/mine --query test.csv"""
_SWEEP = """examples:
  hyperkron sweep mine:train --search damping=1e-4..1e-1:log inner_steps=1..20 method=kfac,cg --workers 4
  hyperkron sweep clean --config mine.yaml --search epochs=5..40 --trials 10
  hyperkron sweep show -o trials.csv"""

COMMANDS: dict[str, tuple[tuple[Option, ...], str, str]] = {
    "clean": (options.CLEAN, "find wrong labels and train a better model", _CLEAN),
    "report": (options.REPORT, "write or update report.html of a run", "example:\n  hyperkron report runs/mine"),
    "export": (options.EXPORT, "write the training rows without the suspects, or with suggested labels", _EXPORT),
    "predict": (options.PREDICT, "labels and probabilities for new rows", _PREDICT),
    "attribute": (options.ATTRIBUTE, "show the training rows behind each prediction", _ATTRIBUTE),
    "resume": (options.RESUME, "continue an interrupted run", "example:\n  hyperkron resume runs/mine"),
    "sweep": (options.SWEEP, "search for good settings with one or more workers", _SWEEP),
    "doctor": (options.DOCTOR, "check this installation", "example:\n  hyperkron doctor"),
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, with the nearest option there is, and ends with the code 2."""

    def __init__(self, *, examples: str, wanted: Sequence[Option] = (), **more: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(epilog=examples, formatter_class=raw, allow_abbrev=False, **more)
        self._wanted = wanted
        groups: dict[str, Any] = {"": self}
        for option in wanted:
            if option.group not in groups:
                groups[option.group] = self.add_argument_group(option.group)
            names = (option.name,) if option.short is None else (option.short, option.name)
            groups[option.group].add_argument(*names, **_settings(option))

    def error(self, message: str) -> NoReturn:
        text = self._plainly(" ".join(message.split()))
        if processes()[0] == 0:  # of several processes one says it
            sys.stderr.write(f"{self.prog}: error: {printable(text)}\nSee `{self.prog} --help`.\n")
        self.exit(2)

    def _plainly(self, message: str) -> str:
        """The parser's message as a person would put it."""
        if message.startswith("unrecognized arguments: "):
            known = [name for action in self._actions for name in action.option_strings]
            return message + nearest(message.split()[2].partition("=")[0], known)
        if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            return message + nearest(found[1], found[2].replace("'", "").split(", "))
        if wrong := re.search(r"argument \S+: (.*must be .*)", message):
            return wrong[1]
        if missing := re.match(r"the following arguments are required: (.*)", message):
            names = missing[1].split(", ")
            needed = [o for o in self._wanted if {o.metavar, o.name, f"{o.short}/{o.name}"} & set(names)]
            about = "; ".join(f"{self.prog.split()[-1]} needs {o.shown} ({o.help})" for o in needed if o.required)
            return f"{about}." if about else f"name a command: {', '.join(COMMANDS)}."
        return message


def _settings(option: Option) -> dict[str, Any]:
    """What argparse is to know about an option."""
    if option.kind == "flag":
        return {"help": option.help, "action": "store_true"}
    default = "" if option.default is None else f" (default: {option.default})"
    found: dict[str, Any] = {"help": option.help + default, "type": option.read, "metavar": option.metavar}
    if option.choices:
        found |= {"choices": option.choices}
    if option.kind == "texts":
        found |= {"nargs": "+"}
    if option.name.startswith("-"):
        return found | {"default": option.default, "required": option.required}
    return found if option.required else found | {"nargs": "?"}


def _version() -> str:
    try:
        return version("hyperkron")
    except PackageNotFoundError:
        return "(not installed)"


def parse(given: Sequence[str], defaults: Mapping[str, Any] | None = None) -> argparse.Namespace:
    """The command that is asked for, its options, and ``given``; with other defaults for those of ``clean``."""
    top = Parser(prog="hyperkron", description=_ABOUT, examples=_EXAMPLES)
    own = f"hyperkron {_version()}"
    top.add_argument("--version", action="version", version=own, help="print the version and exit")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    made = {
        name: commands.add_parser(
            name, help=about, description=about[0].upper() + about[1:] + ".", examples=examples, wanted=wanted
        )
        for name, (wanted, about, examples) in COMMANDS.items()
    }
    made["clean"].set_defaults(**(defaults or {}))
    found, unknown = top.parse_known_args(given)
    if unknown:
        made[found.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    found.given = list(given)
    return found


def check(found: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    if found.command == "export":
        asked = [name for name in (found.drop, found.relabel) if name is not None]
        if len(asked) > 1 or (not asked and found.decisions is None):
            raise UsageError("export needs one of --drop suspects and --relabel suspects, or --decisions.")
        if found.threshold is not None and not 0 <= found.threshold <= 1:
            raise UsageError(f"--threshold={found.threshold!r} must lie between 0 and 1.")
