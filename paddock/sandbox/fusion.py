"""Programs run by a SandboxFusion service: POST /run_code with one program, the answer says how it ended."""

from __future__ import annotations

import http.client
import inspect
import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from paddock.errors import UserError
from paddock.sandbox.inside import checks, wire
from paddock.sandbox.program import Program, Result, Runner, SandboxBroken, SandboxSettings, causes_of

PATH = "/run_code"
TRIES, PAUSE = 4, 0.5  # the pause doubles
ANSWERING = 10.0  # seconds beyond the program's own, for the service to take and answer a request
BUSY = (429, 500, 502, 503, 504)

ANNOTATIONS = "from __future__ import annotations"
HELPERS: tuple[Callable[..., Any], ...] = (checks.same, checks.accepted, checks.marked)
WITH_CHECKS = """\
space = {{"__name__": {module!r}}}
exec(compile({setup!r}, "setup", "exec"), space)
exec(compile({code!r}, "<program>", "exec"), space)
exec(compile({helpers!r}, "helpers", "exec"), space)
if {entry!r}:
    space["candidate"] = space[{entry!r}] if {entry!r} in space else getattr(space["Solution"](), {entry!r})
for check in {checks!r}:
    try:
        exec(compile(check, "check", "exec"), space)
        cause = "ok"
    except AssertionError:
        cause = "wrong"
    except MemoryError:
        cause = "memory"
    except Exception:
        cause = "error"
    print("\\n{mark} " + cause, flush=True)
"""
"""The service runs one text, so here checks and program share a process: a program that searches it can find and
imitate the mark. The local sandbox keeps them apart."""


class FusionClient(Runner):
    """Sends programs to a SandboxFusion service."""

    def __init__(self, settings: SandboxSettings):
        assert settings.url
        if settings.command:
            reason = "holds for programs run here; the service is sent Python"
            fix = "leave out reward_model.sandbox_fusion.url, or the command"
            raise UserError(reason, key="reward_model.sandbox.command", value=" ".join(settings.command), fix=fix)
        if urlsplit(settings.url).scheme not in ("http", "https"):
            reason = "is not an address of a service"
            fix = f"http://host:8080{PATH}"
            raise UserError(reason, key="reward_model.sandbox_fusion.url", value=settings.url, fix=fix)
        super().__init__(settings, settings.max_concurrent)
        self.url = settings.url if urlsplit(settings.url).path.endswith(PATH) else settings.url.rstrip("/") + PATH

    def run(self, program: Program, seconds: float | None = None) -> Result:
        seconds = self.settings.timeout if seconds is None else seconds
        mark = secrets.token_hex(16)
        request = {
            "code": _text(program, mark) if program.checks else program.code,
            "stdin": program.stdin,
            "language": "python",
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": self.settings.memory_limit_mb,
            "files": {},
            "fetch_files": [],
        }
        return result_of(self._asked(request, seconds), program, mark)

    def close(self) -> None:
        """Does nothing: no resource is held."""

    def _asked(self, request: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        """Returns the service's answer. A service that is busy or fails is asked again, a few times and while there is
        time."""
        body = json.dumps(request).encode()
        reason, end = "", time.monotonic() + self.settings.total_timeout
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            if time.monotonic() > end:
                break
            post = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(post, timeout=2 * seconds + ANSWERING) as response:
                    answer = json.load(response)
            except urllib.error.HTTPError as error:
                text = error.read(200).decode(errors="replace")
                reason = f"it answered {error.code} {error.reason}: {text}"
                if error.code not in BUSY:
                    break
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = str(error)
            else:
                if isinstance(answer, dict) and answer.get("status") in ("Success", "Failed"):
                    return answer
                reason = f"it answered {answer!r:.200}"
        raise SandboxBroken(f"{self.url} runs no programs: {reason}")


def result_of(answer: Mapping[str, Any], program: Program, mark: str) -> Result:
    steps = [step for step in (answer.get("compile_result"), answer.get("run_result")) if step]
    last: Mapping[str, Any] = steps[-1] if steps else {}
    stdout, stderr = (str(last.get(name) or "") for name in ("stdout", "stderr"))
    seconds = sum(float(step.get("execution_time") or 0.0) for step in steps)
    cause = _ending(steps, stderr)
    if not program.checks:
        return Result(cause, stdout, stderr, seconds)
    marked = [line.split() for line in stdout.splitlines() if line.startswith(mark)]
    found = [words[1] for words in marked if len(words) == 2][: len(program.checks)]
    if len(found) == len(program.checks):
        cause = next((check for check in found if check != "ok"), "ok")
    elif cause == "ok":  # it ended itself before all was asked
        cause = "error"
    return Result(cause, stdout, stderr, seconds, causes_of(found, cause, program))


def _ending(steps: Sequence[Mapping[str, Any]], stderr: str) -> str:
    if any(step.get("status") == "TimeLimitExceeded" for step in steps):
        return "timeout"
    code = next((step["return_code"] for step in steps if step.get("return_code")), 0)
    if code == 0:
        return "ok"
    return "memory" if "MemoryError" in stderr else "killed" if code < 0 else "error"


def _text(program: Program, mark: str) -> str:
    return WITH_CHECKS.format(
        module=wire.MODULE,
        setup=program.setup,
        code=program.code,
        helpers="\n".join([ANNOTATIONS, *map(inspect.getsource, HELPERS)]),
        entry=program.entry and program.entry.rpartition(".")[2],
        checks=list(program.checks),
        mark=mark,
    )
