"""How fast answers are scored: GSM8K, MATH, what the processes around MATH cost, answers that no parser computes, and
the answers of a step, from tokens to scores, beside what its decoding and its calls alone take; and a step whose slow
answers are neighbours.

python benchmarks/rewards.py [--answers 10000] [--maths 2000] [--workers 2] [--prompts 128] [--parts kinds,step,uneven]
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import step_work
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paddock.config.schema import Config
from paddock.data.dataset import PromptRow
from paddock.data.loader import prompt_batch
from paddock.engines.rollout.base import Prompt
from paddock.loading.load import load
from paddock.rewards.functions import MODULE, Target
from paddock.rewards.maths import boxed
from paddock.rewards.rules import Scorer, gsm8k
from paddock.rewards.score import ScoreRequest
from paddock.rewards.scoring import Scoring
from paddock.rollouts.batch import with_responses
from paddock.rollouts.collect import Collector, Drawn
from paddock.rollouts.environments import ids_of
from paddock.rollouts.episode import Episode, Span
from paddock.trainer.assembly import open_rewards

LIMIT = 2.0  # seconds
WORDS, SAMPLES, TOKENS = 49_152, 8, 256
STEPS = 7
SLOW, SLOW_SECONDS = 32, 1.0  # answers of a step whose calls wait, and for how long each


def gsm8k_answers(count: int) -> list[ScoreRequest]:
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


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer, as those of most models are, whose words are made up."""
    draw, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    words = dict.fromkeys(["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    while len(words) < WORDS:
        words["\u0120" * draw.randint(0, 1) + "".join(draw.choices(letters, k=draw.randint(2, 7)))] = None
    backend = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


def answered(number: int, prompts: int, source: str, scoring: Scoring) -> Drawn:
    """Returns a step as the rollout leaves it: tokens drawn at random, and no scores."""
    draw = random.Random(number)
    rows = [
        PromptRow(
            index, index, [1] * 120, [{"role": "user", "content": "?"}], source, "18", {"index": index}, f"row {index}"
        )
        for index in range(number * prompts, (number + 1) * prompts)
    ]
    batch = prompt_batch(rows, SAMPLES, 0)
    found = [
        Episode(number, row, Prompt(row.tokens, [number]), [written(draw)], done=True)
        for row in rows
        for number in ids_of(row, SAMPLES)
    ]
    return Drawn(with_responses(batch, found, 0), scoring, dict(enumerate(found)))


def written(draw: random.Random) -> Span:
    return Span([draw.randrange(300, WORDS) for _ in range(TOKENS)], [-1.0] * TOKENS, 0)


def step(name: str, source: str, rule: Callable[..., Any], prompts: int, config: Config) -> None:
    """Times the scoring of whole steps, and what must be done in it at the least: decode all tokens, and call the rule.

    Each is the median of its steps; the first, which starts processes, does not count.
    """
    seconds: dict[str, list[float]] = {"decode": [], "calls": [], "scored": []}
    with open_rewards(config) as rewards:
        collector = Collector(config, None, None, rewards, tokenizer_of_words(), frozenset())  # type: ignore[arg-type]
        for number in range(STEPS):
            drawn = answered(number, prompts, source, rewards.begin())
            marks = [time.perf_counter()]
            texts = collector.decode(drawn.batch.answers())
            marks.append(time.perf_counter())
            values = [rule(data_source=source, solution_str=t, ground_truth="18", extra_info={}) for t in texts]
            marks.append(time.perf_counter())
            scored, _ = collector.score(drawn)
            marks.append(time.perf_counter())
            assert scored.extras["score"] == values
            for part, begin, end in zip(seconds, marks, marks[1:], strict=False):
                seconds[part].append(end - begin)
    decode, calls, all_of_it = (statistics.median(found[1:]) for found in seconds.values())
    print(
        f"a step of {len(scored):,} answers of {TOKENS} tokens, {name}: {1e3 * all_of_it:.1f} ms, of which decoding "
        f"{1e3 * decode:.1f} and calls {1e3 * calls:.1f}: {all_of_it / (decode + calls):.2f} times the two, and "
        f"{1e6 * (all_of_it - decode - calls) / len(scored):.0f} microseconds an answer beside them",
        flush=True,
    )


def uneven(count: int, workers: int, config: Config) -> None:
    """Times a step in which the calls of some neighbouring answers wait, after steps in which all calls were quick."""
    with open_rewards(config) as rewards:
        for number in range(STEPS):
            waits = [SLOW_SECONDS if number == STEPS - 1 and 100 <= row < 100 + SLOW else 0.0 for row in range(count)]
            begin = time.perf_counter()
            rewards.score([ScoreRequest("e", str(wait), str(row)) for row, wait in enumerate(waits)])
    seconds, bound = time.perf_counter() - begin, SLOW_SECONDS * -(-SLOW // workers)
    print(
        f"a step of {count:,} answers, of which {SLOW} neighbours wait {SLOW_SECONDS:g} s each, {workers} processes: "
        f"{seconds:.2f} s, {seconds / bound:.2f} times {bound:g} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--maths", type=int, default=2_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=128, help=f"of a step, with {SAMPLES} answers each")
    parser.add_argument("--parts", default="kinds,step,uneven")
    args = parser.parse_args()
    settings = [f"reward_model.num_workers={args.workers}", f"reward_model.timeout={LIMIT}"]
    if "kinds" in args.parts:
        kinds(args, load(settings).config)
    if "step" in args.parts:
        step("a function in a process", "e", step_work.compute_score, args.prompts,
             load([*settings, f"custom_reward_function.path={step_work.__file__}"]).config)  # fmt: skip
        step("GSM8K's rule", "openai/gsm8k", gsm8k, args.prompts, load(settings).config)
    if "uneven" in args.parts:
        function = [f"custom_reward_function.path={step_work.__file__}", "custom_reward_function.name=compute_slowly"]
        uneven(SAMPLES * args.prompts, args.workers, load([*settings, *function]).config)


def kinds(args: argparse.Namespace, config: Config) -> None:
    """Times answers of each kind, which are texts already."""
    with open_rewards(config) as rewards:
        asked = gsm8k_answers(args.answers)
        with timed("GSM8K", args.answers):
            assert sum(score.value for score in rewards.score(asked)) == (args.answers + 1) // 2

        asked = maths(args.maths)
        with timed("MATH, here", args.maths) as alone:
            right = sum(boxed(r.solution, r.ground_truth) for r in asked)
        rewards.score(maths(16 * args.workers))  # the processes are up, and have imported what they need
        with timed(f"MATH, {args.workers} processes", args.maths) as pooled:
            assert sum(score.value for score in rewards.score(asked)) == right
        with timed("MATH, the same answers again", args.maths):
            assert all(score.cached for score in rewards.score(asked))

        nothing = Scorer(Target(f"{MODULE}paddock.rewards.rules", "addition"))
        rewards.scorers["lighteval/MATH"] = nothing  # the way to a process and back, with nothing done there
        with timed(f"nothing, {args.workers} processes", args.maths) as empty:
            rewards.score(asked)
        del rewards.scorers["lighteval/MATH"]
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
