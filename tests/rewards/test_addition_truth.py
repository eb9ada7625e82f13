"""Ground truths of `paddock/addition`: digits as a text, or a whole number; anything else is named, not scored 0."""

from __future__ import annotations

import pytest

from paddock.rewards.rules import compute_score
from paddock.rewards.score import Failed


@pytest.mark.parametrize(
    ("truth", "answer", "score"),
    [
        ("64", "64", 1.0),
        ("64", " 64\n", 1.0),
        ("64", "46", 0.0),
        ("04", "4", 0.0),  # a text counts digit by digit
        (64, "64", 1.0),
        (64, " 64 ", 1.0),
        (64, "65", 0.0),
        (4, "04", 1.0),  # a number has no leading zeros
        (-5, "-5", 1.0),
        (64, "", 0.0),
        (64, "64.0", 0.0),
        (64, "sixty-four", 0.0),
        (64, "9" * 5000, 0.0),
        (64, "٦٤", 0.0),
    ],
)
def test_a_whole_number_is_compared_as_a_number(truth, answer, score):
    assert compute_score("paddock/addition", answer, truth) == score


@pytest.mark.parametrize("truth", [None, True, 6.4, [64], {"target": "64"}])
def test_any_other_truth_is_an_error_and_no_score(truth):
    with pytest.raises(Failed, match="is neither a text nor a whole number"):
        compute_score("paddock/addition", "64", truth)
