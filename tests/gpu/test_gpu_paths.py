"""On a GPU, what is fast equals what is plain: rollouts, log-probs, gradients, and a whole run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from tiny_models import EOS, FAMILIES, one_turn_each, tiny_batch, tiny_model

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.core.device import flash_attention
from paddock.core.masked import Denominators
from paddock.core.timing import Timer
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.embedded import pool as pool_module
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.engine import Engine, offload_idle
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.attention.hook import attention_forward
from paddock.models.forward import FUSED
from paddock.models.fused import fused
from paddock.rollouts.batch import with_responses
from paddock.trainer.out_of_memory import explaining
from paddock.workers.policy import Policy
from paddock.workers.role import MiniBatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GREEDY = Sampling(max_tokens=40, stop_tokens=frozenset({EOS}), seed=5, step=2, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=1.0, stop_tokens=frozenset(range(4, 12)))
PROMPTS = [
    Prompt([40 + 3 * i + j for j in range(length)], [100 * i + j for j in range(3)])
    for i, length in enumerate((3, 9, 1, 17, 60, 5))
]


def engine_of(
    family: str, dtype: torch.dtype = torch.float32, exact: bool = False, temperature: float = 1.0, **shape: int
) -> Engine:
    model = tiny_model(family, **shape).to("cuda", dtype)
    model.set_attn_implementation("paddock")
    settings = Settings(optim=OptimConfig(lr=1e-3), compute=dtype, exact=exact, budget=Budget(100), total_steps=9,
                        temperature=temperature)  # fmt: skip
    return Engine(SingleBackend(model, settings))


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


GROUPS = [
    Prompt([40 + 3 * i + j % 90 for j in range(length)], [100 * i + j for j in range(8)], max_tokens=limit)
    for i, (length, limit) in enumerate(((3, None), (70, 9), (1, None), (130, None), (64, 25), (300, None)))
]
"""Eight responses to each prompt, which end at different times."""


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_responses_read_together_change_no_answer(monkeypatch, family):
    monkeypatch.setattr(pool_module, "SPARED", 0)
    engine = engine_of(family)
    rollout = EmbeddedEngine(engine.model, max_num_seqs=20, max_num_batched_tokens=400, free_cache=False)
    wanted = HFEngine(tiny_model(family).cuda()).generate(GROUPS, SAMPLED)
    for _ in range(2):  # the second time on kept buffers and graphs
        found = rollout.generate(GROUPS, SAMPLED)
        assert rollout.slots is not None and rollout.slots.shares
        assert tokens(found) == tokens(wanted) and len(set(map(len, tokens(found)))) > 5
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=2e-4, rtol=0)
    assert any(graphs.replays for graphs in rollout.graphs.values())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
def test_in_bf16_log_probs_are_as_exact_if_prompts_are_read_together(monkeypatch, family):
    """Against float32 with the same weights. Each way has graphs of its own, and neither is recorded again."""
    shape = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    engine = engine_of(family, torch.bfloat16, **shape)
    rollout = EmbeddedEngine(engine.model, max_num_seqs=32, free_cache=False)
    found: dict[bool, list[Completion]] = {}
    replays: list[dict[object, object]] = []
    for together in (False, True, False, True):
        monkeypatch.setattr(pool_module, "SPARED", 0 if together else 10**9)
        found[together] = rollout.generate(GROUPS, SAMPLED)
        assert rollout.slots is not None and rollout.slots.shares is together
        replays.append(
            {(key, size): graph for key, kept in rollout.graphs.items() for size, graph in kept.replays.items()}
        )
    assert {key[-1] for key in rollout.graphs} == {False, True}
    assert replays[0] and replays[1].items() > replays[0].items(), "both ways are replayed"
    assert all(replays[3][name] is graph for name, graph in replays[1].items()), "and none is made again"
    plain = tiny_model(family, **shape).to("cuda", torch.bfloat16).float()
    plain.set_attn_implementation("eager")
    alone, shared = (distances(plain, found[together]) for together in (False, True))
    assert min(len(alone), len(shared)) > 500 and alone.mean() < 0.05
    assert shared.mean() < 1.25 * alone.mean() and shared.max() < 2 * alone.max()


@torch.no_grad()
def distances(model: torch.nn.Module, completions: list[Completion]) -> torch.Tensor:
    """Returns how far the log-prob of each token of the responses to `GROUPS` is from that of `model`."""
    prompts = [prompt.tokens for prompt in GROUPS for _ in prompt.rows]
    apart = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens]], device="cuda")
        scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = scores.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
        apart.append((torch.tensor(completion.log_probs) - wanted).abs())
    return torch.cat(apart)


@pytest.mark.parametrize("window", [None, 6])
def test_flash_attention_and_its_gradients_equal_a_plain_loop(window):
    lengths, key_lengths, scale = [5, 1, 40, 17], [5, 9, 64, 17], 0.2
    ends, key_ends = (torch.tensor([0, *sizes]).cumsum(0).int().cuda() for sizes in (lengths, key_lengths))
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(n), heads, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for n, heads in ((lengths, 6), (key_lengths, 2), (key_lengths, 2)))  # fmt: skip
    found = flash_attention(q, k, v, ends, lengths, scale, window, key_ends, key_lengths)
    asked, pieces = torch.randn_like(found), []
    grads = torch.autograd.grad(found, (q, k, v), asked)
    for (a, b), (c, d) in zip(pairwise(ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        query, key, value = q[a:b].double(), *(x[c:d].double().repeat_interleave(3, 1) for x in (k, v))
        score = torch.einsum("qhd,khd->hqk", query, key) * scale
        ahead = torch.arange(c, d, device="cuda") - torch.arange(d - b + a, d, device="cuda")[:, None]
        hidden = (ahead > 0) if window is None else (ahead > 0) | (ahead <= -window)
        pieces.append(torch.einsum("hqk,khd->qhd", score.masked_fill(hidden, float("-inf")).softmax(-1), value))
    wanted = torch.cat(pieces)
    torch.testing.assert_close(found.double(), wanted, atol=2e-2, rtol=2e-2)
    for ours, plain in zip(grads, torch.autograd.grad(wanted, (q, k, v), asked.double()), strict=True):
        torch.testing.assert_close(ours, plain, atol=5e-2, rtol=5e-2)


def test_a_rollout_gives_its_memory_back_and_the_next_one_draws_the_same():
    engine = engine_of("qwen3")
    rollout = EmbeddedEngine(engine.model, max_num_seqs=64, max_num_batched_tokens=30)
    long = replace(SAMPLED, max_tokens=200)  # of which keys and values are most of the memory
    first = rollout.generate(PROMPTS, long)
    assert rollout.slots is not None
    pool, after = rollout.slots, torch.cuda.memory_allocated()
    for kept in (False, True, True):  # graphs, once all buffers are one stretch of memory
        before = dict(rollout.graphs)
        assert tokens(rollout.generate(PROMPTS, long)) == tokens(first)
        assert (rollout.graphs == before) is kept and not pool.keys and pool is rollout.slots
        assert torch.cuda.memory_allocated() <= after + 2**21
    pool.restore()
    assert pool.bytes() > 2**20


@pytest.mark.parametrize("sampling", [SAMPLED, replace(SAMPLED, stop_tokens=frozenset(range(60)))])
def test_looks_behind_the_device_change_no_answer(sampling):
    """Responses that end at any time, slots for half of them, prompts with limits of their own."""
    prompts = [replace(prompt, max_tokens=(None, 5, 40)[i % 3]) for i, prompt in enumerate(PROMPTS)]
    engine, long = engine_of("qwen3"), replace(sampling, max_tokens=90)
    wanted = HFEngine(tiny_model("qwen3").cuda()).generate(prompts, long)
    early: list[Completion] = []
    found = EmbeddedEngine(engine.model, max_num_seqs=6).generate(prompts, long, early.extend)
    assert tokens(found) == tokens(wanted) and [one.stopped for one in found] == [one.stopped for one in wanted]
    assert 0 < len(early) < len(found) and all(one in found for one in early)


def groups_of_three() -> Batch:
    batch = tiny_batch()
    first = torch.arange(len(batch)) // 3 * 3
    mask = None if batch.prompt_mask is None else batch.prompt_mask[first]
    return batch.with_(prompts=batch.prompts[first], prompt_mask=mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_computed_once_train_as_rows_alone(family):
    batch, found = groups_of_three(), []
    for share in (True, False):
        engine = engine_of(family, torch.bfloat16, hidden_size=64, head_dim=32, intermediate_size=128)
        engine.backend.settings = replace(engine.settings, share_prompts=share)
        outputs = engine.backend.outputs(batch, frozenset({"log_probs", "entropy"}))
        (outputs.log_probs.square().sum() / 100).backward()
        grads = torch.cat([p.grad.flatten().double() for p in engine.model.parameters() if p.grad is not None])
        found.append((outputs.log_probs.detach(), grads))
    torch.testing.assert_close(found[0][0], found[1][0], atol=0.05, rtol=0)
    assert (found[0][1] - found[1][1]).norm() <= 0.03 * found[1][1].norm()


@pytest.mark.parametrize("share", [True, False])
def test_micro_batches_are_launched_without_waiting_for_the_device(share):
    """The host lays out the next one while the device computes the one before."""
    engine = engine_of("qwen2", torch.bfloat16, hidden_size=64, head_dim=32, intermediate_size=128)
    engine.backend.settings = replace(engine.settings, share_prompts=share)
    policy, batch = Policy(engine, load([]).config), groups_of_three()
    batch = batch.with_(advantages=torch.ones(batch.mask.shape), rollout_log_probs=torch.zeros(batch.mask.shape))
    mini = MiniBatch(batch.row, Denominators.count(batch.mask), uses_old_log_probs=False)
    micro_batches = engine.micro_batches(batch, list(torch.arange(len(batch)).split(3)))
    before = torch.cuda.get_sync_debug_mode()
    for mode in ("default", "error"):  # the first time kernels are compiled
        torch.cuda.set_sync_debug_mode(mode)
        try:
            sums = engine._backward(micro_batches, partial(policy.loss, mini), policy.wants)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    assert all(total.isfinite() for total in sums.values())


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


@pytest.mark.parametrize(
    ("family", "draws", "shape"),
    [
        *((family, {}, {}) for family in ("llama", "qwen2", "qwen3", "gemma2")),
        ("llama", {"temperature": 0.7}, {}),
        ("llama", {"temperature": 0.7, "top_p": 0.9}, {}),
        ("llama", {"temperature": 0.7}, {"vocab_size": 8192 + 7}),
        ("gemma2", {}, {"head_dim": 256}),
    ],
)
def test_in_exact_numerics_rollout_and_trainer_agree_bit_for_bit(family, draws, shape):
    small = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128} | shape
    engine = engine_of(family, torch.bfloat16, True, draws.get("temperature", 1.0), **small)
    rollout = EmbeddedEngine(engine.model, max_num_seqs=7, max_num_batched_tokens=30)
    batch = tiny_batch()
    width = batch.prompts.shape[1]
    prompts = []
    for row in range(len(batch)):
        length = int(batch.prompt_mask[row].sum()) if batch.prompt_mask is not None else width
        prompts.append(Prompt(batch.prompts[row, width - length :].tolist(), [int(batch.row[row])]))
    completions = rollout.generate(prompts, replace(SAMPLED, **{"temperature": 1.0, "max_tokens": 30} | draws))
    episodes = one_turn_each(completions, prompts, batch.group.tolist(), version=0)
    batch = with_responses(batch.with_(responses=None, mask=None, lengths=None), episodes, 0)
    trainer = engine.forward(batch, frozenset({"log_probs"})).log_probs
    assert torch.equal(trainer.cpu(), batch.need("rollout_log_probs"))


def test_a_device_without_memory_is_said_by_phase_and_key():
    config = load(
        ["trainer.device=cuda", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.max_num_seqs=64"]
    ).config
    said, phase = r"phase `gen` \(generation\): CUDA out of memory\. Tried to allocate", Timer()("gen")
    with pytest.raises(UserError, match=said) as caught, explaining(config, dict), phase:
        torch.empty(2**46, dtype=torch.uint8, device="cuda")
    assert "is free." in caught.value.reason and caught.value.key == "actor_rollout_ref.rollout.max_num_seqs"


def test_weights_that_were_away_from_the_device_compute_as_before():
    engine = engine_of("qwen3")
    batch = tiny_batch()
    before = engine.forward(batch, frozenset({"log_probs"})).log_probs
    engine.settings = replace(engine.settings, offload_params=True)
    offload_idle(engine, least=1)
    held = torch.cuda.memory_allocated()
    engine.move("host")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < held
    engine.move("device")
    assert torch.equal(engine.forward(batch, frozenset({"log_probs"})).log_probs, before)


def test_gradients_of_padded_rows_are_finite_if_all_scores_are_far_below_zero():
    """cuDNN's backward returned NaN for this length: see `MASKED` in models/attention/hook.py."""
    length, dim = 192, 64
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (0.1 * torch.randn(1, 2, length, dim, device="cuda", dtype=torch.bfloat16, generator=draw) for _ in "qkv")
    q[..., 0], k[..., 0] = 1.0, -120.0 * dim**0.5
    heads = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
    out, _ = attention_forward(torch.nn.Module(), *heads, mask)
    grads = torch.autograd.grad(out.float().sum(), heads)
    assert all(grad.isfinite().all() for grad in grads)
