r"""LoRA against all weights: time and memory of a GRPO step with a reference, on public shapes with random weights.

python benchmarks/lora.py                                        # SmolLM2-135M: 128 prompts x 8, 120 tokens in, 256 out
python benchmarks/lora.py --shape qwen2.5-0.5b --rank 64
python benchmarks/lora.py --shape qwen3-0.6b --prompts 32 \
    --set actor_rollout_ref.model.enable_gradient_checkpointing=True
python benchmarks/lora.py --checkpoints                          # writes them after the last step, and weighs them

Each way runs in a process of its own, so that its peak is its own; both import at once, and then run one after the
other. Masters are float32 in both, products bf16. Every response has the full length. `planned` is the fullest phase by
`paddock plan`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `paddock train` does

import torch
import transformers
from cpu_step import build_model, write_prompts
from gpu_step import SHAPES, config_of
from step_work import Work

import paddock
from paddock.core.device import peak_memory
from paddock.engines.train.optim import Updater
from paddock.estimate.job import job
from paddock.estimate.memory import estimate
from paddock.trainer.reinforcement import train

WAYS = ("full", "lora")
PHASES = ("step", "gen", "old_log_prob", "ref", "update_actor")
KL = "actor_rollout_ref.actor.use_kl_loss=True"


def measure(work: Work, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    folder, device = Path(work.folder) / way, args.device
    last = work.warmup + work.steps
    keys = [KL, f"trainer.default_local_dir={folder}", *work.settings]
    keys += [f"trainer.save_freq={last}"] if args.checkpoints else []
    keys += [f"actor_rollout_ref.model.lora_rank={args.rank}"] if way == "lora" else []
    config = config_of(work, device, "grpo", keys)
    trained = count_trained()
    train(config)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][work.warmup :]
    stored = [file for file in (folder / f"global_step_{last}/actor").rglob("*") if file.is_file()]
    planned = job(config)
    return {
        "seconds": {name: statistics.median(line.get(f"timing_s/{name}", 0.0) for line in lines) for name in PHASES},
        "peak": peak_memory(torch.device(device)),
        "planned": max(map(sum, (parts.values() for parts in estimate(planned).phases.values()))) if planned else 0,
        "checkpoint": sum(file.stat().st_size for file in stored if "token" not in file.name),
        "trained": trained[0],
    }


def count_trained() -> list[int]:
    """Filled by the run: how many numbers its optimizer changes."""
    found, init = [0], Updater.__init__

    def counted(self: Updater, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        found[0] = sum(master.numel() for master in self.masters)

    Updater.__init__ = counted  # type: ignore[method-assign]
    return found


def waiting(way: str, path: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    """A process that imports what it needs, and runs when it is told that `path` is there."""
    command = [sys.executable, __file__, "--measure", way, str(path), "--rank", str(args.rank), "--device", args.device]
    command += ["--checkpoints"] if args.checkpoints else []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def finished(way: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate("go\n")
    if process.returncode:
        raise SystemExit(f"{way} failed with {process.returncode}:\n{out[-2000:]}{errors[-4000:]}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def show(shape: str, name: str, found: dict[str, Any]) -> None:
    seconds = [f"{phase} {value:.3f} s" for phase, value in found["seconds"].items() if value]
    print(
        f"| {shape} | {name} | {found['trained'] / 1e6:.2f} M trained | {' | '.join(seconds)} | "
        f"peak {found['peak'] / 2**30:.2f} GiB | planned {found['planned'] / 2**30:.2f} GiB |"
        + (f" checkpoint {found['checkpoint'] / 1e6:,.1f} MB |" if found["checkpoint"] else ""),
        flush=True,
    )


def compare(args: argparse.Namespace, folder: Path) -> None:
    begin, case = time.perf_counter(), SHAPES[args.shape]
    case = replace(case, prompts=args.prompts or case.prompts)
    model, data, path = folder / "model", folder / "prompts.jsonl", folder / "work.json"
    processes = {way: waiting(way, path, args) for way in WAYS}
    build_model(case, model, torch.device(args.device))
    longest = write_prompts(case, model, case.prompts * (args.warmup + args.steps), data)
    work = Work(
        str(model), str(data), case.prompts, case.n, longest, case.new_tokens, args.steps, args.warmup, "fp32",
        case.micro_rows, False, str(folder), args.set,
    )  # fmt: skip
    work.write(path)
    found = {way: finished(way, process) for way, process in processes.items()}
    show(args.shape, "all weights", found["full"])
    show(args.shape, f"LoRA, rank {args.rank}", found["lora"])
    full, lora = found["full"], found["lora"]
    print(
        f"| {args.shape} | LoRA against all | {lora['peak'] / full['peak']:.0%} of the memory | "
        f"{lora['seconds']['step'] / full['seconds']['step']:.0%} of the time |"
        + (f" {lora['checkpoint'] / full['checkpoint']:.1%} of a checkpoint |" if full["checkpoint"] else "")
    )
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    print(
        f"{date.today()}: {name}; paddock {paddock.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}; {case.prompts} prompts x {case.n}, "
        f"{case.prompt_tokens[1]} -> {case.new_tokens}; settings {' '.join(args.set) or 'none'}; "
        f"{time.perf_counter() - begin:.0f} s in all"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, help="of a step; unset: the shape's, 128")
    parser.add_argument("--checkpoints", action="store_true", help="write and weigh them as well")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="steps that do not count")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key of Paddock")
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "WORK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        way, path = args.measure
        if sys.stdin.readline():  # nothing: nobody is there any more who would wait for it
            print(json.dumps(measure(Work.read(path), way, args)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(args, Path(folder))


if __name__ == "__main__":
    main()
