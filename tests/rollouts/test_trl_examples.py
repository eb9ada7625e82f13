"""TRL's example scripts, as its repository has them: the same turns earn the same rewards in TRL and here."""

from __future__ import annotations

import os
import runpy
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-trl")
import trl_games
from beside_trl import by_paddock, by_trl, call, save_model

FOLDER = os.environ.get("PADDOCK_TRL_EXAMPLES")
SAYS = "PADDOCK_TRL_EXAMPLES names no folder: make test-trl PADDOCK_TRL_EXAMPLES=.../trl/examples/scripts"
given = pytest.mark.skipif(FOLDER is None, reason=SAYS)
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("trl_examples"))


class Constructed(Exception):
    """Holds what a script gave to its trainer, and ends the script where it would train."""

    def __init__(self, **arguments: Any):
        self.arguments = arguments

    def train(self):
        raise self


def trainer_of(script: str, *arguments: str) -> dict[str, Any]:
    """Returns what a script constructs its GRPOTrainer with; nothing in it is changed."""
    import trl

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *arguments])
        patch.setattr(trl, "RichProgressCallback", trl.RichProgressCallback)  # TRL reads its modules when asked
        patch.setattr(trl, "GRPOTrainer", Constructed)
        patch.setattr(trl, "GRPOConfig", SimpleNamespace)
        trl_games.install(patch)
        with pytest.raises(Constructed) as found:
            runpy.run_path(str(Path(FOLDER or "") / script), run_name="__main__")
    return found.value.arguments


def same(folder, monkeypatch, rows, turns, rewards, **kwargs) -> list[dict[str, float | None]]:
    """Plays the turns in TRL and here; returns the rewards, which are equal."""
    rewards = rewards if isinstance(rewards, list) else [rewards]
    theirs = by_trl(folder, rows, turns, rewards, length=7168, **kwargs)
    ours = by_paddock(folder, rows, turns, rewards, monkeypatch, length=7168,
                      environment=kwargs.get("environment_factory"), tools=kwargs.get("tools"))  # fmt: skip
    assert [single(paid) for paid in ours.rewards] == theirs.rewards
    return ours.rewards


def single(paid: dict[str, float | None]) -> dict[str, float | None]:
    """Returns rewards as the float32 numbers that TRL keeps."""
    return {name: None if value is None else float(np.float32(value)) for name, value in paid.items()}


MOVES = [call("move", direction="left") + call("stay") * 8, "caught"]
MISSED = [call("stay") * 9, "missed"]
HALF = [call("move", direction="left"), call("move", direction="up"), call("stay") * 9, "more"]


@given
def test_catch(folder, monkeypatch):
    made = trainer_of("openenv/catch.py", "--env-mode", "space", "--env-host", "http://127.0.0.1")
    turns = [MOVES, MISSED, HALF, ["nothing"]]
    found = same(folder, monkeypatch, [made["train_dataset"][0]] * 4, turns, made["reward_funcs"],
                 environment_factory=made["environment_factory"])  # fmt: skip
    assert [one["reward_from_env"] for one in found] == [1.0, 0.0, 1.0, 0.0]


@given
def test_several_games_in_one_class(folder, monkeypatch):
    made = trainer_of("openenv/multi_env.py")
    rows = [made["train_dataset"][index] for index in (0, 1, 500, 501)]
    guesses = [call("guess", guess="[crate]"), call("guess", guess="[crane]") + call("guess", guess="[crane]"), "done"]
    turns = [guesses, [call("guess", guess="[no]"), call("move", direction="left"), "?"], MOVES, MISSED]
    found = same(folder, monkeypatch, rows, turns, made["reward_funcs"],
                 environment_factory=made["environment_factory"])  # fmt: skip
    assert [one["wordle_reward"] for one in found] == [1.0, 0.0, None, None]
    assert [one["catch_reward"] for one in found] == [None, None, 1.0, 0.0]


@given
def test_sudoku(folder, monkeypatch):
    made = trainer_of("openenv/sudoku.py", "--env-host", "http://127.0.0.1")
    truth = trl_games.solution()
    right = [call("place", row=at, col=at, number=truth[at - 1][at - 1]) for at in (1, 5, 9)]
    wrong = call("place", row=1, col=1, number=truth[0][0] % 9 + 1)
    turns = [[*right, "solved"], [right[0], wrong, right[0], "lost"], [wrong, wrong, right[1], "slow"], ["nothing"]]
    found = same(folder, monkeypatch, [made["train_dataset"][0]] * 4, turns, made["reward_funcs"],
                 environment_factory=made["environment_factory"])  # fmt: skip
    assert [one["reward_correct"] for one in found] == [1.0, 0.0, 0.0, 0.0]
    assert found[0]["reward_progress"] == 1.0 and found[2]["reward_repetition"] < 0 == found[3]["reward_valid_moves"]


