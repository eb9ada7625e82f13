"""The contract of training engines: other packages use the public methods of `Engine`, and it has no others."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from paddock.engines.train.base import Backend
from paddock.engines.train.engine import Engine
from paddock.engines.train.fsdp import FSDPBackend
from paddock.engines.train.single import SingleBackend

PACKAGE = ROOT / "paddock"
OUTSIDE = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "engines" / "train" not in path.parents]
OPEN_TO_ALL = {"base", "engine", "open", "settings"}
"""Modules of engines/train that other packages import: the contract, what makes engines, and their settings."""
INSIDE = {"backend", "updater", "adapters_off", "offload"}
"""Attributes of an engine that are its own."""
ENGINES = {"engine", "trainer"}
"""Names that other packages give to a training engine; some also to a rollout engine."""


def methods(cls: type) -> set[str]:
    found = {name for base in cls.__mro__[:-1] for name, what in vars(base).items() if is_method(what)}
    return {name for name in found if not name.startswith("_")}


def is_method(what: Any) -> bool:
    return inspect.isfunction(what) or isinstance(what, property | classmethod)


@pytest.mark.parametrize("kind", [SingleBackend, FSDPBackend])
def test_a_backend_has_every_method_of_the_protocol_and_no_base_class(kind):
    attributes = {"model", "adapters", "updater", "gathered_model"}
    assert methods(Backend) - attributes <= methods(kind)
    assert kind.__bases__ == (object,)


def test_other_packages_import_the_contract_and_what_makes_engines():
    imported = {str(path.relative_to(PACKAGE)): modules_of_engines(path) for path in OUTSIDE}
    assert {path: modules for path, modules in imported.items() if not modules <= OPEN_TO_ALL} == {}


def modules_of_engines(path: Path) -> set[str]:
    """Returns the modules of engines/train that a file imports."""
    prefix, nodes = "paddock.engines.train.", [*ast.walk(ast.parse(path.read_text()))]
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.removeprefix(prefix).split(".")[0] for name in modules if name.startswith(prefix)}


def test_each_name_of_the_contract_is_used_by_another_package():
    used = {name for path in OUTSIDE for name in asked_of_engines(path)}
    assert methods(Engine) - used == set()
    assert used & INSIDE == set()


def asked_of_engines(path: Path) -> set[str]:
    """Attributes of variables, or of fields, that are named as engines are."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if name in ENGINES:
                found.add(node.attr)
    return found
