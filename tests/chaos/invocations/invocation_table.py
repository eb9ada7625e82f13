"""The table of bad invocations: `python -m tests.chaos.invocations.invocation_table` tries all, prints the table and
keeps its numbers in docs/reliability/invocations.json, in about twenty minutes; with `--count` it prints how many of
each kind there are, and tries none."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from invocation import Answer, Case
from invocation_catalogue import CASES, KINDS, alone, tried

RECORD = Path(__file__).resolve().parents[3] / "docs" / "reliability" / "invocations.json"
COLUMNS = ("in a process of their own", "exit code 2", "tracebacks", "hangs", "key, reason and fix named",
           "left something behind")  # fmt: skip


def outcome(case: Case, answer: Answer) -> set[str]:
    """The columns in which this answer counts."""
    problems = answer.problems(case)
    unnamed = [text for text in problems if text.startswith(("does not say", "names no"))]
    facts = (alone(case), answer.code == 2, "a traceback" in problems, answer.code is None, not unnamed,
             bool(answer.left))  # fmt: skip
    return {column for column, true in zip(COLUMNS, facts, strict=True) if true}


def measured() -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    root = Path(tempfile.mkdtemp(prefix="invocations-"))
    try:
        for number, case in enumerate(CASES):
            answer = tried(case, root / str(number))
            found[case.kind].update(outcome(case, answer))
            for problem in answer.problems(case):
                print(f"{case.kind}: {case.title}: {problem}", file=sys.stderr)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return found


def written(found: dict[str, Counter[str]] | None = None) -> str:
    """In markdown, with a last row of sums; without `found`, the counts alone."""
    sizes = Counter(case.kind for case in CASES)
    columns = COLUMNS if found else ()
    rows = [[kind, sizes[kind], *(found[kind][column] for column in columns if found)] for kind in KINDS]
    rows.append(["**all**", *(sum(int(row[place]) for row in rows) for place in range(1, 2 + len(columns)))])
    head = ["kind of mistake", "invocations", *columns]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def record(found: dict[str, Counter[str]], seconds: float) -> None:
    sizes = Counter(case.kind for case in CASES)
    rows = {kind: {"invocations": sizes[kind]} | {column: found[kind][column] for column in COLUMNS} for kind in KINDS}
    document = {"date": time.strftime("%Y-%m-%d"), "minutes": round(seconds / 60, 1), "kinds": rows}
    RECORD.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    if "--count" in sys.argv:
        print(written())
        return
    began = time.monotonic()
    found = measured()
    record(found, time.monotonic() - began)
    print(written(found))


if __name__ == "__main__":
    main()
