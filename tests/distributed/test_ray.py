"""Runs on two Ray workers, FSDP2 over gloo: what one process learns, they learn; what it saves, they read; and back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE, ON_DEVICE
from safetensors.torch import load_file
from tiny_models import tiny_batch
from tiny_zoo import save

from paddock.config.schema import Config
from paddock.config.topology import DevicePool, pools
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.plan.arithmetic import roles as planned_roles
from paddock.rollouts.collect import Collector, Drawn
from paddock.trainer import reinforcement as runs
from paddock.workers.policy import Policy
from paddock.workers.rank import Rank
from paddock.workers.sharded import FORWARD, UPDATE, SharedRows, WorkerLost

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
cluster = pytest.importorskip("paddock.workers.ray")

SMALL = [
    "data.train_batch_size=8", "data.val_max_samples=8", "actor_rollout_ref.rollout.n=4", "trainer.test_freq=-1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.val_before_train=False", "trainer.logger=[file]",
    "data.dataloader_num_workers=0", *ON_DEVICE,
    # AdamW divides by the gradient's own size: without a floor it makes much of the last bit of a tiny one
    "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3",
    "++critic.optim.override_optimizer_config.eps=1e-3",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


EXPORTER = free_port()


@pytest.fixture(scope="module", autouse=True)
def one_cluster() -> Iterator[None]:
    often = {"metrics_report_interval_ms": 500, **cluster.LOCAL["_system_config"]}
    ray.init(num_cpus=2, _metrics_export_port=EXPORTER, **cluster.LOCAL | {"_system_config": often})
    yield
    ray.shutdown()


class Kept:
    """Processes that outlive a run: the next one loads its roles into them, which spares the imports."""

    def __init__(self) -> None:
        self.group: Any = None

    def start(self, config: Config, total_steps: int, wanted: Sequence[DevicePool] = ()) -> dict[str, Any]:
        (pool,) = wanted or pools(config)
        if self.group is None:
            self.group = cluster.RayRanks(pool, config, 1)
            self.group.close = lambda: None
        self.group.pool, self.group.config = pool, config
        self.group.timeout = float(config.actor_rollout_ref.nccl_timeout)
        self.group.enlist(total_steps)
        self.group.ready()
        return {"main": self.group}

    def end(self) -> None:
        if self.group is not None:
            cluster.RayRanks.close(self.group)
        self.group = None


@pytest.fixture(scope="module")
def kept_processes() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.end()


@pytest.fixture
def kept(kept_processes: Kept, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(cluster, "start_ranks", kept_processes.start)
    return kept_processes


def config_of(folder: Path, workers: int, *overrides: str) -> Config:
    places = [f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder / 'rollouts'}"]
    return load([*SMALL, *places, f"trainer.n_gpus_per_node={workers}", *overrides], chooses=True).config


def train(folder: Path, workers: int, *overrides: str) -> list[dict[str, float]]:
    assert runs.train(config_of(folder, workers, *overrides)).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def learnt(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith(("timing", "perf", "global_seqlen"))} for row in rows]


def ledger(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Of every step: which prompts it drew, and what was answered."""
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    lines = {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
    return {name: [(row["prompt"], row["answer"]) for row in rows] for name, rows in lines.items()}


def assert_same_numbers(got: list[dict[str, float]], want: list[dict[str, float]]) -> None:
    for mine, theirs in zip(learnt(got), learnt(want), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, abs=1e-5, rel=1e-5), (theirs["step"], name)


def weights(folder: Path, step: int, role: str = "actor") -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}" / role / "model.safetensors")


