"""Rollout engines in a pool of their own, on real Ray: they have the weights of the last update, and outlive kill -9.

vLLM itself where it is installed, and SGLang's recorded protocol in front of transformers.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from devices import DEVICE, ON_DEVICE
from tiny_models import tiny_batch
from transformers import AutoModelForCausalLM

from paddock.commands.preflight import check
from paddock.config.roles import ActorRolloutRefConfig
from paddock.config.schema import Config
from paddock.core.timing import Timer
from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Sampling
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.load import load_tokenizer
from paddock.plan.arithmetic import roles as planned_roles
from paddock.rollouts.episode import Episode
from paddock.trainer import reinforcement as runs
from paddock.workers.rank import Rank
from paddock.workers.roles import Roles, build
from paddock.workers.sharded_rollout import RolloutServers
from paddock.workers.updates import actor_plan

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
cluster = pytest.importorskip("paddock.workers.ray")

KEYS = [
    "algorithm.adv_estimator=grpo", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=4", "trainer.test_freq=-1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.val_before_train=False", "trainer.logger=[file]",
    "data.dataloader_num_workers=0", *ON_DEVICE, "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
    "++actor_rollout_ref.rollout.engine_kwargs.sglang.enable_deterministic_inference=True",
]  # fmt: skip
RECORDED = ROOT / "tests/engines/recorded"
ENGINES = [pytest.param("vllm", marks=pytest.mark.vllm), "sglang", "embedded"]
ROWS = [
    PromptRow(i, i, [40 + i + j for j in range(length)], "", "", None, {}, f"row {i}")
    for i, length in enumerate((4, 11, 2, 7))
]
WORDS = 258  # of the built-in model
SAMPLED = Sampling(max_tokens=8, stop_tokens=frozenset(), seed=1, step=0, ignore_eos=True)
GREEDY = replace(SAMPLED, temperature=0.0)


@pytest.fixture(scope="module", autouse=True)
def one_cluster() -> Iterator[None]:
    paths = os.pathsep.join([str(RECORDED), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(num_cpus=3, runtime_env={"env_vars": {"PYTHONPATH": paths}}, **cluster.LOCAL)
    yield
    ray.shutdown()


@pytest.fixture(params=ENGINES)
def engine(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    else:
        monkeypatch.syspath_prepend(RECORDED)
    return request.param


def config_of(folder: Path, engine: str, trainers: int, servers: int, *overrides: str, spans: int = 1) -> Config:
    places = [f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder / 'rollouts'}"]
    sizes = [f"trainer.n_gpus_per_node={trainers}", f"actor_rollout_ref.rollout.n_gpus_per_node={servers}",
             f"actor_rollout_ref.rollout.tensor_model_parallel_size={spans}"]  # fmt: skip
    return load([*KEYS, *places, *sizes, f"actor_rollout_ref.rollout.name={engine}", *overrides], chooses=True).config


def opened(config: Config) -> Roles:
    return build(config, load_tokenizer(config.actor_rollout_ref.model.path or ""), 4)


def answers(roles: Roles, sampling: Sampling, rows: list[PromptRow] = ROWS) -> list[Episode]:
    """Returns two responses to each row."""
    with roles.generating(Timer()):
        return roles.rollout.episodes(rows, 2, sampling)


def tokens_of(found: list[Episode]) -> dict[int, list[int]]:
    return {one.id: one.spans[0].tokens for one in found}


def saved(roles: Roles, folder: Path) -> Path:
    folder.mkdir(parents=True)
    roles.actor.save(folder)
    return folder


def update(roles: Roles, group: ActorRolloutRefConfig) -> None:
    batch = tiny_batch(rows=32)
    batch = batch.with_(prompts=batch.prompts % WORDS, responses=batch.need("responses") % WORDS)
    weights = torch.linspace(-1.0, 1.0, len(batch))[:, None] * batch.need("mask")
    batch = batch.with_(advantages=weights, old_log_probs=roles.actor.log_probs(batch))
    roles.actor.learn(batch, actor_plan(group, batch, step=1))


@torch.no_grad()
def gaps(folder: Path, found: list[Episode]) -> tuple[float, float]:
    """Of the engine's log-probs from those of transformers, and of its tokens from the likeliest: the worst."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    off, behind = 0.0, 0.0
    for one in found:
        (turn,), prompt = one.spans, one.prompt.tokens
        expected = model(torch.tensor([prompt + turn.tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        drawn = expected.gather(1, torch.tensor(turn.tokens)[:, None])[:, 0]
        off = max(off, (drawn - torch.tensor(turn.log_probs)).abs().max().item())
        behind = max(behind, (expected.max(-1).values - drawn).max().item())
    return off, behind


LAYOUTS = {"2 trainers, 1 server": (2, 1, 1), "1 trainer, 2 servers": (1, 2, 1), "1 server of 2 ranks": (1, 2, 2)}
BESIDE = "actor_rollout_ref.rollout.nnodes=0"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_answer_with_the_weights_of_the_last_update_or_checkpoint(engine, layout, tmp_path):
    trainers, devices, spans = LAYOUTS[layout]
    if spans > 1 and (engine == "embedded" or (engine == "sglang" and DEVICE.type != "cpu")):
        pytest.skip("the embedded engine spans one device, and a server of SGLang one for each of its ranks")
    config = config_of(tmp_path, engine, trainers, devices, "actor_rollout_ref.actor.optim.lr=0.01", spans=spans)
    roles = opened(config)
    try:
        assert isinstance(roles.rollout, RolloutServers)
        require_as_planned(roles, config)
        before = answers(roles, GREEDY)
        assert roles.rollout.version == 0
        old = saved(roles, tmp_path / "old")
        assert max(gaps(old, before)) < 1e-3
        update(roles, config.actor_rollout_ref)
        with pytest.raises(UserError, match=f"log-probs of engine 0 of {devices // spans} are"):
            roles.rollout.verify()
        assert roles.rollout.publish()["rollout/sync_gap"] < 1e-3
        after = answers(roles, GREEDY)
        assert roles.rollout.version == 1
        new = saved(roles, tmp_path / "new")
        assert max(gaps(new, after)) < 1e-3 and [one.id for one in after] == [one.id for one in before]
        assert gaps(new, before)[0] > 0.05  # new weights matter
        assert require_same_whoever_answers(roles)
        roles.actor.load(old)
        assert max(gaps(old, answers(roles, GREEDY))) < 1e-3 and roles.rollout.version == 2
    finally:
        roles.close()


def test_a_server_beside_the_trainer_shares_its_device_and_has_its_last_weights(engine, tmp_path):
    config = config_of(tmp_path, engine, 1, 1, BESIDE, "actor_rollout_ref.actor.optim.lr=0.01")
    roles = opened(config)
    try:
        require_as_planned(roles, config)
        trainer, server = roles.ranks
        bundles = [ray.util.placement_group_table(there)["bundles"] for there in trainer.placement_groups]
        assert [bundle["CPU"] for (bundle,) in map(dict.values, bundles)] == [2.0]
        assert server.placement_groups == trainer.placement_groups
        assert trainer.pids != server.pids and roles.devices == 1
        before = answers(roles, GREEDY)
        update(roles, config.actor_rollout_ref)
        assert roles.rollout.publish()["rollout/sync_gap"] < 1e-3
        new = saved(roles, tmp_path / "new")
        assert max(gaps(new, answers(roles, GREEDY))) < 1e-3 < 0.05 < gaps(new, before)[0]
    finally:
        roles.close()
    opened(config).close()  # the bundle is free again


def require_same_whoever_answers(roles: Roles) -> bool:
    """A row's tokens are its own: prompts go to other engines, in other company."""
    together = tokens_of(answers(roles, SAMPLED))
    apart = tokens_of([one for row in ROWS for one in answers(roles, SAMPLED, [row])])
    return together == apart and len({tuple(tokens) for tokens in together.values()}) > 1


def require_as_planned(roles: Roles, config: Config) -> None:
    names = {
        "single": "single",
        "fsdp": "fsdp",
        "VLLMEngine": "vllm",
        "SGLangEngine": "sglang",
        "EmbeddedCopy": "embedded",
    }
    found = {
        role: (names[kind], group.size)
        for group in roles.ranks
        for kinds in group.broadcast("", Rank.engines)
        for role, kind in kinds.items()
    }
    assert found == {role["role"]: (role["engine"], role["devices"]) for role in planned_roles(config)}


def test_under_lora_engines_get_merged_weights(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.syspath_prepend(RECORDED)
    keys = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.01"]
    config = config_of(tmp_path, "sglang", 1, 1, *keys)
    roles = opened(config)
    try:
        before = answers(roles, GREEDY)
        update(roles, config.actor_rollout_ref)
        assert roles.rollout.publish()["rollout/sync_gap"] < 1e-3
        assert [one.spans for one in answers(roles, GREEDY)] != [one.spans for one in before]
    finally:
        roles.close()


def train(config: Config) -> list[dict[str, float]]:
    check(config)
    assert runs.train(config).finished
    return [
        json.loads(line) for line in Path(config.trainer.default_local_dir, "metrics.jsonl").read_text().splitlines()
    ]


def ledger(folder: Path) -> dict[str, list[tuple[str, str]]]:
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    lines = {file.name: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
    return {name: [(row["prompt"], row["answer"]) for row in rows] for name, rows in lines.items()}


def fault(monkeypatch: pytest.MonkeyPatch, phase: str, time: int) -> list[int]:
    """The first server is killed when it is at work on this phase for the given time. Returns its process id then."""
    gather: Callable[..., Any] = cluster.RayRanks.gather
    seen: list[str] = []
    killed: list[int] = []

    def killing(group: Any, futures: Any, now: str, arrived: Any = None) -> Any:
        if group.pool.name == "rollout" and now == phase:
            seen.append(now)
            if len(seen) == time:
                killed.append(group.pids[0])
                os.kill(group.pids[0], signal.SIGKILL)
        return gather(group, futures, now, arrived)

    monkeypatch.setattr(cluster.RayRanks, "gather", killing)
    return killed


def test_a_run_outlives_kill_9_of_a_server_with_the_same_samples(engine, tmp_path, monkeypatch, caplog):
    keys = ["trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.max_restarts=1"]
    want = train(config_of(tmp_path / "whole", engine, 1, 1, *keys))
    assert len(want) == 3
    for step in want:
        assert step["rollout/sync_gap"] < 1e-3 and step.get("rollout_corr/log_ppl_abs_diff", 0.0) < 1e-3
    phase, time = ("server.load_bucket", 3) if engine == "sglang" else ("server.answer", 2)
    killed = fault(monkeypatch, phase, time)
    with caplog.at_level(logging.WARNING):
        got = train(config_of(tmp_path / "killed", engine, 1, 1, *keys))
    assert len(killed) == 1 and len(got) == 3
    assert f"rank 0 of 1 (rollout) died in {phase}" in caplog.text
    assert ledger(tmp_path / "killed") == ledger(tmp_path / "whole")
    for mine, theirs in zip(got, want, strict=True):
        assert mine["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-4)


def of_learning(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Returns what does not depend on where rollouts are, nor on how long things took."""
    places = ("timing", "perf", "rollout/", "training/idle_s", "training/rollout_")
    return [{name: row[name] for name in row if not name.startswith(places)} for row in rows]


def test_two_pools_of_one_process_train_as_one_process_does(tmp_path):
    keys = ["trainer.total_training_steps=4", "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32"]  # fmt: skip
    apart = train(config_of(tmp_path / "apart", "embedded", 1, 1, *keys))
    together = train(config_of(tmp_path / "together", "embedded", 1, 1, *keys, "actor_rollout_ref.hybrid_engine=True"))
    assert len(apart) == 4 and of_learning(apart) == of_learning(together)
    assert all(row["rollout/idle_s"] > 0 and row["training/idle_s"] > 0 for row in apart)


def test_responses_of_later_steps_go_on_beside_the_training_and_a_run_goes_on_from_its_checkpoint(tmp_path, caplog):
    keys = ["algorithm.staleness=2", "actor_rollout_ref.rollout.max_num_seqs=12", "trainer.save_freq=1",
            "data.max_response_length=24", "actor_rollout_ref.rollout.ignore_eos=True"]  # fmt: skip
    straight = train(config_of(tmp_path / "straight", "embedded", 1, 1, *keys[1:], "trainer.total_training_steps=6"))
    folder = tmp_path / "ahead"
    for steps in (3, 6):
        rows = train(config_of(folder, "embedded", 1, 1, *keys, f"trainer.total_training_steps={steps}"))
    assert len(rows) == len(straight) == 6
    off = "training/off_policy/trajectory_"
    assert max(row[f"{off}staleness_worst/max"] for row in rows) in (1, 2)
    assert max(row[f"{off}spans/max"] for row in rows) > 1, "a response was drawn by several versions"
    prompts = [[[json.loads(line)["prompt"] for line in (run / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
                for step in range(1, 7)] for run in (folder, tmp_path / "straight")]  # fmt: skip
    assert prompts[0] == prompts[1]


def test_a_rollout_process_that_is_stopped_is_named_although_it_is_alone_in_its_pool(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "SILENCE", 6.0)
    monkeypatch.setattr(cluster, "TICK", 1.0)
    keys = ["algorithm.staleness=1", "trainer.total_training_steps=4"]
    step, stopped = runs.Trainer.step, list[int]()

    def stop_in_step_2(trainer: Any) -> Any:
        if trainer.step_no == 2:
            (pool,) = (ranks for ranks in trainer.roles.ranks if "rollout" in ranks.pool.roles)
            stopped.extend(pool.pids)
            os.kill(pool.pids[0], signal.SIGSTOP)
        return step(trainer)

    monkeypatch.setattr(runs.Trainer, "step", stop_in_step_2)
    try:
        with pytest.raises(UserError, match=r"rank 0 of 1 \(rollout\) gave no sign of life for 6 s") as error:
            train(config_of(tmp_path, "embedded", 1, 1, *keys))
        assert f"pid {stopped[0]}" in str(error.value)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
