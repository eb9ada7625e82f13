"""Chooses what runs programs: this machine, or the service that the config names."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Protocol

from paddock.sandbox.fusion import FusionClient
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import Program, Result, SandboxSettings

log = logging.getLogger(__name__)


class Runner(Protocol):
    at_once: int
    """Programs that it runs side by side."""

    def run_all(self, programs: Sequence[Program], seconds: float | None = None) -> list[Result]: ...

    def close(self) -> None: ...


def runner_of(settings: SandboxSettings) -> Runner:
    """Returns the runner of this process, kept until its end."""
    return _runner(settings, os.getpid())


@cache
def _runner(settings: SandboxSettings, process: int) -> Runner:
    return FusionClient(settings) if settings.url else LocalSandbox(settings)


def check(settings: SandboxSettings) -> None:
    """A UserError, before training, where programs could not be run as the config wants it."""
    if settings.url:
        FusionClient(settings).close()
        return
    with LocalSandbox(settings) as sandbox:
        log.info("programs run behind %s; %d MB of memory are guarded by %s", sandbox.isolation,
                 settings.memory_limit_mb, sandbox.guard)  # fmt: skip
