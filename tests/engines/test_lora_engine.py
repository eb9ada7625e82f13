"""Engines under LoRA: what is trained, what stays, and that rollouts, reference and checkpoints are those of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import EOS, FAMILIES, one_turn_each, tiny_batch, tiny_model
from torch import Tensor

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.engines.rollout.base import Completion, Limits, Prompt, Request, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.embedded.prepacked import pays
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.base import LossFn, Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.open import actor_engine, critic_engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.adapters import MERGED, WEIGHTS_FILE, Lora, adapters_on, attach, is_adapter
from paddock.models.forward import FUSED
from paddock.models.gathered import GatheredModel
from paddock.models.load import model_folder
from paddock.models.value_head import HEAD_FILE, ValueModel
from paddock.rollouts.batch import with_responses

peft = pytest.importorskip("peft")
LORA = Lora(rank=4, alpha=32)
WANT = {"actor": frozenset({"log_probs"}), "critic": frozenset({"values"})}
PROMPTS = [Prompt([40 + 3 * i + j for j in range(length)], [2 * i, 2 * i + 1]) for i, length in enumerate((3, 9, 5))]


def settings(**changes: Any) -> Settings:
    return Settings(**{"optim": OptimConfig(lr=0.05), "budget": Budget(64), "forward_budget": Budget(64)} | changes)


def model_of(role: str, family: str = "qwen2", dtype: torch.dtype = torch.float32, lora: Lora | None = LORA) -> Any:
    model = tiny_model(family).to(dtype)
    model.set_attn_implementation("paddock")
    if role == "actor":
        return attach(model, lora)
    return ValueModel(attach(model.base_model, lora))


def engine_of(role: str = "actor", family: str = "qwen2", **changes: Any) -> Engine:
    dtype = changes.get("compute", torch.float32)
    return Engine(SingleBackend(model_of(role, family, dtype), settings(**changes)))


def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
    values = outputs.values if outputs.log_probs is None else outputs.log_probs
    assert values is not None
    generator = torch.Generator().manual_seed(0)
    signs = torch.randn(values.shape, generator=generator)
    return (values * signs * micro.need("mask")).sum() / 20 + (outputs.values is not None) * values.sum() / 20, {}


def trained(engine: Engine, role: str = "actor", steps: int = 2, first: int = 0) -> Engine:
    """Two steps change all of an adapter: in the first its second matrix, which was zero, in the second the other."""
    chosen: LossFn = loss
    for step in range(first, first + steps):
        engine.train_step(engine.micro_batches(tiny_batch(seed=step)), chosen, WANT[role])
    return engine


def log_probs(engine: Engine, batch: Batch) -> Tensor:
    found = engine.forward(batch, WANT["actor"]).log_probs
    assert found is not None
    return found


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_only_adapters_and_a_critics_head_change(role, compute):
    engine = engine_of(role, compute=compute)
    before = {name: tensor.clone() for name, tensor in engine.backend.tensors()}
    trained(engine, role, steps=3 if role == "critic" else 2)  # the critic's head is zero too
    changed = {name for name, tensor in engine.backend.tensors() if not torch.equal(tensor, before[name])}
    head = {"value_head.weight", "value_head.bias"} if role == "critic" else set()
    assert changed == {name for name in before if is_adapter(name)} | head


def test_the_optimizer_keeps_adapters_in_float32_and_nothing_of_the_rest():
    engine = trained(engine_of(compute=torch.bfloat16))
    masters = engine.updater.named_masters()
    assert masters and all(is_adapter(name) and master.dtype == torch.float32 for name, master in masters.items())
    assert {tensor.dtype for _, tensor in engine.backend.tensors()} == {torch.bfloat16}
    assert len(engine.updater.optimizer.state) == len(masters)
    assert all(p.grad is None for name, p in engine.model.named_parameters() if not is_adapter(name))


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
def test_the_reference_is_the_model_before_training_bit_for_bit_and_no_second_one(compute, packed):
    actor = trained(engine_of(compute=compute, packed=packed))
    reference = actor.without_adapters(Budget(64))
    alone = Engine(SingleBackend(model_of("actor", dtype=compute, lora=None), settings(optim=None, packed=packed)))
    batch = tiny_batch(seed=9)
    assert torch.equal(log_probs(reference, batch), log_probs(alone, batch))
    assert (log_probs(actor, batch) - log_probs(reference, batch)).abs().max() > 0.05
    assert reference.model is actor.model and reference.updater is None and actor.updater is not None
    one_row_a_time = actor.without_adapters(Budget(64, rows=1))
    torch.testing.assert_close(log_probs(one_row_a_time, batch), log_probs(reference, batch), atol=0.05, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [EmbeddedEngine, HFEngine])
def test_rollouts_run_the_adapter(family, kind):
    """Log-probs of the rollout are the trainer's within 1e-5, and not those of the frozen model."""
    engine = trained(engine_of(family=family))
    sampling = Sampling(max_tokens=20, stop_tokens=frozenset({EOS}), seed=3, step=1)
    found = kind(engine.rollout_model, max_num_seqs=4).generate(PROMPTS, sampling)
    batch = answered(found)
    mask = batch.need("mask") == 1
    gap = (log_probs(engine, batch) - batch.need("rollout_log_probs"))[mask].abs().max()
    base = log_probs(engine.without_adapters(Budget(64)), batch)
    assert gap < 1e-5 < 0.1 < (base - batch.need("rollout_log_probs"))[mask].abs().max()


