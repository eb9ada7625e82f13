"""Environments of verifiers run through its own rollout and rubric; what cannot run is refused by name.

v0 tests need verifiers before 0.4, tests of tasksets any version with `verifiers.v1.Taskset`.
"""

from __future__ import annotations

import sys
import textwrap
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

    __all__ = ["Sums"]

    class Data(vf.TaskData):
        answer: str

    class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
        NEEDS_CONTAINER = {container}

        @vf.reward(weight=0.5)
        async def right(self, trace{runtime}) -> float:
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
                data = Data(prompt=f"What is {{i}} + {{i}}?", answer=str(2 * i), system_prompt="Add.")
                yield Sum(data, self.config.task)
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


def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> str:
    stack = pytest.importorskip("verifiers.v1", reason="verifiers is not installed: make test-environments")
    if not hasattr(stack, "Taskset"):
        pytest.skip("this version of verifiers has no tasksets")
    text = V1.format(**{"container": False, "infinite": False, "runtime": "", **how})
    return module(tmp_path, monkeypatch, f"sums_of_v1_{len(str(how))}", text)


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
    assert environment_of(name).max_turns == 1


def test_an_infinite_taskset_has_its_first_tasks(tmp_path, monkeypatch):
    name = taskset(tmp_path, monkeypatch, infinite=True)
    assert play(name, script(["1998"]), seed=1999).messages[1]["content"] == "What is 999 + 999?"


@pytest.mark.parametrize(
    ("how", "reason"),
    [({"container": True}, "tasks in a container"), ({"runtime": ", runtime"}, "right over a runtime")],
)
def test_a_taskset_that_needs_a_runtime_is_refused(tmp_path, monkeypatch, how, reason):
    with pytest.raises(UserError, match=reason):
        environment_of(taskset(tmp_path, monkeypatch, **how))


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
