"""The kernels of a GPU that have a counterpart for a CPU (see native.py), and what they alone make use of."""

# ruff: noqa: F401 (the names are read from here, see choice.py)

from paddock.kernels.decode import decode_attention, rows_by_prompt
from paddock.kernels.gated import gated, gated_backward
from paddock.kernels.norm import add_norm, add_norm_backward
from paddock.kernels.rotary import rotary, rotary_backward
from paddock.kernels.sampling import draw
from paddock.kernels.statistics import gather, gradient
