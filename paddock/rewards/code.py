"""Answers that are programs: taken out of the text, run in the sandbox, scored by the tests they pass.

Each scorer takes the settings of the sandbox; without them, those of a config that sets none.
Each returns, beside the score, `acc` and for every cause `sandbox/<cause>`, 1 for how this answer ended and else 0.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile, zip_longest
from math import isclose, isfinite
from typing import Any

from paddock.sandbox.program import CAUSES, Program, SandboxSettings, default_settings
from paddock.sandbox.runner import runner_of

FENCE = "```"
PYTHON = ("python", "python3", "py")
LINE, WORD = re.compile("[^\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]+"), re.compile(r"\S+")


def contest(
    solution_str: str, ground_truth: Any, sandbox: SandboxSettings | None = None, continuous: bool = True
) -> dict[str, Any]:
    """codecontests, apps, codeforces, taco: the share of tests passed, or 1 for all of them and else 0.

    The truth has `inputs` and `outputs`, texts for standard input and output; with `fn_name`, arguments and result of
    that function. A test that runs out of time is the last: those after it count as failed.
    """
    truth = _truth(ground_truth, "inputs", "outputs")
    settings = sandbox or default_settings()
    code = code_of(solution_str)
    inputs, outputs = truth["inputs"], truth["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    if function := truth.get("fn_name"):
        program = Program(code, checks=tuple(map(_call, inputs, outputs)), entry=function)
        return _checked(program, settings, continuous)
    texts = [*map(_joined, inputs)], [*map(_joined, outputs)]
    return _scored(_read_and_written(code, *texts, settings, continuous), continuous)


def humaneval(solution_str: str, ground_truth: Any, sandbox: SandboxSettings | None = None) -> dict[str, Any]:
    """1 if the function passes `check`. The truth has `prompt`, `test` and `entry_point`.  arXiv:2107.03374"""
    truth = _truth(ground_truth, "prompt", "test", "entry_point")
    prompt, entry = truth["prompt"], truth["entry_point"]
    check = f"{truth['test']}\ncheck(candidate)\n"
    program = Program(completed(prompt, entry, solution_str), checks=(check,), setup=_closed(prompt), entry=entry)
    return _checked(program, sandbox or default_settings(), continuous=False)


def mbpp(
    solution_str: str, ground_truth: Any, sandbox: SandboxSettings | None = None, continuous: bool = False
) -> dict[str, Any]:
    """1 if all asserts hold, or the share of those that do. The truth has `test_list`, and may have `test_setup_code`
    and `test_imports`.  arXiv:2108.07732"""
    truth = _truth(ground_truth, "test_list")
    setup = "\n".join([*(truth.get("test_imports") or ()), truth.get("test_setup_code") or ""])
    if not truth["test_list"]:
        raise ValueError("the ground truth has no tests")
    code = f"{setup}\n{code_of(solution_str)}"
    program = Program(code, checks=tuple(truth["test_list"]), setup=setup)
    return _checked(program, sandbox or default_settings(), continuous)


def by_its_tests(
    solution_str: str, ground_truth: Any, sandbox: SandboxSettings | None = None, continuous: bool | None = None
) -> dict[str, Any]:
    """Scores by the tests that the ground truth has: `test_list` as `mbpp`, `entry_point` as `humaneval`, or else
    `inputs` and `outputs` as `contest`. `continuous`: None leaves it to the kind of tests."""
    truth = _truth(ground_truth)
    if "entry_point" in truth and "test_list" not in truth:  # a single test
        return humaneval(solution_str, truth, sandbox)
    given = {} if continuous is None else {"continuous": continuous}
    return (mbpp if "test_list" in truth else contest)(solution_str, truth, sandbox, **given)


def code_of(answer: str) -> str:
    """Returns the last block fenced as Python, else the last fenced one, else the whole text. A last block may be
    open."""
    blocks: list[tuple[str, list[str]]] = []
    inside = False
    for line in answer.splitlines():
        mark = line.strip()
        if mark.startswith(FENCE) and FENCE not in mark.removeprefix(FENCE):
            if not inside:
                blocks.append((mark.removeprefix(FENCE).strip().lower(), []))
            inside = not inside
        elif inside:
            blocks[-1][1].append(line)
    filled = [block for block in blocks if block[1]]
    python = [block for block in filled if block[0] in PYTHON]
    return "\n".join((python or filled)[-1][1]) if filled else answer


def completed(prompt: str, entry: str, answer: str) -> str:
    """Returns the prompt with the answer, which is the whole function again or the rest of it.

    Nothing of the answer is parsed here: a parser can be brought down.
    """
    code, name = code_of(answer), entry.rpartition(".")[2]  # `Solution().name` is how LeetCode's rows call a method
    if re.search(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(name)}\b", code, re.MULTILINE):
        return f"{_closed(prompt)}\n\n{code}"
    return prompt + _body(code)


def _closed(prompt: str) -> str:
    """The prompt as a module, for the helpers that stand in it: a function of a docstring alone is whole, one without
    is not."""
    try:
        compile(prompt, "prompt", "exec", dont_inherit=True)
    except SyntaxError:
        return f"{prompt}    pass\n"
    return prompt


def _body(text: str) -> str:
    """Returns a function's body: up to the first line that is not indented."""
    lines = takewhile(lambda line: not line or line[0].isspace() or line[0] in "#)]}", text.splitlines())
    return "\n".join(lines) + "\n"


