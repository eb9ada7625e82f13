"""python -m paddock.commands.sft key=value ...: supervised training, the same as `paddock sft`."""

from __future__ import annotations

import shlex
import sys

from paddock.cli import main
from paddock.loading.load import Loaded


def run(arguments: list[str]) -> int:
    from paddock.commands.keys_of import SFT

    return train(SFT.load(arguments, chooses=True))


def train(loaded: Loaded) -> int:
    from paddock.commands.preflight import begin

    begin(loaded, alone=True)
    from paddock.commands.ending import setting, supervised
    from paddock.trainer.supervised import FINE_TUNING

    return supervised(
        FINE_TUNING,
        loaded,
        lambda model: [
            f"paddock generate {shlex.quote(model)} prompt=TEXT",
            f"paddock train {setting('actor_rollout_ref.model.path', model)} data.train_files=FILE",
        ],
    )


if __name__ == "__main__":
    sys.exit(main(["sft", *sys.argv[1:]]))
