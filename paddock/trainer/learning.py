"""Says of a run that its rewards teach nothing, with the likely cause: read from the metrics of its last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STEPS = 3
ALIKE, SAME_PROMPTS = "reward/alike", "training/same_prompts"
TOKEN_AGE = "training/off_policy/token_staleness_share/"
"""Begins the names of the shares of tokens by their age in versions."""
CAUSES = (
    ("reward/unscored", 1, "reward functions returned None for {0:g} responses of the last step: return a number for "
     "each response that a function is to score"),
    ("reward/timeouts", 1, "{0:g} calls of the last step took longer than reward_model.timeout: raise it, or mend "
     "the function"),
    (SAME_PROMPTS, 1, "every prompt is the same text, or empty: check data.prompt_key, or what reset() of the "
     "environment returns"),
    ("response_length/clip_ratio", 1, "every response was cut at its limit: raise data.max_response_length"),
)  # fmt: skip
"""Metrics that explain why no response scores better than another, the value from which they do, and what to do."""
OTHERWISE = (
    "the reward is constant, or the task is too hard for this model, or solved: compare responses with their ground "
    "truths (samples.jsonl, `paddock report`)"
)


def warning(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns what keeps the last steps from teaching anything; None if they do, or were trained without rewards.

    `rows`: metrics of steps in their order. One prompt for all rows is normal where an environment asks.
    """
    last = [row for row in rows if ALIKE in row][-STEPS:]
    if len(last) < STEPS:
        return None
    if all(row[ALIKE] == 1 for row in last):
        score = last[-1].get("critic/score/mean") or 0.0
        found = f"in the last {STEPS} steps all responses to a prompt scored alike ({score:.3g} on average)"
        causes = (text.format(last[-1][name]) for name, least, text in CAUSES if (last[-1].get(name) or 0) >= least)
        return f"{found}: the reward teaches nothing. Likely cause: {next(causes, OTHERWISE)}"
    if all(row.get(SAME_PROMPTS) == 1 and "num_turns/mean" not in row for row in last):
        return f"in the last {STEPS} steps all prompts were the same. Check data.prompt_key, and the rows of the data"
    return None
