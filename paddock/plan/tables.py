"""A plan for people: what runs, where, how much, whether it fits, and which values came from where."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paddock.config import tree
from paddock.config.conversations import converses, environments_named, files_of
from paddock.config.roles import RolloutConfig
from paddock.config.schema import DataConfig, row_tokens
from paddock.config.secrets import masked
from paddock.config.topology import pools, takes_one_step
from paddock.estimate.memory import MemoryPlan
from paddock.facts.machine import GIB
from paddock.loading.overrides import LINE, PROGRAM
from paddock.plan.arithmetic import BatchPlan, roles
from paddock.plan.plan import Plan

BAR = 24  # characters of a full memory bar
MIN_WIDTH = 120  # long keys stay on one line, also in a file


class PrintedPlan(Plan):
    """A plan that `print`, a prompt of Python and a notebook show as `render` does, without colours."""

    def __str__(self) -> str:
        file = io.StringIO()
        render(self, Console(file=file, highlight=False, width=MIN_WIDTH, force_jupyter=False))
        return file.getvalue()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def render(plan: Plan, console: Console | None = None) -> None:
    show(plan, (_algorithm, _placement, _batch, _memory, _time, _ahead, _origins, _advice), console)


def render_supervised(plan: Plan) -> None:
    show(plan, (_supervised, _phases, _time, _origins, _advice))


def show(plan: Plan, blocks: Sequence[Callable[[Plan, Console], None]], console: Console | None = None) -> None:
    screen = console or Console(highlight=False, width=max(Console().width, MIN_WIDTH))
    for block in blocks:
        block(plan, screen)


def _supervised(plan: Plan, console: Console) -> None:
    """Shows what supervised training would do: the likelihood of given answers is raised."""
    batch, config = plan.batch, plan.loaded.config
    trainer, data = config.trainer, config.data
    (learner, *_) = roles(config)
    _title(console, f"Supervised training: {escape(str(config.actor_rollout_ref.model.path))}")
    _rows(
        console,
        ("loss", "mean negative log-likelihood over the tokens of the answers"),
        ("devices", f"{trainer.nnodes} node(s) x {trainer.n_gpus_per_node} {trainer.device}"),
        ("engine", f"{learner['engine']}, weights split over {learner['weights_split']}"),
        *_files(plan),
        ("columns", _columns(data)),
        ("a step", f"{batch.prompts} rows of at most {row_tokens(data)} tokens, 1 optimizer step"),
        ("micro-batches", f"per device: {batch.micro_batches}"),
        ("steps", _steps(batch)),
    )


def _columns(data: DataConfig) -> str:
    if data.answer_key is None:
        return f"{data.prompt_key}: every turn of the assistant is learnt"
    return f"prompts in {data.prompt_key}, answers in {data.answer_key}"


def _title(console: Console, text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def _rows(console: Console, *rows: tuple[str, str]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print(table)


def _algorithm(plan: Plan, console: Console) -> None:
    facts = plan.algorithm
    reward, loss = facts["kl_in_reward"], facts["kl_loss"]
    terms = [f"{value:g} in the {place}" for value, place in ((reward, "reward"), (loss, "loss")) if value]
    _title(console, f"Algorithm: {facts['estimator']}")
    _rows(
        console,
        ("what", facts["about"]),
        ("loss", f"{facts['policy_loss'] or 'of the teachers alone'}, {facts['aggregation']}"),
        *_distillation(facts["distillation"]),
        ("critic", "yes" if facts["critic"] else "no"),
        ("reference", f"yes: KL {' and '.join(terms)}" if facts["reference"] else "no: no KL term has a weight"),
    )


def _distillation(facts: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Returns how the actor learns from teachers, and from whom."""
    if facts is None:
        return []
    who = [f"{one['path']} for {one['key']}" if one["key"] else one["path"] for one in facts["teachers"]]
    return [("distillation", f"{facts['loss']} as a {facts['as']}, weight {facts['weight']:g}, from {', '.join(who)}")]


