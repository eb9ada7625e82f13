"""What the commands beside `train` change about the launch surface: names, defaults, and keys without effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from paddock.config import recipes
from paddock.facts.machine import this_machine
from paddock.loading import own_data
from paddock.loading.load import Loaded, load
from paddock.loading.overrides import parse
from paddock.loading.rules import set_by_user

_A, _M, _RO = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
MACHINE = ("trainer.device", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.seed")
PROMPTS = ("data.max_*", "data.filter_*", "data.truncation", "data.*_key", "data.seed", "data.tokenizer",
           "data.trust_remote_code", "data.apply_chat_template", "data.apply_chat_template_kwargs")  # fmt: skip
ENVIRONMENT = ("environment", "environment_kwargs", "environment_kwargs.*")
NO_ESTIMATOR = {"algorithm.adv_estimator": "reinforce_plus_plus"}
"""An estimator that needs neither critic nor groups."""


@dataclass(frozen=True)
class Command:
    name: str
    reads: tuple[str, ...]
    """Patterns of keys; any other that the user sets is reported."""
    names: Mapping[str, str]
    """Shorter or foreign names; one that ends in a dot stands for a section."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    real: Mapping[str, Any] = field(default_factory=dict)
    """Further defaults of a run that is not the embedded default."""
    embedded: Mapping[str, Any] = field(default_factory=dict)
    """Defaults in which the embedded default differs from training's."""
    origin: str | None = None
    """Origin of this command's defaults in a plan; unset: the command's name."""
    unreads: Mapping[str, str] = field(default_factory=dict)
    """Patterns of keys that are excepted from `reads`, and the section whose keys are read in their place."""
    trains: bool = True

    def load(
        self,
        arguments: Sequence[str] = (),
        values: Mapping[str, Any] | None = None,
        here: bool = True,
        gpu: str | None = None,
        chooses: bool = False,
    ) -> Loaded:
        """Loads a config as `train` does, with this command's names and defaults. The user's settings win.

        `values`: keys and their values from a Python program. `here`: False if files may be on another machine. `gpu`:
        the device to plan for. `chooses`: see `paddock.loading.load.load`.
        """
        overrides = [self.translate(argument) for argument in arguments]
        given = {setting.key: setting.value for setting in parse(overrides).settings} | dict(values or {})
        defaults = recipes.left_to_user({**self.situation(given, chooses), **self.defaults}, given)
        own = [f"{key}={'null' if value is None else value}" for key, value in defaults.items() if key not in given]
        loaded = load([*own, *overrides], values=values, here=here, gpu=gpu, trains=self.trains, chooses=chooses)
        unset = defaults.keys() - given.keys()
        loaded.origins |= dict.fromkeys(unset, self.origin or f"paddock {self.name}")
        loaded.warnings = [warning for warning in loaded.warnings if warning.split()[0] not in unset]
        unread = [key for key in loaded.origins if not self.is_read(key)]
        idle = tuple(text for key in unread for text in (f"{own_data.CHOSEN}{key}=", f"{key}="))
        loaded.warnings = [warning for warning in loaded.warnings if not warning.startswith(idle)]
        loaded.warnings += self.unread(loaded)
        return loaded

    def situation(self, given: Mapping[str, Any], chooses: bool) -> Mapping[str, Any]:
        if own_data.applies(given, this_machine() if chooses else None):
            return {}
        if not recipes.is_embedded(given, chooses):
            return self.real
        return {**recipes.embedded(given.get("environment")), **self.embedded} if self.embedded else {}

    def translate(self, argument: str) -> str:
        bare = argument.lstrip("+~")
        sign, (key, equals, value) = argument[: len(argument) - len(bare)], bare.partition("=")
        section, dot, rest = key.partition(".")
        if key in self.names:
            key = self.names[key]
        elif section + dot in self.names:
            key = self.names[section + dot] + rest
        return f"{sign}{key}{equals}{value}"

    def unread(self, loaded: Loaded) -> list[str]:
        warned = " ".join(loaded.warnings)
        return [
            f"{key} has no effect on `paddock {self.name}`{self.instead(key)}"
            for key, origin in loaded.origins.items()
            if set_by_user(origin) and key not in warned and not self.is_read(key)
        ]

    def is_read(self, key: str) -> bool:
        return not self.instead(key) and any(fnmatchcase(key, name) for name in self.reads)

    def instead(self, key: str) -> str:
        """Returns the end of a warning that names the key which is read in place of this one; empty if none is."""
        section = next((section for name, section in self.unreads.items() if fnmatchcase(key, name)), None)
        return "" if section is None else f": it reads {section}.{key.rpartition('.')[2]}"


