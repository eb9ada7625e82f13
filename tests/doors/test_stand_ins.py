"""Programs that launch scripts call have stand-ins under `paddock run`, and `verl` is Paddock's wherever it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from paddock import __version__
from paddock.errors import UserError
from paddock.verl.scripts.launcher import OVERRIDES, as_module, behind, is_ours

REWARD = """
import verl
from verl.utils.reward_score import countdown, gsm8k
from recipe.mine import half

def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("verl of the reward:", verl.__file__, flush=True)
    return half() * countdown.one() * bool(gsm8k.compute_score)
"""

SCORES = """
from paddock.rewards.functions import Target, function_of
print(function_of(Target("reward.py", "compute_score"))("", "", "", {}))
"""
"""Loads the reward as a process of a run does."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder like a checkout of verl: a package of its name, and modules of the user's own."""
    files = {
        "verl/__init__.py": "raise SystemExit('the verl of the checkout was imported')\n",
        "verl/trainer/__init__.py": "",
        "verl/trainer/main_ppo.py": "",
        "verl/utils/reward_score/countdown.py": "def one():\n    return 1\n",
        "verl/utils/reward_score/gsm8k.py": "",
        "recipe/mine.py": "def half():\n    return 0.5\n",
        "reward.py": REWARD,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def paddock_run(folder: Path, text: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.sh").write_text(text)
    command = [sys.executable, "-P", "-m", "paddock.cli", "run", *flags, "run.sh"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120)


def test_inside_a_checkout_paddocks_verl_serves_and_says_so(checkout):
    script = """
    set -eu
    export PYTHONPATH=$PWD
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nonsense=1 || echo "ended with $?"
    python3 -c "$SCORES"
    """
    done = paddock_run(checkout, script, SCORES=SCORES)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"`verl` is Paddock's, {ROOT}/compat/verl; the one in {checkout} is not used") == 1
    assert "paddock: trainer.nonsense=1: no such key" in done.stderr and "ended with 2" in done.stdout
    assert f"verl of the reward: {ROOT}/compat/verl/__init__.py" in done.stdout
    assert done.stdout.endswith("0.5\n")


def test_inside_a_checkout_defaults_of_its_own_verl_are_told_to_training_commands(checkout):
    (checkout / "verl" / "trainer" / "config").mkdir()
    (checkout / "verl" / "trainer" / "config" / "ppo_trainer.yaml").write_text(
        "actor_rollout_ref: {actor: {entropy_coeff: 0.001}}\n"
    )
    script = """
    export PYTHONPATH=$PWD && mkdir -p deeper && cd deeper
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo
    """
    done = paddock_run(checkout, script, "--plan")
    assert done.returncode == 0, done.stderr
    file = "../verl/trainer/config/ppo_trainer.yaml"
    assert f"0.001 in {file}: actor_rollout_ref.actor.entropy_coeff=0.001 restores it" in done.stdout


def test_a_launcher_of_ranks_starts_our_command_once_and_in_this_python(tmp_path):
    other = tmp_path / "env" / "bin"
    other.mkdir(parents=True)
    (other / "python3").write_text("#!/bin/sh\necho another python; exit 9\n")
    (other / "python3").chmod(0o755)
    script = """
    set -eu
    export PATH=$PWD/env/bin:$PATH
    ulimit -n 123456789
    conda activate verl
    source activate verl
    . /no/such/place/set_env.sh
    ray stop --force
    torchrun --standalone --nproc_per_node 8 -m paddock.cli --version
    srun --nodes 2 accelerate launch --num_processes 4 --module paddock.cli --version
    ray job submit --working-dir . -- python3 -u -m paddock.cli --version
    uv run --frozen python3 -m paddock.cli --version
    srun true || echo "no srun: $?"
    echo 'srun true || python3.11 -m paddock.cli --version' > inner.sh
    paddock run inner.sh
    """
    done = paddock_run(tmp_path, script)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "Ray processes" not in line]  # an installed ray's
    assert lines == [*[f"paddock {__version__}"] * 4, "no srun: 127", f"paddock {__version__}"]
    for program in ("torchrun", "srun", "ray", "uv"):
        assert f"paddock: {program} is passed over: `python3 -m paddock.cli` starts here, once" in done.stderr
    for passed in ("conda activate verl", "source activate verl", "source /no/such/place/set_env.sh"):
        assert f"passed over, it is not on this machine: {passed}" in done.stderr
    assert "passed over, ray is not installed: ray stop --force" in done.stderr or shutil.which("ray")
    assert "the limit stays as it is: ulimit -n 123456789" in done.stderr


def test_planning_starts_no_launcher_and_answers_questions_about_devices(tmp_path):
    script = """
    set -euo pipefail
    mkdir kept && rm -rf kept
    devices=$(nvidia-smi -L | wc -l)
    until npu-smi info; do sleep 10; done
    nodes=($(scontrol show hostnames "nodes[1-2]"))
    srun --nodes=1 -w "${nodes[0]}" apptainer run image.sif ray start --head --block &
    sleep 1000
    torchrun --nnodes=16 --nproc_per_node=8 train.py
    srun apptainer exec i.sif bash -c "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=$devices" | tail -n 40
    """
    done = paddock_run(tmp_path, script, "--plan", "--set", "trainer.nnodes=2")
    assert done.returncode == 0, done.stderr
    assert "not run while planning: torchrun --nnodes=16 --nproc_per_node=8 train.py" in done.stderr
    assert "not run while planning: rm -rf kept" in done.stderr and (tmp_path / "kept").is_dir()
    settings = done.stdout.splitlines()
    assert any(line.split()[:1] == ["trainer.n_gpus_per_node=8"] for line in settings), done.stdout
    assert any(line.split()[:1] == ["trainer.nnodes=2"] for line in settings)