def merged_model(engine: Engine, family: str, dtype: torch.dtype) -> Any:
    model = tiny_model(family).to(dtype)
    model.set_attn_implementation("paddock")
    model.load_state_dict(dict(engine.adapters.merged(engine.backend.tensors())), strict=False)
    return SingleBackend(model, settings(optim=None, compute=dtype)).model


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_merged_rollouts_are_those_of_the_merged_model_and_leave_the_weights_as_they_were(family, compute):
    engine = trained(engine_of(family=family, compute=compute))
    merged, batch = merged_model(engine, family, compute), tiny_batch(seed=9)
    before, own = {name: tensor.clone() for name, tensor in engine.backend.tensors()}, log_probs(engine, batch)
    rollout, wanted = (
        EmbeddedEngine(engine.rollout_model, max_num_seqs=4, merge=True),
        EmbeddedEngine(merged, max_num_seqs=4),
    )
    for step in (1, 2):
        sampling = Sampling(max_tokens=20, stop_tokens=frozenset({EOS}), seed=3, step=step)
        assert rollout.generate(PROMPTS, sampling) == wanted.generate(PROMPTS, sampling)
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.backend.tensors())
    assert torch.equal(log_probs(engine, batch), own)
    greedy = Sampling(max_tokens=6, stop_tokens=frozenset({EOS}), seed=3, step=1, temperature=0.0)
    assert talk(rollout, greedy) == talk(wanted, greedy)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.backend.tensors())
    with engine.adapters.off():
        base = EmbeddedEngine(engine.model, max_num_seqs=4).generate(PROMPTS, greedy)
        assert rollout.generate(PROMPTS, greedy) == base, "adapters that are off are not merged"


def talk(engine: EmbeddedEngine, sampling: Sampling) -> list[list[int]]:
    """A conversation of two turns, whose first response is parked in between."""
    first = Request(list(range(40, 49)), [0], [0], sampling.step, sampling.max_tokens, keep=True)
    engine.resume(sampling, Limits([(64, 1)]))
    engine.submit([first])
    said = engine.advance()[0].tokens
    second = Request([*first.tokens, *said, 50, 51], [0], [0], sampling.step, sampling.max_tokens)
    engine.submit([second])
    found = [said, engine.advance()[0].tokens]
    engine.pause()
    return found


