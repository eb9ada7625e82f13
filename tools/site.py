"""Hooks of mkdocs: pages that GitHub shows well become a site that can be read alone, from a disk without a server.

A page may link any file of the project. Those outside docs/ (README, examples, scripts) are taken into the site under
their own path, and links to them are rewritten. mkdocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
HOME = [ROOT / "README.md", ROOT / "README_zh.md"]
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
LINK = re.compile(r"\[(?P<text>[^]]*)\]\((?P<target>[^)\s]+)\)|`[^`\n]*`")
ELSEWHERE = re.compile(r"[a-z]+:|#")
BLOCK = re.compile(r"(- |\* |1\. |\|)")
"""How a list or a table begins."""


def on_config(config: Any) -> Any:
    """Names headings as GitHub does, so that a link to one works in both."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Adds what pages link outside docs/."""
    for path in linked([*HOME, *sorted(DOCS.rglob("*.md"))]):
        if not path.is_relative_to(DOCS):
            files.append(File.generated(config, site_path(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    source = Path(page.file.abs_src_path)
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(partial(rewritten, source), spaced(text)) for text in parts[::2]]
    return "\n".join(parts)  # a blank line around each fenced block


def linked(pages: list[Path]) -> list[Path]:
    """These pages and all files that they lead to, directly or by other pages."""
    found = list(pages)
    for path in found:  # grows
        if path.suffix == ".md":
            found += [target for target in dict.fromkeys(targets(path)) if target not in found]
    return found


def targets(page: Path) -> Iterator[Path]:
    for text in FENCE.split(page.read_text())[::2]:
        for match in LINK.finditer(text):
            if match["target"] and not ELSEWHERE.match(match["target"]):
                target = (page.parent / match["target"].partition("#")[0]).resolve()
                if target.is_file():
                    yield target


def site_path(path: Path) -> str:
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


def rewritten(source: Path, match: re.Match[str]) -> str:
    """The link as it is in the site. A folder has no page there, so its path is named instead."""
    target = match["target"]
    if not target or ELSEWHERE.match(target):
        return match[0]
    path, sign, anchor = target.partition("#")
    there = (source.parent / path).resolve()
    if there.is_dir():
        return f"{match['text']} (`{there.relative_to(ROOT).as_posix()}`)"
    here = posixpath.dirname(site_path(source))
    return f"[{match['text']}]({posixpath.relpath(site_path(there), here)}{sign}{anchor})"


def spaced(text: str) -> str:
    """A blank line between a paragraph and the list or table right below it, which Python's Markdown wants."""
    lines: list[str] = []
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        paragraph = before.strip() and not before.startswith((" ", "#", "<")) and not BLOCK.match(before)
        if paragraph and BLOCK.match(line) and not inside_list(lines):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def inside_list(lines: list[str]) -> bool:
    """Whether the last lines belong to a list item that was not indented where it goes on."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if BLOCK.match(line):
            return True
    return False
