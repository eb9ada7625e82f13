"""Modules of the user's own: by name, or in a file. Each finds the neighbours of its file and verl's names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from paddock.facts.compat import importable

MODULE = "pkg://"
"""Stands before the name of a module that can be imported."""


def module_named(name: str) -> ModuleType:
    """Imports a module of the user's; one written for verl finds verl's names."""
    importable()
    return importlib.import_module(name)


def module_at(path: str) -> ModuleType:
    """Returns the module `pkg://NAME`, or the one in a file: that is read again if it changed since."""
    if path.startswith(MODULE):
        return module_named(path.removeprefix(MODULE))
    importable()
    file = file_at(path)
    source = Path(file).read_bytes()
    name = f"paddock_file_{file.encode().hex()}"  # hashlib would bring OpenSSL into every process that scores
    if (known := sys.modules.get(name)) is not None and known.__dict__["__source__"] == source:
        return known
    module = ModuleType(name)
    module.__dict__.update(__file__=file, __source__=source, __package__=package_of(Path(file)))
    top, folder = top_of(Path(file)), Path(file).parent
    packaged = (folder / "__init__.py").is_file()
    # Its neighbours are found as if it were run as a script; a package's never stand before others.
    for place in map(str, (folder, top.parent) if packaged else (folder,)):
        if place not in sys.path:
            sys.path.insert(len(sys.path) if packaged else 0, place)
    sys.modules[name] = module
    try:
        exec(compile(source, file, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def top_of(file: Path) -> Path:
    """Returns the folder of the outermost package that a file is in; its own folder if that is no package."""
    top = file.parent
    while (top / "__init__.py").is_file() and (top.parent / "__init__.py").is_file():
        top = top.parent
    return top


def package_of(file: Path) -> str:
    """Returns the name by which relative imports in a file find the other modules of its package.

    The name is Paddock's own, so that the package of a fork never stands in for an installed one. The `__init__` of a
    package runs when a name is asked of it that is no module: a whole trainer's imports more than a scorer has.
    """
    top = top_of(file)
    name, folder = f"paddock_folder_{str(top).encode().hex()}", top
    for part in ("", *file.parent.relative_to(top).parts):
        name, folder = (f"{name}.{part}", folder / part) if part else (name, folder)
        if name not in sys.modules:
            sys.modules[name] = Package(name, folder)
    return name


class Package(ModuleType):
    """Stands for a folder of modules whose `__init__` has not run yet."""

    def __init__(self, name: str, folder: Path):
        super().__init__(name)
        self.__dict__.update(__path__=[str(folder)], __package__=name)

    def __getattr__(self, name: str) -> Any:
        init = Path(self.__dict__["__path__"][0]) / "__init__.py"
        if name.startswith("__") or "__file__" in self.__dict__ or not init.is_file():
            raise AttributeError(name)
        if importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            raise AttributeError(name)  # a module of the package, which the import goes on to load
        self.__dict__["__file__"] = str(init)
        exec(compile(init.read_bytes(), init, "exec"), self.__dict__)
        return getattr(self, name)


def file_at(path: str) -> str:
    return str(Path(path).expanduser().resolve())
