"""Hostile and honest programs, scored as a run does it. `python -m tests.chaos.sandbox.attack` shows each of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import ordinary_account
import pytest
from conftest import ROOT

from paddock.errors import UserError
from paddock.rewards.manager import RewardManager
from paddock.rewards.score import ScoreRequest
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import default_settings
from tests.chaos.sandbox.attack import TENTH, attack, faults
from tests.chaos.sandbox.catalogue import Case, script
from tests.chaos.sandbox.cheats import CHEATS
from tests.chaos.sandbox.honest import HONEST
from tests.chaos.sandbox.hostile import GUARDIAN, HOSTILE, REPORT, TEXTS, WALLS
from tests.chaos.sandbox.memory import MEMORY
from tests.chaos.sandbox.outside import manager, watched

MEMORY_MB, PROCESSES, SECONDS = 256, 16, 2.0
HIDDEN = (
    "record locks of fourteen processes", "processes whose first thread has ended",
    "processes whose threads take turns", "access lists of files",
)  # fmt: skip
"""Ways to take memory that the watch alone must see, where no control group does: an ordinary user has none."""
SHORT = (
    "fourteen processes fill a block each", "connections that nobody accepts", "datagrams that nobody reads",
    "a shared map that keeps its pages", "a shared map of zeros", "huge pages held by pipes", "locks on bytes of files",
    "epoll instances that watch each other's files", *HIDDEN,
)  # fmt: skip
"""Ways to take memory that are tried by default; `slow` tries all."""
SLOW = ("forever", "byte by byte", "megabytes", "millions", "huge number", "questions away", "without end", "one line")


@pytest.fixture(scope="module")
def rewards() -> Iterator[RewardManager]:
    try:
        LocalSandbox(default_settings()).close()
    except UserError as error:
        pytest.skip(f"no isolation works on this machine: {error}")
    with manager(MEMORY_MB, PROCESSES, SECONDS) as found:
        yield found


def scores(rewards: RewardManager, cases: list[Case]) -> dict[str, float]:
    """As one batch of a run; a UserError would end it."""
    requests = [ScoreRequest(case.source, case.answer, dict(case.truth)) for case in cases]
    return {case.name: score.value for case, score in zip(cases, rewards.score(requests), strict=True)}


def test_the_catalogues_are_as_large_as_promised():
    assert len({case.name for case in HOSTILE}) == len(HOSTILE) >= 120
    assert len({case.name for case in HONEST}) == len(HONEST) >= 60


def test_honest_programs_are_rewarded(rewards):
    assert {name for name, score in scores(rewards, HONEST).items() if score != 1.0} == set()


def test_cheats_are_not_rewarded(rewards):
    assert {name for name, score in scores(rewards, CHEATS).items() if score > 0} == set()


def test_no_answer_ends_a_run(rewards):
    quick = [case for case in (*GUARDIAN, *REPORT, *WALLS, *TEXTS) if not any(word in case.name for word in SLOW)]
    found = scores(rewards, quick)
    assert len(found) == len(quick) >= 60
    assert scores(rewards, [script("", "afterwards", "print(int(input()) + 1)")]) == {"afterwards": 1.0}


@pytest.mark.parametrize("name", SHORT)
def test_the_machine_keeps_its_memory(rewards, name):
    """Where others use the machine too, the smallest of three peaks counts."""
    case = next(case for case in MEMORY if case.name == name)
    peaks = []
    for _ in range(3):
        outcome = watched(rewards, case)
        assert outcome.score == 0.0 and not outcome.ended_the_run
        peaks.append(outcome.peak)
        if outcome.peak <= TENTH * (MEMORY_MB << 20):
            return
    raise AssertionError(f"{[peak >> 20 for peak in peaks]} MB")


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can try as another account")
def test_an_ordinary_account_is_guarded_too():
    words = [f"--memory={MEMORY_MB}", f"--processes={PROCESSES}", f"--seconds={SECONDS}", "--names", *HIDDEN]
    command = ordinary_account.command("-m", "tests.chaos.sandbox.attack", *words)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(HIDDEN)} hostile programs" in done.stdout and f"user {ordinary_account.NUMBER}" in done.stdout


@pytest.mark.slow
def test_the_whole_attack():
    cases = [(case, False) for case in HOSTILE] + [(case, True) for case in HONEST]
    found = attack(cases, MEMORY_MB, PROCESSES, SECONDS)
    assert len(found) == len(cases) and faults(found, MEMORY_MB, SECONDS) == []
