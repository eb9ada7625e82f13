"""Keys of the training engines: optimizer, FSDP, Megatron, checkpoints. A frozen role has some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddock.config.field import key, section

DTYPES = ("bfloat16", "bf16", "float16", "fp16", "float32", "fp32")
PARTS = ("model", "optimizer", "extra", "hf_model")
STRATEGIES = ("fsdp", "fsdp2", "megatron", "single")
SPLITS_MODELS = frozenset({"megatron"})
"""Training engines that split matrices and layers over ranks. They read the sections `megatron` and `lora`."""


@dataclass
class OptimConfig:
    optimizer: str = key("AdamW", "class of torch.optim", choices=("AdamW", "Adam", "SGD"))
    lr: float = key(1e-6, "peak learning rate", low=0)
    lr_warmup_steps: int = key(-1, "linear warm-up in steps of the run; -1: use the ratio")
    lr_warmup_steps_ratio: float = key(0.0, "warm-up as a share of all steps", low=0, high=1)
    lr_warmup_init: float = key(0.0, "learning rate at the start of the warm-up", low=0)
    lr_scheduler_type: str = key("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    lr_decay_steps: int | None = key(
        None, "step of the run at which the decay ends, warm-up included; unset: the last", low=1
    )
    min_lr_ratio: float = key(0.0, "lowest learning rate of a decay, as a share of lr", low=0, high=1)
    num_cycles: float = key(0.5, "cosine waves between peak and end", above=0)
    total_training_steps: int = key(-1, "length of the schedule; -1: the length of the run")
    weight_decay: float = key(0.01, "decoupled weight decay", low=0)
    betas: list[float] = key([0.9, 0.999], "AdamW's moment decays")
    clip_grad: float = key(1.0, "largest gradient norm", above=0)
    override_optimizer_config: dict[str, Any] = key({}, "further arguments of the optimizer, by name")


@dataclass
class MixedPrecisionConfig:
    reduce_dtype: str = key("fp32", "type in which gradients are summed over ranks", choices=DTYPES)


@dataclass
class FrozenConfig:
    """Keys of a model that is not trained and lies whole on each device."""

    param_offload: bool = key(False, "keep parameters in host memory while the role is idle")
    dtype: str = key("bfloat16", "type in which the model computes", choices=DTYPES)
    full_determinism: bool = key(False, "deterministic kernels, at the price of speed")


@dataclass
class ShardedConfig(FrozenConfig):
    """Keys of a model that is not trained and is sharded by FSDP."""

    offload_policy: bool = key(False, "FSDP2's own offload: parameters live on the host, also in training")
    reshard_after_forward: bool = key(True, "free gathered parameters between forward and backward")
    fsdp_size: int = key(-1, "ranks that share one copy of the weights; -1: all")
    forward_prefetch: bool = key(False, "gather the next layer while this one computes")


@dataclass
class FSDPConfig(ShardedConfig):
    """Keys of a model that FSDP trains."""

    optimizer_offload: bool = key(False, "keep optimizer state in host memory while the role is idle")
    model_dtype: str = key("fp32", "type of the master weights", choices=DTYPES)
    mixed_precision: MixedPrecisionConfig = section(MixedPrecisionConfig)


@dataclass
class FrozenMegatronConfig:
    """Keys of a model that is not trained and is split by Megatron."""

    tensor_model_parallel_size: int = key(1, "ranks that share each matrix", low=1)
    pipeline_model_parallel_size: int = key(1, "ranks that share the layers", low=1)
    context_parallel_size: int = key(1, "ranks that share each sequence", low=1)
    expert_model_parallel_size: int = key(1, "ranks that share the experts", low=1)
    expert_tensor_parallel_size: int | None = key(None, "ranks that share each expert's matrices", low=1)
    sequence_parallel: bool = key(True, "split activations outside tensor-parallel regions")
    param_offload: bool = key(False, "keep parameters in host memory while the role is idle")
    seed: int = key(42, "seed of Megatron's RNG tracker")
    dtype: str = key("bfloat16", "type in which the model computes", choices=DTYPES)
    override_transformer_config: dict[str, Any] = key(
        {"attention_backend": "flash"}, "fields of Megatron's TransformerConfig: recompute_granularity, ..."
    )


@dataclass
class MegatronConfig(FrozenMegatronConfig):
    """Keys of a model that Megatron trains."""

    use_distributed_optimizer: bool = key(True, "share optimizer state over data-parallel ranks")
    optimizer_offload: bool = key(False, "keep optimizer state in host memory while the role is idle")


@dataclass
class CheckpointConfig:
    save_contents: list[str] = key(
        ["model", "optimizer", "extra"],
        "what a checkpoint holds; transformers loads its weights, with hf_model or without",
        choices=PARTS,
    )
    load_contents: list[str] | None = key(None, "what is read back; unset: all that was saved", choices=PARTS)


@dataclass
class RouterReplayConfig:
    mode: str = key(
        "disabled",
        "replay of expert choices in training: recorded in the log-prob pass (R2) or the rollout (R3)",
        choices=("disabled", "R2", "R3"),
    )
