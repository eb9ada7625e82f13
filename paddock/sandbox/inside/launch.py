"""Isolates a cell (namespaces, mounts), and waits outside until it ends.

A cell sees the system's programs and libraries, the interpreter and an empty /tmp: all but /tmp read-only, nothing of
the home folder, no network, no process of the machine. The process inside, see zygote.py, has no privilege left:
root becomes nobody first.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NoReturn

from . import kernel

USER = 1000  # what programs see as their user
NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
"""What programs see -> the device it is. Zeros can be read from `full` too, but it cannot be mapped: pages of a shared
mapping of `zero` would belong to no process."""
WRITABLE = ("/tmp", "/dev/shm")
PACKAGE_FOLDER = "/paddock"  # where this folder is seen inside
BOOT = "import sys; sys.path.append({package_folder!r}); from inside.zygote import main; main()"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # an answer gets the same score every time
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "1",  # every further arena of a thread costs 64 MB of address space, which is limited
}
CHECK_PARENT = 0.5  # seconds


def main() -> None:
    """Arguments: the control socket, and the plan as JSON (see cell.py)."""
    descriptor, plan, parent = int(sys.argv[1]), json.loads(sys.argv[2]), os.getppid()
    control = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    devnull = os.open(os.devnull, os.O_RDWR)  # now: the child changes the root that it shares with this process
    if plan["group"]:
        with suppress(OSError):  # then the group stays empty, and whoever made it sees that
            kernel.write(plan["group"], "0")
    try:
        cell = {"bubblewrap": _bubblewrap, "unshare": _unshare, "unsafe": _nothing}[plan["isolation"]](plan, control)
    except OSError as error:
        control.send(json.dumps({"failed": _described(error)}).encode())
        return
    control.close()
    os.dup2(devnull, 2)
    _wait(cell, parent)
    if plan["isolation"] == "unsafe":
        from paddock.core.supervisor import kill_descendants

        kill_descendants()


def _wait(cell: int, parent: int) -> None:
    """Until the cell has ended. The parent's death is its end too: whoever else holds the control socket open."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        with suppress(ChildProcessError):
            if os.waitpid(cell, os.WNOHANG)[0] == cell:
                return
        if os.getppid() != parent:
            os.kill(cell, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, CHECK_PARENT)


def _unshare(plan: dict[str, Any], control: socket.socket) -> int:
    _enter_namespaces()
    child = os.fork()
    if child == 0:
        try:
            _build(plan)
            _start(plan, control)
        except BaseException as error:
            control.send(json.dumps({"failed": _described(error)}).encode())
            os._exit(1)
    return child


def _enter_namespaces() -> None:
    if os.geteuid() == 0:
        try:
            return kernel.unshare(NAMESPACES)
        except PermissionError:  # in a container root may be allowed no more than others
            kernel.become_nobody()
    kernel.unshare(NAMESPACES | kernel.CLONE_NEWUSER, user=USER)


def _build(plan: dict[str, Any]) -> None:
    """A new root beside the old one, which is put at /old for the while; then it takes its place.

    Modules that are not loaded yet cannot be found meanwhile.
    """
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV)
    for folder in ("old", "new"):
        os.mkdir(f"/tmp/{folder}")
    kernel.pivot_root("/tmp", "old")
    kernel.mount("tmpfs", "/new", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4m,mode=755")
    for folder in ("proc", "tmp", "dev/shm"):
        os.makedirs(f"/new/{folder}")
    for folder in WRITABLE:
        kernel.mount_empty(f"/new{folder}", plan["tmp_mb"])
    for link, target in plan["links"].items():
        os.symlink(target, f"/new{link}")
    for name, device in DEVICES.items():
        _bind(f"/old/dev/{device}", f"/new/dev/{name}")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/new/dev/{name}")
    for target, source in plan["binds"].items():
        _bind(f"/old{source}", f"/new{target}")
    for target in _mounts("/new/"):
        if target.removeprefix("/new") not in WRITABLE and not target.startswith("/new/dev/"):
            kernel.make_read_only(target)
    try:
        kernel.mount("proc", "/new/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    except PermissionError:  # where parts of /proc are hidden, as in a container, none is allowed
        plan["proc"] = os.open("/old/proc", os.O_RDONLY | os.O_DIRECTORY)
    kernel.make_read_only("/new")
    kernel.pivot_root("/new", ".")


def _bind(source: str, target: str) -> None:
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "a"):
            pass
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)


def _mounts(under: str) -> list[str]:
    """Mount points, also those that came along with what was bound."""
    with open("/old/proc/self/mountinfo", "rb") as lines:
        names = [re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4]) for line in lines]
    return [path for path in map(os.fsdecode, names) if path.startswith(under)]


def _bubblewrap(plan: dict[str, Any], control: socket.socket) -> int:
    """bubblewrap maps a single user: root builds without a user namespace, and becomes nobody inside."""
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        namespaces += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    else:
        namespaces += ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
    view = ["--proc", "/proc", "--dev", "/dev", "--dev-bind", "/dev/full", "/dev/zero"]
    view += ["--perms", "1777", "--size", str(plan["tmp_mb"] << 20), "--tmpfs", "/tmp"]
    for link, target in plan["links"].items():
        view += ["--symlink", target, link]
    for target, source in plan["binds"].items():
        for folder in reversed(PurePath(target).parents):
            view += ["--dir", str(folder)]  # where bubblewrap makes them by itself, they are for their owner alone
        view += ["--ro-bind", source, target]
    view += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    child = os.fork()
    if child == 0:
        _start(
            plan, control, before=[plan["bubblewrap"], *namespaces, "--die-with-parent", "--new-session", *view, "--"]
        )
    return child


def _nothing(plan: dict[str, Any], control: socket.socket) -> int:
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        _start(plan, control, package_folder=os.path.dirname(os.path.dirname(__file__)))
    return child


def _start(
    plan: dict[str, Any], control: socket.socket, before: Sequence[str] = (), package_folder: str = PACKAGE_FOLDER
) -> NoReturn:
    """Replaces this process by a new interpreter, so that nothing of its memory is inside the cell."""
    control.set_inheritable(True)
    facts = {name: plan.get(name) for name in ("tmp_mb", "send_buffer", "command", "proc")} | {
        "unsafe": plan["isolation"] == "unsafe",
        "shown_in_tmp": [path for path in plan["binds"] if path.startswith("/tmp/")],
    }
    if facts["proc"] is not None:
        os.set_inheritable(facts["proc"], True)
    arguments = [str(control.fileno()), json.dumps(facts)]
    command = [*before, *plan["python"], "-c", BOOT.format(package_folder=package_folder), *arguments]
    os.execve(command[0], command, ENVIRONMENT)


def _described(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
