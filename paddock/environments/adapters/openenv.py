"""Environments behind an OpenEnv server: `openenv:http://127.0.0.1:8000`.

An episode is a session of the server's WebSocket: reset, steps, close. `reset` is given the seed and the row's columns.
The server says what an action is (`/schema`). If it has one text, the policy's turn is that text; `field` names it if
there are several. If it is an MCP tool call, the server's tools are the policy's. Of an observation the policy reads
all fields that are not empty, as JSON; its one text alone if there is nothing else, or, with a warning before the run,
nothing but numbers. `text` names the field, or a list of fields, to read. Actions of several required fields are
refused.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from paddock.environments.environment import Answer, Environment, Messages, Turn
from paddock.environments.packages import imported, refused
from paddock.environments.reused import asked
from paddock.environments.tools import Tool, ToolError, written

TIMEOUT = 60.0
"""Seconds that the server has for an answer."""
PATIENCE = 10.0
"""Seconds that an episode waits for a free session: a closed one is free a moment later."""


EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values of an observation that say nothing."""
log = logging.getLogger(__name__)


class ServerError(Exception):
    """Raised for an error that the server answers with."""

    def __init__(self, data: Mapping[str, Any]):
        super().__init__(f"{data.get('message')} {data.get('errors', '')}".strip())
        self.code = data.get("code")


class GameSession:
    """Holds one session of a server; several threads may ask."""

    def __init__(self, url: str):
        client = imported("websockets.sync.client", "websockets", f"openenv:{url}")
        self.closed = imported("websockets.exceptions", "websockets", f"openenv:{url}").ConnectionClosed
        self.lock, self.stack = threading.Lock(), ExitStack()
        address = f"ws{url.removeprefix('http')}/ws"
        self.socket = self.stack.enter_context(client.connect(address, max_size=None))

    def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the server says to a message: `observation`, `reward`, `done`."""
        with self.lock:
            with suppress(self.closed):  # the server's last word is still there to be read
                self.socket.send(json.dumps({"type": kind, "data": data}))
            said = json.loads(self.socket.recv(timeout=TIMEOUT))
        if said["type"] == "error":
            raise ServerError(said["data"])
        found: dict[str, Any] = said["data"]
        return found

    def close(self) -> None:
        with self.stack, suppress(self.closed):
            self.socket.send(json.dumps({"type": "close"}))


class OpenEnv(Environment):
    """Plays one episode on a server."""

    def __init__(
        self, url: str, field: str | None, text: str | Sequence[str] | None, listed: Sequence[Mapping[str, Any]]
    ):
        """`field` of an action has the policy's turn; `text`: the fields of an observation that it reads, else all."""
        self.url, self.field, self.text, self.listed = url, field, text, listed
        self.session: GameSession | None = None
        self.paid, self.over = 0.0, False
        """What calls have earned since the last turn, and whether one of them ended the episode."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        columns = {name: value for name, value in row.items() if is_json(value)}
        self.session, said = opened(self.url, {**columns, "seed": seed % 2**31})
        first = self._text(said["observation"])
        own = self.listed and row.get("prompt")  # servers of tools greet, and the row says what to do
        return asked(row, first) if first and not own else None

    def step(self, answer: Answer) -> Turn:
        assert self.session is not None
        if self.field is None:
            reward, self.paid = self.paid, 0.0
            return Turn(list(answer.results), reward, self.over or not answer.results)
        try:
            said = self.session.ask("step", {self.field: answer.text})
        except ServerError as error:  # what the policy wrote does not suit: it is told
            return Turn(f"error: {error}")
        return Turn(self._text(said["observation"]), float(said["reward"] or 0.0), bool(said["done"]))

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

    def tools(self) -> Sequence[Tool]:
        return [
            Tool(one["name"], one["description"], dict(one["input_schema"]), ServerTool(self, one["name"]).call)
            for one in self.listed
        ]

    def _text(self, observation: Mapping[str, Any]) -> str:
        if isinstance(self.text, str):
            return written(observation.get(self.text, ""))
        told = [name for name in observation if name != "metadata"] if self.text is None else self.text
        fields = {name: observation[name] for name in told if observation.get(name) not in EMPTY}
        if not observation.keys() - {"metadata"}:  # servers of tools greet in the metadata
            return written(observation.get("metadata", {}).get("message", ""))
        if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
            return text
        return json.dumps(fields, ensure_ascii=False)


class ServerTool:
    """Holds one tool of a server. Its call is a method, so that calls of a turn run one after the other."""

    def __init__(self, episode: OpenEnv, name: str):
        self.episode, self.name = episode, name

    def call(self, /, **arguments: Any) -> str:
        episode = self.episode
        assert episode.session is not None
        said = episode.session.ask("step", {"type": "call_tool", "tool_name": self.name, "arguments": arguments})
        episode.paid += float(said["reward"] or 0.0)
        episode.over = episode.over or bool(said["done"])
        if error := said["observation"].get("error"):
            raise ToolError(error["message"])
        result = said["observation"].get("result")
        return written(result["data"] if isinstance(result, dict) and "data" in result else result)


def opened(url: str, data: Mapping[str, Any]) -> tuple[GameSession, dict[str, Any]]:
    """Returns a session and its first observation; waits a moment if all sessions are taken."""
    until = time.monotonic() + PATIENCE
    while True:
        session = GameSession(url)
        try:
            return session, session.ask("reset", data)
        except ServerError as error:
            session.stack.close()
            if error.code != "CAPACITY_REACHED":
                raise
            if time.monotonic() > until:
                fix = "let the server take more (max_concurrent_envs), or run fewer episodes at once"
                raise refused(f"openenv:{url}", str(error), fix) from error
            time.sleep(0.1)


def source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that makes episodes on the server at a URL; `kwargs`: `field`, `text`."""
    full, url = f"openenv:{name}", name.rstrip("/")
    imported("websockets.sync.client", "websockets", full)
    if not url.startswith(("http://", "https://")):
        raise refused(full, "is not the URL of a server", "openenv:http://127.0.0.1:8000")
    if strange := set(kwargs) - {"field", "text"}:
        raise refused(full, f"has no argument {sorted(strange)[0]!r}", "field, text")
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=TIMEOUT) as answer:
            schema = json.load(answer)
            action = schema["action"]
    except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
        fix = "start it (e.g. uvicorn server.app:app --port 8000), and check the address"
        raise refused(full, f"no OpenEnv server answers there: {error}", fix) from error
    field = kwargs.get("field") or text_field(action)
    listed = [] if field else tools_at(url)
    needed = set(action.get("required", ())) - {field, "metadata"}
    if not listed and (field not in action.get("properties", {}) or needed):
        reason = f"its action has the fields {', '.join(action.get('properties', {}))}, and a turn is one text"
        raise refused(full, reason, "field=NAME, of an action that needs no other field")
    text = kwargs.get("text")
    if text is None and (alone := only_text(schema.get("observation") or {})):
        text, others = alone
        if others:
            reason = "%s: of an observation the policy reads %s, and not %s; environment_kwargs={text: [%s]} shows all"
            log.warning(reason, full, text, ", ".join(others), ",".join((text, *others)))
    return lambda: OpenEnv(url, field, text, listed)