class Fixed:
    """Stands for `random`: games draw the same, whichever moves first."""

    @staticmethod
    def choice(cells):
        return cells[0]

    @staticmethod
    def random():
        return 0.5


@given
def test_2048(folder, monkeypatch):
    made = trainer_of("grpo_2048.py")
    kind = made["environment_factory"]
    monkeypatch.setitem(kind.reset.__globals__, "random", Fixed)
    monkeypatch.setitem(kind._spawn.__globals__, "random", Fixed)
    around = [call("move", direction=way) for way in ("left", "up", "right", "down") * 2]
    turns = [[*around, "end"], ["".join(around), "end"], [call("move", direction="left"), call("move"), "end"], ["no"]]
    found = same(folder, monkeypatch, [made["train_dataset"][0]] * 4, turns, made["reward_funcs"],
                 environment_factory=kind)  # fmt: skip
    scores = [one["reward_score"] for one in found]
    assert scores[0] == scores[1] > scores[2] > scores[3] == 0.0


@given
def test_an_agent_with_a_database(folder, monkeypatch, tmp_path):
    """The tool sets an alarm, so it needs the main thread; its rewards read tool calls and lists of results."""
    script = runpy.run_path(str(Path(FOLDER or "") / "grpo_agent.py"), run_name="example")
    monkeypatch.chdir(tmp_path)
    with sqlite3.connect("biogrid.db") as database:
        database.execute("create table interactions (gene text, other text)")
        database.execute("insert into interactions values ('JNKK', 'MAPKK4')")
    asked = [
        {**script["format_example"]({"question": f"Does the gene {gene} interact?"}), "answer": answer}
        for gene, answer in (("JNKK", "yes"), ("JNKK", "yes"), ("ABC", "no"), ("JNKK", "yes"))
    ]

    def query(gene):
        return call("query_biogrid", sql_command=f"SELECT other FROM interactions WHERE gene = '{gene}'")

    turns = [[query("JNKK"), "It does: *Yes*"], ["*yes*"], [query("ABC"), "*no*"],
             [call("query_biogrid", sql_command="SELECT * FROM nothing"), query("JNKK"), "*no*"]]  # fmt: skip
    rewards = [script[name] for name in ("correctness_reward", "structure_reward", "query_reward")]
    found = same(folder, monkeypatch, asked, turns, rewards, tools=[script["query_biogrid"]])
    assert [pytest.approx(3.1), pytest.approx(-0.9)] == [sum(one.values()) for one in found[:2]]


class Calculating:
    """Is what scripts for GSM8K make of TRL's contract: a calculator, and a reward for what follows ####."""

    def reset(self, answer: str, **row) -> str:
        self.truth, self.used, self.right = answer.split("####")[-1].strip(), 0, False
        return " Write the answer behind ####."

    def calculate(self, expression: str) -> float:
        """
        Computes an expression.

        Args:
            expression: for example 2 * 3
        """
        self.used += 1
        return float(eval(expression, {"__builtins__": {}}))

    def submit(self, answer: str) -> str:
        """
        Takes the final answer.

        Args:
            answer: a number
        """
        self.right = float(answer) == float(self.truth)
        return "Right." if self.right else "Wrong."

    def get_reward(self) -> float:
        return float(self.right)


def written(completions, answer, **columns):
    return [float(turns[-1]["content"].split("####")[-1].strip() == truth.split("####")[-1].strip())
            for turns, truth in zip(completions, answer, strict=True)]  # fmt: skip


def used(environments, **columns):
    return [-0.1 * one.used for one in environments]


def test_questions_with_a_calculator(folder, monkeypatch):
    asked = [{"role": "user", "content": "Natalia sold 48 clips, then half as many. How many?"}]
    rows = [{"prompt": asked, "answer": "48 / 2 = 24, 48 + 24 = 72\n#### 72"}] * 4
    steps = [call("calculate", expression="48 / 2"), call("calculate", expression="48 + 24")]
    turns = [[*steps, call("submit", answer="72"), "#### 72"], ["".join(steps), "so #### 72"],
             [call("calculate", expression="48 /"), call("submit", answer="many"), "#### 71"],
             ["#### 72"]]  # fmt: skip
    found = same(folder, monkeypatch, rows, turns, [written, used], environment_factory=Calculating)
    assert [one["Calculating"] for one in found] == [1.0, 0.0, 0.0, 0.0]
    assert [one["written"] for one in found] == [1.0, 1.0, 0.0, 1.0]
