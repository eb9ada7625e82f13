"""However a run ends, its finished steps are kept: at its last step, by an error, by a closed terminal."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from test_loop import arguments, start, wait_for, weights

from paddock.cli import main
from paddock.commands import train as main_ppo
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.runs.checkpoint import CheckpointStore
from paddock.runs.tracking import Tracker
from paddock.trainer.loop import Trainer
from paddock.trainer.reinforcement import train
from tests.forked import Child, Forked, write_to

GRPO = "algorithm.adv_estimator=grpo"
SCORER = """
import pathlib
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if pathlib.Path({flag!r}).exists():
        raise ValueError("the scorer is broken")
    return float(len(solution_str))
"""


def ledger(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("timing", "perf"))} for row in rows]


def steps(folder: Path) -> list[int]:
    return CheckpointStore(folder).steps()


def same_weights(one: Path, other: Path, step: int, role: str = "actor") -> bool:
    first, second = weights(one, step, role), weights(other, step, role)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_last_step_is_saved_without_a_key_and_the_last_lines_say_what_to_do_next(tmp_path, capsys):
    assert main(["train", *arguments(tmp_path, GRPO, "trainer.save_freq=-1")]) == 0
    assert steps(tmp_path) == [2]
    said = capsys.readouterr().out.splitlines()[-4:]
    actor = tmp_path / "global_step_2" / "actor"
    assert said[0].startswith("Done: 2 steps of 2.") and said[1] == f"The model is in {actor}"
    assert said[2].startswith(f"Next: paddock eval model={actor} data=") and "paddock export" in said[3]
    for command in (said[2].removeprefix("Next: "), said[3].strip().replace("FOLDER", str(tmp_path / "out"))):
        assert main([*command.split()[1:], *(["data.val_max_samples=4"] if "eval" in command else [])]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_next_command_names_the_environment_of_the_run(tmp_path, capsys):
    keys = ["environment=builtin:calculator", "data.max_response_length=40", "data.train_files=builtin:products/train",
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2", "data.val_files=builtin:products/test",
            "actor_rollout_ref.model.path=builtin:tiny-tools"]  # fmt: skip
    assert main(["train", *arguments(tmp_path, GRPO, *keys)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Next: paddock eval")]
    assert "environment=builtin:calculator" in line and "multi_turn.max_assistant_turns=2" in line
    assert main([*line.split()[2:], "data.val_max_samples=16"]) == 0
    right = re.search(r"mean@1\D+([\d.]+)%", capsys.readouterr().out)
    assert float(right[1]) > 20  # none without the tool


def test_a_key_turns_the_last_checkpoint_off_and_the_last_line_says_so(tmp_path, capsys):
    assert main(["train", *arguments(tmp_path, GRPO, "trainer.save_freq=-1", "trainer.save_last=False")]) == 0
    assert steps(tmp_path) == []
    assert capsys.readouterr().out.splitlines()[-1] == "No model was saved: trainer.save_last=False."


def test_a_run_that_was_complete_says_that_nothing_was_trained_and_what_to_change(tmp_path, capsys):
    command = ["train", *arguments(tmp_path, GRPO)]
    assert main(command) == 0
    before = ledger(tmp_path)
    capsys.readouterr()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "Nothing was trained" in said and "Done" not in said
    assert "trainer.total_training_steps=4" in said and "trainer.resume_mode=disable" in said
    assert ledger(tmp_path) == before
    assert main([*command, "trainer.total_training_steps=1", "trainer.total_epochs=5"]) == 0
    said = capsys.readouterr().out
    assert "holds step 2 already, and this command ends with step 1" in said
    assert "trainer.total_training_steps=4 trainer.total_epochs=10" in said, "of two limits both must grow"
    assert main([*command, "trainer.total_training_steps=3"]) == 0
    assert "Done: 1 steps of 3" in capsys.readouterr().out


@pytest.mark.parametrize("estimator", [pytest.param("grpo", marks=pytest.mark.slow), "gae"])
def test_a_scorer_that_raises_in_step_3_leaves_steps_1_and_2(estimator, tmp_path, monkeypatch):
    flag, scorer = tmp_path / "broken", tmp_path / "scorer.py"
    scorer.write_text(SCORER.format(flag=str(flag)))
    common = [f"algorithm.adv_estimator={estimator}", f"custom_reward_function.path={scorer}",
              "trainer.total_training_steps=4", "trainer.save_freq=-1", "algorithm.kl_ctrl.type=adaptive"]  # fmt: skip
    assert train(load(arguments(tmp_path / "whole", *common)).config).finished
    step = Trainer.step

    def break_in_step_3(self):
        if self.step_no == 3:
            flag.touch()
        return step(self)

    monkeypatch.setattr(Trainer, "step", break_in_step_3)
    folder = tmp_path / "broken_off"
    with pytest.raises(UserError, match="the scorer is broken"):
        train(load(arguments(folder, *common)).config)
    assert steps(folder) == [2]
    flag.unlink()
    monkeypatch.setattr(Trainer, "step", step)
    assert train(load(arguments(folder, *common)).config).finished
    assert ledger(folder) == ledger(tmp_path / "whole")
    for role in ["actor"] + ["critic"] * (estimator == "gae"):
        assert same_weights(folder, tmp_path / "whole", 4, role)


POINTS = {
    "data": ("paddock.data.loader.Loader.next_prompts", 2),
    "engine": ("paddock.engines.rollout.embedded.engine.EmbeddedEngine.answer", 2),
    "advantages": ("paddock.trainer.loop.compute_advantages", 2),
    "dump": ("paddock.trainer.loop.dump_samples", 2),
    "publish": ("paddock.trainer.loop.Trainer.publish", 3),
    "validation": ("paddock.trainer.validation.Validation.run", 3),
    "cost": ("paddock.trainer.performance.Performance.metrics", 3),
    "log": ("paddock.runs.tracking.jsonl.MetricsFile.log", 3),
}
"""A function that fails in step 3, and the step whose checkpoint is left."""


FEW = ("data", "engine", "dump", "log")
"""Points of the default tests; the others are slow."""


def four_steps(folder: Path) -> list[str]:
    """Arguments of a run that validates once and dumps every step."""
    return arguments(folder, GRPO, "trainer.total_training_steps=4", "trainer.save_freq=-1", "trainer.test_freq=3",
                     f"trainer.rollout_data_dir={folder / 'rollouts'}")  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a run of `four_steps` that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(load(four_steps(folder)).config).finished
    return folder


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=() if point in FEW else pytest.mark.slow) for point in POINTS]
)
def test_an_error_outside_an_update_leaves_the_last_finished_step(point, whole, tmp_path, monkeypatch, caplog):
    name, kept = POINTS[point]
    folder = tmp_path / "failed"
    with monkeypatch.context() as patch:
        failing = break_when_step_is(3, name, patch)
        with pytest.raises(RuntimeError, match="a bug of ours"):
            train(load(four_steps(folder)).config)
        assert failing.reached
    assert steps(folder) == [kept]
    assert f"goes on after step {kept}" in caplog.text
    assert train(load(four_steps(folder)).config).finished
    assert same_weights(folder, whole, 4)
    assert ledger(folder) == ledger(whole)
    files = sorted(path.name for path in (whole / "rollouts").iterdir())
    assert files == ["1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl"]
    assert all((folder / "rollouts" / file).read_text() == (whole / "rollouts" / file).read_text() for file in files)


class Failing:
    """A function that raises while the run is in a given step."""

    def __init__(self, function):
        self.function, self.armed, self.reached = function, False, False

    def __get__(self, instance, owner=None):
        return self if instance is None else lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        if self.armed:
            self.reached, self.armed = True, False
            raise RuntimeError("a bug of ours")
        return self.function(*args, **kwargs)


def break_when_step_is(number: int, name: str, patch: pytest.MonkeyPatch) -> Failing:
    import importlib

    path, _, attribute = name.rpartition(".")
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, kind = path.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    failing = Failing(getattr(owner, attribute))
    patch.setattr(owner, attribute, failing)
    step = Trainer.step

    def arm(self):
        failing.armed = self.step_no == number
        return step(self)

    patch.setattr(Trainer, "step", arm)
    return failing


def test_an_error_inside_an_update_saves_nothing_and_says_from_where_the_run_goes_on(
    whole, tmp_path, monkeypatch, caplog
):
    common = [GRPO, "trainer.total_training_steps=4", "trainer.save_freq=1"]
    with monkeypatch.context() as patch:
        break_when_step_is(3, "paddock.engines.train.engine.Engine.train_step", patch)
        with pytest.raises(RuntimeError, match="a bug of ours"):
            train(load(arguments(tmp_path / "cut", *common)).config)
    assert steps(tmp_path / "cut") == [1, 2]
    assert "inside an update" in caplog.text and "goes on after step 2" in caplog.text
    assert train(load(arguments(tmp_path / "cut", *common)).config).finished
    assert same_weights(tmp_path / "cut", whole, 4)


def test_an_error_hides_no_other_when_its_checkpoint_cannot_be_written(tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        break_when_step_is(2, "paddock.data.loader.Loader.next_prompts", patch)
        patch.setattr(Trainer, "save_weights", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(RuntimeError, match="a bug of ours"):
            train(load(arguments(tmp_path, GRPO, "trainer.save_freq=-1")).config)
    assert "a checkpoint of step 1 could not be written" in caplog.text and "begins at step 1" in caplog.text
    assert steps(tmp_path) == []


def test_updates_that_are_not_finite_end_the_run_with_a_checkpoint(tmp_path):
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1e38 * len(solution_str)\n")  # fmt: skip  # noqa: E501
    with pytest.raises(UserError, match="not finite"):
        train(load(arguments(tmp_path, GRPO, f"custom_reward_function.path={scorer}", "trainer.save_freq=-1",
                             "trainer.max_nonfinite_steps=2", "trainer.total_training_steps=5",
                             "algorithm.norm_adv_by_std_in_grpo=False")).config)  # fmt: skip
    assert steps(tmp_path) == [2] and [row["step"] for row in ledger(tmp_path)] == [1, 2]
    before = load_file(ROOT / "paddock/assets/tiny/model.safetensors")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(tmp_path, 2).items())


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_is_unharmed(tmp_path):
    keys = (GRPO, "trainer.total_training_steps=5000", "trainer.save_freq=-1")
    first = start(tmp_path, *keys)
    wait_for(tmp_path / "metrics.jsonl", first)
    second = start(tmp_path, *keys)
    code, refused = second.wait(), second.said()
    first.send_signal(signal.SIGTERM)
    assert code == 2 and "another run is writing here" in refused and f"process {first.pid}" in refused
    assert "Traceback" not in refused
    assert first.wait() == 130, first.said()
    (step,) = steps(tmp_path)
    assert [row["step"] for row in ledger(tmp_path)] == list(range(1, step + 1))


def test_a_closed_terminal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path):
    """A real one: closing its other end sends SIGHUP, and every later write fails with EIO."""
    ours, theirs = pty.openpty()
    keys = arguments(tmp_path, GRPO, "trainer.total_training_steps=2000", "trainer.save_freq=1000",
                     "trainer.logger=[console]")  # fmt: skip

    def command() -> int:
        os.close(ours)
        become_leader(theirs)
        os.dup2(theirs, 0)
        write_to(theirs)
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        sys.argv = ["main_ppo", *keys]
        return main_ppo.main()

    process = Child(command)
    os.close(theirs)
    deadline = time.monotonic() + 60
    os.set_blocking(ours, False)
    lines = tmp_path / "metrics.jsonl"
    while not (lines.exists() and lines.stat().st_size) and time.monotonic() < deadline:
        drain(ours)
        time.sleep(0.02)
    os.close(ours)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.returncode == 130
    (step,) = steps(tmp_path)
    assert [row["step"] for row in ledger(tmp_path)] == list(range(1, step + 1))


def become_leader(terminal: int) -> None:
    """Makes the terminal the controlling one of a new session, as a terminal emulator does."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def drain(terminal: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.read(terminal, 65536)


