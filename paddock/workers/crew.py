"""The roles that live in one process, and what is asked of them. A group calls these methods by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paddock.config.roles import RolloutConfig
from paddock.config.schema import Config
from paddock.config.topology import rolls_out_apart, trains_adapters
from paddock.core.batch import Batch
from paddock.core.device import compute_dtype, device_name, device_of, peak_memory, peak_reserved
from paddock.engines.rollout.base import Completion, CopyEngine, Prompt, RolloutEngine, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.rollout.vllm import VLLMEngine
from paddock.engines.train.base import Place, Want
from paddock.engines.train.settings import reference_budget
from paddock.engines.train.single import SingleEngine
from paddock.errors import UserError
from paddock.models.adapters import Adapters
from paddock.models.load import model_folder
from paddock.workers.outgoing import Bucket, Outgoing
from paddock.workers.probe import sync
from paddock.workers.reward_model import ModelScorer, open_reward_model
from paddock.workers.rollout_sglang import open_sglang
from paddock.workers.worker import CriticWorker, Metrics, PolicyWorker, UpdatePlan


class Crew:
    """`roles` of one pool, on this process's device; `engines` is how it trains: alone, or with other ranks."""

    def __init__(
        self, config: Config, total_steps: int, roles: Sequence[str], engines: type[SingleEngine] = SingleEngine
    ):
        self.workers: dict[str, PolicyWorker | CriticWorker] = {}
        self.rollout: RolloutEngine | None = None
        self.awake = ExitStack()
        self.outgoing: Outgoing | None = None
        self.limits, self.config = config.actor_rollout_ref.rollout, config
        self.scorer: ModelScorer | None = None
        if "actor" in roles:
            self.workers["actor"] = PolicyWorker(engines.for_actor(config, total_steps), config)
        if "rollout" in roles:
            self.rollout = rollout_engine(config, self.actor_engine) if "actor" in roles else copy_engine(config)
        elif "actor" in roles:
            self.outgoing = Outgoing(self.actor_engine, config)
        if "reference" in roles:
            self.workers["reference"] = PolicyWorker(self.reference_engine(config, engines), config)
        if "critic" in roles:
            self.workers["critic"] = CriticWorker(engines.for_critic(config, total_steps), config)
        for worker in self.workers.values():
            worker.engine.move("host")  # until it is asked for

    def reference_engine(self, config: Config, engines: type[SingleEngine]) -> SingleEngine:
        """Under LoRA the actor's own, with its adapters off: always in the actor's pool."""
        if not trains_adapters(config):
            return engines.for_reference(config)
        return self.actor_engine.without_adapters(reference_budget(config))

    @property
    def actor_engine(self) -> SingleEngine:
        engine = self.workers["actor"].engine
        assert isinstance(engine, SingleEngine)
        return engine

    def engines(self) -> dict[str, str]:
        """What runs each role here, by the names that a plan uses."""
        found = {role: type(worker.engine).__name__ for role, worker in self.workers.items()}
        return found | ({"rollout": type(self.rollout).__name__} if self.rollout else {})

    def device_name(self) -> str:
        return device_name(self.device)

    def memory(self) -> tuple[int, int] | None:
        """The most bytes that tensors took here, and that torch held for them; None on a CPU."""
        return None if self.device.type == "cpu" else (peak_memory(self.device), peak_reserved(self.device))

    @cached_property
    def device(self) -> torch.device:
        return device_of(self.config.trainer.device)

    def end_tokens(self) -> frozenset[int]:
        return end_tokens(self.actor_engine)

    def move(self, role: str, where: Place) -> None:
        self.workers[role].engine.move(where)

    def forward(self, batch: Batch, role: str, want: Want) -> dict[str, Tensor]:
        """The wanted columns, and the ids of their rows."""
        outputs = self.workers[role].forward(batch, want)
        return {"row": batch.row, **{name: getattr(outputs, name) for name in want}}

    def update(self, batch: Batch, plan: UpdatePlan, role: str) -> Metrics:
        return self.workers[role].carry_out(batch, plan)

    def wake(self) -> None:
        """All weights come together for a rollout; an engine with a copy of them may need a new one."""
        if isinstance(self.rollout, CopyEngine):
            self.rollout.wake()
            if self.rollout.stale:
                self.sync_weights()
            return
        self.actor_engine.move("device")
        self.awake.callback(self.actor_engine.move, "host")
        self.awake.enter_context(self.actor_engine.gathered())

    def sleep(self) -> None:
        assert self.rollout is not None
        self.rollout.sleep()
        self.awake.close()

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Completion]:
        assert self.rollout is not None
        return self.rollout.generate(prompts, sampling) if prompts else []

    def sync_weights(self) -> Metrics:
        """The rollout engine takes the actor's new weights; one that runs the actor's own has them."""
        assert self.rollout is not None
        return sync(self.actor_engine, self.rollout, self.limits)

    def unsent(self) -> bool:
        """Engines elsewhere do not have the actor's weights yet."""
        return self.sender.stale

    def next_bucket(self) -> Bucket | None:
        return self.sender.next()

    def question(self) -> tuple[Prompt, Sampling]:
        return self.sender.question()

    def gaps(self, prompt: Prompt, answers: list[list[Completion]]) -> tuple[list[float], float]:
        return self.sender.gaps(prompt, answers)

    @property
    def sender(self) -> Outgoing:
        assert self.outgoing is not None, "the rollout is in this process"
        return self.outgoing

    def load_bucket(self, bucket: Bucket) -> None:
        """Of the weights of an actor elsewhere."""
        assert isinstance(self.rollout, CopyEngine)
        self.rollout.load_bucket(bucket.unpacked(device_of(self.config.trainer.device)), bucket.first, bucket.last)

    def differing_layers(self) -> list[str]:
        assert isinstance(self.rollout, CopyEngine)
        return self.rollout.differing_layers()

    def open_scorer(self, tokenizer: Any, stops: frozenset[int]) -> None:
        """The reward model, a whole one in every process; `tokenizer` and `stops` are the policy's."""
        self.scorer = open_reward_model(self.config, tokenizer, stops)

    def check_scorer(self, prompt: Any, truth: Any) -> None:
        assert self.scorer is not None
        self.scorer.check(prompt, truth)

    def score(self, batch: Batch, texts: list[str]) -> dict[str, Any]:
        """What the reward model thinks of these rows, and their ids."""
        assert self.scorer is not None
        if not texts:
            return {"row": batch.row, "rows": torch.zeros(0), "tokens": None, "metrics": {}}
        found = self.scorer.scores(batch, texts)
        return {"row": batch.row, "rows": found.rows, "tokens": found.tokens, "metrics": found.metrics}

    def save(self, role: str, path: Path) -> None:
        if not path.is_dir():
            raise UserError(
                f"the process of the {role} does not see {path}",
                key="trainer.default_local_dir",
                fix="a folder that all nodes share",
            )
        self.workers[role].save(path)

    def load(self, role: str, path: Path) -> None:
        self.workers[role].load(path)
        if role == "actor" and isinstance(self.rollout, CopyEngine):
            self.rollout.stale = True
        if role == "actor" and self.outgoing:
            self.outgoing.stale = True


def engines_of(config: Config, alone: bool) -> type[SingleEngine]:
    """What trains: Megatron where the config says so, else one process by itself or FSDP."""
    if config.actor_rollout_ref.actor.strategy == "megatron":
        from paddock.engines.train.megatron.engine import MegatronEngine

        return MegatronEngine
    if alone:
        return SingleEngine
    from paddock.engines.train.fsdp import FSDPEngine

    return FSDPEngine


def end_tokens(engine: SingleEngine) -> frozenset[int]:
    """Those that the model's own generation config names: an end of turn, say."""
    named = getattr(engine.rollout_model.generation_config, "eos_token_id", None)
    return frozenset(token for token in (named if isinstance(named, list) else [named]) if token is not None)


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
