"""A GRPO step on one GPU, phase by phase, on public shapes with random weights: rollouts, whole step, training.

python benchmarks/gpu_step.py                                    # SmolLM2-135M: 128 prompts x 8, 120 tokens in, 256 out
python benchmarks/gpu_step.py --shape qwen2.5-0.5b --parts rollout
python benchmarks/gpu_step.py --shape qwen3-8b --parts rollout,step --profile   # kernels of decode steps and updates
python benchmarks/gpu_step.py --shape qwen3-0.6b --parts mixed,training
python benchmarks/gpu_step.py --parts algorithms                  # PPO, GRPO and RLOO on the same work
python benchmarks/gpu_step.py --shape qwen3-0.6b --prompts 32 --weights fp32 --parts algorithms
python benchmarks/gpu_step.py --parts step --set actor_rollout_ref.numerics=exact

Every response has the full length that its prompt asks for. Bounds are by bytes and arithmetic, at the device's data
sheet (bound.py); `copy` is the bandwidth of a large copy. speed_table.py measures the same over many shapes.
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

import paddock_step
import peers
import torch
import transformers
from bound import Bound, bound, speed_of
from cpu_step import CASES, Case, build_model, write_prompts
from kernel_times import Timeline, decode_kernels, listed, profiled, update_kernels
from step_work import Work

import paddock
from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.device import peak_memory, reset_peak_memory, synchronize
from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.train.engine import Engine
from paddock.engines.train.open import actor_engine
from paddock.estimate.counts import Work as Counted
from paddock.estimate.job import job
from paddock.loading.load import load
from paddock.rollouts.batch import with_responses
from paddock.rollouts.episode import Episode, continued
from paddock.trainer.reinforcement import train
from paddock.workers.policy import Policy
from paddock.workers.rank import rollout_engine
from paddock.workers.updates import actor_plan

SHAPES = {
    "smallest": CASES["smallest"],
    "smollm2-135m": replace(CASES["smollm2"], prompts=128, new_tokens=256, prompt_tokens=(120, 120), micro_rows=64),
    "qwen2.5-0.5b": Case(
        128, 8, 256, (120, 120), 64, "Qwen2Config",
        {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "qwen3-0.6b": Case(
        128, 8, 256, (120, 120), 64, "Qwen3Config",
        {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "qwen2.5-1.5b": Case(
        128, 8, 256, (120, 120), 32, "Qwen2Config",
        {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
         "num_attention_heads": 12, "num_key_value_heads": 2},
    ),
    "qwen3-1.7b": Case(
        128, 8, 256, (120, 120), 32, "Qwen3Config",
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "qwen2.5-7b": Case(
        64, 8, 256, (120, 120), 16, "Qwen2Config",
        {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
         "num_attention_heads": 28, "num_key_value_heads": 4},
        tied=False,
    ),
    "qwen3-8b": Case(
        64, 8, 256, (120, 120), 16, "Qwen3Config",
        {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        tied=False,
    ),
}  # fmt: skip
MIXED = 256, 100, 1024  # sequences, and the least and most tokens of prompts and of answers


def config_of(
    work: Work, device: str, estimator: str = "grpo", extra: list[str] | None = None, gpu: str | None = None
) -> Config:
    """Returns the config of a run; `gpu` names a device by whose memory budgets are chosen instead of this one's."""
    keys = [key for key in paddock_step.arguments(work) if "ppo_max_token_len" not in key and "adv_est" not in key]
    keys += [f"algorithm.adv_estimator={estimator}", f"trainer.device={device}"]
    if estimator == "gae":
        keys += [f"critic.model.path={work.model}", f"critic.model.fsdp_config.model_dtype={work.weights}"]
    return load([*keys, *(extra or [])], gpu=gpu).config


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, those read and those written."""
    size = 2**31 if device.type == "cuda" else 2**26
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size / min(seconds)


def counted(prompts: list[Prompt], new_tokens: list[int]) -> Counted:
    """Returns these answers as `paddock plan` counts them, with prompts of the mean length."""
    tokens = round(statistics.mean(len(prompt.tokens) for prompt in prompts))
    return Counted(len(prompts), len(prompts[0].rows), tokens, max(new_tokens), tuple(new_tokens))


def learn(worker: Policy, config: Config, batch: Batch, step: int) -> None:
    worker.learn(batch, actor_plan(config.actor_rollout_ref, batch, step))


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.case, self.folder = args, SHAPES[args.shape], folder
        self.case = replace(self.case, prompts=args.prompts or self.case.prompts)
        self.device = torch.device(args.device)
        model, data = folder / "model", folder / "prompts.jsonl"
        build_model(self.case, model, self.device)
        longest = write_prompts(self.case, model, self.case.prompts * (args.warmup + args.steps), data)
        case = self.case
        self.work = Work(
            str(model), str(data), case.prompts, case.n, longest, case.new_tokens, args.steps, args.warmup,
            args.weights, case.micro_rows, False, str(folder), args.set,
        )  # fmt: skip

    def engine(self) -> tuple[Config, Engine]:
        config = config_of(self.work, self.device.type)
        return config, actor_engine(config, 1)

    def timed(self, function: Any) -> tuple[float, Any]:
        synchronize(self.device)
        start = time.perf_counter()
        result = function()
        synchronize(self.device)
        return time.perf_counter() - start, result

    def rollout(self, prompts: list[Prompt], new_tokens: list[int], name: str) -> None:
        config, engine = self.engine()
        rollout = rollout_engine(config, engine)
        sampling = Sampling(max(new_tokens), frozenset(), 0, 0, ignore_eos=True)
        first, _ = self.timed(lambda: rollout.generate(prompts, sampling))
        runs = [self.timed(lambda s=s: rollout.generate(prompts, replace(sampling, step=s))) for s in (1, 2, 3)]
        seconds, found = sorted(runs, key=lambda run: run[0])[1]
        lengths = [len(completion.tokens) for completion in found]
        tokens = sum(lengths)
        floor = self.bound(config, counted(prompts, lengths)).rollout
        gap = self.gap(config, engine, prompts, found)
        self.row(
            name, f"{tokens / seconds:,.0f} tok/s", f"{seconds:.3f} s", f"first call {first:.1f} s",
            f"bound {floor:.3f} s ({floor / seconds:.0%})", f"log-prob gap mean {gap[0]:.2g} max {gap[1]:.2g}",
            f"peak {peak_memory(self.device) / 2**30:.1f} GiB",
        )  # fmt: skip
        if self.args.profile:
            again = partial(rollout.generate, prompts, replace(sampling, step=4))
            self.row(f"time of the {name}", *Timeline.of(profiled(again)).listed())
            self.row(f"decode steps of the {name}", *listed(decode_kernels(again)))

    def bound(self, config: Config, work: Counted) -> Bound:
        planned = job(config)
        assert planned is not None
        return bound(planned.actor, work, speed_of(self.device))

    def gap(self, config: Config, engine: Engine, prompts: list[Prompt], found: list[Any]) -> tuple[float, float]:
        """|log-prob of the rollout - log-prob of the trainer|, over at most 256 responses."""
        asked = {number: prompt for prompt in prompts for number in prompt.rows}
        row = PromptRow(0, 0, [], "", "", None, {}, "")
        episodes = [continued(Episode(one.row, row, asked[one.row], [], done=False), one, version=0) for one in found]
        batch = with_responses(batch_of(prompts), episodes, 0).rows(torch.arange(min(256, len(found))))
        trainer = Policy(engine, config).log_probs(batch)
        differences = (trainer - batch.need("rollout_log_probs"))[batch.need("mask") == 1].abs()
        return differences.mean().item(), differences.max().item()

    def even(self) -> None:
        case, draw = self.case, torch.Generator().manual_seed(0)
        length = case.prompt_tokens[1]
        words = torch.randint(5, case.shape["vocab_size"], (case.prompts, length), generator=draw).tolist()
        prompts = [Prompt(tokens, list(range(i * case.n, (i + 1) * case.n))) for i, tokens in enumerate(words)]
        self.rollout(prompts, [case.new_tokens] * (case.prompts * case.n), "rollout")

    def mixed(self) -> None:
        """Prompts of many lengths, each with a limit of its own for its answer."""
        count, least, most = MIXED
        draw = torch.Generator().manual_seed(0)
        lengths = torch.randint(least, most + 1, (count,), generator=draw).tolist()
        words = [torch.randint(5, self.case.shape["vocab_size"], (n,), generator=draw).tolist() for n in lengths]
        answers = torch.randint(least, most + 1, (count,), generator=draw).tolist()
        prompts = [Prompt(tokens, [i], max_tokens=answers[i]) for i, tokens in enumerate(words)]
        self.rollout(prompts, answers, "mixed rollout")

    def step(self, estimator: str = "grpo") -> dict[str, float]:
        run = self.folder / estimator
        config = self.step_config(estimator, run)
        train(config)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][self.args.warmup :]
        names = ("step", "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
        found = {n: statistics.median(line.get(f"timing_s/{n}", 0.0) for line in lines) for n in names}
        found["peak GiB"] = peak_memory(self.device) / 2**30
        gaps = [line.get("training/rollout_probs_diff_mean", float("nan")) for line in lines]
        shown = [f"{name} {value:.3f}" for name, value in found.items() if value]
        case = self.case
        least = self.bound(config, Counted(case.prompts, case.n, self.work.prompt_tokens, case.new_tokens))
        shown += [f"bound of gen {least.rollout:.3f}, of update_actor {least.update:.3f}"]
        self.row(f"step {estimator}", *shown, f"prob gap {statistics.median(gaps):.5f}")
        if self.args.profile:
            again = self.step_config(estimator, self.folder / f"{estimator}-profiled")
            self.row(f"update of step {estimator}", *listed(update_kernels(lambda: train(again))))
        return found

    def step_config(self, estimator: str, run: Path) -> Config:
        keys = [f"trainer.default_local_dir={run}", "trainer.resume_mode=disable", *self.args.set]
        return config_of(self.work, self.device.type, estimator, keys)

    def vllm(self) -> None:
        """The same step with vLLM's engine in this process: what its sleep frees, and what a weight sync takes."""
        from paddock.engines.rollout.vllm import VLLMEngine

        freed: list[int] = []
        seconds: dict[str, list[float]] = {"sleep": [], "wake": [], "load_bucket": []}

        def timed(name: str, method: Any) -> Any:
            def call(engine: Any, *arguments: Any) -> None:
                before = torch.cuda.mem_get_info()[0] if name == "sleep" else 0
                seconds[name].append(self.timed(lambda: method(engine, *arguments))[0])
                if name == "sleep":
                    freed.append(torch.cuda.mem_get_info()[0] - before)

            return call

        for name in seconds:
            setattr(VLLMEngine, name, timed(name, getattr(VLLMEngine, name)))
        group = "actor_rollout_ref.rollout"
        keys = [f"{group}.name=vllm", f"{group}.tensor_model_parallel_size=1", f"{group}.gpu_memory_utilization=0.4"]
        self.args.set = [*self.args.set, *keys]
        found = self.step()
        lines = [json.loads(line) for line in (self.folder / "grpo/metrics.jsonl").read_text().splitlines()]
        tokens = self.case.prompts * self.case.n * self.case.new_tokens
        self.row("vLLM", f"{tokens / found['gen']:,.0f} tok/s with wake and sync",
                 f"sleep frees {max(freed) / 2**30:.1f} GiB",
                 *(f"{name} {statistics.median(values):.2f} s" for name, values in seconds.items() if values),
                 f"sync gap {max(line.get('rollout/sync_gap', 0.0) for line in lines):.4f}")  # fmt: skip

    def algorithms(self) -> None:
        found = {}
        for estimator in ("gae", "grpo", "rloo"):
            self.clear()
            found[estimator] = self.step(estimator)
        for estimator in ("grpo", "rloo"):
            time_, memory = (found[estimator][key] / found["gae"][key] for key in ("step", "peak GiB"))
            self.row(f"{estimator} against PPO", f"{time_:.0%} of the time", f"{memory:.0%} of the memory")

    def training(self) -> None:
        """Updates on full sequences of 1,024 tokens, packed to 16k."""
        rows, length = (64, 1024) if self.device.type == "cuda" else (2, 8)
        work = replace(self.work, prompts=rows, n=1)
        config = config_of(work, self.device.type, "grpo", ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
                                                            "algorithm.adv_estimator=reinforce_plus_plus"])  # fmt: skip
        worker = Policy(actor_engine(config, 10), config)
        words = torch.randint(5, self.case.shape["vocab_size"], (rows, length))
        batch = Batch(
            row=torch.arange(rows), group=torch.arange(rows), prompts=words[:, :1], responses=words[:, 1:],
            lengths=torch.full((rows,), length - 1), mask=torch.ones(rows, length - 1, dtype=torch.long),
        ).with_(advantages=torch.randn(rows, length - 1), old_log_probs=torch.zeros(rows, length - 1))  # fmt: skip
        update = partial(learn, worker, config, batch)
        update(0)
        seconds = statistics.median(self.timed(partial(update, s))[0] for s in (1, 2, 3))
        parameters = sum(p.numel() for p in worker.engine.model.parameters())
        rate = rows * length / seconds
        self.row("training", f"{rate:,.0f} tok/s", f"{6 * parameters * rate / 1e12:.0f} TFLOP/s (6 N D)",
                 f"peak {peak_memory(self.device) / 2**30:.1f} GiB")  # fmt: skip

    def trl(self) -> None:
        """TRL's GRPO step with transformers' generate, on the same work."""
        try:
            found = peers.trl(replace(self.work, device=self.device.type))
        except peers.PeerError as error:
            return self.row("TRL", f"failed: {error}")
        self.row("TRL step", f"step {found['step_s']:.3f}", f"gen {found['generation_s']:.3f}",
                 f"peak GiB {found['peak_gib']:.1f}", f"trl {found['versions']['trl']}")  # fmt: skip

    def clear(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        reset_peak_memory(self.device)

    def row(self, *cells: str) -> None:
        print(f"| {self.args.shape} | {' | '.join(cells)} |", flush=True)

    def run(self) -> None:
        self.bandwidth = bandwidth(self.device)
        self.clear()
        parts = {"rollout": self.even, "mixed": self.mixed, "step": self.step, "training": self.training,
                 "algorithms": self.algorithms, "trl": self.trl, "vllm": self.vllm}  # fmt: skip
        for part in self.args.parts.split(","):
            self.clear()
            parts[part]()


def batch_of(prompts: list[Prompt]) -> Batch:
    rows = [(row, number, prompt.tokens) for number, prompt in enumerate(prompts) for row in prompt.rows]
    width = max(len(tokens) for *_, tokens in rows)
    padded = torch.tensor([[0] * (width - len(tokens)) + tokens for *_, tokens in rows])
    mask = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for *_, tokens in rows])
    ids, groups = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
    return Batch(row=ids, group=groups, prompts=padded, prompt_mask=mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument(
        "--parts", default="rollout,step", help="of rollout, mixed, step, training, algorithms, trl, vllm"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, help="a step, instead of the shape's own number")
    parser.add_argument("--weights", choices=["bf16", "fp32"], default="bf16", help="fp32: masters, products in bf16")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key of Paddock")
    parser.add_argument("--profile", action="store_true", help="of rollouts and steps on a GPU: time by kind of kernel")
    args = parser.parse_args()
    if args.profile and args.device != "cuda":
        parser.error(f"--profile reads the times of kernels on a CUDA device, not on {args.device}")
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        bench.run()
        case, versions = bench.case, f"torch {torch.__version__}, transformers {transformers.__version__}"
        work = f"{case.prompts} prompts x {case.n}, {case.prompt_tokens[1]} -> {case.new_tokens}"
        print(
            f"{date.today()}: {name}, copy {bench.bandwidth / 1e12:.2f} TB/s; paddock {paddock.__version__}, "
            f"{versions}, Python {platform.python_version()}; {work}; settings {' '.join(args.set) or 'none'}"
        )


if __name__ == "__main__":
    main()
