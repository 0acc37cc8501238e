"""The parser: jsonargparse with plain typed options, and mistakes answered in a sentence."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from hyperkron.cli import options
from hyperkron.cli.options import Option
from hyperkron.cli.output import nearest, printable

_ABOUT = """Finds wrong labels in a training set with a few trusted rows, trains a better model, and reports both."""
_EXAMPLES = """examples:
  hyperkron clean train.csv --trusted trusted.csv --text text --label label --out runs/mine
  hyperkron report runs/mine
  hyperkron export runs/mine --drop suspects -o clean.csv
  hyperkron resume runs/mine
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
  hyperkron export runs/mine --relabel suspects --threshold 0.9 -o clean.csv"""

COMMANDS: dict[str, tuple[tuple[Option, ...], str, str]] = {
    "clean": (options.CLEAN, "find wrong labels and train a better model", _CLEAN),
    "report": (options.REPORT, "write or update report.html of a run", "example:\n  hyperkron report runs/mine"),
    "export": (options.EXPORT, "write the training rows without the suspects, or with suggested labels", _EXPORT),
    "resume": (options.RESUME, "continue an interrupted run", "example:\n  hyperkron resume runs/mine"),
    "doctor": (options.DOCTOR, "check this installation", "example:\n  hyperkron doctor"),
}
_TYPES: dict[str, type] = {"whole": int, "number": float}
_WORDS = {"int": "a whole number", "float": "a number"}
_WRONG_TYPE = re.compile(
    r"""Parser key "(?P<key>[\w.]+)":\s+Expected a <class '(?P<type>\w+)'>.*?value: (?P<value>.*)"""
)


class Parser(ArgumentParser):
    """Says what is wrong in one sentence, with the nearest option there is, and ends with the code 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        parser = getattr(ex, "subcommand_parser", None) or self
        prog = parser.prog if parser is not self else f"{self.prog}{_command_of(message)}"
        text = _plainly(" ".join(message.split()), parser)
        sys.stderr.write(f"{prog}: error: {printable(text)}\nSee `{prog} --help`.\n")
        self.exit(2)


def _plainly(message: str, parser: argparse.ArgumentParser) -> str:
    """The parser's message as a person would put it."""
    if wrong := _WRONG_TYPE.search(message):
        name = "--" + wrong["key"].rpartition(".")[2].replace("_", "-")
        return f"{name}={wrong['value']} must be {_WORDS.get(wrong['type'], 'a text')}."
    if message.startswith("unrecognized arguments: "):
        given = message.removeprefix("unrecognized arguments: ").split()
        known = [text for action in parser._actions for text in action.option_strings]
        return f"{message}{nearest(given[0].partition('=')[0], known)}"
    if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
        return message + nearest(found[1], found[2].replace("'", "").split(", "))
    if message.startswith('expected "') and message.endswith("but it was not provided."):
        return f"name a command: {', '.join(COMMANDS)}."
    if missing := re.match(r"the following arguments are required: (?P<keys>.*)", message):
        keys = [key.partition(".") for key in missing["keys"].split(", ")]
        return "; ".join(_missing(command, name) for command, _, name in keys) + "."
    return message


def _command_of(message: str) -> str:
    """The command that a message about a missing argument is about, after a space; nothing for other messages."""
    found = re.match(r"the following arguments are required: (\w+)\.", " ".join(message.split()))
    return f" {found[1]}" if found else ""


def _missing(command: str, name: str) -> str:
    """What is missing, as help names it."""
    option = next(option for option in COMMANDS[command][0] if option.key == name)
    named = option.name if option.name.startswith("-") else str(option.metavar)
    return f"{command} needs {named} ({option.help})"


def _make(prog: str, about: str, examples: str | None = None, **more: Any) -> Parser:
    parser = Parser(
        prog=prog,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        print_config=None,
        allow_abbrev=False,
        **more,
    )
    return parser


def _add(parser: Parser, wanted: Iterable[Option]) -> None:
    groups: dict[str, Any] = {"": parser}
    for option in wanted:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        more: dict[str, Any] = {"help": option.help}
        if option.kind == "flag":
            more["action"] = "store_true"
        else:
            more |= {"type": _TYPES.get(option.kind, str), "default": option.default}
            more |= {"choices": option.choices} if option.choices else {"metavar": option.metavar}
        if option.kind == "texts":
            more["nargs"] = "+"
        if option.optional:
            more["nargs"] = "?"
        if option.required:
            more["required"] = True
        if not option.name.startswith("-"):
            more.pop("default", None)
        if option.default is not None and option.kind != "flag":
            more["help"] += f" (default: {option.default})"
        names = (option.name,) if option.short is None else (option.short, option.name)
        groups[option.group].add_argument(*names, **more)


def parser(version: str, defaults: Mapping[str, Any] | None = None) -> Parser:
    """The parser of all commands.

    Args:
        version: printed by ``--version``.
        defaults: other defaults for options of ``clean``.
    """
    top = _make("hyperkron", _ABOUT, _EXAMPLES, version=version)
    commands = top.add_subcommands(dest="command", required=True, metavar="COMMAND", title="commands", description=None)
    for name, (wanted, about, examples) in COMMANDS.items():
        made = _make(f"hyperkron {name}", about[0].upper() + about[1:] + ".", examples)
        _add(made, wanted)
        commands.add_subcommand(name, made, help=about)
        made.prog = f"hyperkron {name}"
        if name == "clean" and defaults:
            made.set_defaults(dict(defaults))
    return top
