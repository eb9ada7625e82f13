"""Public environments of other packages run unmodified: whole episodes, paid as the packages themselves pay.

`make test-environments` installs the packages; a test skips where its package is missing. `EPISODES` is the table of
what was played, with the seed 7: package, version, environment, turns, reward. Each is played again through the
package's own interface, with the same seed and actions, and must come to the same reward.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from episodes import Policy, halving, play, script

from paddock.environments.catalogue import environment_of
from paddock.environments.environment import Answer
from paddock.environments.reused import GameDraws, Reused
from paddock.errors import UserError

SEED = 7


@dataclass(frozen=True)
class Episode:
    """Holds one line of the table."""

    package: str
    version: str
    name: str
    turns: int
    reward: float
    policy: Policy
    row: Mapping[str, Any] = field(default_factory=dict)


HANOI = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]
MOVES = ["up", "left", "down", "right"]
SORTED = "<answer>['-92.5', '-81.9', '-27.0', '-16.0', '30.0', '64.0', '82.0', '89.6']</answer>"
SUM = {"prompt": "What is 2 + 2?", "ground_truth": "4"}


def boxed(texts: list[str]) -> Policy:
    return script([f"\\boxed{{{text}}}" for text in texts])


def bracketed(texts: list[str]) -> Policy:
    return script([f"[{text}]" for text in texts])


EPISODES = [
    Episode("textarena", "0.7.4", "GuessTheNumber-v0", 4, 1.0, halving(1, 20, "I say [{}]")),
    Episode("textarena", "0.7.4", "Mastermind-v0", 6, 0.25, bracketed(["1 2 3 4", "2 3 4 5", "3 4 5 6", "4 5 6 1"])),
    Episode("textarena", "0.7.4", "TowerOfHanoi-v0", 7, 1.0, script(HANOI)),
    Episode("textarena", "0.7.4", "Blackjack-v0", 8, 0.4, bracketed(["Hit", "Stand"])),
    Episode("textarena", "0.7.4", "FrozenLake-v0", 6, 1.0, bracketed(["s", "s", "d", "s", "d", "d"])),
    Episode("textarena", "0.7.4", "Secretary-v0", 3, 1.0, bracketed(["continue", "continue", "accept"])),
    Episode("textarena", "0.7.4", "Minesweeper-v0-small", 4, 0.875, bracketed(["0 0", "4 4", "2 2", "3 1", "1 3"])),
    Episode("textarena", "0.7.4", "2048-v0-ultra-easy", 26, 1.0, bracketed(["Up", "Left", "Down", "Right"])),
    Episode("textarena", "0.7.4", "Bandit-v0", 21, 0.118, bracketed(["red", "blue", "green", "yellow", "purple"])),
    Episode("textarena", "0.7.4", "ThreeCardMonte-v0", 1, 1.0, bracketed(["1"])),
    Episode("gem-llm", "0.1.0", "game:GuessTheNumber-v0-easy", 3, 1.0, halving(1, 10, "\\boxed{{{}}}")),
    Episode("gem-llm", "0.1.0", "game:Mastermind-v0-easy", 10, 0.5, boxed(["1 2", "3 4", "5 6", "2 1", "4 3", "6 5"])),
    Episode("gem-llm", "0.1.0", "game:TowerofHanoi-v0-easy", 7, 1.0, boxed(HANOI)),
    Episode("gem-llm", "0.1.0", "game:Game2048-v0-easy", 45, 1.0, boxed(MOVES)),
    Episode("gem-llm", "0.1.0", "game:Sokoban-v0-easy", 20, 0.5, boxed(MOVES)),
    Episode("gem-llm", "0.1.0", "game:Minesweeper-v0-easy", 25, 0.6, boxed(["reveal 0 0", "reveal 4 4", "reveal 2 2"])),
    Episode("gem-llm", "0.1.0", "rg:leg_counting", 1, 1.0, boxed(["80"])),
    Episode("skyrl-gym", "0.4.0", "gsm8k", 1, 1.0, script(["#### 4"]), SUM),
    Episode("skyrl-gym", "0.4.0", "gsm8k_multi_turn", 3, 1.04, script(["#### 5", "hm", "#### 4"]), SUM),
    Episode("skyrl-gym", "0.4.0", "aime", 1, -1.0, script(["Answer: 5"]), SUM),
    Episode("reasoning-gym", "0.1.25", "leg_counting", 1, 1.0, script(["<answer>188</answer>"])),
    Episode("reasoning-gym", "0.1.25", "number_sorting", 1, 1.0, script([SORTED])),
    Episode("reasoning-gym", "0.1.25", "spell_backward", 1, 0.5, script(["tuobxxxx"])),
]  # fmt: skip

PREFIX = {"textarena": "textarena", "gem-llm": "gem", "skyrl-gym": "skyrl_gym", "reasoning-gym": "reasoning_gym"}


def version_of(package: str) -> str:
    """Returns the installed version of a package; the test skips without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: make test-environments")


