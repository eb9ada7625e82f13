"""Rules that the key `reward` names: each scores every row, whatever its data_source. docs/en/rewards.md has them.

A rule compares the response with the row's ground truth, as any scorer does; its further arguments are `reward_kwargs`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paddock.errors import UserError
from paddock.facts.distribution import install_command
from paddock.facts.modules import MODULE
from paddock.grading.limits import TooLong, cpu_seconds
from paddock.rewards.custom import Target
from paddock.rewards.rules import SCORERS, Scorer, texts_of
from paddock.rewards.score import Score

SECONDS = 0.5  # CPU seconds that a pattern or a schema may take on one response; ordinary ones take below 0.001
TRUTH = "{ground_truth}"
CLOSING = {"{": "}", "[": "]"}
TIMED_OUT = Score(0.0, timed_out=True)


def exact_match(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
) -> float:
    """1 if the response is the ground truth, or one of a list of them; else 0. White space at the ends does not count,
    and any run of it is one space."""
    answer = normal(solution_str, ignore_case, ignore_punctuation)
    return float(any(answer == normal(truth, ignore_case, ignore_punctuation) for truth in texts_of(ground_truth)))


def contains(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    ignore_case: bool = False,
    whole_words: bool = True,
) -> float:
    """1 if the ground truth, or one of a list of them, stands somewhere in the response; else 0. White space counts as
    in `exact_match`. With `whole_words`, a place does not count that lies inside a longer word or number."""
    answer = normal(solution_str, ignore_case)
    truths = [normal(truth, ignore_case) for truth in texts_of(ground_truth)]
    if "" in truths:
        raise ValueError("the ground truth is empty, and every response contains that")
    return float(any(_stands_in(truth, answer, whole_words) for truth in truths))


def regex(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, pattern: str | None = None
) -> float | Score:
    """1 if the pattern is found somewhere in the response, else 0. The pattern is the ground truth, or `pattern`, in
    which `{ground_truth}` stands for the row's ground truth as plain text."""
    if pattern is None:
        patterns = texts_of(ground_truth)
    elif TRUTH in pattern:
        patterns = [pattern.replace(TRUTH, re.escape(truth)) for truth in texts_of(ground_truth)]
    else:
        patterns = [pattern]
    found = [compiled(each) for each in patterns]
    return within_time(lambda: float(any(each.search(solution_str) for each in found)))


def json_schema(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    schema: Mapping[str, Any] | None = None,
) -> float | Score:
    """1 if the last JSON object in the response is valid by the schema, else 0; the last array, if the schema's type is
    that. The schema is `schema` or, without it, the row's ground truth, an object or its JSON text."""
    chosen = ground_truth if schema is None else schema
    validator = validator_of(chosen if isinstance(chosen, str) else json.dumps(chosen))
    opening = "[" if validator.schema.get("type") == "array" else "{"
    return within_time(lambda: _valid(validator, solution_str, opening))


def code(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **options: Any
) -> dict[str, Any]:
    """Scores the program in the response by the tests in the ground truth, run in the sandbox: `test_list` (as
    MBPP), `test` with `entry_point` (as HumanEval), or else `inputs` and `outputs`."""
    from paddock.rewards import code as programs

    truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(truth, Mapping):
        raise ValueError(f"the ground truth is {ground_truth!r:.80}, not tests: an object with inputs and outputs")
    if "test_list" in truth:
        return programs.mbpp(data_source, solution_str, truth, extra_info, **options)
    if "entry_point" in truth:
        options.pop("continuous", None)  # it has one test
        return programs.humaneval(data_source, solution_str, truth, extra_info, **options)
    return programs.contest(data_source, solution_str, truth, extra_info, **options)


def normal(text: str, ignore_case: bool, ignore_punctuation: bool = False) -> str:
    text = text.casefold() if ignore_case else text
    if ignore_punctuation:
        text = "".join(character for character in text if not unicodedata.category(character).startswith("P"))
    return " ".join(text.split())


def _stands_in(truth: str, answer: str, whole_words: bool) -> bool:
    start = answer.find(truth)
    while start >= 0:
        end = start + len(truth)
        if not whole_words or not (
            _joined(answer[start - 1 : start], truth[0]) or _joined(truth[-1], answer[end : end + 1])
        ):
            return True
        start = answer.find(truth, start + 1)
    return False


