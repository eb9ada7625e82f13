"""What a run left behind, as one document: its curves from metrics.jsonl, its accuracies from the answers it wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddock.rewards.rules import compute_score, scorer_of
from paddock.runs.samples import Sample
from paddock.trainer.validation import by_source, variable_metrics

METHODS = {"strict": "strict", "lenient": "flexible"}
"""Our name and the rule's: the number after `####`, or the last number of the answer. Of a conversation both read the
policy's last turn, as the reward does."""
PASSED = "passed"
"""Our name of the only count where the rule has no methods: the score that the reward gave, 1 if all tests pass."""
CURVES = {
    "reward": "critic/score/mean",
    "length": "response_length/mean",
    "cut": "response_length/clip_ratio",
    "entropy": "actor/entropy",
    "kl": "actor/reward_kl_penalty",
    "gap": "training/rollout_probs_diff_mean",
    "gradient": "actor/grad_norm",
    "explained": "critic/vf_explained_var",
    "step_seconds": "timing_s/step",
    "rollout_seconds": "timing_s/gen",
    "reward_seconds": "timing_s/reward",
    "reference_seconds": "timing_s/ref",
    "values_seconds": "timing_s/values",
    "critic_seconds": "timing_s/update_critic",
    "update_seconds": "timing_s/update_actor",
    "memory_gib": "perf/max_memory_allocated_gb",
    "turns": "num_turns/mean",
    "calls": "tool_call_counts/mean",
    "malformed": "environment/malformed_calls",
    "failed": "environment/failed_calls",
    "late": "reward/sandbox/timeout/mean",
    "rounds": "training/num_gen_batches",
}
"""Our name of a curve and the metric. `cut` is the share of answers that reached the longest length; `gap` the mean
difference of a token's probability between rollout and trainer; `turns` counts the prompt too, and with the three below
it is a mean over conversations; `late` is the share of programs that ran out of time; `reward_seconds` is the time that
a step waits for scores after its rollout; `rounds` counts the batches that a step sampled until one was full of groups
that teach something. A run without a reference, a critic, conversations, programs or such a filter lacks their
curves."""
DIGITS = 5

Curve = list[float]


def curves(metrics: Path) -> dict[str, Curve]:
    """One list per curve, one entry per step. Step times leave validation out; `seconds` is their running sum."""
    steps = [line for line in lines_of(metrics) if line["step"] > 0]
    found = {
        name: [shortened(line[metric]) for line in steps]
        for name, metric in CURVES.items()
        if steps and metric in steps[0]
    }
    total, seconds = 0.0, []
    for line in steps:
        total += line["timing_s/step"]
        seconds.append(shortened(total))
    return {"step": [line["step"] for line in steps], "seconds": seconds, **found}


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Those that are whole: the last one may be in the middle of being written."""
    text = file.read_text() if file.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def shortened(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


class HeldOut:
    """Accuracies of a run's validations. Each file of answers is read once, when it has appeared."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.found: dict[int, dict[str, float]] = {}

    def read(self) -> dict[str, list[float]]:
        for path in self.folder.glob("*.jsonl"):
            if int(path.stem) not in self.found:
                samples = samples_of(path)
                greedy = {name: next(iter(values.values())) for name, values in accuracies(samples).items()}
                length = sum(sample.length for sample in samples) / len(samples)
                self.found[int(path.stem)] = {**greedy, "length": shortened(length)}
        steps = sorted(self.found)
        names = self.found[steps[0]] if steps else ()
        return {"step": list(steps), **{name: [self.found[step][name] for step in steps] for name in names}}


def samples_of(file: Path) -> list[Sample]:
    records = (json.loads(line) for line in file.read_text().splitlines())
    return [Sample(**{name: value for name, value in record.items() if name != "step"}) for record in records]


def accuracies(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """By method: mean@n of n answers per prompt, and pass@k for each k up to n if there are several."""
    found = {}
    for name in methods_of(samples[0].data_source):
        scored = [replace(sample, score=score_of(sample, name)) for sample in samples]
        (prompts,) = by_source(scored).values()
        metrics = variable_metrics(prompts, "reward")
        wanted = (metric for metric in metrics if metric.startswith(("mean@", "pass@")) and metric != "pass@1")
        found[name] = {metric: round(metrics[metric], 6) for metric in wanted}
    return found


def methods_of(source: str) -> tuple[str, ...]:
    return tuple(METHODS) if "method" in scorer_of(source).options else (PASSED,)


def score_of(sample: Sample, name: str) -> float:
    """Programs are not run again: their score is the one that the sandbox gave."""
    if name == PASSED:
        return sample.score
    last = (sample.extras.get("turns") or [sample.answer])[-1]
    return float(compute_score(sample.data_source, last, sample.ground_truth, method=METHODS[name]))


def write(document: Mapping[str, Any], file: Path) -> None:
    """Replaces the file at once: whoever copies it away meanwhile gets a whole one."""
    lines = ",\n".join(f' "{name}": {compact(value)}' for name, value in document.items())
    writing = file.with_suffix(".writing")
    writing.write_text(f"{{\n{lines}\n}}\n")
    writing.rename(file)


def compact(value: Any) -> str:
    """A curve on one line, a group of curves on one line each."""
    if isinstance(value, dict) and any(isinstance(entry, list | dict) for entry in value.values()):
        inner = ",\n".join(f'  "{name}": {json.dumps(entry)}' for name, entry in value.items())
        return f"{{\n{inner}\n }}"
    return json.dumps(value)
