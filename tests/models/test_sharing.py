"""A prompt computed once for its group: the numbers and gradients of rows computed alone, from fewer tokens."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.engines.train.engine import Engine
from paddock.engines.train.forwards import shares_prompts
from paddock.engines.train.routers import Routers
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.models.attention import Scores, SharedPrompts
from paddock.models.attention.blocks import BlockAttention
from paddock.models.packing import pack, sequence_lengths
from paddock.models.sharing import pack_shared, parts_of_groups

WANT = frozenset({"log_probs", "entropy"})


def grouped(prompts=(9, 5, 12), responses=((7, 1, 4), (8, 8, 8), (3, 6)), words=90, seed=0) -> Batch:
    """Rows of each group among those of others, one with a hole in its mask and one that does not count."""
    draw = torch.Generator().manual_seed(seed)
    width, longest = max(prompts), max(max(group) for group in responses)
    rows = [(group, length) for group, lengths in enumerate(responses) for length in lengths]
    order = torch.randperm(len(rows), generator=draw).tolist()
    texts = [torch.randint(4, words, (n,), generator=draw) for n in prompts]
    prompt, lengths, groups = torch.zeros(len(rows), width, dtype=torch.long), [], []
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for place, index in enumerate(order):
        group, length = rows[index]
        prompt[place, width - prompts[group] :] = texts[group]
        mask[place, width - prompts[group] :] = 1
        lengths.append(length)
        groups.append(group)
    written = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    written[lengths.index(max(lengths)), 1] = 0
    written[-1] = 0
    return Batch(
        row=torch.arange(len(rows)) + 100,
        group=torch.tensor(groups),
        prompts=prompt,
        prompt_mask=mask,
        responses=torch.randint(4, words, (len(rows), longest), generator=draw),
        lengths=torch.tensor(lengths),
        mask=written,
    )


def packed_model(family: str):
    model = tiny_model(family)
    model.set_attn_implementation("paddock")
    return model


def engine(model, **settings) -> Engine:
    return Engine(SingleBackend(model, Settings(**settings)))


def square(batch: Batch, outputs) -> tuple[torch.Tensor, dict]:
    """Any loss that every log-prob and entropy takes part in."""
    weights = torch.linspace(0.3, 1.0, outputs.log_probs.shape[1])
    return (weights * (outputs.log_probs.square() + 0.1 * outputs.entropy)).sum() / 10, {}


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prompts_give_the_numbers_and_gradients_of_rows_alone(family):
    model = packed_model(family)
    batch = grouped()
    found = {}
    for share in (True, False):
        model.zero_grad()
        outputs = engine(model, share_prompts=share, optim=OptimConfig()).backend.outputs(batch, WANT)
        square(batch, outputs)[0].backward()
        grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        found[share] = outputs.log_probs, outputs.entropy, grads
    for shared, alone in zip(found[True][:2], found[False][:2], strict=True):
        torch.testing.assert_close(shared, alone, atol=2e-6, rtol=1e-5)
    assert found[True][2].keys() == found[False][2].keys()
    for name, grad in found[False][2].items():
        torch.testing.assert_close(found[True][2][name], grad, atol=5e-6, rtol=1e-4, msg=name)


def test_the_stream_holds_each_prompt_once():
    batch = grouped()
    shared, alone = pack_shared(batch), pack(batch)
    assert shared is not None
    counted = {group for group, mask in zip(batch.group.tolist(), batch.mask.any(-1).tolist(), strict=True) if mask}
    used = [n for n, mask in zip(batch.lengths.tolist(), batch.mask.any(-1).tolist(), strict=True) if mask]
    assert shared.tokens.shape[1] == sum((9, 5, 12)[group] for group in counted) + sum(n - 1 for n in used)
    assert shared.tokens.shape[1] < alone.tokens.shape[1]
    assert torch.equal(shared.targets, alone.targets) and torch.equal(shared.places, alone.places)


@pytest.mark.parametrize("window,softcap", [(None, None), (6, None), (None, 2.0), (4, 3.0)])
def test_attention_over_a_shared_prompt_equals_attention_over_its_copies(window, softcap):
    torch.manual_seed(0)
    how = SharedPrompts([5, 9], [[3, 4, 4], [7, 1]])
    q, k, v = (torch.randn(33, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    assert len(q) == sum(how.lengths)
    found = BlockAttention.apply(q, k, v, how.blocks, Scores(0.3, window, softcap))
    keys, values = (x.index_select(0, how.sources).repeat_interleave(2, 1) for x in (k, v))
    parts, query, key = [], 0, 0
    for length, seen in zip(how.lengths, how.key_lengths, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[query : query + length], keys[key : key + seen]) * 0.3
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        place, other = torch.arange(seen - length, seen)[:, None], torch.arange(seen)[None]
        hidden = (other > place) if window is None else (other > place) | (other <= place - window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values[key : key + seen]))
        query, key = query + length, key + seen
    wanted = torch.cat(parts)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad(found, (q, k, v), grad), torch.autograd.grad(wanted, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("budget", [21, 30, 60, 1000])
def test_how_groups_are_cut_changes_no_gradient(budget):
    model, batch = packed_model("qwen3"), grouped()
    norms = []
    for tokens in (budget, 1000):
        trained = engine(model, share_prompts=True, optim=OptimConfig(lr=0.0), budget=Budget(tokens))
        norms.append(trained.train_step(trained.micro_batches(batch), square, WANT)["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_micro_batches_keep_groups_together_within_the_budget_and_lose_no_row():
    batch = grouped()
    parts, tokens = parts_of_groups(batch, 25)
    lengths, prompt = batch.lengths.tolist(), batch.prompt_mask.sum(-1).tolist()
    for rows, count in zip(parts, tokens, strict=True):
        assert len({int(batch.group[row]) for row in rows}) == 1
        assert count == prompt[rows[0]] + sum(lengths[row] for row in rows) <= 25
    for budget in (21, 30, 60, 1000):
        split = Budget(budget).split(batch, by_group=True)
        assert sorted(torch.cat(split).tolist()) == list(range(len(batch)))
    assert len(Budget(72).split(batch, by_group=True)) == 1 < len(Budget(72).split(batch))


def test_a_row_that_fits_no_micro_batch_is_named_with_the_key():
    batch = grouped()
    with pytest.raises(UserError, match=f"has {max(sequence_lengths(batch))} tokens"):
        Budget(10, key="the.key").split(batch, by_group=True)


def test_only_equal_prompts_are_shared_whatever_the_group_says():
    batch = grouped()
    assert (
        pack_shared(batch.with_(group=torch.zeros(len(batch), dtype=torch.long))).tokens.shape
        == pack_shared(batch).tokens.shape
    )
    different = batch.prompts + torch.arange(len(batch))[:, None]
    assert pack_shared(batch.with_(prompts=different)) is None
    parts, _ = parts_of_groups(batch.with_(prompts=different), 1000)
    assert sorted(parts) == [[row] for row in range(len(batch))]


@pytest.mark.parametrize("settings", [{"packed": False}, {"exact": True}])
def test_what_cannot_share_is_refused_if_asked_for_and_else_does_without(settings):
    routers = Routers(packed_model("llama"), None)
    for share in (None, False):
        assert not shares_prompts(Settings(share_prompts=share, **settings), routers)
    with pytest.raises(UserError, match="use_prefix_grouper"):
        shares_prompts(Settings(share_prompts=True, **settings), routers)
