"""``main``: from the arguments to a command and its exit code."""

from __future__ import annotations

import errno
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from hyperkron.cli import ranks
from hyperkron.cli.config import read_config
from hyperkron.cli.options import as_options
from hyperkron.cli.output import UsageError, ensure_streams, say, say_json, silence
from hyperkron.cli.parser import check, parse

OK, ERROR, USAGE = 0, 1, 2
_MODULES = {"clean": "cleaning", "resume": "cleaning", "sweep": "sweeping", "doctor": "doctor"}
"""Where the functions of the commands are, each named after its command; all others are in runs.py."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of the command line, and return its exit code: 0 success, 1 error, 2 wrong usage.

    Ctrl-C gives 130 and SIGTERM 143. Where stdout was closed before the start, nothing is printed; where its reader
    left, the code is 1. Messages that stderr does not take are lost, and the command continues.

    Example:
        >>> main(["--version"])
        hyperkron ...
        0
    """
    ensure_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    wanted: Any = None
    try:
        try:
            with _terminable(), _worded_warnings():
                wanted = parse(given)
                if getattr(wanted, "config", None) is not None:
                    wanted = parse(given, read_config(wanted.config))
                check(wanted)
                module = import_module(f"hyperkron.cli.{_MODULES.get(wanted.command, 'runs')}")
                command = getattr(module, wanted.command)
                code: int = command(wanted) if ranks.processes()[1] == 1 else ranks.run(command, wanted)
                return code
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


def _failed(error: Exception, options: Any) -> int:
    """Say what went wrong, without a traceback where the message is meant for people."""
    solution = sys.modules.get("hyperkron.solution")  # whose errors are raised only once it has been imported
    ours = solution is not None and isinstance(error, solution.HyperkronError)
    usage = isinstance(error, UsageError)
    if getattr(options, "debug", False) or not (usage or ours or isinstance(error, (OSError, MemoryError))):
        traceback.print_exception(error)
    text = as_options(str(error)) if ours else str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = getattr(options, "run", None) or getattr(options, "out", None)
        if getattr(options, "command", "") == "predict":  # which writes nothing into the run
            folder = None
        where = error.filename or (f"a file in {folder}" if folder else "the output")
        text = f"the disk is full ({error.strerror}): {where} cannot be written. Free some space, then try again."
    prog = f"hyperkron {options.command}" if options is not None else "hyperkron"
    rank = ranks.processes()[0]
    if usage and rank > 0:  # the first process says it
        return USAGE
    told = f"process {rank}: {text}" if rank else text
    say(f"{prog}: error: {told}" + (f"\nSee `{prog} --help`." if usage else ""))
    if getattr(options, "json", False):
        say_json({"error": text, "type": type(error).__name__})
    return USAGE if usage else ERROR


def _interrupted(options: Any, code: int) -> int:
    """Say how to continue."""
    if ranks.processes()[0] > 0:  # the first process says it
        return code
    folder = getattr(options, "run", None) or getattr(options, "out", None)
    text = "Interrupted. Nothing was written; run the same command again."
    if getattr(options, "command", "") == "sweep":
        text = "Interrupted. Trials that were finished are kept; run the same command again to continue."
    elif folder and getattr(options, "command", "") in ("clean", "resume"):
        files = sys.modules.get("hyperkron.cleaning.folder")  # nothing was done before it was imported
        if files is not None and files.has_whole_result(Path(folder)):
            text = f"Interrupted. The run in {folder} is finished; see `hyperkron report {shlex.quote(folder)}`."
        elif (Path(folder) / "config.json").exists():
            text = f"Interrupted. What was finished is saved; continue with: hyperkron resume {shlex.quote(folder)}"
            if known := [name for name in ("rows.csv", "report.html") if (Path(folder) / name).exists()]:
                text += f"\nThe suspects are known already: see {' and '.join(known)} there."
    say(f"\n{text}")
    if getattr(options, "json", False):
        say_json({"error": text, "type": "Interrupted"})
    return code


@contextmanager
def _worded_warnings() -> Iterator[None]:
    """Warnings of the library are said as messages, without the place in the code and in the words of the options."""
    before = warnings.showwarning

    def show(message: Any, category: type[Warning], *more: Any, **named: Any) -> None:
        if category.__name__ == "HyperkronWarning":
            say(f"warning: {as_options(str(message))}")
        else:
            before(message, category, *more, **named)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the process the way Ctrl-C does, with messages and exit codes; both wait for imports to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, _stop)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored, as under nohup
        before[signal.SIGINT] = signal.signal(signal.SIGINT, _stop)
    alarm = signal.getsignal(signal.SIGALRM) if hasattr(signal, "setitimer") else None
    try:
        yield
    finally:
        if hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is not alarm:  # a caller's timer stays
            signal.setitimer(signal.ITIMER_REAL, 0)
            before[signal.SIGALRM] = alarm
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _stop(number: int, frame: FrameType | None) -> None:
    """End the process; during an import, whose C++ code may abort or lose the exception, look again in a moment.

    A second signal does not wait.
    """
    here = frame if hasattr(signal, "setitimer") and not signal.getitimer(signal.ITIMER_REAL)[0] else None
    while here is not None and here.f_code is not main.__code__:
        if here.f_code.co_filename.startswith("<frozen importlib"):
            signal.signal(signal.SIGALRM, lambda _, later: _stop(number, later))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return
        here = here.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
