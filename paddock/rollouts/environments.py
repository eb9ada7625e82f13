"""From rows to episodes over a rollout engine: the environments of a run, which one a row has, and `roll_out`."""

from __future__ import annotations

import copy
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from paddock.config.conversations import SINGLE, TOOLS, converses, environments_named, files_of, with_verl_limits
from paddock.config.plugins import import_plugin
from paddock.config.rewards import PYTHON
from paddock.config.schema import Config
from paddock.core.background import Workers
from paddock.core.registry import suggest
from paddock.data.chat import PromptEncoder
from paddock.data.columns import ENVIRONMENT
from paddock.data.dataset import PromptDataset, PromptRow
from paddock.data.dialogue import Dialogue
from paddock.data.proof import HIDDEN, require_proof, untrained_marks
from paddock.engines.rollout.base import Completion, Decoded, Request, RolloutEngine, Sampling, Until
from paddock.environments.calls import format_of
from paddock.environments.catalogue import Factory, environment_of, environments_at
from paddock.environments.environment import Environment
from paddock.environments.tool_environment import ToolEnvironment, load_tools
from paddock.environments.tools import Tool
from paddock.errors import UserError
from paddock.models.load import model_folder
from paddock.models.untrained import untrained
from paddock.rollouts.conversation import Conversation, ConversationSetting, prompts_are_texts
from paddock.rollouts.conversations import Clock, Conversations, OnEpisodes
from paddock.rollouts.episode import Episode, begun, continued, tokens_of
from paddock.sandbox.program import settings_of

log = logging.getLogger(__name__)

Functions = Mapping[str, Callable[..., Any]]
NO_FUNCTIONS: Functions = {}
AGENT = "actor_rollout_ref.rollout.agent.default_agent_loop"
TOOL_CONFIG = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
VERL = "paddock.verl.conversations"


class OneTurn(Environment):
    """Ends with the first turn: what a plain rollout is."""

    max_turns = 1
    inline = True


