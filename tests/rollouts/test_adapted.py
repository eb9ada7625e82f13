"""Environments of other packages talk with a model through the driver of conversations."""

from __future__ import annotations

import importlib.util
import textwrap
from typing import Any

import pytest
from talks import talk


class Waits:
    """A plain class whose reward is a coroutine."""

    def reset(self, **row: Any) -> str:
        return "0="

    async def get_reward(self) -> float:
        return 0.75


def paid(episodes: Any) -> list[float]:
    return [sum(span.reward for span in one.spans) for one in episodes]


def test_a_plain_class_is_paid_by_a_reward_that_is_awaited():
    assert paid(talk(Waits, count=2, samples=1)) == [0.75, 0.75]


def test_games_talk_with_a_model_and_the_group_is_asked_the_same():
    if importlib.util.find_spec("textarena") is None:
        pytest.skip("textarena is not installed: make test-environments")
    found = talk("textarena:Sokoban-v0", "data.max_prompt_length=1024", count=2, samples=2, length=512)
    asked = [str(one.extras["messages"]) for one in found]
    assert asked[0] == asked[1] != asked[2] == asked[3] and "Sokoban" in asked[0]
    assert [len([span for span in one.spans if span.log_probs]) for one in found] == [2] * 4  # two moves that are none


def test_verifiers_scores_what_a_model_wrote_also_where_it_was_cut(tmp_path, monkeypatch):
    verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed: make test-environments")
    if not hasattr(verifiers, "load_environment"):
        pytest.skip("this version of verifiers has no v0")
    text = """
        import verifiers as vf
        from datasets import Dataset

        def turns(state, **kwargs):
            return float(len(state["trajectory"]))

        class Again(vf.MultiTurnEnv):
            async def env_response(self, messages, state, **kwargs):
                return [vf.UserMessage(content="1=")]

        def load_environment():
            rows = Dataset.from_list([{"question": "0=", "answer": ""}])
            return Again(dataset=rows, rubric=vf.Rubric(funcs=[turns]), max_turns=3)
    """
    (tmp_path / "talks_of_v0.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert paid(talk("verifiers:talks_of_v0", count=2, samples=1, length=64)) == [3.0, 3.0]
    assert paid(talk("verifiers:talks_of_v0", count=2, samples=1, length=1)) == [1.0, 1.0]


def test_a_taskset_scores_what_a_model_wrote_also_where_it_was_cut(tmp_path, monkeypatch):
    verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed: make test-environments")
    if hasattr(verifiers, "load_environment"):
        pytest.skip("this version of verifiers runs no tasksets")
    text = """
        import verifiers.v1 as vf

        __all__ = ["Talks", "Again"]

        class Talk(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
            @vf.reward
            async def turns(self, trace) -> float:
                return float(trace.num_turns)

        class Again(vf.SingleAgentEnv):
            async def run(self, task, agents):
                async with agents.agent.interaction(task) as talk:
                    said = await talk.turn()
                    while not said.terminated and talk.trace.num_turns < 3:
                        said = await talk.turn("1=")

        class Talks(vf.Taskset[Talk, vf.TasksetConfig]):
            def load(self):
                return [Talk(vf.TaskData(idx=0, prompt="0="), self.config.task)]
    """
    (tmp_path / "talks_of_v1.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert paid(talk("verifiers:talks_of_v1", count=2, samples=2, length=64)) == [3.0] * 4
    assert paid(talk("verifiers:talks_of_v1", count=2, samples=1, length=1)) == [1.0, 1.0]
