"""Whole runs under Megatron: what `single` learns, it learns; its checkpoints resume and export."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core: make test-megatron")

import on_cpu
import torch
from conftest import ROOT
from devices import DEVICE, ON_DEVICE
from megatron.core import parallel_state
from tiny_models import moved_copy
from transformers import AutoModelForCausalLM

from paddock.commands.export import export
from paddock.commands.preflight import check
from paddock.config.topology import in_one_process
from paddock.engines.train.open import actor_engine, backend_of
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.loading.rules import Scope, require
from paddock.trainer import reinforcement as runs

MEGATRON = "--config-name=ppo_megatron_trainer"
SMALL = [
    "data.train_batch_size=8", "data.val_max_samples=8", "actor_rollout_ref.rollout.n=4", "trainer.test_freq=-1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.val_before_train=False", "trainer.logger=[file]",
    "data.dataloader_num_workers=0", *ON_DEVICE, "trainer.total_training_steps=2",
    # AdamW divides by the gradient's own size: without a floor it makes much of the last bit of a tiny one
    "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3",
    "++critic.optim.override_optimizer_config.eps=1e-3",
]  # fmt: skip
PPO = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True"]
GRPO = ["algorithm.adv_estimator=grpo"]
TAUGHT = [
    *GRPO, "distillation.enabled=True", "distillation.teacher_models.teacher_model.model_path={teacher}",
    "distillation.distillation_loss.loss_mode=forward_kl_topk", "distillation.distillation_loss.topk=8",
]  # fmt: skip
A = "actor_rollout_ref.actor"


def run(folder: Path, *keys: str) -> list[dict[str, Any]]:
    teacher = folder.parent / "teacher"
    if TAUGHT[-1] in keys and not teacher.exists():
        moved_copy(ROOT / "paddock/assets/tiny", teacher, 1)
    keys = tuple(key.format(teacher=teacher) if key in TAUGHT else key for key in keys)
    config = load([*SMALL, f"trainer.default_local_dir={folder}", *keys], chooses=True).config
    if in_one_process(config):
        check(config)
    assert runs.train(config).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_alike(got: list[dict[str, Any]], want: list[dict[str, Any]], places: float = 1e-4) -> None:
    for mine, theirs in zip(got, want, strict=True):
        for name, value in theirs.items():
            if name.startswith(("actor/", "critic/", "reward/", "response_length/", "distillation/")):
                assert mine[name] == pytest.approx(value, abs=places), name


@pytest.mark.parametrize("keys", [PPO, GRPO, TAUGHT], ids=["ppo", "grpo", "teacher"])
def test_a_run_learns_what_single_learns(tmp_path, keys):
    want = run(tmp_path / "single", *keys)
    assert_alike(run(tmp_path / "megatron", MEGATRON, *keys), want)


def test_a_resumed_run_equals_the_uninterrupted_one_and_exports(tmp_path):
    keys = [MEGATRON, *GRPO, "trainer.save_freq=2", "trainer.total_training_steps=4"]
    want = run(tmp_path / "whole", *keys)
    run(tmp_path / "cut", *keys, "trainer.total_training_steps=2")
    assert_alike(run(tmp_path / "cut", *keys), want, places=0.0)
    export(tmp_path / "cut", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(load([]).config.actor_rollout_ref.model.path.replace(
        "builtin:", "paddock/assets/"), dtype=torch.float32)  # fmt: skip
    moved = [name for (name, a), b in zip(model.named_parameters(), start.parameters(), strict=True) if (a != b).any()]
    assert moved


RAY = ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_cpus=2",
       "actor_rollout_ref.model.external_lib=patched_on_cpu"]  # fmt: skip


@pytest.mark.parametrize(
    "keys",
    [
        [*PPO, f"{A}.megatron.tensor_model_parallel_size=2", "critic.megatron.tensor_model_parallel_size=2"],
        [*GRPO, f"{A}.megatron.pipeline_model_parallel_size=2", f"{A}.megatron.param_offload=True"],
        [*TAUGHT, f"{A}.megatron.tensor_model_parallel_size=2"],
        [*TAUGHT, f"{A}.megatron.pipeline_model_parallel_size=2"],
    ],
    ids=["tensor", "pipeline", "teacher, tensor", "teacher, pipeline"],
)
def test_two_workers_learn_what_single_learns(tmp_path, monkeypatch, keys):
    pytest.importorskip("ray", reason="needs the extra `ray`")
    here = Path(__file__).resolve().parent
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent}:{here.parent.parent}:{before}")
    want = run(tmp_path / "single", *(key for key in keys if ".megatron." not in key))
    assert_alike(run(tmp_path / "megatron", MEGATRON, *RAY, *keys), want)


def test_adapters_learn_beside_a_reference_without_them(tmp_path):
    rows = run(tmp_path, MEGATRON, *GRPO, f"{A}.use_kl_loss=True", "actor_rollout_ref.model.lora.rank=8",
               f"{A}.optim.lr=0.01", f"{A}.ppo_mini_batch_size=8")  # fmt: skip
    assert rows[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6) and rows[1]["actor/kl_loss"] > 1e-4


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a CPU's")
def test_several_processes_on_a_cpu_are_refused_before_anything_starts():
    config = load([*SMALL, MEGATRON, *GRPO, *RAY, f"{A}.megatron.tensor_model_parallel_size=2"], chooses=True).config
    with pytest.raises(UserError, match="in one process only"):
        check(config)


BROKEN_RULES = [
    (f"{A}.megatron.dtype=float16", "loss scale"),
    ("actor_rollout_ref.numerics=exact", "numerics"),
    (f"{A}.router_replay.mode=R2", "router_replay"),
]
REFUSED = [
    ("+override_transformer_config.moe_aux_loss_coeff=0.01", "split"),
    ("+override_transformer_config.hidden_size=8", "follows from the model"),
    ("+override_transformer_config.recompute_granularty=full", "no such field"),
    ("+override_transformer_config.recompute_granularity=some", "some"),
    ("expert_model_parallel_size=2", "no experts|do not divide"),
]


@pytest.mark.parametrize(("setting", "reason"), BROKEN_RULES)
def test_rules_refuse_what_megatron_does_not(setting, reason):
    with pytest.raises(UserError, match=reason) as refusal:
        require(load([*SMALL, MEGATRON, *GRPO, setting], chooses=True).config, Scope.TRAINING)
    assert setting.partition("=")[0] in str(refusal.value)


@pytest.mark.parametrize(("key", "reason"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(key, reason):
    sign = "+" if key.startswith("+") else ""
    config = load([*SMALL, MEGATRON, *GRPO, f"{sign}{A}.megatron.{key.removeprefix('+')}"], chooses=True).config
    parallel_state.destroy_model_parallel()
    with pytest.raises(UserError, match=reason) as refusal:
        actor_engine(config, backend=backend_of(config, alone=True))
    assert f"{A}.megatron.{key.removeprefix('+').partition('=')[0].partition('.')[0]}" in str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["actor_rollout_ref.model.lora.rank=4", "actor_rollout_ref.model.lora.dropout=0.1"], "lora.dropout"),
        (["actor_rollout_ref.model.lora.rank=4", "actor_rollout_ref.model.lora.target_modules=[q_proj]"], "q_proj"),
    ],
)
def test_what_other_engines_do_and_this_one_does_not_is_refused_by_name(keys, reason):
    config = load([*SMALL, MEGATRON, *GRPO, *keys], chooses=True).config
    with pytest.raises(UserError, match=reason):
        actor_engine(config, backend=backend_of(config, alone=True))


def test_recomputed_layers_give_the_same_run(tmp_path):
    want = run(tmp_path / "plain", MEGATRON, *GRPO)
    again = [f"+{A}.megatron.override_transformer_config.recompute_{name}" for name in
             ("granularity=full", "method=block", "num_layers=1")]  # fmt: skip
    on_cpu.patch()
    assert_alike(run(tmp_path / "again", MEGATRON, *GRPO, *again), want)
