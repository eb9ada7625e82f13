"""The teachers of a run: frozen models that score what the student drew, each the rows that are routed to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from paddock.algorithms.distillation import wanted_of_teacher
from paddock.config.distillation import TEACHERS, DistillationConfig, Teacher, teachers_of
from paddock.core.batch import Batch
from paddock.errors import UserError
from paddock.facts.models import shape_of
from paddock.models.load import load_tokenizer
from paddock.models.packing import images_of
from paddock.workers.policy import Policy
from paddock.workers.sharded import ShardedPolicy

COLUMNS = {
    "log_probs": "teacher_log_probs",
    "topk_tokens": "teacher_tokens",
    "topk_log_probs": "teacher_topk_log_probs",
}
"""Maps outputs of a teacher's forward pass to columns of the batch."""


class Teachers:
    """Routes rows to teachers, in this process or over ranks, and joins what they say."""

    def __init__(self, keys: DistillationConfig, source_key: str, policies: Mapping[str, Policy | ShardedPolicy]):
        """`source_key`: the column that picks a row's scorer."""
        self.keys, self.source_key, self.policies = keys, source_key, policies
        self.teachers = teachers_of(keys)
        self.wants = wanted_of_teacher(keys.distillation_loss)

    def scored(self, batch: Batch) -> Batch:
        """Fills the columns that the loss reads: a forward pass of each teacher over its rows."""
        columns: dict[str, Any] = {}
        for teacher, rows in self.routed(batch):
            part = batch if len(rows) == len(batch) else batch.rows(rows)  # columns that ranks have stay there
            require_sight(teacher, part)
            outputs = self.policies[teacher.role].forward(part, self.wants)
            for name in self.wants:
                values = getattr(outputs, name)
                column = columns.setdefault(COLUMNS[name], values.new_zeros(len(batch), *values.shape[1:]))
                column[rows] = values
        return batch.with_(**columns)

    def routed(self, batch: Batch) -> list[tuple[Teacher, torch.Tensor]]:
        """Returns each teacher that has rows in the batch, with their positions."""
        if len(self.teachers) == 1:
            return [(self.teachers[0], torch.arange(len(batch)))]
        keys = self.keys_of(batch)
        require_teachers(self.keys, keys)
        rows = {one: [position for position, key in enumerate(keys) if key == one.key] for one in self.teachers}
        return [(one, torch.tensor(positions)) for one, positions in rows.items() if positions]

    def keys_of(self, batch: Batch) -> Sequence[str | None]:
        """Returns what each row has in the column that `distillation.teacher_key` names."""
        name = self.keys.teacher_key
        if routes_by_source(self.keys, self.source_key):
            return [str(source) for source in batch.extras["data_source"]]
        values = [(info or {}).get(name) for info in batch.extras["extra_info"]]
        return [None if value is None else str(value) for value in values]


def routes_by_source(keys: DistillationConfig, source_key: str) -> bool:
    """True if rows are routed by the column that also picks their scorer."""
    return keys.teacher_key in ("data_source", source_key)


def require_teachers(keys: DistillationConfig, wanted: Iterable[str | None]) -> None:
    """Refuses rows that have one of these keys and no teacher, if there are several."""
    column, known = keys.teacher_key, [teacher.key for teacher in teachers_of(keys)]
    without = [key for key in wanted if key not in known] if len(known) > 1 else []
    if not without:
        return
    if without[0] is None:
        reason = "rows have no such column: it is data_source, or a field of extra_info"
        fix = "distillation.teacher_key=data_source"
        raise UserError(reason, key="distillation.teacher_key", value=column, fix=fix)
    reason = f"a row has {column}={without[0]}, and no teacher has that key: there are {', '.join(map(str, known))}"
    raise UserError(reason, key=TEACHERS, fix=f"+{TEACHERS}.NAME.key={without[0]} +{TEACHERS}.NAME.model_path=MODEL")


def check_routes(keys: DistillationConfig, source_key: str, sources: Iterable[str]) -> None:
    """Refuses data sources without a teacher, if rows are routed by them."""
    if routes_by_source(keys, source_key):
        require_teachers(keys, sources)


def require_sight(teacher: Teacher, rows: Batch) -> None:
    """Refuses rows with images for a teacher that reads text alone."""
    shape = shape_of(teacher.path) if images_of(rows) else None
    if shape is not None and not shape.vision_params:
        raise UserError(
            "reads text alone, and rows with images are routed to it",
            key=teacher.setting,
            value=teacher.path,
            fix="a teacher that sees, with the student's tokenizer",
        )


def check_tokenizers(keys: DistillationConfig, tokenizer: Any, trusted: bool) -> None:
    """Refuses a teacher to which a token of the student means something else. A teacher may know further tokens."""
    teachers = teachers_of(keys)
    student = tokenizer.get_vocab() if teachers else {}
    for teacher in teachers:
        own = load_tokenizer(teacher.path, trusted, key=teacher.setting).get_vocab()
        other = next((token for token, index in student.items() if own.get(token) != index), None)
        if other is not None:
            raise UserError(
                f"its tokenizer is not the student's: {other!r} is token {student[other]} of the student, and "
                f"{own.get(other, 'none')} of the teacher",
                key=teacher.setting,
                value=teacher.path,
                fix="a teacher of the student's family: token ids must mean the same to both",
            )
