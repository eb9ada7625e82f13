"""Kills training runs with SIGKILL, runs the same command again, and compares with a run that nobody touched.

    python -m tests.chaos.kills --kills 220            # writes docs/reliability/kills.json
    python -m tests.chaos.kills --jobs grpo --kills 12 --seed 3 --no-record

A trial is one run folder: its run is killed several times, half of the times at a random moment and half at a named
point (POINTS), until a last run reaches the end. Then everything that the run left must equal the untouched run:
weights, optimizer tensors, trainer state, every line of metrics.jsonl but the timings, samples.jsonl, run.json and the
rollout dumps; report.html, which shows the timings, must be there. Each run is the real command (`paddock.cli.main`) in
a process of its own, forked from one that has imported torch.

Ranks of Ray are killed by ray_kills.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from paddock import __version__
from tests.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "reliability" / "kills.json"
STEPS, SAVE_EVERY = 6, 2
LIMIT = 120.0
"""Seconds that one run may take."""

SMALL = [
    f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={SAVE_EVERY}", "trainer.max_actor_ckpt_to_keep=2",
    "trainer.test_freq=3", "trainer.logger=[file]", "data.train_batch_size=8", "data.dataloader_num_workers=0",
]  # fmt: skip
RL = [
    *SMALL, "data.val_max_samples=8", "actor_rollout_ref.rollout.n=4", "trainer.max_critic_ckpt_to_keep=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "algorithm.kl_ctrl.type=adaptive",
    "trainer.rollout_data_dir={folder}/rollouts",
]  # fmt: skip
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 8
"""
JOBS: dict[str, list[str]] = {
    "grpo": ["train", *RL, "algorithm.adv_estimator=grpo", "custom_reward_function.path={scorer}"],
    "ppo": ["train", *RL, "algorithm.adv_estimator=gae"],
    "rloo": ["train", *RL, "algorithm.adv_estimator=rloo"],
    "ahead": ["train", *RL, "algorithm.adv_estimator=grpo", "algorithm.staleness=2",
              "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.max_num_seqs=40"],
    "lora": ["train", *RL, "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=8"],
    "sft": ["sft", *SMALL],
    "rm": ["rm", "train", *SMALL, "data.val_max_samples=16"],
}  # fmt: skip
"""One command each. `{folder}` is the run's folder, `{scorer}` a reward function that runs in processes of its own."""


@dataclass(frozen=True)
class Point:
    """A place in the code: before or after a call of `function`, or inside the write that it does."""

    function: str
    when: str = "before"
    jobs: frozenset[str] = frozenset(JOBS)
    only: Callable[..., bool] = field(default=lambda *_, **__: True, compare=False)
    """Which calls count, by their arguments."""


