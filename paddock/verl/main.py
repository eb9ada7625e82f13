"""Entry points of verl's names beside main_ppo: supervised training, generation, scores of a file.

Under `paddock run --plan` each of them says what it would do, and does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from paddock.commands.guard import PLAN_ONLY, guarded
from paddock.loading.load import Loaded

RANK = "RANK"
"""torchrun's number of a process: rank 0 starts the run's own processes, and the others have nothing to do."""
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Beginnings of the variables that torchrun sets: the run's own processes must not meet in its group."""


def entry(command: Callable[..., int], *surface: str) -> Callable[[], int]:
    """Returns an entry point that runs a command, on the named surface of commands.py."""
    return lambda: guarded(partial(command, *surface), sys.argv[1:])


def supervise(surface: str, arguments: list[str]) -> int:
    from paddock.commands import sft as main_sft
    from paddock.verl import commands as verl_commands

    if os.environ.get(RANK, "0") != "0":
        return 0
    planned = bool(os.environ.get(PLAN_ONLY))
    loaded = verl_commands.load_supervised(getattr(verl_commands, surface), arguments, os.environ, here=not planned)
    if not planned:
        leave_torchrun()
        return main_sft.train(loaded)
    from paddock.commands.keys_of import SFT
    from paddock.plan.plan import make_supervised
    from paddock.plan.tables import render_supervised

    shown = replace(loaded, origins={key: origin for key, origin in loaded.origins.items() if SFT.is_read(key)})
    render_supervised(make_supervised(shown, strict=False))
    return 0


def leave_torchrun() -> None:
    """Forgets torchrun's variables, if it started this process."""
    for name in [name for name in os.environ if name.startswith(OF_TORCHRUN)] if RANK in os.environ else ():
        del os.environ[name]


def generate(surface: str, arguments: list[str]) -> int:
    from paddock.commands import generate as main_generation
    from paddock.verl import commands as verl_commands

    output, rest = main_generation.named_output(arguments)
    planned = bool(os.environ.get(PLAN_ONLY))
    loaded: Loaded = getattr(verl_commands, surface).load(rest, here=not planned)
    if planned:
        rollout, data = loaded.config.actor_rollout_ref.rollout, loaded.config.data
        print(f"Generation: {loaded.config.actor_rollout_ref.model.path} answers {data.val_files}")
        print(f"  {rollout.n} answer(s) to each prompt, of at most {data.max_response_length} tokens, on one device")
        print(f"  temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k}")
        print(f"  answers are written to {output}")
        print("\n".join(f"  ! {warning}" for warning in loaded.warnings))
        return 0
    return main_generation.write(loaded, output)


def score(arguments: list[str]) -> int:
    from paddock.verl.commands import load_scores

    planned = bool(os.environ.get(PLAN_ONLY))
    loaded, columns = load_scores(arguments, here=not planned)
    if planned:
        function = loaded.config.custom_reward_function.path or "the rule of each row's data source"
        print(f"Scores of {loaded.config.data.val_files}: each answer in column {columns.responses!r}, by {function}")
        print("\n".join(f"  ! {warning}" for warning in loaded.warnings))
        return 0
    for warning in loaded.warnings:
        print(f"paddock: {warning}", file=sys.stderr)
    from paddock.verl.file_scores import mean_scores

    print(mean_scores(loaded.config, columns))
    return 0


fsdp_sft_trainer = entry(supervise, "FSDP_SFT")
"""`verl.trainer.fsdp_sft_trainer`: SFT on columns of prompts and answers, or on conversations."""
sft_trainer = entry(supervise, "ENGINE_SFT")
"""`verl.trainer.sft_trainer` and `sft_trainer_ray`: SFT on conversations."""
main_generation = entry(generate, "GENERATION")
main_generation_server = entry(generate, "GENERATION_SERVER")
main_eval = entry(score)