def _placement(plan: Plan, console: Console) -> None:
    config = plan.loaded.config
    trainer = config.trainer
    alone = trainer.device == "cpu" and trainer.n_gpus_per_node == 1
    where = "one CPU process" if alone else f"{trainer.nnodes} node(s) x {trainer.n_gpus_per_node} {trainer.device}"
    for pool in pools(config)[1:]:
        size = f"{pool.nodes} x {pool.per_node}"
        where += f"; {pool.name}: {size}, on the same devices" if pool.beside else f"; {pool.name}: {size}"
    _title(console, f"Placement: {where}")
    table = Table(box=None, padding=(0, 2, 0, 2))
    for name in ("role", "engine", "rows split over", "weights split over"):
        table.add_column(name)
    for role in roles(config):
        table.add_row(role["role"], str(role["engine"]), str(role["rows_split"]), str(role["weights_split"]))
    console.print(table)


def _batch(plan: Plan, console: Console) -> None:
    batch, config = plan.batch, plan.loaded.config
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    _title(console, f"Model and data: {escape(str(config.actor_rollout_ref.model.path))}")
    _rows(
        console,
        *_files(plan),
        *_episodes(config.actor_rollout_ref.rollout, config.environment),
        ("a step", f"{batch.prompts} prompts x {batch.responses} responses = {batch.rows} rows"),
        ("update", f"{batch.optimizer_steps} optimizer step(s), {mini} prompts each"),
        ("micro-batches", f"per device and mini-batch: {batch.micro_batches}"),
        ("steps", _steps(batch)),
    )


def _files(plan: Plan) -> list[tuple[str, str]]:
    named = (("train", plan.train_files), ("validate", plan.val_files))
    return [(name, ", ".join(file.path for file in files) or "none") for name, files in named]


def _steps(batch: BatchPlan) -> str:
    steps = "unknown: the number of training rows is not known" if batch.total_steps is None else str(batch.total_steps)
    if batch.steps_per_epoch is not None:
        steps += f" ({batch.steps_per_epoch} an epoch, {batch.train_rows} rows)"
    return steps


def _episodes(rollout: RolloutConfig, environment: Any) -> list[tuple[str, str]]:
    """Returns who answers the policy, and for how many turns."""
    if not converses(rollout, environment):
        return []
    named = environments_named(environment).values() or files_of(rollout.multi_turn.function_tool_path)
    who = ", ".join(named) or "tools"
    most = rollout.multi_turn.max_assistant_turns
    turns = f"at most {most} turns" if most else "as many turns as it takes"
    return [("environment", f"{who}: {turns}, {rollout.response_length} tokens in all, its own words included")]


def _memory(plan: Plan, console: Console) -> None:
    _phases(plan, console)
    if (memory := plan.memory) is None:
        return
    held = f"{memory.kv_sequences} full-length sequences at a time, per engine"
    config = plan.loaded.config
    if converses(config.actor_rollout_ref.rollout, config.environment):
        held = f"{memory.kv_sequences} whole conversations at a time, per engine, those that wait for a tool included"
    host = f"; {memory.host_bytes / GIB:.1f} GiB offloaded to each host" if memory.host_bytes else ""
    _rows(console, ("KV cache", f"{held}{host}"))


def _phases(plan: Plan, console: Console) -> None:
    if (memory := plan.memory) is None:
        return
    size = memory.hardware.memory_bytes / GIB
    unit = "this process, RAM" if memory.hardware.gpus == 0 else "each GPU"
    verdict = "[green]fits[/green]" if memory.fits else f"[red]does not fit[/red] ({', '.join(memory.overfull)})"
    _title(console, f"Memory of {unit}, {size:.0f} GiB, if every row has full length: {verdict}")
    table = Table(box=None, padding=(0, 2, 0, 2))
    table.add_column("phase")
    table.add_column("GiB", justify="right")
    table.add_column("")
    table.add_column("of which", overflow="fold")
    for phase in memory.phases:
        filled = min(BAR, round(BAR * memory.total(phase) / memory.hardware.memory_bytes))
        bar = "█" * filled + "·" * (BAR - filled)
        table.add_row(phase, f"{memory.total(phase) / GIB:.1f}", bar, _parts(memory, phase))
    console.print(table)


