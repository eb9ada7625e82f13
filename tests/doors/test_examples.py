"""Every example script plans, fits the hardware its header names, and says what `paddock plan` says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from pages import typed
from test_guides import check
from test_plan import shell

from paddock.config import tree
from paddock.facts.machine import GPU_MEMORY_GIB
from paddock.facts.models import shape_of
from paddock.loading.foreign import rule_for
from tools.example_headers import (
    READMES,
    SEVERAL_COMMANDS,
    arguments,
    hardware,
    header,
    memory_line,
    plan_of,
    scripts,
    tables,
    time_line,
)

SCRIPTS = scripts()
ESTIMATORS = {
    "grpo_trainer": "grpo", "ppo_trainer": "gae", "rloo_trainer": "rloo", "sandbox": "grpo", "environments": "grpo",
    "distillation": "grpo",
}  # fmt: skip
GEARS = ("megatron", "lora", "npu", "vl", "moe", "seq_balance", "sandbox", "sglang", "rm", "32k", "sp2", "offload")
SUBJECTS = ("gsm8k", "math", "geo3k", "code", "hh")
NAME = re.compile(rf"run_[a-z0-9.-]+(_({'|'.join(GEARS)}))*(_({'|'.join(SUBJECTS)}))?\.sh")
GUIDE = "rloo_trainer/run_qwen2-7b.sh"
"""The guide's own keys: eighty rows a micro-batch do not fit 80 GB if all of them have full length."""
FAMILIES = (
    *("qwen2", "qwen2.5", "qwen3", "deepseek-llm", "deepseek-v3", "glm", "mistral", "gemma", "moonlight", "llama"),
    *("gpt-oss", "seed-oss", "smollm2"),
)


def name_of(script: Path) -> str:
    return f"{script.parent.name}/{script.name}"


@cache
def planned(script: Path) -> dict[str, Any]:
    return plan_of(script)


each = pytest.mark.parametrize("script", SCRIPTS, ids=name_of)


@each
def test_a_script_is_named_for_model_variant_and_subject(script):
    """Those of environments are named for what is played."""
    assert NAME.fullmatch(script.name) or script.parent.name == "environments"
    assert header(script, "plan") == f"paddock run --plan {script.name}"
    assert header(script, "run").startswith(f"bash {script.name} [key=value ...]")


@each
def test_a_script_is_sound_bash_and_stops_at_the_first_error(script):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
    assert script.stat().st_mode & 0o111, "not executable"
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ")
    code = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert code[0] == "set -euo pipefail"
    assert text.endswith('    "$@"\n')
    assert len(text.splitlines()) <= 70 and max(map(len, text.splitlines())) <= 120


@each
def test_every_key_of_a_script_is_a_field_and_set_once(script):
    keys = [word.lstrip("+").partition("=")[0] for word in arguments(script) if not word.startswith("--")]
    assert len(keys) == len(set(keys))
    assert [key for key in keys if tree.leaf_of(key) is None or rule_for(key) is not None] == []


@each
def test_a_script_plans_for_the_hardware_of_its_header(script):
    plan, target = planned(script), hardware(script)
    config = plan["config"]
    assert config["algorithm"]["adv_estimator"] == ESTIMATORS[script.parent.name]
    if target is None:
        assert header(script, "hardware") == "a laptop, CPU only" and config["trainer"]["device"] == "cpu"
        return
    assert (config["trainer"]["nnodes"], config["trainer"]["n_gpus_per_node"]) == (target.nodes, target.per_node)
    assert target.gib == GPU_MEMORY_GIB[target.device]
    assert config["trainer"]["device"] == ("npu" if target.device.startswith("910") else "cuda")


@each
def test_the_header_says_what_the_plan_says(script):
    plan = planned(script)
    assert header(script, "memory") == memory_line(plan), "run: python tools/example_headers.py"
    assert time_line(plan) in (header(script, "time"), None), "run: python tools/example_headers.py"
    assert header(script, "time") not in ("", "?")


@each
def test_a_script_fits_with_rows_of_full_length(script):
    assert planned(script)["memory"]["fits"] == (name_of(script) != GUIDE)


@each
def test_the_variant_in_a_name_is_the_variant_in_the_config(script):
    config, name = planned(script)["config"], script.stem
    group = config["actor_rollout_ref"]
    shape = shape_of(group["model"]["path"])
    lora = group["model"]["lora_rank"] or group["model"]["lora"]["rank"]
    sequences = group["actor"]["ulysses_sequence_parallel_size"]
    offload = group["actor"]["fsdp_config"]["param_offload"] and group["actor"]["fsdp_config"]["optimizer_offload"]
    facts = {
        "megatron": group["actor"]["strategy"] == "megatron",
        "lora": lora > 0,
        "npu": config["trainer"]["device"] == "npu",
        "vl": bool(shape and shape.vision_params) and config["data"]["image_key"] == "images",
        "moe": bool(shape and shape.experts),
        "sglang": group["rollout"]["name"] == "sglang",
        "rm": config["reward_model"]["enable"],
        "32k": config["data"]["max_response_length"] == 32768,
        "sp2": sequences == config["critic"]["ulysses_sequence_parallel_size"] == 2,
    }
    assert {variant: f"_{variant}_" in f"{name}_" for variant in facts} == facts
    if "seq_balance" in name:
        assert group["actor"]["use_dynamic_bsz"] and config["trainer"]["balance_batch"]
    if "_offload" in name:
        assert offload


