"""Puts everything about some runs into one HTML file that opens without a server, a network or another file."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from paddock import __version__
from paddock.config import tree
from paddock.config.secrets import masked
from paddock.core.files import replacing
from paddock.report.curves import FEWEST, POINTS, Curve, Series, curves_of, metric_names, series_of, thinned
from paddock.report.summary import (
    HELD_OUT,
    duration,
    held_out,
    phase_seconds,
    speed,
    summary_lines,
    title_of,
    total_seconds,
    training,
)
from paddock.runs.reading import RecordedRun, read_run
from paddock.trainer.learning import TOKEN_AGE, warning

log = logging.getLogger(__name__)

HERE, NAME = Path(__file__).parent, "report.html"
BINS = 80
"""Bars of the chart of time by phase at most; each is the mean of equally many steps."""
SAMPLE_BYTES = 1_000_000
"""Bytes of all samples on a page; steps between the first and the last are left out until they fit."""
CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "mean score of the step's responses", ("critic/score/mean",)),
    ("Training loss", "negative log-likelihood, or preference loss", ("train/loss",)),
    ("Training accuracy", "share of pairs whose preferred answer scores higher", ("train/accuracy",)),
    ("Held-out accuracy", "of the validation pairs", ("val/accuracy",)),
    ("Held-out loss", "on the validation rows", ("val/loss",)),
    ("Response length", "mean tokens per response", ("response_length/mean",)),
    ("Entropy", "mean over tokens, in nats", ("actor/entropy",)),
    ("KL", "from the reference policy, or from the policy before the update",
     ("actor/reward_kl_penalty", "actor/kl_loss", "rollout_corr/kl", "actor/ppo_kl")),
    ("Spread of rewards", "standard deviation of the step's scores", ("reward/std",)),
    ("Policy loss", "of the actor", ("actor/pg_loss",)),
    ("Distillation", "divergence from the teacher, mean over tokens", ("distillation/abs_loss", "distillation/loss")),
    ("Value loss", "of the critic", ("critic/vf_loss",)),
    ("Explained variance", "of the returns by the critic", ("critic/vf_explained_var",)),
    ("Gradient norm", "before clipping", ("actor/grad_norm", "train/grad_norm")),
    ("Clipped tokens", "share of tokens whose ratio was clipped", ("actor/pg_clipfrac",)),
    ("Cut responses", "share of responses that reached the length limit", ("response_length/clip_ratio",)),
    ("Trainer and rollout", "mean difference of the sampled tokens' probabilities",
     ("training/rollout_probs_diff_mean",)),
    ("Learning rate", "of the optimizer", ("actor/lr", "train/lr")),
    ("Throughput", "tokens per second and device", ("perf/throughput",)),
)  # fmt: skip
"""Title, meaning, and the metrics of which the first one that moves is drawn."""
ALWAYS = ("Reward", "Response length", "Entropy", "Training loss")
"""Charts that are drawn even if nothing in them moves."""
SHARES = ("accuracy", "ratio", "clipfrac")


def render(runs: Sequence[RecordedRun]) -> str:
    """Returns the page about these runs."""
    curves = curves_of(runs)
    title = curves[0].label if len(curves) == 1 else f"{len(runs)} runs"
    data = {
        "title": title,
        "subtitle": subtitle(curves[0].runs[0]) if len(curves) == 1 else ", ".join(curve.label for curve in curves),
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "version": __version__,
        "curves": [{"label": curve.label, "runs": [run.name for run in curve.runs]} for curve in curves],
        "warnings": [found for curve in curves for run in curve.runs if (found := warned(run, len(curves)))],
        "headlines": [headlines(curve) for curve in curves],
        **all_series(curves),
        "charts": charts(curves),
        "phases": [phases(curve) for curve in curves],
        "ahead": [running_ahead(curve) for curve in curves],
        "samples": [{"run": run.name, "lines": bounded(run.samples, len(runs))} for run in runs if run.samples],
        "configs": [config(run) for run in runs if run.settings],
        "environments": [{"run": run.name, "facts": run.environment} for run in runs if run.environment],
        "meanings": {key: leaf.metadata["meaning"] for key, leaf in tree.leaves().items()},
    }
    return fill((HERE / "page.html").read_text(encoding="utf-8"), title, data)


def write_page(runs: Sequence[RecordedRun], path: Path, key: str) -> None:
    """Writes the page about these runs; `key` is the setting or option that names its folder."""
    page = render(runs).encode(errors="replace")
    with replacing(path, key) as file:
        file.write(page)


def conclude_run(folder: Path) -> list[str]:
    """Writes the page of a run at its end; returns its summary, line by line. Logs errors: the run has ended well."""
    try:
        run = read_run(folder)
        summary = summary_lines(run)
    except Exception as error:
        log.warning("no summary of this run: %s", error)
        return []
    try:
        write_page([run], folder / NAME, "trainer.default_local_dir")
    except Exception as error:
        log.warning("%s was not written: %s", NAME, error)
        return summary
    return [*summary, f"The report is in {folder / NAME}"]


def warned(run: RecordedRun, curves: int) -> str | None:
    """Returns what keeps a run from learning; where the page has several, with its name."""
    found = warning(run.rows)
    return f"{run.name}: {found}" if found and curves > 1 else found


def fill(template: str, title: str, data: Mapping[str, Any]) -> str:
    """Puts texts into the template, each once: what a run wrote never becomes markup or script."""
    parts = {
        "TITLE": escape(title),
        "STYLE": (HERE / "style.css").read_text(encoding="utf-8"),
        "SCRIPT": "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("charts.js", "page.js")),
        "DATA": script_json(data),
    }
    page = []
    for i, piece in enumerate(template.split("@@")):
        page.append(parts[piece] if i % 2 else piece)
    return "".join(page)


def script_json(data: Any) -> str:
    """Returns JSON that a <script> element can hold: no `<`, `>` or `&`, and no half of a surrogate pair."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode(errors="replace").decode()


