"""What checks can do with a program's objects, and where the line is drawn to those who would judge themselves."""

# ruff: noqa: E501 - programs are texts
from __future__ import annotations

import json

import pytest
from test_code_scorers import LIMITS, asserts, cause

from paddock.errors import UserError
from paddock.rewards.code import contest, humaneval
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.oracle import guarded
from paddock.sandbox.program import default_settings


@pytest.fixture(scope="module", autouse=True)
def _isolation() -> None:
    try:
        LocalSandbox(default_settings()).close()
    except UserError as error:
        pytest.skip(f"no isolation works on this machine: {error}")


SPY = """
import os
class Point:
    seen = []
    def __init__(self, x): self.x = x
    def __eq__(self, other):
        Point.seen.append(repr(other))
        return isinstance(other, Point) and self.x == other.x
    def __lt__(self, other):
        Point.seen.append(repr(other))
        return self.x < other.x
    def __sub__(self, other):
        Point.seen.append(repr(other))
        return 0
    def __contains__(self, item):
        Point.seen.append(repr(item))
        return True
    def __repr__(self): return f'Point({self.x})'
def make(x):
    return Point(x)
def seen():
    return Point.seen
"""


@pytest.mark.parametrize(
    "expectation", ["make(1) == 4242", "4242 == make(1)", "make(1) in [4242]", "{4242: 1} == {make(1): 1}"]
)
def test_an_expected_value_never_reaches_the_program(expectation):
    test = f"try:\n    {expectation}\nexcept TypeError:\n    pass\nassert not any('4242' in text for text in seen())"
    assert asserts(SPY, test)["score"] == 1.0


@pytest.mark.parametrize("operation", ["make(1) < 4242", "make(1) - 4242", "4242 - make(1)", "4242 > make(1)"])
def test_operators_of_a_result_are_not_asked_about_plain_values(operation):
    test = f"try:\n    {operation}\n    assert False\nexcept TypeError:\n    pass\nassert seen() == []"
    assert asserts(SPY, test)["score"] == 1.0


def test_operators_of_a_class_that_the_check_names_are_asked():
    assert asserts(SPY, "assert Point(1) < Point(2) and 5 in Point(1) and Point(3) - Point(1) == 0")["score"] == 1.0
    assert asserts(SPY, "assert make(1) == Point(1) and make(1) != Point(2)")["score"] == 1.0


def test_a_function_with_a_capital_letter_is_believed_no_more_than_another():
    task = {
        "prompt": "def Diff(x):\n",
        "entry_point": "Diff",
        "test": "def check(c):\n    assert abs(c(41) - 42) < 1e-6\n",
    }
    cheat = "class Diff:\n    def __init__(self, x): pass\n    def __sub__(self, other): return 0\n"
    assert humaneval(f"```python\n{cheat}def Diff_(x): pass\n# def Diff(x)\n```", task, sandbox=LIMITS)["score"] == 0.0


def test_an_equality_that_agrees_to_anything_is_not_believed():
    yes = "class V:\n    def __init__(self, x): pass\n    def __eq__(self, other): return True"
    scored = asserts(yes, "assert V(1) == V(2)")
    assert scored["score"] == 0.0 and cause(scored) == "wrong"


GUARDED = {
    "a comparison": ("data = [1]\nassert f(data) == sorted(data)", True),
    "the other way round": ("data = [1]\nassert sorted(data) == f(data)", True),
    "a result with a name": ("data = [1]\nout = f(data)\nassert out == sorted(data)", True),
    "a method": ("data = [1]\nself.assertEqual(f(data), sorted(data))", True),
    "a slice by the result": ("data = [1]\nk = f(data)\nassert data[:k] == [1]", False),
    "the argument alone": ("data = [1]\nf(data)\nassert data == [2]", False),
    "no variable": ("assert f([1]) == [1]", False),
}


@pytest.mark.parametrize(("check", "wrapped"), list(GUARDED.values()), ids=list(GUARDED))
def test_only_what_a_result_is_compared_with_is_taken_as_it_was(check, wrapped):
    (found,) = guarded((check,), "import unittest\nself = unittest.TestCase()")
    assert ("__expected__" in found) is wrapped


