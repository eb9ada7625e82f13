"""The window of batches that are drawn ahead, beside a model of it that is slow and plain."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from byte_tokenizer import byte_tokenizer

from paddock.config.schema import DataConfig
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader
from paddock.engines.rollout.base import Completion, Sampling
from paddock.rollouts.environments import request_of
from paddock.rollouts.episode import Episode, Span, continued
from paddock.rollouts.window import Window, from_tensors, to_tensors

PROMPTS, SAMPLES, LONGEST, LAST = 2, 2, 6, 12
SAMPLING = Sampling(max_tokens=LONGEST, stop_tokens=frozenset(), seed=0, step=0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> PromptDataset:
    file = tmp_path_factory.mktemp("window") / "rows.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "data_source": "sums", "reward_model": {"ground_truth": n}} for n in range(7)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset(str(file), byte_tokenizer(), DataConfig(), key="data.train_files")


def opened(dataset: PromptDataset, staleness: int) -> tuple[Loader, Window]:
    loader = Loader(dataset, PROMPTS, seed=3, look_ahead=False)
    return loader, Window(loader, PROMPTS, SAMPLES, staleness, LAST)


def synchronous(dataset: PromptDataset) -> list[list[int]]:
    """Returns the groups that each step trains if nothing runs ahead."""
    loader = Loader(dataset, PROMPTS, seed=3, look_ahead=False)
    return [[row.group for row in loader.next_prompts()] for _ in range(LAST)]


def drawn(episode: Episode, chance: random.Random, version: int, whole: bool) -> Episode:
    """Draws the next tokens of a response: its token at a place is the place, so that a hole would be seen."""
    request = request_of([episode], SAMPLING)
    assert request.start == request.written == sum(len(span.tokens) for span in episode.spans)
    assert request.step == episode.step and request.tokens == [*episode.prompt.tokens, *range(request.start)]
    left = LONGEST - episode.id % LONGEST - request.start  # of its own length
    count = left if whole else chance.randint(0, left)
    if not count:
        return episode
    tokens = list(range(request.start, request.start + count))
    ends = count == left
    return continued(episode, Completion(episode.id, tokens, [-1.0] * count, ends, finished=ends), version)


def play(dataset: PromptDataset, seed: int) -> None:
    """Plays a run whose responses end at random, which is stopped at random and goes on under another staleness."""
    chance, expected = random.Random(seed), synchronous(dataset)
    staleness = chance.randint(0, 4)
    loader, window = opened(dataset, staleness)
    version, bound, step = 0, staleness, 1
    while step <= LAST:
        batch = window.fill(step)
        assert [one.step for one in window.batches] == list(range(step, window.batches[-1].step + 1))
        assert window.batches[-1].step <= min(step + max(staleness, bound), LAST)
        wanted = {episode.id for episode in batch.episodes.values()}
        window.take(drawn(one, chance, version, one.id in wanted) for one in window.unfinished())
        trained = window.pop(version)
        assert [row.group for row in trained.rows] == expected[step - 1]
        assert list(trained.episodes) == [g * SAMPLES + i for g in expected[step - 1] for i in range(SAMPLES)]
        for episode in trained.episodes.values():
            versions = [span.version for span in episode.spans]
            assert versions == sorted(set(versions)) and 0 <= version - versions[0] <= max(staleness, bound)
            assert [token for span in episode.spans for token in span.tokens] == list(range(len_of(episode)))
        version += chance.random() < 0.8  # an update may be skipped
        step += 1
        if chance.random() < 0.3:
            state, place = window.state(), loader.state_dict()
            saved = json.loads(json.dumps(state["batches"])), to_tensors(state["begun"])
            bound = max(staleness, bound if window.batches else 0)
            staleness = chance.randint(0, 4)
            before = [list(one.episodes.values()) for one in window.batches]
            loader, window = opened(dataset, staleness)
            loader.load_state_dict(place)
            window.load_state(*saved)
            assert [list(one.episodes.values()) for one in window.batches] == before
            assert loader.state_dict() == place
    assert not window.batches


def len_of(episode: Episode) -> int:
    return LONGEST - episode.id % LONGEST


def test_steps_train_what_they_would_if_nothing_ran_ahead_and_no_token_is_too_old(dataset):
    for seed in range(60):
        play(dataset, seed)


@pytest.mark.slow
def test_ten_thousand_random_runs_keep_order_age_and_every_row_once(dataset):
    for seed in range(10_000):
        play(dataset, 1_000_000 + seed)


def test_steps_that_a_program_trains_itself_make_what_waits_older_and_lose_nothing(dataset):
    _, window = opened(dataset, 2)
    groups = synchronous(dataset)
    for step, late in ((1, 0), (4, 2), (5, 2), (6, 2)):
        batch = window.fill(step)
        assert [row.group for row in batch.rows] == groups[step - 1 - late]
        assert [one.step for one in window.batches] == list(range(step, step + 3))
        window.take(replace(one, spans=[Span([1], [-1.0], 0)], finished=True) for one in batch.episodes.values())
        window.batches.popleft()


def test_a_batch_whose_tokens_are_too_old_is_not_trained(dataset):
    _, window = opened(dataset, 1)
    for episode in window.fill(1).episodes.values():
        window.take([replace(episode, spans=[Span([1], [-1.0], 3)], finished=True)])
    with pytest.raises(AssertionError, match="a token is 1 versions old"):
        window.pop(4)


def test_tokens_of_one_version_are_one_span_although_a_pause_lay_between(dataset):
    _, window = opened(dataset, 1)
    (first, *_) = window.fill(1).episodes.values()
    part = Completion(first.id, [5, 6], [-0.5, -0.25], False, finished=False)
    again = continued(continued(first, part, 7), replace(part, tokens=[8], log_probs=[-1.5]), 7)
    assert again.spans == [Span([5, 6, 8], [-0.5, -0.25, -1.5], 7)] and not again.finished
    assert [span.version for span in continued(again, part, 8).spans] == [7, 8]


def test_episodes_that_have_begun_are_the_same_behind_a_checkpoint(dataset):
    _, window = opened(dataset, 2)
    chance = random.Random(0)
    window.fill(1)
    window.take(drawn(one, chance, 0, False) for one in window.unfinished())
    begun = window.state()["begun"]
    rows = [row for batch in window.batches for row in batch.rows]
    plain = [replace(one, prompt=replace(one.prompt, rows=[one.id])) for one in begun]
    assert begun and from_tensors(to_tensors(begun), rows) == plain
    assert from_tensors(to_tensors([]), rows) == []
