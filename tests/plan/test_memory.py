"""Memory by phase: values worked by hand, peaks measured on a GPU, and what every setting must do to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.estimate import memory
from paddock.estimate.memory import GIB, Hardware, RoleLoad, RolloutLoad, StepLoad, estimate, layer_elements, scalar
from paddock.estimate.splits import Fsdp, Megatron
from paddock.facts.models import ModelShape, shape_of


def shape(name: str) -> ModelShape:
    found = shape_of(name)
    assert found is not None
    return found


QWEN = shape("Qwen/Qwen2-7B-Instruct")
P = 7_615_616_512


def job(
    gpus: int = 8, tokens: int = 16384, memory: int = 80 * GIB, model: ModelShape = QWEN, **changes: Any
) -> StepLoad:
    """The guide's run: Qwen2-7B on eight GPUs with vLLM over two, a reference, and no critic."""
    split = Fsdp(max(1, gpus))
    made = StepLoad(
        hardware=Hardware(gpus, min(gpus, 8), memory),
        rollout=RolloutLoad("vllm", rows=1280, row_tokens=1536, tensor=2, memory_fraction=0.6),
        roles={
            "actor": RoleLoad(model, split, update_tokens=tokens, forward_tokens=tokens),
            "reference": RoleLoad(model, split, forward_tokens=tokens, dtype_bytes=2),
        },
    )
    return replace(made, **changes)


def with_critic(made: StepLoad) -> StepLoad:
    return made.with_roles(critic=scalar(made.actor), reward_model=scalar(made.roles["reference"]))


def alone(made: StepLoad) -> StepLoad:
    """Leaves the reference out."""
    return replace(made, roles={"actor": made.actor})


def actor(made: StepLoad, **changes: Any) -> StepLoad:
    return made.with_roles(actor=replace(made.actor, **changes))


def rollout(made: StepLoad, **changes: Any) -> StepLoad:
    return replace(made, rollout=replace(made.rollout, **changes))


def test_states_by_hand() -> None:
    """fp32 weights, gradients and two moments are 16 bytes a parameter, over eight GPUs."""
    states = job().actor.states
    assert (states.parameters, states.gradients, states.optimizer) == (P * 4 // 8, P * 4 // 8, P * 8 // 8)
    assert states.total == 16 * P // 8 == 15_231_233_024
    parts = estimate(job()).phases["update_actor"]
    assert parts["parameters"] + parts["gradients"] + parts["optimizer"] == states.total


def test_reference_is_two_bytes_a_parameter_over_all_gpus() -> None:
    assert estimate(job()).phases["update_actor"]["reference"] == P * 2 // 8


def test_a_vllm_pool_by_hand() -> None:
    """0.6 of 80 GiB, less 2 P / 2 bytes of weights, holds KV of two of the four key heads: 28,672 bytes a token."""
    plan = estimate(job())
    parts = plan.phases["gen"]
    assert parts["rollout_weights"] == P
    assert parts["kv_cache"] == int(0.6 * 80 * GIB) - P
    assert plan.kv_tokens == (int(0.6 * 80 * GIB) - P) // (28 * 2 * 2 * 128 * 2)
    assert plan.kv_sequences == plan.kv_tokens // 1536 == 997


def test_update_activations_by_hand() -> None:
    """28 inputs of 3584, one layer of 8h + 2 (q + k) + 4f, and gradients of 2 (f + h) numbers a token, bf16."""
    layer = 8 * 3584 + 2 * (3584 + 512) + 4 * 18944
    assert layer_elements(QWEN) == layer
    expected = 16384 * 2 * (28 * 3584 + layer + 2 * (18944 + 3584))
    parts = estimate(job()).phases["update_actor"]
    assert parts["activations"] == expected
    assert "logits" not in parts  # they are gone before a layer runs backward


def test_the_head_is_the_peak_when_rows_are_few() -> None:
    parts = estimate(job(tokens=2048)).phases["update_actor"]
    assert parts["logits"] == 16 * 1024 * 152064
    assert parts["activations"] == 2048 * 2 * (28 + 6) * 3584


def test_gathered_weights_by_hand() -> None:
    root, layer = 2 * 152064 * 3584, 233_057_792
    assert QWEN.layer_parameters == layer
    plan = estimate(job())
    assert plan.phases["update_actor"]["gathered"] == 2 * (2 * root + 3 * layer)
    assert plan.phases["old_log_prob"]["gathered"] == 2 * (root + 2 * layer)


# Peaks of torch.cuda.max_memory_allocated on an H200: FSDP with bf16 compute on fp32 weights, two accumulated
# backward passes, fused AdamW, chunked log-probs, Qwen2-1.5B: tokens, chunk, checkpointing, bytes forward and in update
MEASURED = [
    (4096, 1024, True, 20.331e9, 28.619e9),
    (16384, 1024, True, 20.369e9, 29.864e9),
    (16384, 4096, True, 24.102e9, 37.321e9),
    (16384, 8192, True, 29.080e9, 47.266e9),
    (32768, 1024, True, 21.332e9, 33.407e9),
    (8192, 1024, False, 20.343e9, 52.072e9),
]


@pytest.mark.parametrize(("tokens", "chunk", "checkpointing", "forward", "update"), MEASURED)
def test_peaks_agree_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tokens: int, chunk: int, checkpointing: bool, forward: float, update: float
) -> None:
    monkeypatch.setattr(memory, "LOGITS_CHUNK", chunk)
    made = alone(job(gpus=1, tokens=tokens, model=shape("Qwen/Qwen2-1.5B")))
    plan = estimate(actor(made, checkpointing=checkpointing))
    assert plan.total("old_log_prob") == pytest.approx(forward, rel=0.01)
    assert plan.total("update_actor") == pytest.approx(update, rel=0.01)


