"""Scorers by data source, on answers that are hard to judge."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from paddock.errors import UserError
from paddock.rewards.custom import Failed
from paddock.rewards.rules import SCORERS, compute_score, gsm8k, scorer_of

GSM8K = [
    ("so it is #### 42", "42", 1),
    ("#### 1,234", "1234", 1),
    ("#### $18", "18", 1),
    ("####18", "18", 1),
    ("#### 18.00", "18", 1),
    ("#### 18.", "18", 1),
    ("#### -5", "-5", 1),
    ("#### 5", "-5", 0),
    ("#### 7 no, #### 8", "8", 1),
    ("#### 8 no, #### 7", "8", 0),
    ("#### 42 apples", "42", 1),
    ("#### 420", "42", 0),
    ("the answer is 42", "42", 0),
    ("#### forty-two", "42", 0),
    ("", "42", 0),
    ("#### 42" + " and so on" * 40, "42", 0),  # the answer must stand near the end
    ("x" * 100_000 + "#### 42", "42", 1),
    ("#### 1.2.3", "1", 0),
    ("#### 12", "1,2", 1),
]


@pytest.mark.parametrize(("answer", "truth", "score"), GSM8K)
def test_gsm8k_takes_the_last_marked_number(answer, truth, score):
    assert compute_score("openai/gsm8k", answer, truth) == score


@pytest.mark.parametrize(
    ("answer", "score"), [("the answer is 42.", 1), ("41, no, 42", 1), ("42, no, 41", 0), ("#### 42", 1), ("none", 0)]
)
def test_gsm8k_flexible_takes_the_last_number(answer, score):
    assert gsm8k("openai/gsm8k", answer, "42", method="flexible") == score


def test_gsm8k_refuses_a_truth_that_is_no_number():
    with pytest.raises(Failed, match="ValueError: the ground truth 'forty' is not a number"):
        compute_score("openai/gsm8k", "#### 40", "forty")


MATH = [
    (r"\boxed{\frac12}", "0.5", 1),
    (r"\boxed{1/2}", r"\frac{1}{2}", 1),
    (r"\boxed{\dfrac{3}{4}}", r"\frac{3}{4}", 1),
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0),
    (r"\boxed{2\sqrt2}", r"\sqrt{8}", 1),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{5\text{ cm}}", "5", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{\$18}", "18", 1),
    (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{1{,}234}", "1234", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
    (r"\boxed{(1,2]}", "[1,2]", 0),
    (r"\boxed{(2,1)}", "(1,2)", 0),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\boxed{\text{even}}", "even", 1),
    (r"\boxed{\text{even}}", r"\text{odd}", 0),
    (r"\boxed{1} no, \boxed{2}", "2", 1),
    (r"\boxed{2} no, \boxed{1}", "2", 0),
    (r"\boxed{\boxed{7}", "7", 1),
    (r"\boxed{7", "7", 0),
    (r"\boxed{}", "7", 0),
    ("7", "7", 0),
    ("", "7", 0),
    (r"\boxed{" + "1+" * 50_000 + "1}", "50001", 0),
    ("x" * 100_000 + r"\boxed{7}", "7", 1),
]


@pytest.mark.parametrize(("answer", "truth", "score"), MATH)
def test_math_compares_the_last_boxed_answer_as_mathematics(answer, truth, score):
    assert compute_score("lighteval/MATH", answer, truth) == score


@pytest.mark.parametrize("name", ["DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"])
def test_the_other_names_of_math_have_the_same_scorer(name):
    assert scorer_of(name) is SCORERS["lighteval/MATH"]


@pytest.mark.parametrize("name", ["math_dapo", "math", "math_dapo_reasoning", "aime2024", "aime_2025"])
@pytest.mark.parametrize(
    ("answer", "correct", "pred"),
    [
        ("so\nAnswer: 34", True, "34"),
        ("Answer: 33\nno\nanswer : $34$", True, "$34$"),
        (r"Answer: \boxed{34}", True, "34"),
        ("**Answer:** 34", True, "** 34"),
        ("Answer: 33", False, "33"),
        ("the answer is 34", False, ""),
        ("Answer: 34\n" + "x" * 300, False, ""),
    ],
)
def test_dapo_rewards_by_plus_and_minus_one_and_tells_what_it_read(name, answer, correct, pred):
    expected = {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
    assert compute_score(name, answer, "34") == expected


def test_an_unknown_source_lists_the_known_ones_and_the_way_out():
    with pytest.raises(UserError, match="data_source=openai/gsm9k") as error:
        compute_score("openai/gsm9k", "", "")
    assert "did you mean 'openai/gsm8k'" in error.value.fix and "aime*" in error.value.fix
    assert "custom_reward_function.path=" in error.value.fix


def test_a_scoring_process_imports_no_torch():
    code = "import paddock.rewards.worker, paddock.rewards.maths, sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_ten_thousand_gsm8k_answers_take_less_than_ten_seconds():
    answer = "She sells 16 - 3 - 4 = 9 eggs a day. " * 30
    begin = time.perf_counter()
    assert sum(compute_score("openai/gsm8k", f"{answer}#### {n}", str(n)) for n in range(10_000)) == 10_000
    assert time.perf_counter() - begin < 10


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_reference_answers_of_gsm8k_are_all_right(split):
    file = ROOT.parent / "shared" / "data" / "gsm8k" / f"{split}.jsonl"
    if not file.is_file():
        pytest.skip("GSM8K is not here")
    for line in file.read_text().splitlines():
        answer = json.loads(line)["answer"]
        truth = answer.rpartition("####")[2].strip().replace(",", "")
        assert compute_score("openai/gsm8k", answer, truth) == 1.0, answer
        assert compute_score("openai/gsm8k", answer, truth + "1") == 0.0, answer
