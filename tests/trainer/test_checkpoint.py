from __future__ import annotations

import errno
import io
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from paddock.config import tree
from paddock.config.schema import Config
from paddock.core.files import replacing
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.runs import settings as run_settings
from paddock.runs.checkpoint import LATEST, MANIFEST, CheckpointStore, checkpoint_store, find_damage, resume_point
from paddock.trainer import state as trainer_state
from tests.forked import ForkedCall


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
    "it is a file, not a folder": lambda f: (shutil.rmtree(f), f.write_text("x")),
    "it is a symbolic link to no folder": lambda f: (shutil.rmtree(f), f.symlink_to("nowhere")),
    "manifest.json is that of step 10": lambda f: shutil.copytree(f.with_name("global_step_10"), f, dirs_exist_ok=True),
}


def edited(**changes):
    """Writes values of another shape into a manifest that is right otherwise."""

    def edit(folder: Path) -> None:
        values = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(values | changes))

    return edit


def entry(value):
    return edited(files={"note.txt": value})


RIGHT = {"size": 7, "sha256": "0" * 64}
OTHER = "manifest.json is not as this program writes it"
SHAPES = {
    "a list at top level": (OTHER, lambda f: (f / MANIFEST).write_text("[]")),
    "a text at top level": (OTHER, lambda f: (f / MANIFEST).write_text('"x"')),
    "null at top level": (OTHER, lambda f: (f / MANIFEST).write_text("null")),
    "nested a million deep": ("cannot be read", lambda f: (f / MANIFEST).write_text("[" * 10**6)),
    "bytes that are no text": ("cannot be read", lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe\x00")),
    "a folder in its place": ("cannot be read", lambda f: ((f / MANIFEST).unlink(), (f / MANIFEST).mkdir())),
    "files as a list": (OTHER, edited(files=[])),
    "files as a text": (OTHER, edited(files="note.txt")),
    "no files": (OTHER, edited(files={})),
    "files null": (OTHER, edited(files=None)),
    "format as a text": (OTHER, edited(format="1")),
    "format as a list": (OTHER, edited(format=[1])),
    "format true": (OTHER, edited(format=True)),
    "format null": (OTHER, edited(format=None)),
    "step as a text": (OTHER, edited(step="20")),
    "an entry that is a list": (OTHER, entry([7, "0" * 64])),
    "an entry that is null": (OTHER, entry(None)),
    "an entry without a checksum": (OTHER, entry({"size": 7})),
    "a size that is a text": (OTHER, entry(RIGHT | {"size": "7"})),
    "a negative size": (OTHER, entry(RIGHT | {"size": -7})),
    "a checksum that is a number": (OTHER, entry(RIGHT | {"sha256": 7})),
    "a name that climbs out": (OTHER, edited(files={"../global_step_10/note.txt": RIGHT})),
    "an absolute name": (OTHER, edited(files={"/etc/passwd": RIGHT})),
    "an empty name": (OTHER, edited(files={"": RIGHT})),
    "a name with a null byte": (OTHER, edited(files={"a\0b": RIGHT})),
    "a name too long for a file": ("cannot be read", edited(files={"x" * 5000: RIGHT})),
    "the name of a folder": ("actor is missing", edited(files={"actor": RIGHT})),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_manifest_of_another_shape_is_named_and_the_checkpoint_before_is_used(tmp_path, caplog, shape):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    message, damage = SHAPES[shape]
    damage(save(store, 20))
    assert store.newest().step == 10
    assert message in caplog.text and "global_step_20" in caplog.text and "global_step_10 instead" in caplog.text


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


@pytest.mark.parametrize("text", [None, "", "twenty", "-1", "1e1", "9" * 5000, "9" * 12, "0x0a", "9 10"])
def test_the_newest_is_found_without_the_pointer_file(tmp_path, text, caplog):
    store = CheckpointStore(tmp_path)
    for step in (9, 10):
        save(store, step)
    (tmp_path / LATEST).unlink()
    if text is not None:
        (tmp_path / LATEST).write_text(text)
    assert store.newest().step == 10
    assert (f"{LATEST} names no checkpoint" in caplog.text) == (text is not None)


def test_a_pointer_file_of_bytes_or_in_the_form_of_a_folder_is_reported(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    save(store, 10)
    (tmp_path / LATEST).write_bytes(b"\xff\xfe")
    assert store.newest().step == 10 and f"{LATEST} names no checkpoint" in caplog.text
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).mkdir()
    caplog.clear()
    assert store.newest().step == 10 and "Is a directory" in caplog.text
    with pytest.raises(UserError, match=f"{LATEST} is a folder"):  # when a run begins, not when it first saves
        resume_point(config("trainer.resume_mode=auto").trainer, store)


# What does not belong there


def stray_file(path: Path) -> None:
    path.write_text("not a checkpoint")


def stray_link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [stray_file, stray_link, dangling_link])
@pytest.mark.parametrize("name", [".global_step_3.writing", ".global_step_3.replaced", ".global_step_9.removing"])
def test_strays_with_the_name_of_a_half_written_checkpoint_are_removed(tmp_path, caplog, make, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("of somebody else")
    store = CheckpointStore(tmp_path)
    save(store, 2)
    make(tmp_path / name)
    assert resume_point(config("trainer.resume_mode=auto").trainer, store).step == 2
    assert name in caplog.text or make is stray_link  # which is a folder
    assert not os.path.lexists(tmp_path / name)
    save(store, 3)
    assert store.newest().step == 3 and not (tmp_path / "global_step_3").is_symlink()
    assert (tmp_path / "elsewhere" / "precious").is_file()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("make", [stray_file, stray_link, dangling_link])
def test_strays_with_the_name_of_a_checkpoint_are_reported_and_give_way_to_it(tmp_path, caplog, make):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("of somebody else")
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 2)
    make(tmp_path / "global_step_7")
    assert store.newest().step == 2
    assert "global_step_7 is damaged" in caplog.text or make is stray_link  # which is a folder beyond the latest step
    for step in (7, 8):
        save(store, step)
        assert store.newest().step == step
    assert (tmp_path / "elsewhere" / "precious").is_file()
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "global_step_8", LATEST]


