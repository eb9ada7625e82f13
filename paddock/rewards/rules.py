"""Built-in rules: which there are, which data sources and names pick them, and those that match texts.

A rule compares a response with the row's ground truth. `reward=NAME` picks one for every row, a row's data_source one
for that row; docs/en/rewards.md has them. Imports nothing heavy: rules of mathematics and of programs are imported by
the process that runs them.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import lru_cache, partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.facts.distribution import install_command
from paddock.facts.modules import MODULE
from paddock.grading.limits import TooLong, cpu_seconds
from paddock.rewards import verl_verdicts
from paddock.rewards.functions import ROW, Shape, Target, load
from paddock.rewards.score import Score, ScoreRequest
from paddock.sandbox.program import settings_of

if TYPE_CHECKING:
    from paddock.config.schema import RewardModelConfig

TAIL = 300  # characters of the response in which the final answer must stand
SECONDS = 0.5  # CPU seconds that a pattern or a schema may take on one response; ordinary ones take below 0.001
TRUTH = "{ground_truth}"
CLOSING = {"{": "}", "[": "]"}


@dataclass(frozen=True)
class Scorer:
    """A rule or a function, and what the manager must know of it."""

    target: Target
    name: str = ""
    """Name of its column and metric; for a rule the name that the key `reward` has for it."""
    weight: float = 1.0
    own: bool = False
    """True for a function of the user's own, which is given all turns of a response; False: a rule, which is given the
    last turn alone."""
    shape: Shape = ROW
    here: str | None = None
    """Why a function of this program runs in a thread of it, if it does."""
    pooled: bool = True
    """True if the function runs in a process that can be killed. False if it cannot hang and costs less than the way
    there and back, about 50 microseconds."""
    failed: float = 0.0
    """The score of a response whose scoring was cut off."""
    limit: float = inf
    """Seconds for one response, if reward_model.timeout is not less. A scorer with a limit also gives up by itself, and
    is then `undecided`."""
    pure: bool = False
    """Ground truth and response decide the score, and nothing else: equal ones need not be scored again."""
    options: frozenset[str] = frozenset()
    """Arguments of a rule that the config may set."""
    sandboxed: bool = False
    """True for a rule that runs programs: its argument `sandbox` follows from other keys of the config."""
    sources: tuple[str, ...] = ()
    """Data sources that pick the rule, a `*` standing for any text."""

    def with_arguments(self, given: Mapping[str, Any], config: RewardModelConfig) -> Scorer:
        """Returns the scorer with those of its options that are given, and with what follows from other keys."""
        kwargs = {name: value for name, value in given.items() if name in self.options}
        if self.sandboxed:
            kwargs["sandbox"] = settings_of(config)
        return replace(self, target=replace(self.target, kwargs=kwargs))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """The score that the rule for this source gives: a number, or a dict with `score` and more."""
    function = load(replace(scorer_of(data_source).target, kwargs=options))
    (score,) = function([ScoreRequest(data_source, solution_str, ground_truth, extra_info or {})])
    return {"score": score.value, **score.extras} if score.extras else score.value


def rule_of(data_source: str) -> Scorer | None:
    """Returns the rule of a source, if there is one."""
    return next((rule for pattern, rule in SCORERS.items() if fnmatchcase(data_source, pattern)), None)


def scorer_of(data_source: str, optional: bool = False) -> Scorer:
    """Returns the rule of a source; `optional`: one that gives nothing, if there is none."""
    if rule := rule_of(data_source) or (SCORERS["paddock/episodes"] if optional else None):
        return rule
    raise UserError(
        "no scorer is known for this source",
        key="data_source",
        value=data_source,
        fix=f"{suggest(data_source, list(SCORERS))}; or score all rows by custom_reward_function.path=my_reward.py, "
        "with def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0",
    )


def texts_of(ground_truth: Any) -> list[str]:
    """The answers that count as true: one text or number, or a list of them."""
    truths = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    for truth in truths:
        if not isinstance(truth, str | int | float):
            raise ValueError(f"the ground truth is {ground_truth!r:.80}, not a text or a list of texts")
    if not truths:
        raise ValueError("the ground truth is an empty list")
    return [str(truth) for truth in truths]


def addition(solution_str: str, ground_truth: str | int) -> float:
    """1 if the answer is the true text; a truth that is a whole number is compared as a number."""
    answer = solution_str.strip()
    if isinstance(ground_truth, str):
        return float(answer == ground_truth)
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, int):
        raise ValueError(f"the ground truth {ground_truth!r:.80} is neither a text nor a whole number")
    return float(bool(re.fullmatch("-?[0-9]{1,100}", answer)) and int(answer) == ground_truth)


def nothing(solution_str: str, ground_truth: Any) -> float:
    """0: the environment pays."""
    return 0.0


NOTHING = nothing.__name__


GSM8K = {"strict": r"####\s*({})", "flexible": r"({})"}
MONEY = r"-?\$?-?[\d.,]*\d(?:/\d+)?"


def gsm8k(solution_str: str, ground_truth: str, method: str = "strict", verdicts: str = "paddock") -> float:
    """1 if the last `#### number` is the true one; `flexible` takes the last number, marked or not."""
    if method not in GSM8K:
        raise ValueError(f"method is {method!r}, not {' or '.join(GSM8K)}")
    if as_verl(verdicts):
        return float(verl_verdicts.stated_number(solution_str[-TAIL:], method, str(ground_truth)))
    numbers = re.findall(GSM8K[method].format(MONEY), solution_str[-TAIL:])
    truth = number(str(ground_truth))
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    return float(bool(numbers) and number(numbers[-1]) == truth)


def as_verl(verdicts: str) -> bool:
    if verdicts not in ("paddock", "verl"):
        raise ValueError(f"verdicts is {verdicts!r}, not paddock or verl")
    return verdicts == "verl"


def number(text: str) -> Fraction | None:
    """`$1,234.50` -> 1234.5, and `1/2` -> 0.5"""
    try:
        return Fraction(text.strip().replace(",", "").replace("$", ""))
    except (ValueError, ZeroDivisionError):
        return None


MOST_TAGS = 10
ARTICLES = frozenset({"a", "an", "the"})
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def tagged_answer(solution_str: str, ground_truth: Any, format_score: float = 0.0) -> float:
    """1 if the last `<answer>` is one of the true ones but for case, articles and punctuation, a quarter of that for an
    answer among many tags, and `format_score` for another answer.  Search-R1, arXiv:2503.09516"""
    truths = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    truths = [truths] if isinstance(truths, str) else list(truths)
    if not truths:
        raise ValueError("the ground truth has no answer")
    start = solution_str.rfind("<answer>", 0, max(0, solution_str.rfind("</answer>")))
    if start < 0:
        return 0.0
    answer = solution_str[start + len("<answer>") :].partition("</answer>")[0]
    if plain_words(answer) not in map(plain_words, map(str, truths)):
        return format_score
    return 0.25 if max(map(solution_str.count, ("<answer>", "</answer>"))) > MOST_TAGS else 1.0


def plain_words(text: str) -> list[str]:
    return [word for word in text.lower().translate(NO_PUNCTUATION).split() if word not in ARTICLES]


def exact_match(
    solution_str: str, ground_truth: Any, ignore_case: bool = False, ignore_punctuation: bool = False
) -> float:
    """1 if the response is the ground truth, or one of a list of them; else 0. White space at the ends does not count,
    and any run of it is one space."""
    answer = normal(solution_str, ignore_case, ignore_punctuation)
    return float(any(answer == normal(truth, ignore_case, ignore_punctuation) for truth in texts_of(ground_truth)))


def contains(solution_str: str, ground_truth: Any, ignore_case: bool = False, whole_words: bool = True) -> float:
    """1 if the ground truth, or one of a list of them, stands somewhere in the response; else 0. White space counts as
    in `exact_match`. With `whole_words`, a place does not count that lies inside a longer word or number."""
    answer = normal(solution_str, ignore_case)
    truths = [normal(truth, ignore_case) for truth in texts_of(ground_truth)]
    if "" in truths:
        raise ValueError("the ground truth is empty, and every response contains that")
    return float(any(_stands_in(truth, answer, whole_words) for truth in truths))


def regex(solution_str: str, ground_truth: Any, pattern: str | None = None) -> float | Score:
    """1 if the pattern is found somewhere in the response, else 0. The pattern is the ground truth, or `pattern`, in
    which `{ground_truth}` stands for the row's ground truth as plain text."""
    if pattern is None:
        patterns = texts_of(ground_truth)
    elif TRUTH in pattern:
        patterns = [pattern.replace(TRUTH, re.escape(truth)) for truth in texts_of(ground_truth)]
    else:
        patterns = [pattern]
    compiled_patterns = [compiled(each) for each in patterns]
    return within_time(lambda: float(any(each.search(solution_str) for each in compiled_patterns)))


