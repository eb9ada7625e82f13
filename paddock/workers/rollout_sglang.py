"""SGLang as the config asks for it."""

from __future__ import annotations

import json
from typing import Any

from paddock.config.schema import Config
from paddock.config.topology import rolls_out_apart
from paddock.core.device import compute_dtype, device_of
from paddock.engines.rollout.sglang import SGLangEngine
from paddock.errors import UserError
from paddock.models.load import model_folder

KEY = "actor_rollout_ref.rollout"


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
