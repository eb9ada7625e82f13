"""A training run as an object: the same as a command, for notebooks and programs."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakSet

from paddock.commands.preflight import check
from paddock.config.schema import Config
from paddock.errors import UserError
from paddock.library.functions import Reward, environment_settings, parts_of, reward_settings, source_of
from paddock.library.keywords import ARGUMENTS, KEYS, Keywords, settings_of
from paddock.library.rows import files_of_rows, rows_of_texts
from paddock.loading.load import Loaded, load

if TYPE_CHECKING:
    from paddock.core.batch import Batch
    from paddock.plan.plan import Plan
    from paddock.rollouts.episode import Episode
    from paddock.runs.checkpoint import Checkpoint
    from paddock.trainer.lifecycle import Metrics, Outcome, Step
    from paddock.trainer.loop import Trainer
    from paddock.trainer.run import RunKind, Training

log = logging.getLogger("paddock")

ALGORITHM, FOLDER = "algorithm.adv_estimator", KEYS["folder"]
NAMES = {"ppo": "gae"}
"""Algorithms that people call by another name than their estimator's."""
SFT, REWARD_MODEL = "sft", "reward_model"
RUNS = "runs"
FIRST_ID = 1 << 31


class Run:
    """Trains a model on data with a reward and an algorithm, as the command `paddock train` does.

    >>> import paddock
    >>> def correct(completion: str, answer: str) -> float:
    ...     return float(answer in completion)
    >>> rows = [{"prompt": "2+3=", "answer": "5"}, {"prompt": "4+4=", "answer": "8"}]
    >>> run = paddock.Run(data=rows, reward=correct, n=4, batch=2, steps=2, logger=["file"])

    `model`: a folder or a name of the hub; without one, the largest on this disk that fits, or the built-in one.
    `data`: a list of dicts, a `datasets.Dataset`, a pandas or arrow table, a path, or a name of the hub; `validation`
    the same. `reward`: a function, the name of a rule, a list of these, or a dict with a weight for each.
    `environment`: an `Environment` class, its name, or a dict of several; `tools`: functions that the policy may call,
    or their names. `algorithm`: ppo, grpo, rloo or another estimator; `sft` learns the answers of the rows,
    `reward_model` their preferences.

    Keywords set one key each (`paddock.library.keywords`); `config` takes any key. Errors that the caller can mend are
    `paddock.UserError`, with the texts of the command.

    Without `folder`, a run that was interrupted goes on when the same lines run again, and one that was finished begins
    anew in another folder. `on_step`, `on_save` and `on_validation` are called with a `Step`, a `Checkpoint`, and the
    step's number with the metrics.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        data: Any = None,
        reward: Reward | Sequence[Reward] | Mapping[Reward, float] | None = None,
        *,
        environment: str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]] | None = None,
        tools: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
        algorithm: str = "grpo",
        validation: Any = None,
        config: Mapping[str, Any] | None = None,
        on_step: Callable[[Step], object] | None = None,
        on_save: Callable[[Checkpoint], object] | None = None,
        on_validation: Callable[[int, Metrics], object] | None = None,
        **keywords: Unpack[Keywords],
    ):
        self.algorithm = algorithm
        self.listeners = on_step, on_save, on_validation
        named, scorers = reward_settings(reward)
        held, others = environment_settings(environment, tools)
        self.functions = scorers | others
        named |= held
        own = environment.values() if isinstance(environment, Mapping) else [environment]
        texts = [source_of(part) for part in (*parts_of(reward), *parts_of(tools), *own) if callable(part)]
        values = settings_of(keywords, config or {})
        if model is not None:
            named[ARGUMENTS["model"]] = str(model)
        for name, given in (("data", data), ("validation", validation)):
            if given is not None:
                named[ARGUMENTS[name]] = files_of_rows(given, name)
        if algorithm not in (SFT, REWARD_MODEL):
            named[ALGORITHM] = NAMES.get(algorithm, algorithm)
        if twice := next((key for key in named if key in values), None):
            fix = f"set it once: algorithm={values[twice]!r}" if twice == ALGORITHM else "set it once"
            reason = "is set by an argument of Run as well"
            raise UserError(reason, key=twice, value=values[twice], fix=fix)
        values |= named
        self.own_folder = FOLDER not in values
        if self.own_folder:
            values[FOLDER] = str(Path(RUNS) / f"{algorithm}-{identity(values, texts)}")
        self.values, self.loaded = values, self.load(values)
        self.training: Training | None = None
        """The run while it is open, from the first use to `close`."""
        self.things = ExitStack()
        self.thread, self.fitting = 0, False
        """The thread that opened the run, and whether `train` runs."""
        self.ids = itertools.count(FIRST_ID)
        """Ids of prompts that are none of the training data's."""
        self.drawn: dict[int, int] = {}
        """The step after which `sample` drew with each version of the weights."""

    def load(self, values: Mapping[str, Any], gpu: str | None = None) -> Loaded:
        """Returns the config as the command of this algorithm loads it. `gpu`: the device to plan for."""
        if self.algorithm not in (SFT, REWARD_MODEL):
            return load(values=values, gpu=gpu, chooses=True)
        from paddock.commands import keys_of

        command = keys_of.SFT if self.algorithm == SFT else keys_of.RM
        return command.load(values=values, gpu=gpu, chooses=True)

    @property
    def config(self) -> Config:
        """Returns the whole config, as the run reads it.

        >>> run.config.data.train_batch_size
        2
        """
        return self.loaded.config

    @property
    def folder(self) -> Path:
        """Returns the folder that metrics, samples and checkpoints are written to.

        >>> run.folder.parent.name
        'runs'
        """
        return Path(self.config.trainer.default_local_dir)

    def plan(self, gpu: str | None = None) -> Plan:
        """Returns what the run would do: steps, memory, time, advice. `print` shows it as `paddock plan` does.

        `gpu`: the name of a GPU that need not be here, such as `H100`.

        >>> "2 prompts x 4 responses" in str(run.plan())
        True
        """
        from paddock.plan.plan import known_gpu, make
        from paddock.plan.tables import PrintedPlan

        if gpu is not None:
            gpu = known_gpu("gpu", gpu)
        loaded = self.loaded if gpu is None else self.load(self.values, gpu)
        return PrintedPlan(**vars(make(loaded, gpu)))

    def train(self) -> Outcome:
        """Trains all steps that are left. Ctrl-C ends it after the step, with a checkpoint; the next call goes on.

        >>> run.train().finished
        True
        """
        training = self.open()
        self.fitting = True
        try:
            outcome = training.fit()
        finally:
            self.fitting = False
        if outcome.finished and outcome.trained == 0:
            log.warning(
                "nothing was trained: %s holds all %d steps. To train on: Run(..., folder=%r, steps=%d)",
                *(self.folder, outcome.total, str(self.folder), 2 * outcome.total),
            )
        return outcome

    def __iter__(self) -> Iterator[Step]:
        """Trains step by step: yields each with its number, metrics, batch and samples.

        >>> with paddock.Run(data=rows, reward=correct, n=2, batch=2, steps=2, logger=["file"]) as other:
        ...     for step in other:
        ...         print(step.number, len(step.samples))
        1 4
        2 4
        """
        training = self.open()
        while (step := training.advance()) is not None:
            yield step

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Returns the metrics of the current weights on these rows; without any, on those of `validation`.

        >>> sorted(run.evaluate(rows))
        ['val-aux/data/reward/pass@1', 'val-core/data/reward/mean@1']
        """
        files = None if data is None else files_of_rows(data, "data")
        with self.trainer() as trainer:
            validation = trainer.validation if files is None else trainer.validation_on(files)
            if validation is None:
                fix = "evaluate(rows), or Run(..., validation=rows)"
                raise UserError("there are no rows to evaluate on", key="data.val_files", fix=fix)
            with trainer.apart() as timer:
                return validation.run(trainer.step_no, timer)[0]

    def generate(
        self, prompts: Any, n: int = 1, temperature: float | None = None, response_length: int | None = None
    ) -> list[Any]:
        """Returns `n` responses to a prompt (a text, or messages), or a list of such lists to a list of prompts.

        `temperature` and `response_length` replace the run's own. In an environment a response is the conversation:
        what others than the policy said stands in brackets.

        >>> len(run.generate("2+2=", n=3))
        3
        >>> [len(responses) for responses in run.generate(["2+2=", "1+5="], temperature=0)]
        [1, 1]
        """
        many = [prompts] if isinstance(prompts, str) else list(prompts)
        alone = isinstance(prompts, str) or (bool(many) and isinstance(many[0], Mapping))
        changed = {"n": n} | ({} if response_length is None else {"response_length": response_length})
        for name, value in changed.items():
            require_count(name, value)
        if temperature is not None and not (isinstance(temperature, Real) and 0 <= temperature < math.inf):
            fix = "0 (greedy), or more"
            raise UserError("is no temperature", key="temperature", value=f"{temperature!r:.80}", fix=fix)
        from paddock.rollouts.texts import texts_for_people

        with self.trainer() as trainer:
            longer = "Run(..., prompt_length={})"
            rows = trainer.parts.rows_of_prompts([prompts] if alone else many, self.ids, longer)
            sampling = replace(trainer.collector.sampling, step=trainer.step_no)
            if temperature is not None:
                sampling = replace(sampling, temperature=temperature)
            if response_length is not None:
                sampling = replace(sampling, max_tokens=response_length)
            with trainer.apart():
                episodes = trainer.roles.rollout.episodes(rows, n, sampling)
            texts = iter(texts_for_people(episodes, trainer.collector.decode))
            found = [list(itertools.islice(texts, n)) for _ in rows]
        return found[0] if alone else found

    def export(self, folder: str | Path, dtype: str | None = None) -> Path:
        """Writes the current weights and the tokenizer to a folder that `transformers` loads.

        >>> sorted(file.name for file in run.export("model").glob("*.safetensors"))
        ['model.safetensors']
        """
        from paddock.commands.export import export

        out = Path(folder).expanduser()
        export(self.save().folder, out, dtype)
        return out

    def save(self) -> Checkpoint:
        """Writes a checkpoint of the last finished step, unless there is one.

        >>> run.save().step
        2
        """
        return self.open().save()

    def report(self, out: str | Path | None = None) -> Path:
        """Writes the page about this run, as `paddock report` does; returns where it is.

        >>> run.report().name
        'report.html'
        """
        from paddock.report.page import NAME, write_page
        from paddock.runs.reading import read_run

        path = Path(out).expanduser() if out is not None else self.folder / NAME
        write_page([read_run(self.folder)], path, "out")
        return path

    def sample(self, rows: Any = None, n: int | None = None) -> list[Episode]:
        """Draws responses with the current weights: episodes with tokens, log-probs and text.

        `rows`: prompts, or rows as `data` has them; without any, the next `batch` rows of the training data.

        >>> episodes = run.sample(rows, n=4)
        >>> len(episodes), len({episode.group for episode in episodes})
        (8, 2)
        """
        if n is not None:
            require_count("n", n)
        from paddock.library.episodes import with_origin

        with self.trainer() as trainer:
            if rows is None:
                prompts = trainer.loader.next_prompts(self.config.data.train_batch_size)
            else:
                dataset = trainer.parts.dataset(files_of_rows(rows_of_texts(rows), "rows"), "rows")
                prompts = [replace(row, group=next(self.ids)) for row in dataset.rows(range(len(dataset)))]
            sampling = replace(trainer.collector.sampling, step=trainer.step_no + 1)
            with trainer.roles.generating(trainer.timer), trainer.timer("gen"):
                found = trainer.roles.rollout.episodes(prompts, n or trainer.collector.samples, sampling)
            self.drawn |= {span.version: trainer.step_no for episode in found for span in episode.response}
            return with_origin(found, trainer.collector.decode)

    def score(self, episodes: Sequence[Episode]) -> Batch:
        """Returns episodes as a batch with their scores, by the run's reward.

        >>> batch = run.score(episodes)
        >>> batch.need("scores").sum(-1).shape
        torch.Size([8])
        """
        if not episodes:
            raise UserError("there is no episode to score", key="run.score", fix="run.sample gives some")
        from paddock.library.episodes import as_drawn

        with self.trainer() as trainer, trainer.timer("reward"):
            collector = trainer.collector
            collector.rewards.steps_done = trainer.step_no
            drawn = as_drawn(episodes, collector.tokenizer.pad_token_id, collector.rewards.begin())
            return collector.score(drawn)[0]

    def advantages(self, batch: Batch) -> Batch:
        """Returns a scored batch with log-probs, values and advantages, by the run's algorithm.

        >>> batch = run.advantages(batch)
        >>> batch.need("advantages").shape == batch.need("mask").shape
        True
        """
        with self.trainer() as trainer:
            return trainer.with_advantages(batch)[0]

    def learn(self, batch: Batch) -> dict[str, float]:
        """Updates the weights on a batch that has advantages, as one step: it is logged, and saved when that is due.

        Returns the step's metrics. Rows that older weights drew are learnt with their ratios, as in PPO.

        >>> run.learn(batch)["training/global_step"]
        3.0
        """
        with self.trainer() as trainer, self.open().interruptible(trainer):
            complete = trainer.completed(batch)
            current = self.drawn_by_current_weights(complete, trainer.step_no)

            def step() -> tuple[Metrics, Batch]:
                return trainer.learn(complete, current) | trainer.describe(complete), complete

            return trainer.advance(self.open().tracker, step).metrics

    def drawn_by_current_weights(self, batch: Batch, step: int) -> bool:
        """False for rows that `sample` drew before the last step, or did not draw: their ratios are not 1."""
        if batch.versions is None:
            return False
        versions = batch.versions[batch.need("mask") != 0].unique().tolist()
        return all(self.drawn.get(version) == step for version in versions)

    def sync(self) -> None:
        """Gives an engine with a copy of the weights the current ones. `sample` does so too, if they are old.

        >>> run.sync()
        """
        with self.trainer() as trainer:
            trainer.roles.rollout.publish()

    @contextmanager
    def trainer(self) -> Iterator[Trainer]:
        """Gives the block the trainer, with the random numbers of the run."""
        training = self.open()
        from paddock.trainer.loop import Trainer

        with training.own_state():
            trainer = training.opened()
            if not isinstance(trainer, Trainer):
                reason, fix = "this algorithm draws no responses", "train a policy: grpo, ppo, rloo, ..."
                raise UserError(reason, key="algorithm", value=training.kind.command, fix=fix)
            yield trainer

    def open(self) -> Training:
        """Returns what the run works with; opens it at its newest checkpoint if it is not open."""
        if self.training is not None:
            return self.training
        if self.own_folder:
            self.choose_folder()
            self.own_folder = False  # opened again, the run stays where it is
        for warning in self.loaded.warnings:
            log.warning(warning)
        self.take_over()
        check(self.config)
        from paddock.trainer.lifecycle import Listeners
        from paddock.trainer.run import open_training

        training = open_training(self.config, self.kind(), self.loaded.origins, Listeners(*self.listeners))
        self.training = self.things.enter_context(training)
        self.thread = threading.get_ident()
        self.ids, self.drawn = itertools.count(FIRST_ID), {}
        OPEN.add(self)
        atexit.unregister(close_all)
        atexit.register(close_all)  # behind what this run has imported, so before that is torn down
        return self.training

    def take_over(self) -> None:
        """Closes another open run of this thread in the same folder, unless it trains: the same cell ran again."""
        for run in list(OPEN):
            here = run.training is not None and run.folder.resolve() == self.folder.resolve()
            if here and not run.fitting and run.thread == threading.get_ident():
                log.warning("closed the earlier run in %s, which was idle: this one goes on in its folder", run.folder)
                run.close()

    def kind(self) -> RunKind:
        """Returns how this algorithm's trainer is made."""
        if self.algorithm in (SFT, REWARD_MODEL):
            from paddock.trainer.supervised import FINE_TUNING, REWARD_MODELLING

            return FINE_TUNING if self.algorithm == SFT else REWARD_MODELLING
        from paddock.trainer.reinforcement import REINFORCEMENT, open_trainer

        return replace(REINFORCEMENT, open=partial(open_trainer, functions=self.functions))

    def choose_folder(self) -> None:
        """Takes the first folder of this run's name that holds no finished run."""
        from paddock.runs.record import is_finished

        first, number = str(self.folder), 2
        while is_finished(self.folder):
            self.config.trainer.default_local_dir = f"{first}-{number}"
            number += 1

    def close(self) -> None:
        """Ends the run's processes and gives its memory back. Any method opens it again, at its newest checkpoint.

        >>> run.close()
        """
        training, self.training = self.training, None
        if training is not None:
            training.keep()
            self.things.close()
            training.give_memory_back()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "training", None) is not None:
            self.close()

    def __reduce__(self) -> str:
        raise TypeError("a Run stays in its process")

    def __repr__(self) -> str:
        model, folder = self.config.actor_rollout_ref.model.path, str(self.folder)
        return f"Run({model!r}, algorithm={self.algorithm!r}, folder={folder!r})"


OPEN: WeakSet[Run] = WeakSet()
"""Runs that were opened and may be open still."""


def close_all() -> None:
    """Closes the runs that are open when the program ends: `__del__` would come when torch's modules are gone."""
    for run in list(OPEN):
        run.close()


def identity(values: Mapping[str, Any], texts: Sequence[str]) -> str:
    """Returns a name that is equal for equal lines of a program: settings, rows, and the text of functions."""
    return hashlib.sha256(json.dumps([values, texts], sort_keys=True, default=str).encode()).hexdigest()[:8]


def require_count(name: str, value: Any) -> None:
    """Raises a UserError unless the value counts responses or tokens, before an engine makes room for so many."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise UserError("is not a whole number above 0", key=name, value=f"{value!r:.80}", fix=f"{name}=1 or more")
