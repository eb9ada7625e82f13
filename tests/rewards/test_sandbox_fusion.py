"""The SandboxFusion client against a real server on the loopback that speaks the protocol and really runs Python."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paddock.errors import UserError
from paddock.rewards.code import contest, humaneval, mbpp
from paddock.sandbox import fusion
from paddock.sandbox.fusion import FusionClient
from paddock.sandbox.program import CAUSES, Program, SandboxBroken, SandboxSettings, default_settings
from paddock.sandbox.runner import check


class Service(ThreadingHTTPServer):
    """Answers POST /run_code as SandboxFusion does; may be told to fail first."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict] = []
        self.failures: list[tuple[int, dict | None]] = []
        """Answers in place of programs' endings; None: the connection ends in the middle of one."""
        self.running = self.most_running = 0
        self.lock = threading.Lock()

    @property
    def settings(self) -> SandboxSettings:
        return replace(default_settings(), url=f"http://127.0.0.1:{self.server_port}/run_code", memory_limit_mb=512)


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append({"path": self.path, **request})
            failure = self.server.failures.pop(0) if self.server.failures else None
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        code, answer = failure or (200, run(request))
        with self.server.lock:
            self.server.running -= 1
        body = json.dumps(answer).encode() if answer is not None else b"{"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body) if answer is not None else 1000))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def run(request: dict) -> dict:
    limit = f"import resource as r; r.setrlimit(r.RLIMIT_AS, ({request['memory_limit_MB'] << 20},) * 2)\n"
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"{limit}exec(compile({request['code']!r}, 'main.py', 'exec'))"],
            input=request["stdin"], capture_output=True, text=True, timeout=request["run_timeout"],
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        result = {"status": "TimeLimitExceeded", "execution_time": request["run_timeout"], "return_code": None}
        return {"status": "Failed", "message": "", "compile_result": None, "run_result": result, "files": {}}
    result = {
        "status": "Finished", "execution_time": time.monotonic() - start, "return_code": done.returncode,
        "stdout": done.stdout, "stderr": done.stderr,
    }  # fmt: skip
    status = "Success" if done.returncode == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result, "files": {}}


@pytest.fixture
def service(monkeypatch) -> Iterator[Service]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fusion, "PAUSE", 0.01)
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_program_is_sent_as_the_protocol_has_it(service):
    result = FusionClient(service.settings).run(Program("print(int(input()) + 1)", "41"))
    assert (result.cause, result.stdout) == ("ok", "42\n") and result.seconds > 0
    assert service.requests == [
        {
            "path": "/run_code",
            "code": "print(int(input()) + 1)",
            "stdin": "41",
            "language": "python",
            "compile_timeout": 10.0,
            "run_timeout": 10.0,
            "memory_limit_MB": 512,
            "files": {},
            "fetch_files": [],
        }
    ]


def test_an_address_without_the_path_is_completed(service):
    base = f"http://127.0.0.1:{service.server_port}/"
    assert FusionClient(replace(service.settings, url=base)).run(Program("print(1)")).passed
    assert service.requests[0]["path"] == "/run_code"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("print(1)", "ok"),
        ("1 / 0", "error"),
        ("print(", "error"),
        ("while True: pass", "timeout"),
        ("x = bytearray(10 << 30)", "memory"),
        ("import os; os.kill(os.getpid(), 9)", "killed"),
    ],
)
def test_endings_have_the_same_causes_as_here(service, code, cause):
    settings = replace(service.settings, timeout=1.0 if cause == "timeout" else 10.0)
    assert FusionClient(settings).run(Program(code)).cause == cause


def test_scorers_give_what_the_local_sandbox_gives(service):
    sandbox = service.settings
    sums = {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]}
    assert contest("print(sum(map(int, input().split())))", sums, sandbox=sandbox)["score"] == 0.5
    calls = {"inputs": [[1], [2], [0]], "outputs": [1, 0.5, 0], "fn_name": "inverse"}
    scored = contest("class Solution:\n    def inverse(self, x): return 1 / x", calls, sandbox=sandbox)
    assert scored["score"] == pytest.approx(2 / 3) and scored["sandbox/error"] == 1.0
    task = {
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    }
    for body, score in (("    return x + 1", 1.0), ("    return x", 0.0), ("    import os; os._exit(0)", 0.0)):
        assert humaneval(body, task, sandbox=sandbox)["score"] == score
    tests = {"test_list": ["assert half(4) == 2", "assert half(1) == 0"]}
    code = "def half(x):\n    return x / 2\nif __name__ == '__main__':\n    input()"
    scored = mbpp(code, tests, sandbox=sandbox, continuous=True)
    assert scored["score"] == 0.5
    assert [name for name in CAUSES if scored[f"sandbox/{name}"]] == ["wrong"]


def test_a_failing_service_is_asked_again_and_then_not_any_more(service):
    client = FusionClient(service.settings)
    service.failures = [(503, {}), (200, {"status": "SandboxError", "message": "no pod"}), (200, None)]
    assert client.run(Program("print(1)")).passed
    assert len(service.requests) == fusion.TRIES
    service.failures = [(200, {"status": "SandboxError", "message": "no pod is free"})] * 10
    with pytest.raises(SandboxBroken, match="no pod is free"):
        client.run(Program("print(1)"))
    assert len(service.requests) == 2 * fusion.TRIES


def test_a_request_that_the_service_refuses_is_not_repeated(service):
    service.failures = [(422, {"detail": "language"})]
    with pytest.raises(SandboxBroken, match=r"422.*language"):
        FusionClient(service.settings).run(Program("print(1)"))
    assert len(service.requests) == 1


def test_a_service_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fusion, "PAUSE", 0.01)
    with socket.socket() as closed:  # bound, not listening: connections to it are refused
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/run_code"
        with pytest.raises(SandboxBroken, match=f"{url}.*refused"):
            FusionClient(replace(default_settings(), url=url)).run(Program("print(1)"))


def test_no_more_programs_are_sent_at_a_time_than_allowed(service):
    client = FusionClient(replace(service.settings, max_concurrent=3))
    results = client.run_all([Program(f"import time; time.sleep(0.2); print({number})") for number in range(9)])
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(9)]
    assert 2 <= service.most_running <= 3


def test_what_the_service_cannot_do_is_refused_before_training():
    settings = default_settings()
    with pytest.raises(UserError, match=r"reward_model\.sandbox_fusion\.url=sandbox:8080"):
        check(replace(settings, url="sandbox:8080"))
    with pytest.raises(UserError, match=r"reward_model\.sandbox\.command=node"):
        check(replace(settings, url="http://sandbox:8080", command=("node", "{file}")))
