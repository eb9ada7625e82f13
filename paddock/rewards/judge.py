"""Judges: a language model reads what was asked and answered, and writes a number.

It is asked in the words of a template, and its number is found by a pattern. `JudgeEndpoint` asks any server of
OpenAI's chat protocol; an engine of our own is asked in workers/reward_model.py. A reply that does not come in time, or
holds no number, counts as failed, by its cause; if all of a batch fail, the run stops.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from paddock.config.schema import JudgeConfig
from paddock.errors import UserError

KEY = "reward_model.judge"
TEMPLATE = """\
Below are a request and the answer that an assistant gave.

<request>
{prompt}
</request>

<answer>
{response}
</answer>

How good is the answer? Weigh it in a few sentences. Then end with one line of this form,
Score: N
where N is a number from 0 (useless) to 10 (perfect).
"""
FIELD = re.compile(r"\{(prompt|response|ground_truth)\}")
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""Answers of a server that is busy or in trouble: asking again may help."""
LONGEST_REPLY = 1 << 22  # bytes
PAUSE = 0.5  # seconds before the first retry; each later one waits twice as long

Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """What a judge wrote, or why it wrote nothing."""

    text: str = ""
    cause: str | None = None
    """One word, counted as a metric: timeout, unreachable, busy, malformed, too_long, no_number."""
    detail: str = ""


Complete = Callable[[Sequence[Conversation]], list[Reply]]


class Judge:
    """Scores answers by asking someone."""

    def __init__(self, config: JudgeConfig, complete: Complete):
        self.config, self.complete = config, complete
        self.template = TEMPLATE if config.template_path is None else read_template(config.template_path)
        try:
            self.pattern = re.compile(config.pattern)
        except re.error as error:
            raise UserError(
                f"is not a regular expression: {error}", key=f"{KEY}.pattern", value=config.pattern, fix=r"Score: (\d+)"
            ) from error

    def ask(self, prompt: Any, response: str, truth: Any) -> Conversation:
        """Filled in one pass: what an answer says about braces is left alone."""
        truth = "" if truth is None else str(truth)
        values = {"prompt": plain_text(prompt), "response": response, "ground_truth": truth}
        return [{"role": "user", "content": FIELD.sub(lambda field: values[field[1]], self.template)}]

    def read(self, reply: Reply) -> float | Reply:
        """Returns the number in the last match of the pattern: its first group, or without groups all of it."""
        if reply.cause is not None:
            return reply
        matches = list(self.pattern.finditer(reply.text))
        text = matches[-1][min(1, self.pattern.groups)] if matches else None
        try:
            value = float(str(text).replace(",", ""))
        except ValueError:
            value = float("nan")
        return value if isfinite(value) else Reply(reply.text, "no_number", f"it wrote {reply.text[-200:]!r}")

    def scores(
        self, prompts: Sequence[Any], responses: Sequence[str], truths: Sequence[Any]
    ) -> tuple[list[float], dict[str, float]]:
        """Returns one number each, and how many replies failed by which cause. Equal questions are asked once, if the
        judge does not draw lots."""
        asked = [self.ask(*row) for row in zip(prompts, responses, truths, strict=True)]
        names = [json.dumps(each) if self.config.temperature == 0 else str(i) for i, each in enumerate(asked)]
        questions = dict(zip(names, asked, strict=True))
        replies = zip(questions, self.complete(list(questions.values())), strict=True)
        by_name = {name: self.read(reply) for name, reply in replies}
        verdicts = [by_name[name] for name in names]
        failures = [verdict for verdict in verdicts if isinstance(verdict, Reply)]
        if len(failures) == len(verdicts):
            raise self.nothing(failures)
        causes = Counter(f"reward/judge/{failure.cause}" for failure in failures)
        values = [self.config.failed if isinstance(verdict, Reply) else verdict for verdict in verdicts]
        return values, {"reward/judge/failed": float(len(failures)), **{cause: float(n) for cause, n in causes.items()}}

    def check(self, prompt: Any, truth: Any) -> None:
        """Asks one question before training starts."""
        self.scores([prompt], ["I do not know."], [truth])

    def nothing(self, failures: Sequence[Reply]) -> UserError:
        cause, _ = Counter(failure.cause for failure in failures).most_common(1)[0]
        detail = next(failure.detail for failure in failures if failure.cause == cause)
        key, fix = "source", "see that it answers, and how long it takes: reward_model.judge.timeout"
        if cause == "no_number":
            key = "pattern"
            fix = "a pattern that fits what it writes, or more tokens: reward_model.rollout.response_length"
        reason = f"the judge gave no score to any of {len(failures)} answers; most often: {cause} ({detail})"
        return UserError(reason, key=f"{KEY}.{key}", value=getattr(self.config, key), fix=fix)


