"""Functions of the program that runs, on their way to processes: by their code and what it reads, not by a name.

A process has a copy of both. What the function changes stays in its process; what the program changes reaches it with
the next batch, as the function is sent anew when its bytes differ.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from paddock.rewards.functions import Target
from paddock.rewards.rules import Scorer
from paddock.rewards.runners import ProcessPool
from paddock.rewards.score import Failed

log = logging.getLogger(__name__)

MOST = 64 << 20
"""Bytes of a function with all that it reads. It is written for every batch, and every process holds it."""


class NotSent(Exception):
    """A function that no other process can be given; the text says why."""


class Sender:
    """Writes functions of this program to files of its own, from which processes read them."""

    def __init__(self, pool: ProcessPool):
        self.pool = pool
        self.last: dict[str, Target] = {}
        """Targets that were sent last, by the name of the scorer."""

    @cached_property
    def folder(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="paddock-functions-", ignore_cleanup_errors=True)

    def obstacle_to(self, scorer: Scorer) -> str | None:
        """Returns why a function cannot run in a process, and tries one."""
        why = self._obstacle_to(scorer)
        if why is None:
            log.info("the reward %s runs in processes, on a copy of what it reads of this program", scorer.name)
        else:
            log.warning(
                "the reward %s runs in a thread of this program, since it cannot be sent to a process: %s. It is given "
                "up after %g s (reward_model.timeout), and cannot be killed",
                *(scorer.name, why, self.pool.timeout),
            )
        return why

    def _obstacle_to(self, scorer: Scorer) -> str | None:
        if scorer.shape.reads_environments:
            return "it reads `environments`, which live here"
        try:
            self.pool.shape_of(self.current(scorer).target)
        except NotSent as error:
            return str(error)
        except Failed as error:
            return f"a process has not what it needs: it {error}"
        return None

    def current(self, scorer: Scorer) -> Scorer:
        """Returns the scorer as processes call it: with the file that holds a function of this program as it is now."""
        if scorer.target.function is None or scorer.here:
            return scorer
        try:
            content = content_of(scorer.target.function)
        except NotSent as error:
            if scorer.name not in self.last:
                raise
            log.warning("the reward %s runs as it was sent before: %s", scorer.name, error)
        else:
            file = Path(self.folder.name) / hashlib.blake2b(content, digest_size=16).hexdigest()
            if not file.exists():
                file.write_bytes(content)
            self.last[scorer.name] = replace(scorer.target, function=None, sent=str(file))
        return replace(scorer, target=self.last[scorer.name])

    def close(self) -> None:
        if "folder" in vars(self):  # it is made when something is sent, and again after this
            vars(self).pop("folder").cleanup()


def content_of(function: Callable[..., Any]) -> bytes:
    """Returns the function as bytes that `pickle.loads` reads; raises NotSent."""
    try:
        return pickled(function)
    except Exception as error:  # whatever an object of the program raises when it is asked for its state
        held = obstacle(function)
        reason = f"it reads {held[0]!r}: {held[1]}" if held else str(error) or type(error).__name__
        raise NotSent(reason) from error


def pickled(value: Any) -> bytes:
    import cloudpickle  # for the few programs that have a function of their own

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if what := stays(value):
                raise NotSent(f"{what} stays in its process")
            return super().reducer_override(value)

    buffer = Limited()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


class Limited(io.BytesIO):
    """A buffer that refuses to grow beyond `MOST` bytes."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > MOST:
            raise NotSent(f"takes more than {MOST >> 20} MiB")
        return super().write(content)


def stays(value: Any) -> str | None:
    """Names what could be sent, but is not meant to be there twice: a model, or memory of a device."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.nn.Module):
        return "a model"
    return "a tensor on a device" if isinstance(value, torch.Tensor) and value.device.type != "cpu" else None


def obstacle(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Returns the name of what cannot be sent among what a function reads, and why."""
    code = function if inspect.isroutine(function) else type(function).__call__
    read = inspect.getclosurevars(inspect.unwrap(code))
    own = getattr(function, "__self__", None if inspect.isfunction(function) else function)
    for name, value in {**read.globals, **read.nonlocals, **getattr(own, "__dict__", {})}.items():
        try:
            pickled(value)
        except Exception as error:
            return name, str(error) or type(error).__name__
    return None
