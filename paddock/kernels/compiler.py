"""Compiles cpu/kernels.cpp for the machine at hand. The result stays in the user's cache, for its processor alone."""

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

from paddock.facts.machine import cache_folder
from paddock.facts.processor import processor_flags

log = logging.getLogger(__name__)

FOLDER = Path(__file__).with_name("cpu")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
COMPILERS = ("g++", "c++", "clang++")


@cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled library; None without a compiler that makes it: then torch's own operations do the work."""
    compiler = find_compiler()
    if compiler is None:
        log.info("no C++ compiler (%s): some steps take longer on this CPU", ", ".join(COMPILERS))
        return None
    threads, said = openmp(), ""
    if threads:
        ctypes.CDLL(threads, ctypes.RTLD_GLOBAL)  # torch's own threads, found by name when the library is opened
    for by_threads in ("-fopenmp", "-fopenmp-simd") if threads else ("-fopenmp-simd",):  # some compilers want others
        try:
            return ctypes.CDLL(str(compiled(compiler, [*FLAGS, *for_processor(), by_threads])))
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()[-500:]
    log.info("%s cannot compile this CPU's kernels, some steps take longer: %s", compiler, said)
    return None


def find_compiler() -> str | None:
    """The path of the C++ compiler: the one that $CXX names, else the first that is installed."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), *COMPILERS)))), None)


def compiled(compiler: str, flags: list[str]) -> Path:
    sources = [file.read_text() for file in sorted(FOLDER.iterdir())]
    processor = sorted(processor_flags()) or platform.processor()  # others may read the same cache
    identity = (sources, compiler, flags, platform.machine(), processor)
    name = f"native-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}.so"
    try:
        folder = cache_folder("kernels")
        if (folder / name).exists():
            return folder / name
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder)
    except (OSError, RuntimeError):  # a cache that cannot be written, or no home, costs time and not the run
        folder = Path(tempfile.mkdtemp(prefix="paddock-kernels-"))
        scratch = tempfile.TemporaryDirectory(dir=folder)
    log.info("compiling kernels for this CPU, once")
    with scratch as place:
        part, whole = os.path.join(place, "native.o"), os.path.join(place, name)
        for command in ([*flags, "-c", str(FOLDER / "kernels.cpp"), "-o", part], ["-shared", part, "-o", whole]):
            subprocess.run([compiler, *command], check=True, capture_output=True, text=True, timeout=300)
        os.replace(whole, folder / name)
    return folder / name


def openmp() -> str | None:
    """The file of the threads that torch uses: a second kind beside them would fight for the same cores."""
    try:
        files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    except OSError:
        return None
    found = [file for file in files if os.path.basename(file).startswith(("libgomp", "libiomp"))]
    return min(found, key=lambda file: ("/torch/" not in file, file), default=None)


def for_processor() -> list[str]:
    if platform.machine() in ("x86_64", "AMD64"):
        return ["-march=native", "-mprefer-vector-width=512"]
    return ["-mcpu=native"]
