"""Code in answers: how it is found, how it is judged, and that it cannot judge itself."""

from __future__ import annotations

import gzip
import json
import os
import time
from dataclasses import replace

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from paddock.core.supervisor import descendants
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rewards.code import code_of, completed, contest, humaneval, mbpp, same_output
from paddock.rewards.score import ScoreRequest
from paddock.sandbox.inside.checks import accepted, same
from paddock.sandbox.inside.wire import read, written
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import CAUSES, Program, default_settings, settings_of
from paddock.trainer.assembly import open_rewards

HUMANEVAL = ROOT.parent / "shared" / "data" / "humaneval" / "HumanEval.jsonl.gz"
LIMITS = replace(default_settings(), memory_limit_mb=256)


@pytest.fixture(scope="module", autouse=True)
def _isolation() -> None:
    try:
        LocalSandbox(LIMITS).close()
    except UserError as error:
        pytest.skip(f"no isolation works on this machine: {error}")


def cause(scored: dict) -> str:
    (found,) = [name for name in CAUSES if scored[f"sandbox/{name}"] == 1.0]
    return found


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("so:\n```python\nx = 1\n```\nor\n```Python\nx = 2\n```\nit is", "x = 2"),
        ("```python\nx = 1\n```\nprints\n```\n1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```js\nlet x\n```\n```py\nx = 3\n```\n```bash\nls\n```", "x = 3"),
        ("```python3\ndef f():\n    return '''\n  a\n'''\n```", "def f():\n    return '''\n  a\n'''"),
        ("1. so\n   ```python\n   x = 1\n   ```", "   x = 1"),
        ("it was cut off ```python\n```python\nx = 1\ny =", "x = 1\ny ="),
        ("```python\n```", "```python\n```"),
        ("x = 1", "x = 1"),
        ("use ```x``` here", "use ```x``` here"),
        ("", ""),
    ],
)
def test_the_last_python_block_is_the_program(answer, code):
    assert code_of(answer) == code


def test_a_long_answer_is_searched_in_no_time():
    start = time.monotonic()
    for text in ("```\n" * 30000, "```python\nx\n" * 10000, "a" * 1_000_000, "``" * 100_000 + "`" * 100_000):
        code_of(text)
        completed("def f():\n", "f", text)
    assert time.monotonic() - start < 2


PROMPT = 'from typing import List\n\n\ndef f(x: int) -> int:\n    """One more."""\n'


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("    return x + 1\n", PROMPT + "    return x + 1\n"),
        ("    return x + 1\n\nprint(f(1))\nand so on", PROMPT + "    return x + 1\n\n"),
        ("    y = [\n1,\n]\n    return 1", PROMPT + "    y = [\n"),
        ("    y = (\n        1\n)\n# done\n    return y", PROMPT + "    y = (\n        1\n)\n# done\n    return y\n"),
        ("```python\ndef f(x):\n    return x + 1\n```", PROMPT + "\n\ndef f(x):\n    return x + 1"),
        ("I cannot.", PROMPT + "\n"),
        ("", PROMPT + "\n"),
    ],
)
def test_an_answer_is_the_whole_function_or_its_rest(answer, code):
    assert completed(PROMPT, "f", answer) == code


