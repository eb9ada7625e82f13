"""Vendors of devices have one home: core/device.py. Everyone else asks it what a device can do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "paddock"
HOME = "core/device.py"
ALLOWED = {
    "kernels/": "run on GPUs alone, and say so",
    "facts/": "what devices exist, and which of them are here",
    "config/": "the values of trainer.device, and what recipes set for them",
    "plan/": "arithmetic about devices that are not here",
    "estimate/": "arithmetic about devices that are not here",
    "loading/": "what a config says for a device, and the packages that it needs, before torch is imported",
}
VENDORS = r"cuda|npu|nccl|hccl|nvidia|ascend|rocm|hip|xpu|mps"
NAMES = re.compile(rf"(?:is_|torch_)?(?:{VENDORS})")
WORDS = re.compile(rf"\b(?:is_|torch_)?(?:{VENDORS})\b(?!\.)", re.IGNORECASE)
FILES = [
    path for path in sorted(PACKAGE.rglob("*.py"))
    if not (inside := path.relative_to(PACKAGE).as_posix()).startswith(tuple(ALLOWED)) and inside != HOME
]  # fmt: skip


def docstrings(tree: ast.Module) -> set[int]:
    """Strings that stand alone are words to readers."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def vendors_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Attributes, names, imports and strings of a file that name a vendor."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and NAMES.fullmatch(node.attr):
            yield node.lineno, f".{node.attr}"
        elif isinstance(node, ast.Name) and NAMES.fullmatch(node.id):
            yield node.lineno, node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for name in (module, *(alias.name for alias in node.names)):
                if any(NAMES.fullmatch(part) for part in name.split(".")):
                    yield node.lineno, name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found = None if " " in node.value.strip() else WORDS.search(node.value)
            if found:
                yield node.lineno, repr(found.group())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_other_module_names_a_vendor(path: Path) -> None:
    assert list(vendors_of(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "x.is_cuda",
        "x.cuda()",
        "import torch_npu",
        "from torch import cuda",
        "torch.device('cuda')",
        "device.type == 'npu'",
        "backend = 'cpu:gloo,cuda:nccl'",
        "f'{kind}:hccl'",
    ],
)
def test_the_guard_sees_what_it_looks_for(line: str) -> None:
    assert list(vendors_of(ast.parse(line)))


def test_the_guard_lets_words_and_options_of_others_pass() -> None:
    for line in ('"""CUDA graphs."""', "key = 'disable_cuda_graph'", "fix = 'trainer.device=cuda or cpu'"):
        assert list(vendors_of(ast.parse(line))) == []
