"""Stands before the programs that launch scripts call: `python3`, `torchrun`, `srun`, `ray` and the like.

A command of Paddock's, however it is launched, starts once, by this Python and with Paddock's `verl`: its ranks are its
own to start. Any other command is the program's own; while planning it is named and passed over.

Each stand-in is a file of the program's name that calls `main`. It runs without site-packages: standard library only.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from paddock.commands.guard import PLAN_ONLY, note
from paddock.errors import EXIT_CODE, UserError
from paddock.facts.compat import CHECKOUT, DEVICE_PROGRAMS, python_path, shims

FOLDER = "PADDOCK_RUN_FOLDER"  # the folder of one `paddock run`: stand-ins, and notes of what has happened
OVERRIDES = "PADDOCK_RUN_SET"  # overrides of `paddock run --set`, as a JSON list
PREFIX, PROGRAMS, SAID, OTHERS = "paddock-run-", "programs", "said", "others"


PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(9, 16)))
FLAGS = re.compile(r"-[uOBqvds]+|-[WX].*")
RANKS = ("torchrun", "accelerate", "deepspeed")
LAUNCHERS = (*PYTHONS, *RANKS, "uv", "srun", "ray")
"""Programs that start another command, which may be Paddock's: it is started here, in real runs as well."""
LAUNCHERS_ELSEWHERE = ("sbatch", "apptainer", "singularity", "docker", "podman", "ssh", "mpirun", "nsys", "numactl")
"""Programs that start another command where no stand-in is: they are passed over while planning, as the next ones."""
PASSED_OVER = (
    *("pip", "pip3", "conda", "mamba", "git", "apt", "apt-get", "sudo", "make", "rsync", "scp", "rm", "pkill"),
    *("hf", "huggingface-cli", "modelscope", "wget", "curl", "aws", "gsutil", "hdfs", "wandb", "killall", "paddock"),
)
ANSWERS = {
    **dict.fromkeys(DEVICE_PROGRAMS, "".join(f"GPU {n}: assumed while planning\n" for n in range(8))),
    "scontrol": "localhost\n",
}
"""What programs print while planning, for scripts that count on it."""
PLANNED = (*LAUNCHERS, *LAUNCHERS_ELSEWHERE, *PASSED_OVER, *ANSWERS)
"""Programs with a stand-in while planning. Any other is the script's own affair, also then: mkdir, tee, date."""

PER_NODE = re.compile(r"--(?:nproc[-_]per[-_]node|num_gpus)[= ](\d+)")
IN_ALL = re.compile(r"--num_processes[= ](\d+)")
NODES = re.compile(r"--(?:nnodes|num_nodes|num_machines)[= ](\d+)(?![\d:])")
"""Options of launchers that say how many processes there are."""

STARTS = re.compile(r"\b(ray|subprocess|system|popen|download|snapshot_download|from_pretrained|load_dataset)\b")
"""What a `python -c` names that is more than a question."""

AHEAD = "engines in a pool of their own do not run ahead yet; main_ppo with algorithm.staleness=1 does on the trainer's"
NOT_BUILT = {
    "verl.experimental.fully_async_policy": AHEAD,
    "verl.experimental.one_step_off_policy": AHEAD,
    "verl_mlite": "Megatron Lite is not a training engine here",
}
"""Modules that Paddock has no counterpart for, with the reason."""

RECIPES = ("recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo", "recipe.entropy.main_entropy")
"""Trainers of recipes whose keys `main_ppo` has: dynamic sampling is algorithm.filter_groups, and policy_loss.loss_mode
names losses by covariance."""


def main(words: list[str]) -> int:
    """Returns the exit code of a program, called by a script with these words; a command that runs does not return."""
    try:
        return _called(words)
    except UserError as error:
        print(f"paddock: {error}", file=sys.stderr)
        note(EXIT_CODE)
        return EXIT_CODE


def _called(words: list[str]) -> int:
    planning = bool(os.environ.get(PLAN_ONLY))
    program, arguments = words[0], words[1:]
    flags, command = behind(words)
    command = as_module(command)
    if planning and program == "paddock":
        command = ["-m", "paddock.cli", *arguments]
    ours = is_ours(command)
    if ours and (not planning or can_plan(command)):
        start(flags, command, program)
    if command and not ours and not is_question(command):
        with suppress(OSError), Path(os.environ[FOLDER], OTHERS).open("a") as others:
            others.write(f"{shlex.join(['python3', *command[: 1 + (command[0] == '-m')]])}\n")
    if program in PYTHONS and (not planning or is_question(command)):
        execute(flags, command)
    if not planning:
        return _itself(program, arguments)
    if program in (*LAUNCHERS, *LAUNCHERS_ELSEWHERE) and (script := shell_behind(words)):
        return subprocess.run(["bash", *script]).returncode
    print(f"paddock: not run while planning: {shlex.join(words)}", file=sys.stderr)
    sys.stdout.write(ANSWERS.get(program, ""))
    return 0


