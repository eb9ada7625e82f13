"""Checkpoints that are whole or not there: `kill -9` at any moment leaves a store that loads.

    root/global_step_20/{actor,critic,...}      what the engines and the trainer wrote
                        manifest.json           every file with size and SHA-256, written last
         latest_checkpointed_iteration.txt      20
         .global_step_30.writing                a write in progress, or one that was killed

A checkpoint is written under a hidden name, put on the disk, and renamed. What was there before goes only after that.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import resource
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from paddock import __version__
from paddock.config.schema import TrainerConfig
from paddock.core.files import REFUSALS, replacing, sync, unwritable
from paddock.errors import UserError

log = logging.getLogger(__name__)

KEY = "trainer.default_local_dir"
NAME = re.compile(r"global_step_(0|[1-9][0-9]*)")
HIDDEN = re.compile(r"\.global_step_(0|[1-9][0-9]*)\.(writing|replaced|removing)")
LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
FORMAT = 1
NATIVE_REFUSALS = ("inline_container.cc", "No space left on device")  # of torch.save, of others


@dataclass(frozen=True)
class Checkpoint:
    """Names a checkpoint on the disk: what `Run.save` returns, and what `on_save` receives.

    >>> import paddock
    >>> from pathlib import Path
    >>> paddock.Checkpoint(20, Path("runs/mine/global_step_20")).step
    20
    """

    step: int
    """The last step that it holds."""
    folder: Path
    """Holds `actor`, which `transformers` loads, and the state of the run."""


class CheckpointStore:
    """Writes and finds the checkpoints of a run; no other run writes here. `keep`: how many stay; None: all."""

    def __init__(self, root: str | Path, keep: int | None = None):
        self.root = Path(root)
        self.keep = keep
        self.wrote = False
        """True if this run has written a checkpoint here."""

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """Gives the block a folder to write into, which becomes the step's checkpoint if the block does not raise."""
        writing = self._hidden(step, "writing")
        try:
            self.sweep()
            writing.mkdir(parents=True)
            yield writing
            write_manifest(writing, step)
            self._publish(step)
            self.wrote = True
        except BaseException as error:
            shutil.rmtree(writing, ignore_errors=True)
            refusal = disk_refusal(error)
            if refusal is None:
                raise
            raise unwritable(self.root, KEY, refusal) from error
        self.prune(step)

    def newest(self) -> Checkpoint | None:
        """Returns the newest checkpoint whose files are as they were written. Damaged ones are named and skipped."""
        broken: list[str] = []
        for step in self._newest_first(self._latest()):
            problem = find_damage(self.folder(step))
            if problem is None:
                for message in broken:
                    log.warning("%s; going on from global_step_%d instead", message, step)
                return Checkpoint(step, self.folder(step))
            broken.append(f"{self.folder(step)} is damaged: {problem}")
        if broken:
            raise UserError(
                "no checkpoint here is whole:\n    " + "\n    ".join(broken),
                key=KEY,
                value=self.root,
                fix="restore the files, or start afresh: trainer.resume_mode=disable",
            )
        return None

    def steps(self) -> list[int]:
        names = [NAME.fullmatch(entry.name) for entry in self._entries()]
        return sorted(int(name[1]) for name in names if name)

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def sweep(self) -> None:
        """Removes what killed writes left behind, and puts back a checkpoint whose replacement did not arrive."""
        try:
            for entry in self._entries():
                left = HIDDEN.fullmatch(entry.name)
                final = self.folder(int(left[1])) if left else None
                if left and final and left[2] == "replaced" and entry.is_dir() and not os.path.lexists(final):
                    entry.rename(final)
                elif final or entry.match(f".{LATEST}.*.tmp"):
                    if final and not entry.is_dir():
                        log.warning("%s is no folder, and has the name of a half-written checkpoint: removed", entry)
                    remove(entry)
                elif entry.name == LATEST and entry.is_dir():
                    raise IsADirectoryError(errno.EISDIR, f"{LATEST} is a folder")
        except OSError as error:
            raise unwritable(self.root, KEY, error) from error

    def _publish(self, step: int) -> None:
        final, replaced = self.folder(step), self._hidden(step, "replaced")
        if os.path.lexists(final):
            final.rename(replaced)
        self._hidden(step, "writing").rename(final)
        sync(self.root)
        with replacing(self.root / LATEST, KEY) as file:
            file.write(str(step).encode())
        sync(self.root)
        with suppress(OSError):
            remove(replaced)

    def prune(self, newest: int) -> None:
        """Removes all but `keep` checkpoints, counted from the newest."""
        if self.keep is None:
            return
        folders = [step for step in self._newest_first(newest) if os.path.isdir(self.folder(step))]
        for step in folders[max(self.keep, 1) :]:
            removing = self._hidden(step, "removing")
            try:
                self.folder(step).rename(removing)
                remove(removing)
            except OSError as error:
                log.warning("an old checkpoint stays, since it cannot be removed: %s", error)

    def _newest_first(self, latest: int | None) -> list[int]:
        """Steps in descending order. Steps beyond the latest come last: a run that went back has left them behind.
        Entries that are no folders come first, so that a search always reports them."""
        beyond = {step for step in self.steps() if latest is not None and step > latest}
        return sorted(self.steps(), key=lambda step: (os.path.isdir(self.folder(step)), step in beyond, -step))

    def _latest(self) -> int | None:
        """Returns the step that the pointer file names; None if it names none. A pointer that does not help is
        reported."""
        try:
            text = (self.root / LATEST).read_text().strip()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            text = f"({error})"
        step = int(text) if re.fullmatch("[0-9]{1,18}", text) else None
        if step not in self.steps():
            log.warning("%s names no checkpoint that is here: %.60s", self.root / LATEST, text)
        return step

    def _hidden(self, step: int, state: str) -> Path:
        return self.root / f".global_step_{step}.{state}"

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.root.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            reason, fix = f"cannot be read: {error.strerror}", f"make it readable, or set {KEY} to another folder"
            raise UserError(reason, key=KEY, value=self.root, fix=fix) from error