def only_text(observation: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """Returns the one text of an observation and its other fields, if all of those are numbers."""
    fields = dict(observation.get("properties", {}))
    for name in ("metadata", "done", "reward"):
        fields.pop(name, None)
    texts = [name for name, about in fields.items() if about.get("type") == "string"]
    others = [name for name in fields if name not in texts]
    numbers = all(fields[name].get("type") in ("integer", "number", "boolean") for name in others)
    return (texts[0], others) if len(texts) == 1 and numbers else None


def text_field(action: Mapping[str, Any]) -> str | None:
    """Returns the field of an action that takes a text: the one that is required, or the only one."""
    fields = {name: about for name, about in action.get("properties", {}).items() if name != "metadata"}
    texts = [name for name, about in fields.items() if about.get("type") == "string" and "const" not in about]
    required = [name for name in action.get("required", ()) if name in texts]
    if "tool_name" in fields:
        return None
    return required[0] if len(required) == 1 else texts[0] if len(texts) == 1 else None


def tools_at(url: str) -> list[dict[str, Any]]:
    """Returns the tools of a server of MCP tools; none for any other server."""
    session, _ = opened(url, {})
    try:
        return list(session.ask("step", {"type": "list_tools"})["observation"].get("tools", ()))
    except ServerError:
        return []
    finally:
        session.close()


def is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
