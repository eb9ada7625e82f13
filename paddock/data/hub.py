"""Data sets of the hub: asked for by name, kept by `datasets` as Arrow files on this disk."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from paddock.errors import UserError
from paddock.facts.files import HELD_OUT, FileSource

HUB_TIMEOUT = 10.0  # seconds


def hub_sources(path: str, key: str) -> list[FileSource]:
    """Returns the files of `org/name` or `org/name:config`: its training split, or the held-out one for
    data.val_files."""
    name, _, config = path.partition(":")
    try:
        loaded = load_from_hub(name, config or None)
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        reason = f"is no file or folder here, and cannot be fetched from the hub: {first_line(error)}"
        fix = f"correct the path; or get it on a machine that can, and name its folder: {key}=FOLDER"
        raise UserError(reason, key=key, value=path, fix=f"{fix} (HF_HUB_OFFLINE=1 uses the cache)") from error
    wanted = HELD_OUT if key == "data.val_files" else ("train",)
    split = next((split for split in wanted if split in loaded), next(iter(loaded)) if len(loaded) == 1 else None)
    if split is None:
        reason = f"has the splits {', '.join(sorted(loaded))}, and none is called {wanted[0]}"
        raise UserError(reason, key=key, value=path, fix="save the split that you want: save_to_disk")
    return [FileSource(f"{path} {split}", Path(part["filename"]), "arrow") for part in loaded[split].cache_files]


def load_from_hub(name: str, config: str | None) -> Any:
    """Returns a `datasets.DatasetDict`; with HF_HUB_OFFLINE=1, from the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    # One question with a time limit: `load_dataset` alone retries an unreachable hub for half a minute.
    with suppress(OfflineModeIsEnabled):
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT)

    import datasets

    return datasets.load_dataset(name, config)


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
