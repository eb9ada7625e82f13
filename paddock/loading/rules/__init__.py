"""Checks on a whole config, one function per rule. Each names the key, the value, the reason and the fix."""

from __future__ import annotations

from collections.abc import Callable

from paddock.config import tree
from paddock.config.schema import Config
from paddock.loading.rules.algorithm import (
    correction_can_be_read,
    estimator_gets_its_components,
    estimator_gets_its_critic,
    estimator_gets_its_groups,
    losses_have_what_they_need,
    replayed_experts_are_recorded,
    sampling_is_possible,
)
from paddock.loading.rules.data import (
    absent_plugins,
    data_files_are_named,
    row_limits_are_positive_or_off,
    weights_suit_the_files,
)
from paddock.loading.rules.devices import (
    adapters_suit_their_engine,
    devices_divide_into_groups,
    megatron_trains_all_or_none,
    mini_batches_divide_the_batch,
    offloaded_activations_are_few,
    rollouts_apart_copy_weights,
    rows_divide_over_devices,
    token_budgets_hold_one_sequence,
)
from paddock.loading.rules.distillation import (
    distillation_trains_the_actor_alone,
    served_teachers,
    teachers_are_named,
    teachers_know_the_tokens,
    the_teacher_moves_the_loss,
)
from paddock.loading.rules.limits import (
    unknown,
    within_limits,
)
from paddock.loading.rules.rewards import (
    reward_model_is_named,
    reward_settings_agree,
    rewards_have_names_and_weights,
)
from paddock.loading.rules.run import (
    checkpoints_are_whole,
    frequencies_are_positive_or_off,
    loggers_are_known,
    resume_path_is_a_step,
)
from paddock.loading.rules.unread import (
    set_by_user,
    small_models_learn_slowly,
    warnings,
)

__all__ = ["check", "check_limits", "set_by_user", "unknown", "within_limits"]


RULES: tuple[Callable[[Config], None], ...] = (
    estimator_gets_its_groups,
    estimator_gets_its_critic,
    estimator_gets_its_components,
    rollouts_apart_copy_weights,
    devices_divide_into_groups,
    mini_batches_divide_the_batch,
    rows_divide_over_devices,
    megatron_trains_all_or_none,
    token_budgets_hold_one_sequence,
    losses_have_what_they_need,
    teachers_are_named,
    the_teacher_moves_the_loss,
    distillation_trains_the_actor_alone,
    teachers_know_the_tokens,
    correction_can_be_read,
    replayed_experts_are_recorded,
    sampling_is_possible,
    frequencies_are_positive_or_off,
    row_limits_are_positive_or_off,
    loggers_are_known,
    resume_path_is_a_step,
    checkpoints_are_whole,
    adapters_suit_their_engine,
    offloaded_activations_are_few,
    reward_model_is_named,
    reward_settings_agree,
    data_files_are_named,
    weights_suit_the_files,
    rewards_have_names_and_weights,
)
"""The rules in the order in which they are checked: the first that is broken is reported."""
OF_UPDATES = {mini_batches_divide_the_batch, rows_divide_over_devices, token_budgets_hold_one_sequence}
"""Rules on how a step's rows are cut for forward passes and updates of the trainer."""


def check_limits(config: Config) -> None:
    """Raises for the first key whose value is outside the schema's limits."""
    for leaf in tree.leaves().values():
        within_limits(leaf, tree.get(config, leaf.key))


def check(config: Config, origins: dict[str, str], here: bool = True, trains: bool = True) -> list[str]:
    """Raises the first broken rule; returns warnings for what is allowed but seldom meant.

    `here`: Python files that the run imports must be on this machine; a wrong path is the commonest mistake. `trains`:
    False if the command only answers.
    """
    for rule in RULES:
        if trains or rule not in OF_UPDATES:
            rule(config)
    absent = [*absent_plugins(config)]
    if here:
        for error in absent:
            raise error
    told = [f"{error.key}: {error.value} is not on this machine" for error in absent]
    slow = small_models_learn_slowly(config, origins) if trains else ()
    return [*told, *warnings(config, origins), *slow, *served_teachers(config)]
