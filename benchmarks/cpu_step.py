"""A step of GRPO on a CPU, Paddock's and TRL's side by side: the same model, prompts, reward, lengths and machine.

python benchmarks/cpu_step.py --case tiny --threads 1 --steps 5 --trl-python TRL_VENV/bin/python
python benchmarks/cpu_step.py --case smollm2 --threads 2 --steps 3 --rounds 2 --trl-python TRL_VENV/bin/python

Models are built here with random weights, unless --model names a folder. Every response has the full length. Each
system runs in a process of its own; rounds alternate between them. On a busy machine compare processor seconds with one
thread. TRL takes --micro-rows responses at a time, Paddock what its own token budget for a CPU holds: how a batch is
split changes no gradient. --budget gives Paddock micro-batches of so many tokens instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import HERE, PeerError, report
from step_work import Work

SHOWN = ("generation", "forward", "update")
SENTENCES = (
    "Ann buys {} apples and gives {} of them to Tom. ", "A train of {} cars leaves {} of them behind. ",
    "Of {} birds on a roof {} fly away. ", "Each of {} boxes holds {} pens. ", "Is {} more than {}? ",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What a step consists of, and the model's shape."""

    prompts: int
    n: int
    new_tokens: int
    prompt_tokens: tuple[int, int]
    micro_rows: int
    family: str
    shape: dict[str, int]
    tied: bool = True
    """One matrix embeds tokens and is the head."""


