"""Write the weights of a Qwen2 GGUF file as a folder that transformers loads, in bfloat16.

    python -m benchmarks.results.weights FILE.gguf OUT [--tokenizer FOLDER]

For a machine that has a GGUF file and no model hub; needs the packages gguf and accelerate. Prints the SHA-256 of the
file. `--tokenizer` copies the tokenizer from a folder that this script wrote before: building it takes half a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
ROWS = 4096  # of a tensor, converted at a time
ROUNDING = 0.1
"""Relative distance of head and embedding below which quantisation alone explains it: the published model ties them."""


def convert(file: Path, folder: Path, tokenizer: Path | None = None) -> dict[str, Any]:
    """Writes model, config and tokenizer to `folder`; returns what was found in the file, which weights.json holds."""
    reader = GGUFReader(file)
    folder.mkdir(parents=True)
    weights = dict(tensors(reader))
    tied = tie(weights)
    config = config_of(reader, tied)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    if tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tokenizer / name, folder)
    else:
        write_tokenizer(file, folder)
    written = AutoTokenizer.from_pretrained(folder)
    if written.eos_token != END_OF_TURN:
        raise ValueError(f"the tokenizer ends a turn with {written.eos_token!r}, not {END_OF_TURN!r}")
    ends = written.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], bos_token_id=ends[1]).save_pretrained(folder)
    parameters = sum(weight.numel() for weight in weights.values())
    found = {"file": file.name, "sha256": sha256(file), "parameters": parameters, "tied": tied}
    (folder / "weights.json").write_text(json.dumps(found) + "\n")
    return found


def tensors(reader: GGUFReader) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor by its name there; rows are converted side by side, since the embedding has a third of all."""

    def converted(rows: np.ndarray, tensor: ReaderTensor) -> torch.Tensor:
        return torch.from_numpy(np.array(dequantize(rows, tensor.tensor_type))).to(torch.bfloat16)

    with ThreadPoolExecutor() as pool:
        parts = [
            [pool.submit(converted, tensor.data[at : at + ROWS], tensor) for at in range(0, len(tensor.data), ROWS)]
            for tensor in reader.tensors
        ]
        for tensor, rows in zip(reader.tensors, parts, strict=True):
            yield name_of(tensor.name), torch.cat([part.result() for part in rows])


def name_of(name: str) -> str:
    """`blk.3.attn_q.bias` -> `model.layers.3.self_attn.q_proj.bias`"""
    *parts, kind = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{kind}"
    return f"{TOP[parts[0]]}.{kind}"


def tie(weights: dict[str, torch.Tensor]) -> bool:
    """Keeps the head alone, for both, if it is the embedding at another precision: the head has more bits."""
    head, embedding = weights.get(HEAD), weights[EMBEDDING]
    if head is None:
        return True
    distance = (head.float() - embedding.float()).norm() / head.float().norm()
    if distance > ROUNDING:
        return False
    weights[EMBEDDING] = weights.pop(HEAD)
    return True


def config_of(reader: GGUFReader, tied: bool) -> Qwen2Config:
    def field(name: str) -> Any:
        return reader.fields[f"qwen2.{name}"].contents()

    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=round(field("attention.layer_norm_rms_epsilon"), 12),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=tied,
        bos_token_id=reader.fields["tokenizer.ggml.bos_token_id"].contents(),
        eos_token_id=reader.fields["tokenizer.ggml.eos_token_id"].contents(),
        dtype=torch.bfloat16,
    )


def write_tokenizer(file: Path, folder: Path) -> None:
    """A turn ends with `<|im_end|>`, whatever the version of transformers makes of the file."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.eos_token, tokenizer.pad_token = END_OF_TURN, END_OF_TEXT
    tokenizer.save_pretrained(folder)


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    for name, value in convert(options.file, options.out, options.tokenizer).items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
