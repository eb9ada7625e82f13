"""Optional packages: what each extra of the distribution is for, what works without it, and how to get it."""

from __future__ import annotations

from dataclasses import dataclass

from paddock.facts.distribution import install_command
from paddock.runs.record import version_of


@dataclass(frozen=True)
class Extra:
    """Describes an extra. `packages` are names of distributions; it is named for the first."""

    packages: tuple[str, ...]
    purpose: str
    without: str


EXTRAS = {
    "ray": Extra(("ray",), "several processes, GPUs or nodes", "training in one process, on one device"),
    "vllm": Extra(("vllm",), "rollouts by vLLM", "rollouts by the embedded engine, on the actor's own weights"),
    "sglang": Extra(("sglang",), "rollouts by SGLang", "rollouts by the embedded engine"),
    "megatron": Extra(("megatron-core",), "tensor, pipeline and expert parallel training", "training by FSDP"),
    "lora": Extra(("peft",), "LoRA adapters", "training of all weights"),
    "vision": Extra(("pillow",), "images of vision-language models", "training on text"),
    "json": Extra(("jsonschema",), "the rule reward=json_schema", "every other rule and function"),
    "environments": Extra(
        ("textarena", "reasoning-gym", "skyrl-gym", "verifiers", "websockets"),
        "environments of TextArena, Reasoning Gym, SkyRL Gym, verifiers and OpenEnv",
        "environments of your own, and plain classes as TRL has them",
    ),
    "models": Extra(("gguf", "accelerate"), "`paddock models get`", "models from a folder or the hub"),
    "wandb": Extra(("wandb",), "metrics in Weights & Biases", "metrics on the console and in files"),
    "mlflow": Extra(
        ("mlflow-skinny", "sqlalchemy", "alembic"), "metrics in MLflow", "metrics on the console and in files"
    ),
    "swanlab": Extra(("swanlab",), "metrics in SwanLab", "metrics on the console and in files"),
    "trackio": Extra(("trackio",), "metrics in Trackio", "metrics on the console and in files"),
    "tensorboard": Extra(("tensorboard",), "metrics in TensorBoard", "metrics on the console and in files"),
    "docs": Extra(("mkdocs", "mkdocs-material", "jieba"), "`make docs`, the site", "the same pages as files"),
}
"""A test compares names and packages with pyproject.toml; `loggers` and `dev` are sets of these."""


@dataclass(frozen=True)
class Found:
    """Says which packages of an extra are installed here."""

    name: str
    versions: dict[str, str]
    missing: list[str]
    purpose: str
    without: str
    install: str

    @property
    def whole(self) -> bool:
        return not self.missing


def find_extras() -> list[Found]:
    found = []
    for name, extra in EXTRAS.items():
        versions = {package: version for package in extra.packages if (version := version_of(package))}
        missing = [package for package in extra.packages if package not in versions]
        found.append(Found(name, versions, missing, extra.purpose, extra.without, install_command(name)))
    return found
