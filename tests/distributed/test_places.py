"""Where roles go, and what is refused before a process is started. Needs no Ray."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model

from paddock.commands.preflight import check
from paddock.config.schema import Config
from paddock.config.topology import data_parallel_size, device_count, in_one_process, pools
from paddock.core.masked import Denominators
from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.estimate.job import job
from paddock.estimate.memory import estimate
from paddock.facts.machine import this_machine
from paddock.loading.load import load
from paddock.models.packing import sequence_lengths
from paddock.plan.arithmetic import roles
from paddock.rollouts.episode import Episode, Span
from paddock.rollouts.packed import PackedEpisodes
from paddock.runs.tracking.prometheus import allowed
from paddock.workers.policy import Policy
from paddock.workers.roles import Roles
from paddock.workers.sharded import cut, share_of
from paddock.workers.sharded_rollout import ShardedRollout
from paddock.workers.transport import from_arrays, to_arrays
from paddock.workers.updates import plan_update
from paddock.workers.weight_sender import Bucket, WeightSender

CPU = ["trainer.device=cpu", "algorithm.adv_estimator=gae"]


def config_of(*overrides: str) -> Any:
    return load([*CPU, *overrides]).config


def machine(*packages: str) -> Any:
    return replace(this_machine(), installed=frozenset(packages))


def test_one_device_is_one_process_and_more_share_a_pool():
    assert in_one_process(config_of())
    config = config_of("trainer.n_gpus_per_node=4", "trainer.nnodes=2", "actor_rollout_ref.actor.use_kl_loss=True")
    (pool,) = pools(config)
    assert (pool.size, pool.roles) == (8, ("actor", "rollout", "reference", "critic"))


def test_a_critic_may_have_devices_of_its_own():
    own = ["critic.enable_resource_pool=True", "critic.n_gpus_per_node=2", "critic.ulysses_sequence_parallel_size=2"]
    config = config_of("trainer.n_gpus_per_node=4", *own)
    assert [(pool.name, pool.size, pool.roles) for pool in pools(config)] == [
        ("main", 4, ("actor", "rollout")),
        ("critic", 2, ("critic",)),
    ]
    assert data_parallel_size(config, config.critic) == 1
    table = {role["role"]: (role["devices"], role["rows_split"], role["weights_split"]) for role in roles(config)}
    assert table == {"actor": (4, 4, 4), "rollout": (4, 4, 1), "critic": (2, 1, 2)}
    with pytest.raises(UserError, match=r"ulysses_sequence_parallel_size=3: 2 devices do not divide"):
        config_of("trainer.n_gpus_per_node=3", *own[:2], "critic.ulysses_sequence_parallel_size=3")


APART = ["actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.rollout.name=vllm"]


def test_rollouts_may_have_devices_of_their_own():
    own = ["actor_rollout_ref.rollout.n_gpus_per_node=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    config = config_of(*APART, *own, "trainer.n_gpus_per_node=2")
    assert [(pool.name, pool.size, pool.roles) for pool in pools(config)] == [
        ("main", 2, ("actor", "critic")),
        ("rollout", 4, ("rollout",)),
    ]
    table = {role["role"]: (role["engine"], role["devices"], role["rows_split"]) for role in roles(config)}
    assert table == {"actor": ("fsdp", 2, 2), "rollout": ("vllm", 4, 2), "critic": ("fsdp", 2, 2)}
    with pytest.raises(UserError, match=r"_parallel_size=2: 3 devices do not divide .*\n.*rollout.n_gpus_per_node x"):
        config_of(*APART, own[1], "actor_rollout_ref.rollout.n_gpus_per_node=3")


BESIDE = "actor_rollout_ref.rollout.nnodes=0"


def test_rollouts_may_have_processes_of_their_own_on_the_devices_of_the_trainer():
    config = config_of(*APART, BESIDE, "trainer.n_gpus_per_node=2")
    assert [(pool.name, pool.size, pool.place) for pool in pools(config)] == [
        ("main", 2, "main"),
        ("rollout", 2, "main"),
    ]
    assert device_count(pools(config)) == 2 and not in_one_process(config_of(*APART, BESIDE))
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    with pytest.raises(
        UserError, match=r"_parallel_size=2: 3 devices do not divide .*\n.*of trainer.n_gpus_per_node x"
    ):
        size = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
        config_of(*APART, BESIDE, "trainer.n_gpus_per_node=3", size)
    (warning,) = load([*CPU, *APART, BESIDE, "actor_rollout_ref.rollout.n_gpus_per_node=4"]).warnings
    assert "n_gpus_per_node has no effect" in warning and "nnodes=0" in warning


def test_one_device_is_enough_for_a_pool_beside_the_trainer_and_named_as_the_fix():
    def asked(*keys: str) -> Config:
        gpu = ["trainer.device=cuda", "trainer.n_gpus_per_node=1", "algorithm.adv_estimator=grpo",
               "data.train_files=builtin:addition/train", "data.val_files=[]"]  # fmt: skip
        return load([*gpu, *APART, *keys]).config

    one = replace(machine("ray", "vllm"), device="cuda", devices=1)
    with pytest.raises(UserError, match=rf"has 1 cuda device\(s\), and the run asks for 2 .*\n.*fix: {BESIDE}"):
        check(asked(), one)
    check(asked(BESIDE), one)


def test_ranks_may_share_a_device_and_have_a_share_of_its_memory_each():
    """The layout of a cluster is tried on one GPU: its device counts once, and a rank plans with its part of it."""
    gpu = ["trainer.device=cuda", "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct", "data.val_files=[]",
           "algorithm.adv_estimator=grpo", "data.train_files=builtin:addition/train"]  # fmt: skip
    shared = load([*gpu, "trainer.n_gpus_per_node=4", "trainer.ranks_per_device=4"]).config
    assert [pool.size for pool in pools(shared)] == [4] and device_count(pools(shared)) == 1
    two_pools = load([*gpu, "trainer.n_gpus_per_node=2", "trainer.ranks_per_device=3", *APART]).config
    assert device_count(pools(two_pools)) == 1
    one = replace(machine("ray", "vllm"), device="cuda", devices=1, device_memory=96 << 30)
    check(shared, one)
    own, whole = job(shared, "h100"), job(load([*gpu, "trainer.n_gpus_per_node=4"]).config, "h100")
    assert own and whole and own.hardware.memory_bytes * 4 == whole.hardware.memory_bytes
    with pytest.raises(UserError, match=r"has 1 cuda device\(s\), .* asks for 2 .*\n.*fix: .*per_node=2"):
        check(load([*gpu, "trainer.n_gpus_per_node=4", "trainer.ranks_per_device=2"]).config, one)
    here = load([*gpu, "trainer.ranks_per_device=2"], machine=one).config
    assert here.trainer.n_gpus_per_node == 2
    (warning,) = load([*CPU, "trainer.ranks_per_device=2"]).warnings
    assert "ranks_per_device has no effect" in warning


def test_memory_is_counted_where_it_is():
    gpus = ["trainer.device=cuda", "trainer.n_gpus_per_node=4", "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct",
            "actor_rollout_ref.rollout.free_cache_engine=False", "actor_rollout_ref.rollout.name=vllm",
            "algorithm.adv_estimator=grpo", "data.train_files=builtin:addition/train", "data.val_files=[]"]  # fmt: skip
    together, apart = (job(load([*gpus, *more]).config, "h100") for more in ([], APART))
    beside = job(load([*gpus[:3], *gpus[4:], *APART, BESIDE]).config, "h100")  # these never sleep
    assert together and apart and beside
    shared, own = estimate(together).phases, estimate(apart).phases
    assert "kv_cache" in shared["update_actor"] and "parameters" in shared["gen"]
    assert estimate(beside).phases == shared
    assert own["gen"].keys() == {"rollout_weights", "kv_cache"} and "kv_cache" not in own["update_actor"]


def test_a_pool_of_one_trains_with_single_whatever_the_others_are():
    config = config_of(*APART, "critic.enable_resource_pool=True", "critic.n_gpus_per_node=2")
    assert {role["role"]: role["engine"] for role in roles(config)} == {
        "actor": "single",
        "rollout": "vllm",
        "critic": "fsdp",
    }
    check(config_of(*APART, "actor_rollout_ref.actor.strategy=single"), machine("ray", "vllm"))


def test_an_engine_that_runs_the_weights_of_the_actor_alone_has_no_pool_of_its_own():
    reason, fix = "hybrid_engine=False: .*hf runs the actor's own", "rollout.name=embedded, vllm or sglang"
    with pytest.raises(UserError, match=rf"{reason}.*\n.*{fix}"):
        config_of(APART[0], "actor_rollout_ref.rollout.name=hf")
    assert config_of(APART[0], "trainer.device=cpu").actor_rollout_ref.rollout.name == "embedded"


def test_sizes_of_a_pool_that_is_not_asked_for_are_named():
    (warning,) = load([*CPU, "actor_rollout_ref.rollout.n_gpus_per_node=4"]).warnings
    assert "n_gpus_per_node has no effect" in warning and "hybrid_engine" in warning


@pytest.mark.parametrize("shared", [None, torch.device("cpu")], ids=["through the host", "in the device's memory"])
def test_all_weights_travel_in_buckets_as_they_are(shared):
    """Pickling a tensor of a CPU copies it, in place of the memory that processes on one GPU share."""
    engine = Engine(SingleBackend(tiny_model().to(torch.bfloat16), Settings()))
    config = config_of("actor_rollout_ref.rollout.name=vllm")
    sender = WeightSender(Policy(engine, config), config.actor_rollout_ref.rollout, beside=False)
    assert sender.shared is None
    sender.size, sender.shared = 20_000, shared
    found: list[Bucket] = []
    while sender.unsent():
        bucket = sender.next_bucket()
        assert bucket is not None and sender.kept is (bucket if shared else None)
        found.append(pickle.loads(pickle.dumps(bucket)))
    assert (sender.finish(), sender.kept) == (0, None)
    marks = [(bucket.first, bucket.last) for bucket in found]
    assert len(found) > 2 and marks == [(True, False)] + [(False, False)] * (len(found) - 2) + [(False, True)]
    arrived = {name: tensor for bucket in found for name, tensor in bucket.unpacked(torch.device("cpu"))}
    sent = dict(engine.weights())
    assert arrived.keys() == sent.keys()
    for name, tensor in sent.items():
        assert arrived[name].dtype == tensor.dtype and torch.equal(arrived[name], tensor)
    odd = [("a", torch.arange(3, dtype=torch.uint8)), ("b", torch.tensor(2.5)), ("c", torch.ones(2, 3).half())]
    for (name, tensor), (other, there) in zip(
        odd, Bucket.of(odd, True, True).unpacked(torch.device("cpu")), strict=True
    ):
        assert name == other and torch.equal(tensor, there) and tensor.shape == there.shape


@pytest.mark.parametrize(
    ("overrides", "packages", "reason"),
    [
        (
            ["trainer.n_gpus_per_node=2"],
            [],
            'n_gpus_per_node=2: 2 processes need ray\n  fix: pip install "paddock-rl.ray',
        ),
        (
            ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.strategy=single"],
            ["ray"],
            "strategy=single: trains on",
        ),
        (["actor_rollout_ref.actor.fsdp_config.offload_policy=True"], [], "offload_policy=True: is FSDP2's"),
        (
            [*APART, "actor_rollout_ref.actor.fsdp_config.offload_policy=True"],
            ["ray", "vllm"],
            "offload_policy=True: is FSDP2's, and one device runs",
        ),
        (APART, ["vllm"], "2 processes need ray\n.*without a pool of its own for the rollout"),
    ],
)
def test_what_processes_cannot_do_is_refused_before_they_start(overrides, packages, reason):
    with pytest.raises(UserError, match=reason):
        check(config_of(*overrides), machine(*packages))


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_of_an_update_are_its_mini_batches_and_nothing_else(shuffle, balance):
    """Each row of each mini-batch goes to one share, with the whole mini-batch's denominators, and travels once."""
    keys = config_of("critic.ppo_epochs=3", f"critic.shuffle={shuffle}", "critic.ppo_mini_batch_size=4").critic
    batch = tiny_batch(rows=12)
    plan = plan_update(keys, 1, batch, step=5)
    assert len(plan.minis) == 9 and plan.uses_old_log_probs
    parts = cut(sequence_lengths(batch), [mini.rows for mini in plan.minis], 3, balance)
    shares = [share_of(batch, plan, part) for part in parts]
    for number, mini in enumerate(plan.minis):
        assert mini.denominators == Denominators.count(batch.need("mask")[mini.rows])
        found = [rows.positions[mine.minis[number].rows] for rows, mine in shares]
        assert sorted(torch.cat(found).tolist()) == sorted(mini.rows.tolist())
        assert all(mine.minis[number].denominators == mini.denominators for _, mine in shares)
    for rows, _ in shares:
        assert len(rows.positions.unique()) == len(rows.positions)


