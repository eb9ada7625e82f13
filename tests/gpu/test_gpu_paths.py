"""On a GPU, what is fast equals what is plain: rollouts, log-probs, gradients, and a whole run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import EOS, FAMILIES, tiny_batch, tiny_model

from paddock.config.engine import OptimConfig
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleEngine
from paddock.models.attention import FUSED
from paddock.models.fused import fused
from paddock.trainer.experience import with_responses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GREEDY = Sampling(max_tokens=40, stop_tokens=frozenset({EOS}), seed=5, step=2, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=1.0, stop_tokens=frozenset(range(4, 12)))
PROMPTS = [
    Prompt([40 + 3 * i + j for j in range(length)], [100 * i + j for j in range(3)])
    for i, length in enumerate((3, 9, 1, 17, 60, 5))
]


def engine_of(family: str, dtype: torch.dtype = torch.float32, exact: bool = False, **shape: int) -> SingleEngine:
    model = tiny_model(family, **shape).to("cuda", dtype)
    model.set_attn_implementation("paddock")
    settings = Settings(optim=OptimConfig(lr=1e-3), compute=dtype, exact=exact, budget=Budget(100), total_steps=9)
    return SingleEngine(model, settings)


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, replace(SAMPLED, top_p=0.9, top_k=20)], ids=["greedy", "sampled", "top"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_by_graphs_equal_the_plain_engine(family, sampling):
    engine = engine_of(family)
    assert fused(engine.model) is not None
    rollout = EmbeddedEngine(engine.model, max_num_seqs=7, max_num_batched_tokens=30, free_cache=False)
    wanted = HFEngine(tiny_model(family).cuda()).generate(PROMPTS, sampling)
    for _ in range(2):  # the second time on kept buffers and graphs
        found = rollout.generate(PROMPTS, sampling)
        assert tokens(found) == tokens(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=2e-4, rtol=0)
    assert any(graphs.replays for graphs in rollout.graphs.values())


def test_a_rollout_gives_its_memory_back_and_the_next_one_draws_the_same():
    engine = engine_of("qwen3")
    rollout = EmbeddedEngine(engine.model)
    before = torch.cuda.memory_allocated()
    first = rollout.generate(PROMPTS, SAMPLED)
    assert torch.cuda.memory_allocated() <= before + 2**20 and not rollout.graphs
    assert tokens(rollout.generate(PROMPTS, SAMPLED)) == tokens(first)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_computed_once_train_as_rows_alone(family):
    batch = tiny_batch()
    first = torch.arange(len(batch)) // 3 * 3
    mask = None if batch.prompt_mask is None else batch.prompt_mask[first]
    batch = batch.with_(prompts=batch.prompts[first], prompt_mask=mask)
    found = []
    for share in (True, False):
        engine = engine_of(family, torch.bfloat16, hidden_size=64, head_dim=32, intermediate_size=128)
        engine.settings = replace(engine.settings, share_prompts=share)
        outputs = engine.outputs(batch, frozenset({"log_probs", "entropy"}))
        (outputs.log_probs.square().sum() / 100).backward()
        grads = torch.cat([p.grad.flatten().double() for p in engine.model.parameters() if p.grad is not None])
        found.append((outputs.log_probs.detach(), grads))
    torch.testing.assert_close(found[0][0], found[1][0], atol=0.05, rtol=0)
    assert (found[0][1] - found[1][1]).norm() <= 0.03 * found[1][1].norm()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
def test_graphs_see_new_weights_without_being_made_again(family):
    engine = engine_of(family)
    rollout = EmbeddedEngine(engine.model, free_cache=False)
    before = rollout.generate(PROMPTS, GREEDY)
    kept = dict(rollout.graphs)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    after = rollout.generate(PROMPTS, GREEDY)
    assert rollout.graphs == kept and tokens(after) != tokens(before)
    assert tokens(after) == tokens(HFEngine(engine.model).generate(PROMPTS, GREEDY))


def test_a_model_without_a_fused_forward_decodes_by_its_modules():
    engine = engine_of("qwen2")
    del vars(engine.model.base_model)[FUSED]
    rollout = EmbeddedEngine(engine.model, max_num_seqs=7, free_cache=False)
    assert tokens(rollout.generate(PROMPTS, SAMPLED)) == tokens(HFEngine(engine.model).generate(PROMPTS, SAMPLED))
    assert any(graphs.replays for graphs in rollout.graphs.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_by_the_fused_forward_equal_those_by_modules(family):
    found = []
    for keep in (True, False):
        engine = engine_of(family)
        if not keep:
            del vars(engine.model.base_model)[FUSED]
        batch = tiny_batch()

        def loss(micro, outputs):
            return (outputs.log_probs * micro.mask.to("cuda")).sum() / 100 - outputs.entropy.sum() / 1000, {}

        for _ in range(3):
            engine.train_step(engine.micro_batches(batch), loss, frozenset({"log_probs", "entropy"}))
        found.append([parameter.detach().cpu() for parameter in engine.model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_in_exact_numerics_rollout_and_trainer_agree_bit_for_bit(family):
    engine = engine_of(family, torch.bfloat16, exact=True, hidden_size=64, head_dim=32, intermediate_size=128)
    rollout = EmbeddedEngine(engine.model, max_num_seqs=7, max_num_batched_tokens=30)
    batch = tiny_batch()
    width = batch.prompts.shape[1]
    prompts = []
    for row in range(len(batch)):
        length = int(batch.prompt_mask[row].sum()) if batch.prompt_mask is not None else width
        prompts.append(Prompt(batch.prompts[row, width - length :].tolist(), [int(batch.row[row])]))
    completions = rollout.generate(prompts, replace(SAMPLED, max_tokens=30))
    batch = with_responses(batch.with_(responses=None, mask=None, lengths=None), completions, 0)
    trainer = engine.forward(batch, frozenset({"log_probs"})).log_probs
    assert torch.equal(trainer.cpu(), batch.need("rollout_log_probs"))


def test_weights_that_were_away_from_the_device_compute_as_before():
    engine = engine_of("qwen3")
    batch = tiny_batch()
    before = engine.forward(batch, frozenset({"log_probs"})).log_probs
    engine.settings = replace(engine.settings, offload_params=True)
    held = torch.cuda.memory_allocated()
    engine.move("host")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < held
    engine.move("device")
    assert torch.equal(engine.forward(batch, frozenset({"log_probs"})).log_probs, before)
