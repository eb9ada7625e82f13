"""Teachers over two Ray workers, FSDP2 over gloo: what one process learns from them, two ranks learn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from devices import ON_DEVICE
from safetensors.torch import load_file
from tiny_models import moved_copy

from paddock.loading.load import load
from paddock.trainer import reinforcement as runs

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
cluster = pytest.importorskip("paddock.workers.ray")

LOSS = "distillation.distillation_loss"
SMALL = [
    "actor_rollout_ref.model.path=builtin:tiny", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=2",
    "data.val_files=null", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.logger=[file]",
    "data.dataloader_num_workers=0", *ON_DEVICE, "algorithm.adv_estimator=grpo", "distillation.enabled=True",
    "trainer.total_training_steps=4", "trainer.save_freq=4", "data.max_prompt_length=16", "data.max_response_length=8",
    "reward=exact_match", "actor_rollout_ref.actor.optim.lr=3e-4", "distillation.teacher_key=task",
    *(f"actor_rollout_ref.{role}.dtype=float32" for role in ("rollout", "actor.fsdp_config", "ref.fsdp_config")),
    # AdamW divides by the gradient's own size: without a floor it makes much of the last bit of a tiny one
    "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3",
]  # fmt: skip
ONE = ["distillation.teacher_models.teacher_model.model_path={teacher}"]
TWO = [
    f"+distillation.teacher_models.{name}.{field}"
    for name, path in (("often", "{teacher}"), ("seldom", "builtin:tiny"))
    for field in (f"key={name}", f"model_path={path}")
]


@pytest.fixture(scope="module", autouse=True)
def one_cluster() -> Iterator[None]:
    ray.init(num_cpus=2, **cluster.LOCAL)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return moved_copy(ROOT / "paddock/assets/tiny", tmp_path_factory.mktemp("teacher") / "moved", 1)


def train(folder: Path, workers: int, *overrides: str) -> list[dict[str, float]]:
    """Of every eight rows, one goes to the second teacher: a rank may have none of its rows."""
    folder.mkdir()
    rows = [{"prompt": f"{10 + n}+{20 + n}=", "answer": str(30 + 2 * n), "task": "often" if n % 8 else "seldom"}
            for n in range(16)]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"data.train_files={folder}/rows.jsonl", f"trainer.default_local_dir={folder}"]
    assert runs.train(load([*SMALL, *own, f"trainer.n_gpus_per_node={workers}", *overrides]).config).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ([*ONE, f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=8"], []),
        ([*ONE, f"{LOSS}.loss_mode=forward_kl_topk"], ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"]),
        ([*TWO, f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True", f"{LOSS}.use_task_rewards=False",
          "trainer.balance_batch=False"], []),
    ],
    ids=["top-k", "top-k, sequence parallel", "two teachers, as a reward"],
)  # fmt: skip
def test_two_workers_learn_from_teachers_what_one_process_learns(settings, shared, teacher, tmp_path):
    settings = [setting.format(teacher=teacher) for setting in settings]
    want = train(tmp_path / "one", 1, *settings)
    got = train(tmp_path / "two", 2, *settings, *shared)
    assert any(row["distillation/loss"] for row in want)
    for mine, theirs in zip(got, want, strict=True):
        names = [name for name in theirs if name.startswith(("distillation/", "actor/", "critic/"))]
        assert {name: mine[name] for name in names} == pytest.approx(
            {name: theirs[name] for name in names}, abs=1e-5, rel=1e-5
        )
    one, two = (load_file(tmp_path / name / "global_step_4/actor/model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-5)
