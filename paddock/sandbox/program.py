"""What is run, within which limits, and how it ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from paddock.errors import UserError

if TYPE_CHECKING:
    from paddock.config.schema import RewardModelConfig

AROUND = 6.0  # seconds of a scorer's time that are kept for all but programs
CAUSES = ("ok", "wrong", "error", "timeout", "memory", "output", "processes", "forbidden", "left_running", "killed")
"""How a program ends. `error`: an exception, or an exit code but 0; `output`: it wrote too much; `processes`: it
started too many; `forbidden`: it made a system call that no answer needs, such as opening a socket; `left_running`: it
left processes behind; `killed`: by a signal of another kind."""


@dataclass(frozen=True)
class Program:
    """A text to run, with what it reads; or functions that checks call."""

    code: str
    stdin: str = ""
    checks: tuple[str, ...] = ()
    """Python statements, asserts most likely. They call functions of the program by name, or `candidate`."""
    setup: str = ""
    """Python that runs before the checks, beside the program."""
    entry: str | None = None
    """The function that checks call `candidate`; a method of a class `Solution` will do."""


@dataclass(frozen=True)
class Result:
    cause: str
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    checks: tuple[str, ...] = ()
    """The cause of each check."""
    detail: str = ""

    @property
    def passed(self) -> bool:
        return self.cause == "ok"


class SandboxBroken(Exception):
    """Programs cannot be run any more: no fault of theirs, so nobody is given a score for it."""


class Runner(ABC):
    """Runs programs, at most `at_once` side by side. A context manager: nothing runs any more when it is left."""

    def __init__(self, settings: SandboxSettings, at_once: int):
        self.settings, self.at_once = settings, at_once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def run(self, program: Program, seconds: float | None = None) -> Result:
        """Returns how the program ended; `seconds` is its limit, else that of the settings. Any thread may call it."""

    def run_all(self, programs: Sequence[Program], seconds: float | None = None) -> list[Result]:
        if min(self.at_once, len(programs)) < 2:
            return [self.run(program, seconds) for program in programs]
        with ThreadPoolExecutor(min(self.at_once, len(programs))) as threads:
            return list(threads.map(lambda program: self.run(program, seconds), programs))

    @abstractmethod
    def close(self) -> None:
        """Waits for programs that are running, and frees what is held."""


def causes_of(known: Sequence[str], cause: str, program: Program) -> tuple[str, ...]:
    """Returns the cause of each check: those that are known, and for the others that of the program's end."""
    return (*known, *[cause] * len(program.checks))[: len(program.checks)]


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """The keys of `reward_model.sandbox` and `reward_model.sandbox_fusion`, complete; plain values, which travel to
    another process."""

    isolation: str
    timeout: float
    total_timeout: float
    """Seconds of all programs of one answer."""
    processes: int
    memory_limit_mb: int
    command: tuple[str, ...]
    readable: tuple[str, ...]
    url: str | None
    max_concurrent: int


def settings_of(config: RewardModelConfig) -> SandboxSettings:
    local, service = config.sandbox, config.sandbox_fusion
    total = config.timeout - AROUND
    if local.timeout > total:
        raise UserError(
            f"leaves no time to answer: after reward_model.timeout={config.timeout:g} s the scorer itself is killed",
            key="reward_model.sandbox.timeout",
            value=local.timeout,
            fix=f"reward_model.timeout={local.timeout + AROUND:g}",
        )
    return SandboxSettings(
        isolation=local.isolation,
        timeout=local.timeout,
        total_timeout=total,
        processes=local.processes,
        memory_limit_mb=service.memory_limit_mb,
        command=tuple(local.command),
        readable=tuple(local.readable),
        url=service.url,
        max_concurrent=service.max_concurrent,
    )


def default_settings() -> SandboxSettings:
    """Returns the settings of a config that sets none of them."""
    from paddock.config.schema import RewardModelConfig  # a fifth of a second that a scorer with settings is spared

    return settings_of(RewardModelConfig())
