"""A checkpoint's actor folder is a model of transformers as it stands, whether or not save_contents names hf_model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from paddock.loading.load import load
from paddock.trainer.reinforcement import train

ACTOR = "actor_rollout_ref.actor"
SMALL = [
    *("algorithm.adv_estimator=grpo", "trainer.total_training_steps=1", "trainer.save_freq=1", "trainer.test_freq=-1"),
    *("trainer.val_before_train=False", "trainer.logger=[file]", "data.train_batch_size=4", f"{ACTOR}.optim.lr=1e-2"),
    *(f"{ACTOR}.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4"),
]


@pytest.fixture(scope="module", params=["[model,optimizer,extra]", "[model,optimizer,extra,hf_model]"])
def actor(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    keys = [f"{ACTOR}.checkpoint.save_contents={request.param}", f"trainer.default_local_dir={folder}"]
    assert train(load([*SMALL, *keys]).config).finished
    return folder / "global_step_1" / "actor"


def test_the_actor_folder_loads_with_auto_model_for_causal_lm(actor):
    model, report = AutoModelForCausalLM.from_pretrained(actor, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    stored = load_file(actor / "model.safetensors")
    assert stored and all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stored.items())


def test_the_actor_folder_loads_with_auto_tokenizer_and_answers(actor):
    tokenizer, model = AutoTokenizer.from_pretrained(actor), AutoModelForCausalLM.from_pretrained(actor)
    shipped = AutoTokenizer.from_pretrained(ROOT / "paddock/assets/tiny")
    messages = [{"role": "user", "content": "12+34="}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert prompt["input_ids"][0].tolist() == shipped.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).strip().isdigit()