def textarena_itself(name: str, actions: list[str], row: Mapping[str, Any]) -> float:
    import textarena

    game = textarena.make(name)
    game.reset(num_players=1, seed=SEED)
    for action in actions:
        done, _ = game.step(action=action)
    assert done
    return float(game.close()[0][0])


def gem_itself(name: str, actions: list[str], row: Mapping[str, Any]) -> float:
    import gem
    import gem.envs

    game = gem.make(name)
    game.reset(seed=SEED)
    return sum(float(game.step(action)[1]) for action in actions)


def skyrl_gym_itself(name: str, actions: list[str], row: Mapping[str, Any]) -> float:
    import skyrl_gym

    truth = {"ground_truth": row["ground_truth"]}
    extras = {"reward_spec": truth, "reward_model": truth, "extra_info": {}}
    game = skyrl_gym.make(name, env_config={}, extras=extras)
    return sum(float(game.step(action)["reward"]) for action in actions)


def reasoning_gym_itself(name: str, actions: list[str], row: Mapping[str, Any]) -> float:
    import reasoning_gym

    data = reasoning_gym.create_dataset(name, seed=SEED, size=1)
    answer = actions[-1].removeprefix("<answer>").removesuffix("</answer>")
    return float(data.score_answer(answer=answer, entry=data[0]))


ITSELF: dict[str, Callable[[str, list[str], Mapping[str, Any]], float]] = {
    "textarena": textarena_itself,
    "gem-llm": gem_itself,
    "skyrl-gym": skyrl_gym_itself,
    "reasoning-gym": reasoning_gym_itself,
}


@pytest.mark.parametrize("episode", EPISODES, ids=lambda one: f"{one.package}:{one.name}")
def test_an_unmodified_environment_runs_a_whole_episode_and_pays_what_its_package_pays(episode):
    version = version_of(episode.package)
    played = play(f"{PREFIX[episode.package]}:{episode.name}", episode.policy, row=episode.row, seed=SEED)
    assert played.reward == pytest.approx(ITSELF[episode.package](episode.name, played.texts, episode.row))
    if version == episode.version:
        assert (played.turns, played.reward) == (episode.turns, pytest.approx(episode.reward, abs=1e-3))


@pytest.mark.parametrize(
    "name", ["textarena:Mastermind-v0", "textarena:2048-v0-ultra-easy", "gem:game:Sokoban-v0-easy"]
)
def test_a_seed_decides_a_game_whatever_plays_beside_it_and_in_whichever_object(name):
    version_of("textarena" if name.startswith("textarena") else "gem-llm")
    moves = (
        boxed(MOVES)
        if name.startswith("gem")
        else bracketed(["1 2 3 4", "2 1 6 5"] if "Master" in name else ["Up", "Left"])
    )
    factory = environment_of(name)

    def transcript(seed: int) -> list[Any]:
        return play(factory, moves, seed=seed, limit=8).messages

    alone = [transcript(seed) for seed in range(6)]
    assert len({str(one) for one in alone}) > 1
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(transcript, [*range(6), *range(6)])) == alone * 2


