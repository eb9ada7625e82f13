"""Verdicts on mathematical answers: a table of pairs, answers that are too much for a parser, remembered verdicts."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
from conftest import ROOT

from benchmarks.hedges import LETTERS, hedges
from paddock.core.batch import Batch
from paddock.core.boxed import last_boxes
from paddock.grading import library, verdicts
from paddock.grading.limits import SECONDS, TooLong, Unread, cpu_seconds
from paddock.grading.notation import canonical
from paddock.grading.reader import read
from paddock.grading.values import SampledValue, valued
from paddock.grading.verdicts import compared
from paddock.loading.load import load
from paddock.rewards.functions import Failed, Target
from paddock.rewards.maths import boxed
from paddock.rewards.rules import compute_score
from paddock.rewards.runners import ProcessPool, ScoringJob
from paddock.rewards.score import ScoreRequest, checked
from paddock.trainer.assembly import open_rewards

TABLE = [line.split("\t") for line in (ROOT / "tests" / "rewards" / "answers.tsv").read_text().splitlines()[1:]]


KINDS = sorted({row[0] for row in TABLE})


@pytest.mark.parametrize("kind", KINDS)
def test_the_pairs_of_a_kind_have_their_verdicts(kind):
    def verdict(truth: str, answer: str) -> str:
        equal = checked(boxed(answer, truth)).value == 1 if kind == "boxes" else compared(answer, truth).equal
        return "equal" if equal else "different"

    assert [row for row in TABLE if row[0] == kind and verdict(row[1], row[2]) != row[3]] == []


def test_the_table_covers_every_kind_of_answer_on_both_sides():
    kinds = {row[0] for row in TABLE}
    assert len(TABLE) >= 400 and len({tuple(row[:3]) for row in TABLE}) == len(TABLE)
    for kind in kinds - {"malformed"}:
        assert {row[3] for row in TABLE if row[0] == kind} == {"equal", "different"}, kind
    asked = [
        "set",
        "interval",
        "matrix",
        "base",
        "units",
        "text",
        "percent",
        "choice",
        "tuple",
        "complex",
        "plus-minus",
        "boxes",
    ]
    assert kinds >= {*asked, "mixed number"}


ONE_WAY = {
    ("equation", "4"),  # `x^2 + y^2 = 4` says `4` as an answer, and more than that as a truth
    ("equation", "a+b=7"),
    ("integer", "m+n = 809"),
    ("equation", "2x=10"),  # `x = 5` solves it
    ("equation", "5=6"),
}
BOTH_WAYS = [row for row in TABLE if row[0] not in ("boxes", "sum") and (row[0], row[2]) not in ONE_WAY]


@pytest.mark.parametrize("kind", sorted({row[0] for row in BOTH_WAYS}))
def test_equality_does_not_depend_on_which_side_is_the_truth(kind):
    rows = [row for row in BOTH_WAYS if row[0] == kind]
    assert [row for row in rows if compared(row[1], row[2]).equal != (row[3] == "equal")] == []


HEDGES = [
    *(r"(A) (B) (C) (D) (E)", "(A) B", "A. B. C", "(A) x=B", r"(A)\ (B)", "answer: B. answer: D", r"\textbf{(B)}[D]"),
    *("\\text{(B)}\n\\text{(D)}", r"x=\text{(C)}(\text{(D)})", "A=B", "A B", "(A) maybe B", "Ⓐ Ⓑ", "(A) (B) 12"),
    *("(a) (b)", "A, B", r"\{A, B\}", "A+0B", r"\sqrt{A^2} \text{ or } B", "A. wait, (b)"),
]


@pytest.mark.parametrize("hedge", HEDGES)
def test_an_answer_that_names_two_options_is_right_for_none(hedge):
    truths = [f for letter in LETTERS for f in (letter, f"({letter})", rf"\text{{({letter})}}", f"({letter}) 12")]
    assert [truth for truth in [*truths, "12"] if compared(hedge, truth).equal] == []


def test_no_hedge_of_the_grammar_is_accepted():
    """`python benchmarks/hedges.py` tries 100,000."""
    assert [text for text, letters in hedges(600, seed=0) if any(compared(text, each).equal for each in letters)] == []


@pytest.mark.parametrize("source", ["HuggingFaceH4/MATH-500", "math_dapo", "numina_olympiads", "hiyouga/geometry3k"])
def test_one_answer_to_all_multiple_choice_questions_pays_with_no_rule(source):
    answer = r"\boxed{(A) (B) (C) (D) (E)} Answer: (A) (B) (C) (D) (E)"
    found = [checked(compute_score(source, answer, letter)).value for letter in "ABCDE"]
    assert max(found) <= 0


FURTHER = [
    ("B", "B)", True), ("B", r"\textbf{(B)}\ 2x+1", True), ("x", "(A) x", True), ("e", "(A) e", True),
    ("12", r"12\$", True), ("10:30", "10{:}30", True), ("5", "5个", True), ("5", "5 人", True), ("5 m", "5米", True),
    ("5 kg", "5米", False), ("5", "5万", False), ("5", r"5\text{万}", False), ("12", r"12\text{ is too small}", False),
    (r"\pm 3", "(3,-3)", False), ("(1,2)", "1 or 2", False), ("0,1,-1", r"0,\pm 1", True),
    ("5, 6", "(a) 5, (b) 6", True),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "answer", "equal"), FURTHER)
def test_further_pairs_have_their_verdicts(truth, answer, equal):
    assert compared(answer, truth).equal is equal


@pytest.mark.parametrize("source", ["lighteval/MATH", "math_dapo", "numina_olympiads", "hiyouga/geometry3k"])
def test_a_row_without_a_truth_is_refused_and_one_of_several_truths_suffices(source):
    with pytest.raises(Failed, match="ground truth is None"):
        compute_score(source, r"\boxed{None} Answer: None", None)
    with pytest.raises(Failed, match="ground truth is None"):
        compute_score(source, "nothing", None)
    assert checked(compute_score(source, r"\boxed{2} Answer: 2", ["1", "2"])).value > 0.5


VALUES = [
    (r"1\frac{1}{2}", "3/2"),
    (r"-1\frac{1}{2}", "-3/2"),
    (r"\frac12\cdot 3", "3/2"),
    ("2^{3^2}", "512"),
    ("2^3^2", "512"),
    ("-3^2", "-9"),
    ("(-3)^2", "9"),
    ("6/2*3", "9"),
    (r"\binom52", "10"),
    ("3!!", "720"),
    (r"0.1\overline{6}", "1/6"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"\sqrt{\frac{9}{4}}", "3/2"),
    ("8^{2/3}", "4"),
    ("|3-5|", "2"),
    (r"\lfloor -1.5 \rfloor", "-2"),
    (r"\gcd(12,18)+\max(1,2)", "8"),
    ("1.5e3", "1500"),
    (r"(-1)^{10^{100}}", "1"),
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_an_expression_has_its_exact_value(text, value):
    assert str(valued(read(canonical(text)), SampledValue(None))) == value


@pytest.mark.parametrize(
    "text", ["2 3", "x2", "((7", "}{", r"\frac{1}{", r"\sqrt", "4210_8", "1..2", "+", r"\unknown{5}"]
)
def test_what_has_no_grammar_is_not_guessed(text):
    with pytest.raises(Unread):
        read(canonical(text))


@pytest.mark.parametrize(
    ("response", "boxes"),
    [
        (r"\boxed{1} and \boxed{2}", ["1", "2"]),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", ["1", "2"]),
        (r"\boxed{1}, \boxed{\frac{1}{2}} and \boxed{3}", ["1", r"\frac{1}{2}", "3"]),
        (r"\boxed{1} \text{ and } \boxed{2}", ["1", "2"]),
        (r"\boxed{1} no, it is \boxed{2}", ["2"]),
        (r"\boxed{1} \boxed{2}", ["2"]),
        (r"\boxed{1}," + " " * 100_000 + r"\boxed{2}", ["2"]),
        (r"\boxed{1}", ["1"]),
        (r"\boxed{1} and \boxed{2", []),
        ("none", []),
    ],
    ids=lambda value: str(value)[:30],
)
def test_boxes_that_a_comma_or_an_and_joins_are_one_answer(response, boxes):
    assert last_boxes(response) == boxes


LARGE = [
    r"10^{10^{10}}",
    r"9^{9^{9^9}}",
    "2^" * 400 + "2",
    "(2^{99})^{" * 60 + "2" + "}" * 60,
    r"\sin" * 150 + "x",
    r"\sin(" * 150 + "x" + ")" * 150,
    r"\sqrt{" * 140 + "2" + "}" * 140,
    r"\frac{1}{1+" * 80 + "1" + "}" * 80,
    "100000!",
    "5!!!!",
    r"\binom{10^9}{5\cdot 10^8}",
    r"\exp(\exp(\exp(\exp(9))))",
    r"\tan(10^{100})",
    r"10^{-10^{9}}",
    "-" * 900 + "1",
    ",".join(map(str, range(250))),
]
HEAVY = [
    r"(x+1)^{10000}-1",
    r"x^{1000000000}",
    "(a+b+c+d)^{999}" * 60,
    "(x+1)(x+2)(x+3)" * 60,
    r"\begin{pmatrix}" + "&".join(["1"] * 240) + r"\\" + "&".join(["2"] * 240) + r"\end{pmatrix}",
    r"\{" + ",".join(f"x_{n}" for n in range(99)) + r"\}",
    r"\sum_{k=1}^{10^{9}} k^{k}",
    r"\prod_{k=1}^{100000} k",
    r"\lim_{n\to\infty} n^{n^{n}}",
    r"1\pm " * 20 + "2",
    r"(1,2)\cup" * 99 + "(3,4)",
    "0." + "12" * 400 + "...",
    r"0.\overline{" + "1" * 900 + "}",
    "1e9999",
    *(
        "(" * 900,
        "{" * 900,
        "|" * 900,
        "$" * 900,
        "\\" * 900,
        "^" * 900,
        "_" * 900,
        "1 " * 450,
        "1," * 400,
        "aa " * 300,
    ),
    *("5" + r"\," * 400 + "1", "5 " + "cm " * 200, "5 " + r"\text{cm}" * 100, r"\text{" * 150, "1:" * 400, "x=" * 300),
]


@pytest.fixture(scope="module")
def imported() -> None:
    """The first answer of each kind in a process imports what sympy needs for it."""
    for text in (r"\lim_{n\to\infty} \frac{1}{n}", r"(1,2)\cup(3,4]", r"\begin{pmatrix}1\\2\end{pmatrix}", r"\{1,x\}",
                 "x>3", r"\sqrt{2}i", r"5\text{ cm}", "(x+1)(x+2)", "1:2"):  # fmt: skip
        for truth in (text, "7", "x+1", "(1,2)", r"\{1,2\}", "x>3"):
            compared(text, truth)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize("answer", [*LARGE, *HEAVY], ids=lambda text: text[:24])
def test_an_answer_that_is_too_much_for_a_parser_is_refused_within_a_second(answer):
    for truth in ("7", "x+1", "(1,2)", r"\{1,2\}", "x>3"):
        begin = time.process_time()
        verdict = compared(answer, truth)
        assert not verdict.equal and time.process_time() - begin < 1.0, (truth, verdict)


@pytest.mark.parametrize("answer", LARGE, ids=lambda text: text[:24])
def test_an_answer_that_was_given_up_is_undecided_not_wrong(answer):
    assert compared(answer, "x+1" if answer.startswith("-") else "7").undecided


def test_a_mistake_in_the_comparison_is_undecided_and_ends_no_run(monkeypatch):
    monkeypatch.setattr(verdicts, "form", lambda text: [][1])
    assert compared("a mistake", "of ours") == verdicts.Verdict(False, undecided=True)


def test_a_number_too_large_to_compute_equals_itself_as_it_is_written():
    assert compared("10^{10^{10}}", r"10^{ 10^{10} }").equal
    assert compared("10^{10^{10}}+1", "10^{10^{10}}") == verdicts.Verdict(False, undecided=True)


HANGS = r"\int_0^1 \sin(\sin(\sin(\sin(x^x)))) dx"  # in SymPy


def test_a_comparison_that_takes_too_long_is_given_up_once(monkeypatch):
    asked = []
    equal = library.equal
    monkeypatch.setattr(library, "equal", lambda *texts: (asked.append(texts), equal(*texts))[1])
    monkeypatch.setattr(verdicts, "SECONDS", 0.5)
    begin = time.process_time()
    assert compared(HANGS, "2") == verdicts.Verdict(False, undecided=True)
    assert time.process_time() - begin < SECONDS and len(asked) == 1
    begin = time.process_time()
    assert compared(HANGS, "2").undecided and time.process_time() - begin < 0.1 and len(asked) == 1
    assert not compute_score("lighteval/MATH", rf"another text, the same \boxed{{{HANGS}}}", "2") and len(asked) == 1


def test_a_remembered_verdict_is_read_once_whatever_surrounds_the_answer(monkeypatch):
    read_texts = []
    form = verdicts.form
    monkeypatch.setattr(verdicts, "form", lambda text: (read_texts.append(text), form(text))[1])
    for response in (r"first \boxed{\frac{34}{17}}", r"second \boxed{\frac{34}{17}}"):
        assert compute_score("lighteval/MATH", response, "2.00") == 1
    assert len(read_texts) == 2, "the truth and the answer"


def test_cpu_time_is_limited_although_the_code_catches_exceptions():
    begin = time.process_time()
    with pytest.raises(TooLong), cpu_seconds(0.1):
        while True:
            with suppress(Exception):
                sum(range(1000))
    assert time.process_time() - begin < 1.0
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) == signal.SIG_DFL


def test_in_a_thread_there_is_no_signal_and_verdicts_are_the_same():
    found = []
    thread = threading.Thread(target=lambda: found.append(compared(r"\frac{68}{17}", "4")))
    thread.start()
    thread.join()
    assert found == [verdicts.Verdict(True)]


def batch_of(sources: list[str], truth: str) -> Batch:
    ids, mask = torch.arange(len(sources)), torch.ones(len(sources), 2, dtype=torch.long)
    extras = {"data_source": sources, "ground_truth": [truth] * len(sources)}
    return Batch(ids, ids, mask, responses=mask, mask=mask, lengths=mask.sum(-1), extras=extras)


def test_answers_that_were_given_up_are_counted_and_hold_no_worker():
    towers = [rf"\boxed{{10^{{10^{{1{n}}}}}}}" for n in range(20)]
    with open_rewards(load(["reward_model.num_workers=1"]).config) as rewards:
        rewards.fill(batch_of(["lighteval/MATH"], "3"), [r"\boxed{3}"])  # the worker is up
        (worker,) = rewards.pool.workers
        begin = time.monotonic()
        sources = ["lighteval/MATH"] * 20 + ["math_dapo", "lighteval/MATH"]
        batch, metrics = rewards.fill(batch_of(sources, "3"), [*towers, "Answer: 10^{10^{10}}", r"\boxed{3.0}"])
        assert time.monotonic() - begin < 5 and rewards.pool.workers == [worker], "none was killed"
        assert batch.scores.sum(-1).tolist() == [0] * 20 + [-1, 1] and batch.extras["pred"][20] == "10^{10^{10}}"
        assert metrics["reward/math_undecided"] == 21 and metrics["reward/timeouts"] == 21
        _, metrics = rewards.fill(batch_of(["lighteval/MATH"], "3"), [r"\boxed{3}"])
        assert metrics["reward/math_undecided"] == 0


def test_runs_without_mathematics_have_no_such_metric():
    with open_rewards(load([]).config) as rewards:
        _, metrics = rewards.fill(batch_of(["openai/gsm8k"], "3"), ["#### 3"])
    assert "reward/math_undecided" not in metrics


def test_a_job_with_a_limit_of_its_own_is_killed_before_the_pool_would(tmp_path):
    file = tmp_path / "native.py"
    file.write_text("import time\ndef score(data_source, solution_str, ground_truth, extra_info): time.sleep(60)\n")
    pool = ProcessPool(1, timeout=30.0)
    job = ScoringJob(Target(str(file), "score"), (ScoreRequest("", "", ""),), limit=0.5)
    begin = time.monotonic()
    pool.submit([job])
    try:
        assert pool.results([job.future]) == [None] and time.monotonic() - begin < 10
    finally:
        pool.close()
