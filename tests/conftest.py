"""One torch thread: on two cores a small model runs many times slower with the default."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_finish() -> None:
    """Takes thousands of tests and imported modules out of garbage collection, which training asks for after a step."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import sys

    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(params=["compiled", "torch"])
def cpu_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of a CPU: its compiled kernels, and torch's operations where there is no compiler."""
    from paddock.kernels import native
    from paddock.kernels.compiler import library

    if request.param == "torch":
        monkeypatch.setattr(native, "can_run", lambda *_: False)
    elif library() is None:
        pytest.skip("no C++ compiler")
    return request.param
