"""Geometry3K: problems with a drawing, the answer a number.  arXiv:2105.04165"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddock.data.prepare.preparer import ANSWERED, Preparer, Row, rule_row, training_columns
from paddock.data.prepare.records import Record

SOURCE = "hiyouga/geometry3k"
INSTRUCTION = r"Reason first, between <think> and </think>. Then give the final answer in \boxed{}."
IMAGE = "<image>"
"""Marks a drawing in the text."""
COLUMNS = training_columns(ANSWERED, images=[{"bytes": "binary", "path": "string"}])


def row(record: Record) -> Row:
    problem, answer, images = record.text("problem"), record.text("answer"), _images(record)
    places = problem.count(IMAGE)
    if places == 0:
        problem = IMAGE * len(images) + problem
    elif places != len(images):
        raise record.error(
            "images", f"has {len(images)} drawings, and the problem {places} places for one", "mend or drop the record"
        )
    asked = f"{problem} {INSTRUCTION}"
    return rule_row(SOURCE, asked, "math", answer, answer=answer, question=problem) | {"images": images}


def _images(record: Record) -> list[Row]:
    value = record.values.get("images")
    images = value if isinstance(value, list) else [value]
    if value is None or not images:
        raise record.error("images", "holds no drawing", "check that this is the raw data set")
    return [_image(record, image) for image in images]


def _image(record: Record, image: Any) -> Row:
    """Returns the drawing's file as it was published: bytes in the table, or a file beside it."""
    name = image.get("path") if isinstance(image, dict) else image
    content = image.get("bytes") if isinstance(image, dict) else None
    if content is None and isinstance(name, str):
        try:
            content = Path(name).read_bytes()
        except OSError as error:
            raise record.error("images", f"{name}: {error.strerror}", "name files that are there") from error
    if not isinstance(content, bytes) or not content:
        raise record.error("images", f"is {image!r:.80}, not a picture", "a file's bytes, or its path")
    return {"bytes": content, "path": Path(name).name if isinstance(name, str) else None}


PREPARER = Preparer(name="geo3k", title="Geometry3K", hub=SOURCE, config=None, row=row, columns=COLUMNS)
