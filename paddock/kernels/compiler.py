"""Compiles native.cpp for the machine at hand. The result stays in the user's cache, for its processor alone."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from paddock.core.cache import cache_folder

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("g++", "c++", "clang++")


@cache
def library() -> ctypes.CDLL | None:
    """None where there is no compiler, or none that makes it: then torch's own operations do the work."""
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), *COMPILERS)))), None)
    if compiler is None:
        log.info("no C++ compiler (%s): some steps take longer on this CPU", ", ".join(COMPILERS))
        return None
    threads = openmp()
    flags = [*FLAGS, *for_processor(), "-fopenmp" if threads else "-fopenmp-simd"]
    try:
        if threads:
            ctypes.CDLL(threads, ctypes.RTLD_GLOBAL)  # torch's own threads, found by name when the library is opened
        return ctypes.CDLL(str(compiled(compiler, flags)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.info("%s cannot compile this CPU's kernels, some steps take longer: %s", compiler, said.strip()[-500:])
        return None


def compiled(compiler: str, flags: list[str]) -> Path:
    identity = (SOURCE.read_text(), compiler, *flags, platform.machine(), processor())
    name = f"native-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}.so"
    known = cache_folder("kernels") / name
    if known.exists():
        return known
    log.info("compiling kernels for this CPU, once")
    folder = known.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder)
    except OSError:  # a cache that cannot be written costs time, not the run
        folder = Path(tempfile.mkdtemp(prefix="paddock-kernels-"))
        scratch = tempfile.TemporaryDirectory(dir=folder)
    with scratch as place:
        part, whole = os.path.join(place, "native.o"), os.path.join(place, name)
        for command in ([*flags, "-c", str(SOURCE), "-o", part], ["-shared", part, "-o", whole]):
            subprocess.run([compiler, *command], check=True, capture_output=True, text=True, timeout=300)
        os.replace(whole, folder / name)
    return folder / name


def openmp() -> str | None:
    """The file of the threads that torch uses: a second kind beside them would fight for the same cores."""
    try:
        files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return None
    return next((file for file in sorted(files) if os.path.basename(file).startswith(("libgomp", "libiomp"))), None)


def for_processor() -> list[str]:
    if platform.machine() in ("x86_64", "AMD64"):
        return ["-march=native", "-mprefer-vector-width=512"]
    return ["-mcpu=native"]


def processor() -> str:
    """What tells this processor from another that may read the same cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
