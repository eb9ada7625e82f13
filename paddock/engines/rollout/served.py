"""A program of its own that answers over HTTP, for as long as the process that started it lives."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import Any

from paddock.errors import UserError

HOST = "127.0.0.1"
START_SECONDS, CONTROL_SECONDS, GRACE_SECONDS, POLL_SECONDS = 1800.0, 900.0, 5.0, 0.2
TAIL, LOOKED_AT = 15, 1 << 16  # lines of what it wrote that an error shows, and bytes in which they are


class Refusal(Exception):
    """The server answered, and its answer is no."""


class Server:
    """`module` is run by this Python: it reads its arguments as a line of JSON, and ends when its input does.

    `key` is the part of the config that asked for it.
    """

    def __init__(self, module: str, arguments: dict[str, Any], environment: dict[str, str], key: str):
        self.key = key
        self.port = free_port()
        self.log: Any = tempfile.TemporaryFile()  # noqa: SIM115 - it has no name, so nothing is left, whoever is killed
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,  # its children are ended with it
        )
        self.ending = threading.Lock()
        self.last_lines: list[str] = []
        self.close = weakref.finalize(self, end, self.process, self.log)  # at exit too
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(arguments | {"host": HOST, "port": self.port}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self.lost("it ended at once") from error

    def wait_for(self, path: str, seconds: float = START_SECONDS) -> None:
        """Waits until `path` answers."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.call("GET", path, timeout=max(1.0, deadline - time.monotonic()))
                return
            except (OSError, http.client.HTTPException, Refusal):  # it is not listening yet, or says that it starts
                if self.process.poll() is not None:
                    raise self.lost("it ended while it started") from None
                if time.monotonic() > deadline:
                    raise self.lost(f"it did not start within {seconds:.0f} s") from None
                time.sleep(POLL_SECONDS)

    def post(self, path: str, body: dict[str, Any], timeout: float | None = CONTROL_SECONDS) -> Any:
        """Returns the server's answer. A server that hangs is ended by its own watchdog; then this call fails."""
        try:
            return self.call("POST", path, body, timeout)
        except Refusal as refusal:
            raise self.error(f"{path} failed: {refusal}") from None
        except TimeoutError:
            raise self.lost(f"{path} was not answered within {timeout:.0f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise self.lost(f"{path} was cut off: {error}", GRACE_SECONDS) from None

    def call(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"} if content else {})
            answer = connection.getresponse()
            said = answer.read()
        finally:
            connection.close()
        found = json.loads(said) if said and "json" in (answer.getheader("Content-Type") or "") else said.decode()
        if answer.status != http.HTTPStatus.OK:
            raise Refusal(message_of(found) or f"status {answer.status}")
        return found

    def lost(self, reason: str, grace: float = 0.0) -> UserError:
        """Ends the server and returns the error with the last lines that it wrote. Many threads may call it at once."""
        with self.ending:
            with contextlib.suppress(subprocess.TimeoutExpired):
                reason += f" (exit status {self.process.wait(grace)})"
            if not self.log.closed:
                self.last_lines = self.written()
            self.close()
        return self.error(
            reason + ("; the last that it wrote:\n" + "\n".join(self.last_lines) if self.last_lines else "")
        )

    def written(self) -> list[str]:
        """Returns the last lines of the server's log; reads them without moving the position at which it writes."""
        size = os.fstat(self.log.fileno()).st_size
        end = os.pread(self.log.fileno(), LOOKED_AT, max(0, size - LOOKED_AT))
        return end.decode(errors="replace").splitlines()[-TAIL:]

    def error(self, reason: str) -> UserError:
        fix = "what its own message asks for, or actor_rollout_ref.rollout.name=embedded"
        return UserError(f"the server of the rollout engine: {reason}", key=self.key, fix=fix)


def message_of(answer: Any) -> str:
    """Errors come as {"error": {"message": ...}}, {"message": ...} or plain text."""
    while isinstance(answer, dict):
        answer = answer.get("error") or answer.get("message")
    return "" if answer is None else str(answer).strip()


def free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return free.getsockname()[1]


def end(process: subprocess.Popen[bytes], log: Any) -> None:
    """Ends the whole session that the server leads; killed if it does not end in time."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(GRACE_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    if process.stdin is not None:
        process.stdin.close()
    log.close()


def arguments_of_this_server() -> dict[str, Any]:
    """Runs in the server: returns its arguments, and from now on ends it with the process that started it."""
    found = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_starter, daemon=True).start()
    return found


def end_with_starter() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
