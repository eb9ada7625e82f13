"""Each rule of the guide speaks at its boundary and not before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paddock.config import tree
from paddock.config.schema import Config
from paddock.estimate.memory import GIB, Hardware, RoleLoad, RolloutLoad, StepLoad, estimate
from paddock.estimate.splits import Fsdp, Megatron
from paddock.facts.models import shape_of
from paddock.loading.load import load
from paddock.plan.advice import Advice, Facts, advise, is_tuned, recommended_n
from paddock.plan.arithmetic import BatchPlan
from paddock.plan.plan import make

# The guide's first example, with a warm-up and a validation frequency that count steps knowingly.
_A = "actor_rollout_ref.actor"
KEYS = {
    "estimator": "algorithm.adv_estimator",
    "n": "actor_rollout_ref.rollout.n",
    "model_name": "actor_rollout_ref.model.path",
    "lora_rank": "actor_rollout_ref.model.lora_rank",
    "lr": f"{_A}.optim.lr",
    "warmup_steps": f"{_A}.optim.lr_warmup_steps",
    "warmup_ratio": f"{_A}.optim.lr_warmup_steps_ratio",
    "use_kl_in_reward": "algorithm.use_kl_in_reward",
    "kl_coef": "algorithm.kl_ctrl.kl_coef",
    "use_kl_loss": f"{_A}.use_kl_loss",
    "kl_loss_coef": f"{_A}.kl_loss_coef",
}
RIGHT: dict[str, Any] = {
    "estimator": "rloo",
    "n": 5,
    "model_name": "Qwen/Qwen2-7B-Instruct",
    "lr": 1e-6,
    "warmup_steps": 3,
    "use_kl_in_reward": True,
    "kl_coef": 0.001,
}
BATCH = BatchPlan(
    prompts=1024,
    responses=5,
    rows=5120,
    mini_batches=4,
    optimizer_steps=4,
    rows_per_device=640,
    micro_batches="",
    train_rows=7473,
    steps_per_epoch=7,
    total_steps=105,
)


def facts(**changes: Any) -> Facts:
    """The guide's example with other values of keys, of the batch, or of what follows from all keys."""
    config = Config()
    for name, value in {**RIGHT, **changes}.items():
        if name in KEYS:
            tree.put(config, KEYS[name], value)
    batch = replace(BATCH, **{name: value for name, value in changes.items() if hasattr(BATCH, name)})
    right = Facts(
        group=config.actor_rollout_ref,
        algorithm=config.algorithm,
        batch=batch,
        needs=frozenset({"groups"}),
        critic=False,
        billions=7.6,
        test_freq=7,
        cut_by_rows=frozenset(),
        job=None,
        merged=None,
    )
    return replace(right, **{name: value for name, value in changes.items() if hasattr(right, name)})


def about(key: str, **changes: Any) -> list[Advice]:
    return [advice for advice in advise(facts(**changes)) if advice.key.endswith(key)]


def only(key: str, **changes: Any) -> Advice:
    (advice,) = about(key, **changes)
    return advice


def test_a_run_that_is_right_gets_no_advice() -> None:
    assert advise(facts()) == []


@pytest.mark.parametrize(
    ("billions", "n"),
    [(0.5, 16), (1.5, 16), (2.9, 11), (3.0, 8), (4.0, 8), (5.0, 6), (7.0, 5), (10.0, 5), (10.1, 4), (72.0, 4)],
)
def test_n_follows_the_formula_within_the_range_of_the_size(billions: float, n: int) -> None:
    assert recommended_n(billions) == n


@pytest.mark.parametrize(
    ("billions", "few", "enough", "most", "many"),
    [(2.9, 7, 8, 16, 17), (3.0, 4, 5, 8, 9), (10.0, 4, 5, 8, 9), (10.1, 3, 4, 6, 7)],
)
def test_n_outside_the_range_of_the_size_is_named(billions: float, few: int, enough: int, most: int, many: int) -> None:
    assert about("rollout.n", billions=billions, n=enough) == []
    assert about("rollout.n", billions=billions, n=most) == []
    low = only("rollout.n", billions=billions, n=few)
    assert low.suggestion == f"actor_rollout_ref.rollout.n={recommended_n(billions)}"
    assert only("rollout.n", billions=billions, n=many).suggestion == f"actor_rollout_ref.rollout.n={most}"


