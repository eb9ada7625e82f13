"""Scores every hostile and every honest program as a training run does, and writes down what it saw from outside.

    python -m tests.chaos.sandbox.attack [--memory 1024] [--processes 16] [--seconds 4] [--kinds memory cheat ...]
                                         [--names "one large block" ...] [--json attack.json] [--markdown attack.md]

The machine's memory is MemAvailable of /proc/meminfo, sampled by another process. Where others use the machine too, a
program that seems to take more than it may is tried again, and the smallest of three peaks counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from paddock.sandbox.cell import SLACK
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import default_settings

from .catalogue import Case, script
from .honest import HONEST
from .hostile import HOSTILE
from .outside import SETTLE, Outcome, manager, watched

TENTH = 1.1
TRIES = 3


@dataclass(frozen=True)
class Seen:
    kind: str
    name: str
    honest: bool
    cheat: bool
    outcome: Outcome

    @property
    def rewarded(self) -> bool:
        return self.outcome.score == 1.0


def attack(cases: list[tuple[Case, bool]], memory_mb: int, processes: int, seconds: float) -> list[Seen]:
    """All of them, one after the other, by one reward manager, as one run has it."""
    found = []
    with manager(memory_mb, processes, seconds) as rewards:
        watched(rewards, script("", "the scorer is loaded", "print(42)"))
        for place, (case, honest) in enumerate(cases):
            outcome = watched(rewards, case)
            for _ in range(TRIES - 1):
                if outcome.peak <= TENTH * (memory_mb << 20):
                    break
                time.sleep(SETTLE)
                again = watched(rewards, case)
                outcome = min(outcome, again, key=lambda one: (not one.ended_the_run, one.peak))
            found.append(Seen(case.kind, case.name, honest, case.cheat, outcome))
            print(
                f"{place + 1}/{len(cases)} {case.kind}: {case.name}: {outcome.cause}, {outcome.seconds:.1f} s, "
                f"{outcome.peak >> 20} MB",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(SETTLE)
    return found


def faults(found: list[Seen], memory_mb: int, seconds: float) -> list[str]:
    """What must not be, in words."""
    words = []
    for seen in found:
        where = f"{seen.kind}: {seen.name}"
        if seen.outcome.ended_the_run:
            words.append(f"{where} ended the run: {seen.outcome.ended_the_run}")
        if seen.cheat and seen.outcome.score > 0:
            words.append(f"{where} was rewarded")
        if seen.honest and not seen.rewarded:
            words.append(f"{where} was not rewarded: {seen.outcome.cause}")
        if seen.outcome.seconds > seconds + SLACK:
            words.append(f"{where} took {seen.outcome.seconds:.1f} s")
        if seen.outcome.peak > TENTH * (memory_mb << 20):
            words.append(f"{where} took {seen.outcome.peak >> 20} MB of the machine")
    return words


def table(found: list[Seen], memory_mb: int, guard: str) -> str:
    lines = [
        f"Limit {memory_mb} MB; memory is guarded by {guard}; user {os.geteuid()}.",
        "",
        "| kind | programs | rewarded | how they ended | largest peak of the machine, MB |",
        "|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys((seen.kind, seen.honest) for seen in found):
        some = [seen for seen in found if (seen.kind, seen.honest) == kind]
        ends = ", ".join(
            f"{cause} {count}" for cause, count in Counter(seen.outcome.cause for seen in some).most_common()
        )
        rewarded, peak = sum(seen.rewarded for seen in some), max(seen.outcome.peak for seen in some) >> 20
        lines.append(f"| {'honest: ' if kind[1] else ''}{kind[0]} | {len(some)} | {rewarded} | {ends} | {peak} |")
    honest = [seen.rewarded for seen in found if seen.honest]
    cheats = [seen.outcome.score > 0 for seen in found if seen.cheat]
    ended = sum(bool(seen.outcome.ended_the_run) for seen in found)
    peak = max((seen.outcome.peak for seen in found), default=0) >> 20
    lines += [
        "",
        f"{len(found) - len(honest)} hostile programs, {ended} runs ended by an answer; {sum(cheats)} of {len(cheats)} "
        f"cheats rewarded; {sum(honest)} of {len(honest)} honest programs rewarded; largest peak {peak} MB.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--kinds", nargs="*")
    parser.add_argument("--names", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    cases = [(case, False) for case in HOSTILE] + [(case, True) for case in HONEST]
    cases = [(case, honest) for case, honest in cases if not options.kinds or case.kind in options.kinds]
    cases = [(case, honest) for case, honest in cases if not options.names or case.name in options.names]
    with LocalSandbox(default_settings()) as sandbox:
        guard = sandbox.guard
    found = attack(cases, options.memory, options.processes, options.seconds)
    text, wrong = table(found, options.memory, guard), faults(found, options.memory, options.seconds)
    print(text + "".join(f"FAULT {line}\n" for line in wrong))
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        rows = [asdict(seen) for seen in found]
        whole = {"memory_mb": options.memory, "guard": guard, "user": os.geteuid(), "faults": wrong, "programs": rows}
        options.json.write_text(json.dumps(whole, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
