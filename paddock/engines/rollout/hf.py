"""The plain engine: transformers' own attention and cache over padded batches. What `embedded` must equal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from paddock.engines.rollout.base import Completion, EngineConfig, Limits, Request, RolloutEngine, Sampling
from paddock.engines.rollout.embedded.engine import borrowed
from paddock.engines.rollout.embedded.routes import chosen
from paddock.engines.rollout.embedded.sampling import require_finite, sample, uniforms
from paddock.engines.rollout.stops import StopTables
from paddock.models.experts import ARGUMENT, Routing, experts_of, recordable
from paddock.models.token_stats import forbid
from paddock.models.vision import plain, plain_positions, vision_tokens

if TYPE_CHECKING:
    from paddock.engines.train.engine import Engine


class HFEngine(RolloutEngine):
    """Batches of `max_num_seqs` responses, prompts padded on the left, each batch until its last response ends."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int = 256,
        record_experts: bool = False,
        stop_tables: StopTables | None = None,
    ):
        """`stop_tables`: they know the texts of tokens, for samplings with stop strings."""
        self.model = model
        self.stop_tables = stop_tables or StopTables()
        self.record_experts = record_experts
        self.max_num_seqs = max_num_seqs
        self.sampling: Sampling | None = None
        self.waiting: list[Request] = []

    def resume(self, sampling: Sampling, limits: Limits) -> None:
        """Opens a session; a cache is made for each batch, as long as it is needed."""
        assert self.sampling is None, "a session is open: pause it first"
        self.sampling = sampling

    def submit(self, requests: Iterable[Request]) -> None:
        self.waiting += [part for request in requests for part in request.parts(1)]

    @torch.no_grad()
    def advance(self, seconds: float | None = None) -> list[Completion]:
        """Computes the next batch to its end, however long that takes: the plain engine knows no other pause."""
        assert self.sampling is not None, "no session is open: resume comes first"
        now, self.waiting = self.waiting[: self.max_num_seqs], self.waiting[self.max_num_seqs :]
        if not now:
            return []
        # transformers' SDPA drops the cap on attention scores that Gemma 2 has, and knows no sinks, as gpt-oss has.
        capped = getattr(self.model.config, "attn_logit_softcapping", None) is not None
        plain = capped or not self.model._supports_sdpa
        with borrowed(self.model, "eager" if plain else "sdpa"):
            return self.batch(now, self.sampling)

    def pause(self) -> list[Completion]:
        """Ends the session. What was not computed begins again when it is submitted again."""
        self.sampling, self.waiting = None, []
        return []

    def batch(self, requests: list[Request], sampling: Sampling) -> list[Completion]:
        device, width = self.model.device, max(len(request.tokens) for request in requests)
        missing, images = [width - len(one.tokens) for one in requests], [one.images for one in requests]
        filled = [[0] * gap + request.tokens for gap, request in zip(missing, requests, strict=True)]
        tokens = torch.tensor(filled, device=device)
        mask = torch.tensor([[0] * gap + [1] * (width - gap) for gap in missing], device=device)
        positions, pixels = (mask.cumsum(-1) - 1).clamp_min(0), plain(images, device)
        last = positions[:, -1:] + torch.tensor([[seen.offset if seen else 0] for seen in images], device=device)
        if pixels:
            positions = plain_positions(images, missing, width).to(device)
        cache = DynamicCache(config=self.model.config)
        counters = [(one.rows[0], one.step, one.start) for one in requests]
        rows, steps, starts = torch.tensor(counters, device=device).t()
        numbers = uniforms(rows, steps, starts, sampling.max_tokens, sampling.seed)
        stops = sampling.ends
        strings = self.stop_tables.of(sampling.stop, device)
        states = torch.tensor([strings.begun(one) for one in requests], device=device) if strings else None
        minimum = torch.tensor([request.minimum(sampling) for request in requests], device=device)
        named = torch.tensor(sorted(stops), device=device) if stops and sampling.min_tokens else None
        ends = [request.limit for request in requests]
        stopped: set[int] = set()
        columns: list[tuple[list[int], list[float]]] = []
        experts = recordable(experts_of(self.model)) if self.record_experts else None
        choices: list[Tensor] = []
        while len(columns) < max(ends):
            routing = Routing(experts) if experts else None
            logits = self.logits(tokens, mask, positions, cache, routing, pixels)
            if routing:
                choices.append(routing.chosen().unflatten(0, tokens.shape).cpu())
            early = None if named is None else minimum > len(columns)
            drawn, log_probs = sample(logits, numbers[:, len(columns)], sampling, early, named)
            require_finite(log_probs.numpy(force=True))
            columns.append((drawn.tolist(), log_probs.tolist()))
            said = torch.zeros_like(drawn, dtype=torch.bool)
            if strings and states is not None:
                states, said = strings.step(states, drawn)
                said &= minimum < len(columns)
            for i, (token, complete) in enumerate(zip(columns[-1][0], said.tolist(), strict=True)):
                if (token in stops or complete) and i not in stopped and len(columns) <= ends[i]:
                    stopped.add(i)
                    ends[i] = len(columns)
            last = last + 1
            tokens, positions, pixels = drawn[:, None], last, {}
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        drawn_tokens, drawn_log_probs = (list(zip(*column, strict=True)) for column in zip(*columns, strict=True))
        found = [
            Completion(one.rows[0], list(tokens[:end]), list(log_probs[:end]), i in stopped, key=one.keys[0])
            for i, (one, end, tokens, log_probs) in enumerate(
                zip(requests, ends, drawn_tokens, drawn_log_probs, strict=True)
            )
        ]
        return with_experts(found, [len(one.tokens) for one in requests], width, choices) if choices else found

    def logits(
        self, tokens: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache, routing: Routing | None,
        pixels: dict[str, Tensor],
    ) -> Tensor:  # fmt: skip
        output = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **pixels,
            **({ARGUMENT: routing} if routing else {}),
        )
        return forbid(output.logits[:, 0], vision_tokens(self.model.config))


def with_experts(found: list[Completion], lengths: list[int], width: int, choices: list[Tensor]) -> list[Completion]:
    """`choices` of the padded prompts, then of one token a row after another; nobody chose for the last one drawn."""
    whole = torch.cat([*choices, torch.zeros_like(choices[0][:, :1])], 1)
    return [
        replace(part, experts=chosen(row[width - length : width], row[width:], len(part.tokens)))
        for row, part, length in zip(whole, found, lengths, strict=True)
    ]


def open_engine(config: EngineConfig, trainer: Engine | None) -> HFEngine:
    """Makes the engine over the trainer's own model."""
    rollout = config.actor_rollout_ref.rollout
    assert trainer is not None and rollout.max_num_seqs is not None
    return HFEngine(
        trainer.rollout_model,
        max_num_seqs=rollout.max_num_seqs,
        record_experts=rollout.enable_rollout_routing_replay,
        stop_tables=StopTables.of_keys(config.actor_rollout_ref, config.data),
    )