def test_fewer_than_four_responses_are_too_noisy_a_baseline() -> None:
    assert "too noisy" in only("rollout.n", n=3).message
    assert "too noisy" not in only("rollout.n", n=4).message
    assert only("rollout.n", n=3, billions=None).suggestion.endswith("n=4")
    assert about("rollout.n", n=4, billions=None) == []


def test_a_critic_needs_few_responses() -> None:
    assert about("rollout.n", estimator="gae", needs=frozenset(), critic=True, n=4) == []
    assert about("rollout.n", estimator="gae", needs=frozenset(), critic=True, n=1) == []
    assert only("rollout.n", estimator="gae", needs=frozenset(), critic=True, n=5).suggestion.endswith("n=4")
    assert about("rollout.n", estimator="reinforce_plus_plus", needs=frozenset(), n=1) == []


@pytest.mark.parametrize(
    ("name", "tuned"),
    [
        ("Qwen/Qwen2-7B-Instruct", True),
        ("$HOME/models/deepseek-llm-7b-chat", True),
        ("google/gemma-2-2b-it", True),
        ("google/gemma-3-4b-pt", False),
        ("THUDM/GLM-4.1V-9B-Thinking", True),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", True),
        ("/runs/smollm2_sft/", True),
        ("Qwen/Qwen2.5-7B", False),
        ("Qwen/Qwen3-8B-Base", False),
        ("Qwen/Qwen3-8B", None),
        ("meta-llama/Llama-3.2-1B", False),
        ("mistralai/Mistral-7B-v0.3", False),
        ("mistralai/Mistral-Nemo-Instruct-2407", True),
        ("/runs/mine", None),
        ("kitty/bits", None),
    ],
)
def test_a_name_tells_tuned_models_from_base_models(name: str, tuned: bool | None) -> None:
    assert is_tuned(name) is tuned


@pytest.mark.parametrize(
    ("name", "lr", "suggested"),
    [
        ("Qwen2-7B-Instruct", 5e-7, None),
        ("Qwen2-7B-Instruct", 4.9e-7, "1e-06"),
        ("Qwen2-7B-Instruct", 5e-6, None),
        ("Qwen2-7B-Instruct", 5.1e-6, "5e-06"),
        ("Qwen2-7B", 5e-6, None),
        ("Qwen2-7B", 4.9e-6, "5e-06"),
        ("Qwen2-7B", 1e-5, None),
        ("Qwen2-7B", 1.1e-5, "1e-05"),
        ("mine", 5e-7, None),
        ("mine", 1e-5, None),
        ("mine", 1.1e-5, "1e-05"),
    ],
)
def test_learning_rates_have_a_range_by_the_kind_of_start(name: str, lr: float, suggested: str | None) -> None:
    said = [advice.suggestion for advice in about("optim.lr", model_name=name, lr=lr)]
    assert said == ([] if suggested is None else [f"actor_rollout_ref.actor.optim.lr={suggested}"])


def test_adapters_have_no_range_of_learning_rates() -> None:
    assert about("optim.lr", lora_rank=8, lr=3e-4) == []


def test_a_linear_warm_up_is_advised_where_there_is_none() -> None:
    key = "actor_rollout_ref.actor.optim.lr_warmup_steps"
    for unset in (0, -1):
        assert only("warmup_steps", warmup_steps=unset).suggestion == f"{key}=3"
    assert only("warmup_steps", warmup_steps=0, total_steps=10).suggestion == f"{key}=1"
    assert only("warmup_steps", warmup_steps=0, total_steps=None).suggestion == f"{key}_ratio=0.03"
    assert about("warmup_steps", warmup_steps=0, warmup_ratio=0.1) == []


