"""Judges, asked through a real server on this machine: what is sent, what is read, and how failures end."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paddock.config.schema import JudgeConfig
from paddock.errors import UserError
from paddock.rewards.judge import TEMPLATE, Judge, JudgeEndpoint, Reply, plain_text, text_of


class Server:
    """Speaks the chat protocol; `answer` maps a request's last message to a reply, a status, or something odder."""

    def __init__(self):
        self.requests, self.headers, self.path = [], [], None
        self.most_at_once = self.now = 0
        self.answer = lambda text: "Score: 5"
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.path = self.path
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.now += 1
                    outer.most_at_once = max(outer.most_at_once, outer.now)
                found = outer.answer(body["messages"][-1]["content"])
                with outer.lock:
                    outer.now -= 1
                with suppress(BrokenPipeError, ConnectionResetError):
                    outer.reply(self, found)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @staticmethod
    def reply(handler, found):
        status, headers, text = 200, {}, found
        if isinstance(found, tuple):
            status, headers, text = found
        if isinstance(text, str) and status == 200:
            text = json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})
        content = text if isinstance(text, bytes) else text.encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)


@pytest.fixture
def server():
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


def settings(server, **keys) -> JudgeConfig:
    return JudgeConfig(**{"source": "endpoint", "url": server.url, "model": "some-judge", "timeout": 5.0, **keys})


def judge(server, **keys) -> Judge:
    config = settings(server, **keys)
    return Judge(config, JudgeEndpoint(config, max_tokens=64))


def score(one: Judge, *responses: str) -> list[float]:
    return one.scores(["2+2?"] * len(responses), list(responses), ["4"] * len(responses))[0]


def test_scores_are_the_numbers_that_the_judge_wrote_in_the_order_of_the_rows(server):
    answer = re.compile("<answer>\\s(.*)\\s</answer>")
    server.answer = lambda text: f"Hm. Score: 3\nNo: Score: {len(answer.search(text)[1])}."
    assert score(judge(server), "a", "abcd", "ab") == [1.0, 4.0, 2.0]


def test_the_request_says_what_the_chat_protocol_wants(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    score(judge(server, api_key_env="MY_KEY", request={"seed": 7, "max_tokens": None}), "4")
    asked = TEMPLATE.replace("{prompt}", "2+2?").replace("{response}", "4")
    message = {"role": "user", "content": asked}
    assert server.requests == [{"model": "some-judge", "messages": [message], "temperature": 0.0, "seed": 7}]
    assert server.path == "/v1/chat/completions"
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_without_a_key_none_is_sent_and_tokens_are_bounded(server, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    score(judge(server, url=server.url + "/chat/completions"), "4")
    assert "Authorization" not in server.headers[0] and server.requests[0]["max_tokens"] == 64
    assert server.path == "/v1/chat/completions"


def test_equal_answers_are_asked_for_once_unless_the_judge_draws_lots(server):
    assert score(judge(server), "a", "b", "a", "a") == [5.0] * 4 and len(server.requests) == 2
    assert score(judge(server, temperature=0.7), "a", "a") == [5.0] * 2 and len(server.requests) == 4


def test_no_more_than_so_many_requests_run_at_a_time(server):
    def slow(text):
        time.sleep(0.05)
        return "Score: 1"

    server.answer = slow
    start = time.monotonic()
    assert score(judge(server, max_concurrent=4), *map(str, range(24))) == [1.0] * 24
    assert 2 <= server.most_at_once <= 4
    assert time.monotonic() - start < 24 * 0.05


def test_a_busy_server_is_asked_again_after_the_time_it_names(server):
    replies = iter([(429, {"Retry-After": "0.2"}, "slow down"), (503, {}, "overloaded"), "Score: 8"])
    server.answer = lambda text: next(replies)
    start = time.monotonic()
    assert score(judge(server), "a") == [8.0]
    assert len(server.requests) == 3 and time.monotonic() - start >= 0.5


def test_a_server_that_stays_silent_costs_the_time_limit_and_a_count_by_cause(server):
    """One row of three hangs: it gets the score of failures, and the others theirs."""
    release = threading.Event()
    server.answer = lambda text: (release.wait(20), "Score: 9")[1] if "hang" in text else "Score: 9"
    one = judge(server, timeout=0.4, retries=1, failed=-1.0)
    start = time.monotonic()
    values, metrics = one.scores(["q"] * 3, ["a", "hang", "b"], [None] * 3)
    assert time.monotonic() - start < 3
    release.set()
    assert values == [9.0, -1.0, 9.0]
    assert metrics == {"reward/judge/failed": 1.0, "reward/judge/timeout": 1.0}


def test_a_body_that_drips_in_is_cut_off_at_the_limit(server):
    class Dripping(bytes):
        pass

    def drip(handler, found):
        if not isinstance(found, Dripping):
            return Server.reply(handler, found)
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b" ")
            time.sleep(0.05)

    server.reply = drip
    server.answer = lambda text: Dripping() if "slow" in text else "Score: 2"
    start = time.monotonic()
    values, metrics = judge(server, timeout=0.5, retries=0).scores(["q", "q"], ["a", "slow"], [None, None])
    assert values == [2.0, 0.0] and metrics["reward/judge/timeout"] == 1
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        ("I would rather not say.", "no_number"),
        ("Score: nan", "no_number"),
        ((200, {}, b"<html>proxy</html>"), "malformed"),
        ((200, {}, b'{"choices": []}'), "malformed"),
        ((200, {}, b'{"choices": [{"message": {"content": null}}]}'), "malformed"),
    ],
)
def test_replies_without_a_number_are_counted_by_cause(server, reply, cause):
    server.answer = lambda text: reply if "bad" in text else "Score: 6"
    values, metrics = judge(server, failed=0.5, retries=0).scores(["q", "q"], ["a", "bad"], [None, None])
    assert values == [6.0, 0.5]
    assert metrics == {"reward/judge/failed": 1.0, f"reward/judge/{cause}": 1.0}


