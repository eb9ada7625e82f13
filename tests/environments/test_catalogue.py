"""A name, a class or a function becomes a factory of environments; what cannot is refused by name."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from paddock.core.registry import Registry
from paddock.environments import catalogue
from paddock.environments.catalogue import environment_of
from paddock.environments.environment import Answer, Environment, Turn
from paddock.environments.plain_class import PlainEnvironment
from paddock.environments.tools import tool
from paddock.errors import UserError

FILE = """
    from dataclasses import dataclass
    import paddock.environments.environment as e

    class Guess(e.Environment):
        max_turns = {turns}
        def __init__(self, secret=7):
            self.secret = secret
        def step(self, answer):
            return e.Turn(reward=float(answer.text == str(self.secret)), done=True)

    @dataclass
    class Plain:
        start: int = 0
        def reset(self, **row):
            return None

    def maker(secret):
        return Guess(secret)

    def broken():
        return 1 / 0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "games.py"
    path.write_text(textwrap.dedent(FILE.format(turns=3)))
    return path


def refusal(name: Any, **kwargs: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        environment_of(name, kwargs)
    assert caught.value.key == "environment" and caught.value.fix
    return caught.value


def test_a_class_of_a_file_makes_one_object_per_episode_with_its_arguments(file):
    factory = environment_of(f"{file}:Guess", {"secret": 5})
    one, other = factory.make(), factory.make()
    assert one is not other and factory.max_turns == 3 and factory.name == f"{file}:Guess"
    said = one.step(Answer("5"))
    assert isinstance(said, Turn) and said.reward == 1.0


def test_a_function_that_returns_an_environment_is_called_for_each_episode(file):
    assert environment_of(f"{file}:maker", {"secret": 9}).make().secret == 9  # type: ignore[attr-defined]


def test_a_plain_class_is_adapted(file):
    made = environment_of(f"{file}:Plain", {"start": 4}).make()
    assert isinstance(made, PlainEnvironment) and made.plain.start == 4


def test_a_file_that_was_edited_is_read_again_and_one_that_was_not_is_not(file):
    first = environment_of(f"{file}:Guess").make()
    assert type(environment_of(f"{file}:Guess").make()) is type(first)
    file.write_text(textwrap.dedent(FILE.format(turns=5)))  # the same size, within the same second
    assert environment_of(f"{file}:Guess").max_turns == 5


def test_a_file_imports_its_neighbours(tmp_path):
    (tmp_path / "rules_of_the_game.py").write_text("LIMIT = 11")
    (tmp_path / "game.py").write_text(
        "from rules_of_the_game import LIMIT\nfrom paddock.environments.environment import Environment\n"
        "class Game(Environment):\n    max_turns = LIMIT\n"
    )
    assert environment_of(f"{tmp_path / 'game.py'}:Game").max_turns == 11


@pytest.mark.parametrize("name", ["neighbour_games:Guess", "pkg://neighbour_games:Guess"])
def test_a_class_of_a_module_with_and_without_pkg(name, file, monkeypatch):
    monkeypatch.syspath_prepend(str(file.parent))
    (file.parent / "neighbour_games.py").write_text(file.read_text())
    assert environment_of(name).max_turns == 3
    assert environment_of("paddock.environments.environment:Environment").tools == ()


class Shop(Environment):
    closed = 0

    @tool
    def price(self, item: str) -> float:
        """Returns a price."""
        return 2.5

    def close(self) -> None:
        Shop.closed += 1


class Waits(Shop):
    async def close(self) -> None:  # type: ignore[override]
        Waits.closed += 1


@pytest.mark.parametrize("kind", [Shop, Waits])
def test_a_class_itself_works_and_the_object_made_for_its_tools_is_closed(kind):
    before = kind.closed
    factory = environment_of(kind)
    assert [one.name for one in factory.tools] == ["price"] and kind.closed == before + 1
    assert factory.name == kind.__name__ and isinstance(factory.make(), kind)


def test_a_plug_in_adds_a_prefix(monkeypatch):
    monkeypatch.setattr(catalogue, "SOURCES", Registry("source of environments", key="environment"))
    catalogue.SOURCES.register("shop")(lambda rest, kwargs: lambda: Waits() if rest == "slow" else Shop())
    assert isinstance(environment_of("shop:slow").make(), Waits)
    assert type(environment_of("shop").make()) is Shop


def test_an_unknown_prefix_is_refused_with_the_nearest_one():
    assert "did you mean 'textarena'?" in str(refusal("textarea:Wordle-v0"))
    assert "does not name a class" in str(refusal("wordle"))


def test_a_missing_file_a_missing_class_and_a_file_without_a_class_are_refused(file):
    assert "no such file" in refusal(f"{file.parent}/gmaes.py:Guess").reason
    assert "did you mean 'Guess'?" in str(refusal(f"{file}:Guesss").fix)
    assert refusal(str(file)).fix == f"{file}:Class"


def test_a_file_that_cannot_be_imported_is_refused_with_its_line(file):
    file.write_text("import os\nos.nothing\n")
    assert "AttributeError" in refusal(f"{file}:Guess").reason and "games.py line 2" in refusal(f"{file}:Guess").reason
    assert "No module named 'no_such'" in refusal("pkg://no_such.module:Game").reason


def test_a_constructor_that_raises_is_refused_with_what_it_was_given_and_takes(file):
    error = refusal(f"{file}:Guess", secert=5)
    assert "unexpected keyword argument 'secert'" in error.reason and "catalogue" not in error.reason
    assert "secert=5" in str(error.fix) and "(secret=7)" in str(error.fix)
    assert "ZeroDivisionError: division by zero (games.py line 22)" in refusal(f"{file}:broken").reason


def test_an_object_without_reset_is_no_environment():
    assert "no method reset" in refusal(dict).reason


def test_what_close_raises_is_a_warning_and_a_close_that_hangs_is_left_behind(caplog):
    class Stuck(Environment):
        def close(self):
            raise RuntimeError("still held")

    class Hangs(Environment):
        def close(self):
            time.sleep(20)

    assert environment_of(Stuck).tools == () and "close raised RuntimeError: still held" in caplog.text
    begun = time.monotonic()
    assert environment_of(Hangs, seconds=0.2).tools == () and time.monotonic() - begun < 10
    assert "close of an environment took longer than 0.2 s" in caplog.text


def test_a_constructor_that_hangs_is_refused_with_the_key_of_its_limit():
    class Hangs(Environment):
        def __init__(self):
            time.sleep(20)

    with pytest.raises(UserError, match=r"making it took longer than 0\.2 s") as caught:
        environment_of(Hangs, seconds=0.2)
    assert caught.value.fix == "actor_rollout_ref.rollout.multi_turn.tool_timeout=0.4"