REINFORCED = frozenset({"grpo", "ppo", "rloo", "ahead", "lora"})
SUPERVISED = frozenset(JOBS) - REINFORCED
STORE = "paddock.runs.checkpoint"
POINTS: dict[str, Point] = {
    "the folder's lock is just taken": Point("paddock.runs.lock.FolderLock.__enter__", "after"),
    "a checkpoint has some of its files": Point("paddock.trainer.lifecycle.save_state"),
    "a checkpoint has all files and no manifest": Point(f"{STORE}.write_manifest"),
    "a checkpoint's manifest is being written": Point(f"{STORE}.json.dumps", "after"),
    "a checkpoint is whole and has no name yet": Point(f"{STORE}.CheckpointStore._publish"),
    "a checkpoint has its name and the pointer names the one before": Point(
        f"{STORE}.replacing", only=lambda path, *_: path.name == "latest_checkpointed_iteration.txt"
    ),
    "the pointer is set and old checkpoints are still there": Point(f"{STORE}.CheckpointStore.prune"),
    "an old checkpoint is being removed": Point(
        f"{STORE}.shutil.rmtree", only=lambda path, *_, **__: str(path).endswith(".removing")
    ),
    "half of a line of the ledger is written": Point("paddock.runs.tracking.jsonl.MetricsFile.log", "half a line"),
    "a line of samples is half written": Point(
        "paddock.runs.tracking.jsonl.SamplesFile.log", "half a line", REINFORCED
    ),
    "the settings are being written": Point("paddock.runs.record.json.dumps", "after"),
    "the report is being written": Point("paddock.report.page.render", "after"),
    "a rollout dump is half written": Point("paddock.runs.samples.json.dumps", "after", REINFORCED),
    "the engine begins to generate": Point(
        "paddock.engines.rollout.embedded.engine.EmbeddedEngine.answer", "before", REINFORCED
    ),
    "responses are being scored": Point("paddock.rewards.scoring.Scoring.collect", "before", REINFORCED),
    "gradients are there and the optimizer has not stepped": Point("paddock.engines.train.optim.Updater.step"),
    "the optimizer has stepped": Point("paddock.engines.train.optim.Updater.step", "after"),
    "between the two updates of a step": Point("paddock.engines.train.engine.Engine.train_step", "after"),
    "a validation begins": Point("paddock.trainer.validation.Validation.run", "before", REINFORCED),
    "a resumed run has loaded its weights": Point("paddock.trainer.lifecycle.TrainingRun.load_state"),
    "the model is being exported": Point("paddock.core.files.settle", "before", SUPERVISED),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: Point, nth: int) -> None:
    """Makes this process kill itself at the n-th time that it reaches the point."""
    owner, attribute = resolve(point.function)
    function, seen = getattr(owner, attribute), 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += point.only(*args, **kwargs)
        if seen < nth or not point.only(*args, **kwargs):
            return function(*args, **kwargs)
        if point.when == "half a line":
            file, *_, metrics = args
            os.write(file.file.fileno(), json.dumps({"step": 1, "half": str(metrics)}).encode()[:100])
        elif point.when == "after":
            function(*args, **kwargs)
        die()

    if isinstance(owner, type(json)) and owner.__name__ in ("json", "shutil"):  # a library: only as this module sees it
        module = importlib.import_module(point.function.rsplit(".", 2)[0])
        vars(module)[owner.__name__] = Stand(owner, attribute, wrapped)
    else:
        setattr(owner, attribute, wrapped)


class Stand:
    """A module with one function replaced."""

    def __init__(self, module: Any, name: str, function: Callable[..., Any]):
        self._module, self._name, self._function = module, name, function

    def __getattr__(self, name: str) -> Any:
        return self._function if name == self._name else getattr(self._module, name)


def resolve(path: str) -> tuple[Any, str]:
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:-1]:
            owner = getattr(owner, name)
        return owner, parts[-1]
    raise LookupError(path)


