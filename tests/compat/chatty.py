"""A tiny chat model that calls a tool: what it says is drawn by a real engine, and it can be trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from byte_tokenizer import tokenizer_of_bytes
from tiny_models import tiny_model

from paddock.data.dataset import PromptDataset
from paddock.engines.rollout.base import RolloutEngine, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.loading.load import load
from paddock.models.load import load_causal_lm, load_tokenizer
from paddock.rollouts.environments import Environments, RowEnvironments
from paddock.rollouts.episode import Episode, begun

sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))

CALL = '<tool_call>{"name": "check", "arguments": {"answer": "7"}}</tool_call>'
SPECIAL = ["<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
END = 1
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"


def save_chatty(folder: Path, likely: str = CALL) -> Path:
    """Writes a model whose turn is the text `likely`, one token of it, in eight of nine cases, else a 7."""
    tokenizer = tokenizer_of_bytes(before=SPECIAL, template=TEMPLATE, eos_token="<|end|>", pad_token="<pad>",
                                   padding_side="left")  # fmt: skip
    tokenizer.add_tokens([likely])
    call, seven = tokenizer.encode(likely)[0], tokenizer.encode("7")[0]
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")
    model = tiny_model("llama", vocab_size=272, eos_token_id=END, pad_token_id=0)
    with torch.no_grad():
        for layer in model.model.layers:  # so that a token follows from the last one alone
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.zero_()
        embedding[:, 0] = 1.0
        embedding[assistant, 0], embedding[assistant, 1] = 0.0, 1.0
        head.zero_()
        head[END, 0], head[call, 1], head[seven, 1] = 3.0, 3.0, 2.7
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int = 4, **columns: Any) -> Path:
    """Writes rows as verl's preprocessing does; a column that is a function is called with the row's number."""
    lines = []
    for index in range(count):
        own = {name: value(index) if callable(value) else value for name, value in columns.items()}
        extra = {"index": index, **own.pop("extra_info", {})}
        lines.append({"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": f"3+4={index}?"}],
                      "reward_model": {"style": "rule", "ground_truth": "7"}, "extra_info": extra, **own})  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def keys_of(model: Path, folder: Path, *more: str) -> list[str]:
    """Returns the keys of a run of two steps over `rows.jsonl` of the folder."""
    return [
        f"actor_rollout_ref.model.path={model}", f"data.train_files={folder / 'rows.jsonl'}", "data.val_files=null",
        "algorithm.adv_estimator=grpo", "trainer.total_training_steps=2", "trainer.save_last=False",
        "trainer.logger=[file]", "data.dataloader_num_workers=0", f"trainer.default_local_dir={folder / 'run'}",
        "data.train_batch_size=4", f"{ROLLOUT}.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_prompt_length=128", "data.max_response_length=160", "reward_model.num_workers=1",
        f"trainer.rollout_data_dir={folder / 'rollouts'}", *more,
    ]  # fmt: skip


def talk(
    model: Path, folder: Path, *more: str, samples: int = 2, length: int = 160,
    engine: Callable[..., RolloutEngine] = EmbeddedEngine, slots: int = 64, **changes: Any,
) -> list[Episode]:  # fmt: skip
    """Returns the episodes of the rows of `rows.jsonl`, `samples` each."""
    own = RowEnvironments(load(keys_of(model, folder, f"{ROLLOUT}.max_num_seqs={slots}", *more)).config)
    config, tokenizer = own.prompting(), load_tokenizer(str(model))
    data = PromptDataset.train(config.data, tokenizer)
    environments = Environments(config, tokenizer, frozenset({END}), own)
    weights = load_causal_lm(str(model), dtype=torch.float32, device=torch.device("cpu"))
    sampling = Sampling(**{"max_tokens": length, "stop_tokens": frozenset({END}), "seed": 3, "step": 1, **changes})
    try:
        return environments.run(
            engine(weights, max_num_seqs=slots), 7, begun(data.rows(range(len(data))), samples, sampling.step), sampling
        )
    finally:
        environments.close()


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