def subtitle(run: RecordedRun) -> str:
    """Returns one line about a run: how, what and how long it trained."""
    settings, steps = run.settings, run.rows[-1]["step"]
    model = settings.get("actor_rollout_ref.model.path")
    command = run.starts[-1].get("command", "train") if run.starts else "train"
    how = settings.get("algorithm.adv_estimator") if command == "train" else command
    data = settings.get("data.train_files")
    files = ", ".join(
        "/".join(Path(str(each)).parts[-2:]) for each in (data if isinstance(data, list) else [data]) if each
    )
    parts = [how, Path(str(model)).name if model else None, files or None, f"{steps:,} steps"]
    if total := total_seconds(run.rows):
        parts.append(duration(sum(total.values())))
    return " · ".join(str(part) for part in parts if part)


def headlines(curve: Curve) -> list[dict[str, Any]]:
    """Returns the numbers on top of the page; of several runs their means."""
    per_run = [[*held_out(run), *training(run)] for run in curve.runs]
    first = [asdict(change) for change in per_run[0]]
    for entry in first if len(per_run) > 1 else ():
        same = [change for changes in per_run for change in changes if change.metric == entry["metric"]]
        before = [change.before for change in same if change.before is not None]
        entry["before"] = sum(before) / len(before) if before else None
        entry["after"] = sum(change.after for change in same) / len(same)
        entry["note"] = f"mean of {len(same)} seeds"
    seconds = [sum(total_seconds(run.rows).values()) for run in curve.runs]
    found: list[dict[str, Any]] = first
    if any(seconds):
        mean = sum(seconds) / len(seconds)
        each = duration(mean / max(1, len(curve.runs[0].values("timing_s/step"))))
        found.append({"label": "Time of steps", "text": duration(mean), "note": f"{each} per step"})
    speeds = [rate for run in curve.runs if (rate := speed(run))]
    if speeds:
        rate = sum(speeds) / len(speeds)
        found.append(
            {"label": "Tokens per second", "text": f"{rate:,.0f}", "note": "prompts and responses, all devices"}
        )
    return found


