"""All bad invocations, and which of them are tried how."""

from __future__ import annotations

import invocations_of_commands
import invocations_of_config
import invocations_of_data
import invocations_of_models
from invocation import Answer, Case, in_fork, in_subprocess
from invocation_props import closed

MODULES = (invocations_of_config, invocations_of_commands, invocations_of_data, invocations_of_models)
CASES: list[Case] = [case for module in MODULES for case in module.CASES]
KINDS = list(dict.fromkeys(case.kind for case in CASES))
EVERY = 8
"""Of the invocations that import torch, every so many-th is a process of its own; others are forked from one that has
imported it already, which saves some seconds each."""
OF_EACH_KIND = 3


def alone(case: Case) -> bool:
    """Whether the invocation is tried as a user starts it, from the import on."""
    return not case.heavy or HEAVY[id(case)] % EVERY == 0


def tried(case: Case, folder) -> Answer:
    return in_subprocess(case, folder) if alone(case) else in_fork(case, folder)


def short() -> list[Case]:
    """Some of every kind that are refused before torch is imported, and need no process of their own."""
    light = [case for case in CASES if not case.heavy and case.typed[0] != "run"]
    light = [case for case in light if not any(isinstance(make, closed) for make in case.made)]
    return [case for kind in KINDS for case in [one for one in light if one.kind == kind][:OF_EACH_KIND]]


HEAVY = {id(case): number for number, case in enumerate(case for case in CASES if case.heavy)}