def behind(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns flags and arguments of Python in a command line, whatever launches it; nothing if it starts no Python.

    >>> behind(["srun", "-n", "1", "torchrun", "--nproc_per_node=8", "-m", "verl.trainer.sft_trainer", "a=1"])
    ([], ['-m', 'verl.trainer.sft_trainer', 'a=1', 'trainer.n_gpus_per_node=8', 'trainer.nnodes=1'])
    """
    program, rest = os.path.basename(words[0]), words[1:]
    if program in PYTHONS:
        flags, rest = split_flags(rest)
        if rest[:2] not in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
            return flags, rest
        program, rest = "torchrun", rest[2:]
    if program in RANKS:
        first = next((n for n, word in enumerate(rest) if word in ("-m", "--module") or word.endswith(".py")), None)
        if first is None or rest[first].endswith(".py"):
            return [], []
        return [], ["-m", *rest[first + 1 :], *ranks(rest[:first], rest[first + 1 :])]
    if program in (*LAUNCHERS, *LAUNCHERS_ELSEWHERE):
        inner = next((n for n, word in enumerate(rest) if os.path.basename(word) in PLANNED), None)
        return ([], []) if inner is None else behind(rest[inner:])
    return [], []


def split_flags(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the interpreter's own flags, and what it runs."""
    first = 0
    while first < len(arguments) and FLAGS.fullmatch(arguments[first]):
        first += 2 if arguments[first] in ("-W", "-X") else 1
    return arguments[:first], arguments[first:]


def ranks(options: list[str], command: list[str]) -> list[str]:
    """Returns overrides for the processes that a launcher's options ask for, unless the command says it itself."""
    text = " ".join(options)
    per_node, in_all, nodes = PER_NODE.search(text), IN_ALL.search(text), NODES.search(text)
    machines = int(nodes[1]) if nodes else 1
    devices = int(per_node[1]) if per_node else int(in_all[1]) // max(machines, 1) if in_all else 0
    asked = {"trainer.n_gpus_per_node": devices, "trainer.nnodes": machines}
    given = {word.partition("=")[0] for word in command}
    return [f"{key}={count}" for key, count in asked.items() if count and key not in given] if devices else []


def shell_behind(words: list[str]) -> list[str]:
    """Returns the arguments of the shell that a launcher starts: `-c TEXT`, or a script."""
    for number, word in enumerate(words):
        if os.path.basename(word) in ("bash", "sh"):
            return words[number + 1 :]
        if words[0] == "sbatch" and word.endswith(".sh"):
            return words[number:]
    return []


def is_ours(command: list[str]) -> bool:
    """True for `-m MODULE` of a module that Paddock has. One of verl's that it has not is refused by name."""
    if command[:1] != ["-m"] or len(command) < 2:
        return False
    module = command[1]
    path = shims().joinpath(*module.split("."))
    reason = next((reason for name, reason in NOT_BUILT.items() if module.startswith(name)), None)
    if path.with_suffix(".py").is_file() or (path / "__main__.py").is_file():
        return True
    if not reason and not f"{module}.".startswith("verl."):
        return f"{module}.".startswith("paddock.")
    fix = "verl.trainer.main_ppo trains; `paddock --help` lists what else there is"
    raise UserError(reason or "Paddock has no such module", key=f"python3 -m {module}", fix=fix)


def as_module(command: list[str]) -> list[str]:
    """Returns the command of ours that a program of verl's examples or recipes amounts to; any other as it is.

    `main_ppo_split.py` is main_ppo with half of the devices for actor and rollout, and half for the critic.
    """
    if command[:1] == ["-m"] and command[1:2] and command[1] in RECIPES:
        return ["-m", "verl.trainer.main_ppo", *by_the_recipe(command[1], command[2:])]
    if not command or os.path.basename(command[0]) != "main_ppo_split.py":
        return command
    given = dict(word.split("=", 1) for word in [*command[1:], *overrides()] if "=" in word)
    devices, nodes = given.get("trainer.n_gpus_per_node", "8"), given.get("trainer.nnodes", "1")
    half = int(devices) // 2 if devices.isdigit() else 0
    split = [f"trainer.n_gpus_per_node={half}", f"critic.n_gpus_per_node={half}", f"critic.nnodes={nodes}"]
    apart = [*split, "critic.enable_resource_pool=True"] if half else []
    return ["-m", "verl.trainer.main_ppo", *command[1:], *apart]


def by_the_recipe(module: str, arguments: list[str]) -> list[str]:
    """Returns arguments whose config file, if they name one, is looked for beside the recipe, as Hydra does."""
    name = next((n for n, word in enumerate(arguments) if word.split("=")[0] in ("--config-name", "-cn")), None)
    given = [word.partition("=")[2] for word in arguments if word.startswith("--config-path=")]
    folder = os.path.join(*module.split(".")[:-1], *(given or ["config"]))
    if name is None or not os.path.isdir(folder):
        return arguments
    return [f"--config-path={folder}", *(word for word in arguments if not word.startswith("--config-path="))]


def overrides() -> list[str]:
    """Returns the overrides of `paddock run --set`, for every training command."""
    return json.loads(os.environ.get(OVERRIDES) or "[]")


def can_plan(command: list[str]) -> bool:
    """True for commands that plan if the environment says so. Others of ours are passed over while planning."""
    module, *arguments = command[1:]
    if module == "paddock.cli":
        return arguments[:1] in (["train"], ["plan"])
    return module == "paddock.trainer.main_ppo" or module.startswith("verl.")


def is_question(command: list[str]) -> bool:
    """True for a short question to Python, which is answered while planning: `-V`, `-c` that starts nothing."""
    if command[:1] == ["-c"]:
        return not STARTS.search("".join(command[1:2]))
    return command[:1] in (["-V"], ["--version"])


def start(flags: list[str], command: list[str], program: str) -> None:
    """Runs a command of ours in the place of this process."""
    note()
    if program not in (*PYTHONS, "paddock") and not os.environ.get(PLAN_ONLY):
        say(f"{program} is passed over: `python3 {' '.join(command[:2])}` starts here, once, and starts its own ranks")
    execute(flags, [*command, *overrides()])


def execute(flags: list[str], command: list[str]) -> None:
    """Runs Python in the place of this process. It finds Paddock's `verl` before any other: that of the working folder,
    which `python -m` puts first, of PYTHONPATH, which scripts set, and an installed one. The rest keeps its order."""
    ours = python_path()
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in ours]
    here = [os.getcwd()] if command[:1] in (["-m"], ["-c"], ["-"], []) else []  # a file's own folder stays first
    others = [path for path in (*here, *given) if os.path.isfile(os.path.join(path, "verl", "__init__.py"))]
    if others:
        if command[1:2] == ["verl.trainer.main_ppo"]:
            os.environ[CHECKOUT] = os.path.join(others[0], "verl")
        say(f"`verl` is Paddock's, {ours[0]}/verl; the one in {others[0]} is not used")
    os.environ["PYTHONPATH"] = os.pathsep.join([*ours, *here, *given])
    os.execv(sys.executable, [sys.executable, *flags, *(["-P"] if here else []), *command])


def say(text: str) -> None:
    """Prints a message once in a run."""
    notes = Path(os.environ[FOLDER], SAID)
    if notes.exists() and text in notes.read_text().splitlines():
        return
    print(f"paddock: {text}", file=sys.stderr, flush=True)
    with suppress(OSError), notes.open("a") as file:
        file.write(f"{text}\n")


def _itself(program: str, arguments: list[str]) -> int:
    """Calls the program that the script means. Without Ray its clusters are passed over: one machine needs none."""
    stand_ins = re.compile(rf".*/{PREFIX}[^/]*/{PROGRAMS}/?")  # of this run, or of one that has started it
    parts = [part for part in os.environ.get("PATH", "").split(os.pathsep) if not stand_ins.fullmatch(part)]
    if program_file := shutil.which(program, path=os.pathsep.join(parts)):
        os.execv(program_file, [program_file, *arguments])
    if program == "ray" and arguments[:1] in (["start"], ["stop"], ["status"]):
        print(f"paddock: passed over, ray is not installed: {shlex.join([program, *arguments])}", file=sys.stderr)
        return 0
    print(f"paddock: {program}: command not found", file=sys.stderr)
    return 127
