"""How far the log-probs of a rollout and of the trainer are apart, with a model's own weights and with random ones of
the same shape: the first step of a GRPO run each.

python benchmarks/gap.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --data gsm8k/train.parquet
python benchmarks/gap.py --model MODEL --data FILE --set actor_rollout_ref.numerics=exact     # zero
python benchmarks/gap.py --model builtin:tiny --data builtin:addition/train --prompts 4 --device cpu

Both compute the same numbers, in other orders of the same bf16 sums. `surprise` is -log p of a token on average:
random weights leave every token unlikely, so that a difference of logits is one of log-probs, and none of probability.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `paddock train` does

import torch
import transformers
from torch import Tensor

from paddock.core.batch import Batch
from paddock.loading.load import load
from paddock.models.load import model_folder
from paddock.trainer.loop import Trainer
from paddock.trainer.reinforcement import train

HEAD = "| weights | tokens | surprise | log-probs apart: mean | 99 % | max | probabilities apart: mean | max |"


def random_twin(model: str, folder: Path, device: str) -> Path:
    """Writes a model of the same shape and vocabulary and with random weights, as pretraining begins."""
    config = transformers.AutoConfig.from_pretrained(model)
    torch.manual_seed(0)
    with torch.device(device):
        twin = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    twin.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def differences(model: str, folder: Path, args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Returns the log-probs of the first step's tokens, by the rollout and by the trainer."""
    found: list[tuple[Tensor, Tensor]] = []
    plain = Trainer.with_old_log_probs

    def compared(trainer: Any, batch: Batch) -> Batch:
        own, mask = trainer.roles.actor.log_probs(batch), batch.need("mask") == 1
        found.append((batch.need("rollout_log_probs")[mask], own[mask]))
        return plain(trainer, batch)

    keys = [
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}", f"data.train_files={args.data}",
        f"actor_rollout_ref.rollout.n={args.n}", f"data.train_batch_size={args.prompts}", "data.val_files=[]",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        f"data.max_response_length={args.tokens}", f"trainer.device={args.device}", "trainer.total_training_steps=1",
        "trainer.logger=[file]", "trainer.save_last=False", f"trainer.default_local_dir={folder}", *args.set,
    ]  # fmt: skip
    with patch.object(Trainer, "with_old_log_probs", compared):
        train(load(keys).config)
    return found[0]


def line(name: str, rollout: Tensor, trainer: Tensor) -> str:
    gap, likely = (rollout - trainer).abs(), (rollout.exp() - trainer.exp()).abs()
    high = gap.kthvalue(max(1, round(0.99 * len(gap)))).values
    numbers = [-rollout.mean(), gap.mean(), high, gap.max(), likely.mean(), likely.max()]
    return f"| {name} | {len(gap):,} | {' | '.join(f'{number.item():.2g}' for number in numbers)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, a name on the hub, or builtin:tiny")
    parser.add_argument("--data", required=True, help="rows that a GRPO run could train on")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="most of an answer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a further key of Paddock")
    args = parser.parse_args()
    print(f"{HEAD}\n|---|{'---:|' * 7}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        own = str(model_folder(args.model))
        print(line("own", *differences(own, folder / "own", args)), flush=True)
        twin = random_twin(own, folder / "model", args.device)
        print(line("random", *differences(str(twin), folder / "random", args)), flush=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu"
    print(f"{date.today()}: {device}; {Path(args.model).name}; torch {torch.__version__}; "
          f"settings {' '.join(args.set) or 'none'}")  # fmt: skip


if __name__ == "__main__":
    main()
