r"""The table of speed: rollout, update and whole GRPO step on one device, random weights of public shapes, each beside
its bound by bytes and arithmetic (bound.py) and what `paddock plan` says.

python benchmarks/speed_table.py --list                          # names of all rows: SHAPE/WORK/WAY
python benchmarks/speed_table.py 'smollm2-135m/*' --json speed.jsonl
python benchmarks/speed_table.py '*/short/full' --steps 2 --warmup 1 \
    --set actor_rollout_ref.actor.ppo_max_token_len_per_gpu=49152
python benchmarks/speed_table.py 'qwen2.5-*' --peers vllm,trl    # the same work by others, by this Python (peers.py)
python benchmarks/speed_table.py 'qwen3-8b/few/lora' --gpu 4090  # with what a GPU of 24 GiB would choose

Rows of a shape share its model and run one after the other; each prints its line of markdown as soon as it is measured,
and adds a line of JSON to the file that --json names. `short` work has responses of one length; in `long` work each
prompt has its own, drawn from an exponential distribution: a long tail. Means over the steps behind the warm-up. A
peer's cell is `-` where it does not do that work (`does`).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `paddock train` does

import peers
import step_work
import torch
import transformers
from bound import bound, speed_of
from cpu_step import build_model, write_prompts
from gpu_step import SHAPES, config_of

import paddock
from paddock.core.device import peak_memory, reset_peak_memory
from paddock.engines.rollout.base import Completion, Request, RolloutEngine
from paddock.estimate.counts import Work
from paddock.estimate.duration import duration
from paddock.estimate.job import job
from paddock.trainer.reinforcement import train

RANK = 32
COLUMNS = ("shape", "work", "trained", "rollout, tok/s", "rollout, s", "bound", "update, s", "bound", "step, s",
           "bound", "planned", "GiB")  # fmt: skip
WORDS = 3  # columns at the left that hold no numbers
PEERS = {"vllm": ("vLLM, tok/s", "tokens_per_s", ",.0f"), "trl": ("TRL step, s", "step_s", ".2f")}
"""Of each peer its column, and the number that is shown there."""


@dataclass(frozen=True)
class Row:
    """One measurement: a shape, the work of a step, and what is trained."""

    shape: str
    work: str
    way: str
    prompts: int
    n: int
    prompt_tokens: int
    response_tokens: int
    mean_tokens: int | None
    """Mean of the distribution of lengths; None: all responses are of full length."""
    checkpointing: bool
    weights: str
    """Type of the weights that the optimizer changes; products are bf16."""

    @property
    def name(self) -> str:
        return f"{self.shape}/{self.work}/{self.way}"

    def limits(self) -> list[int]:
        """Returns the tokens of a response to each prompt: quantiles of the distribution, in a fixed order."""
        if self.mean_tokens is None:
            return [self.response_tokens] * self.prompts
        spaced = [-self.mean_tokens * math.log(1 - (i + 0.5) / self.prompts) for i in range(self.prompts)]
        lengths = [max(1, min(self.response_tokens, round(length))) for length in spaced]
        return random.Random(0).sample(lengths, len(lengths))

    def adapters(self, rank: int) -> list[str]:
        """Returns the keys of what is trained."""
        beside = [f"actor_rollout_ref.model.lora_rank={rank}"] if self.way != "full" else []
        return [*beside, *(["actor_rollout_ref.model.lora.merge=True"] if self.way == "merged" else [])]

    def counted(self, prompt_tokens: int) -> Work:
        """Returns the work as `paddock plan` counts it."""
        lengths = tuple(length for length in self.limits() for _ in range(self.n))
        return Work(self.prompts, self.n, prompt_tokens, max(lengths), lengths)


def rows() -> list[Row]:
    """Full weights of 7 billion parameters and more fit one device in bf16 alone, and only if layers are recomputed.
    Their adapters, with few answers a step, are for a small device. `merged`: adapters, by `lora.merge`."""
    found = []
    for shape in ("smallest", "smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-1.7b", "qwen2.5-7b", "qwen3-8b"):
        large, middle = shape in ("qwen2.5-7b", "qwen3-8b"), shape in ("qwen2.5-1.5b", "qwen3-1.7b")
        works = {"short": (64 if large else 128, 8, 120, 256, None), "long": (16 if large else 32, 8, 256, 4096, 1000)}
        if shape == "smallest":
            works = {"short": (2, 2, 12, 4, None), "long": (2, 2, 12, 16, 6)}
        for work, sizes in works.items():
            recomputed = large or (middle and work == "long")
            found += [Row(shape, work, "full", *sizes, recomputed, "bf16" if large else "fp32"),
                      *(Row(shape, work, way, *sizes, recomputed, "fp32") for way in ("lora", "merged"))]  # fmt: skip
        if large:
            found.append(Row(shape, "few", "lora", 8, 8, 256, 1024, None, True, "fp32"))
    return found


def does(peer: str, row: Row) -> bool:
    """Returns whether the peer does the row's work: rollouts of vLLM are the same whatever is trained, and trl_step.py
    trains all weights on responses of one length."""
    return row.way == "full" and (peer == "vllm" or row.mean_tokens is None)


@contextmanager
def limited(limits: list[int]) -> Iterator[None]:
    """Responses to the i-th prompt of a step end at `limits[i]` tokens."""
    answer = RolloutEngine.answer

    def shortened(self: RolloutEngine, requests: list[Request], *args: Any, **kwargs: Any) -> list[Completion]:
        own = [replace(request, limit=limit) for request, limit in zip(requests, limits, strict=True)]
        return answer(self, own, *args, **kwargs)

    RolloutEngine.answer = shortened  # type: ignore[method-assign]
    try:
        yield
    finally:
        RolloutEngine.answer = answer  # type: ignore[method-assign]


def measure(row: Row, model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Trains a few steps in this process; returns the row's numbers, and those of peers."""
    device, data, run = torch.device(args.device), folder / "prompts.jsonl", folder / row.name.replace("/", "-")
    case = replace(SHAPES[row.shape], prompt_tokens=(row.prompt_tokens, row.prompt_tokens))
    longest = write_prompts(case, model, row.prompts * (max(args.warmup, 1) + args.steps), data)
    step = step_work.Work(
        str(model), str(data), row.prompts, row.n, longest, row.response_tokens, args.steps, args.warmup, row.weights,
        case.micro_rows, row.checkpointing, str(folder), [],
    )  # fmt: skip
    keys = [f"trainer.default_local_dir={run}", "trainer.resume_mode=disable", *row.adapters(args.rank), *args.set]
    config = config_of(step, device.type, "grpo", keys, args.gpu)
    clear(device)
    with limited(row.limits()):
        train(config)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][args.warmup :]
    times = {
        name: statistics.mean(line[f"timing_s/{name}"] for line in lines) for name in ("gen", "update_actor", "step")
    }
    work, speed, planned = row.counted(longest), speed_of(device), job(config)
    assert planned is not None
    wrote = statistics.mean(line["response_length/mean"] for line in lines)
    if round(wrote * work.rows) != work.written:
        raise SystemExit(f"{row.name}: responses have {wrote} tokens on average, not {work.written / work.rows}")
    least, told, peak = bound(planned.actor, work, speed), duration(planned, work, speed), peak_memory(device)
    clear(device)
    others = beside(row, replace(step, device=device.type), args.peers, args.patience)
    return {
        "name": row.name, **asdict(row), "rank": args.rank if row.way != "full" else 0,
        "written_tokens": work.written, "rollout_tokens_per_s": work.written / times["gen"],
        "rollout_s": times["gen"], "rollout_bound_s": least.rollout, "rollout_planned_s": told.phases["gen"],
        "update_s": times["update_actor"], "update_bound_s": least.update,
        "update_planned_s": told.phases["update_actor"],
        "step_s": times["step"], "step_bound_s": least.step, "step_planned_s": told.step,
        "peak_gib": peak / 2**30,
        "budget": config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu, **circumstances(args),
        **({"peers": others} if others else {}),
    }  # fmt: skip


