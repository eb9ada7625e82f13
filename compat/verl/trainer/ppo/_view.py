"""One way to read the configs that callers bring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MISSING: Any = object()


class View:
    """Reads any config by attribute or `get`: a dataclass, an OmegaConf node, a mapping, None; then the fallback's."""

    def __init__(self, node: Any = None, fallback: Any = None, **overrides: Any):
        self._node, self._fallback, self._overrides = node, fallback, overrides

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._overrides:
            return self._overrides[name]
        default = getattr(self._fallback, name, MISSING)
        value = read(self._node, name, default)
        if value is MISSING:
            raise AttributeError(f"the config has no key {name!r}")
        return View(value, default) if isinstance(value, Mapping) or hasattr(default, "__dataclass_fields__") else value

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    __getitem__ = __getattr__

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)


def read(node: Any, name: str, default: Any) -> Any:
    if isinstance(node, Mapping):
        return node.get(name, default)
    return getattr(node, name, default)
