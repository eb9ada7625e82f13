"""A plug-in with which every update fails as on a device without memory: for test_ray.py, on whose machine is none."""

from __future__ import annotations

from typing import Any

import torch

from paddock.workers.policy import Policy


def learn(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. And so on.")


Policy.learn = learn  # type: ignore[method-assign]
