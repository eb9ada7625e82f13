"""Problems of our own: rows as HumanEval's are, references that pass their tests, wrong answers that do not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from conftest import ROOT

from benchmarks.results.programs import held_out
from benchmarks.results.programs.__main__ import FAMILIES, PER_FAMILY, SOURCE, UNSEEN, splits, tasks_of
from benchmarks.results.programs.problem import FEWEST, Draw, made
from paddock.data.prepare import humaneval
from paddock.errors import UserError
from paddock.rewards.code import completed
from paddock.rewards.rules import scorer_of
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import Program, default_settings

HUMANEVAL = ROOT.parent / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
ONE_EACH = {name: next(tasks_of(name, family, seed=1)) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def sandbox():
    with LocalSandbox(default_settings(), size=2) as found:
        yield found


@pytest.fixture(scope="module")
def everything():
    return splits(seed=1)


def judged(sandbox, tasks, answers):
    """Whether each answer, given as a model gives it, passes the tests of its row."""
    programs = []
    for task, answer in zip(tasks, answers, strict=True):
        truth = json.loads(task.row("train", 0)["reward_model"]["ground_truth"])
        code = completed(truth["prompt"], truth["entry_point"], f"Here it is:\n```python\n{answer}```")
        check = f"{truth['test']}\ncheck(candidate)\n"
        programs.append(Program(code, checks=(check,), setup=truth["prompt"], entry=truth["entry_point"]))
    return [result.passed for result in sandbox.run_all(programs)]


def test_the_reference_of_every_family_passes_its_tests_in_the_sandbox(sandbox):
    passed = judged(sandbox, ONE_EACH.values(), [task.problem.solution() for task in ONE_EACH.values()])
    assert [name for name, right in zip(ONE_EACH, passed, strict=True) if not right] == []


def test_an_answer_that_always_returns_the_result_of_the_first_example_fails_in_every_family(sandbox):
    stubs = []
    for task in ONE_EACH.values():
        (_, result), *_ = task.problem.examples()
        stubs.append(f"{task.problem.header('none')}\n    return {result!r}\n")
    passed = judged(sandbox, ONE_EACH.values(), stubs)
    assert [name for name, right in zip(ONE_EACH, passed, strict=True) if right] == []


def test_there_are_many_problems_of_many_families_and_their_tests_tell_right_from_constant(everything):
    tasks = [task for found in everything.values() for task in found]
    assert len(FAMILIES) >= 60 and len(everything["train"]) >= 1500
    assert len(everything["own_test"]) == UNSEEN * len(FAMILIES)
    assert len({(task.problem.name, task.problem.body) for task in tasks}) == len(tasks)
    assert all(len(task.problem.cases) >= FEWEST and task.problem.is_tested() for task in tasks)
    counts = Counter(task.task_id.partition("/")[0] for task in tasks)
    assert counts.keys() == FAMILIES.keys() and max(counts.values()) <= PER_FAMILY
    assert min(counts.values()) > UNSEEN


def test_problems_with_other_rules_have_tests_that_tell_them_apart(everything):
    """The reference of one problem is mostly wrong for the next one of its family."""
    by_family: dict[str, list] = {}
    for task in everything["train"]:
        by_family.setdefault(task.task_id.partition("/")[0], []).append(task.problem)
    same = pairs = 0
    for problems in by_family.values():
        for one, other in pairwise(problems):
            pairs += 1
            scope: dict = {}
            exec(one.solution(), scope)
            same += one.takes == other.takes and all(
                agrees(scope[one.name], given, result) for given, result in other.cases
            )
    assert same / pairs < 0.03


def agrees(function, given, result):
    try:
        return function(*given) == result
    except Exception:
        return False


def test_a_row_is_what_the_preparation_of_humaneval_writes_and_hides_the_solution():
    task = ONE_EACH["windows"]
    row = task.row("train", 7)
    assert row["data_source"] == SOURCE and scorer_of(SOURCE) is scorer_of(humaneval.SOURCE)
    assert row["extra_info"] == {"split": "train", "index": 7, "task_id": "windows/1"}
    truth = json.loads(row["reward_model"]["ground_truth"])
    assert truth.keys() == {"prompt", "test", "entry_point"}
    (message,) = row["prompt"]
    assert message["content"] == f"{humaneval.INSTRUCTION}\n\n```python\n{truth['prompt'].strip()}\n```"
    assert task.problem.body not in message["content"]


def test_the_same_seed_makes_the_same_problems_and_another_one_others():
    first, again, other = ([task.prompt for task in tasks_of("tank", FAMILIES["tank"], seed, 5)] for seed in (1, 1, 2))
    assert first == again != other


def test_a_problem_shows_examples_in_three_forms_and_hints_in_three():
    problem = made("twice", {"xs": "list[int]"}, "int", "Twice the sum.", "return $k * sum(xs)",
                   [([n],) for n in range(1, 7)], values={"k": 2})  # fmt: skip
    assert problem.prompt("builtin", "session") == (
        'def twice(xs: list[int]) -> int:\n    """Twice the sum.\n'
        '    >>> twice([1])\n    2\n    >>> twice([2])\n    4\n    """\n'
    )
    assert problem.prompt("typing", "equal").startswith("from typing import List\n\n\ndef twice(xs: List[int]) -> int:")
    assert "Examples:\n    twice([1]) == 2" in problem.prompt("none", "equal")
    assert problem.prompt("none", "returns").startswith("def twice(xs):")
    assert problem.test().startswith("def check(candidate):\n    assert candidate([1]) == 2\n")
    assert Draw("a").random() == Draw("a").random()


THEIRS = {"prompt": "def theirs(x):\n    one two three four five six seven eight nine", "entry_point": "theirs"}


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        ({"theirs": {"def theirs(): anything"}}, "functions of the same names: theirs"),
        ({"f": {"say: TWO three, four 5 five six seven eight nine"}}, "two three four five six seven eight nine"),
    ],
)
def test_a_name_or_eight_words_in_common_with_the_test_set_are_refused(tmp_path, ours, reason):
    file = tmp_path / "HumanEval.jsonl"
    file.write_text(json.dumps(THEIRS) + "\n")
    with pytest.raises(UserError, match=reason):
        held_out.compared(ours, file)
    found = held_out.compared({"f": {"two three four five six seven eight"}}, file)
    assert (found["problems"], found["longest_run"]) == (1, 7)


@pytest.mark.skipif(not HUMANEVAL.is_file(), reason="HumanEval is not here")
def test_the_command_writes_rows_that_share_nothing_with_humaneval(tmp_path):
    command = [sys.executable, "-m", "benchmarks.results.programs", "--out", tmp_path, "--held-out", HUMANEVAL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "programs.json").read_text())
    assert facts == json.loads(done.stdout)
    assert facts["held_out"]["problems"] == 164 and facts["held_out"]["longest_run"] < held_out.RUN
    assert {path.name for path in tmp_path.iterdir()} == {"train.parquet", "own_test.parquet", "programs.json"}
