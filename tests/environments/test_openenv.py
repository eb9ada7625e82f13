"""Episodes on real OpenEnv servers on loopback: the environment that `openenv init` writes, and MCP tools."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from episodes import play, script

from paddock.environments.adapters import openenv as adapter
from paddock.environments.catalogue import environment_of
from paddock.environments.environment import Call
from paddock.errors import UserError

SERVERS = Path(__file__).with_name("openenv_servers.py")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of the servers: a text environment, MCP tools, a board."""
    pytest.importorskip("openenv", reason="openenv is not installed: make test-environments")
    folder = tmp_path_factory.mktemp("openenv")
    program = "import sys; sys.argv = ['openenv', 'init', 'demo_env']; from openenv.cli.__main__ import main; main()"
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, capture_output=True, timeout=120)
    ports = [free_port(), free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    server = subprocess.Popen([sys.executable, str(SERVERS), str(folder), *map(str, ports)])
    try:
        for url in urls:
            wait_for(f"{url}/health", server)
        yield urls
    finally:
        server.terminate()
        server.wait(20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(url)


def test_a_text_environment_pays_what_openenvs_own_client_is_paid(servers):
    from openenv.core.generic_client import GenericEnvClient

    said = ["hello", "hi"]
    played = play(f"openenv:{servers[0]}", script(said), limit=2)
    with GenericEnvClient(base_url=servers[0]).sync() as client:
        client.reset(seed=7)
        paid = [client.step({"message": text}).reward for text in said]
    assert played.reward == pytest.approx(sum(paid)) == pytest.approx(0.7)
    assert [one["content"] for one in played.messages] == ["Demo Env environment ready!", "hello", "hello", "hi", "hi"]


def test_a_server_of_one_session_serves_one_episode_after_the_other(servers):
    factory = environment_of(f"openenv:{servers[0]}")
    assert [play(factory, script(["hello"]), limit=1).reward for _ in range(5)] == [0.5] * 5


def test_more_episodes_than_sessions_are_refused_with_the_servers_limit(servers, monkeypatch):
    monkeypatch.setattr(adapter, "PATIENCE", 0.3)
    factory = environment_of(f"openenv:{servers[0]}")
    one, other = factory.make(), factory.make()
    one.reset({}, 0)
    with pytest.raises(UserError, match="1/1 sessions active") as caught:
        other.reset({}, 0)
    assert "max_concurrent_envs" in str(caught.value.fix)
    one.close()
    other.close()


def test_tools_of_a_server_are_the_policys(servers):
    name = f"openenv:{servers[1]}"
    (tool,) = environment_of(name).tools
    assert (tool.name, tool.description) == ("add", "Adds to the counter.")
    turns = [[Call("add", {"amount": 2})], [Call("add", {"amount": "x"})], [Call("add", {"amount": "3"})]]
    played = play(name, script(turns), row={"target": 5})
    assert (played.turns, played.reward) == (3, 1.0) and played.messages[0]["content"] == "Count to 5."
    heard = [one["content"] for one in played.messages if one["role"] == "tool"]
    assert heard[0] == "2" and "not of type integer" in heard[1] and heard[2] == "5"


def test_the_rows_prompt_is_asked_before_a_server_of_tools_and_a_turn_without_calls_ends(servers):
    played = play(f"openenv:{servers[1]}", script(["I will not."]), row={"prompt": "Count!"})
    assert played.messages[0]["content"] == "Count!" and (played.turns, played.reward) == (1, 0.0)


def test_an_action_that_does_not_suit_is_told_to_the_policy(servers):
    session, _ = adapter.opened(servers[0], {})
    try:
        with pytest.raises(adapter.ServerError, match="Field required"):
            session.ask("step", {"massage": "hello"})
    finally:
        session.close()


def test_arguments_name_fields_and_unknown_ones_are_refused(servers):
    name = f"openenv:{servers[0]}"
    played = play(name, script(["hello"]), kwargs={"field": "message", "text": "message_length"}, limit=1)
    assert played.messages[-1]["content"] == "5"
    for kwargs, reason in (
        ({"fields": "x"}, "no argument 'fields'"),
        ({"field": "massage"}, "has the fields metadata, m"),
    ):
        with pytest.raises(UserError, match=reason):
            environment_of(name, kwargs)


def test_the_policy_reads_all_of_an_observation_or_is_told_before_the_run_what_not(servers, caplog):
    played = play(f"openenv:{servers[2]}", script(["1", "0"]))
    heard = [json.loads(one["content"]) for one in played.messages if one["role"] == "user"]
    assert heard[0] == {"phase": "initial", "cells": [0, 0], "legal": [0, 1]}
    assert heard[1:] == [
        {"phase": "playing", "cells": [0, 1], "legal": [0], "last": 1},
        {"phase": "playing", "cells": [1, 1], "last": 0},
    ]
    assert not caplog.records
    assert play(f"openenv:{servers[2]}", script(["1"]), kwargs={"text": "legal"}).messages[0]["content"] == "[0, 1]"
    both = play(f"openenv:{servers[0]}", script(["hi"]), kwargs={"text": ["echoed_message", "message_length"]}, limit=1)
    assert json.loads(both.messages[-1]["content"]) == {"echoed_message": "hi", "message_length": 2}
    assert not caplog.records
    environment_of(f"openenv:{servers[0]}")
    assert "reads echoed_message, and not message_length" in caplog.text


def test_a_server_that_does_not_answer_is_named():
    pytest.importorskip("websockets", reason="websockets is not installed: make test-environments")
    with pytest.raises(UserError, match="no OpenEnv server answers") as caught:
        environment_of(f"openenv:http://127.0.0.1:{free_port()}")
    assert "start it" in str(caught.value.fix)
    with pytest.raises(UserError, match="not the URL"):
        environment_of("openenv:echo")
