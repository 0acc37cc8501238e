"""``main``: from the arguments to a command and its exit code."""

from __future__ import annotations

import errno
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

OK, ERROR, USAGE = 0, 1, 2
_COMMANDS = {
    "clean": ("cleaning", "clean"),
    "resume": ("cleaning", "resume"),
    "report": ("runs", "report"),
    "export": ("runs", "export"),
    "doctor": ("doctor", "doctor"),
}


class _Stopped(SystemExit):
    """SIGTERM came where nothing handles it better."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 success, 1 error, 2 wrong usage.

    Ctrl-C gives 130 and SIGTERM 143. Where stdout was closed before the start, nothing is printed; where its reader
    left, the code is 1. Messages that stderr does not take are lost, and the command continues.

    Args:
        arguments: those of the command line by default.

    Example:
        >>> main(["--version"])
        hyperkron ...
        0
    """
    from hyperkron.cli.output import ensure_streams, silence

    ensure_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    wanted: Any = None
    try:
        try:
            with _terminable():
                wanted = _parsed(given)
                if getattr(wanted, "config", None) is not None:
                    from hyperkron.cli.config import read_config

                    wanted = _parsed(given, read_config(wanted.config))
                return _call(wanted, given)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _interrupted(wanted, 128 + signal.SIGINT)
    except BrokenPipeError:  # whoever read our output has left
        silence(sys.stdout)
        return ERROR
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else OK if error.code is None else ERROR
        return _interrupted(wanted, code) if code in (128 + signal.SIGINT, 128 + signal.SIGTERM) else code
    except Exception as error:
        code = _failed(error, wanted)
        try:
            sys.stdout.flush()
        except OSError:  # what could not be written (a full disk) would be tried again, and told of, at the exit
            silence(sys.stdout)
        return code


def _parsed(given: list[str], defaults: Mapping[str, Any] | None = None) -> Any:
    """The namespace of the command that was asked for, with its name."""
    try:
        from hyperkron.cli.parser import parser
    except ImportError as error:
        raise OSError(
            f"the command line needs jsonargparse, which cannot be imported ({error}): pip install 'hyperkron[cli]'"
        ) from error
    top = parser(_version(), defaults).parse_args(given)
    options = top[top.command]
    options.command = top.command
    return options


def _version() -> str:
    try:
        return version("hyperkron")
    except PackageNotFoundError:
        return "unknown"


def _call(options: Any, given: list[str]) -> int:
    module, function = _COMMANDS[options.command]
    code: int = getattr(import_module(f"hyperkron.cli.{module}"), function)(options, given)
    return code


def _failed(error: Exception, options: Any) -> int:
    """Say what went wrong, without a traceback where the message is meant for people."""
    from hyperkron.cli.output import UsageError, say, say_json

    usage, debug = isinstance(error, UsageError), bool(getattr(options, "debug", False))
    if debug or not (usage or _expected(error)):
        traceback.print_exception(error)
    text = _in_words(error, options)
    prog = f"hyperkron {options.command}" if options is not None else "hyperkron"
    say(f"{prog}: error: {text}" + (f"\nSee `{prog} --help`." if usage else ""))
    if getattr(options, "json", False):
        say_json({"error": text, "type": type(error).__name__})
    return USAGE if usage else ERROR


def _in_words(error: Exception, options: Any) -> str:
    """What an error says, in terms of the command line; a full disk with what to do about it."""
    if isinstance(error, _ours()):
        from hyperkron.cli.options import as_options

        return as_options(str(error))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = getattr(options, "run", None) or getattr(options, "out", None)
        where = error.filename or (f"a file in {folder}" if folder else "the output")
        return f"the disk is full ({error.strerror}): {where} cannot be written. Free some space, then try again."
    return str(error) or type(error).__name__


def _expected(error: Exception) -> bool:
    """Whether an error is the world's or the user's, and not ours."""
    return isinstance(error, (OSError, MemoryError, *_ours()))


def _ours() -> tuple[type[Exception], ...]:
    """The errors of the package, if it has been imported."""
    solution = sys.modules.get("hyperkron.solution")
    return () if solution is None else (solution.HyperkronError,)


def _interrupted(options: Any, code: int) -> int:
    """Say how to continue."""
    from hyperkron.cli.output import say, say_json

    folder = getattr(options, "run", None) or getattr(options, "out", None)
    command = getattr(options, "command", "")
    if command in ("clean", "resume") and folder and (Path(folder) / "result.json").exists():
        text = f"Interrupted. The run in {folder} is finished; see `hyperkron report {shlex.quote(str(folder))}`."
    elif command in ("clean", "resume") and folder and (Path(folder) / "config.json").exists():
        text = f"Interrupted. What was finished is saved; continue with: hyperkron resume {shlex.quote(str(folder))}"
    else:
        text = "Interrupted. Nothing was written; run the same command again."
    say(f"\n{text}")
    if getattr(options, "json", False):
        say_json({"error": text, "type": "Interrupted"})
    return code


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the process the way Ctrl-C does, with messages and exit codes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _Stopped(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