def test_weights_that_were_gathered_are_merged_too():
    engine = trained(engine_of(compute=torch.bfloat16))
    before = {name: tensor.clone() for name, tensor in engine.backend.tensors()}
    gathered = GatheredModel.of(engine.model, torch.device("cpu"))
    gathered.model.set_attn_implementation("paddock")
    gathered.fill(engine.backend.tensors())
    sampling = Sampling(max_tokens=20, stop_tokens=frozenset({EOS}), seed=3, step=1)
    found = EmbeddedEngine(gathered.model, max_num_seqs=4, merge=True).generate(PROMPTS, sampling)
    model = merged_model(engine, "qwen2", torch.bfloat16)
    del vars(model.base_model)[FUSED]  # what is gathered runs by its modules
    assert found == EmbeddedEngine(model, max_num_seqs=4).generate(PROMPTS, sampling)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.backend.tensors())


def test_a_merged_rollout_that_fails_leaves_the_weights_as_they_were(monkeypatch):
    engine = trained(engine_of(compute=torch.bfloat16))
    before = {name: tensor.clone() for name, tensor in engine.backend.tensors()}
    rollout = EmbeddedEngine(engine.rollout_model, max_num_seqs=4, merge=True)
    sampling = Sampling(max_tokens=20, stop_tokens=frozenset({EOS}), seed=3, step=1)

    def fail(*_: Any, **__: Any) -> None:
        now = dict(engine.backend.tensors())
        assert any(not torch.equal(tensor, now[name]) for name, tensor in before.items()), "nothing is merged"
        raise RuntimeError("lost")

    for place in ("submit", "decode", "prefill"):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
            patch.setattr(rollout, place, fail)
            rollout.generate(PROMPTS, sampling)
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.backend.tensors()), place
        assert adapters_on(engine.model)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="lost"):
        patch.setattr("paddock.engines.rollout.embedded.engine.borrowed", fail)
        rollout.generate(PROMPTS, sampling)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.backend.tensors())
    assert len(rollout.generate(PROMPTS, sampling)) == 6


def answered(found: list[Completion]) -> Batch:
    rows = [(row, group, prompt.tokens) for group, prompt in enumerate(PROMPTS) for row in prompt.rows]
    width = max(len(tokens) for *_, tokens in rows)
    batch = Batch(
        row=torch.tensor([row for row, *_ in rows]),
        group=torch.tensor([group for _, group, _ in rows]),
        prompts=torch.tensor([[0] * (width - len(tokens)) + tokens for *_, tokens in rows]),
        prompt_mask=torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for *_, tokens in rows]),
    )
    return with_responses(batch, one_turn_each(found, PROMPTS, range(len(PROMPTS)), version=0), 0)


