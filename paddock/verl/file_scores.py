"""Scores of answers that a file holds already: mean over the answers of a row, then over the rows of a data source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from paddock.data.tables import Record, Table, bad_row, open_tables
from paddock.errors import UserError
from paddock.rewards.manager import RewardManager
from paddock.rewards.score import ScoreRequest
from paddock.verl.commands import RESPONSES, SOURCE, TRUTH

FILES = "data.val_files"


def mean_scores(files: Sequence[str], columns: Mapping[str, str], rewards: RewardManager) -> dict[str, float]:
    """Returns the mean score of each data source, as `test_score/SOURCE`."""
    rows = [row for path in files for row in answered(path, columns)]
    if not rows:
        raise UserError("holds no rows", key=FILES, value=",".join(files), fix="name a file with answers")
    scores = rewards.score([request for requests in rows for request in requests])
    values, means = iter(score.value for score in scores), defaultdict[str, list[float]](list)
    for requests in rows:
        means[requests[0].data_source].append(fmean(next(values) for _ in requests))
    return {f"test_score/{source}": fmean(rows_means) for source, rows_means in means.items()}


def answered(path: str, columns: Mapping[str, str]) -> Iterator[list[ScoreRequest]]:
    """Yields the requests of each row of a file, one for each answer."""
    for table in open_tables(path, FILES, lambda names: names):
        require_columns(table, columns)
        for row in range(table.count):
            yield requests_of(table.rows([row])[0], table.location(row), columns)


def require_columns(table: Table, columns: Mapping[str, str]) -> None:
    for key, name in columns.items():
        if name not in table.columns:
            reason = f"{table.path} has no column {name!r}; it has {', '.join(map(repr, table.columns))}"
            raise UserError(reason, key=key, value=name, fix=f"name the right one: {key}=...")


def requests_of(record: Record, location: str, columns: Mapping[str, str]) -> list[ScoreRequest]:
    responses, truth = record[columns[RESPONSES]], record[columns[TRUTH]]
    answers: list[Any] = [responses] if isinstance(responses, str) else list(responses or ())
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise bad_row(location, columns[RESPONSES], "is no list of texts", "write one text for each answer")
    if not isinstance(truth, dict) or "ground_truth" not in truth:
        raise bad_row(location, columns[TRUTH], "has no ground_truth", '{"style": "rule", "ground_truth": "..."}')
    extra, source = record.get("extra_info") or {}, str(record[columns[SOURCE]])
    return [ScoreRequest(source, answer, truth["ground_truth"], extra, location) for answer in answers]
