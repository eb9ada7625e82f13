"""Bad invocations are answered with key, value, reason and fix, and exit code 2: some of every kind. All of them are in
test_invocations_long.py."""

from __future__ import annotations

import pytest
from invocation import Case, in_process, in_subprocess
from invocation_catalogue import CASES, KINDS, short
from invocation_table import written

from paddock.cli import COMMANDS


@pytest.mark.parametrize("case", short(), ids=lambda case: case.title)
def test_a_mistake_is_answered_before_torch_is_imported(case, tmp_path):
    assert in_process(case, tmp_path / "here").problems(case) == []


@pytest.mark.parametrize("kind", ["misspelt keys", "scripts"])
def test_a_mistake_is_answered_so_in_a_process_of_its_own(kind, tmp_path):
    case = next(case for case in CASES if case.kind == kind)
    assert in_subprocess(case, tmp_path / "here").problems(case) == []


def test_the_catalogue_holds_every_command_and_counts_what_it_holds():
    assert len(CASES) >= 280
    assert {case.typed[0] for case in CASES} >= set(COMMANDS)
    table = written()
    assert f"| **all** | {len(CASES)} |" in table and all(f"| {kind} |" in table for kind in KINDS)


def test_an_answer_that_is_not_good_enough_is_noticed(tmp_path):
    """The checks above are no rubber stamp: what works, what is not named and what is left behind are found."""
    works = Case("none", ("--version",), ("0.",))
    assert "exit code 0" in in_process(works, tmp_path / "a").problems(works)
    unnamed = Case("none", ("train", "data.foo=1"), ("data.bar",))
    assert in_process(unnamed, tmp_path / "b").problems(unnamed) == ["does not say 'data.bar'"]
    leaves = Case("none", ("run", "s.sh"), (), (lambda folder: (folder / "s.sh").write_text("touch half; exit 2"),))
    assert "left half" in in_process(leaves, tmp_path / "c").problems(leaves)