def _time(plan: Plan, console: Console) -> None:
    if plan.time is None:
        return
    phases = ", ".join(f"{name} {clock(seconds)}" for name, seconds in plan.time.phases.items())
    steps = plan.batch.total_steps
    whole = "" if steps is None else f", {clock(steps * plan.time.step)} in all {steps}"
    on_cpu = plan.memory is not None and plan.memory.hardware.gpus == 0
    source = (
        "estimated from a few milliseconds of products on this processor" if on_cpu else "by the device's data sheet"
    )
    _title(console, f"Time, {source}, if every response has full length")
    _rows(console, ("a step", f"about {clock(plan.time.step)}{whole}"), ("of which", phases))


def _ahead(plan: Plan, console: Console) -> None:
    """Shows what running ahead would give, beside as many mini-batches of a larger rollout."""
    if plan.lengths is None:
        return
    lengths, data = plan.lengths, plan.loaded.config.data
    tokens = f"median {lengths.at(0.5)}, 99th percentile {lengths.at(0.99)}, longest {lengths.tokens[-1]} tokens"
    _title(console, f"Running ahead, by {escape(lengths.source)}: {tokens}")
    table = Table(box=None, padding=(0, 2, 0, 2))
    for name in ("algorithm.staleness", "rollout.max_num_seqs", "a step", "steps an hour", "with mini-batches instead"):
        table.add_column(name, justify="right")
    for row in plan.ahead:
        beside = f"{row.mini_batches:.2f} x with {row.staleness + 1}" if row.staleness else ""
        slots, gain = f"{row.slots}", f"{row.gain:.2f} x"
        table.add_row(str(row.staleness), slots, clock(row.seconds), gain, beside)
    console.print(table)
    bypass = ", algorithm.rollout_correction.bypass_mode=True" if takes_one_step(plan.loaded.config) else ""
    keys = f"data.train_batch_size={data.train_batch_size} x their number{bypass}"
    console.print(f"  mini-batches of a larger rollout, which need no staleness: {keys}", soft_wrap=True)


def clock(seconds: float) -> str:
    """Formats seconds in a unit that leaves two or three figures: 4.2 s, 42 s, 4.2 min, 42 min, 4.2 h, 4.2 days."""
    units = (("s", 1, 100), ("min", 60, 100), ("h", 3600, 72), ("days", 86400, float("inf")))
    unit, size = next((unit, size) for unit, size, most in units if seconds < most * size)
    amount = seconds / size
    return f"{amount:.1f} {unit}" if amount < 10 else f"{amount:.0f} {unit}"


def _parts(memory: MemoryPlan, phase: str) -> str:
    parts = sorted(memory.phases[phase].items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size >= 0.05 * GIB) or "under 0.05 each"


def _origins(plan: Plan, console: Console) -> None:
    """Every value that is not the schema's own default, does not merely follow another key, and is read in this run."""
    _title(console, "Values, and where they came from")
    config = plan.loaded.config
    roles_of_keys = {"critic.": config.critic.enable, "reward_model.": config.reward_model.enable}
    idle = tuple(section for section, used in roles_of_keys.items() if not used)
    for key, origin in sorted(plan.loaded.origins.items(), key=lambda item: (_rank(item[1]), item[0])):
        if origin.startswith("follows") or (key.startswith(idle) and origin not in (LINE, PROGRAM)):
            continue
        value = masked(tree.get(config, key))
        setting = f"{key}=[{','.join(map(str, value))}]" if isinstance(value, list) else f"{key}={value}"
        console.print(f"  {escape(f'{setting:<88}')} [dim]{escape(origin)}[/dim]", soft_wrap=True)


def _rank(origin: str) -> int:
    order = (LINE, PROGRAM, "recipe", "--config-name", "guide", "embedded")
    return next((place for place, start in enumerate(order) if origin.startswith(start)), len(order))


def _advice(plan: Plan, console: Console) -> None:
    if plan.notes:
        _title(console, "Notes")
        for note in plan.notes:
            console.print(f"  [yellow]![/yellow] {escape(note)}", soft_wrap=True)
    if plan.advice:
        _title(console, "Advice")
        for advice in plan.advice:
            console.print(f"  - {escape(advice.message)}\n    try {escape(advice.suggestion)}", soft_wrap=True)
