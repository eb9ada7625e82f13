"""Stop strings at token level: which token of a response completes one of them, by a table, in one step per token.

Strings become an Aho-Corasick automaton over bytes. What a token does to it, from each of its states, is a column of
the table; tokens that do the same share one. So a step is a lookup on the device that draws, and nothing is decoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paddock.config.roles import ActorRolloutRefConfig
from paddock.config.schema import DataConfig
from paddock.data.spelling import Spelling, spelling_of
from paddock.engines.rollout.base import Request
from paddock.errors import UserError

KEY = "actor_rollout_ref.rollout.stop"
MOST_BYTES = 512
OTHER = b"\xff"
"""A byte that no text has."""
CONTINUATIONS = (
    (0x80, 0xBF, -1),
    (0x80, 0xBF, 0),
    (0x80, 0xBF, 1),
    (0xA0, 0xBF, 0),
    (0x80, 0x9F, 0),
    (0x90, 0xBF, 1),
    (0x80, 0x8F, 1),
)
"""For each place inside a character of UTF-8: the lowest and the highest next byte, and the place behind it; -1: the
character is whole. The first three have one, two and three bytes to come; others follow bytes that not all may."""
LEADS = ((0xC2, 0xDF, 0), (0xE0, 0xE0, 3), (0xED, 0xED, 4), (0xE1, 0xEF, 1), (0xF0, 0xF0, 5), (0xF4, 0xF4, 6),
         (0xF1, 0xF3, 2))  # fmt: skip
"""First bytes of characters of several bytes, and the place behind each; the first match counts."""


class StopTable:
    """Finds the token that completes a stop string in a response's text, decoded from its first token on, with special
    tokens written out.

    ``moves[state, class of the token]`` is the next state, or its bitwise complement if the token completes a string.
    """

    def __init__(self, moves: np.ndarray, classes: np.ndarray, start: int, device: torch.device):
        self.start, self.device = start, device
        self.moves, self.classes = torch.from_numpy(moves).to(device), torch.from_numpy(classes).to(device)
        self.rows: list[list[int]] = moves.tolist()
        self.numbers: list[int] = classes.tolist()

    def step(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the states behind these tokens, and which of them complete a string, both ``[B]``."""
        moves = self.moves[states, self.classes[tokens.clamp(max=len(self.classes) - 1)]]
        ended = moves < 0
        return torch.where(ended, ~moves, moves), ended

    def after(self, tokens: Sequence[int]) -> int:
        """Returns the state behind these tokens of a response, the first ones."""
        return self.read(tokens, self.start, len(tokens))[0]

    def begun(self, request: Request) -> int:
        """Returns the state in which the responses to a request go on."""
        return self.after(request.tokens[len(request.tokens) - request.written :])

    def read(self, tokens: Sequence[int], state: int, minimum: int = 0) -> tuple[int, int | None]:
        """Returns the state behind further tokens of a response, and how many of them there are up to the first behind
        `minimum` that completes a string; None if none does."""
        last = len(self.numbers) - 1
        for count, token in enumerate(tokens, 1):
            state = self.rows[state][self.numbers[min(token, last)]]
            if state < 0:
                state = ~state
                if count > minimum:
                    return state, count
        return state, None


class StopTables:
    """Makes the tables of stop strings, and keeps them."""

    def __init__(self, tokenizer: Any = None):
        """`tokenizer`: None if no sampling has stop strings."""
        self.tokenizer = tokenizer
        self.made: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray, int]] = {}
        self.found: dict[tuple[tuple[str, ...], torch.device], StopTable] = {}

    @classmethod
    def of_keys(cls, group: ActorRolloutRefConfig, data: DataConfig) -> StopTables:
        """Makes the table of `rollout.stop`; strings that texts of the policy cannot contain are refused."""
        strings = tuple(group.rollout.stop)
        if not strings:
            return cls()
        from paddock.models.load import open_tokenizer  # a server's own process does without transformers

        tables = cls(open_tokenizer(group.model, data))
        tables.make(strings)
        return tables

    def make(self, strings: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, int]:
        if strings not in self.made:
            assert self.tokenizer is not None, "an engine that is to know stop strings is opened with a tokenizer"
            self.made[strings] = table_of(spelling_of(self.tokenizer), strings)
        return self.made[strings]

    def of(self, strings: tuple[str, ...], device: torch.device) -> StopTable | None:
        """Returns the table of these strings; None if there are none."""
        if not strings:
            return None
        if (strings, device) not in self.found:
            self.found[strings, device] = StopTable(*self.make(strings), device)
        return self.found[strings, device]