@pytest.mark.parametrize(
    ("coefficient", "suggested"),
    [(0.0001, None), (0.00009, "0.0001"), (0.0007, None), (0.005, None), (0.0051, "0.005"), (0.0, "0.001")],
)
def test_kl_coefficients_have_a_range(coefficient: float, suggested: str | None) -> None:
    said = [advice.suggestion for advice in about("kl_coef", kl_coef=coefficient)]
    assert said == ([] if suggested is None else [f"algorithm.kl_ctrl.kl_coef={suggested}"])
    assert about("kl_coef", kl_coef=coefficient, use_kl_in_reward=False) == []


def test_a_double_kl_is_told_with_both_numbers() -> None:
    advice = only("use_kl_loss", use_kl_loss=True, kl_coef=0.002, kl_loss_coef=0.04)
    assert "0.002" in advice.message and "0.04" in advice.message
    assert advice.suggestion == "actor_rollout_ref.actor.use_kl_loss=False"
    assert about("use_kl_loss", use_kl_loss=True, kl_loss_coef=0.0) == []
    assert about("use_kl_loss", use_kl_loss=True, kl_coef=0.0) == []
    assert about("use_kl_loss", use_kl_loss=True, use_kl_in_reward=False) == []


def test_a_validation_frequency_meant_as_epochs_is_converted() -> None:
    advice = only("test_freq", test_freq=5)
    assert "every 0.71 epochs, 21 times" in advice.message
    assert advice.message.endswith("every 5 epochs are 35 steps")
    assert advice.suggestion == "trainer.test_freq=35"


@pytest.mark.parametrize("frequency", [-1, 0, 7, 14, 20, 105])
def test_a_validation_frequency_that_counts_steps_is_left_alone(frequency: int) -> None:
    assert about("test_freq", test_freq=frequency) == []


def test_a_validation_frequency_is_not_taken_for_epochs_that_the_run_does_not_have() -> None:
    assert about("test_freq", test_freq=10, steps_per_epoch=58, total_steps=100) == []


def test_a_validation_frequency_is_left_alone_where_nothing_is_validated() -> None:
    line = [
        "data.train_files=gsm8k/train.parquet",
        "trainer.total_training_steps=3",
        "trainer.n_gpus_per_node=8",
    ]
    asked = {files: make(load([*line, f"data.val_files={files}"])).advice for files in ("gsm8k/test.parquet", "[]")}
    assert [any(one.key == "trainer.test_freq" for one in advice) for advice in asked.values()] == [True, False]


def test_a_validation_frequency_beyond_the_run_is_told() -> None:
    assert only("test_freq", test_freq=106).suggestion == "trainer.test_freq=7"
    assert about("test_freq", test_freq=5, steps_per_epoch=None, total_steps=None) == []


def job(
    memory: int = 80, name: str = "Qwen/Qwen2-7B-Instruct", gpus: int = 8, tokens: int = 16384, **rollout: Any
) -> StepLoad:
    shape = shape_of(name)
    assert shape is not None
    split = Fsdp(max(1, gpus))
    engine = {"engine": "vllm", "tensor": 2, "memory_fraction": 0.6} | rollout
    return StepLoad(
        hardware=Hardware(gpus, min(gpus, 8), memory * GIB),
        rollout=RolloutLoad(rows=1280, row_tokens=1536, **engine),
        roles={
            "actor": RoleLoad(shape, split, update_tokens=tokens, forward_tokens=tokens),
            "reference": RoleLoad(shape, split, forward_tokens=tokens, dtype_bytes=2),
        },
    )


def told(work: StepLoad, cut_by_rows: frozenset[str] = frozenset()) -> list[str]:
    """The suggestions on memory, less the closing note on the batch size."""
    suggestions = [advice.suggestion for advice in advise(facts(job=work, cut_by_rows=cut_by_rows))]
    if suggestions:
        assert suggestions.pop() == "data.train_batch_size=1024, as it is"
    return suggestions


