"""verl's commands beside main_ppo: their keys lead to `paddock sft`, `paddock generate` and scores of a file."""

from __future__ import annotations

import ast
import json
import os
import sys
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from tiny_models import save_tiny

from paddock.commands.guard import PLAN_ONLY
from paddock.commands.keys_of import SFT
from paddock.errors import UserError
from paddock.verl.commands import ENGINE_SFT, FSDP_SFT, GENERATION, GENERATION_SERVER, load_supervised
from paddock.verl.main import generate, leave_torchrun, score, supervise

A, M = "actor_rollout_ref.actor", "actor_rollout_ref.model"
FOUR = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "RANK": "0"}
GSM8K = ["data.train_files=t.parquet", "data.prompt_key=extra_info", "data.response_key=extra_info",
         "+data.prompt_dict_keys=['question']", "data.response_dict_keys=['answer']"]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny model, rows with nested questions, and rows with conversations."""
    folder = tmp_path_factory.mktemp("verl")
    pairs = [(f"{a}+{b}=?", str(a + b)) for a in range(1, 5) for b in (1, 20)]
    nested = [{"extra_info": {"question": q, "answer": a}, "reward_model": {"ground_truth": a}} for q, a in pairs]
    said = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}], "answer": "another"}
        for q, a in pairs
    ]
    for name, rows in (("nested", nested), ("said", said)):
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder, save_tiny(folder / "model")


def small(folder, model, out):
    return [f"model.path={model}", "data.train_batch_size=4", "trainer.total_training_steps=2", "trainer.logger=file",
            f"trainer.default_local_dir={folder / out}", "trainer.device=cpu", "trainer.n_gpus_per_node=1",
            f"{A}.fsdp_config.dtype=float32", "optim.lr=1e-3", "data.max_length=64"]  # fmt: skip


def losses(folder):
    return [json.loads(line)["train/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_keys_of_the_old_sft_trainer_become_those_of_paddock_sft():
    loaded = load_supervised(
        FSDP_SFT,
        [*GSM8K, "model.partial_pretrain=Qwen/Qwen2.5-0.5B", "model.strategy=fsdp2", "data.micro_batch_size=16",
         "ulysses_sequence_parallel_size=2", "optim.lr_scheduler=cosine", "trainer.max_ckpt_to_keep=3",
         "model.fsdp_config.cpu_offload=True", "trainer.n_gpus_per_node=2"],
        FOUR,
    )  # fmt: skip
    config = loaded.config
    actor, data = config.actor_rollout_ref.actor, config.data
    assert (data.prompt_key, data.answer_key) == ("extra_info.question", "extra_info.answer")
    assert data.prompt_as_message and not data.filter_overlong_prompts and data.max_length == 1024
    assert (actor.strategy, actor.ulysses_sequence_parallel_size, actor.fsdp_config.param_offload) == ("fsdp2", 2, True)
    assert (actor.optim.betas, actor.optim.lr_scheduler_type, actor.optim.lr) == ([0.9, 0.95], "cosine", 1e-5)
    assert actor.ppo_micro_batch_size_per_gpu == 2  # over eight devices
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes) == (4, 2), "torchrun's devices win"
    assert config.trainer.max_actor_ckpt_to_keep == 3 and config.trainer.total_epochs == 4
    assert loaded.origins[f"{A}.optim.betas"] == "verl's fsdp_sft_trainer"


def test_keys_of_the_later_sft_trainer_become_those_of_paddock_sft():
    given = ["data.train_files=t.parquet", "model=hf_model", "model.path=Qwen/Qwen3-8B", "engine=fsdp", "optim=fsdp",
             "engine.strategy=fsdp2", "engine.ulysses_sequence_parallel_size=2", "engine.model_dtype=bf16",
             "data.max_token_len_per_gpu=8192", "data.use_dynamic_bsz=True", "data.pad_mode=no_padding",
             "checkpoint.save_contents=[model,optimizer,extra]", "optim.min_lr_ratio=0.1"]  # fmt: skip
    loaded = load_supervised(ENGINE_SFT, given, FOUR)
    actor = loaded.config.actor_rollout_ref.actor
    assert loaded.config.data.prompt_key == "messages" and loaded.config.actor_rollout_ref.model.path == "Qwen/Qwen3-8B"
    assert (actor.strategy, actor.fsdp_config.model_dtype, actor.ppo_max_token_len_per_gpu) == ("fsdp2", "bf16", 8192)
    assert actor.use_dynamic_bsz and actor.ulysses_sequence_parallel_size == 2
    assert "data.pad_mode=no_padding is ignored: sequences are packed without padding" in loaded.warnings


def test_megatron_in_sft_is_fsdp_here_and_what_would_change_the_result_is_refused():
    given = ["data.train_files=t.parquet", "model.path=Qwen/Qwen3-8B", "engine=megatron", "optim=megatron",
             "engine.tensor_model_parallel_size=8", "+optim.override_optimizer_config.optimizer_cpu_offload=True",
             "optim.lr=2e-5", "optim.min_lr=2e-6"]  # fmt: skip
    loaded = load_supervised(ENGINE_SFT, given, FOUR)
    actor = loaded.config.actor_rollout_ref.actor
    assert (actor.strategy, actor.fsdp_config.optimizer_offload) == ("fsdp", True)
    assert actor.optim.min_lr_ratio == pytest.approx(0.1)
    assert any(text.startswith("engine.tensor_model_parallel_size=8 is ignored") for text in loaded.warnings)
    with pytest.raises(UserError, match="of Megatron's"):
        load_supervised(ENGINE_SFT, [*given, "+engine.override_transformer_config.moe_aux_loss_coeff=0.01"], FOUR)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("engine=veomni", "veomni is not a training engine here"),
        ("engine=automodel", "automodel is not a training engine here"),
        ("model.mtp.enable=True", "multi-token prediction is not trained"),
        ("data.messages_key=talk", "the column messages is read under this name alone"),
        ("data.trian_files=x", "no such key"),
    ],
)
def test_what_sft_cannot_honour_is_refused_by_name(argument, reason):
    with pytest.raises(UserError, match=reason):
        load_supervised(ENGINE_SFT, ["data.train_files=t.parquet", "model.path=Qwen/Qwen3-8B", argument], {})


def test_nested_questions_are_asked_by_the_template_and_learnt_as_paddock_sft_does(tiny, capsys, monkeypatch):
    folder, model = tiny
    monkeypatch.delenv("RANK", raising=False)
    nested = [f"data.train_files={folder / 'nested.parquet'}", *GSM8K[1:]]
    assert supervise(FSDP_SFT, [*small(folder, model, "old"), *nested]) == 0
    said = [f"data.train_files={folder / 'said.parquet'}"]
    cosine = ["optim.betas=[0.9,0.95]", "optim.lr_warmup_steps_ratio=0.1", "optim.lr_scheduler_type=cosine"]
    assert supervise(ENGINE_SFT, [*small(folder, model, "new"), *said, *cosine]) == 0
    found = losses(folder / "old")
    assert len(found) == 2 and found == losses(folder / "new"), "both hold the same conversations"
    assert (folder / "old" / "huggingface" / "model.safetensors").is_file()


def test_a_row_beyond_max_length_stops_is_cut_or_is_left_out(tiny):
    from paddock.data.unscored import AnswerDataset
    from paddock.models.load import load_tokenizer

    folder, model = tiny
    tokenizer = load_tokenizer(str(model), False, None)

    def rows(*overrides):
        given = [f"data={folder / 'said.parquet'}", f"model={model}", "data.prompt_key=messages", *overrides]
        dataset = AnswerDataset.train(SFT.load(given).config.data, tokenizer)
        return [(len(row.tokens), len(row.ground_truth)) for row in dataset.rows(range(len(dataset)))]

    whole = rows()
    longest = max(map(sum, whole))
    assert rows(f"data.max_length={longest}") == whole
    assert len(rows(f"data.max_length={longest - 1}")) < len(whole)
    kept = [f"data.max_length={longest - 1}", "data.filter_overlong_prompts=False"]
    with pytest.raises(UserError, match=r"data\.max_length"):
        rows(*kept)
    at = whole.index(next(row for row in whole if sum(row) == longest))
    assert rows(*kept, "data.truncation=left")[at] == (whole[at][0] - 1, whole[at][1])
    assert rows(*kept, "data.truncation=right")[at] == (whole[at][0], whole[at][1] - 1)


def test_ranks_of_torchrun_above_the_first_have_nothing_to_do(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert supervise(FSDP_SFT, ["no such argument"]) == 0


def test_the_runs_own_processes_do_not_meet_in_the_group_of_torchrun(monkeypatch):
    for name, value in {
        **FOUR,
        "MASTER_ADDR": "a",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PATH_OF_MINE": "p",
    }.items():
        monkeypatch.setenv(name, value)
    leave_torchrun()
    assert not {*FOUR, "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & {*os.environ} and "PATH_OF_MINE" in os.environ


def test_a_plan_of_sft_says_model_rows_steps_and_memory_and_trains_nothing(monkeypatch, capsys):
    for name, value in {PLAN_ONLY: "1", **FOUR}.items():
        monkeypatch.setenv(name, value)
    assert supervise(FSDP_SFT, [*GSM8K, "model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct"]) == 0
    out = capsys.readouterr().out
    for text in ("Supervised training: Qwen/Qwen2.5-0.5B-Instruct", "2 node(s) x 4 cuda", "256 rows of at most 1024",
                 "prompts in extra_info.question", "update_actor", "verl's fsdp_sft_trainer"):  # fmt: skip
        assert text in out
    assert "rollout  " not in out and "KV cache" not in out


def test_generation_writes_answers_under_verls_keys_and_scores_of_the_file_are_printed(tiny, capsys, caplog, tmp_path):
    _, model = tiny
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.parquet"
    row = {"prompt": "1+1=", "data_source": "mine", "reward_model": {"style": "rule", "ground_truth": "2"}}
    prompts.write_text(f"{json.dumps(row)}\n")
    (tmp_path / "r.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
                                   "    return float(len(solution_str) >= 0) * 0.5\n")  # fmt: skip
    given = [f"model.path={model}", f"data.path={prompts}", f"data.output_path={answers}", "data.n_samples=2",
             "rollout.response_length=4", "rollout.prompt_length=32", "trainer.n_gpus_per_node=8", "trainer.nnodes=1",
             "rollout.tensor_model_parallel_size=2", "trainer.device=cpu", "rollout.dtype=float32"]  # fmt: skip
    assert generate(GENERATION, given) == 0
    assert "which ones come does not depend on their number" in caplog.text
    capsys.readouterr()
    (written,) = parquet.read_table(answers).to_pylist()
    assert len(written["responses"]) == 2
    assert score([f"data.path={answers}", f"custom_reward_function.path={tmp_path / 'r.py'}"]) == 0
    assert ast.literal_eval(capsys.readouterr().out) == {"test_score/mine": 0.5}
    with pytest.raises(UserError, match=r"data\.response_key=texts"):
        score([f"data.path={answers}", "data.response_key=texts", f"custom_reward_function.path={tmp_path / 'r.py'}"])


def test_scores_of_a_file_take_the_rule_of_its_data_source(tmp_path, capsys):
    rows = [
        {"responses": answers, "data_source": "openai/gsm8k", "reward_model": {"ground_truth": truth}}
        for answers, truth in ((["#### 4", "#### 5"], "4"), (["#### 7", "#### 7"], "7"))
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert score([f"data.path={tmp_path / 'a.parquet'}"]) == 0
    assert ast.literal_eval(capsys.readouterr().out) == {"test_score/openai/gsm8k": 0.75}


def test_plans_of_generation_and_scores_name_what_they_would_do(monkeypatch, capsys):
    monkeypatch.setenv(PLAN_ONLY, "1")
    given = [
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "data.train_files=/far/t.parquet",
        "+data.output_path=o.parquet",
    ]
    assert generate(GENERATION_SERVER, [*given, "actor_rollout_ref.rollout.n=3"]) == 0
    assert score(["data.path=/far/a.parquet", "data.prompt_key=prompt", "custom_reward_function.path=/far/r.py"]) == 0
    out = capsys.readouterr().out
    assert "Qwen/Qwen3-8B answers /far/t.parquet" in out and "3 answer(s)" in out and "written to o.parquet" in out
    assert "Scores of /far/a.parquet" in out and "data.prompt_key=prompt is ignored: prompts are not read" in out


@pytest.mark.parametrize(
    "name",
    ["main_ppo", "main_ppo_sync", "fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray", "main_generation",
     "main_generation_server", "main_eval"],
)  # fmt: skip
def test_every_module_that_scripts_start_has_a_main(name):
    sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))
    assert callable(import_module(f"verl.trainer.{name}").main)
