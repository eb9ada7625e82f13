"""python -m paddock.commands.generate key=value ...: a model answers rows or a prompt: `paddock generate`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from paddock.cli import main
from paddock.commands.preflight import announce, check_paths, require_writable_file
from paddock.errors import UserError
from paddock.loading.load import Loaded

OUTPUT_NAMES = ("output", "data.output_path")
FORMATS = (".jsonl", ".parquet")
PROMPT = "prompt"


def run(arguments: list[str]) -> int:
    from paddock.commands.keys_of import GENERATE
    from paddock.commands.run_model import with_run

    asked = [argument for argument in arguments if argument.partition("=")[:2] == (PROMPT, "=")]
    if asked:
        return answer(asked, [argument for argument in arguments if argument not in asked])
    output, rest = named_output(arguments)
    return write(GENERATE.load(with_run(GENERATE, rest)), output)


def named_output(arguments: list[str]) -> tuple[Path, list[str]]:
    """Returns the file to write, and the other arguments."""
    from paddock.config.paths import expand

    given = [argument for argument in arguments if argument.lstrip("+").partition("=")[0] in OUTPUT_NAMES]
    output = Path(expand(given[-1].partition("=")[2]) if given else "")
    if output.suffix not in FORMATS:
        reason = f"is not a {' or '.join(FORMATS)} file" if given else "no file to write is named"
        fix = "output=answers.jsonl" if given else 'output=answers.jsonl, or one prompt on the console: prompt="TEXT"'
        raise UserError(reason, key="output", value=output if given else None, fix=fix)
    return output, [argument for argument in arguments if argument not in given]


def write(loaded: Loaded, output: Path) -> int:
    """Writes the answers to the prompts of data.val_files."""
    announce(loaded)
    check_paths(loaded.config, ("val",), ())
    require_writable_file("output", output, loaded.config)
    from paddock.commands.generation import generate
    from paddock.trainer.assembly import Assembly

    with ExitStack() as things:
        summary = generate(Assembly(loaded.config, things), output)
    print(f"{output}: {summary}")
    return 0


def answer(asked: list[str], arguments: list[str]) -> int:
    """Prints the answers to one prompt, and how long they took on stderr."""
    from paddock.commands.keys_of import GENERATE
    from paddock.commands.run_model import with_run

    text = asked[-1].partition("=")[2]
    if not text.strip():
        raise UserError("is empty; is a shell variable unset?", key=PROMPT, value="''", fix='prompt="What is 2+2?"')
    overrides = with_run(GENERATE, arguments)
    beside = {GENERATE.translate(argument).lstrip("+").partition("=")[0] for argument in overrides}
    for other in (*OUTPUT_NAMES, "data.val_files"):
        if other in beside:
            reason = f"is answered on the console, and {other} asks for a file"
            raise UserError(reason, key=PROMPT, value=text, fix=f"leave out one of {PROMPT} and {other}")
    loaded = GENERATE.load([*overrides, "data.val_files=null"])
    loaded.warnings = [warning for warning in loaded.warnings if not warning.startswith("data.val_files")]
    announce(loaded)
    check_paths(loaded.config, (), ())
    from paddock.commands.generation import answer as answers_to
    from paddock.trainer.assembly import Assembly

    with ExitStack() as things:
        found, summary = answers_to(Assembly(loaded.config, things), text)
    for index, response in enumerate(found):
        print(response if len(found) == 1 else f"[{index + 1}] {response}")
    print(f"paddock: {summary}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
