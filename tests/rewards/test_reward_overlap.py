"""Scoring while responses are still generated, and scores that are known already."""

from __future__ import annotations

import contextlib
import gc
import json
import textwrap
import threading
import time
import weakref
from concurrent.futures import Future

import pytest
import torch

from paddock.commands.frozen_policy import FrozenRollout
from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.timing import Timer
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader
from paddock.engines.rollout.base import Completion
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.load import load_tokenizer
from paddock.rewards.score import Score, ScoreRequest
from paddock.rewards.scoring import Known, key_of
from paddock.rollouts.collect import Collector
from paddock.trainer.assembly import open_rewards
from paddock.trainer.reinforcement import train

WATCHING = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info, log):
    begin = time.time()
    time.sleep(0.1)
    with open(log, "a") as out:
        out.write(f"{begin} {time.time()}\\n")
    return {"score": len(solution_str), "text": solution_str}
"""


class Slow:
    """An engine that writes one response after the other, each in 0.15 seconds. It hands over each when it has ended,
    or, as engines in other processes do, all of them at the end, or says nothing before it returns."""

    def __init__(self, tokenizer, tells: str):
        self.tokenizer, self.tells, self.ended = tokenizer, tells, list[float]()

    decoded = None

    def answer(self, requests, sampling, on_done=None, until=None):
        rows = [row for request in requests for row in request.rows]
        found = {}
        for row in sorted(rows, key=lambda row: -row % 7):  # not in the order of the batch
            time.sleep(0.15)
            tokens = [*self.tokenizer.encode(str(row)), self.tokenizer.eos_token_id]
            found[row] = Completion(row, tokens, [0.0] * len(tokens), True)
            self.ended.append(time.time())
            if on_done and self.tells == "each":
                on_done([found[row]])
        if on_done and self.tells == "all":
            on_done(list(found.values()))
        return [found[row] for row in rows]


@pytest.fixture
def explore(tmp_path):
    """One round of a small run, with its metrics, its seconds, and when each response was scored."""

    def run(*settings: str, code: str = WATCHING, tells: str = "each"):
        (tmp_path / "mine.py").write_text(textwrap.dedent(code))
        arguments = [
            f"custom_reward_function.path={tmp_path}/mine.py",
            f"+custom_reward_function.reward_kwargs.log={tmp_path}/log",
            *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "reward_model.num_workers=2"),
            *("data.dataloader_num_workers=0", "algorithm.adv_estimator=grpo"),
            *settings,
        ]
        config: Config = load(arguments).config
        tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        dataset = PromptDataset.train(config.data, tokenizer)
        run.engine = engine = Slow(tokenizer, tells)
        timer = Timer()
        with open_rewards(config) as rewards:
            rewards.check([ScoreRequest("mine", "", "")])
            (tmp_path / "log").write_text("")
            loader = Loader.train(config.data, dataset)
            rollout = FrozenRollout(engine, frozenset())
            collector = Collector(config, loader, rollout, rewards, tokenizer, frozenset())
            batch, metrics = collector.collect(1, timer, lambda time: contextlib.nullcontext())
        begun = sorted(float(line.split()[0]) for line in (tmp_path / "log").read_text().splitlines())
        return batch, metrics, timer.seconds, begun, engine.ended

    return run


def is_right(batch) -> bool:
    """Every row has the score of its own response."""
    texts = [str(row) for row in batch.row.tolist()]
    return batch.extras["text"] == texts and batch.scores.sum(-1).tolist() == [len(text) for text in texts]


def test_responses_are_scored_while_others_are_still_written(explore):
    batch, metrics, seconds, begun, ended = explore()
    assert is_right(batch) and len(begun) == 8
    assert begun[0] < ended[-2] and begun[3] < ended[-1], "half were taken up before the last was written"
    assert seconds["reward"] < seconds["gen"]
    assert metrics["reward/score/mean"] == batch.scores.sum(-1).mean()


def test_scoring_begins_after_generation_where_the_config_says_so(explore):
    batch, _, seconds, begun, ended = explore("reward_model.launch_reward_fn_async=False")
    assert is_right(batch) and begun[0] > ended[-1] and seconds["reward"] >= 0.4


@pytest.mark.parametrize("tells", ["all", "nothing"])
def test_an_engine_that_tells_at_the_end_or_not_at_all_is_served_as_well(explore, tells):
    batch, _, _, begun, ended = explore(tells=tells)
    assert is_right(batch) and begun[0] > ended[-1]


def test_a_failing_row_stops_the_run_while_others_are_still_written(explore):
    code = WATCHING.replace("time.sleep(0.1)", "1 / (extra_info == {} or solution_str == '')")
    with pytest.raises(UserError, match=r"ZeroDivisionError.*builtin:addition/train row \d+ \(row id \d+\)"):
        explore(code=code)
    assert len(explore.engine.ended) < 8


@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_both_ways_train_alike(tmp_path, engine):
    """Two steps of a real run: when scoring happens changes no number."""
    logged = []
    for early in (True, False):
        folder = tmp_path / str(early)
        arguments = [
            *("algorithm.adv_estimator=grpo", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=4"),
            f"actor_rollout_ref.rollout.name={engine}",
            *("trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1"),
            *("trainer.logger=[file]", "data.dataloader_num_workers=0", f"trainer.default_local_dir={folder}"),
            f"reward_model.launch_reward_fn_async={early}",
        ]
        assert train(load(arguments).config).finished
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        logged.append(
            [
                {name: value for name, value in json.loads(line).items() if not name.startswith(("timing", "perf"))}
                for line in lines
            ]
        )
    assert len(logged[0]) == 2 and logged[0] == logged[1]


# Scores that are known already


def maths(solution: str, truth: str = "3", source: str = "lighteval/MATH") -> ScoreRequest:
    return ScoreRequest(source, solution, truth)


@pytest.fixture(scope="module")
def with_processes():
    with open_rewards(load(["reward_model.num_workers=1", "reward_model.timeout=2"]).config) as rewards:
        yield rewards


@pytest.fixture
def rewards(with_processes):
    """That knows nothing yet."""
    with_processes.known = Known()
    return with_processes


def test_equal_answers_to_equal_questions_are_scored_once(rewards, monkeypatch):
    asked = [
        maths(r"\boxed{\sqrt9}"),
        maths(r"\boxed{\sqrt9}"),
        maths(r"\boxed{\sqrt8}"),
        maths(r"\boxed{\sqrt9}", "4"),
    ]
    submitted, submit = [], rewards.pool.submit
    monkeypatch.setattr(rewards.pool, "submit", lambda jobs: (submitted.extend(jobs), submit(jobs)))
    scores = rewards.score(asked)
    assert [score.value for score in scores] == [1, 1, 0, 0]
    assert [score.cached for score in scores] == [False, True, False, False] and len(submitted) == 3
    again = rewards.score(asked)
    assert [score.value for score in again] == [1, 1, 0, 0] and all(score.cached for score in again)
    assert len(submitted) == 3


def test_after_a_row_that_cannot_be_asked_nobody_waits_for_the_rows_before_it(rewards):
    asked = [maths(r"\boxed{3}"), maths("3", source="nobody knows it")]
    with pytest.raises(UserError, match="nobody knows it"):
        rewards.score(asked)
    scoring = rewards.begin()
    scoring.add({0: asked[0]})
    ((future, _),) = scoring.columns[0].away
    assert [score.value for score in future.result(60)] == [1.0]


def test_an_answer_that_hangs_costs_its_limit_once_however_often_it_is_given(rewards):
    begin = time.monotonic()
    scores = rewards.score([maths(r"\boxed{9^{9^{9^9}}}")] * 8)
    assert all(score.timed_out for score in scores) and time.monotonic() - begin < 12
    assert len(rewards.known.scores) == 0, "another time the machine may be less busy"


def test_the_metric_counts_rows_whose_score_was_known(rewards):
    ids, mask = torch.arange(3), torch.ones(3, 2, dtype=torch.long)
    extras = {"data_source": ["lighteval/MATH"] * 3, "ground_truth": ["3"] * 3}
    batch = Batch(ids, ids, mask, responses=mask, mask=mask, lengths=mask.sum(-1), extras=extras)
    _, metrics = rewards.fill(batch, [r"\boxed{\sqrt9}", r"\boxed{\sqrt9}", "none"])
    assert metrics["reward/cache_hits"] == 1.0


def test_what_decides_a_score_is_part_of_its_key():
    target = open_rewards(load([]).config)._scorer(maths("")).target
    keys = {
        key_of(target, request)
        for request in (
            *(maths("a", "b"), maths("ab", ""), maths("", "ab"), maths("a", "b", "HuggingFaceH4/MATH-500")),
            *(maths("a\ud800", "b"), maths("a", ["b"]), maths("a", {"target": ["b"]}), maths("a", 1), maths("a", "1")),
        )
    }
    assert len(keys) == 8, "two names of one scorer share what it found"


def test_a_users_function_is_called_for_every_row(tmp_path):
    (tmp_path / "count.py").write_text(
        "calls = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    global calls\n    calls += 1\n    return calls\n"
    )
    settings = [f"custom_reward_function.path={tmp_path}/count.py", "reward_model.num_workers=1"]
    with open_rewards(load(settings).config) as rewards:
        assert sorted(score.value for score in rewards.score([maths("same")] * 4)) == [1, 2, 3, 4]


def test_only_the_most_recently_used_scores_are_kept():
    known = Known(most=2)

    def put(key: bytes, score: Score) -> None:
        future: Future = Future()
        known.expect(key, future)
        future.set_result([score])

    put(b"a", Score(1.0))
    put(b"b", Score(2.0))
    assert known.get(b"a") == Score(1.0)
    put(b"c", Score(3.0))
    assert (known.get(b"a"), known.get(b"b"), known.get(b"c")) == (Score(1.0), None, Score(3.0))


def test_what_was_scored_does_not_keep_the_responses_alive(rewards):
    scoring = rewards.begin()
    scoring.add({0: maths(r"\boxed{\sqrt9}")})
    scoring.collect()
    lasting = weakref.ref(scoring)
    del scoring
    gc.collect()
    assert lasting() is None and len(rewards.known.scores) == 1


def test_maths_answers_that_hang_the_parser_are_cut_off_from_any_thread(rewards):
    found = []
    asked = [maths(r"\boxed{\sqrt9}"), maths(r"\boxed{9^{9^{9^9}}}"), maths(r"\boxed{3.0}")]
    thread = threading.Thread(target=lambda: found.extend(rewards.score(asked)))
    begin = time.monotonic()
    thread.start()
    thread.join(30)
    assert [(score.value, score.timed_out) for score in found] == [(1, False), (0, True), (1, False)]
    assert time.monotonic() - begin < 15
