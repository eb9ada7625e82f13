"""Metrics that are collected and reduced, under verl's name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor

from verl.trainer.ppo import metric_utils


class AggregationType(Enum):
    """How the values of a metric become one number."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


REDUCE: dict[AggregationType, Callable[[Any], Any]] = {
    AggregationType.MEAN: np.mean,
    AggregationType.SUM: np.sum,
    AggregationType.MIN: np.min,
    AggregationType.MAX: np.max,
}


class Metric:
    """Collects numbers, and reduces them in one way."""

    def __init__(self, aggregation: str | AggregationType, value: Any = None):
        self.aggregation = AggregationType(aggregation)
        self.values: list[Any] = []
        if value is not None:
            self.extend(value) if isinstance(value, list) else self.append(value)

    def append(self, value: Any) -> None:
        """Takes a number, a tensor of one element, or all values of another metric of the same kind."""
        if isinstance(value, Metric):
            self.extend(value)
            return
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if not isinstance(number, int | float | np.ndarray | np.number):
            raise ValueError(f"{type(value).__name__} is no number, or not a single one")
        self.values.append(number)

    def extend(self, values: Metric | Iterable[Any]) -> None:
        if isinstance(values, Metric) and values.aggregation is not self.aggregation:
            raise ValueError(f"a {self.aggregation.value} does not take values of a {values.aggregation.value}")
        for value in list(values.values if isinstance(values, Metric) else values):
            self.append(value)

    def aggregate(self) -> float:
        return float(REDUCE[self.aggregation](self.values))

    @classmethod
    def aggregate_dp(cls, metric_lists: Sequence[Metric]) -> float:
        """Returns one number for metrics of several ranks, each with a value of every micro-batch.

        Ranks are averaged for a sum and a mean, micro-batch by micro-batch; for a minimum and a maximum all count.
        """
        kinds, sizes = {one.aggregation for one in metric_lists}, {len(one.values) for one in metric_lists}
        if len(kinds) != 1 or len(sizes) != 1:
            raise ValueError(
                f"ranks have metrics of kinds {[kind.value for kind in kinds]} and lengths {sorted(sizes)}"
            )
        (kind,) = kinds
        table = np.array([one.values for one in metric_lists], dtype=float)
        return float(REDUCE[kind](table if kind in (AggregationType.MIN, AggregationType.MAX) else table.mean(0)))

    @classmethod
    def chain(cls, metric_lists: Sequence[Metric]) -> Metric:
        """Returns one metric with the values of all."""
        whole = cls(metric_lists[0].aggregation if metric_lists else AggregationType.MEAN)
        for metric in metric_lists:
            whole.extend(metric)
        return whole

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], aggregation: str | AggregationType) -> dict[str, Metric]:
        return {name: cls(aggregation, value) for name, value in data.items()}

    def init_list(self) -> Metric:
        """Returns an empty metric of the same kind."""
        return type(self)(self.aggregation)


def reduce_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns one number for each name: a metric's own, else by the words of the name (`metric_utils`)."""
    own = {name: value.aggregate() for name, value in metrics.items() if isinstance(value, Metric)}
    rest = {name: values for name, values in metrics.items() if name not in own}
    return {**metric_utils.reduce_metrics(rest), **own}
