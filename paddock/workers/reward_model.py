"""The role that scores by a model: a classifier over whole conversations, or a language model that judges in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from paddock.config.plugins import import_plugin
from paddock.config.schema import DataConfig, RewardModelConfig, RewardModelModelConfig, TrainerConfig
from paddock.core.batch import Batch, PerRow, PerToken
from paddock.core.device import compute_dtype, device_of
from paddock.data.chat import PromptEncoder
from paddock.data.transcript import Transcriber, Transcript, same_tokens
from paddock.engines.rollout.base import Prompt, RolloutEngine, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.engine import Engine
from paddock.engines.train.open import frozen_engine
from paddock.engines.train.settings import Budget, Settings, engine_settings, model_source
from paddock.errors import UserError
from paddock.models.load import load_causal_lm, load_tokenizer, model_folder
from paddock.models.reward_head import KEY, RewardModel, load_reward_model, scored_batch, sequence_scores
from paddock.rewards.judge import Conversation, Judge, JudgeEndpoint, Reply
from paddock.workers.role import Role, stop_tokens
from paddock.workers.updates import Metrics

BUDGET = "reward_model.forward_max_token_len_per_gpu"
MODEL = "reward_model.model"
TOKENIZER_FILES = ("tokenizer*", "*.tiktoken", "vocab.*", "*.model", "spiece*")


@dataclass(frozen=True)
class ModelScores:
    """What a model thinks of a batch's responses."""

    rows: PerRow
    tokens: PerToken | None = None
    """For every token, where `reward_model.token_level` asks for it; `rows` are then their sums."""
    metrics: Metrics = field(default_factory=dict)


class ModelScorer(Protocol):
    cheap: bool
    """True if scoring a row takes almost no time."""

    def scores(self, batch: Batch, texts: Sequence[str]) -> ModelScores:
        """Scores every row; `texts` are the decoded responses."""
        ...

    def check(self, prompt: Any, truth: Any) -> None:
        """Before training: does it answer at all?"""
        ...


class ClassifierScorer(Role):
    """Scores with a reward model: a classifier over whole conversations."""

    cheap = True

    def __init__(self, engine: Engine, transcriber: Transcriber, keys: RewardModelConfig):
        super().__init__(engine, "reward_model")
        assert isinstance(engine.model, RewardModel)
        self.unread, self.transcriber, self.keys = engine.model.unread, transcriber, keys
        if keys.token_level:
            require_token_scores(engine.model, transcriber)

    def check(self, prompt: Any, truth: Any) -> None:
        """It is loaded: nothing else can be missing."""

    def scores(self, batch: Batch, texts: Sequence[str]) -> ModelScores:
        transcripts = [each.without_last(self.unread) for each in self.transcripts(batch)]
        self.require_room(transcripts)
        whole = scored_batch([t.prompt for t in transcripts], [t.answer for t in transcripts], self.keys.token_level)
        values = self.forward(whole, frozenset({"values"})).need("values")
        tokens = self.of_tokens(values, batch.need("mask")) if self.keys.token_level else None
        rows = sequence_scores(whole, values) if tokens is None else tokens.sum(-1)
        require_finite(rows, batch)
        cut = sum(transcript.cut for transcript in transcripts)
        return ModelScores(rows.float().cpu(), tokens, {"reward/model/cut": float(cut)})

    def transcripts(self, batch: Batch) -> list[Transcript]:
        kept = batch.need("prompt_mask") != 0
        prompts = [row[own].tolist() for row, own in zip(batch.prompts, kept, strict=True)]
        turns = batch.extras.get("conversation")
        return self.transcriber.transcripts(batch.extras["messages"], prompts, batch.answers(), turns)

    def require_room(self, transcripts: Sequence[Transcript]) -> None:
        longest, room = max(map(len, transcripts)), self.keys.forward_max_token_len_per_gpu
        if self.keys.use_dynamic_bsz and longest > room:
            raise UserError(
                f"the reward model reads a sequence of {longest} tokens",
                key=BUDGET,
                value=room,
                fix=f"{longest} or more; or cut sequences: reward_model.max_length={room}",
            )

    @staticmethod
    def of_tokens(values: PerToken, mask: PerToken) -> PerToken:
        """The value behind each token is at the next place; what the policy did not write has none."""
        behind = values[:, 1 : 1 + mask.shape[1]]
        missing = mask.shape[1] - behind.shape[1]
        return torch.nn.functional.pad(behind, (0, missing)).to(mask.device).float() * (mask != 0)


