"""Messages to and from processes that score, and how many of them go at a time."""

from __future__ import annotations

import pickle
import socket
import textwrap
import threading
import time
from dataclasses import fields, replace
from enum import IntEnum, StrEnum

import pytest

from paddock.rewards import runners as pools
from paddock.rewards.channel import LENGTH, Channel
from paddock.rewards.functions import Target
from paddock.rewards.manager import mean_of
from paddock.rewards.runners import ProcessPool, ScoringJob
from paddock.rewards.score import Failed, Score, ScoreRequest, checked
from paddock.rewards.worker import READY, RECALL, RETURNED, SCORED, TOOK, serve


@pytest.fixture
def ends():
    here, there = (Channel(end) for end in socket.socketpair())
    yield here, there
    here.close()
    there.close()


def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(ends):
    here, there = ends
    messages = [("scored", number, "x" * (number * 7 % 50)) for number in range(40)]
    packed = [pickle.dumps(message) for message in messages]
    stream = b"".join(LENGTH.pack(len(content)) + content for content in packed)
    found = []
    assert there.arrived() == [] and not there.has_something()
    for start in range(0, len(stream), 11):
        here.socket.sendall(stream[start : start + 11])
        assert there.has_something()
        found += there.arrived()
    assert found == messages and there.arrived() == []


def test_a_message_larger_than_the_sockets_buffer_arrives(ends):
    here, there = ends
    text = "répons" * 300_000
    sender = threading.Thread(target=here.send, args=(text,))
    sender.start()
    assert there.receive() == text
    sender.join()


def test_what_was_sent_before_the_end_is_read_before_the_end(ends):
    here, there = ends
    here.send("last")
    here.close()
    assert there.arrived() == ["last"]
    assert there.has_something(), "the end"
    for read in (there.arrived, there.receive):
        with pytest.raises(EOFError):
            read()


def test_requests_and_scores_survive_the_way_with_every_field():
    request = ScoreRequest(
        "s", "text", {"a": 1}, {"b": 2}, "f row 1", [{"role": "user"}], (1, 2), (3, 4), "last", [{}], "held", {"c": 5}
    )
    scores = [Score(0.25), Score(0.0), Score(1.0, {"acc": True}), Score(1.0, {}, True, True, True, 3, False)]
    scores += [replace(Score(0.5), **{name: True}) for name in ("timed_out", "undecided", "cached")]
    scores += [Score(0.5, retries=2), Score(0.0, applies=False)]
    assert len(fields(request)) == 12 and all(getattr(request, one.name) for one in fields(request))
    for value in (request, ScoreRequest("s", "", None), *scores):
        again = pickle.loads(pickle.dumps(value))
        assert again == value and type(again) is type(value)


COUNTING = """
import os, time
seen = 0

def score(data_source, solution_str, ground_truth, extra_info):
    global seen
    seen += 1
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "slow":
        time.sleep(0.005)
    if solution_str == "break":
        raise KeyError("broken")
    return {"score": seen, "text": solution_str, "pid": os.getpid()}
"""


@pytest.fixture
def target(tmp_path) -> Target:
    (tmp_path / "counting.py").write_text(textwrap.dedent(COUNTING))
    return Target(str(tmp_path / "counting.py"), "score")


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """The sizes of all chunks that are sent."""
    found: list[int] = []
    send = ProcessPool._send

    def counted(self, worker, jobs):
        found.append(len(jobs))
        send(self, worker, jobs)

    monkeypatch.setattr(ProcessPool, "_send", counted)
    monkeypatch.setattr(pools, "QUICK", 5.0)  # on a busy machine, too, a call is quick
    monkeypatch.setattr(pools, "BUSY", 1000.0)  # and one process does it all
    return found


def score(pool: ProcessPool, target: Target, texts: list[str]) -> list[Score | None]:
    jobs = [ScoringJob(target, (ScoreRequest("mine", text, None),)) for text in texts]
    pool.submit(jobs)
    return [scores and scores[0] for scores in pool.results([job.future for job in jobs])]


def test_chunks_of_a_quick_scorer_grow_and_its_calls_keep_their_order(target, sizes):
    pool = ProcessPool(size=16, timeout=60.0)
    try:
        texts = [str(number) for number in range(1024)]
        for step in range(2):
            found = score(pool, target, texts)
            assert [one.value for one in found] == [1024 * step + number for number in range(1, 1025)]
            assert [one.extras["text"] for one in found] == texts
    finally:
        pool.close()
    assert sizes == [16, 32, 64, 128, 256, 512, 8, 4, 2, 1, 1, 512, 512]


def test_chunks_of_a_slow_scorer_do_not_grow(target, sizes, monkeypatch):
    monkeypatch.setattr(pools, "QUICK", 0.0)
    pool = ProcessPool(size=16, timeout=60.0)
    try:
        assert all(score(pool, target, ["a"] * 1024))
    finally:
        pool.close()
    assert max(sizes) == 16


def test_chunks_of_a_scorer_that_becomes_slow_shrink_to_what_it_does_in_the_time_of_a_quick_one(
    target, sizes, monkeypatch
):
    pool = ProcessPool(size=16, timeout=60.0)
    try:
        score(pool, target, ["a"] * 1024)
        monkeypatch.setattr(pools, "QUICK", 0.05)  # no more than ten calls of at least 5 ms
        sizes.clear()
        score(pool, target, ["slow"] * 40)
        assert sizes == [40]
        score(pool, target, ["slow"] * 40)
        assert max(sizes[1:]) <= 10
    finally:
        pool.close()


