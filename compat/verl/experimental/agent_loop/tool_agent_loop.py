"""The loop with tools under verl's names, for classes that change a state of it. Rows with `tool_agent` do not need it:
`paddock.environments` runs their tools."""

from __future__ import annotations

import asyncio
import json
import logging
from enum import Enum
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from paddock.errors import UserError
from paddock.rollouts.conversation import shortened
from paddock.verl.classes import settled, taken
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return
from verl.tools.schemas import ToolResponse
from verl.tools.tool_registry import initialize_tools_from_config
from verl.utils.profiler import simple_timer

logger = logging.getLogger(__name__)


class AgentState(Enum):
    """Names what a loop does next."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"
    INTERACTING = "interacting"


class AgentData(SimpleNamespace):
    """Holds the state of an episode."""

    def __init__(self, messages: list[dict[str, Any]], **given: Any):
        lists = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "turn_scores", "tool_rewards")
        empty: dict[str, Any] = {name: [] for name in (*lists, "tool_calls")}
        nothing = dict.fromkeys(("image_data", "video_data", "audio_data", "interaction", "routed_experts"))
        start = {"metrics": {}, "request_id": uuid4().hex, "tools_kwargs": {}, "interaction_kwargs": {},
                 "extra_fields": {}, "user_turns": 0, "assistant_turns": 0}  # fmt: skip
        known = {name: value for name, value in given.items() if value is not None}
        super().__init__(messages=messages, **{**empty, **nothing, **start, **known})


class ToolAgentLoop(AgentLoopBase):
    """Lets the policy call tools until a turn calls none; an interaction may answer such a turn.

    What stands between two turns is what the template writes there, also before the first message.
    """

    def __init__(self, *args: Any, tools: Any = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        rollout, limits = self.rollout_config, self.rollout_config.multi_turn
        for name in ("max_user_turns", "max_assistant_turns", "max_parallel_calls", "max_tool_response_length",
                     "tool_response_truncate_side"):  # fmt: skip
            setattr(self, name, limits[name])
        self.prompt_length, self.response_length = rollout.prompt_length, rollout.response_length
        if tools is None and limits.tool_config_path:
            tools = SimpleNamespace(tools=initialize_tools_from_config(limits.tool_config_path))
        listed = tools.tools if tools is not None else []
        self.tools = {tool.name: tool for tool in listed}
        self.tool_schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in listed]
        self.tool_parser_name = limits.format
        self.tool_parser = ToolParser.get_tool_parser(limits.format, self.tokenizer)
        self.interaction_config_file = limits.interaction_config_path
        if self.interaction_config_file:
            self.interaction_map = self._initialize_interactions(self.interaction_config_file)

    def _initialize_interactions(self, interaction_config_file: str) -> dict[str, Any]:
        return initialize_interactions_from_config(interaction_config_file)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        data = AgentData(list(kwargs["raw_prompt"]), tools_kwargs=kwargs.get("tools_kwargs"))
        if self.interaction_config_file:
            data.interaction_kwargs = dict(kwargs["extra_info"].get("interaction_kwargs") or {})
            data.interaction = self.interaction_map[data.interaction_kwargs["name"]]
            await data.interaction.start_interaction(data.request_id, **data.interaction_kwargs)
        steps: dict[AgentState, Any] = {
            AgentState.PENDING: lambda: self._handle_pending_state(data, sampling_params),
            AgentState.GENERATING: lambda: self._handle_generating_state(data, sampling_params),
            AgentState.PROCESSING_TOOLS: lambda: self._handle_processing_tools_state(data),
            AgentState.INTERACTING: lambda: self._handle_interacting_state(data),
        }
        state = AgentState.PENDING
        while state != AgentState.TERMINATED:
            state = await steps[state]()
        return self._output(data)

    def _output(self, data: AgentData) -> AgentLoopOutput:
        split, most = len(data.prompt_ids) - len(data.response_mask), self.response_length
        fields = {**data.extra_fields, "turn_scores": data.turn_scores, "tool_rewards": data.tool_rewards}
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:split], response_ids=data.prompt_ids[split:][:most],
            response_mask=data.response_mask[:most], response_logprobs=data.response_logprobs[:most] or None,
            num_turns=data.user_turns + data.assistant_turns + 1, metrics=data.metrics, extra_fields=fields,
        )  # fmt: skip

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        agent_data.prompt_ids = await self.apply_chat_template(agent_data.messages, tools=self.tool_schemas)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        data = agent_data
        with simple_timer("generate_sequences", data.metrics):
            turn = await self.server_manager.generate(
                request_id=data.request_id, prompt_ids=data.prompt_ids, sampling_params=sampling_params
            )
        data.assistant_turns += 1
        data.response_ids = turn.token_ids
        self._append(data, turn.token_ids, 1, turn.log_probs)
        limits = (self.max_assistant_turns, data.assistant_turns), (self.max_user_turns, data.user_turns)
        full = not ignore_termination and len(data.response_mask) >= self.response_length
        if full or any(most and count >= most for most, count in limits):
            return AgentState.TERMINATED
        text, data.tool_calls = await self.tool_parser.extract_tool_calls(data.response_ids)
        data.messages.append({"role": "assistant", "content": text})
        if data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.INTERACTING if self.interaction_config_file else AgentState.TERMINATED

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        data, calls = agent_data, agent_data.tool_calls[: self.max_parallel_calls]
        given = {"tools_kwargs": data.tools_kwargs, "agent_data": data}
        with simple_timer("tool_calls", data.metrics):
            found = await asyncio.gather(*(self._call_tool(one, **taken(self._call_tool, given)) for one in calls))
        messages = []
        for call, (response, reward, _) in zip(calls, found, strict=True):
            self._assert_mm_supported(bool(response.image or response.video))
            message = {"role": "tool", "name": call.name, "content": response.text or ""}
            messages.append(message | ({"tool_call_id": call.tool_call_id} if call.tool_call_id else {}))
            if reward is not None:
                data.tool_rewards.append(reward)
        return await self._said(data, messages)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        data = agent_data
        over, said, score, *_ = await data.interaction.generate_response(
            data.request_id, data.messages, **data.interaction_kwargs
        )
        if score is not None:
            data.turn_scores.append(score)
        state = await self._said(data, [{"role": "user", "content": said}])
        return AgentState.TERMINATED if over else state

    async def _said(self, data: AgentData, messages: list[dict[str, Any]]) -> AgentState:
        """Appends messages of tools or a user, if a turn still fits behind them."""
        data.messages.extend(messages)
        schemas, last = self.tool_schemas, data.prompt_ids[-1:]
        tokens = await asyncio.to_thread(self._behind, messages, schemas, last)
        data.user_turns += 1
        if len(data.response_mask) + len(tokens) >= self.response_length:
            return AgentState.TERMINATED
        self._append(data, tokens, 0, None)
        return AgentState.GENERATING

    def _append(self, data: AgentData, tokens: list[int], mark: int, log_probs: list[float] | None) -> None:
        data.prompt_ids = [*data.prompt_ids, *tokens]
        data.response_mask += [mark] * len(tokens)
        data.response_logprobs += log_probs or [0.0] * len(tokens)

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: dict[str, Any], agent_data: AgentData | None = None
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Calls a tool; what goes wrong is told to the policy."""
        tool, instance = self.tools.get(tool_call.name), None
        if tool is None:
            return ToolResponse(text=f"error: there is no tool {tool_call.name!r}; there are {[*self.tools]}"), 0.0, {}
        try:
            arguments = json.loads(tool_call.arguments)
            if isinstance(tool, FunctionTool):
                response, reward, metrics = normalize_function_tool_return(await tool.call(arguments))
            else:
                create = dict((tools_kwargs.get(tool_call.name) or {}).get("create_kwargs") or {})
                instance = await settled(tool.create(**taken(tool.create, {**create, "create_kwargs": create})))
                instance = instance[0] if isinstance(instance, tuple) else instance
                given = taken(tool.execute, {"agent_data": agent_data})
                response, reward, metrics = await settled(tool.execute(instance, arguments, **given))
        except UserError:
            raise
        except Exception as error:
            logger.warning("the tool %s raised %s: %s", tool_call.name, type(error).__name__, error)
            return ToolResponse(text=f"error: {type(error).__name__}: {error}"), 0.0, {}
        finally:
            if instance is not None:
                await settled(tool.release(instance))
        response = response if isinstance(response, ToolResponse) else ToolResponse(text=str(response))
        text = shortened(response.text or "", self.max_tool_response_length, self.tool_response_truncate_side)
        return response.model_copy(update={"text": text}), reward, metrics
