from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import signal
import sys
import time
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.runs.samples import Sample, dump_samples, samples_of
from paddock.runs.tracking.console import ConsoleLog, Screen, StepLines, highlights, validation
from paddock.runs.tracking.jsonl import MetricsFile, SamplesFile, worth_keeping
from paddock.runs.tracking.run import LoggedRun
from paddock.runs.tracking.tracker import Tracker
from tests.forked import ForkedCall, forget

STEP = {
    "actor/pg_loss": 0.234, "actor/ppo_kl": 0.5, "actor/kl_loss": 0.0123, "critic/score/mean": 0.456,
    "response_length/mean": 132.4, "perf/total_num_tokens": 5000.0, "perf/time_per_step": 2.0, "training/epoch": 0.0,
}  # fmt: skip
ACCURACY = {"val-core/openai/gsm8k/acc/mean@1": 0.452, "val-aux/openai/gsm8k/acc/pass@1": 0.452}


def config(folder: Path, *loggers: str, **trainer) -> Config:
    keys = [f"trainer.{key}={value}" for key, value in trainer.items()]
    names = ",".join(loggers)
    return load([f"trainer.default_local_dir={folder}", f"trainer.logger=[{names}]", *keys]).config


def tracker_of(config: Config, total_steps: int, resumed: int | None = None, state: Any = None) -> Tracker:
    return Tracker(config.trainer, asdict(config), total_steps, resumed, state)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sample(answer: str = "4", group: int = 0) -> Sample:
    return Sample("2 + 2 = [bold]", answer, 1.0, 1, group, ground_truth="4")


# metrics.jsonl


def test_every_step_is_one_line_whatever_loggers_are_named(tmp_path):
    with tracker_of(config(tmp_path, "file"), total_steps=2) as tracker:
        tracker.log(1, {"a": 0.5, "b": np.float32(2)})
        assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 0.5, "b": 2.0}]  # readable while the run goes on
        tracker.log(2, {"a": math.nan})
    assert lines(tmp_path / "metrics.jsonl")[1] == {"step": 2, "a": None}


def test_a_step_that_is_logged_again_is_merged_into_its_line(tmp_path):
    file = MetricsFile(tmp_path)
    file.log(1, {"a": 1.0})
    file.log(1, {"a": 2.0, "b": 3.0})
    file.log(2, {"a": 4.0})
    assert lines(file.path) == [{"step": 1, "a": 2.0, "b": 3.0}, {"step": 2, "a": 4.0}]


def test_a_resumed_run_drops_the_lines_beyond_its_checkpoint_and_a_torn_one(tmp_path):
    file = MetricsFile(tmp_path)
    for step in range(6):
        file.log(step, {"a": float(step)})
    file.close()
    with file.path.open("ab") as torn:
        torn.write(b'{"step": 6, "a"')
    resumed = MetricsFile(tmp_path, resumed=3)
    resumed.log(3, {"val": 1.0})  # validation before the first new step
    for step in (4, 5):
        resumed.log(step, {"a": 10.0 * step})
    assert [(line["step"], line["a"]) for line in lines(file.path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
        (5, 50),
    ]
    assert lines(file.path)[3]["val"] == 1.0


def test_a_new_run_moves_the_metrics_of_an_older_one_aside(tmp_path):
    for value in (1.0, 2.0, 3.0):
        file = MetricsFile(tmp_path)
        file.log(1, {"a": value})
        file.close()
    kept = {path.name: lines(path)[0]["a"] for path in tmp_path.iterdir()}
    assert kept == {"metrics.1.jsonl": 1.0, "metrics.2.jsonl": 2.0, "metrics.jsonl": 3.0}


def test_a_killed_run_loses_no_more_than_the_line_it_was_writing(tmp_path):
    def log_on() -> None:
        file = MetricsFile(tmp_path)
        for step in range(10**9):
            file.log(step, {f"m{i}": i / 7 for i in range(100)})
            file.log(step, {"again": 1.0})
            if step == 20:
                print("running", flush=True)

    child = ForkedCall(log_on)
    while child.said() != "running\n":
        assert child.poll() is None, child.said()
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    MetricsFile(tmp_path, resumed=10**9).close()
    found = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in found] == list(range(len(found))) and len(found) > 20
    assert all(line["again"] == 1.0 for line in found[:-1])


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written") as error:
        MetricsFile(tmp_path / "file")
    assert error.value.key == "trainer.default_local_dir"


