"""The troubleshooting page shows what Paddock says: its commands are typed here, and its headings are in the code."""

from __future__ import annotations

import re
import runpy
import shlex
from dataclasses import replace

import pytest
from conftest import ROOT
from pages import LANGUAGES, blocks

from paddock.cli import main
from paddock.commands import preflight
from paddock.facts.machine import Machine, cache_folder, this_machine

PAGE = ROOT / "docs" / LANGUAGES[0] / "troubleshooting.md"
OWN_TASK = PAGE.with_name("own_task.md")
"""Its blocks are the files that they name: make.py, which writes mine.csv, and r.py."""
SHOWN = [block for block in blocks(PAGE, "text") if block.startswith("$ paddock")]
SCORER = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
FILES = {
    "other.csv": "text,label_of\nabc,1\n",
    "broken.csv": "question,answer\n2*3=,6,7\n",
    "noanswer.jsonl": '{"prompt": "2*3="}\n',
    "raises.py": f"{SCORER}    return int(solution_str)\n",
    "none.py": f"{SCORER}    print('scored')\n",
    "long.csv": "question,answer\n" + "".join(f"{'word ' * 150}{row},1\n" for row in range(40)),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files that the page speaks of, on a machine with nothing but a CPU and no optional package."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    for block in blocks(OWN_TASK, "python"):
        (tmp_path / block.split()[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("make.py")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    if cache_folder("models").exists():
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bare = replace(this_machine(), device="cpu", devices=0)
    monkeypatch.setattr(Machine, "has", lambda self, package: False)
    monkeypatch.setattr(preflight, "this_machine", lambda: bare)


def as_pattern(lines: list[str]) -> str:
    """A line `...` stands for any lines."""
    return "".join("(?:.*\n)*" if line == "..." else re.escape(line) + "\n" for line in lines)


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.splitlines()[0][2:80])
def test_a_command_of_the_page_is_answered_as_shown(block, folder, capfd):
    line, *answer = block.replace("paddock-rl[", "paddock[").splitlines()
    assert main(shlex.split(line)[2:]) == 2
    said = capfd.readouterr().err.replace("paddock-rl[", "paddock[")
    assert re.fullmatch(as_pattern(answer), said), said


def headings() -> list[str]:
    return [line[4:] for line in PAGE.read_text().splitlines() if line.startswith("### ")]


def test_a_heading_without_an_example_is_a_message_of_the_code():
    source = "".join(path.read_text() for path in sorted((ROOT / "paddock").rglob("*.py")))
    plain = re.sub(r'"\s*\n\s*f?"', "", source)
    examples = " ".join(SHOWN)
    assert not [heading for heading in headings() if not is_said(heading, examples) and not is_said(heading, plain)]


def is_said(heading: str, text: str) -> bool:
    """Whether all parts of a heading are there; `...` stands for what changes."""
    return all(part in text for part in heading.split(" ... "))