def table_of(spelling: Spelling, strings: Sequence[str]) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns moves ``[states, classes]``, the class of each token ``[vocabulary + 1]``, the last one that of all
    further ids, and the first state."""
    patterns = [string.encode() for string in strings]
    if (size := sum(map(len, patterns))) > MOST_BYTES:
        reason = f"has {size} bytes together, more than {MOST_BYTES}"
        raise UserError(reason, key=KEY, value=list(strings), fix="fewer or shorter strings: the end of each is enough")
    steps, ends = automaton(patterns)
    spelling, kinds = distinct(spelling, patterns)
    pieces = [*(piece or b"" for piece in spelling.pieces), b""]
    moves, root = walked(steps, ends, pieces), 0
    if spelling.fallback:
        moves = with_bytes(moves, steps, ends, spelling)
    if spelling.first != spelling.pieces:
        root = len(moves)
        first = walked(steps[:1], ends, [*(piece or b"" for piece in spelling.first), b""], steps)[0]
        for number in spelling.fallback:
            first[number] = moves[0, number] if spelling.first[number] else 0
        first[[not piece for piece in pieces]] = root
        moves = np.concatenate([moves, first[None]])
    columns = np.ascontiguousarray(moves.T)
    _, index, classes = np.unique(columns.view(f"V{columns.itemsize * columns.shape[1]}")[:, 0], return_index=True,
                                  return_inverse=True)  # fmt: skip
    return np.ascontiguousarray(columns[index].T), classes[kinds].astype(np.int64), root


def distinct(spelling: Spelling, patterns: Sequence[bytes]) -> tuple[Spelling, np.ndarray]:
    """Returns a spelling of few tokens, and the one that stands for each of the vocabulary, and for further ids: those
    that differ in bytes which are in no pattern do the same."""
    others = bytes(byte if any(byte in pattern for pattern in patterns) else OTHER[0] for byte in range(256))

    @cache
    def shortened(piece: bytes | None) -> bytes | None:
        """Leaves out what stands between two bytes that are in no pattern, unless it has one."""
        first, *rest = (piece or b"").translate(others).split(OTHER)
        kept = [part for part in rest[:-1] if any(pattern in part for pattern in patterns)]
        return None if piece is None else OTHER.join([first, *kept, *rest[-1:]])

    pairs = zip(spelling.pieces, spelling.first, strict=True)
    keys = [(shortened(piece), shortened(first), spelling.fallback.get(number))
            for number, (piece, first) in enumerate(pairs)]  # fmt: skip
    kinds = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    fallback = {number: byte for (*_, byte), number in kinds.items() if byte is not None}
    small = Spelling([piece for piece, *_ in kinds], [first for _, first, _ in kinds], fallback)
    return small, np.array([*(kinds[key] for key in keys), len(kinds)])


def automaton(patterns: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the next state ``[states, 256]`` by byte, and which states end with a pattern. State 0 is the first."""
    steps, ends = [[0] * 256], [False]
    for pattern in patterns:
        state = 0
        for byte in pattern:
            if not steps[state][byte]:
                steps[state][byte] = len(steps)
                steps.append([0] * 256)
                ends.append(False)
            state = steps[state][byte]
        ends[state] = True
    behind, waiting = [0] * len(steps), deque(state for state in steps[0] if state)
    while waiting:  # in order of depth: a state falls back to the longest other one that its bytes end with
        state = waiting.popleft()
        fall = behind[state]
        ends[state] |= ends[fall]
        for byte, following in enumerate(steps[state]):
            if following:
                behind[following] = steps[fall][byte]
                waiting.append(following)
            else:
                steps[state][byte] = steps[fall][byte]
    return np.array(steps, np.int32), np.array(ends)


def walked(
    starts: np.ndarray, ends: np.ndarray, pieces: Sequence[bytes], steps: np.ndarray | None = None
) -> np.ndarray:
    """Returns where each piece leads from the first states, as many as `starts` has: ``[states, pieces]``."""
    steps = starts if steps is None else steps
    lengths = np.array([len(piece) for piece in pieces])
    order = np.argsort(-lengths, kind="stable")
    lengths, joined = lengths[order], np.frombuffer(b"".join(pieces[at] for at in order), np.uint8)
    offsets = lengths.cumsum() - lengths
    states = np.repeat(np.arange(len(starts), dtype=np.int32)[:, None], len(pieces), axis=1)
    ended = np.zeros(states.shape, bool)
    for at in range(int(lengths.max(initial=0))):
        longer = int((lengths > at).sum())
        states[:, :longer] = steps[states[:, :longer], joined[offsets[:longer] + at]]
        ended[:, :longer] |= ends[states[:, :longer]]
    found = np.empty_like(states)
    found[:, order] = np.where(ended, ~states, states)
    return found


def with_bytes(moves: np.ndarray, steps: np.ndarray, ends: np.ndarray, spelling: Spelling) -> np.ndarray:
    """Returns the moves with tokens that stand for single bytes, as a decoder with byte fallback joins them: bytes in a
    row are text if all of them are UTF-8, and nothing that a string has if not.

    States are those of the automaton between two characters, for each place inside a character those again, and a last
    one in bytes that are no UTF-8. A token of text goes on from there as from the first state.
    """
    size, broken = len(moves), len(moves) * (1 + len(CONTINUATIONS))
    inside = np.repeat(moves[:1], broken + 1 - size, axis=0)
    moves = np.concatenate([moves, inside])
    nobody = [*(number for number, piece in enumerate(spelling.pieces) if piece is None), len(spelling.pieces)]
    moves[:, nobody] = np.arange(len(moves), dtype=moves.dtype)[:, None]
    for number, byte in spelling.fallback.items():
        following = steps[:, byte]
        whole = np.where(ends[following], ~following, following)
        lead = next((place for low, high, place in LEADS if low <= byte <= high), None)
        moves[:size, number] = whole if byte < 0x80 else broken if lead is None else (1 + lead) * size + following
        for place, (low, high, behind) in enumerate(CONTINUATIONS):
            fits, rows = low <= byte <= high, slice((1 + place) * size, (2 + place) * size)
            moves[rows, number] = broken if not fits else whole if behind < 0 else (1 + behind) * size + following
        moves[broken, number] = broken
    return moves
