"""python -m paddock.trainer.main_ppo key=value ...: `paddock train` for launch scripts, with verl's defaults."""

from __future__ import annotations

import os
import sys

from paddock import cli
from paddock.commands.guard import PLAN_ONLY, guarded


def run(arguments: list[str], wide: bool = False) -> int:
    """Refuses what can be refused before torch is imported; then trains.

    `wide`: a launch script written for verl has started it, and counts on verl's defaults. In a file or a pipe each
    step is also one long line with every metric, as readers of such logs expect (the logger `steps`).
    """
    from paddock.commands.preflight import begin
    from paddock.loading.load import load
    from paddock.plan import report

    if os.environ.get(PLAN_ONLY):
        return report.run(arguments, strict=False, chooses=not wide)  # a script's data may be on another machine
    loaded = load(arguments, chooses=not wide)
    if wide and "console" in loaded.config.trainer.logger and not sys.stdout.isatty():
        loaded.config.trainer.logger = list(dict.fromkeys([*loaded.config.trainer.logger, "steps"]))
    begin(loaded)
    from paddock.commands.ending import after_training, conclude
    from paddock.config import tree
    from paddock.trainer.reinforcement import REINFORCEMENT

    outcome = REINFORCEMENT.train(loaded.config, loaded.origins)
    after = after_training(outcome, tree.settings(loaded.config))
    return conclude(outcome, loaded.config.trainer, *after)


def main() -> int:
    arguments = sys.argv[1:]
    if {"-h", "--help"} & {*arguments}:
        return cli.main(["train", *arguments])
    return guarded(lambda arguments: run(arguments, wide=True), arguments)


if __name__ == "__main__":
    sys.exit(main())
