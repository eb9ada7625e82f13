"""A package of verl's name for launch scripts and plug-ins written for it. Re-exports only; the code is Paddock's."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`from verl import DataProto`, without torch for those who do not ask for it."""
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
