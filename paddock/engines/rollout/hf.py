"""The plain engine: transformers' own attention and cache over padded batches. What `embedded` must equal."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from paddock.engines.rollout.base import Completion, OnDone, Prompt, Sampling
from paddock.engines.rollout.embedded.engine import borrowed
from paddock.engines.rollout.embedded.sampling import require_finite, sample, uniforms


class HFEngine:
    """Batches of `max_num_seqs` responses, prompts padded on the left, each batch until its last response ends."""

    def __init__(self, model: PreTrainedModel, *, max_num_seqs: int = 256, autocast: torch.dtype | None = None):
        self.model = model
        self.max_num_seqs = max_num_seqs
        self.autocast = autocast

    @torch.no_grad()
    def generate(self, prompts: list[Prompt], sampling: Sampling, on_done: OnDone | None = None) -> list[Completion]:
        pairs = [(prompt.tokens, row) for prompt in prompts for row in prompt.rows]
        # transformers' SDPA drops the cap on attention scores that Gemma 2 has.
        capped = getattr(self.model.config, "attn_logit_softcapping", None) is not None
        with borrowed(self.model, "eager" if capped else "sdpa", self.autocast):
            found: list[Completion] = []
            for start in range(0, len(pairs), self.max_num_seqs):
                finished = self.batch(pairs[start : start + self.max_num_seqs], sampling)
                found += finished
                if on_done is not None and len(found) < len(pairs):
                    on_done(finished)
            return found

    def batch(self, pairs: list[tuple[list[int], int]], sampling: Sampling) -> list[Completion]:
        device, width = self.model.device, max(len(tokens) for tokens, _ in pairs)
        tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in pairs], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in pairs], device=device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        cache = DynamicCache(config=self.model.config)
        numbers = uniforms(torch.tensor([row for _, row in pairs], device=device), sampling)
        stops = frozenset() if sampling.ignore_eos else sampling.stop_tokens
        ended: set[int] = set()
        columns: list[tuple[list[int], list[float]]] = []
        while len(columns) < sampling.max_tokens and len(ended) < len(pairs):
            logits = self.logits(tokens, mask, positions, cache)
            drawn, log_probs = sample(logits, numbers[:, len(columns)], sampling)
            require_finite(log_probs)
            columns.append((drawn.tolist(), log_probs.tolist()))
            ended |= {i for i, token in enumerate(columns[-1][0]) if token in stops}
            tokens, positions = drawn[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        words, chances = (list(zip(*column, strict=True)) for column in zip(*columns, strict=True))
        return [ended_at_stop(row, list(words[i]), list(chances[i]), stops) for i, (_, row) in enumerate(pairs)]

    def logits(self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, 0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Nothing to do, and nothing is read: the engine runs the actor's own parameters, which are already new."""

    def sleep(self) -> None:
        """Nothing to free: a cache lives as long as its batch."""

    def wake(self) -> None:
        """Nothing to do: the weights never left."""


def ended_at_stop(row: int, tokens: list[int], log_probs: list[float], stops: frozenset[int]) -> Completion:
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), None)
    return Completion(row, tokens[:end], log_probs[:end], stopped=end is not None)
