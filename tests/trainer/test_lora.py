"""`paddock train` with LoRA: runs learn, go on after a stop, and leave adapters and models that others load."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from tiny_models import save_tiny, tiny_batch
from transformers import AutoModelForCausalLM

from paddock.cli import main
from paddock.commands.frozen_policy import open_policy
from paddock.commands.preflight import check
from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.train.engine import Engine, adapter_of
from paddock.engines.train.open import actor_engine, reference_engine
from paddock.errors import UserError
from paddock.facts.machine import this_machine
from paddock.loading.load import load
from paddock.models.adapters import MERGED, WEIGHTS_FILE
from paddock.trainer.assembly import Assembly
from paddock.trainer.reinforcement import train
from paddock.workers.rank import Rank

peft = pytest.importorskip("peft")
RANK = "actor_rollout_ref.model.lora_rank"
SMALL = [
    "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "trainer.total_training_steps=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.save_freq=1",
    "trainer.logger=[file]",
    "data.dataloader_num_workers=0",
    f"{RANK}=8",
]
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True"]
PPO = ["algorithm.adv_estimator=gae", "critic.model.lora_rank=4", "algorithm.use_kl_in_reward=True",
       "actor_rollout_ref.actor.ppo_mini_batch_size=4"]  # fmt: skip
FP32 = ["actor_rollout_ref.actor.fsdp_config.dtype=float32", "critic.model.fsdp_config.dtype=float32"]


def run(folder: Path, *overrides: str) -> list[dict[str, float]]:
    config = load([*SMALL, f"trainer.default_local_dir={folder}", *overrides]).config
    check(config)
    assert train(config).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def adapter(folder: Path, step: int, role: str = "actor") -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}" / role / WEIGHTS_FILE)


def tiny() -> Any:
    return AutoModelForCausalLM.from_pretrained(ROOT / "paddock/assets/tiny", dtype=torch.float32)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(4, 12)[None]).logits


def test_a_run_by_merged_weights_trusts_its_rollouts_and_resumes(tmp_path):
    keys = [*GRPO, "actor_rollout_ref.model.lora.merge=True", "trainer.test_freq=2", "data.val_max_samples=8"]
    rows = run(tmp_path / "whole", *keys)
    assert all(row["actor/skipped"] == 0 and row["training/rollout_probs_diff_max"] < 1e-5 for row in rows)
    assert not any("timing_per_token_ms/old_log_prob" in row for row in rows), "the trainer computes none"
    assert max(tensor.abs().max() for name, tensor in adapter(tmp_path / "whole", 2).items() if "lora_B" in name) > 0
    run(tmp_path / "parts", *keys, "trainer.total_training_steps=1")
    run(tmp_path / "parts", *keys)
    for name, tensor in adapter(tmp_path / "whole", 2).items():
        assert torch.equal(adapter(tmp_path / "parts", 2)[name], tensor), name


@pytest.mark.parametrize("mini_batch", [8, 4])
def test_log_probs_of_a_run_by_merged_weights_are_the_rollouts(tmp_path, mini_batch):
    keys = ["actor_rollout_ref.model.lora.merge=True", f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}"]
    rows = run(tmp_path, *GRPO, *FP32, *keys)
    told = [row["training/rollout_probs_diff_max"] for row in rows if "training/rollout_probs_diff_max" in row]
    assert all(value < 1e-5 for value in told) and (mini_batch == 8 or len(told) == 2)


@pytest.mark.parametrize("overrides", [GRPO, PPO], ids=["grpo", "ppo"])
def test_a_run_ends_with_a_changed_adapter_and_no_second_copy_of_the_weights(overrides, tmp_path):
    rows = run(tmp_path, *overrides, *FP32)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/skipped"] == 0 for row in rows)
    assert "timing_s/ref" in rows[0]
    assert max(tensor.abs().max() for name, tensor in adapter(tmp_path, 1).items() if "lora_B" in name) > 0
    assert any(not torch.equal(tensor, adapter(tmp_path, 2)[name]) for name, tensor in adapter(tmp_path, 1).items())
    assert not list(tmp_path.rglob("model*.safetensors"))
    if overrides is PPO:
        assert rows[0]["training/rollout_probs_diff_max"] < 1e-5 and rows[1]["training/rollout_probs_diff_max"] < 1e-5
        assert load_file(tmp_path / "global_step_2/critic/value_head.safetensors")["weight"].abs().max() > 0


def test_the_reference_of_a_rank_is_the_model_that_was_loaded(tmp_path):
    config = load([*SMALL, *GRPO, *FP32]).config
    rank = Rank(config, 2, ("actor", "rollout", "reference"))
    actor, reference = rank.actor.engine, rank.frozen["reference"].engine
    assert isinstance(reference, Engine) and reference.model is actor.model
    with torch.no_grad():
        for name, param in actor.model.named_parameters():
            if ".lora_B." in name:
                param.normal_(std=0.2)
    alone = reference_engine(config)
    batch = tiny_batch()
    batch = batch.with_(prompts=batch.prompts % 13, responses=batch.need("responses") % 13)
    want = frozenset({"log_probs"})
    assert torch.equal(reference.forward(batch, want).log_probs, alone.forward(batch, want).log_probs)
    assert not torch.equal(actor.forward(batch, want).log_probs, alone.forward(batch, want).log_probs)


@pytest.mark.parametrize("overrides", [pytest.param(GRPO, marks=pytest.mark.slow), PPO], ids=["grpo", "ppo"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(overrides, tmp_path):
    common = [*overrides, *FP32, "trainer.total_training_steps=4"]
    whole = run(tmp_path / "whole", *common)
    folder = tmp_path / "halves"
    run(folder, *common, "trainer.save_freq=2")
    (folder / "global_step_4").rename(tmp_path / "gone")  # as if the run had been killed after its second step
    again = run(folder, *common)
    for role in ["actor", "critic"] if overrides is PPO else ["actor"]:
        one, other = adapter(tmp_path / "whole", 4, role), adapter(folder, 4, role)
        assert all(torch.equal(one[name], other[name]) for name in one)
    for before, after in zip(whole[2:], again[2:], strict=True):
        timed = ("timing", "perf")
        assert {k: v for k, v in before.items() if not k.startswith(timed)} == {
            k: v for k, v in after.items() if not k.startswith(timed)
        }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    run(folder, *GRPO, *FP32, "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]")
    return folder


def test_peft_loads_a_checkpoint_and_an_export_is_the_merged_model_or_the_adapter(finished, tmp_path, capsys):
    checkpoint = finished / "global_step_2" / "actor"
    base = logits(tiny())
    wanted = logits(peft.PeftModel.from_pretrained(tiny(), checkpoint))
    assert (wanted - base).abs().max() > 1e-3
    assert main(["export", str(finished), str(tmp_path / "merged"), "--dtype", "fp32"]) == 0
    assert main(["export", str(finished), str(tmp_path / "adapter"), "--adapter"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-5, rtol=0)
    assert not (tmp_path / "merged" / WEIGHTS_FILE).exists()
    assert (tmp_path / "adapter" / WEIGHTS_FILE).read_bytes() == (checkpoint / WEIGHTS_FILE).read_bytes()
    assert torch.equal(logits(peft.PeftModel.from_pretrained(tiny(), tmp_path / "adapter")), wanted)
    assert (tmp_path / "adapter" / "tokenizer.json").is_file() and (tmp_path / "merged" / "tokenizer.json").is_file()
    beside = AutoModelForCausalLM.from_pretrained(checkpoint / MERGED, dtype=torch.float32)
    torch.testing.assert_close(logits(beside), wanted, atol=1e-4, rtol=0)
    assert (checkpoint / MERGED / "tokenizer.json").is_file()


def test_a_run_starts_from_an_adapter_and_generation_uses_it(finished, tmp_path):
    start = finished / "global_step_2" / "actor"
    keys = ["actor_rollout_ref.model.lora_rank=0", f"actor_rollout_ref.model.lora_adapter_path={start}"]
    config = load([*SMALL, *GRPO, *FP32, *keys]).config
    engine = actor_engine(config)
    stored = adapter(finished, 2)
    for name, tensor in adapter_of(engine).items():
        assert torch.equal(tensor, stored["base_model.model." + name.replace(".default.", ".")])
    policy = open_policy(Assembly(config, ExitStack()))
    prompts = [Prompt([3, 5, 7], [0, 1])]
    sampling = Sampling(max_tokens=6, stop_tokens=frozenset(), seed=1, step=0, ignore_eos=True)
    assert policy.engine.generate(prompts, sampling) == EmbeddedEngine(engine.model).generate(prompts, sampling)
    rows = run(tmp_path, *GRPO, *FP32, *keys)
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([f"{RANK}=8", "actor_rollout_ref.model.target_modules=[q_porj]"], ["target_modules=q_porj", "q_proj"]),
        ([f"{RANK}=4", "actor_rollout_ref.model.lora_adapter_path=@"], ["lora_rank=4", "has rank 8"]),
        (["actor_rollout_ref.model.lora_adapter_path=/nowhere"], ["lora_adapter_path=/nowhere"]),
        ([f"{RANK}=0", "actor_rollout_ref.model.lora.rank=8"], ["lora.rank=8", "lora_rank=8", "lora_alpha=32"]),
        (["actor_rollout_ref.ref.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"], ["ref.ulysses"]),
    ],
)
def test_mistakes_are_one_message(keys, words, finished, tmp_path):
    start = str(finished / "global_step_2" / "actor")
    with pytest.raises(UserError) as error:
        run(tmp_path, *GRPO, *(key.replace("@", start) for key in keys))
    assert all(word in str(error.value) for word in words), error.value


def test_without_peft_a_run_is_refused_before_it_loads_anything():
    bare = replace(this_machine(), installed=frozenset())
    for key in (f"{RANK}=8", "critic.model.lora_rank=8"):
        config = load(["algorithm.adv_estimator=gae", key]).config
        with pytest.raises(UserError, match="LoRA needs peft"):
            check(config, bare)
    check(load(["algorithm.adv_estimator=gae"]).config, bare)


def test_another_rank_or_scale_does_not_go_on_from_a_checkpoint(finished):
    for change in (
        f"{RANK}=4",
        "actor_rollout_ref.model.lora_alpha=64",
        "actor_rollout_ref.model.target_modules=[q_proj]",
    ):
        with pytest.raises(UserError, match=change.partition("=")[0]):
            run(finished, *GRPO, *FP32, "trainer.total_training_steps=3", change)


@pytest.mark.parametrize("estimator", ["grpo", pytest.param("gae", marks=pytest.mark.slow)])
def test_runs_with_adapters_learn(estimator, tmp_path):
    """Sums of small numbers, as without LoRA: the last steps score well above the first."""
    rows = run(
        tmp_path, f"algorithm.adv_estimator={estimator}", "critic.model.lora_rank=8", "data.train_batch_size=32",
        "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "critic.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.lr=3e-3", "trainer.total_training_steps=16", "trainer.save_freq=-1",
    )  # fmt: skip
    scores = [row["critic/score/mean"] for row in rows]
    assert mean(scores[-4:]) > mean(scores[:4]) + 0.1, scores


@pytest.mark.parametrize("command", ["sft", "rm"])
def test_supervised_training_and_reward_models_take_adapters(command, tmp_path):
    model, rows = save_tiny(tmp_path / "model"), tmp_path / "rows.jsonl"
    made = {
        "sft": [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)],
        "rm": [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(8)],
    }
    rows.write_text("\n".join(json.dumps(row) for row in made[command]))
    settings = [f"model={model}", f"data={rows}", "data.train_batch_size=4", "optim.lr=1e-2", "trainer.save_freq=1",
                "actor_rollout_ref.actor.fsdp_config.dtype=float32", "trainer.total_training_steps=2",
                "trainer.logger=file", f"trainer.default_local_dir={tmp_path / 'run'}", f"{RANK}=4"]  # fmt: skip
    assert main([*(["sft"] if command == "sft" else ["rm", "train"]), *settings]) == 0
    part = "actor" if command == "sft" else "reward_model"
    stored = adapter(tmp_path / "run", 2, part)
    assert all("lora_" in name for name in stored)
    assert max(tensor.abs().max() for name, tensor in stored.items() if "lora_B" in name) > 0
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "run" / "huggingface" / "model.safetensors")
    same = {name for name in before if name in after and torch.equal(before[name], after[name])}
    assert "model.embed_tokens.weight" in same and not any("q_proj.weight" in name for name in same)
    # the same command goes on from the checkpoint and ends where an uninterrupted run does
    again = [word.replace("total_training_steps=2", "total_training_steps=3") for word in settings]
    assert main([*(["sft"] if command == "sft" else ["rm", "train"]), *again]) == 0
    whole = [word.replace(str(tmp_path / "run"), str(tmp_path / "whole")) for word in again]
    assert main([*(["sft"] if command == "sft" else ["rm", "train"]), *whole]) == 0
    one, other = adapter(tmp_path / "run", 3, part), adapter(tmp_path / "whole", 3, part)
    assert all(torch.equal(one[name], other[name]) for name in one)
