"""Distillation on the embedded model: it learns from its teachers, goes on after a stop, and refuses what cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from tiny_models import moved_copy

from paddock.config.distillation import Teacher
from paddock.core.batch import Batch
from paddock.errors import UserError
from paddock.estimate.job import job
from paddock.estimate.memory import estimate
from paddock.loading.load import load
from paddock.plan.arithmetic import roles
from paddock.trainer.loop import Trainer
from paddock.trainer.reinforcement import train
from paddock.workers.teachers import require_sight

TINY = ROOT / "paddock/assets/tiny"
LOSS = "distillation.distillation_loss"
SMALL = [
    "data.train_batch_size=8", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.val_before_train=False", "trainer.save_freq=1",
    "trainer.logger=[file]", "data.dataloader_num_workers=0", "algorithm.adv_estimator=grpo", "trainer.test_freq=-1",
    "distillation.enabled=True", "actor_rollout_ref.actor.optim.lr=1e-3",
]  # fmt: skip
ALONE = f"{LOSS}.use_task_rewards=False"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> list[Path]:
    """Two models of the student's tokenizer that answer otherwise: their embeddings, and so their heads, are moved."""
    folder = tmp_path_factory.mktemp("teachers")
    return [moved_copy(TINY, folder / f"teacher_{seed}", seed) for seed in (1, 2)]


def one(teacher: Path) -> str:
    return f"distillation.teacher_models.teacher_model.model_path={teacher}"


def arguments(folder: Path, *overrides: str) -> list[str]:
    return [*SMALL, f"trainer.default_local_dir={folder}", *overrides]


def run(folder: Path, *overrides: str) -> list[dict[str, float]]:
    assert train(load(arguments(folder, *overrides)).config).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"global_step_{step}/actor/model.safetensors")


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{LOSS}.loss_mode=k3"],
        [f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=8"],
        [f"{LOSS}.loss_mode=forward_kl_topk", "actor_rollout_ref.model.use_remove_padding=False"],
        [f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True"],
    ],
    ids=["k3", "topk", "topk, padded", "k1 as a reward"],
)
def test_the_student_comes_nearer_to_its_teacher(overrides, teachers, tmp_path):
    rows = run(tmp_path, one(teachers[0]), ALONE, "trainer.total_training_steps=12", "trainer.save_freq=-1",
               "actor_rollout_ref.rollout.n=8", *overrides)  # fmt: skip
    name = "distillation/loss" if "topk" in overrides[0] else "distillation/abs_loss"
    first, last = rows[0][name], sum(row[name] for row in rows[-3:]) / 3
    assert last < 0.7 * first, f"{first} -> {last}"
    assert "timing_s/teacher" in rows[0] and "timing_s/ref" not in rows[0]
    assert all(row["actor/skipped"] == 0 for row in rows)


def test_a_teacher_that_is_the_student_has_nothing_to_teach(tmp_path):
    row = run(tmp_path, one(TINY), ALONE, "actor_rollout_ref.rollout.temperature=0.7")[0]
    assert row["distillation/loss_max"] < 1e-6, "at any temperature: both have that of the samples"


def test_beside_task_rewards_both_losses_are_there_and_have_their_weights(teachers, tmp_path):
    rewards = run(tmp_path / "a", "distillation.enabled=False")[0]
    both = run(tmp_path / "b", one(teachers[0]))[0]
    none = run(tmp_path / "c", one(teachers[0]), f"{LOSS}.distillation_loss_coef=0")[0]
    assert {"actor/pg_loss", "distillation/loss"} <= both.keys() and "actor/pg_loss" in rewards
    assert both["actor/grad_norm"] != rewards["actor/grad_norm"] == none["actor/grad_norm"]
    first, second = weights(tmp_path / "a", 1), weights(tmp_path / "c", 1)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("mode", ["k3", "forward_kl_topk"])
def test_the_batch_may_be_cut_anyhow(mode, teachers, tmp_path):
    common = (one(teachers[0]), ALONE, f"{LOSS}.loss_mode={mode}", "trainer.total_training_steps=1")
    cut = (
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=40",
    )
    run(tmp_path / "a", *common, "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3")
    run(tmp_path / "b", *common, *cut, "++actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3")
    first, second = weights(tmp_path / "a", 1), weights(tmp_path / "b", 1)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-6)


