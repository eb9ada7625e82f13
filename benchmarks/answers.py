"""How often verdicts on MATH answers are wrong, on a table of pairs: false accepts, false refusals, and the time.

python benchmarks/answers.py [--table tests/rewards/answers.tsv] [--judge paddock | math-verify] [--wrong]
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

TABLE = Path(__file__).parent.parent / "tests" / "rewards" / "answers.tsv"


def paddock() -> Callable[[str, str, str], bool]:
    from paddock.grading.verdicts import compared
    from paddock.rewards.maths import boxed
    from paddock.rewards.score import checked

    def judge(kind: str, truth: str, answer: str) -> bool:
        return checked(boxed(answer, truth)).value == 1 if kind == "boxes" else compared(answer, truth).equal

    return judge


def math_verify() -> Callable[[str, str, str], bool]:
    """The library alone, called as its documentation shows."""
    from math_verify import parse, verify

    def judge(kind: str, truth: str, answer: str) -> bool:
        return verify(parse(f"${truth}$"), parse(answer if kind == "boxes" else f"${answer}$"))

    return judge


JUDGES = {"paddock": paddock, "math-verify": math_verify}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--judge", choices=JUDGES, default="paddock")
    parser.add_argument("--wrong", action="store_true", help="list the pairs with a wrong verdict")
    args = parser.parse_args()
    judge = JUDGES[args.judge]()
    judge("warm", "1", r"\sum_{k=1}^{2} k")
    rows = [line.split("\t") for line in args.table.read_text().splitlines()[1:]]
    wrong: Counter[str] = Counter()
    times = []
    for kind, truth, answer, expected in rows:
        begin = time.perf_counter()
        found = "equal" if judge(kind, truth, answer) else "different"
        times.append(time.perf_counter() - begin)
        if found != expected:
            wrong[expected] += 1
            if args.wrong:
                print(f"{kind:14s} {truth!r} and {answer!r} are {expected}, found {found}")
    of = Counter(row[3] for row in rows)
    print(
        f"{args.judge}, {len(rows)} pairs: {wrong['different']} of {of['different']} different pairs accepted "
        f"({wrong['different'] / of['different']:.1%}), {wrong['equal']} of {of['equal']} equal pairs refused "
        f"({wrong['equal'] / of['equal']:.1%}); {1e3 * sum(times) / len(times):.2f} ms a pair, "
        f"at most {1e3 * max(times):.0f}"
    )


if __name__ == "__main__":
    main()
