"""A GGUF file becomes the model that it was made of: every matrix in its place, the head tied where it was tied."""

from __future__ import annotations

import json

import pytest
import torch
from byte_tokenizer import tokenizer_of_bytes
from tiny_models import SHAPE, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf = pytest.importorskip("gguf")

from benchmarks.results.weights import END_OF_TEXT, END_OF_TURN, HEAD, LAYER, TOP, convert  # noqa: E402

TOKENS = 256 + 2
NAMES = {hugging: name for name, hugging in {**TOP, **LAYER}.items()}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, number, rest = module.split(".", 3)
        return f"blk.{number}.{NAMES[rest]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def write(model, file, head):
    writer = gguf.GGUFWriter(file, "qwen2")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list([str(number) for number in range(TOKENS)])
    writer.add_bos_token_id(TOKENS - 1)
    writer.add_eos_token_id(TOKENS - 2)
    weights = {name: weight for name, weight in model.state_dict().items() if name != HEAD}
    for name, weight in {**weights, HEAD: head}.items():
        writer.add_tensor(gguf_name(name), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_model_computes_what_the_original_does(tied, tmp_path):
    shape = {"vocab_size": TOKENS, "head_dim": SHAPE["hidden_size"] // SHAPE["num_attention_heads"]}
    model = tiny_model("qwen2", **shape, tie_word_embeddings=tied)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16).float()  # what the conversion keeps
    embedding = model.get_input_embeddings().weight.detach().clone()
    head = model.get_output_embeddings().weight.detach().clone()
    if tied:  # the file's embedding has fewer bits than its head, which is the one to keep
        model.get_input_embeddings().weight.data += 0.03 * embedding * torch.sign(torch.randn_like(embedding))
    write(model, tmp_path / "tiny.gguf", head)
    model.get_input_embeddings().weight.data = embedding

    tokenizer = tokenizer_of_bytes(after=(END_OF_TURN, END_OF_TEXT), eos_token=END_OF_TURN, template="{{ messages }}")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    found = convert(tmp_path / "tiny.gguf", tmp_path / "model", tmp_path / "tokenizer")

    assert found["tied"] is tied
    assert json.loads((tmp_path / "model/weights.json").read_text()) == found
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert again.config.tie_word_embeddings is tied
    tokens = torch.arange(20)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert again.generation_config.eos_token_id == [TOKENS - 2, TOKENS - 1]
    assert AutoTokenizer.from_pretrained(tmp_path / "model").eos_token == END_OF_TURN