class JudgeScorer:
    """Scores with a language model that judges in words."""

    cheap = False

    def __init__(self, judge: Judge):
        self.judge = judge

    def check(self, prompt: Any, truth: Any) -> None:
        self.judge.check(prompt, truth)

    def scores(self, batch: Batch, texts: Sequence[str]) -> ModelScores:
        conversations = batch.extras.get("conversation", [()] * len(batch))
        texts = [told(turns) if len(turns) > 1 else text for turns, text in zip(conversations, texts, strict=True)]
        values, metrics = self.judge.scores(batch.extras["messages"], texts, batch.extras["ground_truth"])
        return ModelScores(torch.tensor(values), metrics=metrics)


def told(turns: Sequence[Mapping[str, Any]]) -> str:
    """Returns a conversation as a judge reads it: each turn under its author's name."""
    return "\n\n".join(f"[{turn['role']}]\n{turn['content']}" for turn in turns)


class EngineJudge(Role):
    """Asks a language model in this process."""

    def __init__(self, engine: Engine, rollout: RolloutEngine, tokenizer: Any, keys: RewardModelConfig, seed: int):
        super().__init__(engine, "judge")
        self.rollout, self.encoder, self.limits = rollout, PromptEncoder(tokenizer), keys.rollout
        self.sampling = Sampling(
            max_tokens=self.limits.response_length,
            stop_tokens=stop_tokens(engine, tokenizer),
            seed=seed,
            step=0,
            temperature=keys.judge.temperature,
        )

    def __call__(self, conversations: Sequence[Conversation]) -> list[Reply]:
        places = [f"question {number}" for number in range(len(conversations))]
        encoded = self.encoder.encode(list(conversations), places, "prompt")
        limits = self.limits
        longest = limits.prompt_length
        if limits.max_model_len is not None:
            longest = min(longest, limits.max_model_len - limits.response_length)
        fitting = [place for place, tokens in enumerate(encoded) if len(tokens) <= longest]
        with self.on_device():
            found = self.rollout.generate([Prompt(encoded[place], [place]) for place in fitting], self.sampling)
        if limits.free_cache_engine:
            self.rollout.sleep()
        texts = self.encoder.tokenizer.batch_decode([each.tokens for each in found], skip_special_tokens=True)
        written = dict(zip(fitting, texts, strict=True))
        too_long = f"a question has more than {longest} tokens: reward_model.rollout.prompt_length, max_model_len"
        return [
            Reply(written[place]) if place in written else Reply(cause="too_long", detail=too_long)
            for place in range(len(conversations))
        ]


def open_reward_model(
    reward: RewardModelConfig, data: DataConfig, trainer: TrainerConfig, tokenizer: Any, stops: frozenset[int]
) -> ModelScorer | None:
    """Opens the scorer that `reward_model` describes, if it is enabled; `tokenizer` and `stops` are the policy's."""
    if not reward.enable:
        return None
    if reward.model.external_lib:
        import_plugin(reward.model.external_lib, "reward_model.model.external_lib")
    if reward.judge.source == "endpoint":
        return JudgeScorer(Judge(reward.judge, JudgeEndpoint(reward.judge, reward.rollout.response_length)))
    if reward.judge.source == "engine":
        return JudgeScorer(Judge(reward.judge, open_judge(reward, trainer)))
    device = device_of(trainer.device)
    rows = None if reward.use_dynamic_bsz else reward.micro_batch_size_per_gpu
    settings = Settings(
        forward_budget=Budget(reward.forward_max_token_len_per_gpu + 1, rows, BUDGET),  # one place behind each answer
        packed=reward.model.use_remove_padding,
        **engine_settings(reward.model.fsdp_config, device),
    )
    model = load_reward_model(**model_source(reward.model, MODEL), dtype=settings.wide, device=device)
    engine = frozen_engine(model, settings)
    engine.move("host")
    return ClassifierScorer(engine, open_transcriber(reward, data, tokenizer, stops), reward)