def test_a_batch_without_a_single_score_stops_the_run_and_shows_what_came(server):
    server.answer = lambda text: "I like it."
    with pytest.raises(UserError, match=r"judge.pattern=.*no score to any of 2 answers.*no_number.*'I like it.'"):
        score(judge(server), "a", "b")


def test_a_server_that_is_not_there_is_named(server):
    server.http.shutdown()
    server.http.server_close()
    start = time.monotonic()
    with pytest.raises(UserError, match=rf"unreachable .*{re.escape(server.url)}.*refused"):
        score(judge(server, retries=1), "a")
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("status", "key"), [(401, "api_key_env"), (404, "url"), (400, "request")], ids=["key", "address", "request"]
)
def test_a_refusal_that_will_not_pass_stops_at_once_with_the_servers_words(server, status, key):
    server.answer = lambda text: (status, {}, '{"error": "no such model"}')
    with pytest.raises(UserError, match=rf"judge.{key}=(.|\n)*{status}(.|\n)*no such model"):
        score(judge(server), "a")
    assert len(server.requests) == 1


def test_one_question_before_training_finds_what_is_wrong(server):
    judge(server).check([{"role": "user", "content": "2+2?"}], "4")
    assert len(server.requests) == 1
    server.answer = lambda text: "good"
    with pytest.raises(UserError, match="no_number"):
        judge(server).check("2+2?", "4")


def test_a_template_and_a_pattern_of_ones_own(server, tmp_path):
    path = tmp_path / "rubric.txt"
    path.write_text("Truth: {ground_truth}\nAsked: {prompt}\nSaid: {response}\nGrade A, B or 1 to 5.")
    server.answer = lambda text: "<grade>4</grade> because <grade>2,000.5</grade>"
    one = judge(server, template_path=str(path), pattern="<grade>([^<]*)</grade>")
    assert one.scores([[{"role": "user", "content": "2+2?"}]], ["{prompt} four"], [4])[0] == [2000.5]
    said = server.requests[0]["messages"][0]["content"]
    assert said == "Truth: 4\nAsked: 2+2?\nSaid: {prompt} four\nGrade A, B or 1 to 5."


def test_a_pattern_without_groups_is_the_number_itself():
    assert Judge(JudgeConfig(pattern=r"[\d.]+"), list).read(Reply("between 3 and 4.5")) == 4.5


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pattern": "("}, r"judge.pattern=\(: is not a regular expression"),
        ({"template_path": "nowhere.txt"}, r"judge.template_path=nowhere.txt: cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        Judge(JudgeConfig(**keys), list)


def test_a_template_that_hides_the_answer_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text("Is {prompt} a good question?")
    with pytest.raises(UserError, match=r"has no \{response\}"):
        Judge(JudgeConfig(template_path=str(tmp_path / "t.txt")), list)


def test_conversations_are_told_apart_by_their_roles():
    turns = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "?"},
    ]
    assert plain_text(turns) == "user: 2+2?\n\nassistant: 5\n\nuser: ?"


def test_a_reply_of_any_shape_is_text_or_malformed():
    assert text_of(b'{"choices": [{"message": {"content": "hi"}}]}') == Reply("hi")
    for body in (b"", b"[]", b'{"choices": 1}', b'{"choices": [{}]}', b"\xff"):
        assert text_of(body).cause == "malformed"
