"""The seccomp filter, run by a slow machine of ours for both processors, and checked against the system's headers."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from paddock.sandbox.inside import seccomp
from paddock.sandbox.inside.seccomp import ABSENCE, ALLOW, FORBIDDEN, KILL, MACHINES, NUMBERS, REFUSAL

ERRORS = (ABSENCE, REFUSAL, seccomp.DENIAL, seccomp.NO_SUPPORT)
HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}


def answer(machine: str, number: int, *arguments: int, arch: int | None = None, socket: int = KILL) -> int:
    """What the kernel would do: the stricter answer of both filters. struct seccomp_data is the number, the machine,
    the address, and six arguments."""
    six = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("<IIQ6Q", number, MACHINES[machine] if arch is None else arch, 0, *six)
    both = seccomp.assembled(socket, machine), seccomp.assembled_last(machine)
    return min((run(program, data) for program in both), key=[KILL, *ERRORS, ALLOW].index)


def run(program: bytes, data: bytes) -> int:
    code = [struct.unpack("<HBBI", word) for word in re.findall(b"(?s).{8}", program)]
    place = held = 0
    while True:
        operation, if_true, if_false, value = code[place]
        place += 1
        if operation == 0x20:  # load a word
            (held,) = struct.unpack_from("<I", data, value)
        elif operation == 0x54:
            held &= value
        elif operation == 0x06:
            return value
        else:
            true = {0x15: held == value, 0x25: held > value, 0x45: bool(held & value)}[operation]
            place += if_true if true else if_false


@pytest.mark.parametrize("machine", list(MACHINES))
def test_every_listed_call_gets_its_answer_and_every_other_passes(machine):
    numbers = NUMBERS[machine]
    special = {numbers[name] for name in seccomp.BY_ARGUMENT}
    forbidden = {numbers[name] for name in FORBIDDEN if name in numbers}
    absent = {numbers[name] for name in seccomp.ABSENT if name in numbers}
    unsupported = {numbers[name] for name in seccomp.UNSUPPORTED}
    answers = ((forbidden, KILL), (absent, ABSENCE), (unsupported, seccomp.NO_SUPPORT))
    for number in set(range(seccomp.NEWEST + 1)) - special:
        expected = next((expected for some, expected in answers if number in some), ALLOW)
        assert answer(machine, number) == expected, number
    assert answer(machine, seccomp.NEWEST + 1) == ABSENCE
    assert len(forbidden) > 35


@pytest.mark.parametrize("machine", list(MACHINES))
def test_sockets_of_this_machine_alone_and_children_without_namespaces_are_allowed(machine):
    socket, clone = (NUMBERS[machine][name] for name in ("socket", "clone"))
    assert answer(machine, socket, 1) == ALLOW
    assert {answer(machine, socket, family) for family in (0, 2, 10, 16, 17, 40)} == {KILL}
    assert {answer(machine, socket, family, socket=seccomp.DENIAL) for family in (2, 10)} == {seccomp.DENIAL}
    assert answer(machine, clone, 0x01200011) == ALLOW  # fork
    assert answer(machine, clone, 0x003D0F00) == ALLOW  # a thread
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(machine, clone, flag | 17) == KILL


@pytest.mark.parametrize("machine", list(MACHINES))
def test_pairs_of_sockets_are_of_this_machine_too(machine):
    pair = NUMBERS[machine]["socketpair"]
    assert (answer(machine, pair, 1), answer(machine, pair, 30)) == (ALLOW, KILL)


@pytest.mark.parametrize("machine", list(MACHINES))
def test_another_process_cannot_be_limited_or_scheduled(machine):
    numbers = NUMBERS[machine]
    for name in seccomp.OWN_PROCESS:
        assert answer(machine, numbers[name], 0) == ALLOW
        assert {answer(machine, numbers[name], pid) for pid in (1, 2, 77, 0xFFFFFFFF)} == {REFUSAL}, name
    for name, process in (("setpriority", 0), ("ioprio_set", 1)):
        assert answer(machine, numbers[name], process, 0) == ALLOW
        assert answer(machine, numbers[name], process, 1) == REFUSAL
        assert {answer(machine, numbers[name], kind, 0) for kind in range(4) if kind != process} == {REFUSAL}


@pytest.mark.parametrize("machine", list(MACHINES))
def test_memory_that_no_process_has_cannot_be_made(machine):
    numbers = NUMBERS[machine]
    private, shared, validated, anonymous = 2, 1, 3, 0x20
    for flags in (private, shared, validated, private | anonymous, private | anonymous | 0x4000):
        assert answer(machine, numbers["mmap"], 0, 4096, 3, flags) == ALLOW
    for flags in (shared | anonymous, validated | anonymous, shared | anonymous | 0x8000, 0x100000021):
        assert answer(machine, numbers["mmap"], 0, 4096, 3, flags) == REFUSAL
    for option, expected in ((7, REFUSAL), (32, REFUSAL), (2, ALLOW), (8, ALLOW)):
        assert answer(machine, numbers["setsockopt"], 5, 1, option) == expected
    for command, expected in ((1031, REFUSAL), (37, REFUSAL), (38, REFUSAL), (6, ALLOW), (2, ALLOW), (1030, ALLOW)):
        assert answer(machine, numbers["fcntl"], 5, command) == expected
    for option in (22, 35, 62, 78):
        assert answer(machine, numbers["prctl"], option) == REFUSAL
    for option in (4, 15, 38, 0x53564D41):
        assert answer(machine, numbers["prctl"], option) == ALLOW


def test_the_calls_of_another_processor_are_not_judged_by_this_ones_numbers():
    read = 0
    assert answer("x86_64", read) == ALLOW
    assert answer("x86_64", read, arch=0x40000003) == KILL  # 32-bit code in a 64-bit program
    assert answer("x86_64", read | 0x40000000) == KILL  # 32-bit pointers
    assert answer("aarch64", read, arch=MACHINES["x86_64"]) == KILL


@pytest.mark.parametrize("machine", list(MACHINES))
def test_numbers_are_those_of_the_systems_headers(machine):
    header = next((Path(path) for path in HEADERS[machine] if Path(path).is_file()), None)
    if header is None:
        pytest.skip("the kernel's headers are not installed")
    known = dict(re.findall(r"#define __NR3?2?6?4?_?(\w+)\s+(\d+)", header.read_text()))
    known |= {name: number for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", header.read_text())}
    ours = NUMBERS[machine]
    assert {name: number for name, number in ours.items() if name in known and int(known[name]) != number} == {}
    assert len(set(ours) & set(known)) > len(ours) - 6