class RowEnvironments:
    """Knows the environment of each row, by the config and by the row's `agent_name`."""

    def __init__(self, config: Config, functions: Functions = NO_FUNCTIONS):
        """`functions`: what the config names as `python:NAME`, of the program that made the run."""
        self.config, self.functions = config, functions
        self.factory = cache(self.made)
        """Returns the factory of rows with this `agent_name`, or without one; the second argument: which environment,
        of several."""
        if converses(config.actor_rollout_ref.rollout, config.environment):
            self.import_library()

    def of(self, row: PromptRow) -> Factory:
        """Returns the factory of a row."""
        if row.agent or not self.routed:
            return self.factory(row.agent, None)
        if row.environment not in list(self.environments):
            said = "names no environment" if row.environment is None else f"there is no environment {row.environment!r}"
            reason = f"{said}, and the run has several"
            fix = f"the run has {', '.join(map(str, self.environments))}: each row names one of them"
            raise UserError(reason, key=f"{row.location}, column {ENVIRONMENT!r}", fix=fix)
        return self.factory(None, row.environment)

    def without_agent(self) -> list[Factory]:
        """Returns the factories of rows that name no agent loop."""
        return [self.factory(None, name) for name in (self.environments if self.routed else [None])]

    @property
    def routed(self) -> bool:
        """True if rows name their environments."""
        return bool(self.environments) and None not in self.environments

    @cached_property
    def environments(self) -> dict[str | None, Any]:
        """Returns the classes, functions and names of environments by the names that rows give; under None the one of
        all rows."""
        named = {name: self.named(one) for name, one in environments_named(self.config.environment).items()}
        alone = named.get(None)
        held = environments_at(alone) if isinstance(alone, str) else None
        found: dict[str | None, Any] = dict((named if held is None else held).items())
        kwargs = self.config.environment_kwargs
        if None not in found and (unknown := [name for name in kwargs if name not in found]):
            fix = f"{{NAME: {{...}}}} with the name of an environment: {', '.join(map(str, found))}"
            raise UserError(f"there is no environment {unknown[0]!r}", key="environment_kwargs", value=kwargs, fix=fix)
        return found

    def made(self, agent: str | None, environment: str | None) -> Factory:
        rollout = self.config.actor_rollout_ref.rollout
        if agent is None and self.environments:
            limit, kwargs = rollout.multi_turn.tool_timeout, self.config.environment_kwargs
            kwargs = kwargs if environment is None else kwargs.get(environment, {})
            return environment_of(self.environments[environment], kwargs, limit)
        name = agent or rollout.agent.default_agent_loop
        if found := self.loop(name):
            return found
        if name == TOOLS or (agent is None and name == SINGLE and rollout.multi_turn.enable):
            return self.with_tools()
        if name == SINGLE:
            return environment_of(OneTurn)
        known = [SINGLE, TOOLS, *self.verl.loop_names()]
        raise UserError("there is no such agent loop", key=AGENT, value=name, fix=suggest(name, known))

    def with_tools(self) -> Factory:
        limits, tools = self.config.actor_rollout_ref.rollout.multi_turn, self.named_tools()
        if not tools and not limits.interaction_config_path:
            raise UserError(
                "no tool is named", key="actor_rollout_ref.rollout.multi_turn.enable", value=limits.enable,
                fix="actor_rollout_ref.rollout.multi_turn.function_tool_path=FILE.py, or environment=FILE.py:Class",
            )  # fmt: skip
        plain = Factory(TOOLS, lambda: ToolEnvironment(tools), tools, None, inline=True)
        return self.verl.with_tools(tools) or plain

    def loop(self, name: str) -> Factory | None:
        """Returns the agent loop in verl's form of this name: one of the config's file, or one that a module
        registered."""
        if name not in (SINGLE, TOOLS):
            self.import_library()
        found: Factory | None = self.verl.loop(name, self.named_tools)
        return found

    def import_library(self) -> None:
        """Imports the module that may register sources of environments, formats of calls, and agent loops."""
        if library := self.config.actor_rollout_ref.model.external_lib:
            import_plugin(library, "actor_rollout_ref.model.external_lib")

    @cached_property
    def verl(self) -> Any:
        """Knows the tools, interactions and agent loops in verl's form (`VerlConversations`)."""
        return importlib.import_module(VERL).VerlConversations(self.config.actor_rollout_ref.rollout, self.config)

    def named(self, name: str) -> str | Callable[..., Any]:
        """Returns the name, or the class of the program that made the run."""
        if not name.startswith(f"{PYTHON}:"):
            return name
        own = self.functions.get(name.removeprefix(f"{PYTHON}:"))
        if own is None:
            reason = "is a class of the program that made this run, and no other process has it"
            raise UserError(reason, key="environment", value=name, fix="put it into a file: environment=FILE.py:Class")
        return own

    def named_tools(self) -> list[Tool]:
        """Returns the functions and classes that the config names as tools."""
        limits = self.config.actor_rollout_ref.rollout.multi_turn
        classes: list[Tool] = self.verl.tools()
        paths = files_of(limits.function_tool_path)
        functions = load_tools(paths, lambda: settings_of(self.config.reward_model), self.functions)
        names = [one.name for one in (*classes, *functions)]
        if repeated := [name for name in names if names.count(name) > 1]:
            reason = f"two tools are both called {repeated[0]}, and a call names its tool"
            raise UserError(reason, key=TOOL_CONFIG, value=limits.tool_config_path, fix="rename one of them")
        return [*classes, *functions]

    def prompting(self) -> Config:
        """Returns the config with prompts that tell the policy of its tools, if rows without an agent have some."""
        schemas = [] if self.routed else [tool.schema() for tool in self.factory(None, None).tools]
        if not schemas:
            return self.config
        config = copy.deepcopy(self.config)
        config.data.apply_chat_template_kwargs["tools"] = schemas
        return config


