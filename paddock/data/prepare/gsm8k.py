"""GSM8K: grade-school maths in words, the answer after `####`.  arXiv:2110.14168"""

from __future__ import annotations

from paddock.data.prepare.preparer import ANSWERED, Preparer, Row, rule_row, training_columns
from paddock.data.prepare.records import Record

SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
COLUMNS = training_columns(ANSWERED)


def row(record: Record) -> Row:
    question, answer = record.text("question"), record.text("answer")
    asked, truth = f"{question} {INSTRUCTION}", _final_answer(record, answer)
    return rule_row(SOURCE, asked, "math", truth, answer=answer, question=question)


def _final_answer(record: Record, answer: str) -> str:
    """`... #### 1,234` -> `1234`"""
    _, mark, final = answer.rpartition("####")
    final = final.strip().replace(",", "")
    if not mark or not final:
        raise record.error(
            "answer", "no final answer after '####'", "end the text with '#### <number>', or drop the record"
        )
    return final


PREPARER = Preparer(name="gsm8k", title="GSM8K", hub=SOURCE, config="main", row=row, columns=COLUMNS)
