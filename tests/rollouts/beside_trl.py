"""The same scripted turns through TRL's own rollout and through a run of ours: what reward functions get, and pay."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import tokenizer_of_bytes
from tiny_models import tiny_model

from paddock import Run
from paddock.engines.rollout.base import Completion, Request
from paddock.engines.rollout.embedded.engine import EmbeddedEngine

END = "<|im_end|>"
ROOM = 16384
Turns = Sequence[str]
"""What the policy says in an episode, turn by turn."""


@dataclass
class Seen:
    """Holds the rewards of each episode by the name of their source, and what functions were given."""

    rewards: list[dict[str, float | None]] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    completions: list[Any] = field(default_factory=list)


def save_model(folder: Path) -> Path:
    """Writes a tiny model whose tokens are bytes, with the chat template that TRL ships for Qwen3."""
    import trl

    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer = tokenizer_of_bytes(after=("<|im_start|>", END, "<pad>"), template=template.read_text(),
                                   eos_token=END, pad_token="<pad>")  # fmt: skip
    end = tokenizer.convert_tokens_to_ids(END)
    model = tiny_model("qwen3", max_position_embeddings=ROOM, eos_token_id=end, pad_token_id=end + 1, bos_token_id=None)
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def call(name: str, /, **arguments: Any) -> str:
    """Returns a tool call as Qwen3 writes it."""

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tokens_of(tokenizer: Any, text: str, most: int) -> list[int]:
    return tokenizer.encode(text + END, add_special_tokens=False)[:most]


class Watching:
    """Keeps what one reward function is given, the last first."""

    def __init__(self, seen: Seen):
        self.seen = seen
        self.__name__ = "watching"

    def __reduce__(self):
        raise TypeError("what it keeps is read in this process")

    def __call__(self, prompts: list[Any], completions: list[Any], **columns: Any) -> list[None]:
        self.seen.prompts, self.seen.completions = copy.deepcopy(prompts), copy.deepcopy(completions)
        return [None] * len(prompts)


class Scored(Exception):
    """Raised once TRL has its rewards: nothing is trained here."""


def by_trl(
    folder: Path, rows: Sequence[dict[str, Any]], script: Sequence[Turns], rewards: Sequence[Callable[..., Any]],
    length: int = 4096, **kwargs: Any,
) -> Seen:  # fmt: skip
    """Returns what TRL's trainer makes of these turns; `kwargs`: tools, environment_factory."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    seen = Seen()
    settings = GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=len(rows), num_generations=2, use_cpu=True,
        bf16=False, report_to="none", max_completion_length=length,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = GRPOTrainer(
        model=str(folder), reward_funcs=[*rewards, Watching(seen)], args=settings, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": ""}]}] * len(rows)), **kwargs,
    )  # fmt: skip
    alive: list[tuple[list[int], list[str]]] = []

    def drawn(prompts: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        nonlocal alive
        if not alive:
            alive = [([], list(turns)) for turns in script]
        found, rest = [], []
        for prompt in prompts:  # those that go on come in their order
            before, turns = alive.pop(0)
            while prompt[: len(before)] != before:
                before, turns = alive.pop(0)
            found.append(tokens_of(tokenizer, turns[0], length))
            rest.append((prompt + found[-1], turns[1:]))
        alive = rest
        return found, None

    scored = trainer._calculate_rewards

    def kept(*given: Any) -> None:
        names = [getattr(one, "__name__", "") for one in rewards]
        names += ["watching", *trainer.reward_func_names[len(rewards) + 1 :]]
        for values in scored(*given).tolist():
            found = {name: None if value != value else value for name, value in zip(names, values, strict=True)}
            seen.rewards.append({name: value for name, value in found.items() if name != "watching"})
        raise Scored

    trainer._generate_single_turn, trainer._calculate_rewards = drawn, kept
    trainer.model.train()
    with pytest.raises(Scored):
        trainer._generate_and_score_completions(copy.deepcopy(list(rows)))
    return seen


class Scripted:
    """Stands for the engine's draws: each row says its turns, one after the other."""

    def __init__(self, tokenizer: Any, script: Sequence[Turns]):
        self.tokenizer, self.script, self.done = tokenizer, script, []
        self.said = dict.fromkeys(range(len(script)), 0)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for key, row in zip(request.keys, request.rows, strict=True):
                text = self.script[row][self.said[row]]
                self.said[row] += 1
                tokens = tokens_of(self.tokenizer, text, request.limit)
                stopped = tokens[-1] == self.tokenizer.eos_token_id
                self.done.append(Completion(row, tokens, [-1.0] * len(tokens), stopped, key=key))

    def advance(self, seconds: float | None = None) -> list[Completion]:
        found, self.done = self.done, []
        return found

    def play(self, patch: pytest.MonkeyPatch) -> None:
        def nothing(*_: Any) -> list[Completion]:
            return []

        own = {"submit": self.submit, "advance": self.advance}
        for name in ("submit", "advance", "resume", "forget", "pause"):
            patch.setattr(EmbeddedEngine, name, own.get(name, nothing))


def by_paddock(
    folder: Path, rows: Sequence[dict[str, Any]], script: Sequence[Turns], rewards: Sequence[Callable[..., Any]],
    patch: pytest.MonkeyPatch, length: int = 4096, environment: Any = None, tools: Any = None, config: Any = None,
) -> Seen:  # fmt: skip
    """Returns what a run of ours makes of these turns."""
    from transformers import AutoTokenizer

    seen, names = Seen(), [getattr(one, "__name__", "") for one in rewards]
    Scripted(AutoTokenizer.from_pretrained(folder), script).play(patch)
    keys = {"data.val_files": None, "data.shuffle": False, "data.max_prompt_length": 8192, "trainer.device": "cpu",
            "actor_rollout_ref.rollout.max_model_len": ROOM}  # fmt: skip
    with Run(
        str(folder), list(rows), [*rewards, Watching(seen)], environment=environment, tools=tools, n=1, logger=[],
        batch=len(rows), response_length=length, algorithm="reinforce_plus_plus", folder=str(folder / "paddock"),
        config=keys | (config or {}),
    ) as run:  # fmt: skip
        episodes = run.sample()
        batch = run.score(episodes)
        for index, episode in enumerate(episodes):
            seen.rewards.append({name: batch.extras[name][index] for name in names})
            several = environment if isinstance(environment, dict) else {None: environment}
            for name, kind in several.items():
                if hasattr(kind, "get_reward"):
                    own = name is None or name == rows[index]["environment"]
                    paid = sum(span.reward for span in episode.spans) if own else None
                    seen.rewards[-1][kind.__name__] = paid
    return seen