class Environments:
    """Runs episodes over an engine. One is made where the engine is: here, or in each rank."""

    def __init__(
        self, config: Config, tokenizer: Any, stops: frozenset[int], rows: RowEnvironments, hands: bool = False
    ):
        """`hands`: episodes carry their environments."""
        self.config, self.rows = config, rows
        self.clock = Clock()
        self.told: set[str] = set()
        self.ahead: Conversations | None = None
        """Conversations of sessions that may end before they do."""
        rollout, kwargs = config.actor_rollout_ref.rollout, dict(config.data.apply_chat_template_kwargs)
        prompted = kwargs.pop("tools", [])
        self.setting = ConversationSetting(
            limits=rollout.multi_turn,
            prompt_length=config.data.max_prompt_length,
            truncation=config.data.truncation,
            dialogue=Dialogue(PromptEncoder(tokenizer, kwargs), stops),
            format=format_of(rollout.multi_turn.format, kwargs.get("chat_template", tokenizer.chat_template)),
            tokenizer=tokenizer,
            stops=stops,
            workers=Workers(),
            deterministic=rollout.deterministic,
            hands_environments=hands,
            routes=rows.routed,
            prompted=prompted,
        )

    def check(self, dataset: PromptDataset) -> None:
        """Refuses rows that name no environment of several, and templates by which turns cannot follow each other."""
        for row in dataset.first_of_each(ENVIRONMENT) if self.rows.routed else [dataset[0]]:
            self.prove(row)

    def prove(self, row: PromptRow) -> None:
        """Refuses a chat template by which several turns cannot follow each other; plain texts need none."""
        factory, dialogue = self.rows.of(row), self.setting.dialogue
        if not prompts_are_texts(row, dialogue) and factory.max_turns != 1:
            tools = [tool.schema() for tool in factory.tools]
            asked = () if isinstance(row.messages, str) else row.messages
            proof = require_proof(dialogue, self.setting.format, tools or None, asked)
            for note in proof.notes if tools else ():
                if note.startswith(HIDDEN):
                    log.warning(note)
            model = self.config.actor_rollout_ref.model.path
            if tools and model and (unknown := untrained(model_folder(model), proof.marks)):
                log.warning(untrained_marks(self.setting.tokenizer.convert_ids_to_tokens(unknown)))

    def run(
        self, engine: RolloutEngine, version: int, asked: Sequence[Episode], sampling: Sampling,
        on_done: OnEpisodes | None = None, until: Until | None = None,
    ) -> list[Episode]:  # fmt: skip
        """Returns the same episodes at their end, as `roll_out` does; those that have not ended go on at the next call
        that has an `until`."""
        if not asked:
            return []
        talks = self.ahead if until else None
        if talks is None:
            talks = Conversations(engine, self.config.actor_rollout_ref.rollout.max_num_seqs, self.clock)
        self.ahead = talks if until else self.ahead
        begun = {conversation.id for conversation in talks.conversations.values()}
        new = [episode for episode in asked if episode.id not in begun]
        talks.begin([self.conversation(one.row, one.id, replace(sampling, step=one.step), version) for one in new])
        ended = {episode.id: episode for episode in talks.run(version, on_done, until)}
        self.tell_of_limits(list(ended.values()))
        return [ended.get(one.id, one) for one in asked]

    def conversation(self, row: PromptRow, number: int, sampling: Sampling, version: int) -> Conversation:
        factory = self.rows.of(row)
        play: Any = factory.conversation or Conversation
        if self.config.algorithm.staleness and not play.runs_ahead:
            reason = f"{factory.name} is an agent loop in verl's form, which holds turns of one version alone"
            raise UserError(reason, key="algorithm.staleness", value=self.config.algorithm.staleness, fix="0")
        return play(row, number, factory, self.setting, sampling, version)

    def tell_of_limits(self, found: Sequence[Episode]) -> None:
        """Warns, once each, of results that were cut and of calls that took too long."""
        limits = with_verl_limits(self.setting.limits)
        told = {
            "cut_results": f"results of tools are cut to {limits.max_tool_response_length} characters "
            "(actor_rollout_ref.rollout.multi_turn.max_tool_response_length)",
            "timeouts": f"calls took longer than {limits.tool_timeout:g} s "
            "(actor_rollout_ref.rollout.multi_turn.tool_timeout), and were given up",
        }
        for name, warning in told.items():
            times = sum(one.extras[name] for one in found)
            if times and name not in self.told:
                self.told.add(name)
                log.warning("%d %s", times, warning)

    def close(self) -> None:
        if self.ahead:
            self.ahead.cancel()
        self.setting.workers.close()


