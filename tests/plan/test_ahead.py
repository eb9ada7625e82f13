"""What running ahead would give: decode steps counted by hand, beside a simulation token by token, and as users ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.cli import main
from paddock.errors import UserError
from paddock.estimate.counts import Work
from paddock.estimate.duration import Pace, rollout_seconds
from paddock.estimate.job import job as job_of
from paddock.facts.machine import GPU_SPEED
from paddock.loading.load import load
from paddock.plan.ahead import AHEAD, Simulation, lengths_of
from paddock.plan.plan import Plan, make

SMALL = ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1", "data.train_batch_size=16",
         "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B", "data.max_response_length=2048"]  # fmt: skip
WIDE = [*SMALL, "actor_rollout_ref.rollout.n=8"]


class Counting:
    """Takes a second for each decode step, or for each key; remembers the tokens of each prefill."""

    def __init__(self, keys: bool = False):
        self.keys, self.prefilled = keys, list[int]()

    def prefill(self, tokens: int) -> float:
        self.prefilled.append(tokens)
        return 0.0

    def decode(self, steps: float, tokens: float, keys: float) -> float:
        return keys if self.keys else steps


def drawn_at(pace: Any, prompt: int = 0) -> Simulation:
    return Simulation(pace, prompt)


def test_decode_steps_by_hand() -> None:
    """Two slots. Alone, 1 and 3 begin, 2 follows the 1 and ends with the 3; 4 and 1, then 1, end with the 4; three of
    one token take two steps. Ahead, two of those three are drawn in the slot beside the 4. As two mini-batches of a
    larger rollout, the 4 begins behind the 3."""
    batches = [[1, 3, 2], [4, 1, 1], [1, 1, 1], [1]]
    assert drawn_at(Counting()).sessions(batches, slots=2) == [3, 4, 2, 1]
    assert drawn_at(Counting()).sessions(batches, slots=2, ahead=1) == [3, 4, 1]
    assert drawn_at(Counting()).sessions([batches[0] + batches[1], batches[2] + batches[3]], slots=2) == [7, 2]


def test_what_is_carried_is_computed_again_with_its_prompt() -> None:
    """Three slots: the 6 has two tokens when the 2 and the 1 are finished, and needs four more steps; the other 1 of
    its batch took the slot of the first."""
    pace = Counting()
    assert drawn_at(pace, prompt=10).sessions([[2, 1], [6, 1], [1]], slots=3, ahead=1) == [2, 4]
    assert pace.prefilled == [10, 10, 10, 10, 12, 10]


def test_with_slots_for_all_every_other_step_draws_everything() -> None:
    batches = [[7, 2], [3, 7], [7, 1], [2, 7], [1, 1]]
    assert drawn_at(Counting()).sessions(batches, slots=8, ahead=1) == [7, 0, 7, 0]


def by_single_tokens(batches: list[list[int]], slots: int, ahead: int, prompt: int) -> list[float]:
    """Keys that are read in each step, if responses are drawn one token after the other."""
    drawn = [[0 for _ in batch] for batch in batches]
    read = []
    for step in range(len(batches) - ahead):
        live: list[tuple[int, int]] = []
        places = [(number, i) for number in range(step, step + ahead + 1) for i in range(len(batches[number]))]
        waiting = [(number, i) for number, i in places if drawn[number][i] < batches[number][i]]
        waiting.sort(key=lambda place: (place[0], -drawn[place[0]][place[1]]))
        keys = 0
        while drawn[step] != batches[step]:
            while waiting and len(live) < slots:
                live.append(waiting.pop(0))
            for number, i in live:
                keys += prompt + drawn[number][i]
                drawn[number][i] += 1
            live = [(number, i) for number, i in live if drawn[number][i] < batches[number][i]]
        read.append(float(keys))
    return read


@given(
    batches=st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=6, max_size=6),
    slots=st.integers(1, 10),
    ahead=st.integers(0, 4),
)
def test_stretches_between_two_ends_equal_single_tokens(batches: list[list[int]], slots: int, ahead: int) -> None:
    drawn = drawn_at(Counting(keys=True), prompt=5).sessions(batches, slots, ahead)
    assert drawn == by_single_tokens(batches, slots, ahead, prompt=5)


def test_responses_of_full_length_take_the_time_of_the_plan() -> None:
    config = load(WIDE, gpu="h200").config
    job, speed = job_of(config, "h200"), GPU_SPEED["h200"]
    assert job is not None
    simulated = Simulation(Pace.of(job, speed), 512, samples=8).sessions([[2048] * 128], slots=128)
    assert simulated == pytest.approx([rollout_seconds(job, Work(16, 8, 512, 2048), speed)], rel=1e-3)


def planned(*more: str, lengths: str | None = None, keys: list[str] = WIDE) -> Plan:
    return make(load([*keys, *more], gpu="h200", here=False), "h200", 1000, lengths=lengths)


def test_a_long_tail_that_is_named_pays_and_is_advised() -> None:
    plan = planned(lengths="8")
    assert [row.staleness for row in plan.ahead] == [0, *AHEAD]
    none, first, second, fourth = plan.ahead
    assert none.gain == 1 and 1.2 < first.gain < second.gain < fourth.gain < 5
    for row in plan.ahead[1:]:
        assert 128 <= row.slots <= 192 and row.seconds == pytest.approx(none.seconds / row.gain)
        assert 1 < row.mini_batches < 1 + row.staleness
    (advice,) = [one for one in plan.advice if one.key == "algorithm.staleness"]
    assert advice.suggestion == f"algorithm.staleness=2 actor_rollout_ref.rollout.max_num_seqs={second.slots}"
    assert not [one for one in planned("algorithm.staleness=1", lengths="8").advice if one.key == advice.key]


def test_responses_of_like_length_do_not_pay() -> None:
    plan = planned(lengths="1")
    assert all(row.gain < 1.2 for row in plan.ahead)
    assert "algorithm.staleness" not in {advice.key for advice in plan.advice}


def write_run(folder: Path, lengths: list[int], prompt: float = 100.0) -> None:
    folder.mkdir(exist_ok=True)
    line = {"step": 1, "source": "rollout", "samples": [{"length": length} for length in lengths]}
    metrics = {"step": 1, "prompt_length/mean": prompt, "response_length/max": max(lengths) + 1.0}
    held_out = {"step": 1, "source": "validation", "samples": [{"length": 5000}]}
    (folder / "samples.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(held_out) + "\n")
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")


def test_lengths_are_those_of_the_dumps_or_of_the_samples_of_a_run(tmp_path: Path) -> None:
    config = load(WIDE).config
    write_run(tmp_path, [*range(1, 32), 9000])
    lengths = lengths_of(config, str(tmp_path))
    assert lengths is not None and lengths.tokens == [*range(1, 32), 2048, 2048] and lengths.prompt == 100
    settings = {"data.train_batch_size": 16, "actor_rollout_ref.rollout.n": 4}
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"after_step": 0, "settings": settings}]}))
    lengths = lengths_of(config, str(tmp_path))
    assert lengths is not None and lengths.source == f"32 responses of {tmp_path}"
    assert lengths.tokens == sorted([*range(1, 32), 2048] * 2 + [2048]), "64 rows a step, and their longest"
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for step in range(1, 7):
        (dumps / f"{step}.jsonl").write_text(f'{{"step": {step}, "length": {step}}}\n' * 10)
    start = {"after_step": 0, "settings": {"trainer.rollout_data_dir": str(dumps)}}
    (tmp_path / "run.json").write_text(json.dumps({"starts": [start]}))
    lengths = lengths_of(config, str(tmp_path))
    assert lengths is not None and lengths.tokens == [3] * 10 + [4] * 10 + [5] * 10 + [6] * 10


def test_a_run_that_has_begun_is_told_of_its_long_tail(tmp_path: Path) -> None:
    own = f"trainer.default_local_dir={tmp_path}"
    assert planned(own).ahead == []
    write_run(tmp_path, [200] * 98 + [2000] * 2)
    plan = planned(own)
    assert (
        plan.lengths is not None
        and plan.lengths.tail == pytest.approx(10, abs=0.1)
        and len(plan.ahead) == 1 + len(AHEAD)
    )
    write_run(tmp_path, [200] * 100)
    assert planned(own).ahead == []


@pytest.mark.parametrize(
    ("lengths", "keys", "reason"),
    [
        ("nowhere", [], "is no tail and no folder of a run with at least 16 responses"),
        ("0.5", [], "is no tail"),
        ("8", ["algorithm.adv_estimator=remax"], "greedy one of the same weights"),
        ("8", ["algorithm.filter_groups.enable=True"], "filter_groups are not simulated"),
    ],
)
def test_what_cannot_be_simulated_is_refused_if_it_is_asked_for(lengths: str, keys: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as error:
        planned(*keys, lengths=lengths)
    assert error.value.key == "--lengths"
    if keys:
        assert planned(*keys).ahead == []


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "--gpu", "h200", "--rows", "1000", "--lengths", "8", *WIDE]
    assert main(line) == 0
    printed = capsys.readouterr().out
    assert "Running ahead, by a log-normal tail of 8: median 171" in printed and "x with 3" in printed
    assert main([*line, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)["running_ahead"]
    assert [row["staleness"] for row in table] == [0, *AHEAD]
