"""`paddock template`: how a model's chat template writes several turns, and whether a run of them can use it."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddock.core.options import Options
from paddock.errors import EXIT_CODE

MODEL = "MODEL"


def run(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 if a run of several turns can use the template, else 2."""
    parser = Options(prog="paddock template")
    parser.add_argument("model", metavar=MODEL, help="a folder, or a name of the hub")
    parser.add_argument("--format", metavar="NAME", help="format of tool calls (default: as the template shows it)")
    options = parser.parse_args(list(argv))
    from paddock.data.chat import PromptEncoder
    from paddock.data.dialogue import Dialogue
    from paddock.data.proof import prove, untrained_marks
    from paddock.environments.calls import format_of
    from paddock.models.load import load_tokenizer, model_folder
    from paddock.models.untrained import untrained

    tokenizer, folder = load_tokenizer(options.model, key=MODEL), model_folder(options.model, MODEL)
    stops = end_tokens(folder) | {tokenizer.eos_token_id}
    dialogue = Dialogue(PromptEncoder(tokenizer), frozenset(stops))
    proof = prove(dialogue, format_of(options.format, dialogue.template))
    if unknown := untrained(folder, proof.marks):
        proof.notes.append(untrained_marks(tokenizer.convert_ids_to_tokens(unknown)))
    print(table([*proof.rows, *(("note", note) for note in proof.notes)]))
    for problem in proof.problems:
        print(f"refused: {problem}")
    if not proof.problems:
        print("A run of several turns can use this template: tokens that were drawn are never written anew.")
    return EXIT_CODE if proof.problems else 0


def end_tokens(folder: Path) -> set[int]:
    """Returns the tokens at which the model stops, by its own files."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            named: Any = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            if named is not None:
                return set(named if isinstance(named, list) else [named])
    return set()


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Returns rows of two columns as text; long rows are wrapped."""
    left = max(len(what) for what, _ in rows) + 2 if rows else 0
    width = max(60, min(160, shutil.get_terminal_size((120, 24)).columns))
    lines = []
    for what, found in rows:
        first, *rest = textwrap.wrap(found, width - left, break_long_words=True) or [""]
        lines += [f"{what:<{left}}{first}", *(" " * left + line for line in rest)]
    return "\n".join(lines)
