"""The command `paddock`. Heavy imports happen inside the command that needs them: a wrong key is answered at once."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from paddock import __version__
from paddock.commands.guard import guarded
from paddock.errors import UserError
from paddock.help.pages import PAGES

COMMANDS = {name: page.module for name, page in PAGES.items()}
ENDING = """
`paddock COMMAND --help` has the keys of a command and examples.
Overrides are Hydra's: a.b=c, +a.b=c, ++a.b=c, ~a.b, lists [a,b], --config-path DIR --config-name NAME.
Without a model or data, everything runs on a small embedded default:
  paddock plan algorithm.adv_estimator=grpo
"""
COLUMN = 38
"""Column of `paddock --help` in which summaries begin."""


def usage() -> str:
    """Returns every command with its summary."""
    lines = ["paddock trains language models with reinforcement learning.", ""]
    for page in PAGES.values():
        *above, last = [f"  {line.strip()}" for line in page.usage.splitlines()]
        summary = textwrap.wrap(page.summary, 82)
        beside = f"{last:<{COLUMN}}" if len(last) < COLUMN else f"{last}\n{' ' * COLUMN}"
        lines += [*above, beside + f"\n{' ' * COLUMN}".join(summary)]
    return "\n".join([*lines, ENDING])


def main(argv: Sequence[str] | None = None) -> int:
    """The console script."""
    return guarded(_dispatch, list(sys.argv[1:] if argv is None else argv))


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage(), end="")
        return 0
    if arguments[0] == "--version":
        print(f"paddock {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        near = get_close_matches(arguments[0], COMMANDS, n=1)
        fix = f"did you mean `paddock {near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}; see paddock --help"
        raise UserError("no such command", key=arguments[0] or "''", fix=fix)
    if asks_for_help(arguments):
        from paddock.help.show import page_of

        has_options = PAGES[arguments[0]].parses and arguments[0] != "data"  # each data set has options of its own
        print(page_of(arguments[0], arguments[1:], has_options), flush=True)
        if not has_options:
            return 0
        print()
        arguments = [arguments[0], "--help"]
    code: int = import_module(command).run(arguments[1:])
    return code


def asks_for_help(arguments: list[str]) -> bool:
    """True if --help is for us: a script's own arguments, and those of a command with a parser, are left to them."""
    words = arguments[1:2] if arguments[0] == "run" or PAGES[arguments[0]].parses else arguments[1:]
    return "-h" in words or "--help" in words


if __name__ == "__main__":
    sys.exit(main())
