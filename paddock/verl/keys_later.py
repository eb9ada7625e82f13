"""Rules for keys that later versions of the launch surface added (verl's 0.9 line)."""

from __future__ import annotations

from paddock.loading.foreign import Converted, Ignored, KeyRule, Refused, each, moved, per_device, share_of_lr, times_lr

_A, _REF, _RO, _M = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout", "model"))
_C, _CM = "critic", "critic.model"
_OPTIM = (f"{_A}.optim", f"{_C}.optim")
_FSDP = (f"{_A}.fsdp_config", f"{_REF}.fsdp_config", f"{_CM}.fsdp_config")
_MEGATRON = (f"{_A}.megatron", f"{_REF}.megatron", f"{_C}.megatron")

_CHUNKED = Ignored("logits are always processed in chunks here")
_PACKED = Ignored("sequences are packed without padding")
_FUSED = Ignored("log-probs and entropy are always fused and chunked here")
_OWN_MAPPING = Ignored("weights are mapped from and to Hugging Face's names by Paddock itself")
_NO_SUCH_CHECKPOINT = Ignored("only with use_dist_checkpointing=True, which is refused")
_NO_QAT = Refused("quantization-aware training is not built", "leave it out", (None, False))
_ONLY_QAT = Ignored("quantization-aware training is off")
_FLOAT32 = Refused("gradients and moments are float32", "leave it out", (None, False, "fp32", "float32"))
_NOT_MUON = Ignored("the optimizer is AdamW, Adam or SGD")
_FROM_FILE = Refused("rollouts are not read from a file", "leave it out", (None, False))

ROWS_OVER_ALL: dict[str, KeyRule] = {
    key: Converted(f"{key}_per_gpu", per_device, "rows over all devices; here rows of one")
    for key in (
        *(f"{_A}.ppo_micro_batch_size", f"{_REF}.log_prob_micro_batch_size", f"{_RO}.log_prob_micro_batch_size"),
        *("critic.ppo_micro_batch_size", "critic.forward_micro_batch_size", "reward_model.micro_batch_size"),
    )
}
"""How a batch is cut into micro-batches changes no result."""

OPTIM: dict[str, KeyRule] = {
    "min_lr": Converted("min_lr_ratio", share_of_lr, "an absolute rate; here a share of lr"),
    "init_lr_ratio": Converted("lr_warmup_init", times_lr, "a share of lr; here an absolute rate"),
    "lr_scheduler": Refused("is called lr_scheduler_type", "write lr_scheduler_type=constant, linear or cosine"),
    "zero_indexed_step": Refused("the first step has number 0", "leave it out", (None, True)),
    "wd_incr_style": Refused("weight decay is constant", "leave it out", (None, "constant")),
    "use_precision_aware_optimizer": _FLOAT32,
    "main_grads_dtype": _FLOAT32,
    "exp_avg_dtype": _FLOAT32,
    "exp_avg_sq_dtype": _FLOAT32,
    "master_weights": Ignored("fsdp_config.model_dtype is the type of the master weights"),
    "master_weight_dtype": Refused("is the engine's", "set fsdp_config.model_dtype"),
    "store_param_remainders": Ignored("master weights are stored whole"),
    "use_layer_wise_distributed_optimizer": _NOT_MUON,
    "muon_*": _NOT_MUON,
}

