"""Train one experiment with TRL from the same start as Paddock, and write its curves as JSON while it goes on.

    python -m benchmarks.results grpo-0.5b --seed 1 --part train --data DATA --out OUT --model FOLDER
    python -m benchmarks.results.against_trl grpo-0.5b --seed 1 --data DATA --out OUT --model FOLDER --seconds 420
    python -m benchmarks.results.comparison --curves OUT --out OUT

The second command needs TRL. Weights, prompts and their order, answers per step, lengths, sampling, reward, loss and
optimizer settings are those of the experiment; trl_training.py says what cannot be the same. Training ends after the
step that passes --seconds. OUT/trl-NAME-SEED.json is a document as OUT/NAME-SEED.json is for Paddock, with one greedy
evaluation by `paddock eval` at the end.

TRL's default are fp32 weights with bf16 autocast, and so they are here. `--weights bfloat16` is faster per step, but
loses updates: in bf16, 94 % of the weights of Qwen2.5-Coder-0.5B-Instruct are more than 6e-6 from the next, and
AdamW's updates are hardly larger than the learning rate, 3e-6 in grpo-0.5b.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from benchmarks.results.__main__ import Document, Run, arguments
from benchmarks.results.experiment import Experiment, load
from benchmarks.results.records import HeldOut, write

SAMPLING = ("rollout.val_kwargs.", "data.max_response_length")
"""Keys of evaluation that greedy answers of the length of training do without."""
MODEL = "model"
"""Folder of the trained model, below that of the run."""


class TrlRun(Run):
    """One experiment with one seed, trained by TRL and evaluated by Paddock."""

    prefix = "trl-"

    def __init__(self, experiment: Experiment, options: argparse.Namespace):
        super().__init__(experiment, options)
        self.limits = [f"--seconds={options.seconds:g}", f"--micro-batch={options.micro_batch}",
                       f"--weights={options.weights}"]  # fmt: skip

    def train(self) -> None:
        (self.folder / "metrics.jsonl").unlink(missing_ok=True)
        super().train()

    def launch(self, command: str, arguments: list[str], log: Any) -> subprocess.Popen[str]:
        if command == "train":
            return self.start_module("benchmarks.results.trl_training", [*self.limits, *arguments], log)
        return super().launch(command, arguments, log)

    def head(self, command: str, arguments: list[str]) -> Document:
        """`trainer` tells the document from one of Paddock's."""
        document = super().head(command, arguments)
        own = [self.experiment.name, f"--seed={self.seed}", f"--steps={self.experiment.steps}", *self.limits]
        words = ["python -m benchmarks.results.against_trl", *own, *(["--set", *self.more] if self.more else [])]
        return {**document, "trainer": f"TRL {version('trl')}", "command": " ".join(words)}

    def evaluate(self) -> None:
        """Answers the test set greedily, as Paddock's own validation does, after the last step that was made."""
        document = json.loads(self.file.read_text())
        step, folder = document["curves"]["step"][-1], self.folder / "after"
        greedy = {key: value for key, value in self.experiment.evaluation.items() if not key.startswith(SAMPLING)}
        keys = replace(self.experiment, evaluation=greedy).sampling()
        arguments = [f"model={self.folder / MODEL}", f"data={self.data}/test.parquet", *keys, *self.more]
        with (self.folder / "after.log").open("w") as log:
            code = self.launch("eval", [*arguments, f"trainer.validation_data_dir={folder}"], log).wait()
        self.require(code, self.folder / "after.log")
        document["held_out"] = {**HeldOut(folder).read(), "step": [step]}
        write(document, self.file)


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], "python -m benchmarks.results.against_trl", ("train", "evaluate"))
    parser.add_argument(
        "--seconds", type=float, required=True, help="of training: it ends after the step that passes them"
    )
    parser.add_argument("--micro-batch", type=int, default=64, help="answers that go forward and backward at a time")
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    experiment = load(options.experiment)
    run = TrlRun(replace(experiment, steps=options.steps or experiment.steps), options)
    if options.part in (None, "train"):
        run.train()
    if options.part in (None, "evaluate"):
        run.evaluate()
    print(run.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
