"""What slow tools cost a rollout: conversations whose tools wait, against those whose tools do not.

python benchmarks/tools.py                                            # the embedded model, on this CPU
python benchmarks/tools.py --hidden 512                               # random weights, turns of about 64 tokens
python benchmarks/tools.py --model FOLDER --conversations 64,256,1024 --seconds 0.1,1

Every turn of the policy is followed by a tool of so many seconds. The bound is the larger of two times: that of the
same work with tools of 0 seconds, and that of one conversation alone, whose turns and tools follow each other; where
turns differ in length, the longest conversation takes more than that.
`--hidden` gives the model's layers that width and random weights; tokens that those draw often end its turns.
`idle` is the share of the time in which the engine did nothing although a request could have run; on a GPU the device
itself tells, by events around all that is launched there.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import itertools
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `paddock train` does

import torch
from transformers import PreTrainedModel
from turns import Work, likeliest

import paddock
from paddock.core.device import device_of
from paddock.data.dataset import PromptDataset
from paddock.engines.rollout.base import Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.loading.load import load
from paddock.models.fused import fuse
from paddock.models.load import load_causal_lm, load_tokenizer
from paddock.rollouts.conversations import Clock
from paddock.rollouts.environments import Environments, RowEnvironments
from paddock.rollouts.episode import begun

MOST_WARM_UP = 12  # rounds


def waiting(seconds: float, turns: int) -> type[paddock.Environment]:
    """Returns an environment of so many turns, each of which is answered after so many seconds."""

    class Waits(paddock.Environment):
        inline = seconds == 0
        max_turns = turns

        if seconds:

            async def step(self, answer: paddock.Answer) -> str:  # type: ignore[override]
                await asyncio.sleep(seconds)
                return "go on: "

        else:

            def step(self, answer: paddock.Answer) -> str:
                return "go on: "

    return Waits


@dataclass(frozen=True)
class Result:
    seconds: float
    tokens: int
    idle: float


class Timed(EmbeddedEngine):
    """An engine that records, on its GPU, when each launch of prompts or decode steps begins and ends.

    The device's time between two of them is idle, unless all conversations were waiting for tools. Small kernels that
    move finished sequences run in these gaps, so the sum is an upper bound.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.pauses: set[int] = set()
        """Numbers of the launches before which nothing could run."""

    def prefill(self, sequences: Any, requests: Any) -> None:
        with self.marked():
            super().prefill(sequences, requests)

    def decode(self, sequences: Any, beside: Any = None) -> None:
        with self.marked():
            super().decode(sequences, beside)

    def advance(self, seconds: float | None = None) -> Any:
        found = super().advance(seconds)
        if not (self.turns or self.waiting or (self.session and self.session.live)):
            self.pauses.add(len(self.marks))
        return found

    @contextmanager
    def marked(self) -> Iterator[None]:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        yield
        ended.record()
        self.marks.append((begun, ended))

    def idle(self) -> float:
        """Returns the seconds between launches so far, and forgets those."""
        torch.cuda.synchronize()
        gaps = [
            self.marks[number - 1][1].elapsed_time(self.marks[number][0]) / 1000
            for number in range(1, len(self.marks))
            if number not in self.pauses
        ]
        self.marks, self.pauses = [], set()
        return sum(gaps)


class Bench:
    """A model, its engine and rows, as a run has them."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        device = device_of(args.device)
        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        self.tokenizer = load_tokenizer(args.model)
        self.net = load_causal_lm(args.model, dtype=dtype, device=device)
        named = self.net.generation_config.eos_token_id
        self.stops = frozenset(named if isinstance(named, list) else [named]) | {self.tokenizer.eos_token_id}
        if args.hidden:
            self.net = widened(self.net, args.hidden).to(device, dtype)
        if reason := fuse(self.net):  # as a run does
            raise SystemExit(f"the forward of {args.model} would not be that of a run: {reason}")
        if args.hidden:
            work = Work(64, 1, args.turn_tokens, 0, 32, self.net.config.vocab_size)
            self.stops = likeliest(EmbeddedEngine(self.net, max_num_seqs=64), work)

    def run(self, conversations: int, seconds: float) -> Result:
        args = self.args
        config = load([
            f"actor_rollout_ref.model.path={args.model}", f"trainer.device={args.device}", "environment=python:waits",
            "data.train_files=builtin:products/train", "data.max_prompt_length=512",
            f"actor_rollout_ref.rollout.max_num_seqs={max(2, conversations)}",
        ]).config  # fmt: skip
        rows = PromptDataset.train(config.data, self.tokenizer).rows(range(conversations))
        engine = (EmbeddedEngine if args.device == "cpu" else Timed)(self.net, max_num_seqs=max(2, conversations))
        own = RowEnvironments(config, {"waits": waiting(seconds, args.turns)})
        environments = Environments(config, self.tokenizer, self.stops, own)
        sampling = Sampling(args.length, self.stops, 1, 0)
        found: list[Result] = []
        graphs: set[Any] = set()
        settled = False
        for number in itertools.count(1):
            environments.clock = Clock()
            episodes = environments.run(engine, 0, begun(rows, 1, sampling.step), sampling)
            tokens = sum(len(span.tokens) for one in episodes for span in one.spans if span.log_probs)
            clock = environments.clock
            idle = engine.idle() if isinstance(engine, Timed) else clock.idle
            if settled:
                found.append(Result(clock.total, tokens, idle / clock.total))
            if len(found) == args.rounds:
                break
            before, graphs = graphs, {replay for one in engine.graphs.values() for replay in one.replays.values()}
            settled = settled or (number >= args.warm_up and (graphs <= before or number >= MOST_WARM_UP))
        environments.close()
        return Result(
            *(statistics.median(column) for column in zip(*(vars(one).values() for one in found), strict=True))
        )


def widened(net: PreTrainedModel, hidden: int) -> PreTrainedModel:
    """Returns a model of the same vocabulary with random weights: 12 layers of this width."""
    config = copy.deepcopy(net.config)
    wide = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 12, "head_dim": 64,
            "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
            "max_position_embeddings": 8192, "initializer_range": 0.02,
            "layer_types": ["full_attention"] * 12}  # fmt: skip
    config.update(wide)
    torch.manual_seed(0)
    return type(net)(config)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--conversations", type=numbers, default=[8, 32, 128])
    parser.add_argument("--seconds", type=numbers, default=[0.1, 1.0])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="most tokens of a conversation")
    parser.add_argument("--hidden", type=int, default=0, help="width of layers with random weights")
    parser.add_argument("--turn-tokens", type=int, default=64, help="about so many tokens a turn, with --hidden")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--warm-up",
        type=int,
        default=2,
        help="least rounds before those; there are more until one has recorded no graph",
    )
    bench = Bench(parser.parse_args())
    print(
        "| tool, s | conversations | seconds | tokens/s | bound, s | of the bound | idle |",
        "|---|---|---|---|---|---|---|",
        sep="\n",
    )
    for conversations in map(int, bench.args.conversations):
        alone = bench.run(1, 0.0).seconds
        free = bench.run(conversations, 0.0)
        show(0.0, conversations, free, free.seconds)
        for seconds in bench.args.seconds:
            bound = max(free.seconds, alone + seconds * bench.args.turns)
            show(seconds, conversations, bench.run(conversations, seconds), bound)


def show(seconds: float, conversations: int, found: Any, bound: float) -> None:
    speed, share = found.tokens / found.seconds, bound / found.seconds
    print(f"| {seconds:g} | {conversations} | {found.seconds:.2f} | {speed:,.0f} | {bound:.2f} | {share:.0%} "
          f"| {found.idle:.1%} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