def test_episodes_leave_the_random_numbers_of_the_program_alone():
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    one, other = GameDraws(3), GameDraws(3)
    drawn: dict[int, list[float]] = {0: [], 1: []}
    for number, draws in ((0, one), (1, other), (1, other), (0, one)):
        with draws.drawing():
            drawn[number] += [random.random(), np.random.rand()]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 4
    assert (random.random(), np.random.rand()) == expected


def test_a_game_is_used_again_unless_it_raised_or_is_still_played():
    class Dice(Reused):
        def begin(self, game: Any, seed: int) -> str:
            return "Throw."

    free: list[Any] = []

    def begun() -> Dice:
        dice = Dice(object, free)
        dice.reset({}, 0)
        return dice

    first = begun()
    game = first.game
    first.close()
    assert free == [game]
    raised = begun()
    assert raised.game is game
    with pytest.raises(ZeroDivisionError), raised.playing():
        _ = 1 / 0
    raised.close()
    slow = begun()
    with slow.playing():
        slow.close()
    assert free == []


@pytest.mark.parametrize("name", ["TicTacToe-v0", "Poker-v0", "Golf-v0"])
def test_games_of_several_players_are_refused_by_name(name):
    version_of("textarena")
    with pytest.raises(UserError, match="several players, and there is one policy") as caught:
        environment_of(f"textarena:{name}")
    assert caught.value.value == f"textarena:{name}" and "GuessTheNumber-v0" in str(caught.value.fix)


@pytest.mark.parametrize("name", ["Slitherlink-v0", "Cryptarithm-v0", "Countdown-v0", "ThreeCardMonte-v0"])
def test_games_that_mix_up_reward_and_reason_go_on_behind_an_invalid_move_and_pay_nothing_for_it(name, caplog):
    version_of("textarena")
    played = play(f"textarena:{name}", script(["nonsense"]), seed=SEED)
    assert (played.turns, played.reward) == (2, 0.0) and "invalid move" in played.messages[2]["content"]
    assert "which is no number: 0 counts" in caplog.text


WORDS = ["apple", "table", "house", "chair", "plant", "water", "stone", "light"]


WORD_GAME = """
import sys, nltk
nltk.download = lambda *_, **__: True
from episodes import play, script
from test_public_environments import textarena_itself
name, *texts = sys.argv[1:]
played = play(f"textarena:{name}", script(texts))
print(played.turns, played.reward, textarena_itself(name, played.texts, {}))
if name == "Wordle-v0":
    import textarena
    one, other = (textarena.make(name).env for _ in range(2))
    while hasattr(one, "env"):
        one, other = one.env, other.env
    assert one.dictionary is not other.dictionary and one.dictionary.uk_words is other.dictionary.uk_words
    assert one.dictionary.is_english_word("apple") and not other.dictionary.is_english_word("xqzxq")
"""


@pytest.mark.parametrize(
    ("name", "texts", "turns"),
    [("Wordle-v0", ["I try [stone]", "[plant]", "[water]"], 3), ("Hangman-v0", ["[e]", "[a]", "[t]", "[w]", "[r]"], 5)],
)
def test_word_games_run_with_word_lists(name, texts, turns, tmp_path):
    """A small word list and a tagger that calls every word a noun stand where NLTK looks for its data."""
    version_of("textarena")
    words, tagger = tmp_path / "corpora" / "words", tmp_path / "taggers" / "averaged_perceptron_tagger_eng"
    words.mkdir(parents=True), tagger.mkdir(parents=True)
    for file in ("en", "en-basic"):
        (words / file).write_text("\n".join(WORDS))
    for file, content in (("weights", {}), ("tagdict", dict.fromkeys(WORDS, "NN")), ("classes", ["NN"])):
        (tagger / f"{tagger.name}.{file}.json").write_text(json.dumps(content))
    environ = {**os.environ, "NLTK_DATA": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", WORD_GAME, name, *texts]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert said.stdout.split() == [str(turns), "1.0", "1.0"], said.stderr


def test_word_games_say_that_they_need_word_lists(monkeypatch):
    version_of("textarena")
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: False)
    with pytest.raises(UserError, match="word lists of NLTK") as caught:
        environment_of("textarena:Hangman-v0")
    assert "nltk.downloader words" in str(caught.value.fix)


