"""python -m paddock.trainer.main_rm key=value ...: a reward model from preference pairs, as `paddock rm train`."""

from __future__ import annotations

import logging
import sys

from paddock.door import INTERRUPTED, guarded


def run(arguments: list[str]) -> int:
    from paddock.preflight import check
    from paddock.trainer.commands import RM

    loaded = RM.load(arguments)
    check(loaded.config)
    logging.basicConfig(format="paddock: %(message)s", stream=sys.stderr)
    logging.getLogger("paddock").setLevel(logging.INFO)
    for warning in loaded.warnings:
        print(f"paddock: {warning}", file=sys.stderr)
    from paddock.trainer.rm import train_reward_model

    folder = train_reward_model(loaded.config)
    if folder is None:
        place = loaded.config.trainer.default_local_dir
        print(f"Stopped, with a checkpoint in {place}. The same command goes on from there.")
        return INTERRUPTED
    print(f"The reward model is in {folder}.")
    print(f"Next: paddock train reward_model.enable=True reward_model.model.path={folder}")
    return 0


def main() -> int:
    return guarded(run, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
