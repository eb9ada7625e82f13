"""How each phase of a step cuts its rows into micro-batches: the keys that decide it, and the tokens they allow."""

from __future__ import annotations

from dataclasses import dataclass

from paddock.config.schema import Config, row_tokens
from paddock.config.tree import get

_A, _REF, _RO = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
_LOG_PROBS = ("log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "log_prob_use_dynamic_bsz")


@dataclass(frozen=True)
class MicroBatches:
    """Names a phase's role and the keys of its micro-batches."""

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


_PPO = ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu", "use_dynamic_bsz")
PHASES = {
    "update_actor": MicroBatches("actor", "update_tokens", _A, *_PPO),
    "log_probs": MicroBatches("actor", "forward_tokens", _RO, *_LOG_PROBS),
    "ref_log_probs": MicroBatches("reference", "forward_tokens", _REF, *_LOG_PROBS),
    "teacher_log_probs": MicroBatches("teacher", "forward_tokens", _REF, *_LOG_PROBS),
    "update_critic": MicroBatches("critic", "update_tokens", "critic", *_PPO),
    "values": MicroBatches(
        "critic",
        "forward_tokens",
        "critic",
        "forward_micro_batch_size_per_gpu",
        "forward_max_token_len_per_gpu",
        "use_dynamic_bsz",
    ),
    "reward": MicroBatches(
        "reward_model",
        "forward_tokens",
        "reward_model",
        "micro_batch_size_per_gpu",
        "forward_max_token_len_per_gpu",
        "use_dynamic_bsz",
    ),
}
TOKEN_BUDGETS = tuple(dict.fromkeys(cut.tokens_key for cut in PHASES.values()))
"""Keys of token budgets, each before those that follow it."""
_BY_SWITCH = {cut.switch_key: cut for cut in reversed(PHASES.values())}
SWITCHED = tuple(reversed(_BY_SWITCH.values()))
"""One phase for each switch, the first that reads it."""
