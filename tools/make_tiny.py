"""Make the embedded default: a half-million-parameter model that has begun to learn addition, from a fixed seed.

    python tools/make_tiny.py [--out paddock/assets/tiny]

A short supervised warm start on partly wrong answers leaves it right about one time in four when it samples;
reinforcement learning takes it from there. Prints sampled and greedy accuracy on held-out pairs.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from paddock.core.rng import permutation
from paddock.data.builtin import builtin_rows
from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine

SEED = 0
BATCH = 128
STEPS = 300  # of the warm start: about one sampled answer in four is right
NOISE = 0.2  # share of digits in the warm start's answers that are random
LEARNING_RATE = 1e-3
SPECIAL = ["<pad>", "<eos>"]
PAD, EOS = 0, 1
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary.setdefault(letter, len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=258,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def warm_start(net: Qwen2ForCausalLM, words: PreTrainedTokenizerFast) -> None:
    rows = builtin_rows("builtin:addition/warmup")
    texts = [words(row["prompt"])["input_ids"] for row in rows]
    dice = random.Random(SEED)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    order: list[int] = []
    for step in range(STEPS):
        if len(order) < BATCH:
            order = permutation(len(rows), SEED, step).tolist()
        chosen, order = order[:BATCH], order[BATCH:]
        answers = {i: [*words(noisy(rows[i]["answer"], dice))["input_ids"], EOS] for i in chosen}
        width = max(len(texts[i]) + len(answers[i]) for i in chosen)
        tokens = torch.full((BATCH, width), PAD)
        labels = torch.full((BATCH, width), -100)
        for place, i in enumerate(chosen):
            both = texts[i] + answers[i]
            tokens[place, : len(both)] = torch.tensor(both)
            labels[place, len(texts[i]) : len(both)] = torch.tensor(answers[i])
        loss = net(input_ids=tokens, attention_mask=(tokens != PAD).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def noisy(answer: str, dice: random.Random) -> str:
    return "".join(str(dice.randrange(10)) if dice.random() < NOISE else digit for digit in answer)


def accuracy(net: Qwen2ForCausalLM, words: PreTrainedTokenizerFast) -> dict[str, float]:
    """On held-out pairs: 4 samples at temperature 1, and greedy."""
    rows = builtin_rows("builtin:addition/test")
    engine = EmbeddedEngine(net, max_num_seqs=512)
    prompts = [Prompt(words(row["prompt"])["input_ids"], list(range(i * 4, i * 4 + 4))) for i, row in enumerate(rows)]
    sampling = Sampling(max_tokens=8, stop_tokens=frozenset({EOS}), seed=1, step=0)
    found = {}
    for name, how, asked in (
        ("sampled", sampling, prompts),
        ("greedy", replace(sampling, temperature=0.0), [Prompt(p.tokens, p.rows[:1]) for p in prompts]),
    ):
        answers = [words.decode(c.tokens, skip_special_tokens=True) for c in engine.generate(asked, how)]
        each = len(answers) // len(rows)
        truths = [row["reward_model"]["ground_truth"] for row in rows for _ in range(each)]
        found[name] = sum(a == t for a, t in zip(answers, truths, strict=True)) / len(truths)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "paddock/assets/tiny")
    options = parser.parse_args()
    torch.set_num_threads(1)
    net, words = model(), tokenizer()
    warm_start(net, words)
    net.eval().save_pretrained(options.out)
    words.save_pretrained(options.out)
    size = sum(parameter.numel() for parameter in net.parameters())
    found = accuracy(net, words)
    shown = ", ".join(f"{name} {value:.1%}" for name, value in found.items())
    print(f"{size} parameters in {options.out}; held-out accuracy: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
