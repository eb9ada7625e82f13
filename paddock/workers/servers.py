"""Rollout engines in a pool of their own: they take the actor's weights after each update, and prove it.

Weights travel through the store of whoever runs the processes. Every rank of the actor gathers a bucket, the first one
puts it there once, and every engine reads it. The driver asks for each bucket and hands it on: a process that dies on
either side is named as in any other call, and a CPU takes the way that a GPU takes. A collective over both pools would
spare copies through the host, but when one side dies the other hangs in it.
"""

from __future__ import annotations

from paddock.workers.group import Group, PolicyHandle, RolloutHandle
from paddock.workers.probe import out_of_step
from paddock.workers.worker import Metrics


class Servers(RolloutHandle):
    """Their memory is their own: they never sleep."""

    def __init__(self, group: Group, engine_size: int, actor: PolicyHandle):
        super().__init__(group, engine_size)
        self.actor, self.ranks_per_engine = actor, engine_size

    def wake(self) -> None:
        """At the start and after a checkpoint was loaded, the engines' weights are not the actor's."""
        if any(self.actor.group.broadcast("unsent")):
            self.sync()

    def sleep(self) -> None:
        """There is nobody to make room for."""

    def sync(self) -> Metrics:
        with self.actor.present():
            self.send()
            return {"rollout/sync_gap": self.verify()}

    def send(self) -> None:
        last = False
        while not last:
            bucket = self.actor.group.broadcast("next_bucket")[0]
            self.group.broadcast("load_bucket", bucket)
            last = bucket.last

    def verify(self) -> float:
        """The worst engine's gap between its log-probs and the actor's, for tokens that it draws."""
        trainers = self.actor.group
        prompt, sampling = trainers.broadcast("question")[0]
        answers = self.group.map("generate", [[[prompt]]] * self.engines, sampling)
        gaps, limit = trainers.broadcast("gaps", prompt, answers)[0]
        for number, gap in enumerate(gaps):
            if not gap <= limit:
                layers = self.group.broadcast("differing_layers")[number * self.ranks_per_engine]
                name = self.actor.config.actor_rollout_ref.rollout.name or ""
                raise out_of_step(name, gap, limit, layers, f"engine {number} of {self.engines}")
        return max(gaps)
