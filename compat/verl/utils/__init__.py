"""What plug-ins import from verl's tools: scores, metrics, configs, groups, masked means."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`from verl.utils import group_mean_std`, without torch for those who do not ask for it."""
    if name in ("as_torch_index", "group_mean_std"):
        from verl.utils import groupwise

        return getattr(groupwise, name)
    if name in ("hf_tokenizer", "hf_processor"):
        from verl.utils import tokenizer

        return getattr(tokenizer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
