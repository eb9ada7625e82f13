"""Scorers by data source, on answers that are hard to judge."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from paddock.errors import UserError
from paddock.grading.verdicts import compared
from paddock.loading.load import load
from paddock.rewards.maths import thought_and_boxed
from paddock.rewards.rules import compute_score, gsm8k, scorer_of
from paddock.rewards.score import Failed, ScoreRequest, checked
from paddock.trainer.assembly import open_rewards

LONG = 100_000  # characters

GSM8K = [
    ("so it is #### 42", "42", 1),
    ("#### 1,234", "1234", 1),
    ("#### 1,234,567.50", "1234567.5", 1),
    ("#### 1,00,000", "100000", 1),
    ("#### $18", "18", 1),
    ("#### -$18", "-18", 1),
    ("#### $-18", "-18", 1),
    ("####18", "18", 1),
    ("#### 18.00", "18", 1),
    ("#### 18.", "18", 1),
    ("#### .5", "0.5", 1),
    ("#### -5", "-5", 1),
    ("#### 5", "-5", 0),
    ("#### 50%", "50", 1),
    ("#### 1/2", "0.5", 1),
    ("#### 1/2", "1", 0),
    ("#### 1/0", "1", 0),
    ("#### 7 no, #### 8", "8", 1),
    ("#### 8 no, #### 7", "8", 0),
    ("#### 42 apples", "42", 1),
    ("#### 42km", "42", 1),
    ("#### 420", "42", 0),
    ("the answer is 42", "42", 0),
    (r"\boxed{42}", "42", 0),
    (r"#### \frac{1}{2}", "0.5", 0),
    ("#### forty-two", "42", 0),
    ("####", "42", 0),
    ("", "42", 0),
    ("#### 42" + " and so on" * 40, "42", 0),  # the answer must stand near the end
    ("x" * LONG + "#### 42", "42", 1),
    ("#### " * (LONG // 5) + "42", "42", 1),
    ("#" * LONG, "42", 0),
    ("#### " + "9" * LONG, "42", 0),
    ("#### 1.2.3", "1", 0),
    ("#### 12", "1,2", 1),
]


@pytest.mark.parametrize(("answer", "truth", "score"), GSM8K)
def test_gsm8k_takes_the_last_marked_number(answer, truth, score):
    assert compute_score("openai/gsm8k", answer, truth) == score


FLEXIBLE = [
    ("the answer is 42.", 1),
    ("41, no, 42", 1),
    ("42, no, 41", 0),
    ("#### 42", 1),
    (r"\boxed{42}", 1),
    (r"it costs $42.00!", 1),
    ("84/2", 1),
    ("42 %", 1),
    ("none", 0),
    ("", 0),
    ("...,,,", 0),
    ("42" + "x" * LONG, 0),
    ("x" * LONG + "42", 1),
]


@pytest.mark.parametrize(("answer", "score"), FLEXIBLE)
def test_gsm8k_flexible_takes_the_last_number(answer, score):
    assert gsm8k(answer, "42", method="flexible") == score


def test_gsm8k_has_two_methods():
    with pytest.raises(ValueError, match="method is 'loose', not strict or flexible"):
        gsm8k("#### 42", "42", method="loose")


def test_the_config_chooses_the_method_of_the_scorer_that_has_one():
    asked = [ScoreRequest("openai/gsm8k", "it is 42", "42"), ScoreRequest("paddock/addition", "42", "42")]
    for settings, expected in (([], [0, 1]), (["reward_model.compute_score_kwargs={method: flexible}"], [1, 1])):
        with open_rewards(load(settings).config) as rewards:
            assert [score.value for score in rewards.score(asked)] == expected
    later = load(["+reward.compute_score_kwargs={method: flexible}"]).config
    assert later.reward_model.compute_score_kwargs == {"method": "flexible"}


def test_gsm8k_refuses_a_truth_that_is_no_number():
    with pytest.raises(Failed, match="ValueError: the ground truth 'forty' is not a number"):
        compute_score("openai/gsm8k", "#### 40", "forty")


EQUAL = [
    # fractions
    (r"\frac12", "0.5"),
    ("1/2", r"\frac{1}{2}"),
    (r"\dfrac{3}{4}", r"\frac{3}{4}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt3}"),
    ("1:2", r"\frac12"),
    # numbers
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    (r"1\,234", "1234"),
    (r"1,\!234", "1234"),
    ("1234.0", "1,234"),
    ("2^{10}", "1024"),
    (r"1.0\times 10^6", "1000000"),
    ("5!", "120"),
    (r"\log_2 8", "3"),
    (r"\binom{5}{2}", "10"),
    # percent, money, units
    (r"50\%", "50"),
    ("50%", r"50\%"),
    (r"\$18", "18"),
    (r"\$1,234.50", "1234.5"),
    ("18 dollars", "18"),
    (r"5\text{ cm}", "5"),
    ("5 cm", "5"),
    ("5cm^2", "5"),
    (r"12\text{ km/h}", "12"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    # LaTeX and algebra
    (r"2\sqrt2", r"\sqrt{8}"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{x+2}{7}", r"\frac{2+x}{7}"),
    ("x=5", "5"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,2", "2,1"),
    (r"\pm 2", "2,-2"),
    (r"6 \text{ or } 8", "6,8"),
    (r"\left(\frac12,3\right)", "(0.5,3)"),
    (r"x\in[1,2]", "[1,2]"),
    (r"(-\infty,2)\cup(3,\infty)", r"(-\infty, 2) \cup (3, \infty)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\text{even}", "even"),
    ("Even", r"\text{even}"),
    (r"\text{(B)}", "B"),
    (r"\textbf{(B)}", r"\text{B}"),
    ("**7**", "7"),
    ("$7$.", "7"),
]
DIFFERENT = [
    (r"\frac{1}{3}", r"\frac{1}{2}"),
    ("0.33", r"\frac13"),
    ("12", "1,2"),
    ("1,2", "12"),
    ("112", "11_2"),
    (r"50\%", "0.5"),
    ("5x", "5"),
    ("5xy", "5"),
    ("(1,2]", "[1,2]"),
    ("(2,1)", "(1,2)"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("2", r"\pm 2"),
    (r"\text{even}", r"\text{odd}"),
    ("A", "B"),
    ("-5", "5"),
    (r"\frac{1}{0}", "5"),
    (r"\frac{1}{", "1"),
    ("}{", "7"),
    ("", "7"),
    ("7", ""),
    ("", ""),
    ("1+" * (LONG // 2) + "1", "50001"),
    ("9" * LONG, "9"),
    ("{" * LONG, "7"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_answers_that_mean_the_same_are_equal(answer, truth):
    assert compared(answer, truth).equal


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT, ids=lambda text: text[:20])
def test_answers_that_mean_another_thing_are_not(answer, truth):
    begin = time.perf_counter()
    assert not compared(answer, truth).equal
    assert time.perf_counter() - begin < 2.0


BOXES = [
    (r"\boxed{\frac12}", "0.5", 1),
    (r"\boxed{1} no, \boxed{2}", "2", 1),
    (r"\boxed{2} no, \boxed{1}", "2", 0),
    (r"\boxed{7} and then \boxed{", "7", 0),
    (r"\boxed{\boxed{7}", "7", 1),
    (r"\boxed{7", "7", 0),
    (r"\boxed{}", "7", 0),
    (r"$\boxed 7$", "7", 1),
    (r"\fbox{7}", "7", 1),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1),
    ("7", "7", 0),
    ("", "7", 0),
    (r"\boxed{" + "1+" * (LONG // 2) + "1}", "50001", 0),
    ("x" * LONG + r"\boxed{7}", "7", 1),
    (r"\boxed{7}" + "x" * LONG, "7", 1),
    (r"\boxed{" * (LONG // 7), "7", 0),
]


@pytest.mark.parametrize(("answer", "truth", "score"), BOXES, ids=lambda text: str(text)[:20])
def test_math_takes_the_last_box(answer, truth, score):
    assert compute_score("lighteval/MATH", answer, truth) == score


NUMINA = [
    (r"so \boxed{7}", "7", 1),
    (r"The answer is 8. \boxed{7}", "7", 1),
    ("The answer is 7.", "7", 1),
    ("the answer is: $\\frac{1}{2}$", "0.5", 1),
    ("Answer: 7 cm", "7", 1),
    ("The answers are 1, 2", r"\{1,2\}", 1),
    ("The answer is 6. No: the answer is 7.", "7", 1),
    ("The answer is 7. No: the answer is 6.", "7", 0),
    ("The answer is **(B)**", "B", 1),
    ("7", "7", 0),
    ("", "7", 0),
    ("The answer is", "7", 0),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{1,234}", "1234", 1),
    ("x" * LONG + "the answer is 7", "7", 1),
    ("the answer is 7" + "x" * LONG, "7", 0),
    ("answer is " * (LONG // 10), "7", 0),
]


@pytest.mark.parametrize(("answer", "truth", "score"), NUMINA, ids=lambda text: str(text)[:20])
def test_numina_takes_the_box_or_what_is_called_the_answer(answer, truth, score):
    begin = time.perf_counter()
    assert compute_score("numina_olympiads", answer, truth) == score
    assert time.perf_counter() - begin < 2.0


THOUGHT = "<think>because</think>"
GEOMETRY = [
    (THOUGHT + r"\boxed{12}", "12", 1.0, True, True),
    (THOUGHT + r" so \boxed{12} it is", "12", 1.0, True, True),
    (THOUGHT + r"\boxed{12\text{ cm}}", "12", 1.0, True, True),
    (THOUGHT + r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0, True, True),
    (THOUGHT + r"\boxed{13} or \boxed{12}", "12", 1.0, True, True),
    (THOUGHT + r"\boxed{60^\circ}", "60", 1.0, True, True),
    (THOUGHT + r"\boxed{13}", "12", 0.1, False, True),
    (r"\boxed{12}", "12", 0.9, True, False),
    (r"<think>\boxed{12}</think>", "12", 0.9, True, False),
    (r"well <think></think>\boxed{12}", "12", 0.9, True, False),
    (THOUGHT + "12", "12", 0.0, False, False),
    (THOUGHT + r"\boxed{12", "12", 0.0, False, False),
    ("", "12", 0.0, False, False),
    ("<think>" + "x" * LONG + r"</think>\boxed{12}", "12", 1.0, True, True),
    ("<think>" + "</think>" * (LONG // 8) + r"\boxed{" * 1000, "12", 0.0, False, False),
]


@pytest.mark.parametrize(
    ("answer", "truth", "score", "correct", "in_format"), GEOMETRY, ids=lambda text: str(text)[:20]
)
def test_geometry_weighs_the_answer_and_its_form(answer, truth, score, correct, in_format):
    begin = time.perf_counter()
    found = compute_score("hiyouga/geometry3k", answer, truth)
    assert found["score"] == pytest.approx(score) and (found["acc"], found["format"]) == (correct, in_format)
    assert time.perf_counter() - begin < 2.0


def test_the_weight_of_the_form_can_be_set():
    right, wrong = r"\boxed{12}", THOUGHT + r"\boxed{13}"
    assert [thought_and_boxed(text, "12", format_score=0.5)["score"] for text in (right, wrong)] == [0.5, 0.5]


PARIS = {"target": ["Paris", "the City of Light"]}
SEARCH = [
    ("<answer>Paris</answer>", PARIS, 1),
    ("<answer> the PARIS. </answer>", PARIS, 1),
    ("<answer>City of light!</answer>", PARIS, 1),
    ("<answer>London</answer> no, <answer>Paris</answer>", PARIS, 1),
    ("<answer>Paris</answer> no, <answer>London</answer>", PARIS, 0),
    ("<answer>in Paris</answer>", PARIS, 0),
    ("<answer>Paris", PARIS, 0),
    ("Paris</answer>", PARIS, 0),
    ("</answer>Paris<answer>", PARIS, 0),
    ("Paris", PARIS, 0),
    ("<answer></answer>", PARIS, 0),
    ("", PARIS, 0),
    ("<answer>Paris</answer></answer>", PARIS, 1),
    ("<answer>a <answer>Paris</answer>", PARIS, 1),
    ("<answer>Paris</answer>", "paris", 1),
    ("<answer>Paris</answer>", ["Rome", "Paris"], 1),
    ("<answer>1,234</answer>", ["1234"], 1),
    ("<answer>$1/2$</answer>", ["1/2"], 1),
    ("<answer>50%</answer>", ["50"], 1),
    ("<answer>1984</answer>", [1984], 1),
    ("<answer>Paris</answer>" * 11, PARIS, 0.25),
    ("x" * LONG + "<answer>Paris</answer>", PARIS, 1),
    ("<answer>" + "x " * (LONG // 2) + "</answer>", PARIS, 0),
    ("<answer>" * (LONG // 8), PARIS, 0),
]


@pytest.mark.parametrize(("answer", "truth", "score"), SEARCH, ids=lambda text: str(text)[:20])
def test_search_answers_match_exactly_but_for_case_articles_and_punctuation(answer, truth, score):
    begin = time.perf_counter()
    assert compute_score("searchR1_nq", answer, truth) == score
    assert time.perf_counter() - begin < 1.0


def test_search_refuses_a_truth_without_answers():
    with pytest.raises(Failed, match="ValueError: the ground truth has no answer"):
        compute_score("searchR1_nq", "<answer>x</answer>", {"target": []})


NAMES = {
    "stated": [
        *("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12"),
        "numina_olympiads",
    ],
    "tagged_answer": [
        *("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa", "searchR1_2wikimultihopqa"),
        *("searchR1_musique", "searchR1_bamboogle"),
    ],
    "boxed": ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"],
    "answer_line": ["math_dapo", "math", "math_dapo_reasoning", "aime", "aime2024", "aime_2025"],
    "thought_and_boxed": ["hiyouga/geometry3k"],
    "gsm8k": ["openai/gsm8k"],
    "contest": ["codecontests", "apps", "codeforces", "taco"],
    "humaneval": ["openai/openai_humaneval", "paddock/programs"],
    "mbpp": ["google-research-datasets/mbpp"],
}


@pytest.mark.parametrize(("function", "name"), [(function, name) for function in NAMES for name in NAMES[function]])
def test_every_name_of_a_source_has_its_scorer(function, name):
    assert scorer_of(name).target.name == function


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
        (r"Answer: \frac{68}{2}", True, r"\frac{68}{2}"),
        ("Answer: 34 cm", True, "34 cm"),
        (r"Answer: 34\%", True, r"34\%"),
        ("Answer: 3,4", False, "3,4"),
        ("Answer: 34.0", True, "34.0"),
        (r"\boxed{34}", True, "34"),
        (r"\boxed{34} or Answer: 33", False, "33"),
        ("Answer:", False, ""),
        ("", False, ""),
        ("x" * LONG + "Answer: 34", True, "34"),
        ("Answer: " + "9" * LONG, False, ""),
    ],
    ids=lambda text: str(text)[:20],
)
def test_dapo_rewards_by_plus_and_minus_one_and_tells_what_it_read(answer, correct, pred):
    expected = {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}
    assert compute_score("math_dapo", answer, "34") == expected


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


AS_VERL = [
    ("openai/gsm8k", "#### 18.", "18", 1, 0),
    ("openai/gsm8k", "#### $18", "18", 1, 0),
    ("openai/gsm8k", "#### 1,234", "1234", 1, 1),
    ("openai/gsm8k", "#### .5", "0.5", 1, 0),
    ("math_dapo", "Answer: 18.", "18", 1, -1),
    ("math_dapo", r"Answer: \frac12", "0.5", 1, -1),
    ("math_dapo", r"Answer: $x = \frac12$", r"\frac{1}{2}", 1, 1),
    ("math_dapo", r"Answer: 5\text{ meters}", "5", 1, 1),
    ("math_dapo", r"Answer: 1,234", "1234", 1, 1),
    ("math_dapo", r"so \boxed{18}", "18", 1, 1),
    ("math_dapo", r"\boxed{18}, Answer: 19", "18", -1, -1),
    ("math_dapo", "none", "18", -1, -1),
]


@pytest.mark.parametrize(("source", "answer", "truth", "ours", "verls"), AS_VERL)
def test_two_rules_give_verls_own_verdicts_if_asked(source, answer, truth, ours, verls):
    scores = [compute_score(source, answer, truth), compute_score(source, answer, truth, verdicts="verl")]
    assert [checked(score).value for score in scores] == [ours, verls]


def test_verdicts_of_nobody_are_refused():
    with pytest.raises(Failed, match="not paddock or verl"):
        compute_score("openai/gsm8k", "#### 1", "1", verdicts="trl")