def test_a_stray_file_alone_does_not_start_a_run_afresh_in_silence(tmp_path):
    stray_file(tmp_path / "global_step_7")
    with pytest.raises(UserError, match="it is a file, not a folder"):
        CheckpointStore(tmp_path).newest()


def test_names_that_only_look_like_a_checkpoints_are_left_alone(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    for name in (
        "global_step_",
        "global_step_007",
        "global_step_-1",
        "global_step_٣",
        "global_step_1.bak",
        "GLOBAL_STEP_9",
    ):
        (tmp_path / name).mkdir()
    assert store.newest() is None
    save(store, 1), save(store, 2)
    assert store.steps() == [2] and (tmp_path / "global_step_007").is_dir()


@pytest.mark.parametrize("closed", ["root", "step", "part", "file"])
def test_what_may_not_be_read_is_an_error_in_words(tmp_path, closed, monkeypatch, caplog):
    """Refusals of the operating system are raised by hand: root may read whatever its permissions say."""
    store = CheckpointStore(tmp_path)
    save(store, 10)
    folder = save(store, 20)
    barred = {"root": tmp_path, "step": folder, "part": folder / "actor", "file": folder / "note.txt"}[closed]
    stat, opened, listed = os.stat, open, os.listdir

    def refusing(function, exact):
        def call(path, *arguments, **options):
            inside = Path(str(path)) == barred if exact else Path(str(path)).is_relative_to(barred)
            if not isinstance(path, int) and inside and (exact or Path(str(path)) != barred or closed == "file"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return function(path, *arguments, **options)

        return call

    if closed != "file":
        monkeypatch.setattr(os, "stat", refusing(stat, False))
    monkeypatch.setattr(os, "listdir", refusing(listed, True))
    monkeypatch.setattr(io, "open", refusing(opened, False))
    if closed == "root":
        with pytest.raises(UserError, match="cannot be read: Permission denied"):
            store.newest()
    else:
        assert store.newest().step == 10
        assert "Permission denied" in caplog.text and "global_step_10 instead" in caplog.text


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


def write_on(root: Path) -> None:
    store = CheckpointStore(root, keep=2)
    start = store.newest()
    for step in range(start.step + 1 if start else 1, 10**6):
        with store.write(step) as folder:
            for part in range(8):
                (folder / f"part{part}").write_bytes(bytes([step % 256]) * 200_000)
        print(step, flush=True)


def test_killed_at_random_moments_a_run_always_goes_on(tmp_path):
    moments, done = random.Random(0), 0
    for _ in range(6):
        child = ForkedCall(lambda: write_on(tmp_path))
        while "\n" not in child.said():
            assert child.poll() is None, child.said()
            time.sleep(0.001)
        assert int(child.said().split()[0]) == done + 1
        time.sleep(moments.uniform(0, 0.15))
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        found = CheckpointStore(tmp_path).newest()
        assert found.step > done
        assert all((found.folder / f"part{p}").read_bytes() == bytes([found.step % 256]) * 200_000 for p in range(8))
        done = found.step


# Disks that refuse


@pytest.mark.parametrize("how", ["python", "torch"])
def test_a_disk_that_refuses_a_large_file_is_a_user_error_and_leaves_the_store_as_it_was(tmp_path, how):
    """A limit on file sizes refuses in the middle of a write, as the end of the disk does."""
    store = CheckpointStore(tmp_path)
    with store.write(1) as folder:
        (folder / "small").write_text("fits")

    def write_much() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            with store.write(2) as folder:
                if how == "torch":
                    torch.save(torch.zeros(10**6), folder / "large.pt")
                else:
                    (folder / "large").write_bytes(bytes(10**6))
        except UserError as error:
            print(error)

    process = ForkedCall(write_much)
    code, said = process.wait(), process.said()
    assert code == 0 and f"trainer.default_local_dir={tmp_path}: cannot be written" in said, said
    assert "fix: ulimit -f unlimited, or set trainer.default_local_dir to another folder" in said
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
    store = checkpoint_store(config(f"trainer.default_local_dir={tmp_path}").trainer)
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


def test_the_larger_limit_counts(caplog):
    limits = ["trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=3"]
    assert checkpoint_store(config(*limits).trainer).keep == 3
    assert checkpoint_store(config(limits[0]).trainer).keep == 2
    assert checkpoint_store(config().trainer).keep is None
    assert checkpoint_store(config(limits[1]).trainer).keep is None, (
        "it would delete the actor's, too, of which all are kept"
    )
    assert "max_critic_ckpt_to_keep=3 has no effect" in caplog.text


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
    return json.loads(json.dumps(tree.settings(config(*overrides))))


def test_the_same_config_may_go_on_without_a_word(caplog):
    run_settings.check_settings(saved_config(), tree.settings(config("trainer.resume_mode=auto")))
    assert caplog.text == ""


@pytest.mark.parametrize(
    "change",
    ["algorithm.adv_estimator=rloo", "trainer.seed=7", "data.train_batch_size=128", "data.shuffle=False",
     "actor_rollout_ref.model.path=/models/other", "actor_rollout_ref.model.lora_rank=8"],
)  # fmt: skip
def test_a_change_that_breaks_the_run_is_refused_with_both_values(change):
    base = ["actor_rollout_ref.model.path=/models/one", "trainer.total_training_steps=5"]
    with pytest.raises(UserError, match="the checkpoint was written with") as error:
        run_settings.check_settings(saved_config(*base), tree.settings(config(*base, change)))
    key, value = change.split("=")
    assert (error.value.key, str(error.value.value)) == (key, value)
    assert "trainer.resume_mode=disable" in error.value.fix


def test_other_changes_are_reported_and_a_model_may_move(caplog):
    before = saved_config("actor_rollout_ref.model.path=/old/qwen", "actor_rollout_ref.rollout.n=4")
    with caplog.at_level(logging.WARNING):
        after = config("actor_rollout_ref.model.path=/new/qwen", "actor_rollout_ref.rollout.n=8")
        run_settings.check_settings(before, tree.settings(after))
    assert "actor_rollout_ref.rollout.n: 4 -> 8" in caplog.text and "/old/qwen -> /new/qwen" in caplog.text


def test_a_key_that_an_older_version_did_not_have_is_no_change(caplog):
    before = saved_config()
    del before["trainer.save_freq"]
    run_settings.check_settings(before, tree.settings(config("trainer.save_freq=9")))
    assert caplog.text == ""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_with_its_free_space(tmp_path, number):
    with (
        pytest.raises(UserError, match="cannot be written") as error,
        replacing(tmp_path / "file", "trainer.x") as file,
    ):
        file.write(b"half")
        raise OSError(number, os.strerror(number))
    assert "free space on its disk" in error.value.fix and os.listdir(tmp_path) == []
