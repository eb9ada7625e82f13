"""Floating-point operations and bytes of a step, from shapes and lengths alone: no device and no clock.

With N weights that a token is multiplied with, V of them in the head, L layers and attention of width q:

    token      2 N + 4 L q keys     operations of one token's forward pass, over its keys
    prompt     as many tokens, over half of themselves; not through the head, as no log-prob of theirs is wanted
    response   as many tokens, over the prompt and half of themselves
    update     2 + r + w forwards   forward and input gradients; r: again if layers are recomputed, w: weight gradients,
                                    which adapters do without
    decode     every step reads all weights, every token the keys and values before it

A prompt is computed once for its group, unless its rows are on several devices (`prompt_copies`).
"""

from __future__ import annotations

from dataclasses import dataclass

from paddock.estimate.memory import RoleLoad
from paddock.estimate.splits import Megatron
from paddock.facts.models import ModelShape


@dataclass(frozen=True)
class Work:
    """Describes the rows of a step: how many prompts and responses, and how many tokens they have."""

    prompts: int
    responses: int
    """Per prompt."""
    prompt_tokens: int
    response_tokens: int
    """Tokens of the longest response."""
    lengths: tuple[int, ...] = ()
    """Tokens of each response; empty: all are as long as the longest."""
    epochs: int = 1
    shares_prompts: bool = True
    """True if a group's prompt is computed once where its rows are together."""

    @property
    def rows(self) -> int:
        return self.prompts * self.responses

    @property
    def written(self) -> int:
        """Tokens of all responses."""
        return sum(self.lengths) if self.lengths else self.rows * self.response_tokens

    @property
    def keys(self) -> float:
        """Keys that the tokens of all responses attend to: those of the prompt, and on average half of the response."""
        squares = sum(n * n for n in self.lengths) if self.lengths else self.rows * self.response_tokens**2
        return self.written * self.prompt_tokens + squares / 2


def multiplied_weights(role: RoleLoad) -> float:
    """Weights that one token is multiplied with; a tower's for each patch of the tokens that are images."""
    tower = role.shape.vision_params * (role.image_share * role.shape.vision_patches_per_token - 1)
    return role.shape.multiplied_parameters + tower


def head_weights(shape: ModelShape) -> int:
    return shape.hidden * (1 if shape.scalar_head else shape.vocab)


def attention_width(shape: ModelShape) -> float:
    if shape.kv_lora_rank:
        return shape.heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim) / 2
    return shape.heads * shape.head_dim


def prompt_copies(role: RoleLoad, work: Work, devices: int = 1) -> int:
    """Times that each prompt is computed: once for each device that may have rows of its group. Ranks that share the
    tokens of a row, and Megatron's, compute every row alone."""
    alone = isinstance(role.split, Megatron) or role.split.sequence > 1
    return work.responses if alone or not work.shares_prompts else min(work.responses, devices)


def prompt_operations(role: RoleLoad, work: Work) -> float:
    """Operations of every prompt's forward pass, once each."""
    products = 2 * (multiplied_weights(role) - head_weights(role.shape))
    attention = 4 * role.shape.layers * attention_width(role.shape) * work.prompt_tokens / 2
    return work.prompts * work.prompt_tokens * (products + attention)


def response_operations(role: RoleLoad, work: Work) -> float:
    """Operations of a forward pass of all responses, at once or token by token."""
    attention = 4 * role.shape.layers * attention_width(role.shape) * work.keys
    return work.written * 2 * multiplied_weights(role) + attention


def forward_operations(role: RoleLoad, work: Work, devices: int = 1) -> float:
    copies = prompt_copies(role, work, devices)
    return copies * prompt_operations(role, work) + response_operations(role, work)


def forward_tokens(role: RoleLoad, work: Work, devices: int = 1) -> int:
    """Tokens that go through the model in one pass over the rows."""
    return prompt_copies(role, work, devices) * work.prompts * work.prompt_tokens + work.written


def update_forwards(role: RoleLoad) -> int:
    """Forward passes whose operations an update has."""
    return 2 + role.checkpointing + (role.lora_rank == 0)
