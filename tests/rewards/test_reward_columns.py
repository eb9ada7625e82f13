"""Functions of TRL's contract: what they are given, what they may return, and how mistakes in them are told."""

from __future__ import annotations

import json
import textwrap
import time

import pytest
import torch

from paddock.core.batch import Batch
from paddock.data.dataset import PromptDataset
from paddock.data.loader import prompt_batch
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.load import load_tokenizer
from paddock.rewards.functions import BATCH, COLUMNS, Target, shape_of
from paddock.rewards.functions import load as load_function
from paddock.rewards.manager import RewardManager
from paddock.rewards.score import Failed, ScoreRequest
from paddock.trainer.assembly import open_rewards


@pytest.fixture
def file(tmp_path):
    """Writes a module of reward functions and returns its path."""
    numbers = iter(range(100))

    def write(code: str) -> str:
        path = tmp_path / f"mine{next(numbers)}.py"  # a module is imported once
        path.write_text(textwrap.dedent(code))
        return str(path)

    return write


@pytest.fixture
def call(file):
    """What the function `reward` of this code gives for these requests."""

    def run(code: str, requests: list[ScoreRequest], **kwargs):
        return load_function(Target(file(code), "reward", kwargs))(requests)

    return run


def request(solution="yes", prompt="Is it?", truth="yes", tokens=(7, 8), steps=(3, 10), row=0, **extra):
    return ScoreRequest("mine", solution, truth, extra, f"a.parquet row {row}", prompt, tokens, steps)


# What a function is given


@pytest.mark.parametrize("head", ["def", "async def"])
def test_a_plain_prompt_gives_texts_and_the_rows_columns_as_lists(call, head):
    code = f"""
    {head} reward(prompts, completions, ground_truth, task, **columns):
        assert prompts == ["1+1?", "2+2?"] and completions == ["2", "5"]
        assert ground_truth == columns["answer"] == columns["solution"] == ["2", "4"]
        assert task == ["easy", None] and columns["level"] == [None, 3] and columns["data_source"] == ["mine"] * 2
        assert columns["extra_info"] == [{{"task": "easy"}}, {{"level": 3}}]
        assert columns["completion_ids"] == [[7, 8], [7, 8]]
        assert columns["trainer_state"].global_step == 3 and columns["trainer_state"].max_steps == 10
        return [float(c == t) for c, t in zip(completions, ground_truth)]
    """
    rows = [request("2", "1+1?", "2", task="easy"), request("5", "2+2?", "4", level=3)]
    assert [score.value for score in call(code, rows)] == [1.0, 0.0]


def test_a_conversation_gives_lists_of_messages(call):
    asked = [{"role": "user", "content": "1+1?"}]
    code = """
    def reward(prompts, completions, **columns):
        assert prompts == [[{"role": "user", "content": "1+1?"}]]
        assert completions == [[{"role": "assistant", "content": "2"}]]
        return [float(completion[0]["content"]) for completion in completions]
    """
    assert call(code, [request("2", asked)])[0].value == 2.0


def test_a_column_called_answer_is_not_overwritten_by_the_ground_truth(call):
    code = "def reward(completions, answer, solution): return [float(a + s) for a, s in zip(answer, solution)]"
    assert call(code, [request(truth="2", answer="1")])[0].value == 12.0


def test_a_function_without_columns_is_given_what_it_names(call):
    code = "def reward(completion_ids, bonus): return [len(ids) + bonus for ids in completion_ids]"
    assert call(code, [request(tokens=[1, 2, 3])], bonus=0.5)[0].value == 3.5


def test_none_is_a_row_to_which_the_function_does_not_apply(call):
    first, second = call("def reward(completions, **c): return [None, 2]", [request(), request()])
    assert (first.value, first.applies) == (0.0, False) and (second.value, second.applies) == (2.0, True)


def test_what_a_function_logs_becomes_columns(call):
    code = """
    def reward(completions, log_extra, log_metric, **columns):
        log_extra("length", [len(text) for text in completions])
        log_metric("temperature", 0.5)
        return [None if text == "no" else 1.0 for text in completions]
    """
    scores = call(code, [request("yes"), request("no")])
    assert [s.extras for s in scores] == [{"length": 3, "temperature": 0.5}, {"length": 2, "temperature": 0.5}]


