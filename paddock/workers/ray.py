"""Ranks in processes of Ray's, one per device. The only file that imports ray.

A rank is an actor in a bundle of a placement group, and its methods run in its main thread. One that dies, hangs or
never comes up is named, with its phase and its last sign of life.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError, RayTaskError
from ray.util.metrics import Gauge
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor
from torch.distributed import TCPStore

from paddock.algorithms.losses import POLICY_LOSS, PolicyLoss, losses_of_the_program
from paddock.config.plugins import import_plugin
from paddock.config.schema import Config
from paddock.config.topology import DevicePool
from paddock.core.batch import Batch
from paddock.core.device import RESOURCE, device_of, seed_all, share_device
from paddock.core.processes import Rendezvous, join
from paddock.engines.train.open import backend_of
from paddock.errors import UserError
from paddock.models.packing import images_of
from paddock.workers.heartbeat import Heartbeat, Silence, last_status
from paddock.workers.rank import Rank
from paddock.workers.sharded import Ranks, SharedRows, WorkerLost
from paddock.workers.transport import from_arrays, to_arrays
from paddock.workers.weight_sender import Bucket

log = logging.getLogger(__name__)

LOCAL: dict[str, Any] = {
    "address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1", "logging_level": logging.WARNING,
    "_system_config": {"worker_niceness": 0},
}  # fmt: skip
"""`ray.init` arguments for one machine: nice value 0 (Ray lowers the priority by default), and the loopback address for
what Ray advertises. Its servers listen on all interfaces all the same: `warn_without_token` looks after that."""
ANSWER = 30.0
"""Seconds in which a cluster that is to be joined must answer."""
SILENCE = 60.0
"""Seconds without a sign of life after which a rollout process counts as stopped: signs come every two seconds."""
TICK = 5.0
"""Seconds between two looks at ranks that are at work."""
GRACE = 15.0
"""Seconds to wait for an answer of every rank. One death breaks a collective on all ranks; this finds the dead one."""

R = TypeVar("R")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class BatchRefs:
    """References to the columns of some rows: each column of a share is sent once, however many phases read it."""

    columns: dict[str, ray.ObjectRef]
    images: ray.ObjectRef | None = None
    """Images of each row; the rows of one prompt share one object."""

    def open(self) -> Batch:
        arrays = ray.get(list(self.columns.values()))
        extras = {"images": ray.get(self.images)} if self.images else {}
        columns = {name: from_arrays(array) for name, array in zip(self.columns, arrays, strict=True)}
        return Batch(**columns, extras=extras)


@dataclass(frozen=True)
class Stored:
    """Weights that wait in Ray's store for the ranks that read them: once a node, and never the driver."""

    ref: ray.ObjectRef
    last: bool

    def open(self) -> Bucket:
        return ray.get(self.ref)


class RankProcess:
    """The process of one rank."""

    rank: Rank
    heartbeat: Heartbeat

    def up(self) -> int:
        """Returns the process id."""
        return os.getpid()

    def enlist(
        self,
        config: Config,
        total_steps: int,
        roles: Sequence[str],
        place: Rendezvous,
        losses: Mapping[str, PolicyLoss],
    ) -> None:
        """Joins the other ranks, and loads the roles; those of an earlier call go. `losses`: the driver's own."""
        for name, loss in losses.items():
            if name not in POLICY_LOSS:
                POLICY_LOSS.register(name)(loss)
        vars(self).pop("rank", None)
        if dist.is_initialized():
            dist.destroy_process_group()
        assert place.store is not None
        heartbeats = TCPStore(*place.store, is_master=False)
        self.heartbeat = Heartbeat(place.rank, heartbeats)
        if place.size > 1:
            with self.heartbeat.during("joining the other ranks"):
                device = device_of(config.trainer.device)
                if config.trainer.ranks_per_device > 1:
                    share_device(device, config.trainer.ranks_per_device)
                join(place, device)
        if config.actor_rollout_ref.model.external_lib:
            import_plugin(config.actor_rollout_ref.model.external_lib, "actor_rollout_ref.model.external_lib")
        seed_all(config.trainer.seed)
        with self.heartbeat.during("loading weights"):
            self.rank = Rank(config, total_steps, roles, backend_of(config, alone=place.size == 1), heartbeats)

    def call(self, phase: str, role: str, method: str, *args: Any) -> Any:
        """Answers a call of the driver's: the one place where a role and its method are looked up by name."""
        with self.heartbeat.during(phase):
            opened = [arg.open() if isinstance(arg, BatchRefs | Stored) else arg for arg in args]
            answer = getattr(self.rank.role(role), method)(*opened)
            return Stored(ray.put(answer), answer.last) if isinstance(answer, Bucket) else to_arrays(answer)


