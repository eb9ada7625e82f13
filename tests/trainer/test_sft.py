"""Supervised training: which tokens are learnt, what the loss is, and that nothing but the data decides the result."""

from __future__ import annotations

import json
import shutil
import signal
from functools import partial

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from tiny_models import EOS, byte_tokenizer, save_tiny, tiny_model

from paddock.commands.keys_of import SFT
from paddock.config.engine import OptimConfig
from paddock.config.schema import DataConfig
from paddock.core.masked import Denominators
from paddock.data.unscored import AnswerDataset
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.models.attention import NAME as ATTENTION
from paddock.trainer.supervised import FINE_TUNING, SupervisedTrainer, answer_batch
from paddock.workers.supervised import likelihood

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 9) for b in (2, 30)]


def write_rows(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def dataset(tmp_path, rows, **settings):
    data = DataConfig(
        dataloader_num_workers=0, seed=0, **{"max_prompt_length": 64, "max_response_length": 16, **settings}
    )
    return AnswerDataset(str(write_rows(tmp_path / "rows.jsonl", rows)), byte_tokenizer(), data, key="data.train_files")


def texts(rows):
    tokenizer = byte_tokenizer()
    return [(tokenizer.decode(row.tokens), tokenizer.decode(row.ground_truth)) for row in rows]


@pytest.fixture
def config(tmp_path):
    """Loads a config for a tiny model and ROWS, in fp32."""
    model, data = save_tiny(tmp_path / "model"), write_rows(tmp_path / "train.jsonl", ROWS)

    def load(folder, *overrides):
        settings = ["trainer.logger=file", "data.train_batch_size=4", "data.max_prompt_length=64", "optim.lr=1e-2",
                    "data.max_response_length=16", "actor_rollout_ref.actor.fsdp_config.dtype=float32",
                    f"model={model}", f"data={data}", f"trainer.default_local_dir={tmp_path / folder}"]  # fmt: skip
        return SFT.load([*settings, *overrides]).config

    return load


CHAT = [{"role": "user", "content": "2+2?"}]


@pytest.mark.parametrize(
    ("row", "learnt"),
    [
        ({"prompt": "2+2=", "answer": "4", "response": "no", "extra_info": {"answer": "no"}}, ("2+2=", "4<eos>")),
        ({"prompt": "2+2=", "answer": None, "response": "4"}, ("2+2=", "4<eos>")),
        ({"prompt": CHAT, "extra_info": {"answer": "four"}}, ("user: 2+2?\nassistant:", "four<eos>")),
        (
            {"prompt": [*CHAT, {"role": "assistant", "content": "4"}], "extra_info": {"answer": "no"}},
            ("user: 2+2?\nassistant:", "4<eos>"),
        ),
        ({"messages": [*CHAT, {"role": "assistant", "content": "4"}]}, ("user: 2+2?\nassistant:", "4<eos>")),
    ],
    ids=["answer", "response", "extra_info", "conversation", "messages"],
)
def test_the_answer_is_found_in_a_fixed_order_and_ends_with_eos(tmp_path, row, learnt):
    assert texts(dataset(tmp_path, [row]).rows([0])) == [learnt]


def test_prepared_gsm8k_rows_are_learnt_from_their_worked_solution(tmp_path):
    info = {"split": "train", "index": 0, "answer": "2+2=4 #### 4", "question": "2+2?"}
    row = {"data_source": "openai/gsm8k", "prompt": CHAT, "reward_model": {"ground_truth": "4"}, "extra_info": info}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    config = DataConfig(train_files=str(tmp_path / "train.parquet"), seed=0)
    rows = AnswerDataset.train(config, byte_tokenizer()).rows([0])
    assert texts(rows) == [("user: 2+2?\nassistant:", "2+2=4 #### 4<eos>")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "2+2="}, r"rows.jsonl row 1, column 'answer': there is no answer(.|\n)*fix: add a column 'answer'"),
        ({"prompt": "2+2=", "answer": 4}, "row 1, column 'answer': is 4, not the text"),
        ({"prompt": "2+2=", "answer": ""}, "row 1, column 'answer': is '', not the text"),
        ({"prompt": CHAT, "reward_model": {"ground_truth": "4"}}, "row 1, column 'answer'"),
    ],
)
def test_a_row_without_an_answer_is_named_when_the_file_is_opened(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        dataset(tmp_path, [ROWS[0], row])


def test_a_file_without_prompts_lists_the_columns_it_has(tmp_path):
    with pytest.raises(UserError, match=r"no column 'prompt'; it has 'q', 'answer'"):
        dataset(tmp_path, [{"q": "2+2=", "answer": "4"}])


def test_rows_whose_prompt_or_answer_is_too_long_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = [ROWS[0], {"prompt": "x" * 65, "answer": "1"}, {"prompt": "y", "answer": "1" * 16}, ROWS[1]]
    for _ in range(2):  # measured, then from the cache
        found = dataset(tmp_path, rows)
        assert [row.index for row in found.rows(range(len(found)))] == [0, 3]
        assert found.left_out == 2


def test_an_answer_that_is_cut_does_not_end(tmp_path):
    rows = [{"prompt": "y", "answer": "1" * 20}]
    cut = dataset(tmp_path, rows, filter_overlong_prompts=False, truncation="left").rows([0])[0]
    assert len(cut.ground_truth) == 16 and EOS not in cut.ground_truth
    with pytest.raises(UserError, match=r"data.max_response_length=16: .*row 0 has an answer of 21 tokens"):
        dataset(tmp_path, rows, filter_overlong_prompts=False).rows([0])


def loss_of(batch):
    return partial(likelihood, denominators=Denominators.count(batch.need("mask")))


def engine(rows: int | None) -> Engine:
    """One step of plain gradient descent with lr 1 shows the gradient."""
    optim = OptimConfig(optimizer="SGD", lr=1.0, weight_decay=0.0, clip_grad=1e9)
    model = tiny_model("qwen3")
    model.set_attn_implementation(ATTENTION)
    return Engine(SingleBackend(model, Settings(Budget(4096, rows), optim=optim)))


def test_the_loss_is_the_mean_cross_entropy_of_the_answer_tokens(tmp_path):
    rows = dataset(tmp_path, ROWS).rows([1, 2, 7])
    batch = answer_batch(rows, 0)
    found = (one := engine(None)).train_step(one.micro_batches(batch), loss_of(batch), frozenset({"log_probs"}))
    total, count, model = 0.0, 0, tiny_model("qwen3")
    for row in rows:
        tokens = torch.tensor([row.tokens + row.ground_truth])
        labels = torch.tensor([[-100] * len(row.tokens) + row.ground_truth])
        total += float(model(input_ids=tokens, labels=labels).loss.detach()) * len(row.ground_truth)
        count += len(row.ground_truth)
    assert found["train/loss"] == pytest.approx(total / count, rel=1e-5)


def test_how_a_batch_is_split_does_not_change_the_gradient(tmp_path):
    batch = answer_batch(dataset(tmp_path, ROWS).rows(range(8)), 0)
    weights = []
    for rows in (None, 1, 3):
        one = engine(rows)
        assert len(one.micro_batches(batch)) == {None: 1, 1: 8, 3: 3}[rows]
        one.train_step(one.micro_batches(batch), loss_of(batch), frozenset({"log_probs"}))
        weights.append(dict(one.weights()))
    start = dict(engine(None).weights())
    for name, whole in weights[0].items():
        moved = (whole - start[name]).abs().max()
        for other in weights[1:]:
            torch.testing.assert_close(other[name], whole, rtol=0, atol=float(1e-5 * moved + 1e-7))


def final_weights(folder):
    return load_file(folder / "huggingface" / "model.safetensors")


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, config):
    settings = ("trainer.total_training_steps=6", "trainer.save_freq=2", "optim.lr_scheduler_type=cosine")
    FINE_TUNING.train(config("whole", *settings))
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for gone in ("global_step_6", "global_step_4", "huggingface"):
        shutil.rmtree(tmp_path / "again" / gone)
    assert FINE_TUNING.train(config("again", *settings)).finished
    whole, again = final_weights(tmp_path / "whole"), final_weights(tmp_path / "again")
    assert all(torch.equal(whole[name], again[name]) for name in whole) and whole.keys() == again.keys()
    losses = [[line["train/loss"] for line in metrics_of(tmp_path / name)] for name in ("whole", "again")]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert losses[0][-1] < losses[0][0]


