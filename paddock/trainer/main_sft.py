"""python -m paddock.trainer.main_sft key=value ...: supervised training, the same as `paddock sft`."""

from __future__ import annotations

import logging
import sys

from paddock.door import INTERRUPTED, guarded


def run(arguments: list[str]) -> int:
    from paddock.preflight import check
    from paddock.trainer.commands import SFT

    loaded = SFT.load(arguments)
    check(loaded.config)
    logging.basicConfig(format="paddock: %(message)s", stream=sys.stderr)
    logging.getLogger("paddock").setLevel(logging.INFO)
    for warning in loaded.warnings:
        print(f"paddock: {warning}", file=sys.stderr)
    from paddock.trainer.sft import fine_tune

    folder = fine_tune(loaded.config)
    if folder is None:
        place = loaded.config.trainer.default_local_dir
        print(f"Stopped, with a checkpoint in {place}. The same command goes on from there.")
        return INTERRUPTED
    print(f"The model is in {folder}. Next: paddock train actor_rollout_ref.model.path={folder}")
    return 0


def main() -> int:
    return guarded(run, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
