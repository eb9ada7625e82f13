"""Train one experiment with one seed, evaluate the model before and after, and write both as JSON while it goes on.

    paddock data gsm8k --local_save_dir DATA
    python -m benchmarks.results grpo-0.5b --seed 1 --data DATA --out OUT [--model FOLDER] [--part train|start|evaluate]

The experiments are the files of benchmarks/results/experiments. Each part is the commands that a user would type:
`paddock train`, which validates greedily on the whole test set, and `paddock eval` with eight samples per prompt of the
model as it was (`start`) and as it became. OUT/NAME-SEED.json has the curves, OUT/start-MODEL-DATA.json the model as it
was, for all runs that start from it, OUT/runs/NAME-SEED logs, answers and checkpoint.
`--shared` notes that something else ran on the device, so that the seconds of this run mean little.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.learning_curves import ROOT, conditions
from benchmarks.results.experiment import Experiment, load, names
from benchmarks.results.records import HeldOut, accuracies, curves, samples_of, write

POLL = 2.0  # seconds
SHOWN = 4000  # characters of a log

Document = dict[str, Any]


class Run:
    """One experiment with one seed: its commands, its folder, and the document that grows."""

    prefix = ""
    """Beginning of the names of the document and the folder."""

    def __init__(self, experiment: Experiment, options: argparse.Namespace):
        self.experiment, self.seed, self.data = experiment, options.seed, options.data
        self.model = options.model or experiment.model
        self.more, self.shared = options.set, options.shared
        name = f"{self.prefix}{experiment.name}-{options.seed}"
        self.file, self.folder = options.out / f"{name}.json", options.out / "runs" / name
        self.start = options.out / f"start-{experiment.start}.json"
        self.folder.mkdir(parents=True, exist_ok=True)

    def train(self) -> None:
        """Rewrites the document whenever a step is done, so that a run that is cut off leaves its curve."""
        held_out, began, seen = HeldOut(self.folder / "validation"), time.monotonic(), -1
        with (self.folder / "train.log").open("w") as log:
            process = self.launch("train", self.train_arguments(self.model, self.data, self.folder), log)
            document = self.head("train", self.train_arguments(self.experiment.model, "DATA"))
            while True:
                running = process.poll() is None
                found = curves(self.folder / "metrics.jsonl")
                if len(found["step"]) != seen or not running:
                    seen = len(found["step"])
                    document["command_seconds"] = round(time.monotonic() - began, 1)
                    document |= {"curves": found, "held_out": held_out.read()}
                    document["finished"] = not running and process.returncode == 0 and seen == self.experiment.steps
                    write(document, self.file)
                if not running:
                    break
                time.sleep(POLL)
        self.require(process.returncode, self.folder / "train.log")

    def evaluate_start(self) -> None:
        """The model as it was is evaluated once for all runs that start from it with the same data."""
        if not self.start.is_file():
            write(self.sampled(self.model, "before", self.experiment.model), self.start)

    def evaluate(self) -> None:
        """Accuracy and pass@8 of samples, before and after."""
        self.evaluate_start()
        trained = f"global_step_{self.experiment.steps}/actor"
        after = self.sampled(f"{self.folder}/{trained}", "after", trained)
        document = json.loads(self.file.read_text())
        document["sampled"] = {"before": json.loads(self.start.read_text())["accuracy"], "after": after["accuracy"]}
        write(document, self.file)

    def sampled(self, model: str, when: str, name: str) -> Document:
        folder, began = self.folder / when, time.monotonic()
        keys = self.experiment.sampling()
        arguments = [f"model={model}", f"data={self.data}/test.parquet", *keys, f"trainer.seed={self.seed}"]
        extra = [*self.more, f"trainer.validation_data_dir={folder}"]
        with (self.folder / f"{when}.log").open("w") as log:
            code = self.launch("eval", [*arguments, *extra], log).wait()
        self.require(code, self.folder / f"{when}.log")
        samples = samples_of(folder / "0.jsonl")
        document = self.head("eval", [f"model={name}", "data=DATA/test.parquet", *keys, f"trainer.seed={self.seed}"])
        seconds, length = time.monotonic() - began, sum(sample.length for sample in samples) / len(samples)
        prompts = len({sample.group for sample in samples})
        return {**document, "prompts": prompts, "length": round(length, 1), "command_seconds": round(seconds, 1),
                "accuracy": accuracies(samples)}  # fmt: skip

    def head(self, command: str, arguments: list[str]) -> Document:
        """What the numbers belong to. The command has the names that a user with a hub would type."""
        source, programs = Path(self.model) / "weights.json", self.data / "programs.json"
        return {
            **{"experiment": self.experiment.name, "title": self.experiment.title, "seed": self.seed},
            **{"model": self.experiment.model, "steps": self.experiment.steps, "shared_device": self.shared},
            **({"warm_up": self.experiment.warm_up} if self.experiment.warm_up else {}),
            "weights": json.loads(source.read_text()) if source.is_file() else None,
            **({"programs": json.loads(programs.read_text())} if programs.is_file() else {}),
            **{**conditions(), "device": device(), "commit": commit()},
            "command": " ".join([f"paddock {command}", *arguments]),
        }

    def train_arguments(self, model: str, data: Path | str, folder: Path | None = None) -> list[str]:
        steps = self.experiment.steps
        own = [
            f"actor_rollout_ref.model.path={model}",
            *(f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"),
            *(f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}", f"trainer.seed={self.seed}"),
        ]
        places = [f"trainer.default_local_dir={folder}", f"trainer.validation_data_dir={folder}/validation",
                  "trainer.resume_mode=disable"] if folder else []  # fmt: skip
        return [*self.experiment.training(), *own, *self.more, *places]

    def launch(self, command: str, arguments: list[str], log: Any) -> subprocess.Popen[str]:
        return self.start_module("paddock.cli", [command, *arguments], log)

    def start_module(self, module: str, arguments: list[str], log: Any) -> subprocess.Popen[str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.Popen(
            [sys.executable, "-u", "-m", module, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def require(self, code: int, log: Path) -> None:
        if code:
            raise SystemExit(f"{log} ended with exit code {code}:\n{log.read_text()[-SHOWN:]}")


def device() -> str:
    """The accelerator's name as its driver tells it: this process takes no memory of it."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True) if shutil.which(query[0]) else None
    return found.stdout.splitlines()[0].strip() if found and found.returncode == 0 else "cpu"


