"""Reward models: packed scores equal transformers' own, heads of every kind are read, and what is saved loads again."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import EOS, FAMILIES, PAD, SHAPE, byte_tokenizer, save_tiny
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.models.load import load_backbone
from paddock.models.reward_head import load_reward_model, save_classifier, scored_batch, sequence_scores
from paddock.models.value_head import ValueModel

AUTO = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
VALUES = frozenset({"values"})


def save_classifier_of(kind, path, family="llama", labels=1, **overrides):
    """A tiny classifier of transformers' own, with random weights and a tokenizer beside it."""
    config_type, differences = FAMILIES[family]
    config = config_type(**{**SHAPE, **differences, "num_labels": labels, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AUTO[kind].from_config(config, dtype=torch.float32).eval()
        if model.score.bias is not None:
            torch.nn.init.normal_(model.score.bias)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    model.set_attn_implementation("eager")  # transformers' SDPA drops the cap on scores that Gemma 2 has
    return model


def sequences(count=7, seed=0):
    """Prompts and answers of different lengths; some answers are empty."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(4, 260, (length,), generator=generator).tolist()

    return [draw(1, 9) for _ in range(count)], [draw(0, 12) for _ in range(count)]


def padded(prompts, answers):
    """Padded on the right, as transformers' own examples do."""
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [PAD] * (width - len(row)) for row in rows])
    return tokens, torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_sequences_equal_those_of_transformers(family, packed, tmp_path):
    own = save_classifier_of("sequence", tmp_path, family)
    engine = Engine(SingleBackend(load_reward_model(str(tmp_path)), Settings(forward_budget=Budget(40), packed=packed)))
    prompts, answers = sequences()
    batch = scored_batch(prompts, answers, every_token=False)
    found = sequence_scores(batch, engine.forward(batch, VALUES).values)
    tokens, mask = padded(prompts, answers)
    with torch.no_grad():
        expected = own(input_ids=tokens, attention_mask=mask).logits.squeeze(-1)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scores_of_tokens_equal_those_of_transformers(family, tmp_path):
    own = save_classifier_of("token", tmp_path, family)
    model = load_reward_model(str(tmp_path))
    assert model.every_token
    prompts, answers = sequences()
    batch = scored_batch(prompts, answers, every_token=True)
    values = Engine(SingleBackend(model, Settings())).forward(batch, VALUES).values
    tokens, mask = padded(prompts, answers)
    with torch.no_grad():
        expected = own(input_ids=tokens, attention_mask=mask).logits.squeeze(-1)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        behind = values[row, : len(answer) + 1]  # the last prompt token, then those of the answer
        torch.testing.assert_close(
            behind, expected[row, len(prompt) - 1 : len(prompt) + len(answer)], atol=2e-5, rtol=1e-5
        )
    last = expected[torch.arange(len(prompts)), mask.sum(-1) - 1]
    torch.testing.assert_close(sequence_scores(batch, values), last, atol=2e-5, rtol=1e-5)


def test_the_critics_that_training_saves_are_reward_models_of_tokens(tmp_path):
    critic = ValueModel(load_backbone(str(save_tiny(tmp_path / "lm"))))
    torch.nn.init.normal_(critic.value_head.weight)
    torch.nn.init.ones_(critic.value_head.bias)
    critic.save(tmp_path / "critic")
    model = load_reward_model(str(tmp_path / "critic"))
    assert model.every_token and model.unread is None
    hidden = torch.randn(3, 48)
    torch.testing.assert_close(model.values(hidden), critic.values(hidden))


def test_a_language_model_gives_no_scores_unless_it_shall_learn_to(tmp_path):
    path = str(save_tiny(tmp_path))
    with pytest.raises(UserError, match=r"reward_model.model.path=.*Qwen2ForCausalLM(.|\n)*paddock rm train"):
        load_reward_model(path)
    model = load_reward_model(path, fresh_head=True)
    assert not model.every_token and (model.values(torch.randn(4, 48)) == 0).all()


def test_a_model_with_several_labels_is_refused(tmp_path):
    save_classifier_of("sequence", tmp_path, labels=2)
    with pytest.raises(UserError, match=r"reward_model.model.path"):
        load_reward_model(str(tmp_path))


def test_one_label_is_meant_although_config_json_says_nothing_of_labels(tmp_path):
    """Its default is two; published reward models leave it out and say num_labels=1 when they are loaded."""
    save_classifier_of("sequence", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("id2label", "label2id", "num_labels"):
        config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_reward_model(str(tmp_path)).value_head.weight.shape == (1, 48)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_a_saved_classifier_is_the_same_to_transformers_and_to_us(family, tmp_path):
    model = load_reward_model(str(save_tiny(tmp_path / "lm", family)), fresh_head=True).for_pairs(PAD)
    torch.nn.init.normal_(model.value_head.weight)
    save_classifier(model, tmp_path / "rm", dict(model.state_dict()))
    own, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "rm", output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and own.num_labels == 1
    prompts, answers = sequences()
    tokens, mask = padded(prompts, answers)
    with torch.no_grad():
        expected = own(input_ids=tokens, attention_mask=mask).logits.squeeze(-1)
    batch = scored_batch(prompts, answers, every_token=False)
    for again in (model, load_reward_model(str(tmp_path / "rm"))):
        found = sequence_scores(batch, Engine(SingleBackend(again, Settings())).forward(batch, VALUES).values)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_what_training_saves_on_the_way_is_read_as_a_model_of_sequences(tmp_path):
    """Its head stands beside the backbone as a critic's does."""
    model = load_reward_model(str(save_tiny(tmp_path / "lm")), fresh_head=True).for_pairs(EOS)
    torch.nn.init.normal_(model.value_head.weight)
    Engine(SingleBackend(model, Settings())).save(tmp_path / "checkpoint")
    again = load_reward_model(str(tmp_path / "checkpoint"))
    assert not again.every_token and again.unread == EOS
    hidden = torch.randn(3, 48)
    torch.testing.assert_close(again.values(hidden), model.values(hidden))


def test_a_token_classifier_trained_on_keeps_its_weight_and_loses_its_bias(tmp_path):
    own = save_classifier_of("token", tmp_path)
    model = load_reward_model(str(tmp_path), fresh_head=True)
    assert torch.equal(model.value_head.bias, own.score.bias)
    model = model.for_pairs(PAD)
    assert torch.equal(model.value_head.weight, own.score.weight) and model.value_head.bias == 0
    assert not model.every_token and not model.value_head.bias.requires_grad
