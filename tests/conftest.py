"""One torch thread: on two cores a small model runs many times slower with the default. Signals as at a terminal."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:  # by nohup, or by a shell that runs the tests in the background
        signal.signal(number, lambda *_: None)  # processes that tests start ignore what is ignored, not what is handled


def pytest_collection_finish() -> None:
    """Takes thousands of tests and imported modules out of garbage collection, which training asks for after a step."""
    gc.collect()
    gc.freeze()
    os.register_at_fork(after_in_child=gc.freeze)  # freeing a TCPStore joins a thread of the parent's


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _scorers_of_built_in_rows() -> None:
    """Reads the rows of each built-in data set once a process: hundreds of runs would do it again, for a seventh of
    their time. A built-in table is the same object in all of them."""
    if (dataset := sys.modules.get("paddock.data.dataset")) is None:
        return
    read, kept = dataset.scorers_of, cache(dataset.scorers_of)
    dataset.scorers_of = lambda table, source: (kept if table.path.startswith("builtin:") else read)(table, source)


@pytest.fixture(autouse=True, scope="session")
def _interpreted_kernels() -> None:
    """Has triton's interpreter exchange the builtins of its language once for each launch. By itself it looks for them
    at each call of one function by another, which is a third of the time of kernels' tests."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    @cache
    def languages(function: Callable[..., object]) -> list[ModuleType]:
        return [module for module in function.__globals__.values() if module is tl or module is tl.core]

    def call(function: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        if any(tl.core.is_builtin(language.load) for language in languages(function.fn)):
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


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


@pytest.fixture
def catalogues() -> Iterator[None]:
    """Forgets afterwards what a plug-in of the test has registered, in any table."""
    from paddock.algorithms.advantages import ESTIMATOR
    from paddock.algorithms.losses import POLICY_LOSS
    from paddock.config import recipes
    from paddock.config.loggers import LOGGERS
    from paddock.config.roles import DECLARED_LOSSES
    from paddock.config.rollout_engines import ENGINES
    from paddock.environments.calls import FORMATS
    from paddock.environments.catalogue import SOURCES
    from paddock.library.plugins import SCORERS

    tables = [recipes.ESTIMATORS, ESTIMATOR._entries, POLICY_LOSS._entries, LOGGERS, ENGINES,
              SOURCES._entries, FORMATS, SCORERS]  # fmt: skip
    before, losses = [{*table} for table in tables], {*DECLARED_LOSSES}
    yield
    for table, names in zip(tables, before, strict=True):
        for name in {*table} - names:
            del table[name]
    DECLARED_LOSSES.intersection_update(losses)