class Sampler(ABC):
    """Anything that answers prompts: a rollout engine beside the actor, or the rollout of many ranks."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Returns the version of the weights that it samples with."""

    @property
    def decoded(self) -> Decoded | None:
        """Returns what it has decoded so far; None: it does not count that."""
        return None

    @property
    def ends_sooner(self) -> bool:
        """True if it heeds `Until.sooner`, and what was drawn of responses is kept then."""
        return False

    runs_on = False
    """True if it samples in a pool of its own, beside the training."""
    idle = 0.0
    """Seconds in which such a pool did nothing between the last two rollouts."""

    def run_on(self, asked: list[Episode], sampling: Sampling) -> None:
        """Goes on with these episodes beside the caller, until another call comes; the next call with an `until`
        goes on from there. A rollout that does not run on leaves them as they are."""
        return

    @abstractmethod
    def go_on(
        self,
        asked: list[Episode],
        sampling: Sampling,
        on_done: OnEpisodes | None = None,
        until: Until | None = None,
    ) -> list[Episode]:
        """Returns the same episodes with what was drawn of them, as `roll_out` does."""

    def episodes(
        self, rows: list[PromptRow], samples: int, sampling: Sampling, on_done: OnEpisodes | None = None
    ) -> list[Episode]:
        """Returns `samples` episodes for each row, row after row."""
        return self.go_on(begun(rows, samples, sampling.step), sampling, on_done)


def roll_out(
    engine: RolloutEngine, version: int, asked: Sequence[Episode], sampling: Sampling,
    on_done: OnEpisodes | None = None, environments: Environments | None = None, until: Until | None = None,
) -> list[Episode]:  # fmt: skip
    """Returns the same episodes with what was drawn of them: all are finished, unless `until` names some of them by id.

    Rows are answered in `environments` if there are any, else each episode is one turn of the policy. `on_done` hears
    of episodes that are finished while others are not.
    """
    if environments:
        return environments.run(engine, version, asked, sampling, on_done, until)
    episodes = {episode.id: episode for episode in asked}

    def take(parts: list[Completion]) -> list[Episode]:
        return [continued(episodes[part.row], part, version) for part in parts]

    def ended(parts: list[Completion]) -> None:
        assert on_done is not None
        on_done(take(parts))

    parts = engine.answer(requests_of(asked, sampling), sampling, on_done and ended, until)
    episodes |= {episode.id: episode for episode in take(parts)}
    return list(episodes.values())


def requests_of(asked: Sequence[Episode], sampling: Sampling) -> list[Request]:
    """Returns a request for each episode that has begun, and one for all others of a prompt; keys are the ids."""
    together: dict[tuple[int, int | None, int | None], list[Episode]] = {}
    for episode in asked:
        name = episode.group, episode.prompt.max_tokens, episode.id if episode.spans else None
        together.setdefault(name, []).append(episode)
    return [request_of(episodes, sampling) for episodes in together.values()]


def request_of(episodes: list[Episode], sampling: Sampling) -> Request:
    """Returns the request for what is to be drawn of these episodes, which begin with the same tokens."""
    first = episodes[0]
    ids, drawn = [episode.id for episode in episodes], tokens_of(first)
    return Request(
        tokens=first.prompt.tokens + drawn,
        keys=ids,
        rows=ids,
        step=first.step,
        limit=first.prompt.limit(sampling) - len(drawn),
        start=len(drawn),
        images=first.prompt.images,
        written=len(drawn),
    )
