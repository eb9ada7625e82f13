"""The engine for one device: the same gradient however the rows are cut, and exact after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny, tiny_batch, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from paddock.algorithms.losses import LossInputs, policy_loss_terms, value_loss
from paddock.config.engine import OptimConfig
from paddock.config.roles import ActorConfig, CriticConfig
from paddock.config.schema import Config
from paddock.core.batch import Batch
from paddock.core.masked import Denominators
from paddock.engines.train.base import LossFn, Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.open import actor_engine, critic_engine, reference_engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.loading.rules import Scope, require
from paddock.models.fused.joined import side_by_side
from paddock.models.value_head import ValueModel

ALL = frozenset({"log_probs", "entropy"})
LOG_PROBS = frozenset({"log_probs"})
VALUES = frozenset({"values"})


def settings(**changes: Any) -> Settings:
    defaults: dict[str, Any] = {"optim": OptimConfig(lr=0.01), "budget": Budget(64), "forward_budget": Budget(64)}
    return Settings(**defaults | changes)


def actor(family: str = "qwen2", **changes: Any) -> Engine:
    model = tiny_model(family)
    model.set_attn_implementation("paddock")
    return Engine(SingleBackend(model, settings(**changes)))


def critic(**changes: Any) -> Engine:
    model = tiny_model().base_model
    model.set_attn_implementation("paddock")
    value_model = ValueModel(model)
    torch.manual_seed(0)
    torch.nn.init.normal_(value_model.value_head.weight)
    return Engine(SingleBackend(value_model, settings(**changes)))


def rollouts(**options: Any) -> Batch:
    batch = tiny_batch(tools=True, **options)
    generator = torch.Generator().manual_seed(1)

    def draw() -> Tensor:
        return torch.randn(batch.mask.shape, generator=generator) * batch.mask

    return batch.with_(old_log_probs=draw() - 5, advantages=draw(), values=draw(), returns=draw())


def policy_loss(batch: Batch) -> LossFn:
    config, denominators = ActorConfig(entropy_coeff=0.1), Denominators.count(batch.mask)

    def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = LossInputs(outputs.log_probs, micro.old_log_probs, micro.advantages, micro.mask)
        return policy_loss_terms(inputs, config, denominators, outputs.entropy)

    return loss


def critic_loss(batch: Batch) -> LossFn:
    config, denominators = CriticConfig(loss_agg_mode="token-mean"), Denominators.count(batch.mask)

    def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        return value_loss(outputs.values, micro.values, micro.returns, micro.mask, config, denominators)

    return loss


def gradient(engine: Engine, micros: list[Batch], loss: LossFn, want: frozenset[str]) -> dict[str, Tensor]:
    """Of one step, caught before the optimizer sees it."""
    caught: dict[str, Tensor] = {}
    clip = engine.updater.clip

    def catch() -> Tensor:
        caught.update({name: master.grad.clone() for name, master in engine.updater.named_masters().items()})
        return clip()

    engine.updater.clip = catch
    engine.train_step(micros, loss, want)
    engine.updater.clip = clip
    return caught


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert got.keys() == want.keys()
    scale = max(tensor.abs().max().item() for tensor in want.values())
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], atol=tolerance * scale, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


SPLITS = [[6], [1] * 6, [2, 4], [4, 1, 1]]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_micro_batches_do_not_change_the_gradient(split, role):
    batch = rollouts()
    make, loss, want = (actor, policy_loss, ALL) if role == "actor" else (critic, critic_loss, VALUES)
    whole = gradient(make(), [batch], loss(batch), want)
    parts = [batch.rows(index) for index in torch.arange(6).split(split)]
    assert_near(gradient(make(), parts, loss(batch), want), whole)


def test_the_order_of_rows_does_not_change_the_gradient():
    batch = rollouts()
    shuffled = batch.rows(torch.tensor([3, 0, 5, 1, 4, 2]))
    want = gradient(actor(), [batch], policy_loss(batch), ALL)
    assert_near(gradient(actor(), [shuffled], policy_loss(shuffled), ALL), want)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_packed_and_padded_rows_give_one_loss_and_one_gradient(family):
    batch = rollouts()
    packed, padded = actor(family), actor(family, packed=False)
    for name in ("log_probs", "entropy", "sum_pi_squared"):
        got, want = (getattr(engine.forward(batch, frozenset({name})), name) for engine in (packed, padded))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    got, want = (
        gradient(engine, [batch], policy_loss(batch), ALL) for engine in (actor(family), actor(family, packed=False))
    )
    assert_near(got, want, 1e-5)
    got, want = (engine.train_step([batch], policy_loss(batch), ALL) for engine in (packed, padded))
    assert got == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_checkpointing_does_not_change_the_gradient(role):
    batch = rollouts()
    make, loss, want = (actor, policy_loss, ALL) if role == "actor" else (critic, critic_loss, VALUES)
    plain = gradient(make(), [batch], loss(batch), want)
    again = gradient(make(checkpointing=True), [batch], loss(batch), want)
    assert all(torch.equal(again[name], plain[name]) for name in plain)


def test_forward_is_what_the_model_itself_says():
    batch, engine = rollouts(), actor("llama", temperature=0.7)
    outputs = engine.forward(batch, frozenset({"log_probs", "entropy", "sum_pi_squared"}))
    for i in range(len(batch)):
        length, start = int(batch.lengths[i]), int(batch.prompt_mask[i].sum())
        tokens = torch.cat([batch.prompts[i, -start:], batch.responses[i, :length]])
        with torch.no_grad():
            log_pi = torch.log_softmax(engine.model(tokens[None]).logits[0, start - 1 : -1] / 0.7, -1)
        valid = batch.mask[i, :length] != 0
        chosen = log_pi.gather(-1, batch.responses[i, :length, None])[:, 0]
        expected = {
            "log_probs": chosen,
            "entropy": -(log_pi.exp() * log_pi).sum(-1),
            "sum_pi_squared": log_pi.exp().square().sum(-1),
        }
        for name, want in expected.items():
            row = getattr(outputs, name)[i]
            torch.testing.assert_close(row[:length][valid], want[valid], atol=1e-5, rtol=1e-5)
            assert (row[batch.mask[i] == 0] == 0).all()


def test_forward_does_not_depend_on_its_budget():
    batch, want = rollouts(), frozenset({"log_probs"})
    whole = actor(forward_budget=Budget(10_000)).forward(batch, want).log_probs
    for budget in (Budget(17), Budget(1, rows=2)):
        torch.testing.assert_close(
            actor(forward_budget=budget).forward(batch, want).log_probs, whole, atol=1e-5, rtol=1e-5
        )


def test_micro_batches_keep_to_their_budget():
    batch = rollouts(rows=20)
    for micros in (actor(budget=Budget(40)).micro_batches(batch), actor(budget=Budget(1, rows=3)).micro_batches(batch)):
        assert sorted(torch.cat([micro.row for micro in micros]).tolist()) == list(range(20))
    by_tokens = actor(budget=Budget(40)).micro_batches(batch)
    assert all(int(micro.prompt_mask.sum() + micro.lengths.sum()) <= 40 for micro in by_tokens)
    with pytest.raises(UserError, match="key=3: one sequence has"):
        actor(budget=Budget(3, key="key")).micro_batches(batch)


def test_a_step_reports_its_norm_and_rate_and_changes_the_weights():
    batch, engine = rollouts(), actor(optim=OptimConfig(lr=0.5, clip_grad=1e-3, lr_warmup_steps=2, lr_warmup_init=0.25))
    before = weights(engine)
    found = []
    for _ in range(3):
        found += [engine.train_step([batch], policy_loss(batch), ALL) for _ in range(2)]
        engine.advance()
    assert [metrics["lr"] for metrics in found] == [0.25, 0.25, 0.375, 0.375, 0.5, 0.5]
    assert found[0]["grad_norm"] > 1e-3 and found[0]["skipped"] == 0.0
    assert {"actor/pg_loss", "actor/entropy"} <= found[0].keys()
    assert any(not torch.equal(before[name], tensor) for name, tensor in engine.weights())


def test_clipping_bounds_the_change():
    batch = rollouts()
    engine = actor(optim=OptimConfig(optimizer="SGD", lr=1.0, clip_grad=1e-3, weight_decay=0.0))
    before = weights(engine)
    engine.train_step([batch], policy_loss(batch), ALL)
    change = torch.cat([(tensor - before[name]).flatten() for name, tensor in engine.weights()]).norm()
    assert change.item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_void(broken):
    batch, engine = rollouts(), actor()
    engine.train_step([batch], policy_loss(batch), ALL)
    before = weights(engine)

    def bad(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = policy_loss(batch)(micro, outputs)
        return (loss + torch.inf if broken == "loss" else loss * 1e38 * 1e38), metrics

    metrics = engine.train_step([batch], bad, ALL)
    assert metrics["skipped"] == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights())
    assert {float(moments["step"]) for moments in engine.updater.optimizer.state.values()} == {1.0}
    assert engine.train_step([batch], policy_loss(batch), ALL)["skipped"] == 0.0


def test_a_micro_batch_in_which_nothing_counts_adds_nothing():
    batch = rollouts()
    mask = batch.mask.clone()
    mask[4:] = 0
    batch = batch.with_(mask=mask)
    whole = gradient(actor(), [batch.rows(slice(0, 4))], policy_loss(batch), ALL)
    with_empty = gradient(actor(), [batch.rows(slice(0, 4)), batch.rows(slice(4, 6))], policy_loss(batch), ALL)
    assert_near(with_empty, whole)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_restart_leaves_no_trace(role, compute, tmp_path):
    batch = rollouts()
    make, loss, want = (actor, policy_loss, ALL) if role == "actor" else (critic, critic_loss, VALUES)
    optim = OptimConfig(lr=0.01, lr_scheduler_type="cosine", lr_warmup_steps=1)
    engine = make(compute=compute, optim=optim, total_steps=9)
    for _ in range(2):
        engine.train_step([batch], loss(batch), want)
        engine.advance()
    engine.save(tmp_path)
    last = engine.train_step([batch], loss(batch), want)
    again = make(compute=compute, optim=optim, total_steps=9)
    again.load(tmp_path)
    assert again.train_step([batch], loss(batch), want) == last
    assert all(torch.equal(*pair) for pair in zip(weights(again).values(), weights(engine).values(), strict=True))


def test_a_checkpoint_is_a_model_that_transformers_loads(tmp_path):
    engine = actor(compute=torch.bfloat16)
    engine.train_step([rollouts()], policy_loss(rollouts()), ALL)
    engine.save(tmp_path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    assert all(torch.equal(loaded[name], master) for name, master in engine.updater.named_masters().items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    actor().save(tmp_path)
    with pytest.raises(UserError, match=r"holds another model: .*k_norm"):
        actor("qwen3", optim=None).load(tmp_path)
    wider = tiny_model(hidden_size=64)
    with pytest.raises(UserError, match="holds another model"):
        Engine(SingleBackend(wider, settings(optim=None))).load(tmp_path)


def test_masters_stay_wide_while_the_model_computes_narrow():
    engine, batch = actor(compute=torch.bfloat16, optim=OptimConfig(lr=1e-7)), rollouts()
    engine.train_step([batch], policy_loss(batch), ALL)
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.bfloat16}
    start = dict(tiny_model().named_parameters())
    for name, master in engine.updater.named_masters().items():
        assert master.dtype == torch.float32
        assert (master != start[name]).any()  # a step that bf16 could not have taken
        assert torch.equal(dict(engine.weights())[name], master.bfloat16())


def test_gradients_of_micro_batches_are_summed_in_float32():
    batch = rollouts()
    parts = [batch.rows(index) for index in torch.arange(6).split(1)]
    whole, split = (gradient(actor(compute=torch.bfloat16), m, policy_loss(batch), ALL) for m in ([batch], parts))
    assert {tensor.dtype for tensor in split.values()} == {torch.float32}
    assert_near(split, whole, 0.03)


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("llama", False)])
def test_weights_have_their_names_and_a_tied_head_comes_once(family, tied):
    names = [name for name, _ in actor(family).weights()]
    assert "model.embed_tokens.weight" in names and len(set(names)) == len(names)
    assert ("lm_head.weight" in names) is not tied


def test_a_reference_is_frozen(tmp_path):
    engine = actor(optim=None)
    assert not any(param.requires_grad for param in engine.model.parameters())
    engine.save(tmp_path)
    engine.load(tmp_path)
    assert not (tmp_path / "optimizer.pt").exists()


def test_offloading_brings_everything_back():
    engine, batch = actor(offload_params=True, offload_optimizer=True, compute=torch.bfloat16), rollouts()
    other = actor(compute=torch.bfloat16)
    for _ in range(2):
        engine.move("device")
        engine.train_step([batch], policy_loss(batch), ALL)
        engine.move("host")
        other.train_step([batch], policy_loss(batch), ALL)
    assert all(torch.equal(*pair) for pair in zip(weights(engine).values(), weights(other).values(), strict=True))


def whole_config(folder: Path) -> Config:
    """A run's config, resolved as far as the engine reads it."""
    config = Config()
    config.trainer.device = "cpu"
    model, role, ref = config.actor_rollout_ref.model, config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    model.path = config.critic.model.path = str(folder)
    config.critic.model.trust_remote_code, config.critic.model.use_remove_padding = False, True
    config.critic.model.external_lib = None
    role.use_dynamic_bsz, ref.log_prob_use_dynamic_bsz, config.critic.use_dynamic_bsz = True, True, True
    role.ppo_max_token_len_per_gpu = ref.log_prob_max_token_len_per_gpu = 64
    config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu = 64
    config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz = True
    config.critic.ppo_max_token_len_per_gpu = config.critic.forward_max_token_len_per_gpu = 64
    return config


