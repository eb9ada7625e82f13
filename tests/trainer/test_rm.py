"""Reward models from preference pairs: what the loss is, and that nothing but the data decides the result."""

from __future__ import annotations

import json
import math
import shutil
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import EOS, PAD, byte_tokenizer, save_tiny, tiny_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from paddock.commands.keys_of import RM
from paddock.config.engine import OptimConfig
from paddock.config.schema import DataConfig
from paddock.core.batch import Batch
from paddock.data.pairs import PairDataset
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.models.packing import sequence_lengths
from paddock.models.reward_head import load_reward_model, save_classifier, scored_batch, sequence_scores
from paddock.trainer.supervised import REWARD_MODELLING, RewardTrainer, pair_batch
from paddock.workers.supervised import preference, whole_pairs

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "no " * (a % 3) + str(a)}
    for a in range(1, 9)
    for b in (2, 30)
]

VALUES = frozenset({"values"})


def write_pairs(path, rows=PAIRS):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def rows_of(tmp_path, rows=PAIRS):
    config = DataConfig(dataloader_num_workers=0, seed=0, max_prompt_length=64, max_response_length=16)
    found = PairDataset(str(write_pairs(tmp_path / "pairs.jsonl", rows)), byte_tokenizer(), config, key="data")
    return found.rows(range(len(found)))


def given(scores: list[float]) -> tuple[Batch, Outputs]:
    """Rows whose model gives these scores, preferred answers first."""
    batch = scored_batch([[5]] * len(scores), [[6]] * len(scores), every_token=False)
    values = torch.zeros(len(scores), 2)
    values[:, 1] = torch.tensor(scores)
    return batch, Outputs(values=values)


def test_the_loss_of_known_margins():
    """Margins 0, ln 3 and -2: log 2, log(4/3) and log(1 + e^2)."""
    share, metrics = preference(*given([0.5, 0.5, math.log(3) - 1, -1.0, -4.0, -2.0]), 3)
    expected = (math.log(2) + math.log(4 / 3) + math.log(1 + math.e**2)) / 3
    assert share.item() == pytest.approx(expected, rel=1e-6)
    assert metrics["train/accuracy"].item() == pytest.approx(1 / 3)
    assert metrics["train/margin"].item() == pytest.approx((math.log(3) - 2) / 3, rel=1e-6)


def test_large_margins_neither_overflow_nor_vanish():
    share, _ = preference(*given([500.0, -500.0, -500.0, 500.0]), 2)
    assert share.item() == pytest.approx(500.0)


@pytest.fixture
def model_path(tmp_path):
    """A reward model whose head is not zero: gradients reach the backbone."""
    model = load_reward_model(str(save_tiny(tmp_path / "lm")), fresh_head=True).for_pairs(PAD)
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(1))
    save_classifier(model, tmp_path / "model", dict(model.state_dict()))
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def engine(path: str, budget: Budget) -> Engine:
    """One step of plain gradient descent with lr 1 shows the gradient."""
    optim = OptimConfig(optimizer="SGD", lr=1.0, weight_decay=0.0, clip_grad=1e9)
    return Engine(SingleBackend(load_reward_model(path).for_pairs(PAD), Settings(budget, optim=optim)))


