"""The page in a real browser: it draws the curves, answers to the pointer and the keyboard, and opens a sample.

`make test-browser` runs it; it needs playwright and the distribution's Chromium, and is skipped without them.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import VALIDATION, write_run, write_samples

from paddock.report.page import render
from paddock.runs.reading import read_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
REWARD = "#charts [data-metric='critic/score/mean']"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser, tmp_path) -> Iterator[Any]:
    """Opens the page about some run folders; fails on any error, warning or request that the page makes."""
    complaints, contexts = [], []

    def opened(*folders: Path, width: int = 1400, scheme: str = "light") -> Any:
        path = tmp_path / "page.html"
        path.write_text(render([read_run(folder) for folder in folders]))
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda sent: complaints.append(sent.url) if sent.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        page.wait_for_selector(f"{REWARD} path.line", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [text for text in complaints if not text.startswith("data:")] == []


def points(page: Any, metric: str) -> list[tuple[float, float]]:
    """Reads the corners of a drawn line, in pixels."""
    line = page.locator(f"#charts [data-metric='{metric}'] path.line").first.get_attribute("d")
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+),([\d.-]+)", line)]


def test_the_drawn_curve_has_a_corner_for_each_step_at_the_height_of_its_value(show, tmp_path):
    write_run(tmp_path / "run", steps=20)
    page = show(tmp_path / "run")
    run = read_run(tmp_path / "run")
    for metric in ("critic/score/mean", VALIDATION):
        drawn, values = points(page, metric), run.values(metric)
        assert len(drawn) == len(values)
        low, high = values.index(min(values)), values.index(max(values))
        pixels = (drawn[high][1] - drawn[low][1]) / (values[high] - values[low])
        assert pixels < 0  # a larger value lies higher
        scale = [drawn[low][1] + pixels * (value - values[low]) for value in values]
        assert [y for _, y in drawn] == pytest.approx(scale, abs=0.2)
        steps = run.metrics[metric][0]
        across = (drawn[-1][0] - drawn[0][0]) / (steps[-1] - steps[0])
        places = [drawn[0][0] + across * (step - steps[0]) for step in steps]
        assert across > 0 and [x for x, _ in drawn] == pytest.approx(places, abs=0.2)


def test_the_pointer_and_the_keyboard_read_values(show, tmp_path):
    lines = write_run(tmp_path / "run", steps=20)
    page = show(tmp_path / "run")
    tip = page.locator(f"{REWARD} .tip")
    page.locator(f"{REWARD} svg").focus()
    page.keyboard.press("Home")
    assert "step 1" in tip.inner_text() and f"{lines[1]['critic/score/mean']:.3g}"[:5] in tip.inner_text()
    page.keyboard.press("ArrowRight")
    assert "step 2" in tip.inner_text()
    page.locator(f"{REWARD} svg").hover(position={"x": 200, "y": 60})
    assert re.search(r"step \d+", tip.inner_text())
    assert page.locator("#charts line.cross").count() > 3  # in all charts at the same step


def test_a_click_opens_a_sample_and_steps_can_be_chosen(show, tmp_path):
    write_run(tmp_path / "run", steps=20)
    write_samples(tmp_path / "run", [0, 10, 20], answer="line\n" * 30 + "<b>{}</b></script>")
    page = show(tmp_path / "run")
    first = page.locator(".sample").first
    assert "step 0" in first.inner_text() and "expected 0" in page.locator(".pair").first.inner_text()
    closed = first.bounding_box()["height"]
    first.locator("button").click()
    assert first.locator("button").get_attribute("aria-expanded") == "true"
    assert first.bounding_box()["height"] > closed + 100 and "advantage" in first.inner_text()
    assert "<b>1</b></script>" in first.locator("pre.answer").inner_text()
    page.get_by_label("late step").select_option("10")
    assert "step 10" in page.locator(".sample").nth(1).inner_text()
    page.get_by_role("button", name="Training").click()
    assert "What is 0 + 0?" in page.locator(".sample pre.prompt, .shared pre.prompt").first.inner_text()


def test_metrics_and_settings_are_found_by_their_words(show, tmp_path):
    write_run(tmp_path / "run", settings=("algorithm.adv_estimator=grpo",))
    page = show(tmp_path / "run")
    page.get_by_label("search metrics").fill("number_7")
    page.locator("tr.metric:visible").click()
    assert page.locator("tr.detail path.line").count() == 1
    page.get_by_label("search config").fill("adv_estimator")
    row = page.locator(".settings tbody tr", has_text="algorithm.adv_estimator").first
    assert "grpo" in row.inner_text() and "command line" in row.inner_text()


def test_log_scale_smoothing_and_the_legend_change_the_drawing(show, tmp_path):
    write_run(tmp_path / "a", steps=60, settings=None)
    write_run(tmp_path / "b", steps=60, seed=3, settings=None)
    page = show(tmp_path / "a", tmp_path / "b")
    assert page.locator(f"{REWARD} path.line").count() == 2 and page.locator(f"{REWARD} path.raw").count() == 2
    before = points(page, "critic/score/mean")
    page.locator("#smoothing").fill("0")
    assert page.locator(f"{REWARD} path.raw").count() == 0 and points(page, "critic/score/mean") != before
    plain = points(page, "critic/score/mean")
    page.locator(f"{REWARD} button.log").click()
    assert points(page, "critic/score/mean") != plain
    page.locator("#legend button").first.click()
    assert page.locator(f"{REWARD} path.line").count() == 1


def test_a_run_ahead_shows_ages_and_alternating_steps(show, tmp_path):
    write_run(tmp_path / "run", steps=10, ahead=True)
    write_run(tmp_path / "other")
    page = show(tmp_path / "run")
    ages, steps = page.locator("#ahead svg").all()
    assert ages.locator("rect").count() == 2 and steps.locator("path.line").count() == 2
    heights = [float(bar.get_attribute("height")) for bar in steps.locator("rect").all()]
    assert max(heights) > 1.5 * min(heights)
    steps.hover(position={"x": 60, "y": 60})
    tip = page.locator("#ahead .tip:visible").inner_text()
    assert "step 1" in tip and "generation" in tip and re.search(r"finished, of later steps\s*60$", tip, re.M)
    assert show(tmp_path / "other").locator("#ahead").count() == 0


def test_seeds_are_drawn_as_a_band(show, tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path / f"seed{seed}", seed=seed)
    page = show(*(tmp_path / f"seed{seed}" for seed in (1, 2, 3)))
    assert page.locator(f"{REWARD} path.band").count() == page.locator(f"{REWARD} path.line").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window(show, tmp_path, width, scheme):
    write_run(tmp_path / "run_with_a_name_that_is_much_longer_than_a_narrow_window_is_wide", steps=20)
    page = show(next(tmp_path.glob("run_*")), width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", dark)[0])
    assert red < 60 if scheme == "dark" else red > 200


def test_a_run_of_1000_steps_opens_in_less_than_2_seconds(browser, tmp_path):
    write_run(tmp_path / "run", steps=1000)
    (tmp_path / "page.html").write_text(render([read_run(tmp_path / "run")]))
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto("about:blank")
    began = time.monotonic()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector(f"{REWARD} path.line", state="attached")
    seconds = time.monotonic() - began
    print(json.dumps({"seconds to open": round(seconds, 2)}))
    assert seconds < 2 and len(points(page, "critic/score/mean")) == 1000
    page.close()
