"""A mixture of experts learns, with the experts of its rollouts replayed and its routers balanced."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
import torch
from conftest import ROOT
from tiny_zoo import save
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2MoeConfig, Qwen2MoeForCausalLM

from paddock.loading.load import load
from paddock.trainer.reinforcement import train

A, RO, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
EXPERTS = [
    f"{A}.router_replay.mode=R3",
    f"{RO}.enable_rollout_routing_replay=True",
    f"++{M}.override_config.router_aux_loss_coef=0.01",
]
COMMON = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=builtin:addition/train",
    "data.val_files=builtin:addition/test",
    "data.max_prompt_length=16",
    "data.max_response_length=6",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
    "data.dataloader_num_workers=0",
]


def run(folder: Path, model: Path, *overrides: str) -> list[dict[str, float]]:
    arguments = [*COMMON, *EXPERTS, f"{M}.path={model}", f"trainer.default_local_dir={folder}", *overrides]
    assert train(load(arguments).config).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_random_experts_learn_which_bytes_are_wanted(tmp_path):
    """Half of all bytes are below 128: from there nearly all of them are."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(letter.isascii() for letter in solution_str) / max(len(solution_str), 1)\n"
    )
    lines = run(
        tmp_path / "run",
        save(tmp_path / "model", "qwen3_moe"),
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
        "data.train_batch_size=8",
        f"{A}.ppo_mini_batch_size=8",
        f"{RO}.n=8",
        f"{A}.optim.lr=0.01",
        f"{A}.fsdp_config.dtype=float32",
        f"{RO}.dtype=float32",
        "trainer.total_training_steps=14",
    )
    rewards = [line["critic/score/mean"] for line in lines]
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.2
    assert max(line["training/rollout_probs_diff_mean"] for line in lines) < 1e-6


def upcycled(folder: Path) -> Path:
    """The embedded default with four experts in the place of each network: all as it was, but for a little noise."""
    dense = AutoModelForCausalLM.from_pretrained(ROOT / "paddock/assets/tiny", dtype=torch.float32)
    fields = {name: value for name, value in dense.config.to_dict().items() if name not in ("architectures", "dtype")}
    fields |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1}
    fields |= {"moe_intermediate_size": dense.config.intermediate_size, "shared_expert_intermediate_size": 8}
    torch.manual_seed(0)
    sparse = Qwen2MoeForCausalLM(Qwen2MoeConfig(**{k: v for k, v in fields.items() if k != "model_type"})).float()
    sparse.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, other in zip(sparse.model.layers, dense.model.layers, strict=True):
            both = torch.cat([other.mlp.gate_proj.weight, other.mlp.up_proj.weight])
            layer.mlp.experts.gate_up_proj.copy_(both + 0.01 * torch.randn_like(layer.mlp.experts.gate_up_proj))
            layer.mlp.experts.down_proj.copy_(other.mlp.down_proj.weight.expand_as(layer.mlp.experts.down_proj))
            layer.mlp.shared_expert.down_proj.weight.zero_()
            layer.mlp.gate.weight.normal_(0, 0.1)
    sparse.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "paddock/assets/tiny").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_experts_learn_to_add(tmp_path):
    lines = run(tmp_path / "run", upcycled(tmp_path / "model"), "data.train_batch_size=64", f"{RO}.n=8",
                f"{A}.ppo_mini_batch_size=64", f"{A}.optim.lr=5e-4", "trainer.total_training_steps=24")  # fmt: skip
    rewards = [line["critic/score/mean"] for line in lines]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.15
    assert lines[-1]["actor/router_dead_experts"] == 0
