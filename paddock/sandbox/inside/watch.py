"""Counts what a program holds: the memory of all its processes, and what the kernel holds for them.

A program's resident memory is only a part of what it takes from the machine. Beside it there are page tables and
records of mappings, tasks, locks, files in the folders it may write to, its output, and the buffers of its pipes and
sockets. Each has an upper bound that /proc tells quickly. While the sum of the bounds is below the limit, nothing more
is read; else each is counted as exactly as it can be. What cannot be counted at all is denied: see seccomp.py.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")
PIPE = 16 * PAGE  # bytes that a pipe holds at most, as long as its size cannot be changed
SENT = 2  # a socket's messages take at most twice its send buffer: the last one may pass it
DATAGRAMS = 11  # messages of other senders that a datagram socket holds at most; so many are in its queue
TASK = 64 << 10  # bytes of kernel memory per thread: its stack, its record, its table of open files
MAPPING, MOST_MAPPINGS = 320, 65530  # bytes per mapping, and how many a process has by default at most
INODE = 2 << 10  # bytes per file in a folder of memory: inode, name, attributes
LOCK, WATCH = 256, 256  # bytes per file lock, and per watch of an epoll instance
MOST_LOCKS, LOCKS_READ = 4096, 1 << 20  # locks that a program may have, and bytes that are read to count them
NUMBERS = 256  # watches that an epoll instance can have per open file: one for each number that it ever had
FILE = 1 << 10  # bytes per open file
READ = 1 << 16
UNKNOWN = 1 << 62  # more than was read: beyond every limit
FASTEST = 4 << 30  # bytes per second that one processor can fill
TURNS = 8  # lists of a process' threads in which a living one must be found
SHORTEST, LONGEST = 0.001, 0.05  # seconds between two looks
FIELDS = re.compile(r"^(Threads|VmSize|VmRSS|VmPTE|VmSwap|HugetlbPages):\s+(\d+)", re.MULTILINE)


class Process(NamedTuple):
    name: str
    memory: str
    """Folder of /proc that shows its memory: a living thread's where the first thread has ended."""
    threads: int
    size: int
    """Bytes of address space."""
    resident: int
    beside: int
    """Bytes that `resident` leaves out: page tables, swapped pages and huge pages."""


