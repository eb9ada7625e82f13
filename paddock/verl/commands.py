"""verl's commands for SFT and generation: their keys and defaults as `paddock sft` and `paddock generate` have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paddock.commands.keys_of import GENERATE, NO_ESTIMATOR, SFT, Command
from paddock.errors import UserError
from paddock.loading.foreign import Ignored, KeyRule, Mapped, Refused, moved, rule_for, table, without_effect
from paddock.loading.load import Loaded
from paddock.loading.overrides import parse

_A, _RO = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GROUPS = ("engine", "optim", "model")
"""Config groups: `engine=megatron` chooses a file of defaults, and thereby an engine."""


@dataclass(frozen=True)
class Surface:
    """A command of verl's: the command here that does its work, and what its keys and defaults become."""

    name: str
    command: Command
    rules: Mapping[str, KeyRule]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def load(self, arguments: Sequence[str], here: bool = True) -> Loaded:
        """Loads a config of verl's keys. Notes on keys that have no effect come first among its warnings.

        `here`: False if files that it names may be on another machine.
        """
        renamed, notes = self.translated(arguments)
        command = replace(
            self.command, defaults={**self.command.defaults, **self.defaults}, real={}, origin=f"verl's {self.name}"
        )
        loaded = command.load(renamed, here=here)
        loaded.warnings = [*notes, *loaded.warnings]
        return loaded

    def translated(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns the arguments under the names here, and a note for each that has no effect."""
        kept, notes = list[str](), list[str]()
        for argument in arguments:
            bare = argument.lstrip("+~")
            key, equals, value = bare.partition("=")
            rule = rule_for(key, self.rules) if equals and not argument.startswith("-") else None
            if isinstance(rule, Mapped):
                kept.append(f"{argument[: len(argument) - len(bare)]}{rule.to}={value}")
            elif rule is None:
                kept.append(argument)
            else:
                assert isinstance(rule, Ignored | Refused)
                (setting,) = parse([argument]).settings
                notes.append(without_effect(rule, key, setting.value))
        return kept, notes


_CHOOSES = "data.apply_chat_template_kwargs.enable_thinking=True"
SUPERVISED: dict[str, KeyRule] = {
    **moved({
        "model.partial_pretrain": "@model.path",
        "model.strategy": "@actor.strategy",
        "model.fsdp_config.cpu_offload": "@actor.fsdp_config.param_offload",
        "model.fsdp_config.*": "@actor.fsdp_config.*",
        "model.*": "@model.*",
        "engine.{strategy,ulysses_sequence_parallel_size}": "@actor.{strategy,ulysses_sequence_parallel_size}",
        "engine.use_remove_padding": "@model.use_remove_padding",
        "optim.lr_scheduler": "@actor.optim.lr_scheduler_type",
        "optim.*": "@actor.optim.*",
        "ulysses_sequence_parallel_size use_remove_padding":
            "@actor.ulysses_sequence_parallel_size @model.use_remove_padding",
        "data.{micro_batch_size,micro_batch_size_per_gpu}": "@actor.ppo_{micro_batch_size,micro_batch_size_per_gpu}",
        "data.{max_token_len_per_gpu,use_dynamic_bsz}": "@actor.{ppo_max_token_len_per_gpu,use_dynamic_bsz}",
        "data.num_workers": "data.dataloader_num_workers",
        "data.chat_template": "data.apply_chat_template_kwargs.chat_template",
        "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
        "trainer.checkpoint.*": "@actor.checkpoint.*",
        "checkpoint.*": "@actor.checkpoint.*",
    }),
    **table({
        "data.messages_key data.multiturn.messages_key": Refused(
            "the column messages is read under this name alone", "rename the column to messages", ("messages",)),
        "data.tools_key data.multiturn.tools_key": Refused(
            "the column tools is read under this name alone", "rename the column to tools", ("tools",)),
        "model.fsdp_config.offload_params": Ignored("model.fsdp_config.cpu_offload decides"),
        "data.enable_thinking_key data.multiturn.enable_thinking_key": Refused(
            "a row does not choose how the template thinks", f"{_CHOOSES}, for all rows", (None, "enable_thinking")),
        "data.enable_thinking_default": Refused("is an argument of the chat template", _CHOOSES, (None, "none")),
        "data.pad_mode": Ignored("sequences are packed without padding"),
        "data.balance_dp_token": Ignored("losses are divided by the tokens of the whole batch"),
        "data.ignore_input_ids_mismatch": Ignored("the template writes a conversation as a whole"),
        "trainer.profile_interval profiler.*": Ignored("no profiler is started"),
    }),
}  # fmt: skip

_FSDP_HERE = Ignored("supervised training runs FSDP2 here, whose result is the same")
ENGINES: dict[str, dict[str, KeyRule]] = {
    "fsdp": moved({"engine.*": "@actor.fsdp_config.*"}),
    "megatron": {
        **moved({
            "engine.dtype": "@actor.fsdp_config.dtype",
            "engine.{param_offload,optimizer_offload}": "@actor.fsdp_config.{param_offload,optimizer_offload}",
            "optim.override_optimizer_config.optimizer_cpu_offload": "@actor.fsdp_config.optimizer_offload",
        }),
        **table({
            "optim.override_optimizer_config.{*offload_fraction,overlap_cpu_optimizer_d2h_h2d} "
            "optim.override_optimizer_config.use_precision_aware_optimizer "
            "engine.override_transformer_config.{attention_backend,gradient_accumulation_fusion}": _FSDP_HERE,
            "optim.override_optimizer_config.decoupled_weight_decay": Refused(
                "AdamW's weight decay is decoupled", "optim.optimizer=Adam adds it to the gradient", (None, True)),
            "engine.override_transformer_config.recompute_*": Ignored("model.enable_gradient_checkpointing decides"),
            "engine.override_*": Refused(
                "is a field of Megatron's, and supervised training runs FSDP2 here", "leave it out"),
            "engine.*": _FSDP_HERE,
        }),
    },
}  # fmt: skip

ROWS_AS_VERL = {
    "data.max_prompt_length": "${data.max_length}",
    "data.max_response_length": "${data.max_length}",
    "data.filter_overlong_prompts": False,
}
"""verl limits prompt and answer together, and stops at a row that is too long."""

LAST_STEP = 10**9
"""verl's SFT commands validate after the last step, whatever `trainer.test_freq` says, and not before the first."""

SUPERVISED_DEFAULTS: dict[str, Any] = {
    **ROWS_AS_VERL,
    "data.max_length": 1024,
    "data.train_batch_size": 256,
    "trainer.total_epochs": 4,
    "trainer.test_freq": LAST_STEP,
    "trainer.val_before_train": False,
    "trainer.save_freq": -1,
    "trainer.project_name": "gsm8k-sft",
    "trainer.experiment_name": "test",
}

FSDP_SFT = Surface(
    "fsdp_sft_trainer",
    SFT,
    SUPERVISED,
    {
        **SUPERVISED_DEFAULTS,
        "data.prompt_as_message": True,
        f"{_A}.optim.lr": 1e-5,
        f"{_A}.optim.betas": [0.9, 0.95],
        f"{_A}.optim.lr_warmup_steps_ratio": 0.1,
        f"{_A}.optim.lr_scheduler_type": "cosine",
    },
)
ENGINE_SFT = Surface(
    "sft_trainer",
    SFT,
    {**SUPERVISED, "data.truncation": Ignored("a row that is too long is cut at its end, as verl's sft_trainer does")},
    {
        **SUPERVISED_DEFAULTS,
        "data.prompt_key": "messages",
        "data.truncation": "right",
        f"{_A}.optim.lr": 1e-3,
    },
)


def load_supervised(surface: Surface, arguments: Sequence[str], world: Mapping[str, str], here: bool = True) -> Loaded:
    """Loads the config of an SFT command; `world`: environment variables, of which torchrun sets the devices."""
    engine, rest = chosen_engine(arguments)
    rows, rest = columns(surface, rest)
    devices, rest = launched_devices(rest, world)
    rules = {**ENGINES[engine], **surface.rules}
    defaults = {key: value for key, value in surface.defaults.items() if key not in rows}
    chosen = replace(surface, rules=rules, defaults={**defaults, **rows})
    loaded = chosen.load([*rest, *devices], here)
    if loaded.config.trainer.test_freq < 1:
        loaded.config.trainer.test_freq = LAST_STEP
        loaded.origins["trainer.test_freq"] = "verl validates after the last step"
    return loaded


def chosen_engine(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the engine that config groups name, and the other arguments."""
    groups = {key: value for key, _, value in (argument.partition("=") for argument in arguments) if key in GROUPS}
    for group in ("engine", "optim"):
        if (name := groups.get(group, "fsdp")) not in ENGINES:
            reason = f"{name} is not a training engine here"
            raise UserError(reason, key=group, value=name, fix="engine=fsdp optim=fsdp, or leave both out")
    return groups.get("engine", "fsdp"), [text for text in arguments if text.partition("=")[0] not in GROUPS]


def columns(surface: Surface, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns where prompts and answers are, and the other arguments. Keys inside a column are joined by dots."""
    named = ("prompt_key", "prompt_dict_keys", "response_key", "response_dict_keys", "multiturn.enable")
    mine = [text for text in arguments if text.lstrip("+").partition("=")[0] in {f"data.{name}" for name in named}]
    given = {setting.key.removeprefix("data."): setting.value for setting in parse(mine).settings}
    rest = [argument for argument in arguments if argument not in mine]
    if surface is not FSDP_SFT or given.get("multiturn.enable"):
        return {"data.prompt_key": "messages"}, rest
    return {
        "data.prompt_key": inside(given.get("prompt_key", "question"), given.get("prompt_dict_keys")),
        "data.answer_key": inside(given.get("response_key", "answer"), given.get("response_dict_keys")),
    }, rest


def inside(column: str, keys: Sequence[str] | None) -> str:
    return ".".join([column, *(keys or ())])


def launched_devices(arguments: Sequence[str], world: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Returns the devices that torchrun was asked for as settings, and the other arguments; without it there are none.

    torchrun starts a process for each device; here rank 0 starts them through Ray.
    """
    here, everywhere = (world.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if not (here.isdecimal() and everywhere.isdecimal()):
        return [], list(arguments)
    settings = {"trainer.n_gpus_per_node": int(here), "trainer.nnodes": int(everywhere) // int(here)}
    rest = [argument for argument in arguments if argument.lstrip("+").partition("=")[0] not in settings]
    return [f"{key}={value}" for key, value in settings.items()], rest


ONE_DEVICE = Ignored("answers are generated on one device; which ones come does not depend on their number")
NO_RAY = Ignored("one process needs no Ray")
GENERATION = Surface(
    "main_generation",
    GENERATE,
    {
        **moved({"{rollout,@rollout}.prompt_length": "{data,data}.max_prompt_length"}),
        **moved({"{rollout,@rollout}.response_length": "{data,data}.max_response_length"}),
        **table(
            {
                "trainer.{n_gpus_per_node,nnodes} {rollout,@rollout}.tensor_model_parallel_size": ONE_DEVICE,
                "actor.*": Ignored("there is no actor beside the rollout"),
                "ray_kwargs.*": NO_RAY,
            }
        ),
    },
    {
        f"{_RO}.n": 5,
        f"{_RO}.top_k": 50,
        f"{_RO}.top_p": 0.7,
        "data.max_prompt_length": 1536,
        "data.max_response_length": 512,
        "data.val_batch_size": 128,
    },
)
GENERATION_SERVER = Surface(
    "main_generation_server", GENERATE, {**GENERATION.rules, "data.train_files": Mapped("data.val_files")}
)


SCORES = Surface(
    "main_eval",
    Command(
        name="main_eval",
        reads=("data.*", "custom_reward_function.*", "reward_model.*"),
        names={"data.path": "data.val_files"},
        defaults={**NO_ESTIMATOR, "data.train_files": None},
    ),
    {"data.prompt_key": Ignored("prompts are not read"), "ray_kwargs.*": NO_RAY},
)
RESPONSES, SOURCE, TRUTH = "data.response_key", "data.data_source_key", "data.reward_model_key"
SCORED_COLUMNS = {RESPONSES: "responses", SOURCE: "data_source", TRUTH: "reward_model"}
"""Keys of a file of answers, and the columns that they name by default."""


def load_scores(arguments: Sequence[str], here: bool) -> tuple[Loaded, dict[str, str]]:
    """Loads the config of verl's main_eval, and the column that each key names."""
    own = [argument for argument in arguments if argument.lstrip("+").partition("=")[0] in SCORED_COLUMNS]
    columns = {setting.key: str(setting.value) for setting in parse(own).settings}
    rest = [argument for argument in arguments if argument not in own]
    return SCORES.load(rest, here), SCORED_COLUMNS | columns
