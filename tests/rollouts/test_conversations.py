"""Conversations over an engine session: what is drawn is what trains, nobody waits, and bits do not depend on speed."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from talks import EOS, model, opened, rows, sampling, talk, texts, tokenizer

import paddock
from paddock.core.batch import NOBODY
from paddock.data.loader import prompt_batch
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.rollouts import conversations
from paddock.rollouts.batch import with_prompts, with_responses
from paddock.rollouts.conversations import Conversations
from paddock.rollouts.episode import begun

ENOUGH = 3
"""Turns after which the environments of these tests end."""


class Echo(paddock.Environment):
    """Says a byte of its own after every turn, and pays for it."""

    inline = True

    def step(self, answer):
        if answer.number + 1 == ENOUGH:
            return paddock.Turn(reward=2.0, done=True)
        return paddock.Turn(f"+{answer.number}=", reward=0.25)


class Dice(paddock.Environment):
    """Takes as long as it likes, another time each time."""

    def step(self, answer):
        time.sleep(random.random() * 0.02)
        return "+1=" if answer.number + 1 < ENOUGH else None


@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_what_trains_is_what_was_drawn_and_only_that(engine, monkeypatch):
    drawn: dict[int, list[list[int]]] = {}
    kind = type(talk.__globals__["ENGINES"][engine](talk.__globals__["model"]()))
    advance = kind.advance

    def noted(self, seconds=None):
        found = advance(self, seconds)
        for one in found:
            drawn.setdefault(one.row, []).append(one.tokens)
        return found

    monkeypatch.setattr(kind, "advance", noted)
    found = talk(Echo, engine=engine, count=3, samples=2)
    assert [one.id for one in found] == [row.group * 2 + sample for row in rows(3) for sample in range(2)]
    for one in found:
        assert [span.tokens for span in one.spans if span.log_probs] == drawn[one.id]
        assert len(drawn[one.id]) == ENOUGH and one.done
    batch = prompt_batch(rows(3), 2, 0)
    batch = with_responses(with_prompts(batch, found, 0), found, 0)
    assert torch.equal(batch.prompts, prompt_batch(rows(3), 2, 0).prompts)
    for index, turns in enumerate(batch.turns()):
        assert turns == drawn[int(batch.row[index])]
    said = (batch.mask == 0) & (torch.arange(batch.mask.shape[1]) < batch.lengths[:, None])
    assert (batch.versions[said] == NOBODY).all() and (batch.rollout_log_probs[said] == 0).all() and said.any()
    assert (batch.environment_rewards.sum(-1) == 2.5).all() and (batch.environment_rewards[said] == 0).all()


def test_the_environments_words_stand_between_the_turns_as_tokens():
    for spans in texts(talk(Echo, count=2)):
        assert spans[1::2] == ["+0=", "+1="]


def test_turns_of_a_conversation_equal_those_that_are_computed_from_the_first_token_on():
    """Keys and values that stay, against a fresh engine that computes each turn anew, greedily."""
    kept = talk(Echo, count=4, samples=1, temperature=0.0)
    anew = talk(Echo, count=4, samples=1, temperature=0.0, engine="hf")
    assert texts(kept) == texts(anew)
    for one, other in zip(kept, anew, strict=True):
        for span, same in zip(one.spans, other.spans, strict=True):
            if span.log_probs:
                assert torch.allclose(torch.tensor(span.log_probs), torch.tensor(same.log_probs), atol=1e-4)


def test_bits_do_not_depend_on_how_fast_tools_are_if_the_run_is_deterministic():
    keys = ("actor_rollout_ref.rollout.deterministic=True",)
    first, second = (talk(Dice, *keys, count=6, samples=2) for _ in range(2))
    assert [one.spans for one in first] == [one.spans for one in second]


@pytest.mark.parametrize("environment", [Echo, Dice])
def test_an_engine_that_cannot_wait_gets_its_next_launch_between_a_few_conversations(environment, monkeypatch):
    """Many turns that end at once would leave its device without work; the tokens are the same."""
    whole = talk(environment, count=6, samples=4)
    resumed = [0]
    go_on, advance = Conversations.go_on, EmbeddedEngine.advance

    def counted(self, *args):
        resumed[-1] += len(self.flying) > 0
        go_on(self, *args)

    def noted(self, seconds=None):
        resumed.append(0)
        return advance(self, seconds)

    monkeypatch.setattr(conversations, "AT_ONCE", 2)
    monkeypatch.setattr(Conversations, "go_on", counted)
    monkeypatch.setattr(EmbeddedEngine, "advance", noted)
    monkeypatch.setattr(EmbeddedEngine, "can_wait", lambda self: False)
    assert texts(talk(environment, count=6, samples=4)) == texts(whole)
    assert max(resumed) == 2


@pytest.mark.parametrize("slots", [8, 3])
def test_a_longest_sequence_of_prompt_and_response_is_enough_if_conversations_are_computed_anew(slots):
    environments = opened(Echo, f"actor_rollout_ref.rollout.max_num_seqs={slots}")
    engine = EmbeddedEngine(model(), max_num_seqs=slots, max_model_len=64)  # 32 + 32
    try:
        assert len(environments.run(engine, 7, begun(rows(4), 2, 0), sampling(32))) == 8
    finally:
        environments.close()


def test_a_conversation_that_waits_holds_nobody_up():
    """One tool returns once all other episodes have ended: whoever waited for it would wait for ever."""
    others, ended = 7, threading.Semaphore(0)

    class First(paddock.Environment):
        made = 0

        def __init__(self):
            self.number, First.made = First.made, First.made + 1

        def step(self, answer):
            if self.number == 1 and answer.number == 0:  # 0 is made for its tools
                for _ in range(others):
                    assert ended.acquire(timeout=30)
            return "+1=" if answer.number == 0 else None

        def close(self):
            if self.number > 1:
                ended.release()

    found = talk(First, count=8, samples=1)
    assert [one.extras["num_turns"] for one in found] == [4] * 8


def test_others_begin_while_conversations_that_wait_hold_every_slot():
    """Two slots: the first conversations' tools return once the last conversation has begun."""
    begun = threading.Semaphore(0)

    class Patient(paddock.Environment):
        def step(self, answer):
            if answer.number == 0:
                begun.release()
                while begun._value < 6:  # all six have had a turn
                    time.sleep(0.001)
            return "+1=" if answer.number < 2 else None

    found = talk(Patient, count=6, samples=1, slots=2)
    assert all(len(one.spans) == 5 for one in found)
    drawn = talk(Patient, count=6, samples=1, slots=8)
    assert texts(found) == texts(drawn)  # what was computed anew draws the same tokens


