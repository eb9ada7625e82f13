"""The package of verl's name that comes with this one, for plug-ins that import it."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path

SERVES = "PADDOCK_VERL"  # set by `paddock run`: in its processes the name `verl` is Paddock's
CHECKOUT = (
    "PADDOCK_VERL_CHECKOUT"  # set by `paddock run` for a training command: the checkout's `verl` that ours replaces
)
PACKAGE = Path(__file__).parent.parent
DEVICE_PROGRAMS = ("nvidia-smi", "npu-smi", "rocm-smi")
"""Programs by which launch scripts look for devices."""


def shims() -> Path:
    """Returns the folder that holds the package: in a wheel it is inside of this one, in a checkout beside it."""
    return next(folder for folder in (PACKAGE / "compat", PACKAGE.parent / "compat") if folder.is_dir())


def python_path() -> list[str]:
    """Returns folders of PYTHONPATH by which another Python finds `verl` and this package.

    An installed one is found without; its neighbours in site-packages must not serve Pythons of other environments.
    """
    installed = PACKAGE.parent.name in ("site-packages", "dist-packages")
    return [str(shims()), *([] if installed else [str(PACKAGE.parent)])]


def importable() -> None:
    """Makes plug-ins written for verl importable: those of the working directory, as `python -m` does, and verl's
    names, unless verl itself is installed."""
    with suppress(OSError):  # the working directory may be gone
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    if "verl" not in sys.modules and importlib.util.find_spec("verl") is None:
        sys.path.append(str(shims()))


def of_checkouts(inside: str) -> list[str]:
    """Returns folders of this name in the `verl` of checkouts that ours stands before: the working directory's, and
    those on sys.path."""
    with suppress(OSError):  # the working directory may be gone
        places = [Path(place or os.getcwd(), "verl", inside) for place in dict.fromkeys(["", *sys.path])]
        return [str(folder) for folder in places if folder.is_dir() and not folder.is_relative_to(shims())]
    return []


def why_missing(error: BaseException) -> str:
    """Returns the reason of an import of verl's that failed because the package of its name is ours; else nothing."""
    lacking = isinstance(error, ImportError) and str(error.name).startswith("verl.")
    return f"; `verl` is Paddock's here ({shims()}/verl), which has not all of verl's" if lacking else ""


def serve() -> None:
    """Imports Paddock's `verl`, so that none of the same name is imported in this process, wherever sys.path leads."""
    folder = shims() / "verl"
    spec = importlib.util.spec_from_file_location(
        "verl", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules["verl"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["verl"])
