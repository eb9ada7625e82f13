"""Experts: found in every family, recorded as chosen, and chosen again whatever the weights have become since."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import tiny_batch
from tiny_zoo import DENSE, SPARSE, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from paddock.errors import UserError
from paddock.models.attention import Packed
from paddock.models.experts import BLOCK, Experts, Routing, experts_of
from paddock.models.forward import hidden_states
from paddock.models.packing import pack, pad

LENGTHS = [9, 6]


def model_of(family: str) -> PreTrainedModel:
    model = tiny(family)
    model.set_attn_implementation("paddock")
    return model


def tokens() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(4, 260, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    return drawn, torch.cat([torch.arange(length) for length in LENGTHS])[None]


def states(model: PreTrainedModel, routing: Routing | None) -> Tensor:
    return hidden_states(model, *tokens(), Packed(LENGTHS), routing)


def experts(model: PreTrainedModel) -> Experts:
    found = experts_of(model)
    assert found is not None
    return found


@torch.no_grad()
def disturb(model: PreTrainedModel) -> None:
    """As an update might, and more."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("family", SPARSE)
def test_experts_are_found_in_every_family(family):
    found, config = experts(model_of(family)), tiny(family).config
    dense_layers = getattr(config, "first_k_dense_replace", 0) or 0
    assert found.layers == config.num_hidden_layers - dense_layers
    assert (found.count, found.top_k, found.dtype) == (
        config.num_local_experts if hasattr(config, "num_local_experts") else config.num_experts,
        config.num_experts_per_tok,
        torch.uint8,
    )


@pytest.mark.parametrize("family", DENSE)
def test_a_dense_model_has_none(family):
    assert experts_of(tiny(family)) is None


@pytest.mark.parametrize("family", SPARSE)
@torch.no_grad()
def test_watching_changes_nothing_and_playing_own_choices_again_neither(family):
    model = model_of(family)
    plain = states(model, None)
    recorder = Routing(experts(model))
    assert torch.equal(states(model, recorder), plain)
    ids = recorder.chosen()
    assert ids.shape == (sum(LENGTHS), experts(model).layers, experts(model).top_k)
    assert torch.equal(states(model, Routing(experts(model), replay=ids)), plain)


@pytest.mark.parametrize("family", SPARSE)
@torch.no_grad()
def test_after_an_update_the_recorded_experts_are_chosen_and_their_scores_are_new(family):
    model = model_of(family)
    recorder = Routing(experts(model))
    before = states(model, recorder)
    disturb(model)
    everyone = torch.ones(sum(LENGTHS), dtype=torch.bool)
    replayed, own = (Routing(experts(model), replay=ids, counts=everyone) for ids in (recorder.chosen(), None))
    after = states(model, replayed)
    assert torch.equal(replayed.chosen(), recorder.chosen())
    assert not torch.equal(states(model, own).round(decimals=3), after.round(decimals=3))
    assert not torch.equal(own.chosen(), recorder.chosen())
    assert after.isfinite().all() and (after - before).abs().max() > 1e-2
    if (getattr(model.config, "n_group", 1) or 1) > 1:
        return  # among the recorded groups, the router's own choice is another one
    agreed = (own.chosen()[:, 0].unsqueeze(-1) == recorder.chosen()[:, 0].unsqueeze(-2)).any(-1).double().mean(-1)
    torch.testing.assert_close(replayed.agreed[0].double(), agreed.sum(), atol=1e-5, rtol=0)  # the first: same inputs


@torch.no_grad()
def test_the_output_is_that_of_the_recorded_experts_weighed_by_the_scores_of_now():
    """Qwen3-MoE, by hand: softmax over all, the chosen normed, each expert a gated network."""
    model = model_of("qwen3_moe")
    found, block = experts(model), model.base_model.layers[1].mlp
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1], [5, 2], [3, 4], [2, 2], [1, 0]])
    replay = torch.zeros(5, 2, 2, dtype=torch.uint8)
    replay[:, 1] = ids
    vars(block)["paddock_routing"] = Routing(found, replay=replay)
    got = block(x[None])[0]
    scores = (x @ block.gate.weight.t()).softmax(-1)
    for token, chosen in enumerate(ids.tolist()):
        weights = scores[token, chosen] / scores[token, chosen].sum()
        want = torch.zeros(48)
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ x[token]).chunk(2)
            want += weight * (block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
        torch.testing.assert_close(got[token], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@torch.no_grad()
def test_recorded_experts_outside_of_the_groups_that_would_be_picked_now_keep_their_scores(family):
    """Routers that pick groups first would weigh such an expert with zero, or not know it at all."""
    model = model_of(family)
    found, block = experts(model), model.base_model.layers[1].mlp
    x = torch.randn(1, 12, 48, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 7], [2, 4], [1, 5]]).repeat(4, 1)  # of groups 0 and 3, 1 and 2, 0 and 2
    seen = {}
    block.experts.register_forward_pre_hook(lambda _, args: seen.update(ids=args[1], weights=args[2]))
    vars(block)["paddock_routing"] = Routing(found, replay=ids[:, None])
    block(x)
    logits = x[0] @ block.gate.weight.t()
    scores = (logits.softmax(-1) if family == "deepseek_v2" else logits.sigmoid()).gather(1, ids)
    if block.config.norm_topk_prob and family == "deepseek_v3":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    assert torch.equal(seen["ids"], ids)
    torch.testing.assert_close(seen["weights"], scores * block.config.routed_scaling_factor)


