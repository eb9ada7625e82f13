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
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddock import __version__
from paddock.config import tree
from paddock.config.schema import Config, TrainerConfig
from paddock.errors import UserError
from paddock.trainer.files import REFUSALS, replacing, sync_folder, unwritable

log = logging.getLogger(__name__)

KEY = "trainer.default_local_dir"
NAME = re.compile(r"global_step_(\d+)")
HIDDEN = re.compile(r"\.global_step_(\d+)\.(writing|replaced|removing)")
LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
FORMAT = 1
NATIVE_REFUSALS = ("inline_container.cc", "No space left on device")  # of torch.save, of others
ASYNC_SAVE = ("actor_rollout_ref.actor.checkpoint.async_save", "critic.checkpoint.async_save")


@dataclass(frozen=True)
class Checkpoint:
    step: int
    folder: Path


class CheckpointStore:
    """The checkpoints of one run, which is the only one that writes here. `keep` is how many stay; None: all."""

    def __init__(self, root: str | Path, keep: int | None = None):
        self.root = Path(root)
        self.keep = keep
        self.wrote = False
        """Whether this run has a checkpoint of its own here."""

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """A folder to write into; the checkpoint of the step once the block has ended, nothing if it raised."""
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
        self._prune(step)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose files are all as they were written. Broken ones are named and passed over."""
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
                if left and left[2] == "replaced" and not self.folder(int(left[1])).exists():
                    entry.rename(self.folder(int(left[1])))
                elif left:
                    shutil.rmtree(entry)
                elif entry.match(f".{LATEST}.*.tmp"):
                    entry.unlink()
        except OSError as error:
            raise unwritable(self.root, KEY, error) from error

    def _publish(self, step: int) -> None:
        final, replaced = self.folder(step), self._hidden(step, "replaced")
        if final.exists():
            final.rename(replaced)
        self._hidden(step, "writing").rename(final)
        sync_folder(self.root)
        with replacing(self.root / LATEST, KEY) as file:
            file.write(str(step).encode())
        sync_folder(self.root)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        if self.keep is None:
            return
        for step in self._newest_first(newest)[max(self.keep, 1) :]:
            removing = self._hidden(step, "removing")
            try:
                self.folder(step).rename(removing)
                shutil.rmtree(removing)
            except OSError as error:
                log.warning("an old checkpoint stays, since it cannot be removed: %s", error)

    def _newest_first(self, latest: int | None) -> list[int]:
        """By step, down; those beyond the latest come last: a run that went back has left them behind."""
        return sorted(self.steps(), key=lambda step: (latest is not None and step > latest, -step))

    def _latest(self) -> int | None:
        try:
            return int((self.root / LATEST).read_text())
        except (OSError, ValueError):
            return None

    def _hidden(self, step: int, state: str) -> Path:
        return self.root / f".global_step_{step}.{state}"

    def _entries(self) -> list[Path]:
        return sorted(self.root.iterdir()) if self.root.is_dir() else []


def write_manifest(folder: Path, step: int) -> None:
    """Puts every file of the folder on the disk, and then the list of them."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    with ThreadPoolExecutor() as pool:
        entries = dict(zip(files, pool.map(settle, files.values()), strict=True))
    manifest = {"format": FORMAT, "step": step, "paddock": __version__, "files": entries}
    with replacing(folder / MANIFEST, KEY) as file:
        file.write(json.dumps(manifest, indent=1).encode())
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)


def settle(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return {"size": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(folder: Path) -> str | None:
    """The first thing in which a checkpoint differs from its manifest, in words."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, files = manifest["format"], manifest["files"]
    except FileNotFoundError:
        return f"there is no {MANIFEST}: it was not written by this program, or not to the end"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    if version > FORMAT:
        return f"it has format {version}, of a later version ({manifest.get('paddock')}); this one reads {FORMAT}"
    for name, entry in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        size = (folder / name).stat().st_size
        if size != entry["size"]:
            return f"{name} has {size} bytes, and had {entry['size']} when it was written"
    with ThreadPoolExecutor() as pool:
        found = pool.map(checksum, [folder / name for name in files])
        wrong = [name for name, value in zip(files, found, strict=True) if value != files[name]["sha256"]]
    return f"{wrong[0]} has the right size, but other content than was written" if wrong else None


def disk_refusal(error: BaseException) -> OSError | None:
    """The refusal of a disk in an error: an OSError, or what libraries that write in native code make of one."""
    if isinstance(error, OSError):
        return error if error.errno in REFUSALS else None
    native = isinstance(error, Exception) and any(sign in str(error) for sign in NATIVE_REFUSALS)
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if native else None


def checkpoint_store(config: Config) -> CheckpointStore:
    """The store of a run. One folder holds actor and critic, so the larger of the two limits counts."""
    for key in ASYNC_SAVE:
        if tree.get(config, key):
            raise UserError(
                "checkpoints are written between steps, not while the next one runs",
                key=key,
                value=True,
                fix=f"{key}=False; a larger trainer.save_freq makes saving cheaper",
            )
    trainer = config.trainer
    limits = [n for n in (trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep) if n is not None]
    return CheckpointStore(trainer.default_local_dir, max(limits, default=None))


def resume_point(trainer: TrainerConfig, store: CheckpointStore) -> Checkpoint | None:
    """Where the run goes on: trainer.resume_mode. auto: the newest whole checkpoint of the store, if there is one;
    disable: none; resume_path: the one that trainer.resume_from_path names, or an error."""
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        store.sweep()
        return store.newest()
    folder = Path(trainer.resume_from_path or "")
    name = NAME.fullmatch(folder.name)
    problem = "it is not the folder of a step" if name is None else None if folder.is_dir() else "no such folder"
    problem = problem or find_damage(folder)
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
