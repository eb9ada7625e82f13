"""GRPO in one file, to be read from top to bottom: `python examples/grpo_from_scratch.py [STEPS]`.

A model of half a million parameters, which comes with the package, learns to add two numbers of two digits. The sum is
written units digit first: "12+34=" is answered by "64". Eighty steps take about a minute on one core.

A step asks the policy for 8 responses to each of 64 prompts, scores them 1 or 0, compares each response with the others
to its prompt, and makes the better ones likelier:

    A_i = (R_i - mean of the group) / (std of the group + 1e-6)                    arXiv:2402.03300
    L   = -mean over all tokens of  min(r A, clip(r, 0.8, 1.2) A),   r = pi / pi_old

`paddock train algorithm.adv_estimator=grpo` does the same by the same parts, over any number of devices, with
checkpoints, validation, KL terms and metrics.
"""

from __future__ import annotations

import random
import sys
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paddock.algorithms.advantages import grpo_advantage, on_tokens
from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.core.masked import Denominators, aggregate
from paddock.data.builtin import builtin_rows
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Settings
from paddock.engines.train.single import SingleBackend
from paddock.models.load import load_causal_lm, load_tokenizer

MODEL = "builtin:tiny"
PROMPTS, RESPONSES, LENGTH = 64, 8, 8
LEARNING_RATE, CLIP = 5e-4, 0.2
SEED = 1
LOG_PROBS = frozenset({"log_probs"})

tokenizer = load_tokenizer(MODEL)
END = tokenizer.eos_token_id


def text_of(row: dict) -> str:
    """Returns the question of a row: "12+34="."""
    prompt = row["prompt"]
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def draw(rollout: EmbeddedEngine, rows: list[dict], samples: int, step: int, temperature: float) -> list[Completion]:
    """Draws responses to each row. A token depends on (seed, step, response, position) alone: on no other row."""
    prompts = [
        Prompt(tokenizer(text_of(row))["input_ids"], [place * samples + sample for sample in range(samples)])
        for place, row in enumerate(rows)
    ]
    sampling = Sampling(LENGTH, frozenset({END}), seed=SEED, step=step, temperature=temperature)
    return rollout.generate(prompts, sampling)


def score(completion: Completion, row: dict) -> float:
    """Returns 1 for the right digits, else 0."""
    answer = tokenizer.decode(completion.tokens, skip_special_tokens=True)
    return float(answer.strip() == row["reward_model"]["ground_truth"])


def batch_of(rows: list[dict], completions: list[Completion]) -> Batch:
    """Lays a batch of B rows out: prompts ``[B, P]``, padded on the left; responses, mask and scores ``[B, R]``."""
    asked = [row for row in rows for _ in range(RESPONSES)]
    prompts = [torch.tensor(tokenizer(text_of(row))["input_ids"]) for row in asked]
    responses = [torch.tensor(completion.tokens) for completion in completions]
    lengths = torch.tensor([len(response) for response in responses])
    padded = pad_sequence(responses, batch_first=True, padding_value=END)
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    scores = torch.zeros(padded.shape)
    scores[torch.arange(len(asked)), lengths - 1] = torch.tensor(
        [score(*pair) for pair in zip(completions, asked, strict=True)]
    )
    return Batch(
        row=torch.arange(len(asked)),
        group=torch.arange(len(asked)) // RESPONSES,
        prompts=pad_sequence(prompts, batch_first=True, padding_value=END, padding_side="left"),
        prompt_mask=pad_sequence([torch.ones_like(one) for one in prompts], batch_first=True, padding_side="left"),
        responses=padded,
        mask=mask,
        lengths=lengths,
        scores=scores,
    )


def with_advantages(batch: Batch) -> Batch:
    """Compares each response with those of its group; every token of a response has the response's advantage."""
    returns = batch.need("scores").sum(-1)
    advantages, _ = on_tokens(batch, grpo_advantage(returns, batch.group))
    return batch.with_(advantages=advantages)


def loss(denominators: Denominators, micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns a micro-batch's share of the loss: the shares of all micro-batches add up to the mini-batch's loss."""
    advantages, mask = micro.need("advantages"), micro.need("mask")
    ratio = (outputs.log_probs - micro.need("old_log_probs")).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return aggregate(-surrogate, mask, "token-mean", denominators), {}


def learn(trainer: Engine, batch: Batch, epochs: int = 1) -> float:
    """Takes an optimizer step for each half of the batch; returns the last gradient's norm."""
    batch = batch.with_(old_log_probs=trainer.forward(batch, LOG_PROBS).log_probs)
    norm = 0.0
    for _ in range(epochs):
        for rows in torch.arange(len(batch)).chunk(2):
            mini = batch.rows(rows)
            denominators = Denominators.count(mini.need("mask"))
            norm = trainer.train_step(trainer.micro_batches(mini), partial(loss, denominators), LOG_PROBS)["grad_norm"]
    trainer.advance()  # the schedule of the learning rate counts steps
    return norm


def accuracy(rollout: EmbeddedEngine, rows: list[dict]) -> float:
    """Returns the share of rows whose greedy answer is right."""
    found = draw(rollout, rows, samples=1, step=0, temperature=0.0)
    return sum(score(*pair) for pair in zip(found, rows, strict=True)) / len(rows)


def main(steps: int = 80) -> float:
    """Trains, and returns the accuracy on sums that training never sees."""
    torch.manual_seed(SEED)
    model = load_causal_lm(MODEL, dtype=torch.float32)
    trainer = Engine(SingleBackend(model, Settings(optim=OptimConfig(lr=LEARNING_RATE))))
    rollout = EmbeddedEngine(trainer.rollout_model)  # the trainer's own weights: there is no copy to keep in step
    rows, held_out, order = (
        builtin_rows("builtin:addition/train"),
        builtin_rows("builtin:addition/test"),
        random.Random(SEED),
    )
    print(f"before: {accuracy(rollout, held_out):.1%} of {len(held_out)} held-out sums")
    for step in range(1, steps + 1):
        asked = order.sample(rows, PROMPTS)
        batch = batch_of(asked, draw(rollout, asked, RESPONSES, step, temperature=1.0))
        norm = learn(trainer, with_advantages(batch))
        if step % 10 == 0 or step == steps:
            print(f"step {step}: reward {batch.need('scores').sum(-1).mean():.3f}, gradient norm {norm:.2f}")
    found = accuracy(rollout, held_out)
    print(f"after: {found:.1%}")
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
