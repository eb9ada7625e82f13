"""`paddock eval`: accuracy, pass@k and maj@k of a model on data files, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.cli import main
from paddock.commands.preflight import announce, check_paths, require_prompts, require_writable_file
from paddock.errors import UserError
from paddock.loading import rules

if TYPE_CHECKING:
    from paddock.commands.evaluation import Evaluation

STATISTICS = ("mean", "pass", "maj", "best")
"""Statistics in the table; JSON has all."""
FLAG = "--json"


def run(arguments: list[str]) -> int:
    """Evaluates a model. `--json` prints JSON in place of the table; `--json=FILE` writes it beside the table."""
    from paddock.commands.keys_of import EVAL
    from paddock.commands.run_model import with_run

    flags = [argument for argument in arguments if argument.partition("=")[0] == FLAG]
    loaded = EVAL.load(with_run(EVAL, [argument for argument in arguments if argument not in flags]))
    _, equals, file = flags[-1].partition("=") if flags else ("", "", "")
    if equals and not file:
        raise UserError("needs a file name, or no =", key=FLAG, fix=f"{FLAG}=accuracy.json")
    announce(loaded)
    rules.require(loaded.config, rules.Scope.SCORING)
    check_paths(loaded.config, ("val",), ("trainer.validation_data_dir",))
    require_prompts(loaded.config, ("val",))
    if file:
        require_writable_file(FLAG, Path(file).expanduser(), loaded.config)
    from paddock.commands.evaluation import evaluate
    from paddock.core.files import replacing
    from paddock.trainer.assembly import Assembly

    with ExitStack() as things:
        evaluation = evaluate(Assembly(loaded.config, things))
    document = json.dumps(asdict(evaluation), indent=2)
    if file:
        with replacing(Path(file).expanduser(), FLAG) as stream:
            stream.write(document.encode() + b"\n")
    if flags and not file:
        print(document)
    else:
        show(evaluation)
    return 0


def show(evaluation: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    screen = Console(highlight=False)
    table = Table("", *evaluation.sources)
    table.add_row("prompts", *(f"{source['prompts']:,}" for source in evaluation.sources.values()))
    for name in shown({name for source in evaluation.sources.values() for name in source["metrics"]}):
        cells = (cell(source["metrics"], name) for source in evaluation.sources.values())
        table.add_row(name.removesuffix("/mean"), *cells)
    model = f"{evaluation.model} with {evaluation.adapter}" if evaluation.adapter else evaluation.model
    screen.print(f"{model} on {', '.join(evaluation.files)}", markup=False, soft_wrap=True)
    screen.print(table)
    left_out = f"; {evaluation.left_out:,} prompts that are too long were left out" if evaluation.left_out else ""
    screen.print(f"{evaluation.mean_length:.1f} tokens an answer, {evaluation.seconds:.1f} s{left_out}")


def shown(names: set[str]) -> list[str]:
    """Returns the metrics of the table, in order. Scores of 0 and 1 have pass@k, which is their exact best@k, and a
    mean that is their pass@1."""
    hidden = {"best"} if "pass@1" in names else set()
    chosen = []
    for name in names - {"pass@1"}:
        statistic, _, size = name.removesuffix("/mean").partition("@")
        if statistic in STATISTICS and statistic not in hidden and size.isdigit():
            chosen.append((STATISTICS.index(statistic), int(size), name))
    return [name for _, _, name in sorted(chosen)]


def cell(metrics: dict[str, float], name: str) -> str:
    """Returns the text of a cell: a percentage if every score was 0 or 1, so that there is a pass@1."""
    if name not in metrics:
        return ""
    return f"{100 * metrics[name]:.1f}%" if "pass@1" in metrics else f"{metrics[name]:.4g}"


if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
