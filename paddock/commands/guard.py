"""Shared by all entry points: how a command ends, whatever happens in it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paddock.errors import EXIT_CODE, UserError, printable

PLAN_ONLY = "PADDOCK_PLAN"  # set by `paddock run --plan`: the script's command plans instead of training
CALLED = "PADDOCK_RUN_CALLED"  # set by `paddock run`: a file that our commands make, and add their exit codes to
INTERRUPTED, CLOSED_PIPE = 130, 141
PREFIX = "paddock: "


def guarded(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Handles the errors of an entry point: what the user can mend is one message and exit code 2."""
    note()
    code = 1
    try:
        if not logging.getLogger().handlers:  # else the caller has set up logging
            logging.getLogger().addHandler(Messages())
        code = command(arguments)
    except UserError as error:
        print(f"paddock: {error}", file=sys.stderr)
        code = EXIT_CODE
    except KeyboardInterrupt:
        print("paddock: interrupted", file=sys.stderr)
        code = INTERRUPTED
    except MemoryError:
        limited = "a limit of this process (ulimit -v, ulimit -d) or the machine's memory is used up"
        print(f"paddock: {limited}\n  fix: raise the limit, or a smaller model", file=sys.stderr)
        code = EXIT_CODE
    except BrokenPipeError:
        sys.stderr.close()
        code = CLOSED_PIPE
    finally:
        note(code)
    return code


def note(code: int | None = None) -> None:
    """Tells `paddock run` that a command of the script begins, or has ended with this exit code."""
    if file := os.environ.get(CALLED):
        with suppress(OSError), Path(file).open("a") as notes:
            notes.write("" if code is None else f"{code}\n")


class Messages(logging.Handler):
    """Writes log records to whatever stderr is at the time, under the prefix that every message has.

    A record that cannot be written is dropped: a run outlives its terminal.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            print(f"{PREFIX}{printable(self.format(record))}", file=sys.stderr)


def say_last(text: str) -> None:
    """Prints the last lines of a command, whose exit code they must not change: the terminal may be closed by now."""
    try:
        print(text, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails to flush them at its exit