def test_a_call_that_hangs_in_a_large_chunk_is_cut_off_alone_and_chunks_stay_small_from_then_on(target, sizes):
    pool = ProcessPool(size=16, timeout=1.0)
    try:
        score(pool, target, ["a"] * 1024)
        texts = ["a"] * 300 + ["hang"] + ["a"] * 723
        found = score(pool, target, texts)
        assert [place for place, one in enumerate(found) if one is None] == [300]
        assert [one.value for one in found[:300]] == list(range(1025, 1325)), "those before it are not called again"
        assert [one.value for one in found[301:]] == list(range(1, 724)), (
            "those behind it go to a new process, in order"
        )
        sizes.clear()
        score(pool, target, ["a"] * 1024)
        assert max(sizes) == 16
    finally:
        pool.close()


def test_a_call_that_fails_in_a_large_chunk_is_named(target, sizes):
    pool = ProcessPool(size=16, timeout=60.0)
    try:
        score(pool, target, ["a"] * 1024)
        with pytest.raises(Failed, match="raised KeyError: 'broken'") as error:
            texts = ["a"] * 77 + ["break"] + ["a"] * 900
            jobs = [ScoringJob(target, (ScoreRequest("mine", text, None),)) for text in texts]
            pool.submit(jobs)
            pool.results([job.future for job in jobs])
        assert jobs[77].future.exception() is error.value
    finally:
        pool.close()


WAITING = """
import os, pathlib, time
here = pathlib.Path(__file__).parent

def score(data_source, solution_str, ground_truth, extra_info):
    with open(here / "calls", "a") as file:
        print(ground_truth, file=file)
    if solution_str == "slow":
        time.sleep(0.1)
    if solution_str == "together":
        (here / "pids" / str(os.getpid())).touch()
        while len(list((here / "pids").iterdir())) < 2:
            time.sleep(0.001)
    return 1.0
"""


def test_calls_behind_a_slow_one_go_to_other_processes_and_are_made_once(tmp_path, monkeypatch):
    """Those behind it end when two processes have some of them."""
    (tmp_path / "waiting.py").write_text(textwrap.dedent(WAITING))
    (tmp_path / "pids").mkdir()
    target = Target(str(tmp_path / "waiting.py"), "score")
    monkeypatch.setattr(pools, "BUSY", 0.0)
    pool = ProcessPool(size=4, timeout=100.0)
    try:
        assert score(pool, target, [""])
        pool._quick[target] = 64
        jobs = [ScoringJob(target, (ScoreRequest("mine", "together" if n else "slow", str(n)),)) for n in range(64)]
        pool.submit(jobs)
        assert all(pool.results([job.future for job in jobs]))
    finally:
        pool.close()
    calls = (tmp_path / "calls").read_text().split()[1:]
    assert calls[0] == "0" and sorted(calls, key=int) == [str(number) for number in range(64)]


HELD = """
import pathlib, time
here = pathlib.Path(__file__).parent

def score(data_source, solution_str, ground_truth, extra_info):
    (here / "begun").touch()
    while not (here / "go on").exists():
        time.sleep(0.001)
    return 1.0
"""


def test_a_worker_returns_the_calls_behind_the_present_one_if_it_is_asked_in_time(ends, tmp_path):
    here, there = ends
    (tmp_path / "held.py").write_text(textwrap.dedent(HELD))
    target = Target(str(tmp_path / "held.py"), "score")
    server = threading.Thread(target=serve, args=(there,))
    server.start()
    calls = [(number, (ScoreRequest("mine", "", None),)) for number in range(4)]
    here.send(RECALL)  # no call is made: it says nothing
    here.send((target, 60.0, calls))
    while not (tmp_path / "begun").exists():
        time.sleep(0.001)
    here.send(RECALL)
    (tmp_path / "go on").touch()
    expected = [(READY, 0, False), (RETURNED, 0, [1, 2, 3]), (TOOK, 0), (SCORED, 0)]
    assert [here.receive()[: len(wanted)] for wanted in expected] == expected
    here.send((target, 60.0, calls[1:2]))
    assert [here.receive()[:2] for _ in range(3)] == [(READY, 1), (TOOK, 1), (SCORED, 1)]
    here.close()
    server.join(60)
    assert not server.is_alive()


def test_calls_of_some_hundredths_of_a_second_get_more_processes(tmp_path, monkeypatch):
    """A process is idle for a moment after each of them, which is no reason not to start others."""
    (tmp_path / "waiting.py").write_text("import time\ndef score(*_, **__):\n    time.sleep(0.05)\n    return 1.0")
    target = Target(str(tmp_path / "waiting.py"), "score")
    pool = ProcessPool(size=4, timeout=60.0)
    try:
        assert score(pool, target, ["a"])
        for _ in range(2):
            assert all(score(pool, target, ["a"] * 15))
        assert len(pool.workers) > 1
    finally:
        pool.close()


def test_values_of_a_class_of_the_scorers_own_arrive_as_plain_ones():
    class Kind(StrEnum):
        GOOD = "good"

    class Level(IntEnum):
        HIGH = 3

    class Share(float):
        pass

    found = checked({"score": 1.0, "kind": Kind.GOOD, "level": Level.HIGH, "share": Share(0.5), "pred": 10**400})
    assert {name: (type(value), value) for name, value in found.extras.items()} == {
        "kind": (str, "good"), "level": (int, 3), "share": (float, 0.5), "pred": (str, hex(10**400)),
    }  # fmt: skip
    assert mean_of([found.extras["pred"], 1, 2.0]) == 1.5
