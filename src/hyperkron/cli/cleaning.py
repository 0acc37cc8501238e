"""``hyperkron clean`` and ``hyperkron resume``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperkron.cli.config import print_config
from hyperkron.cli.options import as_options
from hyperkron.cli.output import UsageError, progress, say, say_json

if TYPE_CHECKING:
    from torch import nn

READING = ("text", "label", "image", "features", "trusted_column", "id", "annotator", "annotators", "charset")
"""Options that say how the data is to be read."""
OWN = ("probabilities", "embeddings")
"""Options that name files of the user's own models."""
SETTINGS = ("seed", "epochs", "device", "encoder", "layers", "budget", "compare")
"""Options that are settings of the same name."""


def clean(options: Any) -> int:
    """Find wrong labels and train without them."""
    if options.print_config:
        print(print_config(vars(options)), end="")
        return 0
    if options.train is None:
        raise UsageError("TRAIN is missing: name the file or folder with the training rows.")
    _need_packages(options)
    options.out = options.out or str(_free_folder(options.train))
    out = Path(options.out)
    if not options.quiet:
        say(f"Reading {options.train}" + (f" and {options.trusted}" if options.trusted else ""))
    from hyperkron import cleaning
    from hyperkron.cleaning.folder import replacing

    config = cleaning.CleanConfig(**{name: getattr(options, name) for name in SETTINGS})
    with showing(options) as shown, replacing(out, options.overwrite, say):
        cleaning.clean(
            options.train,
            options.trusted,
            test=options.test,
            out=out,
            model=load_model(options.model),
            config=config,
            progress=shown,
            command=shlex.join(["hyperkron", *options.given]),
            on_result=_first_report(options),
            **getattr(options, "shared", {}),
            **{name: getattr(options, name) for name in OWN if getattr(options, name) is not None},
            **reading(options),
        )
    return _finish(options, out)


def resume(options: Any) -> int:
    """Continue an interrupted run."""
    _need_packages(options)
    out = Path(options.run)
    if not (out / "config.json").is_file():
        raise FileNotFoundError(f"RUN={str(out)!r} holds no run (no config.json); begin one with `hyperkron clean`.")
    from hyperkron import cleaning
    from hyperkron.cleaning.folder import has_whole_result

    if not options.quiet:
        done = has_whole_result(out)
        say(f"The run in {out} is finished; reading its result again" if done else f"Continuing {out}")
    with showing(options) as shown:
        cleaning.resume(
            out,
            model=load_model(options.model),
            expected=expected_settings(options),
            progress=shown,
            on_result=_first_report(options),
            **getattr(options, "shared", {}),
        )
    return _finish(options, out)


def _first_report(options: Any) -> Callable[[Path], None] | None:
    """What writes report.html while the alternatives are compared; trouble with it is told at the end."""

    def write(out: Path) -> None:
        from hyperkron.cleaning.report import write_report
        from hyperkron.solution import HyperkronError

        with suppress(HyperkronError):
            write_report(out)

    return None if options.no_report else write


@contextmanager
def showing(options: Any) -> Iterator[Any]:
    """What shows the progress of a command, until the block ends."""
    shown = progress(options.quiet)
    try:
        yield shown
    finally:
        shown.stop()


def reading(options: Any) -> dict[str, Any]:
    """The options that say how the data is to be read, where they are given."""
    reading = {name: getattr(options, name) for name in READING if getattr(options, name) is not None}
    for name in ("features", "id", "annotators"):
        if name in reading and len(reading[name]) == 1:
            reading[name] = reading[name][0].split(",")
    return reading


def expected_settings(options: Any) -> dict[str, Any]:
    """What is given to `resume` of that which the run began with."""
    found = {name: getattr(options, name) for name in ("trusted", "test", *OWN, *SETTINGS)} | reading(options)
    return {name: value for name, value in found.items() if value is not None}


def load_model(name: str | None) -> Callable[[], nn.Module] | None:
    """The user's own network, where one is named."""
    if name is None:
        return None
    from hyperkron.cleaning.models import load_callable

    return load_callable(name)


def _need_packages(options: Any) -> None:
    """Miss a package now rather than after the training."""
    if not options.no_report and find_spec("jinja2") is None:
        raise ModuleNotFoundError("jinja2 is not installed: pip install 'hyperkron[report]', or add --no-report.")
    if options.tensorboard and find_spec("tensorboard") is None:
        raise ModuleNotFoundError(
            "tensorboard is not installed: pip install 'hyperkron[track]', or leave out --tensorboard."
        )


def _free_folder(train: str) -> Path:
    """A folder below runs/ that is named after the training rows and not there yet."""
    stem = Path(train.removeprefix("hf:")).name.split(":")[0].split(".")[0]
    name = "".join(char if char.isalnum() or char in "-_" else "-" for char in stem) or "run"
    tried = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in range(1, 10**6))
    return next(path for path in tried if not path.exists())


def _finish(options: Any, out: Path) -> int:
    """Write what comes after the training, and say what came out."""
    from hyperkron.solution import HyperkronError

    try:
        if not options.no_report:
            from hyperkron.cleaning.report import write_report

            write_report(out)
        if options.tensorboard:
            from hyperkron.cli.board import write_board

            write_board(out)
    except HyperkronError as error:  # the run itself is complete
        say(f"warning: {as_options(str(error))}")
    if options.json:
        from hyperkron.cleaning.folder import FILES

        content = json.loads((out / "result.json").read_text("utf-8"))
        there = {name: str(out / name) for name in FILES if (out / name).exists()}
        say_json({**content, "folder": str(out), "files": there})
    else:
        from hyperkron.cleaning.data.files import several
        from hyperkron.cleaning.fields import read_result
        from hyperkron.cli.summary import summary

        if options.quiet and (notes := read_result(out).child("data").items("messages")):  # not said on the way
            say(f"{several(len(notes), 'notice')} about the data: see data.messages in {out / 'result.json'}.")
        say(summary(out), stream=sys.stdout)
    return 0
