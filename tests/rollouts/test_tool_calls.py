"""Tool calls of a turn: run, limited, answered in order; what goes wrong is told to the policy."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from talks import conversation, driven, talk

import paddock
from paddock.environments.environment import Answer, Call, Malformed
from paddock.environments.tools import tool_of
from paddock.rollouts.conversation import Conversation
from paddock.rollouts.waits import TimeLimit

LIMITS = "actor_rollout_ref.rollout.multi_turn"


class Tools(paddock.Environment):
    @paddock.tool
    def add(self, a: int, b: int = 1) -> int:
        """Adds."""
        return a + b

    @paddock.tool
    def fail(self) -> int:
        """Fails."""
        return 1 // 0

    @paddock.tool
    def refuse(self) -> int:
        """Refuses."""
        raise paddock.ToolError("not today")

    @paddock.tool
    def sleep(self) -> str:
        """Sleeps."""
        time.sleep(0.5)
        return "late"

    @paddock.tool
    def say(self, text: str) -> dict[str, str]:
        """Says."""
        return {"said": text}

    @paddock.tool
    async def later(self, text: str) -> str:
        """Says it later."""
        return text[::-1]


def answered(*calls: Call, settings: tuple[str, ...] = (), malformed: tuple[Malformed, ...] = ()) -> tuple:
    own = conversation(Tools, f"{LIMITS}.max_parallel_calls=9", *settings)
    found = driven(own.results(Answer("", calls=calls, malformed=malformed)))
    return [message["content"] for message in found], own.counts, found


def test_results_come_in_the_order_of_the_calls_with_their_names():
    calls = Call("add", {"a": 2, "b": 3}, id="7"), Call("later", {"text": "ab"}), Call("say", {"text": "hé"})
    texts, counts, messages = answered(*calls)
    assert texts == ["5", "ba", '{"said": "hé"}']
    assert [message["name"] for message in messages] == ["add", "later", "say"]
    assert messages[0]["tool_call_id"] == "7" and "tool_call_id" not in messages[1]
    assert all(message["role"] == "tool" for message in messages) and counts.failed_calls == 0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (Call("fail", {}), "error: ZeroDivisionError: integer division or modulo by zero"),
        (Call("refuse", {}), "error: not today"),
        (Call("sub", {}), "error: there is no tool 'sub'; there are add, fail, refuse, sleep, say, later"),
        (Call("add", {}), "error: add lacks the argument 'a'"),
        (Call("add", {"a": 1, "c": 2}), "error: add has no argument 'c'; it has ['a', 'b']"),
        (Call("add", {"a": "many"}), "error: a is 'many', not of type integer"),
        (Call("add", {"a": True}), "error: a is True, not of type integer"),
    ],
)
def test_what_goes_wrong_is_told_to_the_policy_and_counted(call, told):
    texts, counts, _ = answered(call, Call("add", {"a": "2"}))
    assert texts == [told, "3"] and counts.failed_calls == 1


def test_a_malformed_call_is_answered_with_its_reason():
    texts, *_ = answered(Call("add", {"a": 1}), malformed=(Malformed("{", "is not JSON"),))
    assert texts == ["2", "error: is not JSON"]


def test_a_tool_that_takes_too_long_is_given_up():
    own = conversation(Tools, f"{LIMITS}.tool_timeout=0.1")
    waiting = own.results(Answer("", calls=[Call("sleep", {})]))
    next(waiting)
    with pytest.raises(StopIteration) as end:
        waiting.throw(TimeLimit())
    assert end.value.value[0]["content"] == "error: the tool took longer than 0.1 s"
    assert own.counts.timeouts == own.counts.failed_calls == 1


def test_calls_beyond_the_limit_of_a_turn_are_not_run_and_the_policy_is_told():
    own = conversation(Tools, f"{LIMITS}.max_parallel_calls=2")
    found = driven(own.results(Answer("", calls=[Call("add", {"a": number}) for number in range(100)])))
    told = "error: not run: at most 2 calls of a turn are run, and here are 98 more"
    assert [message["content"] for message in found] == ["1", "2", told], "one message for all of them"


def test_unless_keys_say_so_only_verls_tools_and_environment_classes_have_limits():
    calls = [Call("later", {"text": "x" * 300})] * 2
    for limited, count, length in ((True, 2, 273), (False, 2, 300)):
        own = conversation(Tools)
        own.calls_limited = limited
        found = [message["content"] for message in driven(own.results(Answer("", calls=calls)))]
        assert [len(found), len(found[0])] == [count, length] and found[1].startswith("error") == limited


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ("right", "ab…12345...(truncated)"),
        ("left", "(truncated)...345678é0"),
        ("middle", "ab…1...(truncated)...78é0"),
    ],
)
def test_a_long_result_is_cut_on_the_named_side_in_whole_characters(side, kept):
    keys = f"{LIMITS}.max_tool_response_length=8", f"{LIMITS}.tool_response_truncate_side={side}"
    texts, counts, _ = answered(Call("later", {"text": "ab…12345678é0"[::-1]}), settings=keys)
    assert texts == [kept] and counts.cut_results == 1


def test_a_result_that_fits_exactly_stays_whole():
    texts, counts, _ = answered(Call("later", {"text": "12345678"}), settings=(f"{LIMITS}.max_tool_response_length=8",))
    assert texts == ["87654321"] and counts.cut_results == 0


def test_functions_run_side_by_side_and_methods_of_an_environment_one_after_the_other():
    meeting = threading.Barrier(2)

    @paddock.tool
    def meet() -> str:
        """Returns when two are there."""
        meeting.wait(timeout=10)
        return "met"

    class Both(paddock.Environment):
        inside = 0

        @paddock.tool
        def alone(self) -> str:
            """Must be alone."""
            Both.inside += 1
            time.sleep(0.01)
            Both.inside -= 1
            return str(Both.inside)

        def tools(self):
            return [*super().tools(), tool_of(meet)]

    own = conversation(Both, f"{LIMITS}.max_parallel_calls=9")
    calls = [Call("meet", {}), Call("alone", {}), Call("meet", {}), Call("alone", {})]
    found = driven(own.results(Answer("", calls=calls)))
    assert [message["content"] for message in found] == ["met", "0", "met", "0"]


def test_a_model_that_calls_a_tool_gets_its_result_and_answers():
    """The embedded model of the tool task, greedily: some of its turns call the tool, and some copies are right."""
    found = talk("builtin:calculator", count=48, samples=1, length=40, data="builtin:products/test",
                 weights="tiny-tools", temperature=0.0)  # fmt: skip
    called = [one for one in found if one.extras["tool_call_counts"]]
    assert len(called) > 10
    for one in called:
        call, result, *_ = one.extras["conversation"]
        a, b = (int(part.strip("mul(ab=) ][")) for part in call["content"].split(","))
        assert result == {"role": "tool", "name": "mul", "content": f"{a * b}="}
    right = [one.extras["conversation"][-1]["content"] + "=" == one.extras["conversation"][1]["content"]
             for one in called if len(one.extras["conversation"]) > 2]  # fmt: skip
    assert sum(right) > len(called) // 4


def test_tools_that_return_at_once_need_no_thread_and_what_they_raise_is_told():
    @paddock.tool(inline=True)
    def where() -> str:
        """Names its thread."""
        return threading.current_thread().name

    class AtOnce(paddock.Environment):
        inline = True

        @paddock.tool
        def fail(self) -> str:
            """Fails."""
            raise ValueError(threading.current_thread().name)

        @paddock.tool
        async def later(self) -> str:
            """Waits for its turn of the event loop."""
            return threading.current_thread().name

        def tools(self):
            return [*super().tools(), tool_of(where)]

    own = conversation(AtOnce, f"{LIMITS}.max_parallel_calls=9")
    here = threading.current_thread().name
    waits = own.results(Answer("", calls=(Call("where", {}), Call("fail", {}))))
    with pytest.raises(StopIteration) as end:
        next(waits)
    assert [one["content"] for one in end.value.value] == [here, f"error: ValueError: {here}"]
    (told,) = driven(own.results(Answer("", calls=(Call("later", {}),))))
    assert told["content"] not in ("", here)


class Leaves(paddock.Environment):
    """Its tool ends the program, or is cancelled, as the code that it runs may be."""

    max_turns, call_format = 2, "pythonic"

    @paddock.tool
    def exits(self) -> str:
        """Exits."""
        raise SystemExit(0)

    @paddock.tool
    async def later(self) -> str:
        """Exits later."""
        raise SystemExit(0)

    @paddock.tool
    async def cancelled(self) -> str:
        """Is cancelled."""
        raise asyncio.CancelledError


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("name", ["exits", "later", "cancelled"])
def test_a_tool_that_exits_or_is_cancelled_ends_no_run(name, inline, monkeypatch):
    monkeypatch.setattr(Leaves, "inline", inline)
    monkeypatch.setattr(Conversation, "read", lambda self, done: Answer("", done.tokens, calls=[Call(name, {})]))
    for one in talk(Leaves, f"{LIMITS}.tool_timeout=20", count=2):
        told = one.extras["conversation"][1]["content"]
        assert told.startswith("error: CancelledError" if name == "cancelled" else "error: SystemExit")
        assert one.extras["timeouts"] == 0 and one.extras["failed_calls"] == 2


@contextmanager
def alarmed(seconds: int):
    """What TRL's agent example does around a query."""
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