def same_output(written: str, expected: str) -> bool:
    """Compares line by line and word by word; words that are decimal fractions to six digits.

    Words are taken one at a time: a list of all would need many times the memory of what the program wrote.
    """
    return _alike(_lines(written), _lines(expected), _same_words)


def _alike(first: Iterable[str], second: Iterable[str], same: Callable[[str, str], bool]) -> bool:
    """True if there are as many of both, and all pairs are the same."""
    pairs = zip_longest(first, second)
    return all(left is not None and right is not None and same(left, right) for left, right in pairs)


def _lines(text: str) -> Iterator[str]:
    """Yields the lines that have words, split where `str.splitlines` splits."""
    return (line.group() for line in LINE.finditer(text) if not line.group().isspace())


def _same_words(line: str, expected: str) -> bool:
    return _alike((word.group() for word in WORD.finditer(line)), expected.split(), _same_word)


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not re.fullmatch(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?|[+-]?\d+\.?[eE][+-]?\d+", expected):
        return False
    try:
        return isclose(float(word), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def _read_and_written(
    code: str, inputs: Sequence[str], outputs: Sequence[str], settings: SandboxSettings, continuous: bool
) -> list[str]:
    """Returns the cause of each test. Those that were not run have the cause that stopped them."""
    runner = runner_of(settings)
    causes: list[str] = []
    end = time.monotonic() + settings.total_timeout
    for start in range(0, len(inputs), runner.at_once):
        left = end - time.monotonic()
        if left <= 0 or "timeout" in causes or (not continuous and set(causes) - {"ok"}):
            break
        some = slice(start, start + runner.at_once)
        results = runner.run_all([Program(code, stdin=text) for text in inputs[some]], min(settings.timeout, left))
        for result, expected in zip(results, outputs[some], strict=True):
            wrong = result.passed and not same_output(result.stdout, expected)
            causes.append("wrong" if wrong else result.cause)
    rest = next((cause for cause in causes if cause != "ok"), "timeout")
    return causes + [rest] * (len(inputs) - len(causes))


def _checked(program: Program, settings: SandboxSettings, continuous: bool) -> dict[str, Any]:
    (result,) = runner_of(settings).run_all([program])
    return _scored(result.checks, continuous)


def _scored(causes: Sequence[str], continuous: bool) -> dict[str, Any]:
    passed = sum(cause == "ok" for cause in causes)
    everything = passed == len(causes)
    ended = next((cause for cause in causes if cause != "ok"), "ok")
    score = passed / len(causes) if continuous else float(everything)
    return {"score": score, "acc": everything} | {f"sandbox/{cause}": float(cause == ended) for cause in CAUSES}


def _call(given: Any, expected: Any) -> str:
    """Returns a test of a function: arguments in a list, or each as JSON on a line of its own."""
    wanted = [expected]
    if isinstance(expected, str):
        with suppress(ValueError):
            wanted.append(json.loads(expected))
    call, ways = f"output = candidate(*{_literal(_arguments(given))})", _literal(wanted)
    return f"{call}\nassert any(accepted(marked(output), marked(one)) for one in {ways})"


def _literal(value: Any) -> str:
    """Writes a value as Python source. Unlike `repr` it writes inf and nan so that Python can read them."""
    if isinstance(value, float) and not isfinite(value):
        return f"float('{value}')"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_literal(item)}, " for item in value) + ")"
    return repr(value)


def _arguments(given: Any) -> list[Any]:
    if not isinstance(given, str):
        return list(given)
    try:
        return [json.loads(line) for line in given.splitlines()]
    except ValueError:
        return [given]


def _joined(text: Any) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text))


def _truth(ground_truth: Any, *needed: str) -> Mapping[str, Any]:
    """Returns the ground truth, which may be written as JSON."""
    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truth, Mapping):
        raise ValueError(f"the ground truth is {ground_truth!r:.80}, not tests: an object with inputs and outputs")
    if any(truth.get(name) is None for name in needed):
        raise ValueError(f"the ground truth must have {', '.join(needed)}; it is {ground_truth!r:.80}")
    return truth
