"""The device of this process: the only file that names vendors."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import random
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch.multiprocessing.reductions import reduce_tensor

from paddock.errors import UserError
from paddock.facts.processor import multiplies_bf16

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def device_type() -> str:
    """cuda, npu or cpu: what this process can use."""
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # there once torch_npu is imported
    return "npu" if npu is not None and npu.is_available() else "cpu"


def device_of(name: str | None = None) -> torch.device:
    """The device that `trainer.device` names, or the one that is there."""
    kind = name or device_type()
    if kind == "npu":
        load_npu()
    if kind != "cpu" and kind != device_type():
        raise UserError(
            f"this process sees no {kind} device",
            key="trainer.device",
            value=kind,
            fix=f"trainer.device={device_type()}",
        )
    return torch.device(kind) if kind == "cpu" else torch.device(kind, vendor(kind).current_device())


def load_npu() -> None:
    """Imports torch_npu, by which torch learns of Ascend devices."""
    if hasattr(torch, "npu"):
        return
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise UserError(
            f"torch_npu, which teaches torch about Ascend devices, cannot be imported: {error}",
            key="trainer.device",
            value="npu",
            fix="pip install torch_npu of torch's own version, beside CANN; or trainer.device=cuda or cpu",
        ) from error


def vendor(kind: str) -> ModuleType:
    """torch's module for an accelerator: streams, memory and seeds have the same names in each."""
    return getattr(torch, kind)


def collective_backend(kind: str) -> str:
    """torch.distributed's name for what carries tensors between processes; objects go over gloo."""
    carriers = {"cuda": "nccl", "npu": "hccl"}
    return f"cpu:gloo,{kind}:{carriers[kind]}" if kind in carriers else "gloo"


SHARES_FROM = 23000
"""First version of NCCL that lets several ranks join on one device, as the library counts: 2.30.0."""


def share_device(device: torch.device, ranks: int) -> None:
    """Allows this process to join others of the same device; refuses a library of collectives that cannot."""
    key = "trainer.ranks_per_device"
    if device.type != "cuda" or torch.version.hip:
        raise UserError("only NCCL lets ranks share a device", key=key, value=ranks, fix=f"{key}=1")
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    version = ctypes.c_int()  # of the library that is loaded: torch names the one that it was built with
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    if version.value < SHARES_FROM:
        cuda = str(torch.version.cuda).partition(".")[0]
        raise UserError(
            f"NCCL {version.value // 10000}.{version.value // 100 % 100} refuses several ranks on one device",
            key=key, value=ranks, fix=f'pip install --no-deps "nvidia-nccl-cu{cuda}>=2.30"',
        )  # fmt: skip


RESOURCE = {"cuda": "GPU", "npu": "NPU", "cpu": "CPU"}
"""Ray's name for a device; it counts those of NVIDIA and Ascend by itself."""


def shares_memory(device: torch.device) -> bool:
    """True if another process of this machine can read a tensor of this device without a copy."""
    return device.type == "cuda"


class SharedTensor:
    """Names a tensor in a device's memory, so that another process of this machine can open it there.

    Bytes travel, and only `open` touches the device: a process that hands them on needs none. The sender must keep this
    object until the tensor has been read.
    """

    def __init__(self, tensor: torch.Tensor):
        self.tensor: torch.Tensor | None = tensor
        self.handle = pickle.dumps(reduce_tensor(tensor))

    def __getstate__(self) -> dict[str, Any]:
        return {"tensor": None, "handle": self.handle}

    def open(self) -> torch.Tensor:
        function, arguments = pickle.loads(self.handle)
        return function(*arguments)


