"""python -m paddock.commands.rm key=value ...: a reward model from preference pairs, as `paddock rm train`."""

from __future__ import annotations

import sys

from paddock.cli import main
from paddock.errors import UserError


def run(arguments: list[str]) -> int:
    if arguments[:1] != ["train"]:
        given = arguments[0] if arguments else None
        reason = "needs a subcommand, and `train` is the only one"
        raise UserError(reason, key="paddock rm", value=given, fix="paddock rm train")
    return train(arguments[1:])


def train(arguments: list[str]) -> int:
    from paddock.commands.keys_of import RM
    from paddock.commands.preflight import begin

    loaded = RM.load(arguments, chooses=True)
    begin(loaded, alone=True)
    from paddock.commands.ending import setting, supervised
    from paddock.trainer.supervised import REWARD_MODELLING

    use = "paddock train reward_model.enable=True"
    return supervised(REWARD_MODELLING, loaded, lambda model: [f"{use} {setting('reward_model.model.path', model)}"])


if __name__ == "__main__":
    sys.exit(main(["rm", "train", *sys.argv[1:]]))
