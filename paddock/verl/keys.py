"""Keys of verl that are no fields here: mapped, converted, ignored with a warning, or refused with a reason.

Nothing is accepted in silence: a key that is neither in the schema nor in this table is an error. `foreign.keys_in`
reads the texts that name keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddock.errors import UserError
from paddock.loading.foreign import (
    Converted,
    Ignored,
    KeyRule,
    Refused,
    RefusedInTraining,
    Several,
    keys_in,
    moved,
    per_device,
    share_of_lr,
    table,
    times_lr,
)
from paddock.loading.rules.distillation import NO_TEACHER_SERVER
from paddock.verl.keys_forks import FORKS

_A, _RO, _M = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))


def _engine(value: Any) -> Any:
    """Returns the strategy that a config group of verl's names for all roles."""
    known = {"dp": "fsdp", "fsdp": "fsdp", "fsdp2": "fsdp2", "megatron": "megatron"}
    if value not in known:
        reason = f"{value} is not a training engine here"
        raise UserError(reason, key="model_engine", value=value, fix="model_engine=fsdp, or model_engine=megatron")
    return known[value]


def _trainer_mode(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how far rollouts run ahead in a mode of verl's V1 trainer."""
    if value == "sync":
        return {}
    if value != "colocate_async":
        reason = "engines in a pool of their own do not run ahead yet"
        raise UserError(reason, key=key, value=value, fix=f"{key}=colocate_async, on the trainer's devices")
    batches = int(given.get("trainer.v1.colocate_async.num_warmup_batches", 1))
    return {"algorithm.staleness": min(batches, int(given.get("trainer.v1.sampler.max_off_policy_threshold", batches)))}


RENAMED = {
    "{@actor,critic}.grad_clip": "{@actor,critic}.optim.clip_grad",
    "OPTIM.lr_decay_style": "OPTIM.lr_scheduler_type",
    "FSDP.mixed_precision.param_dtype": "FSDP.dtype",
    "critic.fsdp.*": "critic.model.fsdp_config.*",
    "{@actor,@ref}.fsdp_config.ulysses_sequence_parallel_size": "{@actor,@ref}.ulysses_sequence_parallel_size",
    "critic.model.fsdp_config.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
    "@actor.use_remove_padding": "@model.use_remove_padding",
    "@actor.policy_loss.{tau_pos,tau_neg}": "@actor.{tau_pos,tau_neg}",
    "@actor.megatron.router_replay.mode": "@actor.router_replay.mode",
    "@model.torch_dtype": "@actor.fsdp_config.dtype",
    "data.{tool_config_path,function_tool_path}": "@rollout.multi_turn.{tool_config_path,function_tool_path}",
    "trainer.train_batch_size": "data.train_batch_size",
    "algorithm.{rollout_is,rollout_is_threshold}": "algorithm.rollout_correction.{rollout_is,rollout_is_threshold}",
    "reward.custom_reward_function.{path,name}": "custom_reward_function.{path,name}",
    "reward_manager.name": "reward_model.reward_manager",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.{num_workers,timeout,compute_score_kwargs}": "reward_model.{num_workers,timeout,compute_score_kwargs}",
    "reward.{max_concurrent,max_rpm,max_tpm}": "reward_model.{max_concurrent,max_rpm,max_tpm}",
    "reward.estimated_tokens_per_request": "reward_model.estimated_tokens_per_request",
    "reward.reward_kwargs.{method,format_score,score}":
        "reward_model.compute_score_kwargs.{method,format_score,score}",
    "reward.reward_kwargs.*": "reward_model.reward_kwargs.*",
    "reward_model.model_path": "reward_model.model.path",
    "reward_model.inference.*": "reward_model.rollout.*",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model.rollout.*": "reward_model.rollout.*",
    "reward.reward_model.{enable,enable_resource_pool}": "reward_model.{enable,enable_resource_pool}",
    "reward.reward_model.{n_gpus_per_node,nnodes}": "reward_model.{n_gpus_per_node,nnodes}",
    "reward_model.sandbox_fusion_url": "reward_model.sandbox_fusion.url",
    "sandbox_fusion.{url,max_concurrent,memory_limit_mb}":
        "reward_model.sandbox_fusion.{url,max_concurrent,memory_limit_mb}",
    "reward.sandbox_fusion.{url,max_concurrent,memory_limit_mb}":
        "reward_model.sandbox_fusion.{url,max_concurrent,memory_limit_mb}",
    "reward_model.overlong_buffer.{enable,len,penalty_factor,log}":
        "reward_model.reward_kwargs.overlong_buffer_cfg.{enable,len,penalty_factor,log}",
}  # fmt: skip
REFUSED: dict[str, KeyRule] = {
    "OPTIM.optimizer_impl": Refused("optimizers come from torch.optim", "leave it out", (None, "torch.optim")),
    "OPTIM.{weight_decay_incr_style,wd_incr_style}": Refused(
        "weight decay is constant", "leave it out", (None, "constant")),
    "FSDP.wrap_policy.min_num_params": Refused("models are sharded layer by layer", "leave it out", (None, 0)),
    "FSDP.mixed_precision": Refused("is a section", "set mixed_precision.reduce_dtype, and dtype"),
    "FSDP.mixed_precision.buffer_dtype": Refused(
        "buffers keep the type in which transformers makes them", "leave it out", (None, "fp32", "float32")),
    "MEGATRON.use_dist_checkpointing": RefusedInTraining(
        "weights start from Hugging Face's files, which any layout reads",
        f"leave it out, and {_M}.path names the Hugging Face folder", (None, False)),
    "MEGATRON.virtual_pipeline_model_parallel_size": RefusedInTraining(
        "a pipeline rank has one run of layers", "leave it out: it changes no result", (None, 1)),
    "MEGATRON.override_ddp_config*": RefusedInTraining(
        "Megatron's DistributedDataParallel is not in use: gradients are summed once a step", "leave it out",
        (None, {})),
    "MEGATRON.override_mcore_model_config*": RefusedInTraining(
        "the model's arguments follow from its Hugging Face config",
        "override_transformer_config, or model.override_config", (None, {})),
    "{@actor,@ref,critic,reward_model}.load_weight": Refused(
        "a role without its weights cannot train", "leave it out", (True,)),
    "{@actor,@actor.megatron}.router_replay.*_file": RefusedInTraining(
        "choices of experts travel within a step, and no file holds them",
        f"leave it out; {_A}.router_replay.mode=R3"),
    "{@model,critic.model}.hf_config_path": Refused(
        "a model's config is read from beside its weights", "put config.json into the model's folder"),
    "{@model,critic.model}.tiled_mlp.*": Refused(
        "the MLP is not tiled", "use ulysses_sequence_parallel_size or a smaller token budget", (None, False, 4)),
    "{@model,critic.model}.mtp.enable*": Refused(
        "multi-token prediction is not trained", "leave it out", (None, False)),
    "@rollout.mtp*": Refused("multi-token prediction is not used", "leave it out"),
    "{@model,critic.model}.lora.type": Refused("adapters are plain LoRA", "leave it out", (None, "lora")),
    "{@model,critic.model}.lora.dropout_position": Refused(
        "dropout stands before the adapter", "leave it out", (None, "pre")),
    "{@model,critic.model}.lora.a2a_experimental": Refused(
        "is an experiment of another system", "leave it out", (None, False)),
    "{@model,critic.model}.lora.lora_B_init_method": Refused(
        "B starts at zero, so that training starts at the model itself", "leave it out", (None, "zero")),
    "@rollout.over_sample_rate": RefusedInTraining(
        "every response that is started is finished", "leave it out", (None, 0)),
    "@rollout.quantization": RefusedInTraining(f"the engine's weights have the type {_RO}.dtype", "leave it out"),
    "@rollout.prometheus.enable": RefusedInTraining(
        "engines serve no metrics", "leave it out; trainer.logger=[console,prometheus] serves those of the run",
        (None, False)),
    "@rollout.mode": Refused(
        "is not a mode", "leave it out: requests always run side by side", (None, "async", "sync")),
    "@rollout.skip_rollout skip.*.enable": Refused(
        "rollouts are not read from a file", "leave it out", (None, False)),
    "@rollout.skip_dump_dir": Refused("rollouts are not read from a file", "leave it out"),
    "@rollout.agent.custom_async_server.*": Refused(
        "engines are chosen by rollout.name", "name an engine, or register one through model.external_lib"),
    "@rollout.engine_kwargs.trtllm*": Refused(
        "TensorRT-LLM is not an engine here", "use rollout.name=vllm", (None, {})),
    "reward_manager.source reward.reward_manager.source reward_model.reward_loop_source": Refused(
        "managers are chosen by name", "leave it out", (None, "register")),
    "reward_manager.module.* reward.reward_manager.module.*": Refused(
        "managers are chosen by name", "write a scorer and name it in custom_reward_function.path",
        (None, "custom_reward_manager")),
    "reward_model.{reward_loop_module_path,reward_loop_class_name}": Refused(
        "managers are chosen by name", "use custom_reward_function.path"),
    "reward_model.ulysses_sequence_parallel_size": RefusedInTraining(
        "one device reads a whole sequence", "leave it out", (None, 1)),
    "data.datagen.*": Refused("rows are not generated while training", "write them to a file beforehand"),
    "trainer.esi_redundant_time": RefusedInTraining(
        "a run does not ask when its lease ends", "leave it out; on SIGTERM a run writes a checkpoint and stops",
        (None, 0)),
    "{@actor,critic}.checkpoint.async_save": RefusedInTraining(
        "checkpoints are written between steps, not while the next one runs",
        "leave it out; a larger trainer.save_freq makes saving cheaper", (None, False)),
    "trainer.default_hdfs_dir": Refused("HDFS is not written", "mount it, and set trainer.default_local_dir"),
    "trainer.del_local_ckpt_after_load": Refused(
        "a checkpoint that was just read may be the only one", "set trainer.max_actor_ckpt_to_keep", (None, False)),
    "trainer.v1.*": Refused("is of another trainer", "leave it out; algorithm.staleness draws batches ahead"),
    "transfer_queue.*": Refused("tensors travel without a queue service", "leave it out", (None, False)),
    "global_profiler.tool": RefusedInTraining(
        "no profiler is started", "leave it out; metrics.jsonl has the seconds of every phase of a step"),
    "OPTIM.lr_scheduler": Refused(
        "is called lr_scheduler_type", "write lr_scheduler_type=constant, linear or cosine"),
    "OPTIM.zero_indexed_step": Refused("the first step has number 0", "leave it out", (None, True)),
    "OPTIM.{use_precision_aware_optimizer,main_grads_dtype,exp_avg_dtype,exp_avg_sq_dtype}": Refused(
        "gradients and moments are float32", "leave it out", (None, False, "fp32", "float32")),
    "OPTIM.master_weight_dtype": Refused("is the engine's", "set fsdp_config.model_dtype"),
    "critic.megatron.router_replay.mode": Refused("the critic's experts are its own", "leave it out", ("disabled",)),
    "critic.megatron.router_replay.*_file": Refused("the critic's experts are its own", "leave it out"),
    "ENGINE.qat.enable @rollout.qat.enable": Refused(
        "quantization-aware training is not built", "leave it out", (None, False)),
    "MEGATRON.dynamic_context_parallel": Refused("ranks share every sequence alike", "leave it out", (None, False)),
    "critic.loss_scale_factor": Refused("the value loss is a mean over tokens", "leave it out"),
    "critic.model.exclude_modules": Refused("no layer of the critic is left out", "set target_modules", (None, [])),
    "critic.model.lora_adapter_path": Refused("the critic's adapter starts at zero", "leave it out"),
    "@rollout.full_determinism": Refused(
        "no key makes an engine's kernels deterministic",
        f"{_RO}.name=embedded actor_rollout_ref.numerics=exact: bits then depend on the seed alone", (None, False)),
    "@rollout.checkpoint_engine.custom_backend_module": Refused("weights travel by one way", "leave it out"),
    "@rollout.disaggregation.enabled": Refused(
        "an engine prefills and decodes on the same devices", "leave it out", (None, False)),
    "data.audio_key": Refused("audio is not read", "leave it out", (None, "audios")),
}  # fmt: skip
IGNORED: dict[str, KeyRule] = {
    "OPTIM.{lr_wsd_decay_style,lr_wsd_decay_steps}": Ignored("schedules are constant, linear or cosine"),
    "OPTIM.use_checkpoint_opt_param_scheduler": Ignored("a resumed run always restores its schedule"),
    "FSDP.use_orig_params": Ignored("FSDP2 always keeps the original parameters"),
    "FSDP.seed": Ignored("every random choice follows trainer.seed"),
    "FSDP.strategy": Ignored("follows the role's strategy"),
    "FSDP.forward_only MEGATRON.forward_only": Ignored("follows from the role"),
    "{FSDP,MEGATRON,@actor,@ref}.entropy_from_logits_with_chunking {FSDP,@actor,@ref}.entropy_checkpointing "
    "ENGINE.entropy_from_logits_chunk_size @actor.sum_pi_squared_checkpointing "
    "distillation.distillation_loss.{use_chunked_topk,chunked_topk_chunk_size}": Ignored(
        "logits are always processed in chunks here"),
    "{FSDP,@actor,@ref}.use_torch_compile": Ignored("layers run by kernels of their own, and none is compiled"),
    "{@ref.fsdp_config,reward_model.model.fsdp_config,@ref.megatron}.optimizer_offload "
    "{@ref,reward_model.model}.fsdp_config.{model_dtype,mixed_precision.reduce_dtype} "
    "@ref.megatron.use_distributed_optimizer": Ignored("a frozen model has no optimizer and no gradients"),
    "reward_model.model.fsdp_config.{offload_policy,reshard_after_forward,fsdp_size,forward_prefetch}": Ignored(
        "a reward model lies whole on each device"),
    "MEGATRON.use_remove_padding": Ignored("Megatron's layers always get packed sequences"),
    "MEGATRON.grad_offload": Ignored("gradients are freed after each optimizer step: none is left to offload"),
    "MEGATRON.{use_mbridge,vanilla_mbridge} {@actor,critic}.checkpoint.mbridge_config*": Ignored(
        "weights are mapped from and to Hugging Face's names by Paddock itself"),
    "MEGATRON.{dist_checkpointing_path,dist_checkpointing_prefix} "
    "MEGATRON.{dist_ckpt_optim_fully_reshardable,distrib_optim_fully_reshardable_mem_efficient}": Ignored(
        "only with use_dist_checkpointing=True, which is refused"),
    "reward_model.megatron.*": Ignored("reward_model.strategy=megatron is not built yet"),
    "{@actor,@ref,critic}.rollout_n @rollout.multi_turn.num_repeat_rollouts": Ignored(f"follows {_RO}.n"),
    "{@actor,@model,reward_model.model,critic.model}.use_fused_kernels "
    "{@model,critic.model}.fused_kernel_options.impl_backend": Ignored(
        "log-probs and entropy are always fused and chunked here"),
    "{critic,reward_model}.nccl_timeout": Ignored("follows actor_rollout_ref.nccl_timeout"),
    "@actor.calculate_sum_pi_squared": Ignored("follows what the estimator needs"),
    "{@ref,@ref.megatron}.router_replay.*": Ignored(
        "the reference is another policy, and chooses experts of its own"),
    "critic.model.lora.merge": Ignored("no rollout engine has the critic's weights"),
    "critic.model.{tokenizer_path,custom_chat_template}": Ignored("the critic reads the policy's tokens"),
    "{@model,critic.model,reward_model.model}.use_shm": Ignored("weights are memory-mapped from where they are"),
    "data.use_shm": Ignored("data files are memory-mapped from where they are"),
    "{@model,critic.model}.use_liger": Ignored("Paddock fuses what Liger would"),
    "{@model,critic.model}.mtp.*": Ignored("multi-token prediction is off"),
    "{@model,critic.model}.lora.freeze_*": Ignored("only adapters are trained under LoRA"),
    "@rollout.calculate_log_probs": Ignored("log-probs of sampled tokens are always returned"),
    "{@rollout,reward_model.rollout}.skip_tokenizer_init": Ignored("engines take tokens and give tokens"),
    "@rollout.layered_summon": Ignored("weights are always streamed layer by layer"),
    "@rollout.layer_name_map.*": Ignored("weights travel under Hugging Face names"),
    "@rollout.moe_tensor_parallel_size": Ignored("experts are split as the engine splits its other matrices"),
    "@rollout.multi_turn.{tokenization_sanity_check_mode,use_inference_chat_template} data.continuous_token.*": Ignored(
        "what was sampled is never tokenised again: see `paddock template`"),
    "@rollout.agent.num_workers": Ignored("conversations are driven where their engine is"),
    "@rollout.quantization_config_file": Ignored(f"only with {_RO}.quantization, which is refused"),
    "@rollout.prometheus.{port,served_model_name,file}": Ignored(
        f"only with {_RO}.prometheus.enable=True, which is refused"),
    "@rollout.trace.backend": Ignored(
        "traces go to no service; trainer.rollout_data_dir=FOLDER keeps every rollout as jsonl"),
    "@rollout.trace.*": Ignored("only with a trace backend"),
    "distillation.teacher_models.*.{inference*,num_replicas} distillation.{n_gpus_per_node,nnodes}": Ignored(
        NO_TEACHER_SERVER),
    "reward_model.use_reward_loop": Ignored("reward_model.launch_reward_fn_async says when scoring begins"),
    "reward_model.rollout.limit_images": Ignored("a judge reads texts alone"),
    "reward_model.rollout.{gpu_memory_utilization,enforce_eager,cudagraph_capture_sizes,load_format} "
    "reward_model.rollout.{enable_chunked_prefill,enable_prefix_caching,disable_log_stats,engine_kwargs*}": Ignored(
        "a judge in this process is run by the actor's modules, without a server of its own"),
    "data.return_raw_chat": Ignored("messages are always kept"),
    "data.return_raw_input_ids": Ignored("prompt tokens are always kept"),
    "data.return_full_prompt": Ignored("the full prompt is always kept"),
    "data.return_multi_modal_inputs": Ignored("images are processed once, for rollout and training"),
    "trainer.use_legacy_worker_impl": Ignored("there is one worker implementation"),
    "trainer.use_v1": Ignored("there is one trainer"),
    "trainer.v1.{colocate_async.num_warmup_batches,sampler.max_off_policy_threshold}": Ignored(
        "algorithm.staleness bounds the age of tokens, and trainer.v1.trainer_mode sets it"),
    "trainer.v1.sampler.max_off_policy_strategy": Ignored(
        "nothing is dropped for its age: no token is older than algorithm.staleness"),
    "{@actor,@ref,@rollout,critic,reward_model}.profile* "
    "global_profiler.{steps,profile_continuous_steps,save_path,global_tool_config*} profile.options.* "
    "trainer.profile_steps": Ignored("no profiler is started: global_profiler.tool is refused"),
    "hydra.*": Ignored("Hydra's own run folder and logging are not used"),
    "OPTIM.master_weights": Ignored("fsdp_config.model_dtype is the type of the master weights"),
    "OPTIM.store_param_remainders": Ignored("master weights are stored whole"),
    "OPTIM.{use_layer_wise_distributed_optimizer,muon_*}": Ignored("the optimizer is AdamW, Adam or SGD"),
    "ENGINE.{pad_to_length,pad_to_length_bucket} MEGATRON.pad_bshd_to_minibatch_max": Ignored(
        "sequences are packed without padding"),
    "ENGINE.qat.* @rollout.qat*": Ignored("quantization-aware training is off"),
    "MEGATRON.max_seqlen_per_dp_cp_rank": Ignored("only with dynamic_context_parallel=True, which is refused"),
    "MEGATRON.use_megatron_fsdp": Ignored(
        "weights are split by the tensor, pipeline and expert sizes, and the optimizer over all ranks, which "
        "takes more memory; strategy=fsdp shards all of them"),
    "{@actor,critic}.checkpoint.strict": Ignored(
        "a checkpoint holds every weight of its model, which either value allows"),
    "@rollout.moe_load_balance_metrics_interval": Ignored("the balance of experts is not measured in a rollout"),
    "@rollout.disaggregation.*": Ignored("prefill and decode are on the same devices"),
    "@rollout.sglang_rollout_mode": Ignored("requests always run side by side in one engine process per group"),
    "@rollout.server.*": Ignored("engines are called without a network in between"),
    "algorithm.filter_groups.max_inflight_gen_batches": Ignored("a batch begins as soon as it is certain to be needed"),
    "skip.*": Ignored("rollouts are not read from a file"),
}  # fmt: skip
ROWS_OVER_ALL = (
    "{@actor.ppo_,@ref.log_prob_,@rollout.log_prob_,critic.ppo_,critic.forward_,reward_model.}micro_batch_size"
)
"""Rows over all devices. How a batch is cut into micro-batches changes no result."""

RULES: dict[str, KeyRule] = {
    **moved(RENAMED),
    **moved({"OPTIM.warmup_style": "OPTIM.lr_scheduler_type"}, lambda value: value or "constant"),
    **moved({"model_engine": "@actor.strategy", "@actor.model_engine": "@actor.strategy"}, _engine),
    **{
        key: Converted(f"{key}_per_gpu", per_device, "rows over all devices; here rows of one")
        for key in keys_in(ROWS_OVER_ALL)
    },
    **{
        f"{section}.{name}": Converted(f"{section}.{ours}", value, about)
        for section in keys_in("OPTIM")
        for name, ours, value, about in (
            ("min_lr", "min_lr_ratio", share_of_lr, "an absolute rate; here a share of lr"),
            ("init_lr_ratio", "lr_warmup_init", times_lr, "a share of lr; here an absolute rate"),
        )
    },
    **{
        key: Refused(f"{engine} is not a training engine here", "use fsdp_config or megatron")
        for engine in ("veomni", "automodel", "torchtitan", "deepspeed", "mindspeed")
        for key in keys_in(f"@actor.{engine}* @ref.{engine}* critic.{engine}*")
    },
    "trainer.v1.trainer_mode": Several(_trainer_mode, "the batches that are drawn ahead"),
    **table(REFUSED),
    **table(IGNORED),
    **FORKS,
}
