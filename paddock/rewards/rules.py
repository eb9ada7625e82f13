"""Scorers by `data_source`, and those that are a few lines of text matching. Imports nothing heavy."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from math import inf
from typing import TYPE_CHECKING, Any

from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.facts.modules import MODULE
from paddock.rewards import verl_verdicts
from paddock.rewards.custom import Target, load
from paddock.rewards.score import ScoreRequest

if TYPE_CHECKING:
    from paddock.config.schema import RewardModelConfig

TAIL = 300  # characters of the response in which the final answer must stand


@dataclass(frozen=True)
class Scorer:
    """A scoring function, and what the manager must know of it."""

    target: Target
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
    """Arguments that reward_model.compute_score_kwargs may set."""
    reads_turns: bool = False
    """True if the function is given all turns of a response, as a user's own is; False: the last turn alone."""
    settings: Callable[[RewardModelConfig], dict[str, Any]] | None = None
    """Arguments that follow from other keys of the config; plain values, for they travel to another process."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """The score that the rule for this source gives: a number, or a dict with `score` and more."""
    target = scorer_of(data_source).target
    function = load(replace(target, kwargs={**target.kwargs, **options}))
    score = function(ScoreRequest(data_source, solution_str, ground_truth, extra_info or {}))
    return {"score": score.value, **score.extras} if score.extras else score.value


def has_rule(data_source: str) -> bool:
    return any(fnmatchcase(data_source, pattern) for pattern in SCORERS)


def scorer_of(data_source: str, optional: bool = False) -> Scorer:
    """Returns the scorer of a source; `optional`: one that gives nothing, if there is none."""
    for pattern, scorer in SCORERS.items():
        if fnmatchcase(data_source, pattern):
            return scorer
    if optional:
        return SCORERS["paddock/episodes"]
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


def addition(data_source: str, solution_str: str, ground_truth: str | int, extra_info: Any = None) -> float:
    """1 if the answer is the true text; a truth that is a whole number is compared as a number."""
    answer = solution_str.strip()
    if isinstance(ground_truth, str):
        return float(answer == ground_truth)
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, int):
        raise ValueError(f"the ground truth {ground_truth!r:.80} is neither a text nor a whole number")
    return float(bool(re.fullmatch("-?[0-9]{1,100}", answer)) and int(answer) == ground_truth)


def nothing(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """0: the environment pays."""
    return 0.0


NOTHING = nothing.__name__


GSM8K = {"strict": r"####\s*({})", "flexible": r"({})"}
MONEY = r"-?\$?-?[\d.,]*\d(?:/\d+)?"


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    method: str = "strict",
    verdicts: str = "paddock",
) -> float:
    """1 if the last `#### number` is the true one; `flexible` takes the last number, marked or not."""
    if method not in GSM8K:
        raise ValueError(f"method is {method!r}, not {' or '.join(GSM8K)}")
    if as_verl(verdicts):
        return float(verl_verdicts.stated_number(solution_str[-TAIL:], method, str(ground_truth)))
    found = re.findall(GSM8K[method].format(MONEY), solution_str[-TAIL:])
    truth = number(str(ground_truth))
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    return float(bool(found) and number(found[-1]) == truth)


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


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, format_score: float = 0.0
) -> float:
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


def _rule(name: str, module: str = "rules", pooled: bool = False, failed: float = 0.0, options: str = "") -> Scorer:
    target = Target(f"{MODULE}paddock.rewards.{module}", name)
    return Scorer(target, pooled, failed, pure=True, options=frozenset(options.split()))


def _program(name: str, options: str = "") -> Scorer:
    """Run in the sandbox. Not pure: a program may draw at random, and a busy machine may make it late."""
    target = Target(f"{MODULE}paddock.rewards.code", name)
    return Scorer(target, options=frozenset(options.split()), settings=_sandbox)


def _sandbox(config: RewardModelConfig) -> dict[str, Any]:
    from paddock.sandbox.program import settings_of  # imports the config's schema, which no other rule needs

    return {"sandbox": settings_of(config).as_argument()}


def _mathematics(name: str, failed: float = 0.0, options: str = "") -> Scorer:
    """Gives up by itself (grading/limits.py). The limit here is for native code, which only a kill ends."""
    return replace(_rule(name, "maths", pooled=True, failed=failed, options=options), limit=10.0)


_BOXED = _mathematics("boxed")
_DAPO = _mathematics("answer_line", failed=-1.0, options="verdicts")
_STATED = _mathematics("stated")
_EXACT = _rule("exact_match", options="format_score")
_CONTEST = _program("contest", options="continuous")
_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
_SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")

SCORERS: dict[str, Scorer] = {
    "paddock/addition": _rule("addition"),
    "paddock/products": _rule("addition"),
    "paddock/episodes": _rule("nothing"),
    "openai/gsm8k": _rule("gsm8k", options="method verdicts"),
    "lighteval/MATH": _BOXED,
    "DigitalLearningGmbH/MATH-lighteval": _BOXED,
    "HuggingFaceH4/MATH-500": _BOXED,
    "math_dapo": _DAPO,
    "math": _DAPO,
    "math_dapo_reasoning": _DAPO,
    "aime*": _DAPO,
    **{f"numina_{name}": _STATED for name in _NUMINA},
    "hiyouga/geometry3k": _mathematics("thought_and_boxed", options="format_score"),
    **{f"searchR1_{name}": _EXACT for name in _SEARCH},
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _CONTEST),
    **dict.fromkeys(("openai/openai_humaneval", "paddock/programs"), _program("humaneval")),
    "google-research-datasets/mbpp": _program("mbpp", options="continuous"),
}
"""Scorers by source, a `*` standing for any text; the first that fits is used."""