def test_a_run_that_fits_gets_no_advice_on_memory() -> None:
    assert estimate(job()).fits
    assert told(job()) == []


def test_the_batch_size_is_said_to_save_nothing() -> None:
    advice = advise(facts(job=job(memory=24)))[-1]
    assert advice.key == "data.train_batch_size"
    assert "saves nothing" in advice.message


def test_a_pool_too_large_beside_training_is_lowered_to_what_fits() -> None:
    work = job(memory_fraction=0.9)
    assert estimate(work).overfull == ("gen",)
    assert told(work) == ["actor_rollout_ref.rollout.gpu_memory_utilization=0.7"]
    assert estimate(job(memory_fraction=0.7)).fits
    assert not estimate(job(memory_fraction=0.75)).fits


def test_an_engine_without_a_pool_gets_fewer_sequences() -> None:
    """It reads no gpu_memory_utilization: 1280 rows of 0.5B beside its states on 24 GiB."""
    work = job(memory=24, name="Qwen/Qwen2.5-0.5B", gpus=1, tokens=4096, engine="embedded", tensor=1)
    assert estimate(work).overfull == ("gen",)
    assert told(work) == ["actor_rollout_ref.rollout.max_num_seqs=512"]


def test_micro_batches_too_large_are_halved_in_the_users_unit() -> None:
    key = "actor_rollout_ref.actor.ppo"
    assert told(job(tokens=80 * 1536), cut_by_rows=frozenset({"update_actor"})) == [
        f"{key}_micro_batch_size_per_gpu=40"
    ]
    assert told(job(tokens=131072)) == [f"{key}_max_token_len_per_gpu=65536"]


def test_offload_is_advised_where_nothing_quicker_makes_it_fit() -> None:
    assert told(job(memory=26)) == [
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    ]


def test_offload_of_a_megatron_role_has_its_own_keys() -> None:
    work = job(memory=60, tokens=2048, name="Qwen/Qwen2.5-32B-Instruct", tensor=4)
    split = Megatron(world=16, tensor=8)
    work = replace(
        work,
        hardware=replace(work.hardware, gpus=16),
        roles={name: replace(role, split=split) for name, role in work.roles.items()},
    )
    section = "actor_rollout_ref.actor.megatron"
    assert told(work) == [f"{section}.param_offload=True {section}.optimizer_offload=True"]


def test_recomputing_activations_comes_before_smaller_micro_batches() -> None:
    work = job(tokens=32768)
    work = work.with_roles(actor=replace(work.actor, checkpointing=False))
    assert told(work) == ["actor_rollout_ref.model.enable_gradient_checkpointing=True"]


def test_an_engine_whose_weights_leave_no_room_is_spread_over_more_gpus() -> None:
    work = job(name="Qwen/Qwen2.5-72B-Instruct", gpus=64, tensor=1, memory_fraction=0.9, tokens=4096, memory=100)
    assert estimate(work).kv_sequences == 0
    assert "actor_rollout_ref.rollout.tensor_model_parallel_size=2" in told(work)


def test_where_no_setting_helps_adapters_or_more_nodes_do() -> None:
    work = job(name="Qwen/Qwen2.5-72B-Instruct")
    suggestions = told(work)
    assert "actor_rollout_ref.model.lora_rank=64" in suggestions
    assert "trainer.nnodes=4" in suggestions
    assert suggestions[-1] == "a smaller model, or devices with more memory"


def test_a_cpu_is_not_told_to_offload_or_to_add_nodes() -> None:
    suggestions = told(job(gpus=0, memory=15, engine="embedded", tensor=1))
    assert suggestions[-1] == "a smaller model, or devices with more memory"
    assert not any("offload" in text or "nnodes" in text for text in suggestions)


@pytest.mark.parametrize("memory", [16, 24, 32, 40, 48, 80])
@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-3B", "Qwen/Qwen2-7B", "Qwen/Qwen3-30B-A3B"])
def test_a_run_that_does_not_fit_is_never_left_without_a_way(memory: int, name: str) -> None:
    work = job(memory=memory, name=name)
    assert bool(told(work)) is not estimate(work).fits


