"""The phases of a step: their names, the role that works in each, and the keys that cut its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddock.config.schema import Config, row_tokens
from paddock.config.tree import get

_A, _REF, _RO = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
_LOG_PROBS = ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz")


@dataclass(frozen=True)
class MicroBatches:
    """Names a phase's role and the keys that cut its rows into micro-batches."""

    role: str
    field: str
    """Field of the role in the memory model that holds the tokens."""
    section: str
    rows: str
    """Key of the number of rows."""
    tokens: str
    """Key of the token budget."""
    switch: str
    """Key that is True if the token budget is used."""

    @property
    def rows_key(self) -> str:
        return f"{self.section}.{self.rows}"

    @property
    def tokens_key(self) -> str:
        return f"{self.section}.{self.tokens}"

    @property
    def switch_key(self) -> str:
        return f"{self.section}.{self.switch}"

    def by_tokens(self, config: Config) -> bool:
        """True if the token budget cuts rows: also if it is switched off, but no number of rows is set."""
        return bool(get(config, self.switch_key)) or get(config, self.rows_key) is None

    def most_tokens(self, config: Config) -> int:
        """Returns the tokens of one micro-batch at most: the budget, or full rows."""
        if self.by_tokens(config):
            return int(get(config, self.tokens_key))
        return int(get(config, self.rows_key)) * row_tokens(config.data)


@dataclass(frozen=True)
class Phase:
    """Describes a phase of a step."""

    name: str
    """Name of its timer (`timing_s/NAME`), and of its memory and seconds in a plan."""
    title: str
    """Name for people."""
    role: str = ""
    """The role that works in it, as the memory model names it."""
    cut: MicroBatches | None = None
    updates: bool = False
    """True: the role's weights change."""
    generates: bool = False
    """True: responses are drawn."""
    prefetches: str = ""
    """The role whose weights are fetched in it, for the phase after it."""
    checkpointing: str = ""
    """Key that has layers recomputed in its backward pass."""
    by_tokens: str = ""
    """Tokens that its seconds are divided by for `timing_per_token_ms`: of `responses`, or `all`."""
    outside: bool = False
    """True: `timing_s/step` does not contain it."""


_PPO = ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "use_dynamic_bsz")
_VALUES = ("forward_micro_batch_size_per_gpu", "forward_max_token_len_per_gpu", "use_dynamic_bsz")
_REWARD = ("micro_batch_size_per_gpu", "forward_max_token_len_per_gpu", "use_dynamic_bsz")


def _computes(name: str, title: str, role: str, section: str, keys: tuple[str, ...], **rest: Any) -> Phase:
    """Returns a phase in which a role computes micro-batches, cut by these keys of the section."""
    field = "update_tokens" if rest.get("updates") else "forward_tokens"
    return Phase(name, title, role, MicroBatches(role, field, section, *keys), **rest)


_ALL = (
    Phase("gen", "generation", "rollout", generates=True, by_tokens="responses"),
    Phase("gen_max", "greedy baseline", "rollout", generates=True),
    _computes("reward", "reward", "reward_model", "reward_model", _REWARD, prefetches="reference"),
    _computes("old_log_prob", "old log-probs", "actor", _RO, _LOG_PROBS, prefetches="reference"),
    _computes("ref", "reference", "reference", _REF, _LOG_PROBS, by_tokens="all"),
    _computes("teacher", "teachers", "teachers", _REF, _LOG_PROBS),
    _computes("values", "values", "critic", "critic", _VALUES, by_tokens="all"),
    Phase("adv", "advantages", by_tokens="all"),
    _computes("update_critic", "critic update", "critic", "critic", _PPO, updates=True,
              checkpointing="critic.model.enable_gradient_checkpointing", by_tokens="all"),
    _computes("update_actor", "policy update", "actor", _A, _PPO, updates=True,
              checkpointing="actor_rollout_ref.model.enable_gradient_checkpointing", by_tokens="all"),
    Phase("update_reward_model", "reward model update"),
    Phase("update_weights", "weight sync"),
    Phase("testing", "validation", "rollout", generates=True, outside=True),
    Phase("dump_rollout_generations", "rollout dump"),
    Phase("save_checkpoint", "checkpoint", outside=True),
)  # fmt: skip
PHASES = {phase.name: phase for phase in _ALL}
"""Phases by name, in the order in which they run; they do not overlap."""
CUTS = {
    name: cut
    for name in ("update_actor", "old_log_prob", "ref", "teacher", "update_critic", "values", "reward")
    if (cut := PHASES[name].cut)
}
"""Keys of the phases whose rows are cut, each phase before those whose token budgets follow its own."""
TOKEN_BUDGETS = tuple(dict.fromkeys(cut.tokens_key for cut in CUTS.values()))
"""Keys of token budgets, each before those that follow it."""
_BY_SWITCH = {cut.switch_key: cut for cut in reversed(CUTS.values())}
SWITCHED = tuple(reversed(_BY_SWITCH.values()))
"""One phase for each switch, the first that reads it."""