class Echo:
    """A group whose processes answer each row with its own number."""

    size = 3

    def __init__(self) -> None:
        self.asked: list[list[PromptRow]] = []

    def begin(self, role: str, method: Any, shares: Any, sampling: Sampling, others: Any) -> Any:
        self.asked = [asked.rows for (asked,) in shares]
        episodes = [asked.episodes.unpacked(asked.rows) for (asked,) in shares]
        answers = [PackedEpisodes.of([answered(one.row, one.id) for one in share]) for share in episodes]
        return SimpleNamespace(wait=lambda arrived: [arrived(answer) for answer in answers])


def answered(row: PromptRow, number: int) -> Episode:
    prompt = Prompt(row.tokens, [number], row.images)
    return Episode(number, row, prompt, [Span([number], [-0.5], 3)], done=True)


def row_of(group: int, length: int) -> PromptRow:
    return PromptRow(group, group, [1] * length, "asked", "", "tests of a program", {"more": 1}, f"row {group}")


def test_answers_come_back_in_the_order_of_the_rows_and_are_told_when_they_come():
    told: list[int] = []
    rows, ranks = [row_of(10 * n, n) for n in (5, 1, 9, 2, 7, 3, 4)], Echo()
    sampling = Sampling(max_tokens=4, stop_tokens=frozenset(), seed=0, step=0)
    rollout = ShardedRollout(ranks)
    found = rollout.episodes(rows, 2, sampling, lambda some: told.extend(one.id for one in some))
    assert found == [answered(row, i) for row in rows for i in (2 * row.group, 2 * row.group + 1)]
    assert all(one.prompt.tokens is row.tokens for one, row in zip(found[::2], rows, strict=True))
    assert sorted(told) == sorted(one.id for one in found)
    work = [sum(len(row.tokens) + 2 * 4 for row in share) for share in ranks.asked]
    assert max(work) - min(work) < 10 and {row.ground_truth for share in ranks.asked for row in share} == {None}


