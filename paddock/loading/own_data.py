"""A run that names data, but neither a model nor hardware: what this machine can do with these rows.

Every choice is a line for people, with the key that changes it; a key that the user set is never among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paddock.config import recipes
from paddock.config.paths import expand, files_of
from paddock.errors import UserError
from paddock.facts.files import SAMPLED, FileSample, hub_name, is_here, sample
from paddock.facts.machine import Machine
from paddock.facts.models import BUILTIN, ModelShape, local_models, shape_of

_M, _RO = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
MODEL, FILES = f"{_M}.path", "data.train_files"
ORIGIN = "chosen for your data"
CHOSEN = "chosen: "
HARDWARE = (recipes.DEVICES, "trainer.nnodes")
TINY = recipes.EMBEDDED[MODEL]
GET = "paddock models get smollm2-135m-instruct"
LARGEST_ON_CPU = 400_000_000
"""Parameters of a model above which a step on a CPU takes many minutes."""
TINY_ANSWER, REAL_ANSWER = 64, 256
"""Tokens of a response at most: the built-in model reads and writes bytes."""
LONGEST_PROMPT = 1024


@dataclass(frozen=True)
class Choice:
    """A key that nobody set, what it becomes, and why; `said` in a line of its own, or told in another one's."""

    key: str
    value: Any
    why: str
    said: bool = True

    def __str__(self) -> str:
        value = "[" + ",".join(map(str, self.value)) + "]" if isinstance(self.value, list) else self.value
        return f"{CHOSEN}{self.key}={value} ({self.why})"


def applies(chosen: Mapping[str, Any], machine: Machine | None = None) -> bool:
    """True if data that can be read here is named, and neither a model nor an accelerator.

    `machine`: given for a run of Paddock's own, which may also name the built-in model, or one that the only device of
    this machine holds.
    """
    paths = [expand(path) for path in files_of(chosen.get(FILES))]
    readable = not any(path.startswith(BUILTIN) for path in paths) and all(is_here(p) or hub_name(p) for p in paths)
    if not paths or not readable or chosen.get("data.custom_cls.path") is not None:
        return False
    model, device = chosen.get(MODEL), chosen.get(recipes.DEVICE)
    if model is not None and not (machine and _is_held(str(model), machine, device == "cpu")):
        return False
    if device == "cpu" or (model is not None and str(model).startswith(BUILTIN)):
        return True
    return device is None and all(chosen.get(key) is None for key in HARDWARE)


def _is_held(model: str, machine: Machine, on_cpu: bool) -> bool:
    """True for the built-in model, and for one of a known size that the only device of this machine can train."""
    if model.startswith(BUILTIN):
        return True
    shape = shape_of(expand(model))
    return shape is not None and machine.devices <= 1 and _fits(shape, machine, "cpu" if on_cpu else machine.device)


def choices(chosen: Mapping[str, Any], machine: Machine) -> list[Choice]:
    """Returns values of the keys that decide how long a run takes and whether it fits; those in `chosen` stay."""
    paths = [expand(path) for path in files_of(chosen[FILES])]
    rows = sample(paths, FILES, chosen.get("data.prompt_key"), chosen.get("data.answer_key"))
    most = chosen.get("data.train_max_samples") or -1
    if rows.count is not None and isinstance(most, int) and 0 < most < rows.count:
        rows = replace(rows, count=most)
    device = machine.device if machine.devices and chosen.get(recipes.DEVICE) != "cpu" else "cpu"
    named = chosen.get(MODEL)
    model, shape, why = _model(machine, device) if named is None else (named, shape_of(expand(str(named))), "named")
    tiny = str(model).startswith(BUILTIN)
    here = f"{machine.devices} of this kind here" if machine.devices else "this machine has no accelerator"
    all_choices = [
        Choice(recipes.DEVICE, device, here),
        Choice(recipes.DEVICES, 1, "one process"),
        Choice(MODEL, model, why),
        Choice("algorithm.adv_estimator", "grpo", "no critic to train beside the model"),
        *_lengths(rows, tiny, shape),
        *_batch(rows, tiny, device),
        *_details(tiny, device),
    ]
    settled = {key for key, value in chosen.items() if value is not None}
    if recipes.EPOCHS in settled:  # the user's, and steps follow from them
        settled.add(recipes.STEPS)
    if chosen.get("environment") or chosen.get(f"{_RO}.multi_turn.enable"):  # these write prompts, too
        settled.add("data.max_prompt_length")
    return [choice for choice in all_choices if choice.key not in settled]