# Peaks of the same kind by Paddock's own step on one H200 (benchmarks/NOTES.md): Qwen3-0.6B with float32 masters and
# gradient checkpointing; roles beside the actor, tokens of the micro-batches that came, GiB
STEPS = [((), 11_563, 13.2), (("critic",), 11_563, 21.0), (("reference",), 23_125, 16.8)]


@pytest.mark.parametrize(("beside", "tokens", "gib"), STEPS)
def test_one_rank_alone_agrees_with_steps_on_a_gpu(beside: tuple[str, ...], tokens: int, gib: float) -> None:
    made = alone(job(gpus=1, tokens=tokens, model=shape("Qwen/Qwen3-0.6B")))
    trained = replace(made.actor, split=Fsdp(alone=True))
    frozen = replace(trained, dtype_bytes=2)
    roles = {"critic": scalar(trained), "reference": frozen}
    plan = estimate(made.with_roles(actor=trained, **{name: roles[name] for name in beside}))
    assert plan.total("update_actor") / GIB == pytest.approx(gib, rel=0.08)


def test_states_of_one_rank_alone_by_hand() -> None:
    """0.5B in bf16 with float32 masters and moments, and a reference: 7.5 GiB at rest were measured."""
    model = shape("Qwen/Qwen2.5-0.5B")
    states = RoleLoad(model, Fsdp(alone=True)).states
    weights = 494_032_768
    assert (states.parameters, states.gradients, states.optimizer) == (2 * weights, 4 * weights, 12 * weights)
    assert (states.parameters + states.optimizer + 2 * weights) / GIB == pytest.approx(7.5, rel=0.02)
    narrow = RoleLoad(model, Fsdp(alone=True), dtype_bytes=2).states  # no masters where nothing is wider
    assert (narrow.parameters, narrow.gradients, narrow.optimizer) == (2 * weights, 2 * weights, 4 * weights)


@pytest.mark.parametrize(
    ("name", "kilobytes"), [("Qwen/Qwen2-7B", 225.4), ("Qwen/Qwen3-4B", 170.6), ("Qwen/Qwen3-30B-A3B", 194.6)]
)
def test_a_layers_activations_agree_with_a_gpu(name: str, kilobytes: float) -> None:
    """Bytes a token that a layer more kept for backward, dense, with query norms, and with 8 of 128 experts."""
    assert 2 * layer_elements(shape(name)) / 1000 == pytest.approx(kilobytes, rel=0.01)


