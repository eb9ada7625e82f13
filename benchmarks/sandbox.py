"""Programs a second through the sandbox, against the start of a bare interpreter: 164 programs, 8 times.

With a copy of HumanEval its solutions and tests, else as many small programs of our own.

python benchmarks/sandbox.py [--humaneval HumanEval.jsonl.gz] [--isolation auto] [--workers 2] [--repeats 8]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from paddock.data.prepare.records import read_file
from paddock.rewards.code import completed
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import Program, default_settings

BARE = 64


def humaneval(path: Path) -> list[Program]:
    programs = []
    for record in read_file(path, "--humaneval"):
        prompt, test, entry = (record.text(name) for name in ("prompt", "test", "entry_point"))
        code = completed(prompt, entry, record.text("canonical_solution"))
        programs.append(Program(code, checks=(f"{test}\ncheck(candidate)",), setup=prompt, entry=entry))
    return programs


def our_own(count: int = 164) -> list[Program]:
    code = (
        "from typing import List\n\ndef total(numbers: List[int]) -> int:\n    return sum(n * {n} for n in numbers)\n"
    )
    check = "for size in range(20):\n    assert candidate(list(range(size))) == {n} * size * (size - 1) // 2"
    return [Program(code.format(n=n), checks=(check.format(n=n),), entry="total") for n in range(count)]


def bare_starts(workers: int) -> float:
    """Interpreters a second that do nothing: what a process for each program cannot beat."""
    start = time.perf_counter()
    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(lambda _: subprocess.run([sys.executable, "-c", "pass"], check=True), range(BARE)))
    return BARE / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--isolation", default="auto")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    programs = (humaneval(options.humaneval) if options.humaneval else our_own()) * options.repeats
    with LocalSandbox(replace(default_settings(), isolation=options.isolation), options.workers) as sandbox:
        sandbox.run_all(programs[: options.workers])  # the cells are warm
        start = time.perf_counter()
        results = sandbox.run_all(programs)
        seconds = time.perf_counter() - start
        isolation = sandbox.isolation
    bare = bare_starts(options.workers)
    print(f"{len(results)} programs, {options.workers} cells ({isolation}): {seconds:.1f} s")
    print(f"  {len(results) / seconds:.0f} programs/s; bare `python -c pass`: {bare:.0f} starts/s")
    print(f"  {dict(Counter(result.cause for result in results))}")


if __name__ == "__main__":
    main()
