"""Episodes become the response columns of a batch."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paddock.core.batch import NOBODY, Batch, require_one_turn
from paddock.data.loader import left_padded
from paddock.rollouts.episode import Episode


def with_responses(batch: Batch, episodes: Sequence[Episode], pad: int) -> Batch:
    """Returns the batch with the responses of its rows: each ends at the policy's last token, R is the longest.

    Episodes stand in the order of the rows. `environment_rewards` is filled if an environment paid any.
    """
    if [episode.id for episode in episodes] != batch.row.tolist():
        raise ValueError("the rollout returned other rows than were asked for, or in another order")
    responses = [episode.response for episode in episodes]
    spans = list(chain.from_iterable(responses))
    sizes = np.array([len(span.tokens) for span in spans], np.int64)
    lengths = np.array([sum(len(span.tokens) for span in response) for response in responses], np.int64)
    width = int(lengths.max())
    inside = np.arange(width) < lengths[:, None]  # by numpy: torch would wake threads for so little

    def column(values: np.ndarray, padding: int = 0) -> Tensor:
        """Lays the values of all tokens of all spans out as ``[B, R]``."""
        found = np.full(inside.shape, padding, values.dtype)
        found[inside] = values
        return torch.from_numpy(found)

    log_probs = (span.log_probs or [0.0] * len(span.tokens) for span in spans)
    versions = column(np.repeat(np.array([span.version for span in spans], np.int32), sizes), NOBODY)
    columns: dict[str, Any] = {
        "responses": column(in_a_row((span.tokens for span in spans), np.int64), pad),
        "mask": torch.from_numpy((versions.numpy() != NOBODY).astype(np.int64)),
        "lengths": torch.from_numpy(lengths),
        "rollout_log_probs": column(in_a_row(log_probs, np.float32)),
        "versions": versions,
        "done": torch.tensor([episode.done for episode in episodes]),
    }
    if paid := [index for index, span in enumerate(spans) if span.reward]:
        rewards = np.zeros(sizes.sum(), np.float32)
        rewards[sizes.cumsum()[paid] - 1] = [spans[index].reward for index in paid]
        columns["environment_rewards"] = column(rewards)
    names = dict.fromkeys(name for episode in episodes for name in episode.extras)
    extras = {name: [episode.extras.get(name) for episode in episodes] for name in names}
    experts = expert_columns(episodes, batch.prompts.shape[1], width)
    batch = batch.with_(**columns, **experts, extras={**batch.extras, **extras})
    if experts:
        require_one_turn(
            batch,
            "the experts of tokens that an environment wrote are not recorded",
            key="actor_rollout_ref.rollout.enable_rollout_routing_replay",
            value=True,
            fix="leave it out; actor_rollout_ref.actor.router_replay.mode=R2 replays experts of the trainer's own pass",
        )
    return batch


def in_a_row(lists: Iterable[Sequence[float]], kind: type[np.number]) -> np.ndarray:
    """Returns the numbers of all lists, one after the other: `struct` reads a list in a third of numpy's time."""
    code = np.dtype(kind).char
    return np.frombuffer(b"".join([struct.pack(f"{len(one)}{code}", *one) for one in lists]), kind)


def with_prompts(batch: Batch, episodes: Sequence[Episode], pad: int) -> Batch:
    """Returns the batch with the prompts of its episodes, padded on the left: an environment may ask its own."""
    tokens, mask = left_padded([episode.prompt.tokens for episode in episodes], pad)
    return batch.with_(prompts=torch.from_numpy(tokens), prompt_mask=torch.from_numpy(mask))


def expert_columns(episodes: Sequence[Episode], prompt_width: int, width: int) -> dict[str, Tensor]:
    """Returns the recorded choices of experts: prompts padded on the left, responses on the right."""
    chosen = [episode.experts for episode in episodes if episode.experts]
    if not chosen:
        return {}
    like = chosen[0].prompt
    prompts = like.new_zeros(len(chosen), prompt_width, *like.shape[1:])
    responses = like.new_zeros(len(chosen), width, *like.shape[1:])
    for row, one in enumerate(chosen):
        prompts[row, prompt_width - len(one.prompt) :] = one.prompt
        responses[row, : len(one.response)] = one.response
    return {"prompt_experts": prompts, "response_experts": responses}
