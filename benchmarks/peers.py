"""Peers on the same work as Paddock: rollouts by vLLM's engine, GRPO steps by TRL.

Each runs in a process of its own, by a script of this folder (vllm_rollout.py, trl_step.py), so that a device has its
memory back afterwards. Needs the standard library alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from step_work import Work

HERE = Path(__file__).resolve().parent
PATIENCE = 1200.0
"""Seconds after which a process is ended: an engine that hangs would take the rest of the table with it."""
STEPS = 2
"""The most steps that count, after one that does not: a peer's step may take minutes."""


class PeerError(Exception):
    """Says why a peer has no numbers; `output` is the end of what its process printed."""

    def __init__(self, reason: str, output: str = ""):
        super().__init__(reason)
        self.output = output


def report(
    script: str, *arguments: str, python: str = sys.executable, environment: dict[str, str] | None = None,
    patience: float | None = PATIENCE,
) -> dict[str, Any]:  # fmt: skip
    """Runs a script of this folder in a process of its own and returns the last JSON object that it printed.

    All processes that it started are ended with it.
    """
    command = [python, str(HERE / script), *arguments]
    own = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path), **(environment or {})}
    process = subprocess.Popen(
        command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, complained = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired as error:
        raise PeerError(f"no end after {patience:.0f} s") from error
    finally:
        end(process)
    objects = [line for line in said.splitlines() if line.startswith("{")]
    if process.returncode or not objects:
        output = said[-2000:] + complained[-4000:]
        raise PeerError(cause(said + complained) or f"exit status {process.returncode}", output)
    found: dict[str, Any] = json.loads(objects[-1])
    return found


def end(process: subprocess.Popen[str]) -> None:
    """Ends the process and all of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def cause(output: str) -> str:
    """Returns the last error that the output names, but for one that refers to others above; else its last line."""
    errors = [error for error in re.findall(r"\b\w*(?:Error|Exception): .+", output) if "above" not in error]
    return (errors or output.strip().splitlines() or [""])[-1].strip()


def trl(work: Work, patience: float = PATIENCE) -> dict[str, Any]:
    """Returns seconds of a GRPO step and of its generation by TRL, and the memory that it takes."""
    path = Path(work.folder) / "trl.json"
    work.write(path)
    found = report("trl_step.py", str(path), patience=patience)
    return {
        "step_s": statistics.median(sum(wall for wall, _ in step.values()) for step in found["steps"]),
        "generation_s": statistics.median(step["generation"][0] for step in found["steps"]),
        "peak_gib": found["memory"] / 2**30, "micro_rows": work.micro_rows, "steps": work.steps,
        "versions": found["versions"],
    }  # fmt: skip


def vllm(work: Work, limits: list[int], patience: float) -> dict[str, Any]:
    """Returns seconds and tokens/s of rollouts by vLLM; responses to the i-th prompt have `limits[i]` tokens."""
    path = Path(work.folder) / "vllm.json"
    work.write(path)
    found = report("vllm_rollout.py", str(path), json.dumps(limits), patience=patience)
    seconds, written = statistics.mean(found["seconds"]), work.n * sum(limits)
    return {"rollout_s": seconds, "tokens_per_s": written / seconds,
            "tokens_per_s_without_log_probs": written / found["seconds_without_log_probs"], "steps": work.steps,
            **found["settings"], "versions": found["versions"]}  # fmt: skip


def measured(peer: str, work: Work, limits: list[int], patience: float) -> dict[str, Any]:
    """Returns the numbers of a peer; or under `missing` what a table shows in their place, with the reason. A peer that
    takes more than `patience` seconds is ended."""
    if find_spec(peer) is None:
        return {"missing": "not installed", "reason": f"this Python cannot import {peer}"}
    work = replace(work, warmup=1, steps=min(work.steps, STEPS))
    try:
        return trl(work, patience) if peer == "trl" else vllm(work, limits, patience)
    except PeerError as error:
        print(error.output, file=sys.stderr, flush=True)
        return {"missing": "failed", "reason": str(error)}
