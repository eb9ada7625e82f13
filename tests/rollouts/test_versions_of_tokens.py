"""Responses that several versions of the weights drew: each token's log-prob is that of the weights that drew it."""

from __future__ import annotations

import random
from dataclasses import replace
from threading import Barrier, Thread

import pytest
import torch
from sessions import SAMPLED, close
from tiny_models import tiny_model
from torch.distributed import HashStore

from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Until
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.rollouts.environments import requests_of, roll_out
from paddock.rollouts.episode import Episode, begun, tokens_of
from paddock.rollouts.packed import PackedEpisodes
from paddock.workers.rollout import EpisodeShare, Others

SAMPLING = replace(SAMPLED, temperature=1.0)


def row_of(group: int) -> PromptRow:
    return PromptRow(group, group, [40 + (7 * group + i) % 60 for i in range(1 + group % 9)], "", "", None, {}, "")


@torch.no_grad()
def log_probs(model, episode: Episode) -> list[float]:
    """Returns the log-prob of each token of the response, by a forward pass over all of it."""
    tokens = torch.tensor([episode.prompt.tokens + tokens_of(episode)])
    chosen = model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return chosen[len(episode.prompt.tokens) - 1 :].tolist()


@torch.no_grad()
def play(interruptions: int) -> list[int]:
    """Draws responses while the weights change; checks each that is finished; returns how many versions drew them."""
    model, chance = tiny_model("qwen3"), random.Random(4)
    engine, versions, noise = EmbeddedEngine(model, max_num_seqs=7), {}, torch.Generator().manual_seed(0)
    waiting, group, version, spans, interrupted = [], 0, 0, [], 0
    while interrupted < interruptions:
        versions[version] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        while len(waiting) < 10:
            waiting += begun([row_of(group)], 2, group)
            group += 1
        wanted = [one.id for one in waiting[: chance.randint(1, 2)]]
        found = roll_out(engine, version, waiting, SAMPLING, until=Until(wanted))
        assert [one.id for one in found] == [one.id for one in waiting]
        ended = [one for one in found if one.finished]
        assert set(wanted) <= {one.id for one in ended}
        waiting = [one for one in found if not one.finished]
        interrupted += sum(bool(one.spans) for one in waiting)
        for one in ended:
            assert len({span.version for span in one.spans}) == len(one.spans)
            spans.append(len(one.spans))
            start = 0
            for span in one.spans:
                model.load_state_dict(versions[span.version])
                close(span.log_probs, log_probs(model, one)[start : start + len(span.tokens)], 3e-5)
                start += len(span.tokens)
        model.load_state_dict(versions[version])
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=noise)
        version += 1
        oldest = min((span.version for one in waiting for span in one.spans), default=version)
        versions = {number: state for number, state in versions.items() if number >= oldest}
    return spans


def test_a_span_has_the_log_probs_of_the_version_that_drew_it():
    assert max(play(60)) > 2


@pytest.mark.slow
def test_a_thousand_interruptions_leave_every_span_with_its_version():
    assert max(play(1000)) > 3


def test_an_engine_without_parts_carries_whole_requests():
    """The plain engine computes its batches to their end: what did not begin waits for the next session."""
    engine, asked = HFEngine(tiny_model(), max_num_seqs=2), begun([row_of(3)], 4, 1)
    found = roll_out(engine, 5, asked, SAMPLING, until=Until([asked[0].id]))
    assert [one.finished for one in found] == [True, True, False, False] and not found[3].spans
    rest = roll_out(engine, 6, found[2:], SAMPLING)
    assert all(one.finished and one.spans[0].version == 6 for one in rest)


def test_engines_of_a_pool_go_on_until_each_has_finished_its_head():
    """One engine has a head of long responses, another of short ones, and a third none at all."""
    store, others, limits = HashStore(), Others("calls/0", 3), {0: 200, 1: 1, 2: 200}
    together = Barrier(3)
    finished: dict[int, list[Episode]] = {}

    def work(rank: int) -> None:
        model = tiny_model("qwen3")
        head = begun([row_of(10 * rank + 1)], 2, 1) if rank < 2 else []
        head = [replace(one, prompt=replace(one.prompt, max_tokens=limits[rank])) for one in head]
        later = begun([row_of(10 * rank + 2 + i) for i in range(5)], 2, 2)
        later = [replace(one, prompt=replace(one.prompt, max_tokens=20)) for one in later]
        rows = list({one.group: one.row for one in [*head, *later]}.values())
        asked = EpisodeShare(rows, PackedEpisodes.of([*head, *later]), [one.id for one in head])
        until = others.until(asked, store)
        engine = EmbeddedEngine(model, max_num_seqs=8)
        sampling = replace(SAMPLING, stop_tokens=frozenset(), max_tokens=200)
        together.wait(60)
        finished[rank] = [one for one in roll_out(engine, 0, [*head, *later], sampling, until=until) if one.finished]
        assert {one.id for one in head} <= {one.id for one in finished[rank]}

    threads = [Thread(target=work, args=(rank,)) for rank in limits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(finished) == [0, 1, 2] and store.add("calls/0", 0) == 3
    assert len(finished[1]) > 2, "an engine with a short head draws later responses meanwhile"


def test_an_engine_without_work_counts_as_finished():
    store = HashStore()
    Others("calls/1", 2).until(EpisodeShare([], PackedEpisodes.of([]), []), store)
    assert store.add("calls/1", 0) == 1


def test_responses_with_limits_of_their_own_are_asked_for_apart():
    long, *short = begun([row_of(1)], 3, 1)
    short = [replace(episode, prompt=replace(episode.prompt, max_tokens=2)) for episode in short]
    asked = requests_of([long, *short], SAMPLING)
    assert [(request.limit, len(request.rows)) for request in asked] == [(SAMPLING.max_tokens, 1), (2, 2)]