# console


def run(folder: Path, **changes) -> LoggedRun:
    return dataclasses.replace(LoggedRun("project", "name", folder, {}, total_steps=60), **changes)


def shown(folder: Path, terminal: bool, *logged: tuple[int, dict], **changes) -> str:
    screen = Screen(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None)
    console = ConsoleLog(run(folder, **changes), screen)
    for step, metrics in logged:
        console.log(step, metrics)
    console.generations(logged[-1][0], [sample()])
    console.close()
    return screen.file.getvalue()


def test_the_highlights_of_a_step_read_as_in_the_guide():
    line = ", ".join(highlights(STEP))
    assert line == "Reward: 0.456, Length: 132, Actor Loss: 0.234, KL: 0.0123, 2,500 tokens/s"


def test_a_log_file_gets_one_compact_line_a_step_with_the_time_left(tmp_path):
    text = shown(tmp_path, False, (0, ACCURACY), (12, STEP | ACCURACY))
    assert re.search(r"^12/60  .*Actor Loss: 0\.234, .* tokens/s, ETA 0:00:0\d$", text, re.M)
    assert "Validation Accuracy: 45.2%\n" in text
    assert "step:" not in text and "\x1b" not in text


def test_the_logger_steps_writes_every_metric_of_a_step_on_one_line(tmp_path):
    screen = Screen(file=io.StringIO(), force_terminal=False, width=160, color_system=None)
    lines = StepLines(run(tmp_path), screen)
    lines.log(12, STEP | ACCURACY)
    lines.generations(12, [sample()])
    lines.close()
    text = screen.file.getvalue()
    (whole,) = text.splitlines()
    assert whole.startswith("step:12 - ")
    parsed = dict(part.rsplit(":", 1) for part in whole.split(" - "))
    assert {name: float(value) for name, value in parsed.items() if name != "step"} == STEP | ACCURACY
    assert parsed["perf/total_num_tokens"] == "5000"
    assert "\x1b" not in text


def test_a_terminal_gets_a_bar_and_no_line_for_parsers(tmp_path):
    text = shown(tmp_path, True, (30, STEP), resumed=29)
    assert "Actor Loss: 0.234" in text and "step:30" not in text
    assert "30/60" in text and "ETA" in text and "Epoch 1" in text and "━" in text


def test_the_time_left_follows_the_pace_since_the_first_validation(tmp_path, monkeypatch):
    clock = iter([0.0, 500.0, 510.0, 520.0])  # start, end of the first validation, two steps
    monkeypatch.setattr("paddock.runs.tracking.console.time.monotonic", lambda: next(clock))
    screen = Screen(file=io.StringIO(), force_terminal=False)
    console = ConsoleLog(run(tmp_path), screen)
    for step in (0, 1, 2):
        console.log(step, ACCURACY if step == 0 else STEP)
    assert re.findall(r"ETA (.*)", screen.file.getvalue()) == ["0:09:50", "0:09:40"]


def test_generations_are_shown_as_they_are(tmp_path):
    assert "2 + 2 = [bold]" in shown(tmp_path, False, (1, STEP))


def test_no_escape_of_an_answer_reaches_the_terminal(tmp_path):
    answer = Sample("2 + 2 = ", "\x1b[2J\x1b]0;mine\x07 4\x9b", 1.0, 3, 0)
    screen = Screen(file=io.StringIO(), force_terminal=True, color_system=None)
    ConsoleLog(run(tmp_path), screen).generations(1, [answer])
    written = screen.file.getvalue()
    assert "\\x1b[2J\\x1b]0;mine\\x07 4" in written and "\x1b[2J" not in written and "\x07" not in written


def test_validation_is_called_accuracy_only_where_scores_are_0_and_1():
    assert validation({"actor/pg_loss": 1.0}) is None
    assert validation({"val-core/rm/reward/mean@4": 3.25}) == "Validation Reward: 3.25"
    two = ACCURACY | {"val-core/math/acc/mean@1": 0.3, "val-aux/math/acc/pass@1": 0.3}
    assert validation(two) == "Validation Accuracy: openai/gsm8k 45.2%, math 30.0%"


