"""What the two sides of cpu_step.py share: the work, its reward, and the clock. Needs the standard library alone."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """Steps of GRPO over a file of prompts, with `n` responses of exactly `new_tokens` tokens to each."""

    model: str
    data: str
    """jsonl: one conversation a line, `prompts` of them a step."""
    prompts: int
    n: int
    prompt_tokens: int
    """Of the longest prompt."""
    new_tokens: int
    steps: int
    warmup: int
    """Further steps before these, which do not count."""
    weights: str
    """bf16; or fp32, with products in bf16."""
    micro_rows: int
    """Responses that go forward and backward at a time."""
    checkpointing: bool
    folder: str
    """For what a run writes."""
    settings: list[str]
    """Further keys of Paddock."""
    device: str = "cpu"

    @property
    def rows(self) -> int:
        return self.prompts * self.n

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: str) -> Work:
        return cls(**json.loads(Path(path).read_text()))


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward that costs nothing and differs within a group."""
    return float(len(solution_str))


def compute_slowly(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward that takes as many seconds as the answer says."""
    time.sleep(float(solution_str))
    return 1.0


class Clock:
    """Wall and processor seconds of each step by phase. While one runs inside another, the other stands still."""

    def __init__(self) -> None:
        self.steps: list[dict[str, tuple[float, float]]] = []
        self.memory = 0
        self.start()

    def start(self) -> None:
        """Here a step begins."""
        self.running = ["other"]
        self.seconds: defaultdict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self.last = time.perf_counter(), time.process_time()

    def lap(self) -> None:
        """The time since the last lap belongs to the phase that runs."""
        now = time.perf_counter(), time.process_time()
        wall, cpu = self.seconds[self.running[-1]]
        self.seconds[self.running[-1]] = wall + now[0] - self.last[0], cpu + now[1] - self.last[1]
        self.last = now

    def end(self) -> None:
        """Here a step ends, and the next one begins."""
        self.lap()
        self.steps.append(dict(self.seconds))
        self.memory = peak_memory()
        print(f"step {len(self.steps)}: {sum(wall for wall, _ in self.seconds.values()):.2f} s", flush=True)
        self.start()

    def time(self, owner: Any, method: str, phase: str) -> None:
        """From now on, the time that the method takes belongs to the phase."""
        function = getattr(owner, method)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.lap()
            self.running.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.lap()
                self.running.pop()

        setattr(owner, method, timed)

    def report(self, work: Work, tokens: float, **versions: str) -> None:
        """The last line of the output, which cpu_step.py reads; `tokens`: what a step's prompts and responses hold."""
        counted = self.steps[work.warmup :]
        print(json.dumps({"steps": counted, "memory": self.memory, "tokens": tokens, "versions": versions}), flush=True)


def peak_memory() -> int:
    """Bytes: the most that this process held at a time, and that each process held that it started and still has."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return own + sum(map(high_water, descendants("self")))


def descendants(process: str) -> list[str]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    return [found for child in children for found in (child, *descendants(child))]


def high_water(process: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
