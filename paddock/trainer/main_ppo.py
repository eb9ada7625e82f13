"""python -m paddock.trainer.main_ppo key=value ...: the door that launch scripts use, the same as `paddock train`."""

from __future__ import annotations

import logging
import os
import sys

from paddock.door import INTERRUPTED, PLAN_ONLY, guarded


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

    from paddock.trainer.run import train

    folder = loaded.config.trainer.default_local_dir
    if train(loaded.config):
        print(f"Done. Metrics and checkpoints: {folder}")
        return 0
    print(f"Stopped, with a checkpoint in {folder}. The same command goes on from there.")
    return INTERRUPTED


def main() -> int:
    return guarded(run, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