def test_every_role_is_built_from_the_config(tmp_path):
    config, batch = whole_config(save_tiny(tmp_path)), rollouts()
    policy, reference = actor_engine(config), reference_engine(config)
    values = critic_engine(config)
    got, want = (engine.forward(batch, LOG_PROBS).log_probs for engine in (policy, reference))
    assert torch.equal(got, want)
    assert (values.forward(batch, VALUES).values == 0).all()
    assert policy.settings.checkpointing and policy.settings.packed and reference.updater is None
    assert {m.dtype for m in policy.updater.masters} == {torch.float32}
    values.train_step(values.micro_batches(batch), critic_loss(batch), VALUES)
    values.save(tmp_path / "critic")
    config.critic.model.path = str(tmp_path / "critic")
    again = critic_engine(config)
    assert all(torch.equal(*pair) for pair in zip(weights(again).values(), weights(values).values(), strict=True))


def test_fp16_is_refused(tmp_path):
    config = whole_config(save_tiny(tmp_path))
    config.actor_rollout_ref.actor.fsdp_config.dtype = "fp16"
    with pytest.raises(UserError, match=r"actor.fsdp_config.dtype=fp16: gradients in float16 need a loss scale"):
        require(config, Scope.TRAINING)
    with pytest.raises(AssertionError):
        actor_engine(config)


def test_the_model_is_left_in_eval_mode():
    batch, engine = rollouts(), actor(checkpointing=True)
    engine.train_step([batch], policy_loss(batch), ALL)
    assert not any(module.training for module in engine.model.modules())


def test_weights_that_lie_side_by_side_are_saved_each_for_itself(tmp_path):
    engine = Engine(SingleBackend(tiny_model(), Settings(optim=OptimConfig(lr=1e-3), total_steps=3)))
    attention = engine.model.model.layers[0].self_attn
    wanted = {name: tensor.clone() for name, tensor in engine.weights()}
    side_by_side([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert attention.k_proj.weight.untyped_storage().data_ptr() == attention.q_proj.weight.untyped_storage().data_ptr()
    engine.save(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
