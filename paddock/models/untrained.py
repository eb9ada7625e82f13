"""Tokens that a model was never trained on: their rows of the head are those of the unused tokens at its end.

Vocabularies are published with reserved tokens and rounded up. Training that never sees a token as a target moves its
row as it moves the rows of all the others of that kind, so they stay alike. What a later training teaches of one of
them it teaches of all: the one that is meant may be the likeliest, and a sample still draws one of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open

from paddock.models.files import WEIGHTS

HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
LAST = 1024  # rows that are looked at: unused tokens are the last ones
LOOK_ALIKES = 16  # rows that make a token one of many
CLOSE = 0.1  # distance of two rows that are alike, as a share of their length


def untrained(folder: Path, tokens: Sequence[int]) -> list[int]:
    """Returns those tokens whose rows of the head are those of unused tokens; none where the folder has no
    safetensors, or a head of another name."""
    for file, name in heads(folder) if tokens else ():
        with safe_open(file, "pt") as opened:
            rows = opened.get_slice(name)
            count = rows.get_shape()[0]
            last = rows[max(0, count - LAST) :].float()
            found = []
            for token in tokens:
                own = rows[token : token + 1].float()
                alike = (last - own).norm(dim=1) <= CLOSE * own.norm()
                if int(alike.sum()) >= LOOK_ALIKES:
                    found.append(token)
            return found
    return []


def heads(folder: Path) -> list[tuple[Path, str]]:
    """Returns the matrices that logits come from and their files: the head, else the embedding that it is tied to."""
    names: dict[str, Path] = {}
    for file in folder.glob(f"*{Path(WEIGHTS).suffix}"):
        with safe_open(file, "pt") as opened:
            names |= dict.fromkeys(opened.keys(), file)
    return [(file, name) for ends in (HEADS, EMBEDDINGS) for name, file in names.items() if name.endswith(ends)]
