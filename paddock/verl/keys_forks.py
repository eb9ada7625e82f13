"""Rules for keys of verl's first surface (early 2025) and of the public projects that grew from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paddock.loading.foreign import Converted, Ignored, KeyRule, Refused, Several, each, moved

_A, _REF, _RO, _M = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout", "model"))
_FSDP = (f"{_A}.fsdp_config", f"{_REF}.fsdp_config", "critic.model.fsdp_config", "reward_model.model.fsdp_config")
_FUNCTION = "custom_reward_function"

_NO_GRADIENTS_LEFT = Ignored("gradients are freed after each optimizer step: none is left to offload")
_ENGINES_OWN = Ignored("the engine decides it by its own memory")
_RECOMPUTES_LAYERS = Ignored("enable_gradient_checkpointing recomputes layer by layer")
_OFF = Ignored("only beside a key that is refused")


def _refused(names: Iterable[str], why: str, fix: str, *harmless: Any) -> dict[str, KeyRule]:
    return dict.fromkeys(names, Refused(why, fix, (None, False, *harmless)))


def _sampled(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """A temperature above 0 sampled in validation, without a key of its own for it."""
    return {f"{_RO}.val_kwargs.temperature": value, f"{_RO}.val_kwargs.do_sample": float(value) > 0}


def _only_newest(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {f"trainer.max_{role}_ckpt_to_keep": 1 for role in ("actor", "critic")} if value else {}


def _of_the_function(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Further arguments of a manager are the function's, if there is one; else the key is as unknown as it was."""
    name = key.removeprefix("reward_model.")
    return {f"{_FUNCTION}.{name}" if given.get(f"{_FUNCTION}.path") else key: value}


ADVICE = "reward loops and batches of your own are written with the library: docs/en/library.md"

