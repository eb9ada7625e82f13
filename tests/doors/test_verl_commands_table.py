"""tools/verl_commands.py finds launch commands in checkouts and says what becomes of each, without running anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOOD = """set -x
LENGTH=$((1024 * 2))
DATA=(
    data.train_files=$HOME/a.parquet  # rows
    data.max_response_length=${LENGTH}
)
# python3 -m verl.trainer.main_ppo never.started=1
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.actor.fsdp_config.grad_offload=False \\
    actor_rollout_ref.rollout.n=${N:-8} trainer.n_gpus_per_node=$GPUS \\
    "${DATA[@]}" trainer.logger=['console'] $@ 2>&1 | tee x.log
"""
UNKNOWN = "touch $HERE/ran\npython3 -m verl.trainer.main_ppo algorithm.some_trick=True data.zoo=$X\n"
OWN = "python3 -m recipe.mine.main_mine a=1\npython3 -m verl.trainer.main_generation b=2\n"


def test_commands_are_counted_by_what_becomes_of_them(tmp_path):
    for place, text in (("one/run.sh", GOOD), ("one/deep/unknown.sh", UNKNOWN), ("two/own.slurm", OWN)):
        (tmp_path / "all" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "all" / place).write_text(text)
    table = tmp_path / "table.md"
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "verl_commands.py", tmp_path / "all", "--out", table],
        capture_output=True, text=True, env={"HERE": str(tmp_path), "PATH": "/usr/bin:/bin"}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith(("one", "two"))}
    assert counts == {"one": ["2", "1", "0", "1"], "two": ["1", "0", "1", "0"]}
    assert "    1 algorithm.some_trick\n    1 data.zoo" in done.stdout
    assert "recipe.mine.main_mine: is a trainer of the checkout's own" in table.read_text()
    assert not (tmp_path / "ran").exists()