SUPERVISED_READS = (
    *PROMPTS,
    *MACHINE,
    *("data.train_*", "data.val_*", "data.validation_shuffle", "data.shuffle", "data.dataloader_num_workers"),
    *(f"{_M}.*", f"{_A}.optim.*", f"{_A}.fsdp_config.*", f"{_A}.strategy", f"{_A}.use_dynamic_bsz"),
    *(f"{_A}.ppo_micro_batch_size_per_gpu", f"{_A}.ppo_max_token_len_per_gpu", f"{_RO}.log_prob_*"),
    *("trainer.total_*", "trainer.test_freq", "trainer.val_before_train", "trainer.save_*", "trainer.resume_*"),
    *("trainer.default_local_dir", "trainer.max_actor_ckpt_to_keep", "trainer.max_nonfinite_steps"),
    *("trainer.project_name", "trainer.experiment_name", "trainer.logger"),
    *("trainer.balance_batch", "trainer.max_restarts", f"{_A}.ulysses_sequence_parallel_size"),
    *("actor_rollout_ref.nccl_timeout", "ray_kwargs.*", "trainer.ray_wait_register_center_timeout"),
)
SUPERVISED_NAMES = {
    "model": f"{_M}.path",
    "model.partial_pretrain": f"{_M}.path",
    "model.": f"{_M}.",
    "data": "data.train_files",
    "data.micro_batch_size_per_gpu": f"{_A}.ppo_micro_batch_size_per_gpu",
    "optim.": f"{_A}.optim.",
}


def supervised(name: str, short_name: str, real: Mapping[str, Any], embedded: Mapping[str, Any]) -> Command:
    """Returns a command that trains on given rows, by one optimizer step for each batch."""
    defaults = {
        **NO_ESTIMATOR,
        "trainer.experiment_name": short_name,
        f"{_A}.ppo_mini_batch_size": "${data.train_batch_size}",
    }
    real = {f"{_A}.optim.lr": 1e-5, **real}
    return Command(name, SUPERVISED_READS, SUPERVISED_NAMES, defaults, real, embedded)


SFT = supervised(
    "sft",
    "sft",
    real={"data.train_batch_size": 256, "trainer.total_epochs": 3, "trainer.test_freq": 20},
    embedded={"data.train_files": "builtin:addition/warmup", "data.val_files": None},
)

RM = supervised(
    "rm train",
    "rm",
    real={"data.train_batch_size": 128, "trainer.total_epochs": 1, "trainer.test_freq": 50},
    embedded={
        "data.train_files": "builtin:addition/pairs",
        "data.val_files": "builtin:addition/pairs_test",
        "data.train_batch_size": 32,
        f"{_A}.optim.lr": 3e-4,  # with 1e-3 a seed may rank fewer pairs right, which PPO follows
        f"{_A}.optim.lr_warmup_steps_ratio": 0.05,
        f"{_A}.optim.lr_scheduler_type": "cosine",
        "trainer.total_training_steps": 6000,
        "trainer.test_freq": 1000,
    },
)

EVAL = Command(
    name="eval",
    reads=(
        *PROMPTS,
        *MACHINE,
        *("data.val_*", "data.validation_shuffle", f"{_M}.*", f"{_RO}.*", "trainer.validation_data_dir"),
        *("reward_model.*", "custom_reward_function.*", "reward", "reward_kwargs", "reward_weights"),
        *ENVIRONMENT,
    ),
    names={"model": f"{_M}.path", "model.": f"{_M}.", "data": "data.val_files", "rollout.": f"{_RO}."},
    defaults=NO_ESTIMATOR,
    unreads={f"{_RO}.{name}": f"{_RO}.val_kwargs" for name in ("n", "do_sample", "temperature", "top_k", "top_p")},
    trains=False,
)

GENERATE = Command(
    name="generate",
    reads=(*PROMPTS, *MACHINE, *ENVIRONMENT, "data.val_*", f"{_M}.*", f"{_RO}.*"),
    names={
        "model": f"{_M}.path",
        "model.": f"{_M}.",
        "data": "data.val_files",
        "data.path": "data.val_files",
        "data.batch_size": "data.val_batch_size",
        "data.n_samples": f"{_RO}.n",
        "n": f"{_RO}.n",
        "rollout.": f"{_RO}.",
    },
    defaults={**NO_ESTIMATOR, f"{_RO}.n": 1, "data.filter_overlong_prompts": False},
    unreads={f"{_RO}.val_kwargs.*": _RO},
    trains=False,
)
