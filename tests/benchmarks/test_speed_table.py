"""The bounds of the table of speed by hand, and its rows."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT

from paddock.config.memory.model import Role
from paddock.facts.machine import GPU_SPEED
from paddock.facts.models import shape_of
from paddock.plan.counts import Work

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")  # scripts import their neighbours
    import speed_table
    from bound import bound
    from gpu_step import SHAPES

FLOPS, BANDWIDTH = 989e12, 4.8e12  # one H200, by its data sheet
WEIGHTS, HEAD = 134_515_008, 49_152 * 576
ATTENTION = 4 * 30 * 9 * 64  # operations of a token per key: 30 layers, 9 heads of 64; products with keys and values
KEY = 2 * 30 * 3 * 64 * 2  # bytes of a token's keys and values


def of_smollm2(work: Work, **role: bool | int):
    shape = shape_of("HuggingFaceTB/SmolLM2-135M")
    assert shape is not None
    return bound(Role(shape, **role), work, GPU_SPEED["h200"])  # type: ignore[arg-type]


def test_many_sequences_are_bound_by_the_bytes_of_their_keys_and_values() -> None:
    """128 prompts x 8, 120 -> 256: 255 decode steps of 1,024 sequences; operations would take 0.08 s."""
    found = of_smollm2(Work(128, 8, 120, 256), checkpointing=False)
    assert found.prefill == pytest.approx(128 * 120 * (2 * (WEIGHTS - HEAD) + ATTENTION * 60) / FLOPS)
    read = 255 * 2 * WEIGHTS + (128 * 255 * 120 + 1024 * 255 * 255 / 2) * KEY
    assert found.decode == pytest.approx(read / BANDWIDTH)
    once = 128 * 120 * (2 * (WEIGHTS - HEAD) + ATTENTION * 60) + 1024 * 256 * (2 * WEIGHTS + ATTENTION * 248)
    assert found.update == pytest.approx(3 * once / FLOPS)
    assert (found.rollout, found.step) == (found.prefill + found.decode, found.prefill + found.decode + found.update)
    assert found.rollout == pytest.approx(0.197, abs=0.001) and found.update == pytest.approx(0.238, abs=0.001)


def test_a_large_model_is_bound_by_its_operations() -> None:
    """Qwen2.5-7B with 1,024 sequences: 7.07 billion weights are multiplied, for 15 GB that are read."""
    shape = shape_of("Qwen/Qwen2.5-7B")
    assert shape is not None
    found = bound(Role(shape), Work(128, 8, 120, 256), GPU_SPEED["h200"])
    weights, attention = 7_615_616_512 - 152_064 * 3584, 4 * 28 * 28 * 128
    assert found.decode == pytest.approx(1024 * 255 * (2 * weights + attention * 247.5) / FLOPS)
    assert found.decode > 255 * 2 * 7_615_616_512 / BANDWIDTH


def test_recomputing_adds_a_forward_and_adapters_leave_one_out() -> None:
    work = Work(4, 2, 16, 32)
    plain = of_smollm2(work, checkpointing=False).update
    assert of_smollm2(work, checkpointing=True).update == pytest.approx(4 / 3 * plain)
    assert of_smollm2(work, checkpointing=False, lora_rank=8).update == pytest.approx(2 / 3 * plain)


def test_the_rows_cover_shapes_works_and_ways() -> None:
    names = {row.name for row in speed_table.rows()}
    assert len(names) == len(speed_table.rows()) == 7 * 2 * 2
    assert {row.shape for row in speed_table.rows()} <= SHAPES.keys()
    assert [row.name for row in speed_table.chosen(["qwen3-8b/long/*"])] == [
        "qwen3-8b/long/full", "qwen3-8b/long/lora",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="--list"):
        speed_table.chosen(["qwen3-8b"])


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "smallest"])
def test_a_shape_is_that_of_the_public_model(name: str) -> None:
    public = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M"}.get(name, f"Qwen/{name}")
    shape, case = shape_of(public), SHAPES[name]
    assert shape is not None
    sizes = (shape.vocab, shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads)
    assert sizes == tuple(case.shape.values())[:6] and shape.tied_embeddings == case.tied


def test_long_work_has_a_tail_that_is_the_same_each_time() -> None:
    (row,) = speed_table.chosen(["qwen3-1.7b/long/full"])
    limits = row.limits()
    assert limits == row.limits() and (min(limits), max(limits)) == (16, 4096)
    mean = sum(limits) / len(limits)
    assert 950 < mean < 1000 and sorted(limits)[16] < 0.75 * mean, (
        "half of the responses are much shorter than the mean"
    )
    assert row.counted(256).written == 8 * sum(limits)


def test_a_line_of_the_table_is_made_of_the_numbers_in_json() -> None:
    row = speed_table.chosen(["qwen2.5-7b/short/full"])[0]
    numbers = {"rank": 0, "written_tokens": 131_072, "rollout_tokens_per_s": 33608.2, "step_planned_s": 17.43,
               "peak_gib": 74.51}  # fmt: skip
    for phase, seconds, least in (("rollout", 3.9, 1.95), ("update", 12.9, 8.0), ("step", 16.9, 9.95)):
        numbers |= {f"{phase}_s": seconds, f"{phase}_bound_s": least}
    found = json.loads(json.dumps(speed_table.asdict(row) | numbers))
    assert speed_table.markdown(found) == (
        "| qwen2.5-7b | 64 x 8, 120 -> 256 | all, bf16, recomputed | 33,608 | 3.90 | 1.95 (50%) | 12.90 | 8.00 (62%) "
        "| 16.90 | 9.95 (59%) | 17.43 | 74.5 |"
    )


def test_the_page_of_performance_shows_the_measured_rows() -> None:
    text = (ROOT / "docs/performance.md").read_text()
    lines = [json.loads(line) for line in (ROOT / "docs/curves/speed.jsonl").read_text().splitlines()]
    assert "\n".join([speed_table.HEAD, *map(speed_table.markdown, lines)]) in text
    off = [abs(line["step_planned_s"] / line["step_s"] - 1) for line in lines]
    assert f"within {max(off):.0%} of every step".replace("%", " %") in text and max(off) < 0.25
    for line in lines:
        assert line["date"] in text and line["versions"]["torch"].partition("+")[0] in text
    steps = {line["name"]: line["step_s"] for line in lines}
    ratios = [f"{steps[f'{name}/lora'] / steps[f'{name}/full']:.2f} x" for name in
              ("qwen2.5-1.5b/short", "smollm2-135m/short", "smollm2-135m/long")]  # fmt: skip
    assert "{} for Qwen2.5-1.5B (wanted: 1.0), {} and {} for SmolLM2-135M".format(*ratios) in text
