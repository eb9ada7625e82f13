"""Each recipe of CONTRIBUTING.md is followed to the letter: its file is written, its command is typed, it works."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys

import pytest
import transformers
from conftest import ROOT
from pages import arguments_of
from unread_keys import unread_keys

from paddock.cli import main
from paddock.environments.calls import FORMATS
from paddock.environments.environment import Call
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.loading.rules import form, run
from tests.forked import ForkedCall, forget

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = dict(re.findall(r"^### An? (.+?)\n(.*?)(?=^##)", PAGE, re.M | re.S))
SMALL = [
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=False",
    "trainer.save_last=False", "data.dataloader_num_workers=0", "trainer.default_local_dir=run",
]  # fmt: skip


def blocks(recipe: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", RECIPES[recipe], re.M | re.S)


def test_every_kind_of_addition_has_a_recipe():
    assert list(RECIPES) == [
        "advantage estimator", "policy loss", "scorer", "logger", "rollout engine", "environment adapter",
        "tool-call format", "model family", "key", "role", "rule",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "recipe",
    ["advantage estimator", "policy loss", "scorer", "logger", "rollout engine", "environment adapter",
     "tool-call format"],
)  # fmt: skip
def test_one_file_and_one_command_train(recipe, tmp_path, monkeypatch, catalogues):
    (source,), (command,) = blocks(recipe, "python"), blocks(recipe, "bash")
    name = re.match(r"# (my_\w+)\.py\n", source)[1]
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    words = tuple(shlex.split(command.replace("\\\n", " ")))
    if words[0] == "PYTHONPATH=.":
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert main([*arguments_of(words), *SMALL]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and all(line["actor/skipped"] == 0 for line in lines)
    if recipe == "logger":
        assert [text.split()[0] for text in (tmp_path / "run" / "lines.txt").read_text().splitlines()] == ["1", "2"]
    if recipe in ("scorer", "environment adapter"):
        assert 0 <= lines[0]["critic/score/mean"] <= 1
    if recipe == "tool-call format":
        call = Call("calculator", {"expression": "1+1"})
        assert FORMATS["lines"].parse(f"so\n{FORMATS['lines'].render([call])}") == ([call], [])
        assert len(FORMATS["lines"].parse("CALL {")[1]) == 1


def test_a_family_is_proved_by_a_tiny_model_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "families"))
    import tiny_zoo
    from table import outcome

    (line,) = blocks("model family", "python")
    zoo = dict[str, object]()
    exec(line, {"DENSE": zoo, "GraniteConfig": transformers.GraniteConfig})
    assert not set(zoo) & set(tiny_zoo.ZOO)
    for name, entry in zoo.items():
        monkeypatch.setitem(tiny_zoo.ZOO, name, entry)
        assert [outcome(name, gear, tmp_path) for gear in ("embedded", "packed", "update")] == ["works"] * 3


def test_a_key_without_a_reader_is_found_and_one_with_a_reader_is_none(tmp_path):
    """By the search that `make test` does, on a copy of the package."""
    (block,) = blocks("key", "python")
    assert "greeting: str = key(" in block
    shutil.copytree(ROOT / "paddock", tmp_path / "paddock", ignore=shutil.ignore_patterns("__pycache__", "assets"))
    assert unread_keys(tmp_path / "paddock", ["trainer.greeting"]) == {"trainer.greeting"}
    loop = tmp_path / "paddock" / "trainer" / "reinforcement.py"
    opening = "    check_tokenizers(config.distillation"
    loop.write_text(loop.read_text().replace(opening, f"    print(config.trainer.greeting)\n{opening}"))
    assert unread_keys(tmp_path / "paddock", ["trainer.greeting"]) == set()


OPENINGS = {
    "TrainerConfig": "class TrainerConfig:\n",
    "ROLES": "    for role in (\n",
    "_ALL": "_ALL = (\n",
    "LOADS": "LOADS: dict[str, Callable[[Config, ModelShape], RoleLoad | None]] = {\n",
    "FROZEN": "FROZEN: dict[str, Callable[[Rank, type[Backend]], dict[str, Engine]]] = {\n",
    "Trainer.with_advantages": "        with roles.forwarding():\n",
}
"""The line of each place that a recipe names, behind which its lines are written."""


def test_a_frozen_role_is_an_entry_in_each_table_and_a_line_of_the_step(tmp_path):
    shutil.copytree(ROOT / "paddock", tmp_path / "paddock")
    (tmp_path / "compat").symlink_to(ROOT / "compat")
    for block in blocks("role", "python"):
        file, place = re.match(r"# (\S+), in (\S+)\n", block).groups()
        text = (tmp_path / file).read_text()
        assert text.count(OPENINGS[place]) == 1
        (tmp_path / file).write_text(text.replace(OPENINGS[place], OPENINGS[place] + block.partition("\n")[2]))
    ranks = tmp_path / "paddock" / "workers" / "rank.py"
    ranks.write_text(ranks.read_text().replace("import teachers_of", "import Teacher, teachers_of"))
    assert len(blocks("role", "python")) <= 8
    words = ["algorithm.adv_estimator=grpo", "trainer.fluency=builtin:tiny", *SMALL]

    def changed(*arguments: str) -> ForkedCall:
        def command() -> int:
            forget("paddock")
            sys.path.insert(0, str(tmp_path))
            from paddock.cli import main

            return main([*arguments, *words])

        process = ForkedCall(command, folder=tmp_path)
        assert process.wait() == 0, process.said()
        return process

    plan = json.loads(changed("plan", "--json").said())
    assert "fluency" in [role["role"] for role in plan["roles"]] and "fluency" in plan["memory"]["phases"]
    changed("train")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["timing_s/fluency"] > 0 for line in lines)


def test_a_function_with_a_decorator_is_a_rule_of_every_command(monkeypatch):
    (block,) = blocks("rule", "python")
    monkeypatch.setattr(form, "RULES", [*form.RULES])
    exec(block, dict(vars(run)))
    assert load(["trainer.critic_warmup=2", "trainer.total_training_steps=3"]).config.trainer.critic_warmup == 2
    with pytest.raises(UserError, match="the actor learns in none of them") as refused:
        load(["trainer.critic_warmup=3", "trainer.total_training_steps=3"])
    assert refused.value.key == "trainer.critic_warmup"
