"""How fast answers are scored: GSM8K, MATH, what the processes around MATH cost, and answers that no parser computes.

python benchmarks/rewards.py [--answers 10000] [--maths 2000] [--workers 2]
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

from paddock.config.load import load
from paddock.rewards.custom import MODULE, Target
from paddock.rewards.manager import RewardManager
from paddock.rewards.maths import boxed
from paddock.rewards.rules import Scorer
from paddock.rewards.score import ScoreRequest

LIMIT = 2.0  # seconds


def gsm8k(count: int) -> list[ScoreRequest]:
    """Some 600 characters each, half of them right."""
    steps = (
        "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs a day, at $2 each, which makes 9 * 2 = <<9*2=18>>18 dollars. " * 6
    )
    return [ScoreRequest("openai/gsm8k", f"{steps}\n#### {n:,}", str(n + n % 2)) for n in range(count)]


def maths(count: int) -> list[ScoreRequest]:
    """All different, half of them right: numbers, fractions, roots, pairs, intervals and polynomials."""
    draw = random.Random(0)
    requests = []
    for n in range(count):
        a, b, c = (draw.randint(2, 500) for _ in range(3))
        more = n // 6 % 2  # makes it wrong
        answer, truth = [
            (f"{a * b:,}", f"{a * b + more}"),
            (rf"\frac{{{2 * a}}}{{{2 * b}}}", rf"\frac{{{a + more}}}{{{b}}}"),
            (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b + more}}}"),
            (rf"\left({a}, {b}, {c}\right)", f"({a},{b},{c + more})"),
            (rf"[{a}, {a + b})\cup({a + b + c}, \infty)", rf"[{a},{a + b + more})\cup({a + b + c},\infty)"),
            (f"(x+{a})^2+{c}", f"x^2+{2 * a}x+{a * a + c + more}"),
        ][n % 6]
        requests.append(ScoreRequest("lighteval/MATH", rf"Therefore $\boxed{{{answer}}}$.", truth))
    return requests


@contextmanager
def timed(name: str, count: int) -> Iterator[list[float]]:
    """Wall seconds of the block, which are appended to what it yields, and CPU seconds of this process."""
    begin, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    found: list[float] = []
    yield found
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    here = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    print(
        f"{name:42s} {seconds:7.2f} s  {count / seconds:9,.0f} answers/s  {here:6.2f} CPU s in the trainer", flush=True
    )
    found.append(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--maths", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    config = load([f"reward_model.num_workers={args.workers}", f"reward_model.timeout={LIMIT}"]).config

    with RewardManager(config) as rewards:
        asked = gsm8k(args.answers)
        with timed("GSM8K", args.answers):
            assert sum(score.value for score in rewards.score(asked)) == (args.answers + 1) // 2

        asked = maths(args.maths)
        with timed("MATH, here", args.maths) as alone:
            right = sum(boxed(r.data_source, r.solution, r.ground_truth) for r in asked)
        rewards.score(maths(16 * args.workers))  # the processes are up, and have imported what they need
        with timed(f"MATH, {args.workers} processes", args.maths) as pooled:
            assert sum(score.value for score in rewards.score(asked)) == right
        with timed("MATH, the same answers again", args.maths):
            assert all(score.cached for score in rewards.score(asked))

        nothing = Scorer(Target(f"{MODULE}paddock.rewards.rules", "addition"))
        rewards.custom = nothing  # the way to a process and back, with nothing done there
        with timed(f"nothing, {args.workers} processes", args.maths) as empty:
            rewards.score(asked)
        rewards.custom = None
        share = empty[0] / pooled[0]
        print(f"the pool's share of MATH: {share:.1%}, {1e6 * empty[0] / args.maths:.0f} microseconds an answer;")
        print(f"speed-up by {args.workers} processes: {alone[0] / pooled[0]:.2f}")

        towers = [rf"\boxed{{9^{{9^{{9^{9 + n}}}}}}}" for n in range(2 * args.workers)]
        begin = time.perf_counter()
        scores = rewards.score([*(ScoreRequest("lighteval/MATH", tower, "3") for tower in towers), *maths(100)])
        assert sum(score.undecided for score in scores) == len(towers)
        print(
            f"{len(towers)} towers of powers and 100 ordinary answers, {args.workers} processes, limit {LIMIT:g} s: "
            f"{time.perf_counter() - begin:.2f} s"
        )


if __name__ == "__main__":
    main()
