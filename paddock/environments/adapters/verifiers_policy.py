"""What verifiers v1 asks as a model: an endpoint over the policy, and the chat loop that calls it.

verifiers runs an agent's program (a harness) against its own interception server, which records every model call and
passes it on to an endpoint. Here the endpoint hands it to the episode whose name the request has as its model. The
harness is verifiers' `null` as a coroutine: prompts, tool calls over MCP, no process and nothing to install.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache
from types import ModuleType
from typing import Any

from paddock.environments.environment import Answer, Message
from paddock.environments.packages import imported

HARNESS = "paddock_policy"
"""Name under which verifiers finds the harness: it imports plug-ins by module."""
Asked = Callable[[list[Message], Sequence[Mapping[str, Any]]], Awaitable[Answer | None]]
FULL = "this model's maximum context length is reached"
"""What the policy says when it may write no more. The rollout then ends without an error, and is scored as it is."""


class PolicyEndpoint:
    """Serves chat completions on the loopback address: `episodes` has who answers for each model name."""

    def __init__(self) -> None:
        self.episodes: dict[str, Asked] = {}
        self.url = ""
        self.starting = asyncio.Lock()

    async def start(self) -> str:
        """Returns the base URL; the first call starts the server, which runs until the program ends."""
        async with self.starting:
            if not self.url:
                web = imported("aiohttp.web", "verifiers", "verifiers")
                app = web.Application(client_max_size=1 << 30)
                app.router.add_post("/v1/chat/completions", self.complete)
                runner = web.AppRunner(app, access_log=None)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return self.url

    async def complete(self, request: Any) -> Any:
        web = imported("aiohttp.web", "verifiers", "verifiers")
        body = await request.json()
        asked = self.episodes.get(body["model"])
        said = await asked(body["messages"], body.get("tools") or ()) if asked else None
        if said is None:
            return web.json_response({"error": {"message": FULL, "type": "invalid_request_error"}}, status=400)
        return web.json_response(completion(said, body["model"]))


@cache
def endpoint() -> PolicyEndpoint:
    """Returns the endpoint of this process; call it in the loop beside."""
    return PolicyEndpoint()


def completion(said: Answer, model: str) -> dict[str, Any]:
    """Returns a turn of the policy as a chat completion."""
    calls = [
        {
            "id": call.id or f"call_{said.number}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for index, call in enumerate(said.calls)
    ]
    message = {"role": "assistant", "content": said.text, **({"tool_calls": calls} if calls else {})}
    reason = "length" if not said.stopped else "tool_calls" if calls else "stop"
    return {
        "id": f"turn-{said.number}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 0, "completion_tokens": len(said.tokens), "total_tokens": len(said.tokens)},
    }


@cache
def register() -> str:
    """Makes the harness known to verifiers, and returns its name."""
    stack = imported("verifiers.v1", "verifiers", "verifiers")
    wire = imported("verifiers.v1.dialects.chat", "verifiers", "verifiers").message_to_wire
    result = imported("verifiers.v1.runtimes", "verifiers", "verifiers").ProgramResult
    httpx = imported("httpx", "verifiers", "verifiers")

    class Chat(stack.Harness[stack.HarnessConfig]):  # type: ignore[name-defined]
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: Mapping[str, str],
            data: Any,
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(wire, prompt or ()))
            messages = [*([{"role": "system", "content": system}] if system else []), *asked]
            async with AsyncExitStack() as stack:
                tools = await opened(stack, mcp_urls)
                client = await stack.enter_async_context(
                    httpx.AsyncClient(timeout=None, trust_env=False, headers={"Authorization": f"Bearer {secret}"})
                )
                body: dict[str, Any] = {"model": ctx.model, "messages": messages}
                if tools:
                    body["tools"] = [tool for tool, _ in tools.values()]
                while True:
                    reply = await client.post(f"{endpoint}/chat/completions", json=body)
                    if reply.status_code != 200:
                        return result(exit_code=int(FULL not in reply.text), stdout="", stderr=reply.text)
                    message = reply.json()["choices"][0]["message"]
                    calls = message.get("tool_calls") or []
                    said = {"role": "assistant", "content": message.get("content") or ""}
                    messages.append({**said, "tool_calls": calls} if calls else said)
                    if not calls:
                        return result(exit_code=0, stdout="", stderr="")
                    messages += [await called(tools, call) for call in calls]

    module = ModuleType(HARNESS)
    vars(module).update(Chat=Chat, __all__=["Chat"])
    sys.modules[HARNESS] = module
    return HARNESS


Tools = dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], Awaitable[str]]]]
"""The tools of a task by name: how a chat request writes each, and a function that calls it."""


async def opened(stack: AsyncExitStack, urls: Mapping[str, str]) -> Tools:
    """Connects with the tool servers of a task, until `stack` is closed; tools are named as verifiers names them."""
    tools: Tools = {}
    if not urls:
        return tools
    mcp = imported("mcp", "verifiers", "verifiers")
    http = imported("mcp.client.streamable_http", "verifiers", "verifiers")
    for server, url in urls.items():
        client = await stack.enter_async_context(mcp.Client(http.streamable_http_client(url)))
        for tool in (await client.list_tools()).tools:
            name = f"{server}_{tool.name}" if server else tool.name
            function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}

            async def call(arguments: dict[str, Any], client: Any = client, name: str = tool.name) -> str:
                found = await client.call_tool(name, arguments)
                return "\n".join(getattr(one, "text", str(one)) for one in found.content)

            tools[name] = {"type": "function", "function": function}, call
    return tools


async def called(tools: Tools, call: Mapping[str, Any]) -> Message:
    """Returns the message that answers a tool call."""
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    said = await tools[name][1](arguments) if name in tools else f"error: unknown tool {name!r}"
    return {"role": "tool", "tool_call_id": call["id"], "content": said}
