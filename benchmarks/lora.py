"""LoRA against training all weights: time and memory of a GRPO step with a reference, on public shapes, random weights.

python benchmarks/lora.py                                        # SmolLM2-135M: 128 prompts x 8, 120 tokens in, 256 out
python benchmarks/lora.py --shape qwen2.5-0.5b --rank 64
python benchmarks/lora.py --shape qwen3-0.6b --set actor_rollout_ref.model.enable_gradient_checkpointing=True

Each way runs in a process of its own, so that its peak is its own. Masters are float32 in both, products bf16. Every
response has the full length. `planned` is the fullest phase by `paddock plan`; checkpoints are those of the last step.
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
from paddock.plan.from_config import job
from paddock.plan.memory import estimate
from paddock.trainer.run import train

WAYS = ("full", "lora")
PHASES = ("step", "gen", "old_log_prob", "ref", "update_actor")
KL = "actor_rollout_ref.actor.use_kl_loss=True"


def measure(work: Work, way: str, rank: int, device: str) -> dict[str, Any]:
    """One run, in this process."""
    folder = Path(work.folder) / way
    last = work.warmup + work.steps
    keys = [KL, f"trainer.default_local_dir={folder}", f"trainer.save_freq={last}", *work.settings]
    keys += [f"actor_rollout_ref.model.lora_rank={rank}"] if way == "lora" else []
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


def run(work: Work, way: str, args: argparse.Namespace) -> dict[str, Any]:
    path = Path(work.folder) / "work.json"
    work.write(path)
    command = [sys.executable, __file__, "--measure", way, str(path), "--rank", str(args.rank), "--device", args.device]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{way} failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(shape: str, name: str, found: dict[str, Any]) -> None:
    seconds = [f"{phase} {value:.3f} s" for phase, value in found["seconds"].items() if value]
    print(
        f"| {shape} | {name} | {found['trained'] / 1e6:.2f} M trained | {' | '.join(seconds)} | "
        f"peak {found['peak'] / 2**30:.2f} GiB | planned {found['planned'] / 2**30:.2f} GiB | "
        f"checkpoint {found['checkpoint'] / 1e6:,.1f} MB |",
        flush=True,
    )


def compare(args: argparse.Namespace, folder: Path) -> None:
    case = SHAPES[args.shape]
    model, data = folder / "model", folder / "prompts.jsonl"
    build_model(case, model, torch.device(args.device))
    longest = write_prompts(case, model, case.prompts * (args.warmup + args.steps), data)
    work = Work(
        str(model), str(data), case.prompts, case.n, longest, case.new_tokens, args.steps, args.warmup, "fp32",
        case.micro_rows, False, str(folder), args.set,
    )  # fmt: skip
    found = {way: run(work, way, args) for way in WAYS}
    show(args.shape, "all weights", found["full"])
    show(args.shape, f"LoRA, rank {args.rank}", found["lora"])
    full, lora = found["full"], found["lora"]
    print(
        f"| {args.shape} | LoRA against all | {lora['peak'] / full['peak']:.0%} of the memory | "
        f"{lora['seconds']['step'] / full['seconds']['step']:.0%} of the time | "
        f"{lora['checkpoint'] / full['checkpoint']:.1%} of a checkpoint |"
    )
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    print(
        f"{date.today()}: {name}; paddock {paddock.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}; {case.prompts} prompts x {case.n}, "
        f"{case.prompt_tokens[1]} -> {case.new_tokens}; settings {' '.join(args.set) or 'none'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key of Paddock")
    parser.add_argument("--measure", nargs=2, metavar=("WAY", "WORK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(Work.read(args.measure[1]), args.measure[0], args.rank, args.device)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(args, Path(folder))


if __name__ == "__main__":
    main()