def commit() -> str | None:
    """Of the checkout; unknown where it is a bare copy of files, unless PADDOCK_COMMIT says it."""
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return os.environ.get("PADDOCK_COMMIT") or (done.stdout.strip() if done.returncode == 0 else None)


def arguments(description: str, program: str, parts: tuple[str, ...]) -> argparse.ArgumentParser:
    """Returns a parser of what names a run of an experiment; `parts` can be asked for alone."""
    parser = argparse.ArgumentParser(description=description, prog=program)
    parser.add_argument("experiment", choices=names())
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="local folder of the model's weights; default: its name on the hub")
    parser.add_argument("--part", choices=parts, help="default: all, one after the other")
    parser.add_argument("--steps", type=int, help="instead of the experiment's own number")
    parser.add_argument("--shared", action="store_true", help="note that other work shares the device")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further keys of both commands")
    return parser


def main() -> int:
    parts = ("train", "start", "evaluate")
    options = arguments(__doc__.splitlines()[0], "python -m benchmarks.results", parts).parse_args()
    experiment = load(options.experiment)
    run = Run(replace(experiment, steps=options.steps or experiment.steps), options)
    if options.part in (None, "train"):
        run.train()
    if options.part == "start":
        run.evaluate_start()
    if options.part in (None, "evaluate"):
        run.evaluate()
    print(run.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