def test_in_environments_rows_are_cut_by_their_number_and_travel_whole():
    rows, ranks = [row_of(n, 1000 if n == 0 else 1) for n in range(6)], Echo()
    rollout = ShardedRollout(ranks)
    rollout.in_environments = True
    rollout.episodes(rows, 1, Sampling(max_tokens=4, stop_tokens=frozenset(), seed=0, step=0))
    assert [len(share) for share in ranks.asked] == [2, 2, 2]
    assert sorted((row for share in ranks.asked for row in share), key=lambda row: row.group) == rows


def test_episodes_travel_as_arrays_and_without_prompts_of_their_rows():
    rows, other = [row_of(3, 2), row_of(5, 4)], Prompt([8, 8], [5])
    plain = answered(rows[0], 3)
    spans = [Span([4, 5], [-0.25, -1.5], 7), Span([6]), Span([], [], 7), Span([9], [-3.0], 8, reward=0.1)]
    several = Episode(5, rows[1], other, spans, done=False, extras={"ended": "turns", "messages": "asked"})
    packed = PackedEpisodes.of([plain, several])
    assert packed.prompts == [None, other] and packed.tokens.tolist() == [3, 4, 5, 6, 9]
    assert pickle.loads(pickle.dumps(packed)).unpacked(rows) == [plain, several]
    assert PackedEpisodes.of([plain]).extras is None
    assert PackedEpisodes.of([]).unpacked(rows) == []


