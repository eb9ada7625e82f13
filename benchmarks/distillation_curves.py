"""Let a larger model teach the embedded one to add, on several seeds, beside GRPO and SFT on as many answers; draw it.

    python -m benchmarks.distillation_curves [--seeds 1 2 3] [--methods reward loss grpo sft] [--steps 40] [--out docs]
                                             [--set key=value ...]

First trains the teacher: a model of 2.4 million parameters with the embedded model's tokenizer, from random weights, by
`paddock sft` on the true sums of the training pairs. Each run then starts from the embedded model and learns from 256
answers a step, at one learning rate: its own answers, judged by the teacher (as a reward: k1; as a loss: forward KL
over the teacher's 16 likeliest tokens) or by the rule (GRPO); or answers that the teacher wrote (SFT). Accuracy is that
of 4 samples at temperature 1 on pairs that training never sees. Each run is the command a user would type, on one
thread. Writes OUT/curves/distillation.json after every run, and OUT/images/distillation.svg at the end.
TEACHER_FOLDER=FOLDER in the environment keeps the teacher there, for the next time.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.learning_curves import (
    DOTTED,
    GREY,
    ROOT,
    Panel,
    children_seconds,
    command,
    line,
    over_seeds,
    page,
    record,
    reward_curve,
    sampled_accuracy,
    text,
)
from paddock.data.builtin import builtin_rows

ANSWERS = 256
"""Answers that a step learns from."""
EVERY = 10
"""Steps between two measurements."""
TOLD = "teacher.json"
TEACHER_STEPS, TEACHER_SEED = 160, 0
SHAPE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6,
         "num_key_value_heads": 6, "layer_types": ["full_attention"] * 4}  # fmt: skip
"""Where the teacher's config differs from that of the embedded model."""
RATE = 5e-4
LOSS = "distillation.distillation_loss"
DISTILLED = ("distillation.enabled=True", f"{LOSS}.use_task_rewards=False")
METHODS: dict[str, tuple[str, ...]] = {
    "reward": (*DISTILLED, f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True"),
    "loss": (*DISTILLED, f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=16"),
    "grpo": (),
    "sft": (),
}
"""Overrides of `paddock train`, or none; the embedded default has the rest."""
NAME = {"reward": "distilled, as a reward", "loss": "distilled, as a loss", "grpo": "GRPO", "sft": "SFT"}
COLOUR = {"reward": "#1f6fb2", "loss": "#2a9d6f", "grpo": "#d1495b", "sft": "#b8860b"}
PLAIN = ("trainer.device=cpu", "data.max_prompt_length=16", "data.max_response_length=8", "trainer.resume_mode=disable",
         "actor_rollout_ref.actor.fsdp_config.dtype=float32", "model.enable_gradient_checkpointing=False")  # fmt: skip
"""Settings of SFT that the embedded default of `paddock train` has."""
SIZES = {name: (f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
                f"actor_rollout_ref.rollout.n={ANSWERS // prompts}", f"actor_rollout_ref.actor.optim.lr={RATE}")
         for name, prompts in {"reward": ANSWERS, "loss": ANSWERS, "grpo": 32}.items()}  # fmt: skip
"""A teacher needs one answer a prompt, GRPO groups of them."""
SAMPLED = "val-core/paddock/addition/reward/mean@4"
VALIDATION = (f"trainer.test_freq={EVERY}", "actor_rollout_ref.rollout.val_kwargs.n=4",
              "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
              "actor_rollout_ref.rollout.val_kwargs.temperature=1.0")  # fmt: skip

Run = dict[str, Any]


def train_teacher(folder: Path) -> dict[str, Any]:
    """Trains the teacher in this folder from random weights, unless it is there; returns what the document says."""
    if (folder / TOLD).exists():
        return json.loads((folder / TOLD).read_text())
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tiny, start, rows = ROOT / "paddock/assets/tiny", folder / "start", folder / "sums.jsonl"
    torch.manual_seed(TEACHER_SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny, **SHAPE))
    model.save_pretrained(start)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(start)
    sums = [(row["prompt"], row["reward_model"]["ground_truth"]) for row in builtin_rows("builtin:addition/train")]
    write_rows(rows, sums)
    cpu = children_seconds()
    command("sft", f"model={start}", f"data={rows}", *PLAIN, f"trainer.total_training_steps={TEACHER_STEPS}",
            "data.train_batch_size=256", "optim.lr=1e-3", "optim.lr_scheduler_type=cosine", "optim.min_lr_ratio=0.3",
            "trainer.total_epochs=99",
            f"trainer.seed={TEACHER_SEED}", f"trainer.default_local_dir={folder}/teacher")  # fmt: skip
    spent = children_seconds() - cpu
    accuracy = sampled_accuracy(f"{folder}/teacher/huggingface", TEACHER_SEED, folder)
    print(f"teacher: {accuracy:.1%} of its samples are right, {spent:.0f} s of CPU", flush=True)
    size = sum(weights.numel() for weights in model.parameters())
    told = {"parameters": size, "steps": TEACHER_STEPS, "sampled": accuracy, "command_cpu": round(spent, 1)}
    (folder / TOLD).write_text(json.dumps({"teacher": told}))
    return {"teacher": told}


def write_rows(file: Path, rows: list[tuple[str, str]]) -> None:
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))


def measure(shared: Path, method: str, seed: int, steps: int, folder: Path, *overrides: str) -> Run:
    """One run in this folder: accuracy of samples on held-out pairs, by step, and the reward of what it trained on."""
    teacher = shared / "teacher/huggingface"
    curves = (from_given if method == "sft" else from_own)(method, teacher, seed, steps, folder, *overrides)
    return {"method": method, "seed": seed, **curves}