def remove(entry: Path) -> None:
    """Removes a folder with its content, or a file. Of a symbolic link only the link goes."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)


def write_manifest(folder: Path, step: int) -> None:
    """Puts every file of the folder on the disk, and then the list of them."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    with ThreadPoolExecutor() as pool:
        entries = dict(zip(files, pool.map(settle, files.values()), strict=True))
    manifest = {"format": FORMAT, "step": step, "paddock": __version__, "files": entries}
    with replacing(folder / MANIFEST, KEY) as file:
        file.write(json.dumps(manifest, indent=1).encode())
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync(inner)


def settle(path: Path) -> dict[str, Any]:
    """Puts a file on the disk; returns its entry in the manifest."""
    sync(path)
    return {"size": path.stat().st_size, "sha256": checksum(path)}


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Damaged(Exception):
    """A checkpoint that differs from what was written; the text says in what."""


def read_manifest(folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Returns the step, and size and SHA-256 of every file by its path in the checkpoint. Raises Damaged unless
    `write_manifest` could have written it."""
    try:
        values = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"there is no {MANIFEST}: it was not written by this program, or not to the end") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error}") from None
    if isinstance(values, dict) and whole_number(version := values.get("format")) and version > FORMAT:
        later = f"it has format {version}, of a later version ({values.get('paddock')})"
        raise Damaged(f"{later}; this one reads {FORMAT}")
    if not isinstance(values, dict) or not is_manifest(values):
        raise Damaged(f"{MANIFEST} is not as this program writes it: {json.dumps(values):.200}")
    return values["step"], values["files"]


def is_manifest(values: dict[str, Any]) -> bool:
    numbered, files = all(whole_number(values.get(name)) for name in ("format", "step")), values.get("files")
    return numbered and isinstance(files, dict) and bool(files) and all(is_entry(*item) for item in files.items())


def is_entry(name: str, entry: Any) -> bool:
    """True for a file of this folder with its size and checksum."""
    path = PurePosixPath(name)
    inside = bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name
    return (
        inside and isinstance(entry, dict) and whole_number(entry.get("size")) and isinstance(entry.get("sha256"), str)
    )


def whole_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def find_damage(folder: Path) -> str | None:
    """Returns the first thing in which a checkpoint differs from its manifest, in words."""
    try:
        if not folder.is_dir():
            kind = "a symbolic link to no folder" if folder.is_symlink() else "a file, not a folder"
            raise Damaged(f"it is {kind}" if os.path.lexists(folder) else "there is no such folder")
        step, files = read_manifest(folder)
        name = NAME.fullmatch(folder.absolute().name)
        if name and int(name[1]) != step:
            raise Damaged(f"{MANIFEST} is that of step {step}")
        compare(folder, files)
    except Damaged as damage:
        return str(damage)
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror or error}"
    return None


def compare(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Raises Damaged for the first file that is missing or has another size or content than was written."""
    for name, entry in files.items():
        if not (folder / name).is_file():
            raise Damaged(f"{name} is missing")
        size = (folder / name).stat().st_size
        if size != entry["size"]:
            raise Damaged(f"{name} has {size} bytes, and had {entry['size']} when it was written")
    with ThreadPoolExecutor() as pool:
        found = pool.map(checksum, [folder / name for name in files])
        for (name, entry), value in zip(files.items(), found, strict=True):
            if value != entry["sha256"]:
                raise Damaged(f"{name} has the right size, but other content than was written")


def disk_refusal(error: BaseException) -> OSError | None:
    """Returns the disk's refusal that an error stands for: an OSError, or what native code made of one; else None."""
    if isinstance(error, OSError):
        return error if error.errno in REFUSALS else None
    native = isinstance(error, Exception) and any(sign in str(error) for sign in NATIVE_REFUSALS)
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    return OSError(errno.EFBIG if limited else errno.ENOSPC, "No space left on device") if native else None


def checkpoint_store(trainer: TrainerConfig) -> CheckpointStore:
    """Returns a run's store. One folder holds actor and critic, so the larger of the two limits counts; if all of the
    actor's checkpoints are kept, there is no limit."""
    actor, critic = trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep
    if actor is None and critic is not None:
        log.warning(
            "trainer.max_critic_ckpt_to_keep=%d has no effect: trainer.max_actor_ckpt_to_keep is unset, which keeps "
            "all checkpoints, and the critic is in their folder",
            critic,
        )
    return CheckpointStore(trainer.default_local_dir, None if actor is None else max(actor, critic or actor))


def resume_point(trainer: TrainerConfig, store: CheckpointStore) -> Checkpoint | None:
    """Returns the checkpoint from which the run goes on: trainer.resume_mode. auto: the newest whole checkpoint of the
    store, if there is one; disable: none; resume_path: the one that trainer.resume_from_path names, or an error."""
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        store.sweep()
        newest = store.newest()
        if newest and newest.step == store.steps()[-1]:  # a run that was killed before it removed old ones
            store.prune(newest.step)
        return newest
    folder = Path(trainer.resume_from_path or "")
    name = NAME.fullmatch(folder.name)
    problem = "it is not the folder of a step" if name is None else find_damage(folder)
    if name is None or problem:
        beside = CheckpointStore(folder.parent if name else folder).steps()
        known = f"; steps there: {', '.join(map(str, beside))}" if beside else ""
        raise UserError(
            f"cannot be resumed: {problem}",
            key="trainer.resume_from_path",
            value=trainer.resume_from_path,
            fix=f"a whole checkpoint .../global_step_N{known}; or trainer.resume_mode=auto",
        )
    return Checkpoint(int(name[1]), folder)
