"""The code keeps its levels, one file per vendor, sizes and names. docs/architecture.md says why."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "paddock"
LEVELS = [
    ["errors"],
    ["facts", "grading"],
    ["config", "core"],
    ["algorithms", "estimate", "kernels"],
    ["loading", "sandbox"],
    ["data", "models", "rewards"],
    ["engines", "environments"],
    ["rollouts"],
    ["workers"],
    ["runs"],
    ["trainer"],
    ["__main__", "cli", "commands", "doctor", "help", "library", "plan", "report", "verl"],
]
LEVEL = {package: number for number, packages in enumerate(LEVELS) for package in packages}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    return module.split(".")[0]


def test_every_package_that_has_a_level_is_there():
    assert {name for name in LEVEL if not any(module_of(path).startswith(name) for path in FILES)} == set()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> list[str]:
    """Absolute names of all that a file imports, also inside functions."""
    names = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_module_imports_from_lower_levels_or_its_own_folder(path):
    package = package_of(module_of(path))
    if module_of(path) == "__init__":
        return
    assert package in LEVEL, f"{package} has no level: give it one here and in docs/architecture.md"
    for name in imports(path):
        if not name.startswith("paddock."):
            continue
        other = package_of(name.removeprefix("paddock."))
        if other not in LEVEL:  # `from paddock import __version__`
            continue
        entry_points = LEVEL[package] == LEVEL[other] == len(LEVELS) - 1
        lower = other == package or entry_points or LEVEL[other] < LEVEL[package]
        assert lower, f"{module_of(path)} imports {name} from above"


def test_attention_imports_nothing_else_of_models():
    inside = [path for path in FILES if module_of(path).startswith("models.attention")]
    assert len(inside) > 5
    for path in inside:
        strange = [name for name in imports(path) if name.startswith("paddock.models.")]
        assert [name for name in strange if not name.startswith("paddock.models.attention.")] == [], module_of(path)


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (r"^\s*(import|from) ray\b", "workers/ray.py"),
        (r"\btorch\.cuda\b", "core/device.py"),
        (r"(import|from) torch_npu\b|import_module\(.torch_npu", "core/device.py"),
        (r"^\s*(import|from) peft\b", "models/adapters.py"),
        (r"^\s*(import|from) vllm\b", "engines/rollout/vllm.py"),
        (r"^\s*(import|from) sglang\b", "engines/rollout/sglang.py"),
        (r"^\s*(import|from) megatron\b", "engines/train/megatron"),
    ],
)
def test_a_vendor_has_one_home(pattern, home):
    guests = [module_of(path) for path in FILES if re.search(pattern, path.read_text(), re.M)]
    home = home.removesuffix(".py").replace("/", ".")
    assert [guest for guest in guests if guest != home and not guest.startswith(f"{home}.")] == []


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_and_functions_stay_small(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path.name}:{node.lineno} {node.name} has {length} lines"


def test_names_say_what_is_inside():
    hollow = re.compile(r"(^|_)(utils?|helpers?|misc|common)(_|$)")
    assert [str(path) for path in FILES if any(hollow.search(part) for part in module_of(path).split("."))] == []


def test_config_names_no_torch():
    packages = ("errors", "facts", "config", "estimate", "loading", "plan", "cli", "commands", "help", "doctor")
    heavy = ("torch", "transformers", "ray", "datasets")
    guilty = [
        (module_of(path), node.lineno)
        for path in FILES
        if package_of(module_of(path)) in packages
        for node in parsed(path).body  # at import time; a command may import more once it knows that it will train
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[0] in heavy
    ]
    assert guilty == []


def test_the_shim_holds_no_logic_of_its_own():
    """compat/verl adapts names and shapes; anything long belongs into the package."""
    for path in (ROOT / "compat").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


def test_no_module_imports_itself_by_way_of_others():
    modules = {module_of(path): path for path in FILES if module_of(path) != "__init__"}
    arrows: dict[str, set[str]] = {}
    for module, path in modules.items():
        named = (name.removeprefix("paddock.") for name in imports(path) if name.startswith("paddock."))
        # `from package import module` names the package as well; a module's own package is no import of its face
        arrows[module] = {name for name in named if name in modules and not f"{module}.".startswith(f"{name}.")}
    cleared: set[str] = set()

    def follow(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        for other in arrows[module] - cleared:
            follow(other, (*path, module))
        cleared.add(module)

    for module in modules:
        follow(module, ())
    assert len(cleared) == len(modules) > 300


def test_no_two_test_files_share_a_name():
    """pytest imports a test file by its name alone: a second file of that name is not collected."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