def test_a_resumed_run_equals_one_that_was_not_interrupted(teachers, tmp_path):
    common = (one(teachers[0]), f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=8")
    whole = run(tmp_path / "a", *common, "trainer.total_training_steps=3")
    run(tmp_path / "b", *common, "trainer.total_training_steps=1")
    resumed = run(tmp_path / "b", *common, "trainer.total_training_steps=3")
    names = [name for name in whole[0] if name.startswith(("distillation/", "actor/", "critic/"))]
    assert [[row[name] for name in names] for row in whole] == [[row[name] for name in names] for row in resumed]
    first, second = weights(tmp_path / "a", 3), weights(tmp_path / "b", 3)
    assert all(torch.equal(first[name], second[name]) for name in first)


def routed(folder: Path, teachers: list[Path], tasks: list[str], *overrides: str) -> list[str]:
    """Rows of two tasks, by turns, and a teacher for each task."""
    file = folder / "rows.jsonl"
    rows = [
        {"prompt": f"{10 + n}+{20 + n}=", "answer": str(30 + 2 * n), "task": tasks[n % len(tasks)]} for n in range(8)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = [
        setting
        for name, path in zip("ab", teachers, strict=True)
        for setting in (f"+distillation.teacher_models.{name}.key=task_{name}",
                        f"+distillation.teacher_models.{name}.model_path={path}")
    ]  # fmt: skip
    files = (f"data.train_files={file}", "data.val_files=null", "reward=exact_match", "trainer.device=cpu",
             "actor_rollout_ref.model.path=builtin:tiny", "data.max_response_length=8", "data.max_prompt_length=16",
             "actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.ref.fsdp_config.dtype=float32",
             "actor_rollout_ref.actor.fsdp_config.dtype=float32", "data.shuffle=False")  # fmt: skip
    return [*files, *named, "distillation.teacher_key=task", ALONE, "trainer.total_training_steps=1", *overrides]


def test_each_row_goes_to_the_teacher_of_its_key(teachers, tmp_path):
    (tmp_path / "data").mkdir()
    keys = routed(tmp_path / "data", teachers, ["task_a", "task_b"])
    both = run(tmp_path / "both", *keys)[0]["distillation/abs_loss"]
    swapped = run(tmp_path / "swapped", *routed(tmp_path / "data", teachers[::-1], ["task_a", "task_b"]))[0]
    alone = [run(tmp_path / name, *routed(tmp_path / "data", teachers, [f"task_{name}"]))[0] for name in "ab"]
    losses = [row["distillation/abs_loss"] for row in alone]
    assert both + swapped["distillation/abs_loss"] == pytest.approx(sum(losses), rel=1e-4), "half the tokens of each"
    assert both not in losses


def test_rows_without_a_teacher_are_named(teachers, tmp_path):
    with pytest.raises(UserError, match="a row has task=task_c, and no teacher has that key: there are task_a, task_b"):
        run(tmp_path / "a", *routed(tmp_path, teachers, ["task_a", "task_c"]))
    with pytest.raises(UserError, match="a row has data_source=rows, and no teacher has that key"):
        run(
            tmp_path / "c",
            *routed(tmp_path, teachers, ["task_a"], "distillation.teacher_key=data_source"),
        )
    with pytest.raises(UserError, match="rows have no such column"):
        run(tmp_path / "b", *routed(tmp_path, teachers, ["task_a"], "distillation.teacher_key=nothing"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "no model is named"),
        (["distillation.teacher_models.teacher_model.model_path=/nowhere"], "no such folder"),
        (["distillation.teacher_models.teacher_model=builtin:tiny"], "is a section"),
        (["+distillation.teacher_models.a.model_path=builtin:tiny", "+distillation.teacher_models.a.modelpath=x"],
         "a teacher has model_path and key"),
        (["+distillation.teacher_models.a.model_path=builtin:tiny", "+distillation.teacher_models.b.model_path=x"],
         "no row would go to this one"),
        (["+distillation.teacher_models.a.model_path=builtin:tiny", "+distillation.teacher_models.a.key=x",
          "+distillation.teacher_models.b.model_path=builtin:tiny", "+distillation.teacher_models.b.key=x"],
         "teacher a has the same key"),
        ([one(TINY), f"{LOSS}.loss_mode=k1"], "does not depend on the teacher"),
        ([one(TINY), f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=300"], "the vocabulary has 258 tokens"),
        ([one(TINY), f"{LOSS}.loss_mode=reverse_kl"], "is not one of the values"),
        ([one(TINY), f"{LOSS}.policy_loss_mode=gspo"], "is not one of the values"),
        ([one(TINY), ALONE, "critic.enable=True"], "nothing reads values"),
        (["distillation.teacher_models.teacher_model.model_path=builtin:tiny",
          "actor_rollout_ref.model.path=Qwen/Qwen3-8B"], "a vocabulary of 258 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_distilled_is_refused_before_a_run(overrides, said, tmp_path):
    from paddock.commands.preflight import check

    with pytest.raises(UserError) as refusal:
        check(load(arguments(tmp_path, *overrides)).config)
    assert said in str(refusal.value)


def test_a_teacher_of_another_tokenizer_is_refused_before_weights_are_loaded(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(tokenizer))
    (other / "model.safetensors").unlink()
    with pytest.raises(UserError, match="its tokenizer is not the student's"):
        run(tmp_path / "run", one(other))


def test_a_teacher_with_a_wider_embedding_scores_the_students_tokens(teachers, tmp_path):
    """Families pad the embedding of large models further: the rows behind the tokenizer's last token mean nothing."""
    from paddock.models.load import load_causal_lm

    model = load_causal_lm(path=str(teachers[0]), dtype=torch.float32, device="cpu")
    model.resize_token_embeddings(272)
    shutil.copytree(teachers[0], tmp_path / "wide")
    model.save_pretrained(tmp_path / "wide")
    mode = f"{LOSS}.loss_mode=forward_kl_topk"
    wide = run(tmp_path / "a", one(tmp_path / "wide"), ALONE, mode)[0]
    plain = run(tmp_path / "b", one(teachers[0]), ALONE, mode)[0]
    assert wide["distillation/loss"] == plain["distillation/loss"]


def test_keys_that_have_no_reader_are_told(tmp_path):
    served = ["+distillation.teacher_models.teacher_model.inference.name=vllm", "distillation.nnodes=1"]
    loaded = load(arguments(tmp_path, one(TINY), ALONE, *served, "actor_rollout_ref.actor.use_kl_loss=True"))
    said = "\n".join(loaded.warnings)
    assert said.count("a teacher has no server") == 2 and "use_kl_loss has no effect" in said
    assert loaded.config.distillation.teacher_models == {"teacher_model": {"model_path": str(TINY)}}
    entry = "{model_path: builtin:tiny, key: null, num_replicas: 0, inference: {name: vllm}}"
    whole = load(["distillation.enabled=True", f"+distillation.teacher_models.teacher_model={entry}"])
    assert "\n".join(whole.warnings).count("a teacher has no server") == 2, "as a whole config file has it"
    off = load(["distillation.enabled=False", f"{LOSS}.topk=4"]).warnings
    assert off == [f"{LOSS}.topk has no effect: distillation.enabled=False"]


def test_one_response_a_prompt_is_enough_where_no_advantage_is_read(teachers, tmp_path):
    alone = load(arguments(tmp_path, one(TINY), ALONE, "actor_rollout_ref.rollout.n=1"))
    assert alone.config.critic.enable is False
    with pytest.raises(UserError, match="compares the responses"):
        load(arguments(tmp_path, one(TINY), "actor_rollout_ref.rollout.n=1"))
    ppo = load([one(TINY), "distillation.enabled=True", ALONE, "algorithm.adv_estimator=gae"])
    assert ppo.config.critic.enable is False


def test_a_plan_counts_the_teachers(tmp_path):
    def planned(*overrides: str):
        student = ("actor_rollout_ref.model.path=Qwen/Qwen3-8B", "trainer.n_gpus_per_node=8", "trainer.device=cuda")
        return load([*SMALL[:-2], *student, *overrides]).config

    alone, taught = planned(), planned("distillation.enabled=True", one(Path("Qwen/Qwen3-32B")))
    names = [role["role"] for role in roles(taught)]
    assert names == ["actor", "rollout", "teacher teacher_model"]
    assert "teacher" not in estimate(job(alone)).phases
    memory = estimate(job(taught)).phases
    assert memory["update_actor"]["teachers"] == pytest.approx(2 * 32.76e9 / 8, rel=0.01)
    offloaded = planned("distillation.enabled=True", one(Path("Qwen/Qwen3-32B")),
                        "actor_rollout_ref.ref.fsdp_config.param_offload=True")  # fmt: skip
    memory = estimate(job(offloaded)).phases
    assert "teachers" not in memory["update_actor"] and memory["teacher"]["teachers"] > 0


def test_adapters_learn_from_a_teacher_beside_their_reference(teachers, tmp_path):
    keys = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.use_kl_loss=True")
    rows = run(tmp_path, one(teachers[0]), *keys)
    assert rows[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6) and rows[0]["distillation/loss"] > 0


def test_conversations_are_scored_without_what_the_environment_wrote(teachers, tmp_path, monkeypatch):
    seen = []
    learn = Trainer.learn
    monkeypatch.setattr(Trainer, "learn", lambda self, batch, **others: seen.append(batch) or learn(self, batch))
    rows = run(tmp_path, one(teachers[0]), ALONE, "environment=builtin:guess", "trainer.total_training_steps=1")
    batch = seen[0]
    assert rows[0]["num_turns/mean"] > 2 and batch.need("mask").sum() < batch.need("lengths").sum()
    assert batch.need("teacher_log_probs")[batch.need("mask") == 0].abs().sum() == 0
    assert (batch.need("teacher_log_probs")[batch.need("mask") != 0] < 0).all()


def test_rows_with_images_are_refused_a_teacher_that_reads_text_alone():
    ids = torch.tensor([0])
    batch = Batch(row=ids, group=ids, prompts=torch.ones(1, 2), extras={"images": ["a picture"]})
    with pytest.raises(UserError, match="reads text alone"):
        require_sight(Teacher("blind", str(TINY), None), batch)