def beside(row: Row, step: step_work.Work, names: Iterable[str], patience: float) -> dict[str, dict[str, Any] | None]:
    """Returns what these peers take for the row's work, None for one that does not do it, and says what failed."""
    limits = row.limits()
    found = {name: peers.measured(name, step, limits, patience) if does(name, row) else None for name in names}
    for name, numbers in found.items():
        if numbers and "missing" in numbers:
            print(f"{row.name}: {name} {numbers['missing']}: {numbers['reason']}", file=sys.stderr, flush=True)
    return found


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_peak_memory(device)


def circumstances(args: argparse.Namespace) -> dict[str, Any]:
    """Returns on what, when and with what a row was measured."""
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    versions = {"paddock": paddock.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    chosen_for = {"chosen_for": args.gpu} if args.gpu else {}
    return {"device": name, **chosen_for, "date": str(date.today()), "steps": args.steps, "warmup": args.warmup,
            "settings": args.set, "versions": versions | {"python": platform.python_version()}}  # fmt: skip


def head(names: Iterable[str]) -> str:
    """Returns the first two lines of the table, with a column for each of these peers."""
    columns = [*COLUMNS, *(PEERS[name][0] for name in names)]
    return f"| {' | '.join(columns)} |\n|{'---|' * WORDS}{'---:|' * (len(columns) - WORDS)}"


def markdown(found: dict[str, Any], names: Iterable[str]) -> str:
    """Returns a measured row as a line of the table with a column for each of these peers."""
    length = f"{found['response_tokens']:,}" + (f", mean {found['written_tokens'] / found['prompts'] / found['n']:,.0f}"
                                                if found["mean_tokens"] else "")  # fmt: skip
    work = f"{found['prompts']} x {found['n']}, {found['prompt_tokens']} -> {length}"
    recomputed = ", recomputed" if found["checkpointing"] else ""
    trained = (
        f"LoRA, rank {found['rank']}{', merged' * (found['way'] == 'merged')}"
        if found["rank"]
        else f"all, {found['weights']}"
    )
    cells = [found["shape"], work, trained + recomputed, f"{found['rollout_tokens_per_s']:,.0f}"]
    for phase in ("rollout", "update", "step"):
        seconds, least = found[f"{phase}_s"], found[f"{phase}_bound_s"]
        cells += [f"{seconds:.2f}", f"{least:.2f} ({least / seconds:.0%})"]
    cells += [f"{found['step_planned_s']:.2f}", f"{found['peak_gib']:.1f}"]
    others = found.get("peers", {})
    cells += [cell(name, others[name]) if name in others else "" for name in names]
    return f"| {' | '.join(cells)} |"


def cell(peer: str, numbers: dict[str, Any] | None) -> str:
    if numbers is None:
        return "-"
    _, number, form = PEERS[peer]
    return str(numbers["missing"]) if "missing" in numbers else format(numbers[number], form)


def chosen(patterns: list[str]) -> list[Row]:
    found = [row for row in rows() if any(fnmatch(row.name, pattern) for pattern in patterns)]
    if not found:
        raise SystemExit(f"no row is named {' or '.join(patterns)}; --list shows all names")
    return found


def named(names: str) -> list[str]:
    """Returns the peers of a list with commas."""
    found = [name for name in names.split(",") if name]
    if unknown := set(found) - PEERS.keys():
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: no such peer; known are {', '.join(PEERS)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="names, or patterns of names")
    parser.add_argument("--list", action="store_true", help="show all names and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to which a line for each row is added")
    parser.add_argument("--rank", type=int, default=RANK, help="of adapters")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key of Paddock")
    parser.add_argument("--gpu", metavar="NAME", help="choose budgets by this GPU's memory, as `paddock plan --gpu`")
    parser.add_argument("--peers", type=named, default=[], metavar="NAMES", help=f"of {','.join(PEERS)}")
    parser.add_argument("--patience", type=float, default=peers.PATIENCE, help="seconds after which a peer is ended")
    args = parser.parse_args()
    if args.list:
        print("\n".join(row.name for row in rows()))
        return
    print(head(args.peers), flush=True)
    for shape, group in groupby(chosen(args.rows), key=lambda row: row.shape):
        with tempfile.TemporaryDirectory() as folder:
            build_model(SHAPES[shape], Path(folder) / "model", torch.device(args.device))
            for row in group:
                found = measure(row, Path(folder) / "model", Path(folder), args)
                print(markdown(found, args.peers), flush=True)
                if args.json:
                    with args.json.open("a") as file:
                        print(json.dumps(found), file=file)


if __name__ == "__main__":
    main()
