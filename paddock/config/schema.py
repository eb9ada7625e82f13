"""Every key of a run: its type, default and one-line meaning. The single schema; nothing else holds a default.

A default of None means "decided by something else", which the meaning names; `follows` takes another key's value.
What the chosen algorithm and the machine decide is in recipes.py and resolve.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddock.config.distillation import DistillationConfig
from paddock.config.engine import DTYPES, STRATEGIES, FrozenConfig
from paddock.config.field import follows, key, section
from paddock.config.roles import KL_KINDS, ActorRolloutRefConfig, CriticConfig
from paddock.config.rollout_engines import ENGINES

REWARD_MANAGERS = ("naive", "batch", "prime", "dapo", "remote", "rate_limited", "gdpo")
REWARD_RULES = ("exact_match", "contains", "regex", "json_schema", "math", "code")


@dataclass
class PluginConfig:
    path: str | None = key(None, "Python file of a map-style data set, whose items are rows", path=True)
    name: str | None = key(None, "class in that file")


@dataclass
class SamplerConfig:
    class_path: str | None = key(None, "Python file of a sampler: the order of prompts, each epoch", path=True)
    class_name: str | None = key(None, "class in that file")


@dataclass
class DataConfig:
    train_files: Any = key(
        None, "parquet, jsonl, json, csv, a folder, or a data set of the hub (org/name); one or a list", path=True
    )
    train_weights: list[float] | None = key(
        None, "how often each of train_files is drawn from; unset: by its rows", above=0
    )
    val_files: Any = key(None, "the same for validation", path=True)
    train_batch_size: int = key(1024, "prompts per step", low=1)
    val_batch_size: int | None = key(None, "prompts per validation batch; unset: all", low=1)
    gen_batch_size: int = follows("data.train_batch_size", "prompts per generation round of dynamic sampling", low=1)
    train_max_samples: int = key(-1, "use at most this many rows; -1: all", low=1, off=-1)
    val_max_samples: int = key(-1, "use at most this many rows; -1: all", low=1, off=-1)
    max_prompt_length: int = key(512, "longest prompt, in tokens", low=1)
    max_response_length: int = key(1024, "longest response, in tokens", low=1)
    max_length: int | None = key(None, "longest prompt and answer together, in tokens; supervised training only", low=1)
    filter_overlong_prompts: bool = key(True, "leave out prompts that are too long")
    filter_overlong_prompts_workers: int = key(1, "processes that filter", low=1)
    truncation: str = key("error", "what becomes of a too long prompt", choices=("error", "left", "right", "middle"))
    prompt_key: str = key("prompt", "column of the messages; default, if there is none: question, problem, ...")
    prompt_as_message: bool = key(
        False, "supervised training: ask a prompt that is a plain text as a user's message, by the chat template"
    )
    answer_key: str | None = key(
        None, "column of the true answer; unset: answer, solution, ground_truth, label or output"
    )
    reward_fn_key: str = key("data_source", "column that picks the scorer")
    image_key: str = key("images", "column of images")
    video_key: str = key("videos", "column of videos")
    image_patch_size: int | None = key(None, "pixels per vision patch; unset: the model's, and no other works", low=1)
    mm_processor_kwargs: dict[str, Any] = key({}, "limits of an image's area: min_pixels, max_pixels")
    shuffle: bool = key(True, "shuffle the training rows each epoch")
    validation_shuffle: bool = key(False, "shuffle the validation rows")
    seed: int | None = key(None, "seed of the shuffle; unset: trainer.seed")
    dataloader_num_workers: int = key(8, "above 0: tokenise the next batch while this one is trained on", low=0)
    tokenizer: str | None = key(None, "tokenizer; unset: the model's", path=True)
    trust_remote_code: bool = follows("actor_rollout_ref.model.trust_remote_code", "for the tokenizer")
    apply_chat_template: bool = key(
        True, "ask a prompt that is a text as a user's message, by the chat template; False: prompts go as plain texts"
    )
    apply_chat_template_kwargs: dict[str, Any] = key({}, "arguments of the chat template")
    custom_cls: PluginConfig = section(PluginConfig)
    sampler: SamplerConfig = section(SamplerConfig)


def row_tokens(data: DataConfig) -> int:
    """Returns the tokens of the longest row."""
    longest = data.max_prompt_length + data.max_response_length
    return longest if data.max_length is None else min(longest, data.max_length)


@dataclass
class KLControlConfig:
    type: str = key("fixed", "adaptive keeps KL near target_kl", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "weight of KL in the reward", low=0)
    horizon: int = key(10000, "rows over which the adaptive coefficient moves", low=1)
    target_kl: float = key(0.1, "KL that the adaptive controller aims at", above=0)


@dataclass
class PFPPOConfig:
    reweight_method: str = key("pow", "how scores become weights", choices=("pow", "max_min", "max_random"))
    weight_pow: float = key(2.0, "exponent of pow")


@dataclass
class FilterGroupsConfig:
    enable: bool = key(False, "drop groups whose rewards are all equal, and sample again (DAPO)")
    metric: str = key("seq_reward", "what must differ: seq_reward, seq_final_reward, score, acc or a key of the scorer")
    max_num_gen_batches: int = key(0, "rounds before giving up; 0: no limit", low=0)


@dataclass
class RolloutCorrectionConfig:
    preset: str | None = key(None, "a named set of the keys below; those that are set win")
    rollout_is: str | None = key(None, "importance weights against the rollout policy", choices=("token", "sequence"))
    rollout_is_threshold: float | str = key(2.0, "truncate weights at this; 'lo_hi': zero outside the band")
    rollout_is_batch_normalize: bool = key(False, "divide weights by their mean")
    rollout_rs: str | None = key(None, "reject by these statistics: token_k1, seq_mean_k3, ... (comma list)")
    rollout_rs_threshold: float | str | None = key(None, "their bounds: one for all, or one each")
    bypass_mode: bool = key(False, "rollout log-probs stand for the old log-probs")
    loss_type: str = key("ppo_clip", "loss of bypass mode", choices=("ppo_clip", "reinforce"))


@dataclass
class AlgorithmConfig:
    adv_estimator: str = key("gae", "advantage estimator: gae (PPO), grpo, rloo, ...")
    gamma: float = key(1.0, "discount", above=0, high=1)
    lam: float = key(1.0, "GAE's lambda", low=0, high=1)
    norm_adv_by_std_in_grpo: bool = key(True, "divide by the group's std; False: Dr.GRPO")
    use_kl_in_reward: bool = key(False, "subtract KL(policy | reference) from the reward")
    kl_penalty: str = key("kl", "estimator of that KL", choices=KL_KINDS)
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    use_pf_ppo: bool = key(False, "resample rows by their score (PF-PPO)")
    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    staleness: int = key(
        0, "updates that a response may span: so many later batches are drawn beside that of a step", low=0, high=8
    )
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)
    gdpo_reward_keys: list[str] = key(
        [], "gdpo: components that the scorer returns; unset: all named rules and functions"
    )
    gdpo_reward_weights: list[float] | None = key(
        None, "gdpo: their weights; unset: those of rules and functions, or 1"
    )


@dataclass
class RewardModelModelConfig:
    path: str | None = key(None, "reward model", path=True)
    input_tokenizer: str | None = follows("actor_rollout_ref.model.path", "tokenizer of the responses", path=True)
    external_lib: str | None = follows("actor_rollout_ref.model.external_lib", "module imported first")
    trust_remote_code: bool = key(False, "run model code that comes with the weights")
    override_config: dict[str, Any] = key({}, "fields of the model's own config.json")
    use_remove_padding: bool = key(True, "pack sequences instead of padding them")
    fsdp_config: FrozenConfig = section(FrozenConfig)


@dataclass
class RewardRolloutConfig:
    """The engine that serves a reward model or judge."""

    name: str | None = key(None, "engine; unset: as actor_rollout_ref.rollout.name", choices=ENGINES)
    dtype: str = key("bfloat16", "type in which it computes", choices=DTYPES)
    tensor_model_parallel_size: int = key(1, "ranks that share its weights", low=1)
    data_parallel_size: int = key(1, "copies that share expert layers", low=1)
    expert_parallel_size: int = key(1, "ranks that share the experts", low=1)
    max_num_batched_tokens: int = key(8192, "tokens per engine step", low=1)
    max_num_seqs: int = key(1024, "sequences at a time", low=1)
    max_model_len: int | None = key(None, "longest sequence; unset: prompt + response", low=1)
    free_cache_engine: bool = key(True, "give memory back while training")
    prompt_length: int = key(2048, "longest prompt of a judge", low=1)
    response_length: int = key(2048, "longest answer of a judge", low=1)


@dataclass
class JudgeConfig:
    """A language model that judges in words; `reward_model.rollout.response_length` bounds what it writes."""

    source: str | None = key(
        None,
        "who judges: a server (endpoint) or reward_model.model.path in our own engine (engine); unset: no judge",
        choices=("endpoint", "engine"),
    )
    url: str | None = key(None, "server that speaks OpenAI's chat protocol: http://host:port/v1")
    model: str | None = key(None, "model that the server shall ask")
    api_key_env: str = key("OPENAI_API_KEY", "environment variable that holds the server's key, if it wants one")
    template_path: str | None = key(
        None, "text file in which {prompt}, {response}, {ground_truth} are filled in; unset: a score from 0 to 10",
        path=True,
    )  # fmt: skip
    pattern: str = key(
        r"Score:\s*(-?\d+(?:\.\d+)?)", "regular expression whose first group is the number; its last match counts"
    )
    temperature: float = key(0.0, "sampling temperature of the judge; 0: greedy", low=0)
    request: dict[str, Any] = key({}, "further fields of the request to a server; null removes one")
    max_concurrent: int = key(32, "requests at a time", low=1)
    timeout: float = key(60.0, "seconds for one request", above=0)
    retries: int = key(2, "further attempts when a server is busy or silent", low=0)
    failed: float = key(0.0, "score of an answer for which no number came")


@dataclass
class SandboxConfig:
    url: str | None = key(None, "SandboxFusion service; unset: the local sandbox")
    max_concurrent: int = key(64, "programs that the service runs at a time", low=1)
    memory_limit_mb: int = key(1024, "memory of one program, here or in the service", low=64)


@dataclass
class LocalSandboxConfig:
    """The sandbox of programs that a model wrote; time limits also hold for a service."""

    isolation: str = key(
        "auto",
        "what keeps programs in; auto: bubblewrap where it works, else unshare; unsafe: nothing does",
        choices=("auto", "bubblewrap", "unshare", "unsafe"),
    )
    timeout: float = key(10.0, "seconds of one program; all tests of an answer share reward_model.timeout", above=0)
    processes: int = key(32, "processes and threads of one program", low=1)
    command: list[str] = key([], "what runs the program in {file}; empty: Python")
    readable: list[str] = key([], "folders that programs may read, beside the system's and Python's own", path=True)


@dataclass
class OverlongBufferConfig:
    enable: bool = key(False, "penalise responses near the longest length (DAPO)")
    len: int = key(0, "length of the zone in which the penalty grows", low=0)
    penalty_factor: float = key(1.0, "penalty at the longest length", low=0)
    log: bool = key(False, "report the penalty as a metric")


@dataclass
class RewardKwargsConfig:
    """Arguments of the reward manager."""

    max_resp_len: int = follows("data.max_response_length", "longest response of the overlong penalty", low=1)
    overlong_buffer_cfg: OverlongBufferConfig = section(OverlongBufferConfig)


@dataclass
class RewardModelConfig:
    enable: bool = key(False, "score with a reward model")
    enable_resource_pool: bool = key(False, "on GPUs of its own")
    n_gpus_per_node: int = key(8, "GPUs per node of that pool", low=1)
    nnodes: int = key(0, "nodes of that pool", low=0)
    strategy: str = follows("actor_rollout_ref.actor.strategy", "engine", choices=STRATEGIES)
    model: RewardModelModelConfig = section(RewardModelModelConfig)
    micro_batch_size_per_gpu: int | None = key(None, "rows per forward; unset: a token budget", low=1)
    use_dynamic_bsz: bool | None = key(None, "by token budget; unset: unless a row count is set")
    forward_max_token_len_per_gpu: int = follows("critic.forward_max_token_len_per_gpu", "token budget", low=1)
    max_length: int | None = key(None, "cut longer sequences at their end; unset: none is cut", low=1)
    token_level: bool = key(False, "one score for every token of a response; needs a token classifier")
    model_weight: float | None = key(
        None, "score = model_weight * model + rule_weight * rule; both unset: a row's reward_model.style decides"
    )
    rule_weight: float | None = key(None, "weight of the rule; unset beside a model_weight: 0")
    judge: JudgeConfig = section(JudgeConfig)
    reward_manager: str = key("naive", "how scorers are called", choices=REWARD_MANAGERS)
    reward_kwargs: RewardKwargsConfig = section(RewardKwargsConfig)
    num_workers: int | None = key(None, "processes that score; unset: the number of cores", low=1)
    launch_reward_fn_async: bool = key(True, "score while other responses are still generated")
    timeout: float = key(30.0, "seconds for one call of a scorer; then all its processes are killed", above=0)
    compute_score_kwargs: dict[str, Any] = key(
        {}, "arguments of built-in scorers, e.g. {method: flexible} or {verdicts: verl} of gsm8k"
    )
    max_concurrent: int = key(16, "rate_limited: calls at a time", low=1)
    max_rpm: float | None = key(None, "rate_limited: calls per minute; unset: no limit", above=0)
    max_tpm: float | None = key(None, "rate_limited: tokens per minute; unset: no limit", above=0)
    estimated_tokens_per_request: int = key(2000, "rate_limited: tokens that one call counts for", low=1)
    max_retries: int = key(3, "rate_limited: further tries of a call that raised or timed out", low=0)
    sandbox_fusion: SandboxConfig = section(SandboxConfig)
    sandbox: LocalSandboxConfig = section(LocalSandboxConfig)
    rollout: RewardRolloutConfig = section(RewardRolloutConfig)


@dataclass
class CustomRewardConfig:
    path: Any = key(
        None, "Python file of a scorer: FILE or FILE:FUNCTION; a list: the score is the sum of all functions", path=True
    )
    name: Any = key("compute_score", "function in that file; a list: several functions of one file")
    reward_kwargs: dict[str, Any] = key({}, "further arguments of that function; of several: {FUNCTION: {name: value}}")
    weights: list[float] | None = key(None, "weight of each function in the sum; unset: 1 each")


@dataclass
class TrainerConfig:
    device: str | None = key(None, "cuda, npu or cpu; unset: what is there", choices=("cuda", "npu", "cpu"))
    n_gpus_per_node: int | None = key(
        None, "devices per node; unset: all that are here, else 1 process if the model fits this CPU, else 8", low=1
    )
    nnodes: int = key(1, "nodes", low=1)
    ranks_per_device: int = key(
        1, "ranks (n_gpus_per_node counts them) that share a GPU: tries the layout of many GPUs on few", low=1
    )
    seed: int = key(42, "seed of everything that is random")
    total_epochs: int | None = key(
        None, "passes over the training rows, at most; unset: 15, or as many as total_training_steps takes", low=1
    )
    total_training_steps: int | None = key(None, "steps, at most; unset: from total_epochs", low=1)
    project_name: str = key("paddock", "project shown by loggers")
    experiment_name: str = follows("algorithm.adv_estimator", "run shown by loggers")
    logger: Any = key(
        None, "where metrics go (steps: every metric on one line); unset: console, and wandb where it is installed"
    )
    log_val_generations: int = key(0, "validation answers shown by loggers", low=0)
    rollout_data_dir: str | None = key(None, "dump rollouts as jsonl here", path=True)
    validation_data_dir: str | None = key(None, "dump validation answers as jsonl here", path=True)
    val_before_train: bool = key(True, "validate before the first step")
    val_only: bool = key(False, "validate and stop")
    test_freq: int = key(5, "validate every so many steps (not epochs); -1: never", low=1, off=-1)
    save_freq: int = key(-1, "checkpoint every so many steps; -1: only after the last, and when stopped", low=1, off=-1)
    save_last: bool = key(True, "checkpoint after the last step, whatever save_freq says")
    critic_warmup: int = key(0, "the actor learns from this step on; before it the critic alone", low=0)
    balance_batch: bool = key(True, "give every rank the same amount of work")
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", "where checkpoints go", path=True
    )
    resume_mode: str = key(
        "auto",
        "go on from the newest checkpoint, from none, or from resume_from_path",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = key(None, "a folder global_step_N", path=True)
    max_actor_ckpt_to_keep: int | None = key(None, "checkpoints kept; unset: all", low=1)
    max_critic_ckpt_to_keep: int | None = key(None, "critic checkpoints kept; unset: all", low=1)
    ray_wait_register_center_timeout: int = key(300, "seconds to wait for every worker to come up", low=1)
    max_nonfinite_steps: int = key(3, "updates in a row that may be void (NaN, inf) before the run stops", low=1)
    max_restarts: int = key(0, "times a run restarts itself after a worker died", low=0)

    def steps(self, per_epoch: int) -> int:
        """Returns the steps of a run; of `total_training_steps` and `total_epochs`, what is reached first."""
        limits = self.total_training_steps, self.total_epochs and per_epoch * self.total_epochs
        return min(limit for limit in limits if limit is not None)


@dataclass
class RayConfig:
    ray_init: dict[str, Any] = key({}, "arguments of ray.init")
    timeline_json_file: str | None = key(None, "write Ray's timeline here", path=True)


@dataclass
class Config:
    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig)
    reward: Any = key(
        None,
        "rule that scores every row, whatever its data_source, or FILE:FUNCTION; a list: the sum of all; "
        "unset: data_source decides",
        choices=REWARD_RULES,
    )
    reward_kwargs: dict[str, Any] = key({}, "arguments of the rules in `reward`, e.g. {pattern: ...} of regex")
    reward_weights: list[float] | None = key(None, "weight of each rule in `reward`; unset: 1 each")
    environment: Any = key(
        None,
        "who answers the policy: FILE:Class, module:Class, or a name of a package, as textarena:Wordle-v0; "
        "{NAME: one of these, ...}: the one that a row names in its column environment",
    )
    environment_kwargs: dict[str, Any] = key({}, "arguments of the environment's constructor; of several: by its name")
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    distillation: DistillationConfig = section(DistillationConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    ray_kwargs: RayConfig = section(RayConfig)