def test_the_response_limit_counts_what_the_environment_says():
    class Chatter(paddock.Environment):
        inline = True

        def step(self, answer):
            return "x" * 5

    for length in (12, 13, 24):
        for one in talk(Chatter, count=4, length=length):
            size = sum(len(span.tokens) for span in one.response)
            assert size <= length and not one.done and one.extras["ended"] == "length"
            assert one.response[-1].log_probs  # nothing of the environment's stands behind the last turn


def test_words_that_leave_no_room_for_a_turn_end_the_episode_and_one_token_of_room_is_enough():
    class Long(paddock.Environment):
        inline = True

        def step(self, answer):
            assert answer.number == 0 or not answer.stopped or len(answer.tokens) == 1
            return "x" * (20 - len(answer.tokens) - left)

    for left in (0, 1):
        for one in talk(Long, count=3, length=20):
            if one.spans[0].tokens[-1] == EOS:
                assert len(one.spans) == (1 if left == 0 else 3)


@pytest.mark.parametrize(("key", "most"), [("max_assistant_turns=2", 2), ("max_user_turns=2", 3)])
def test_turns_are_limited_and_the_last_one_is_still_answered_and_paid(key, most):
    found = talk(Echo, f"actor_rollout_ref.rollout.multi_turn.{key}", count=3)
    for one in found:
        turns = [span for span in one.spans if span.log_probs]
        assert len(turns) == most and one.done == (most == ENOUGH)
        assert [span.reward for span in turns] == [0.25] * (most - 1) + [2.0 if most == ENOUGH else 0.25]
        assert one.extras["ended"] == ("done" if most == ENOUGH else "turns")


