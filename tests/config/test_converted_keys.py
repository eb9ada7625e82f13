"""Keys of verl's 0.8 and 0.9 lines that are taken in another unit, done with a warning, or refused with a reason."""

import pytest

from paddock.errors import UserError
from paddock.loading.load import load

A, RO, M = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))
EIGHT = ["trainer.n_gpus_per_node=8", "trainer.device=cuda", "trainer.nnodes=2"]


def test_an_absolute_lowest_rate_becomes_a_share_of_the_peak():
    loaded = load([f"{A}.optim.min_lr=2e-7", f"{A}.optim.lr=1e-6", f"{A}.optim.lr_decay_style=cosine"])
    assert loaded.config.actor_rollout_ref.actor.optim.min_lr_ratio == pytest.approx(0.2)
    assert any(f"{A}.optim.min_lr=2e-07 is {A}.optim.min_lr_ratio=0.2" in warning for warning in loaded.warnings)
    with pytest.raises(UserError) as error:
        load([f"{A}.optim.min_lr=1e-7"])
    assert error.value.fix == f"set {A}.optim.lr"
    assert load([f"{A}.optim.min_lr=0"]).config.actor_rollout_ref.actor.optim.min_lr_ratio == 0


def test_a_share_at_the_start_of_the_warm_up_becomes_an_absolute_rate():
    optim = load([f"{A}.optim.init_lr_ratio=0.1", f"{A}.optim.lr=1e-5"]).config.actor_rollout_ref.actor.optim
    assert optim.lr_warmup_init == pytest.approx(1e-6)


def test_micro_batches_over_all_devices_become_those_of_one():
    loaded = load([*EIGHT, f"{A}.ppo_micro_batch_size=64", f"{RO}.log_prob_micro_batch_size=8"])
    assert loaded.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    assert loaded.config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu == 1
    assert any("ppo_micro_batch_size=64 is" in warning and "rows of one" in warning for warning in loaded.warnings)


def test_greedy_validation_of_several_answers_is_done_with_a_warning():
    loaded = load([f"{RO}.val_kwargs.n=4"])
    assert loaded.config.actor_rollout_ref.rollout.val_kwargs.n == 4
    assert any("greedy answers to one prompt are all the same" in warning for warning in loaded.warnings)


def test_a_checkpoint_of_weights_alone_is_written_whole_with_a_warning():
    warnings = load([f"{A}.checkpoint.save_contents=[hf_model]"]).warnings
    (warning,) = [text for text in warnings if "save_contents" in text]
    assert "also holds model, optimizer, extra" in warning


@pytest.mark.parametrize(
    ("argument", "key", "value"),
    [
        (f"+{A}.policy_loss.tau_pos=0.9", "actor_rollout_ref.actor.tau_pos", 0.9),
        (f"{M}.torch_dtype=float32", "actor_rollout_ref.actor.fsdp_config.dtype", "float32"),
        (f"{A}.model_engine=megatron", "actor_rollout_ref.actor.strategy", "megatron"),
        ("sandbox_fusion.memory_limit_mb=512", "reward_model.sandbox_fusion.memory_limit_mb", 512),
    ],
)
def test_a_later_name_is_taken_under_the_one_here(argument, key, value):
    from paddock.config import tree

    assert tree.get(load([argument]).config, key) == value


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        (f"{RO}.trace.backend=mlflow", "trainer.rollout_data_dir=FOLDER keeps every rollout"),
        (f"{A}.checkpoint.strict=False", "holds every weight"),
        (f"{A}.megatron.use_megatron_fsdp=True", "strategy=fsdp shards all of them"),
        ("data.continuous_token.enable=True", "never tokenised again"),
        (f"{A}.fsdp_config.qat.enable=False", "not built"),
    ],
)
def test_a_key_that_changes_no_result_is_ignored_with_the_reason(argument, said):
    assert any(said in warning for warning in load([argument]).warnings)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("model_engine=veomni", "veomni is not a training engine here"),
        ("model_engine=mindspeed", "mindspeed is not a training engine here"),
        (f"{RO}.engine_kwargs.trtllm.max_batch_size=8", "TensorRT-LLM is not an engine here"),
        (f"{M}.mtp.enable=True", "multi-token prediction is not trained"),
        (f"{A}.fsdp_config.qat.enable=True", "quantization-aware training is not built"),
        (f"{A}.optim.exp_avg_dtype=bf16", "gradients and moments are float32"),
        ("skip.rollout.enable=True", "rollouts are not read from a file"),
        (f"{A}.optim.zero_indexed_step=False", "the first step has number 0"),
    ],
)
def test_what_would_change_the_result_is_refused_in_one_line(argument, reason):
    with pytest.raises(UserError) as error:
        load([argument])
    assert reason in str(error.value) and error.value.fix


def test_a_file_that_is_on_another_machine_stops_a_run_and_not_the_plan_of_a_script():
    missing = ["custom_reward_function.path=nowhere/reward.py"]
    with pytest.raises(UserError):
        load(missing)
    assert "custom_reward_function.path: nowhere/reward.py is not on this machine" in load(missing, here=False).warnings


def test_a_text_that_hydra_cannot_read_and_an_argument_of_blanks_are_taken_with_a_warning():
    loaded = load(["trainer.experiment_name=run_8npu}", " "])
    assert loaded.config.trainer.experiment_name == "run_8npu}"
    assert loaded.warnings[:2] == [
        "trainer.experiment_name=run_8npu} is taken as a text: Hydra's grammar cannot read it",
        "an argument of blanks is left out: does a line of the script end with a backslash and blanks?",
    ]
    with pytest.raises(UserError, match="cannot be read"):
        load(["data.train_batch_size=8}"])
