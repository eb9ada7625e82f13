from __future__ import annotations

import pytest

from paddock.core import timing
from paddock.core.timing import Timer
from paddock.trainer.performance import timing_metrics


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_repeated_phases_add_up_and_nested_ones_count_in_both(clock):
    timer = Timer()
    with timer("step"):
        for _ in range(2):
            with timer("gen"):
                clock.now += 3
        with timer("gen"), timer("gen"):
            clock.now += 1
        clock.now += 2
    assert dict(timer.seconds) == {"gen": 7.0, "step": 9.0}


def test_a_phase_that_raises_is_still_counted(clock):
    timer = Timer()
    with pytest.raises(KeyError), timer("gen"):
        clock.now += 4
        raise KeyError
    with timer("gen"):
        clock.now += 1
    assert timer.seconds["gen"] == 5


def test_generation_is_counted_by_response_tokens_and_the_rest_by_all(clock):
    timer = Timer()
    for phase, seconds in {"gen": 4, "update_actor": 6, "old_log_prob": 1}.items():
        with timer(phase):
            clock.now += seconds
    assert timing_metrics(timer, response_tokens=1000, all_tokens=3000) == {
        "timing_s/gen": 4,
        "timing_s/update_actor": 6,
        "timing_s/old_log_prob": 1,
        "timing_per_token_ms/gen": 4,
        "timing_per_token_ms/update_actor": 2,
    }
    timer.reset()
    assert timing_metrics(timer, 1, 1) == {}
