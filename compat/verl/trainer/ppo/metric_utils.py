"""A step's metrics under verl's names; the numbers are `paddock.trainer.metrics` and `.validation`.

Where nothing counts (all rows aborted, all tokens masked) a mean, maximum or minimum is zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paddock.core.masked import masked_mean, masked_sum
from paddock.core.timing import Timer
from paddock.errors import UserError
from paddock.runs.samples import Sample
from paddock.trainer import metrics as step_metrics
from paddock.trainer import performance, validation
from verl.protocol import to_batch

THROUGHPUT = ("perf/total_num_tokens", "perf/time_per_step", "perf/throughput")
REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "max": np.max, "min": np.min, "mean": np.mean, "std": np.mean, "fraction": np.mean,
}  # fmt: skip


def reduce_metrics(metrics: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """One number for each name: a mean, unless the name says max or min.

    The last of the words max, min, mean, std and fraction in the part after the last slash decides:
    `score/max` and `max_memory_gb` are maxima, `admin_rate`, `minutes` and `seq_max_k2_mean` are means.
    """
    return {name: reduction_of(name)(values) for name, values in metrics.items()}


def reduction_of(name: str) -> Callable[[Sequence[Any]], Any]:
    words = re.split(r"[^a-z0-9]+", name.rpartition("/")[2].lower())
    return next((REDUCTIONS[word] for word in reversed(words) if word in REDUCTIONS), np.mean)


def compute_data_metrics(batch: Any, use_critic: bool = True) -> dict[str, float]:
    """Clip ratios are shares of rows as wide as the padded columns."""
    rows = to_batch(batch).with_(rollout_log_probs=None)
    longest = rows.need("prompt_mask").shape[1], rows.need("mask").shape[1]
    return step_metrics.batch_metrics(rows, *longest, use_critic)


def compute_timing_metrics(batch: Any, timing_raw: Mapping[str, float]) -> dict[str, float]:
    timer = Timer()
    timer.seconds.update(timing_raw)
    return performance.timing_metrics(timer, *performance.token_counts(to_batch(batch)))


def compute_throughout_metrics(batch: Any, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens are the sum of `meta_info["global_token_num"]`, seconds those of `timing_raw["step"]`."""
    found = performance.throughput_metrics(int(sum(batch.meta_info["global_token_num"])), timing_raw["step"], n_gpus)
    return {name: found[name] for name in THROUGHPUT}


@torch.no_grad()
def compute_variance_proxy_metrics(batch: Any, gradient_norm: float | None = None) -> dict[str, float]:
    """Signal and noise of the gradient from forward passes alone; empty unless `sum_pi_squared` is there.

    With ``W = sum_t w_t^2 (1 - 2 pi_t + sum_v pi_v^2)``, the squared norm of a row's gradient in the logits, and A the
    row's mean advantage: signal ``|g|^2``, total power ``E[A^2 W]``, noise of the mean ``(power - signal) / (N - 1)``.
    Without a gradient's norm signal and noise are not known, and zero.
    """
    rows = to_batch(batch)
    if rows.sum_pi_squared is None:
        return {}
    mask = rows.need("mask")
    energy = 1 - 2 * rows.need("old_log_probs").exp() + rows.sum_pi_squared
    if rows.weights is not None:
        energy = energy * rows.weights.square()
    advantage = masked_mean(rows.need("advantages"), mask, -1)
    energy = masked_sum(energy, mask, -1)
    signal = torch.full_like(energy[0], (gradient_norm or 0.0) ** 2)
    power = (advantage.square() * energy.clamp(min=0)).mean()
    noise = ((power - signal) / max(len(rows) - 1, 1)).clamp(min=0)
    return step_metrics.to_floats(
        {
            "variance_proxy/proxy1_signal_strength": signal,
            "variance_proxy/proxy2_total_power": power,
            "variance_proxy/proxy3_pure_noise": torch.zeros_like(noise) if gradient_norm is None else noise,
            "variance_proxy/expected_a_squared": advantage.square().mean(),
            "variance_proxy/expected_w": energy.mean(),
        }
    )


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[Any], float]],
    n_bootstrap: int = validation.DRAWS,
    seed: int = validation.SEED,
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each function over subsets drawn with replacement."""
    items = np.fromiter(data, dtype=object, count=len(data))
    subsets = items[np.random.RandomState(seed).randint(0, len(items), (n_bootstrap, subset_size))]
    results = [[reduce(subset) for subset in subsets] for reduce in reduce_fns]
    return [(float(np.mean(values)), float(np.std(values))) for values in results]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> Any:
    """The value of the first item that gives the most frequent vote; of equally frequent ones the first."""
    votes = [item[vote_key] for item in data]
    once, places = np.ones((len(votes), 1), np.float32), np.arange(len(votes), dtype=np.float32)[:, None]
    (winner,) = validation.majority([votes.index(vote) for vote in votes], once, places)
    return data[winner][val_key]


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[Any],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = validation.SEED,
) -> dict[str, dict[str, dict[str, float]]]:
    """`{data source: {variable: {metric: value}}}`; a variable whose values are no numbers has no entry."""
    if seed != validation.SEED:
        raise UserError(
            "draws of another seed do not compare with those of other runs",
            key="seed",
            value=seed,
            fix=f"leave it at {validation.SEED}; bootstrap_metric takes any",
        )
    groups: dict[Any, int] = {}
    samples = []
    for place, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        extras = {name: values[place] for name, values in infos_dict.items()}
        score, group = extras.get("reward", 0.0), groups.setdefault(uid, len(groups))
        samples.append(Sample("", "", score, 0, group, data_source=source, extras=extras))
    found = {
        source: {name: known_metrics(prompts, name) for name in infos_dict}
        for source, prompts in validation.by_source(samples).items()
    }
    return {source: {name: each for name, each in named.items() if each} for source, named in found.items()}


def known_metrics(prompts: Sequence[Sequence[Sample]], variable: str) -> dict[str, float]:
    """All but pass@k, which verl's readers do not expect."""
    found = validation.variable_metrics(prompts, variable)
    return {name: value for name, value in found.items() if not name.startswith("pass@")}
