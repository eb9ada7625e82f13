"""The system calls that a program is denied, as a filter for the kernel's packet filter machine.

FORBIDDEN ends the program: no honest answer asks for these, and a cause of its own is counted. ABSENT behave as if the
kernel had none of them, since libraries try some and do without. So does every call newer than the tables. UNSUPPORTED
behave as on a file system without attributes.

The filter leaves only calls that need no privilege and reach nothing beyond the namespaces. It also denies two kinds:

* Kernel memory that no count of a program's memory can see: files without a name, access lists of files, queues, rings
  and watches; buffers larger than the default; pages that only a pipe or a socket holds (splice); pages of a shared
  anonymous mapping, which stay after all but one of them are unmapped.
* A process id as an argument where 0 means oneself (OWN_PROCESS): the judge has the program's user, and would obey.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence

AF_UNIX = 1
NAMESPACES = 0x7E020000  # every CLONE_NEW* flag of clone
SHARED_ANONYMOUS = 0x21  # flags of mmap
SEND_BUFFERS = (7, 32)  # SO_SNDBUF, SO_SNDBUFFORCE of setsockopt
DENIED_FCNTL = (36, 37, 38, 1024, 1026, 1031)
"""F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW, whose locks /proc does not attribute; F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ."""
SET_FILTER, SET_MAPPING = 22, 35  # PR_SET_SECCOMP, PR_SET_MM
LAST_PRCTL, NAME_MAPPING = 61, 0x53564D41  # later options allocate per process; PR_SET_VMA is one that libraries use
ALLOW, KILL = 0x7FFF0000, 0x80000000
ABSENCE, DENIAL, REFUSAL = 0x50000 | 38, 0x50000 | 13, 0x50000 | 1  # ENOSYS, EACCES, EPERM
NO_SUPPORT = 0x50000 | 95  # EOPNOTSUPP
NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16  # offsets of struct seccomp_data; an argument has 8 bytes
LOAD, AND, RETURN, EQUAL, ABOVE, ANY_BIT = 0x20, 0x54, 0x06, 0x15, 0x25, 0x45  # instructions on 32-bit words
NEWEST = 462  # mseal; later ones, as setxattrat, are ABSENT
X32 = 0x3FFFFFFF  # numbers above are those of x86-64's 32-bit pointers

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SINCE_COMMON = {  # from Linux 5.1 on all machines have the same numbers
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "landlock_create_ruleset": 444,
    "landlock_add_rule": 445, "landlock_restrict_self": 446, "memfd_secret": 447, "process_mrelease": 448,
    "set_mempolicy_home_node": 450,
}  # fmt: skip
NUMBERS = {
    "x86_64": SINCE_COMMON | {
        "mmap": 9, "shmget": 29, "sendfile": 40, "socket": 41, "sendmsg": 46, "socketpair": 53, "setsockopt": 54,
        "clone": 56, "semget": 64, "msgget": 68, "fcntl": 72, "ptrace": 101, "syslog": 103, "uselib": 134,
        "personality": 135, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144, "vhangup": 153,
        "modify_ldt": 154, "pivot_root": 155, "prctl": 157, "chroot": 161, "sync": 162, "acct": 163,
        "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "iopl": 172,
        "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "nfsservctl": 180,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
        "sched_setaffinity": 203, "io_setup": 206, "lookup_dcookie": 212, "clock_settime": 227,
        "mbind": 237, "set_mempolicy": 238, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249,
        "keyctl": 250, "ioprio_set": 251, "inotify_init": 253, "migrate_pages": 256, "unshare": 272, "splice": 275,
        "tee": 276, "vmsplice": 278, "move_pages": 279, "inotify_init1": 294,
        "perf_event_open": 298, "fanotify_init": 300, "prlimit64": 302, "name_to_handle_at": 303,
        "open_by_handle_at": 304, "syncfs": 306, "sendmmsg": 307, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "sched_setattr": 314, "seccomp": 317,
        "memfd_create": 319, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": SINCE_COMMON | {
        "io_setup": 0, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7,
        "lookup_dcookie": 18, "fcntl": 25, "inotify_init1": 26, "ioprio_set": 30,
        "umount2": 39, "mount": 40, "pivot_root": 41, "nfsservctl": 42, "chroot": 51, "vhangup": 58, "quotactl": 60,
        "sendfile": 71, "vmsplice": 75, "splice": 76, "tee": 77, "sync": 81, "acct": 89, "personality": 92,
        "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112,
        "syslog": 116, "ptrace": 117, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
        "setpriority": 140, "reboot": 142, "prctl": 167, "settimeofday": 170, "mq_open": 180, "msgget": 186,
        "semget": 190, "shmget": 194, "socket": 198, "socketpair": 199, "setsockopt": 208, "sendmsg": 211,
        "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "mmap": 222, "swapon": 224, "swapoff": 225,
        "mbind": 235, "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241,
        "prlimit64": 261, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265, "syncfs": 267,
        "setns": 268, "sendmmsg": 269, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "finit_module": 273, "sched_setattr": 274, "seccomp": 277, "memfd_create": 279, "bpf": 280,
        "userfaultfd": 282, "kexec_file_load": 294,
    },
}  # fmt: skip
ABSENT = (
    "clone3",  # its flags lie in memory, where a filter cannot look; libraries fall back to clone
    "io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "personality", "modify_ldt",
    "name_to_handle_at", "memfd_create", "memfd_secret", "shmget", "semget", "msgget", "mq_open", "io_setup",
    "inotify_init", "inotify_init1", "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self",
    "seccomp", "mbind", "set_mempolicy", "set_mempolicy_home_node", "migrate_pages", "move_pages", "process_madvise",
    "process_mrelease", "sync", "syncfs",
    "splice", "tee", "vmsplice", "sendfile",  # a byte of a page holds the whole page, and counts as a byte
    "sendmsg", "sendmmsg",  # they carry open files, which no process has meanwhile
)  # fmt: skip
UNSUPPORTED = ("setxattr", "lsetxattr", "fsetxattr")
OWN_PROCESS = (
    "prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr",
)  # fmt: skip
"""System calls whose first argument is a process: any but 0, the calling one, is refused."""
OWN_PROCESS_SECOND = {"setpriority": 0, "ioprio_set": 1}
"""System calls whose first argument says what the second is: PRIO_PROCESS or IOPRIO_WHO_PROCESS, with 0, is allowed."""
BY_ARGUMENT = ("socket", "socketpair", "clone", "mmap", "setsockopt", "fcntl", "prctl", *OWN_PROCESS,
               *OWN_PROCESS_SECOND)  # fmt: skip
FOR_ISOLATION = ("unshare", "mount")
"""Forbidden to programs, but not yet to the process that isolates them."""
FORBIDDEN = tuple(name for name in NUMBERS["x86_64"] if name not in (*ABSENT, *UNSUPPORTED, *BY_ARGUMENT))


def assembled(socket: int = KILL, machine: str | None = None) -> bytes:
    """Returns the filter of a cell, for this machine or the named one. `socket` answers who opens one to the outside.

    It allows what is needed to isolate a program: `assembled_last` is installed beside it once that is done.
    The kernel translates a filter when it is installed, which takes longer than all else here; this one is inherited.
    """
    machine = machine or os.uname().machine
    numbers = NUMBERS[machine]
    code = [
        _word(LOAD, MACHINE),
        *_unless(EQUAL, MACHINES[machine], KILL),
        _word(LOAD, NUMBER),
        *(_when(ABOVE, X32, KILL) if machine == "x86_64" else ()),
        *_when(ABOVE, NEWEST, ABSENCE),
    ]
    for names, answer in ((FORBIDDEN, KILL), (ABSENT, ABSENCE), (UNSUPPORTED, NO_SUPPORT)):
        for name in names:
            if name in numbers and name not in FOR_ISOLATION:
                code += _when(EQUAL, numbers[name], answer)
    return b"".join([*code, *_by_argument(_tests(socket), numbers), _word(RETURN, ALLOW)])


def assembled_last(machine: str | None = None) -> bytes:
    """The filter of a program, beside that of its cell: the kernel does what the stricter of both says."""
    machine = machine or os.uname().machine
    numbers = NUMBERS[machine]
    code = [_word(LOAD, NUMBER)]
    for name in FOR_ISOLATION:
        code += _when(EQUAL, numbers[name], KILL)
    filters = {"prctl": [_argument(0), *_when(EQUAL, SET_FILTER, REFUSAL)]}
    return b"".join([*code, *_by_argument(filters, numbers), _word(RETURN, ALLOW)])


def _by_argument(tests: Mapping[str, list[bytes]], numbers: Mapping[str, int]) -> list[bytes]:
    code: list[bytes] = []
    for name, test in tests.items():
        body = [*test, _word(RETURN, ALLOW)]
        code += [_word(EQUAL, numbers[name], 0, len(body)), *body]
    return code


def _tests(socket: int) -> dict[str, list[bytes]]:
    """Instructions that look at the arguments of a call, by its name."""
    outside = [_argument(0), *_unless(EQUAL, AF_UNIX, socket)]
    tests = {
        "socket": outside,
        "socketpair": outside,
        "clone": [_argument(0), *_when(ANY_BIT, NAMESPACES, KILL)],
        "mmap": [_argument(3), _word(AND, SHARED_ANONYMOUS), *_when(EQUAL, SHARED_ANONYMOUS, REFUSAL)],
        "setsockopt": [_argument(2), *_when_any(SEND_BUFFERS, REFUSAL)],
        "fcntl": [_argument(1), *_when_any(DENIED_FCNTL, REFUSAL)],
        "prctl": [
            _argument(0),
            *_when(EQUAL, SET_MAPPING, REFUSAL),
            *_when(EQUAL, NAME_MAPPING, ALLOW),
            *_when(ABOVE, LAST_PRCTL, REFUSAL),
        ],
    }
    tests |= {name: [_argument(0), *_unless(EQUAL, 0, REFUSAL)] for name in OWN_PROCESS}
    for name, process in OWN_PROCESS_SECOND.items():
        tests[name] = [_argument(0), *_unless(EQUAL, process, REFUSAL), _argument(1), *_unless(EQUAL, 0, REFUSAL)]
    return tests


def _argument(place: int) -> bytes:
    """Loads the lower half: the kernel reads no more of these."""
    return _word(LOAD, FIRST_ARGUMENT + 8 * place)


def _when_any(values: Sequence[int], answer: int) -> list[bytes]:
    return [word for value in values for word in _when(EQUAL, value, answer)]


def _word(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", operation, if_true, if_false, value)


def _when(test: int, value: int, answer: int) -> list[bytes]:
    return [_word(test, value, 0, 1), _word(RETURN, answer)]


def _unless(test: int, value: int, answer: int) -> list[bytes]:
    return [_word(test, value, 1, 0), _word(RETURN, answer)]
