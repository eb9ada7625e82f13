"""Control groups: where one can be made, what it bounds, and that none is left behind."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_sandbox import AVAILABLE, LIMITS, needs_isolation

from paddock.sandbox import cgroup
from paddock.sandbox.cell import Cell
from paddock.sandbox.cgroup import made_group
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import Program
from paddock.sandbox.runner import check


def proc_of(folder: Path, own: str, mounts: str) -> Path:
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(own)
    (proc / "mountinfo").write_text(mounts.replace("TREE", str(folder / "tree")))
    return proc


def group_in(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in {"cgroup.procs": "", **files}.items():
        (folder / name).write_text(text)
    return folder


def test_version_1_makes_a_group_below_its_own(tmp_path):
    own = group_in(tmp_path / "tree/job", {"memory.limit_in_bytes": "0"})
    text = "5:cpu:/\n4:memory:/docker/abc/job\n0::/\n"
    mounts = "30 25 0:26 /docker/abc TREE rw - cgroup cgroup rw,memory\n31 25 0:27 / /other rw - cgroup cgroup rw,cpu\n"
    assert cgroup._parents(proc_of(tmp_path, text, mounts)) == [(own, 1)]


def test_version_2_makes_a_neighbour_but_leaves_no_limit(tmp_path):
    tree = tmp_path / "tree"
    group_in(tree, {"cgroup.subtree_control": "cpu memory"})
    group_in(tree / "user", {"cgroup.subtree_control": "memory pids", "memory.max": "max\n"})
    group_in(tree / "user/app", {"cgroup.subtree_control": "", "memory.max": "max\n"})
    mounts = "30 25 0:26 / TREE rw - cgroup2 cgroup2 rw\n"
    proc = proc_of(tmp_path, "0::/user/app\n", mounts)
    assert cgroup._parents(proc) == [(tree / "user", 2), (tree, 2)]
    (tree / "user/app/memory.max").write_text("1000000\n")
    assert cgroup._parents(proc) == []


@pytest.mark.parametrize("text", ["", "nonsense", "0::/elsewhere\n"])
def test_where_there_are_no_groups_none_is_made(tmp_path, text):
    proc = proc_of(tmp_path, text, "30 25 0:26 / TREE rw - cgroup2 cgroup2 rw\nbroken line\n")
    assert made_group(proc) is None
    assert made_group(tmp_path / "nothing") is None


def test_a_group_that_is_left_is_removed_when_its_owner_is_gone(tmp_path):
    parent = group_in(tmp_path / "tree/job", {"memory.limit_in_bytes": "0"})
    dead = 2**22 + 5  # beyond the largest process id
    for owner in (dead, os.getpid()):
        (parent / f"{cgroup.NAME}{owner}-0").mkdir()
    cgroup._remove_abandoned(parent)
    assert [folder.name for folder in parent.glob(f"{cgroup.NAME}*")] == [f"{cgroup.NAME}{os.getpid()}-0"]


def needs_groups() -> None:
    group = made_group()
    if group is None:
        pytest.skip("this user may make no control group here")
    group.remove()


SOCKETS = """
import os, socket, time
for _ in range(14):
    if os.fork() == 0:
        break
pairs = []
try:
    while True:
        pairs.append(socket.socketpair())
        for one in pairs[-1]:
            one.setblocking(False)
            try:
                while True:
                    one.send(bytes(1 << 16))
            except BlockingIOError:
                pass
except OSError:
    time.sleep(9)
"""


@needs_isolation
def test_what_the_kernel_ends_is_out_of_memory_and_the_group_goes_with_the_cell(monkeypatch):
    needs_groups()
    monkeypatch.setattr("paddock.sandbox.cell._send_buffer", lambda: 0)  # the watch sees no sockets
    cell = Cell(AVAILABLE[0], LIMITS)
    assert cell.group and cell.group.has_members() and cell.group.kills() == 0
    folder = cell.group.folder
    assert cell.run(Program(SOCKETS), 5.0).cause == "memory"
    assert cell.group.kills() > 0
    assert cell.run(Program("print(1)"), 5.0).passed
    cell.close()
    assert not folder.exists()


@needs_isolation
def test_the_log_says_which_guard_is_in_force(caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "paddock"):
        check(LIMITS)
        monkeypatch.setattr("paddock.sandbox.cell.made_group", lambda: None)
        check(replace(LIMITS, memory_limit_mb=300))
    *_, first, second = [record.getMessage() for record in caplog.records]
    assert "256 MB" in first and "guarded by" in first
    assert second.endswith(
        "300 MB of memory are guarded by a watch over its processes and what the kernel holds for them"
    )
    with LocalSandbox(LIMITS) as box:
        assert box.guard in second
