"""Keys of other launch surfaces that are no fields here: mapped, ignored with a warning, or refused with a reason.

Nothing is accepted in silence: a key that is neither in the schema nor in this file is an error. A pattern's `*` stands
for any part of a key, also across dots.
"""

from __future__ import annotations

from typing import Any

from paddock.errors import UserError
from paddock.loading.foreign import Ignored, KeyRule, Mapped, Refused, RefusedInTraining, each, moved
from paddock.loading.rules.distillation import NO_TEACHER_SERVER
from paddock.verl.keys_forks import FORKS
from paddock.verl.keys_later import LATER

_A = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_RO = "actor_rollout_ref.rollout"
_M = "actor_rollout_ref.model"
_FSDP = (f"{_A}.fsdp_config", f"{_REF}.fsdp_config", "critic.model.fsdp_config", "reward_model.model.fsdp_config")
_MEGATRON = (f"{_A}.megatron", f"{_REF}.megatron", "critic.megatron")
_FSDP_FROZEN = (_FSDP[1], _FSDP[3])
_OPTIM = (f"{_A}.optim", "critic.optim")


def _engine(value: Any) -> Any:
    """Returns the strategy that a config group of verl's names for all roles."""
    known = {"dp": "fsdp", "fsdp": "fsdp", "fsdp2": "fsdp2", "megatron": "megatron"}
    if value not in known:
        reason = f"{value} is not a training engine here"
        raise UserError(reason, key="model_engine", value=value, fix="model_engine=fsdp, or model_engine=megatron")
    return known[value]


_ALWAYS_CHUNKED = Ignored("logits are always processed in chunks here")
_ALWAYS_FUSED = Ignored("log-probs and entropy are always fused and chunked here")
_FOLLOWS_N = Ignored("follows actor_rollout_ref.rollout.n")
_ONE_SEED = Ignored("every random choice follows trainer.seed")
_NOT_PROFILED = Ignored("no profiler is started: global_profiler.tool is refused")
_NOT_COMPILED = Ignored("layers run by kernels of their own, and none is compiled")
_NEVER_RETOKENISED = Ignored("what was sampled is never tokenised again: see `paddock template`")
_OWN_MAPPING = Ignored("weights are mapped from and to Hugging Face's names by Paddock itself")
_NO_SUCH_CHECKPOINT = Ignored("only with use_dist_checkpointing=True, which is refused")
_NO_OPTIMIZER = Ignored("a frozen model has no optimizer and no gradients")
_WHOLE = Ignored("a reward model lies whole on each device")
_OWN_JUDGE = Ignored("a judge in this process is run by the actor's modules, without a server of its own")
_NO_TEACHER_SERVER = Ignored(NO_TEACHER_SERVER)
_NO_METRICS = Ignored(f"only with {_RO}.prometheus.enable=True, which is refused")
_NO_FILE_OF_EXPERTS = RefusedInTraining(
    "choices of experts travel within a step, and no file holds them", f"leave it out; {_A}.router_replay.mode=R3"
)
_WHOLE_ROLE = Ignored("follows the role's strategy")