# tensorboard


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulation = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulation.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_has_every_step_once_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    with tracker_of(config(tmp_path, "tensorboard", log_val_generations=1), total_steps=4) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"a/b": float(step)})
        tracker.generations(3, [sample()])
    with tracker_of(config(tmp_path, "tensorboard"), total_steps=4, resumed=2) as tracker:
        for step in (3, 4):
            tracker.log(step, {"a/b": 10.0 * step})
    assert scalars(tmp_path / "tensorboard", "a/b") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


# loggers that are not installed here: stand-ins that record, with the parameters that the real ones document


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple] = []


def fake_wandb(book: Recorder) -> types.ModuleType:
    module = types.ModuleType("wandb")

    class Online:
        def log(self, data, step=None):
            book.calls.append(("log", step, data))

        def finish(self):
            book.calls.append(("finish",))

    def init(project=None, name=None, config=None, dir=None, id=None, resume=None):
        book.calls.append(("init", project, name, id, resume))
        return Online()

    module.init = init
    module.Table = lambda columns, data: ("table", columns, data)
    return module


def fake_mlflow(book: Recorder) -> types.ModuleType:
    module = types.ModuleType("mlflow")

    def start_run(run_id=None, run_name=None):
        book.calls.append(("start", run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "f" * 32))

    def log_metrics(metrics, step=None):
        assert all(re.fullmatch(r"[/\w.\- :]*", name) for name in metrics)
        book.calls.append(("log", step, metrics))

    module.set_experiment = lambda experiment_name: book.calls.append(("experiment", experiment_name))
    module.start_run, module.log_metrics = start_run, log_metrics
    module.log_dict = lambda dictionary, artifact_file: json.dumps(dictionary)
    module.end_run = lambda: book.calls.append(("finish",))
    return module


def fake_swanlab(book: Recorder) -> types.ModuleType:
    module = types.ModuleType("swanlab")

    def init(project=None, experiment_name=None, config=None, logdir=None, id=None, resume=None):
        assert re.fullmatch(r"[a-z0-9]{21}", id)
        book.calls.append(("init", project, experiment_name, id, resume))

    module.init = init
    module.log = lambda data, step=None: book.calls.append(("log", step, data))
    module.Text = lambda data, caption=None: (data, caption)
    module.finish = lambda: book.calls.append(("finish",))
    return module


def fake_trackio(book: Recorder) -> types.ModuleType:
    module = types.ModuleType("trackio")
    module.init = lambda project, name=None, config=None, resume="never": book.calls.append(
        ("init", project, name, name, resume)
    )
    module.log = lambda metrics, step=None: book.calls.append(("log", step, metrics))
    module.Table = lambda dataframe=None: dataframe
    module.finish = lambda: book.calls.append(("finish",))
    return module


FAKES = {"wandb": fake_wandb, "mlflow": fake_mlflow, "swanlab": fake_swanlab, "trackio": fake_trackio}


@pytest.mark.parametrize("name", FAKES)
def test_a_resumed_run_continues_the_same_run_of_its_logger(tmp_path, monkeypatch, name):
    book = Recorder()
    monkeypatch.setitem(sys.modules, name, FAKES[name](book))
    settings = config(tmp_path, name, log_val_generations=1, project_name="p", experiment_name="e")
    with tracker_of(settings, total_steps=4) as tracker:
        tracker.log(1, {"val-core/x/acc/mean@8": 0.5})
        tracker.generations(1, [sample()])
        state = json.loads(json.dumps(tracker.state_dict()))
    logged = [call for call in book.calls if call[0] == "log"]
    assert logged[0][1] == 1 and list(logged[0][2].values()) == [0.5]
    assert book.calls[-1] == ("finish",)

    book.calls.clear()
    with tracker_of(settings, total_steps=4, resumed=1, state=state) as tracker:
        assert tracker.state_dict() == state
    assert any(state[name] in call for call in book.calls)


