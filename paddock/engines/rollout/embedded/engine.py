"""Rollouts with the actor's own modules, in its own process: no copy of the weights, nothing to synchronise."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.embedded.prepacked import prepacked
from paddock.engines.rollout.embedded.sequences import Request, Sequences
from paddock.engines.rollout.embedded.slots import Decode, Prefill, Slots
from paddock.errors import UserError
from paddock.models.attention import NAME, Attention, no_mask

ROUND = 16  # buffers grow in steps of so many positions
PACK_FROM = 16  # decode steps that repay putting the weights in order


class EmbeddedEngine:
    """Continuous batching over transformers' modules: each prompt is computed once for all its responses, finished
    responses leave at once, and waiting prompts take their slots.

    `autocast` runs the module in that type, as a trainer with fp32 weights does; None takes the module as it is.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        autocast: torch.dtype | None = None,
    ):
        self.model = model
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.autocast = autocast
        self.slots: Slots | None = None

    @torch.no_grad()
    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Completion]:
        requests = Request.split(prompts, self.max_num_seqs)
        self.check(requests, sampling)
        slots = self.room(requests, sampling)
        self.slots = None  # an error leaves nothing behind: what is not finite would spread from there
        packed = prepacked(self.model, slots.count) if sampling.max_tokens >= PACK_FROM else nullcontext()
        with borrowed(self.model, NAME, self.autocast), packed:
            found = self.run(Sequences(slots, sampling, self.model.device), requests)
        self.slots = slots
        return [found[place] for place in range(len(found))]

    def run(self, sequences: Sequences, requests: list[Request]) -> dict[int, Completion]:
        """Longest prompts first, so that neighbours are of like length."""
        waiting = deque(sorted(requests, key=lambda request: -len(request.tokens)))
        found: dict[int, Completion] = {}
        while waiting or sequences.live:
            if arrivals := sequences.arrivals(waiting, self.max_num_batched_tokens):
                self.prefill(sequences, arrivals)
            else:
                self.decode(sequences)
            found.update(sequences.retire())
        return found

    def prefill(self, sequences: Sequences, requests: list[Request]) -> None:
        """Computes the prompts, packed, and draws the first token of each response."""
        start, device = sequences.live, self.model.device
        lengths = [len(request.tokens) for request in requests]
        how = Prefill(sequences.slots, lengths, sequences.admit(requests), device)
        tokens = torch.tensor([token for request in requests for token in request.tokens], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        logits = self.logits(tokens[None], positions[None], how, last)[0]
        counts = torch.tensor([len(request.rows) for request in requests], device=device)
        sequences.draw(logits.repeat_interleave(counts, 0), start)

    def decode(self, sequences: Sequences) -> None:
        """One more token for each live sequence."""
        live = slice(sequences.live)
        lengths = sequences.length[live]
        how = Decode(sequences.slots, lengths)
        logits = self.logits(sequences.token[live, None], lengths[:, None], how, 1)[:, 0]
        lengths += ~sequences.done[live]
        sequences.draw(logits)

    def logits(self, tokens: Tensor, positions: Tensor, how: Attention, keep: Tensor | int) -> Tensor:
        """Through the whole model, for families differ in what they do to logits, but for the kept positions alone."""
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=no_mask(tokens.device),
            use_cache=False,
            attend=how,
            logits_to_keep=keep,
        )
        return output.logits

    def room(self, requests: list[Request], sampling: Sampling) -> Slots:
        """The buffers of the last call, if this one fits."""
        count = min(self.max_num_seqs, sum(len(request.rows) for request in requests))
        longest = max((len(request.tokens) for request in requests), default=0) + sampling.max_tokens
        if self.slots is None or self.slots.count < count or self.slots.max_len < longest:
            self.slots = None  # frees the old ones before the new ones are made
            self.slots = Slots(count, -(-longest // ROUND) * ROUND, self.autocast)
        return self.slots

    def check(self, requests: list[Request], sampling: Sampling) -> None:
        sizes = [len(request.tokens) for request in requests]
        assert all(sizes), "a prompt is empty"
        if self.max_model_len is not None and max(sizes, default=0) + sampling.max_tokens > self.max_model_len:
            raise UserError(
                f"a prompt of {max(sizes)} tokens and a response of up to {sampling.max_tokens} do not fit",
                key="actor_rollout_ref.rollout.max_model_len",
                value=self.max_model_len,
                fix="raise it, or lower data.max_prompt_length or data.max_response_length",
            )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Nothing to do, and nothing is read: the engine runs the actor's own parameters, which are already new."""

    def sleep(self) -> None:
        """Frees keys and values; the next `generate` allocates what it needs."""
        self.slots = None

    def wake(self) -> None:
        """Nothing to do: buffers are made at first use, and the weights never left."""


@contextmanager
def borrowed(model: PreTrainedModel, attention: str, autocast: torch.dtype | None) -> Iterator[None]:
    """The module in evaluation mode and under this attention function, and afterwards as it was.

    Autocast spans all of it: weights are cast once, and the casts are gone before the next update.
    """
    training = [module for module in model.modules() if module.training]
    implementation = model.config._attn_implementation
    model.eval()
    model.set_attn_implementation(attention)
    try:
        with torch.autocast(model.device.type, autocast) if autocast else nullcontext():
            yield
    finally:
        model.set_attn_implementation(implementation)
        for module in training:
            module.training = True