def test_a_name_of_an_earlier_check_is_the_checks_own():
    first, second = guarded(("data = [3, 1]", "assert f(data) == sorted(data)"), "")
    assert first == "data = [3, 1]" and "__expected__" in second


def test_a_check_that_cannot_be_read_stays_as_it_is():
    assert guarded(("assert f(", "x = 1"), "") == ("assert f(", "x = 1")
    assert asserts("def f(): pass", "assert f(")["score"] == 0.0


def test_a_function_of_a_check_gives_away_nothing_but_its_results():
    look = """
def spy(f):
    found = []
    for name in ('__globals__', '__code__', '__closure__', '__self__', '__class__', '__dict__', 'gi_frame', 'func'):
        try:
            found.append(str(getattr(f, name)))
        except Exception:
            pass
    return [text for text in found if 'hidden' in text]
"""
    assert asserts(look, "hidden = 'hidden'\nassert spy(lambda: hidden) == []")["score"] == 1.0
    assert asserts(look, "class Box:\n    hidden = 'hidden'\nassert spy(Box()) == []")["score"] == 1.0


def test_a_callback_of_nobody_ends_the_program_and_not_the_checks():
    code = 'import os\ndef f(x):\n    os.write(3, b\'["callback", ["call", 99, [["tuple", []], ["dict", []]]]]\\n\')\n    return 2'
    assert asserts(code, "assert f(1) == 2")["score"] == 0.0


@pytest.mark.parametrize("swallow", ["except Exception", "except BaseException", "except"])
def test_the_end_of_a_program_cannot_be_taken_for_an_error(swallow):
    check = f"try:\n    f(1)\n{swallow}:\n    pass"
    assert asserts("import os\ndef f(x):\n    os._exit(0)", check)["score"] == 0.0
    assert asserts("def f(x):\n    raise ValueError", check)["score"] == 1.0


def test_infinity_and_what_is_no_number_in_rows():
    inf, nan = float("inf"), float("nan")
    truth = {"inputs": [[[1, inf]], [[nan]]], "outputs": [inf, nan], "fn_name": "top"}
    assert contest("def top(a):\n    return a[-1]", truth, sandbox=LIMITS)["score"] == 1.0
    assert contest("def top(a):\n    return 0.0", truth, sandbox=LIMITS)["score"] == 0.0
    assert contest("def top(a):\n    return 'nan'", truth, sandbox=LIMITS)["score"] == 0.0
    assert contest("def top(a):\n    return a[-1]", json.dumps(truth), sandbox=LIMITS)["score"] == 1.0


def test_every_solution_has_an_instance_of_its_own():
    code = "class Solution:\n    def __init__(self):\n        self.n = 0\n    def up(self):\n        self.n += 1\n        return self.n"
    truth = {"inputs": [[], []], "outputs": [1, 1], "fn_name": "up"}
    assert contest(code, truth, sandbox=LIMITS)["score"] == 1.0


MATH = "class math:\n    isclose = staticmethod(lambda *parts, **more: True)\n"
JUDGES = {
    "a module of the library": (MATH + "def area(r): return 0.0", "assert math.isclose(area(2), 12.566370614359172)", 0),
    "the judge's own": ("import math\ndef area(r): return math.pi * r * r", "assert math.isclose(area(1), math.pi)", 1),
    "not imported by the program": ("def area(r): return 3.0 * r", "assert math.floor(area(1)) == 3", 1),
    "a module of others": (MATH.replace("math", "np") + "def area(r): return 0.0", "assert np.isclose(area(2), 12.6)", 0),
    "denied": (MATH.replace("math", "np").replace("True", "False") + "def area(r): 1", "assert not np.isclose(area(2), 12)", 0),
    "a function of that name": ("def copy(x): return [x, x]", "assert copy(2) == [2, 2]", 1),
    "a method of its own object": ("class Box:\n    def add(self, n): return n + 1\nbox = Box()", "assert box.add(1) == 2", 1),
}  # fmt: skip


@pytest.mark.parametrize(("program", "check", "score"), list(JUDGES.values()), ids=list(JUDGES))
def test_a_module_that_a_check_judges_by_is_the_judges_and_not_the_programs(program, check, score):
    assert asserts(program, check)["score"] == score