RULES: dict[str, KeyRule] = {
    # one meaning, another name
    **moved(
        {
            f"{_A}.grad_clip": f"{_A}.optim.clip_grad",
            "data.tool_config_path": f"{_RO}.multi_turn.tool_config_path",
            "critic.grad_clip": "critic.optim.clip_grad",
            f"{_A}.use_remove_padding": f"{_M}.use_remove_padding",
            f"{_A}.fsdp_config.ulysses_sequence_parallel_size": f"{_A}.ulysses_sequence_parallel_size",
            f"{_REF}.fsdp_config.ulysses_sequence_parallel_size": f"{_REF}.ulysses_sequence_parallel_size",
            "critic.model.fsdp_config.ulysses_sequence_parallel_size": "critic.ulysses_sequence_parallel_size",
            "reward_manager.name": "reward_model.reward_manager",
            "algorithm.rollout_is": "algorithm.rollout_correction.rollout_is",
            "algorithm.rollout_is_threshold": "algorithm.rollout_correction.rollout_is_threshold",
            "trainer.train_batch_size": "data.train_batch_size",
            "reward_model.sandbox_fusion_url": "reward_model.sandbox_fusion.url",
            **{f"{place}.mixed_precision.param_dtype": f"{place}.dtype" for place in _FSDP},
            # later names of the same surface
            "reward.custom_reward_function.path": "custom_reward_function.path",
            "reward.custom_reward_function.name": "custom_reward_function.name",
            "reward.reward_manager.name": "reward_model.reward_manager",
            **{
                f"reward.{name}": f"reward_model.{name}"
                for name in (
                    *("num_workers", "timeout", "compute_score_kwargs", "max_concurrent", "max_rpm", "max_tpm"),
                    "estimated_tokens_per_request",
                )
            },
            **{
                f"reward.reward_kwargs.{name}": f"reward_model.compute_score_kwargs.{name}"
                for name in ("method", "format_score", "score")
            },
            "reward.reward_kwargs.*": "reward_model.reward_kwargs.*",
            "reward_model.model_path": "reward_model.model.path",
            "reward_model.inference.*": "reward_model.rollout.*",
            "critic.fsdp.*": "critic.model.fsdp_config.*",
            "reward.reward_model.rollout.*": "reward_model.rollout.*",
            "reward.reward_model.enable": "reward_model.enable",
            "reward.reward_model.model_path": "reward_model.model.path",
            "reward.sandbox_fusion.url": "reward_model.sandbox_fusion.url",
            "reward.sandbox_fusion.max_concurrent": "reward_model.sandbox_fusion.max_concurrent",
            "reward.sandbox_fusion.memory_limit_mb": "reward_model.sandbox_fusion.memory_limit_mb",
            **{
                f"reward_model.overlong_buffer.{name}": f"reward_model.reward_kwargs.overlong_buffer_cfg.{name}"
                for name in ("enable", "len", "penalty_factor", "log")
            },
        }
    ),
    **{f"{place}.warmup_style": Mapped(f"{place}.lr_scheduler_type", lambda v: v or "constant") for place in _OPTIM},
    **{f"{place}.lr_decay_style": Mapped(f"{place}.lr_scheduler_type") for place in _OPTIM},
    "model_engine": Mapped(f"{_A}.strategy", _engine),
    f"{_A}.model_engine": Mapped(f"{_A}.strategy", _engine),
    # optimizer
    **each(
        _OPTIM,
        {
            "optimizer_impl": Refused("optimizers come from torch.optim", "leave it out", (None, "torch.optim")),
            "weight_decay_incr_style": Refused("weight decay is constant", "leave it out", (None, "constant")),
            "lr_wsd_decay_style": Ignored("schedules are constant, linear or cosine"),
            "lr_wsd_decay_steps": Ignored("schedules are constant, linear or cosine"),
            "use_checkpoint_opt_param_scheduler": Ignored("a resumed run always restores its schedule"),
        },
    ),
    # FSDP and Megatron
    **each(
        _FSDP,
        {
            "wrap_policy.min_num_params": Refused("models are sharded layer by layer", "leave it out", (None, 0)),
            "use_orig_params": Ignored("FSDP2 always keeps the original parameters"),
            "seed": _ONE_SEED,
            "strategy": _WHOLE_ROLE,
            "forward_only": Ignored("follows from the role"),
            "entropy_from_logits_with_chunking": _ALWAYS_CHUNKED,
            "entropy_checkpointing": _ALWAYS_CHUNKED,
            "use_torch_compile": _NOT_COMPILED,
            "mixed_precision": Refused("is a section", "set mixed_precision.reduce_dtype, and dtype"),
            "mixed_precision.buffer_dtype": Refused(
                "buffers keep the type in which transformers makes them", "leave it out", (None, "fp32", "float32")
            ),
        },
    ),
    **each(
        _FSDP_FROZEN,
        {
            "optimizer_offload": _NO_OPTIMIZER,
            "model_dtype": _NO_OPTIMIZER,
            "mixed_precision.reduce_dtype": _NO_OPTIMIZER,
        },
    ),
    **each(
        _FSDP[3:],
        dict.fromkeys(("offload_policy", "reshard_after_forward", "fsdp_size", "forward_prefetch"), _WHOLE),
    ),
    **each(
        _MEGATRON,
        {
            "forward_only": Ignored("follows from the role"),
            "use_remove_padding": Ignored("Megatron's layers always get packed sequences"),
            "grad_offload": Ignored("gradients are freed after each optimizer step: none is left to offload"),
            "use_mbridge": _OWN_MAPPING,
            "vanilla_mbridge": _OWN_MAPPING,
            "dist_checkpointing_path": _NO_SUCH_CHECKPOINT,
            "dist_checkpointing_prefix": _NO_SUCH_CHECKPOINT,
            "use_dist_checkpointing": RefusedInTraining(
                "weights start from Hugging Face's files, which any layout reads",
                f"leave it out, and {_M}.path names the Hugging Face folder",
                (None, False),
            ),
            "virtual_pipeline_model_parallel_size": RefusedInTraining(
                "a pipeline rank has one run of layers", "leave it out: it changes no result", (None, 1)
            ),
            "override_ddp_config*": RefusedInTraining(
                "Megatron's DistributedDataParallel is not in use: gradients are summed once a step",
                "leave it out",
                (None, {}),
            ),
            "override_mcore_model_config*": RefusedInTraining(
                "the model's arguments follow from its Hugging Face config",
                "override_transformer_config, or model.override_config",
                (None, {}),
            ),
        },
    ),
    **each((f"{_REF}.megatron",), {"use_distributed_optimizer": _NO_OPTIMIZER, "optimizer_offload": _NO_OPTIMIZER}),
    "reward_model.megatron.*": Ignored("reward_model.strategy=megatron is not built yet"),
    **each(
        (_A, _REF, "critic", "reward_model"),
        {
            "load_weight": Refused("a role without its weights cannot train", "leave it out", (True,)),
        },
    ),
    **{
        f"{role}.{engine}*": Refused(f"{engine} is not a training engine here", "use fsdp_config or megatron")
        for role in (_A, _REF, "critic")
        for engine in ("veomni", "automodel", "torchtitan", "deepspeed", "mindspeed")
    },
    # actor, reference, critic
    f"{_A}.rollout_n": _FOLLOWS_N,
    f"{_REF}.rollout_n": _FOLLOWS_N,
    "critic.rollout_n": _FOLLOWS_N,
    f"{_A}.entropy_from_logits_with_chunking": _ALWAYS_CHUNKED,
    f"{_A}.entropy_checkpointing": _ALWAYS_CHUNKED,
    f"{_REF}.entropy_from_logits_with_chunking": _ALWAYS_CHUNKED,
    f"{_REF}.entropy_checkpointing": _ALWAYS_CHUNKED,
    f"{_A}.use_fused_kernels": _ALWAYS_FUSED,
    f"{_A}.use_torch_compile": _NOT_COMPILED,
    f"{_REF}.use_torch_compile": _NOT_COMPILED,
    "critic.nccl_timeout": Ignored("follows actor_rollout_ref.nccl_timeout"),
    f"{_A}.calculate_sum_pi_squared": Ignored("follows what the estimator needs"),
    f"{_A}.sum_pi_squared_checkpointing": _ALWAYS_CHUNKED,
    **each((_A, f"{_A}.megatron"), {"router_replay.*_file": _NO_FILE_OF_EXPERTS}),
    f"{_REF}.router_replay.*": Ignored("the reference is another policy, and chooses experts of its own"),
    # model
    f"{_M}.hf_config_path": Refused(
        "a model's config is read from beside its weights", "put config.json into the model's folder"
    ),
    "critic.model.lora.merge": Ignored("no rollout engine has the critic's weights"),
    "critic.model.tokenizer_path": Ignored("the critic reads the policy's tokens"),
    f"{_M}.use_shm": Ignored("weights are memory-mapped from where they are"),
    "critic.model.use_shm": Ignored("weights are memory-mapped from where they are"),
    "reward_model.model.use_shm": Ignored("weights are memory-mapped from where they are"),
    "data.use_shm": Ignored("data files are memory-mapped from where they are"),
    f"{_M}.use_fused_kernels": _ALWAYS_FUSED,
    "reward_model.model.use_fused_kernels": _ALWAYS_FUSED,
    f"{_M}.fused_kernel_options.impl_backend": _ALWAYS_FUSED,
    f"{_M}.use_liger": Ignored("Paddock fuses what Liger would"),
    f"{_M}.tiled_mlp.*": Refused(
        "the MLP is not tiled", "use ulysses_sequence_parallel_size or a smaller token budget", (None, False, 4)
    ),
    "critic.model.tiled_mlp.*": Refused(
        "the MLP is not tiled", "use ulysses_sequence_parallel_size or a smaller token budget", (None, False, 4)
    ),
    f"{_M}.mtp.enable*": Refused("multi-token prediction is not trained", "leave it out", (None, False)),
    f"{_M}.mtp.*": Ignored("multi-token prediction is off"),
    f"{_RO}.mtp*": Refused("multi-token prediction is not used", "leave it out"),
    **each(
        (_M, "critic.model"),
        {
            "lora.type": Refused("adapters are plain LoRA", "leave it out", (None, "lora")),
            "lora.dropout_position": Refused("dropout stands before the adapter", "leave it out", (None, "pre")),
            "lora.a2a_experimental": Refused("is an experiment of another system", "leave it out", (None, False)),
            "lora.freeze_*": Ignored("only adapters are trained under LoRA"),
            "lora.lora_B_init_method": Refused(
                "B starts at zero, so that training starts at the model itself", "leave it out", (None, "zero")
            ),
        },
    ),
    # rollout
    f"{_RO}.over_sample_rate": RefusedInTraining(
        "every response that is started is finished", "leave it out", (None, 0)
    ),
    f"{_RO}.quantization": RefusedInTraining(f"the engine's weights have the type {_RO}.dtype", "leave it out"),
    f"{_RO}.prometheus.enable": RefusedInTraining(
        "engines serve no metrics",
        "leave it out; trainer.logger=[console,prometheus] serves those of the run",
        (None, False),
    ),
    f"{_RO}.mode": Refused("is not a mode", "leave it out: requests always run side by side", (None, "async", "sync")),
    f"{_RO}.calculate_log_probs": Ignored("log-probs of sampled tokens are always returned"),
    f"{_RO}.skip_tokenizer_init": Ignored("engines take tokens and give tokens"),
    f"{_RO}.layered_summon": Ignored("weights are always streamed layer by layer"),
    f"{_RO}.layer_name_map.*": Ignored("weights travel under Hugging Face names"),
    f"{_RO}.moe_tensor_parallel_size": Ignored("experts are split as the engine splits its other matrices"),
    f"{_RO}.skip_rollout": Refused("rollouts are not read from a file", "leave it out", (None, False)),
    f"{_RO}.skip_dump_dir": Refused("rollouts are not read from a file", "leave it out"),
    f"{_RO}.multi_turn.num_repeat_rollouts": _FOLLOWS_N,
    f"{_RO}.multi_turn.tokenization_sanity_check_mode": _NEVER_RETOKENISED,
    f"{_RO}.multi_turn.use_inference_chat_template": _NEVER_RETOKENISED,
    f"{_RO}.agent.num_workers": Ignored("conversations are driven where their engine is"),
    f"{_RO}.quantization_config_file": Ignored(f"only with {_RO}.quantization, which is refused"),
    f"{_RO}.prometheus.port": _NO_METRICS,
    f"{_RO}.prometheus.served_model_name": _NO_METRICS,
    f"{_RO}.trace.backend": Ignored(
        "traces go to no service; trainer.rollout_data_dir=FOLDER keeps every rollout as jsonl"
    ),
    f"{_RO}.trace.*": Ignored("only with a trace backend"),
    f"{_RO}.agent.custom_async_server.*": Refused(
        "engines are chosen by rollout.name", "name an engine, or register one through model.external_lib"
    ),
    f"{_RO}.engine_kwargs.trtllm*": Refused("TensorRT-LLM is not an engine here", "use rollout.name=vllm", (None, {})),
    # distillation
    "distillation.teacher_models.*.inference*": _NO_TEACHER_SERVER,
    "distillation.teacher_models.*.num_replicas": _NO_TEACHER_SERVER,
    "distillation.n_gpus_per_node": _NO_TEACHER_SERVER,
    "distillation.nnodes": _NO_TEACHER_SERVER,
    "distillation.distillation_loss.use_chunked_topk": _ALWAYS_CHUNKED,
    "distillation.distillation_loss.chunked_topk_chunk_size": _ALWAYS_CHUNKED,
    # reward
    "reward_manager.source": Refused("managers are chosen by name", "leave it out", (None, "register")),
    "reward_manager.module.*": Refused(
        "managers are chosen by name",
        "write a scorer and name it in custom_reward_function.path",
        (None, "custom_reward_manager"),
    ),
    "reward_model.use_reward_loop": Ignored("reward_model.launch_reward_fn_async says when scoring begins"),
    "reward_model.reward_loop_source": Refused("managers are chosen by name", "leave it out", (None, "register")),
    "reward_model.reward_loop_module_path": Refused("managers are chosen by name", "use custom_reward_function.path"),
    "reward_model.reward_loop_class_name": Refused("managers are chosen by name", "use custom_reward_function.path"),
    "reward_model.ulysses_sequence_parallel_size": RefusedInTraining(
        "one device reads a whole sequence", "leave it out", (None, 1)
    ),
    "reward_model.nccl_timeout": Ignored("follows actor_rollout_ref.nccl_timeout"),
    "reward_model.rollout.limit_images": Ignored("a judge reads texts alone"),
    "reward_model.rollout.skip_tokenizer_init": Ignored("engines take tokens and give tokens"),
    **each(
        ("reward_model.rollout",),
        dict.fromkeys(
            (
                *("gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "load_format"),
                *("enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats", "engine_kwargs*"),
            ),
            _OWN_JUDGE,
        ),
    ),
    # data
    "data.return_raw_chat": Ignored("messages are always kept"),
    "data.return_raw_input_ids": Ignored("prompt tokens are always kept"),
    "data.return_full_prompt": Ignored("the full prompt is always kept"),
    "data.return_multi_modal_inputs": Ignored("images are processed once, for rollout and training"),
    "data.datagen.*": Refused("rows are not generated while training", "write them to a file beforehand"),
    # trainer
    "trainer.esi_redundant_time": RefusedInTraining(
        "a run does not ask when its lease ends",
        "leave it out; on SIGTERM a run writes a checkpoint and stops",
        (None, 0),
    ),
    **each(
        (f"{_A}.checkpoint", "critic.checkpoint"),
        {
            "async_save": RefusedInTraining(
                "checkpoints are written between steps, not while the next one runs",
                "leave it out; a larger trainer.save_freq makes saving cheaper",
                (None, False),
            )
        },
    ),
    "trainer.default_hdfs_dir": Refused("HDFS is not written", "mount it, and set trainer.default_local_dir"),
    "trainer.del_local_ckpt_after_load": Refused(
        "a checkpoint that was just read may be the only one", "set trainer.max_actor_ckpt_to_keep", (None, False)
    ),
    "trainer.use_legacy_worker_impl": Ignored("there is one worker implementation"),
    "trainer.use_v1": Ignored("there is one trainer"),
    "trainer.v1.*": Refused("there is one trainer, and it is synchronous", "leave it out"),
    "transfer_queue.*": Refused("tensors travel without a queue service", "leave it out", (None, False)),
    **each((_A, _REF, _RO, "critic", "reward_model"), {"profile*": _NOT_PROFILED}),
    "global_profiler.tool": RefusedInTraining(
        "no profiler is started", "leave it out; metrics.jsonl has the seconds of every phase of a step"
    ),
    **each(
        ("global_profiler",),
        dict.fromkeys(("steps", "profile_continuous_steps", "save_path", "global_tool_config*"), _NOT_PROFILED),
    ),
    "trainer.profile_steps": _NOT_PROFILED,
    "profile.options.*": _NOT_PROFILED,
    "hydra.*": Ignored("Hydra's own run folder and logging are not used"),
    **LATER,
    **FORKS,
}