@pytest.mark.parametrize(
    ("name", "module", "fix"),
    [
        ("textarena:Wordle-v0", "textarena", "pip install textarena"),
        ("gem:game:Wordle-v0-easy", "gem", "pip install --no-deps gem-llm"),
        ("skyrl_gym:gsm8k", "skyrl_gym", "pip install skyrl-gym"),
        ("reasoning_gym:leg_counting", "reasoning_gym", "pip install reasoning-gym"),
        ("verifiers:reverse-text", "verifiers", "pip install verifiers"),
        ("openenv:http://127.0.0.1:8000", "websockets", "pip install websockets"),
    ],
)
def test_a_missing_package_is_named_with_how_to_install_it(name, module, fix, monkeypatch):
    for loaded in [one for one in sys.modules if one.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="not installed") as caught:
        environment_of(name)
    assert (caught.value.key, caught.value.value) == ("environment", name) and fix in str(caught.value.fix)


@pytest.mark.parametrize(
    ("package", "name", "near"),
    [
        ("textarena", "textarena:GuessNumber-v0", "GuessTheNumber-v0"),
        ("gem-llm", "gem:game:GuessTheNumber-v0", "game:GuessTheNumber-v0-easy"),
        ("skyrl-gym", "skyrl_gym:gsm", "gsm8k"),
        ("reasoning-gym", "reasoning_gym:leg_count", "leg_counting"),
    ],
)
def test_a_name_that_a_package_does_not_have_is_refused_with_near_ones(package, name, near):
    version_of(package)
    with pytest.raises(UserError) as caught:
        environment_of(name)
    assert near in str(caught.value.fix) and len(str(caught.value)) < 400


def test_a_row_may_name_the_task_of_reasoning_gym():
    version_of("reasoning-gym")
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", seed=3, size=5)[4]
    row = {"dataset": "chain_sum", "seed": 3, "index": 4}
    played = play("reasoning_gym", script([entry["answer"]]), row=row)
    assert played.messages[0]["content"] == entry["question"] and (played.turns, played.reward) == (1, 1.0)
    assert environment_of("reasoning_gym:chain_sum").max_turns == 1


def test_system_messages_of_the_row_stay_before_a_game():
    version_of("reasoning-gym")
    system = {"role": "system", "content": "Answer in <answer> tags."}
    row = {"prompt": [system, {"role": "user", "content": "?"}]}
    played = play("reasoning_gym:leg_counting", script(["0"]), row=row)
    assert played.messages[0] == system and "legs" in played.messages[1]["content"]


def test_text2sql_of_skyrl_gym_queries_a_database_over_several_turns(tmp_path):
    version_of("skyrl-gym")
    folder = tmp_path / "spider" / "database" / "pets"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "pets.sqlite") as database:
        database.execute("create table pets (name text, legs int)")
        database.execute("insert into pets values ('cat', 4), ('hen', 2)")
    row = {"prompt": "Which pets have four legs?", "ground_truth": "select name from pets where legs = 4"}
    turns = [
        "<think>look</think><sql>select * from pets</sql>",
        "<think>four</think><solution>select name from pets where legs > 3</solution>",
    ]
    kwargs = {"db_path": str(tmp_path)}
    played = play("skyrl_gym:text2sql", script(turns), row={**row, "db_id": "pets", "data": "spider"}, kwargs=kwargs)
    assert (played.turns, played.reward) == (2, 1.0) and "hen" in played.messages[2]["content"]
    with pytest.raises(UserError, match="db_id field is required"):
        play("skyrl_gym:text2sql", script(turns), row=row, kwargs=kwargs)


def test_an_answer_that_was_cut_is_played_as_it_is():
    version_of("reasoning-gym")
    environment = environment_of("reasoning_gym:leg_counting").make()
    environment.reset({}, SEED)
    turn = environment.step(Answer("<answer>", stopped=False))
    assert turn.done and turn.reward == 0.0  # type: ignore[union-attr]
