"""Entry points of verl's names beside main_ppo: supervised training, generation, scores of a file.

Under `paddock run --plan` each of them says what it would do, and does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from paddock.commands import generate as main_generate
from paddock.commands import sft
from paddock.commands.guard import PLAN_ONLY, guarded
from paddock.config.paths import files_of
from paddock.loading.load import Loaded
from paddock.verl import commands

RANK = "RANK"
"""torchrun's number of a process: rank 0 starts the run's own processes, and the others have nothing to do."""
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Beginnings of the variables that torchrun sets: the run's own processes must not meet in its group."""


def entry(command: Callable[[list[str]], int]) -> Callable[[], int]:
    """Returns an entry point that runs a command with the arguments of this process."""
    return lambda: guarded(command, sys.argv[1:])


def supervise(surface: commands.Surface, arguments: list[str]) -> int:
    if os.environ.get(RANK, "0") != "0":
        return 0
    planned = bool(os.environ.get(PLAN_ONLY))
    loaded = commands.load_supervised(surface, arguments, os.environ, here=not planned)
    if not planned:
        leave_torchrun()
        return sft.train(loaded)
    from paddock.plan.plan import make_supervised
    from paddock.plan.tables import render_supervised

    read = {key: origin for key, origin in loaded.origins.items() if surface.command.is_read(key)}
    shown = replace(loaded, origins=read)
    render_supervised(make_supervised(shown, strict=False))
    return 0


def leave_torchrun() -> None:
    """Forgets torchrun's variables, if it started this process."""
    for name in [name for name in os.environ if name.startswith(OF_TORCHRUN)] if RANK in os.environ else ():
        del os.environ[name]


def generate(surface: commands.Surface, arguments: list[str]) -> int:
    output, rest = main_generate.named_output(arguments)
    planned = bool(os.environ.get(PLAN_ONLY))
    loaded = surface.load(rest, here=not planned)
    if not planned:
        return main_generate.write(loaded, output)
    rollout, data = loaded.config.actor_rollout_ref.rollout, loaded.config.data
    print(f"Generation: {loaded.config.actor_rollout_ref.model.path} answers {data.val_files}")
    print(f"  {rollout.n} answer(s) to each prompt, of at most {data.max_response_length} tokens, on one device")
    print(f"  temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k}")
    print(f"  answers are written to {output}")
    return show_notes(loaded)


def score(arguments: list[str]) -> int:
    planned = bool(os.environ.get(PLAN_ONLY))
    loaded, columns = commands.load_scores(arguments, here=not planned)
    files = files_of(loaded.config.data.val_files)
    if planned:
        function = loaded.config.custom_reward_function.path or "the rule of each row's data source"
        responses = columns[commands.RESPONSES]
        print(f"Scores of {','.join(files)}: each answer in column {responses!r}, by {function}")
        return show_notes(loaded)
    for warning in loaded.warnings:
        print(f"paddock: {warning}", file=sys.stderr)
    from paddock.trainer.assembly import open_rewards
    from paddock.verl.file_scores import mean_scores

    with open_rewards(loaded.config) as rewards:
        print(mean_scores(files, columns, rewards))
    return 0


def show_notes(loaded: Loaded) -> int:
    print("\n".join(f"  ! {warning}" for warning in loaded.warnings))
    return 0


fsdp_sft_trainer = entry(partial(supervise, commands.FSDP_SFT))
"""`verl.trainer.fsdp_sft_trainer`: SFT on columns of prompts and answers, or on conversations."""
sft_trainer = entry(partial(supervise, commands.ENGINE_SFT))
"""`verl.trainer.sft_trainer` and `sft_trainer_ray`: SFT on conversations."""
main_generation = entry(partial(generate, commands.GENERATION))
main_generation_server = entry(partial(generate, commands.GENERATION_SERVER))
main_eval = entry(score)
