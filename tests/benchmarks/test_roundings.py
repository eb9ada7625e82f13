"""The pass whose roundings can be left out is transformers' own forward without them, and close to it in bf16."""

from __future__ import annotations

import pytest
import torch
from conftest import ROOT
from tiny_models import tiny_model

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    from roundings import LEFT_OUT, PLACES, Pass

PROMPT, ANSWER = torch.arange(5, 17), torch.arange(40, 60)


def by_transformers(model) -> torch.Tensor:
    tokens = torch.cat([PROMPT, ANSWER])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, len(PROMPT) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, ANSWER[:, None])[:, 0]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_pass_without_roundings_is_transformers_own(family):
    model = tiny_model(family)
    found, wanted = Pass(model, (), None).log_probs(PROMPT, ANSWER), by_transformers(model)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_every_place_rounds_and_passes_with_other_noise_are_apart_by_roundings_alone():
    model = tiny_model("qwen2")
    exact = Pass(model, (), None).log_probs(PROMPT, ANSWER)
    for place in PLACES:
        assert not torch.equal(Pass(model, [place], None).log_probs(PROMPT, ANSWER), exact), place
    for places, least, most in ((PLACES, 1e-5, 1e-1), ((), 0.0, 1e-5)):
        one, two = (Pass(model, places, seed).log_probs(PROMPT, ANSWER) for seed in (1, 2))
        assert least < (one - two).abs().max() < most


def test_places_that_a_line_leaves_out_are_known():
    assert all(set(left_out) <= set(PLACES) for left_out in LEFT_OUT.values())