@dataclass
class Chaos:
    """Runs, kills and compares, below one folder."""

    work: Path
    dice: random.Random
    seconds: dict[str, float] = field(default_factory=dict)
    """What an untouched run of each job took."""

    def command(self, job: str, folder: Path) -> list[str]:
        scorer = self.work / "scorer.py"
        scorer.write_text(SCORER)
        words = [word.format(folder=folder, scorer=scorer) for word in JOBS[job]]
        return [*words, f"trainer.default_local_dir={folder}"]

    def start(self, job: str, folder: Path, before: Callable[[], None] = lambda: None) -> Forked:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Forked(self.command(job, folder), folder.with_suffix(".log"), before=before)

    def reference(self, job: str) -> Path:
        folder = self.work / job / "untouched"
        if job not in self.seconds:
            began = time.monotonic()
            code = self.start(job, folder).wait(LIMIT)
            assert code == 0, folder.with_suffix(".log").read_text()
            self.seconds[job] = time.monotonic() - began
        return folder

    def trial(self, job: str, name: str, kills: int) -> Counter[str]:
        """Kills one run `kills` times at most, lets it finish, compares. Returns where it was killed, by count."""
        untouched, folder, died = self.reference(job), self.work / job / name, Counter[str]()
        points = [point for point, where in POINTS.items() if job in where.jobs]
        while died.total() < kills:
            point = self.dice.choice(points) if self.dice.random() < 0.5 else None
            if point:
                where, nth = POINTS[point], self.dice.choice((1, 1, 2, 3))
                code = self.start(job, folder, lambda where=where, nth=nth: arm(where, nth)).wait(LIMIT)
            else:
                moment = self.dice.uniform(0.1, 0.95) * self.seconds[job]
                code = self.start(job, folder).wait(LIMIT, kill_at=moment)
            if code != -signal.SIGKILL:
                assert code == 0, f"exit {code}:\n" + folder.with_suffix(".log").read_text()
                break
            died[point or "random moment"] += 1
        code = self.start(job, folder).wait(LIMIT)
        assert code == 0, f"exit {code}:\n" + folder.with_suffix(".log").read_text()
        differences = list(compare(untouched, folder))
        assert not differences, f"{job}/{name} after {dict(died)}: {differences[:5]}"
        shutil.rmtree(folder)
        return died


TIMED = ("timing", "perf")
ASIDE = re.compile(r"(metrics|samples)\.\d+\.jsonl")
"""Ledgers of a run that was killed before its first checkpoint: the next one starts afresh and keeps them."""


def compare(want: Path, got: Path) -> Iterator[str]:
    """Yields every difference between what two runs left."""
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*") if not ASIDE.fullmatch(path.name))
             for root in (want, got)]  # fmt: skip
    if names[0] != names[1]:
        yield f"files: {sorted(set(names[0]) ^ set(names[1]))}"
        return
    for name in names[0]:
        one, other = want / name, got / name
        if one.name == "distributed":
            if not same(whole_state(one), whole_state(other)):
                yield name
            continue
        if one.is_dir() or one.name in ("manifest.json", "report.html") or "distributed" in one.parts:
            continue
        if not equal(one, other, want, got):
            yield name


def equal(one: Path, other: Path, want: Path, got: Path) -> bool:
    if one.suffix == ".safetensors":
        return same(load_file(one), load_file(other))
    if one.suffix == ".pt":
        return same(torch.load(one, weights_only=True), torch.load(other, weights_only=True))
    if one.name == "metrics.jsonl":
        return ledger(one) == ledger(other)
    return one.read_text().replace(str(want), "RUN") == other.read_text().replace(str(got), "RUN")


def whole_state(folder: Path) -> Any:
    """Returns what the ranks of an FSDP run saved together, with every tensor whole."""
    with tempfile.TemporaryDirectory() as work:
        dcp_to_torch_save(folder, Path(work, "whole.pt"))
        return torch.load(Path(work, "whole.pt"), weights_only=True)


def same(one: Any, other: Any) -> bool:
    """True if two nested structures hold the same numbers, bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def ledger(path: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=220, help="kills in all, shared among the jobs")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), random.Random(args.seed))
        for job in args.jobs:
            began, died, trials = time.monotonic(), Counter[str](), 0
            while died.total() < args.kills / len(args.jobs):
                died += chaos.trial(job, f"trial_{trials}", kills=5)
                trials += 1
            print(f"{job}: {died.total()} kills in {trials} runs, each ended as the untouched run")
            if not args.no_record:
                record(job, died, trials, args.seed, time.monotonic() - began)


def record(job: str, died: Counter[str], trials: int, seed: int, seconds: float) -> None:
    """Puts the counts of a job into docs/reliability/kills.json, in the place of earlier ones."""
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    document = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    document[job] = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"paddock": __version__, "torch": torch.__version__},
        "seed": seed,
        "minutes": round(seconds / 60, 1),
        "runs": trials,
        "kills": dict(sorted(died.items())),
    }
    RECORD.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
