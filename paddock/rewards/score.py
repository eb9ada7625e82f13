"""What a scorer is asked, and what it may answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

RESERVED = frozenset(
    {"data_source", "ground_truth", "extra_info", "messages", "index", "location", "style", "written_prompt"}
)
"""Columns of a batch that come from the data; a scorer's own values go by other names."""
LARGEST = 2**1023
"""Whole numbers beyond it, which a policy may well write, are kept as texts: no float holds them, and a mean is one."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to be scored."""

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    location: str = "a row"
    """The row's file and number, or its id: what an error message names."""
    prompt: str | Sequence[Mapping[str, Any]] | None = None
    """A plain text or messages. This, `tokens` and `steps` are filled for functions of TRL's contract alone."""
    tokens: Sequence[int] = ()
    """Token ids of the response."""
    steps: tuple[int, int] = (0, 0)
    """Training steps that are done, and all that there will be."""
    last_turn: str | None = None
    """The policy's last turn, if it wrote several; `solution` is then all of them and what stands between them."""
    turns: Sequence[Mapping[str, Any]] | None = None
    """All messages behind the prompt, if the response is a conversation in an environment."""
    environment: Any = None
    """The environment of a conversation, for functions that ask for `environments`: they run in this process."""
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """What the environment of a conversation says of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as a call with all values: half the time of what a dataclass does by itself."""
        return ScoreRequest, _values_of_request(self)


@dataclass(frozen=True, slots=True)
class Score:
    value: float
    """0 if the scorer does not apply to the row."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What else the scorer returned."""
    timed_out: bool = False
    undecided: bool = False
    """The scorer itself gave up: it compares answers within limits of its own. `timed_out` is set as well."""
    cached: bool = False
    """Known from an equal answer to an equal question."""
    retries: int = 0
    applies: bool = True
    """False if a function returned None for the row: its mean leaves the row out."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as a call with all values, or with the number alone if there is nothing else."""
        values = _values_of_score(self)
        return Score, values[:1] if values[1:] == NOTHING_ELSE else values


_values_of_request = attrgetter(*ScoreRequest.__slots__)
_values_of_score = attrgetter(*Score.__slots__)
NOTHING_ELSE = _values_of_score(Score(0.0))[1:]


class Failed(Exception):
    """A scorer that cannot be loaded, raised, or returned what is no score; the text says which, and where."""

    def __init__(self, reason: str, row: int | None = None, lasting: bool = True, fix: str | None = None):
        """`row`: which of a batch. `lasting`: calling it again would not help. `fix`: of a mistake of its own kind."""
        super().__init__(reason)
        self.row, self.lasting, self.fix = row, lasting, fix


def checked(result: Any) -> Score:
    """Checks a scorer's result: a finite number, or a dict with one under `score`; anything else is a mistake in the
    scorer, not a zero. A Score was checked before."""
    if isinstance(result, Score):
        return result
    if not isinstance(result, Mapping):
        return Score(_number(result, "returned"))
    if "score" not in result:
        raise Failed(f"returned a dict without 'score': its keys are {sorted(map(str, result))}")
    if clash := RESERVED & result.keys():
        raise Failed(f"returned the key {min(clash)!r}, which is a column of the data: rename it")
    extras = {str(name): _plain(value, name) for name, value in result.items() if name != "score"}
    return Score(_number(result["score"], "returned a dict whose 'score' is"), extras)


def _number(value: Any, verb: str) -> float:
    number = _scalar(value)
    if not isinstance(number, int | float):
        raise Failed(f"{verb} {value!r:.80} ({type(value).__name__}), not a number")
    if not math.isfinite(number):
        raise Failed(f"{verb} {number}")
    return float(number)


def _plain(value: Any, name: Any) -> Any:
    """Numbers, texts and lists of them: what any process can read and any log can show."""
    value = _scalar(value)
    if value is None or isinstance(value, bool):
        return value
    # what is of a class of the scorer's own, an Enum say, cannot be read by another process
    if isinstance(value, int):
        return int.__int__(value) if abs(value) < LARGEST else hex(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name) for key, item in value.items()}
    raise Failed(f"returned under {name!r} a {type(value).__name__}, not a number or a text")


def _scalar(value: Any) -> Any:
    """Returns the number in a NumPy scalar or a tensor of one element."""
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):  # it has several
        return value
