"""A device that runs out of memory: which phase asked for more, and the key with which it asks for less."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from paddock.config import tree
from paddock.config.phases import CUTS, PHASES
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config, row_tokens
from paddock.core.timing import PHASE
from paddock.errors import UserError
from paddock.loading.budgets import SEQUENCES, UNIT

SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
HOST = "DefaultCPUAllocator: "
"""Begins what torch says of a processor's memory, in a `RuntimeError` of no class of its own."""
SENTENCES = 3
"""Sentences of torch's message that are shown: how much was asked for, and how much the device has."""
PLAN = "`paddock plan` with the same keys shows what every phase needs"


@contextmanager
def explaining(config: Config, memory_by: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Raises a `UserError` with a key to lower, in place of torch's error, if a device runs out of memory in the block.

    `memory_by`: returns the phases whose memory is decided as that of another one, by name.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError) and HOST not in str(error):
            raise
        phase = str(vars(error).get(PHASE, ""))
        phase = memory_by().get(phase, phase)
        said = " ".join(re.split(r"(?<=\.)\s", str(error).rpartition(HOST)[2])[:SENTENCES])
        key, fix = less(config, phase)
        value = None if key is None else tree.get(config, key)
        where = f" in the phase `{phase}` ({PHASES[phase].title})" if phase in PHASES else ""
        reason = f"the device ran out of memory{where}: {said}"
        raise UserError(reason, key=key, value=value, fix=f"{fix}; {PLAN}") from error


def less(config: Config, phase: str) -> tuple[str | None, str]:
    """Returns the key by which a phase takes less memory, and a setting to try."""
    if phase in PHASES and PHASES[phase].generates:
        return less_at_a_time(config, phase == "testing")
    cut = CUTS.get(phase)
    if cut is None:
        return None, "a smaller model, adapters (actor_rollout_ref.model.lora_rank=32) or more devices"
    if cut.by_tokens(config):
        key, now, least, unit = cut.tokens_key, int(tree.get(config, cut.tokens_key)), row_tokens(config.data), UNIT
    else:
        key, now, least, unit = cut.rows_key, int(tree.get(config, cut.rows_key)), 1, 1
    half = max(least, now // 2 // unit * unit or now // 2)
    if half < now:
        return key, f"{key}={half}"
    recompute = PHASES[phase].checkpointing
    if recompute and not tree.get(config, recompute):
        return recompute, f"{recompute}=True"
    return key, "a micro-batch is one row already: shorter rows, adapters, offload or more devices"


def less_at_a_time(config: Config, validates: bool) -> tuple[str, str]:
    """Returns the key by which the KV cache takes less memory: half the sequences, or a smaller share for vLLM's."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if engine_kind(rollout.name).copies_weights:
        return SHARE, f"a smaller {SHARE}"
    most = rollout.max_num_seqs or 1
    asked = (data.val_batch_size or most) * rollout.val_kwargs.n if validates else data.train_batch_size * rollout.n
    if min(most, asked) > 1:
        return SEQUENCES, f"{SEQUENCES}={min(most, asked) // 2}"
    return SEQUENCES, "one sequence at a time is the least: a shorter data.max_response_length, or more devices"