class Alarmed(paddock.Environment):
    """Needs the main thread wherever it is called."""

    max_turns = 3

    def __init__(self):
        with alarmed(5):
            self.steps = 0

    def reset(self, row, seed):
        with alarmed(5):
            return "1+2="

    @paddock.tool
    def add(self, a: int) -> int:
        """Adds."""
        with alarmed(5):
            return a + 1

    def step(self, answer):
        with alarmed(5):
            self.steps += 1
            return f"{self.steps}+4="

    def reward(self, episode):
        with alarmed(5):
            return float(self.steps)


@pytest.fixture
def old_alarm():
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)


def test_what_needs_the_main_thread_is_called_there_and_told_once(old_alarm, caplog):
    found = talk(Alarmed, count=2, samples=1)
    assert [sum(span.reward for span in one.spans) for one in found] == [3.0, 3.0]
    told = [record.getMessage() for record in caplog.records if "signal only works" in record.getMessage()]
    assert [line.split(" raised ")[0].rpartition(".")[2] for line in told] == ["Alarmed", "reset", "step", "reward"]
    assert "main thread from now on" in told[0]


def test_a_tool_that_needs_the_main_thread_answers_its_first_call(old_alarm, caplog):
    own = conversation(Alarmed)
    for times in (1, 2):
        found = driven(own.results(Answer("", calls=[Call("add", {"a": times})])))
        assert [message["content"] for message in found] == [str(times + 1)]
    assert own.counts.failed_calls == 0 and caplog.text.count("Alarmed.add raised ValueError: signal only works") == 1
    assert "@paddock.tool(inline=True)" in caplog.text


def test_a_run_in_another_thread_says_why_a_tool_fails(old_alarm, caplog):
    own = conversation(Alarmed)
    calls = Answer("", calls=[Call("add", {"a": 1})])
    with ThreadPoolExecutor(1) as thread:
        (message,) = thread.submit(driven, own.results(calls)).result()
    assert message["content"].startswith("error: ValueError: signal only works") and own.counts.failed_calls == 1
    assert "this run is not in the main thread" in caplog.text
