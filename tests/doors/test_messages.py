"""What users read on stderr: one prefix, and no word that only means something inside the source."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache

from conftest import ROOT

from paddock.config import tree
from paddock.loading import foreign

FILES = sorted((ROOT / "paddock").rglob("*.py"))
OURS = {file.name for file in FILES} | {"constraints.txt", "pyproject.toml", "Makefile"}
NAMED = re.compile(r"(?<![\w/.-])([\w-]+\.(?:py|txt|toml))\b")


@cache
def calls() -> list[tuple[str, ast.Call]]:
    """Every call in the package that may be meant, with its place."""
    chosen = (file for file in FILES if re.search(r"fix=|sys\.stderr", file.read_text()) and "inside" not in file.parts)
    return [
        (f"{file.relative_to(ROOT)}:{call.lineno}", call)
        for file in chosen
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
    ]


def texts(node: ast.AST) -> str:
    return " ".join(
        part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def test_a_fix_names_no_source_file():
    fixes = [(place, texts(word.value)) for place, call in calls() for word in call.keywords if word.arg == "fix"]
    assert len(fixes) > 150
    assert [(place, text) for place, text in fixes if OURS & set(NAMED.findall(text))] == []


def test_the_meaning_of_a_key_names_no_source_file():
    meanings = {key: leaf.metadata["meaning"] for key, leaf in tree.leaves().items()}
    meanings |= {key: f"{getattr(rule, 'why', '')} {getattr(rule, 'fix', '')}" for key, rule in foreign.rules().items()}
    assert {key: text for key, text in meanings.items() if NAMED.search(text)} == {}


def test_errors_warnings_and_log_records_have_one_prefix(tmp_path):
    """A command logs a warning, and then fails."""
    code = (
        "import logging, sys, types\n"
        "from paddock import cli\n"
        "def fails(arguments):\n"
        "    logging.getLogger('paddock.data').warning('rows are left out')\n"
        "    raise cli.UserError('no')\n"
        "sys.modules['failing'] = types.SimpleNamespace(run=fails)\n"
        "cli.COMMANDS['plan'] = 'failing'\n"
        "sys.exit(cli.main(['plan']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["paddock: rows are left out", "paddock: no"]


def test_what_is_printed_to_stderr_begins_with_the_prefix():
    """Each print to stderr in the package; the sandbox's inner programs talk to their guard alone."""
    printed = []
    for place, call in calls():
        if getattr(call.func, "id", "") == "print":
            to_stderr = any(word.arg == "file" and ast.unparse(word.value) == "sys.stderr" for word in call.keywords)
            if to_stderr and not re.match(r"f?['\"](\\n)?(paddock: |\{PREFIX\})", ast.unparse(call.args[0])):
                printed.append(place)
    assert printed == []