def test_two_new_runs_do_not_share_an_id(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(Recorder()))
    ids = {tracker_of(config(tmp_path, "wandb"), total_steps=1).state_dict()["wandb"] for _ in range(2)}
    assert len(ids) == 2


@pytest.mark.parametrize("name", [*FAKES, "tensorboard"])
def test_a_logger_that_is_not_installed_is_a_user_error_with_the_command(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # the import system's own way to say: not there
    with pytest.raises(UserError, match=f"needs {name}") as error:
        tracker_of(config(tmp_path, name), total_steps=1)
    assert error.value.key == "trainer.logger" and f'pip install "paddock-rl[{name}]"' in error.value.fix


def test_a_logger_that_does_not_start_is_a_user_error(tmp_path, monkeypatch):
    module = types.ModuleType("wandb")
    module.init = lambda **_: (_ for _ in ()).throw(RuntimeError("api_key not configured"))
    monkeypatch.setitem(sys.modules, "wandb", module)
    closed = []
    monkeypatch.setattr(ConsoleLog, "close", lambda self: closed.append(self))
    with pytest.raises(UserError, match="api_key not configured"):
        tracker_of(config(tmp_path, "console", "wandb"), total_steps=1)
    assert len(closed) == 1


def test_a_logger_that_fails_later_is_reported_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    class Broken:
        run_id = None

        def __init__(self, run):
            pass

        def log(self, step, metrics):
            raise TimeoutError("no answer from the server")

        generations = close = lambda *_: None

    monkeypatch.setattr("paddock.runs.tracking.adapters.WandB", Broken)
    with tracker_of(config(tmp_path, "wandb"), total_steps=2) as tracker:
        tracker.log(1, {"a": 1.0})
        tracker.log(2, {"a": 2.0})
    assert caplog.text.count("no answer from the server") == 1
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


def test_the_shown_generations_are_spread_over_the_samples(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(ConsoleLog, "generations", lambda self, step, samples: seen.extend(s.answer for s in samples))
    with tracker_of(config(tmp_path, "console", log_val_generations=3), total_steps=1) as tracker:
        tracker.generations(1, [sample(str(i)) for i in range(9)])
    assert seen == ["0", "3", "6"]


def test_nothing_is_imported_for_loggers_that_are_not_named():
    names = ("wandb", "mlflow", "swanlab", "trackio", "tensorboard")

    def imported() -> None:
        forget("paddock", *names)
        import paddock.runs.tracking.tracker  # noqa: F401

        print([name for name in names if name in sys.modules])

    process = ForkedCall(imported)
    assert (process.wait(), process.said()) == (0, "[]\n")


# samples


def text_batch() -> Batch:
    return Batch(
        row=torch.arange(2),
        group=torch.tensor([4, 4]),
        prompts=torch.tensor([[0, 1, 2], [3, 4, 5]]),
        prompt_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]),
        responses=torch.tensor([[6, 7], [8, 0]]),
        mask=torch.tensor([[1, 1], [1, 0]]),
        lengths=torch.tensor([2, 1]),
        scores=torch.tensor([[0, 1.0], [-1.0, 0]]),
        advantages=torch.tensor([[0.5, 1.5], [-2.0, 77]]),
        extras={
            "data_source": ["a", "b"],
            "ground_truth": ["x", "y"],
            "acc": [True, False],
            "vector": [np.ones(2), None],
        },
    )


class Numbers:
    """A tokenizer that writes the numbers of tokens."""

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def test_samples_leave_out_padding_and_average_the_advantage():
    first, second = samples_of(text_batch(), Numbers())
    assert (first.prompt, first.answer, first.length) == ("1 2", "6 7", 2)
    assert (second.prompt, second.answer, second.length) == ("3 4 5", "8", 1)
    assert [(s.score, s.advantage, s.group) for s in (first, second)] == [
        (1.0, pytest.approx(1.0), 4),
        (-1.0, pytest.approx(-2.0), 4),
    ]
    assert (first.data_source, first.ground_truth, first.extras["acc"]) == ("a", "x", True)


