"""python -m paddock.commands.rm key=value ...: a reward model from preference pairs, as `paddock rm train`."""

from __future__ import annotations

import sys
from pathlib import Path

from paddock.commands.guard import guarded, helpful, start_log
from paddock.errors import UserError


def run(arguments: list[str]) -> int:
    if arguments[:1] != ["train"]:
        given = arguments[0] if arguments else None
        reason = "needs a subcommand, and `train` is the only one"
        raise UserError(reason, key="paddock rm", value=given, fix="paddock rm train")
    return train(arguments[1:])


def train(arguments: list[str]) -> int:
    from paddock.commands.keys_of import RM
    from paddock.commands.preflight import check, choose_threads

    loaded = RM.load(arguments, chooses=True)
    check(loaded.config, alone=True)
    choose_threads(loaded.config)
    start_log(loaded.warnings)
    from paddock.commands.ending import conclude, setting
    from paddock.trainer.supervised import EXPORT, REWARD_MODELLING

    outcome = REWARD_MODELLING.train(loaded.config, loaded.origins)
    model = Path(loaded.config.trainer.default_local_dir) / EXPORT
    use = f"paddock train reward_model.enable=True {setting('reward_model.model.path', str(model))}"
    return conclude(outcome, loaded.config, model, [use])


def main() -> int:
    return guarded(helpful("rm", train), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