def as_the_run_has_them(own: list[Choice], folder: str, chosen: Mapping[str, Any]) -> list[Choice]:
    """Returns the choices of the run that goes on in this folder, which new ones would differ from if rows, or a model
    on this disk, have come since; `own` if none does."""
    there = Path(folder)
    try:
        start = json.loads((there / "run.json").read_bytes())["starts"][-1]
        settings, origins = dict(start["settings"]), dict(start["origins"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return own
    if not (there / "latest_checkpointed_iteration.txt").is_file():
        return own
    set_now = {key for key, value in chosen.items() if value is not None}
    set_now |= {recipes.STEPS} if recipes.EPOCHS in set_now else set()
    free = [key for key, origin in origins.items() if str(origin).startswith(ORIGIN) and key not in set_now]
    held = {key: settings[key] for key in free if key in settings}
    new = {choice.key: choice for choice in own}
    moved = [key for key, value in held.items() if key not in new or new[key].value != value]
    as_it_has = [Choice(key, held[key], "as this run has it", new[key].said if key in new else False) for key in moved]
    return [*(choice for choice in own if choice.key not in moved), *as_it_has]


def _model(machine: Machine, device: str) -> tuple[str, ModelShape | None, str]:
    """The largest model on this disk that can be trained here, those that can chat first; else the built-in one."""
    fitting = [model for model in local_models() if _fits(model.shape, machine, device)]
    if fitting:
        best = max(fitting, key=lambda model: (model.chats, model.shape.parameters))
        return best.path, best.shape, f"the largest on this disk that fits, {best.shape.parameters / 1e6:,.0f} million"
    why = "no language model that fits is on this disk; this one reads any text byte by byte, and has learned to add"
    return TINY, shape_of(TINY), f"{why}. `{GET}` brings one, and the same command then takes it"


def _fits(shape: ModelShape, machine: Machine, device: str) -> bool:
    small = device != "cpu" or shape.parameters <= LARGEST_ON_CPU
    return small and machine.holds_training(shape.parameters, device)


def _lengths(rows: FileSample, tiny: bool, shape: ModelShape | None) -> list[Choice]:
    """Room for the longest prompt and answer among the first rows, in tokens: the built-in model's are bytes."""
    if rows.prompts == (0, 0):
        return [Choice("data.max_response_length", REAL_ANSWER, "the rows are not here yet", said=False)]
    shortest, longest = rows.prompts
    if rows.count and rows.count > SAMPLED:
        longest = longest * 5 // 4  # further rows may be longer
    answer = rows.answer
    if not tiny:
        prompt = min(_up(longest // 2 + 64, 64), LONGEST_PROMPT)
        return [
            Choice("data.max_prompt_length", prompt, f"the longest of your prompts has {longest} bytes"),
            Choice("data.max_response_length", REAL_ANSWER, "a paragraph or two"),
        ]
    response = min(max(8, _up(answer * 3 // 2, 8)), TINY_ANSWER) if answer else TINY_ANSWER // 2
    room = (shape.max_positions if shape else 512) - response
    if shortest > room:
        reason = f"the built-in model reads {room} bytes, and your shortest prompt has {shortest}"
        fix = f"{GET}, and the same command again takes it; or {MODEL}=FOLDER of a model of yours"
        raise UserError(reason, key=MODEL, value=TINY, fix=fix)
    because = f"your answers have up to {answer} bytes" if answer else "there are no answers to measure"
    return [
        Choice("data.max_prompt_length", min(_up(longest, 8), room), f"your prompts have up to {longest} bytes"),
        Choice("data.max_response_length", response, because),
    ]


def _batch(rows: FileSample, tiny: bool, device: str) -> list[Choice]:
    """A batch that leaves a few steps to an epoch, and steps that take minutes, not hours, on this device."""
    most, steps = (32, 150) if tiny else (16, 30) if device == "cpu" else (64, 100)
    batch = most
    while rows.count is not None and batch > 1 and batch * 4 > rows.count:
        batch //= 2
    of = "rows not counted yet" if rows.count is None else f"{rows.count:,} rows"
    epoch = None if rows.count is None else max(1, rows.count // batch)
    passes = "" if epoch is None else f"; {max(1, round(steps / epoch))} times through your rows"
    return [
        Choice("data.train_batch_size", batch, f"prompts in a step; {of}"),
        Choice(f"{_RO}.n", 8, "answers to each prompt, compared with each other"),
        Choice("actor_rollout_ref.actor.optim.lr", 5e-4 if tiny else 1e-5 if device == "cpu" else 2e-6,
               "for a model of this size"),
        Choice("trainer.total_training_steps", steps, f"minutes on this machine{passes}" if tiny or device != "cpu"
               else f"a minute or more each{passes}"),
        Choice("trainer.test_freq", max(5, steps // 5), "", said=False),
    ]  # fmt: skip


def _details(tiny: bool, device: str) -> list[Choice]:
    """Returns what follows from the device and from the size of the model: precision, and no recomputation if it is
    small."""
    if not tiny and device != "cpu":
        return []
    kept = [key for key in recipes.EMBEDDED if key.endswith((".dtype", ".enable_gradient_checkpointing"))]
    kept += ["critic.optim.lr"] if tiny else []
    return [Choice(key, recipes.EMBEDDED[key], f"{TINY if tiny else device}", said=False) for key in kept]


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
