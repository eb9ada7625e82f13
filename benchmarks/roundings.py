"""Which roundings to bf16 set two passes of a model apart: its layers in float32, rounded at named places alone.

python benchmarks/roundings.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --data gsm8k/train.parquet

Two passes sum in other orders, as a rollout and a trainer do: here that is noise of a float32 sum behind each product.
Rounded numbers next to each other are then rounded apart, and a few layers later all of them are. Prints the mean
difference of the two passes' log-probs of sampled answers, and of one to the pass without any rounding: once with all
roundings, then without those that a line names.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import pyarrow.parquet as pq
import torch
import transformers
from torch import Tensor
from torch.nn.functional import silu

INNER = ("norm inside", "rotation inside", "activation")
"""Places inside of a kernel: to leave a rounding out there costs nothing."""
BRANCHES = ("attention projection", "MLP projection")
"""What a layer adds to the stream between layers, which is float32."""
PLACES = (*INNER, *BRANCHES, "norm", "queries, keys, values", "angles", "rotation", "probabilities",
          "attention", "gate and up", "gated")  # fmt: skip
LEFT_OUT: dict[str, Sequence[str]] = {
    "none": (),
    "those inside of kernels": INNER,
    "and of branches": (*INNER, *BRANCHES),
    "and of probabilities": (*INNER, *BRANCHES, "probabilities"),
    "and of gate and up": (*INNER, *BRANCHES, "probabilities", "gate and up"),
    "and of queries, keys, values": (*INNER, *BRANCHES, "probabilities", "gate and up", "queries, keys, values"),
    "all but norms": tuple(place for place in PLACES if place != "norm"),
    "all but queries, keys, values": tuple(place for place in PLACES if place != "queries, keys, values"),
    "all but gate and up": tuple(place for place in PLACES if place != "gate and up"),
    "all but gated": tuple(place for place in PLACES if place != "gated"),
}
NOISE = 2e-7  # of a float32 sum, against the root mean square of a row


class Pass:
    """Computes the log-probs of tokens by a decoder of Llama's kind in float32, rounding at `places`; `seed` is that
    of the noise, without which there is none."""

    def __init__(self, model: Any, places: Sequence[str], seed: int | None):
        self.model, self.places = model, frozenset(places)
        self.noise = None if seed is None else torch.Generator(model.device).manual_seed(seed)
        config = model.config
        self.heads, self.keys = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads

    @torch.no_grad()
    def log_probs(self, prompt: Tensor, answer: Tensor) -> Tensor:
        hidden = self.hidden(torch.cat([prompt, answer]))[len(prompt) - 1 : -1]
        return self.product(self.model.lm_head, hidden, "").log_softmax(-1).gather(1, answer[:, None])[:, 0]

    def hidden(self, tokens: Tensor) -> Tensor:
        backbone = self.model.model
        x = backbone.embed_tokens(tokens)
        found = backbone.rotary_emb(x[None], torch.arange(len(tokens), device=x.device)[None])
        turn = [self.rounded(part[0, :, None], "angles") for part in found]
        for layer in backbone.layers:
            x = x + self.attention(layer.self_attn, self.norm(layer.input_layernorm, x), turn)
            mlp, y = layer.mlp, self.norm(layer.post_attention_layernorm, x)
            gate, up = (self.product(linear, y, "gate and up") for linear in (mlp.gate_proj, mlp.up_proj))
            inner = self.rounded(self.rounded(silu(gate), "activation") * up, "gated")
            x = x + self.product(mlp.down_proj, inner, "MLP projection")
        return self.norm(backbone.norm, x)

    def attention(self, module: Any, y: Tensor, turn: list[Tensor]) -> Tensor:
        projections = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (self.product(p, y, "queries, keys, values").unflatten(1, (-1, self.dim)) for p in projections)
        if hasattr(module, "q_norm"):
            q, k = self.norm(module.q_norm, q), self.norm(module.k_norm, k)
        q, k, v = (x.transpose(0, 1) for x in (self.rotated(q, *turn), self.rotated(k, *turn), v))
        k, v = (x.repeat_interleave(self.heads // self.keys, 0) for x in (k, v))
        scores = (q @ k.transpose(1, 2) * self.dim**-0.5).masked_fill(~causal(len(y), y.device), -torch.inf)
        most = scores.amax(-1, keepdim=True)
        if self.noise is not None:  # which maximum is known when a score is read differs with the order of blocks
            most = most + torch.rand(most.shape, generator=self.noise, device=most.device)
        odds = (scores - most).exp()
        out = self.rounded(odds, "probabilities") @ v / odds.sum(-1, keepdim=True)
        return self.product(module.o_proj, self.rounded(out.transpose(0, 1).flatten(1), "attention"), BRANCHES[0])

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        swapped = torch.cat([-second, first], -1)
        return self.rounded(self.rounded(x * cos, INNER[1]) + self.rounded(swapped * sin, INNER[1]), "rotation")

    def norm(self, module: Any, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return self.rounded(self.rounded(y, INNER[0]) * module.weight, "norm")

    def product(self, linear: Callable[[Tensor], Tensor], x: Tensor, place: str) -> Tensor:
        y = linear(x)
        if self.noise is not None:
            scale = NOISE * y.square().mean(-1, keepdim=True).sqrt()
            y = y + scale * torch.randn(y.shape, generator=self.noise, device=y.device)
        return self.rounded(y, place)

    def rounded(self, x: Tensor, place: str) -> Tensor:
        return x.bfloat16().float() if place in self.places else x


def causal(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


@torch.no_grad()
def sampled(model: Any, tokenizer: Any, prompts: Sequence[Any], most: int) -> list[tuple[Tensor, Tensor]]:
    """Draws an answer to each prompt; returns the tokens of both."""
    drawn = []
    for prompt in prompts:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        given = tokenizer(text, return_tensors="pt").to(model.device)
        out = model.generate(**given, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=most)
        drawn.append((given["input_ids"][0], out[0, given["input_ids"].shape[1] :]))
    return drawn


def line(name: str, left_out: Sequence[str], model: Any, texts: list[tuple[Tensor, Tensor]], exact: Tensor) -> str:
    places = [place for place in PLACES if place not in left_out]
    one, two = (log_probs(Pass(model, places, seed), texts) for seed in (1, 2))
    return f"| {name} | {(one - two).abs().mean():.4f} | {(one - exact).abs().mean():.4f} |"


def log_probs(computed: Pass, texts: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.cat([computed.log_probs(*text) for text in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a name on the hub; a decoder of Llama's kind")
    parser.add_argument("--data", required=True, type=Path, help="parquet file with a column `prompt` of messages")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="most of an answer")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    model = model.float().eval().to(args.device)  # the weights that bf16 has
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    prompts = pq.read_table(args.data, columns=["prompt"]).slice(0, args.prompts)["prompt"].to_pylist()
    texts = sampled(model, tokenizer, prompts, args.tokens)
    exact = log_probs(Pass(model, (), None), texts)
    print(f"{len(exact)} tokens, -log p {-exact.mean():.2f} on average\n")
    print("| roundings left out | two passes apart | from float32 |\n|---|---:|---:|", flush=True)
    for name, left_out in LEFT_OUT.items():
        print(line(name, left_out, model, texts, exact), flush=True)


if __name__ == "__main__":
    main()
