"""Sends weights to a rollout engine, and verifies by a few tokens that it computes what the trainer does."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from paddock.config.roles import RolloutConfig
from paddock.core.batch import Batch
from paddock.engines.rollout.base import Completion, CopyEngine, Prompt, RolloutEngine, Sampling
from paddock.engines.rollout.copies import bucket_bytes, buckets
from paddock.engines.train.engine import Engine
from paddock.errors import UserError
from paddock.workers.updates import Metrics

PROMPT, ROWS, TOKENS = 8, 8, 8
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Nats a token, in the mean, that rounding in the coarser of both types explains. Stale weights are off by more."""


def sync(trainer: Engine, rollout: RolloutEngine, limits: RolloutConfig) -> Metrics:
    """Sends the trainer's weights to a copy of them and verifies it; an engine on the trainer's own has them."""
    if not isinstance(rollout, CopyEngine):
        return {}
    trainer.move("device")
    rollout.wake()
    send(trainer, rollout, bucket_bytes(limits))
    gap = verify(trainer, rollout, limits)
    trainer.move("host")
    return {"rollout/sync_gap": gap}


def send(trainer: Engine, rollout: CopyEngine, size: int) -> None:
    """Sends the adapter alone to an engine that takes it; else all weights, in buckets of `size` bytes, an adapter
    merged into them."""
    if rollout.takes_adapter:
        with TemporaryDirectory(prefix="paddock-adapter-") as folder:
            trainer.save_adapter(Path(folder))
            rollout.load_adapter(Path(folder))
        return
    first = True
    for bucket, last in buckets(trainer.weights(), size):
        rollout.load_bucket(bucket, first, last)
        first = False


def verify(trainer: Engine, rollout: CopyEngine, limits: RolloutConfig) -> float:
    """Returns the mean gap of both sides' log-probs, for tokens that the engine draws. Every rank must call it."""
    prompt, sampling = question(trainer, limits)
    completions = rollout.generate([prompt], sampling)
    gap, limit = gap_of(trainer, prompt, completions), tolerance(trainer, rollout.dtype)
    if not gap <= limit:
        raise out_of_step(rollout.name, gap, limit, rollout.differing_layers())
    return gap


def question(trainer: Engine, limits: RolloutConfig) -> tuple[Prompt, Sampling]:
    """Returns the prompt that the engine answers, of tokens from all of the vocabulary, and how it draws."""
    words = trainer.rollout_model.config.get_text_config().vocab_size
    length = min(PROMPT, limits.prompt_length)
    tokens = [words * (place + 1) // (length + 1) for place in range(length)]
    sampling = Sampling(
        max_tokens=min(TOKENS, limits.response_length),
        stop_tokens=frozenset(),
        seed=0,
        step=0,
        temperature=trainer.settings.temperature,
        ignore_eos=True,
    )
    return Prompt(tokens, list(range(ROWS))), sampling


def gap_of(trainer: Engine, prompt: Prompt, completions: list[Completion]) -> float:
    """Returns the mean difference of log-probs. Every rank must call it."""
    theirs = trainer.forward(as_batch(prompt.tokens, completions), frozenset({"log_probs"})).need("log_probs")
    return (theirs.float().cpu() - torch.tensor([each.log_probs for each in completions])).abs().mean().item()


def tolerance(trainer: Engine, dtype: torch.dtype) -> float:
    """Returns the largest gap that rounding explains; `dtype` is the engine's."""
    return TOLERANCE[max(trainer.settings.compute, dtype, key=lambda one: torch.finfo(one).eps)]


def as_batch(prompt: list[int], completions: list[Completion]) -> Batch:
    responses = torch.tensor([completion.tokens for completion in completions])
    prompts = torch.tensor([prompt] * len(completions))
    return Batch(
        row=torch.arange(len(completions)),
        group=torch.zeros(len(completions), dtype=torch.long),
        prompts=prompts,
        prompt_mask=torch.ones_like(prompts),
        responses=responses,
        mask=torch.ones_like(responses),
        lengths=torch.full((len(completions),), responses.shape[1]),
    )


def out_of_step(engine: str, gap: float, limit: float, layers: list[str], which: str = "the engine") -> UserError:
    key = "actor_rollout_ref.rollout"
    where = f"not what was sent: {', '.join(layers[:4])}" if layers else "in which layer could not be told"
    return UserError(
        f"after the weight sync the log-probs of {which} are {gap:.3g} nats a token from the trainer's, "
        f"more than {limit:g}; {where}",
        key=f"{key}.name",
        value=engine,
        fix=f"{key}.name=embedded" if layers else f"{key}.dtype as the trainer computes, or {key}.name=embedded",
    )
