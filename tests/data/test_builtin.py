"""The arithmetic task that comes with the package."""

from __future__ import annotations

import subprocess
import sys

import pytest
from byte_tokenizer import byte_tokenizer

from paddock.config.schema import DataConfig
from paddock.data.builtin import SPLITS, builtin_rows
from paddock.data.dataset import PromptDataset
from paddock.errors import UserError
from paddock.rewards.rules import compute_score

TRAIN, TEST, WARMUP, PAIRS, PAIRS_TEST = (
    f"builtin:addition/{split}" for split in ("train", "test", "warmup", "pairs", "pairs_test")
)


def pairs(name: str) -> set[frozenset[str]]:
    return {frozenset(row["prompt"].rstrip("=").split("+")) for row in builtin_rows(name)}


@pytest.mark.parametrize("seen", [TRAIN, WARMUP, PAIRS])
def test_a_tested_pair_is_never_seen_in_either_order(seen):
    assert pairs(TEST) and not pairs(TEST) & pairs(seen)


def test_all_pairs_of_two_digits_are_either_trained_on_or_tested():
    everything = {frozenset({str(a), str(b)}) for a in range(10, 100) for b in range(10, 100)}
    assert pairs(TRAIN) | pairs(TEST) == everything
    prompts = [row["prompt"] for row in builtin_rows(TRAIN) + builtin_rows(TEST)]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("name", [name for name in SPLITS if "addition" in name])
def test_the_truth_is_the_sum_read_backwards(name):
    for row in builtin_rows(name):
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        truth = row["reward_model"]["ground_truth"]
        assert int(truth[::-1]) == a + b
        assert compute_score(row["data_source"], truth, truth) == 1.0
        assert compute_score(row["data_source"], truth + "0", truth) == 0.0
        assert row.get("answer", truth) == truth


def test_products_are_asked_of_the_same_numbers_and_a_warm_start_calls_the_tool_every_second_time():
    for split in ("train", "test"):
        sums, rows = builtin_rows(f"builtin:addition/{split}"), builtin_rows(f"builtin:products/{split}")
        assert [row["prompt"] for row in rows] == [row["prompt"].replace("+", "*") for row in sums]
        for row in rows[:99]:
            a, b = map(int, row["prompt"].rstrip("=").split("*"))
            assert row["reward_model"]["ground_truth"] == str(a * b)
    turns = [row["messages"] for row in builtin_rows("builtin:products/turns")]
    calls = [messages for messages in turns if len(messages) == 4]
    assert 0.45 < len(calls) / len(turns) < 0.55
    assert 0.15 < sum(f"{said[3]['content']}=" != said[2]["content"] for said in calls) / len(calls) < 0.25


def test_warm_start_rows_carry_their_answers():
    assert all("answer" in row for row in builtin_rows(WARMUP))


def test_preference_pairs_prefer_the_right_answer_of_every_sum():
    assert pairs(PAIRS) == pairs(TRAIN) and pairs(PAIRS_TEST) == pairs(TEST)
    for row in builtin_rows(PAIRS) + builtin_rows(PAIRS_TEST):
        truth = row["reward_model"]["ground_truth"]
        assert row["chosen"] == truth and row["rejected"] != truth and row["rejected"].isdigit()


def test_wrong_answers_are_shorter_as_often_as_longer_and_wrong_in_every_digit():
    rows = [row for row in builtin_rows(PAIRS)]
    longer = [len(row["rejected"]) - len(row["chosen"]) for row in rows]
    assert 0.8 < sum(gap > 0 for gap in longer) / sum(gap < 0 for gap in longer) < 1.25
    alike = [(row["chosen"], row["rejected"]) for row in rows if len(row["rejected"]) == len(row["chosen"]) == 3]
    for place in range(3):
        assert sum(right[place] != wrong[place] for right, wrong in alike) > 0.1 * len(alike)


def test_rows_are_the_same_in_every_process():
    code = f"from paddock.data.builtin import builtin_rows; print([r['prompt'] for r in builtin_rows({TEST!r})])"
    environment = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str([row["prompt"] for row in builtin_rows(TEST)])


def test_a_data_set_reads_them_by_name():
    dataset = PromptDataset(TEST, byte_tokenizer(), DataConfig(max_prompt_length=6), key="data.val_files")
    row, raw = dataset[3], builtin_rows(TEST)[3]
    assert (row.messages, row.ground_truth) == (raw["prompt"], raw["reward_model"]["ground_truth"])
    assert len(row.tokens) == len("12+34=") and dataset.sources == {"paddock/addition": len(dataset)}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UserError, match="did you mean 'builtin:addition/train'"):
        builtin_rows("builtin:addition/trian")
