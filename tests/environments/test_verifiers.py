"""Environments of verifiers run through its own rollout and rubric; what cannot run is refused by name.

v0 tests need verifiers before 0.4, tests of tasksets verifiers 0.4 or later.
"""

from __future__ import annotations

import json
import logging
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from episodes import play, script

from paddock.environments.catalogue import environment_of
from paddock.environments.environment import Answer, Call, Ended, Malformed
from paddock.errors import UserError

V0 = """
    import verifiers as vf
    from datasets import Dataset

    ROWS = Dataset.from_list([{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(5)])

    def right(completion, answer, **kwargs):
        return float(answer in str(completion[-1].content))

    def short(completion, **kwargs):
        return 1.0

    def over_all(completions, **kwargs) -> list[float]:
        return [1.0 for _ in completions]

    def add(a: int, b: int) -> int:
        '''Adds two numbers.

        Args:
            a: The first.
            b: The second.
        '''
        return a + b

    class Again(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["asked"] = 0
            return state

        async def env_response(self, messages, state, **kwargs):
            state["asked"] += 1
            return [vf.UserMessage(content=f"again {state['asked']}")]

    class Rewrites(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            return []

        async def get_prompt_messages(self, state):
            return state["prompt"] if not state["trajectory"] else [vf.UserMessage(content="a new story")]

    def load_environment(kind="tools", gym="leg_counting"):
        rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
        if kind == "tools":
            return vf.ToolEnv(dataset=ROWS, tools=[add], rubric=rubric, max_turns=4, system_prompt="Use add.")
        if kind == "single":
            return vf.SingleTurnEnv(dataset=ROWS, rubric=rubric)
        if kind == "gym":
            from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv
            return ReasoningGymEnv(gym=gym, num_train_examples=20, num_eval_examples=2)
        if kind == "group":
            return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[over_all]))
        return {"again": Again, "rewrites": Rewrites}[kind](dataset=ROWS, rubric=rubric, max_turns=3)
"""