def _joined(left: str, right: str) -> bool:
    """True if two neighbours belong to one number or one word. Scripts without capitals write many words without a
    space between them: there any place counts."""
    return (left.isdigit() and right.isdigit()) or (_cased(left) and _cased(right))


def _cased(character: str) -> bool:
    return character.lower() != character.upper()


def compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r:.80} is not a regular expression: {error}") from error


def within_time(score: Callable[[], float]) -> float | Score:
    try:
        with cpu_seconds(SECONDS):
            return score()
    except TooLong:
        return TIMED_OUT


@lru_cache(maxsize=256)
def validator_of(schema: str) -> Any:
    """Returns the schema in this JSON text, checked. Its references lead nowhere but into itself: nothing is
    fetched."""
    from jsonschema import SchemaError, validators
    from referencing import Registry

    try:
        content = json.loads(schema)
        if not isinstance(content, Mapping):
            raise ValueError("it is not an object")
        kind = validators.validator_for(content, default=validators.Draft202012Validator)
        kind.check_schema(content)
    except (ValueError, SchemaError) as error:
        raise ValueError(f"{schema!r:.80} is not a JSON schema: {getattr(error, 'message', error)}") from error
    return kind(content, registry=Registry())


def _valid(validator: Any, text: str, opening: str) -> float:
    found = last_json(text, opening)
    try:
        return 0.0 if found is None else float(validator.is_valid(found))
    except (RecursionError, ArithmeticError):  # too deep, or a number that overflows: a model can write such a thing
        return 0.0


def last_json(text: str, opening: str = "{") -> Any:
    """The last JSON object in the text, or array if `opening` is `[`, that lies in no other; None if there is none."""
    decoder, last = json.JSONDecoder(parse_constant=_no_constant), None
    start = text.find(opening)
    while 0 <= start < text.rfind(CLOSING[opening]):
        try:
            last, end = decoder.raw_decode(text, start)
        except ValueError:
            end = start + 1
        except RecursionError:  # every opening in it would be tried, each for as long
            return last
        start = text.find(opening, end)
    return last


def prepared(rule: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a rule as plain values, checked before the run begins: a pattern compiles, a schema is read."""
    found = dict(arguments)
    try:
        if rule == "regex" and "pattern" in found:
            compiled(str(found["pattern"]).replace(TRUTH, "x"))  # any text, where one will stand
        if rule == "json_schema" and isinstance(found.get("schema"), str):
            found["schema"] = json.loads(Path(found["schema"]).expanduser().read_text(encoding="utf-8"))
        if rule == "json_schema" and find_spec("jsonschema") and "schema" in found:
            validator_of(json.dumps(found["schema"]))
    except (OSError, ValueError) as error:
        key = "schema" if rule == "json_schema" else "pattern"
        fix = (
            "a JSON file, or {type: object, ...}" if key == "schema" else "a pattern of Python's `re`, in single quotes"
        )
        raise UserError(str(error), key=f"reward_kwargs.{key}", value=arguments[key], fix=fix) from None
    if rule == "json_schema" and not find_spec("jsonschema"):
        reason, fix = "needs the package jsonschema, which is not installed", install_command("json")
        raise UserError(reason, key="reward", value=rule, fix=fix)
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is Python's, not JSON's")


def _named(function: str, options: str, pooled: bool = False) -> Scorer:
    target = Target(f"{MODULE}paddock.rewards.named", function)
    return Scorer(target, pooled, pure=True, options=frozenset(options.split()))


_PROGRAM = SCORERS["codecontests"]
NAMED: dict[str, Scorer] = {
    "exact_match": _named("exact_match", "ignore_case ignore_punctuation"),
    "contains": _named("contains", "ignore_case whole_words"),
    "regex": _named("regex", "pattern", pooled=True),
    "json_schema": _named("json_schema", "schema", pooled=True),
    "math": SCORERS["lighteval/MATH"],
    "code": Scorer(
        Target(f"{MODULE}paddock.rewards.named", "code"), options=_PROGRAM.options, settings=_PROGRAM.settings
    ),
}
"""Scorers by the names that `config.schema.REWARD_RULES` lists."""