def open_judge(reward: RewardModelConfig, trainer: TrainerConfig) -> EngineJudge:
    device = device_of(trainer.device)
    dtype = compute_dtype(reward.rollout.dtype, device)
    model = load_causal_lm(**model_source(reward.model, MODEL), dtype=dtype, device=device)
    engine = frozen_engine(model, Settings(offload_params=reward.model.fsdp_config.param_offload))
    limits = reward.rollout
    rollout: RolloutEngine
    if limits.name == "embedded":
        rollout = EmbeddedEngine(
            model, max_num_seqs=limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens
        )
    else:
        assert limits.name == "hf"
        rollout = HFEngine(model, max_num_seqs=limits.max_num_seqs)
    engine.move("host")
    return EngineJudge(engine, rollout, own_tokenizer(reward.model), reward, trainer.seed)


def open_transcriber(reward: RewardModelConfig, data: DataConfig, tokenizer: Any, stops: frozenset[int]) -> Transcriber:
    reader = None
    if reward.model.input_tokenizer is not None:
        reader = own_tokenizer(reward.model)
        require_policys_tokens(reward.model, tokenizer)
    writer = PromptEncoder(tokenizer, data.apply_chat_template_kwargs)
    return Transcriber(writer, reader, stops, reward.max_length)


def own_tokenizer(model: RewardModelModelConfig) -> Any:
    folder = model_folder(str(model.path), KEY)
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise UserError(
            "its folder holds no tokenizer",
            key=KEY,
            value=model.path,
            fix="put one beside it; or, if it reads the policy's tokens, reward_model.model.input_tokenizer=null",
        )
    return load_tokenizer(str(model.path), model.trust_remote_code, key=KEY)


def require_policys_tokens(model: RewardModelModelConfig, tokenizer: Any) -> None:
    """Refuses an `input_tokenizer`, which decodes responses, that is not the policy's, under whichever path."""
    key = "reward_model.model.input_tokenizer"
    if str(model_folder(str(model.input_tokenizer), key)) == str(tokenizer.name_or_path):
        return
    if not same_tokens(load_tokenizer(str(model.input_tokenizer), model.trust_remote_code, key=key), tokenizer):
        raise UserError(
            "is not the tokenizer that the policy writes with, and could not read its responses",
            key=key,
            value=model.input_tokenizer,
            fix="leave it out; the reward model's own tokenizer is read from reward_model.model.path",
        )


def require_token_scores(model: RewardModel, transcriber: Transcriber) -> None:
    key = "reward_model.token_level"
    if not model.every_token:
        raise UserError(
            "the reward model scores whole sequences",
            key=key,
            value=True,
            fix="leave it out, or use a token classifier or a critic",
        )
    if not transcriber.keeps_tokens:
        raise UserError(
            "the reward model reads other tokens than the policy writes, so its scores speak of none of these",
            key=key,
            value=True,
            fix="leave it out, or use a reward model with the policy's tokenizer and chat template",
        )


def require_finite(rows: PerRow, batch: Batch) -> None:
    broken = (~torch.isfinite(rows)).nonzero()
    if len(broken):
        row = int(broken[0])
        place = batch.extras["location"][row] if "location" in batch.extras else f"row {int(batch.row[row])}"
        raise UserError(
            f"the reward model gave {float(rows[row])} to a response to {place}",
            key=KEY,
            fix="use other weights, or reward_model.model.fsdp_config.dtype=float32",
        )
