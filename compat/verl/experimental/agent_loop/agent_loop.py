"""The base class of agent loops under verl's names, of versions 0.5 to 0.9."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, TypeVar

from paddock.errors import UserError
from paddock.verl.agent_loop import ServerManager, TokenOutput
from paddock.verl.classes import taken
from paddock.verl.loop_factory import LOOPS, Holder
from verl._records import Record

Loop = TypeVar("Loop", bound=type)
Messages = list[dict[str, Any]]

AsyncLLMServerManager = LLMServerClient = ServerManager
DictConfigWrap = _DummyConfig = Holder


class AgentLoopMetrics(Record):
    """Holds the seconds of an episode."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(Record):
    """Holds what an agent loop returns."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = {}  # noqa: RUF012  # each record has a copy
    mm_processor_kwargs: dict[str, Any] | None = None


class ToolListWrap:
    """Holds the tools of a run."""

    def __init__(self, tools: list[Any]):
        self.tools = tools


class AgentLoopBase(ABC):
    """Runs one episode. `self.server_manager.generate` draws turns of the policy."""

    _class_initialized = False
    enable_continuous_token = True

    def __init__(
        self, trainer_config: Any, server_manager: ServerManager, tokenizer: Any, processor: Any = None,
        dataset_cls: Any = None, dataset_config: Any = None, data_config: Any = None, **kwargs: Any,
    ):  # fmt: skip
        config = trainer_config.config
        self.init_class(**taken(self.init_class, {"config": config, "tokenizer": tokenizer, "processor": processor,
                                                  **kwargs}))  # fmt: skip
        self.config, self.rollout_config = config, config.actor_rollout_ref.rollout
        self.data_config = self.dataset_config = config.data
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls = dataset_cls
        self.apply_chat_template_kwargs = dict(config.data.get("apply_chat_template_kwargs") or {})
        self.loop = asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:
        """Prepares the class once: verl before 0.7."""
        cls._class_initialized = True

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput: ...

    @cached_property
    def system_prompt(self) -> list[int]:
        """The tokens that the template writes before the first message, whatever it is."""
        one, two = (self._templated([{"role": "user", "content": ""}] * count, None, False) for count in (1, 2))
        return one[: len(one) - (len(two) - len(one))]

    async def apply_chat_template(
        self, messages: Messages, tools: Any = None, images: Any = None, videos: Any = None, audios: Any = None,
        mm_processor_kwargs: Any = None, remove_system_prompt: bool = False,
    ) -> list[int]:  # fmt: skip
        """Returns the tokens of a prompt; with `remove_system_prompt` those of messages behind a finished turn of the
        policy, with what the template writes between turns."""
        self._assert_mm_supported(bool(images or videos or audios))
        if remove_system_prompt:
            return await asyncio.to_thread(self._behind, messages, tools)
        return await asyncio.to_thread(self._templated, messages, tools)

    def _templated(self, messages: Messages, tools: Any = None, generation: bool = True) -> list[int]:
        options = {"add_generation_prompt": generation, "tokenize": True, **self.apply_chat_template_kwargs}
        return list(self.tokenizer.apply_chat_template(messages, tools=tools or None, **options))

    def _behind(self, messages: Messages, tools: Any = None, answer: Sequence[int] | None = None) -> list[int]:
        dialogue = self.server_manager.dialogue
        found = dialogue.extension(messages, answer or [], tools or None)
        ended = answer is None and found[:1] and found[0] in dialogue.stops
        return found[1:] if ended else found

    async def process_vision_info(self, messages: Messages) -> dict[str, Any]:
        """Returns nothing: agent loops run on texts."""
        return {}

    process_multi_modal_info = process_vision_info

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal:
            reason = "the loop is given images, videos or audio, and agent loops run on texts"
            raise UserError(reason, key="agent_name", value=type(self).__name__, fix="leave them out")

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return {}

    # Continuous tokens, verl 0.9

    async def ct_build_initial_tokens(self, messages: Messages, tools: Any = None, **media: Any) -> list[int]:
        return await self.apply_chat_template(messages, tools, **media)

    async def ct_merge_assistant_token(
        self, runtime_token_ids: list[int], assistant_token_ids: list[int], response_mask: list[int],
        response_logprobs: list[float] | None = None, assistant_logprobs: list[float] | None = None,
    ) -> tuple[Any, list[int], list[float] | None]:  # fmt: skip
        return merged(runtime_token_ids, assistant_token_ids, 1, response_mask, response_logprobs, assistant_logprobs)

    async def ct_merge_non_assistant_msg(
        self, previous_messages: Messages, messages: Messages, runtime_token_ids: list[int], response_mask: list[int],
        response_logprobs: list[float] | None = None, tools: Any = None,
    ) -> tuple[Any, list[int], list[float] | None]:  # fmt: skip
        new = messages[len(previous_messages) :]
        tokens = await asyncio.to_thread(self._behind, new, tools, runtime_token_ids[-1:])
        return merged(runtime_token_ids, tokens, 0, response_mask, response_logprobs, None)


def merged(
    before: list[int], tokens: list[int], mark: int, mask: list[int], log_probs: list[float] | None,
    own: list[float] | None,
) -> tuple[Any, list[int], list[float] | None]:  # fmt: skip
    """Returns tokens appended to those before, the mask, and log-probs where there are some."""
    likely = None if log_probs is None else [*log_probs, *(own or [0.0] * len(tokens))]
    return SimpleNamespace(token_ids=[*before, *tokens]), [*mask, *[mark] * len(tokens)], likely


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Registers a class under the name that rows or `agent.default_agent_loop` ask for."""

    def file(subclass: Loop) -> Loop:
        LOOPS[agent_name] = subclass
        return subclass

    return file


class AgentLoopWorker:
    """Stands for verl's worker; it cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise UserError("agent loops are driven where their engine is, and not by workers", key="agent_name",
                        value=type(self).__name__, fix="write a subclass of AgentLoopBase")  # fmt: skip


class AgentLoopManager(AgentLoopWorker):
    """Stands for verl's manager; it cannot be made."""


__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AsyncLLMServerManager",
    "DictConfigWrap",
    "LLMServerClient",
    "TokenOutput",
    "ToolListWrap",
    "register",
]
