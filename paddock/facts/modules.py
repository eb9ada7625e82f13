"""Modules of the user's own: by name, or in a file."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

MODULE = "pkg://"
"""Stands before the name of a module that can be imported."""


def module_at(path: str) -> ModuleType:
    """Returns the module `pkg://NAME`, or the one in a file: that is read again if it changed since."""
    if path.startswith(MODULE):
        return importlib.import_module(path.removeprefix(MODULE))
    file = file_at(path)
    source = Path(file).read_bytes()
    name = f"paddock_file_{file.encode().hex()}"  # hashlib would bring OpenSSL into every process that scores
    if (known := sys.modules.get(name)) is not None and known.__dict__["__source__"] == source:
        return known
    module = ModuleType(name)
    module.__dict__.update(__file__=file, __source__=source)
    folder = str(Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # its neighbours, as if it were run as a script
    sys.modules[name] = module
    try:
        exec(compile(source, file, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def file_at(path: str) -> str:
    return str(Path(path).expanduser().resolve())
