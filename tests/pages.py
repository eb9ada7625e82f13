"""The pages of the project as tests read them: their commands, links and headings."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT

LANGUAGES = ("en", "zh")
READMES = [ROOT / "README.md", ROOT / "README_zh.md"]
FOLDERS = ("docs", "examples", "benchmarks")
ALL = [*READMES, *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]


@dataclass(frozen=True)
class Typed:
    page: Path
    words: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()
    """Names and contents of those that the block wrote before."""

    def __str__(self) -> str:
        return f"{self.page.parent.name}/{self.page.name}: {' '.join(self.words)}"[:100]


def title(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, kind: str) -> list[str]:
    return [text for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S) if name == kind]


def typed(page: Path) -> list[Typed]:
    """Every command of a page's shell blocks, split as a shell would, less comments."""
    found = []
    for block in blocks(page, "bash"):
        files = re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END\n", block, re.M | re.S)
        rest = re.sub(r"^cat > .*?^END\n", "", block, flags=re.M | re.S)
        for line in rest.replace("\\\n", " ").splitlines():
            words = shlex.split(line.replace("$HOME", os.path.expanduser("~")), comments=True)
            found += [Typed(page, tuple(words), tuple(files))] if words else []
    return found


def arguments_of(words: tuple[str, ...]) -> list[str] | None:
    """What follows `paddock`, also where it is called as a module or behind variables."""
    rest = list(words)
    while rest and re.fullmatch(r"[A-Z_]+=.*", rest[0]):
        rest.pop(0)
    if rest[:1] == ["paddock"]:
        return rest[1:]
    if rest[:1] and rest[0] in ("python", "python3") and rest[1:3] == ["-m", "paddock.trainer.main_ppo"]:
        return ["train", *rest[3:]]
    return None


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def links(page: Path) -> list[str]:
    """Targets of links and pictures that lie in the project; text in backticks is no link."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


def anchors(page: Path) -> set[str]:
    """Names under which headings can be linked: as GitHub makes them, and the site with its `slugify`."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ (.+?) *$", prose(page), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        names.add(name if name not in found else f"{name}-{found[name]}")
        found[name] = found.get(name, 0) + 1
    return names
