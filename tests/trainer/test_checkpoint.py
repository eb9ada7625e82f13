from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from paddock.config.load import load
from paddock.config.schema import Config
from paddock.errors import UserError
from paddock.trainer import state as trainer_state
from paddock.trainer.checkpoint import LATEST, MANIFEST, CheckpointStore, checkpoint_store, find_damage, resume_point


def save(store: CheckpointStore, step: int, size: int = 1000) -> Path:
    with store.write(step) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "weights.bin").write_bytes(content(step, size))
        (folder / "note.txt").write_text(f"step {step}")
    return store.folder(step)


def content(step: int, size: int) -> bytes:
    return random.Random(step).randbytes(size)


def config(*overrides: str) -> Config:
    return load(["algorithm.adv_estimator=grpo", "trainer.logger=console", *overrides]).config


# Writing


def test_a_checkpoint_lists_every_file_with_size_and_checksum(tmp_path):
    folder = save(CheckpointStore(tmp_path), 20)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert (manifest["format"], manifest["step"]) == (1, 20)
    assert set(manifest["files"]) == {"actor/weights.bin", "note.txt"}
    assert manifest["files"]["actor/weights.bin"]["size"] == 1000
    assert (tmp_path / LATEST).read_text() == "20"
    assert sorted(os.listdir(tmp_path)) == ["global_step_20", LATEST]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(RuntimeError, match="the engine broke"), store.write(2) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError("the engine broke")
    assert sorted(os.listdir(tmp_path)) == ["global_step_1", LATEST]
    assert store.newest().step == 1


def test_the_same_step_can_be_written_again(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 5, size=10)
    save(store, 5, size=20)
    assert (store.newest().folder / "actor" / "weights.bin").stat().st_size == 20


def test_old_checkpoints_go_once_the_new_one_is_there(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert store.steps() == [3, 4]
    with pytest.raises(RuntimeError), store.write(5):
        assert store.steps() == [3, 4]
        raise RuntimeError
    assert store.steps() == [3, 4]


def test_a_run_that_went_back_keeps_what_it_writes_now(tmp_path):
    for step in (10, 20, 30):
        save(CheckpointStore(tmp_path), step)
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 15)
    assert store.steps() == [15] and store.newest().step == 15


# Finding


def test_an_empty_or_missing_store_has_no_checkpoint(tmp_path):
    assert CheckpointStore(tmp_path).newest() is None
    assert CheckpointStore(tmp_path / "nowhere").newest() is None


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "weights.bin has the right size, but other content": lambda f: flip_a_bit(f / "actor" / "weights.bin"),
    "weights.bin has 10 bytes, and had 1000": lambda f: (f / "actor" / "weights.bin").write_bytes(b"0123456789"),
    "note.txt is missing": lambda f: (f / "note.txt").unlink(),
    "there is no manifest.json": lambda f: (f / MANIFEST).unlink(),
    "manifest.json cannot be read": lambda f: (f / MANIFEST).write_text("{"),
    "of a later version": lambda f: (f / MANIFEST).write_text('{"format": 99, "files": {}}'),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, caplog, message):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    DAMAGE[message](save(store, 20))
    assert store.newest().step == 10
    assert message in caplog.text and "global_step_20" in caplog.text and "global_step_10 instead" in caplog.text


def test_a_store_without_a_whole_checkpoint_does_not_start_afresh_in_silence(tmp_path):
    store = CheckpointStore(tmp_path)
    (save(store, 10) / "note.txt").unlink()
    with pytest.raises(UserError, match=r"note\.txt is missing") as error:
        store.newest()
    assert "resume_mode=disable" in error.value.fix


@pytest.mark.parametrize("text", [None, "", "twenty"])
def test_the_newest_is_found_without_the_pointer_file(tmp_path, text):
    store = CheckpointStore(tmp_path)
    for step in (9, 10):
        save(store, step)
    (tmp_path / LATEST).unlink()
    if text is not None:
        (tmp_path / LATEST).write_text(text)
    assert store.newest().step == 10


# Killing