def test_an_environment_may_ask_and_all_episodes_of_a_group_get_the_same_seed():
    seeds: dict[int, set[int]] = {}

    class Asks(paddock.Environment):
        inline = True

        def reset(self, row, seed):
            seeds.setdefault(row["index"], set()).add(seed)
            return f"{seed % 10}+1="

        def step(self, answer):
            return None

    found = talk(Asks, count=3, samples=4)
    assert all(len(own) == 1 for own in seeds.values()) and len({*map(frozenset, seeds.values())}) == 3
    for one in found:
        (seed,) = seeds[one.group]
        assert tokenizer().decode(one.prompt.tokens) == f"{seed % 10}+1="
    before = dict(seeds)
    talk(Asks, count=3, samples=4, step=2)
    assert all(len(seeds[index]) == 2 for index in before)  # another step, another seed


def test_the_reward_of_the_episode_is_paid_at_the_last_turn_beside_that_of_the_turn():
    class Pays(Echo):
        def reward(self, episode):
            assert [turn["role"] for turn in episode.messages] == ["user", *["assistant", "user"] * 2, "assistant"]
            assert episode.row["ground_truth"] and episode.done and episode.text == episode.messages[-1]["content"]
            return 10.0

    for one in talk(Pays, count=2):
        assert [span.reward for span in one.spans if span.log_probs] == [0.25, 0.25, 12.0]


def test_coroutines_run_beside_each_other_and_beside_the_decode():
    running = most = 0

    class Waits(paddock.Environment):
        async def step(self, answer):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
            running -= 1
            return "+1=" if answer.number == 0 else None

    found = talk(Waits, count=6, samples=2)
    assert most > 3 and all(len(one.spans) == 3 for one in found)


@pytest.mark.parametrize("fails", [False, True])
def test_threads_of_tools_hand_the_interpreter_over_soon_while_conversations_last(fails):
    before, seen = sys.getswitchinterval(), []

    class Looks(paddock.Environment):
        def step(self, answer):
            seen.append(sys.getswitchinterval())
            return 1 / 0 if fails else None

    with pytest.raises(paddock.UserError) if fails else nullcontext():
        talk(Looks)
    assert seen[0] == pytest.approx(conversations.SWITCH) and sys.getswitchinterval() == before


def test_what_an_environment_raises_stops_the_run_by_name_and_cancels_the_others():
    cancelled = threading.Event()

    class Broken(paddock.Environment):
        async def step(self, answer):
            if int(answer.number) == 0 and Broken.first:
                Broken.first = False
                while not Broken.waiting:
                    await asyncio.sleep(0.001)
                raise RuntimeError("no")
            Broken.waiting = True
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        first, waiting = True, False

    environments = opened(Broken)
    engine = EmbeddedEngine(talk.__globals__["model"](), max_num_seqs=8)
    with pytest.raises(paddock.UserError, match=r"environment=.*Broken: step raised RuntimeError: no, .*row") as error:
        environments.run(engine, 0, begun(rows(4), 1, 0), sampling())
    assert "mend the environment" in str(error.value)
    assert cancelled.wait(10) and engine.session is None
    engine.generate([], sampling())  # it can be used again


def test_a_step_that_takes_too_long_ends_its_episode_and_is_counted():
    class Slow(paddock.Environment):
        def step(self, answer):
            time.sleep(1.0 if answer.number == 1 else 0.0)
            return "+1="

    found = talk(Slow, "actor_rollout_ref.rollout.multi_turn.tool_timeout=0.2", count=2, samples=1)
    assert [one.extras["ended"] for one in found] == ["timeout"] * 2
    assert [one.extras["timeouts"] for one in found] == [1, 1] and not any(one.done for one in found)


