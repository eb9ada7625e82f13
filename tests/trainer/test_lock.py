"""One run writes into a folder: a second is refused by name, and a dead owner blocks nobody."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from paddock.errors import UserError
from paddock.runs import lock as locks
from paddock.runs.lock import NAME, STALE, FolderLock, require_free, this_process

HOLD = """
import sys, time
sys.argv = ["paddock", "train", "trainer.seed=7"]
from paddock.runs.lock import FolderLock
with FolderLock(sys.stdin.readline().strip()):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", HOLD], env=env, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdin and process.stdout
    process.stdin.write(f"{folder}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "held\n"
    return process


def written(folder: Path, age: float = 0.0, **changes: object) -> None:
    """A lock file as another owner left it."""
    owner = dataclasses.replace(this_process(), **changes)  # type: ignore[arg-type]
    path = folder / NAME
    path.write_text(json.dumps(dataclasses.asdict(owner)))
    os.utime(path, (time.time() - age, time.time() - age))


def test_folders_that_a_refused_run_made_go_again_and_what_was_there_or_written_stays(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError), FolderLock(tmp_path / "runs" / "paddock" / "grpo"):
        raise UserError("the scorer is missing")
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"] and not list((tmp_path / "runs").iterdir())
    with FolderLock(tmp_path / "runs" / "paddock" / "grpo") as lock:
        (lock.folder / "metrics.jsonl").touch()
    assert [path.name for path in lock.folder.iterdir()] == ["metrics.jsonl"]


def test_a_second_process_is_refused_with_the_owner_the_place_and_the_time(tmp_path):
    process = hold(tmp_path)
    try:
        for attempt in (lambda: require_free(tmp_path), lambda: FolderLock(tmp_path).__enter__()):
            with pytest.raises(UserError) as refused:
                attempt()
            text = str(refused.value)
            assert f"process {process.pid}" in text and "since 20" in text and "paddock train trainer.seed=7" in text
            assert str(tmp_path) in text and "fix: " in text
    finally:
        process.kill()
        process.wait()


def test_a_killed_owner_does_not_block(tmp_path):
    process = hold(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / NAME).exists()
    require_free(tmp_path)
    with FolderLock(tmp_path):
        pass
    assert not (tmp_path / NAME).exists()


def test_one_process_cannot_hold_a_folder_twice_and_asking_does_not_release_it(tmp_path):
    with FolderLock(tmp_path):
        for _ in range(2):
            with pytest.raises(UserError, match="another run is writing here"):
                FolderLock(tmp_path).__enter__()
            with pytest.raises(UserError, match="another run is writing here"):
                require_free(tmp_path)
        other = subprocess.run([sys.executable, "-c", HOLD], input=f"{tmp_path}\n", capture_output=True, text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)  # fmt: skip
        assert "another run is writing here" in other.stderr
    with FolderLock(tmp_path):
        pass


def test_an_owner_on_another_node_holds_while_it_touches_the_lock_and_not_after(tmp_path):
    written(tmp_path, boot="other", host="node7", pid=1)
    with pytest.raises(UserError, match=r"node7.*last sign of life was 0 s ago"):
        FolderLock(tmp_path).__enter__()
    written(tmp_path, age=STALE + 5, boot="other", host="node7", pid=1)
    with FolderLock(tmp_path):
        pass


def test_a_touch_in_the_future_counts_from_the_moment_it_is_seen(tmp_path):
    """The clock of a file server was set back by a day: an owner that is gone must not hold the folder for a day."""
    written(tmp_path, age=-86400.0, boot="other", host="node7", pid=1)
    with pytest.raises(UserError, match=r"node7.*last sign of life was 0 s ago; .*try again in 60 s"):
        FolderLock(tmp_path).__enter__()
    touched = (tmp_path / NAME).stat().st_mtime
    assert touched <= time.time()
    os.utime(tmp_path / NAME, (touched - STALE - 1, touched - STALE - 1))  # a minute later
    with FolderLock(tmp_path):
        pass


def test_the_owner_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 0.01)
    with FolderLock(tmp_path) as lock:
        os.utime(lock.path, (0, 0))
        deadline = time.monotonic() + 10
        while lock.path.stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.path.stat().st_mtime > 0


def test_without_locks_in_the_file_system_a_living_process_still_holds(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(locks.errno.ENOLCK, "no locks")

    monkeypatch.setattr(locks.fcntl, "lockf", unsupported)
    written(tmp_path, pid=os.getppid())
    with pytest.raises(UserError, match="another run is writing here"):
        FolderLock(tmp_path).__enter__()
    written(tmp_path, pid=2**22 + 1)
    with FolderLock(tmp_path):
        pass


def test_a_run_whose_folder_was_taken_over_writes_nothing_more(tmp_path):
    with FolderLock(tmp_path) as lock:
        lock.require()
        written(tmp_path, boot="other", host="node7")
        with pytest.raises(UserError, match="another run took this folder over"):
            lock.require()
    assert (tmp_path / NAME).exists()  # it is the other's


def test_a_lock_file_that_was_removed_by_hand_is_written_again(tmp_path):
    with FolderLock(tmp_path) as lock:
        lock.path.unlink()
        lock.require()
        assert lock.path.exists()
        with pytest.raises(UserError):
            FolderLock(tmp_path).__enter__()
    assert not lock.path.exists()


def test_a_run_whose_folder_was_moved_says_so_and_writes_nothing_more(tmp_path):
    with FolderLock(tmp_path / "run") as lock:
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(UserError, match="moved or removed while the run wrote"):
            lock.require()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"user": 1}', "\x00" * 100])
def test_a_lock_file_of_junk_is_nobodys(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    require_free(tmp_path)
    with FolderLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        FolderLock(tmp_path / "file" / "run").__enter__()
