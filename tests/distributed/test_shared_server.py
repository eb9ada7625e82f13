"""Two ranks that share an SGLang server: one of them speaks with it, and both have its answers and its failures."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import ROOT
from ranks import Ranks
from tiny_models import EOS, save_tiny

from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.sglang import ServerRanks, SGLangEngine
from paddock.errors import UserError
from paddock.models.load import load_causal_lm

SAMPLING = Sampling(max_tokens=6, stop_tokens=frozenset({EOS}), seed=1, step=0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests/engines/recorded"), *sys.path]))
        pool = Ranks(2)
    yield pool
    pool.close()


def generate(rank: int, path: str) -> tuple[bool, list[Completion], str]:
    arguments = {"load_format": "dummy", "tp_size": 2, "pp_size": 1, "max_running_requests": 4, "context_length": 16}
    engine = SGLangEngine(path, dtype=torch.float32, device="cpu", arguments=arguments)
    model = load_causal_lm(path)
    engine.load_bucket([(name, param.detach()) for name, param in model.named_parameters()], True, True)
    found = engine.generate([Prompt([5, 6, 7], [0, 1])], SAMPLING)
    try:
        engine.generate([Prompt([5] * 16, [0])], SAMPLING)
        failure = "none"
    except UserError as error:
        failure = error.reason
    differing = engine.differing_layers()
    assert differing == []
    engine.close()
    return engine.server is not None, found, failure


def test_ranks_that_share_a_server_have_the_same_answers_and_failures(ranks, tmp_path):
    (speaks, found, failure), (listens, heard, told) = ranks(generate, str(save_tiny(tmp_path, "qwen2")))
    assert (speaks, listens) == (True, False)
    assert found == heard and len(found) == 2 and all(one.tokens for one in found)
    assert "context length" in failure and failure == told


def server_ranks(rank: int, size: int) -> Any:
    import os

    os.environ["CUDA_VISIBLE_DEVICES"] = str(6 - rank)
    found = ServerRanks.of(size, "cuda")
    return found.leads, found.environment


def test_a_shared_server_sees_the_devices_of_all_its_ranks_the_speakers_first(ranks):
    devices = "CUDA_VISIBLE_DEVICES"
    assert ranks(server_ranks, 2) == [(True, {devices: "6,5"}), (False, {devices: "6,5"})]
    assert ranks(server_ranks, 1) == [(True, {devices: "6"}), (True, {devices: "5"})]
