"""A training run from the lock on its folder to its end: opened, advanced, and begun again when a worker is lost."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paddock.config import tree
from paddock.config.schema import Config
from paddock.config.topology import THREADS, DevicePool, wants_one_thread
from paddock.core.device import device_of, empty_cache, seed_all, torch_settings_restored
from paddock.errors import UserError
from paddock.runs.checkpoint import Checkpoint, checkpoint_store, resume_point
from paddock.runs.lock import FolderLock
from paddock.runs.record import record_end, record_launch
from paddock.runs.tracking import Tracker
from paddock.trainer.interruption import Interruption
from paddock.trainer.lifecycle import Listeners, Outcome, RunFolder, State, Step, TrainingRun
from paddock.trainer.out_of_memory import explaining
from paddock.trainer.state import restore_rng, rng_state
from paddock.workers.sharded import WorkerLost

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunKind:
    """Says what training by reinforcement, on answers and on pairs differ in."""

    command: str
    pools: Callable[[Config], Sequence[DevicePool]]
    """The processes that a run needs."""
    open: Callable[[Config, RunFolder, ExitStack], TrainingRun]
    """Makes the run at its beginning; what is to be closed with it goes on the stack."""
    conclude: Callable[[Any], object] = lambda run: None
    """Called with a run that has trained its last step."""

    def train(self, config: Config, origins: Mapping[str, str] | None = None) -> Outcome:
        """Trains from the newest checkpoint to the last step."""
        with open_training(config, self, origins or {}, Listeners()) as training:
            return training.fit()


@contextmanager
def open_training(
    config: Config, kind: RunKind, origins: Mapping[str, str], listeners: Listeners
) -> Iterator[Training]:
    """Locks the folder of a run and starts its processes for the time of the block."""
    with ExitStack() as things:
        things.enter_context(torch_settings_restored())
        lock = things.enter_context(FolderLock(config.trainer.default_local_dir))
        wanted = kind.pools(config)
        if sum(pool.size for pool in wanted) > 1:
            from paddock.workers.ray import cluster

            things.enter_context(cluster(config, wanted))
        folder = RunFolder(checkpoint_store(config.trainer), lock, listeners)
        training = Training(config, kind, origins, folder)
        things.callback(training.drop_run)
        yield training


class Training:
    """A run that is open. `fit` trains it to its end, `advance` a step.

    When a worker dies, the run begins again at its last checkpoint, `trainer.max_restarts` times: what came after that
    checkpoint is discarded and run again, so every sample counts once.

    Generators of random numbers outside and the settings of torch are, at its end and between two steps, as they were.
    """

    def __init__(self, config: Config, kind: RunKind, origins: Mapping[str, str], folder: RunFolder):
        self.config, self.kind, self.origins, self.folder = config, kind, origins, folder
        self.restarts = 0
        self.run: TrainingRun | None = None
        self.begun = False
        self.random: State | None = None
        self.things = ExitStack()
        """Closes what was opened with the run."""

    def fit(self) -> Outcome:
        """Trains all steps that are left. A signal ends it after the current step, with a checkpoint."""
        first: int | None = None
        while True:
            with self.restarting() as run:
                first = run.step_no if first is None else first
                if self.config.trainer.val_only:
                    return Outcome(True, 0, run.total_steps, run.saved)
                with Interruption() as interruption, run.keeping(self.tracker):
                    while run.step_no < run.total_steps and not interruption.asked:
                        run.advance(self.tracker)
                    if 0 < run.step_no < run.total_steps:
                        run.save(self.tracker)
                finished = run.step_no >= run.total_steps
                if finished:
                    self.conclude(run)
                return Outcome(finished, run.step_no - first, run.total_steps, run.saved)

    def advance(self) -> Step | None:
        """Trains the next step; None if all are done. A signal leaves a checkpoint behind the step, and then counts."""
        while True:
            with self.restarting() as run:
                if run.step_no >= run.total_steps or self.config.trainer.val_only:
                    return None
                with self.interruptible(run):
                    step = run.advance(self.tracker)
                if run.step_no == run.total_steps:
                    self.conclude(run)
                return step

    @contextmanager
    def interruptible(self, run: TrainingRun) -> Iterator[None]:
        """Lets the block train a step. A signal leaves a checkpoint behind the step, and then counts."""
        with Interruption() as interruption, run.keeping(self.tracker):
            yield
            if interruption.asked:
                run.save(self.tracker)
        if interruption.asked:
            raise KeyboardInterrupt

    def save(self) -> Checkpoint:
        """Writes a checkpoint of the last finished step, unless there is one."""
        with self.own_state():
            return self.opened().save(self.tracker)

    def keep(self) -> None:
        """Saves the last step of a run that is closed between two steps: the next call goes on behind it."""
        run = self.run
        if run is None or not run.intact or not self.config.trainer.save_last:
            return
        if run.finished["step"] == (run.saved.step if run.saved else 0):
            return
        try:
            self.save()
        except Exception as error:  # whatever ended the block in which the run was open is what people shall read
            log.error("the steps since the last checkpoint could not be saved: %s", error)

    def give_memory_back(self) -> None:
        """Empties the cache of the device, once the run is closed: the program goes on."""
        gc.collect()
        empty_cache(device_of(self.config.trainer.device))

    def conclude(self, run: TrainingRun) -> None:
        """Does what follows the last step."""
        self.kind.conclude(run)
        record_end(Path(self.config.trainer.default_local_dir), run.step_no)

    @contextmanager
    def restarting(self) -> Iterator[TrainingRun]:
        """Gives the block the run, which has begun. If a worker is lost in it, the next block gets a new run."""
        with self.own_state(), explaining(self.config, lambda: self.run.memory_by if self.run else {}):
            while True:
                try:
                    run = self.opened()
                    if not self.begun:
                        run.begin(self.tracker)
                        self.begun = True
                    break
                except WorkerLost as loss:
                    self.restart(loss)
            try:
                yield run
            except WorkerLost as loss:
                self.restart(loss)

    def restart(self, loss: WorkerLost) -> None:
        """Drops the run, so that the next use opens a new one; refuses to if that was done too often."""
        self.drop_run()
        if self.restarts == self.config.trainer.max_restarts:
            raise UserError(
                str(loss),
                key="trainer.max_restarts",
                value=self.restarts,
                fix="the same command goes on from the last checkpoint; a larger number restarts by itself",
            ) from loss
        self.restarts += 1
        log.warning("%s\nrestart %d of %d", loss, self.restarts, self.config.trainer.max_restarts)

    def opened(self) -> TrainingRun:
        """Returns the run; makes it, from its newest checkpoint, if there is none."""
        if self.run is not None:
            return self.run
        config, trainer = self.config, self.config.trainer
        with ExitStack() as things:
            seed_all(trainer.seed)
            run, store = self.kind.open(config, self.folder, things), self.folder.store
            checkpoint = store.newest() if store.wrote else resume_point(trainer, store)
            loggers = run.restore(checkpoint) if checkpoint else None
            after = checkpoint.step if checkpoint else None
            self.tracker = things.enter_context(Tracker(trainer, asdict(config), run.total_steps, after, loggers))
            record_launch(
                store.root, tree.settings(config), self.kind.command, self.origins, run.devices(), run.step_no
            )
            if run.step_no >= run.total_steps:  # opened to evaluate or generate
                record_end(store.root, run.step_no)
            self.things = things.pop_all()
        self.run, self.begun = run, False
        return run

    def drop_run(self) -> None:
        self.run = None
        self.things.close()

    @contextmanager
    def own_state(self) -> Iterator[None]:
        """Gives the block the random numbers of this run and its number of threads, and others theirs afterwards."""
        others, threads = rng_state(), torch.get_num_threads()
        if self.random is not None:
            restore_rng(self.random)
        if wants_one_thread(self.config) and THREADS not in os.environ:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            self.random = rng_state()
            restore_rng(others)
            torch.set_num_threads(threads)