CASES = {
    "smallest": Case(
        2, 2, 4, (8, 12), 4, "Qwen2Config",
        {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "tiny": Case(
        32, 8, 64, (16, 24), 64, "Qwen2Config",
        {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "smollm2": Case(
        4, 8, 128, (90, 150), 8, "LlamaConfig",
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
         "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
}  # fmt: skip


def build_model(case: Case, folder: Path, device: Any = "cpu") -> None:
    """Random weights, and a tokenizer of one token a byte whose template leaves texts as they are."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<eos>"]
    letters = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    words = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = getattr(transformers, case.family)(
        **case.shape, **words, tie_word_embeddings=case.tied, max_position_embeddings=8192
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_prompts(case: Case, model: Path, count: int, path: Path) -> int:
    """Conversations of one message, as many tokens long as the case says; returns the longest one's tokens."""
    from transformers import AutoTokenizer

    tokenizer, draw, longest = AutoTokenizer.from_pretrained(model), random.Random(0), 0
    with path.open("w") as file:
        for _ in range(count):
            text, wanted = "", draw.randint(*case.prompt_tokens)
            while len(tokens := tokenizer(text)["input_ids"]) < wanted:
                text += draw.choice(SENTENCES).format(draw.randint(10, 99), draw.randint(10, 99))
            message = {"role": "user", "content": tokenizer.decode(tokens[:wanted])}
            read = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=True)["input_ids"]
            longest = max(longest, len(read))
            row = {"data_source": "e", "prompt": [message], "reward_model": {"style": "rule", "ground_truth": ""}}
            print(json.dumps(row), file=file)
    return longest


def prepare(args: argparse.Namespace, folder: Path) -> Work:
    case = CASES[args.case]
    model = args.model or folder / "model"
    if args.model is None:
        build_model(case, model)
    data = folder / "prompts.jsonl"
    longest = write_prompts(case, model, case.prompts * (args.warmup + args.steps), data)
    work = Work(
        str(model), str(data), case.prompts, case.n, longest, case.new_tokens, args.steps, args.warmup, args.weights,
        args.micro_rows or case.micro_rows, args.checkpointing, str(folder),
        [*args.set, *([f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={args.budget}"] if args.budget else [])],
    )  # fmt: skip
    work.write(folder / "work.json")
    return work


def run(name: str, python: str, folder: Path, threads: int) -> dict[str, Any]:
    """One system's run in a process of its own; what it printed last is its report."""
    environment = {
        "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(HERE.parent),
    }  # fmt: skip
    work = str(folder / "work.json")
    try:
        found = report(f"{name}_step.py", work, python=python, environment=environment, patience=None)
    except PeerError as error:
        raise SystemExit(f"{name} failed: {error}\n{error.output}") from error
    walls = [sum(wall for wall, _ in step.values()) for step in found["steps"]]
    print(f"  {name}: {', '.join(f'{wall:.2f}' for wall in walls)} s", file=sys.stderr, flush=True)
    return found


def summary(reports: list[dict[str, Any]], rows: int) -> dict[str, float]:
    """Medians over the steps of all rounds; the largest memory."""
    steps = [step for report in reports for step in report["steps"]]
    phases = {name: statistics.median(step.get(name, (0.0, 0.0))[0] for step in steps) for name in SHOWN}
    wall = statistics.median(sum(seconds for seconds, _ in step.values()) for step in steps)
    cpu = statistics.median(sum(seconds for _, seconds in step.values()) for step in steps)
    cpu_phases = {f"cpu {name}": statistics.median(step.get(name, (0.0, 0.0))[1] for step in steps) for name in SHOWN}
    memory = max(report["memory"] for report in reports) / 2**30
    return {"rate": rows / wall, "wall": wall, **phases, "cpu": cpu, **cpu_phases, "memory": memory}


def table(found: dict[str, dict[str, float]]) -> str:
    """Markdown: a row a system, then what Paddock has for one of TRL."""
    head = ["", "samples/s", "s a step", *SHOWN, "CPU s a step", *(f"CPU {name}" for name in SHOWN), "peak GiB"]
    lines = [" | ".join(head), "|".join(["---"] * len(head))]
    for name, numbers in found.items():
        lines.append(" | ".join([name, *(f"{number:.2f}" for number in numbers.values())]))
    if len(found) == 2:
        ours, theirs = found.values()
        ratios = [f"{ours[key] / theirs[key]:.2f}x" if theirs[key] else "-" for key in ours]
        lines.append(" | ".join(["ratio", *ratios]))
    return "\n".join(f"| {line} |" for line in lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="tiny")
    parser.add_argument("--model", type=Path, help="a folder with real weights instead of random ones")
    parser.add_argument("--trl-python", help="an interpreter that can import trl; unset: Paddock alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1, help="steps that do not count")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each system, in turn")
    parser.add_argument("--weights", choices=("bf16", "fp32"), default="bf16", help="fp32: with products in bf16")
    parser.add_argument("--micro-rows", type=int, help="responses that TRL takes at a time")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch of Paddock; unset: its default")
    parser.add_argument("--checkpointing", action="store_true", help="both recompute activations")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key of Paddock")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    systems = {"paddock": sys.executable} | ({"trl": args.trl_python} if args.trl_python else {})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        work = prepare(args, folder)
        reports: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        for _ in range(args.rounds):
            for name, python in systems.items():
                reports[name].append(run(name, python, folder, args.threads))
    first = {name: found[0] for name, found in reports.items()}
    versions = {name: version for report in first.values() for name, version in report["versions"].items()}
    tokens = {name: round(report["tokens"]) for name, report in first.items()}
    if len(set(tokens.values())) > 1:
        raise SystemExit(f"the two did not do the same work; tokens a step: {tokens}")
    budget = f"{args.budget} tokens" if args.budget else "its default budget"
    print(
        f"{args.case}: {work.prompts} prompts x {work.n} x {work.new_tokens} tokens, {tokens['paddock']} with prompts; "
        f"{args.weights} weights, micro-batches of {work.micro_rows} rows for TRL, of {budget} for Paddock, "
        f"checkpointing {'on' if args.checkpointing else 'off'}; {args.threads} thread(s); "
        f"{', '.join(f'{k} {v}' for k, v in versions.items())}, Python {platform.python_version()}"
    )
    print(table({name: summary(found, work.rows) for name, found in reports.items()}))


if __name__ == "__main__":
    main()
