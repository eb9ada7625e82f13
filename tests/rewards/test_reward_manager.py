"""Scores and what becomes of them: the user's functions, mistakes in them, and the columns of a batch."""

from __future__ import annotations

import copy
import textwrap
from functools import cache

import pytest
import torch

from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rewards.manager import RewardManager, on_last_token
from paddock.rewards.score import ScoreRequest
from paddock.trainer.assembly import open_rewards


@cache
def read(*settings: str) -> Config:
    return load(settings).config


def loaded(*settings: str) -> Config:
    return copy.deepcopy(read(*settings))


@pytest.fixture
def manager(tmp_path):
    """Makes a manager from settings and, if given, the code of a scorer."""
    made = []

    def make(*settings: str, code: str = "", timeout: float = 20.0) -> RewardManager:
        config = loaded("reward_model.num_workers=1", f"reward_model.timeout={timeout}", *settings)
        if code:
            (tmp_path / "my_reward.py").write_text(textwrap.dedent(code))
            config.custom_reward_function.path = f"{tmp_path}/my_reward.py"
        made.append(open_rewards(config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def function(body: str) -> str:
    return f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"


def request(solution: str = "yes", truth: str = "yes", source: str = "mine", location: str = "train.parquet row 7"):
    return ScoreRequest(source, solution, truth, {"note": "n"}, location)


def batch_of(rows: int, mask: list[list[int]] | None = None, **extras) -> Batch:
    kept = torch.tensor(mask if mask is not None else [[1, 1, 0]] * rows)
    given = {"data_source": ["mine"] * rows, "ground_truth": ["yes"] * rows} | extras
    ids, prompts = torch.arange(rows), torch.ones(rows, 1, dtype=torch.long)
    return Batch(ids, ids, prompts, responses=torch.ones_like(kept), mask=kept, lengths=kept.sum(-1), extras=given)


# The user's own functions


def test_a_function_gets_what_the_row_holds_and_its_own_arguments(manager):
    code = """
    def grade(data_source, solution_str, ground_truth, extra_info, bonus, unit):
        assert (data_source, solution_str, ground_truth, extra_info) == ("mine", "yes", "yes", {"note": "n"})
        return {"score": 1 + bonus, "unit": unit}
    """
    settings = ("custom_reward_function.name=grade", "+custom_reward_function.reward_kwargs={bonus: 0.5, unit: cm}")
    (score,) = manager(*settings, code=code).score([request()])
    assert score.value == 1.5 and score.extras == {"unit": "cm"}


def test_an_async_function_is_awaited_in_one_lasting_loop(manager):
    code = """
    import asyncio
    loops = set()
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(0.001)
        loops.add(asyncio.get_running_loop())
        return len(loops)
    """
    assert {score.value for score in manager(code=code).score([request()] * 10)} == {1.0}


def test_a_function_may_import_its_neighbours(manager, tmp_path):
    (tmp_path / "neighbour.py").write_text("VALUE = 0.25")
    code = "import neighbour\n" + function("return neighbour.VALUE")
    assert manager(code=code).score([request()])[0].value == 0.25


def test_a_function_may_be_in_an_installed_module(manager):
    settings = ("custom_reward_function.path=pkg://paddock.rewards.rules", "custom_reward_function.name=addition")
    assert [s.value for s in manager(*settings).score([request(), request("no")])] == [1.0, 0.0]


@pytest.mark.parametrize("value", ["True", "1", "numpy.float32(1)", "numpy.array([1.0])", "{'score': numpy.int64(1)}"])
def test_any_kind_of_number_is_a_score(manager, value):
    assert manager(code="import numpy\n" + function(f"return {value}")).score([request()])[0].value == 1.0


MISTAKES = {
    "raises": ("return 1 / 0", r"compute_score raised ZeroDivisionError: division by zero \(my_reward.py line 2\)"),
    "exits": ("raise SystemExit(2)", r"raised SystemExit: 2"),
    "none": ("return None", r"returned None \(NoneType\), not a number"),
    "nan": ("return float('nan')", "returned nan"),
    "infinite": ("return {'score': float('inf')}", "returned a dict whose 'score' is inf"),
    "text": ("return '1.0'", r"returned '1.0' \(str\), not a number"),
    "list": ("return [1.0, 2.0]", r"returned \[1.0, 2.0\] \(list\), not a number"),
    "no score": ("return {'acc': 1, 'b': 2}", r"returned a dict without 'score': its keys are \['acc', 'b'\]"),
    "text score": ("return {'score': 'high'}", r"'score' is 'high' \(str\), not a number"),
    "object": ("return {'score': 1, 'it': object()}", "returned under 'it' a object, not a number or a text"),
    "clash": ("return {'score': 1, 'ground_truth': 2}", "returned the key 'ground_truth', which is a column"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_scorer_names_file_function_row_and_what_happened(manager, mistake):
    body, message = MISTAKES[mistake]
    rewards = manager(code=function(f"if solution_str == 'bad': {body}\n    return 1.0"))
    with pytest.raises(UserError, match=message) as error:
        rewards.score([request(location="a.parquet row 3"), request("bad", location="a.parquet row 4"), request()])
    text = str(error.value)
    assert "my_reward.py" in text and "compute_score" in text and "on a.parquet row 4" in text and "'bad'" in text


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import no_such_module",
            r"cannot be imported: ModuleNotFoundError: No module named 'no_such_module' \(my_reward.py line 1\)",
        ),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("raise SystemExit('usage')", "cannot be imported: SystemExit: usage"),
        ("def compute_scores(): pass", "has no function 'compute_score'; did you mean 'compute_scores'"),
        ("compute_score = 5", "has no function 'compute_score'; it defines none"),
        (
            "def compute_score(text): return 1",
            "takes 'text', and nothing that it is given is called so; it may name completion, prompt, ground_truth",
        ),
        ("def compute_score(text=''): return 1", "takes nothing of what it is given; it may name data_source"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_training(manager, code, message):
    with pytest.raises(UserError, match=message):
        manager(code=code).check([request()])


def test_a_check_also_refuses_a_function_that_hangs_and_a_source_without_scorer(manager):
    with pytest.raises(UserError, match="took longer than 1 s"):
        manager(code=function("import time; time.sleep(100)"), timeout=1.0).check([request()])
    with pytest.raises(UserError, match="no scorer is known for this source"):
        manager().check([request()])


def test_a_check_tries_the_built_in_scorers_too(manager):
    with pytest.raises(UserError, match=r"the ground truth 'yes' is not a number.*on train.parquet row 7"):
        manager().check([request(source="openai/gsm8k")])
    manager().check([request("1", "1", "openai/gsm8k"), request("1", "1", "lighteval/MATH")])


# Built-in scorers, in this process and in others


def test_sources_mix_in_one_call_and_scores_keep_their_order(manager):
    requests = [
        request("#### 5", "5", "openai/gsm8k"),
        request(r"\boxed{\frac12}", "0.5", "lighteval/MATH"),
        request("64", "64", "paddock/addition"),
        request("Answer: 3", "4", "math_dapo"),
        request("#### 6", "5", "openai/gsm8k"),
    ]
    assert [score.value for score in manager().score(requests)] == [1, 1, 1, -1, 0]


def test_scorers_that_cannot_hang_start_no_process(manager):
    rewards = manager()
    rewards.score([request("#### 5", "5", "openai/gsm8k"), request("64", "64", "paddock/addition")])
    assert rewards.pool.workers == []


def test_an_answer_that_hangs_the_parser_is_a_counted_failure(manager):
    rewards = manager("reward_model.num_workers=2", timeout=2.0)
    sources = ["lighteval/MATH", "math_dapo", "lighteval/MATH"]
    answers = [r"\boxed{9^{9^{9^9}}}", "Answer: 9^{9^{9^9}}", r"\boxed{\sqrt{9}}"]
    batch, metrics = rewards.fill(batch_of(3, data_source=sources, ground_truth=["3", "3", "3"]), answers)
    assert batch.scores.sum(-1).tolist() == [0, -1, 1] and metrics["reward/timeouts"] == 2


# The columns of a batch


def test_a_score_stands_on_the_last_token_the_policy_wrote():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    scores = on_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), mask)
    assert scores.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [3, 0, 0, 0], [0, 4, 0, 0], [0, 0, 0, 0]]


CODE = function("return {'score': len(solution_str), 'acc': solution_str == ground_truth, 'pred': solution_str}")


def test_what_a_scorer_returns_becomes_columns_and_means(manager):
    batch, metrics = manager(code=CODE).fill(batch_of(4), ["yes", "no", "yes", "maybe"])
    assert batch.scores.tolist() == [[0, 3, 0], [0, 2, 0], [0, 3, 0], [0, 5, 0]]
    assert batch.extras["score"] == [3, 2, 3, 5] and batch.extras["acc"] == [True, False, True, False]
    assert batch.extras["pred"] == ["yes", "no", "yes", "maybe"] and batch.extras["ground_truth"] == ["yes"] * 4
    assert metrics == {
        "reward/score/mean": 3.25,
        "reward/acc/mean": 0.5,
        "reward/timeouts": 0.0,
        "reward/cache_hits": 0.0,
    }


def test_rows_that_a_reward_model_scores_are_shown_to_no_rule(manager):
    styles = ["rule", "model", "rule"]
    batch, metrics = manager(code=CODE).fill(batch_of(3, style=styles, ground_truth=["yes", None, "yes"]), ["no"] * 3)
    assert batch.scores.sum(-1).tolist() == [2, 0, 2] and batch.extras["acc"] == [False, None, False]
    assert metrics["reward/acc/mean"] == 0.0
    unknown = batch_of(2, style=["model"] * 2, data_source=["nobody/knows"] * 2)
    for name in ("naive", "batch"):
        filled, _ = manager(f"reward_model.reward_manager={name}").fill(unknown, ["a", "b"])
        assert filled.scores.sum().item() == 0


def test_a_batch_can_be_scored_again(manager):
    rewards = manager(code=CODE)
    once, _ = rewards.fill(batch_of(1), ["yes"])
    assert rewards.fill(once, ["no"])[0].extras["score"] == [2]


def test_a_timed_out_row_counts_as_failed_in_every_column(manager):
    code = "import time\n" + CODE.replace("    return", "    if solution_str == 'hang': time.sleep(100)\n    return")
    batch, metrics = manager(code=code, timeout=1.0).fill(batch_of(2), ["yes", "hang"])
    assert batch.extras["acc"] == [True, 0.0] and batch.extras["pred"] == ["yes", None]
    assert batch.scores.sum(-1).tolist() == [3, 0]
    assert metrics == {
        "reward/score/mean": 1.5,
        "reward/acc/mean": 0.5,
        "reward/timeouts": 1.0,
        "reward/cache_hits": 0.0,
    }


def test_columns_of_mixed_sources_have_a_gap_where_a_scorer_says_nothing(manager):
    rows = batch_of(2, data_source=["openai/gsm8k", "math_dapo"], ground_truth=["5", "5"])
    batch, metrics = manager().fill(rows, ["#### 5", "Answer: 5"])
    assert batch.extras["acc"] == [None, True] and metrics["reward/acc/mean"] == 1.0
    batch, _ = manager("reward_model.reward_manager=dapo").fill(rows, ["#### 5", "Answer: 5"])
    assert batch.extras["acc"] == [1.0, True]


def test_batches_in_which_different_scorers_spoke_can_be_joined(manager):
    """Dynamic sampling joins rounds; a check has heard every scorer before the first."""
    rewards = manager()
    rewards.check([request("", "5", "openai/gsm8k"), request("", "5", "math_dapo")])
    rounds = [
        rewards.fill(batch_of(1, data_source=[source], ground_truth=["5"]), ["Answer: 5"])[0]
        for source in ("openai/gsm8k", "math_dapo")
    ]
    assert Batch.concat(rounds).extras["pred"] == [None, "5"]


def test_a_failing_row_of_a_batch_is_named_by_its_place_and_id(manager):
    rows = batch_of(2, location=["a.parquet row 8", "a.parquet row 9"])
    with pytest.raises(UserError, match=r"on a.parquet row 9 \(row id 1\)"):
        manager(code=function("return 1 / (solution_str == 'yes')")).fill(rows, ["yes", "no"])


BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"
OVERLONG = ["data.max_response_length=10", f"{BUFFER}.enable=True", f"{BUFFER}.len=4", f"{BUFFER}.penalty_factor=2"]


def test_long_responses_lose_reward_but_not_their_score(manager):
    mask = [[1] * length + [0] * (10 - length) for length in (5, 6, 7, 10)]
    logged = [*OVERLONG, f"{BUFFER}.log=True"]
    batch, metrics = manager(*logged, code=function("return 1.0")).fill(batch_of(4, mask), ["x"] * 4)
    assert batch.scores.sum(-1).tolist() == [1.0, 1.0, 0.5, -1.0]
    assert batch.scores[3].tolist() == [0.0] * 9 + [-1.0]
    assert batch.extras["score"] == [1.0] * 4 and batch.extras["overlong"] == [False, False, True, True]
    assert metrics["reward/overlong_reward/mean"] == -0.625


def test_an_impossible_overlong_buffer_is_refused_at_once(manager):
    with pytest.raises(UserError, match="between 1 and the longest response"):
        manager(*OVERLONG, f"{BUFFER}.len=11")