def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_command_goes_on(tmp_path, config, monkeypatch):
    settings = ("trainer.total_training_steps=4",)
    FINE_TUNING.train(config("whole", *settings))
    step = SupervisedTrainer.step

    def interrupted(self):
        if self.step_no == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(SupervisedTrainer, "step", interrupted)
    assert not FINE_TUNING.train(config("cut", *settings)).finished
    assert (tmp_path / "cut" / "global_step_2" / "actor" / "tokenizer.json").is_file()
    monkeypatch.setattr(SupervisedTrainer, "step", step)
    FINE_TUNING.train(config("cut", *settings))
    whole, cut = final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_an_error_in_the_data_leaves_the_steps_before_it(tmp_path, config, monkeypatch, caplog):
    settings = ("trainer.total_training_steps=4", "trainer.save_freq=-1")
    FINE_TUNING.train(config("whole", *settings))
    with monkeypatch.context() as patch:
        step = SupervisedTrainer.batch

        def torn(self, rows):
            if self.step_no == 3:
                raise RuntimeError("a torn row")
            return step(self, rows)

        patch.setattr(SupervisedTrainer, "batch", torn)
        with pytest.raises(RuntimeError, match="a torn row"):
            FINE_TUNING.train(config("cut", *settings))
    assert "goes on after step 2" in caplog.text
    assert FINE_TUNING.train(config("cut", *settings)).trained == 2
    whole, cut = final_weights(tmp_path / "whole"), final_weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert [line["step"] for line in metrics_of(tmp_path / "cut")] == [1, 2, 3, 4]


def test_validation_loss_is_over_tokens_whatever_the_batch(tmp_path, config):
    held_out = write_rows(
        tmp_path / "val.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "9+9=", "answer": "eighteen"}]
    )
    found = []
    for size in (1, 2):
        FINE_TUNING.train(config(f"run{size}", f"data.val_files={held_out}", f"data.val_batch_size={size}",
                         "trainer.total_training_steps=2", "trainer.test_freq=2"))  # fmt: skip
        found.append([line["val/loss"] for line in metrics_of(tmp_path / f"run{size}") if "val/loss" in line])
    assert len(found[0]) == 2  # before the first step, and after the last
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_updates_that_are_not_finite_end_the_run_and_name_their_rows(tmp_path, config):
    model = tiny_model()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"3 updates in a row .*train.jsonl row \d+"):
        FINE_TUNING.train(config("run", "trainer.total_training_steps=5"))


def test_the_temperature_of_rollouts_does_not_reach_the_loss(tmp_path, config):
    found = []
    for temperature in (1.0, 0.3):
        overrides = ("trainer.total_training_steps=1", f"actor_rollout_ref.rollout.temperature={temperature}")
        FINE_TUNING.train(config(f"run{temperature}", *overrides))
        found.append(metrics_of(tmp_path / f"run{temperature}")[0]["train/loss"])
    assert found[0] == found[1]
