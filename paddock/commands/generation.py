"""Answers of a model to the prompts of data files, written row by row as jsonl, or as parquet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from paddock.commands.frozen_policy import open_policy, prompts_at_a_time
from paddock.core.files import replacing
from paddock.core.timing import Timer
from paddock.data.dataset import PromptDataset, PromptRow
from paddock.data.loader import validation_batches
from paddock.data.unscored import UnscoredDataset
from paddock.errors import UserError
from paddock.rollouts.collect import training_sampling
from paddock.rollouts.episode import Episode, tokens_of
from paddock.rollouts.texts import texts_for_people
from paddock.runs.samples import line_of
from paddock.trainer.assembly import Assembly
from paddock.trainer.out_of_memory import explaining

OUTPUT = "output"
ADDED = ("responses", "log_probs", "lengths", "stopped")
"""Columns beside those of the row: lists with one entry for each response. A log-prob is the sum over the
response's tokens, at the sampling temperature; `stopped` says that it ended by itself."""
CONVERSED = ("conversation", "num_turns", "ended")
"""Columns of responses in an environment: the messages behind the prompt, how many there are, and why it ended."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    prompts: int
    responses: int
    tokens: int
    stopped: int
    left_out: int
    seconds: float

    def __str__(self) -> str:
        prompts = "1 prompt" if self.prompts == 1 else f"{self.prompts:,} prompts"
        parts = [
            f"{self.responses:,} response{'' if self.responses == 1 else 's'} to {prompts}",
            f"{self.tokens / self.responses:.1f} tokens each",
            f"{100 * self.stopped / self.responses:.0f}% ended by themselves",
            f"{self.tokens / self.seconds:,.0f} tokens/s",
        ]
        if self.left_out:
            parts.append(f"{self.left_out:,} prompts that are too long were left out")
        return ", ".join(parts)


def generate(parts: Assembly, output: Path) -> Summary:
    """Writes rollout.n responses to each prompt of data.val_files, as jsonl or parquet; the file appears once it is
    whole."""
    config, policy, timer = parts.config, open_policy(parts), Timer()
    samples, sampling = config.actor_rollout_ref.rollout.n, training_sampling(config, policy.stop_tokens)
    tokens = stopped = 0
    dataset = UnscoredDataset.validation(config.data, parts.tokenizer, parts.reader)
    require_free_columns(dataset)
    with explaining(config, lambda: {"gen": "testing"}), timer("gen"), writer(output) as write:
        rollout = policy.over(parts, dataset, "generating")
        for rows in validation_batches(dataset, prompts_at_a_time(config.data, samples)):
            episodes = rollout.episodes(rows, samples, sampling)
            for index, row in enumerate(rows):
                record = record_of(row, episodes[index * samples : (index + 1) * samples], parts.tokenizer)
                write(record)
                tokens += sum(record["lengths"])
                stopped += sum(record["stopped"])
    return Summary(len(dataset), len(dataset) * samples, tokens, stopped, dataset.left_out, timer.seconds["gen"])


def answer(parts: Assembly, text: str) -> tuple[list[str], Summary]:
    """Returns rollout.n responses to one text, asked as a user's message if the tokenizer has a chat template; in an
    environment each is a whole conversation."""
    policy = open_policy(parts)
    (row,) = parts.rows_of_prompts([text], count(), "data.max_prompt_length={}")
    start, samples = time.perf_counter(), parts.config.actor_rollout_ref.rollout.n
    sampling = training_sampling(parts.config, policy.stop_tokens)
    environments = parts.environments(policy.stop_tokens)
    if environments:
        environments.prove(row)
    episodes = replace(policy, environments=environments).episodes([row], samples, sampling)
    seconds = time.perf_counter() - start
    texts = texts_for_people(episodes, partial(parts.tokenizer.batch_decode, skip_special_tokens=True))
    tokens = sum(len(span.tokens) for episode in episodes for span in episode.spans if span.log_probs)
    return texts, Summary(1, len(episodes), tokens, sum(episode.done for episode in episodes), 0, seconds)


def record_of(row: PromptRow, episodes: list[Episode], tokenizer: Any) -> Record:
    """Returns the row with its responses. Log-probs and lengths are of what the policy wrote."""
    drawn = [[span.log_probs for span in episode.response if span.log_probs] for episode in episodes]
    tokens = [tokens_of(episode) for episode in episodes]
    return {
        **row.extra_info,
        "responses": tokenizer.batch_decode(tokens, skip_special_tokens=True),
        "log_probs": [sum(chain.from_iterable(spans)) for spans in drawn],
        "lengths": [sum(map(len, spans)) for spans in drawn],
        "stopped": [episode.done for episode in episodes],
        **{name: [episode.extras[name] for episode in episodes] for name in CONVERSED if name in episodes[0].extras},
    }


def require_free_columns(dataset: PromptDataset) -> None:
    for table in dataset.tables:
        if taken := sorted({*ADDED, *CONVERSED} & set(table.columns)):
            raise UserError(
                f"it has a column {taken[0]!r} already, which the output needs for itself",
                key=dataset.key,
                value=table.path,
                fix="rename that column",
            )


@contextmanager
def writer(output: Path) -> Iterator[Callable[[Record], object]]:
    """Gives the block a function that writes a record. jsonl goes to disk record by record, parquet at the end, when
    all types are known."""
    records: list[Record] = []
    with replacing(output, OUTPUT) as file:
        if output.suffix == ".jsonl":
            yield lambda record: file.write(line_of(record))
            return
        yield records.append
        try:
            table = pa.Table.from_pylist(records)
        except pa.ArrowException as error:
            raise UserError(
                f"the rows do not fit one parquet schema: {str(error).splitlines()[0]}",
                key=OUTPUT,
                value=output,
                fix=f"{OUTPUT}={output.with_suffix('.jsonl')}",
            ) from error
        parquet.write_table(table, file)
