"""The system calls that a program is denied, as a filter for the kernel's packet filter machine.

FORBIDDEN ends the program: no honest answer asks for these, and a cause of its own is counted. ABSENT behave as if the
kernel had none of them, since libraries try some and do without. So does every call newer than the tables.

What is left needs no privilege and reaches nothing beyond the namespaces. ABSENT also has the ways to take memory that
belongs to no process, and would escape the count of a program's memory.
"""

from __future__ import annotations

import os
import struct

AF_UNIX = 1
NAMESPACES = 0x7E020000  # every CLONE_NEW* flag of clone
ALLOW, KILL, ABSENCE, DENIAL = 0x7FFF0000, 0x80000000, 0x50000 | 38, 0x50000 | 13  # and ENOSYS, EACCES
NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16  # offsets of struct seccomp_data
LOAD, RETURN, EQUAL, ABOVE, ANY_BIT = 0x20, 0x06, 0x15, 0x25, 0x45  # instructions on 32-bit words
NEWEST = 462  # mseal; later ones are ABSENT
X32 = 0x3FFFFFFF  # numbers above are those of x86-64's 32-bit pointers

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SINCE_COMMON = {  # from Linux 5.1 on all machines have the same numbers
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
}  # fmt: skip
NUMBERS = {
    "x86_64": SINCE_COMMON | {
        "shmget": 29, "socket": 41, "clone": 56, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103,
        "uselib": 134, "personality": 135, "vhangup": 153, "modify_ldt": 154, "pivot_root": 155, "chroot": 161,
        "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
        "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "nfsservctl": 180,
        "lookup_dcookie": 212, "clock_settime": 227, "mq_open": 240, "kexec_load": 246, "add_key": 248,
        "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "fanotify_init": 300,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320,
        "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": SINCE_COMMON | {
        "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "nfsservctl": 42, "chroot": 51,
        "vhangup": 58, "quotactl": 60, "acct": 89, "personality": 92, "unshare": 97, "kexec_load": 104,
        "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142,
        "settimeofday": 170, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198,
        "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "swapon": 224, "swapoff": 225,
        "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
ABSENT = (
    "clone3",  # its flags lie in memory, where a filter cannot look; libraries fall back to clone
    "io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "personality", "modify_ldt",
    "name_to_handle_at", "memfd_create", "memfd_secret", "shmget", "semget", "msgget", "mq_open",
)  # fmt: skip
BY_ARGUMENT = ("socket", "clone")
FORBIDDEN = tuple(name for name in NUMBERS["x86_64"] if name not in (*ABSENT, *BY_ARGUMENT))


def assembled(socket: int = KILL, machine: str | None = None) -> bytes:
    """The filter for this machine, or for the named one. `socket` answers who opens one to the outside."""
    machine = machine or os.uname().machine
    numbers = NUMBERS[machine]
    code = [
        _word(LOAD, MACHINE),
        *_unless(EQUAL, MACHINES[machine], KILL),
        _word(LOAD, NUMBER),
        *(_when(ABOVE, X32, KILL) if machine == "x86_64" else ()),
        *_when(ABOVE, NEWEST, ABSENCE),
    ]
    for names, answer in ((FORBIDDEN, KILL), (ABSENT, ABSENCE)):
        for name in names:
            if name in numbers:
                code += _when(EQUAL, numbers[name], answer)
    for name, test in (
        ("socket", _unless(EQUAL, AF_UNIX, socket)),
        ("clone", _when(ANY_BIT, NAMESPACES, KILL)),
    ):
        body = [_word(LOAD, FIRST_ARGUMENT), *test, _word(RETURN, ALLOW)]
        code += [_word(EQUAL, numbers[name], 0, len(body)), *body]
    return b"".join([*code, _word(RETURN, ALLOW)])


def _word(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)


def _when(test: int, value: int, answer: int) -> list[bytes]:
    return [_word(test, value, 0, 1), _word(RETURN, answer)]


def _unless(test: int, value: int, answer: int) -> list[bytes]:
    return [_word(test, value, 1, 0), _word(RETURN, answer)]
