"""Images on their way to Ray's workers: once for each prompt of a share, and what one process learns, two learn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from devices import ON_DEVICE
from pyarrow import parquet
from safetensors.torch import load_file

pytest.importorskip("PIL", reason="needs the extra `vision`")

from tiny_vision import encoded, painted, prompt_of, reader_of, save_tiny_vision, vision_batch

from paddock.loading.load import load
from paddock.trainer import reinforcement as runs
from paddock.workers.sharded import FORWARD, SharedRows

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
cluster = pytest.importorskip("paddock.workers.ray")


@pytest.fixture(scope="module", autouse=True)
def one_cluster() -> Iterator[None]:
    ray.init(num_cpus=2, **cluster.LOCAL)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(tmp_path_factory.mktemp("model"), "qwen3_vl")


def test_rows_of_a_prompt_share_its_images_there_as_here(folder):
    reader = reader_of(folder)
    batch = vision_batch([prompt_of(reader, [painted()]), prompt_of(reader, [])], samples=3)
    group = cluster.RayRanks.__new__(cluster.RayRanks)  # no processes: only what is sent to them
    group.sent, group.batch_sent = {}, None
    some = torch.tensor([0, 2, 4])
    first = group.refs(SharedRows(batch, some, FORWARD))
    again = group.refs(SharedRows(batch.with_(values=torch.zeros_like(batch.mask)), some, FORWARD))
    assert first.images == again.images is not None
    images = first.open().extras["images"]
    assert images[0] is images[1] and images[2] is None
    assert torch.equal(images[0].pixels, batch.extras["images"][0].pixels)
    texts = vision_batch([prompt_of(reader, [])])
    assert group.refs(SharedRows(texts, torch.tensor([0]), FORWARD)).images is None


def test_two_workers_learn_what_one_process_learns(folder, tmp_path):
    rows = [
        {
            "data_source": "colours",
            "prompt": [{"role": "user", "content": "<image>?" if index % 2 else "none?"}],
            "reward_model": {"style": "rule", "ground_truth": "r"},
            "images": [{"bytes": encoded(painted(width=8 + 8 * (index % 3))), "path": None}] if index % 2 else [],
        }
        for index in range(16)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "score.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                       "    return float(ord((solution_str or ' ')[0]) % 4)\n")  # fmt: skip
    for ranks in (1, 2):
        config = load([
            "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={folder}", *ON_DEVICE,
            f"data.train_files={tmp_path}/rows.parquet", "data.train_batch_size=4", "data.max_prompt_length=48",
            "data.max_response_length=3", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.name=embedded",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.optim.lr=0.01",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32", "trainer.total_training_steps=2",
            "trainer.save_freq=2", "trainer.logger=[file]", f"trainer.default_local_dir={tmp_path}/{ranks}",
            f"trainer.n_gpus_per_node={ranks}",
            f"custom_reward_function.path={tmp_path}/score.py", "data.dataloader_num_workers=0",
            "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3",
        ]).config  # fmt: skip
        assert runs.train(config).finished
    one, two = (load_file(tmp_path / ranks / "global_step_2" / "actor" / "model.safetensors") for ranks in ("1", "2"))
    start = load_file(folder / "model.safetensors")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-4, msg=name)
    assert any("visual" in name and not torch.equal(one[name], start[name]) for name in one)
    assert (tmp_path / "2" / "global_step_2" / "actor" / "preprocessor_config.json").is_file()
