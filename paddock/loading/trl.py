"""Where the arguments of TRL's GRPOConfig and GRPOTrainer are here: what people who come from TRL type first.

docs/en/from_trl.md has the same, with defaults and notes, for every argument (`tests/docs/test_from_trl.py`).
"""

from __future__ import annotations

_A, _M, _RO = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_IS = "algorithm.rollout_correction.rollout_is"

ARGUMENTS: dict[str, str] = {
    "num_generations": f"{_RO}.n",
    "num_generations_eval": f"{_RO}.val_kwargs.n",
    "max_completion_length": "data.max_response_length",
    "max_prompt_length": "data.max_prompt_length",
    "learning_rate": f"{_A}.optim.lr",
    "lr_scheduler_type": f"{_A}.optim.lr_scheduler_type",
    "warmup_steps": f"{_A}.optim.lr_warmup_steps",
    "warmup_ratio": f"{_A}.optim.lr_warmup_steps_ratio",
    "weight_decay": f"{_A}.optim.weight_decay",
    "max_grad_norm": f"{_A}.optim.clip_grad",
    "beta": f"{_A}.kl_loss_coef",
    "num_iterations": f"{_A}.ppo_epochs",
    "epsilon": f"{_A}.clip_ratio",
    "epsilon_high": f"{_A}.clip_ratio_high",
    "delta": f"{_A}.clip_ratio_c",
    "entropy_coef": f"{_A}.entropy_coeff",
    "loss_type": f"{_A}.loss_agg_mode",
    "sapo_temperature_pos": f"{_A}.tau_pos",
    "sapo_temperature_neg": f"{_A}.tau_neg",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "reward_funcs": "custom_reward_function.path",
    "environment_factory": "environment",
    "max_tool_calling_iterations": f"{_RO}.multi_turn.max_assistant_turns",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "train_dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "shuffle_dataset": "data.shuffle",
    "per_device_train_batch_size": "data.train_batch_size",
    "generation_batch_size": "data.train_batch_size",
    "gradient_accumulation_steps": f"{_A}.ppo_mini_batch_size",
    "per_device_eval_batch_size": "data.val_batch_size",
    "num_train_epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "eval_steps": "trainer.test_freq",
    "eval_on_start": "trainer.val_before_train",
    "save_steps": "trainer.save_freq",
    "save_total_limit": "trainer.max_actor_ckpt_to_keep",
    "output_dir": "trainer.default_local_dir",
    "run_name": "trainer.experiment_name",
    "report_to": "trainer.logger",
    "resume_from_checkpoint": "trainer.resume_from_path",
    "use_vllm": f"{_RO}.name",
    "vllm_mode": "actor_rollout_ref.hybrid_engine",
    "vllm_gpu_memory_utilization": f"{_RO}.gpu_memory_utilization",
    "vllm_tensor_parallel_size": f"{_RO}.tensor_model_parallel_size",
    "vllm_max_model_length": f"{_RO}.max_model_len",
    "vllm_enable_sleep_mode": f"{_RO}.free_cache_engine",
    "vllm_importance_sampling_correction": _IS,
    "vllm_importance_sampling_mode": _IS,
    "vllm_importance_sampling_clip_max": f"{_IS}_threshold",
    "vllm_importance_sampling_clip_min": f"{_IS}_threshold",
    "gradient_checkpointing": f"{_M}.enable_gradient_checkpointing",
    "bf16": f"{_A}.fsdp_config.dtype",
    "lora_r": f"{_M}.lora_rank",
}
"""Argument -> the key that it is here; the page says what its values become."""


def key_of(argument: str) -> str | None:
    """Returns the key of an argument of TRL's, by its last name: `training_args.num_generations` is one too."""
    return ARGUMENTS.get(argument.lstrip("+~-").rpartition(".")[2])