def test_what_travels_arrives_as_it_was():
    outputs = Outputs(log_probs=torch.randn(2, 3))
    back = from_arrays(to_arrays(outputs))
    assert torch.equal(back.log_probs, outputs.log_probs) and back.values is None


def test_metric_names_become_those_of_prometheus():
    assert allowed("val-core/paddock/addition/reward/mean@4") == "paddock_val_core_paddock_addition_reward_mean_4"


def test_peaks_of_processes_that_share_a_device_add_up_and_the_device_counts_once():
    class Measured:
        def __init__(self, pool: Any, peaks: list[tuple[int, int] | None]):
            self.pool, self.peaks = pool, peaks

        def broadcast(self, role: str, method: Any) -> list[tuple[int, int] | None]:
            return self.peaks

    def found(*keys: str, peaks: list[list[Any]]) -> Roles:
        wanted = pools(config_of(*APART, "trainer.n_gpus_per_node=2", *keys))
        ranks: Any = tuple(map(Measured, wanted, peaks))
        nothing: Any = None
        return Roles(nothing, nothing, {}, None, None, frozenset(), ranks=ranks)

    peaks = [[(10, 20), (30, 35)], [(5, 6), (1, 40)]]
    beside, apart = found(BESIDE, peaks=peaks), found("actor_rollout_ref.rollout.n_gpus_per_node=2", peaks=peaks)
    assert (beside.memory(), beside.devices) == ((31, 75), 2)
    assert (apart.memory(), apart.devices) == ((30, 40), 4)
    assert found(BESIDE, peaks=[[None, None], [None, None]]).memory() is None