@pytest.mark.parametrize(
    ("head", "of_trl"),
    [
        ("def f(prompts, completions, **kwargs)", True),
        ("def f(completions, **kwargs)", True),
        ("def f(completion_ids, **kwargs)", True),
        ("async def f(completions, ground_truth, data_source, extra_info)", True),
        ("def f(data_source, solution_str, ground_truth, extra_info)", False),
        ("def f(data_source, solution_str, ground_truth, extra_info, prompts=None)", False),
        ("def f(data_sources, solution_strs, ground_truths, extra_infos)", False),
        ("def f(**kwargs)", False),
    ],
)
def test_the_signature_tells_whose_contract_a_function_has(head, of_trl):
    names: dict = {}
    exec(f"{head}: pass", names)
    assert shape_of(names["f"]).of_trl is of_trl


def test_verls_batch_manager_calls_all_functions_but_those_of_trls_contract_with_lists():
    assert shape_of(lambda completions: [1.0], batch=True) == COLUMNS
    assert shape_of(lambda solution_strs, **rest: [1.0], batch=True) == BATCH


# What it may return

MISTAKES = {
    "too few": ("return [1.0]", None, r"returned 1 scores for 2 rows"),
    "a number": ("return 1.0", None, r"returned 1.0 \(float\), not a list with a score for each row"),
    "nothing": ("pass", None, r"returned None \(NoneType\), not a list"),
    "a text": ("return [1.0, 'good']", 1, r"returned 'good' \(str\), not a number"),
    "nan": ("return [float('nan'), 1.0]", 0, "returned nan"),
    "infinite": ("return [1.0, float('inf')]", 1, "returned inf"),
    "raises": ("return [1 / 0]", None, r"raised ZeroDivisionError: division by zero \(mine0.py line 1\)"),
    "too many logged": ("columns['log_extra']('x', [1])", None, r"log_extra\('x'\) has 1 values for 2 completions"),
    "a column of the data": ("columns['log_extra']('index', [1, 2]); return [1, 2]", 0, "'index', which is a column"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_says_what_was_returned_and_for_which_row(call, mistake):
    body, row, message = MISTAKES[mistake]
    with pytest.raises(Failed, match=message) as error:
        call(f"def reward(completions, **columns): {body}", [request(), request()])
    assert error.value.row == row


def test_a_column_that_no_row_has_is_named_with_those_that_they_have(call):
    with pytest.raises(Failed, match=r"takes 'task', and nothing that .*columns of the rows: level$"):
        call("def reward(completions, task): return [1.0]", [request(level=3)])


@pytest.mark.parametrize("value", ["[True, 1]", "(1.0, 1)", "numpy.array([1.0, 1.0])", "[numpy.float32(1), 1]"])
def test_any_kind_of_numbers_will_do(call, value):
    code = f"import numpy\ndef reward(completions, **columns): return {value}"
    assert [score.value for score in call(code, [request(), request()])] == [1.0, 1.0]


# In the manager


@pytest.fixture
def manager(file):
    made = []

    def make(code: str, *settings: str, name: str = "reward") -> RewardManager:
        named = [f"custom_reward_function.path={file(code)}:{name}", "reward_model.num_workers=1", *settings]
        made.append(open_rewards(load(named).config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def batch_of(truths: list[str]) -> Batch:
    rows = len(truths)
    ids, mask = torch.arange(rows), torch.tensor([[1, 1, 0]] * rows)
    extras = {
        "data_source": ["mine"] * rows,
        "ground_truth": truths,
        "messages": ["asked?"] * rows,
        "location": [f"a.parquet row {row}" for row in range(rows)],
    }
    return Batch(ids, ids, ids[:, None], responses=mask + 4, mask=mask, lengths=mask.sum(-1), extras=extras)


CODE = """
import os
def reward(prompts, completions, completion_ids, ground_truth, trainer_state, **columns):
    assert prompts == ["asked?"] * len(prompts) and completion_ids == [[5, 5]] * len(prompts)
    open(os.path.join(os.path.dirname(__file__), "calls"), "a").write(f"{len(prompts)}@{trainer_state.global_step} ")
    return [None if t == "skip" else float(c == t) for c, t in zip(completions, ground_truth)]
"""


def test_a_function_is_called_once_a_batch_and_logged_by_its_name(manager, tmp_path):
    rewards = manager(CODE.replace("def reward", "def right"), name="right")
    rewards.steps_done = 4
    batch, metrics = rewards.fill(batch_of(["a", "b", "skip", "c"]), ["a", "x", "a", "c"])
    assert batch.extras["right"] == [1.0, 0.0, None, 1.0] and batch.scores.sum(-1).tolist() == [1, 0, 0, 1]
    assert metrics["reward/right/mean"] == pytest.approx(2 / 3), "None is not in the mean"
    assert metrics["reward/right/std"] == pytest.approx((2 / 9) ** 0.5), "nor in the deviation"
    assert metrics["reward/score/mean"] == 0.5 and metrics["reward/unscored"] == 1
    assert (tmp_path / "calls").read_text() == "4@4 "


def test_responses_that_come_one_by_one_still_make_one_call(manager, tmp_path):
    rewards, batch = manager(CODE), batch_of(["a", "b", "c"])
    scoring = rewards.begin()
    for place in (2, 0, 1):
        said = {name: values[place] for name, values in batch.extras.items()}
        scoring.add({place: rewards.request(said, place, "abc"[place], [5, 5])})
    assert [score.value for score in scoring.collect()] == [1.0, 1.0, 1.0] and 2 in scoring
    assert (tmp_path / "calls").read_text() == "3@0 "


def test_a_function_with_a_name_that_columns_have_is_called_by_its_file_too(manager):
    _, metrics = manager(CODE).fill(batch_of(["a", "b"]), ["a", "b"])
    assert metrics["reward/mine0.reward/mean"] == 1.0


def test_a_mistake_names_file_function_row_value_and_fix(manager):
    rewards = manager("def reward(completions, **columns): return [1.0 if c == 'a' else 'bad' for c in completions]")
    with pytest.raises(UserError) as error:
        rewards.fill(batch_of(["a", "b"]), ["a", "b"])
    text = str(error.value)
    assert "custom_reward_function.path=" in text and "mine0.py: reward returned 'bad' (str), not a number" in text
    assert "on a.parquet row 1 (row id 1)" in text and "None, for each completion" in text


def test_a_function_that_cannot_be_loaded_is_told_how_it_may_look(manager):
    with pytest.raises(UserError, match=r"has no function 'reword'; did you mean 'reward'") as error:
        manager(CODE, name="reword").check([request()])
    assert "FILE.py:FUNCTION" in error.value.fix and "reward(prompts, completions, **columns)" in error.value.fix


def test_a_check_finds_a_wrong_length_with_a_single_row(manager):
    with pytest.raises(UserError, match=r"returned 1 scores for 2 rows, on 2 responses, the first of a.parquet row 0"):
        manager("def reward(completions, **columns): return [1.0]").check([request()])


def test_a_call_that_takes_too_long_is_killed_and_stops_the_run(manager):
    rewards = manager("import time\ndef reward(completions): time.sleep(100)", "reward_model.timeout=0.5")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"took longer than 0.5 s \(reward_model.timeout\), on 2 responses"):
        rewards.fill(batch_of(["a", "b"]), ["a", "b"])
    assert time.monotonic() - began < 30


def test_an_argument_that_a_function_does_not_take_is_named(manager):
    code = "def reward(completions, bonus=0.0): return [bonus for _ in completions]"
    given = "custom_reward_function.reward_kwargs={bonus:0.5,malus:1.0}"
    with pytest.raises(UserError, match=r"takes no 'malus', which reward_kwargs gives it, and has no \*\*kwargs"):
        manager(code, given).check([request()])
    manager(code, given.replace(",malus:1.0", "")).check([request()])
    manager(code.replace("bonus=0.0", "bonus, **columns"), given).check([request()])


ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]
PLAIN = """
def reward(prompts, completions, **columns):
    assert prompts == ["1+1?", "2+2?"], prompts
    return [float(completion == "2") for completion in completions]
"""


def test_a_text_that_was_wrapped_for_a_chat_template_reaches_the_function_as_the_text_it_was(manager, tmp_path):
    """Texts in the data are texts for TRL; the policy is asked by the template all the same."""
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    tokenizer = load_tokenizer("builtin:tiny")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = load([f"data.train_files={tmp_path / 'mine.jsonl'}", "trainer.device=cpu"]).config
    dataset = PromptDataset.train(config.data, tokenizer)
    rows = dataset.rows([0, 1])
    assert [row.messages for row in rows] == [[{"role": "user", "content": row["question"]}] for row in ROWS]
    batch, mask = prompt_batch(rows, 1, 0), torch.tensor([[1, 1, 0]] * 2)
    batch = batch.with_(responses=mask + 4, mask=mask, lengths=mask.sum(-1))
    scored, _ = manager(PLAIN).fill(batch, ["2", "5"])
    assert scored.scores.sum(-1).tolist() == [1.0, 0.0]


def test_calls_of_single_responses_cannot_be_limited_for_it(manager):
    rewards = manager(CODE, "reward_model.reward_manager=rate_limited")
    with pytest.raises(UserError, match=r"takes a whole batch, and reward_model.reward_manager=rate_limited calls it"):
        rewards.check([request()])


def test_the_batch_manager_calls_it_by_its_own_contract(manager):
    rewards = manager(CODE, "reward_model.reward_manager=batch")
    assert rewards.fill(batch_of(["a", "b"]), ["a", "x"])[0].scores.sum(-1).tolist() == [1, 0]