def kill_at(event: int, root: Path) -> None:
    """Ends this process by SIGKILL at the n-th thing it does to the file system below root."""
    seen = 0

    def hook(name: str, arguments: tuple) -> None:
        nonlocal seen
        if name in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(root) in str(arguments[0]):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def write_some(root: Path, event: int, done: Path) -> None:
    kill_at(event, root)
    store = CheckpointStore(root, keep=1)
    for step, size in ((2, 1000), (2, 50), (3, 1000)):  # one after another, one in the place of another
        save(store, step, size)
        done.write_text(str(step))


def test_killed_at_every_single_file_operation_the_store_still_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # for power cuts, which a kill is not; slow
    context = multiprocessing.get_context("fork")
    killed = 0
    for event in range(1, 1000):
        root, done = tmp_path / f"e{event}", tmp_path / f"done{event}"
        save(CheckpointStore(root), 1)
        done.write_text("1")
        child = context.Process(target=write_some, args=(root, event, done))
        child.start()
        child.join()
        store = CheckpointStore(root, keep=1)
        store.sweep()
        found = store.newest()
        assert found is not None and int(done.read_text()) <= found.step <= 3
        assert find_damage(found.folder) is None
        assert not [name for name in os.listdir(root) if name.startswith(".")]
        save(store, 9)
        assert store.newest().step == 9 and store.steps() == [9]
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        killed += 1
    assert killed > 40


WRITER = """
import sys
from pathlib import Path
from paddock.trainer.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1], keep=2)
start = store.newest()
for step in range(start.step + 1 if start else 1, 10**6):
    with store.write(step) as folder:
        for part in range(8):
            (folder / f"part{part}").write_bytes(bytes([step % 256]) * 200_000)
    print(step, flush=True)
"""


def test_killed_at_random_moments_a_run_always_goes_on(tmp_path):
    moments, done = random.Random(0), 0
    for _ in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert int(child.stdout.readline()) == done + 1
        time.sleep(moments.uniform(0, 0.15))
        child.kill()
        child.wait()
        child.stdout.close()
        found = CheckpointStore(tmp_path).newest()
        assert found.step > done
        assert all((found.folder / f"part{p}").read_bytes() == bytes([found.step % 256]) * 200_000 for p in range(8))
        done = found.step


# Disks that refuse


