"""Chat templates are programs of a model's author: what bounds their time and memory.

A template runs in this process, where a second thread stops it by an exception once its time is up. An operation inside
one instruction (``10 ** 10 ** 10``) cannot be stopped so; therefore the first conversation is written in a process of
its own beforehand, which is killed if it takes too long.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

SECONDS = 10.0
"""Longest time for one conversation; a template takes some microseconds."""
MEMORY = 4 * 1024**3  # bytes, of the process that tries a template
TOO_LONG = f"the chat template takes longer than {SECONDS:g} s"
TOO_LARGE = f"the chat template takes more than {MEMORY // 1024**3} GiB of memory"
OUT_OF_MEMORY = 3  # exit code

TRIED: set[str] = set()

# Errors of a template are no business of the trial: the real rendering meets and reports them.
TRIAL = f"""
import json, resource, sys
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
print("ready", flush=True)
asked = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
try:
    def raise_exception(message):
        raise ValueError(message)
    room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    room.filters["tojson"] = lambda value, **options: json.dumps(value)
    room.globals |= dict(raise_exception=raise_exception, strftime_now=str)
    room.from_string(asked.pop("template")).render(**asked)
except MemoryError:
    sys.exit({OUT_OF_MEMORY})
except Exception:
    pass
"""


class TemplateTimeLimit(Exception):
    """Raised inside a template whose time is up."""


class Watch:
    """A block in which chat templates are rendered; each has `seconds` from the last call of `next`.

    TimeLimit may come from the block or from its end, and never after it.
    """

    def __init__(self, seconds: float = SECONDS):
        self.seconds, self.thread = seconds, threading.get_ident()
        self.begun, self.over = threading.Event(), threading.Event()
        self.lock, self.done, self.raised = threading.Lock(), False, False

    def next(self) -> None:
        self.deadline = time.monotonic() + self.seconds

    def __enter__(self) -> Watch:
        threading.Thread(target=self._wait, daemon=True).start()
        self.next()
        self.begun.set()  # an exception in the midst of a thread's start would break it
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        late = None
        while not self.over.is_set():
            try:
                with self.lock:
                    self.done = True
                if self.raised:  # and not arrived yet. To take back nothing would leave a mark: profilers hang on it
                    raise_in(self.thread, None)
                self.over.set()
            except TemplateTimeLimit as limit:  # it arrived here; there is no second one
                late = limit
        if late and error is None:
            raise late

    def _wait(self) -> None:
        self.begun.wait()
        while not self.over.wait(max(0.0, self.deadline - time.monotonic())):
            with self.lock:
                if self.done:
                    return
                if time.monotonic() >= self.deadline:
                    self.raised = True
                    raise_in(self.thread, TemplateTimeLimit)
                    return


def raise_in(thread: int, error: type[Exception] | None) -> None:
    """Raises `error` in a thread at its next instruction of Python; None takes one back that is not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error) if error else None)


def try_template(template: str, messages: Any, arguments: Mapping[str, Any]) -> str | None:
    """Renders one conversation in a process of its own, once for each template of this process; returns what is wrong
    if it takes too much time or memory."""
    if template in TRIED:
        return None
    asked = json.dumps({**arguments, "template": template, "messages": messages}, default=str)
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", TRIAL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    with child:
        assert child.stdout
        child.stdout.readline()  # imports take a while on a busy machine, and are not the template's
        try:
            child.communicate(asked, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            return TOO_LONG
        except BrokenPipeError:  # it could not begin: without jinja2 there are no templates
            return None
    if child.returncode == OUT_OF_MEMORY:
        return TOO_LARGE
    TRIED.add(template)
    return None