V1 = """
    import verifiers.v1 as vf

    class Data(vf.TaskData):
        answer: str

    class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
        {task}

        @vf.reward(weight=0.5)
        async def right(self, trace) -> float:
            return float(self.data.answer in trace.last_reply)

        @vf.reward
        async def turns(self, trace) -> float:
            return float(trace.num_turns)

    class Config(vf.TasksetConfig):
        count: int = 3

    class Sums(vf.Taskset[Sum, Config]):
        INFINITE = {infinite}

        def load(self):
            for i in range(10**9 if self.INFINITE else self.config.count):
                data = Data(idx=i, prompt={prompt}, answer=str(2 * i), system_prompt="Add.")
                yield Sum(data, self.config.task)

    {environment}

    __all__ = [name for name in ("Sums", "Play") if name in globals()]
"""
MEASURED = """
        async def setup(self, runtime):
            await runtime.write("truth", self.data.answer.encode())

        @vf.reward(weight=10)
        async def in_runtime(self, trace, runtime) -> float:
            return float((await runtime.run(["cat", "truth"], {})).stdout == trace.last_reply)
"""
AGAIN = """
    class Play(vf.SingleAgentEnv):
        async def run(self, task, agents):
            async with agents.agent.interaction(task) as talk:
                said = await talk.turn()
                for number in (1, 2):
                    if said.terminated:
                        break
                    said = await talk.turn(f"again {number}")
"""
TWO = """
    class Both(vf.EnvConfig):
        asker: vf.AgentConfig = vf.AgentConfig()
        solver: vf.AgentConfig = vf.AgentConfig()
        tries: int = 1

    class Play(vf.Env[Both]):
        async def run(self, task, agents):
            asked = await agents.asker.run(task)
            for _ in range(self.config.tries):
                await agents.solver.run(vf.Task(vf.TaskData(idx=0, prompt=f"{asked.last_reply} = ?")))

        async def finalize(self, task, episode):
            answers = [one.last_reply for one in episode.traces if one.agent.name == "solver"]
            int(answers[0])
            for trace in episode.traces:
                trace.record_reward("solved", float(answers == ["4"] * len(answers)))
"""
SCREEN = "[vf.UserMessage(content=[vf.ImageUrlContentPart(image_url=vf.ImageUrlSource(url='data:image/png;base64,'))])]"
SHOUTS = """
        @vf.intercept
        async def shouts(self, response: vf.Response) -> vf.Response:
            response.message = vf.AssistantMessage(content="HELLO")
            return response
"""
SHOP = """
    class Shop(vf.Toolset[vf.ToolsetConfig]):
        TOOL_PREFIX = "shop"

        @vf.tool
        async def price(self, item: str) -> str:
            'Returns the price of an item.'
            return f"{item} costs {2 * len(item)}"

    if __name__ == "__main__":
        Shop.run()
"""
SELLS = """
        @classmethod
        def toolsets(cls, config):
            from shop_of_v1 import Shop
            return [Shop(vf.ToolsetConfig())]
"""


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a v0 environment."""
    verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed: make test-environments")
    if not hasattr(verifiers, "load_environment"):
        pytest.skip(f"verifiers {verifiers.__version__} has no v0: pip install 'verifiers<0.4'")
    return module(tmp_path, monkeypatch, "sums_of_v0", V0)


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return f"verifiers:{name}"


def needs_new() -> None:
    verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed: make test-environments")
    if hasattr(verifiers, "load_environment"):
        pytest.skip(f"verifiers {verifiers.__version__} runs no tasksets: pip install 'verifiers>=0.4'")


def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> str:
    needs_new()
    usual = {"task": "", "infinite": False, "environment": "", "prompt": 'f"What is {i} + {i}?"'}
    text = textwrap.dedent(V1)
    for key, value in {**usual, **how}.items():
        indent = {"task": 4, "environment": 0}.get(key, 0)
        text = text.replace(f"{{{key}}}", textwrap.indent(textwrap.dedent(str(value)), " " * indent).strip())
    return module(tmp_path, monkeypatch, f"sums_of_v1_{abs(hash(text))}", text)


@pytest.fixture
def model() -> Iterator[str]:
    """The address of a model that answers 4 to everything."""

    class Four(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            said = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "4"}}
            body = {"id": "1", "object": "chat.completion", "created": 0, "model": "four", "choices": [said]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Four)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_a_tool_environment_runs_its_own_tools_and_rubric(old):
    turns = [[Call("add", {"a": 3, "b": 3}), Call("nothing", {})], "It is 6."]
    played = play(old, script(turns), row={"example_id": 3})
    assert (played.turns, played.reward) == (2, 1.5)
    assert [one["content"] for one in played.messages[:2]] == ["Use add.", "What is 3 + 3?"]
    assert [one["content"] for one in played.messages if one["role"] == "tool"] == ["6", "'nothing'"]
    factory = environment_of(old)
    assert factory.max_turns == 4 and [one.name for one in factory.tools] == ["add"]
    assert factory.tools[0].parameters["properties"]["a"]["type"] == "integer"


def test_a_call_that_cannot_be_read_is_told_and_the_rollout_goes_on(old):
    environment = environment_of(old).make()
    environment.reset({"example_id": 2}, 0)
    told = {"role": "tool", "content": "not JSON"}
    turn: Any = environment.step(Answer("{", malformed=[Malformed("{", "not JSON")], results=[told]))
    assert turn.messages == [told] and not turn.done
    last: Any = environment.step(Answer("4", number=1))
    assert last.done and environment.reward(Ended({}, [], [Answer("{"), Answer("4")], True)) == 1.5
    environment.close()


def test_a_single_turn_environment_is_scored_by_its_rubric_and_the_seed_chooses_the_example(old):
    wrong, right = (play(old, script([text]), seed=11, kwargs={"kind": "single"}) for text in ("7", "2"))
    assert right.messages[0]["content"] == "What is 1 + 1?"
    assert (right.turns, wrong.reward, right.reward) == (1, 0.5, 1.5)


def test_a_multi_turn_environment_keeps_its_state_and_ends_by_its_own_limit(old):
    played = play(old, script(["no", "no", "8"]), row={"example_id": 4}, kwargs={"kind": "again"})
    assert (played.turns, played.reward) == (3, 1.5)
    assert [one["content"] for one in played.messages if one["role"] == "user"][1:] == ["again 1", "again 2"]


@pytest.mark.parametrize("delivered", [0, 1])
def test_an_episode_that_was_cut_is_scored_with_what_was_written(old, delivered):
    environment = environment_of(old, {"kind": "again"}).make()
    environment.reset({"example_id": 4}, 0)
    answer = Answer("8, and", stopped=False)
    if delivered:
        environment.step(answer)
    assert environment.reward(Ended({}, [], [answer], False)) == 1.5
    environment.close()


def test_reasoning_gym_of_verifiers_pays_what_reasoning_gym_pays(old):
    data = pytest.importorskip("reasoning_gym").create_dataset("leg_counting", size=22, seed=0)
    for said in (data[3]["answer"], "0"):
        answer = f"<answer>{said}</answer>"
        played = play(old, script([answer]), row={"example_id": 3}, kwargs={"kind": "gym"})
        assert played.messages[1]["content"] == data[3]["question"]
        assert played.reward == data.score_answer(answer=said, entry=data[3])


@pytest.mark.parametrize(
    ("kind", "reason"), [("group", "over a whole group"), ("rewrites", "rewrites the conversation")]
)
def test_what_an_episode_alone_cannot_honour_is_refused(old, kind, reason):
    with pytest.raises(UserError, match=reason):
        play(old, script(["1", "2"]), kwargs={"kind": kind})


def test_a_taskset_asks_its_tasks_and_pays_their_weighted_rewards(tmp_path, monkeypatch):
    name = taskset(tmp_path, monkeypatch)
    right = play(name, script(["It is 2."]), row={"example_id": 1}, kwargs={"count": 2})
    assert (right.turns, right.reward) == (1, 1.5)
    assert [(one["role"], one["content"]) for one in right.messages[:2]] == [
        ("system", "Add."),
        ("user", "What is 1 + 1?"),
    ]
    assert play(name, script(["It is 9."]), seed=4).reward == 1.0
    assert environment_of(name, {"agent": {"max_turns": 2}}).max_turns == 2


def test_an_infinite_taskset_has_its_first_tasks(tmp_path, monkeypatch):
    name = taskset(tmp_path, monkeypatch, infinite=True)
    assert play(name, script(["1998"]), seed=1999).messages[1]["content"] == "What is 999 + 999?"


def test_a_task_has_its_runtime_in_setup_and_in_its_rewards(tmp_path, monkeypatch):
    name = taskset(tmp_path, monkeypatch, task=MEASURED)
    assert [play(name, script([said]), row={"example_id": 1}).reward for said in ("2", "2.")] == [11.5, 1.5]


def test_an_environment_of_a_taskset_answers_the_policy_over_several_turns(tmp_path, monkeypatch):
    played = play(taskset(tmp_path, monkeypatch, environment=AGAIN), script(["no", "4?", "4"]), row={"example_id": 2})
    assert (played.turns, played.reward) == (3, 3.5)
    said = ["Add.", "What is 2 + 2?", "no", "again 1", "4?", "again 2", "4"]
    assert [one["content"] for one in played.messages] == said


@pytest.mark.parametrize("delivered", [0, 1])
def test_a_task_that_was_cut_is_scored_with_what_was_written(tmp_path, monkeypatch, delivered):
    environment = environment_of(taskset(tmp_path, monkeypatch, environment=AGAIN)).make()
    environment.reset({"example_id": 2}, 0)
    answer = Answer("4, and", stopped=False)
    if delivered:
        environment.step(answer)
    assert environment.reward(Ended({}, [], [answer], False)) == 1.5
    environment.close()


def test_a_taskset_runs_its_own_tool_server(tmp_path, monkeypatch):
    needs_new()
    module(tmp_path, monkeypatch, "shop_of_v1", "import verifiers.v1 as vf\n" + textwrap.dedent(SHOP))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    factory = environment_of(taskset(tmp_path, monkeypatch, task=SELLS), seconds=300)
    assert [(one.name, one.description) for one in factory.tools] == [("shop_price", "Returns the price of an item.")]
    played = play(factory, script([[Call("shop_price", {"item": "tea"})], "4"]), row={"example_id": 2})
    assert [one["content"] for one in played.messages if one["role"] == "tool"] == ["tea costs 6"]
    assert (played.turns, played.reward) == (2, 2.5)


def test_other_agents_have_models_of_their_own_and_the_policy_plays_the_one_that_is_left(tmp_path, monkeypatch, model):
    name = taskset(tmp_path, monkeypatch, environment=TWO)
    four = {"model": "four", "client": {"type": "eval", "base_url": model}}
    asker = play(name, script(["2 + 2"]), kwargs={"solver": four, "tries": 2}, row={"example_id": 0})
    assert (asker.messages[1]["content"], asker.reward) == ("What is 0 + 0?", 2.0)
    solver = play(name, script(["4"]), kwargs={"asker": four})
    assert (solver.messages[0]["content"], solver.reward) == ("4 = ?", 1.0)


def test_an_error_over_what_the_policy_wrote_pays_nothing_and_is_told(tmp_path, monkeypatch, model, caplog):
    caplog.set_level(logging.WARNING)
    four = {"model": "four", "client": {"type": "eval", "base_url": model}}
    played = play(taskset(tmp_path, monkeypatch, environment=TWO), script(["no number"]), kwargs={"asker": four})
    assert played.reward == 0.0
    assert "ended an episode with EnvError" in caplog.text and "invalid literal for int()" in caplog.text


@pytest.mark.parametrize(
    ("how", "kwargs", "reason"),
    [
        ({"task": "NEEDS_CONTAINER = True"}, {}, "container"),
        ({"task": "async def setup(self, runtime):\n    raise OSError('no disk')"}, {}, "OSError: no disk"),
        ({"environment": TWO}, {}, r"the policy would play 2 agents \(asker, solver\)"),
        ({"environment": TWO}, {"asker": "four", "tries": 2}, "several conversations in an episode"),
        ({"prompt": SCREEN}, {}, "more than text"),
        ({"prompt": "None"}, {}, "no prompt"),
        ({"task": SHOUTS, "environment": AGAIN}, {}, "rewrites what the policy wrote"),
    ],
)
def test_what_a_taskset_asks_beyond_one_conversation_of_text_is_refused(
    tmp_path, monkeypatch, how, kwargs, reason, model
):
    four = {"model": "four", "client": {"type": "eval", "base_url": model}}
    given = {key: four if value == "four" else value for key, value in kwargs.items()}
    with pytest.raises(UserError, match=reason):
        play(taskset(tmp_path, monkeypatch, **how), script(["4"]), kwargs=given)


def test_a_taskset_needs_a_version_with_environments_of_its_own(tmp_path, monkeypatch):
    verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed: make test-environments")
    if not hasattr(verifiers, "load_environment"):
        pytest.skip("this version of verifiers has them")
    with pytest.raises(UserError, match="cannot run tasksets"):
        environment_of(module(tmp_path, monkeypatch, "nothing_of_v1", "__all__ = []"))


def test_environments_of_v0_are_refused_where_verifiers_has_none(tmp_path, monkeypatch):
    verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed: make test-environments")
    if hasattr(verifiers, "load_environment"):
        pytest.skip("this version of verifiers has v0")
    with pytest.raises(UserError, match="cannot run environments of v0") as caught:
        environment_of(module(tmp_path, monkeypatch, "sums_of_v0", V0))
    assert "verifiers>=0.1.14,<0.4" in str(caught.value.fix)


def test_a_module_that_is_not_there_is_named():
    pytest.importorskip("verifiers", reason="verifiers is not installed: make test-environments")
    with pytest.raises(UserError, match="no module 'reverse_texts'"):
        environment_of("verifiers:owner/reverse-texts@0.1")