@pytest.mark.parametrize("how", ["python", "torch"])
def test_a_full_disk_is_a_user_error_and_leaves_the_store_as_it_was(tmp_path, how):
    """A limit on file sizes stands in for the end of the disk: the same refusal in the middle of a write."""
    script = f"""
import resource, signal, sys, torch
from paddock.trainer.checkpoint import CheckpointStore
from paddock.errors import UserError
store = CheckpointStore({str(tmp_path)!r})
with store.write(1) as folder:
    (folder / "small").write_text("fits")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with store.write(2) as folder:
        if {how!r} == "torch":
            torch.save(torch.zeros(10**6), folder / "large.pt")
        else:
            (folder / "large").write_bytes(bytes(10**6))
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert f"trainer.default_local_dir={tmp_path}: cannot be written" in done.stdout, done.stderr
    assert "free space on its disk" in done.stdout and "or set trainer.default_local_dir" in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["global_step_1", LATEST]
    assert CheckpointStore(tmp_path).newest().step == 1


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written") as error, CheckpointStore(tmp_path / "file").write(1):
        raise AssertionError("not reached")
    assert error.value.key == "trainer.default_local_dir" and "make it writable" in error.value.fix


def test_errors_that_are_not_the_disks_are_not_blamed_on_it(tmp_path):
    with pytest.raises(ConnectionError), CheckpointStore(tmp_path).write(1):
        raise ConnectionError("a worker is gone")


# Resuming


def test_resume_mode_auto_takes_the_newest_and_disable_none(tmp_path):
    store = checkpoint_store(config(f"trainer.default_local_dir={tmp_path}"))
    assert resume_point(config().trainer, store) is None
    save(store, 3)
    (tmp_path / ".global_step_4.writing").mkdir()
    assert resume_point(config().trainer, store).step == 3
    assert not (tmp_path / ".global_step_4.writing").exists()
    assert resume_point(config("trainer.resume_mode=disable").trainer, store) is None


def test_resume_path_takes_the_named_checkpoint_or_says_what_is_wrong(tmp_path):
    store = CheckpointStore(tmp_path)
    folder = save(store, 3)
    save(store, 7)

    def at(path: Path):
        return resume_point(
            config("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}").trainer, store
        )

    assert (at(folder).step, at(folder).folder) == (3, folder)
    with pytest.raises(UserError, match="no such folder") as error:
        at(tmp_path / "global_step_5")
    assert "steps there: 3, 7" in error.value.fix
    flip_a_bit(folder / "actor" / "weights.bin")
    with pytest.raises(UserError, match="other content"):
        at(folder)


def test_the_larger_limit_counts_and_asynchronous_saving_is_refused_by_name():
    limits = ["trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=3"]
    assert checkpoint_store(config(*limits)).keep == 3
    assert checkpoint_store(config(limits[0])).keep == 2
    assert checkpoint_store(config()).keep is None
    key = "actor_rollout_ref.actor.checkpoint.async_save"
    with pytest.raises(UserError) as error:
        checkpoint_store(config(f"{key}=True"))
    assert error.value.key == key


# State


def test_state_comes_back_as_it_was(tmp_path):
    state = {
        "step": 12,
        "kl": 0.1 + 0.2,
        "loader": {"epoch": 1, "position": 64},
        "pair": (1, 2),
        "numbered": {3: "three"},
        "weights": torch.arange(3.0),
        "nothing": None,
        "nan": float("inf"),
    }
    trainer_state.save_state(tmp_path, state)
    loaded = trainer_state.load_state(tmp_path)
    assert torch.equal(loaded.pop("weights"), state.pop("weights"))
    assert loaded == state
    readable = json.loads((tmp_path / trainer_state.READABLE).read_text())
    assert set(readable) == {"step", "kl", "loader", "nothing"}


def test_state_that_could_not_be_loaded_fails_when_it_is_saved(tmp_path):
    with pytest.raises(Exception, match="Weights only load failed"):
        trainer_state.save_state(tmp_path, {"path": Path("x")})


def test_random_numbers_go_on_where_they_were(tmp_path):
    def draw():
        return random.random(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()

    draw()
    trainer_state.save_state(tmp_path, {"rng": trainer_state.rng_state()})
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    trainer_state.restore_rng(trainer_state.load_state(tmp_path)["rng"])
    assert draw() == expected


def saved_config(*overrides: str) -> dict:
    return json.loads(json.dumps(trainer_state.flat(config(*overrides))))


def test_the_same_config_may_go_on_without_a_word(caplog):
    trainer_state.check_config(saved_config(), config("trainer.resume_mode=auto"))
    assert caplog.text == ""


@pytest.mark.parametrize(
    "change",
    ["algorithm.adv_estimator=rloo", "trainer.seed=7", "data.train_batch_size=128", "data.shuffle=False",
     "actor_rollout_ref.model.path=/models/other", "actor_rollout_ref.model.lora_rank=8"],
)  # fmt: skip
def test_a_change_that_breaks_the_run_is_refused_with_both_values(change):
    base = ["actor_rollout_ref.model.path=/models/one", "trainer.total_training_steps=5"]
    with pytest.raises(UserError, match="the checkpoint was written with") as error:
        trainer_state.check_config(saved_config(*base), config(*base, change))
    key, value = change.split("=")
    assert (error.value.key, str(error.value.value)) == (key, value)
    assert "trainer.resume_mode=disable" in error.value.fix


def test_other_changes_are_reported_and_a_model_may_move(caplog):
    before = saved_config("actor_rollout_ref.model.path=/old/qwen", "actor_rollout_ref.rollout.n=4")
    with caplog.at_level(logging.WARNING):
        trainer_state.check_config(
            before, config("actor_rollout_ref.model.path=/new/qwen", "actor_rollout_ref.rollout.n=8")
        )
    assert "actor_rollout_ref.rollout.n: 4 -> 8" in caplog.text and "/old/qwen -> /new/qwen" in caplog.text


def test_a_key_that_an_older_version_did_not_have_is_no_change(caplog):
    before = saved_config()
    del before["trainer.save_freq"]
    trainer_state.check_config(before, config("trainer.save_freq=9"))
    assert caplog.text == ""
