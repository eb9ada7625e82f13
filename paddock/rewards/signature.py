"""What a scorer is given: what its signature names of what there is, or all of it.

Its names tell how it is called. `completion`: with one response, its prompt, and the row's columns by their names
(FIELDS). `ROW`, or some of it: with one response, as verl does. `WHOLE`: with lists of a batch, TRL's contract
(columns.py). `BATCH`: with lists of a batch, as verl's batch manager does.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.rewards.score import Failed

ROW = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
COMPLETION = "completion"
TRUTHS = ("answer", "solution")
"""Names under which data sets of others have the ground truth."""
WHOLE = frozenset({"prompts", "completions", "completion_ids", "environments"})
"""Arguments of a function of TRL's contract, at least one of which it names."""
FIELDS = (COMPLETION, "prompt", "ground_truth", "data_source", "extra_info")
COLUMNS = ("completions", "prompts", "completion_ids", "ground_truth", "data_source", "extra_info")
UNTOLD = frozenset({*TRUTHS, "log_extra", "log_metric", "trainer_state", "environments"})
"""Names that messages leave out: those of what a few functions ask for."""


def takes_columns(function: Callable[..., Any]) -> bool:
    """True for a function of TRL's contract; its signature tells."""
    names = parameters_of(function)
    return bool(names & WHOLE) and not names & {*ROW, *BATCH} - {"data_source", "ground_truth", "extra_info"}


def takes_fields(function: Callable[..., Any]) -> bool:
    """True for a function that is given a response as `completion`, and columns of its row: it names that, or needs
    what is none of `ROW`."""
    signature = signature_of(function)
    if signature.named & {"solution_str", *WHOLE, *BATCH}:
        return False
    return bool({COMPLETION} & signature.named or {*signature.needed} - {*ROW})


def parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    return signature_of(function).named


@dataclass(frozen=True)
class Signature:
    """Holds the names of a function's arguments."""

    named: frozenset[str]
    needed: tuple[str, ...]
    """Names of the arguments without a default."""
    takes_all: bool
    """True if it has ``**kwargs``, or says nothing of its arguments, as what is written in C may."""
    placed: str | None = None
    """An argument that it takes by position alone."""

    def taken(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what of `given` the function takes."""
        if self.takes_all:
            return dict(given)
        return {name: value for name, value in given.items() if name in self.named}

    def require(self, given: Mapping[str, Any], names: Sequence[str]) -> None:
        """Refuses a function that needs what is not given, or takes nothing of it. `names`: of what every row has;
        all else that is given are columns of the rows."""
        if self.placed:
            reason = f"takes {self.placed!r} by its position alone, and arguments are given by their names"
            fix = "leave the / out of its arguments, or put a function around it; the response is `completion`"
            raise Failed(reason, fix=fix)
        missing = [name for name in self.needed if name not in given]
        if missing or (not self.takes_all and self.named.isdisjoint(given)):
            columns = [] if names in (ROW, BATCH) else sorted(given.keys() - {*names} - UNTOLD)
            raise unmet(self, missing, names, columns)
        truth = next((name for name in TRUTHS if name in self.needed), None)
        if truth and names == FIELDS and not self.takes_all and COMPLETION not in self.named:
            reason = f"takes {truth!r}, which is the row's ground truth, and no response"
            raise Failed(reason, fix=f"name the response `completion`: f(completion, {truth})")

    def require_use(self, kwargs: Mapping[str, Any]) -> None:
        """Refuses arguments of the config that the function does not take."""
        if unused := kwargs.keys() - self.taken(kwargs).keys():
            raise Failed(f"takes no {min(unused)!r}, which reward_kwargs gives it, and has no **kwargs")


def signature_of(function: Callable[..., Any]) -> Signature:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C, without a signature
        return Signature(frozenset(), (), takes_all=True)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        frozenset(p.name for p in named),
        tuple(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        next((p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty), None),
    )


def unmet(signature: Signature, missing: Sequence[str], names: Sequence[str], columns: Sequence[str]) -> Failed:
    """Returns the error of a function that cannot be called with what there is."""
    offered = ", ".join(names) + (f", or columns of the rows: {', '.join(columns)}" if columns else "")
    if not missing:
        return Failed(f"takes nothing of what it is given; it may name {offered}", fix="name what it shall read")
    wanted = " and ".join(map(repr, missing))
    reason = f"takes {wanted}, and nothing that it is given is called so; it may name {offered}"
    if names != BATCH and signature.named & {*BATCH}:
        return Failed(reason, fix="reward_model.reward_manager=batch calls it once, with lists")
    known = [name for name in (*names, *columns) if name not in signature.named]
    close = next(((name, found[0]) for name in missing if (found := difflib.get_close_matches(name, known, n=1))), None)
    if close:
        return Failed(reason, fix=f"did you mean {close[1]!r}? Rename the argument {close[0]!r} of the function")
    say = {
        FIELDS: "rename what it takes; the response is `completion`",
        ROW: "rename what it takes; with `completion` in place of `solution_str` it may name columns of the rows",
    }
    given = f"custom_reward_function.reward_kwargs={{{missing[0]}: 1}}"
    return Failed(reason, fix=f"{say.get(tuple(names), 'rename what it takes')}. Or give it a value: {given}")