def gradients(model: PreTrainedModel, replay: Tensor | None) -> dict[str, Tensor]:
    model.zero_grad()
    states(model, None if replay is None else Routing(experts(model), replay=replay)).square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", SPARSE)
def test_gradients_reach_the_router_and_are_the_same_under_checkpointing(family):
    model = model_of(family)
    recorder = Routing(experts(model))
    states(model, recorder)
    ids, plain = recorder.chosen(), gradients(model, None)
    assert gradients(model, ids).keys() == plain.keys()
    for name, gradient in gradients(model, ids).items():
        torch.testing.assert_close(gradient, plain[name], atol=1e-7, rtol=1e-5)
    disturb(model)
    want = gradients(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    got = gradients(model, ids)
    router = next(name for name in want if ".mlp.gate.weight" in name or ".mlp.router.weight" in name)
    assert want[router].abs().max() > 0
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@torch.no_grad()
def test_choices_are_found_again_in_packed_and_padded_rows(family):
    """Cells tell where in a batch a token stands, however the batch is laid out."""
    model, batch = model_of(family), tiny_batch(tools=True)
    tables = []
    for layout in (pack, pad):
        inputs = layout(batch)
        routing = Routing(experts(model))
        hidden = vars(inputs) | {"routing": routing}
        type(inputs)(**hidden).hidden(model)
        kept = inputs.cells >= 0
        table = torch.full((len(batch) * 16, experts(model).layers, 2), 255, dtype=torch.uint8)
        table[inputs.cells[kept]] = routing.chosen()[kept]
        tables.append(table)
    assert torch.equal(*tables)
    lengths = (batch.prompt_mask.sum(-1) + batch.lengths - 1).tolist()
    assert (tables[0] != 255).all(-1).all(-1).view(len(batch), 16).sum(-1).tolist() == lengths


@torch.no_grad()
def test_a_copy_of_a_watched_model_runs_its_own_weights():
    model = model_of("qwen3_moe")
    experts(model)
    other = copy.deepcopy(model)
    disturb(other)
    assert not torch.allclose(states(other, Routing(experts(other))), states(model, Routing(experts(model))))
    fresh = model_of("qwen3_moe")
    fresh.load_state_dict(other.state_dict())
    assert torch.equal(states(other, None), states(fresh, None))


@torch.no_grad()
def test_loads_and_entropies_count_the_tokens_that_count():
    model = model_of("qwen3_moe")
    counts = torch.arange(sum(LENGTHS)) % 3 > 0
    routing, scores = Routing(experts(model), counts=counts), []
    for layer in model.base_model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, found: scores.append(found[0].double()))
    states(model, routing)
    want = torch.zeros(2, 6)
    for layer in range(2):
        for token in counts.nonzero()[:, 0].tolist():
            for expert in routing.chosen()[token, layer].tolist():
                want[layer, expert] += 1
        probs = scores[layer].softmax(-1)
        entropy = -(probs * probs.log()).sum(-1)[counts].sum()
        torch.testing.assert_close(routing.entropy[layer].double(), entropy, atol=1e-5, rtol=1e-6)
    assert torch.equal(routing.load().float(), want)


class Strange(nn.Module):
    """Chooses its experts by a threshold."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.gate, self.experts = nn.Linear(48, 6), block.experts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        index = (self.gate(rows) > 0).int().argsort(-1)[:, :2]
        return self.experts(rows, index, torch.ones_like(index, dtype=x.dtype)).view(x.shape)


@torch.no_grad()
def test_a_choice_that_nobody_sees_is_refused_where_it_matters():
    model = model_of("qwen3_moe")
    model.base_model.layers[1].mlp = Strange(model.base_model.layers[1].mlp)
    found = experts(model)
    assert BLOCK in vars(model.base_model.layers[1].mlp)
    with pytest.raises(UserError, match=r"layers\.1\.mlp does not choose its experts by a top-k of 6 scores"):
        states(model, Routing(found))
    everyone = torch.ones(sum(LENGTHS), dtype=torch.bool)
    watched = Routing(found, counts=everyone, required=False)
    states(model, watched)
    assert watched.load()[1].sum() == 0