def all_series(curves: Sequence[Curve]) -> dict[str, Any]:
    """Returns every metric of every curve. Series name their steps by number, because most metrics share them."""
    most, steps, numbered = max(FEWEST, POINTS // len(curves)), list[list[int]](), dict[tuple[int, ...], int]()

    def packed(series: Series | None) -> dict[str, Any] | None:
        if series is None or not series.steps:
            return None
        series = thinned(series, most)
        key = tuple(series.steps)
        if key not in numbered:
            numbered[key] = len(steps)
            steps.append(series.steps)
        columns = {"y": series.values, "lo": series.low, "hi": series.high}
        return {"x": numbered[key]} | {name: list(map(short, c)) for name, c in columns.items() if c is not None}

    names = metric_names(run for curve in curves for run in curve.runs)
    metrics = {name: [packed(series_of(curve, name)) for curve in curves] for name in names}
    return {"metrics": metrics, "steps": steps}


def short(value: float | None) -> float | int | None:
    """Returns a number with six digits: more than a chart can show, in half of the bytes."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def charts(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    runs = [run for curve in curves for run in curve.runs]
    names = metric_names(runs)
    found = []
    means = [match for name in names if (match := HELD_OUT.fullmatch(name))]
    for match in means:
        title, percent = title_of(match, names)
        meaning = f"on {match['source']}" if len(means) > 1 else "mean over the validation prompts"
        found.append({"title": title, "meaning": meaning, "metric": match[0], "percent": percent})
    for title, meaning, candidates in CHARTS:
        there = [name for name in candidates if name in names]
        moving = [name for name in there if any(len(set(run.values(name))) > 1 for run in runs)]
        if moving or (there and title in ALWAYS):
            chosen = (moving or there)[0]
            percent = chosen.endswith(SHARES)
            found.append({"title": title, "meaning": meaning, "metric": chosen, "percent": percent})
    found.sort(key=lambda chart: chart["title"] != "Reward")
    return found


def phases(curve: Curve) -> dict[str, Any]:
    """Returns seconds per step by phase: in all, and in at most BINS stretches of the curve's first run."""
    rows = [row for row in curve.runs[0].rows if row.get("timing_s/step")]
    total: dict[str, float] = {}
    for run in curve.runs:
        for phase, seconds in total_seconds(run.rows).items():
            total[phase] = total.get(phase, 0.0) + seconds / len(curve.runs)
    width = math.ceil(len(rows) / BINS) or 1
    bins = [rows[i : i + width] for i in range(0, len(rows), width)]
    timed = [[phase_seconds(row) for row in part] for part in bins]
    means = [{phase: sum(one.get(phase, 0.0) for one in part) / len(part) for phase in total} for part in timed]
    return {
        "total": [[phase, short(seconds)] for phase, seconds in total.items()],
        "steps": [[part[0]["step"], part[-1]["step"]] for part in bins],
        "seconds": {phase: [short(mean[phase]) for mean in means] for phase in total},
    }


def running_ahead(curve: Curve) -> dict[str, Any] | None:
    """Returns the shares of trained tokens by age, and of the curve's first run the last BINS steps: seconds by phase,
    and how many responses of later steps wait behind each; None if nothing ran ahead."""
    rows = [row for run in curve.runs for row in run.rows if f"{TOKEN_AGE}0" in row]
    if not rows:
        return None
    ages = range(
        max(int(name.removeprefix(TOKEN_AGE)) for row in rows for name in row if name.startswith(TOKEN_AGE)) + 1
    )
    weights = [row.get("response_length/mean") or 0.0 for row in rows]
    shares = [
        sum(weight * (row.get(f"{TOKEN_AGE}{age}") or 0.0) for weight, row in zip(weights, rows, strict=True))
        for age in ages
    ]
    last = [row for row in curve.runs[0].rows if row.get("timing_s/step")][-BINS:]
    timed = [phase_seconds(row) for row in last]
    return {
        "ages": [short(100 * share / (sum(weights) or 1)) for share in shares],
        "steps": [[row["step"], row["step"]] for row in last],
        "seconds": {phase: [short(seconds.get(phase, 0.0)) for seconds in timed] for phase in total_seconds(last)},
        "waiting": {name: [row.get(f"rollout/window/{name}") for row in last] for name in ("ready", "carried_rows")},
    }


def bounded(samples: list[dict[str, Any]], runs: int) -> list[dict[str, Any]]:
    """Returns the lines of samples that fit the page: the first and the last of each source, then those between."""
    kept = list(samples)
    while len(json.dumps(kept, ensure_ascii=False).encode(errors="replace")) > SAMPLE_BYTES / runs:
        by_source: dict[str, list[dict[str, Any]]] = {}
        for line in kept:
            by_source.setdefault(line["source"], []).append(line)
        longest = max(by_source.values(), key=len)
        if len(longest) <= 2:
            return kept
        dropped = {id(line) for line in longest[1:-1:2]}
        kept = [line for line in kept if id(line) not in dropped]
    return kept


def config(run: RecordedRun) -> dict[str, Any]:
    """Returns the settings of a run with their origins, and what its continuations changed."""
    unknown = "default" if run.origins else ""
    rows = {key: [text(masked(value, key)), run.origins.get(key, unknown)] for key, value in run.settings.items()}
    changes = []
    for earlier, later in zip(run.starts, run.starts[1:], strict=False):
        old, new = earlier.get("settings", {}), later.get("settings", {})
        for key in new:
            if key in old and old[key] != new[key]:
                values = (text(masked(value, key)) for value in (old[key], new[key]))
                changes.append([later["after_step"], key, *values])
    return {"run": run.name, "settings": rows, "changes": changes}


def text(value: Any) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
