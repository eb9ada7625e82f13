"""Multi-head latent attention of DeepSeek-V3 and its kin, of Megatron's linear layers.  arXiv:2405.04434

Megatron's own module turns positions of one sequence; this one turns those of packed sequences, as the family does.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn
from torch.nn.functional import linear

from paddock.engines.train.megatron.layers import How, MegatronNorm
from paddock.models.attention import Scores


class Shared(nn.Module):
    """A matrix that every rank has whole: to the latents, which all heads read."""

    def __init__(self, config: Any, width: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class LatentAttention(nn.Module):
    """``[T, 1, hidden]`` to itself. Latents belong to tokens, heads to ranks."""

    def __init__(self, layers: list[Any], modelling: Any, config: Any, layer_number: int, pg_collection: Any):
        super().__init__()
        theirs = layers[layer_number - 1]
        self.ranks, self.sequence = pg_collection.tp, config.sequence_parallel
        self.scaling, self.layer_idx = float(theirs.scaling), layer_number - 1
        self.plain, self.turned, self.out = theirs.qk_nope_head_dim, theirs.qk_rope_head_dim, theirs.v_head_dim
        self.latent = theirs.kv_lora_rank
        interleaved = theirs.config.rope_interleave
        self.rotate = modelling.apply_rotary_pos_emb_interleave if interleaved else modelling.apply_rotary_pos_emb
        hidden, heads = config.hidden_size, config.num_attention_heads
        given = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": self.ranks}

        def to_heads(width: int, each: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(width, heads * each, gather_output=False, skip_bias_add=True, **given)

        self.linear_q_down: Shared | None = None
        rank = theirs.q_lora_rank
        if rank is not None:
            self.linear_q_down = Shared(config, hidden, rank)
            self.q_latent_norm = MegatronNorm(config, rank, theirs.epsilon)
        self.linear_q_up = to_heads(hidden if rank is None else rank, self.plain + self.turned)
        self.linear_kv_down = Shared(config, hidden, self.latent + self.turned)
        self.kv_latent_norm = MegatronNorm(config, self.latent, theirs.epsilon)
        self.linear_kv_up = to_heads(self.latent, self.plain + self.out)
        self.linear_proj = RowParallelLinear(
            heads * self.out, hidden, input_is_parallel=True, skip_bias_add=True, **given
        )

    def forward(self, hidden: Tensor, packed_seq_params: How, **unused: Any) -> tuple[Tensor, Tensor | None]:
        how = packed_seq_params
        latent = hidden if self.linear_q_down is None else self.q_latent_norm(self.linear_q_down(hidden))
        query = by_head(self.linear_q_up(latent)[0], self.plain + self.turned)
        latent, turned = self.linear_kv_down(hidden).split([self.latent, self.turned], -1)
        if self.sequence:
            turned = gather_from_sequence_parallel_region(turned, group=self.ranks)
        else:
            turned = copy_to_tensor_model_parallel_region(turned, group=self.ranks)
        both = by_head(self.linear_kv_up(self.kv_latent_norm(latent))[0], self.plain + self.out)
        key, value = both.split([self.plain, self.out], -1)
        query, rest = query.split([self.plain, self.turned], -1)
        rest, turned = self.rotate(rest, by_head(turned, self.turned), how.cos, how.sin)
        query = torch.cat([query, rest], -1)
        key = torch.cat([key, turned.expand(-1, key.shape[1], -1, -1)], -1)
        found = how.packed.attend(self, query, key, value, Scores(self.scaling))
        return self.linear_proj(found.flatten(2).transpose(0, 1))


def by_head(x: Tensor, dim: int) -> Tensor:
    """``[T, 1, H * D] -> [1, H, T, D]``"""
    return x.unflatten(-1, (-1, dim)).permute(1, 2, 0, 3)
