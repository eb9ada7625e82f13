"""Runs with several environments: a row names its own, and each has its tools, arguments and rewards."""

from __future__ import annotations

import pytest

import paddock
from paddock import Run, UserError
from paddock.cli import main

SMALL = {"model": "builtin:tiny", "n": 2, "batch": 2, "steps": 1, "response_length": 24, "logger": ["file"]}
QUIET = {"data.val_files": None}
ROWS = [{"prompt": "1+2=", "environment": "counter"}, {"prompt": "3+4=", "environment": "echo"}]

FILE = '''
class Counter:
    def __init__(self, start=0):
        self.start = start

    @property
    def total(self):
        return self.count + 1

    def reset(self, **row):
        assert "environment" not in row, sorted(row)
        self.count = self.start

    def increment(self) -> int:
        """Adds one."""
        self.count += 1
        return self.count

    def get_reward(self):
        return 1.0 + self.count


class Echo:
    def reset(self, **row):
        self.said = row["prompt"]

    def say(self, text: str) -> str:
        """Says it again."""
        return text

    def get_reward(self):
        return 0.25


GAMES = {"counter": Counter, "echo": Echo}
NUMBER = 7
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "games.py"
    path.write_text(FILE)
    return path


def classes():
    found: dict = {}
    exec(FILE, found)
    return found["GAMES"]


def rewards(environment, rows=ROWS, **keys):
    with Run(data=rows, environment=environment, config=QUIET | keys, **SMALL) as run:
        episodes = run.sample(rows, n=1)
        run.train()
    return [sum(span.reward for span in one.spans) for one in episodes]


@pytest.mark.parametrize("form", ["classes", "addresses", "dict of a file"])
def test_each_row_plays_and_is_paid_by_the_environment_that_it_names(form, file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    several = {
        "classes": classes(), "addresses": {"counter": f"{file}:Counter", "echo": f"{file}:Echo"},
        "dict of a file": f"{file}:GAMES",
    }[form]  # fmt: skip
    assert rewards(several) == [1.0, 0.25]
    assert rewards(several, environment_kwargs={"counter": {"start": 2}}) == [3.0, 0.25]


@pytest.mark.parametrize(("rows", "told"), [
    ([*ROWS, {"prompt": "5+6=", "environment": "chess"}],
     "row 2, column 'environment': there is no environment 'chess'"),
    ([{"prompt": "1+2="}] * 2, "row 0, column 'environment': names no environment"),
])  # fmt: skip
def test_a_row_that_names_no_environment_of_the_run_is_refused_with_those_there_are(rows, told, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=told) as error, Run(
        data=rows, environment=classes(), config=QUIET, **SMALL
    ) as run:  # fmt: skip
        run.train()
    assert "the run has counter, echo" in str(error.value)


@pytest.mark.parametrize(("environment", "kwargs", "told"), [
    ({"counter": 7}, {}, "cannot be called"),
    ("GAMES", {"chess": {}}, "environment_kwargs=.*there is no environment 'chess'"),
    ({"one": "GAMES"}, {}, "holds several environments"),
    ("NUMBER", {}, "has no class or function 'NUMBER'"),
])  # fmt: skip
def test_what_is_no_environment_is_refused_by_name(environment, kwargs, told, file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    named = {"GAMES": f"{file}:GAMES", "NUMBER": f"{file}:NUMBER"}
    if isinstance(environment, dict):
        environment = {name: named.get(one, one) for name, one in environment.items()}
    with pytest.raises(UserError, match=told):
        rewards(named.get(str(environment), environment), environment_kwargs=kwargs)


def test_the_command_takes_several_by_name_and_shows_them_in_its_plan(file, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    several = f"environment={{counter:'{file}:Counter',echo:'{file}:Echo'}}"
    assert main(["plan", several, "algorithm.adv_estimator=grpo"]) == 0
    said = "".join(capsys.readouterr().out.split())
    assert f"{file}:Counter,{file}:Echo" in said


def test_a_reward_function_gets_the_objects_of_all(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    seen = []

    def kind(environments, environment, **columns):
        seen.extend(zip(environment, (type(one).__name__ for one in environments), strict=True))
        return [float(len(name)) for name in environment]

    with Run(data=ROWS, reward=kind, environment=classes(), config=QUIET, **SMALL) as run:
        run.score(run.sample(ROWS, n=1))
    assert set(seen) == {("counter", "Counter"), ("echo", "Echo")}


def test_a_plain_class_may_have_properties_that_need_reset():
    assert [
        tool.name for tool in paddock.environments.plain_class.PlainEnvironment(classes()["counter"]()).tools()
    ] == ["increment"]
