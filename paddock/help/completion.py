"""`paddock completion`: a script for the shell, and the words that it asks for. Imports neither schema nor torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, cast

from paddock.errors import UserError
from paddock.help.pages import PAGES

KNOWN = Path(__file__).with_name("known.json")
"""What `make keys-reference` generates about keys, for completion without the schema."""

ASK = "--words"
"""`paddock completion --words WORD ... CURRENT` prints the words that may stand for CURRENT, one a line."""
SHELLS = ("bash", "zsh", "fish")
FOLDERS = ("export", "report", "generate", "eval", "template")
"""Commands whose first arguments may be folders."""


def run(arguments: list[str]) -> int:
    if arguments[:1] == [ASK]:
        print("\n".join(words(arguments[1:])))
        return 0
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        given = " ".join(arguments) or None
        raise UserError("which shell?", key="paddock completion", value=given, fix=f"one of: {', '.join(SHELLS)}")
    print((Path(__file__).parent / f"completion.{arguments[0]}").read_text(encoding="utf-8"), end="")
    return 0


@cache
def known() -> dict[str, Any]:
    """Returns by `keys` the values of each, and whether it is a path; by `commands` the patterns of keys that each
    reads, and its short names; by `arguments` the words of other commands."""
    return cast(dict[str, Any], json.loads(KNOWN.read_text(encoding="utf-8")))


def words(line: list[str]) -> list[str]:
    """Returns what may stand for the last word of a line `paddock ...`. A word that ends in = . or / may go on."""
    *before, current = line or [""]
    if not before:
        return starting([*PAGES, "--help", "--version"], current)
    command = before[0]
    if command == "rm" and len(before) == 1:
        return starting(["train", "--help"], current)
    options = flags(command, current) if current.startswith("-") else arguments_of(command, before, current)
    spoken = "rm train" if command == "rm" else command
    if spoken in known()["commands"] and not current.startswith("-"):
        options += keys(spoken, current)
    return list(dict.fromkeys(options))


def starting(options: Iterable[str], start: str) -> list[str]:
    return [option for option in options if option.startswith(start)]


def flags(command: str, current: str) -> list[str]:
    page = PAGES.get(command)
    named = [word.split()[0] for word, _ in page.words if word.startswith("-")] if page else []
    return starting(sorted({word.split("=")[0] for word in named} | {"--help"}), current)


def arguments_of(command: str, before: list[str], current: str) -> list[str]:
    """Words of a command that are no keys."""
    first = len(before) == 1
    if command == "help" and first:
        return starting(PAGES, current)
    if command == "completion" and first:
        return starting(SHELLS, current)
    if command == "doctor" and first:
        return starting(["env"], current)
    if command == "models":
        place = {1: ["list", "get"], 2: known()["arguments"]["models"] if before[-1] == "get" else []}
        return starting(place.get(len(before), []), current)
    if command == "data" and first:
        return starting(known()["arguments"]["data"], current)
    if command == "keys":
        return [word.rstrip("=") for word in next_names(known()["keys"], current)]
    if command in FOLDERS or command in ("run", "data"):
        return files("", current) if "=" not in current and (current or command not in ("generate", "eval")) else []
    return []


def keys(command: str, current: str) -> list[str]:
    """Names by section, one level at a time; behind =, values."""
    about = known()["commands"][command]
    sign = current[: len(current) - len(current.lstrip("+~"))]
    name, equals, value = current[len(sign) :].partition("=")
    if equals:
        return values(f"{sign}{name}=", full_name(name, about["names"]), value)
    allowed = [key for key in known()["keys"] if any(fnmatchcase(key, pattern) for pattern in about["reads"])]
    short = []
    for other, full in about["names"].items():
        if full.endswith("."):
            short += [other + key.removeprefix(full) for key in allowed if key.startswith(full)]
        else:
            short.append(other)
    own = [word.partition("=")[0] for word, _ in PAGES[command.split()[0]].words if "=" in word and word[0] != "-"]
    return [sign + word for word in next_names([*own, *short, *allowed], name)]


def full_name(name: str, names: dict[str, str]) -> str:
    section, dot, rest = name.partition(".")
    return names.get(name) or (names[section + dot] + rest if section + dot in names else name)


def next_names(known_keys: Iterable[str], start: str) -> list[str]:
    """Keys that begin so, cut behind the next dot: actor_rollout_ref.ro -> actor_rollout_ref.rollout."""
    options: dict[str, None] = {}
    for key in known_keys:
        if key.startswith(start):
            dot = key.find(".", len(start))
            options[key[: dot + 1] if dot >= 0 else f"{key}="] = None
    return [*options]


def values(before: str, key: str, start: str) -> list[str]:
    about = known()["keys"].get(key, {})
    options = [before + word for word in starting(about.get("values", ()), start)]
    return options + (files(before, start) if about.get("path") or key == "output" else [])


def files(before: str, start: str) -> list[str]:
    """Files and folders that begin so; folders end in /. `~` stays as it was typed."""
    folder, name = os.path.split(start)
    try:
        entries = sorted(os.scandir(os.path.expanduser(folder) or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    options = []
    for entry in entries:
        if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith(".")):
            options.append(before + os.path.join(folder, entry.name) + ("/" if entry.is_dir() else ""))
    return options
