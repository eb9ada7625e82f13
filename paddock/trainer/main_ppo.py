"""python -m paddock.trainer.main_ppo key=value ...: the door that launch scripts use, the same as `paddock train`."""

from __future__ import annotations

import logging
import os
import sys

from paddock.door import PLAN_ONLY, guarded


def run(arguments: list[str]) -> int:
    """Everything that can be refused is refused before torch is imported."""
    from paddock.config.load import load
    from paddock.plan import report
    from paddock.preflight import check

    if os.environ.get(PLAN_ONLY):
        return report.run(arguments, strict=False)  # a script's data may be on another machine
    loaded = load(arguments)
    check(loaded.config)
    logging.basicConfig(level=logging.INFO, format="paddock: %(message)s", stream=sys.stderr)
    for name in ("httpx", "transformers", "datasets"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for warning in loaded.warnings:
        logging.getLogger(__name__).warning(warning)

    from paddock.ending import after_training, conclude
    from paddock.trainer.launch import Launch
    from paddock.trainer.run import train

    outcome = train(loaded.config, Launch("train", loaded.origins))
    return conclude(outcome, loaded.config, *after_training(outcome, loaded.config))


def main() -> int:
    return guarded(run, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
