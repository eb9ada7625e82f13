"""The page of a command as text: what it does, its words, its keys with default and meaning, examples."""

from __future__ import annotations

import shutil
import textwrap

from paddock.help import entry as keys
from paddock.help.completion import known
from paddock.help.pages import PAGES, Page

ALL = "--all"
NAMES_OF_DATA = "data"
NAME_WIDTH, DEFAULT_WIDTH = 44, 14


def page_of(name: str, arguments: list[str], has_options: bool = False) -> str:
    """Returns the help of a command. `--all` beside `--help` lists every key that it reads.

    `has_options`: the command's own parser prints its options after this text.
    """
    page = PAGES[name]
    spoken = "rm train" if name == "rm" else name
    parts = [page.about if name != NAMES_OF_DATA else f"{page.about} {', '.join(known()['arguments']['data'])}"]
    if not has_options:
        parts = [f"usage: {page.usage}", *parts]
        if page.words:
            parts.append("\n".join(f"  {word:<14} {meaning}" for word, meaning in page.words))
    if page.keys:
        parts += key_parts(page, spoken, ALL in arguments)
    parts.append(examples(page))
    return "\n\n".join(parts)


def key_parts(page: Page, spoken: str, every: bool) -> list[str]:
    command = keys.COMMANDS[spoken]
    read = [key for key in keys.entries() if command is None or keys.takes(command, key)]
    shown = [*page.keys, *(key for key in read if key not in page.keys)] if every else [*page.keys]
    title = "Keys, with default and meaning, most useful first:"
    rest = len(read) - len(shown)
    parts = [title + "\n" + "\n".join(line_of(spoken, key) for key in shown)]
    if command is not None and command.names:
        pairs = [f"{short}* = {full}*" if full.endswith(".") else f"{short} = {full}"
                 for short, full in command.names.items() if len(short) < len(full)]  # fmt: skip
        parts.append("Short names: " + textwrap.fill(", ".join(pairs), width() - 2, subsequent_indent="  "))
    if rest:
        parts.append(f"{rest} more keys: `paddock {spoken} --help {ALL}` lists them, `paddock keys WORD` finds them.")
    return parts


def line_of(spoken: str, key: str) -> str:
    command, entry = keys.COMMANDS[spoken], keys.entries()[key]
    default = keys.default_in(command, entry)
    if default.startswith("= "):
        default = f"= {keys.short_name(command, default[2:])}"
    head = f"  {keys.short_name(command, key):<{NAME_WIDTH}} {default:<{DEFAULT_WIDTH}} "
    extra = f" ({entry.limits})" if entry.choices and "one of" in entry.limits else ""
    text = textwrap.wrap(entry.meaning + extra, max(30, width() - NAME_WIDTH - DEFAULT_WIDTH - 4))
    indent = " " * (NAME_WIDTH + DEFAULT_WIDTH + 4)
    if len(head) > len(indent):
        return "\n".join([head.rstrip(), *(indent + part for part in text)])
    return head + f"\n{indent}".join(text)


def examples(page: Page) -> str:
    return "Examples:\n" + "\n".join(f"  # {title}\n  {line}" for title, line in page.examples)


def width() -> int:
    return max(80, min(160, shutil.get_terminal_size((120, 24)).columns))
