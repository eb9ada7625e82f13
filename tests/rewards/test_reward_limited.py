"""Functions that ask a service: a real one, which counts who calls it, how often and how many at a time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest

from paddock.config.schema import RewardModelConfig
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rewards.functions import Target
from paddock.rewards.manager import RewardManager
from paddock.rewards.runners import LimitedPool, Rate, ScoringJob
from paddock.rewards.score import ScoreRequest
from paddock.trainer.assembly import open_rewards

SYNC = """
import json, urllib.request

def compute_score(data_source, solution_str, ground_truth, extra_info, url):
    with urllib.request.urlopen(url, data=solution_str.encode()) as reply:
        return json.load(reply)
"""
ASYNC = """
import asyncio, json

async def compute_score(data_source, solution_str, ground_truth, extra_info, url):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = solution_str.encode()
    writer.write(b"POST / HTTP/1.0\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
    head, _, reply = (await reader.read()).partition(b"\\r\\n\\r\\n")
    writer.close()
    if b" 200 " not in head.splitlines()[0]:
        raise ConnectionError(head.splitlines()[0].decode())
    return json.loads(reply)
"""


@dataclass
class Service:
    """Answers what it is told to: `0.5`, `sleep 2` (then 0), `fail 3` (times, then 1), `text`."""

    url: str = ""
    calls: list[tuple[float, str]] = field(default_factory=list)
    inside: int = 0
    most_inside: int = 0
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: str) -> tuple[int, object]:
        with self.lock:
            self.calls.append((time.monotonic(), body))
            times = sum(call == body for _, call in self.calls)
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        act, _, rest = body.partition(" ")
        time.sleep(float(rest) if act == "sleep" else self.seconds)
        with self.lock:
            self.inside -= 1
        if act == "fail":
            return (429, None) if times <= int(rest) else (200, 1.0)
        return 200, {"sleep": 0.0, "text": "high"}.get(act, float(act) if act[0].isdigit() else 0.0)


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, reply = service.answer(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield service
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def manager(service, tmp_path):
    made = []

    def make(code: str, *settings: str) -> RewardManager:
        Path(tmp_path / "judge.py").write_text(code)
        config = load(
            [
                "reward_model.reward_manager=rate_limited",
                "reward_model.num_workers=1",
                f"custom_reward_function.path={tmp_path}/judge.py",
                f"+custom_reward_function.reward_kwargs.url={service.url}",
                *settings,
            ]
        ).config
        made.append(open_rewards(config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def requests(*solutions: str) -> list[ScoreRequest]:
    return [ScoreRequest("mine", text, "", {}, f"a.parquet row {row}") for row, text in enumerate(solutions)]


def values(manager: RewardManager, *solutions: str) -> list[float]:
    return [score.value for score in manager.score(requests(*solutions))]


@pytest.mark.parametrize("code", [SYNC, ASYNC], ids=["sync", "async"])
def test_calls_run_side_by_side_within_the_limit_and_each_answer_finds_its_row(manager, service, code):
    service.seconds = 0.1
    rewards = manager(code, "reward_model.max_concurrent=8")
    rewards.check(requests("1"))
    begin = time.monotonic()
    assert values(rewards, *(f"{n / 40}" for n in range(40))) == [n / 40 for n in range(40)]
    assert 3 <= service.most_inside <= 8 and len(service.calls) == 41
    assert time.monotonic() - begin < 4.0, "one after the other they take longer"


def test_several_processes_share_the_limit(manager, service):
    service.seconds = 0.05
    rewards = manager(SYNC, "reward_model.max_concurrent=5", "reward_model.num_workers=2")
    assert values(rewards, *["1"] * 30) == [1.0] * 30
    assert service.most_inside <= 5 and len(rewards.pool.workers) == 2


def test_calls_per_minute_are_spread_evenly(manager, service):
    rewards = manager(ASYNC, "reward_model.max_rpm=600")  # one in a tenth of a second
    rewards.check(requests("1"))
    service.calls.clear()
    assert values(rewards, *["1"] * 8) == [1.0] * 8
    gaps = [after[0] - before[0] for before, after in pairwise(service.calls)]
    assert sum(gaps) > 0.6 and sum(gaps) < 2.0


def test_tokens_per_minute_hold_calls_back(manager, service):
    rewards = manager(ASYNC, "reward_model.max_tpm=60000", "reward_model.estimated_tokens_per_request=200")
    rewards.check(requests("1"))
    service.calls.clear()
    values(rewards, *["1"] * 6)
    assert service.calls[-1][0] - service.calls[0][0] > 0.9, "five intervals of 200 tokens at 1000 a second"


def test_a_rate_never_lets_more_through_than_it_says():
    rate, now, passed = Rate(per_minute=120), 0.0, []
    while now < 60.0:
        if rate.due <= now:
            rate.take(now)
            passed.append(now)
        now += 0.01
    assert len(passed) <= 120 and all(after - before >= 0.5 - 1e-6 for before, after in pairwise(passed))
    unlimited = Rate(None)
    unlimited.take(5.0, 1000)
    assert unlimited.due == 5.0


@pytest.mark.parametrize("code", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_call_that_fails_is_made_again_after_a_pause(manager, service, code):
    rewards = manager(code)
    scores = rewards.score(requests("fail 1", "0.5"))
    assert [score.value for score in scores] == [1.0, 0.5] and [score.retries for score in scores] == [1, 0]
    first, again = (when for when, body in service.calls if body == "fail 1")
    assert 0.9 < again - first < 5.0


def test_a_service_that_keeps_failing_stops_the_run_with_the_row_and_the_tries(manager, service):
    rewards = manager(SYNC, "reward_model.max_retries=1")
    with pytest.raises(UserError, match=r"HTTP Error 429.*the last of 2 tries.*on a.parquet row 1 .*'fail 9'"):
        rewards.score(requests("1", "fail 9"))
    assert [body for _, body in service.calls].count("fail 9") == 2
    assert values(rewards, "0.25") == [0.25], "and the manager can go on"


def test_a_mistake_is_not_tried_again(manager, service):
    rewards = manager(ASYNC)
    with pytest.raises(UserError, match=r"returned 'high' \(str\), not a number, on a.parquet row 0"):
        rewards.score(requests("text"))
    assert len(service.calls) == 1
    begin = time.monotonic()
    with pytest.raises(UserError, match="NameError: name 'jason' is not defined"):
        manager(ASYNC.replace("json.loads", "jason.loads")).score(requests("1"))
    with pytest.raises(UserError, match=r"takes 'api', and nothing [\s\S]*reward_kwargs=\{api: 1\}"):
        manager(ASYNC.replace(", url", ", url, api")).score(requests("1"))
    assert time.monotonic() - begin < 5.0


@pytest.mark.parametrize("code", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_call_that_takes_too_long_is_cut_off_and_counted_and_the_others_are_scored(manager, service, code):
    rewards = manager(code, "reward_model.timeout=1", "reward_model.max_retries=0", "reward_model.max_concurrent=4")
    rewards.check(requests("1"))
    begin = time.monotonic()
    scores = rewards.score(requests("0.5", "sleep 30", "0.25", *["1"] * 10))
    assert time.monotonic() - begin < 6.0
    assert [score.value for score in scores] == [0.5, 0.0, 0.25, *[1.0] * 10]
    assert [score.timed_out for score in scores] == [False, True, *[False] * 11]


def test_a_coroutine_that_blocks_its_loop_is_cut_off_too(manager, service):
    blocking = ASYNC.replace(
        "    body = ", "    import time; time.sleep(30 if 'block' in solution_str else 0)\n    body = "
    )
    rewards = manager(blocking, "reward_model.timeout=2", "reward_model.max_retries=0")
    begin = time.monotonic()
    scores = rewards.score(requests("block", "0.5", "0.25"))
    assert [score.value for score in scores] == [0.0, 0.5, 0.25] and scores[0].timed_out
    assert time.monotonic() - begin < 40.0


def test_a_time_out_is_tried_again_before_it_counts(manager, service):
    rewards = manager(ASYNC, "reward_model.timeout=0.5", "reward_model.max_retries=1")
    (score,) = rewards.score(requests("sleep 30"))
    assert score.timed_out and len(service.calls) == 2


def test_limits_without_a_function_of_ones_own_are_refused():
    with pytest.raises(UserError, match="limits the calls of a function of your own, and none is named"):
        load(["reward_model.reward_manager=rate_limited"])


def test_limits_are_refused_for_a_function_that_runs_in_a_thread():
    with pytest.raises(UserError, match="judge is a function of this program, which runs in a thread"):
        load(["reward_model.reward_manager=rate_limited", "custom_reward_function.path=python:judge"])


def test_calls_that_wait_to_be_alone_in_the_only_process_do_not_keep_a_core_busy(tmp_path):
    """Of those that a hanging thread took with it, each is made again alone."""
    code = ["import time", "def score(data_source, solution_str, *_, **__):", "    time.sleep(float(solution_str))"]
    (tmp_path / "waiting.py").write_text("\n".join([*code, "    return 1.0"]))
    target = Target(str(tmp_path / "waiting.py"), "score")
    config = RewardModelConfig(num_workers=1, timeout=1.0, max_concurrent=4, max_retries=0)
    pool = LimitedPool(config)
    turns, turn = [], pool._turn
    pool._turn = lambda: turns.append(None) or turn()
    try:
        jobs = [ScoringJob(target, (ScoreRequest("mine", seconds, None),)) for seconds in ("100", "100", "0.1")]
        pool.submit(jobs)
        scores = pool.results([job.future for job in jobs])
    finally:
        pool.close()
    assert [score and score[0].value for score in scores] == [None, None, 1.0]
    assert len(turns) < 100


@pytest.mark.parametrize("name", ["max_concurrent", "max_rpm", "max_tpm", "estimated_tokens_per_request", "timeout"])
def test_later_names_of_the_limits_are_understood(name):
    assert getattr(load([f"+reward.{name}=7"]).config.reward_model, name) == 7
