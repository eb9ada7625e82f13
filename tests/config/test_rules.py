"""What cannot run is refused before anything heavy starts, with key, value, reason and fix."""

from __future__ import annotations

import pytest

from paddock.errors import UserError
from paddock.facts.machine import GIB, Machine
from paddock.loading.load import load

LAPTOP = Machine("cpu", 0, None, 16 * GIB, 4, frozenset())
GRPO = "algorithm.adv_estimator=grpo"


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (["algorithm.adv_estimatr=rloo"], "algorithm.adv_estimatr", "did you mean algorithm.adv_estimator"),
        (["rollout.n=5"], "rollout.n", "actor_rollout_ref.rollout.n"),
        (
            ["actor_rollout_ref.actor.optim.leraning_rate=1"],
            "actor_rollout_ref.actor.optim.leraning_rate",
            "no such key",
        ),
        (["+nonsense=1"], "nonsense", "no such key"),
        (["data={train_batch_sise:3}"], "data.train_batch_sise", "data.train_batch_size"),
        (["data=3"], "data", "section"),
        (["data.train_batch_size=many"], "data.train_batch_size", "int"),
        (["data.train_batch_size=null"], "data.train_batch_size", "null"),
        (["data.train_batch_size=0"], "data.train_batch_size", ">= 1"),
        (["data.shuffle=maybe"], "data.shuffle", "bool"),
        (["actor_rollout_ref.actor.optim.lr=nan"], "actor_rollout_ref.actor.optim.lr", "not a number"),
        (["actor_rollout_ref.actor.clip_ratio_c=1"], "actor_rollout_ref.actor.clip_ratio_c", "> 1"),
        (["data.truncation=lefft"], "data.truncation", "did you mean 'left'"),
        (["algorithm.adv_estimator=rlo"], "algorithm.adv_estimator", "did you mean 'rloo'"),
        ([GRPO, "actor_rollout_ref.rollout.n=1"], "actor_rollout_ref.rollout.n", "one response has no other"),
        (["critic.enable=False"], "critic.enable", "needs a critic"),
        (["algorithm.adv_estimator=gdpo"], "algorithm.gdpo_reward_keys", "none is named"),
        (
            [GRPO, "data.train_batch_size=10", "actor_rollout_ref.rollout.n=5", "trainer.n_gpus_per_node=8"],
            "data.train_batch_size",
            "50 rows, which 8 GPUs cannot share evenly",
        ),
        (
            ["data.train_batch_size=100", "actor_rollout_ref.actor.ppo_mini_batch_size=64"],
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "a divisor of 100, such as 50",
        ),
        (
            ["trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=3"],
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            "do not divide",
        ),
        (
            [
                "trainer.n_gpus_per_node=8",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=3",
            ],
            "actor_rollout_ref.rollout.tensor_model_parallel_size",
            "engines of 3",
        ),
        (
            ["trainer.n_gpus_per_node=8", "data.max_response_length=32768"],
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            "at least 33280",
        ),
        (["actor_rollout_ref.rollout.name=trtllm"], "actor_rollout_ref.rollout.name", "known: embedded"),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=dro"],
            "actor_rollout_ref.actor.policy_loss.dro_beta",
            "weight",
        ),
        (["actor_rollout_ref.rollout.top_k=0"], "actor_rollout_ref.rollout.top_k", "-1: all"),
        (["actor_rollout_ref.rollout.stop=['']"], "actor_rollout_ref.rollout.stop", "leave it out"),
        (["actor_rollout_ref.rollout.stop=['a\ufffd']"], "actor_rollout_ref.rollout.stop", "leave it out"),
        (
            ["actor_rollout_ref.rollout.min_tokens=9", "data.max_response_length=8"],
            "actor_rollout_ref.rollout.min_tokens",
            "data.max_response_length=9",
        ),
        (["trainer.test_freq=0"], "trainer.test_freq", "-1: never"),
        (
            ["actor_rollout_ref.actor.checkpoint.load_contents=[model]"],
            "actor_rollout_ref.actor.checkpoint.load_contents",
            "read whole",
        ),
        (
            ["actor_rollout_ref.actor.checkpoint.save_contents=[modle]"],
            "actor_rollout_ref.actor.checkpoint.save_contents",
            "did you mean 'model'",
        ),
        (["critic.checkpoint.load_contents=[model,extra]"], "critic.checkpoint.load_contents", "read whole"),
        (
            [
                "actor_rollout_ref.model.lora_rank=4",
                "actor_rollout_ref.model.lora.merge=True",
                "actor_rollout_ref.rollout.name=hf",
                "trainer.n_gpus_per_node=2",
            ],
            "actor_rollout_ref.model.lora.merge",
            "actor_rollout_ref.rollout.name=embedded",
        ),
        (
            [
                "actor_rollout_ref.model.lora_rank=4",
                "actor_rollout_ref.model.lora.merge=True",
                "actor_rollout_ref.numerics=exact",
                "trainer.n_gpus_per_node=2",
            ],
            "actor_rollout_ref.model.lora.merge",
            "not equal bit for bit",
        ),
        (["trainer.logger=[console,wandbb]"], "trainer.logger", "did you mean 'wandb'"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path", "global_step_N"),
        (["reward_model.enable=True"], "reward_model.enable", "reward_model.model.path"),
        (["custom_reward_function.path=/nowhere/score.py"], "custom_reward_function.path", "no such file"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "algorithm.rollout_correction.rollout_rs_threshold", ""),
        (["a.b=1,2,3"], "a.b=1,2,3", "sweep"),
        (["not an override"], "'not an override'", "key=value"),
        (["data.train_files=[a"], "'data.train_files=[a'", "cannot be read"),
        (["--multirun"], "--multirun", "one command is one run"),
        (["--config-name=mine"], "--config-name", "no mine.yaml"),
        (["trainer.project_name=${trainer.nothing}"], "trainer.project_name", "nothing"),
        (["data.train_batch_size=${data.gen_batch_size}"], None, ""),
    ],
)
def test_refused_with_key_reason_and_fix(arguments, key, said):
    with pytest.raises(UserError) as error:
        load(arguments, LAPTOP)
    assert error.value.fix
    assert said in str(error.value)
    if key is not None:
        assert error.value.key == key
