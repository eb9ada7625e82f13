"""Chooses what runs programs: this machine, or the service that the config names."""

from __future__ import annotations

import logging
import os
from functools import cache

from paddock.sandbox.fusion import FusionClient
from paddock.sandbox.local import LocalSandbox
from paddock.sandbox.program import Runner, SandboxSettings

log = logging.getLogger(__name__)


def runner_of(settings: SandboxSettings, size: int = 1) -> Runner:
    """Returns the runner of this process, kept until its end; on this machine it runs `size` programs side by side."""
    return _runner(settings, size, os.getpid())


@cache
def _runner(settings: SandboxSettings, size: int, process: int) -> Runner:
    return FusionClient(settings) if settings.url else LocalSandbox(settings, size)


def check(settings: SandboxSettings) -> None:
    """A UserError, before training, where programs could not be run as the config wants it."""
    if settings.url:
        FusionClient(settings)
        return
    with LocalSandbox(settings) as sandbox:
        log.info("programs run behind %s; %d MB of memory are guarded by %s", sandbox.isolation,
                 settings.memory_limit_mb, sandbox.guard)  # fmt: skip
