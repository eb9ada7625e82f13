"""python -m paddock.commands.sft key=value ...: supervised training, the same as `paddock sft`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from paddock.commands.guard import guarded, helpful, start_log
from paddock.loading.load import Loaded


def run(arguments: list[str]) -> int:
    from paddock.commands.keys_of import SFT

    return train(SFT.load(arguments, chooses=True))


def train(loaded: Loaded) -> int:
    from paddock.commands.preflight import check, choose_threads

    check(loaded.config, alone=True)
    choose_threads(loaded.config)
    start_log(loaded.warnings)
    from paddock.commands.ending import conclude, setting
    from paddock.trainer.supervised import EXPORT, FINE_TUNING

    outcome = FINE_TUNING.train(loaded.config, loaded.origins)
    model = Path(loaded.config.trainer.default_local_dir) / EXPORT
    commands = [
        f"paddock generate {shlex.quote(str(model))} prompt=TEXT",
        f"paddock train {setting('actor_rollout_ref.model.path', str(model))} data.train_files=FILE",
    ]
    return conclude(outcome, loaded.config, model, commands)


def main() -> int:
    return guarded(helpful("sft", run), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
