"""What training, evaluation and generation put together alike, over whatever engine answers."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from paddock.config.conversations import converses
from paddock.config.schema import Config
from paddock.data.dataset import MODEL, PromptDataset, PromptRow
from paddock.environments.environment import messages_said
from paddock.rewards.manager import RewardManager
from paddock.rewards.score import ScoreRequest
from paddock.rollouts.environments import Environments, RowEnvironments

NOTHING_TOLD: dict[str, Any] = {"num_turns": 2, "tool_rewards": [], "turn_scores": [], "rollout_reward_scores": {}}
"""What reward functions written for verl may read of any conversation."""


def in_environments(config: Config, dataset: PromptDataset) -> bool:
    """True if rows are answered in environments: by the config, or because rows name agent loops."""
    return converses(config) or dataset.names_agents


def open_environments(
    config: Config, dataset: PromptDataset, tokenizer: Any, stops: frozenset[int], rows: RowEnvironments,
    things: ExitStack, hands: bool = False,
) -> Environments | None:  # fmt: skip
    """Returns the environments that answer the rows, None if none does; `things` closes them. `hands`: see
    `Environments`."""
    if not in_environments(config, dataset):
        return None
    found = things.enter_context(closing(Environments(config, tokenizer, stops, rows, hands)))
    found.check(dataset)
    return found


def try_scorers(config: Config, dataset: PromptDataset, tokenizer: Any, rewards: RewardManager) -> list[ScoreRequest]:
    """Tries every scorer that the rows need, before weights are loaded; returns the responses that were tried."""
    conversation = in_environments(config, dataset)
    chat = config.data.apply_chat_template_kwargs.get("chat_template", tokenizer.chat_template) is not None
    tries = [trial(row, conversation, chat) for row in dataset.one_of_each_source() if row.style != MODEL]
    rewards.check(tries)
    return tries


def trial(row: PromptRow, conversation: bool, chat: bool = False) -> ScoreRequest:
    """Returns an empty response to a row; `conversation`: one of one turn; `chat`: what an environment asks where the
    row asks nothing is messages."""
    asks = conversation and chat and isinstance(row.written_prompt, str) and not row.written_prompt.strip()
    prompt = messages_said("") if asks else row.written_prompt
    request = ScoreRequest(row.data_source, "", row.ground_truth, row.extra_info, row.location, prompt)
    turns = [{"role": "assistant", "content": ""}]
    return replace(request, turns=turns, told=NOTHING_TOLD) if conversation else request