LATER: dict[str, KeyRule] = {
    **ROWS_OVER_ALL,
    **{
        f"{section}.{name}": Converted(f"{section}.{rule.to}", rule.value, rule.about)
        if isinstance(rule, Converted)
        else rule
        for section in _OPTIM
        for name, rule in OPTIM.items()
    },
    **moved(
        {
            "data.function_tool_path": f"{_RO}.multi_turn.function_tool_path",
            "reward.reward_model.enable_resource_pool": "reward_model.enable_resource_pool",
            "reward.reward_model.n_gpus_per_node": "reward_model.n_gpus_per_node",
            "reward.reward_model.nnodes": "reward_model.nnodes",
            "sandbox_fusion.url": "reward_model.sandbox_fusion.url",
            "sandbox_fusion.max_concurrent": "reward_model.sandbox_fusion.max_concurrent",
            "sandbox_fusion.memory_limit_mb": "reward_model.sandbox_fusion.memory_limit_mb",
            f"{_A}.policy_loss.tau_pos": f"{_A}.tau_pos",
            f"{_A}.policy_loss.tau_neg": f"{_A}.tau_neg",
            f"{_M}.torch_dtype": f"{_A}.fsdp_config.dtype",
            f"{_A}.megatron.router_replay.mode": f"{_A}.router_replay.mode",
        }
    ),
    f"{_REF}.megatron.router_replay.*": Ignored("the reference is another policy, and chooses experts of its own"),
    "critic.megatron.router_replay.mode": Refused("the critic's experts are its own", "leave it out", ("disabled",)),
    "critic.megatron.router_replay.*_file": Refused("the critic's experts are its own", "leave it out"),
    # training engines
    **each(
        (*_FSDP, *_MEGATRON, _A, _REF),
        {
            "entropy_from_logits_chunk_size": _CHUNKED,
            "pad_to_length": _PACKED,
            "pad_to_length_bucket": _PACKED,
            "qat.enable": _NO_QAT,
            "qat.*": _ONLY_QAT,
        },
    ),
    **each(
        _MEGATRON,
        {
            "entropy_from_logits_with_chunking": _CHUNKED,
            "pad_bshd_to_minibatch_max": _PACKED,
            "dynamic_context_parallel": Refused("ranks share every sequence alike", "leave it out", (None, False)),
            "max_seqlen_per_dp_cp_rank": Ignored("only with dynamic_context_parallel=True, which is refused"),
            "dist_ckpt_optim_fully_reshardable": _NO_SUCH_CHECKPOINT,
            "distrib_optim_fully_reshardable_mem_efficient": _NO_SUCH_CHECKPOINT,
            "use_megatron_fsdp": Ignored(
                "weights are split by the tensor, pipeline and expert sizes, and the optimizer over all ranks, which "
                "takes more memory; strategy=fsdp shards all of them"
            ),
        },
    ),
    **each(
        (f"{_A}.checkpoint", "critic.checkpoint"),
        {
            "mbridge_config*": _OWN_MAPPING,
            "strict": Ignored("a checkpoint holds every weight of its model, which either value allows"),
        },
    ),
    # critic
    "critic.loss_scale_factor": Refused("the value loss is a mean over tokens", "leave it out"),
    "critic.model.hf_config_path": Refused(
        "a model's config is read from beside its weights", "put config.json into the model's folder"
    ),
    "critic.model.custom_chat_template": Ignored("the critic reads the policy's tokens"),
    "critic.model.exclude_modules": Refused("no layer of the critic is left out", "set target_modules", (None, [])),
    "critic.model.lora_adapter_path": Refused("the critic's adapter starts at zero", "leave it out"),
    "critic.model.use_liger": Ignored("Paddock fuses what Liger would"),
    "critic.model.use_fused_kernels": _FUSED,
    "critic.model.fused_kernel_options.impl_backend": _FUSED,
    "critic.model.mtp.enable*": Refused("multi-token prediction is not trained", "leave it out", (None, False)),
    "critic.model.mtp.*": Ignored("multi-token prediction is off"),
    # rollout
    f"{_RO}.full_determinism": Refused(
        "no key makes an engine's kernels deterministic",
        f"{_RO}.name=embedded actor_rollout_ref.numerics=exact: bits then depend on the seed alone",
        (None, False),
    ),
    f"{_RO}.checkpoint_engine.custom_backend_module": Refused("weights travel by one way", "leave it out"),
    f"{_RO}.moe_load_balance_metrics_interval": Ignored("the balance of experts is not measured in a rollout"),
    f"{_RO}.prometheus.file": Ignored(f"only with {_RO}.prometheus.enable=True, which is refused"),
    f"{_RO}.qat.enable": _NO_QAT,
    f"{_RO}.qat*": _ONLY_QAT,
    f"{_RO}.disaggregation.enabled": Refused(
        "an engine prefills and decodes on the same devices", "leave it out", (None, False)
    ),
    f"{_RO}.disaggregation.*": Ignored("prefill and decode are on the same devices"),
    f"{_RO}.sglang_rollout_mode": Ignored("requests always run side by side in one engine process per group"),
    f"{_RO}.server.*": Ignored("engines are called without a network in between"),
    # data, reward, trainer
    "data.audio_key": Refused("audio is not read", "leave it out", (None, "audios")),
    "data.continuous_token.*": Ignored("what was sampled is never tokenised again: see `paddock template`"),
    "reward.reward_manager.source": Refused("managers are chosen by name", "leave it out", (None, "register")),
    "reward.reward_manager.module.*": Refused(
        "managers are chosen by name",
        "write a scorer and name it in custom_reward_function.path",
        (None, "custom_reward_manager"),
    ),
    "algorithm.filter_groups.max_inflight_gen_batches": Ignored("batches are generated one after the other"),
    "skip.*.enable": _FROM_FILE,
    "skip.*": Ignored("rollouts are not read from a file"),
}
