"""The options of every command, written once: the parser, the configuration file and its print-out read them here."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["text", "whole", "number", "flag", "texts", "duration", "names"]
"""What a value is; ``texts`` are several arguments, ``names`` are one argument with commas."""
ALTERNATIVES = (
    "noisy",
    "trusted",
    "pooled",
    "small-loss",
    "trusted-confidence",
    "cleanlab",
    "neighbours",
    "gold-loss",
    "forest",
    "boosted",
    "sama",
)
"""What `clean` can compare with; as ``hyperkron.cleaning.ALTERNATIVES``, which needs torch."""
_DURATION = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>s|m|h)?\Z", re.ASCII)
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    """A time in seconds.

    Example:
        >>> seconds("5m"), seconds("90s"), seconds("90"), seconds("1.5h")
        (300.0, 90.0, 90.0, 5400.0)
    """
    found = _DURATION.match(text.strip().lower())
    value = float(found["number"]) * _SECONDS[found["unit"]] if found else 0.0
    if not value:
        raise ValueError
    return value


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if names in (("all",), ("none",)):
        return ALTERNATIVES if names == ("all",) else ()
    if not names or {"all", "none"} & set(names):
        raise ValueError
    return names


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


_READERS: dict[Kind, tuple[Callable[[str], Any], str]] = {
    "text": (str, "a text"),
    "texts": (str, "texts"),
    "whole": (int, "a whole number"),
    "number": (float, "a number"),
    "flag": (_flag, "true or false"),
    "duration": (seconds, "a positive time, such as 90, 90s, 5m or 1h"),
    "names": (_names, "all, none, or names separated by commas"),
}
"""For each kind of option, what reads a text as one (a ValueError where it is none), and what it must be."""


@dataclass(frozen=True)
class Option:
    """One option of a command; without dashes in its name it is a positional argument.

    ``group`` is its heading in the help, ``config`` says whether a configuration file may hold it, ``short`` is a
    letter for it.
    """

    name: str
    kind: Kind
    help: str
    metavar: str | None = None
    default: Any = None
    choices: tuple[str, ...] | None = None
    group: str = ""
    config: bool = True
    short: str | None = None
    required: bool = False

    @property
    def key(self) -> str:
        """The name in Python and in a configuration file: ``trusted_column`` for ``--trusted-column``."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def shown(self) -> str:
        """The name in messages."""
        return self.name if self.name.startswith("-") else str(self.metavar)

    def read(self, text: str) -> Any:
        """The value that a text on the command line or in a configuration file stands for."""
        reader, words = _READERS[self.kind]
        try:
            return reader(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{self.shown}={text[:80]!r} must be {words}.") from error


_DATA, _TRAINING, _OUTPUT = "data", "training", "output"

SPEAKING = (
    Option("--quiet", "flag", "print only errors and the result", group=_OUTPUT),
    Option("--debug", "flag", "show where in the code an error came from", group=_OUTPUT, config=False),
)
JSON = Option("--json", "flag", "print one JSON object on stdout; messages go to stderr", group=_OUTPUT)
MODEL = Option(
    "--model",
    "text",
    "your own network, as module:callable; the callable takes no arguments and returns a torch module",
    "MODULE:CALLABLE",
    group=_TRAINING,
    config=False,
)
TENSORBOARD = Option("--tensorboard", "flag", "also write a TensorBoard log", group=_OUTPUT)
NO_REPORT = Option("--no-report", "flag", "do not write report.html", group=_OUTPUT)
RUN = Option("run", "text", "the run folder, as given to `hyperkron clean --out`", "RUN", required=True)
ID = Option("--id", "texts", "columns that identify rows: carried along, not learnt from", "COLUMN", group=_DATA)
CHARSET = Option("--charset", "text", "encoding of CSV and JSON files (default: utf-8)", "NAME", group=_DATA)
ENCODER = Option("--encoder", "text", "text encoder: a Hugging Face model name or a folder", "NAME", group=_TRAINING)
DEVICE = Option("--device", "text", "device: auto, cpu, cuda, cuda:1, ...", "DEVICE", "auto", group=_TRAINING)

FORMULAS = Option(
    "--formulas",
    "text",
    "CSV cells that a spreadsheet would run as formulas (=1+1): keep them with a warning, escape them with an "
    "apostrophe, or refuse to write (JSON and Parquet are not affected)",
    default="keep",
    choices=("keep", "escape", "refuse"),
)

CLEAN = (
    Option("train", "text", "the training rows: a file, a folder, or hf:NAME", "TRAIN"),
    Option("--trusted", "text", "rows with correct labels: a second file, a folder, or hf:NAME", "PATH", group=_DATA),
    Option("--trusted-column", "text", "the column of TRAIN that marks trusted rows", "COLUMN", group=_DATA),
    Option("--test", "text", "rows for a final evaluation; never used to choose a model", "PATH", group=_DATA),
    Option("--text", "text", "the column with texts", "COLUMN", group=_DATA),
    Option("--image", "text", "the column with image paths", "COLUMN", group=_DATA),
    Option(
        "--features", "texts", "the feature columns of a table, separated by spaces or commas", "COLUMN", group=_DATA
    ),
    Option("--label", "text", "the column with labels", "COLUMN", group=_DATA),
    Option("--annotators", "texts", "columns with labels, one for each of several annotators", "COLUMN", group=_DATA),
    Option(
        "--annotator",
        "text",
        "the column that says who gave a label, if TRAIN has one line per row and annotator; --id names the row",
        "COLUMN",
        group=_DATA,
    ),
    ID,
    CHARSET,
    Option(
        "--probabilities",
        "text",
        "your own out-of-sample class probabilities, as one more expert: .npy or .csv",
        "FILE",
        group=_DATA,
    ),
    Option("--embeddings", "text", "vectors to use in place of the inputs: .npy", "FILE", group=_DATA),
    MODEL,
    ENCODER,
    Option("--layers", "whole", "train the last K layers of the encoder", "K", 0, group=_TRAINING),
    Option("--epochs", "whole", "epochs of one training (default: 15; fewer with --budget)", "N", group=_TRAINING),
    Option("--budget", "duration", "time limit for the whole run: 90, 90s, 5m or 1h", "TIME", group=_TRAINING),
    Option(
        "--compare",
        "names",
        f"alternatives to train and compare with: all, none, or some of {','.join(ALTERNATIVES)}",
        "NAMES",
        "all",
        group=_TRAINING,
    ),
    Option("--seed", "whole", "random seed", "N", 0, group=_TRAINING),
    DEVICE,
    Option("--out", "text", "the run folder (default: runs/NAME)", "RUN", group=_OUTPUT, short="-o"),
    Option("--overwrite", "flag", "replace an existing run in that folder", group=_OUTPUT, config=False),
    NO_REPORT,
    TENSORBOARD,
    JSON,
    *SPEAKING,
    Option("--config", "text", "read options from a YAML or JSON file", "FILE", group=_OUTPUT, config=False),
    Option("--print-config", "flag", "print the options as a YAML file, and exit", group=_OUTPUT, config=False),
)
REPORT = (RUN, JSON, *SPEAKING)
_BEGAN = "settings of the run; they must match, other values are an error"
RECORDED = tuple(
    replace(option, default=None, group=_BEGAN)
    for option in CLEAN
    if option.group in (_DATA, _TRAINING) and option is not MODEL
)
"""Options of `clean` that `resume` compares with the record of the run."""
RESUME = (RUN, MODEL, *RECORDED, NO_REPORT, TENSORBOARD, JSON, *SPEAKING)
EXPORT = (
    RUN,
    Option("--drop", "text", "leave these rows out", choices=("suspects",)),
    Option("--relabel", "text", "keep these rows, with the suggested label", choices=("suspects",)),
    Option("--decisions", "text", "apply what was decided in the report (decisions.json)", "FILE"),
    Option("--threshold", "number", "treat rows with at least this error probability as suspects", "P"),
    Option("--out", "text", "the file to write, in the format of the training rows", "FILE", short="-o", required=True),
    Option("--overwrite", "flag", "replace that file"),
    FORMULAS,
    JSON,
    *SPEAKING,
)
PREDICT = (
    RUN,
    Option("rows", "text", "the new rows: a file or folder with the columns of training", "NEW", required=True),
    Option("--out", "text", "the file to write, .csv or .jsonl (default: CSV on stdout)", "FILE", short="-o"),
    Option("--overwrite", "flag", "replace that file"),
    FORMULAS,
    ID,
    CHARSET,
    MODEL,
    ENCODER,
    DEVICE,
    JSON,
    *SPEAKING,
)
ATTRIBUTE = (
    RUN,
    Option(
        "--query",
        "text",
        "rows to explain, with the columns of the training rows (label: not needed)",
        "PATH",
        required=True,
    ),
    Option("--count", "whole", "training rows for, and against, each prediction", "N", 5),
    MODEL,
    Option("--out", "text", "the page to write (default: RUN/attribution.html)", "FILE", group=_OUTPUT, short="-o"),
    JSON,
    *SPEAKING,
)
SWEEP = (
    Option(
        "function",
        "text",
        "what to minimize, as module:callable; it takes a trial and returns a number. Or: clean (settings of "
        "`hyperkron clean`, the largest accuracy on held-out trusted rows), show (the trials so far)",
        "FUNCTION",
        required=True,
    ),
    Option(
        "--search",
        "texts",
        "settings: NAME=LOW..HIGH (0..1 are two whole numbers, 0.0..1.0 all between), NAME=LOW..HIGH:log or "
        "NAME=FIRST,SECOND",
        "NAME=VALUES",
    ),
    Option("--trials", "whole", "trials in all, of all workers", "N", 50),
    Option("--maximize", "flag", "search for the largest value"),
    Option("--config", "text", "for `sweep clean`: its data and other options, a YAML or JSON file", "FILE"),
    Option("--storage", "text", "an SQLite file, or postgresql://user@host/database", "PATH", "sweep.db"),
    Option("--study", "text", "name of the sweep in the storage", "NAME", "sweep"),
    Option("--workers", "whole", "processes on this machine; the same command elsewhere adds more", "N", 1),
    Option("--retries", "whole", "how often to repeat a trial whose worker was lost", "N", 1),
    Option("--heartbeat", "whole", "seconds between signs of life; a worker that misses four is lost", "N", 15),
    Option("--seed", "whole", "seed of the search", "N", 0),
    Option("--out", "text", "also write all trials, as .csv or .json", "FILE", group=_OUTPUT, short="-o"),
    JSON,
    *SPEAKING,
)
DOCTOR = (JSON, SPEAKING[1])

_ARGUMENTS = {option.key: option for option in (*SWEEP, *PREDICT, *CLEAN, *EXPORT, *ATTRIBUTE)}
_ARGUMENTS |= {"run_folder": RUN, "queries": _ARGUMENTS["query"]}
_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_VALUE = rf"True\b|\[?\.\.\.\]?|\[(?:(?:{_TEXT})(?:, )?)+\]|{_TEXT}"
_ARGUMENT = re.compile(rf"(?<![\w.`'-])({'|'.join(_ARGUMENTS)})(\[\d+\])?=({_VALUE})?")


def as_options(text: str) -> str:
    """What an error says about arguments in Python, said about the options of the command.

    Example:
        >>> as_options("label='x' is not a column; name it with trusted_column=..., or pass overwrite=True.")
        "--label='x' is not a column; name it with --trusted-column ..., or pass --overwrite."
        >>> as_options("If so, pass id=['order no', 'day'].")
        "If so, pass --id 'order no' day."
        >>> print(as_options('pass id=["the customer\\'s"], or pass label="it\\'s".'))
        pass --id 'the customer'"'"'s', or pass --label 'it'"'"'s'.
    """

    def named(found: re.Match[str]) -> str:
        name, value = _ARGUMENTS[found[1]].shown, found[3]
        if not value:
            return f"{name}{found[2] or ''}="
        if value[0] in "'\"" or value[:2] in ("['", '["'):
            if not found.string[: found.start()].endswith("pass "):  # a value that was given, not one to be copied
                return f"{name}{found[2] or ''}={value}"
            try:
                read = ast.literal_eval(value)
            except (SyntaxError, ValueError):  # no text as Python writes it
                return f"{name}={value}"
            return f"{name} {shlex.join([read] if isinstance(read, str) else read)}"
        return name if value == "True" else f"{name} ..."

    text = re.sub(rf"\bresume\(({_TEXT})\)", lambda found: f"`hyperkron resume {shlex.quote(found[1][1:-1])}`", text)
    return re.sub(r"(--[\w-]+) \.\.\., \1", r"\1", _ARGUMENT.sub(named, text))
