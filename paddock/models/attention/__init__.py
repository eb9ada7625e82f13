"""Attention: every implementation, and the table that says which serves when.

Each forward is asked with an `Attention` (interface.py), an object that says what its queries attend to and travels as
an argument through the model's layers. Its class is the layout of keys and values:

| class | layout | when |
|---|---|---|
| `Packed` | sequences end to end | training and prefill |
| `SharedPrompts` | prompts, then their responses | training, if shared prompts save tokens (models/sharing.py) |
| `SharedHeads` | a slice of the tokens per rank | training with sequence parallelism (models/ulysses.py) |
| `PoolPrefill`, `PoolDecode` | KV cache, one row per token | rollouts, if there are decode kernels (`cache_layout`) |
| `SlotPrefill`, `SlotDecode` | KV cache, one rectangle per sequence | rollouts without such kernels |
| none | padded rows | `use_remove_padding=False`, `generate`: transformers calls hook.py without an `Attention` |

Which implementation then computes a layer depends on its scores and on the device: `choice.TABLE` has one row for each,
and `choose` asks it at every call. Kernels themselves are in kernels/ (triton for a GPU, C++ for a CPU); flash
attention is called in core/device.py. Exact numerics replace the value, not the gradient, of a packed forward
(kernels/packed.py, called by models/fused/layer.py).

The package imports nothing else of models/.
"""

from paddock.kernels.arguments import Scores
from paddock.models.attention.choice import cache_layout, choose
from paddock.models.attention.hook import NAME, no_mask
from paddock.models.attention.interface import Attention, AttentionCall
from paddock.models.attention.packed import Packed
from paddock.models.attention.shared_prompts import SharedPrompts

__all__ = [
    "NAME",
    "Attention",
    "AttentionCall",
    "Packed",
    "Scores",
    "SharedPrompts",
    "cache_layout",
    "choose",
    "no_mask",
]
