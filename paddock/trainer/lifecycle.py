"""The life of a training run, whatever it trains: when it validates, logs, saves and stops, and what an error leaves.

    step -> validate -> log -> save, until all steps are done or someone stops the run

`TrainingRun` is the base of `Trainer` (loop.py: reinforcement learning) and of `SupervisedTrainer` (supervised.py). A
step is logged before it is saved, so that a checkpoint never holds a step without its line in metrics.jsonl.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

from paddock.config.schema import TrainerConfig
from paddock.core.batch import Batch
from paddock.core.garbage import collecting_new_objects
from paddock.core.timing import Timer
from paddock.data.loader import Loader
from paddock.errors import UserError
from paddock.runs.checkpoint import Checkpoint, CheckpointStore
from paddock.runs.lock import FolderLock
from paddock.runs.samples import Sample
from paddock.runs.settings import FIXED, check_settings
from paddock.runs.tracking import Tracker
from paddock.trainer.learning import STEPS, warning
from paddock.trainer.state import load_state, restore_rng, rng_state, save_state
from paddock.workers.sharded import WorkerLost
from paddock.workers.updates import Metrics

log = logging.getLogger(__name__)

State = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Reports how a call that trains ended: the return value of `Run.train`.

    >>> import paddock
    >>> paddock.Outcome(finished=False, trained=3, total=10, checkpoint=None).finished
    False
    """

    finished: bool
    """False if the run was interrupted before its last step."""
    trained: int
    """Steps that this call trained; those before its checkpoint were trained by earlier calls."""
    total: int
    """Steps of the whole run."""
    checkpoint: Checkpoint | None
    """The newest one; None if the run saved none."""


SHOWN = {"reward": "critic/score/mean", "length": "response_length/mean", "loss": "train/loss"}
"""What a step shows of itself, by the names of metrics."""


@dataclass(frozen=True, repr=False)
class Step:
    """Holds a finished training step: what iteration over a `Run` yields, and what `on_step` receives.

    >>> import paddock
    >>> with paddock.Run(n=2, batch=2, steps=1, logger=["file"], config={"data.val_files": None}) as run:
    ...     step = next(iter(run))
    >>> step.number, len(step.batch), len(step.samples)
    (1, 4, 4)
    """

    number: int
    """The first step is 1."""
    metrics: Metrics
    """Every metric that is logged, by its name."""
    batch: Batch
    """All columns of the step's rows: tokens, log-probs, scores, advantages."""
    read: Callable[[Batch], list[Sample]] = field(repr=False)

    def __repr__(self) -> str:
        shown = [f"{word} {self.metrics[name]:.3g}" for word, name in SHOWN.items() if name in self.metrics]
        return f"Step({', '.join([str(self.number), *shown])})"

    @cached_property
    def samples(self) -> list[Sample]:
        """Returns the step's responses in words, with their scores; none if the policy wrote none.

        >>> {sample.group for sample in step.samples} == set(step.batch.group.tolist())
        True
        """
        return self.read(self.batch)


@dataclass
class Listeners:
    """Functions of the caller's that hear of a run's progress. What they raise ends the run, with a checkpoint."""

    step: Callable[[Step], object] | None = None
    """Called after each step, when it is logged."""
    saved: Callable[[Checkpoint], object] | None = None
    """Called after each checkpoint."""
    validated: Callable[[int, Metrics], object] | None = None
    """Called with the step and the metrics of each validation."""


@dataclass(frozen=True)
class RunFolder:
    """Holds what guards the folder of a run, its checkpoints, and who hears of them."""

    store: CheckpointStore
    lock: FolderLock
    listeners: Listeners