def from_own(method: str, teacher: Path, seed: int, steps: int, folder: Path, *overrides: str) -> dict[str, Any]:
    """Trains on the student's own answers."""
    named = [f"distillation.teacher_models.teacher_model.model_path={teacher}"] if METHODS[method] else []
    train = [
        *("algorithm.adv_estimator=grpo", *METHODS[method], *SIZES[method], *VALIDATION),
        *(f"trainer.seed={seed}", f"trainer.total_training_steps={steps}", "trainer.resume_mode=disable", *overrides),
    ]
    seconds = timed("train", *train, *named, f"trainer.default_local_dir={folder}")
    lines = [json.loads(one) for one in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [one for one in lines if one["step"] > 0]
    return {
        "command": " ".join(["paddock train", *train]),
        "sampled": {str(one["step"]): one[SAMPLED] for one in lines if SAMPLED in one},
        "reward": [one["critic/score/mean"] for one in updates],
        "seconds": seconds,
    }


def from_given(method: str, teacher: Path, seed: int, steps: int, folder: Path, *overrides: str) -> dict[str, Any]:
    """Trains on answers that the teacher drew at temperature 1, each once."""
    rows, drawn = builtin_rows("builtin:addition/train"), folder / "drawn.jsonl"
    each = -(-steps * ANSWERS // len(rows))
    limits = ("data.max_prompt_length=16", "data.max_response_length=8", "rollout.dtype=float32")
    asked = ("data=builtin:addition/train", f"n={each}", f"trainer.seed={seed}", *limits)
    command("generate", str(teacher), *asked, f"output={drawn}")
    found = [json.loads(one) for one in drawn.read_text().splitlines()]
    pairs = [(row["prompt"], row["responses"][sample]) for sample in range(each) for row in found]
    write_rows(folder / "given.jsonl", pairs[: steps * ANSWERS])
    train = [
        *(f"data.train_batch_size={ANSWERS}", *PLAIN, f"optim.lr={RATE}", f"trainer.total_training_steps={steps}"),
        *(f"trainer.save_freq={EVERY}", f"trainer.seed={seed}", *overrides),
    ]
    files = ("model=builtin:tiny", f"data={folder}/given.jsonl", f"trainer.default_local_dir={folder}/run")
    seconds = timed("sft", *files, *train)
    places = {str(step): f"{folder}/run/global_step_{step}/actor" for step in range(EVERY, steps + 1, EVERY)}
    sampled = {step: sampled_accuracy(model, seed, folder) for step, model in places.items()}
    return {"command": " ".join(["paddock sft", *train]), "sampled": sampled, "seconds": seconds}


def timed(*arguments: str) -> dict[str, float]:
    wall, cpu = time.monotonic(), children_seconds()
    command(*arguments)
    return {"command": round(time.monotonic() - wall, 1), "command_cpu": round(children_seconds() - cpu, 1)}


def summary(run: Run) -> str:
    shown = ", ".join(f"{step}: {share:.1%}" for step, share in run["sampled"].items())
    return f"{run['method']:6s} seed {run['seed']}: sampled {shown}; {run['seconds']['command_cpu']:.0f} s of CPU"


def draw(document: dict[str, Any]) -> str:
    """Left: held-out pairs. Right: what the student's own answers scored in training. A band spans the seeds."""
    steps, runs, teacher = document["steps"], document["runs"], document["teacher"]
    seeds = len({run["seed"] for run in runs})
    left = Panel(62, 462, steps, "Accuracy of samples on held-out pairs")
    right = Panel(540, 940, steps, "Reward of the training samples, 5-step means")
    about = f"{ANSWERS} answers a step. Mean of {seeds} seeds; bands span them."
    parts = [
        text(20, 34, "A larger model teaches addition", size=19, weight=600),
        text(20, 57, about, size=13, fill=GREY),
        *left.axes(),
        *right.axes(),
    ]
    for x, name in zip((540, 726, 540, 726), NAME, strict=True):
        y = 30 if name in ("reward", "loss") else 53
        parts.append(line(x, y, x + 20, y, COLOUR[name], 'stroke-width="3" stroke-linecap="round"'))
        parts.append(text(x + 26, y + 4, NAME[name], size=12, weight=600))
    x, y = left.at(0, teacher["sampled"])
    parts.append(line(x, y, left.right, y, GREY, f'stroke-dasharray="{DOTTED}" stroke-width="2"'))
    parts.append(text(x + 8, y + 17, f"the teacher: {teacher['sampled']:.0%}", fill=GREY))
    start = next(run["sampled"]["0"] for run in runs if "0" in run["sampled"])
    for name in NAME:
        own = [run for run in runs if run["method"] == name]
        if not own:
            continue
        points = [{"0": start} | run["sampled"] for run in own]
        places = [int(step) for step in points[0]]
        low, middle, high = over_seeds([list(one.values()) for one in points])
        parts += [left.band(places, low, high, COLOUR[name]), left.curve(places, middle, COLOUR[name])]
        parts += left.dots(places, middle, COLOUR[name], hollow=False)
        if "reward" in own[0]:
            parts += reward_curve(right, own, COLOUR[name])
    return page(parts)


def main() -> int:
    kept = os.environ.get("TEACHER_FOLDER")
    with tempfile.TemporaryDirectory() as fresh:
        folder = Path(kept or fresh)
        return record(
            "distillation", "methods", list(METHODS), partial(measure, folder), summary, draw, steps=40,
            about=__doc__ or "", prepare=partial(train_teacher, folder),
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