@pytest.mark.parametrize("paid", ["float('nan')", "'much'", "[1]", "None"])
def test_a_reward_that_is_no_number_is_refused_by_name(paid):
    class Odd(paddock.Environment):
        inline = True

        def step(self, answer):
            return paddock.Turn(reward=eval(paid), done=True)

    with pytest.raises(paddock.UserError, match=r"environment=.*Odd: step pays .* no finite number"):
        talk(Odd, count=1)


def test_an_environment_that_takes_too_long_to_begin_stops_the_run_and_names_the_key():
    class Sleeps(paddock.Environment):
        made = 0

        def __init__(self):
            Sleeps.made += 1
            time.sleep(1.0 if Sleeps.made > 1 and slow == "making it" else 0.0)

        def reset(self, row, seed):
            time.sleep(1.0 if slow == "reset" else 0.0)

    for slow in ("making it", "reset"):
        with pytest.raises(paddock.UserError, match=rf"environment=.*: {slow} took longer than 0.1 s") as error:
            talk(Sleeps, "actor_rollout_ref.rollout.multi_turn.tool_timeout=0.1", count=1)
        assert "multi_turn.tool_timeout=0.2" in str(error.value)


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("said", [7, ["a text"]])
def test_what_is_no_message_is_refused_by_name(method, said):
    odd = type("Odd", (paddock.Environment,), {"inline": True, method: lambda self, *args: said})
    with pytest.raises(paddock.UserError, match=rf"environment=.*Odd: {method} returned .*row") as error:
        talk(odd, count=1)
    assert "a list of messages" in str(error.value)


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("message", [
    {"role": "user", "content": 5}, {"role": "user", "content": None}, {"role": "user"}, {"content": "a text"},
    {"role": "user", "content": [{"type": "image", "image": "a.png"}]}, {"role": "user", "content": {"text": "2"}},
])  # fmt: skip
def test_a_message_that_templates_do_not_write_is_refused_by_name_and_value(method, message):
    odd = type("Odd", (paddock.Environment,), {"inline": True, method: lambda self, *args: [message]})
    with pytest.raises(
        paddock.UserError, match=rf"environment=.*Odd: {method} returned a message without.*row"
    ) as error:
        talk(odd, count=1)
    assert repr(message)[:40] in str(error.value)


def test_parts_of_a_content_that_are_texts_become_one():
    class Parts(paddock.Environment):
        inline = True

        def step(self, answer):
            said = [{"role": "user", "content": [{"type": "text", "text": "+1"}, {"type": "text", "text": "="}]}]
            return paddock.Turn(said, done=answer.number == 1)

    (one,) = talk(Parts, count=1, samples=1)
    assert texts([one])[0][1] == "+1=" and one.extras["conversation"][1] == {"role": "user", "content": "+1="}


@pytest.mark.parametrize("said", ["", []])
def test_a_reset_that_asks_nothing_is_refused_by_the_name_of_its_environment(said):
    odd = type("Odd", (paddock.Environment,), {"inline": True, "reset": lambda self, *args: said})
    with pytest.raises(paddock.UserError, match=r"environment=.*Odd: reset returned .*, which asks nothing, .*row"):
        talk(odd, count=1)


@pytest.mark.parametrize(("data", "prompt"), [("builtin:episodes/train", "<3+4=>"), ("builtin:addition/test", "3+4=")])
def test_a_text_of_reset_passes_the_chat_template_unless_prompts_are_plain_texts(data, prompt):
    class Asks(paddock.Environment):
        inline, max_turns = True, 2

        def reset(self, row, seed):
            return "3+4="

        def step(self, answer):
            return "5+6="

    template = (
        "{% for m in messages %}{{ '<' + m['content'] + '>' if m['role'] == 'user' else m['content'] }}{% endfor %}"
    )
    key = f'++data.apply_chat_template_kwargs.chat_template="{template}"'
    (one,) = talk(Asks, key, count=1, samples=1, data=data)
    assert tokenizer().decode(one.prompt.tokens) == prompt
    assert texts([one])[0][1] == prompt.replace("3+4", "5+6")
