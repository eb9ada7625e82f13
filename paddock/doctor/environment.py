"""Facts about this machine, each found by looking: processors, memory, disk, accelerators, compiler, sandbox, hub."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paddock import __version__
from paddock.doctor.extras import Found, find_extras
from paddock.errors import UserError
from paddock.facts.machine import GIB, cache_folder, this_machine
from paddock.runs.record import cpu_name, version_of

CORE = ("torch", "transformers", "datasets", "pyarrow", "omegaconf", "hydra-core", "math-verify")
CONTROL_GROUP = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
HUB = "https://huggingface.co"
HUB_SECONDS = 5.0


@dataclass(frozen=True)
class Sandbox:
    """Says if programs that a model wrote can be isolated here, by what, and what to do if not."""

    works: bool
    isolation: str | None
    guard: str | None
    """Names what bounds a program's memory."""
    reason: str | None
    fix: str | None


@dataclass(frozen=True)
class Accelerators:
    kind: str
    """cuda, npu or cpu: what torch can use in this process."""
    devices: list[str]
    """Name and memory of each."""
    seen_by_system: int
    """Device files, whether torch can use them or not."""
    problem: str | None
    fix: str | None


@dataclass(frozen=True)
class Hub:
    endpoint: str
    offline: bool
    """True if HF_HUB_OFFLINE is set."""
    answers: bool | None
    """None if the hub was not asked."""
    said: str | None


@dataclass(frozen=True)
class MachineReport:
    paddock: str
    python: str
    system: str
    processor: str
    cores: int
    memory_gib: float
    memory_free_gib: float | None
    memory_limit_gib: float | None
    """Memory limit of the control group (a container's), if it is below the machine's memory."""
    disk_free_gib: dict[str, float]
    packages: dict[str, str | None]
    compiler: str | None
    kernels_compiled: int
    """Libraries of CPU kernels in the cache."""
    accelerators: Accelerators
    extras: list[Found]
    sandbox: Sandbox
    hub: Hub
    cache: str


def look(network: bool = False) -> MachineReport:
    """Returns all facts. It takes seconds: torch is imported, and a sandbox is started once."""
    machine = this_machine()
    cache, temporary = cache_folder(""), Path(os.environ.get("TMPDIR") or "/tmp")
    return MachineReport(
        paddock=__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=cpu_name(),
        cores=machine.cores,
        memory_gib=machine.memory / GIB,
        memory_free_gib=free_memory(),
        memory_limit_gib=memory_limit(machine.memory),
        disk_free_gib={str(folder): free_disk(folder) for folder in dict.fromkeys((Path.cwd(), cache, temporary))},
        packages={name: version_of(name) for name in CORE},
        compiler=compiler(),
        kernels_compiled=len([*cache_folder("kernels").glob("native-*.so")]),
        accelerators=accelerators(machine.devices),
        extras=find_extras(),
        sandbox=sandbox(),
        hub=hub(network),
        cache=str(cache),
    )


def free_memory() -> float | None:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 / GIB
    return None


def memory_limit(whole: int) -> float | None:
    for file in CONTROL_GROUP:
        with suppress(OSError, ValueError):
            limit = int(Path(file).read_text())
            if limit < whole:
                return limit / GIB
    return None


def free_disk(folder: Path) -> float:
    """Returns the free GiB of the disk that holds the folder, or its nearest parent that exists."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free / GIB


def compiler() -> str | None:
    """Returns path and version of the C++ compiler; None if there is none."""
    from paddock.kernels.compiler import find_compiler

    found = find_compiler()
    if found is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10).stdout
        return f"{found}: {said.splitlines()[0]}" if said else found
    return found


def accelerators(seen: int) -> Accelerators:
    try:
        from paddock.core.device import describe_devices, device_type
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        return Accelerators(
            "cpu", [], seen, f"torch cannot be imported: {reason}", "pip install --force-reinstall torch"
        )
    kind = device_type()
    problem = fix = None
    if seen and kind == "cpu":
        problem = f"the system has {seen} accelerator(s), and torch {version_of('torch')} cannot use them"
        fix = "install a torch build for this accelerator and its driver, as pytorch.org/get-started says"
    return Accelerators(kind, describe_devices(kind), seen, problem, fix)


def sandbox() -> Sandbox:
    """Starts the sandbox of this machine with the config's defaults, and ends it."""
    from paddock.sandbox.local import LocalSandbox
    from paddock.sandbox.program import default_settings

    try:
        with LocalSandbox(default_settings()) as started:
            return Sandbox(True, started.isolation, started.guard, None, None)
    except UserError as error:
        return Sandbox(False, None, None, error.reason, error.fix)


def hub(network: bool) -> Hub:
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if not network:
        return Hub(endpoint, offline, None, None)
    start = time.monotonic()
    try:
        with urllib.request.urlopen(f"{endpoint}/api/models?limit=1", timeout=HUB_SECONDS) as answer:
            return Hub(endpoint, offline, answer.status == 200, f"{time.monotonic() - start:.1f} s")
    except (urllib.error.URLError, OSError, ValueError) as error:
        return Hub(endpoint, offline, False, str(getattr(error, "reason", error)))