def synchronize(device: torch.device) -> None:
    """Waits until all that was launched has run."""
    if device.type != "cpu":
        vendor(device.type).synchronize(device)


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copies a tensor of the host without waiting for the device, however large it is: from pinned memory. One of a
    device that comes to the host is waited for."""
    if torch.device(device).type == "cpu":
        return tensor.to(device)
    pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


class Launched:
    """Marks a place in the stream of a device: the work that was launched before it can be waited for, and asked about.
    On a CPU all work is done when it was launched."""

    def __init__(self, device: torch.device):
        self.event: Any = None
        if device.type != "cpu":
            self.event = vendor(device.type).Event()
            self.event.record()

    def wait(self) -> None:
        """Waits until that work is done."""
        if self.event is not None:
            self.event.synchronize()

    def done(self) -> bool:
        return self.event is None or self.event.query()


def can_record(device: torch.device) -> bool:
    """True if launches can be recorded as a graph and replayed at once."""
    return device.type == "cuda"


@cache
def recording_stream() -> Any:
    """Returns the one stream of all recordings: products keep some memory for each stream that they have run on."""
    return torch.cuda.Stream()


class Recording:
    """Graphs of launches that share memory for what is between their inputs and outputs."""

    def __init__(self) -> None:
        self.memory = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that replays the launches of `function`, which does not run now.

        By hand: `torch.cuda.graph` gives all memory that torch holds back to the device first, and the next update
        would have to ask for it anew. Nothing may be collected meanwhile, since freeing a graph ends a recording.
        """
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(recording_stream()):
                graph.capture_begin(pool=self.memory, capture_error_mode="thread_local")
                try:
                    function()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph.replay


class CopyStream:
    """Copies between a device and the host, on a stream beside the work that runs there. On a CPU they are plain.

    Torch gives memory to others by the order in which work is launched, and knows nothing of what runs beside: memory
    that a copy reads or writes must stay taken until the work waits for it (`wait`), or be `kept`.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.beside = device.type != "cpu"
        self.stream: Any = vendor(device.type).Stream(device) if self.beside else None

    def host(self, size: int) -> torch.Tensor:
        """Returns pinned host memory of `size` bytes, which the device reads and writes by itself."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.beside)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Copies that the block launches come after all work that was launched before, and beside what follows."""
        if not self.beside:
            yield
            return
        self.stream.wait_stream(vendor(self.device.type).current_stream(self.device))
        with vendor(self.device.type).stream(self.stream):
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Copies that the block launches run beside all other work, and have arrived at its end.

        What they read must have been written before the host last waited, and must not change meanwhile.
        """
        if not self.beside:
            yield
            return
        with vendor(self.device.type).stream(self.stream):
            yield
        self.stream.synchronize()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keeps the tensor's memory until the copies that were launched so far are done."""
        if self.beside:
            tensor.record_stream(self.stream)

    def launched(self) -> Any:
        """Returns the copies that were launched so far, for `wait`."""
        return self.stream.record_event() if self.beside else None

    def wait(self, copies: Any) -> None:
        """Work that is launched from now on runs after these. The host does not wait."""
        if copies is not None:
            vendor(self.device.type).current_stream(self.device).wait_event(copies)


@cache
def launches_early(device: torch.device) -> bool:
    """True if a kernel can start before the one that it waits for has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor's own memory, which programs of a kernel have beside their registers."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 0


@cache
def multiprocessors(device: torch.device) -> int:
    return vendor(device.type).get_device_properties(device).multi_processor_count if device.type != "cpu" else 2


def empty_cache(device: torch.device) -> None:
    """Gives memory that torch holds but does not use back to the device; on a CPU, what the C library holds."""
    if device.type != "cpu":
        vendor(device.type).empty_cache()
    else:
        with suppress(AttributeError, OSError):  # glibc's alone
            ctypes.CDLL(None).malloc_trim(0)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGE = 32 << 20  # bytes: the largest that glibc's own rule takes from the heap


@cache
def keep_freed_memory(device: torch.device) -> None:
    """Lets the C library keep freed memory of a CPU until `empty_cache`.

    By its own rule glibc gives the end of the heap back whenever it is free: after each micro-batch, where nothing
    happens to lie behind it, and the next one gets the same pages anew from the system, zeroed, one fault each.
    """
    if device.type != "cpu":
        return
    with suppress(AttributeError, OSError):  # glibc's alone
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, LARGE)
        libc.mallopt(TRIM_THRESHOLD, 2**31 - 1)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on an accelerator since the last reset, that the process took on a CPU."""
    if device.type != "cpu":
        return vendor(device.type).max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_reserved(device: torch.device) -> int:
    """Bytes of an accelerator: the most that torch held since the last reset, for tensors and for those to come."""
    return vendor(device.type).max_memory_reserved(device)


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else vendor(device.type).get_device_name(device)


