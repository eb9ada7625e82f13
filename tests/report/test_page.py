"""report.html: it holds the run's numbers, stays small, asks for nothing from outside, and escapes what runs wrote."""

from __future__ import annotations

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic import VALIDATION, write_run, write_samples, write_start

from paddock.report.page import bounded, render, short
from paddock.runs.reading import RecordedRun, read_run


class Page(HTMLParser):
    """Collects elements, and the text of each <script>."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


def page_of(*folders: Path) -> Page:
    return Page(render([read_run(folder) for folder in folders]))


def series(data: dict, metric: str, curve: int = 0) -> list[tuple[int, float | None]]:
    one = data["metrics"][metric][curve]
    return list(zip(data["steps"][one["x"]], one["y"], strict=True))


def test_the_page_holds_every_number_of_metrics_jsonl_with_six_digits(tmp_path):
    lines = write_run(tmp_path / "run", steps=200)
    data = page_of(tmp_path / "run").data
    names = {name for line in lines for name in line} - {"step"}
    assert set(data["metrics"]) == names
    for name in names:
        written = [(line["step"], line[name]) for line in lines if name in line]
        shown = series(data, name)
        assert [step for step, _ in shown] == [step for step, _ in written]
        assert [value for _, value in shown] == pytest.approx([value for _, value in written], rel=5e-6)


def test_a_run_of_1000_steps_weighs_less_than_3_mb_and_is_written_in_less_than_2_seconds(tmp_path):
    write_run(tmp_path / "run", steps=1000, settings=None)
    write_samples(tmp_path / "run", [0, *(2**i for i in range(10)), 1000], answer="word " * 700 + "{}")
    write_start(tmp_path / "run", (), seed=0)
    began = time.process_time()
    text = render([read_run(tmp_path / "run")])
    assert time.process_time() - began < 2
    assert 200_000 < len(text.encode()) < 3_000_000
    assert len(series(Page(text).data, "critic/score/mean")) == 1000


def test_longer_and_several_runs_are_thinned(tmp_path):
    write_run(tmp_path / "long", steps=3000, samples=False, settings=None)
    write_run(tmp_path / "other", steps=1000, samples=False, settings=None)
    alone = render([read_run(tmp_path / "long")])
    assert len(alone.encode()) < 3_000_000 and len(series(Page(alone).data, "actor/entropy")) <= 1000
    both = page_of(tmp_path / "long", tmp_path / "other").data
    assert len(series(both, "actor/entropy", 1)) <= 500
    assert series(both, "actor/entropy", 1)[-1][0] == 1000


HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \u2028 \ud800 @@DATA@@ ${1}`"


def test_what_a_run_wrote_never_becomes_markup(tmp_path):
    folder = tmp_path / "<b>&run"
    write_run(folder, steps=10, settings=None)
    start = {
        "after_step": 0,
        "settings": {"<i>key": HOSTILE},
        "origins": {"<i>key": HOSTILE},
        "environment": {"<i>": HOSTILE},
    }
    (folder / "run.json").write_text(json.dumps({"starts": [start]}))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= {"</script><b>metric": 1.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = {
        "prompt": HOSTILE,
        "answer": HOSTILE,
        "score": 1.0,
        "length": 1,
        "ground_truth": HOSTILE,
        "extras": {"<i>": 1},
    }
    line = {"step": 1, "source": "rollout", "samples": [row]}
    (folder / "samples.jsonl").write_text(json.dumps(line) + "\n")
    page = page_of(folder)
    assert len(page.scripts) == 2 and not {"b", "i", "img"} & {tag for tag, _ in page.tags}
    shown = page.data["samples"][0]["lines"][0]["samples"][0]
    assert shown["answer"] == HOSTILE.replace("\ud800", "?")
    assert "</script><b>metric" in page.data["metrics"]


def test_the_page_asks_for_nothing_from_outside(tmp_path):
    write_run(tmp_path / "run")
    text = render([read_run(tmp_path / "run")])
    page = Page(text)
    code = re.sub(r'id="data">.*?</script>', "", text, flags=re.S)  # the data is text, whatever it says
    assert set(re.findall(r"https?://[^\s\"'<)]+", code)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|sendBeacon|WebSocket|import\(", code)
    links = [
        a for tag, a in page.tags if tag in ("link", "script", "img", "iframe") and (a.get("src") or a.get("href"))
    ]
    assert links == [{"rel": "icon", "href": "data:,"}]
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy


def test_scripts_put_texts_into_the_page_as_texts():
    folder = Path(__file__).parents[2] / "paddock" / "report"
    script = "".join((folder / name).read_text() for name in ("charts.js", "page.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)


def test_a_run_ahead_has_the_ages_of_its_tokens_and_its_last_steps_one_by_one(tmp_path):
    write_run(tmp_path / "run", steps=100, ahead=True)
    write_run(tmp_path / "other")
    shown, nothing = page_of(tmp_path / "run", tmp_path / "other").data["ahead"]
    assert (
        nothing is None and sum(shown["ages"]) == pytest.approx(100) and shown["ages"] == pytest.approx([50, 50], abs=2)
    )
    assert shown["steps"] == [[step, step] for step in range(21, 101)]
    assert shown["seconds"]["generation"] == [2, 0] * 40 and shown["seconds"]["policy update"] == [1] * 80
    assert shown["waiting"] == {"ready": [60, 0] * 40, "carried_rows": [4] * 80}


def test_seeds_are_a_band_and_other_runs_a_line(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"seed{seed}", seed=seed)
    write_run(tmp_path / "slow", settings=("actor_rollout_ref.actor.optim.lr=1e-9",))
    data = page_of(tmp_path / "seed1", tmp_path / "slow", tmp_path / "seed2").data
    assert [curve["runs"] for curve in data["curves"]] == [["seed1", "seed2"], ["slow"]]
    band, line = data["metrics"]["critic/score/mean"]
    assert set(band) == {"x", "y", "lo", "hi"} and set(line) == {"x", "y"}
    one, two = (read_run(tmp_path / f"seed{seed}").values("critic/score/mean") for seed in (1, 2))
    means = [(a + b) / 2 for a, b in zip(one, two, strict=True)]
    assert band["y"] == pytest.approx(means, rel=5e-6)
    widths = [abs(a - b) / 2**0.5 for a, b in zip(one, two, strict=True)]  # the deviation of two values
    assert [h - m for h, m in zip(band["hi"], band["y"], strict=True)] == pytest.approx(widths, abs=3e-6)
    assert {one["run"] for one in data["configs"]} == {"seed1", "seed2", "slow"}


def test_settings_carry_their_origin_and_what_a_continuation_changed(tmp_path):
    write_run(tmp_path / "run", settings=("algorithm.adv_estimator=grpo",))
    path = tmp_path / "run" / "run.json"
    (start,) = json.loads(path.read_text())["starts"]
    longer = {**start, "after_step": 10, "settings": {**start["settings"], "trainer.total_training_steps": 99}}
    path.write_text(json.dumps({"starts": [start, longer]}))
    (config,) = page_of(tmp_path / "run").data["configs"]
    assert config["settings"]["algorithm.adv_estimator"] == ["grpo", "command line"]
    assert config["settings"]["trainer.seed"][0] == "0" and config["settings"]["critic.cliprange_value"][1] == "default"
    before = start["settings"]["trainer.total_training_steps"]
    assert config["changes"] == [[10, "trainer.total_training_steps", json.dumps(before), "99"]]


def test_a_folder_with_metrics_alone_makes_a_page(tmp_path):
    write_run(tmp_path / "old", samples=False, settings=None)
    data = page_of(tmp_path / "old").data
    assert data["samples"] == data["configs"] == data["environments"] == []
    assert [chart["title"] for chart in data["charts"][:4]] == [
        "Reward",
        "Held-out accuracy",
        "Response length",
        "Entropy",
    ]
    assert data["charts"][1]["metric"] == VALIDATION and data["charts"][1]["percent"]


def test_a_run_that_only_validated_makes_a_page(tmp_path):
    write_run(tmp_path / "run", steps=0, samples=False)
    data = page_of(tmp_path / "run").data
    assert data["headlines"][0][0]["after"] == 0.25 and data["headlines"][0][0]["before"] is None
    assert data["phases"] == [{"total": [], "steps": [], "seconds": {}}]


def test_samples_beyond_the_budget_lose_the_steps_between_the_first_and_the_last():
    lines = [{"step": step, "source": "rollout", "samples": [{"answer": "好" * 20_000}]} for step in range(40)]
    kept = [line["step"] for line in bounded(lines, runs=1)]
    assert kept[0] == 0 and kept[-1] == 39 and 4 < len(kept) < 20
    assert [line["step"] for line in bounded(lines, runs=1000)] == [0, 39]


def test_numbers_that_json_does_not_know_are_gaps():
    assert [short(x) for x in (float("nan"), float("inf"), None)] == [None] * 3
    assert [short(x) for x in (1.0, 1 / 3, 1e20)] == [1, 0.333333, 1e20]
    page = Page(render([RecordedRun(Path("x"), [{"step": 1, "a": float("nan")}, {"step": 2, "a": 1.0}], [], [])]))
    assert series(page.data, "a") == [(1, None), (2, 1)]


def test_numbers_of_a_scorer_that_are_not_finite_do_not_cost_the_page(tmp_path):
    write_run(tmp_path / "run", steps=2)
    with (tmp_path / "run" / "samples.jsonl").open("a") as file:
        one = {"prompt": "p", "answer": "a", "score": 1.0, "extras": {"ratio": math.nan, "loss": -math.inf, "n": 2}}
        file.write(json.dumps({"step": 2, "source": "mine", "samples": [one]}) + "\n")
    lines = Page(render([read_run(tmp_path / "run")])).data["samples"][0]["lines"]
    assert lines[-1]["samples"][0]["extras"] == {"ratio": None, "loss": None, "n": 2}
