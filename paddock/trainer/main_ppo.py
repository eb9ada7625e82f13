"""python -m paddock.trainer.main_ppo key=value ...: the door that launch scripts use, the same as `paddock train`."""

from __future__ import annotations

import os
import sys

from paddock.cli import guarded

PLAN_ONLY = "PADDOCK_PLAN"  # set by `paddock run --plan`: the script's command plans instead of training


def run(arguments: list[str]) -> int:
    from paddock.config.load import load
    from paddock.plan import report
    from paddock.preflight import check

    if os.environ.get(PLAN_ONLY):
        return report.run(arguments)
    loaded = load(arguments)
    check(loaded.config)
    report.show(report.make(loaded))
    print("\nThis version plans; it does not train yet.")
    return 0


def main() -> int:
    return guarded(run, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
