"""What a family must do, one function per feature: it returns, fails, or is refused by a `UserError` that says why.

Each compares the way that Paddock goes with transformers' plain one: its own attention over padded rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from devices import joined
from specimens import Specimen
from tiny_models import EOS, one_turn_each
from tiny_updates import over_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from paddock.algorithms.losses import LossInputs, policy_loss_terms, value_loss
from paddock.commands.export import export as export_checkpoint
from paddock.config.engine import OptimConfig
from paddock.config.roles import ActorConfig, CriticConfig
from paddock.core.batch import Batch
from paddock.core.masked import Denominators
from paddock.core.processes import Rendezvous
from paddock.engines.rollout.base import Completion, Sampling
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.base import EXPERT_COLUMNS, Backend, LossFn, Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.fsdp import FSDPBackend
from paddock.engines.train.routers import RouterSettings
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.models.adapters import Lora, attach, is_adapter
from paddock.models.load import load_backbone, load_causal_lm
from paddock.models.value_head import ValueModel
from paddock.rollouts.batch import with_responses

LOG_PROBS, ACTOR, CRITIC = frozenset({"log_probs"}), frozenset({"log_probs", "entropy"}), frozenset({"values"})
NEAR: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


def settings(**changes: Any) -> Settings:
    optim = OptimConfig(lr=0.01, override_optimizer_config={"eps": 1e-3})
    return Settings(**{"optim": optim, "budget": Budget(64), "forward_budget": Budget(64), **changes})


def actor(specimen: Specimen, plain: bool = False, backend: type[Backend] = SingleBackend, **changes: Any) -> Any:
    """`plain`: padded rows, and the attention that comes with the family."""
    model = load_causal_lm(str(specimen.folder), attn="eager" if plain else "paddock")
    return Engine(backend.place(model, settings(packed=not plain, **changes), over_ranks()))


def policy_loss(batch: Batch) -> LossFn:
    denominators = Denominators.count(batch.need("mask"))

    def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.log_probs is not None
        inputs = LossInputs(
            outputs.log_probs, micro.need("old_log_probs"), micro.need("advantages"), micro.need("mask")
        )
        return policy_loss_terms(inputs, ActorConfig(entropy_coeff=0.1), denominators, outputs.entropy)

    return loss


def critic_loss(batch: Batch) -> LossFn:
    denominators = Denominators.count(batch.need("mask"))

    def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        assert outputs.values is not None
        columns = (micro.need(name) for name in ("values", "returns", "mask"))
        return value_loss(outputs.values, *columns, CriticConfig(loss_agg_mode="token-mean"), denominators)

    return loss


def step(engine: Engine, batch: Batch, loss: LossFn, want: frozenset[str]) -> dict[str, Tensor]:
    """One optimizer step, and the gradient that it took."""
    caught: dict[str, Tensor] = {}
    assert engine.updater is not None
    updater, clip = engine.updater, engine.updater.clip

    def catch() -> Tensor:
        for name, master in updater.named_masters().items():
            grad = master.grad
            if grad is not None:
                caught[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        return clip()

    updater.clip = catch  # type: ignore[method-assign]
    numbers = engine.train_step(engine.micro_batches(batch), loss, want)
    updater.clip = clip  # type: ignore[method-assign]
    assert numbers["skipped"] == 0 and numbers["grad_norm"] > 0
    return caught


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert got.keys() == want.keys()
    scale = max(tensor.abs().max().item() for tensor in want.values())
    for name in want:
        torch.testing.assert_close(
            got[name].float(), want[name].float(), atol=tolerance * scale, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def generated(specimen: Specimen, **options: Any) -> tuple[PreTrainedModel, list[Completion]]:
    """With a queue before the slots, and responses that end at different times."""
    model = load_causal_lm(str(specimen.folder))
    sampling = Sampling(max_tokens=8, stop_tokens=frozenset({EOS, *range(40, 60)}), seed=0, step=0)
    engine = EmbeddedEngine(model, max_num_seqs=3, max_num_batched_tokens=96, **options)
    return model, engine.generate(specimen.prompts(), sampling)


def as_batch(specimen: Specimen, completions: list[Completion]) -> Batch:
    prompts = [(prompt, row) for prompt in specimen.prompts() for row in prompt.rows]
    width = max(len(prompt.tokens) for prompt, _ in prompts)
    images = [getattr(prompt, "images", None) for prompt, _ in prompts]
    gaps = [width - len(prompt.tokens) for prompt, _ in prompts]
    batch = Batch(
        row=torch.tensor([row for _, row in prompts]),
        group=torch.tensor([row // 2 for _, row in prompts]),
        prompts=torch.tensor([[0] * gap + prompt.tokens for gap, (prompt, _) in zip(gaps, prompts, strict=True)]),
        prompt_mask=torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps]),
        extras={"images": images} if any(image is not None for image in images) else {},
    )
    asked = specimen.prompts()
    return with_responses(batch, one_turn_each(completions, asked, [p.rows[0] // 2 for p in asked], version=0), 0)


def embedded(specimen: Specimen) -> None:
    """Log-probs of what the embedded engine drew are those of the plain forward."""
    _, found = generated(specimen)
    batch = as_batch(specimen, found)
    assert len({len(one.tokens) for one in found}) > 1
    plain = actor(specimen, plain=True).forward(batch, LOG_PROBS).log_probs
    torch.testing.assert_close(batch.need("rollout_log_probs") * batch.need("mask"), plain * batch.need("mask"), **NEAR)


def hf(specimen: Specimen) -> None:
    """The plain engine draws the same tokens."""
    model, found = generated(specimen)
    sampling = Sampling(max_tokens=8, stop_tokens=frozenset({EOS, *range(40, 60)}), seed=0, step=0)
    plain = HFEngine(model, max_num_seqs=3).generate(specimen.prompts(), sampling)
    assert [one.tokens for one in plain] == [one.tokens for one in found]
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), **NEAR)


def packed(specimen: Specimen) -> None:
    """Log-probs and entropies of packed rows are those of padded ones."""
    batch = specimen.batch()
    got, want = (actor(specimen, plain=plain).forward(batch, ACTOR) for plain in (False, True))
    for name in sorted(ACTOR):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), **NEAR)


def update(specimen: Specimen) -> None:
    """The gradient of packed rows, layers computed twice, is that of padded ones; a step moves the policy."""
    batch = specimen.batch()
    engine = actor(specimen, checkpointing=True)
    before = engine.forward(batch, LOG_PROBS).log_probs
    got = step(engine, batch, policy_loss(batch), ACTOR)
    assert_same(got, step(actor(specimen, plain=True), batch, policy_loss(batch), ACTOR))
    assert (engine.forward(batch, LOG_PROBS).log_probs - before).abs().max() > 1e-3


def checkpoint(specimen: Specimen) -> None:
    """A run that goes on from a checkpoint ends where the other one does."""
    batch, folder = specimen.batch(), clean(specimen.scratch / "checkpoint")
    first, second = actor(specimen), actor(specimen)
    step(first, batch, policy_loss(batch), ACTOR)
    first.save(folder)
    step(first, batch, policy_loss(batch), ACTOR)
    second.load(folder)
    step(second, batch, policy_loss(batch), ACTOR)
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, weights(second)[name]), name


def export(specimen: Specimen) -> None:
    """What transformers reads from an exported folder is the policy that was trained."""
    batch, folder = specimen.batch(), specimen.scratch / "trained"
    engine, out = actor(specimen), specimen.scratch / "exported"
    step(engine, batch, policy_loss(batch), ACTOR)
    engine.save(clean(folder))
    give_tokenizer(specimen, folder)
    shutil.rmtree(out, ignore_errors=True)
    export_checkpoint(folder, out)
    vision = hasattr(AutoConfig.from_pretrained(out), "vision_config")
    auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    plain = Engine(
        SingleBackend(
            auto.from_pretrained(out, dtype=torch.float32, attn_implementation="eager"), Settings(packed=False)
        )
    )
    got, want = (one.forward(batch, LOG_PROBS).log_probs for one in (plain, engine))
    torch.testing.assert_close(got, want, **NEAR)


def critic(specimen: Specimen) -> None:
    """Values of packed rows are those of padded ones; a critic learns, is saved and read back."""
    batch, folder = specimen.batch(), clean(specimen.scratch / "critic")
    engines = []
    for plain in (False, True):
        model = ValueModel(load_backbone(str(specimen.folder), attn="eager" if plain else "paddock"))
        torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
        engines.append(Engine(SingleBackend(model, settings(packed=not plain))))
    got, want = (engine.forward(batch, CRITIC).values for engine in engines)
    torch.testing.assert_close(got, want, **NEAR)
    before = weights(engines[0])
    step(engines[0], batch, critic_loss(batch), CRITIC)
    engines[0].save(folder)
    again = ValueModel(load_backbone(str(folder)))
    again.load_head(folder)
    found = weights(Engine(SingleBackend(again, settings())))
    for name, tensor in weights(engines[0]).items():
        assert torch.equal(found[name], tensor), name
    assert any(not torch.equal(found[name], before[name]) for name in before)


def lora(specimen: Specimen) -> None:
    """Adapters alone are trained; merged, they are the policy; off, they are the model that was there before."""
    batch = specimen.batch()
    model = attach(load_causal_lm(str(specimen.folder)), Lora(rank=4, base=str(specimen.folder)))
    engine = Engine(SingleBackend(model, settings()))
    start = engine.forward(batch, LOG_PROBS).log_probs
    frozen = {name: p.clone() for name, p in model.named_parameters() if not is_adapter(name)}
    caught = step(engine, batch, policy_loss(batch), ACTOR)
    assert caught and all(is_adapter(name) for name in caught)
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if not is_adapter(name))
    trained = engine.forward(batch, LOG_PROBS).log_probs
    assert (trained - start).abs().max() > 1e-3
    off = engine.without_adapters(Budget(64)).forward(batch, LOG_PROBS).log_probs
    torch.testing.assert_close(off, start, **NEAR)
    merged = actor(specimen, plain=True)
    own = dict(merged.model.named_parameters())
    with torch.no_grad():
        for name, tensor in engine.weights():
            if name in own:
                own[name].copy_(tensor)
    torch.testing.assert_close(merged.forward(batch, LOG_PROBS).log_probs, trained, **NEAR)


def bf16(specimen: Specimen) -> None:
    """Weights in fp32, all that computes in bf16: it rolls out, learns, and both sides stay near the fp32 model."""
    batch, exact = specimen.batch(), actor(specimen).forward(specimen.batch(), LOG_PROBS).log_probs
    engine = actor(specimen, compute=torch.bfloat16, checkpointing=True)
    got = engine.forward(batch, LOG_PROBS).log_probs
    assert (got - exact).abs().mean() < 0.2 and got.isfinite().all()
    sampling = Sampling(max_tokens=8, stop_tokens=frozenset({EOS, *range(40, 60)}), seed=0, step=0)
    found = EmbeddedEngine(engine.rollout_model, max_num_seqs=3).generate(specimen.prompts(), sampling)
    drawn = as_batch(specimen, found)
    again = engine.forward(drawn, LOG_PROBS).log_probs * drawn.need("mask")
    assert (again - drawn.need("rollout_log_probs")).abs().mean() < 0.1
    before = weights(engine)
    step(engine, batch, policy_loss(batch), ACTOR)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in engine.weights())


@contextmanager
def alone() -> Iterator[None]:
    """A group of one process, as FSDP asks for."""
    with joined(Rendezvous(), torch.device("cpu")):
        yield


def fsdp(specimen: Specimen) -> None:
    """Sharded, the same gradient and the same rollout; the distributed suite does it with two processes."""
    batch = specimen.batch()
    with alone():
        engine = actor(specimen, backend=FSDPBackend, checkpointing=True)
        got = step(engine, batch, policy_loss(batch), ACTOR)
        log_probs = engine.forward(batch, LOG_PROBS).log_probs
        with engine.gathered():
            inner = Engine(SingleBackend(engine.rollout_model, Settings()))
            torch.testing.assert_close(inner.forward(batch, LOG_PROBS).log_probs, log_probs, **NEAR)
    assert_same(got, step(actor(specimen), batch, policy_loss(batch), ACTOR))


def replay(specimen: Specimen) -> None:
    """The experts of the rollout are those of the trainer, also after an update; the rollout's log-probs too before."""
    if not specimen.has_experts:
        raise NotThere("it has no experts")
    _, found = generated(specimen, record_experts=True)
    batch = as_batch(specimen, found)
    noise = torch.randn(batch.need("mask").shape, generator=torch.Generator().manual_seed(0))
    batch = batch.with_(old_log_probs=batch.rollout_log_probs, advantages=noise * batch.need("mask"))
    engine = actor(specimen, routers=RouterSettings(replay=True), checkpointing=True)
    before = engine.forward(batch, LOG_PROBS).log_probs
    torch.testing.assert_close(before * batch.need("mask"), batch.need("rollout_log_probs"), **NEAR)
    for _ in range(3):
        step(engine, batch, policy_loss(batch), ACTOR)
    after = engine.forward(batch, LOG_PROBS | EXPERT_COLUMNS)
    assert torch.equal(after.response_experts, batch.response_experts)
    assert torch.equal(after.prompt_experts, batch.prompt_experts)
    free = actor(specimen).forward(batch, LOG_PROBS).log_probs
    torch.testing.assert_close(free, before, **NEAR)


class NotThere(Exception):
    """The family has nothing that the feature is about."""


def clean(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def give_tokenizer(specimen: Specimen, folder: Path) -> None:
    for file in specimen.folder.iterdir():
        if "token" in file.name or "processor" in file.name or file.suffix == ".jinja":
            shutil.copyfile(file, folder / file.name)


FEATURES: dict[str, tuple[str, Callable[[Specimen], None]]] = {
    "embedded": ("embedded rollout", embedded),
    "hf": ("hf rollout", hf),
    "packed": ("packed = padded", packed),
    "update": ("update", update),
    "bf16": ("bf16", bf16),
    "checkpoint": ("checkpoint", checkpoint),
    "export": ("export, reload", export),
    "critic": ("critic", critic),
    "lora": ("LoRA", lora),
    "fsdp": ("FSDP", fsdp),
    "replay": ("routing replay", replay),
}