def read_template(path: str) -> str:
    try:
        template = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        fix = "a text file with {response} in it"
        raise UserError(reason, key=f"{KEY}.template_path", value=path, fix=fix) from error
    if "{response}" not in template:
        raise UserError(
            "the template has no {response}: a judge that does not see the answer cannot judge it",
            key=f"{KEY}.template_path",
            value=path,
            fix="write {response} where the answer belongs; {prompt} and {ground_truth} are filled in, too",
        )
    return template


def plain_text(prompt: Any) -> str:
    """Returns a conversation as a text; of a single question, the question."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0].get("content", ""))
    return "\n\n".join(f"{message['role']}: {message.get('content', '')}" for message in prompt)


class JudgeEndpoint:
    """A server that speaks OpenAI's chat protocol, asked by several threads at a time."""

    def __init__(self, config: JudgeConfig, max_tokens: int):
        self.config, self.max_tokens = config, max_tokens
        base = str(config.url).rstrip("/")
        self.url = base if base.endswith("/chat/completions") else f"{base}/chat/completions"
        self.given_up = threading.Event()
        secret = os.environ.get(config.api_key_env)
        self.headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {secret}"} if secret else {})}

    def __call__(self, conversations: Sequence[Conversation]) -> list[Reply]:
        with ThreadPoolExecutor(self.config.max_concurrent, thread_name_prefix="judge") as threads:
            try:
                return list(threads.map(self.reply, conversations))
            except BaseException:
                self.given_up.set()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def reply(self, conversation: Conversation, attempt: int = 0) -> Reply:
        """Asked again after a failure that may pass, `judge.retries` times."""
        reply, wait = self.attempt(conversation)
        last = reply.cause in (None, "malformed") or attempt == self.config.retries
        if last or self.given_up.wait(min(max(wait, PAUSE * 2**attempt), self.config.timeout)):
            return reply
        return self.reply(conversation, attempt + 1)

    def attempt(self, conversation: Conversation) -> tuple[Reply, float]:
        """Returns the reply, and the seconds that the server asks to be left alone."""
        body = {
            "model": self.config.model,
            "messages": conversation,
            "temperature": self.config.temperature,
            "max_tokens": self.max_tokens,
            **self.config.request,
        }
        content = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        request = urllib.request.Request(self.url, content, self.headers)
        deadline = time.monotonic() + self.config.timeout
        try:
            with urllib.request.urlopen(request, timeout=self.config.timeout) as response:
                return text_of(read_until(response, deadline)), 0.0
        except urllib.error.HTTPError as error:
            return self.refused(error), seconds(error.headers.get("Retry-After"))
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                return Reply(cause="timeout", detail=f"no answer within {self.config.timeout:g} s"), 0.0
            return Reply(cause="unreachable", detail=f"{self.url}: {reason}"), 0.0

    def refused(self, error: urllib.error.HTTPError) -> Reply:
        try:
            text = error.read(2000).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException):
            text = ""
        if error.code in AGAIN:
            return Reply(cause="busy", detail=f"{error.code} {text[:200]}")
        key = {401: "api_key_env", 403: "api_key_env", 404: "url"}.get(error.code, "request")
        fix = f"see what it serves: {KEY}.url=http://host:port/v1 {KEY}.model=NAME"
        if key == "api_key_env":
            fix = f"put its key into the environment variable {self.config.api_key_env}"
        raise UserError(
            f"the judge at {self.url} refuses to answer: {error.code} {error.reason} {text[:300]}".rstrip(),
            key=f"{KEY}.{key}",
            value=getattr(self.config, key),
            fix=fix,
        )


def read_until(response: Any, deadline: float) -> bytes:
    """The whole body, however slowly it drips: a socket's own time-out starts again with every byte."""
    parts: list[bytes] = []
    size = 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError
        if size > LONGEST_REPLY:
            break
    return b"".join(parts)


def text_of(body: bytes) -> Reply:
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        return Reply(cause="malformed", detail=f"not a chat completion: {body[:200]!r}")
    if not isinstance(content, str):
        return Reply(cause="malformed", detail=f"its content is {content!r}")
    return Reply(content)


def seconds(header: str | None) -> float:
    """Reads a Retry-After header as seconds; a date asks for no more than the usual pause."""
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0