@pytest.mark.parametrize(
    ("written", "expected", "equal"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n3\n\n", "1 2\n3\n", True),
        ("1 2 3", "1 2\n3", False),
        ("YES", "yes", False),
        ("0.3333333333", "0.33333333", True),
        ("0.334", "0.333", False),
        ("1", "1.0", True),
        ("1.0", "1", False),
        ("1e-7", "0.0", True),
        ("12345678901234567890", "12345678901234567891", False),
        ("nan", "0.5", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_output_is_compared_by_words_and_decimals_by_value(written, expected, equal):
    assert same_output(written, expected) is equal


@pytest.mark.parametrize(
    ("output", "expected", "equal"),
    [
        ((1, [2.0, (3,)]), [1, [2, [3]]], True),
        ({1: "a"}, {"1": "a"}, True),
        (0.1 + 0.2, 0.3, True),
        (1, 2, False),
        (True, 1, True),
        ("1", 1, False),
        ([1], [1, 2], False),
        (None, False, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_results_are_compared_as_data(output, expected, equal):
    assert same(output, expected) is equal
    assert accepted(output, [expected]) is equal


ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
SUMS = {"inputs": ["1 2\n", "3 4\n", "-1 1\n", "5 5\n"], "outputs": ["3\n", "7\n", "0\n", "10\n"]}


def test_the_score_is_the_share_of_tests_passed_or_all_or_nothing():
    scored = contest(ADD, json.dumps(SUMS), sandbox=LIMITS)
    assert scored["score"] == 1.0 and scored["acc"] is True and cause(scored) == "ok"
    product = ADD.replace("a + b", "abs(a) + b if b < 4 else 7")
    scored = contest(product, SUMS, sandbox=LIMITS)
    assert scored["score"] == 0.5 and scored["acc"] is False and cause(scored) == "wrong"
    assert contest(product, SUMS, sandbox=LIMITS, continuous=False)["score"] == 0.0
    assert contest("no code", SUMS, sandbox=LIMITS)["score"] == 0.0


def test_lines_may_be_lists():
    truth = {"inputs": [["1 2", "3 4"]], "outputs": [["3", "7"]]}
    code = "for _ in range(2):\n    print(sum(map(int, input().split())))"
    assert contest(code, truth, sandbox=LIMITS)["score"] == 1.0


def test_a_test_that_runs_out_of_time_is_the_last():
    sandbox = replace(LIMITS, timeout=0.5)
    code = "x = input()\nwhile x == '2':\n    pass\nprint(x)"
    numbers = [str(number) for number in range(8)]
    start = time.monotonic()
    scored = contest(code, {"inputs": numbers, "outputs": numbers}, sandbox=sandbox)
    assert scored["score"] == 2 / 8 and cause(scored) == "timeout"
    assert time.monotonic() - start < 5


def test_all_tests_together_have_a_limit():
    sandbox = replace(LIMITS, total_timeout=1.0)
    code = "import time\ntime.sleep(0.4)\nprint(input())"
    numbers = [str(number) for number in range(20)]
    start = time.monotonic()
    scored = contest(code, {"inputs": numbers, "outputs": numbers}, sandbox=sandbox)
    assert 0 <= scored["score"] <= 2 / 20 and cause(scored) == "timeout"
    assert time.monotonic() - start < 6


@pytest.mark.parametrize(
    ("code", "truth"),
    [
        ("def two(a, b):\n    return a + b", {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}),
        ("def two(a, b):\n    return a + b", {"inputs": [[1, 2]], "outputs": [[3]]}),
        ("def two(a, b):\n    return a + b", {"inputs": ["1\n2", '"a"\n"b"'], "outputs": ["3", '"ab"']}),
        ("def two(a, b):\n    return str(a + b)", {"inputs": [[1, 2]], "outputs": ["3"]}),
        ("class Solution:\n    def two(self, a, b):\n        return (a, b)", {"inputs": [[1, 2]], "outputs": [[1, 2]]}),
        ("two = lambda a, b: [a / b]", {"inputs": [[1, 3]], "outputs": [[0.3333333]]}),
    ],
)
def test_functions_are_called_with_each_input(code, truth):
    assert contest(code, truth | {"fn_name": "two"}, sandbox=LIMITS)["score"] == 1.0


def test_a_function_scores_the_share_of_its_calls():
    truth = {"inputs": [[1], [2], [0], [4]], "outputs": [1, 0.5, 0, 9], "fn_name": "inverse"}
    scored = contest("def inverse(x):\n    return 1 / x", truth, sandbox=LIMITS)
    assert scored["score"] == 0.5 and cause(scored) == "error"
    assert contest("def other(x):\n    return 1", truth, sandbox=LIMITS)["score"] == 0.0


@pytest.mark.parametrize(
    "truth", ["no JSON", "[]", {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}, {"inputs": ["1"]}, None]
)
def test_a_row_without_tests_is_an_error_and_not_a_zero(truth):
    with pytest.raises((ValueError, TypeError)):
        contest(ADD, truth, sandbox=LIMITS)
    with pytest.raises((ValueError, TypeError)):
        humaneval("x", truth, sandbox=LIMITS)
    with pytest.raises((ValueError, TypeError)):
        mbpp("x", truth, sandbox=LIMITS)


MORE = {
    "prompt": PROMPT,
    "entry_point": "f",
    "test": "def check(candidate):\n    assert all(map(lambda x: candidate(x) == x + 1, [1, 7]))\n"
    "    assert abs(candidate(41) - 42) < 1e-6\n",
}


def more(answer: str) -> dict:
    return humaneval(answer, json.dumps(MORE), sandbox=LIMITS)


@pytest.mark.parametrize(
    "answer",
    [
        "    return x + 1\n",
        "```python\nfrom typing import List\n\ndef f(x: int) -> int:\n    return x + 1\n```",
        "Here:\n```python\ndef g(x):\n    return x\n\ndef f(x):\n    return g(x) + True\n\nif __name__ == '__main__':\n"
        "    raise SystemExit(f(int(input())))\n```",
    ],
)
def test_an_honest_function_passes(answer):
    assert more(answer)["score"] == 1.0


def test_helpers_of_the_prompt_are_there_for_the_checks_as_the_prompt_has_them():
    task = {
        "prompt": "def code(x):\n    return x * 2\n\ndef decode(x):\n",
        "entry_point": "decode",
        "test": "def check(candidate):\n    assert all(candidate(code(n)) == n for n in range(9))\n",
    }
    assert humaneval("    return x // 2\n", task, sandbox=LIMITS)["score"] == 1.0
    cheat = "```python\ndef code(x):\n    return x\ndef decode(x):\n    return x\n```"
    assert humaneval(cheat, task, sandbox=LIMITS)["score"] == 0.0


CHEATS = {
    "ends itself": "import os\nos._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "exits when asked": "def f(x):\n    raise SystemExit(0)",
    "ends itself when asked": "import os\ndef f(x):\n    os._exit(0)",
    "equal to everything": "class Any(int):\n    def __eq__(self, other): return True\n"
    "    def __sub__(self, other): return 0\n    __hash__ = int.__hash__\ndef f(x):\n    return Any(7)",
    "an object equal to everything": "class Any:\n    def __eq__(self, other): return True\n"
    "    def __sub__(self, other): return 0\ndef f(x):\n    return Any()",
    "its own abs and check": "import builtins\nbuiltins.abs = abs = lambda x: 0\ncheck = lambda candidate: None\n"
    "def f(x):\n    return 2",
    "reads the tests": "import gc, sys\ndef f(x):\n"
    "    texts = [o for o in gc.get_objects() if isinstance(o, str) and 'candidate' + '(41)' in o]\n"
    "    return x + 1 if texts else 0",
    "says that it passed": "import os\nfor number in range(3, 20):\n    try:\n"
    '        os.write(number, b\'{"check": "ok"}\\n{"status": 0}\\n\')\n    except OSError:\n        pass\n'
    "def f(x):\n    return 0",
    "tells names that Python has": "def assert_(x): pass\ndef AssertionError(*a): pass\ndef f(x):\n    return 0",
    "an answer that is none": """import os
def f(x):
    os.write(3, b'["value", ["eval", "x + 1"]]\\n')
    return 0""",
    "ends the checks' loops": "def f(x):\n    raise StopIteration",
}


@pytest.mark.parametrize("answer", list(CHEATS.values()), ids=list(CHEATS))
def test_a_program_cannot_judge_itself(answer):
    scored = more(f"```python\n{answer}\ndef f_(x): pass\n```" if "def f(" in answer else f"```python\n{answer}\n"
                  "def f(x):\n    return 0\n```")  # fmt: skip
    assert scored["score"] == 0.0 and cause(scored) in ("wrong", "error")


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("    while True: pass", "timeout"),
        ("    return [bytes(1 << 20) for _ in range(10000)]", "memory"),
        ("    import socket; socket.socket()", "forbidden"),
        ("    print('x' * (1 << 30))", "memory"),
        ("    while True: print('x' * (1 << 20))", "output"),
        ("    import os; os.kill(os.getpid(), 11)", "killed"),
        ("    raise ValueError(x)", "error"),
        ("    return x", "wrong"),
        ("    import os; os.fork() or os.setsid() or __import__('time').sleep(99); return x + 1", "left_running"),
        ("    return (", "error"),
    ],
)
def test_a_functions_failure_is_counted_by_its_cause(body, found):
    scored = humaneval(body, MORE, sandbox=replace(LIMITS, timeout=3.0))
    assert scored["score"] == 0.0 and cause(scored) == found


def asserts(code: str, *tests: str, **truth) -> dict:
    truth = {"test_list": list(tests), **truth}
    return mbpp(f"```python\n{code}\n```", truth, sandbox=LIMITS)


def test_mbpp_counts_when_all_asserts_hold():
    code = "def half(x):\n    return x / 2"
    assert asserts(code, "assert half(4) == 2", "assert half(1) == 0.5")["score"] == 1.0
    scored = asserts(code, "assert half(4) == 2", "assert half(1) == 0")
    assert scored["score"] == 0.0 and cause(scored) == "wrong"
    truth = {"test_list": ["assert half(4) == 2", "assert half(1) == 0"]}
    assert mbpp(code, truth, sandbox=LIMITS, continuous=True)["score"] == 0.5
    assert cause(asserts("def other(x): pass", "assert half(4) == 2")) == "error"


@pytest.mark.parametrize(
    ("code", "test", "truth"),
    [
        ("def evens(n):\n    yield from range(0, n, 2)", "assert list(evens(5)) == [0, 2, 4]", {}),
        ("def pairs(a, b):\n    return zip(a, b)", "assert dict(pairs('ab', [1, 2])) == {'a': 1, 'b': 2}", {}),
        ("def keys(d):\n    return d.keys()", "assert len(keys({1: 2})) == 1 and set(keys({1: 2})) == {1}", {}),
        (
            "from collections import Counter\ndef count(x):\n    return Counter(x)",
            "assert count('aab') == {'a': 2, 'b': 1}",
            {},
        ),
        ("class Pair:\n    def __init__(self, a):\n        self.a = a\ndef first(p):\n    return p[0].a",
         "assert first([Pair(5), Pair(6)]) == 5", {}),
        ("def total(node):\n    return node.value + (total(node.next) if node.next else 0)",
         "assert total(Node(1, Node(2))) == 3",
         {"test_setup_code": "class Node:\n    def __init__(self, value, next=None):\n"
                             "        self.value, self.next = value, next"}),
        ("def root(x):\n    return x ** 0.5", "assert math.isclose(root(2), 1.41421356, rel_tol=0.001)",
         {"test_imports": ["import math"]}),
        ("from fractions import Fraction\ndef half():\n    return Fraction(1, 2)", "assert half() == 0.5", {}),
        ("from enum import IntEnum\nclass E(IntEnum):\n    A = 3\ndef e():\n    return E.A", "assert e() == 3", {}),
        ("import re\ndef has(t):\n    return re.search('b', t)", "assert has('abc') and not has('ac')", {}),
        ("def adder(n):\n    return lambda x: x + n", "assert adder(2)(3) == 5", {}),
        ("def c():\n    return 3 + 4j, {1, 2}, frozenset([3]), b'x', None, (), range(3)",
         "assert c() == (3 + 4j, {1, 2}, frozenset([3]), b'x', None, (), range(3))", {}),
        ("def c():\n    return [10 ** 9999, -(1 << 60), 'ä\\ud800', True, -0.0]",
         "assert c() == [10 ** 9999, -(1 << 60), 'ä\\ud800', 1, 0]", {}),
        ("from datetime import *\ndef when():\n    return datetime(2024, 1, 2, 3), timedelta(1), date(2024, 2, 29)",
         "from datetime import *\nassert when() == (datetime(2024, 1, 2, 3), timedelta(1), date(2024, 2, 29))", {}),
        ("from decimal import Decimal\ndef d():\n    return {(1, 2): Decimal('1.10'), None: float('inf')}",
         "import decimal\nassert d() == {(1, 2): decimal.Decimal('1.1'), None: float('inf')}", {}),
    ],
)  # fmt: skip
def test_what_functions_return_is_judged_as_if_they_were_called_in_place(code, test, truth):
    scored = asserts(code, test, **truth)
    assert scored["score"] == 1.0, scored


SIMPLE = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.fractions()
    | st.complex_numbers(allow_nan=False) | st.dates() | st.datetimes() | st.timedeltas()
    | st.decimals(allow_nan=False)
)  # fmt: skip
HASHABLE = st.recursive(SIMPLE, lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3))
PLAIN = st.recursive(
    HASHABLE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(HASHABLE, inner, max_size=3) | st.sets(HASHABLE),
    max_leaves=12,
)


@given(PLAIN)
def test_plain_values_arrive_as_they_left(value):
    kept: list = []
    arrived = read(json.loads(json.dumps(written(value, kept))), None)
    assert (arrived, type(arrived), kept) == (value, type(value), [])


def test_an_exception_that_a_check_waits_for_is_the_programs_own():
    code = "def f(x):\n    raise KeyError(x)"
    check = "try:\n    f(1)\nexcept KeyError as error:\n    assert '1' in str(error)\nelse:\n    assert False"
    assert asserts(code, check)["score"] == 1.0


def problems() -> list[dict]:
    if not HUMANEVAL.is_file():
        pytest.skip("HumanEval is not beside this checkout")
    with gzip.open(HUMANEVAL, "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("answer", "score"), [("canonical_solution", 1.0), ("    pass\n", 0.0)])
def test_humaneval_solutions_score_one_and_pass_scores_nothing(answer, score):
    found = {row["task_id"]: humaneval(row.get(answer, answer), row, sandbox=LIMITS) for row in problems()}
    assert len(found) == 164
    assert {task: scored for task, scored in found.items() if scored["score"] != score} == {}


def test_a_batch_with_hostile_answers_is_scored_in_time_and_leaves_no_process():
    """As a run does it: by source, through the processes that score."""
    before = descendants(os.getpid())
    config = load(["reward_model.sandbox.timeout=1", "reward_model.num_workers=2"]).config
    answers = ["    return x + 1", "    while True: pass", "    import socket; socket.socket()", "    return x"]
    requests = [ScoreRequest("openai/openai_humaneval", answer, json.dumps(MORE)) for answer in answers * 2]
    with open_rewards(config) as rewards:
        start = time.monotonic()
        scores = rewards.score(requests)
        assert time.monotonic() - start < config.reward_model.timeout
    assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0] * 2
    assert [score.extras["sandbox/timeout"] for score in scores] == [0.0, 1.0, 0.0, 0.0] * 2
    assert [score.extras["sandbox/forbidden"] for score in scores] == [0.0, 0.0, 1.0, 0.0] * 2
    assert not any(score.timed_out for score in scores)
    end = time.monotonic() + 5
    while descendants(os.getpid()) - before and time.monotonic() < end:
        time.sleep(0.05)
    assert descendants(os.getpid()) - before == set()


def test_a_program_that_may_outlive_its_scorer_is_refused_by_key():
    config = load(["reward_model.sandbox.timeout=28"]).config
    with pytest.raises(UserError, match=r"reward_model\.sandbox\.timeout=28") as error:
        settings_of(config.reward_model)
    assert error.value.fix == "reward_model.timeout=34"


@pytest.mark.slow
def test_164_times_8_programs_take_less_than_a_minute():
    programs = [
        Program(completed(row["prompt"], row["entry_point"], row["canonical_solution"]), setup=row["prompt"],
                checks=(f"{row['test']}\ncheck(candidate)",), entry=row["entry_point"])
        for row in problems()
    ]  # fmt: skip
    with LocalSandbox(LIMITS, size=2) as sandbox:
        start = time.monotonic()
        results = sandbox.run_all(programs * 8)
        assert time.monotonic() - start < 60
    assert {result.cause for result in results} == {"ok"} and len(results) == 1312
