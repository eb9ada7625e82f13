"""Every key of the launch surface that people know has an answer here."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from paddock.config import tree
from paddock.errors import UserError
from paddock.loading import foreign
from paddock.loading.load import load

LAUNCH_KEYS = Path(__file__).with_name("launch_keys.tsv")
MISSION_KEYS = [
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.optim.lr",
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.use_kl_in_reward",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "algorithm.adv_estimator",
    "algorithm.kl_penalty",
    "actor_rollout_ref.actor.use_kl_loss",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.filter_overlong_prompts",
    "data.truncation",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.fsdp_config.param_offload",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "trainer.critic_warmup",
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.total_epochs",
]


REFUSED = [
    ("actor_rollout_ref.actor.router_replay.record_file", "a.pt", "null"),
    ("actor_rollout_ref.actor.megatron.router_replay.replay_file", "a.pt", "null"),
    ("actor_rollout_ref.rollout.over_sample_rate", "0.1", "0"),
    ("actor_rollout_ref.rollout.quantization", "fp8", "null"),
    ("actor_rollout_ref.rollout.prometheus.enable", "True", "False"),
    ("reward_model.ulysses_sequence_parallel_size", "2", "1"),
    ("global_profiler.tool", "nsys", "null"),
    ("trainer.esi_redundant_time", "60", "0"),
    *((f"{role}.checkpoint.async_save", "True", "False") for role in ("actor_rollout_ref.actor", "critic")),
    *(
        (f"{role}.megatron.{name}", value, harmless)
        for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        for name, value, harmless in (
            ("virtual_pipeline_model_parallel_size", "2", "1"),
            ("use_dist_checkpointing", "True", "False"),
            ("override_ddp_config", "{grad_reduce_in_fp32: True}", "{}"),
            ("override_mcore_model_config", "{a: 1}", "{}"),
        )
    ),
    ("+actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32", "True", "null"),
]
"""Keys of verl, a value that is refused, and one that asks for nothing."""


@pytest.mark.parametrize(("key", "value", "harmless"), REFUSED)
def test_what_a_key_of_verl_asks_for_is_refused_by_name_and_a_planned_script_goes_on_without_it(key, value, harmless):
    with pytest.raises(UserError) as refused:
        load([f"{key}={value}"])
    name = key.removeprefix("+")
    assert refused.value.key == name and refused.value.fix
    assert any(line.startswith(f"{name}=") and "is ignored" in line for line in load([f"{key}={harmless}"]).warnings)
    planned = load([f"{key}={value}"], here=False).warnings
    assert any(line.startswith(f"training refuses it: {name}=") for line in planned)


@pytest.mark.parametrize("key", MISSION_KEYS)
def test_keys_of_the_guide_are_real_fields(key):
    assert key in tree.leaves()
    assert foreign.rule_for(key) is None


def launch_keys() -> list[list[str]]:
    """Rows of launch_keys.tsv: tree, key, default, number of public scripts that set the key."""
    lines = LAUNCH_KEYS.read_text().splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def test_every_known_key_is_a_field_or_has_a_legacy_rule():
    keys = [key for _, key, _, _ in launch_keys()]
    assert len(keys) == 878 and sum(int(scripts) > 0 for _, _, _, scripts in launch_keys()) == 249
    assert [key for key in keys if tree.leaf_of(key) is None and foreign.rule_for(key) is None] == []


def test_a_whole_upstream_config_file_loads(tmp_path):
    """Every key with its upstream default, as one file: what people dump and keep."""
    given = {key: yaml.safe_load(default or '""') for name, key, default, _ in launch_keys() if name in "F9"}
    given |= {key: "vllm" for key in given if key.endswith("rollout.name")}
    del given["trainer.n_gpus_per_node"]  # eight, which the machine decides here
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({key: None if v == "None" else v for key, v in given.items()}))
    load(["--config-path", str(tmp_path), "--config-name", "all"])


def test_no_field_hides_behind_a_legacy_rule():
    assert [key for key in tree.leaves() if foreign.rule_for(key) is not None] == []


def test_every_mapping_leads_to_a_field():
    mapped = [rule.to for rule in foreign.rules().values() if isinstance(rule, foreign.Mapped | foreign.Converted)]
    assert mapped
    whole = {f"{name}.*" for name in tree.sections()}
    assert [key for key in mapped if tree.leaf_of(key) is None and key not in whole] == []


def test_every_field_has_a_meaning():
    assert [key for key, leaf in tree.leaves().items() if not leaf.metadata.get("meaning")] == []


def test_an_ignored_key_warns_and_a_refused_one_names_reason_and_fix():
    assert load(["data.return_raw_chat=True"]).warnings == [
        "data.return_raw_chat=True is ignored: messages are always kept"
    ]
    assert load(["actor_rollout_ref.rollout.skip_rollout=False"]).warnings
    with pytest.raises(UserError) as error:
        load(["actor_rollout_ref.actor.ppo_micro_batch_size=8"])
    assert error.value.key == "actor_rollout_ref.actor.ppo_micro_batch_size"
    assert "_per_gpu" in error.value.fix
