"""What training, evaluation and generation put together alike, over whatever engine answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddock.config.conversations import converses, has_agent_loops
from paddock.config.rewards import reward_parts
from paddock.config.schema import Config
from paddock.config.topology import in_one_process
from paddock.data.chat import Messages, PromptEncoder
from paddock.data.dataset import MODEL, PromptDataset, PromptRow, Styles, without_a_model
from paddock.environments.environment import messages_said
from paddock.errors import UserError
from paddock.models.image_reader import ImageReader
from paddock.models.load import open_tokenizer
from paddock.rewards.manager import NO_FUNCTIONS, Functions, RewardManager, named_scorers
from paddock.rewards.score import ScoreRequest
from paddock.rollouts.environments import Environments, RowEnvironments
from paddock.trainer.model_rewards import ModelRewards, validation_styles
from paddock.workers.reward_model import open_reward_model
from paddock.workers.sharded import Ranks, ShardedScorer

PROMPT = "prompt"
NO_EXTRAS: dict[str, Any] = {"num_turns": 2, "tool_rewards": [], "turn_scores": [], "rollout_reward_scores": {}}
"""What reward functions written for verl may read of any conversation."""


class Assembly:
    """Opens the tokenizer, data, rewards and environments of a config."""

    def __init__(self, config: Config, things: ExitStack, functions: Functions = NO_FUNCTIONS):
        """`things` closes what is opened. `functions`: rewards, tools and environments that the config names as
        `python:NAME`."""
        self.things, self.functions = things, functions
        self.rows = RowEnvironments(config, functions)
        self.config = self.rows.prompting()
        self.tokenizer = open_tokenizer(self.config.actor_rollout_ref.model, self.config.data)
        self.reader = ImageReader.of(self.config.actor_rollout_ref, self.config.data)

    def dataset(self, files: list[str], key: str, styles: Styles = without_a_model) -> PromptDataset:
        """Opens further rows, read as those of the config are."""
        return PromptDataset(files, self.tokenizer, self.config.data, key=key, reader=self.reader, styles=styles)

    def held_out(self, files: list[str] | None = None) -> PromptDataset:
        """Opens these files as rows to validate on; without any, those of the config."""
        styles = validation_styles(self.config.reward_model)
        if files is not None:
            return self.dataset(files, "data.val_files", styles)
        return PromptDataset.validation(self.config.data, self.tokenizer, self.reader, styles)

    def rewards(self, folder: Path | None = None) -> RewardManager:
        return self.things.enter_context(open_rewards(self.config, self.functions, folder))

    def try_scorers(self, dataset: PromptDataset, rewards: RewardManager) -> list[ScoreRequest]:
        """Tries every scorer that the rows need, before weights are loaded; returns the responses that were tried."""
        conversation = self.converses_on(dataset)
        kwargs = self.config.data.apply_chat_template_kwargs
        chat = kwargs.get("chat_template", self.tokenizer.chat_template) is not None
        tries = [trial(row, conversation, chat) for row in dataset.one_of_each_source() if row.style != MODEL]
        rewards.check(tries)
        return tries

    def converses_on(self, dataset: PromptDataset | None) -> bool:
        """True if rows are answered in environments: by the config, or because rows name agent loops."""
        named = dataset is not None and dataset.names_agents
        return named or converses(self.config.actor_rollout_ref.rollout, self.config.environment)

    def environments(
        self, stops: frozenset[int], dataset: PromptDataset | None = None, hands: bool = False
    ) -> Environments | None:
        """Opens the environments that answer rows, and tries those of the dataset; None if none does. `hands`: see
        `Environments`."""
        if not self.converses_on(dataset):
            return None
        if hands and not in_one_process(self.config):
            raise UserError(
                "asks for `environments`, which live in the processes of their engines",
                key="custom_reward_function.path",
                value=self.config.custom_reward_function.path,
                fix="run in one process; or let the environment pay: a method get_reward, or reward(episode)",
            )
        made = Environments(self.config, self.tokenizer, stops, self.rows, hands)
        self.things.enter_context(closing(made))
        if dataset is not None:
            made.check(dataset)
        return made

    def models(self, stops: frozenset[int], scoring: Ranks | None = None) -> ModelRewards | None:
        """Opens the reward model in this process, or in the ranks that have it; None if the run has none."""
        keys, config = self.config.reward_model, self.config
        if scoring is not None:
            return ModelRewards(ShardedScorer(scoring, keys.judge.source is None, self.tokenizer, stops), keys)
        scorer = open_reward_model(keys, config.data, config.trainer, self.tokenizer, stops)
        return ModelRewards(scorer, keys) if scorer else None

    def rows_of_prompts(self, prompts: Sequence[Messages], groups: Iterator[int], setting: str) -> list[PromptRow]:
        """Returns rows that ask these prompts, a text as a user's message if the tokenizer has a chat template.
        `groups` are their ids; `setting` is how a longer prompt is allowed, with {} for its tokens."""
        data = self.config.data
        kwargs, longest = data.apply_chat_template_kwargs, data.max_prompt_length
        template = data.apply_chat_template and (self.tokenizer.chat_template or "chat_template" in kwargs)
        asked = [[{"role": "user", "content": one}] if isinstance(one, str) and template else one for one in prompts]
        names = ["the prompt"] if len(asked) == 1 else [f"prompt {number}" for number in range(len(asked))]
        encoded = PromptEncoder(self.tokenizer, kwargs).encode(asked, names, PROMPT)
        for name, tokens in zip(names, encoded, strict=True):
            if len(tokens) > longest:
                reason, fix = f"{name} has {len(tokens)} tokens", setting.format(len(tokens))
                raise UserError(reason, key="data.max_prompt_length", value=longest, fix=fix)
        return [
            PromptRow(0, group, tokens, messages, PROMPT, None, {}, name, written_prompt=prompt)
            for tokens, messages, name, prompt, group in zip(encoded, asked, names, prompts, groups, strict=False)
        ]


def open_rewards(config: Config, functions: Functions = NO_FUNCTIONS, folder: Path | None = None) -> RewardManager:
    """Returns what scores the responses of a run. `folder`: that of the run."""
    reward = config.reward_model
    return RewardManager(
        reward,
        named_scorers(reward_parts(config), config.reward_kwargs, reward, functions),
        weighted=config.custom_reward_function.weights is not None,
        environment_pays=config.environment is not None,
        loops_may_score=has_agent_loops(config.actor_rollout_ref.rollout.agent),
        total_steps=config.trainer.total_training_steps or 1,
        folder=folder,
    )


def trial(row: PromptRow, conversation: bool, chat: bool) -> ScoreRequest:
    """Returns an empty response to a row, which scorers are tried on. `conversation`: it is a conversation of one turn.
    `chat`: an environment asks by messages if the row has no prompt."""
    asks = conversation and chat and isinstance(row.written_prompt, str) and not row.written_prompt.strip()
    prompt = messages_said("") if asks else row.written_prompt
    request = ScoreRequest(row.data_source, "", row.ground_truth, row.extra_info, row.location, prompt)
    turns = [{"role": "assistant", "content": ""}]
    return replace(request, turns=turns, extra_fields=NO_EXTRAS) if conversation else request