ALGORITHMS = {
    "ppo": ["algorithm.adv_estimator=gae"],
    "grpo": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True"],
    "rloo": ["algorithm.adv_estimator=rloo", "trainer.balance_batch=False"],
    "clip_cov": ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
                 "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.shuffle=True"],
    "sequence parallel": ["algorithm.adv_estimator=grpo"],
}  # fmt: skip
SHARED = {"sequence parallel": ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"]}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_workers_learn_what_one_process_learns(name, kept, tmp_path):
    """Losses, gradient norms and every other number for ten steps; and the very same tokens are drawn."""
    steps = ["trainer.total_training_steps=10", "trainer.save_freq=10", *ALGORITHMS[name]]
    want = train(tmp_path / "one", 1, *steps)
    got = train(tmp_path / "two", 2, *steps, *SHARED.get(name, []))
    assert len(got) == 10
    assert_same_numbers(got, want)
    assert ledger(tmp_path / "two") == ledger(tmp_path / "one")
    one, two = weights(tmp_path / "one", 10), weights(tmp_path / "two", 10)
    for tensor_name, tensor in one.items():
        torch.testing.assert_close(two[tensor_name], tensor, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_of_two_workers_resumes_in_one_process_and_back(kept, tmp_path):
    common = ["algorithm.adv_estimator=gae", "trainer.save_freq=2",
              "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
              "actor_rollout_ref.actor.optim.total_training_steps=8", "trainer.total_training_steps=6"]  # fmt: skip
    straight = train(tmp_path / "straight", 1, *common)
    folder = tmp_path / "mixed"
    for workers, steps in ((2, 2), (1, 4), (2, 6)):
        rows = train(folder, workers, *common[:-1], f"trainer.total_training_steps={steps}")
    assert_same_numbers(rows, straight)
    assert ledger(folder) == ledger(tmp_path / "straight")


def test_rollouts_of_two_workers_run_ahead_and_go_on_in_one_process(kept, tmp_path):
    """Prompts of each step are those of a run in which nothing runs ahead; a response may begin there and end here."""
    common = ["algorithm.adv_estimator=grpo", "trainer.save_freq=2", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
              "trainer.total_training_steps=6", "actor_rollout_ref.rollout.max_num_seqs=24"]  # fmt: skip
    train(tmp_path / "straight", 1, *common)
    folder = tmp_path / "ahead"
    for workers, steps in ((2, 6), (1, 6)):
        rows = train(folder, workers, *common, "algorithm.staleness=2", f"trainer.total_training_steps={steps}")
        if workers == 2:
            if DEVICE.type == "cpu":  # one launch of a GPU's graphs draws such a short response whole
                assert any(row["rollout/window/carried_tokens"] for row in rows)
            for step in (4, 6):
                shutil.rmtree(folder / f"global_step_{step}")
            (folder / "latest_checkpointed_iteration.txt").write_text("2")
    ages = [row["training/off_policy/trajectory_staleness_worst/max"] for row in rows]
    assert len(rows) == 6 and max(ages) in (1, 2)
    prompts = [[[prompt for prompt, _ in answers] for answers in ledger(run).values()]
               for run in (folder, tmp_path / "straight")]  # fmt: skip
    assert prompts[0] == prompts[1]


def test_a_scorer_that_raises_leaves_the_finished_steps_of_the_workers(kept, tmp_path):
    flag, scorer = tmp_path / "broken", tmp_path / "scorer.py"
    scorer.write_text(
        "import pathlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    assert not pathlib.Path({str(flag)!r}).exists(), 'the scorer is broken'\n"
        "    return float(len(solution_str))\n"
    )
    common = ["algorithm.adv_estimator=grpo", f"custom_reward_function.path={scorer}", "trainer.save_freq=-1",
              "trainer.total_training_steps=4"]  # fmt: skip
    want = train(tmp_path / "whole", 2, *common)
    folder = tmp_path / "failed"
    step = runs.Trainer.step

    def break_in_step_3(trainer: Any) -> Any:
        if trainer.step_no == 3:
            flag.touch()
        return step(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs.Trainer, "step", break_in_step_3)
        with pytest.raises(UserError, match="the scorer is broken"):
            train(folder, 2, *common)
    assert [path.name for path in folder.glob("global_step_*")] == ["global_step_2"]
    flag.unlink()
    assert learnt(train(folder, 2, *common)) == learnt(want)


def test_validation_and_greedy_baselines_run_on_workers(kept, tmp_path):
    options = ["algorithm.adv_estimator=remax", "trainer.test_freq=1", "trainer.total_training_steps=1",
               "actor_rollout_ref.rollout.name=hf"]  # fmt: skip
    assert_same_numbers(train(tmp_path / "two", 2, *options), train(tmp_path / "one", 1, *options))


def test_metrics_are_in_rays_own_prometheus_exporter(kept, tmp_path):
    pytest.importorskip("opentelemetry.exporter.prometheus", reason="needs ray[default], which brings the exporter")
    rows = train(tmp_path, 2, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1",
                 "trainer.logger=[file,prometheus]", "trainer.experiment_name=watched")  # fmt: skip
    deadline, found = time.monotonic() + 60, None
    while found is None and time.monotonic() < deadline:
        time.sleep(0.5)
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{EXPORTER}/metrics") as page:
            found = re.search(r'paddock_actor_grad_norm\{.*run="watched".*\} (\S+)', page.read().decode())
    assert found is not None
    assert float(found[1]) == pytest.approx(rows[0]["actor/grad_norm"])


def test_the_plan_names_the_placement_that_runs(kept, tmp_path):
    config = config_of(tmp_path, 2, "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True")
    group = kept.start(config, 1)["main"]
    names = {"fsdp": "fsdp", "EmbeddedEngine": "embedded"}
    plan = {role["role"]: (role["engine"], role["devices"]) for role in planned_roles(config)}
    for engines in group.broadcast("", Rank.engines):
        assert {role: (names[engine], group.size) for role, engine in engines.items()} == plan


def test_a_column_travels_once_for_the_same_rows(kept, tmp_path):
    group = kept.start(config_of(tmp_path, 2, "algorithm.adv_estimator=grpo"), 1)["main"]
    batch, some = tiny_batch(), torch.tensor([0, 2])
    first = group.refs(SharedRows(batch, some, FORWARD))
    later = batch.with_(advantages=torch.ones_like(batch.mask))
    again = group.refs(SharedRows(later, some, FORWARD | {"advantages"}))
    assert {name: again.columns[name] for name in first.columns} == first.columns
    assert set(again.columns) == set(first.columns) | {"advantages"}
    assert torch.equal(again.open().need("responses"), batch.need("responses")[some])


def test_versions_reach_the_workers_that_train_and_come_from_those_that_sample(kept, tmp_path, monkeypatch):
    drawn, score = [], Collector.score

    def watched(collector: Collector, found: Drawn, *rest: Any) -> Any:
        drawn.append(found.batch)
        return score(collector, found, *rest)

    monkeypatch.setattr(Collector, "score", watched)
    keys = ["algorithm.adv_estimator=grpo", "trainer.total_training_steps=2", "trainer.save_freq=-1"]
    train(tmp_path, 2, *keys)
    assert [set(batch.versions[batch.mask != 0].tolist()) for batch in drawn] == [{0}, {1}]
    group, some = kept.start(config_of(tmp_path, 2, *keys), 1)["main"], torch.tensor([0, 2])
    arrived = group.refs(SharedRows(drawn[1], some, UPDATE)).open()
    assert torch.equal(arrived.versions, drawn[1].versions[some])


def test_calls_that_were_begun_are_answered_in_their_order_and_awaited_later(kept, tmp_path):
    group = kept.start(config_of(tmp_path, 2, "algorithm.adv_estimator=grpo"), 1)["main"]
    drawn = tiny_batch()
    small = drawn.with_(
        prompts=drawn.prompts % 10, responses=drawn.responses % 10
    )  # the built-in model knows few tokens
    batch = SharedRows(small, torch.tensor([0, 2]), FORWARD)
    calls = [group.begin("actor", Policy.log_probs, [[batch]]), group.begin("", Rank.end_tokens, [[]])]
    assert not calls[0].ready(), "the driver goes on while ranks compute"
    assert calls[1].wait() == group.broadcast("", Rank.end_tokens)[:1]
    assert calls[0].ready() and torch.equal(calls[0].wait()[0], group.map("actor", Policy.log_probs, [[batch]])[0])


def test_a_rank_that_dies_in_a_call_that_was_begun_is_named(kept_processes, tmp_path):
    group = kept_processes.start(config_of(tmp_path, 2, "algorithm.adv_estimator=grpo"), 1)["main"]
    batch = SharedRows(tiny_batch(), torch.tensor([0, 2]), FORWARD)
    pending = group.begin("actor", Policy.log_probs, [[batch]])
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLost, match=r"rank 1 of 2 .* died in actor.log_probs"):
        pending.wait()
    kept_processes.end()


def test_a_rank_that_hangs_is_named_with_its_phase_and_last_sign_of_life(kept, tmp_path):
    config = config_of(tmp_path, 2, "algorithm.adv_estimator=grpo", "actor_rollout_ref.nccl_timeout=60")
    group = kept.start(config, 1)["main"]
    group.timeout = 1.0
    os.kill(group.pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(WorkerLost, match=rf"end_tokens hangs: rank 1 of 2 .*\n.*sign of life .*{group.pids[1]}"):
            group.broadcast("", Rank.end_tokens)
    finally:
        os.kill(group.pids[1], signal.SIGCONT)


def test_an_error_in_a_worker_that_the_user_can_mend_arrives_as_such(kept, tmp_path):
    with pytest.raises(UserError, match="fsdp_size=3: 2 ranks do not divide into groups of 3"):
        train(tmp_path, 2, "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.fsdp_config.fsdp_size=3")


def test_a_worker_without_memory_is_said_as_in_one_process(kept, kept_processes, tmp_path, monkeypatch):
    monkeypatch.setattr(Policy, "learn", Policy.learn)  # put back afterwards
    plugin = "actor_rollout_ref.model.external_lib=tests.distributed.overfull"
    with pytest.raises(
        UserError, match=r"phase `update_actor` \(policy update\): CUDA out of memory\..* 1.00 GiB free\.\n"
    ) as caught:
        train(tmp_path, 2, "algorithm.adv_estimator=grpo", plugin)
    key, tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", caught.value.value
    assert caught.value.key == key and str(caught.value.fix).startswith(f"{key}={tokens // 2}")
    kept_processes.end()


def test_more_workers_than_the_cluster_has_room_for_are_refused_at_once(tmp_path):
    with pytest.raises(UserError, match=r"trainer.n_gpus_per_node=4: the cluster has 1 node\(s\) with 2 CPU\(s\)"):
        runs.train(config_of(tmp_path, 4, "algorithm.adv_estimator=grpo"))


def test_a_cluster_of_the_run_takes_no_calls_without_its_token():
    if os.environ.get("RAY_AUTH_MODE") != "token":
        pytest.skip(f"Ray {ray.__version__} makes no token by itself")
    address = ray.get_runtime_context().gcs_address
    bare = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    stranger = [sys.executable, "-c", f"import ray; ray.init({address!r})"]
    ended = subprocess.run(stranger, env=bare | {"RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True)
    assert ended.returncode and "Authentication token is missing" in ended.stderr


def test_a_cluster_without_a_token_is_told(monkeypatch, caplog):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    cluster.warn_without_token()
    assert not caplog.text
    monkeypatch.delenv("RAY_AUTH_MODE")
    cluster.warn_without_token()
    assert "asks for no token; pip install 'ray[default]>=2.59'" in caplog.text


def test_a_cluster_that_does_not_answer_is_named_in_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "ANSWER", 0.0)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match=f"={address}: no Ray cluster answers there"):
        runs.train(config_of(tmp_path, 2, "algorithm.adv_estimator=grpo"))


# From here on the processes that were kept are gone.


def test_a_place_that_does_not_become_free_is_named_within_its_time(kept_processes, tmp_path):
    kept_processes.end()

    class Squatter:
        def there(self) -> bool:
            return True

    squatter = ray.remote(Squatter).options(num_cpus=1).remote()
    assert ray.get(squatter.there.remote())
    with pytest.raises(UserError, match=r"ray_wait_register_center_timeout=2: node 0 of pool main: no room for 2 x"):
        train(tmp_path, 2, "algorithm.adv_estimator=grpo", "trainer.ray_wait_register_center_timeout=2")
    ray.kill(squatter)


def fault(monkeypatch: pytest.MonkeyPatch, phases: list[str]) -> list[str]:
    """Rank 1 is killed when it is at work on these phases, one after the other. Returns those that have been."""
    gather: Callable[..., Any] = cluster.RayRanks.gather
    done: list[str] = []

    def killing(group: Any, futures: Any, phase: str, arrived: Any = None) -> Any:
        left = phases[len(done) :]
        if left and phase == left[0]:
            done.append(phase)
            os.kill(group.pids[1], signal.SIGKILL)
        return gather(group, futures, phase, arrived)

    monkeypatch.setattr(cluster.RayRanks, "gather", killing)
    return done


def finish_after_kills(phases: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["algorithm.adv_estimator=gae", "trainer.total_training_steps=4", "trainer.save_freq=1"]
    want = train(tmp_path / "whole", 1, *common)
    killed = fault(monkeypatch, phases)
    got = train(tmp_path / "killed", 2, *common, f"trainer.max_restarts={len(phases)}")
    assert killed == phases
    assert_same_numbers(got, want)
    assert ledger(tmp_path / "killed") == ledger(tmp_path / "whole")


def test_a_run_outlives_kill_9_of_a_worker_with_the_same_samples(kept_processes, tmp_path, monkeypatch):
    kept_processes.end()
    finish_after_kills(["actor.learn"], tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_critic_on_devices_of_its_own_learns_the_same(kept_processes, tmp_path):
    kept_processes.end()
    common = ["algorithm.adv_estimator=gae", "trainer.total_training_steps=3"]
    own = ["critic.enable_resource_pool=True", "critic.n_gpus_per_node=1"]
    config = config_of(tmp_path / "two", 1, *common, *own)
    assert [(pool.name, pool.size, pool.roles) for pool in pools(config)] == [
        ("main", 1, ("actor", "rollout")),
        ("critic", 1, ("critic",)),
    ]
    assert_same_numbers(train(tmp_path / "two", 1, *common, *own), train(tmp_path / "one", 1, *common))


@pytest.mark.slow
def test_a_run_outlives_kill_9_in_every_phase(kept_processes, tmp_path, monkeypatch):
    kept_processes.end()
    phases = ["loading", "rollout.wake", "rollout.answer", "rollout.sleep", "actor.forward", "critic.forward",
              "critic.learn", "actor.save"]  # fmt: skip
    finish_after_kills(phases, tmp_path, monkeypatch)


def test_ranks_that_share_weights_sample_by_merged_ones_and_compute_old_log_probs_beside_them(kept, tmp_path):
    model = "actor_rollout_ref.model"
    keys = ["algorithm.adv_estimator=grpo", f"{model}.lora_rank=8", f"{model}.lora.merge=True",
            "actor_rollout_ref.rollout.name=embedded", "actor_rollout_ref.actor.optim.lr=3e-3"]  # fmt: skip
    rows = train(tmp_path, 2, *keys)
    assert all("timing_s/old_log_prob" in row and row["actor/skipped"] == 0 for row in rows)
    assert all(row["rollout_corr/log_ppl_abs_diff"] < 0.01 for row in rows)
    adapter = load_file(tmp_path / f"global_step_{len(rows)}" / "actor" / "adapter_model.safetensors")
    assert max(tensor.abs().max() for name, tensor in adapter.items() if "lora_B" in name) > 0


@pytest.mark.parametrize("mode", [pytest.param("R2", marks=pytest.mark.slow), "R3"])
def test_recorded_experts_reach_the_worker_that_trains_on_them(kept, mode, tmp_path):
    recorded = f"actor_rollout_ref.rollout.enable_rollout_routing_replay={mode == 'R3'}"
    keys = [
        f"actor_rollout_ref.model.path={save(tmp_path / 'model', 'qwen3_moe')}", recorded, "data.max_response_length=6",
        "data.train_files=builtin:addition/train", "data.val_files=builtin:addition/test", "data.max_prompt_length=64",
        f"actor_rollout_ref.actor.router_replay.mode={mode}", "actor_rollout_ref.actor.entropy_coeff=0.1",
        "actor_rollout_ref.actor.optim.lr=0.01", "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.dtype=float32", "trainer.total_training_steps=1", "trainer.save_freq=-1",
        "algorithm.adv_estimator=grpo", "++actor_rollout_ref.model.override_config.router_aux_loss_coef=0.01",
    ]  # fmt: skip
    (one,), (two,) = (train(tmp_path / str(workers), workers, *keys) for workers in (1, 2))
    routers = {name: value for name, value in one.items() if "router" in name or "aux" in name}
    assert {"actor/aux_loss", "actor/router_replay_agreement", "actor/router_entropy"} <= routers.keys()
    assert {name: two[name] for name in routers} == pytest.approx(routers, rel=1e-4, abs=1e-6)
    assert max(one["training/rollout_probs_diff_max"], two["training/rollout_probs_diff_max"]) < 1e-5