SEVEN_BILLION = [
    "trainer.device=cuda",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct",
]


@pytest.mark.parametrize("card", ["4090", "3090", "l4"])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
def test_a_7b_model_on_one_24_gb_card_is_told_lora_settings_that_fit_and_no_nodes(card: str, estimator: str) -> None:
    asked = [*SEVEN_BILLION, f"algorithm.adv_estimator={estimator}"]
    before = make(load(asked, gpu=card), card, assumed_rows=7473)
    assert before.memory is not None and not before.memory.fits
    told = [advice for advice in before.advice if advice.key != "data.train_batch_size"]
    assert any("LoRA" in advice.message for advice in told)
    assert not any("nnodes" in advice.suggestion for advice in told)
    start = next(i for i, advice in enumerate(told) if "lora_rank" in advice.suggestion)
    taken = [setting for advice in told[start:-1] for setting in advice.suggestion.split()]
    after = make(load([*asked, *taken], gpu=card), card, assumed_rows=7473)
    assert after.memory is not None and after.memory.fits


@pytest.mark.parametrize(
    "rows, advised",
    [
        (["critic.ppo_micro_batch_size_per_gpu=64"], "critic.ppo_micro_batch_size_per_gpu=32"),
        (
            ["critic.use_dynamic_bsz=True", "critic.ppo_max_token_len_per_gpu=98304"],
            "critic.ppo_max_token_len_per_gpu=49152",
        ),
    ],
)
def test_each_phase_is_cut_by_the_key_that_it_reads(rows: list[str], advised: str) -> None:
    """The actor's micro-batches are tokens, whatever the critic's are."""
    settings = ["actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct", "algorithm.adv_estimator=gae",
                "trainer.n_gpus_per_node=8", "data.train_batch_size=1024", "actor_rollout_ref.rollout.name=hf",
                "actor_rollout_ref.actor.ppo_mini_batch_size=256"]  # fmt: skip
    before = make(load([*settings, *rows], here=False, gpu="a100"), gpu="a100", assumed_rows=7473)
    assert advised in [advice.suggestion for advice in before.advice]
    after = make(load([*settings, *rows, advised], here=False, gpu="a100"), gpu="a100", assumed_rows=7473)
    assert after.memory is not None and after.memory.fits


ADAPTERS = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=32", *SEVEN_BILLION]


def merging(*keys: str, gpu: str = "h200") -> list[Advice]:
    plan = make(load([*ADAPTERS, *keys], here=False, gpu=gpu), gpu, assumed_rows=7473)
    assert plan.memory is not None and plan.memory.fits
    return [advice for advice in plan.advice if advice.key.endswith("lora.merge")]


def test_adapters_beside_the_weights_are_told_of_merging_and_that_fits_when_it_is_taken() -> None:
    (told,) = merging()
    shape = shape_of("Qwen/Qwen2.5-7B-Instruct")
    assert shape is not None and f"a copy of them, {2 * shape.adapted_parameters / GIB:.1f} GiB" in told.message
    assert told.suggestion == "actor_rollout_ref.model.lora.merge=True" and merging(told.suggestion) == []


@pytest.mark.parametrize(
    "keys",
    [
        ["trainer.n_gpus_per_node=2"],
        ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.gpu_memory_utilization=0.5"],
        ["actor_rollout_ref.model.lora_rank=0", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"],
    ],
    ids=["two devices", "an engine with weights of its own", "no adapters"],
)
def test_merging_is_not_told_where_rollouts_would_not_gain_by_it(keys: list[str]) -> None:
    assert merging(*keys) == []


def test_merging_is_not_told_where_a_copy_of_the_weights_has_no_room() -> None:
    short = ["data.max_prompt_length=256", "data.max_response_length=256"]
    assert merging(*short, gpu="a100") != [] and merging(*short, gpu="4090") == []
