"""Compares the numbers that two versions of Paddock compute, bit for bit, on this machine.

    python tools/same_bits.py                    # this tree against the last commit (HEAD)
    python tools/same_bits.py --against v0.1.0 --cases ppo grpo

Each case is one real command on a CPU in fp32 with fixed seeds, run once by a checkout of the other commit and once by
this tree. Equal must be: every tensor of every checkpoint (weights and optimizer), and every line of metrics.jsonl but
for the timings. Bits depend on the processor, so nothing is kept between machines: the other version runs here, too.
Exit code 1 names the first difference of each case. `ranks` needs the extra `ray` and is left out without it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3
SMALL = [
    f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}", "trainer.test_freq=2", "trainer.device=cpu",
    "trainer.logger=[file]", "data.train_batch_size=8", "data.dataloader_num_workers=0",
]  # fmt: skip
RL = [
    *SMALL, "data.val_max_samples=8", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]  # fmt: skip
OWN_MODEL = [
    "train", *RL, "algorithm.adv_estimator=grpo", "data.max_prompt_length=48", "data.max_response_length=6",
    "actor_rollout_ref.rollout.name=embedded", "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "custom_reward_function.path={fixtures}/score.py", "trainer.test_freq=-1", "trainer.val_before_train=False",
    "actor_rollout_ref.actor.optim.lr=5e-4",  # what a run chooses for a named model is no number of the step
]  # fmt: skip
CASES: dict[str, list[str]] = {
    "grpo": ["train", *RL, "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True"],
    "ppo": ["train", *RL, "algorithm.adv_estimator=gae", "algorithm.kl_ctrl.type=adaptive",
            "algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.ppo_epochs=2"],
    "rloo": ["train", *RL, "algorithm.adv_estimator=rloo"],
    "remax": ["train", *RL, "algorithm.adv_estimator=remax"],
    "dapo": ["train", *RL, "algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True",
             "algorithm.filter_groups.metric=seq_reward", "data.gen_batch_size=12"],
    "lora": ["train", *RL, "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=8",
             "actor_rollout_ref.actor.use_kl_loss=True"],
    "offload": ["train", *RL, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True",
                "actor_rollout_ref.actor.fsdp_config.param_offload=True",
                "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
                "actor_rollout_ref.ref.fsdp_config.param_offload=True"],
    "hf": ["train", *RL, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf"],
    "sft": ["sft", *SMALL],
    "rm": ["rm", "train", *SMALL, "data.val_max_samples=16"],
    "experts": [*OWN_MODEL, "actor_rollout_ref.model.path={fixtures}/experts",
                "data.train_files={fixtures}/sums.jsonl"],
    "images": [*OWN_MODEL, "actor_rollout_ref.model.path={fixtures}/vision",
               "data.train_files={fixtures}/images.parquet"],
    "ranks": ["train", *RL, "algorithm.adv_estimator=gae", "trainer.n_gpus_per_node=2",
              "ray_kwargs.ray_init.num_cpus=2"],
}  # fmt: skip
"""The arguments of `paddock`. `{fixtures}` is a folder with tiny models and data that both versions read."""

TIMED = ("timing_s/", "timing_per_token_ms/", "perf/")
"""Prefixes of metrics that differ from run to run."""


def make_fixtures(folder: Path) -> None:
    """Writes a tiny model of experts, one that sees images, and rows for both."""
    import pyarrow as pa
    from pyarrow import parquet

    sys.path.insert(0, str(ROOT / "tests"))
    import tiny_vision
    import tiny_zoo

    tiny_zoo.save(folder / "experts", "qwen3_moe")
    sums = [{"data_source": "sums", "prompt": f"{a}+{b}=", "reward_model": {"ground_truth": str(a + b)}}
            for a in range(4) for b in range(4)]  # fmt: skip
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    tiny_vision.save_tiny_vision(folder / "vision")
    rows = [
        {
            "data_source": "pictures",
            "prompt": [{"role": "user", "content": f"<image>what is {index}?" if index % 2 else f"say {index}"}],
            "reward_model": {"ground_truth": str(index)},
            "images": [{"bytes": tiny_vision.encoded(tiny_vision.painted(width=8 + 8 * (index % 3))), "path": None}]
            if index % 2
            else [],
        }
        for index in range(16)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "images.parquet")
    (folder / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(ord((solution_str or ' ')[0]) % 4)\n"
    )


def run(tree: Path, case: str, fixtures: Path, folder: Path) -> dict[str, str]:
    """Runs the case by the code in `tree`; returns a digest of each tensor and each line."""
    arguments = [argument.format(fixtures=fixtures) for argument in CASES[case]]
    command = [sys.executable, "-m", "paddock.cli", *arguments, f"trainer.default_local_dir={folder}"]
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder.parent, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{case}: {' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return digests(folder)


def digests(folder: Path) -> dict[str, str]:
    """Returns a digest of every tensor and metric line of a run, by its name."""
    values: dict[str, str] = {}
    for path in sorted(folder.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            values[f"{path.relative_to(folder)}: {name}"] = digest(tensor)
    for path in sorted(folder.rglob(".metadata")):
        with tempfile.NamedTemporaryFile(suffix=".pt") as whole:
            dcp_to_torch_save(path.parent, whole.name)
            for name, value in flattened(torch.load(whole.name, weights_only=False)).items():
                values[f"{path.parent.relative_to(folder)}: {name}"] = digest(value)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if not name.startswith(TIMED) and name != "time":
                values[f"metrics.jsonl: step {row['step']}: {name}"] = repr(value)
    return values


def flattened(tree: Any, name: str = "") -> dict[str, Any]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if items is None:
        return {name: tree}
    return {key: value for part, inner in items for key, value in flattened(inner, f"{name}/{part}").items()}


def digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(data).hexdigest()[:16]}"


def difference(before: dict[str, str], after: dict[str, str]) -> str | None:
    """Describes the first difference; metrics that only `after` has are no difference."""
    for name, value in before.items():
        if name not in after:
            return f"{name} is gone"
        if after[name] != value:
            return f"{name}: {value} became {after[name]}"
    new = [name for name in after if name not in before and not name.startswith("metrics.jsonl")]
    return f"{new[0]} is new" if new else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--against", default="HEAD", help="a commit; this tree, with its uncommitted changes, is the other"
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    cases = [case for case in options.cases if case != "ranks" or importlib.util.find_spec("ray")]
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        other = folder / "other"
        subprocess.run(
            ["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", other, options.against], check=True
        )
        try:
            (folder / "fixtures").mkdir()
            make_fixtures(folder / "fixtures")
            for case in cases:
                before = run(other, case, folder / "fixtures", folder / f"{case}-before")
                after = run(ROOT, case, folder / "fixtures", folder / f"{case}-after")
                found = difference(before, after)
                failed += found is not None
                print(f"{case:8} {len(before):5} values  {found or 'equal'}", flush=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", other], check=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