def json_schema(solution_str: str, ground_truth: Any, schema: Mapping[str, Any] | None = None) -> float | Score:
    """1 if the last JSON object in the response is valid by the schema, else 0; the last array, if the schema's type is
    that. The schema is `schema` or, without it, the row's ground truth, an object or its JSON text."""
    chosen = ground_truth if schema is None else schema
    validator = validator_of(chosen if isinstance(chosen, str) else json.dumps(chosen))
    opening = "[" if validator.schema.get("type") == "array" else "{"
    return within_time(lambda: _valid(validator, solution_str, opening))


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
        return Score(0.0, timed_out=True)


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
    value = last_json(text, opening)
    try:
        return 0.0 if value is None else float(validator.is_valid(value))
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


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is Python's, not JSON's")


def prepared(rule: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments of rules as plain values, checked before the run begins: patterns compile, schemas are read."""
    if rule == "json_schema" and not find_spec("jsonschema"):
        reason, fix = "needs the package jsonschema, which is not installed", install_command("json")
        raise UserError(reason, key="reward", value=rule, fix=fix)
    values = dict(arguments)
    for name, (prepare, fix) in _PREPARED.items():
        try:
            if name in values:
                values[name] = prepare(values[name])
        except (OSError, ValueError) as error:
            raise UserError(str(error), key=f"reward_kwargs.{name}", value=values[name], fix=fix) from None
    return values


def _pattern_of(given: Any) -> Any:
    compiled(str(given).replace(TRUTH, "x"))  # any text, where a truth will stand
    return given


def _schema_of(given: Any) -> Any:
    schema = json.loads(Path(given).expanduser().read_text(encoding="utf-8")) if isinstance(given, str) else given
    validator_of(json.dumps(schema))
    return schema


_PREPARED = {
    "pattern": (_pattern_of, "a pattern of Python's `re`, in single quotes"),
    "schema": (_schema_of, "a JSON file, or {type: object, ...}"),
}
"""What checks an argument of a rule and makes a plain value of it, and the fix if it cannot."""


def _rule(function: str, sources: str = "", options: str = "", module: str = "rules", **rest: Any) -> Scorer:
    target = Target(f"{MODULE}paddock.rewards.{module}", function)
    rest = {"pooled": False, "pure": True, **rest}
    return Scorer(target, options=frozenset(options.split()), sources=tuple(sources.split()), **rest)


_pattern = partial(_rule, pooled=True)
_mathematics = partial(_rule, module="maths", pooled=True, limit=10.0)
"""Gives up by itself (grading/limits.py). The limit here is for native code, which only a kill ends."""
_program = partial(_rule, module="code", pooled=True, pure=False, sandboxed=True)
"""Run in the sandbox. Not pure: a program may draw at random, and a busy machine may make it late."""

RULES = (
    _rule("addition", "paddock/addition paddock/products"),
    _rule("nothing", "paddock/episodes"),
    _rule("gsm8k", "openai/gsm8k", "method verdicts"),
    _rule(
        "tagged_answer",
        "searchR1_nq searchR1_triviaqa searchR1_popqa searchR1_hotpotqa searchR1_2wikimultihopqa searchR1_musique "
        "searchR1_bamboogle",
        "format_score",
    ),
    _rule("exact_match", options="ignore_case ignore_punctuation", name="exact_match"),
    _rule("contains", options="ignore_case whole_words", name="contains"),
    _pattern("regex", options="pattern", name="regex"),
    _pattern("json_schema", options="schema", name="json_schema"),
    _mathematics("boxed", "lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500", name="math"),
    _mathematics("answer_line", "math_dapo math math_dapo_reasoning aime*", "verdicts", failed=-1.0),
    _mathematics(
        "stated",
        "numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc numina_cn_k12 numina_olympiads",
    ),
    _mathematics("thought_and_boxed", "hiyouga/geometry3k", "format_score"),
    _program("by_its_tests", options="continuous", name="code"),
    _program("contest", "codecontests apps codeforces taco", "continuous"),
    _program("humaneval", "openai/openai_humaneval paddock/programs"),
    _program("mbpp", "google-research-datasets/mbpp", "continuous"),
)
SCORERS = {source: rule for rule in RULES for source in rule.sources}
"""Rules by data source; the first that fits is used."""
NAMED = {rule.name: rule for rule in RULES if rule.name}
"""Rules by the names that `config.schema.REWARD_RULES` lists."""