class TrainingRun(ABC):
    """Trains until all steps are done or someone stops it. Subclasses define a step, a validation and the weights."""

    memory_by: ClassVar[Mapping[str, str]] = {}
    """Phase of the timer -> what decides how much memory it takes, as out_of_memory.py names it."""

    def __init__(
        self, keys: TrainerConfig, settings: State, loader: Loader, folder: RunFolder, total_steps: int, validates: bool
    ):
        """`settings`: every key with its value, which checkpoints keep."""
        self.keys, self.settings, self.loader = keys, settings, loader
        self.total_steps, self.validates = total_steps, validates
        self.store, self.lock, self.listeners = folder.store, folder.lock, folder.listeners
        self.step_no = 0
        self.timer = Timer()
        self.void_updates = 0  # in a row
        self.recent: deque[Metrics] = deque(maxlen=STEPS)
        self.warned = False
        self.saved: Checkpoint | None = None
        """The newest checkpoint: of this run, or the one it went on from."""
        self.finished: State = {"step": 0}
        """All that the checkpoint of the last finished step holds beside weights."""
        self.unlogged: tuple[Metrics, Batch] | None = None
        """Metrics and rows of a finished step that no logger has seen yet."""
        self.intact = True
        """False while weights are neither those of the last finished step nor those of the next."""

    @abstractmethod
    def step(self) -> tuple[Metrics, Batch]:
        """Trains step `step_no`; optimizer steps happen inside ``with self.updating()``."""

    def publish(self) -> Metrics:
        """Sends the new weights to those who sample with a copy of them."""
        return {}

    @abstractmethod
    def validate(self, tracker: Tracker) -> Metrics:
        """Returns the metrics of the current weights on held-out rows."""

    @abstractmethod
    def cost(self, batch: Batch) -> Metrics:
        """Returns what the step took: seconds by phase, tokens per second, memory."""

    @abstractmethod
    def save_weights(self, folder: Path) -> None:
        """Writes weights and optimizer of every trained model into a checkpoint."""

    @abstractmethod
    def load_weights(self, folder: Path, state: State) -> None:
        """Reads what `save_weights` wrote; `state` is that of the same checkpoint."""

    @abstractmethod
    def rows_of(self, batch: Batch) -> str:
        """Returns where the rows of a batch can be looked at, for an error message."""

    @abstractmethod
    def devices(self) -> str:
        """Names the devices that train, and their number."""

    def samples(self, batch: Batch) -> list[Sample]:
        """Returns a step's responses in words, if the policy wrote them."""
        return []

    def state(self) -> State:
        """Returns all that the rest of the run depends on, beside weights and config."""
        return {
            "step": self.step_no,
            "loader": self.loader.state_dict(),
            "rng": rng_state(),
            "void_updates": self.void_updates,
        }

    def kept(self, state: State) -> State:
        """Returns a state as a checkpoint keeps it, and `load_state` reads it."""
        return state

    def fixed(self, state: State) -> Mapping[str, str]:
        """Returns the keys that must be those of the checkpoint with this state, and why."""
        return FIXED

    def load_state(self, state: State) -> None:
        self.loader.load_state_dict(state["loader"])
        restore_rng(state["rng"])
        self.step_no, self.void_updates = state["step"], state["void_updates"]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Marks optimizer steps: if one fails, the weights belong to no step and are not saved."""
        self.intact = False
        yield

    def begin(self, tracker: Tracker) -> None:
        """Validates if the run is there for that, before the first step if that is asked for, or if the run ended
        before it had."""
        first = self.step_no == 0 and self.keys.val_before_train
        if (self.validates and (first or self.keys.val_only)) or self.finished.get("validation_owed"):
            tracker.log(self.step_no, self.validated(tracker))
        self.timer.reset()

    def advance(self, tracker: Tracker, step: Callable[[], tuple[Metrics, Batch]] | None = None) -> Step:
        """Trains one step, and does what its number calls for. `step`: what trains it, if that is not `self.step`."""
        self.step_no += 1
        with self.timer("step"), collecting_new_objects():
            metrics, batch = (step or self.step)()
            self.settle(metrics, batch, tracker)
        return self.record(metrics, batch, tracker)

    @property
    def validation_due(self) -> bool:
        every = self.keys.test_freq
        return self.validates and every > 0 and (self.step_no == self.total_steps or self.step_no % every == 0)

    def settle(self, metrics: Metrics, batch: Batch, tracker: Tracker) -> None:
        """Publishes the weights of step `step_no`; adds to the step's metrics."""
        self.intact, self.unlogged = True, (metrics, batch)
        self.count_void_updates(metrics)
        self.finished = self.state() | {"validation_owed": self.validation_due}
        self.lock.require()  # nothing more is written once another run owns the folder
        tracker.rollouts(self.step_no, batch, self.samples)
        self.stop_if_void(batch)
        metrics |= self.publish()

    def record(self, metrics: Metrics, batch: Batch, tracker: Tracker) -> Step:
        """Validates if that is due, logs step `step_no`, and saves it if that is due. A step's seconds are over."""
        if self.validation_due:
            with collecting_new_objects():
                metrics |= self.validated(tracker)
        self.lock.require()
        step = Step(self.step_no, metrics | self.cost(batch), batch, self.samples)
        tracker.log(self.step_no, step.metrics)
        self.unlogged, self.finished = None, self.state()
        self.timer.reset()
        self.recent.append(step.metrics)
        if not self.warned and (found := warning(self.recent)):
            self.warned = True
            log.warning("step %d: %s", self.step_no, found)
        last, every = self.step_no == self.total_steps, self.keys.save_freq
        if (last and self.keys.save_last) or (every > 0 and self.step_no % every == 0):
            self.save(tracker)
        if self.listeners.step:
            self.listeners.step(step)
        return step

    def validated(self, tracker: Tracker) -> Metrics:
        """Validates, and tells who listens."""
        metrics = self.validate(tracker)
        if self.listeners.validated:
            self.listeners.validated(self.step_no, metrics)
        return metrics

    def count_void_updates(self, metrics: Metrics) -> None:
        """Counts updates in a row that were skipped, because a loss or gradient was NaN or infinite."""
        void = any(value > 0 for name, value in metrics.items() if name.endswith("/skipped"))
        self.void_updates = self.void_updates + 1 if void else 0
        if void:
            log.warning("step %d: loss or gradient was not finite; that update is skipped", self.step_no)

    def stop_if_void(self, batch: Batch) -> None:
        limit = self.keys.max_nonfinite_steps
        if self.void_updates >= limit:
            raise UserError(
                f"{self.void_updates} updates in a row were not finite (loss or gradient); {self.rows_of(batch)}",
                key="trainer.max_nonfinite_steps",
                value=limit,
                fix="look at the rows and scores; lower actor_rollout_ref.actor.optim.lr, or use fp32",
            )

    def save(self, tracker: Tracker) -> Checkpoint:
        """Writes a checkpoint of the last finished step, unless there is one."""
        step = self.finished["step"]
        if self.saved and self.saved.step == step and self.saved.folder == self.store.folder(step):
            return self.saved
        with self.timer("save_checkpoint"), self.store.write(step) as folder:
            self.lock.require()
            self.save_weights(folder)
            others = {"loggers": tracker.state_dict(), "config": self.settings}
            save_state(folder, self.kept(self.finished if step else self.state()) | others)
        self.saved = Checkpoint(step, self.store.folder(step))
        if self.listeners.saved:
            self.listeners.saved(self.saved)
        return self.saved

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Goes back to the state after the checkpoint's step; returns what loggers need to go on."""
        try:
            state = load_state(checkpoint.folder)
            if state["step"] != checkpoint.step:
                raise forged(checkpoint.folder, f"its state is that of step {state['step']}")
            check_settings(state["config"], self.settings, self.fixed(state))
            self.load_weights(checkpoint.folder, state)
        except UnpicklingError as error:
            raise forged(checkpoint.folder, "a file holds an object that runs code, which was not run") from error
        self.load_state(state)
        self.saved, self.finished = checkpoint, state | self.state()
        log.info("going on after step %d, from %s", self.step_no, checkpoint.folder)
        return state["loggers"]

    @contextmanager
    def keeping(self, tracker: Tracker) -> Iterator[None]:
        """Saves the last finished step when an error ends the block. A lost worker has taken its weights along."""
        try:
            yield
        except WorkerLost:
            raise
        except (Exception, SystemExit) as error:
            self.rescue(tracker, error)
            raise

    def rescue(self, tracker: Tracker, error: BaseException) -> None:
        """Leaves a checkpoint of the last finished step, and says from where the same command goes on."""
        done = self.finished["step"]
        name = f"{type(error).__name__} in step {self.step_no}"
        if not self.intact:
            log.error("%s, inside an update: its weights belong to no step and are not saved. %s", name, self.way_on())
            return
        if done == 0:
            log.error("%s, before any step was finished: there is nothing to save", name)
            return
        try:
            self.lock.require()
            if self.unlogged:
                metrics, batch = self.unlogged
                tracker.log(done, metrics | self.cost(batch))
            self.save(tracker)
        except Exception as second:
            log.error("%s; a checkpoint of step %d could not be written: %s. %s", name, done, second, self.way_on())
            return
        log.error("%s; the %d steps before it are kept. %s", name, done, self.way_on())

    def way_on(self) -> str:
        """Says what the next run of this folder starts from, and with which keys."""
        if self.saved is None:
            return (
                "There is no checkpoint: the same command begins at step 1 (trainer.save_freq sets how often to save)."
            )
        return f"{resume_command(self.keys)} goes on after step {self.saved.step}, from {self.saved.folder}."


def forged(folder: Path, reason: str) -> UserError:
    """Returns the refusal of a checkpoint that no run wrote, although its checksums are right."""
    fix = "restore its files, or trainer.resume_mode=resume_path trainer.resume_from_path=ANOTHER_STEP"
    return UserError(f"was not written by a run: {reason}", key="trainer.default_local_dir", value=folder, fix=fix)


def resume_command(trainer: TrainerConfig) -> str:
    """Names the command that resumes this run: with resume_mode=auto the same one."""
    return "The same command" + ("" if trainer.resume_mode == "auto" else " with trainer.resume_mode=auto")