def test_rollouts_are_dumped_one_line_a_sample(tmp_path):
    path = dump_samples(tmp_path / "rollouts", 12, samples_of(text_batch(), Numbers()), key="trainer.rollout_data_dir")
    assert path == tmp_path / "rollouts" / "12.jsonl" and os.listdir(path.parent) == ["12.jsonl"]
    first, second = lines(path)
    assert set(first) == {
        "step",
        "prompt",
        "answer",
        "score",
        "length",
        "group",
        "data_source",
        "ground_truth",
        "advantage",
        "extras",
    }
    assert (first["step"], first["score"], second["extras"]) == (12, 1.0, {"acc": False, "vector": None})
    assert first["extras"]["vector"] == [1.0, 1.0]


def test_a_dump_that_cannot_be_written_names_its_key(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        dump_samples(tmp_path / "file", 1, [sample()], key="trainer.rollout_data_dir")
    assert error.value.key == "trainer.rollout_data_dir"


# samples.jsonl


def answers(count: int) -> list[Sample]:
    return [sample(answer=f"answer {number}", group=number) for number in range(count)]


def test_two_steps_of_each_doubling_are_worth_keeping():
    assert [step for step in range(100) if worth_keeping(step)] == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]


def test_samples_of_early_and_late_steps_are_kept_and_their_number_grows_like_the_logarithm(tmp_path):
    with tracker_of(config(tmp_path, "file", test_freq=10), total_steps=1000) as tracker:
        for step in range(0, 1001, 10):
            tracker.generations(step, answers(60))
    kept = lines(tmp_path / "samples.jsonl")
    assert [line["step"] for line in kept] == [0, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1000]
    assert {line["source"] for line in kept} == {"validation"}
    assert [row["answer"] for row in kept[0]["samples"]] == [f"answer {n}" for n in (0, 10, 20, 30, 40, 50)]
    assert kept[0]["samples"] == kept[-1]["samples"]  # the same prompts each time


def test_samples_beyond_the_checkpoint_are_dropped_and_a_repeated_validation_leaves_one_line(tmp_path):
    file = SamplesFile(tmp_path)
    for step in (0, 1, 2, 3, 4):
        file.log(step, "rollout", answers(2))
        file.log(step, "validation", answers(1))
    file.close()
    whole = file.path.read_bytes()
    with file.path.open("ab") as torn:
        torn.write(b'{"step": 5, "sou')
    again = SamplesFile(tmp_path, resumed=2)
    again.log(2, "validation", answers(1))
    for step in (3, 4):
        again.log(step, "rollout", answers(2))
        again.log(step, "validation", answers(1))
    assert file.path.read_bytes() == whole


def test_a_run_without_samples_leaves_no_file_of_them(tmp_path):
    with tracker_of(config(tmp_path, "file"), total_steps=2) as tracker:
        tracker.log(1, {"a": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_kept_samples_are_bounded_and_hold_what_json_can(tmp_path):
    extras = {
        "acc": True,
        "format": 1.5,
        "score": 1.0,
        "index": 3,
        "image": b"\xff",
        "extra_info": {"index": 3},
        "bad": "\ud800",
    }
    truth = np.array([1, 2])
    long = Sample("p" * 10**6, "\ud800" + "a" * 10**6, 1.0, 7, 0, ground_truth=truth, extras=extras)
    SamplesFile(tmp_path).log(1, "rollout", [long])
    (line,) = lines(tmp_path / "samples.jsonl")
    (kept,) = line["samples"]
    assert len(kept["prompt"]) < 2100 and len(kept["answer"]) < 4100 and kept["answer"].endswith("a" * 1000)
    assert "characters left out" in kept["prompt"]
    assert kept["ground_truth"] == "[1, 2]" and kept["extras"] == {"acc": True, "format": 1.5}


def test_kept_samples_are_json_whatever_a_scorer_returned(tmp_path):
    extras = {"ratio": math.nan, "best": math.inf, "large": 10**400, "right": True}
    SamplesFile(tmp_path).log(1, "rollout", [Sample("p", "a", 1.0, 1, 0, extras=extras)])
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert "NaN" not in line and "Infinity" not in line
    found = json.loads(line)["samples"][0]["extras"]
    assert found == {"ratio": None, "best": None, "large": 10**400, "right": True}
