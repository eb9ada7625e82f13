"""Loads every public launch command of a folder of checkouts by its keys, and prints what became of each.

    python tools/verl_commands.py FOLDER                    # each folder in FOLDER is a checkout of verl, or of a fork
    python tools/verl_commands.py FOLDER --out table.md

A launch command starts a module of verl's, of a recipe's or of a fork's that trains by reinforcement, in a shell
script. Nothing of a checkout runs: variables and arithmetic of the script are filled in by their text, and an override
whose value is not known by it counts by its key alone. Each command is loaded for eight GPUs:

    accepted   every key is taken, or ignored with the reason
    named      refused by a reason that names what is lacking: a feature, a rule between keys, a trainer of its own
    otherwise  some key is unknown; the table counts these keys
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from paddock.config.recipes import CONFIG_NAMES  # noqa: E402
from paddock.errors import UserError  # noqa: E402
from paddock.facts.machine import GIB, Machine  # noqa: E402
from paddock.loading.load import NO_SUCH_KEY, known, load  # noqa: E402
from paddock.loading.overrides import parse  # noqa: E402
from paddock.verl.scripts.launcher import as_module, is_ours  # noqa: E402

EIGHT_GPUS = Machine("cuda", 8, 80 * GIB, 1024 * GIB, 96, frozenset({"vllm", "sglang", "ray", "megatron", "wandb"}))
STAND_INS = {
    "trainer.n_gpus_per_node": "8", "trainer.nnodes": "1", "reward_model.model.path": "/data/reward-model",
    "data.train_files": "/data/train.parquet", "data.val_files": "/data/test.parquet",
    "data.train_batch_size": "1024", "actor_rollout_ref.actor.ppo_mini_batch_size": "256",
    "actor_rollout_ref.rollout.n": "8", "algorithm.adv_estimator": "grpo",
}  # fmt: skip
"""Values of keys that a rule needs, if the script's text does not tell them."""
SCRIPTS = ("*.sh", "*.slurm", "*.sbatch", "*.bash")
TRAINER = re.compile(r"(?:-m\s+((?:\w+\.)*\w*main\w*)|python3?\s[^|;]*?\b(main_ppo\w*\.py))\s")
NOT_TRAINERS = re.compile(r"generation|generate|main_eval|\bcompute_score|data_process|model_merger|lcb_runner")
ASSIGNED = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(\(.*\)|\"[^\"]*\"|'[^']*'|[^\s;&|]*)")
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(\[@\])?(?::[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
ARITHMETIC = re.compile(r"\$\(\(([\w\s+*/()%-]+)\)\)")
UNTOLD = re.compile(r"[$`<]|TO_BE_FILLED")
END = re.compile(r"\s(?:\d?>|&>|\||;|&&|&\s*$)")
"""What ends the words of a command: a pipe, a redirection, another command."""


@dataclass
class Command:
    """One launch command: where it stands, the module that it starts, its overrides."""

    checkout: str
    script: str
    module: str
    known: list[str]
    by_key: list[str]
    """Keys whose values the script's text does not tell."""
    kind: str = ""
    why: str = ""
    unknown: tuple[str, ...] = ()


def logical_lines(text: str) -> Iterator[str]:
    """Yields the script's lines with continuations and arrays of several lines joined, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    held = ""
    for line in lines:
        held += re.sub(r"\s#\s.*$", "", line)
        if held.rstrip().endswith("\\") and not held.endswith("\\\\"):
            held = held.rstrip()[:-1] + " "
        elif re.match(r"\s*\w+\+?=\(", held) and held.count("(") > held.count(")"):
            held += " "
        else:
            yield held.strip()
            held = ""
    if held:
        yield held.strip()


def filled(text: str, variables: dict[str, str]) -> str:
    """Returns the text with the variables and the arithmetic that are known by now."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[4]
        return variables.get(name, found[3] if found[3] is not None else found[0])

    for _ in range(4):
        text = VARIABLE.sub(value, text)
        text = ARITHMETIC.sub(lambda found: computed(found, variables), text)
    return text


def computed(found: re.Match[str], variables: dict[str, str]) -> str:
    inside = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), found[1])
    if not re.fullmatch(r"[\d\s+*/()%-]+", inside) or "**" in inside:
        return found[0]
    try:
        return str(int(eval(inside.replace("/", "//"), {"__builtins__": {}})))  # digits and signs alone
    except (SyntaxError, ZeroDivisionError):
        return found[0]


