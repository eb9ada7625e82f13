"""Every command line in the pages names a command that exists, in Hydra's grammar, with keys that the schema has."""

from __future__ import annotations

import re
import shlex

import pytest
from pages import ALL, arguments_of, title, typed

from paddock.cli import COMMANDS
from paddock.commands.keys_of import EVAL, GENERATE, RM, SFT
from paddock.config import tree
from paddock.data.prepare.command import NAMES
from paddock.errors import UserError
from paddock.help.pages import PAGES as HELP
from paddock.loading.overrides import FLAGS as CONFIG_FLAGS
from paddock.loading.overrides import parse
from paddock.models.get import CATALOGUE

SHORT_NAMES = {"eval": EVAL, "generate": GENERATE, "rm": RM, "sft": SFT}
OWN_ARGUMENTS = ("prompt", "output")
"""Of `paddock generate`, beside keys."""
WITH_KEYS = ("train", "plan", "sft", "rm", "eval", "generate")
AND_MORE = "..."


def faults(words: tuple[str, ...]) -> list[str]:
    """What of a command line Paddock would not know; of another program's nothing."""
    if all(re.fullmatch(r"[+~]*\w+\.[\w.]+=.*", word) for word in words):
        return unknown_keys("train", list(words))  # keys to be added to a command
    arguments = arguments_of(words)
    if arguments is None:
        return []
    command, rest = arguments[0], [word for word in arguments[1:] if word != AND_MORE]
    if command not in COMMANDS:
        return [command]
    if command == "data":
        return [] if rest[0] in NAMES else rest[:1]
    if command == "models":
        return [] if rest[0] == "list" or rest[1] in CATALOGUE else rest[1:2]
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    known = {word for name, _ in HELP[command].words for word in name.split()} | {"--help"}
    if command in WITH_KEYS:
        return [flag for flag in flags if flag not in known | CONFIG_FLAGS.keys()] + unknown_keys(command, rest)
    return [flag for flag in flags if flag not in known and command != "run"]  # a script has arguments of its own


def unknown_keys(command: str, words: list[str]) -> list[str]:
    """Keys that are no keys; and the first word that cannot be parsed."""
    given = [word for word in words if re.match(r"[+~]*[\w.]+=|~", word)]
    given = [word for word in given if command != "generate" or word.partition("=")[0] not in OWN_ARGUMENTS]
    if command in SHORT_NAMES:
        given = [SHORT_NAMES[command].translate(word) for word in given]
    try:
        settings = parse(given).settings
    except UserError as error:
        return [str(error.key)]
    return [setting.key for setting in settings if tree.leaf_of(setting.key) is None]


@pytest.mark.parametrize("page", ALL, ids=title)
def test_the_commands_of_a_page_exist_and_their_keys_are_in_the_schema(page):
    found = {" ".join(command.words): faults(command.words) for command in typed(page)}
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("paddock trian", ["trian"]),
        ("paddock train ... trainer.total_epochs=2", []),
        ("paddock train data.train_bath_size=4 trainer.seed=1", ["data.train_bath_size"]),
        ("X=1 python3 -m paddock.trainer.main_ppo critic.lr=1", ["critic.lr"]),
        ("paddock sft optim.lr=1e-5 model.lora_rank=8 data=a.csv optim.rate=1", ["actor_rollout_ref.actor.optim.rate"]),
        ("paddock train 'reward_kwargs={pattern: a'", ["'reward_kwargs={pattern: a'"]),
        ("paddock data gsm9k", ["gsm9k"]),
        ("paddock models get gpt-2", ["gpt-2"]),
        ("paddock plan --gpus 4090", ["--gpus"]),
        ("paddock generate prompt='a b' n=4 rollout.temp=1", ["actor_rollout_ref.rollout.temp"]),
        ("critic.enable=True critic.device=cpu", ["critic.device"]),
        ("make quickstart", []),
    ],
)
def test_what_cannot_be_typed_is_found(line, wrong):
    assert faults(tuple(shlex.split(line))) == wrong
