"""What rollouts that run ahead would give: decode steps of responses with known lengths, batch after batch, at the
pace of the plan.

A session draws the first batch of the window to its end, and later ones in the slots that are left, in the order in
which they are trained. What is unfinished at its end is computed again by the next session, with its prompt.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean
from typing import Any

from paddock.config.conversations import converses
from paddock.config.schema import Config
from paddock.config.topology import copies_rollout_log_probs, takes_one_step
from paddock.errors import UserError
from paddock.estimate.counts import Work
from paddock.estimate.duration import Pace, training_phases
from paddock.estimate.memory import StepLoad
from paddock.facts.machine import Speed
from paddock.loading.budgets import fits
from paddock.loading.rules.algorithm import rollouts_may_run_ahead
from paddock.plan.advice import SEQUENCES_KEY, Advice
from paddock.runs.reading import METRICS, SAMPLES, lines
from paddock.runs.record import starts

LENGTHS = "--lengths"
AHEAD = (1, 2, 4)
WARM, MEASURED = 1 + max(AHEAD), math.lcm(*(1 + ahead for ahead in AHEAD))
"""Steps before those that are counted, and these: whole periods, as the times of steps alternate."""
SLOTS = (1.0, 1.25, 1.5)
"""Responses in flight, in batches."""
NEAR = 1.02
"""Fewer slots are taken if they are slower by no more than this factor."""
MOST_ROWS = 512
"""Responses of a batch that are simulated. In a larger batch each stands for several."""
FEWEST, POINTS = 16, 4096
"""Lengths that tell something; lengths that stand for a tail that is named."""
LIMIT_RATIO = 1.5
"""The limit of a response, divided by the 99th percentile of a tail that is named."""
LONG_TAIL = 4
"""The longest response, divided by the median, from which on a run has the table without being asked."""
GAINS = {1: 1.15, 2: 1.3}
"""Batches ahead that are advised, and the least gain."""
DUMPS, STEPS = 4, 64
"""Last steps of a run whose dumps are read, and whose longest responses are."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of responses, in rising order, and of prompts."""

    source: str
    tokens: list[int]
    prompt: int | None = None
    """Mean; None: not known."""

    @property
    def tail(self) -> float:
        return self.tokens[-1] / self.at(0.5)

    def at(self, share: float) -> int:
        return self.tokens[min(len(self.tokens) - 1, int(share * len(self.tokens)))]


@dataclass(frozen=True)
class Outlook:
    """How long a step takes if the batches of so many later steps are drawn beside it."""

    staleness: int
    slots: int
    """Responses in flight, per engine."""
    seconds: float
    gain: float
    """Steps an hour, relative to those without staleness."""
    mini_batches: float
    """The same with as many batches as mini-batches of a larger rollout, in the same slots."""


def lengths_of(config: Config, given: str | None) -> Lengths | None:
    """Returns the lengths of a tail or run that is named, else of what the run of this config has drawn so far; None
    if there are none."""
    limit = config.data.max_response_length
    if given is not None and re.fullmatch(r"[0-9]+(\.[0-9]+)?", given) and float(given) >= 1:
        median, sigma = limit / LIMIT_RATIO / float(given), math.log(float(given)) / NormalDist().inv_cdf(0.99)
        drawn = (median * math.exp(sigma * NormalDist().inv_cdf((i + 0.5) / POINTS)) for i in range(POINTS))
        return Lengths(f"a log-normal tail of {given}", [max(1, min(limit, round(tokens))) for tokens in drawn])
    folder = Path(config.trainer.default_local_dir if given is None else given).expanduser()
    source, tokens = recorded(folder)
    if tokens:
        prompts = [line["prompt_length/mean"] for line in lines(folder / METRICS) if line.get("prompt_length/mean")]
        tokens = sorted(min(limit, length) for length in tokens)
        return Lengths(f"{source} of {folder}", tokens, round(fmean(prompts)) if prompts else None)
    if given is None:
        return None
    fix = f"{LENGTHS} RUN, a folder with {SAMPLES}, or {LENGTHS} 8: the 99th percentile is 8 times the median"
    raise UserError(
        f"is no tail and no folder of a run with at least {FEWEST} responses", key=LENGTHS, value=given, fix=fix
    )