def test_exit_codes_of_plans_a_refusal_in_a_pipe_a_mistake_behind_a_plan_several_commands(tmp_path):
    command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
    done = paddock_run(tmp_path, f"{command} trainer.nonsense=1 2>&1 | tee log\n", "--plan")
    assert done.returncode == 2 and "trainer.nonsense" in done.stdout
    done = paddock_run(tmp_path, f"{command} > plan.txt\n+trainer.x=1\n", "--plan")
    assert done.returncode == 127 and "1 planned; the script itself ended with exit code 127" in done.stderr
    own = (ROOT / "examples" / "ppo_trainer" / "run_tiny_rm.sh").read_text()
    done = paddock_run(tmp_path, own, "--plan")
    assert done.returncode == 0 and "Algorithm: gae" in done.stdout, done.stderr


def test_what_a_script_leaves_in_the_background_runs_on_and_is_awaited_in_a_plan(tmp_path):
    script = "(sleep 1.5; nohup python3 -m paddock.cli --version > log) & exit 0\n"
    done = paddock_run(tmp_path, f"{script} # paddock", TMPDIR=str(tmp_path))
    assert done.returncode == 0 and "started no command" not in done.stderr, done.stderr
    deadline = time.monotonic() + 30
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tmp_path / "log").read_text() == f"paddock {__version__}\n"
    assert len(list(tmp_path.glob("paddock-run-*"))) == 1
    plan = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo > log &\n"
    done = paddock_run(tmp_path, plan, "--plan", TMPDIR=str(tmp_path))
    assert done.returncode == 0 and "Algorithm: grpo" in (tmp_path / "log").read_text()
    assert len(list(tmp_path.glob("paddock-run-*"))) == 1


def test_a_script_that_waits_for_ever_is_stopped_and_named(tmp_path):
    for flags, text, reason in (
        (["--plan"], "until false; do\nsleep 60\ndone", "waits for ever: 100 times at line 2 of run.sh, in one plan"),
        (
            [],
            "until no-such-smi; do\nsleep 0.01\ndone",
            "waits at line 2 of run.sh for no-such-smi, which is not on this",
        ),
    ):
        done = paddock_run(tmp_path, text + " | cat\npython3 -m verl.trainer.main_ppo\n", *flags)
        assert done.returncode == 2 and reason in done.stderr, done.stderr


def test_the_command_behind_launchers_is_found_with_its_number_of_ranks():
    ours = ["-m", "verl.trainer.main_ppo", "a=1"]
    eight = ["trainer.n_gpus_per_node=8", "trainer.nnodes=1"]
    for words, more in (
        (["/usr/bin/python3", *ours], []),
        (["python3", "-m", "torch.distributed.run", "--nproc_per_node", "8", *ours], eight),
        (["deepspeed", "--num_gpus", "8", "--module", *ours[1:]], eight),
        (["accelerate", "launch", "--num_processes=16", "--num_machines=2", *ours], [eight[0], "trainer.nnodes=2"]),
        (["torchrun", "--nproc-per-node=4", "--nnodes=2", *ours, *eight], eight),
        (["srun", "--job-name", "ray", "-n", "1", "ray", "job", "submit", "--", "python3", *ours], []),
        (["nsys", "profile", "-o", "x", "torchrun", "--standalone", *ours], []),
    ):
        assert behind(words) == ([], [*ours, *more]), words
    assert behind(["python3", "-uB", "-W", "ignore", "-Xdev", "train.py"])[1] == ["train.py"]
    for words in (
        ["torchrun", "train.py", "-m", "verl.trainer.main_ppo"],
        ["srun", "hostname"],
        ["pip", "install", "python"],
    ):
        assert not is_ours(behind(words)[1])


def test_split_placement_gives_the_critic_half_of_the_devices(monkeypatch):
    given = ["main_ppo_split.py", "algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=8", "trainer.nnodes=2"]
    pools = ["trainer.n_gpus_per_node=4", "critic.n_gpus_per_node=4", "critic.nnodes=2"]
    split = [*pools, "critic.enable_resource_pool=True"]
    assert as_module(given) == ["-m", "verl.trainer.main_ppo", *given[1:], *split]
    monkeypatch.setenv(OVERRIDES, '["trainer.n_gpus_per_node=1"]')
    assert as_module(given) == ["-m", "verl.trainer.main_ppo", *given[1:]]


def test_a_module_of_verl_is_matched_exactly_and_one_that_is_not_here_is_refused_by_name():
    assert is_ours(["-m", "verl.trainer.main_ppo"]) and not is_ours(["-m", "recipe.mine.main"])
    assert as_module(["-m", "recipe.dapo.main_dapo", "a=1"]) == ["-m", "verl.trainer.main_ppo", "a=1"]
    for module, reason in (
        ("verl.trainer.main_ppo_x", "has no such module"),
        ("verl_mlite.launch", "Megatron Lite is not a training engine"),
        ("verl.experimental.fully_async_policy.fully_async_main", "in a pool of their own do not run ahead yet"),
    ):
        with pytest.raises(UserError, match=reason) as error:
            is_ours(["-m", module])
        assert module in str(error.value) and error.value.fix