@pytest.mark.slow
def test_nohup_outlives_its_terminal(tmp_path):
    keys = arguments(tmp_path, GRPO, "trainer.total_training_steps=4")
    process = Forked(["train", *keys], before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    wait_for(tmp_path / "metrics.jsonl", process)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0, process.said()
    assert steps(tmp_path)[-1] == 4


@pytest.mark.parametrize("resume_mode", ["auto", "disable"])
def test_how_to_go_on_is_true_for_the_resume_mode(resume_mode, tmp_path, capsys, monkeypatch):
    step = Trainer.step

    def interrupted(self):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # the kernel's and the shell's
        return step(self)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert main(["train", *arguments(tmp_path, GRPO, f"trainer.resume_mode={resume_mode}")]) == 130
    said = capsys.readouterr().out
    assert ("with trainer.resume_mode=auto" in said) == (resume_mode == "disable") and steps(tmp_path) == [1]


def test_a_checkpoint_whose_validation_is_owed_is_validated_first(tmp_path, monkeypatch):
    """The step's line in the ledger is completed before the next step is trained."""
    common = [GRPO, "trainer.test_freq=1", "trainer.save_freq=-1"]
    logged: list[tuple[int, bool]] = []
    with monkeypatch.context() as patch:
        break_when_step_is(2, "paddock.trainer.validation.Validation.run", patch)
        with pytest.raises(RuntimeError):
            train(load(arguments(tmp_path, *common)).config)
    log = Tracker.log

    def seen(self, step, metrics):
        logged.append((step, any(name.startswith("val-core") for name in metrics)))
        log(self, step, metrics)

    monkeypatch.setattr(Tracker, "log", seen)
    assert train(load(arguments(tmp_path, *common, "trainer.total_training_steps=3")).config).finished
    assert logged == [(2, True), (3, True)]


def test_paddock_train_prints_no_wide_lines_into_a_pipe_and_the_module_of_launch_scripts_does(
    tmp_path, capsys, caplog, monkeypatch
):
    caplog.set_level("INFO", logger="paddock")
    keys = arguments(tmp_path, GRPO, "trainer.logger=[console]", "trainer.total_training_steps=1")
    keys.append("trainer.resume_mode=disable")
    said = {}
    for module, command, words in (
        ("paddock.cli train", main, ["train", *keys]),
        ("paddock.trainer.main_ppo", main_ppo.main, keys),
    ):
        monkeypatch.setattr(sys, "argv", ["paddock", *words])
        assert command() == 0
        said[module] = capsys.readouterr().out
        assert "importing torch" in caplog.text and "loading the weights of" in caplog.text
        caplog.clear()
    assert "step:1 - " not in said["paddock.cli train"] and "1/1  Reward: " in said["paddock.cli train"]
    assert "step:1 - " in said["paddock.trainer.main_ppo"]


def test_a_reader_that_goes_away_ends_no_run(tmp_path):
    """A real start of Python, which writes what is left in buffers at its end."""
    keys = arguments(tmp_path, GRPO, "trainer.logger=[console]", "trainer.total_training_steps=4")
    command, environment = (
        [sys.executable, "-m", "paddock.cli", "train", *keys],
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0 and steps(tmp_path)[-1] == 4, said
    assert "logger console failed (BrokenPipeError" in said and "SystemExit" not in said


def test_a_run_whose_folder_is_removed_ends_with_a_reason(tmp_path):
    folder = tmp_path / "run"
    keys = arguments(folder, GRPO, "trainer.total_training_steps=4000", "trainer.save_freq=-1")
    process = Forked(["train", *keys])
    while process.poll() is None and not ((folder / "metrics.jsonl").is_file() and ledger(folder)):
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)
    code, said = process.wait(), process.said()
    assert code == 2 and "Traceback" not in said, said
    assert "removed while the run wrote into it" in said and "fix: put it back" in said


def test_a_limit_of_file_sizes_is_no_full_disk(tmp_path):
    limited = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # noqa: E731
    process = Forked(["train", *arguments(tmp_path, GRPO)], before=limited)
    code, said = process.wait(), process.said()
    assert code == 2 and "larger than this process may write" in said and "ulimit -f" in said, said
    assert "are free" not in said


def forge(folder: Path, name: str, content: bytes) -> None:
    """Changes a file of a checkpoint, with the checksum that its manifest has."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_forged_checkpoint_is_refused_and_runs_no_code(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", *arguments(tmp_path / "run", GRPO), "trainer.total_training_steps=3"]
    assert main(["train", *arguments(tmp_path / "run", GRPO)]) == 0
    folder = tmp_path / "run" / "global_step_2"
    state = (folder / "trainer_state.json").read_bytes()
    forge(folder, "trainer_state.json", state.replace(b'"step": 2', b'"step": 1'))
    assert main(command) == 2
    assert "was not written by a run: its state is that of step 1" in capsys.readouterr().err
    forge(folder, "trainer_state.json", state)
    for name in ("trainer_state.pt", "actor/optimizer.pt"):
        whole = (folder / name).read_bytes()
        torch.save({"state": Evil()}, folder / name)
        forge(folder, name, (folder / name).read_bytes())
        assert main(command) == 2
        assert "runs code, which was not run" in capsys.readouterr().err and not Path("ran").exists()
        forge(folder, name, whole)
    assert main(command) == 0


def test_a_number_too_large_for_a_float_is_refused_as_any_wrong_value(capsys):
    assert main(["plan", "critic.optim.lr_warmup_steps_ratio=1" + "0" * 320]) == 2
    assert "must be float" in capsys.readouterr().err


def test_records_that_nest_without_end_are_no_records(tmp_path, capsys):
    assert main(["train", *arguments(tmp_path, GRPO)]) == 0
    for name in ("samples.jsonl", "run.json"):
        (tmp_path / name).write_text("[" * 100_000)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    assert main(["report", str(tmp_path)]) == 0


def test_control_characters_of_a_value_are_written_out(capsys):
    assert main(["plan", "--gpu", "\x1b[31mred"]) == 2
    said = capsys.readouterr().err
    assert "\\x1b[31mred" in said and "\x1b" not in said
