"""What many turns cost a rollout: conversations whose turns continue parked keys and values, against one long turn.

python benchmarks/turns.py                                   # SmolLM2-135M: 256 conversations, 8 turns of 64 tokens
python benchmarks/turns.py --shape qwen2.5-0.5b --said 64

Each turn ends at its limit, or by a stop token, one of those that random weights draw most often, so that lengths vary
up to twice the limit. After it an environment says `--said` tokens at once. Seconds are medians of `--rounds` sessions
but the first; the ratio is that of seconds per token drawn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from gpu_step import SHAPES, Bench

from paddock.core.device import synchronize
from paddock.engines.rollout.base import Limits, Prompt, Request, RolloutEngine, Sampling
from paddock.workers.rank import rollout_engine

STOPS = 256  # tokens at most that end a turn


@dataclass(frozen=True)
class Work:
    conversations: int
    turns: int
    limit: int
    """Tokens of a turn, at most."""
    said: int
    prompt: int
    vocab: int


def held(engine: RolloutEngine, work: Work, sampling: Sampling) -> tuple[float, int]:
    """Returns the seconds of a session with all conversations, and the tokens that were drawn in it."""
    draw = torch.Generator().manual_seed(0)

    def words(count: int) -> list[int]:
        return torch.randint(5, work.vocab, (count,), generator=draw).tolist()

    tokens = {key: words(work.prompt) for key in range(work.conversations)}
    said = {key: words(work.said * work.turns) for key in tokens}
    turns, drawn = dict.fromkeys(tokens, 0), 0
    synchronize(engine.model.device)  # type: ignore[attr-defined]
    start = time.perf_counter()
    engine.resume(sampling, Limits([(work.prompt, 1)] * work.conversations))
    engine.submit([Request(list(own), [key], [key], 0, work.limit, keep=True) for key, own in tokens.items()])
    while any(count < work.turns for count in turns.values()):
        more = []
        for answer in engine.advance():
            key = answer.key
            drawn += len(answer.tokens)
            turns[key] += 1
            if turns[key] == work.turns:
                engine.forget([key])
                continue
            tokens[key] += answer.tokens + said[key][: work.said]
            said[key] = said[key][work.said :]
            more.append(
                Request(list(tokens[key]), [key], [key], 0, work.limit, len(tokens[key]) - work.prompt, keep=True)
            )
        engine.submit(more)
    engine.pause()
    synchronize(engine.model.device)  # type: ignore[attr-defined]
    return time.perf_counter() - start, drawn


def likeliest(engine: RolloutEngine, work: Work) -> frozenset[int]:
    """Returns the tokens that random weights draw most often."""
    prompts = [Prompt([5 + i] * work.prompt, [i]) for i in range(work.conversations)]
    found = engine.generate(prompts, Sampling(work.limit, frozenset(), 1, 0))
    counts = Counter(token for one in found for token in one.tokens)
    return frozenset(token for token, _ in counts.most_common(min(STOPS, work.vocab // work.limit)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"conversations": 256, "turns": 8, "tokens": 64, "said": 16, "prompt": 120, "rounds": 4}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    bench = argparse.Namespace(
        shape=args.shape, prompts=2, device=args.device, warmup=0, steps=1, weights="bf16", set=[]
    )
    with tempfile.TemporaryDirectory() as folder:
        config, trainer = Bench(bench, Path(folder)).engine()
        engine = rollout_engine(config, trainer)
        engine.max_num_seqs = args.conversations  # type: ignore[attr-defined]
        vocab = SHAPES[args.shape].shape["vocab_size"]
        work = Work(args.conversations, args.turns, args.tokens, args.said, args.prompt, vocab)
        longest = Sampling(args.turns * (2 * args.tokens + args.said), frozenset(), 0, 0)
        cases = {
            "1": (replace(work, turns=1, limit=args.turns * args.tokens), longest),
            f"{args.turns}, each to its limit": (work, longest),
            f"{args.turns}, ended by stop tokens": (
                replace(work, limit=2 * args.tokens),
                replace(longest, stop_tokens=likeliest(engine, work)),
            ),
        }
        print("| turns | tokens a turn | seconds | tokens/s | against one turn |\n|---|---|---|---|---|")
        base = None
        for name, (asked, sampling) in cases.items():
            runs = [held(engine, asked, sampling) for _ in range(args.rounds)][1:]
            seconds, drawn = statistics.median(run[0] for run in runs), runs[0][1]
            base = base or seconds / drawn
            mean = drawn / asked.conversations / asked.turns
            ratio = seconds / drawn / base
            print(f"| {name} | {mean:.1f} | {seconds:.3f} | {drawn / seconds:,.0f} | {ratio:.2f} x |", flush=True)


if __name__ == "__main__":
    main()