def commands(script: Path, checkout: Path) -> Iterator[Command]:
    variables: dict[str, str] = {}
    for line in logical_lines(script.read_text(errors="replace")):
        if found := TRAINER.search(f"{line} "):
            module = found[1] or found[2]
            if not NOT_TRAINERS.search(module):
                yield command_of(line[found.end() :], module, variables, script, checkout)
            continue
        for name, more, value in ASSIGNED.findall(line) if ASSIGNED.match(line) else []:
            bare = value[1:-1] if value[:1] in ("(", '"', "'") else value
            variables[name] = f"{variables.get(name, '')} {bare}" if more else filled(bare, variables)


def command_of(rest: str, module: str, variables: dict[str, str], script: Path, checkout: Path) -> Command:
    text = filled(END.split(f"{rest} ")[0], variables)
    try:
        words = shlex.split(text)
    except ValueError:  # a quote that the next line closes
        words = text.split()
    settings = [word for word in words if re.match(r"[+~]*[A-Za-z_][\w./@:-]*=", word)]
    told = [word for word in settings if not UNTOLD.search(word) and readable(word)]
    hidden = [word.partition("=")[0].lstrip("+~") for word in settings if word not in told]
    place = script.relative_to(checkout.parent)
    return Command(checkout.name, str(place), module, [*config_file(text, checkout), *told], hidden)


def readable(word: str) -> bool:
    try:
        parse([word])
        return True
    except UserError:
        return False


def config_file(text: str, checkout: Path) -> list[str]:
    """Returns the flags of a config file that the checkout has, or of one that every verl has."""
    if not (named := re.search(r"--config-name[= ]'?\"?([\w-]+)", text)):
        return []
    file = next(checkout.rglob(f"{named[1]}.yaml"), None)
    return [
        *([f"--config-path={file.parent}"] if file and named[1] not in CONFIG_NAMES else []),
        f"--config-name={named[1]}",
    ]


def judge(command: Command) -> None:
    """Says what Paddock makes of the command: by its keys first, for their count, then as a whole."""
    started = [command.module] if command.module.endswith(".py") else ["-m", command.module]
    try:
        if not is_ours(as_module(started)):
            raise UserError("is a trainer of the checkout's own", key=f"python3 {' '.join(started)}")
        line = parse(command.known)
        errors = known([*line.settings, *parse([f"{key}=null" for key in command.by_key]).settings])[2]
        command.unknown = tuple(str(error.key) for error in errors if error.reason.startswith(NO_SUCH_KEY))
        if command.unknown:
            command.kind, command.why = "otherwise", ", ".join(command.unknown)
            return
        load(
            [*command.known, *(f"{key}={STAND_INS[key]}" for key in command.by_key if key in STAND_INS)],
            EIGHT_GPUS,
            here=False,
        )
        command.kind = "accepted"
    except UserError as error:
        command.kind, command.why = "named", " ".join(str(error).split("\n  fix: ")[0].split())


def found_in(folder: Path) -> Iterator[Command]:
    for checkout in sorted(path for path in folder.iterdir() if path.is_dir()):
        for script in sorted({path for pattern in SCRIPTS for path in checkout.rglob(pattern)}):
            yield from commands(script, checkout)


def summary(rows: list[Command]) -> list[str]:
    """Returns the totals, a line for each checkout, and the unknown keys by the number of commands they stop."""
    lines = [f"{'checkout':40} commands accepted    named otherwise"]
    for name in [*dict.fromkeys(row.checkout for row in rows), "all"]:
        kinds = Counter(row.kind for row in rows if name in ("all", row.checkout))
        lines.append(f"{name:40} {kinds.total():8} {kinds['accepted']:8} {kinds['named']:8} {kinds['otherwise']:9}")
    keys = Counter(key for row in rows for key in dict.fromkeys(row.unknown))
    return [*lines, "", "unknown keys, by commands:", *(f"{count:5} {key}" for key, count in keys.most_common())]


def markdown(rows: list[Command]) -> str:
    cells = [(row.script, row.module, row.kind, row.why) for row in rows]
    table = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]
    return "\n".join([*summary(rows), "", "| script | module | outcome | why |", "|---|---|---|---|", *table, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="table.md: a row for each command")
    arguments = parser.parse_args()
    rows = list(found_in(arguments.folder.resolve()))
    for row in rows:
        judge(row)
    print("\n".join(summary(rows)))
    if arguments.out:
        arguments.out.write_text(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
