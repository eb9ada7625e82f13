"""Functions that score a whole batch in one call."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rewards.manager import RewardManager
from paddock.rewards.score import ScoreRequest
from paddock.trainer.assembly import open_rewards


@pytest.fixture
def manager(tmp_path):
    made = []

    def make(body: str, *settings: str, head: str = "def compute_score") -> RewardManager:
        arguments = "(data_sources, solution_strs, ground_truths, extra_infos, **more):\n"
        calls = f"    open({str(tmp_path / 'calls')!r}, 'a').write(f'{{len(solution_strs)}} ')\n"
        Path(tmp_path / "mine.py").write_text(head + arguments + calls + textwrap.indent(body, "    ") + "\n")
        settings = (f"custom_reward_function.path={tmp_path}/mine.py", "reward_model.reward_manager=batch", *settings)
        made.append(open_rewards(load(settings).config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def requests(*solutions: str) -> list[ScoreRequest]:
    return [ScoreRequest("mine", text, "t", {"n": row}, f"a.parquet row {row}") for row, text in enumerate(solutions)]


@pytest.mark.parametrize("head", ["def compute_score", "async def compute_score"])
def test_a_batch_function_is_called_once_with_lists(manager, tmp_path, head):
    body = """\
assert data_sources == ["mine"] * 3 and ground_truths == ["t"] * 3 and [e["n"] for e in extra_infos] == [0, 1, 2]
longest = max(map(len, solution_strs))
return [{"score": len(text) / longest, "longest": longest} for text in solution_strs]"""
    scores = manager(body, head=head).score(requests("a", "bb", "cccc"))
    assert [score.value for score in scores] == [0.25, 0.5, 1.0] and scores[0].extras == {"longest": 4}
    assert (tmp_path / "calls").read_text() == "3 "


def test_its_scores_may_be_an_array_and_it_has_arguments_of_its_own(manager):
    body = "import numpy\nreturn numpy.array([more['bonus'] + n for n in range(len(solution_strs))])"
    rewards = manager(body, "+custom_reward_function.reward_kwargs.bonus=0.5")
    assert [score.value for score in rewards.score(requests("a", "b"))] == [0.5, 1.5]


def test_responses_that_come_one_by_one_still_make_one_call(manager, tmp_path):
    scoring = manager("return [float(text) for text in solution_strs]").begin()
    for place in (2, 0, 1):
        scoring.add({place: requests("10", "11", "12")[place]})
    assert [score.value for score in scoring.collect()] == [10.0, 11.0, 12.0]
    assert (tmp_path / "calls").read_text() == "3 "


MISTAKES = {
    "one bad row": ("return [1.0, None, 2.0]", r"compute_score returned None \(NoneType\).*on a.parquet row 1 .*'bb'"),
    "nan": ("return [1.0, 2.0, float('nan')]", r"returned nan, on a.parquet row 2 "),
    "too few": ("return [1.0]", r"returned 1 scores for 3 rows, on 3 responses, the first of a.parquet row 0"),
    "one number": ("return 1.0", r"returned 1.0 \(float\), not a list with a score for each row"),
    "a dict": ("return {'score': [1.0, 2.0, 3.0]}", r"returned \{.*\(dict\), not a list"),
    "raises": ("return [1 / 0]", r"raised ZeroDivisionError: .*\(mine.py line 3\), on 3 responses, the first of"),
    "no score": ("return [{'acc': 1}] * 3", r"returned a dict without 'score'.* on a.parquet row 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_row_where_there_is_one(manager, mistake):
    body, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message) as error:
        manager(body).score(requests("a", "bb", "ccc"))
    assert "mine.py" in str(error.value)


def test_a_function_for_single_responses_is_refused_by_the_check(tmp_path):
    (tmp_path / "one.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): return 1")
    settings = [f"custom_reward_function.path={tmp_path}/one.py", "reward_model.reward_manager=batch"]
    with (
        open_rewards(load(settings).config) as rewards,
        pytest.raises(UserError, match=r"it may name data_sources, [\s\S]*fix: did you mean 'data_sources'"),
    ):
        rewards.check(requests(""))


def test_a_call_that_takes_too_long_stops_the_run(manager):
    rewards = manager("import time; time.sleep(100)", "reward_model.timeout=1")
    with pytest.raises(UserError, match=r"took longer than 1 s \(reward_model.timeout\), on 2 responses"):
        rewards.score(requests("a", "b"))


def test_built_in_scorers_have_no_batch_form_and_need_none():
    with open_rewards(load(["reward_model.reward_manager=batch"]).config) as rewards:
        (score,) = rewards.score([ScoreRequest("openai/gsm8k", "#### 5", "5")])
    assert score.value == 1.0