def describe_devices(kind: str) -> list[str]:
    """Name and memory of each accelerator that this process can use."""
    if kind == "cpu":
        return []
    own = vendor(kind)
    sizes = [own.get_device_properties(place).total_memory / 1024**3 for place in range(own.device_count())]
    return [f"{own.get_device_name(place)}, {size:.0f} GiB" for place, size in enumerate(sizes)]


def reset_peak_memory(device: torch.device) -> None:
    """Resets the peak. On a CPU only Linux can; elsewhere the peak is that of the process's life."""
    if device.type != "cpu":
        vendor(device.type).reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def memory_in_use(device: torch.device) -> int:
    """Bytes that tensors take on an accelerator, that the process takes on a CPU."""
    if device.type != "cpu":
        return vendor(device.type).memory_allocated(device)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak_memory(device)


def seed_all(seed: int) -> None:
    """Every generator that a library may draw from. Paddock's own draws do not depend on them (see rng.py)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


DETERMINISM = {
    "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "npu": {"HCCL_DETERMINISTIC": "true", "CLOSE_MATMUL_K_SHIFT": "1"},
}
"""What a vendor's libraries read when they first run; the user's own setting wins."""


def make_deterministic(device: torch.device) -> None:
    """Makes every sum run in the same order each time, for the rest of this process. An operation that cannot says
    so."""
    for name, value in DETERMINISM.get(device.type, {}).items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False


@contextmanager
def torch_settings_restored() -> Iterator[None]:
    """Undoes `make_deterministic`, if the block calls it, at the end of the block."""
    before, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    names = {name: os.environ.get(name) for settings in DETERMINISM.values() for name in settings}
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = benchmark
        for name, value in names.items():
            if value is None:
                os.environ.pop(name, None)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the type that a config names; float32 where a CPU can only emulate it, at a fraction of the speed."""
    dtype = DTYPES[name]
    if device.type == "cpu" and dtype != torch.float32 and not multiplies_bf16():
        return torch.float32
    return dtype


def has_flash(tensor: torch.Tensor, window: int | None = None) -> bool:
    """True if the device has a flash-attention kernel for packed sequences of this type."""
    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    return narrow and (tensor.device.type == "cuda" or (tensor.device.type == "npu" and window is None))


def has_wide_products(tensor: torch.Tensor) -> bool:
    """True if a product of 16-bit matrices can be returned in float32, as it was summed."""
    return tensor.device.type == "cuda"


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    lengths: list[int],
    scale: float,
    window: int | None,
    key_ends: torch.Tensor | None = None,
    key_lengths: list[int] | None = None,
) -> torch.Tensor:
    """Computes attention with the device's own kernel: packed ``[T, H, D]``, each sequence causal in itself.

    `ends` are 0 and the places where sequences end, on the device; `lengths` are theirs, on the host. Where a sequence
    has more keys than queries, these are the last of them.
    """
    key_ends, key_lengths = ends if key_ends is None else key_ends, key_lengths or lengths
    if q.device.type == "npu":
        return ascend_attention(q, k, v, list(accumulate(lengths)), list(accumulate(key_lengths)), scale)
    # What torch's varlen_attn runs, without the operator in Python around it, which costs as much as a short layer.
    return torch.ops.aten._flash_attention_forward(
        q, k, v, ends, key_ends, max(lengths), max(key_lengths), 0.0, window is None, False, scale=scale,
        window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )[0]  # fmt: skip


def ascend_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[int], key_ends: list[int], scale: float
) -> torch.Tensor:
    npu = importlib.import_module("torch_npu")
    # with sparse_mode=3 the mask is a pattern: causal, from the end of each sequence
    return npu.npu_fusion_attention(
        q, k, v, q.shape[1], input_layout="TND", atten_mask=ascend_mask(q.device), scale=scale, keep_prob=1.0,
        actual_seq_qlen=ends, actual_seq_kvlen=key_ends, sparse_mode=3,
    )[0]  # fmt: skip


@cache
def ascend_mask(device: torch.device) -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)


def has_fused_optimizers(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")
