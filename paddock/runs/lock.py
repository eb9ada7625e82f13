"""One run writes into a folder at a time: a lock that a living run holds, and that a dead one cannot leave behind.

    with FolderLock(folder): ...      # folder/.run.lock: who, where, since when

The lock is the kernel's (POSIX record lock): it goes when its process does, by `kill -9` too, and no child process
inherits it. Kernels of several nodes that share a folder may not know each other's locks. So the owner also touches the
file every BEAT seconds, and a run on another node takes an untouched lock over after STALE seconds of the file
system's clock.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import os
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from paddock.core.files import unwritable
from paddock.errors import UserError

KEY = "trainer.default_local_dir"
NAME = ".run.lock"
BEAT = 10.0
"""Seconds between two touches of the file."""
STALE = 60.0
"""Seconds without a touch after which an owner on another node counts as dead."""
HELD = (errno.EACCES, errno.EAGAIN)
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


@dataclass(frozen=True)
class Owner:
    """Describes the run that holds a folder."""

    user: str
    host: str
    boot: str
    """Identifies the running kernel: containers of one node share it, a rebooted node has another."""
    pid: int
    since: str
    command: str
    token: str
    """Unique for each lock that was ever taken."""

    def __str__(self) -> str:
        return f"{self.user} on {self.host}, process {self.pid}, since {self.since} ({self.command})"


class FolderLock:
    """Holds a folder for one run; a second run is refused with the name of the first."""

    _mine: ClassVar[dict[tuple[int, int], Owner]] = {}
    """Locks of this process by device and inode. The kernel would grant them twice to one process, and would release
    all of them when any descriptor of the file is closed: so a file that is listed here is never opened again."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.path = self.folder / NAME
        self.owner = this_process()
        self._file = -1
        self._made: list[Path] = []
        """Folders that this lock made, the innermost first: those still empty at the end go again."""
        self._stop = threading.Event()

    def __enter__(self) -> FolderLock:
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            raise unwritable(self.folder, KEY, error) from error
        threading.Thread(target=self._beat, name="folder lock", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with suppress(OSError):  # a folder that is gone or read-only by now: a lock without its process blocks nobody
            if read_owner(self._file) == self.owner:
                self.path.unlink(missing_ok=True)
                for folder in self._made:
                    folder.rmdir()
        self._release()

    def require(self) -> None:
        """Refuses to go on if the folder has another owner: this process was stopped or cut off for too long."""
        on_disk = identity(self.path)
        if not self.folder.is_dir():
            raise unwritable(self.folder, KEY, FileNotFoundError(errno.ENOENT, "No such folder"))
        if on_disk is None:
            mine = self._restored()
        else:
            mine = on_disk == identity(self._file) and read_owner(self._file) == self.owner
        if not mine:
            raise UserError(
                "another run took this folder over while this one stood still; this one writes nothing more",
                key=KEY,
                value=self.folder,
                fix="let the other run go on, or end it and start the same command again",
            )

    def _take(self) -> None:
        while True:
            refuse_if_mine(self.path)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                locked = lock(file, self.folder)
                if identity(self.path) != identity(file):  # its owner removed it between our open and our lock
                    os.close(file)
                    continue
                refuse_if_alive(file, self.path, locked)
                write_owner(file, self.owner)
            except BaseException:
                os.close(file)
                raise
            self._hold(file)
            return

    def _hold(self, file: int) -> None:
        self._file, inode = file, identity(file)
        assert inode is not None
        self._mine[inode] = self.owner

    def _release(self) -> None:
        inode = identity(self._file)
        assert inode is not None
        self._mine.pop(inode, None)
        os.close(self._file)

    def _restored(self) -> bool:
        """Writes the lock file again if someone removed it by hand; False if another run was faster."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        lock(file, self.folder)
        write_owner(file, self.owner)
        self._release()
        self._hold(file)
        return True

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            try:
                os.utime(self._file)
            except OSError:
                return


def require_free(folder: str | Path) -> None:
    """Refuses a folder that another run holds, and changes nothing: an answer before anything heavy is imported."""
    path = Path(folder) / NAME
    try:
        refuse_if_mine(path)
        file = os.open(path, os.O_RDWR)
    except OSError:
        return  # no lock, or one that only `FolderLock` can say more about
    try:
        refuse_if_alive(file, path, lock(file, path.parent))
    finally:
        os.close(file)


def lock(file: int, folder: Path) -> bool:
    """Takes the kernel's lock, or refuses; False if this file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            raise refusal(read_owner(file), folder) from None
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def refuse_if_mine(path: Path) -> None:
    inode = identity(path)
    if inode in FolderLock._mine:
        raise refusal(FolderLock._mine[inode], path.parent)


def refuse_if_alive(file: int, path: Path, locked: bool) -> None:
    """Refuses if the owner that the file names may still run, although its kernel's lock is not in our way."""
    owner = read_owner(file)
    if owner is None:
        return
    if owner.boot == boot_id():
        if not locked and runs_here(owner.pid):
            raise refusal(owner, path.parent)
    elif (silent := seconds_untouched(path)) < STALE:
        raise refusal(owner, path.parent, f"{silent:.0f} s ago; if that node is gone, try again in {STALE:.0f} s")


def refusal(owner: Owner | None, folder: Path, last_touch: str | None = None) -> UserError:
    whose = str(owner) if owner else "a process that has not written its name yet"
    stop = f"stop it (kill {owner.pid} on {owner.host})" if owner else "stop it"
    if owner and owner.pid == os.getpid() and owner.boot == boot_id():  # a notebook keeps a run whose cell raised
        stop = "close it (run.close(), of the Run of this process that holds the folder)"
    return UserError(
        f"another run is writing here: {whose}" + (f"; its last sign of life was {last_touch}" if last_touch else ""),
        key=KEY,
        value=folder,
        fix=f"wait for it, {stop}, or give this run a folder of its own: trainer.experiment_name or {KEY}",
    )


def seconds_untouched(path: Path) -> float:
    """Returns the age of the last touch by the clock of the file system, which nodes share. If that clock was set back
    since, the file is touched: its age counts from now on."""
    probe = path.with_name(f"{NAME}.{os.getpid()}")
    probe.touch()
    try:
        age = probe.stat().st_mtime - path.stat().st_mtime
        if age < 0:
            os.utime(path)
        return max(0.0, age)
    finally:
        probe.unlink(missing_ok=True)


def this_process() -> Owner:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"user {os.getuid()}"
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:3]]) if sys.argv else "python"
    return Owner(user, socket.gethostname(), boot_id(), os.getpid(), since, command[:200], uuid.uuid4().hex)


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"node-{uuid.getnode():x}"


def runs_here(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_owner(file: int) -> Owner | None:
    try:
        fields: Any = json.loads(os.pread(file, 65536, 0))
        return Owner(**fields)
    except (ValueError, TypeError):
        return None


def write_owner(file: int, owner: Owner) -> None:
    text = json.dumps(asdict(owner)).encode()
    os.ftruncate(file, 0)
    os.pwrite(file, text, 0)
    os.fsync(file)


def identity(file: int | Path) -> tuple[int, int] | None:
    """Returns device and inode; None if there is no such file."""
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
