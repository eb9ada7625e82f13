"""Modules of the user's own: by name, or in a file. Each finds the neighbours of its file and verl's names."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from paddock.errors import UserError
from paddock.facts.compat import importable

MODULE = "pkg://"
"""Stands before the name of a module that can be imported."""
OURS = f"{Path(__file__).parents[1]}{os.sep}"


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


def user_module(path: str, key: str, value: str, absent: str = "correct the path") -> ModuleType:
    """Returns the module at a path, as `module_at` does. Errors have this key and value, and the fix `absent` if there
    is no such file."""
    if not path.startswith(MODULE) and not Path(path).expanduser().is_file():
        raise UserError("there is no such file", key=key, value=value, fix=absent)
    fix = "a module that this Python imports: check its name, and PYTHONPATH"
    with blaming("cannot be imported:", key, value, fix if path.startswith(MODULE) else f"python {path} shows where"):
        return module_at(path)


@contextmanager
def blaming(what: str, key: str, value: str | None, fix: str) -> Iterator[None]:
    """Turns what a user's code raises in the block into an error with this key, value and fix; its reason is `what`,
    and the exception."""
    try:
        yield
    except (UserError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit is as likely as SyntaxError
        raise UserError(f"{what} {exception_text(error)}", key=key, value=value, fix=fix) from error


def exception_text(error: BaseException) -> str:
    """Returns an exception as text, with the innermost line that is neither Paddock's nor the import system's."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [each for each in frames if not each.filename.startswith((OURS, "<")) and "importlib" not in each.filename]
    place = f" ({Path(others[-1].filename).name} line {others[-1].lineno})" if others else ""
    return f"{type(error).__name__}: {error}{place}"


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
