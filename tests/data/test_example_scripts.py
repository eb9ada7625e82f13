"""The scripts of examples/, really run: from several folders, with and without an installed paddock."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyarrow import parquet

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "data_preprocess"
GSM8K = {"question": "6*7?", "answer": "6*7 = 42\n#### 42"}
MATH = {"problem": "6*7?", "solution": r"It is $\boxed{42}$."}


def run(command: list, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=inherited | env, capture_output=True, text=True, timeout=120
    )


def raw_folder(folder: Path, record: dict) -> Path:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps(record))
    return folder


def truth(folder: Path) -> str:
    return parquet.read_table(folder / "test.parquet").to_pylist()[0]["reward_model"]["ground_truth"]


@pytest.mark.parametrize(
    ("cwd", "script", "path"),
    [
        (ROOT, "examples/data_preprocess/gsm8k.py", ""),
        (SCRIPTS, "gsm8k.py", ""),
        (SCRIPTS, "math.py", ""),
        (SCRIPTS, "./math_dataset.py", ""),
        (Path("/"), SCRIPTS / "math.py", ""),
        (ROOT, "examples/data_preprocess/math.py", str(ROOT)),
    ],
)
def test_each_script_runs_from_any_folder_although_one_is_named_math(tmp_path, cwd, script, path):
    record = GSM8K if "gsm8k" in str(script) else MATH
    raw = raw_folder(tmp_path / "raw", record)
    env = {"PYTHONPATH": path} if path else {}
    command = [sys.executable, script, "--local_dataset_path", raw, "--local_save_dir", tmp_path / "out"]
    done = run(command, cwd, **env)
    assert done.returncode == 0, done.stderr
    assert truth(tmp_path / "out") == "42"


def test_the_script_and_the_command_do_the_same(tmp_path):
    raw = raw_folder(tmp_path / "raw", GSM8K)
    call = "import sys; from paddock.data.prepare import main; sys.exit(main('gsm8k', sys.argv[1:]))"
    outputs = []
    for command in ([SCRIPTS / "gsm8k.py"], ["-c", call]):
        flags = ["--local_dataset_path", raw, "--local_dir", tmp_path / "out"]
        done = run([sys.executable, *command, *flags], ROOT, PYTHONPATH=str(ROOT))
        outputs.append((done.returncode, done.stdout, done.stderr, (tmp_path / "out" / "train.parquet").read_bytes()))
        shutil.rmtree(tmp_path / "out")
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == 0


def test_an_unreachable_hub_is_answered_quickly_with_a_way_out(tmp_path):
    with socket.socket() as closed:  # bound, not listening: connections to it are refused
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        start = time.monotonic()
        command = [sys.executable, SCRIPTS / "gsm8k.py", "--local_save_dir", tmp_path / "out"]
        done = run(command, tmp_path, HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "hf"))
    assert time.monotonic() - start < 20
    assert done.returncode == 2
    assert "--local_dataset_path" in done.stderr and "openai/gsm8k" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_folders_that_datasets_wrote_or_the_hub_keeps_are_read(tmp_path):
    build = f"""
import datasets, sys
from pathlib import Path
from paddock.data.prepare import main
table = datasets.Dataset.from_list([{GSM8K!r}])
datasets.DatasetDict(train=table, test=table).save_to_disk("saved")
table.save_to_disk("single")
for split in ("train", "test"):
    Path("clone/main").mkdir(parents=True, exist_ok=True)
    table.to_parquet(f"clone/main/{{split}}-00000-of-00001.parquet")
paths = "".join(f"  - split: {{s}}\\n    path: main/{{s}}-*\\n" for s in ("train", "test"))
Path("clone/README.md").write_text("---\\nconfigs:\\n- config_name: main\\n  data_files:\\n" + paths + "---\\n")
Path("empty").mkdir()
folders = ("saved", "clone", "single", "empty")
codes = [main("gsm8k", ["--local_dataset_path", f, "--local_save_dir", f"out_{{f}}"]) for f in folders]
assert codes == [0, 0, 2, 2], codes
back = datasets.load_dataset("parquet", data_files="out_clone/train.parquet")["train"][0]
assert back["prompt"][0]["role"] == "user" and back["reward_model"]["ground_truth"] == "42", back
"""
    done = run([sys.executable, "-c", build], tmp_path, PYTHONPATH=str(ROOT), HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 0, done.stderr
    assert truth(tmp_path / "out_saved") == truth(tmp_path / "out_clone") == "42"
    assert "a single table without splits" in done.stderr
    assert "holds nothing that can be read as a data set" in done.stderr
    assert "Traceback" not in done.stderr


RLOO = {
    "algorithm.adv_estimator": "rloo",
    "data.train_files": "/home/someone/data/gsm8k/train.parquet",
    "data.val_files": "/home/someone/data/gsm8k/test.parquet",
    "data.train_batch_size": "1024",
    "data.max_prompt_length": "512",
    "data.max_response_length": "1024",
    "data.filter_overlong_prompts": "True",
    "data.truncation": "error",
    "actor_rollout_ref.model.path": "Qwen/Qwen2-7B-Instruct",
    "actor_rollout_ref.model.use_remove_padding": "True",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "True",
    "actor_rollout_ref.actor.optim.lr": "1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "80",
    "actor_rollout_ref.actor.use_kl_loss": "False",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "False",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": "5",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "0.6",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "160",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "160",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "True",
    "algorithm.use_kl_in_reward": "True",
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": "0.001",
    "trainer.critic_warmup": "0",
    "trainer.logger": '["console","wandb"]',
    "trainer.project_name": "paddock_rloo_example_gsm8k",
    "trainer.experiment_name": "qwen2_7b_function_rm",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "1",
    "trainer.save_freq": "-1",
    "trainer.test_freq": "5",
    "trainer.total_epochs": "15",
}


def test_the_rloo_script_says_what_the_guide_says_and_passes_further_overrides_on(tmp_path):
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"\n')
    python.chmod(0o755)
    script = ROOT / "examples" / "rloo_trainer" / "run_qwen2-7b.sh"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run(["bash", script, "trainer.nnodes=2"], tmp_path, PATH=path, HOME="/home/someone")
    assert done.returncode == 0, done.stderr
    module, *overrides = json.loads(done.stdout)[1:]
    assert module == "paddock.trainer.main_ppo"
    assert overrides.pop() == "trainer.nnodes=2"
    assert dict(override.split("=", 1) for override in overrides) == RLOO
