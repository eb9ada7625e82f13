"""Seconds and memory of the trainer's forward and of one optimizer step, on random weights of a known shape.

python benchmarks/update.py --threads 2
python benchmarks/update.py --shape smollm2-135m --prompts 4 --prompt-len 120 --response-len 128 --threads 2
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from paddock.algorithms.losses import LossInputs, policy_loss_terms
from paddock.config.engine import OptimConfig
from paddock.config.roles import ActorConfig
from paddock.core.batch import Batch
from paddock.core.device import DTYPES, device_of, peak_memory, reset_peak_memory, synchronize
from paddock.core.masked import Denominators
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend

SHAPES: dict[str, tuple[type, dict[str, Any]]] = {
    "tiny": (
        Qwen2Config,
        {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "smollm2-135m": (
        LlamaConfig,
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "qwen2.5-0.5b": (
        Qwen2Config,
        {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2},
    ),
    "qwen3-0.6b": (
        Qwen3Config,
        {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    ),
}  # fmt: skip


def make_model(shape: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    config_type, fields = SHAPES[shape]
    config = config_type(**fields, tie_word_embeddings=True, max_position_embeddings=8192)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="paddock").eval()


def make_batch(args: argparse.Namespace, vocabulary: int) -> Batch:
    """Prompts whose lengths vary by a quarter, each with its group; responses of full length, or of half and more."""
    torch.manual_seed(1)
    rows = args.prompts * args.samples
    prompt_len = torch.randint(args.prompt_len * 3 // 4, args.prompt_len + 1, (args.prompts,))
    prompt_len = prompt_len.repeat_interleave(args.samples)
    low = args.response_len // 2 if args.vary else args.response_len
    lengths = torch.randint(low, args.response_len + 1, (rows,))
    mask = (torch.arange(args.response_len) < lengths[:, None]).float()
    return Batch(
        row=torch.arange(rows),
        group=torch.arange(rows) // args.samples,
        prompts=torch.randint(4, vocabulary, (args.prompts, args.prompt_len)).repeat_interleave(args.samples, 0),
        prompt_mask=(torch.arange(args.prompt_len) >= args.prompt_len - prompt_len[:, None]).long(),
        responses=torch.randint(4, vocabulary, (rows, args.response_len)),
        mask=mask,
        lengths=lengths,
        old_log_probs=torch.full(mask.shape, -5.0),
        advantages=torch.randn(rows, 1).expand_as(mask).contiguous(),
    )


def seconds(what: Any, device: torch.device, repeats: int) -> tuple[float, float]:
    """Wall and processor seconds of the quickest run: the one least disturbed by what else the machine does."""
    what()
    found = []
    for _ in range(repeats):
        synchronize(device)
        wall, cpu = time.perf_counter(), time.process_time()
        what()
        synchronize(device)
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(found)


def measure(args: argparse.Namespace, packed: bool, device: torch.device) -> None:
    wide = torch.promote_types(DTYPES[args.dtype], DTYPES[args.master])
    model = make_model(args.shape, wide, device)
    budget = Budget(args.budget)
    engine = Engine(
        SingleBackend(
            model,
            Settings(
                budget, budget, OptimConfig(), DTYPES[args.dtype], packed=packed, checkpointing=args.checkpointing
            ),
        )
    )
    batch, config = make_batch(args, model.config.vocab_size), ActorConfig()
    denominators = Denominators.count(batch.need("mask"))
    tokens = int(batch.need("prompt_mask").sum() + batch.need("lengths").sum())

    def loss(micro: Batch, outputs: Outputs) -> Any:
        assert outputs.log_probs is not None
        old, advantages, mask = (micro.need(name) for name in ("old_log_probs", "advantages", "mask"))
        return policy_loss_terms(LossInputs(outputs.log_probs, old, advantages, mask), config, denominators)

    want = frozenset({"log_probs"})
    reset_peak_memory(device)
    forward = seconds(lambda: engine.forward(batch, want), device, args.repeats)
    step = seconds(lambda: engine.train_step(engine.micro_batches(batch), loss, want), device, args.repeats)
    print(
        f"{'packed' if packed else 'padded'}: {tokens} tokens, {len(engine.micro_batches(batch))} micro-batches; "
        f"forward {forward[0]:.3f} s (cpu {forward[1]:.3f}), {tokens / forward[0]:,.0f} tok/s; "
        f"step {step[0]:.3f} s (cpu {step[1]:.3f}), {tokens / step[0]:,.0f} tok/s; "
        f"peak {peak_memory(device) / 2**30:.2f} GiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=22)
    parser.add_argument("--response-len", type=int, default=64)
    parser.add_argument("--vary", action="store_true", help="responses of different lengths")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--master", default="fp32", choices=DTYPES, help="type of the master weights")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--layout", default="both", choices=("packed", "padded", "both"))
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for layout in ("packed", "padded"):
        if args.layout in (layout, "both"):
            measure(args, layout == "packed", device_of(args.device))


if __name__ == "__main__":
    main()
