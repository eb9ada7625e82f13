"""TRL's contract by TRL itself: the same turns give reward functions the same messages, and pay the same."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-trl")
from beside_trl import END, by_paddock, by_trl, call, save_model

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("beside_trl"))


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def listed(count: int) -> list:
    """
    Lists numbers.

    Args:
        count: how many
    """
    return [[number, "x" * 300] for number in range(count)]


def table(name: str) -> dict:
    """
    Returns a table.

    Args:
        name: its name
    """
    if name == "none":
        raise KeyError(name)
    return {"name": name, "rows": None}


ROW = {"prompt": [{"role": "user", "content": "How much?"}], "answer": "42"}
CALLS = [
    [call("multiply", a=6, b=7), "42"],
    ["plain 42\n"],
    ["<think>\nhm\n</think>\n\nlet me see\n" + call("multiply", a="6", b=7), "<think>\nok\n</think>\n\n 42 "],
    [call("listed", count=2) + "\n" + call("table", name="x"), "done"],
    [call("table", name="none"), "it fails"],
    [call("multiply", a=6, b=7) + " behind", "41"],
    ["<think>" + call("multiply", a=6, b=7)],
    [call("multiply", a=1, b=2), call("multiply", a=3, b=4), "6 and 12"],
]


def length(completions, **columns):
    return [float(len(turns)) for turns in completions]


def called(completions, answer, **columns):
    return [sum(len(turn.get("tool_calls") or ()) for turn in turns) + float(turns[-1]["content"] == truth)
            for turns, truth in zip(completions, answer, strict=True)]  # fmt: skip


def test_reward_functions_get_the_messages_of_trl_and_pay_the_same(folder, monkeypatch):
    rows, tools = [ROW] * len(CALLS), [multiply, listed, table]
    theirs = by_trl(folder, rows, CALLS, [length, called], tools=tools)
    ours = by_paddock(folder, rows, CALLS, [length, called], monkeypatch, tools=tools)
    for turns in theirs.completions:  # TRL leaves the end of a turn in thinking that nobody closed
        turns[0].update({key: text.removesuffix(END) for key, text in turns[0].items() if key == "reasoning_content"})
    assert ours.completions == theirs.completions
    assert ours.prompts == theirs.prompts and ours.rewards == theirs.rewards
    assert ours.completions[0][0]["tool_calls"][0]["function"] == {"name": "multiply", "arguments": {"a": 6, "b": 7}}


class Saying:
    """Pays nothing itself, and adds the row's number to its question."""

    def reset(self, number: int, **row) -> str:
        self.count = number
        return f" From {number}."

    def increment(self) -> int:
        """
        Adds one.
        """
        self.count += 1
        return self.count


class Asking(Saying):
    """Asks what the row does not, and pays for the count."""

    def reset(self, **row) -> str:
        self.count = 0
        return "Count to two."

    def get_reward(self) -> float:
        return self.count / 2


COUNTS = [
    [call("increment") * 3, call("increment"), "two"],
    ["two"],
    [call("increment"), "one"],
    [call("nothing"), "?"],
]


def told(completions, prompts, **columns):
    return [float(len(turns[-1]["content"]) + len(asked[-1]["content"]))
            for turns, asked in zip(completions, prompts, strict=True)]  # fmt: skip


def counted(environments, **kwargs):
    return [float(environment.count) for environment in environments]


@pytest.mark.parametrize("owned", [True, False])
def test_an_environment_that_owns_the_data_gives_functions_messages(owned, folder, monkeypatch):
    asked = [{"role": "user", "content": "" if owned else "Count."}]
    rows = [{"prompt": asked, "number": number} for number in range(len(COUNTS))]
    kind = Asking if owned else Saying
    theirs = by_trl(folder, rows, COUNTS, [told, counted], environment_factory=kind)
    if owned:
        rows = [{"prompt": "", **row} for row in rows]
    ours = by_paddock(folder, rows, COUNTS, [told, counted], monkeypatch, environment=kind)
    assert ours.completions[:3] == theirs.completions[:3], "the last one names a tool that is not there"
    assert ours.prompts == theirs.prompts and ours.rewards == theirs.rewards


class Shouting:
    """Has a tool of its own, and pays for it."""

    def reset(self, **row) -> str:
        assert "environment" not in row
        self.said = ""
        return " Loud."

    def shout(self, text: str) -> str:
        """
        Says it louder.

        Args:
            text: what is said
        """
        self.said += text
        return text.upper()

    def get_reward(self) -> float:
        return float(len(self.said))


def test_rows_name_their_environment_as_in_trl(folder, monkeypatch):
    asked = [{"role": "user", "content": "Go."}]
    rows = [{"prompt": asked, "number": 3, "environment": name} for name in ("asking", "loud", "loud", "saying")]
    turns = [[call("increment"), "one"], [call("shout", text="hey"), "HEY"], ["quiet"], [call("increment"), "four"]]
    several = {"asking": Asking, "loud": Shouting, "saying": Saying}
    theirs = by_trl(folder, rows, turns, [told], environment_factory=several)
    ours = by_paddock(folder, rows, turns, [told], monkeypatch, environment=several)
    assert ours.completions == theirs.completions and ours.prompts == theirs.prompts
    assert ours.rewards == theirs.rewards
    assert [one["Asking"] for one in ours.rewards] == [0.5, None, None, None]
    assert [one["Shouting"] for one in ours.rewards] == [None, 3.0, 0.0, None]
