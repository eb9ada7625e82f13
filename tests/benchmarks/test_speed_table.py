"""The bounds of the table of speed by hand, its rows, and the peers beside them; kernels told apart by their names."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from tiny_models import tiny_model
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from paddock.config.schema import Config
from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.estimate.counts import Work
from paddock.estimate.duration import duration
from paddock.estimate.job import job
from paddock.estimate.memory import RoleLoad, estimate
from paddock.facts.machine import GPU_SPEED
from paddock.facts.models import shape_of
from paddock.workers.policy import Policy
from tests.forked import ForkedCall

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")  # scripts import their neighbours
    import kernel_times
    import peers
    import speed_table
    import step_work
    from bound import bound
    from gpu_step import SHAPES, config_of

FLOPS, BANDWIDTH = 989e12, 4.8e12  # one H200, by its data sheet
WEIGHTS, HEAD = 134_515_008, 49_152 * 576
ATTENTION = 4 * 30 * 9 * 64  # operations of a token per key: 30 layers, 9 heads of 64; products with keys and values
KEY = 2 * 30 * 3 * 64 * 2  # bytes of a token's keys and values


def of_smollm2(work: Work, **role: bool | int):
    shape = shape_of("HuggingFaceTB/SmolLM2-135M")
    assert shape is not None
    return bound(RoleLoad(shape, **role), work, GPU_SPEED["h200"])  # type: ignore[arg-type]


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
    found = bound(RoleLoad(shape), Work(128, 8, 120, 256), GPU_SPEED["h200"])
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
    assert len(names) == len(speed_table.rows()) == 7 * 2 * 3 + 2
    assert {row.shape for row in speed_table.rows()} <= SHAPES.keys()
    assert [row.name for row in speed_table.chosen(["qwen3-8b/long/*"])] == [
        "qwen3-8b/long/full", "qwen3-8b/long/lora", "qwen3-8b/long/merged",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="--list"):
        speed_table.chosen(["qwen3-8b"])


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "smallest"])
def test_a_shape_is_that_of_the_public_model(name: str) -> None:
    shape, case = shape_of(public(name)), SHAPES[name]
    assert shape is not None
    sizes = (shape.vocab, shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads)
    assert sizes == tuple(case.shape.values())[:6] and shape.tied_embeddings == case.tied


def public(shape: str) -> str:
    return {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M"}.get(shape, f"Qwen/{shape}")


def config_on_one(gpu: str, row: speed_table.Row, folder: Path) -> Config:
    """What the table would run on such a GPU, with the public model."""
    lengths = (row.prompt_tokens, row.response_tokens)
    step = step_work.Work(
        public(row.shape), "rows.jsonl", row.prompts, row.n, *lengths, 1, 1, row.weights, 8, row.checkpointing,
        str(folder), [],
    )  # fmt: skip
    return config_of(step, "cuda", "grpo", [*row.adapters(32), "trainer.n_gpus_per_node=1"], gpu)


def test_few_answers_of_eight_billion_parameters_are_planned_for_24_gib(tmp_path) -> None:
    """With what `--gpu 4090` chooses: adapters, recomputed layers, and as many sequences as fit."""
    (row,) = speed_table.chosen(["qwen3-8b/few/lora"])
    config = config_on_one("4090", row, tmp_path)
    assert config.actor_rollout_ref.rollout.max_num_seqs < row.prompts * row.n
    planned = job(config, "4090")
    assert planned is not None and estimate(planned).fits


def test_long_work_has_a_tail_that_is_the_same_each_time() -> None:
    (row,) = speed_table.chosen(["qwen3-1.7b/long/full"])
    limits = row.limits()
    assert limits == row.limits() and (min(limits), max(limits)) == (16, 4096)
    mean = sum(limits) / len(limits)
    assert 950 < mean < 1000 and sorted(limits)[16] < 0.75 * mean, (
        "half of the responses are much shorter than the mean"
    )
    assert row.counted(256).written == 8 * sum(limits)


def line_of(name: str) -> dict:
    """A line of JSON as it was before there were peers."""
    row = speed_table.chosen([name])[0]
    numbers = {"rank": 0, "written_tokens": 131_072, "rollout_tokens_per_s": 33608.2, "step_planned_s": 17.43,
               "peak_gib": 74.51}  # fmt: skip
    for phase, seconds, least in (("rollout", 3.9, 1.95), ("update", 12.9, 8.0), ("step", 16.9, 9.95)):
        numbers |= {f"{phase}_s": seconds, f"{phase}_bound_s": least}
    return json.loads(json.dumps(speed_table.asdict(row) | numbers))


OWN = (
    "| qwen2.5-7b | 64 x 8, 120 -> 256 | all, bf16, recomputed | 33,608 | 3.90 | 1.95 (50%) | 12.90 | 8.00 (62%) "
    "| 16.90 | 9.95 (59%) | 17.43 | 74.5 |"
)


def test_a_line_of_the_table_is_made_of_the_numbers_in_json() -> None:
    assert speed_table.markdown(line_of("qwen2.5-7b/short/full"), []) == OWN
    assert len(speed_table.head([]).splitlines()[0].split(" | ")) == len(OWN.split(" | "))


def test_a_line_with_peers_has_a_cell_for_each() -> None:
    numbers = {"vllm": {"tokens_per_s": 16_712.4}, "trl": {"step_s": 61.238, "peak_gib": 90.0}}
    line = line_of("qwen2.5-7b/short/full")
    assert speed_table.markdown(line | {"peers": numbers}, speed_table.PEERS) == f"{OWN} 16,712 | 61.24 |"
    failed = {"vllm": None, "trl": {"missing": "failed", "reason": "OutOfMemoryError: too little"}}
    assert speed_table.markdown(line | {"peers": failed}, speed_table.PEERS) == f"{OWN} - | failed |"
    assert speed_table.markdown(line, speed_table.PEERS) == f"{OWN}  |  |", "nobody asked them"
    names, rule = speed_table.head(numbers).splitlines()
    assert names.endswith("| GiB | vLLM, tok/s | TRL step, s |")
    assert rule.count("|") == names.count("|") == OWN.count("|") + 2


def test_vllm_rolls_out_once_for_both_ways_and_trl_trains_all_weights_on_short_work() -> None:
    own = {name: {row.name for row in speed_table.chosen(["smallest/*"]) if speed_table.does(name, row)}
           for name in speed_table.PEERS}  # fmt: skip
    assert own == {"vllm": {"smallest/short/full", "smallest/long/full"}, "trl": {"smallest/short/full"}}


@pytest.mark.parametrize("names, found", [("", []), ("trl", ["trl"]), ("vllm,trl", ["vllm", "trl"])])
def test_peers_are_named_in_a_list_with_commas(names: str, found: list[str]) -> None:
    assert speed_table.named(names) == found


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="sglang: no such peer; known are vllm, trl"):
        speed_table.named("vllm,sglang")


@pytest.fixture
def step(tmp_path) -> step_work.Work:
    return step_work.Work("model", "data", 2, 2, 12, 4, 3, 2, "fp32", 4, False, str(tmp_path), [])


def test_a_peer_that_is_not_installed_is_said_and_the_table_goes_on(step, monkeypatch, capsys) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    row, *others = speed_table.chosen(["smallest/short/*"])
    found = speed_table.beside(row, step, ["vllm", "trl"], peers.PATIENCE)
    assert [speed_table.cell(*peer) for peer in found.items()] == ["not installed", "not installed"]
    assert "smallest/short/full: trl not installed: this Python cannot import trl" in capsys.readouterr().err
    for other in others:
        assert speed_table.beside(other, step, ["vllm", "trl"], peers.PATIENCE) == {"vllm": None, "trl": None}


def test_a_peer_that_fails_is_said_with_its_reason_and_the_table_goes_on(step, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "trl_step.py").write_text("raise RuntimeError('no room for logits')")
    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    monkeypatch.setattr(peers, "HERE", tmp_path)
    found = speed_table.beside(speed_table.chosen(["smallest/short/full"])[0], step, ["trl"], peers.PATIENCE)
    assert found == {"trl": {"missing": "failed", "reason": "RuntimeError: no room for logits"}}
    said = capsys.readouterr().err
    assert "Traceback" in said and "smallest/short/full: trl failed: RuntimeError: no room for logits" in said


SCRIPT = """
import json, sys
print("a library says something")
print(json.dumps({"seen": sys.argv[1:]}))
print("and something more at its end")
"""


def test_the_report_of_a_process_is_the_last_object_that_it_prints(tmp_path) -> None:
    (tmp_path / "peer.py").write_text(SCRIPT)
    assert peers.report(str(tmp_path / "peer.py"), "work.json", "[4, 4]") == {"seen": ["work.json", "[4, 4]"]}


def test_a_process_without_a_report_has_failed(tmp_path) -> None:
    (tmp_path / "peer.py").write_text("print('nothing to report')")
    with pytest.raises(peers.PeerError, match="nothing to report"):
        peers.report(str(tmp_path / "peer.py"))


def test_a_process_that_does_not_end_is_ended_with_all_that_it_started(tmp_path) -> None:
    started = tmp_path / "started"
    (tmp_path / "peer.py").write_text(
        "import subprocess, pathlib, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(peers.PeerError, match="no end after 2 s"):
        peers.report(str(tmp_path / "peer.py"), patience=2.0)
    child, deadline = Path("/proc", started.read_text(), "stat"), time.monotonic() + 5
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "what the process had started still runs"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "output, reason",
    [
        ("(Worker pid=7) ERROR [core.py:1] ValueError: no room\n"
         "EngineDeadError: See stack trace (above) for the root cause.\nleaked semaphores\n", "ValueError: no room"),
        ("Traceback\ntorch.OutOfMemoryError: CUDA out of memory.\n", "OutOfMemoryError: CUDA out of memory."),
        ("Killed\n", "Killed"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure_is_the_error_behind_the_last_one(output: str, reason: str) -> None:
    assert peers.cause(output) == reason


def test_a_peer_runs_few_steps_after_one_that_does_not_count(step, monkeypatch) -> None:
    seen = []
    timed = {"generation": (2.0, 0.0), "update": (1.0, 0.0)}
    reports = {"trl_step.py": {"steps": [timed], "memory": 3 * 2**30, "versions": {"trl": "1"}},
               "vllm_rollout.py": {"seconds": [1.0, 3.0], "seconds_without_log_probs": 0.5, "settings": {},
                                   "versions": {"vllm": "1"}}}  # fmt: skip

    def report(script: str, path: str, *rest: str, patience: float) -> dict:
        assert patience == 9.0
        seen.append((step_work.Work.read(path), *map(json.loads, rest)))
        return reports[script]

    monkeypatch.setattr(peers, "find_spec", lambda name: True)
    monkeypatch.setattr(peers, "report", report)
    trl, vllm = (peers.measured(name, step, [4, 2], patience=9.0) for name in ("trl", "vllm"))
    assert [(work.warmup, work.steps, *limits) for work, *limits in seen] == [(1, 2), (1, 2, [4, 2])]
    assert (trl["step_s"], trl["generation_s"], trl["peak_gib"], trl["versions"]) == (3.0, 2.0, 3.0, {"trl": "1"})
    assert (vllm["rollout_s"], vllm["tokens_per_s"]) == (2.0, 6.0), "two responses each, of 4 and 2 tokens, in 2 s"
    assert vllm["tokens_per_s_without_log_probs"] == 24.0


def test_products_between_the_last_norm_and_the_draw_are_the_heads() -> None:
    layer = [("norm_rows", 1.0), ("nvjet_tst_128x64_h_bz", 4.0), ("rotate", 0.5), ("attend_rows", 6.0),
             ("void cutlass::Kernel2<of a gemm>", 3.0), ("norm_rows", 1.0), ("thin_rows", 8.0),
             ("gate", 2.0)]  # fmt: skip
    ends = [("norm_rows", 1.0), ("nvjet_tst_256x128", 5.0), ("splitKreduce_kernel", 1.0),
            ("void at::native::fill", 0.5), ("draw_rows", 2.0)]  # fmt: skip
    found = kernel_times.by_kind(2 * [*layer, *layer, *ends])
    assert found == {"products": 60.0, "attention": 24.0, "norms": 10.0, "rotation": 2.0, "gates": 8.0, "head": 12.0,
                     "draw": 4.0, "log-probs": 0.0, "optimizer": 0.0, "rest": 1.0}  # fmt: skip
    assert list(found) == list(kernel_times.SHOWN)
    listed = kernel_times.listed([("rotate", 3.0), ("a_new_kernel", 1.0)])
    assert listed == ["all 4.0 ms", "rotation 3.0 ms (75%)", "rest 1.0 ms (25%)", "in the rest 1.0 ms: a_new_kernel"]


def test_every_kernel_that_paddock_launches_has_a_kind() -> None:
    sources = [path.read_text() for path in (ROOT / "paddock" / "kernels").glob("*.py")]
    launched = {name for source in sources for name in re.findall(r"^\s+(\w+)\[\(", source, re.MULTILINE)}
    assert {"attend_rows", "draw_rows", "gate", "gradient_rows", "norm_rows", "rotate", "thin_rows"} <= launched
    assert not {name for name in launched if kernel_times.kind_of(name) == "rest"}
    assert kernel_times.kind_of("void at::native::multi_tensor_apply_kernel<of Adam>") == "optimizer"


def event(name: str, device: DeviceType, start: float, end: float) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, device_type=device,
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
    )  # fmt: skip


def test_kernels_count_while_decode_steps_are_marked() -> None:
    marks = [event(kernel_times.DECODE, DeviceType.CPU, *at) for at in ((100, 200), (300, 400))]
    shadow = event(kernel_times.DECODE, DeviceType.CUDA, 110, 190)  # the mark on the device's own line of time
    times = {"prefill": (10, 90), "first": (110, 150), "second": (150, 190), "sorting": (210, 290), "third": (310, 390)}
    kernels = [event(name, DeviceType.CUDA, *at) for name, at in times.items()]
    launch = event("aten::mm", DeviceType.CPU, 105, 106)
    events = sorted([*kernels, shadow, launch, *marks], key=lambda event: event.time_range.start)
    assert kernel_times.within(events) == [("first", 0.04), ("second", 0.04), ("third", 0.08)]
    with pytest.raises(SystemExit, match="embedded"):
        kernel_times.within(kernels)


def test_a_timeline_tells_short_gaps_from_waits_for_the_host() -> None:
    times = [(30, 50), (40, 100), (60, 80), (104, 200), (230, 300)]  # two overlap the one before them
    kernels = [event("kernel", DeviceType.CUDA, *at) for at in times]
    call, shadow = event(kernel_times.CALL, DeviceType.CPU, 10, 340), event(kernel_times.CALL, DeviceType.CUDA, 30, 300)
    found = kernel_times.Timeline.of([call, shadow, event("aten::mm", DeviceType.CPU, 12, 13), *kernels])
    assert found == kernel_times.Timeline(before=0.02, busy=0.236, short=0.004, long=0.03, after=0.04)
    assert found.listed()[2] == "gaps under 10 us 0.0 ms"
    with pytest.raises(SystemExit, match="no kernel"):
        kernel_times.Timeline.of([call])


def test_the_last_update_of_a_run_is_profiled(monkeypatch) -> None:
    kernels, ran = iter("abc"), []
    monkeypatch.setattr(Policy, "learn", lambda self, batch: ran.append(batch) or batch)

    def profiled(call) -> list[SimpleNamespace]:
        call()
        name = next(kernels)
        return [event(name, DeviceType.CPU, 0, 1), event(name, DeviceType.CUDA, 2, 5)]

    monkeypatch.setattr(kernel_times, "profiled", profiled)
    policy = object.__new__(Policy)
    found = kernel_times.update_kernels(lambda: [Policy.learn(policy, number) for number in (1, 2, 3)])
    assert ran == [1, 2, 3] and found == [("c", 0.003)]


def test_a_rollout_has_a_mark_for_each_decode_step() -> None:
    """In a process of its own: one that was profiled is none to fork others from."""

    def run() -> None:
        engine = EmbeddedEngine(tiny_model())
        decode = EmbeddedEngine.decode
        sampling = Sampling(4, frozenset(), 0, 0, ignore_eos=True)
        with kernel_times.marked(), profile(activities=[ProfilerActivity.CPU]) as seen:
            engine.generate([Prompt([5, 6, 7], [0, 1])], sampling)
        assert sum(event.name == kernel_times.DECODE for event in seen.events()) == 3, (
            "the first token is the prefill's"
        )
        assert EmbeddedEngine.decode is decode

    process = ForkedCall(run)
    code, said = process.wait(60), process.said()
    assert code == 0, said


def measured() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "docs/curves/speed.jsonl").read_text().splitlines()]


def test_the_measured_rows_have_the_seconds_that_are_planned_today(tmp_path) -> None:
    rows = {row.name: row for row in speed_table.rows()}
    for line in {line["name"]: line for line in measured()}.values():
        row = rows[line["name"]]
        planned = job(config_on_one(line.get("chosen_for", "h200"), row, tmp_path), "h200")
        assert planned is not None
        told = duration(planned, row.counted(row.prompt_tokens), GPU_SPEED["h200"])
        assert line["step_planned_s"] == pytest.approx(told.step), row.name
