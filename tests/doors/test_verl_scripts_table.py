"""tools/verl_scripts.py says of every script of a checkout what became of it, and what it was given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

SCRIPTS = {
    "grpo_trainer/planned.sh": ": ${MODEL_PATH:?set it}\nset -u\n"
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.nnodes=$NNODES",
    "grpo_trainer/refused.sh": "python3 -m verl.experimental.fully_async_policy.fully_async_main 2>&1 | tee log",
    "sft/asks.sh": 'if [ $# -lt 1 ]; then\n  echo "Usage: asks.sh <nproc_per_node>"\n  exit 1\nfi\nfalse || exit 3',
    "sft/broken.sh": "set -e\nsource ./not_there.sh",
}


def test_each_script_has_one_outcome_with_its_reason(tmp_path: Path):
    for name, text in SCRIPTS.items():
        script = tmp_path / "checkout" / "examples" / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(text + "\n")
    table = tmp_path / "table.json"
    command = [sys.executable, str(ROOT / "tools" / "verl_scripts.py"), str(tmp_path / "checkout"), "--out", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {row["script"].removeprefix("examples/"): row for row in json.loads(table.read_text())}
    assert {name: row["kind"] for name, row in rows.items()} == {
        "grpo_trainer/planned.sh": "planned",
        "grpo_trainer/refused.sh": "refused",
        "sft/asks.sh": "broken",
        "sft/broken.sh": "broken",
    }
    assert rows["grpo_trainer/planned.sh"]["given"] == {"MODEL_PATH": "/data/model_path", "NNODES": "1"}
    assert "in a pool of their own do not run ahead yet" in rows["grpo_trainer/refused.sh"]["why"]
    assert rows["sft/asks.sh"]["given"] == {"<nproc_per_node>": "8"} and "exit code 3" in rows["sft/asks.sh"]["why"]
    assert "broken.sh: line 2: ./not_there.sh: No such file" in rows["sft/broken.sh"]["why"]
    assert "all: 4 scripts: 1 planned, 1 refused, 2 broken, 0 TRACEBACK, 0 HANG" in done.stdout
    assert "ppo, grpo, rloo: 2 scripts: 1 planned, 1 refused" in done.stdout