def gradient(path: str, batch: Batch, budget: Budget) -> dict[str, torch.Tensor]:
    one = engine(path, budget)
    before = {name: tensor.clone() for name, tensor in one.weights()}
    micro_batches = [batch.rows(rows) for rows in whole_pairs(batch, budget)]
    one.train_step(micro_batches, partial(preference, pairs=len(batch) // 2), VALUES)
    return {name: before[name] - tensor for name, tensor in one.weights()}


def test_the_gradient_is_that_of_a_slow_loop_in_double_precision(tmp_path, model_path):
    rows = rows_of(tmp_path)[:5]
    slow = AutoModelForSequenceClassification.from_pretrained(model_path, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        scores = [
            slow(input_ids=torch.tensor([row.tokens + answer])).logits[0, 0]
            for answer in (row.ground_truth.chosen, row.ground_truth.rejected)
        ]
        total = total + torch.log1p(torch.exp(-(scores[0] - scores[1])))
    (total / len(rows)).backward()
    found = gradient(model_path, pair_batch(rows, PAD), Budget(4096))
    expected = {"backbone." + name.removeprefix("model."): p.grad for name, p in slow.named_parameters()}
    expected["value_head.weight"] = expected.pop("backbone.score.weight")
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name].double(), tensor, atol=2e-5 * float(tensor.abs().max()) + 1e-7, rtol=1e-3
        )
    assert found["value_head.bias"] == 0


def test_how_a_batch_is_split_does_not_change_the_gradient(tmp_path, model_path):
    batch = pair_batch(rows_of(tmp_path), PAD)
    whole = gradient(model_path, batch, Budget(4096))
    for budget, parts in ((Budget(60), None), (Budget(4096, rows=2), 16), (Budget(4096, rows=1), 16)):
        assert parts is None or len(whole_pairs(batch, budget)) == parts
        for name, tensor in gradient(model_path, batch, budget).items():
            torch.testing.assert_close(tensor, whole[name], rtol=0, atol=float(2e-5 * whole[name].abs().max() + 1e-7))


def test_micro_batches_hold_whole_pairs_within_the_budget(tmp_path):
    batch = pair_batch(rows_of(tmp_path), PAD)
    tokens = torch.tensor(sequence_lengths(batch)) - 1
    parts = whole_pairs(batch, Budget(60))
    assert sorted(torch.cat(parts).tolist()) == list(range(len(batch))) and len(parts) > 2
    for part in parts:
        assert tokens[part].sum() <= 60 and part.tolist()[1::2] == [row + 1 for row in part.tolist()[::2]]
    with pytest.raises(UserError, match=r"ppo_max_token_len_per_gpu=9: the answers of one pair have \d\d tokens"):
        whole_pairs(batch, Budget(9))


def test_what_transformers_takes_for_padding_is_left_out_in_training_as_in_use(tmp_path):
    """A tokenizer that pads with its end of text: transformers reads the score before it, so must training."""
    model = tiny_model()
    model.config.pad_token_id = EOS
    model.save_pretrained(tmp_path / "lm")
    rows = rows_of(tmp_path)[:3]
    reward = load_reward_model(str(tmp_path / "lm"), fresh_head=True).for_pairs(EOS)
    torch.nn.init.normal_(reward.value_head.weight)
    save_classifier(reward, tmp_path / "rm", dict(reward.state_dict()))
    own = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    batch = pair_batch(rows, reward.unread)
    found = sequence_scores(batch, Engine(SingleBackend(reward, Settings())).forward(batch, VALUES).values)
    with torch.no_grad():
        expected = [
            own(input_ids=torch.tensor([row.tokens + answer])).logits[0, 0]
            for row in rows
            for answer in (row.ground_truth.chosen, row.ground_truth.rejected)
        ]
    torch.testing.assert_close(found, torch.stack(expected), atol=2e-5, rtol=1e-5)


@pytest.fixture
def config(tmp_path):
    """Loads a config for a tiny model and PAIRS, in fp32."""
    model, data = save_tiny(tmp_path / "tiny"), write_pairs(tmp_path / "train.jsonl")

    def load(folder, *overrides):
        settings = ["trainer.logger=file", "data.train_batch_size=4", "data.max_prompt_length=64", "optim.lr=1e-2",
                    "data.max_response_length=16", "actor_rollout_ref.actor.fsdp_config.dtype=float32",
                    f"model={model}", f"data={data}", f"trainer.default_local_dir={tmp_path / folder}"]  # fmt: skip
        return RM.load([*settings, *overrides]).config

    return load


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def final_weights(folder):
    return load_file(folder / "huggingface" / "model.safetensors")


def test_a_run_learns_its_pairs_from_indifference_and_leaves_a_classifier(tmp_path, config):
    outcome = REWARD_MODELLING.train(
        config(
            "run",
            "trainer.total_training_steps=24",
            f"data.val_files={tmp_path / 'train.jsonl'}",
            "trainer.test_freq=24",
        )
    )
    assert outcome.finished and outcome.trained == 24
    folder = tmp_path / "run" / "huggingface"
    lines = metrics_of(tmp_path / "run")
    assert lines[0]["val/loss"] == pytest.approx(math.log(2)) and lines[0]["val/margin"] == 0
    assert lines[1]["train/loss"] == pytest.approx(math.log(2))
    assert lines[-1]["val/accuracy"] >= 0.9 and lines[-1]["val/loss"] < 0.3
    own = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right, wrong = (
        own(**tokenizer(f"8+30={answer}<eos>", return_tensors="pt", return_token_type_ids=False)).logits.item()
        for answer in ("38", "no no 8")
    )
    assert right > wrong
    loaded = load_reward_model(str(folder))
    assert not loaded.every_token and loaded.unread == PAD


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, config):
    settings = ("trainer.total_training_steps=6", "trainer.save_freq=2", "optim.lr_scheduler_type=cosine")
    REWARD_MODELLING.train(config("whole", *settings))
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for gone in ("global_step_6", "global_step_4", "huggingface"):
        shutil.rmtree(tmp_path / "again" / gone)
    assert REWARD_MODELLING.train(config("again", *settings)).finished
    whole, again = final_weights(tmp_path / "whole"), final_weights(tmp_path / "again")
    assert all(torch.equal(whole[name], again[name]) for name in whole) and whole.keys() == again.keys()
    losses = [[line["train/loss"] for line in metrics_of(tmp_path / name)] for name in ("whole", "again")]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_command_goes_on(tmp_path, config, monkeypatch):
    settings = ("trainer.total_training_steps=4",)
    REWARD_MODELLING.train(config("whole", *settings))
    step = RewardTrainer.step

    def interrupted(self):
        if self.step_no == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(RewardTrainer, "step", interrupted)
    assert not REWARD_MODELLING.train(config("cut", *settings)).finished
    assert (tmp_path / "cut" / "global_step_2" / "reward_model" / "tokenizer.json").is_file()
    monkeypatch.setattr(RewardTrainer, "step", step)
    REWARD_MODELLING.train(config("cut", *settings))
    whole, cut = final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_validation_is_over_all_pairs_whatever_the_batch(tmp_path, config):
    held_out = write_pairs(tmp_path / "val.jsonl", PAIRS[:5])
    found = []
    for size in (1, 2, 5):
        REWARD_MODELLING.train(config(f"run{size}", f"data.val_files={held_out}", f"data.val_batch_size={size}",
                                  "trainer.total_training_steps=2", "trainer.test_freq=2"))  # fmt: skip
        lines = [line for line in metrics_of(tmp_path / f"run{size}") if "val/loss" in line]
        found.append([line[f"val/{name}"] for line in lines for name in ("loss", "accuracy", "margin")])
    assert len(found[0]) == 6  # before the first step, and after the last
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_updates_that_are_not_finite_end_the_run_and_name_their_rows(tmp_path, config):
    model = tiny_model()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    model.save_pretrained(tmp_path / "tiny")
    with pytest.raises(UserError, match=r"3 updates in a row .*train.jsonl row \d+"):
        REWARD_MODELLING.train(config("run", "trainer.total_training_steps=5"))
