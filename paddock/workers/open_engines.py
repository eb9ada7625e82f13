"""Rollout engines as the config asks for them: which class, with which arguments."""

from __future__ import annotations

import json
from typing import Any

from paddock.config.roles import RolloutConfig
from paddock.config.schema import Config
from paddock.config.topology import rolls_out_apart
from paddock.core.device import compute_dtype, device_of
from paddock.engines.rollout.base import CopyEngine, RolloutEngine
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.rollout.sglang import SGLangEngine
from paddock.engines.rollout.vllm import VLLMEngine
from paddock.engines.train.single import SingleEngine
from paddock.errors import UserError
from paddock.models.adapters import Adapters
from paddock.models.load import model_folder

KEY = "actor_rollout_ref.rollout"


def rollout_engine(config: Config, engine: SingleEngine) -> RolloutEngine:
    rollout = config.actor_rollout_ref.rollout
    assert rollout.max_num_seqs is not None
    if rollout.name == "embedded":
        return EmbeddedEngine(
            engine.rollout_model,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            max_model_len=rollout.max_model_len,
            enforce_eager=rollout.enforce_eager,
            free_cache=rollout.free_cache_engine,
            record_experts=rollout.enable_rollout_routing_replay,
        )
    if rollout.name == "hf":
        return HFEngine(
            engine.rollout_model,
            max_num_seqs=rollout.max_num_seqs,
            record_experts=rollout.enable_rollout_routing_replay,
        )
    return copy_engine(config, engine.adapters)


def copy_engine(config: Config, adapters: Adapters | None = None) -> CopyEngine:
    """One with weights of its own; without `adapters` it takes them merged."""
    if config.actor_rollout_ref.rollout.name == "vllm":
        return open_vllm(config, adapters)
    assert config.actor_rollout_ref.rollout.name == "sglang"
    return open_sglang(config)


def open_vllm(config: Config, adapters: Adapters | None = None) -> VLLMEngine:
    model, rollout, device = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.trainer.device
    path = model_folder(str(model.path))
    arguments: dict[str, Any] = {
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.override_config),
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "pipeline_parallel_size": rollout.pipeline_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "max_model_len": rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager or device == "cpu",
        "load_format": rollout.load_format,
        "scheduling_policy": rollout.scheduling_policy,
        "disable_log_stats": rollout.disable_log_stats,
        "logprobs_mode": logprobs_mode(rollout),
    }
    if rollout.cudagraph_capture_sizes:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": list(rollout.cudagraph_capture_sizes)}
    return VLLMEngine(
        str(path),
        dtype=compute_dtype(rollout.dtype, device_of(device)),
        device=str(device),
        arguments=arguments,
        extra=dict(rollout.engine_kwargs.vllm),
        free_cache=rollout.free_cache_engine and not rolls_out_apart(config),
        staged_wake=rollout.multi_stage_wake_up,
        bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
        adapter_rank=adapters.rank if adapters and not model.lora.merge else 0,
    )


def logprobs_mode(rollout: RolloutConfig) -> str:
    """vLLM's raw ones are before temperature and filters, its processed ones after both. Ours are between."""
    key, warm = "actor_rollout_ref.rollout", rollout.temperature != 1.0
    filtered = rollout.do_sample and (rollout.top_k > 0 or rollout.top_p < 1.0 or rollout.min_p > 0.0)
    if warm and filtered:
        raise UserError(
            "beside top_k, top_p or min_p, vLLM cannot report log-probs of the distribution before they cut it",
            key=f"{key}.temperature",
            value=rollout.temperature,
            fix=f"{key}.temperature=1.0; or {key}.top_k=-1 {key}.top_p=1.0 {key}.min_p=0; or {key}.name=embedded",
        )
    if warm and rollout.logprobs_mode == "raw_logprobs":
        raise UserError(
            f"log-probs would not be those of temperature {rollout.temperature}, at which tokens are drawn",
            key=f"{key}.logprobs_mode",
            value=rollout.logprobs_mode,
            fix=f"{key}.logprobs_mode=processed_logprobs",
        )
    return "raw_logprobs" if filtered else rollout.logprobs_mode


def open_sglang(config: Config) -> SGLangEngine:
    """Its log-probs are after temperature and before filters: those that training needs, whatever the sampling."""
    model, rollout, device = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.trainer.device
    if rollout.logprobs_mode == "raw_logprobs" and rollout.temperature != 1.0:
        raise UserError(
            f"log-probs would not be those of temperature {rollout.temperature}, at which tokens are drawn",
            key=f"{KEY}.logprobs_mode",
            value=rollout.logprobs_mode,
            fix=f"{KEY}.logprobs_mode=processed_logprobs",
        )
    if rollout.scheduling_policy != "fcfs":
        raise UserError(
            "responses have no priorities",
            key=f"{KEY}.scheduling_policy",
            value=rollout.scheduling_policy,
            fix=f"{KEY}.scheduling_policy=fcfs, or an order of SGLang's own by {KEY}.engine_kwargs.sglang",
        )
    arguments: dict[str, Any] = {
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": json.dumps(dict(model.override_config)),
        "tp_size": rollout.tensor_model_parallel_size,
        "pp_size": rollout.pipeline_model_parallel_size,
        "ep_size": rollout.expert_parallel_size,
        "mem_fraction_static": rollout.gpu_memory_utilization,
        "max_running_requests": rollout.max_num_seqs,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "chunked_prefill_size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "context_length": rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "disable_cuda_graph": rollout.enforce_eager or device == "cpu",
        "load_format": rollout.load_format,
        "random_seed": rollout.seed,
        "log_level": "error" if rollout.disable_log_stats else "info",
    }
    if rollout.cudagraph_capture_sizes:
        arguments["cuda_graph_bs"] = list(rollout.cudagraph_capture_sizes)
    return SGLangEngine(
        str(model_folder(str(model.path))),
        dtype=compute_dtype(rollout.dtype, device_of(device)),
        device=str(device),
        arguments=arguments,
        extra=dict(rollout.engine_kwargs.sglang),
        free_cache=rollout.free_cache_engine and not rolls_out_apart(config),
        staged_wake=rollout.multi_stage_wake_up,
        bucket_bytes=rollout.checkpoint_engine.update_weights_bucket_megabytes << 20,
    )
