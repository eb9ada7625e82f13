"""Rollout tokens per second: embedded, hf, and transformers' own generate(), on the same random weights.

python benchmarks/rollout.py --shape tiny --prompts 32 --n 8 --prompt-length 20 --new-tokens 64 --threads 1
python benchmarks/rollout.py --shape smollm2-135m --prompts 4 --n 8 --prompt-length 120 --new-tokens 128 --threads 2
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from bound import bound, speed_of
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel, Qwen2Config

from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.estimate.counts import Work
from paddock.estimate.memory import RoleLoad
from paddock.facts.models import from_config
from paddock.models.attention import NAME
from paddock.models.fused import fuse

SHAPES: dict[str, Any] = {
    "tiny": Qwen2Config(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_model(args: argparse.Namespace) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPES[args.shape], dtype=TYPES[args.dtype], attn_implementation=NAME)
    return model.to(args.device).train()


def make_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Prompts of `--prompt-length` tokens; `--ragged`: of half to one and a half times that."""
    spread = torch.linspace(0.5, 1.5, args.prompts) if args.ragged else torch.ones(args.prompts)
    lengths = (spread * args.prompt_length).long().tolist()
    tokens = [torch.randint(5, 300, (length,)).tolist() for length in lengths]
    return [Prompt(tokens[i], list(range(i * args.n, (i + 1) * args.n))) for i in range(args.prompts)]


def transformers_generate(model: PreTrainedModel, args: argparse.Namespace) -> Callable[[list[Prompt]], int]:
    """What a trainer over transformers does: every response has a row of its own, and no log-probs come back."""
    config = GenerationConfig(do_sample=True, max_new_tokens=args.new_tokens, top_k=0, pad_token_id=0)
    config.eos_token_id = None if args.stop is None else args.stop

    @torch.no_grad()
    def generate(prompts: list[Prompt]) -> int:
        rows = [prompt.tokens for prompt in prompts for _ in prompt.rows]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=args.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=args.device)
        model.eval()
        model.set_attn_implementation("sdpa")
        found = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, width:]
        return sum(row.index(args.stop) + 1 if args.stop in row else len(row) for row in found.tolist())

    return generate


def contestants(model: PreTrainedModel, args: argparse.Namespace) -> dict[str, Callable[[list[Prompt]], int]]:
    stops = frozenset() if args.stop is None else frozenset({args.stop})
    sampling = Sampling(args.new_tokens, stops, seed=0, step=0, temperature=args.temperature, top_p=args.top_p)
    fuse(model)  # as a run does; the other two run its modules
    engines = {
        "embedded": EmbeddedEngine(model, max_num_seqs=args.max_num_seqs),
        "hf": HFEngine(model, max_num_seqs=args.max_num_seqs),
    }

    def tokens_of(engine: EmbeddedEngine | HFEngine) -> Callable[[list[Prompt]], int]:
        return lambda prompts: sum(len(found.tokens) for found in engine.generate(prompts, sampling))

    found = {name: tokens_of(engine) for name, engine in engines.items()}
    return found | {"transformers generate()": transformers_generate(model, args)}


def least(args: argparse.Namespace) -> float:
    """Returns the bound of full-length responses by bytes and arithmetic, in seconds."""
    shape = from_config(SHAPES[args.shape].to_dict())
    work = Work(args.prompts, args.n, args.prompt_length, args.new_tokens)
    return bound(RoleLoad(shape), work, speed_of(torch.device(args.device), args.threads)).rollout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ragged", action="store_true")
    parser.add_argument("--stop", type=int, help="a stop token, so that responses end early; unset: full length")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--dtype", choices=TYPES, default="bf16")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", help="one engine by name")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, prompts = make_model(args), make_prompts(args)
    engines = {name: run for name, run in contestants(model, args).items() if args.only in (None, name)}
    work = f"{args.prompts} prompts x {args.n} x {args.new_tokens} tokens"
    print(f"{args.shape} {args.dtype}, {work}, {args.threads} threads, bound {least(args):.2f} s")
    best = dict.fromkeys(engines, (float("inf"), float("inf"), 0))
    for _ in range(args.repeats):  # in turns, so that a busy machine is busy for all; the best of each counts
        for name, run in engines.items():
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = run(prompts)
            best[name] = min(best[name], (time.perf_counter() - wall, time.process_time() - cpu, tokens))
    for name, (wall, cpu, tokens) in best.items():
        print(f"{name:24s} {wall:7.2f} s  {cpu:7.2f} CPU s  {tokens / wall:8.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
