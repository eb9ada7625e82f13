"""SFT and reward models on two Ray workers: what one process learns, they learn; and pairs stay together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import ON_DEVICE
from safetensors.torch import load_file
from tiny_models import save_tiny

from paddock.commands.keys_of import RM, SFT
from paddock.trainer.supervised import FINE_TUNING, REWARD_MODELLING
from paddock.workers.sharded import cut

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
cluster = pytest.importorskip("paddock.workers.ray")

ANSWERS = [{"prompt": f"{a}+{b}=", "answer": str(a + b) * (1 + a % 3)} for a in range(1, 9) for b in (2, 30)]
PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "no " * (a % 3) + str(a)}
    for a in range(1, 9)
    for b in (2, 30)
]
RUNS: dict[str, tuple[Any, Callable[..., Any], list[dict[str, str]]]] = {
    "sft": (SFT, FINE_TUNING.train, ANSWERS),
    "rm": (RM, REWARD_MODELLING.train, PAIRS),
}


@pytest.fixture(scope="module", autouse=True)
def one_cluster() -> Iterator[None]:
    ray.init(num_cpus=2, **cluster.LOCAL)
    yield
    ray.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    save_tiny(tmp_path / "model")

    def train(kind: str, folder: str, ranks: int, *overrides: str) -> list[dict[str, float]]:
        command, begin, rows = RUNS[kind]
        data = tmp_path / f"{kind}.jsonl"
        data.write_text("\n".join(json.dumps(row) for row in rows))
        config = command.load([
            "trainer.logger=file", "data.train_batch_size=6", "data.max_prompt_length=24", "optim.lr=1e-2",
            "data.max_response_length=16", "actor_rollout_ref.actor.fsdp_config.dtype=float32", *ON_DEVICE,
            f"model={tmp_path / 'model'}", f"data={data}", f"data.val_files={data}", "trainer.test_freq=2",
            f"trainer.default_local_dir={tmp_path / folder}", f"trainer.n_gpus_per_node={ranks}",
            "trainer.total_training_steps=4", "trainer.save_freq=2",
            "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3", *overrides,
        ]).config  # fmt: skip
        assert begin(config).finished
        lines = [json.loads(line) for line in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        timed = ("timing", "perf", "global_seqlen")
        return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]

    return train


@pytest.mark.parametrize("kind", RUNS)
def test_two_ranks_learn_what_one_process_learns_and_each_goes_on_from_the_others_checkpoint(kind, run, tmp_path):
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=60"  # several micro-batches, not as many on each rank
    alone, together = run(kind, "one", 1, budget), run(kind, "two", 2, budget)
    assert_close(together, alone)
    one, two = (load_file(tmp_path / folder / "huggingface" / "model.safetensors") for folder in ("one", "two"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5, msg=name)
    (tmp_path / "two" / "global_step_4").rename(tmp_path / "gone")
    assert_close(run(kind, "two", 1, budget), alone)


def assert_close(got: list[dict[str, float]], want: list[dict[str, float]]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (theirs["step"], name)


@pytest.mark.parametrize("balance", [True, False])
def test_the_two_rows_of_a_pair_go_to_one_rank(balance):
    lengths = [3, 9, 4, 1, 7, 2, 8, 8, 5, 6]
    parts = cut(lengths, [torch.arange(10)], 3, balance, together=2)
    assert sorted(torch.cat([part[0] for part in parts]).tolist()) == list(range(10))
    for part in parts:
        rows = part[0].tolist()
        assert all(row % 2 == 0 for row in rows[::2]) and rows[1::2] == [row + 1 for row in rows[::2]]
