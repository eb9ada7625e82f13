"""What offload costs and saves: a GRPO step with a reference, weights and optimizer on the host while they are idle;
and an update on a long sequence, with the inputs of its layers on the host until backward.

python benchmarks/offload.py                                     # Qwen2.5-0.5B: 64 prompts x 8, and a row of 32k tokens
python benchmarks/offload.py --shape smollm2-135m --parts step
python benchmarks/offload.py --shape qwen3-0.6b --parts activations --tokens 65536

Masters and moments are float32, products bf16; every response has the full length. `at rest` is what tensors take
between two steps. `copies alone` is the time that the bytes of a step take at the measured bandwidths of pinned memory,
one direction after the other; `hidden` is the share of it by which the step did not become longer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `paddock train` does

import torch
import transformers
from cpu_step import build_model, write_prompts
from gpu_step import SHAPES, config_of, learn
from step_work import Work

import paddock
from paddock.core.batch import Batch
from paddock.core.device import empty_cache, memory_in_use, peak_memory, reset_peak_memory, synchronize
from paddock.engines.train.offload import Offload
from paddock.engines.train.open import actor_engine
from paddock.trainer.loop import Trainer
from paddock.trainer.reinforcement import train
from paddock.workers.policy import Policy

GROUP = "actor_rollout_ref"
ACTOR, OPTIMIZER, REFERENCE = KEYS = tuple(f"{GROUP}.{key}" for key in (
    "actor.fsdp_config.param_offload", "actor.fsdp_config.optimizer_offload", "ref.fsdp_config.param_offload"
))  # fmt: skip
WAYS = {"all stays": (), "optimizer and reference travel": (OPTIMIZER, REFERENCE), "the actor's weights too": KEYS}
PHASES = ("step", "gen", "reward", "old_log_prob", "ref", "adv", "update_actor")
GIB = 2**30


class Watch:
    """After each step of a run: bytes that were copied so far, each way, and what tensors take on the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.offloads: list[Offload] = []
        self.seen: list[tuple[int, int, int]] = []
        self.init, self.advance = Offload.__init__, Trainer.advance

    def __enter__(self) -> Watch:
        watch = self

        def init(self: Offload, *args: Any, **kwargs: Any) -> None:
            watch.init(self, *args, **kwargs)
            watch.offloads.append(self)

        def advance(self: Trainer, *args: Any, **kwargs: Any) -> None:
            watch.advance(self, *args, **kwargs)
            sent, fetched = (sum(getattr(one, way) for one in watch.offloads) for way in ("sent", "fetched"))
            watch.seen.append((sent, fetched, memory_in_use(watch.device)))

        Offload.__init__, Trainer.advance = init, advance  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        Offload.__init__, Trainer.advance = self.init, self.advance  # type: ignore[method-assign]

    def last_step(self) -> tuple[int, int, int]:
        """Bytes to the host and to the device in the last step, and what is left on the device."""
        (sent, fetched, _), (all_sent, all_fetched, left) = self.seen[-2:]
        return all_sent - sent, all_fetched - fetched, left


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder, self.device = args, folder, torch.device(args.device)
        self.case = SHAPES[args.shape]
        if self.case.prompts > args.prompts:
            self.case = replace(self.case, prompts=args.prompts)
        build_model(self.case, folder / "model", self.device)
        data = folder / "prompts.jsonl"
        longest = write_prompts(self.case, folder / "model", self.case.prompts * (args.warmup + args.steps), data)
        self.work = Work(
            str(folder / "model"), str(data), self.case.prompts, self.case.n, longest, self.case.new_tokens, args.steps,
            args.warmup, "fp32", self.case.micro_rows, False, str(folder), args.set,
        )  # fmt: skip
        self.to_host, self.to_device = self.bandwidths()

    def bandwidths(self) -> tuple[float, float]:
        """Bytes a second between pinned memory and the device, to the host and back."""
        size = GIB if self.device.type != "cpu" else 2**24
        here = torch.empty(size, dtype=torch.uint8, device=self.device)
        there = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type != "cpu")
        rates = []
        for target, source in ((there, here), (here, there)):
            seconds = [self.timed(lambda t=target, s=source: t.copy_(s, non_blocking=True)) for _ in range(4)]
            rates.append(size / min(seconds))
        return rates[0], rates[1]

    def timed(self, function: Any) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        function()
        synchronize(self.device)
        return time.perf_counter() - start

    def step(self) -> None:
        found = {name: self.run(number, away) for number, (name, away) in enumerate(WAYS.items())}
        for name, (seconds, peak, (sent, fetched, left)) in found.items():
            limit = sent / self.to_host + fetched / self.to_device
            longer = seconds["step"] - found["all stays"][0]["step"]
            cells = [f"{phase} {value:.3f}" for phase, value in seconds.items() if value]
            cells += [f"peak {peak / GIB:.2f} GiB", f"at rest {left / GIB:.2f}"]
            if limit:
                cells += [f"to the host {sent / GIB:.2f} GiB, to the device {fetched / GIB:.2f}"]
                cells += [f"copies alone {limit:.3f} s", f"hidden {min(1.0, 1 - longer / limit):.0%}"]
            self.row(f"step, {name}", *cells)

    def run(self, number: int, away: tuple[str, ...]) -> tuple[dict[str, float], int, tuple[int, int, int]]:
        """Median seconds by phase, the peak, and what the last step moved."""
        folder = self.folder / f"run-{number}"
        keys = [f"{GROUP}.actor.use_kl_loss=True", f"trainer.default_local_dir={folder}", *self.args.set]
        keys += [f"{key}={key in away}" for key in KEYS]
        self.clear()
        with Watch(self.device) as watch:
            train(config_of(self.work, self.device.type, "grpo", keys))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][self.args.warmup :]
        seconds = {phase: statistics.median(line.get(f"timing_s/{phase}", 0.0) for line in lines) for phase in PHASES}
        return seconds, peak_memory(self.device), watch.last_step()

    def activations(self) -> None:
        """One row of so many tokens, every layer computed again in backward."""
        tokens = self.args.tokens
        words = torch.randint(5, self.case.shape["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
        one = torch.ones(1, tokens - 1)
        batch = Batch(
            row=torch.arange(1), group=torch.arange(1), prompts=words[:, :1], responses=words[:, 1:],
            lengths=torch.tensor([tokens - 1]), mask=one.long(),
        ).with_(advantages=one, old_log_probs=-one)  # fmt: skip
        for away in (False, True):
            self.clear()
            place = "on the host" if away else "on the device"
            self.row(f"{tokens:,} tokens, layers' inputs {place}", *self.update(batch, away))

    def update(self, batch: Batch, away: bool) -> list[str]:
        keys = [f"{GROUP}.model.enable_gradient_checkpointing=True", f"{GROUP}.model.enable_activation_offload={away}",
                f"{GROUP}.actor.ppo_max_token_len_per_gpu={self.args.tokens}", *self.args.set]  # fmt: skip
        config = config_of(replace(self.work, prompts=1, n=1), self.device.type, "reinforce_plus_plus", keys)
        worker = Policy(actor_engine(config, 10), config)
        update = partial(learn, worker, config, batch)
        update(0)
        reset_peak_memory(self.device)
        start = memory_in_use(self.device)
        seconds = statistics.median(self.timed(partial(update, s)) for s in range(1, 4))
        peak = peak_memory(self.device)
        return [f"update {seconds:.3f} s", f"peak {peak / GIB:.2f} GiB", f"above what rests {(peak - start) / GIB:.2f}"]

    def clear(self) -> None:
        gc.collect()
        empty_cache(self.device)
        reset_peak_memory(self.device)

    def row(self, *cells: str) -> None:
        print(f"| {self.args.shape} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--parts", default="step,activations", help="of step, activations")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=64, help="of a step, at most")
    parser.add_argument("--tokens", type=int, default=32768, help="of the long row")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="steps that do not count")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key of Paddock")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for part in args.parts.split(","):
            {"step": bench.step, "activations": bench.activations}[part]()
        case, versions = bench.case, f"torch {torch.__version__}, transformers {transformers.__version__}"
        print(
            f"{date.today()}: {name}, pinned memory to the host {bench.to_host / 1e9:.1f} GB/s, to the device "
            f"{bench.to_device / 1e9:.1f}; paddock {paddock.__version__}, {versions}, Python "
            f"{platform.python_version()}; {case.prompts} prompts x {case.n}, {case.prompt_tokens[1]} -> "
            f"{case.new_tokens}; settings {' '.join(args.set) or 'none'}"
        )


if __name__ == "__main__":
    main()
