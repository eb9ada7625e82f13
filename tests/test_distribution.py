"""The distribution's name is `paddock-rl`: a package index gives another project for `paddock`."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from paddock.config.loggers import LOGGERS
from paddock.config.rollout_engines import ENGINES
from paddock.doctor.extras import EXTRAS
from paddock.facts.distribution import DISTRIBUTION, install_command

OLD = (
    re.compile(r"""(?<![\w./-])paddock\[[a-z{]"""),  # an extra
    re.compile(r"""(?:pip3?|uv|pipx|poetry)\s(?:pip\s)?(?:install|add|download)\b[^\n`'"]*['"` ]paddock(?![\w-])"""),
    re.compile(r"""metadata\.(?:version|distribution|metadata|requires|files)\(["']paddock["']"""),
    re.compile(r"""^name\s*=\s*["']paddock["']""", re.MULTILINE),
)


def tracked() -> list[str]:
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [name for name in found.stdout.split("\0") if name and (ROOT / name).is_file()]


def old_forms(text: str) -> list[str]:
    return [match.group() for pattern in OLD for match in pattern.finditer(text)]


@pytest.mark.parametrize(
    "text",
    ["pip install {}", 'pip install "{}[ray]"', "pip install -U '{}'", "uv add {}", "uv pip install {}", '"{}[lora]"'],
)
def test_the_patterns_see_the_old_form_and_not_the_new_one(text):
    assert old_forms(text.format("paddock")) and not old_forms(text.format("paddock-rl"))


def test_no_tracked_file_installs_the_other_project():
    found = {}
    for name in tracked():
        text = (ROOT / name).read_bytes().decode("utf-8", "replace")
        if name != "tests/test_distribution.py" and (forms := old_forms(text)):
            found[name] = forms
    assert found == {}


def test_no_tracked_file_holds_marks_of_an_unfinished_merge():
    marks = re.compile(rb"^(<{7} |>{7} )", re.MULTILINE)
    assert [name for name in tracked() if marks.search((ROOT / name).read_bytes())] == []


def test_an_install_command_is_quoted_for_the_shell():
    assert install_command("ray") == f'pip install "{DISTRIBUTION}[ray]"'


def test_commands_work_without_the_metadata_of_a_distribution(tmp_path):
    """A checkout on the path is enough: no command asks which distribution it came with."""
    code = (
        "import importlib.metadata as metadata, sys\n"
        "known = metadata.distribution\n"
        "def without(name):\n"
        "    if name.startswith('paddock'):\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return known(name)\n"
        "metadata.distribution = without\n"
        "from paddock.cli import main\n"
        "sys.exit(main(['--version']) or main(['doctor', 'env']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("paddock 0.") and "extras" in done.stdout.lower()
    assert importlib.metadata.version("torch") in done.stdout


def test_every_extra_that_a_message_names_exists():
    literal = re.compile(r"""install_command\(["'](\w+)["']\)""")
    named = {extra for file in (ROOT / "paddock").rglob("*.py") for extra in literal.findall(file.read_text())}
    named |= {
        *(kind.package for kind in ENGINES.values() if kind.package),
        *(kind.package for kind in LOGGERS.values() if kind.package),
    }
    assert len(named) > 10 and named <= set(EXTRAS)