FORKS: dict[str, KeyRule] = {
    **moved(
        {
            f"{_RO}.n_val": f"{_RO}.val_kwargs.n",
            f"{_RO}.n_agent": f"{_RO}.n",
            "data.n_samples": f"{_RO}.n",
            f"{_RO}.multi_turn.max_turns": f"{_RO}.multi_turn.max_assistant_turns",
            f"{_REF}.param_offload": f"{_REF}.fsdp_config.param_offload",
            "reward_model.param_offload": "reward_model.model.fsdp_config.param_offload",
            **{
                f"{_A}.{name}": f"{_A}.policy_loss.{name}"
                for name in ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
            },
            f"{_A}.checkpoint.contents": f"{_A}.checkpoint.save_contents",
            "critic.checkpoint.contents": "critic.checkpoint.save_contents",
            "algorithm.grpo_use_std": "algorithm.norm_adv_by_std_in_grpo",
            "data.shuffle_train_dataloader": "data.shuffle",
            "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
            "ray_init.*": "ray_kwargs.ray_init.*",
        }
    ),
    f"{_A}.k_percent": Converted(
        f"{_A}.policy_loss.kl_cov_ratio", lambda key, value, given: float(value) / 100, "in percent; here a share"
    ),
    f"{_RO}.val_temperature": Several(_sampled, "a temperature above 0 samples"),
    **dict.fromkeys(
        ("trainer.remove_previous_ckpt", "trainer.remove_previous_ckpt_in_save"),
        Several(_only_newest, "the newest checkpoint alone is kept"),
    ),
    "reward_model.reward_kwargs.*": Several(_of_the_function, "an argument of the reward function"),
    # without effect on numbers
    **each(_FSDP, {"grad_offload": _NO_GRADIENTS_LEFT}),
    "reward_model.model.fsdp_config.min_num_params": Ignored("a reward model lies whole on each device"),
    "*._target_": Ignored("every section has the class that it has in the schema"),
    f"{_RO}.agent.agent_loop_manager_class": Refused(
        "loops are led by Paddock's own manager", f"{_RO}.agent.agent_loop_config_path"
    ),
    "critic.kl_ctrl.*": Ignored("KL in the reward is weighted by algorithm.kl_ctrl"),
    **dict.fromkeys((f"{_RO}.micro_rollout_batch_size", f"{_RO}.swap_space"), _ENGINES_OWN),
    f"{_RO}.engine_kwargs.swap_space": _ENGINES_OWN,
    f"{_REF}.use_ref": Ignored("the reference is loaded if a KL term has a weight"),
    f"{_REF}.use_remove_padding": Ignored(f"follows {_M}.use_remove_padding"),
    **each((_M, "critic.model"), {"gradient_checkpointing_kwargs.*": _RECOMPUTES_LAYERS}),
    "trainer.max_optim_to_keep": Ignored("a checkpoint is kept whole: trainer.max_actor_ckpt_to_keep"),
    "trainer.wandb_mode": Ignored("WANDB_MODE is wandb's own variable"),
    "trainer.stats_*": Ignored("trainer.rollout_data_dir=FOLDER keeps every rollout as jsonl"),
    "trainer.rl_logging_board_dir": Ignored("trainer.rollout_data_dir=FOLDER keeps every rollout as jsonl"),
    "trainer.tensorboard_dir": Ignored("TENSORBOARD_DIR is the logger's own variable"),
    **each(
        (f"{_A}.megatron", f"{_REF}.megatron", "critic.megatron"),
        {
            "num_layers_per_virtual_pipeline_stage": Refused(
                "a pipeline rank has one run of layers", "leave it out: it changes no result"
            )
        },
    ),
    # what changes training, and is not built
    **_refused(
        ("trainer.rejection_sample",),
        "groups without a difference are drawn anew, not dropped",
        "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc",
    ),
    "trainer.rejection_sample_multiplier": _OFF,
    **_refused(
        ("trainer.remove_clip", "data.filter_truncated", "*.mask_truncated_samples"),
        "responses that were cut are not taken out of the loss",
        "leave it out; reward_model.reward_kwargs.overlong_buffer_cfg.enable=True pays less for them",
    ),
    **_refused(
        (f"{_A}.adaptive_entropy.enabled",), "the weight of the entropy bonus is constant", f"{_A}.entropy_coeff=0.001"
    ),
    f"{_A}.adaptive_entropy.*": _OFF,
    **_refused(
        ("data.filter_accuracy",),
        "groups are filtered if all their rewards are equal, not by bounds of their accuracy",
        "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc",
    ),
    **dict.fromkeys(("data.accuracy_lower_bound", "data.accuracy_upper_bound"), _OFF),
    **_refused(
        ("data.oversample_factor",), "a step draws data.train_batch_size prompts", "algorithm.filter_groups", 1, 1.0
    ),
    **_refused(
        (
            *("reward_model.prime_*", "reward_model.rm_*", "reward_model.mini_batch_size", "reward_model.model.update"),
            *("reward_model.model.beta_train", "reward_model.model.optim.*", "reward_model.model.loss_type"),
            *("reward_model.model.ref_*", "algorithm.adv_params.*", "verifier.*"),
        ),
        "implicit process rewards, which train a reward model beside the policy (PRIME), are not built",
        "a reward model that stays as it is: reward_model.model.path",
    ),
    **_refused(
        (
            *(f"{_RO}.prefix_*", f"{_RO}.n_prefix", f"{_RO}.max_prefix_*", f"{_RO}.min_prefix_*"),
            *(f"{_A}.use_off_policy_*", f"{_A}.off_policy_*", f"{_A}.use_sft_*", f"{_A}.sft_*"),
        ),
        "demonstrations among the responses of a group, off-policy, are not built",
        ADVICE,
    ),
    **_refused((f"{_A}.loss_remove_clip",), "a clip range is always there", f"{_A}.clip_ratio=10: none is reached"),
    **_refused(
        (f"{_A}.loss_remove_token_mean",),
        "sums over tokens are divided by rows, too",
        f"{_A}.loss_agg_mode=seq-mean-token-sum-norm",
    ),
    **_refused(
        ("trainer.experience*", "trainer.exp_*"), "responses of earlier steps are not replayed (ExGRPO)", ADVICE
    ),
    **_refused((f"{_A}.skip_grad_bound",), "a step with a large gradient is clipped", f"{_A}.optim.clip_grad=1.0"),
    **_refused(
        ("do_search", "max_turns", "retriever.*"),
        "a search engine is an environment or a tool here, not a key (Search-R1)",
        "environment=FILE:Class: docs/en/environments.md",
    ),
    **dict.fromkeys(("data.max_obs_length", "data.max_start_length", "algorithm.state_masking.*"), _OFF),
    f"{_A}.state_masking": Ignored("what an environment wrote is never trained on"),
    **_refused(
        ("data.train_data_num", "data.val_data_num"), "a random part of the rows is not drawn", "data.train_max_samples"
    ),
    **_refused(("algorithm.no_think_rl",), "responses are trained on as they were drawn", "leave it out"),
    **_refused(
        (
            *("reward_config.*", "data.reward_impl_version", "reward_model.structure_format_score"),
            *("reward_model.final_format_score", "reward_model.retrieval_score"),
        ),
        "is an argument of a scorer that comes with another project",
        f"{_FUNCTION}.path=FILE {_FUNCTION}.reward_kwargs.NAME=value",
        0,
    ),
    **_refused(("data.system_prompt",), "messages are taken as the rows have them", "write it into the rows"),
    **_refused(("data.min_response_length",), "is no limit here", "leave it out", 0),
    **_refused((f"{_RO}.use_fire_sampling",), "the first token is drawn as all others", "leave it out"),
    f"{_RO}.chat_scheduler": Refused(
        "conversations are led by environments and agent loops",
        f"environment=FILE:Class, or {_RO}.agent.agent_loop_config_path",
        (None, "verl.trainer.naive_chat_scheduler.NaiveChatCompletionScheduler"),
    ),
    **_refused(
        ("async_training.*", "async_resources.*", "async_flow.*", "rollout.nnodes", "rollout.n_gpus_per_node",
         "rollout.total_rollout_steps"),
        "rollouts that run asynchronously to training are not built",
        "python3 -m verl.trainer.main_ppo, which is synchronous",
    ),
    **_refused(
        ("teacher.*", "actor_rollout_ref.teacher.*"),
        "a teacher runs within the run, without a server",
        "distillation.enabled=True distillation.teacher_models: docs/en/distillation.md",
    ),
    f"{_RO}.engine_kwargs.dynamo*": Refused("Dynamo is not an engine here", "use rollout.name=vllm", (None, {})),
    **_refused(
        ("reward_model.elliptical.*",), "rewards of exploration by a covariance are not built",
        "a reward function of your own: custom_reward_function.path",
    ),
    **_refused(
        ("algorithm.rollout_correction.rollout_rs_threshold_lower",),
        "both bounds are written as one value",
        "algorithm.rollout_correction.rollout_rs_threshold=0.99_1.01, and rollout_rs=seq_mean_k1 for `geometric`",
    ),
    **_refused(
        ("algorithm.rollout_correction.rollout_token_veto_threshold",),
        "a single token does not void its response",
        "algorithm.rollout_correction.rollout_rs=token_k1 with a rollout_rs_threshold",
    ),
}  # fmt: skip
