"""Reward managers under verl's names: a DataProto in, a score on each row's last token out.

The work is `paddock.rewards.manager`'s. A manager of one's own that is registered here serves `load_reward_manager`;
a Paddock run does not call it, and refuses its name in `reward_model.reward_manager`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from paddock.config.rewards import Part
from paddock.config.schema import OverlongBufferConfig, RewardModelConfig
from paddock.facts.machine import this_machine
from paddock.rewards.functions import lists_of, row_of, signature_of
from paddock.rewards.manager import NO_FUNCTIONS, RewardManager, function_at
from paddock.rewards.score import Score, ScoreRequest, checked
from verl.protocol import to_batch
from verl.trainer.ppo._view import read
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY, get_reward_manager_cls, register


class NaiveRewardManager:
    """Scores each response by `compute_score`, or by the rule for its data source.

    Functions that `get_custom_reward_fn` loaded, and rules that could hang, run in processes with a time-out; any other
    function runs here. Each is called once a row, and one that raises stops the call. `num_examine` asks for nothing:
    responses are not printed.
    """

    name = "naive"

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Any = None,
    ):
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.rewards = scorer(settings(self.name, max_resp_len, overlong_buffer_cfg), compute_score)

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Scores [B, R]; as a dict `reward_tensor`, and `reward_extra_info` with what else was returned, by name."""
        if "rm_scores" in data.batch.keys():  # noqa: SIM118, a TensorDict has no other way to ask
            scores, extras = extract_reward(data)
        else:
            scores, extras = self._score(data)
        return {"reward_tensor": scores, "reward_extra_info": extras} if return_dict else scores

    def _score(self, data: Any) -> tuple[Tensor, dict[str, list[Any]]]:
        objects, batch = data.non_tensor_batch, to_batch(data)
        own = {
            "data_source": objects[self.reward_fn_key],
            "ground_truth": [row["ground_truth"] for row in objects["reward_model"]],
        }
        if "extra_info" in objects:
            own["extra_info"] = objects["extra_info"]
        answers = [
            row[:length]
            for row, length in zip(batch.need("responses").tolist(), batch.need("lengths").tolist(), strict=True)
        ]
        filled, _ = self.rewards.fill(
            batch.with_(extras=own), self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        )
        return filled.need("scores"), {name: list(values) for name, values in filled.extras.items() if name not in own}


def extract_reward(batch: Any) -> tuple[Tensor, dict[str, Any]]:
    """Scores that are in the batch already, and the columns that came with them."""
    names = batch.meta_info.get("reward_extra_keys", ())
    return batch.batch["rm_scores"], {name: batch.non_tensor_batch[name] for name in names}


class BatchRewardManager(NaiveRewardManager):
    """`compute_score` is called once, with lists: `data_sources`, `solution_strs`, `ground_truths`, `extra_infos`."""

    name = "batch"


class PrimeRewardManager(NaiveRewardManager):
    name = "prime"


class DAPORewardManager(NaiveRewardManager):
    """Every row gets `acc`; long responses lose what `overlong_buffer_cfg` says."""

    name = "dapo"


for built_in in (NaiveRewardManager, BatchRewardManager, PrimeRewardManager, DAPORewardManager):
    register(built_in.name)(built_in)


class Called(RewardManager):
    """Scores by a function at hand, in this process."""

    def __init__(self, config: RewardModelConfig, function: Callable[..., Any]):
        super().__init__(config)
        self.function, self.signature = function, signature_of(function)

    def score(self, requests: Sequence[ScoreRequest | None]) -> list[Score]:
        rows = [request for request in requests if request is not None]  # a reward model scores none of verl's rows
        if self.config.reward_manager != "batch":
            return [checked(self.function(**self.signature.taken(row_of(row)))) for row in rows]
        results = self.function(**self.signature.taken(lists_of(rows)))
        return [checked(result) for _, result in zip(rows, results, strict=True)]


def scorer(config: RewardModelConfig, compute_score: Callable[..., Any] | None) -> RewardManager:
    if compute_score in (None, default_compute_score):
        return RewardManager(config)
    target = getattr(compute_score, "target", None)
    if target is None:
        return Called(config, compute_score)
    part = Part(target.name, 1.0, target.path, target.name, dict(target.kwargs))
    return RewardManager(config, [function_at(part, config, NO_FUNCTIONS)])


def settings(manager: str, max_resp_len: int | None, overlong_buffer_cfg: Any) -> RewardModelConfig:
    reward = RewardModelConfig()
    reward.reward_manager, reward.num_workers = manager, this_machine().cores
    reward.reward_kwargs.max_resp_len = max_resp_len or 0
    for each in fields(OverlongBufferConfig):
        value = read(overlong_buffer_cfg, each.name, None)
        if value is not None:
            setattr(reward.reward_kwargs.overlong_buffer_cfg, each.name, value)
    return reward


__all__ = [
    "REWARD_MANAGER_REGISTRY",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "extract_reward",
    "get_reward_manager_cls",
    "register",
]