def recorded(folder: Path) -> tuple[str, list[int]]:
    """Returns what is known of a run's responses, in words, and their lengths: those of its dumped rollouts; without
    them, of the few in samples.jsonl as often as they stand for others, and the longest of each step."""
    settings: dict[str, Any] = next((start.get("settings", {}) for start in reversed(starts(folder))), {})
    named = settings.get("trainer.rollout_data_dir")
    dumps = Path(named).glob("*.jsonl") if named else ()
    files = sorted((path for path in dumps if path.stem.isdecimal()), key=lambda path: int(path.stem))
    if rows := list(chain.from_iterable(map(lines, files[-DUMPS:]))):
        return f"{len(rows):,} responses", [row["length"] for row in rows if row["length"]]
    shown = (line["samples"] for line in lines(folder / SAMPLES) if line.get("source") == "rollout")
    few = [row["length"] for row in chain.from_iterable(shown) if row["length"]]
    if len(few) < FEWEST:
        return "", []
    longest = [int(line["response_length/max"]) for line in lines(folder / METRICS) if line.get("response_length/max")]
    each = settings.get("data.train_batch_size", 1) * settings.get("actor_rollout_ref.rollout.n", 1)
    longest = longest[-STEPS:]
    return f"{len(few)} responses", few * max(1, each * len(longest) // len(few)) + longest


def obstacle(config: Config, speed: Speed | None) -> str | None:
    """Returns why the simulation does not stand for this run; None if it does."""
    if speed is None:
        return "the time of a step is not known here"
    changed = deepcopy(config)
    changed.algorithm.staleness = changed.algorithm.staleness or 1
    for _, reason, *_ in rollouts_may_run_ahead(changed) or ():
        return reason
    if converses(config.actor_rollout_ref.rollout, config.environment):
        return "the turns of conversations are not simulated"
    return "rounds of algorithm.filter_groups are not simulated" if config.algorithm.filter_groups.enable else None


def outlooks(config: Config, job: StepLoad, speed: Speed, lengths: Lengths) -> list[Outlook]:
    """Returns what 0 and each of AHEAD give for responses of these lengths, with the slots that they need."""
    group, random = config.actor_rollout_ref, Random(0)
    prompts, samples, prompt = config.data.train_batch_size, group.rollout.n, lengths.prompt
    prompt = config.data.max_prompt_length if prompt is None else prompt
    rows = min(MOST_ROWS, prompts * samples)
    batches = [random.choices(lengths.tokens, k=rows) for _ in range(WARM + MEASURED + max(AHEAD))]
    drawn, share = sorted(chain(*batches)), job.rollout.rows / rows
    typical = [drawn[(2 * i + 1) * len(drawn) // (2 * prompts * samples)] for i in range(prompts * samples)]
    work = Work(prompts, samples, prompt, drawn[-1], tuple(typical), group.actor.ppo_epochs)
    simulation = Simulation(Pace.of(job, speed), prompt, samples, share)

    def training(own_log_probs: bool) -> float:
        return sum(training_phases(replace(job, own_log_probs=own_log_probs), work, speed).values())

    def seconds(slots: int, ahead: int) -> float:
        return fmean(simulation.sessions(batches, slots, ahead)[WARM : WARM + MEASURED]) + training(not copies(ahead))

    def mini_batches(slots: int, number: int) -> float:
        larger = [list(chain(*batches[i : i + number])) for i in range(WARM, WARM + MEASURED, number)]
        return fmean(simulation.sessions(larger, slots)) / number + training(not takes_one_step(config))

    def copies(ahead: int) -> bool:
        changed = deepcopy(config)
        changed.algorithm.staleness = ahead
        return copies_rollout_log_probs(changed)

    def room(ahead: int, slots: int) -> bool:
        return fits(replace(job, rollout=replace(job.rollout, ahead=ahead, max_sequences=slots)), {"gen"})

    batch = max(1, min(job.rollout.rows, job.rollout.max_sequences))
    now = seconds(batch, 0)
    table = [Outlook(0, batch, now, 1.0, 1.0)]
    for ahead in AHEAD:
        fitting = [slots for factor in SLOTS if room(ahead, slots := round(factor * batch))] or [batch]
        times = {slots: seconds(slots, ahead) for slots in fitting}
        slots = next(slots for slots in fitting if times[slots] <= NEAR * min(times.values()))
        table.append(Outlook(ahead, slots, times[slots], now / times[slots], now / mini_batches(slots, 1 + ahead)))
    return table


@dataclass(eq=False)
class Response:
    batch: int
    length: int
    drawn: int = 0


@dataclass(frozen=True)
class Simulation:
    """Draws responses in the slots of an engine."""

    pace: Pace
    prompt: int
    """Tokens of a prompt."""
    samples: int = 1
    """Responses to a prompt, which is computed once for them."""
    share: float = 1.0
    """Responses that each stands for: more in batches that are too large to simulate, fewer on several devices."""

    def sessions(self, batches: Sequence[Sequence[int]], slots: int, ahead: int = 0) -> list[float]:
        """Returns the seconds of each step's session, up to the last step beside which later batches are drawn.
        `batches`: the lengths of responses; `slots`: per engine, as `max_num_seqs` is."""
        window, seconds = deque[list[Response]](), list[float]()
        for number, batch in enumerate(batches):
            window.append([Response(number, length) for length in batch])
            if len(window) > ahead:
                seconds.append(self.session(window, max(1, round(slots / self.share))))
                window.popleft()
        return seconds

    def session(self, window: Sequence[list[Response]], slots: int) -> float:
        """Draws until all responses of the first batch are finished; returns the seconds that it takes."""
        unfinished = [response for batch in window for response in batch if response.drawn < response.length]
        waiting = deque(sorted(unfinished, key=lambda response: (response.batch, -response.drawn)))
        first = window[0][0].batch
        head = sum(response.batch == first for response in unfinished)
        live, order, now, keys, seconds = list[tuple[int, int, Response]](), count(), 0, 0, 0.0
        while head:
            while waiting and len(live) < slots:
                response = waiting.popleft()
                sharing = 1 if response.drawn else self.samples
                seconds += self.share * self.pace.prefill(self.prompt + response.drawn) / sharing
                keys += self.prompt + response.drawn
                heapq.heappush(live, (now + response.length - response.drawn, next(order), response))
            steps, rows = live[0][0] - now, len(live)
            read = steps * keys + rows * steps * (steps - 1) / 2
            seconds += self.pace.decode(steps, self.share * steps * rows, self.share * read)
            now, keys = now + steps, keys + steps * rows
            while live and live[0][0] == now:
                *_, response = heapq.heappop(live)
                response.drawn = response.length
                head -= response.batch == first
                keys -= self.prompt + response.length
        for end, _, response in live:
            response.drawn = response.length - (end - now)
        return seconds


def ahead_advice(config: Config, table: Sequence[Outlook], lengths: Lengths) -> list[Advice]:
    """Returns the advice to run ahead if steps are so much faster."""
    wanted = [row for row in table if row.gain >= GAINS.get(row.staleness, math.inf)]
    if config.algorithm.staleness or not wanted:
        return []
    row = wanted[-1]
    message = (
        f"the longest responses have {lengths.tail:.0f} x the median: staleness {row.staleness} gives about "
        f"{row.gain:.2f} x the steps an hour, and {row.staleness + 1} mini-batches of a larger rollout "
        f"{row.mini_batches:.2f} x"
    )
    keys = f"algorithm.staleness={row.staleness} {SEQUENCES_KEY}={row.slots}"
    return [Advice("algorithm.staleness", message, keys)]
