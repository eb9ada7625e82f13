"""Keys of the roles that hold a model: actor, reference, rollout, critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddock.config.engine import (
    DTYPES,
    STRATEGIES,
    CheckpointConfig,
    FrozenMegatronConfig,
    FSDPConfig,
    MegatronConfig,
    OptimConfig,
    RouterReplayConfig,
    ShardedConfig,
)
from paddock.config.field import follows, key, section
from paddock.config.rollout_engines import ENGINES

AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")
KL_KINDS = tuple(kind + plus for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for plus in ("", "+"))
DECLARED_LOSSES: set[str] = set()
"""Names of policy losses that plug-ins have registered."""
POLICY_LOSSES = (
    "vanilla",
    "gspo",
    "cispo",
    "sapo",
    "gpg",
    "geo_mean",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "dro",
    "reinforce",
    "bypass_mode",
)
RATIO_LOSSES = frozenset(POLICY_LOSSES) - {"gpg", "reinforce", "bypass_mode"}
"""Losses whose ratio to the old policy corrects for tokens that older weights drew."""


@dataclass
class LoraConfig:
    """LoRA under Megatron; the other engines use lora_rank, lora_alpha and target_modules of the model."""

    rank: int = key(0, "rank of the adapters; 0: none", low=0)
    alpha: int = key(32, "scale of the adapters", low=1)
    dropout: float = key(0.0, "dropout before the adapters", low=0, high=1)
    target_modules: list[str] = key(["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "layers that get one")
    exclude_modules: list[str] = key([], "layers that get none")
    lora_A_init_method: str = key("xavier", "initial A", choices=("xavier", "kaiming", "normal"))
    adapter_path: str | None = key(None, "adapter to start from", path=True)
    dtype: str | None = key(None, "type of the adapters; unset: the model's", choices=DTYPES)


@dataclass
class PolicyLoraConfig(LoraConfig):
    merge: bool = key(
        False,
        "compute by merged weights, without the adapter beside them: in rollouts, on one device in training too",
    )


@dataclass
class ModelConfig:
    path: str | None = key(
        None,
        "local folder or hub name; unset: a small built-in model, or Qwen2-7B-Instruct if data or hardware is named",
        path=True,
    )
    tokenizer_path: str | None = key(None, "tokenizer; unset: beside the model", path=True)
    trust_remote_code: bool = key(False, "run model code that comes with the weights")
    custom_chat_template: str | None = key(None, "Jinja chat template instead of the tokenizer's")
    external_lib: str | None = key(None, "module imported first: registers estimators, losses, models")
    override_config: dict[str, Any] = key({}, "fields of the model's own config.json")
    enable_gradient_checkpointing: bool = key(
        True, "recompute activations in backward; unset, on one GPU: only if its memory needs it"
    )
    enable_activation_offload: bool = key(False, "keep checkpointed activations in host memory")
    use_remove_padding: bool = key(True, "pack sequences instead of padding them")
    lora_rank: int = key(0, "rank of LoRA adapters; 0: train all weights", low=0)
    lora_alpha: float = key(16, "scale of LoRA adapters", above=0)
    target_modules: Any = key("all-linear", "layers that get an adapter: a name, a pattern or a list")
    exclude_modules: Any = key(None, "layers that get none")
    lora_adapter_path: str | None = key(None, "adapter to start from", path=True)
    lora: PolicyLoraConfig = section(PolicyLoraConfig)


@dataclass
class PolicyLossConfig:
    loss_mode: str = key("vanilla", f"the policy loss: {', '.join(POLICY_LOSSES)}")
    clip_cov_ratio: float = key(0.0002, "clip_cov: share of tokens whose loss is dropped", low=0, high=1)
    clip_cov_lb: float = key(1.0, "clip_cov: lowest covariance of a dropped token")
    clip_cov_ub: float = key(5.0, "clip_cov: highest covariance of a dropped token")
    kl_cov_ratio: float = key(0.0002, "kl_cov: share of tokens that get the penalty", low=0, high=1)
    ppo_kl_coef: float | None = key(0.1, "kl_cov: weight of the penalty", low=0)
    dro_beta: float | None = key(None, "dro: weight of the quadratic penalty; required by dro", above=0)


@dataclass
class ActorConfig:
    strategy: str = key("fsdp", "training engine; one device runs `single`, or megatron", choices=STRATEGIES)
    ppo_mini_batch_size: int = key(256, "prompts per optimizer step", low=1)
    ppo_micro_batch_size_per_gpu: int | None = key(None, "rows per forward; unset: a token budget", low=1)
    use_dynamic_bsz: bool | None = key(None, "micro-batches by token budget; unset: unless a row count is set")
    ppo_max_token_len_per_gpu: int = key(
        16384, "token budget of a micro-batch; unset, on one GPU: by its memory, at most 49152", low=1
    )
    ppo_epochs: int = key(1, "passes over each batch of rollouts", low=1)
    shuffle: bool = key(False, "shuffle rows between the mini-batches of a step")
    data_loader_seed: int = key(42, "seed of that shuffle")
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    clip_ratio: float = key(0.2, "PPO clip range", above=0)
    clip_ratio_low: float | None = key(None, "lower clip range; unset: clip_ratio", above=0)
    clip_ratio_high: float | None = key(None, "upper clip range; unset: clip_ratio", above=0)
    clip_ratio_c: float = key(3.0, "dual clip: bound of the loss for negative advantages", above=1)
    tau_pos: float = key(1.0, "sapo: temperature for positive advantages", above=0)
    tau_neg: float = key(1.05, "sapo: temperature for negative advantages", above=0)
    loss_agg_mode: str | None = key(
        None, "how token losses become one number; unset: the loss's own way, mostly token-mean", choices=AGGREGATIONS
    )
    loss_scale_factor: float | None = key(
        None, "divisor of seq-mean-token-sum-norm; unset: data.max_response_length", above=0
    )
    entropy_coeff: float = key(0.0, "weight of the entropy bonus")
    calculate_entropy: bool = key(True, "compute and report entropy; False: only if entropy_coeff needs it")
    use_kl_loss: bool = key(False, "add KL(policy | reference) to the loss")
    kl_loss_coef: float = key(0.001, "weight of that KL", low=0)
    kl_loss_type: str = key("low_var_kl", "its estimator; `+`: straight-through k2 gradient", choices=KL_KINDS)
    use_prefix_grouper: bool | None = key(
        None, "compute a group's shared prompt once in training; unset: where that is possible"
    )
    ulysses_sequence_parallel_size: int = key(1, "ranks that share each sequence (FSDP)", low=1)
    freeze_vision_tower: bool = key(False, "do not train the vision tower")
    optim: OptimConfig = section(OptimConfig)
    fsdp_config: FSDPConfig = section(FSDPConfig)
    megatron: MegatronConfig = section(MegatronConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    router_replay: RouterReplayConfig = section(RouterReplayConfig)


_ACTOR = "actor_rollout_ref.actor"


@dataclass
class RefMegatronConfig(FrozenMegatronConfig):
    tensor_model_parallel_size: int = follows(f"{_ACTOR}.megatron.tensor_model_parallel_size", "as the actor", low=1)
    pipeline_model_parallel_size: int = follows(
        f"{_ACTOR}.megatron.pipeline_model_parallel_size", "as the actor", low=1
    )
    context_parallel_size: int = follows(f"{_ACTOR}.megatron.context_parallel_size", "as the actor", low=1)
    expert_model_parallel_size: int = follows(f"{_ACTOR}.megatron.expert_model_parallel_size", "as the actor", low=1)
    expert_tensor_parallel_size: int | None = follows(
        f"{_ACTOR}.megatron.expert_tensor_parallel_size", "as the actor", low=1
    )
    param_offload: bool = follows(f"{_ACTOR}.megatron.param_offload", "as the actor")
    override_transformer_config: dict[str, Any] = follows(
        f"{_ACTOR}.megatron.override_transformer_config", "as the actor"
    )
    seed: int = follows(f"{_ACTOR}.megatron.seed", "as the actor")


@dataclass
class RefConfig:
    strategy: str = follows(f"{_ACTOR}.strategy", "engine of the reference", choices=STRATEGIES)
    log_prob_micro_batch_size_per_gpu: int | None = key(None, "rows per forward; unset: a token budget", low=1)
    log_prob_use_dynamic_bsz: bool | None = key(None, "by token budget; unset: unless a row count is set")
    log_prob_max_token_len_per_gpu: int = follows(f"{_ACTOR}.ppo_max_token_len_per_gpu", "token budget", low=1)
    ulysses_sequence_parallel_size: int = follows(f"{_ACTOR}.ulysses_sequence_parallel_size", "as the actor", low=1)
    fsdp_config: ShardedConfig = section(ShardedConfig)
    megatron: RefMegatronConfig = section(RefMegatronConfig)


@dataclass
class ValidationSamplingConfig:
    n: int = key(1, "responses per validation prompt", low=1)
    do_sample: bool = key(False, "sample; False: greedy")
    temperature: float = key(0.0, "sampling temperature; 0: greedy", low=0)
    top_k: int = key(-1, "sample among the k likeliest; -1: all", low=1, off=-1)
    top_p: float = key(1.0, "sample within this probability mass", above=0, high=1)


@dataclass
class MultiTurnConfig:
    enable: bool = key(False, "let the policy call the tools below; `environment` alone does so too")
    max_assistant_turns: int | None = key(None, "most turns of the policy in an episode; unset: no limit", low=1)
    max_user_turns: int | None = key(None, "most turns of tools or the environment; unset: no limit", low=1)
    function_tool_path: Any = key(
        None,
        "tools: Python files of functions marked with `tool`, FILE:NAME for one, calculator, code_interpreter; a list",
    )
    tool_config_path: str | None = key(None, "tools: YAML file of classes in verl's form", path=True)
    interaction_config_path: str | None = key(None, "YAML file of interactions in verl's form", path=True)
    max_parallel_calls: int | None = key(
        None, "calls of one turn that are run; unset: 1 for verl's tools and Environment classes, else all", low=1
    )
    max_tool_response_length: int | None = key(
        None,
        "longest result of a tool, in characters; unset: 256 for verl's tools and Environment classes, else no limit",
        low=1,
    )
    tool_response_truncate_side: str = key(
        "middle", "where a long result is cut; middle: both ends are kept", choices=("left", "right", "middle")
    )
    format: str | None = key(None, "how the model writes tool calls; unset: by its chat template")
    tool_timeout: float = key(60.0, "seconds for a tool, and for a step of the environment", above=0)


@dataclass
class AgentConfig:
    default_agent_loop: str = key(
        "single_turn_agent", "loop of rows without agent_name: single_turn_agent, tool_agent, or one of the file below"
    )
    agent_loop_config_path: str | None = key(None, "YAML file of agent loops in verl's form", path=True)


@dataclass
class WeightSyncConfig:
    backend: str = key("naive", "how weights travel to a separate rollout engine")
    update_weights_bucket_megabytes: int = key(2048, "most bytes in flight at a time", low=1)
    engine_kwargs: dict[str, Any] = key({}, "options of the backend")


@dataclass
class EngineArguments:
    """Arguments handed to the engine as they are; any name its own constructor takes."""

    vllm: dict[str, Any] = key({}, "arguments of vllm.LLM")
    sglang: dict[str, Any] = key({}, "arguments of sglang's Engine")


@dataclass
class RolloutConfig:
    name: str | None = key(None, "engine that generates; unset: by hardware and what is installed", choices=ENGINES)
    n_gpus_per_node: int = key(1, "devices per node of a pool of its own (hybrid_engine=False)", low=1)
    nnodes: int = key(1, "nodes of that pool; 0: its processes share the trainer's devices", low=0)
    n: int = key(1, "responses per prompt", low=1)
    do_sample: bool = key(True, "sample; False: greedy")
    temperature: float = key(1.0, "sampling temperature", above=0)
    top_k: int = key(-1, "sample among the k likeliest; -1: all", low=1, off=-1)
    top_p: float = key(1.0, "sample within this probability mass", above=0, high=1)
    min_p: float = key(0.0, "drop tokens below this share of the likeliest", low=0, high=1)
    ignore_eos: bool = key(False, "go on to the full length")
    stop: list[str] = key(
        [], "texts that end a response, or a turn of a conversation, with the token that completes one; it stays"
    )
    min_tokens: int = key(0, "tokens before which neither a stop token nor a text of `stop` ends a response", low=0)
    seed: int | None = key(None, "seed of the sampler; unset: trainer.seed")
    deterministic: bool = key(
        False, "conversations go on turn by turn, in the order of rows: bits do not depend on how fast tools are"
    )
    prompt_length: int = follows("data.max_prompt_length", "longest prompt", low=1)
    response_length: int = follows("data.max_response_length", "longest response", low=1)
    dtype: str = key("bfloat16", "type in which the engine computes", choices=DTYPES)
    gpu_memory_utilization: float = key(
        0.6, "share of GPU memory for weights and KV cache of the engine", above=0, high=1
    )
    tensor_model_parallel_size: int | None = key(
        None, "ranks that share the engine's weights; unset: 2 for vllm and sglang", low=1
    )
    data_parallel_size: int = key(1, "copies of the engine that share expert layers", low=1)
    expert_parallel_size: int = key(1, "ranks that share the experts", low=1)
    pipeline_model_parallel_size: int = key(1, "ranks that share the layers", low=1)
    max_num_seqs: int | None = key(
        None,
        "sequences at a time, per engine; unset: 256 on a CPU, else 1024, or what fits the GPU's memory",
        low=1,
    )
    max_num_batched_tokens: int = key(
        8192, "tokens per engine step; unset, on one GPU: by its memory, at most 32768", low=1
    )
    max_model_len: int | None = key(None, "longest sequence; unset: prompt + response", low=1)
    enable_chunked_prefill: bool = key(True, "mix prefill into decode steps")
    enable_prefix_caching: bool = key(True, "compute a shared prefix once")
    enforce_eager: bool = key(False, "no CUDA graphs")
    cudagraph_capture_sizes: list[int] | None = key(None, "batch sizes captured as CUDA graphs")
    free_cache_engine: bool = key(True, "give the engine's memory back while training")
    multi_stage_wake_up: bool = key(False, "wake weights first, the KV cache after the sync")
    load_format: str = key("dummy", "how the engine loads weights before the first sync")
    logprobs_mode: str = key(
        "processed_logprobs",
        "log-probs after or before temperature and top-k/p",
        choices=("processed_logprobs", "raw_logprobs"),
    )
    scheduling_policy: str = key("fcfs", "order of waiting requests", choices=("fcfs", "priority"))
    disable_log_stats: bool = key(True, "no periodic statistics of the engine")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "rows per forward of the old log-probs; unset: a token budget", low=1
    )
    log_prob_use_dynamic_bsz: bool | None = key(None, "by token budget; unset: unless a row count is set")
    log_prob_max_token_len_per_gpu: int = follows(f"{_ACTOR}.ppo_max_token_len_per_gpu", "token budget", low=1)
    enable_rollout_routing_replay: bool = key(False, "return the experts chosen in rollout")
    val_kwargs: ValidationSamplingConfig = section(ValidationSamplingConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    agent: AgentConfig = section(AgentConfig)
    checkpoint_engine: WeightSyncConfig = section(WeightSyncConfig)
    engine_kwargs: EngineArguments = section(EngineArguments)


@dataclass
class ActorRolloutRefConfig:
    model: ModelConfig = section(ModelConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    hybrid_engine: bool = key(True, "actor and rollout share processes; False: the rollout has a pool of its own")
    numerics: str = key(
        "fast",
        "exact: on one GPU, log-probs of rollout and trainer equal bit for bit, for some more time",
        choices=("fast", "exact"),
    )
    nccl_timeout: int = key(600, "seconds until a collective counts as hung", low=1)


_MODEL = "actor_rollout_ref.model"


@dataclass
class CriticModelConfig:
    path: str | None = follows(f"{_MODEL}.path", "backbone of the critic", path=True)
    external_lib: str | None = follows(f"{_MODEL}.external_lib", "module imported first")
    trust_remote_code: bool = follows(f"{_MODEL}.trust_remote_code", "run model code that comes with the weights")
    override_config: dict[str, Any] = key({}, "fields of the model's own config.json")
    enable_gradient_checkpointing: bool = key(
        True, "recompute activations in backward; unset, on one GPU: only if its memory needs it"
    )
    enable_activation_offload: bool = key(False, "keep checkpointed activations in host memory")
    use_remove_padding: bool = follows(f"{_MODEL}.use_remove_padding", "pack sequences instead of padding them")
    lora_rank: int = key(0, "rank of LoRA adapters; 0: train all weights", low=0)
    lora_alpha: float = key(16, "scale of LoRA adapters", above=0)
    target_modules: Any = key("all-linear", "layers that get an adapter")
    lora: LoraConfig = section(LoraConfig)
    fsdp_config: FSDPConfig = section(FSDPConfig)


@dataclass
class CriticConfig:
    enable: bool | None = key(None, "train a critic; unset: when the estimator needs one")
    enable_resource_pool: bool = key(False, "on devices of its own")
    n_gpus_per_node: int = key(1, "devices per node of that pool", low=1)
    nnodes: int = key(1, "nodes of that pool", low=1)
    strategy: str = follows(f"{_ACTOR}.strategy", "training engine", choices=STRATEGIES)
    model: CriticModelConfig = section(CriticModelConfig)
    optim: OptimConfig = section(OptimConfig, lr=1e-5)
    megatron: MegatronConfig = section(MegatronConfig)
    ppo_mini_batch_size: int = follows(f"{_ACTOR}.ppo_mini_batch_size", "prompts per optimizer step", low=1)
    ppo_micro_batch_size_per_gpu: int | None = key(None, "rows per forward; unset: a token budget", low=1)
    forward_micro_batch_size_per_gpu: int | None = follows(
        "critic.ppo_micro_batch_size_per_gpu", "rows per forward without gradient", low=1
    )
    use_dynamic_bsz: bool | None = key(None, "by token budget; unset: unless a row count is set")
    ppo_max_token_len_per_gpu: int = key(
        32768, "token budget of a micro-batch; unset, on one GPU: by its memory, at most 49152", low=1
    )
    forward_max_token_len_per_gpu: int = follows("critic.ppo_max_token_len_per_gpu", "the same without gradient", low=1)
    ppo_epochs: int = follows(f"{_ACTOR}.ppo_epochs", "passes over each batch of rollouts", low=1)
    shuffle: bool = follows(f"{_ACTOR}.shuffle", "shuffle rows between the mini-batches of a step")
    data_loader_seed: int = key(42, "seed of that shuffle")
    cliprange_value: float = key(0.5, "clip range of the value loss", above=0)
    loss_agg_mode: str | None = follows(
        f"{_ACTOR}.loss_agg_mode", "how token losses become one number; unset: token-mean", choices=AGGREGATIONS
    )
    ulysses_sequence_parallel_size: int = key(1, "ranks that share each sequence (FSDP)", low=1)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