def test_weights_put_in_order_for_decoding_keep_their_adapter():
    """bf16 on a CPU: matrices large enough to be prepacked are those beside which adapters stand."""
    shape = {"hidden_size": 128, "intermediate_size": 256}
    model = tiny_model("qwen3", **shape).to(torch.bfloat16)
    model.set_attn_implementation("paddock")
    engine = Engine(SingleBackend(attach(model, LORA), settings(compute=torch.bfloat16)))
    linear = [module for module in engine.model.modules() if type(module) is torch.nn.Linear]
    if not any(pays(module.weight.data) for module in linear):
        pytest.skip("this CPU multiplies bf16 without putting weights in order")
    trained(engine, steps=4)
    sampling = Sampling(max_tokens=20, stop_tokens=frozenset(), seed=3, step=1, ignore_eos=True)
    batch = answered(EmbeddedEngine(engine.model).generate(PROMPTS, sampling))
    gap = (log_probs(engine, batch) - batch.need("rollout_log_probs")).abs().mean()
    base = log_probs(engine.without_adapters(Budget(64)), batch)
    assert gap < 0.05 < 0.5 < (base - batch.need("rollout_log_probs")).abs().mean()


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_a_checkpoint_is_the_adapter_alone_and_training_goes_on_bit_for_bit(role, compute, tmp_path):
    whole = trained(engine_of(role, compute=compute), role, steps=3)
    half = trained(engine_of(role, compute=compute), role, steps=2)
    half.save(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    head = {HEAD_FILE} if role == "critic" else set()
    assert names == {"adapter_config.json", WEIGHTS_FILE, "optimizer.pt"} | head
    stored = load_file(tmp_path / WEIGHTS_FILE)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert all(name.startswith("base_model.model.") for name in stored)
    again = engine_of(role, compute=compute)
    again.load(tmp_path)
    trained(again, role, steps=1, first=2)
    for (name, one), (_, other) in zip(whole.backend.tensors(), again.backend.tensors(), strict=True):
        assert torch.equal(one, other), name


def test_peft_loads_a_checkpoint(tmp_path):
    engine = trained(engine_of())
    engine.save(tmp_path)
    model = peft.PeftModel.from_pretrained(tiny_model(), tmp_path)
    tokens = torch.arange(4, 24)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, engine.model(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_with_hf_model_the_merged_model_stands_beside_the_adapter(role, tmp_path):
    engine = trained(engine_of(role, saves_merged=True), role)
    engine.save(tmp_path)
    plain = Engine(SingleBackend(model_of(role, lora=None), settings(optim=None)))
    backbone = type(plain.backend.backbone).from_pretrained(tmp_path / MERGED)
    backbone.set_attn_implementation("paddock")
    model = backbone if role == "actor" else ValueModel(backbone)
    if role == "critic":
        model.load_head(tmp_path / MERGED)
    batch = tiny_batch(seed=9)
    name = next(iter(WANT[role]))
    found = getattr(Engine(SingleBackend(model, settings(optim=None))).forward(batch, WANT[role]), name)
    torch.testing.assert_close(found, getattr(engine.forward(batch, WANT[role]), name), atol=1e-4, rtol=0)


@pytest.mark.parametrize("lora", [Lora(rank=8), Lora(rank=4, targets=["q_proj"])])
def test_a_checkpoint_of_other_adapters_is_refused(lora, tmp_path):
    trained(engine_of()).save(tmp_path)
    with pytest.raises(UserError, match="holds another model"):
        Engine(SingleBackend(model_of("actor", lora=lora), settings())).load(tmp_path)


def test_a_head_that_is_frozen_costs_no_gradient_and_changes_no_other():
    """The gradient of adapters is the same whether or not the head's is computed."""
    found = []
    for frozen in (True, False):
        model = model_of("actor", "llama")
        model.lm_head.weight.requires_grad_(not frozen)
        engine = Engine(SingleBackend(model, settings(optim=OptimConfig(lr=0.0))))
        engine.updater.step = lambda: None
        engine.updater.clip = lambda e=engine: (
            found.append({name: master.grad.clone() for name, master in e.updater.named_masters().items()})
            or torch.zeros(())
        )
        trained(engine, steps=1)
    assert "lm_head.weight" in found[1] and "lm_head.weight" not in found[0]
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


def test_a_folder_of_an_adapter_is_no_model(tmp_path):
    trained(engine_of()).save(tmp_path / "adapter")
    with pytest.raises(UserError, match="holds a LoRA adapter, not a model") as error:
        model_folder(str(tmp_path / "adapter"))
    assert "actor_rollout_ref.model.lora_adapter_path=" in str(error.value)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_adapters_have_float32_masters_even_where_weights_are_kept_in_bf16(role, tmp_path):
    keys = ["actor_rollout_ref.model.lora_rank=4", "critic.model.lora_rank=4", "algorithm.adv_estimator=gae",
            "trainer.device=cpu"]  # fmt: skip
    for section in ("actor_rollout_ref.actor", "critic.model"):
        keys += [f"{section}.fsdp_config.model_dtype=bf16", f"{section}.fsdp_config.dtype=bfloat16"]
    config = load(keys).config
    engine = actor_engine(config) if role == "actor" else critic_engine(config)
    assert {master.dtype for master in engine.updater.masters} == {torch.float32}
    compute = engine.settings.compute
    assert {p.dtype for name, p in engine.model.named_parameters() if not name.startswith("value_head")} == {compute}
