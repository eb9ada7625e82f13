r"""HH-RLHF: conversations with an assistant, each with an answer that people preferred and one they did not.

Its texts are transcripts, `\n\nHuman: ...\n\nAssistant: ...`; here they become turns, so that a policy, its reward
model and its supervised start all read one chat template.  arXiv:2204.05862
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from paddock.data.prepare.preparer import MESSAGES, Preparer, Row, training_columns
from paddock.data.prepare.records import Record

SOURCE = "Dahoas/full-hh-rlhf"
SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):\s?")
ROLES = {"Human": "user", "Assistant": "assistant"}


def sft_row(record: Record) -> Row | None:
    """The preferred answer is the one to learn."""
    prompt, answer = turns(record), _answer(record, "chosen")
    return {"prompt": prompt, "response": answer} if answer else None


def rm_row(record: Record) -> Row | None:
    """Returns a pair; None where the two do not differ, or one is empty: there is nothing to prefer."""
    chosen, rejected = _answer(record, "chosen"), _answer(record, "rejected")
    if not chosen or not rejected or chosen == rejected:
        return None
    return {"prompt": turns(record), "chosen": chosen, "rejected": rejected}


def rl_row(record: Record) -> Row | None:
    """Returns a prompt that a reward model scores; the preferred answer is kept to be looked at."""
    return {
        "data_source": SOURCE,
        "prompt": turns(record),
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": _answer(record, "chosen")},
        "extra_info": {},
    }


def turns(record: Record) -> list[Row]:
    """Returns the transcript as messages, without the assistant's turn that is still to be written. What a side says
    in a row is one message; a text without speakers is a question."""
    text = record.text("prompt")
    before, *parts = SPEAKER.split(text)
    messages: list[Row] = [{"role": "user", "content": before.strip()}] if before.strip() else []
    for speaker, said in zip(parts[::2], parts[1::2], strict=True):
        if not said.strip():
            continue
        if messages and messages[-1]["role"] == ROLES[speaker]:
            messages[-1]["content"] += "\n\n" + said.strip()
        else:
            messages.append({"role": ROLES[speaker], "content": said.strip()})
    if not messages or messages[-1]["role"] != "user":
        raise record.error("prompt", "does not end with a question of the human", "drop the record")
    return messages


def _answer(record: Record, column: str) -> str:
    value = record.values.get(column)
    if not isinstance(value, str):
        return record.text(column)  # which says what is wrong
    return value.strip()


_kind: Any = partial(Preparer, name="full_hh_rlhf", title="HH-RLHF", hub=SOURCE, config=None)

PREPARER: Preparer = _kind(
    row=rl_row,
    columns=training_columns(),
    kinds={
        "sft": _kind(row=sft_row, columns={"prompt": MESSAGES, "response": "string"}, next_command="sft"),
        "rm": _kind(
            row=rm_row, columns={"prompt": MESSAGES, "chosen": "string", "rejected": "string"}, next_command="rm train"
        ),
        "rl": _kind(row=rl_row, columns=training_columns(), next_command="train reward_model.enable=True"),
    },
)