class World:
    """The processes that were started after it was made, and the files they can write to.

    `proc` is a /proc that shows them; without one nothing is seen. `folders` are file systems in memory, `streams`
    descriptors of files in memory. `crowded`: that /proc shows the whole machine's processes, under other numbers.
    """

    def __init__(
        self, proc: int | None, folders: Sequence[str], streams: Sequence[int], send_buffer: int, crowded: bool
    ):
        self.proc, self.folders, self.streams, self.send_buffer = proc, folders, streams, send_buffer
        self.own = os.readlink("self", dir_fd=proc) if crowded else None
        self.others = {*self._names(), str(os.getpid())} if self.own is None else set()
        self.held = 0
        """Bytes, as far as the last look had to count."""

    def passed(self, limits: dict[str, Any], deadline: float = math.inf) -> str | None:
        """The limit that all processes together are beyond. After `deadline` locks are no longer read."""
        if self.proc is None:
            return None
        own = [found for name in self._names() if name not in self.others if (found := self._process(name))]
        tasks = sum(process.threads for process in own)
        if tasks > limits["processes"] + 1:  # the judge is one
            return "processes"
        most = limits["memory_mb"] << 20
        files = self._in_files() + self._in_locks(own, deadline) + tasks * TASK
        for count in (self._at_most, self._resident, self._shared):
            self.held = files + count(own)
            if self.held <= most:
                return None
        return "memory"

    def pause(self, limits: dict[str, Any]) -> float:
        """Seconds in which the program cannot have gone from what it held to its limit."""
        if limits["bounded"]:  # by the kernel too
            return LONGEST
        left = (limits["memory_mb"] << 20) - self.held
        speed = FASTEST * min(os.cpu_count() or 1, limits["processes"])
        return min(max(left / speed, SHORTEST), LONGEST)

    def _at_most(self, own: Sequence[Process]) -> int:
        """Bounds that need no look at single mappings or open files."""
        mapped = sum(process.size + process.beside + MAPPING * MOST_MAPPINGS for process in own)
        counts = [self._open_files(task) for task in self._tasks(own)]
        watches = sum((count // 2) ** 2 * NUMBERS * WATCH for count in counts)
        return mapped + sum(counts) * max(PIPE, FILE) + watches + self._in_sockets()

    def _resident(self, own: Sequence[Process]) -> int:
        """Counts pages that several processes share once for each."""
        pages = sum(process.resident + process.beside + self._in_mappings(process) for process in own)
        return pages + self._in_open_files(own) + self._in_sockets()

    def _shared(self, own: Sequence[Process]) -> int:
        """Divides pages by the number of processes that share them, which takes longer to find."""
        return self._resident(own) - sum(process.resident - self._share(process) for process in own)

    def _names(self) -> list[str]:
        """Processes, this one and its elders too unless it must look for its children."""
        if self.proc is None:
            return []
        if self.own is None:
            return [name for name in os.listdir(self.proc) if name.isdigit()]
        found: list[str] = []
        frontier = [self.own]
        while frontier and len(found) < READ:
            tasks = [f"{name}/task/{task}" for name in frontier for task in self._listed(f"{name}/task") or ()]
            frontier = [child for task in tasks for child in self._read(f"{task}/children").split()]
            found += frontier
        return found

    def _process(self, name: str) -> Process | None:
        memory, found = name, self._status(name)
        if not found:
            return None
        if "VmRSS" not in found and found["Threads"] > 1:
            memory, found = self._living(name, found)
        threads, size, resident = (found.pop(key, 0) for key in ("Threads", "VmSize", "VmRSS"))
        return Process(name, memory, threads, size << 10, resident << 10, sum(found.values()) << 10)

    def _living(self, name: str, first: dict[str, int]) -> tuple[str, dict[str, int]]:
        """The folder and the status of a living thread. The first one of the process has ended, and shows no memory.

        Threads may take turns, each of which ends before it is read. If no new one appears, the process is ending.
        """
        seen: set[str] = set()
        for _ in range(TURNS):
            fresh = {f"{name}/task/{task}" for task in self._listed(f"{name}/task") or ()} - seen
            if not fresh:
                return name, first
            for task in fresh:
                if "VmRSS" in (found := self._status(task)):
                    return task, found
            seen |= fresh
        return name, first | {"VmSize": UNKNOWN >> 10, "VmRSS": UNKNOWN >> 10}

    def _status(self, task: str) -> dict[str, int]:
        return {key: int(value) for key, value in FIELDS.findall(self._read(f"{task}/status"))}

    def _share(self, process: Process) -> int:
        lines = self._read(f"{process.memory}/smaps_rollup").splitlines()
        share = next((line for line in lines if line.startswith("Pss:")), None)
        return int(share.split()[1]) * 1024 if share else process.resident

    def _in_mappings(self, process: Process) -> int:
        count = self._lines(f"{process.memory}/maps", 16 * READ, MOST_MAPPINGS)
        if not count and process.memory != process.name:  # the thread has ended since
            count = MOST_MAPPINGS
        return MAPPING * min(count, MOST_MAPPINGS)

    def _tasks(self, own: Iterable[Process]) -> list[str]:
        """Folders of /proc, one for each thread: threads can have open files of their own."""
        tasks = []
        for process in own:
            if process.threads == 1:
                tasks.append(process.name)
            else:
                names = self._listed(f"{process.name}/task")
                tasks += [f"{process.name}/task/{name}" for name in names or ()]
        return tasks

    def _open_files(self, task: str) -> int:
        """Counts the open files of a task. Before Linux 6.2 the size of its folder does not tell."""
        with suppress(OSError):
            if count := os.stat(f"{task}/fd", dir_fd=self.proc).st_size:
                return count
        names = self._listed(f"{task}/fd")
        return READ if names is None else len(names)

    def _in_open_files(self, own: Sequence[Process]) -> int:
        """Counts each pipe once, whoever has it open. Sockets are counted elsewhere."""
        pipes: set[tuple[int, int]] = set()
        count = watches = 0
        for task in self._tasks(own):
            for name in self._listed(f"{task}/fd") or ():
                count += 1
                try:
                    found = os.stat(f"{task}/fd/{name}", dir_fd=self.proc)
                except OSError:
                    continue
                if stat.S_ISFIFO(found.st_mode):
                    pipes.add((found.st_dev, found.st_ino))
                elif stat.S_IFMT(found.st_mode) == 0:  # an object of the kernel without a file
                    watches += self._lines(f"{task}/fdinfo/{name}", READ, UNKNOWN)
        return count * FILE + len(pipes) * PIPE + watches * WATCH

    def _in_sockets(self) -> int:
        """Counts all sockets of the network namespace, which is the cell's: also those that no process has open."""
        text = self._read("self/net/unix", READ + 1)
        if len(text) > READ:
            return UNKNOWN
        kinds = [words[4] for line in text.splitlines()[1:] if len(words := line.split()) > 4]
        messages = sum(DATAGRAMS if kind == "0002" else SENT for kind in kinds)
        return messages * self.send_buffer

    def _in_locks(self, own: Sequence[Process], deadline: float) -> int:
        """Counts the locks of these processes: a /proc that shows the whole machine shows all its locks.

        The kernel writes a page of whole lines per read, and lets all who lock and unlock wait meanwhile: none is read
        after the first lock that is too many, nor after the program's time.
        """
        processes = {process.name for process in own}
        count = 0
        with suppress(OSError):
            for part in self._parts("locks", LOCKS_READ):
                count += sum(not processes.isdisjoint(line.split()[4:6]) for line in part.decode().splitlines())
                if count > MOST_LOCKS:
                    return UNKNOWN
                if time.monotonic() > deadline:
                    break
        return count * LOCK

    def _in_files(self) -> int:
        written = sum(os.fstat(stream).st_blocks * 512 for stream in self.streams)
        return written + sum(map(self._in_folder, self.folders))

    def _in_folder(self, folder: str) -> int:
        found = os.statvfs(folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize + (found.f_files - found.f_ffree) * INODE

    def _listed(self, path: str) -> list[str] | None:
        """Lists a folder of /proc; None if it may not be seen, or its process has ended."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)
        except OSError:
            return None
        try:
            return os.listdir(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def _lines(self, path: str, most: int, beyond: int) -> int:
        """`beyond` for a file that has more than `most` bytes: who writes much must not keep the reader busy."""
        text = self._read(path, most + 1)
        return beyond if len(text) > most else text.count("\n")

    def _read(self, path: str, most: int = READ) -> str:
        try:
            return b"".join(self._parts(path, most)).decode(errors="replace")
        except OSError:  # it has ended
            return ""

    def _parts(self, path: str, most: int) -> Iterator[bytes]:
        descriptor = os.open(path, os.O_RDONLY, dir_fd=self.proc)
        try:
            while most > 0 and (part := os.read(descriptor, READ)):
                yield part
                most -= len(part)
        finally:
            os.close(descriptor)