@dataclass(frozen=True)
class RayPending(Generic[T]):
    """See `Pending`. Ray answers the calls of a process one after the other."""

    ranks: RayRanks
    futures: list[ray.ObjectRef]
    phase: str
    shares: slice
    """Selects one answer for each share: ranks of a group give the same one."""

    def ready(self) -> bool:
        return len(ray.wait(self.futures, num_returns=len(self.futures), timeout=0)[0]) == len(self.futures)

    def wait(self, arrived: Callable[[T], None] | None = None) -> list[T]:
        return self.ranks.gather(self.futures, self.phase, arrived)[self.shares]


class RayRanks(Ranks):
    """See `Ranks`. The processes of one pool."""

    def __init__(
        self, pool: DevicePool, config: Config, cores: int, sharing: int = 1, groups: Sequence[PlacementGroup] = ()
    ):
        """`sharing` processes have one device together, with `cores` each; `groups`: those of the pool whose devices
        this one shares."""
        self.pool, self.config, self.size = pool, config, pool.size
        self.timeout = float(config.actor_rollout_ref.nccl_timeout)
        self.store = TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False)
        self.placement_groups: list[PlacementGroup] = []
        self.ranks: list[Any] = []
        self.pids: list[int] = []
        self.sent: dict[tuple[int, bytes], tuple[Any, ray.ObjectRef]] = {}
        self.batch_sent: Tensor | None = None
        self.enlisting: list[ray.ObjectRef] = []
        try:
            self.place(cores, sharing, groups)
        except BaseException:
            self.close()
            raise

    def place(self, cores: int, sharing: int, groups: Sequence[PlacementGroup]) -> None:
        """A bundle a device, those of a node together; every process must come up within its time."""
        pool, resource = self.pool, RESOURCE[self.config.trainer.device or "cpu"]
        share = {"CPU": float(cores)} | ({} if resource == "CPU" else {resource: 1 / sharing / pool.ranks_per_device})
        bundle = {name: sharing * amount for name, amount in share.items()}
        self.placement_groups = list(groups) or [
            placement_group([bundle] * pool.per_node, "STRICT_PACK") for _ in range(pool.nodes)
        ]
        limit = self.config.trainer.ray_wait_register_center_timeout
        deadline = time.monotonic() + limit
        for node, there in enumerate(self.placement_groups):
            if not there.wait(max(1.0, deadline - time.monotonic())):
                raise late(f"node {node} of pool {pool.name}: no room for {pool.per_node} x {bundle}", limit)
        actor = ray.remote(RankProcess)
        for there in self.placement_groups:
            for index in range(pool.per_node):
                where = PlacementGroupSchedulingStrategy(there, placement_group_bundle_index=index)
                self.ranks.append(actor.options(num_cpus=cores, num_gpus=share.get("GPU", 0),
                                                resources={k: v for k, v in share.items() if k not in ("CPU", "GPU")},
                                                scheduling_strategy=where).remote())  # fmt: skip
        waiting = [rank.up.remote() for rank in self.ranks]
        _, missing = ray.wait(waiting, num_returns=len(waiting), timeout=max(1.0, deadline - time.monotonic()))
        if missing:
            numbers = ", ".join(str(number) for number, future in enumerate(waiting) if future in missing)
            raise late(f"rank {numbers} of {self.size} in pool {pool.name} did not come up", limit)
        self.pids = self.gather(waiting, "starting")

    def enlist(self, total_steps: int) -> None:
        """Begins to load; `ready` waits for it, so that pools load side by side."""
        store = (ray.util.get_node_ip_address(), self.store.port)
        name = f"ranks {self.store.add('meetings', 1)}"
        places = [Rendezvous(rank, self.size, store, name, self.timeout) for rank in range(self.size)]
        self.enlisting = [
            process.enlist.remote(self.config, total_steps, self.pool.roles, place, losses_of_the_program())
            for process, place in zip(self.ranks, places, strict=True)
        ]

    def ready(self) -> None:
        self.gather(self.enlisting, "loading")

    def broadcast(
        self, role: str, method: Callable[Concatenate[R, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        assert not kwargs, "arguments travel by position"
        return self.gather(*self.send(role, method.__name__, [args] * self.size))

    def begin(
        self, role: str, method: Callable[..., T], shares: Sequence[Sequence[Any]], *args: Any, stages: int = 1
    ) -> RayPending[T]:
        stage = self.size // stages
        each = stage // len(shares)
        ready = [[self.refs(item) if isinstance(item, SharedRows) else item for item in share] for share in shares]
        calls = [(*ready[rank % stage // each], *args) for rank in range(self.size)]
        return RayPending(self, *self.send(role, method.__name__, calls), slice(None, stage, each))

    def send(self, role: str, method: str, calls: Sequence[Sequence[Any]]) -> tuple[list[ray.ObjectRef], str]:
        """Queues a call in each process; returns the answers to come, and the phase that errors name."""
        phase = f"{role}.{method}" if role else method
        pairs = zip(self.ranks, calls, strict=True)
        return [process.call.remote(phase, role, method, *args) for process, args in pairs], phase

    def refs(self, rows: SharedRows) -> BatchRefs:
        """Sends the columns of which these rows were not sent yet: batches share what a phase did not change."""
        if rows.batch.row is not self.batch_sent:
            self.sent, self.batch_sent = {}, rows.batch.row
        which, found = rows.positions.numpy().tobytes(), {}
        for name, column in rows.batch.columns().items():
            if name in rows.columns:
                key = id(column), which
                if key not in self.sent:
                    self.sent[key] = column, ray.put(to_arrays(column[rows.positions]))
                found[name] = self.sent[key][1]
        images = images_of(rows.batch)
        if images and (id(images), which) not in self.sent:
            shown = [images[position] for position in rows.positions.tolist()]
            self.sent[id(images), which] = images, ray.put(shown)
        return BatchRefs(found, self.sent[id(images), which][1] if images else None)

    def gather(
        self, futures: list[ray.ObjectRef], phase: str, arrived: Callable[[Any], None] | None = None
    ) -> list[Any]:
        """Answers by rank. Once the first is there, the others have the time of a collective to follow. A rollout
        process is missed sooner, and by itself: it hears of the driver every moment."""
        answers: dict[int, Any] = {}
        silence = Silence(self.store)
        waiting = {future: rank for rank, future in enumerate(futures)}
        first: float | None = None
        while waiting:
            done, _ = ray.wait(list(waiting), timeout=TICK)
            for future in done:
                rank = waiting.pop(future)
                answers[rank] = self.answer(future, rank, phase)
                first = first or time.monotonic()
                if arrived:
                    arrived(answers[rank])
            if waiting and first and time.monotonic() - first > self.timeout:
                raise self.hung(list(waiting.values()), phase)
            if "rollout" in self.pool.roles and phase != "loading" and (gone := silence.of(waiting.values(), SILENCE)):
                raise self.silent(gone, phase)
        return [answers[rank] for rank in range(len(futures))]

    def answer(self, future: ray.ObjectRef, rank: int, phase: str) -> Any:
        try:
            return from_arrays(ray.get(future))
        except RayActorError as error:
            raise self.died(rank, phase, error) from error
        except RayTaskError as error:
            if isinstance(error.cause, UserError | torch.OutOfMemoryError):
                raise error.cause from None
            if dead := self.dead():
                raise self.died(dead[0], phase, dead[1]) from error
            if "imed out" in str(error.cause):
                raise self.hung([other for other in range(self.size) if other != rank], phase) from error
            raise RuntimeError(f"rank {rank} failed in {phase}: {error.cause!r}\n{error}") from error

    def dead(self) -> tuple[int, RayActorError] | None:
        """A collective breaks on every rank when one dies: is there one that does not answer at all?"""
        asked = {process.up.remote(): rank for rank, process in enumerate(self.ranks)}
        deadline = time.monotonic() + GRACE
        while asked and (left := deadline - time.monotonic()) > 0:
            done, _ = ray.wait(list(asked), timeout=left)
            for future in done:
                rank = asked.pop(future)
                try:
                    ray.get(future)
                except RayActorError as error:
                    return rank, error
        return None

    def died(self, rank: int, phase: str, error: RayActorError) -> WorkerLost:
        reason = str(error).strip().splitlines()[-1]
        return WorkerLost(f"rank {rank} of {self.size} ({self.pool.name}) died in {phase}; {self.sign(rank)}. {reason}")

    def hung(self, ranks: list[int], phase: str) -> WorkerLost:
        signs = "".join(f"\n  rank {rank}: {self.sign(rank)}" for rank in ranks)
        return WorkerLost(
            f"{phase} hangs: rank {', '.join(map(str, ranks))} of {self.size} ({self.pool.name}) did not finish within "
            f"actor_rollout_ref.nccl_timeout={self.timeout:.0f} s of the others{signs}"
        )

    def silent(self, ranks: list[int], phase: str) -> WorkerLost:
        signs = "".join(f"\n  rank {rank}: {self.sign(rank)}" for rank in ranks)
        numbers = ", ".join(map(str, ranks))
        return WorkerLost(
            f"{phase}: rank {numbers} of {self.size} ({self.pool.name}) gave no sign of life for {SILENCE:.0f} s{signs}"
        )

    def sign(self, rank: int) -> str:
        return str(last_status(self.store, rank) or "no sign of life yet")

    def count(self, name: str) -> None:
        self.store.add(name, 1)

    def close(self) -> None:
        for process in self.ranks:
            ray.kill(process)
        for there in () if self.pool.beside else self.placement_groups:
            remove_placement_group(there)
        self.ranks, self.placement_groups, self.sent = [], [], {}


def start_ranks(config: Config, total_steps: int, wanted: Sequence[DevicePool]) -> dict[str, Ranks]:
    """Starts the processes of every pool, by its name, and loads their roles."""
    groups: dict[str, RayRanks] = {}
    try:
        for pool in wanted:
            sharing = sum(other.place == pool.place for other in wanted)
            there = groups[pool.beside].placement_groups if pool.beside else ()
            groups[pool.name] = RayRanks(pool, config, cores_per_rank(config, wanted), sharing, there)
        for group in groups.values():
            if group.pool.beside:
                groups[group.pool.beside].ready()  # engines count what others of their device take while they load
            group.enlist(total_steps)
        for group in groups.values():
            group.ready()
    except BaseException:
        for group in groups.values():
            group.close()
        raise
    return dict(groups)


def late(what: str, limit: int) -> UserError:
    key = "trainer.ray_wait_register_center_timeout"
    fix = "`ray status` shows who holds what; free it, or wait longer"
    return UserError(f"{what} within this many seconds", key=key, value=limit, fix=fix)


@contextmanager
def cluster(config: Config, wanted: Sequence[DevicePool]) -> Iterator[None]:
    """A Ray cluster with room for the run: the one that RAY_ADDRESS or ray_kwargs.ray_init names, or one of its own."""
    if ray.is_initialized():
        require_room(config, wanted)
        yield
        return
    options = dict(config.ray_kwargs.ray_init)
    joins = options.get("address") or os.environ.get("RAY_ADDRESS")
    if joins:
        require_answer(joins)
    try:
        ray.init(**({} if joins else LOCAL) | options)
    except (TypeError, ValueError, ConnectionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"Ray does not start: {reason}",
            key="ray_kwargs.ray_init",
            value=options or None,
            fix="arguments of ray.init; RAY_ADDRESS must name a running cluster, or be unset",
        ) from error
    try:
        if not joins:
            warn_without_token()
        require_room(config, wanted)
        yield
        if config.ray_kwargs.timeline_json_file:
            ray.timeline(config.ray_kwargs.timeline_json_file)
    finally:
        ray.shutdown()


def warn_without_token() -> None:
    """Warns of a cluster of our own that runs code for whoever reaches its ports: Ray below 2.59 asks for no token."""
    if "RAY_AUTH_MODE" not in os.environ:  # Ray 2.59 sets it where it makes a token
        fix = (
            "pip install 'ray[default]>=2.59', RAY_AUTH_MODE=token (from 2.52), or RAY_AUTH_MODE=disabled to accept it"
        )
        log.warning("Ray %s listens on all interfaces and asks for no token; %s", ray.__version__, fix)


def require_answer(address: str) -> None:
    """Ray itself would go on trying for many minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():  # auto, local
        return
    deadline = time.monotonic() + ANSWER
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=GRACE).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"no Ray cluster answers there within {ANSWER:.0f} s: {error}",
                    key="RAY_ADDRESS, ray_kwargs.ray_init.address",
                    value=address,
                    fix="`ray status` on the head names its address; without one a cluster is started on this machine",
                ) from error
            time.sleep(1)


def nodes_with(resource: str) -> list[int]:
    return sorted((int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]), reverse=True)


def require_room(config: Config, wanted: Sequence[DevicePool]) -> None:
    """What the cluster has against what the pools ask for, before anything is placed."""
    resource = RESOURCE[config.trainer.device or "cpu"]
    has = nodes_with(resource)
    free = [float(number) for number in has]
    for pool in wanted:
        asked = pool.per_node if resource == "CPU" else pool.per_node / pool.ranks_per_device
        for _ in range(pool.nodes if resource == "CPU" or not pool.beside else 0):
            if not free or free[0] < asked:
                asks = ", ".join(f"{p.name}: {p.nodes} node(s) x {p.per_node}" for p in wanted)
                more = "; on one machine: ray_kwargs.ray_init.num_cpus" if resource == "CPU" else ""
                raise UserError(
                    f"the cluster has {len(has)} node(s) with {', '.join(map(str, has))} {resource}(s), "
                    f"and the run asks for {asks}",
                    key=f"{pool.key}.n_gpus_per_node",
                    value=pool.per_node,
                    fix=f"lower it or {pool.key}.nnodes, or add nodes (`ray status` lists them){more}",
                )
            free[0] -= asked
            free.sort(reverse=True)


def cores_per_rank(config: Config, wanted: Sequence[DevicePool]) -> int:
    """On a CPU the ranks share the cores of a node; beside an accelerator one is enough."""
    if config.trainer.device != "cpu":
        return 1
    return max(1, min(filter(None, nodes_with("CPU"))) // sum(pool.per_node for pool in wanted))


def is_up() -> bool:
    return bool(ray.is_initialized())


def gauge(name: str, about: str, labels: dict[str, str]) -> Callable[[float], None]:
    """A number in Ray's own Prometheus exporter."""
    found = Gauge(name, about, tag_keys=tuple(labels))
    found.set_default_tags(labels)
    return found.set