def megatron_families() -> tuple[str, ...]:
    """Read, not imported: Megatron need not be installed."""
    tree_of = ast.parse((ROOT / "paddock/engines/train/megatron/decoder.py").read_text())
    named = (
        node for node in tree_of.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILIES"
    )
    return ast.literal_eval(next(named).value)


@each
def test_a_script_that_training_refuses_says_so(script):
    group = planned(script)["config"]["actor_rollout_ref"]
    shape = shape_of(group["model"]["path"])
    assert shape is not None
    unmapped = group["actor"]["strategy"] == "megatron" and shape.family not in megatron_families()
    assert header(script, "status").startswith("plans; training is refused: ") == unmapped
    assert not shape.vision_params or group["rollout"]["name"] in ("embedded", "hf"), "these rollouts take images"
    assert not {"optimizer_cpu_offload"} & group["actor"]["optim"]["override_optimizer_config"].keys()


@each
def test_command_line_keys_win_over_the_script(script):
    given = arguments(script, "trainer.total_epochs=1", "a b=c")
    assert given[-2:] == ["trainer.total_epochs=1", "a b=c"]


def test_every_family_and_variant_of_the_recipes_has_a_script():
    names = [script.name for script in SCRIPTS]
    assert [family for family in FAMILIES if not any(name.startswith(f"run_{family}-") for name in names)] == []
    assert [word for word in (*GEARS, *SUBJECTS) if not any(f"_{word}" in name for name in names)] == []
    assert len(SCRIPTS) >= 40


def test_no_script_of_examples_is_left_out_of_these_tests():
    found = {file for folder in ESTIMATORS for file in (ROOT / "examples" / folder).glob("*.sh")}
    assert {file.name for file in found - set(SCRIPTS)} == set(SEVERAL_COMMANDS)


@pytest.mark.parametrize(
    "name", ["grpo_trainer/run_qwen3-30b-a3b_megatron_moe_math.sh", "ppo_trainer/run_qwen3-8b_npu_gsm8k.sh"]
)
def test_a_script_plans_through_the_door_as_its_header_says(name, tmp_path):
    script = ROOT / "examples" / name
    target = hardware(script)
    assert target is not None
    done = shell("paddock", "run", "--plan", str(script), "--gpu", target.device, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout
    step = header(script, "time").split(" a step")[0]
    assert f"a step      {step}" in done.stdout


SMALL = [
    *("trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1", "trainer.save_freq=-1"),
    *("data.train_files=builtin:addition/train", "data.val_files=[]", "data.train_batch_size=4"),
    *("data.max_prompt_length=16", "data.max_response_length=8", "trainer.logger=[console]"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.name=embedded"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
]
"""One step of the embedded model on one core, whatever a script asks for."""


@pytest.mark.parametrize(
    "name",
    [
        "grpo_trainer/run_qwen2.5-3b_lora_gsm8k.sh",
        pytest.param("ppo_trainer/run_deepseek-llm-7b_gsm8k.sh", marks=pytest.mark.slow),
        pytest.param("rloo_trainer/run_qwen2-7b_offload_gsm8k.sh", marks=pytest.mark.slow),
    ],
)
def test_a_script_trains_where_the_model_is_small(name, tmp_path):
    folder = f"trainer.default_local_dir={tmp_path}"
    compiled = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # kernels, not once more
    done = shell("bash", str(ROOT / "examples" / name), *SMALL, folder, MODEL="builtin:tiny", HOME=str(tmp_path),
                 XDG_CACHE_HOME=compiled)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step:1 - " in done.stdout
    assert "Done: " in done.stdout and "The model is in " in done.stdout


PAGES = ("README.md", "environments/README.md", "grpo_trainer/README.md", "ppo_trainer/README.md")
"""In one language: the other one holds the same commands."""


def typed_words(page: str) -> set[tuple[str, ...]]:
    """Every command of a page, without the variables that stand before it."""
    rows = [command.words for command in typed(ROOT / "examples" / page)]
    return {tuple(dropwhile(lambda word: re.match(r"[A-Z]+=", word), words)) for words in rows}


@pytest.mark.parametrize("words", sorted(set().union(*map(typed_words, PAGES))), ids=" ".join)
def test_a_command_of_the_examples_pages_can_be_typed(words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert check(words) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", READMES)
def test_the_tables_of_the_readme_hold_every_script(page):
    text = (ROOT / "examples" / page).read_text()
    assert tables(text) == text, "run: python tools/example_headers.py"
    listed = re.findall(r"\]\((\w+/\S+?\.sh)\)", text)
    assert {name_of(script) for script in SCRIPTS} <= set(listed)
