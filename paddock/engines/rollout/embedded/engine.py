"""Rollouts with the actor's own modules, in its own process: no copy of the weights, nothing to synchronise."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from paddock.core.device import Launched, can_record, empty_cache, to_device
from paddock.core.garbage import collecting_new_objects
from paddock.engines.rollout.base import Completion, Decoded, Limits, Request, RolloutEngine, Sampling
from paddock.engines.rollout.embedded.graphs import STEPS, TURN_STEPS, Graphs, bucket
from paddock.engines.rollout.embedded.pool import TokenPool, numbers_of_a_token, worth_sharing
from paddock.engines.rollout.embedded.prepacked import prepacked
from paddock.engines.rollout.embedded.routes import Routes
from paddock.engines.rollout.embedded.sequences import Extension, KeyValues, Sequences
from paddock.engines.rollout.embedded.slots import Slots
from paddock.engines.rollout.stops import StopTables
from paddock.errors import UserError
from paddock.kernels.launch import can_launch
from paddock.models.adapters import adapters_of, adapters_on
from paddock.models.attention import NAME, Attention, cache_layout, no_mask
from paddock.models.attention.shared_prompts import ranges
from paddock.models.experts import ARGUMENT, Routing, experts_of, recordable
from paddock.models.fused import fused
from paddock.models.packing import spare
from paddock.models.token_stats import Head, forbid
from paddock.models.vision import Placed, place_images, vision_tokens

if TYPE_CHECKING:
    pass

ROUND = 16  # buffers grow in steps of so many positions
PREFILL_SPARE = 8  # a share of a prefill that may be for nothing: lengths of prompts vary, and a prefill is short
PACK_FROM = 16  # decode steps that repay putting the weights in order


class EmbeddedEngine(RolloutEngine):
    """Continuous batching over transformers' modules: each prompt is computed once for all its responses, finished
    responses leave at once, and waiting prompts take their slots.

    On a GPU a decode step is a CUDA graph, and several of them run before the host reads the done flags. Graphs stay
    for the next call, and keys and values too unless `free_cache`: then others have their memory meanwhile. Where it
    does not come back at the same address, graphs are made anew, which takes some hundredths of a second.

    `merge` adds adapters that are on to the weights while a session is open.
    """

    decoded = Decoded()

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        max_model_len: int | None = None,
        enforce_eager: bool = False,
        free_cache: bool = True,
        record_experts: bool = False,
        merge: bool = False,
        stop_tables: StopTables | None = None,
    ):
        """`stop_tables`: they know the texts of tokens, for samplings with stop strings."""
        self.model = model
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.dtype = model.dtype
        self.on_gpu = can_launch(next(model.parameters()))
        self.records = self.on_gpu and can_record(model.device) and not enforce_eager
        self.keeps = self.on_gpu and not free_cache
        self.record_experts = record_experts
        self.merge = merge
        self.experts = experts_of(model)
        self.never = vision_tokens(model.config)
        self.slots: TokenPool | None = None
        self.sequences: dict[int, Sequences] = {}
        self.graphs: dict[tuple[Any, ...], Graphs] = {}
        self.stop_tables = stop_tables or StopTables()
        self.addresses, self.address = 0, 0  # of the weights, and of dropped keys and values
        self.session: Sequences | None = None
        self.waiting: deque[Request] = deque()
        self.turns: deque[Request] = deque()
        self.contexts = ExitStack()
        self.before_last_step: Launched | None = None
        """Place in the stream before the last decode step that was launched."""

    def resume(self, sampling: Sampling, limits: Limits) -> None:
        """Opens a session: keys and values have room for its limits, and the module is in evaluation mode until its
        end."""
        assert self.session is None, "a session is open: pause it first"
        self.check(limits, sampling)
        slots = self.cache(limits, sampling)
        sequences = self.columns(slots, sampling)
        sequences.begin(sampling, self.stop_tables.of(sampling.stop, self.model.device))
        if self.record_experts:
            sequences.routes = Routes(recordable(self.experts), slots.count, sampling.max_tokens, self.model.device)
        with ExitStack() as contexts:
            adapters = adapters_of(self.model) if self.merge and adapters_on(self.model) else None
            if adapters is not None:
                contexts.enter_context(adapters.in_weights())
            if self.records:
                self.drop_old_graphs()
            contexts.enter_context(collecting_new_objects())
            contexts.enter_context(borrowed(self.model, NAME))
            if sampling.max_tokens >= PACK_FROM and not self.on_gpu:
                contexts.enter_context(prepacked(self.model, slots.count))
            self.session, self.contexts, self.waiting = sequences, contexts.pop_all(), deque()

    def submit(self, requests: Iterable[Request]) -> None:
        """Adds requests: those of earlier steps are computed first, and of one step the longest, so that neighbours are
        of like length. Those that go on from a parked response come before them."""
        assert self.session is not None, "no session is open: resume comes first"
        parked, begun = self.session.parked, []
        for request in requests:
            if known := parked.get(request.keys[0]):
                same = request.tokens[: len(known.tokens)] == known.tokens
                assert same and len(request.rows) == 1, "a parked response goes on from its own tokens, by itself"
                self.turns.append(request)
            else:
                begun += request.parts(self.max_num_seqs)
        if self.record_experts and any(request.keep for request in (*begun, *self.turns)):
            raise UserError(
                "choices of experts are recorded for responses of one turn alone",
                key="actor_rollout_ref.rollout.enable_rollout_routing_replay",
                value=True,
                fix="leave it out where conversations have several turns",
            )
        waiting = sorted([*self.waiting, *begun], key=lambda request: (request.step, -len(request.tokens)))
        self.waiting = deque(waiting)

    @torch.no_grad()
    def advance(self, seconds: float | None = None) -> list[Completion]:
        sequences, deadline = self.session, None if seconds is None else time.monotonic() + seconds
        assert sequences is not None, "no session is open: resume comes first"
        while self.turns or self.waiting or sequences.live:
            if requests_now := sequences.next_requests(self.waiting, self.max_num_batched_tokens):
                self.prefill(sequences, requests_now)
            elif self.turns:
                self.extend(sequences, self.next_turns())
            elif sequences.live:
                self.decode(sequences)
            else:
                break  # parked responses hold all the room: they go on, or are forgotten, before others begin
            finished = sequences.retire()
            if finished or (deadline is not None and time.monotonic() > deadline):
                return finished
        return []

    def next_turns(self) -> list[Request]:
        """Takes the next turns whose new tokens are within the token budget; at least one."""
        assert self.session is not None
        turns: list[Request] = []
        budget = self.max_num_batched_tokens
        while self.turns:
            new = len(self.turns[0].tokens) - len(self.session.parked[self.turns[0].keys[0]].tokens) + 1
            if turns and new > budget:
                break
            turns.append(self.turns.popleft())
            budget -= new
        return turns

    def can_wait(self) -> bool:
        """True until a GPU begins the last step: while it computes that one, the next ones are to be launched."""
        return self.before_last_step is None or not self.before_last_step.done()

    def forget(self, keys: Iterable[int]) -> None:
        assert self.session is not None
        self.session.forget(keys)

    @torch.no_grad()
    def pause(self) -> list[Completion]:
        assert self.session is not None
        try:
            parts = self.session.interrupt()
        finally:
            self.end_session()
        self.sleep()
        return parts

    def abandon(self) -> None:
        """Ends the session and drops keys and values: what is not finite would spread from there."""
        self.end_session()
        self.free()

    def end_session(self) -> None:
        self.session = self.before_last_step = None
        self.waiting.clear()
        self.turns.clear()
        self.contexts.close()

    def prefill(self, sequences: Sequences, requests: list[Request]) -> None:
        """Computes the prompts, packed, and draws the first token of each response."""
        start, device = sequences.live, self.model.device
        lengths = [len(request.tokens) for request in requests]
        again = sum(length for request, length in zip(requests, lengths, strict=True) if request.start)
        self.decoded = replace(self.decoded, recomputed=self.decoded.recomputed + again)
        how = sequences.slots.prefill(lengths, sequences.admit(requests), device)
        every = chain.from_iterable(request.tokens for request in requests)
        tokens = torch.from_numpy(np.fromiter(every, np.int64))  # torch would take six times as long
        positions, last = ranges([0] * len(lengths), lengths), torch.tensor(lengths).cumsum(0) - 1
        tokens, positions, last = (to_device(x, device) for x in (tokens, positions, last))
        routing = sequences.routes.watch() if sequences.routes else None
        seen = place_images([request.images for request in requests], lengths, device)
        where, images = seen or (positions[None], None)
        more = (0, 0 if images or routing else spare(len(tokens), self.dtype, device, PREFILL_SPARE))
        logits = self.logits(pad(tokens[None], more), pad(where, more), how, last, routing, images)
        if sequences.routes and routing:
            sequences.routes.prefilled(routing, lengths, [len(request.rows) for request in requests])
        which = to_device(torch.tensor([i for i, request in enumerate(requests) for _ in request.rows]), device)
        sequences.draw(logits[which], slice(start, sequences.live))
        sequences.aged(1, start)

    def extend(self, sequences: Sequences, requests: list[Request]) -> None:
        """Computes what stands behind parked responses, beside a decode step of all that are live, which draws the
        first token of each next response."""
        self.decode(sequences, sequences.slots.extend(sequences.unpark(requests)))

    def decode(self, sequences: Sequences, beside: Extension | None = None) -> None:
        """More tokens for each live sequence: one, or on a GPU as many as run between two reads of the done flags.

        `beside`: new tokens that the first of these steps computes as well.
        """
        if not self.on_gpu:
            self.count(1, sequences.live)
            more = 0 if sequences.routes else spare(sequences.live, self.dtype, self.model.device)
            self.step(sequences, min(sequences.live + more, sequences.slots.count), beside)
            return sequences.aged(1)
        times = min(TURN_STEPS if sequences.parks else STEPS, sequences.longest_wait)
        if times <= 0:  # all are finished, which the host has not seen yet
            return
        self.count(times, sequences.live)
        if beside is not None:
            self.repeat(sequences, sequences.slots.count, 1, beside)  # of all slots: fewer sizes, fewer graphs
        rows, left = bucket(sequences.live, sequences.slots.count), times - (beside is not None)
        self.repeat(sequences, rows, left - 1)
        self.before_last_step = Launched(self.model.device)
        self.repeat(sequences, rows, min(left, 1))
        sequences.aged(times)

    def count(self, steps: int, rows: int) -> None:
        so_far = self.decoded
        self.decoded = replace(so_far, steps=so_far.steps + steps, rows=so_far.rows + steps * rows)

    def repeat(self, sequences: Sequences, rows: int, times: int, beside: Extension | None = None) -> None:
        if self.records and self.experts is None:  # how many tokens an expert gets is not known to a graph
            return self.recorded(sequences).run(rows, times, beside)
        for _ in range(times):
            self.step(sequences, rows, beside)

    def step(self, sequences: Sequences, rows: int, beside: Extension | None = None) -> None:
        """Draws one more token for each of the first `rows` slots. Nothing here waits for a GPU."""
        lengths, done = sequences.length[:rows], sequences.done[:rows]
        how = sequences.slots.decode(lengths, done, beside)
        routing = sequences.routes.watch() if sequences.routes else None
        tokens, positions = sequences.token[:rows], lengths + sequences.offset[:rows] if self.never else lengths
        if beside is not None:
            tokens, positions = torch.cat([tokens, beside.tokens]), torch.cat([positions, beside.positions])
        logits = self.logits(tokens[:, None], positions[:, None], how, None, routing, first=rows)
        if sequences.routes and routing:
            sequences.routes.decoded(routing, sequences.drawn[:rows])
        lengths += ~done
        sequences.draw(logits, slice(0, rows))

    def logits(
        self, tokens: Tensor, positions: Tensor, how: Attention, keep: Tensor | None, routing: Routing | None = None,
        images: Placed | None = None, first: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns logits ``[rows, vocab_size]`` after the kept positions of a packed row, or after the only one of each
        of the `first` rows.

        Through the whole model where it has no fused forward, for families differ in what they do to logits.
        """
        if images is not None:
            hidden = images.hidden(self.model, tokens, positions, how, routing)
            return Head.of(self.model).logits(hidden[0, keep])
        decoder = fused(self.model)
        if decoder is not None:
            hidden = decoder.hidden(tokens, positions, how)
            return Head.of(self.model).logits(hidden[:first, 0] if keep is None else hidden[0, keep])
        output = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=no_mask(tokens.device),
            use_cache=False,
            attend=how,
            logits_to_keep=1 if keep is None else keep,
            **({ARGUMENT: routing} if routing else {}),
        )
        return forbid(output.logits[:first, 0] if keep is None else output.logits[0], self.never)

    def cache(self, limits: Limits, sampling: Sampling) -> KeyValues:
        """Returns the KV cache: that of the last session, if this one fits."""
        most = self.max_num_seqs
        parts = [(size, min(most, left)) for size, rows in limits.requests for left in range(rows, 0, -most)]
        count = min(most, sum(rows for _, rows in parts))
        sizes = sorted((size for size, _ in parts), reverse=True)
        if not self.on_gpu:
            empty_cache(self.model.device)  # of the update before: it would stand beside keys and values
        if not self.pooled:
            return Slots(count, sizes[0] + sampling.max_tokens)
        behind = sampling.max_tokens if limits.behind is None else limits.behind
        at_once = sum(sizes[: count // min(rows for _, rows in parts)])
        pool = self.slots
        if pool is None or pool.count < count or pool.prompt_tokens < at_once or pool.answer_tokens < behind:
            at_once = max(at_once, pool.prompt_tokens * 5 // 4) if pool and pool.prompt_tokens < at_once else at_once
            self.free()
            pool = TokenPool(count, rounded(at_once), rounded(behind), self.model.device)
            self.slots = pool
        elif pool.shapes:
            self.restore(pool)
        pool.shares = self.on_gpu and worth_sharing(parts, count, numbers_of_a_token(self.model.config))
        return pool

    @property
    def pooled(self) -> bool:
        """True if the KV cache is a `TokenPool`. A sharded model's weights are known only once they are gathered."""
        return cache_layout(next(self.model.parameters())) == "pool"

    def restore(self, pool: TokenPool) -> None:
        if not self.address:
            empty_cache(self.model.device)  # of the buffers that they were, layer by layer
        address = pool.restore()
        if address != self.address:
            self.graphs.clear()
        self.address = address

    def columns(self, slots: KeyValues, sampling: Sampling) -> Sequences:
        """Returns the columns; on a GPU those of an earlier call with the same length, which graphs read and write."""
        made = partial(Sequences, slots, sampling.max_tokens, self.model.device, ahead=self.on_gpu)
        if not self.on_gpu:
            return made()
        if sampling.max_tokens not in self.sequences:
            self.sequences[sampling.max_tokens] = made()
        return self.sequences[sampling.max_tokens]

    def drop_old_graphs(self) -> None:
        """Drops all graphs once weights have moved or adapters were switched."""
        pointers = [tensor.data_ptr() for tensor in chain(self.model.parameters(), self.model.buffers())]
        addresses = hash((*pointers, adapters_on(self.model)))
        if addresses != self.addresses:
            self.graphs.clear()
            self.addresses = addresses

    def recorded(self, sequences: Sequences) -> Graphs:
        """Returns the graphs of these sequences, which hold for sessions that draw alike and read prompts alike."""
        sampling, shares = sequences.sampling, self.slots is not None and self.slots.shares
        key = (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, shares,
               sampling.stop, sequences.early is None or len(sequences.early))  # fmt: skip
        if key not in self.graphs:
            self.graphs[key] = Graphs(partial(self.step, sequences))
        return self.graphs[key]

    def check(self, limits: Limits, sampling: Sampling) -> None:
        sizes = [tokens for tokens, _ in limits.requests]
        assert all(sizes), "a prompt is empty"
        longest = max(sizes) if limits.whole is None else limits.whole - sampling.max_tokens
        if self.max_model_len is not None and longest + sampling.max_tokens > self.max_model_len:
            raise UserError(
                f"a prompt of {longest} tokens and a response of up to {sampling.max_tokens} do not fit",
                key="actor_rollout_ref.rollout.max_model_len",
                value=self.max_model_len,
                fix="raise it, or lower data.max_prompt_length or data.max_response_length",
            )

    def sleep(self) -> None:
        """Frees the device memory of keys and values, unless they are to stay."""
        if self.slots is None or self.keeps:
            return
        if self.graphs:
            self.slots.drop()
        else:
            self.free()

    def free(self) -> None:
        """Drops keys, values, and the graphs that read them."""
        self.slots = None
        self.sequences, self.graphs, self.addresses, self.address = {}, {}, 0, 0


def rounded(tokens: int) -> int:
    return -(-tokens // ROUND) * ROUND


@contextmanager
def borrowed(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Puts the module in evaluation mode and under this attention function, and afterwards back."""
    training = [module for module in model.modules() if module.training]
    implementation = model.config._attn_implementation
    if training:
        model.eval()
    if implementation != attention:
        model.set_attn_implementation(attention)
    try:
        yield
    finally:
        if implementation != attention:
            model.set_attn_implementation(implementation)
        for module in training:
            module.training = True
