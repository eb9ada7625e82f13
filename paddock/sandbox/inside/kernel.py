"""System calls that Python 3.11 does not have, each an OSError when it fails. Linux only."""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
KEPT_BY_REMOUNT = {8: MS_NOEXEC, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of statvfs and of mount: what a mount has must stay when it is made read-only without being its owner."""

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522
NOBODY = 65534

_libc: Any = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int, user: int | None = None) -> None:
    """Enters new namespaces. A new user namespace knows one user and group, by the number `user`: this process's own.

    `deny` is what lets an ordinary user say so.
    """
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", flags)
    if user is not None:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{user} {uid} 1")
        write("/proc/self/gid_map", f"{user} {gid} 1")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode() or None)


def make_read_only(path: str) -> None:
    """A bind mount can be made read-only only by mounting it again."""
    kept = sum(flag for seen, flag in KEPT_BY_REMOUNT.items() if os.statvfs(path).f_flag & seen)
    mount("none", path, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def unmount(path: str) -> None:
    _call("umount2", path.encode(), MNT_DETACH)


def pivot_root(root: str, old: str) -> None:
    """`root`, which is a mount, becomes the root, and the old one is found at its folder `old`; at "." for no place."""
    os.chdir(root)
    _call("syscall", {"x86_64": 155, "aarch64": 41}[os.uname().machine], b".", old.encode())
    if old == ".":
        unmount(".")
    os.chdir("/")


def mount_empty(path: str, megabytes: int) -> None:
    options = f"size={megabytes}m,nr_inodes=16k,mode=1777"
    mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, options)


def prctl(option: int, value: int = 0, more: Any = 0) -> None:
    _call("prctl", option, ctypes.c_ulong(value), more, 0, 0)


def become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_DUMPABLE, 1)  # a change of user takes away one's own files in /proc


def drop_capabilities() -> None:
    """All of them, for good: what is executed later gets none back."""
    capability = 0
    while True:
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the last one that this kernel knows, or none may be dropped because none is held
            break
        capability += 1
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def install_filter(program: bytes) -> None:
    """Installs a seccomp filter, given as its assembled instructions of 8 bytes."""

    class FilterProgram(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(FilterProgram(len(program) // 8, program)))


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def limit(kind: int, value: int) -> None:
    """Never above what this process was given itself."""
    _, most = resource.getrlimit(kind)
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


def counts_processes_by_namespace() -> bool:
    """From Linux 5.14 on RLIMIT_NPROC counts the processes of a user namespace, not all of the user's."""
    version = os.uname().release.split("-")[0].split(".")
    return tuple(int(number) for number in version[:2] if number.isdigit()) >= (5, 14)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