def test_phases_follow_the_step_and_the_roles_it_needs() -> None:
    assert list(estimate(alone(job())).phases) == ["gen", "old_log_prob", "update_actor"]
    assert list(estimate(with_critic(job())).phases) == [
        "gen",
        "reward",
        "old_log_prob",
        "ref",
        "values",
        "update_critic",
        "update_actor",
    ]


def test_a_critic_has_no_logits_and_no_output_embedding() -> None:
    made = with_critic(job(tokens=1024))
    plan = estimate(made)
    assert "logits" in plan.phases["update_actor"]
    assert "logits" not in plan.phases["update_critic"]
    critic = P - 152064 * 3584 + 3584
    assert made.roles["critic"].shape.parameters == critic
    assert plan.phases["update_critic"]["critic"] == 3 * (-(-4 * critic // 8)) + (-(-4 * critic // 8))


def test_idle_optimizer_states_rest_on_the_gpu_unless_offloaded() -> None:
    kept, moved = estimate(job()), estimate(actor(job(), optimizer_offload=True))
    assert kept.phases["gen"]["optimizer"] == P
    assert "optimizer" not in moved.phases["gen"]
    assert moved.phases["update_actor"] == kept.phases["update_actor"]  # they come back for the update itself
    assert moved.host_bytes == 8 * P


def test_offload_moves_bytes_from_every_idle_phase_to_the_host() -> None:
    made = with_critic(job())
    moved = made.with_roles(critic=scalar(replace(made.actor, param_offload=True, optimizer_offload=True)))
    before, after = estimate(made), estimate(moved)
    for phase in ("gen", "reward", "old_log_prob", "ref", "update_actor"):
        assert after.total(phase) < before.total(phase)
    for phase in ("values", "update_critic"):
        assert after.total(phase) <= before.total(phase)
    assert after.host_bytes > before.host_bytes == 0


def test_a_cpu_run_has_nowhere_to_offload_to() -> None:
    made = rollout(job(gpus=0, memory=64 * GIB, compute_bytes=4), engine="embedded", tensor=1)
    plan, moved = estimate(made), estimate(actor(made, param_offload=True, optimizer_offload=True))
    assert plan == moved
    assert plan.host_bytes == 0
    assert "gathered" not in plan.phases["update_actor"]  # it computes with the weights it holds
    assert plan.phases["update_actor"]["parameters"] == 4 * P


def test_the_embedded_engine_shares_whole_weights_and_gathers_split_ones() -> None:
    one = rollout(job(gpus=1, model=shape("Qwen/Qwen2.5-0.5B")), engine="embedded", tensor=1)
    parts = estimate(actor(one, param_offload=True)).phases["gen"]
    assert "rollout_weights" not in parts
    assert parts["parameters"] == 4 * 494_032_768  # it runs them, so they are not offloaded now
    eight = rollout(job(), engine="embedded", tensor=1)
    assert estimate(eight).phases["gen"]["rollout_weights"] == 2 * P
    assert estimate(rollout(one, engine="hf")).phases["gen"]["rollout_weights"] == 2 * 494_032_768


def test_a_rollout_by_merged_weights_keeps_a_copy_of_those_that_have_adapters() -> None:
    model = shape("Qwen/Qwen2.5-0.5B")
    one = actor(rollout(job(gpus=1, model=model), engine="embedded", tensor=1), lora_rank=32)
    plain, merging = (estimate(rollout(one, merges=merges)) for merges in (False, True))
    copied = 2 * 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)  # q and o, k and v, the MLP
    assert merging.phases["gen"] == plain.phases["gen"] | {"unmerged_weights": copied}
    assert {**merging.phases, "gen": None} == {**plain.phases, "gen": None}
    assert merging.total("gen") - plain.total("gen") == copied == 2 * model.adapted_parameters


def test_an_actor_that_computes_by_merged_weights_holds_them_in_every_phase() -> None:
    model = shape("Qwen/Qwen2.5-0.5B")
    one = actor(rollout(job(gpus=1, model=model), engine="embedded", tensor=1), lora_rank=32)
    plain, merging = (estimate(actor(one, merges=merges)) for merges in (False, True))
    for phase, parts in plain.phases.items():
        more = merging.phases[phase]["parameters"] - parts["parameters"]
        assert more == 2 * model.adapted_parameters, phase
        assert {**merging.phases[phase], "parameters": 0} == {**parts, "parameters": 0}


def test_an_embedded_cache_holds_the_rows_of_a_step_or_of_a_validation() -> None:
    made = rollout(job(gpus=1, model=shape("Qwen/Qwen2.5-0.5B")), engine="embedded", tensor=1, rows=64)
    per_row = 1536 * 24 * 2 * 2 * 64 * 2
    assert estimate(made).phases["gen"]["kv_cache"] == 64 * per_row
    assert estimate(made).kv_sequences == 64
    many = estimate(rollout(made, rows=10**6, max_sequences=10**4))
    assert many.kv_sequences == 10**4 and many.overfull == ("gen",), "the engine takes no share of the memory"
    assert estimate(rollout(made, rows=10**6, max_sequences=256)).kv_sequences == 256
    shared = rollout(made, shared_tokens=512, sharing=8)
    assert estimate(shared).phases["gen"]["kv_cache"] == 64 * per_row * (1024 + 512 // 8) // 1536
    assert estimate(rollout(made, ahead=2)).kv_sequences == 3 * 64, "batches of later steps are drawn beside it"
    assert estimate(rollout(made, ahead=2, max_sequences=80)).kv_sequences == 80
    validated = estimate(rollout(shared, validation_rows=100))
    assert validated.phases["gen"]["kv_cache"] == 100 * per_row, "each prompt has one answer there"
    assert validated.kv_sequences == 64, "of a step"
    assert estimate(rollout(shared, validation_rows=1)).phases == estimate(shared).phases


def test_an_engine_that_does_not_sleep_keeps_its_pool_in_every_phase() -> None:
    asleep, awake = estimate(job()), estimate(rollout(job(), sleeps=False))
    assert awake.total("gen") == asleep.total("gen")
    assert awake.total("update_actor") == asleep.total("update_actor") + int(0.6 * 80 * GIB)


def test_a_pool_smaller_than_the_weights_holds_no_sequence_and_does_not_fit() -> None:
    plan = estimate(rollout(job(), memory_fraction=0.05))
    assert plan.kv_sequences == 0
    assert plan.overfull == ("gen",)
    assert not plan.fits


def test_latent_caches_are_not_shared_by_tensor_parallel_ranks() -> None:
    made = job(gpus=64, model=shape("deepseek-ai/DeepSeek-V3"), memory=10**12)
    tokens = [estimate(rollout(made, tensor=ways)).kv_tokens for ways in (8, 16)]
    pools = [estimate(rollout(made, tensor=ways)).phases["gen"]["kv_cache"] for ways in (8, 16)]
    assert tokens == [pool // (61 * 576 * 2) for pool in pools]


def test_megatron_by_hand() -> None:
    """Tensor 4, pipeline 2 over 16 ranks: bf16 weights, fp32 gradients an eighth each; 12 bytes over all 16."""
    split = Megatron(world=16, tensor=4, pipeline=2)
    states = RoleLoad(QWEN, split).states
    assert states.parameters == 2 * P // 8
    assert states.gradients == 4 * P // 8
    assert states.optimizer == 12 * P // 16
    assert RoleLoad(QWEN, replace(split, distributed_optimizer=False)).states.optimizer == 12 * P // 8


def test_expert_parallel_splits_experts_only() -> None:
    model = shape("Qwen/Qwen3-30B-A3B")
    experts = 48 * 128 * 3 * 2048 * 768
    states = RoleLoad(model, Megatron(world=8, tensor=2, expert=4, expert_tensor=1)).states
    assert states.parameters == 2 * ((model.parameters - experts) // 2 + experts // 4)


def test_megatron_keeps_its_gradient_buffers_between_updates() -> None:
    made = actor(job(), split=Megatron(world=8, tensor=8))
    assert estimate(made).phases["old_log_prob"]["gradients"] == 4 * P // 8
    assert "gradients" not in estimate(actor(made, param_offload=True)).phases["gen"]
    assert "gradients" not in estimate(job()).phases["old_log_prob"]


def test_tensor_parallel_splits_activations_and_logits() -> None:
    one, four = (estimate(actor(job(tokens=2048), split=Megatron(8, tensor=ways))) for ways in (1, 4))
    for part in ("activations", "logits"):
        assert four.phases["update_actor"][part] * 4 == one.phases["update_actor"][part]


def test_margin_is_a_tenth_but_two_gibibytes_at_least() -> None:
    assert Hardware(8, 8, 80 * GIB).margin == 8 * GIB
    assert Hardware(1, 1, 12 * GIB).margin == 2 * GIB


def test_it_fits_up_to_the_limit_and_not_a_byte_beyond() -> None:
    made = rollout(job(model=shape("Qwen/Qwen2.5-0.5B")), memory_fraction=0.3)
    need = estimate(made).total("update_actor")
    for spare, overfull in ((0, ()), (-1, ("update_actor",))):
        plan = estimate(replace(made, hardware=Hardware(8, 8, need + 2 * GIB + spare)))
        assert plan.hardware.margin == 2 * GIB
        assert plan.overfull == overfull
        assert plan.fits is not bool(overfull)
        assert max(plan.phases, key=plan.total) == "update_actor"


def test_lora_needs_gradients_and_moments_for_the_adapters_only() -> None:
    full, adapted = estimate(job()), estimate(actor(job(), lora_rank=32))
    lora = QWEN.lora_parameters(32)
    assert adapted.phases["update_actor"]["optimizer"] == lora  # 8 bytes over 8 GPUs
    assert adapted.phases["update_actor"]["gradients"] == lora // 2
    assert adapted.phases["update_actor"]["parameters"] == -(-(2 * P + 4 * lora) // 8)  # the model as it computes
    assert (
        adapted.phases["update_actor"]["gathered"] == full.phases["old_log_prob"]["gathered"]
    )  # and no gradients of it
    alone = estimate(actor(job(gpus=1), lora_rank=32)).phases["update_actor"]
    assert alone["parameters"] == 2 * P + 6 * lora and "gathered" not in alone  # masters and the copies that compute
    assert adapted.total("update_actor") < full.total("update_actor")


def test_a_reference_that_is_the_actor_without_adapters_costs_its_activations_alone() -> None:
    made = actor(job(), lora_rank=32, param_offload=True)
    borrowed = replace(made.actor, borrowed=True, forward_tokens=2 * made.actor.forward_tokens)
    plan, without = estimate(made.with_roles(reference=borrowed)), estimate(alone(made))
    assert {phase: plan.total(phase) for phase in without.phases} == {p: without.total(p) for p in without.phases}
    parts = plan.phases["ref"]
    assert parts["parameters"] == made.actor.states.parameters  # they are back on the device for it
    assert parts["activations"] == 2 * plan.phases["old_log_prob"]["activations"]
    assert plan.host_bytes == without.host_bytes


MODELS = [
    shape(name) for name in ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2-7B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3")
]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from([1, 2, 8, 64]), st.integers(1, 40), st.booleans())
def test_settings_move_memory_the_way_their_names_say(
    model: ModelShape, gpus: int, thousands: int, checkpointing: bool
) -> None:
    made = with_critic(job(gpus=gpus, tokens=thousands * 1024, model=model))
    made = actor(made, checkpointing=checkpointing)
    base = estimate(made)

    def never_more(changed: StepLoad, phases: list[str]) -> None:
        plan = estimate(changed)
        assert all(plan.total(phase) <= base.total(phase) for phase in phases)

    every = list(base.phases)
    never_more(actor(made, param_offload=True, optimizer_offload=True), every)
    never_more(actor(made, checkpointing=True), every)
    never_more(actor(made, lora_rank=16), ["update_actor", "gen"])
    never_more(actor(made, update_tokens=1024, forward_tokens=1024), every)
    twice = replace(made.actor.split, degree=2 * gpus)
    never_more(actor(made, split=twice), ["update_actor", "update_critic", "values"])
    more = rollout(made, memory_fraction=0.7)
    assert estimate(more).kv_tokens >= base.kv_tokens


def test_the_fullest_pipeline_stage_counts() -> None:
    """DeepSeek-V3 over 16 stages of tensor 8, experts over 16: 61 layers make stages of 4, the first with the table."""
    model = shape("deepseek-ai/DeepSeek-V3")
    split = Megatron(world=256, tensor=8, pipeline=16, expert=16, expert_tensor=1)
    expert = 3 * 7168 * 2048
    experts = 58 * 256 * expert
    body = model.parameters - 2 * 129280 * 7168 - experts
    dense = -(-(-(-body * 4 // 61) + 129280 * 7168) // 8)
    sparse = 4 * 256 * expert // 16
    states = RoleLoad(model, split).states
    assert states.parameters == 2 * (dense + sparse)
    assert states.gradients == 4 * (dense + sparse)
    # dense weights are alike on 256 / (8 x 16) = 2 ranks, an expert's on 256 / (16 x 16) = 1
    assert states.optimizer == 12 * dense // 2 + 12 * sparse


def test_a_tied_table_has_a_copy_on_the_last_stage() -> None:
    model = shape("Qwen/Qwen2.5-3B")
    table = 151936 * 2048
    states = RoleLoad(model, Megatron(world=4, pipeline=4)).states
    assert states.parameters == 2 * ((model.parameters - table + 3) // 4 + table)


def test_an_optimizer_on_the_host_leaves_the_gpu_in_an_update_too() -> None:
    split = Megatron(world=8, tensor=8)
    here, away, half = (estimate(actor(job(), split=replace(split, host_optimizer=share))) for share in (0.0, 1.0, 0.5))
    moments = 12 * P // 8
    assert here.phases["update_actor"]["optimizer"] == moments
    assert "optimizer" not in away.phases["update_actor"]
    assert away.host_bytes == 8 * moments
    assert half.phases["update_actor"]["optimizer"] == pytest.approx(moments / 2, abs=1)
    assert half.host_bytes == pytest.approx(4 * moments, abs=8)


def test_fsdps_own_offload_keeps_all_states_on_the_host() -> None:
    plan = estimate(actor(job(), split=Fsdp(8, on_host=True)))
    assert not {"parameters", "gradients", "optimizer"} & plan.phases["update_actor"].keys()
    assert plan.phases["update_actor"]["gathered"] == estimate(job()).phases["update_actor"]["gathered"]
    assert plan.host_bytes == 16 * P


def test_a_trained_image_tower_keeps_its_patches_and_a_frozen_one_nothing() -> None:
    """Qwen2.5-VL: 32 blocks of 1280, four patches a token; half of 16384 tokens are images'."""
    model = shape("Qwen/Qwen2.5-VL-7B-Instruct")
    made = actor(job(model=model), image_share=0.5)
    assert estimate(made).phases["update_actor"]["images"] == 8192 * 4 * 32 * 1280 * 2
    frozen = estimate(actor(made, frozen_vision=True)).phases["update_actor"]
    assert "images" not in frozen
    trained = model.parameters - model.vision_params
    assert frozen["optimizer"] == trained  # 8 bytes over 8 GPUs
    assert frozen["parameters"] == -(-4 * model.parameters // 8)


def test_an_image_tower_stands_on_the_first_stage() -> None:
    model = shape("Qwen/Qwen3-VL-8B-Instruct")
    table = 151936 * 4096
    body = model.parameters - 2 * table - model.vision_params
    states = RoleLoad(model, Megatron(world=2, pipeline=2)).states
    assert states.parameters == 2 * (-(-body // 2) + table + model.vision_params)
