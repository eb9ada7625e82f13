"""The loop of one turn under verl's name, to build on; rows with `single_turn_agent` do not need it."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer


class SingleTurnAgentLoop(AgentLoopBase):
    """Draws one turn."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.prompt_length, self.response_length = (
            self.rollout_config.prompt_length,
            self.rollout_config.response_length,
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        metrics: dict[str, Any] = {}
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        with simple_timer("generate_sequences", metrics):
            turn = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        tokens = turn.token_ids[: self.response_length]
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=tokens, response_mask=[1] * len(tokens), num_turns=2, metrics=metrics,
            response_logprobs=(turn.log_probs or [])[: len(tokens)],
        )  # fmt: skip
