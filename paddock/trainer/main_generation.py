"""python -m paddock.trainer.main_generation key=value ...: a model answers a file, as `paddock generate`."""

from __future__ import annotations

import sys
from pathlib import Path

from paddock.door import guarded
from paddock.errors import UserError
from paddock.preflight import check_paths, choose_threads, require_writable_file

OUTPUT_NAMES = ("output", "data.output_path")
FORMATS = (".jsonl", ".parquet")


def run(arguments: list[str]) -> int:
    from paddock.config.paths import expand
    from paddock.trainer.commands import GENERATE

    given = [argument for argument in arguments if argument.lstrip("+").partition("=")[0] in OUTPUT_NAMES]
    output = Path(expand(given[-1].partition("=")[2]) if given else "")
    if output.suffix not in FORMATS:
        reason = f"is not a {' or '.join(FORMATS)} file" if given else "no file to write is named"
        raise UserError(reason, key="output", value=output if given else None, fix="output=answers.jsonl")
    loaded = GENERATE.load([argument for argument in arguments if argument not in given])
    for warning in loaded.warnings:
        print(f"paddock: {warning}", file=sys.stderr)
    choose_threads(loaded.config)
    check_paths(loaded.config, ("val",), ())
    require_writable_file("output", output)
    from paddock.trainer.generation import generate

    print(f"{output}: {generate(loaded.config, output)}")
    return 0


def main() -> int:
    return guarded(run, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
