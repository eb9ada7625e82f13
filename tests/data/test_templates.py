"""Chat templates that never end, or take all memory, are stopped; others are none the slower for it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from byte_tokenizer import byte_tokenizer
from conftest import ROOT

from paddock.data import templates
from paddock.data.chat import PromptEncoder
from paddock.data.templates import TemplateTimeLimit, Watch, try_template
from paddock.errors import UserError

ASKED = [{"role": "user", "content": "2+2?"}]
NEVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_watch_stops_this_thread_once_its_time_is_up():
    start = time.monotonic()
    with pytest.raises(TemplateTimeLimit), Watch(0.1):
        busy(10)
    assert time.monotonic() - start < 5


def test_every_row_has_its_own_time():
    with Watch(0.5) as watch:
        for _ in range(4):
            watch.next()
            busy(0.2)


def test_a_watch_works_in_any_thread_and_touches_no_other():
    found: list[str] = []

    def render() -> None:
        try:
            with Watch(0.1):
                busy(10)
        except TemplateTimeLimit:
            found.append("stopped")

    thread = threading.Thread(target=render)
    thread.start()
    busy(0.3)
    thread.join()
    assert found == ["stopped"]


def test_a_watch_that_ends_in_time_leaves_nothing_behind():
    """An exception that is raised a moment too late must not meet what comes after the block."""
    stopped = 0
    for turn in range(100):
        try:
            with Watch(0.005):
                busy(turn % 25 / 1000)
        except TemplateTimeLimit:
            stopped += 1
        busy(0.001)
    assert 0 < stopped < 100  # both ends of the race were seen


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (NEVER, "takes longer than"),
        ("{{ 10 ** (10 ** 10) }}", "takes longer than"),
        ("{{ 'a' * (10 ** 10) }}", "GiB of memory"),
        ("{{ messages[0].content }}{# fine #}", None),
        ("{{ raise_exception('no') }}", None),
        ("{% broken", None),
    ],
)
def test_a_template_is_tried_in_a_process_that_can_be_killed(template, problem, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 1.0)
    found = try_template(template, ASKED, {"add_generation_prompt": True})
    assert found is None if problem is None else problem in found


def encoder(template: str) -> PromptEncoder:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return PromptEncoder(tokenizer)


def test_the_row_is_named_whose_conversation_never_ends(monkeypatch):
    """The first row ends, so that the trial finds nothing: the second is stopped while it is rendered."""
    sometimes = f"{{% if messages[0].content == 'hang' %}}{NEVER}{{% endif %}}x"
    monkeypatch.setattr("paddock.data.chat.Watch", lambda: Watch(0.3))
    rows = [ASKED, [{"role": "user", "content": "hang"}]]
    with pytest.raises(UserError, match=r"a row 1, column 'prompt': the chat template takes longer than") as error:
        encoder(sometimes).encode(rows, ["a row 0", "a row 1"], "prompt")
    assert "chat_template" in error.value.fix


def test_a_template_is_tried_once(monkeypatch):
    started: list[object] = []
    real = templates.subprocess.Popen
    monkeypatch.setattr(templates.subprocess, "Popen", lambda *a, **k: (started.append(a), real(*a, **k))[1])
    for _ in range(3):
        encoder("{{ messages[0].content }}{# once #}").encode([ASKED], ["row 0"], "prompt")
    assert len(started) == 1


def test_plain_texts_start_no_process(monkeypatch):
    monkeypatch.setattr(templates.subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    assert encoder(NEVER).encode(["2+2?"], ["row 0"], "prompt")


@pytest.mark.parametrize(
    ("template", "prompt", "reason"),
    [
        ("{# nothing #}", ASKED, "becomes no tokens"),
        ("{{ messages[0].content }}", [{"role": "user", "content": ""}], "becomes no tokens"),
        ("{{ messages[0].content }}", [{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
        ("x", "a\udfffb", "half of a surrogate pair"),
    ],
)
def test_a_prompt_that_is_nothing_or_no_text_is_named(template, prompt, reason):
    with pytest.raises(UserError, match=f"row 5, column 'prompt': .*{reason}") as error:
        encoder(template).encode([prompt], ["row 5"], "prompt")
    assert error.value.fix


def test_a_watch_leaves_no_mark_on_which_a_profiler_would_hang():
    """An exception that is taken back, and never was raised, stays pending in Python 3.11 for who traces the thread."""
    code = (
        "import cProfile\nfrom paddock.data.templates import Watch\nprofile = cProfile.Profile()\nprofile.enable()\n"
        "for _ in range(3):\n    with Watch() as watch:\n        watch.next()\nprofile.disable()"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=ROOT).returncode == 0
