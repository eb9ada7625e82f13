"""Token budgets and gradient checkpointing that nobody set: by the memory model on one device, else as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paddock
from paddock.cli import main
from paddock.commands.keys_of import EVAL, GENERATE, SFT, Command
from paddock.config import tree
from paddock.errors import UserError
from paddock.estimate.job import job
from paddock.estimate.memory import estimate
from paddock.facts.machine import GIB, Machine
from paddock.loading.load import Loaded, load
from paddock.plan.plan import known_gpu

A, M, RO = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
TOKENS, CHECKPOINTING, PREFILL, SEQUENCES = (
    f"{A}.ppo_max_token_len_per_gpu",
    f"{M}.enable_gradient_checkpointing",
    f"{RO}.max_num_batched_tokens",
    f"{RO}.max_num_seqs",
)
OLD, REF = f"{RO}.log_prob_max_token_len_per_gpu", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
CRITIC, VALUES = "critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"
DEFAULTS = {TOKENS: 16384, CHECKPOINTING: True, PREFILL: 8192, OLD: 16384, REF: 16384, CRITIC: 32768}
KEYS = [
    "algorithm.adv_estimator=grpo", "data.train_files=gsm8k/train.parquet", "data.val_files=[]",
    "data.train_batch_size=128", f"{A}.ppo_mini_batch_size=128", f"{RO}.n=8",
    "data.max_prompt_length=256", "data.max_response_length=320",
]  # fmt: skip
SMALL, MIDDLE, LARGE = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"


def device(gib: int | None, count: int = 1) -> Machine:
    return Machine("cuda", count, None if gib is None else gib * GIB, 256 * GIB, 16, frozenset({"ray"}))


def loaded(model: str, gib: int | None, *more: str, **options: Any) -> Loaded:
    return load([*KEYS, f"{M}.path={model}", *more], options.pop("machine", device(gib)), **options)


def values(found: Loaded, *keys: str) -> list[Any]:
    return [tree.get(found.config, key) for key in keys]


LOGITS = 16 * 151936 * 1024  # a chunk's, in fp32, with its gradients
STATES = {  # 18 bytes a parameter: weights, gradients, masters, moments; and gradients on their way, c (root + layer)
    SMALL: 18 * 494_032_768 + 2 * (136_134_656 + 14_912_384),
    MIDDLE: 18 * 1_543_714_304 + 2 * (233_373_696 + 46_797_824),
    "Qwen/Qwen2.5-3B": 18 * 3_085_938_688 + 2 * (311_164_928 + 77_076_992),
}
WHOLE = {  # bytes a token: all layers of 8h + 2 (q + k) + 4f numbers, and the head's 6h
    SMALL: 2 * (24 * (8 * 896 + 2 * 1024 + 4 * 4864) + 6 * 896),
    MIDDLE: 2 * (28 * (8 * 1536 + 2 * 1792 + 4 * 8960) + 6 * 1536),
}


@pytest.mark.parametrize(
    ("model", "gib", "tokens"),
    [(SMALL, 139, 49152), (SMALL, 80, 47104), (SMALL, 24, 8192), (MIDDLE, 139, 34816), (MIDDLE, 80, 15360)],
)
def test_a_device_that_holds_all_layers_recomputes_none(model: str, gib: int, tokens: int) -> None:
    """The head is the fullest moment; a tenth of the memory stays free."""
    room = gib * GIB - gib * GIB // 10 - STATES[model] - LOGITS
    assert tokens == min(49152, room // WHOLE[model] // 1024 * 1024)
    found = loaded(model, gib)
    assert values(found, TOKENS, OLD, REF, CHECKPOINTING) == [tokens, tokens, tokens, False]
    assert found.origins[TOKENS] == found.origins[CHECKPOINTING] == f"from {gib} GiB of device memory"
    assert found.origins[OLD] == f"follows {TOKENS}"


def test_layers_are_recomputed_where_few_tokens_would_fit_without() -> None:
    """3B on 80 GiB: 36 inputs of 2048 in float32, one layer, and its gradients of 2 (f + h) numbers."""
    room = 80 * GIB - 80 * GIB // 10 - STATES["Qwen/Qwen2.5-3B"]
    layer = 8 * 2048 + 2 * (2048 + 256) + 4 * 11008
    assert room // (36 * 4 * 2048 + 2 * (layer + 2 * (11008 + 2048))) // 1024 * 1024 == 43008
    assert values(loaded("Qwen/Qwen2.5-3B", 80), TOKENS, CHECKPOINTING) == [43008, True]


@pytest.mark.parametrize(("model", "gib"), [(MIDDLE, 24), (LARGE, 139), (LARGE, 80), (LARGE, 24)])
def test_a_device_too_small_gets_one_row_and_the_plan_says_that_it_does_not_fit(model: str, gib: int) -> None:
    found = loaded(model, gib)
    assert values(found, TOKENS, CHECKPOINTING) == [1024, True]
    assert found.origins[TOKENS] == f"the update does not fit {gib} GiB of device memory"
    work = job(found.config, machine=device(gib))
    assert work is not None and "update_actor" in estimate(work).overfull


@pytest.mark.parametrize("gib", [16, 24, 48, 80, 139])
@pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-135M", SMALL, "Qwen/Qwen3-0.6B", MIDDLE, "Qwen/Qwen3-4B"])
@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo"])
def test_what_is_chosen_from_the_memory_fits_it(model: str, gib: int, estimator: str) -> None:
    found = loaded(model, gib, f"algorithm.adv_estimator={estimator}")
    work = job(found.config, machine=device(gib))
    assert work is not None
    plan = estimate(work)
    by = {TOKENS: "update_actor", CRITIC: "update_critic", PREFILL: "gen"}
    chosen = {by[key] for key, why in found.origins.items() if key in by and why.startswith("from")}
    assert not chosen & set(plan.overfull)
    assert all(value % 1024 == 0 for value in values(found, TOKENS, CRITIC, PREFILL))
    assert found.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu <= 49152


def test_a_critic_has_its_own_budget_beside_the_actor() -> None:
    found = loaded(SMALL, 80, "algorithm.adv_estimator=gae")
    actor, critic = found.config.actor_rollout_ref.actor, found.config.critic
    alone = loaded(SMALL, 80).config.actor_rollout_ref.actor
    assert actor.ppo_max_token_len_per_gpu < alone.ppo_max_token_len_per_gpu  # the critic's states rest on the device
    assert values(found, CRITIC, VALUES) == [critic.ppo_max_token_len_per_gpu] * 2
    assert not critic.model.enable_gradient_checkpointing
    assert values(loaded(SMALL, 80), CRITIC) == [32768]  # GRPO has none to choose for


def test_a_key_that_was_set_wins_and_the_others_are_chosen_beside_it() -> None:
    assert values(loaded(SMALL, 80, f"{TOKENS}=20480"), TOKENS, OLD, CHECKPOINTING) == [20480, 20480, False]
    assert values(loaded(SMALL, 80, f"{TOKENS}=65536"), TOKENS, CHECKPOINTING) == [65536, True]
    assert values(loaded(SMALL, 80, f"{CHECKPOINTING}=True"), TOKENS, CHECKPOINTING) == [49152, True]
    assert values(loaded(LARGE, 139, f"{CHECKPOINTING}=False"), TOKENS, CHECKPOINTING)[1] is False
    assert values(loaded(SMALL, 139, f"{PREFILL}=8192"), PREFILL, TOKENS) == [8192, 49152]
    assert values(loaded(SMALL, 139, f"{OLD}=20000"), TOKENS, OLD, REF) == [49152, 20000, 49152]


def test_a_number_of_rows_stays_and_decides_about_checkpointing() -> None:
    few, many = (loaded(SMALL, 24, f"{A}.ppo_micro_batch_size_per_gpu={rows}") for rows in (8, 64))
    assert values(few, TOKENS, CHECKPOINTING) == [16384, False]
    assert values(many, TOKENS, CHECKPOINTING) == [16384, True]


def test_offloaded_activations_are_those_of_checkpointing() -> None:
    assert values(loaded(SMALL, 139, f"{M}.enable_activation_offload=True"), TOKENS, CHECKPOINTING) == [49152, True]


def test_rows_longer_than_the_largest_budget_find_room_for_a_pair() -> None:
    found = loaded("HuggingFaceTB/SmolLM2-135M", 139, "data.max_response_length=40000")
    assert values(found, TOKENS) == [79 * 1024]  # twice 40,256
    with pytest.raises(UserError, match=rf"{TOKENS}=16384: one sequence may have"):
        loaded("HuggingFaceTB/SmolLM2-135M", None, "data.max_response_length=40000")


@pytest.mark.parametrize("command", [EVAL, GENERATE], ids=lambda command: command.name)
def test_a_command_that_only_answers_is_not_bound_by_how_a_step_is_cut(command: Command) -> None:
    keys = [f"{M}.path={SMALL}", "data=/far/rows.jsonl", "data.max_response_length=40000", "trainer.n_gpus_per_node=3"]
    config = command.load([*keys, "data.train_batch_size=100"], here=False).config
    assert config.data.max_response_length == 40000
    with pytest.raises(UserError, match="one sequence may have"):
        SFT.load([*keys, "data.train_batch_size=3"], here=False)


@pytest.mark.parametrize(
    ("machine", "more"),
    [
        (device(None), []),
        (Machine("cpu", 0, None, 64 * GIB, 8, frozenset()), ["trainer.n_gpus_per_node=1"]),
        (device(139, count=8), []),
        (device(139), [f"{RO}.name=vllm", f"{RO}.tensor_model_parallel_size=1"]),
        (device(139), [f"{M}.path=nobody/knows-this-model"]),
    ],
    ids=["memory not read", "no device here", "several devices", "an engine with weights of its own", "no shape"],
)
def test_defaults_stay_where_the_memory_model_does_not_decide(machine: Machine, more: list[str]) -> None:
    found = loaded(SMALL, None, *more, machine=machine)
    assert dict(zip(DEFAULTS, values(found, *DEFAULTS), strict=True)) == DEFAULTS
    assert not any("device memory" in text for text in (*found.origins.values(), *found.warnings))


@pytest.mark.parametrize("command", [EVAL, GENERATE], ids=lambda command: command.name)
def test_nothing_is_decided_for_updates_where_weights_are_only_read(command: Command) -> None:
    found = command.load([f"model={LARGE}", "data=rows.jsonl", "trainer.n_gpus_per_node=1"], here=False, gpu="h200")
    assert values(found, TOKENS, CHECKPOINTING, PREFILL) == [16384, True, 8192]
    assert not any("device memory" in text for text in (*found.origins.values(), *found.warnings))


@pytest.mark.parametrize("command", [EVAL, GENERATE], ids=lambda command: command.name)
def test_a_command_that_only_answers_holds_weights_and_as_many_sequences_as_fit(command: Command) -> None:
    keys = ["model=Qwen/Qwen3-8B", "data=rows.jsonl", "trainer.n_gpus_per_node=1", "data.max_prompt_length=256"]
    found = command.load([*keys, "data.max_response_length=1024"], here=False, gpu="4090")
    sequence, prefill = 1280 * 36 * 8 * 128 * 2 * 2, 8192 * 2 * (3 * 12288 + 4 * 4096)
    room = 24 * GIB - 24 * GIB // 10 - 2 * 8_190_735_360 - prefill
    assert values(found, SEQUENCES) == [room // sequence // 8 * 8]
    assert any(SEQUENCES in text and "24 GiB" in text for text in found.warnings)


def test_a_cpu_keeps_its_budgets_also_where_a_gpu_is_named() -> None:
    cpu = Machine("cpu", 0, None, 64 * GIB, 8, frozenset())
    plain, named = (loaded(SMALL, None, "trainer.device=cpu", machine=cpu, gpu=gpu) for gpu in (None, "h200"))
    assert plain.as_dict() == named.as_dict() and plain.origins == named.origins
    assert values(plain, TOKENS, CHECKPOINTING, PREFILL) == [1280, True, 8192]


def test_a_plan_for_a_named_device_has_the_numbers_of_a_run_on_it() -> None:
    elsewhere = Machine("cpu", 0, None, 64 * GIB, 8, frozenset())
    planned = loaded(MIDDLE, None, "trainer.n_gpus_per_node=1", machine=elsewhere, gpu="h200")
    there = loaded(MIDDLE, 141, "trainer.n_gpus_per_node=1")
    assert values(planned, *DEFAULTS) == values(there, *DEFAULTS)
    assert planned.origins[TOKENS] == there.origins[TOKENS] == "from 141 GiB of device memory"


@pytest.mark.parametrize("keys", [(), (f"{M}.path={SMALL}",)])
def test_a_named_device_is_planned_whatever_is_unset(keys: tuple[str, ...]) -> None:
    elsewhere = Machine("cpu", 0, None, 64 * GIB, 8, frozenset())
    trainer = load(keys, machine=elsewhere, here=False, gpu="4090").config.trainer
    assert (trainer.device, trainer.n_gpus_per_node) == ("cuda", 1)
    eight = load(keys, machine=Machine("cuda", 8, 80 * GIB, 64 * GIB, 8, frozenset()), here=False, gpu="4090").config
    assert eight.trainer.n_gpus_per_node == 8


@pytest.mark.parametrize("text", ["4090", "rtx 4090", "RTX4090", "NVIDIA GeForce RTX 4090"])
def test_a_device_is_named_as_people_write_it(text: str) -> None:
    assert known_gpu("--gpu", text) == "4090"
    assert (known_gpu("--gpu", "A100-80GB"), known_gpu("--gpu", "Ascend 910B")) == ("a100-80", "910b")


def test_the_same_device_gives_the_same_split_and_another_one_its_own() -> None:
    first, again, other = (loaded(MIDDLE, gib) for gib in (80, 80, 139))
    assert first.as_dict() == again.as_dict()
    assert values(other, TOKENS) != values(first, TOKENS)


def test_train_says_what_was_chosen_and_so_does_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"chosen: {TOKENS}=49152 (from 139 GiB of device memory)"
    assert line in loaded(SMALL, 139).warnings
    arguments = [*KEYS, f"{M}.path={SMALL}", "trainer.n_gpus_per_node=1", "--rows", "7473", "--gpu", "h200"]
    assert main(["plan", *arguments]) == 0
    said = capsys.readouterr().out
    for setting in (f"{TOKENS}=49152", f"{CHECKPOINTING}=False", f"{PREFILL}=32768"):
        assert any(setting in row and row.endswith("from 141 GiB of device memory") for row in said.splitlines())


def test_sequences_at_a_time_are_as_many_as_the_cache_has_room_for() -> None:
    """Qwen3-8B with adapters in 24 GiB: 16.4 GB of weights leave room for a few sequences of 1,280 tokens."""
    keys = [
        f"{M}.lora_rank=32",
        "data.train_batch_size=8",
        f"{A}.ppo_mini_batch_size=8",
        "data.max_response_length=1024",
    ]
    found = loaded("Qwen/Qwen3-8B", 24, *keys)
    (count,) = values(found, SEQUENCES)
    assert count % 8 == 0 and found.origins[SEQUENCES] == "from 24 GiB of device memory"

    def room(sequences: int) -> bool:
        changed = job(loaded("Qwen/Qwen3-8B", 24, *keys, f"{SEQUENCES}={sequences}", f"{PREFILL}=8192").config)
        assert changed is not None
        changed = replace(changed, hardware=replace(changed.hardware, memory_bytes=24 * GIB))
        return "gen" not in estimate(changed).overfull

    assert room(count) and not room(count + 8)
    validated = loaded("Qwen/Qwen3-8B", 24, *keys, "data.val_files=gsm8k/test.parquet")
    assert 0 < values(validated, SEQUENCES)[0] < count, "answers to prompts of their own share nothing"
    few = loaded("Qwen/Qwen3-8B", 24, *keys, "data.val_files=gsm8k/test.parquet", "data.val_batch_size=8")
    assert values(few, SEQUENCES) == [count], "a validation of fewer sequences than a step decides nothing"
    assert values(loaded("Qwen/Qwen3-8B", 24, *keys, f"{SEQUENCES}=64"), SEQUENCES) == [64]
    assert values(loaded("Qwen/Qwen3-8B", 139, *keys), SEQUENCES) == [1024]
    assert values(loaded("Qwen/Qwen3-8B", 16, *keys), SEQUENCES) == [1024], "nothing fits, as the plan says"


def test_sequences_at_a_time_are_chosen_on_several_devices_too() -> None:
    """Each of them holds the KV cache of its own rows beside its shard of the states and the gathered weights."""
    keys = [f"{RO}.name=embedded", "data.max_response_length=4096", "trainer.n_gpus_per_node=4"]
    found = loaded(LARGE, 80, *keys, machine=device(80, count=4))
    (count,) = values(found, SEQUENCES)
    work = job(found.config, machine=device(80, count=4))
    assert work is not None and "gen" not in estimate(work).overfull
    more = replace(work, rollout=replace(work.rollout, max_sequences=count + 8))
    assert count < work.rollout.rows == 256 and "gen" in estimate(more).overfull
    assert values(found, TOKENS, PREFILL) == [DEFAULTS[TOKENS], DEFAULTS[PREFILL]]


def test_a_row_of_an_agent_loop_has_room_for_a_later_prompt() -> None:
    plain, loops = (job(loaded(SMALL, 139, *keys).config, machine=device(139))
                    for keys in ((), (f"{RO}.agent.default_agent_loop=mine.Loop",)))  # fmt: skip
    assert plain is not None and loops is not None
    prompt, response = loops.rollout.shared_tokens, plain.rollout.row_tokens - plain.rollout.shared_tokens
    assert prompt > 0 and loops.rollout.row_tokens == 2 * prompt + response


def test_prefill_by_hand() -> None:
    """A forward's live tensors are c (3f + 4h) bytes a token, beside the cache and what rests."""
    found = loaded(SMALL, 139)
    assert values(found, PREFILL) == [32768]
    work = job(found.config, machine=device(139))
    assert work is not None
    few = replace(work, rollout=replace(work.rollout, rows=8))  # else the logits of a decode step are more
    assert work.rollout.prefill_tokens == 32768 == 128 * 256
    assert estimate(few).phases["gen"]["activations"] == 32768 * 2 * (3 * 4864 + 4 * 896)
    assert estimate(work).phases["gen"]["logits"] == 8 * 151936 * 1024


def test_a_programs_plan_for_a_named_device_chooses_by_its_memory(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    keys = {"trainer.device": "cuda", "trainer.n_gpus_per_node": 1}
    run = paddock.Run(SMALL, rows, "exact_match", n=4, batch=8, folder=tmp_path, config=keys)
    found = [run.plan(gpu).loaded.origins.get(TOKENS) for gpu in ("H200", "4090")]
    assert found == [f"from {gib} GiB of device memory" for gib in (141, 24)]
