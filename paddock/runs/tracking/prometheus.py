"""Metrics of a run in Ray's own Prometheus exporter, which every node of a cluster has.

`ray metrics launch-prometheus` starts a Prometheus that reads them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from paddock.errors import UserError
from paddock.runs.tracking.adapters import need
from paddock.runs.tracking.run import LoggedRun, NumbersLogger

LABELS = ("project", "run")


class Prometheus(NumbersLogger):
    """Sets a gauge per metric, `paddock_actor_grad_norm` for actor/grad_norm; project and run are its labels."""

    def __init__(self, run: LoggedRun):
        need("prometheus", "ray")
        from paddock.workers.ray import gauge, is_up

        if not is_up():
            fix = "trainer.logger=[console], or leave it out of trainer.logger"
            raise UserError("goes through Ray, and one process runs without it", key="trainer.logger",
                            value="prometheus", fix=fix)  # fmt: skip
        self.gauge, self.labels = gauge, dict(zip(LABELS, (run.project, run.name), strict=True))
        self.gauges = {"paddock_step": gauge("paddock_step", "steps done", self.labels)}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            safe = allowed(name)
            if safe not in self.gauges:
                self.gauges[safe] = self.gauge(safe, name, self.labels)
            if math.isfinite(value):
                self.gauges[safe](value)
        self.gauges["paddock_step"](float(step))


def allowed(name: str) -> str:
    """Returns a metric's name in letters, digits and underscores."""
    return "paddock_" + re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
