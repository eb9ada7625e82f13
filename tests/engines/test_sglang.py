"""The server of SGLang: who starts, ends and frees it, what it is told, and what a user hears when it fails.

SGLang itself has no build for a CPU that could be had here: `recorded/` speaks its protocol. What every engine with a
copy of the weights must do is in test_copy_engines.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from copy_pairs import PROMPTS, RECORDED, SAMPLED, Pair, require_right_log_probs, train, worst_gap
from tiny_models import save_tiny
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from paddock.engines.rollout import sglang
from paddock.engines.rollout.base import Prompt, Request
from paddock.engines.rollout.served import Server
from paddock.engines.rollout.sglang import SGLangEngine, parameters
from paddock.engines.rollout.sglang import start as start_server
from paddock.engines.rollout.stops import StopTables
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.loading.rules import Scope, broken, require

ARGUMENTS = {"load_format": "dummy", "tp_size": 1, "pp_size": 1, "max_running_requests": 4}


@pytest.fixture(scope="module")
def recorded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(RECORDED))
        yield


@pytest.fixture(scope="module")
def pair(recorded: None, tmp_path_factory: Any) -> Iterator[Pair]:
    """Told that it is on a GPU, it frees memory as there."""
    pair = Pair("sglang", "tied", tmp_path_factory.mktemp("model"), device="cuda")
    pair.sync()
    yield pair
    pair.engine.close()


@pytest.mark.parametrize("staged", [False, True])
def test_asleep_it_has_no_weights_and_awake_it_takes_them_anew(pair, staged, monkeypatch):
    monkeypatch.setattr(pair.engine, "staged_wake", staged)
    pair.engine.sleep()
    pair.engine.sleep()  # twice is once
    with pytest.raises(AssertionError, match="no weights"):
        pair.engine.generate(PROMPTS, SAMPLED)
    assert pair.sync() < 1e-3  # wakes it
    assert worst_gap(pair.model, pair.engine.generate(PROMPTS, SAMPLED)) < 1e-3


def test_what_was_computed_with_old_weights_is_not_used_again(pair):
    greedy = replace(SAMPLED, temperature=0.0)
    pair.engine.generate(PROMPTS, greedy)  # the server keeps every prefix
    pair.change()
    pair.sync()
    assert worst_gap(pair.model, pair.engine.generate(PROMPTS, greedy)) < 1e-3


def test_an_error_among_responses_ends_the_others_and_leaves_the_server_usable(pair):
    def stumble(done: Any) -> None:
        raise KeyError("stumbled")

    with pytest.raises(KeyError, match="stumbled"):
        pair.engine.generate(PROMPTS, replace(SAMPLED, ignore_eos=True, max_tokens=40), stumble)
    assert len(pair.engine.generate(PROMPTS, SAMPLED)) == 6
    assert pair.sync() < 1e-3


def test_a_request_that_the_server_refuses_is_the_users_to_mend(pair):
    with pytest.raises(UserError, match="context length"):
        pair.engine.generate([Prompt([5] * 60, [0])], SAMPLED)


def test_arguments_that_sglang_does_not_have_or_that_are_ours_are_refused_by_name(recorded, tmp_path):
    path = str(save_tiny(tmp_path, "qwen2"))
    with pytest.raises(UserError, match="set by paddock") as refused:
        SGLangEngine(path, dtype=torch.float32, device="cpu", arguments=ARGUMENTS, extra={"port": 1})
    assert refused.value.key == "actor_rollout_ref.rollout.engine_kwargs.sglang.port"
    extra = {"max_running_request": 3}
    with pytest.raises(UserError, match="max_running_requests") as refused:
        start_server({"model_path": path, **ARGUMENTS, **extra}, extra, {})
    assert refused.value.key == "actor_rollout_ref.rollout.engine_kwargs.sglang.max_running_request"


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UserError, match="load_format odd is unknown") as refused:
        start_server({"model_path": str(tmp_path), **ARGUMENTS, "load_format": "odd"}, {}, {})
    assert "exit status 1" in refused.value.reason and list(tmp_path.iterdir()) == []


def plain_server() -> Server:
    server = Server("plain_server", {}, {}, "actor_rollout_ref.rollout")
    server.wait_for("/health")
    return server


def test_a_server_that_does_not_start_in_time_is_ended(recorded):
    server = plain_server()
    with pytest.raises(UserError, match="did not start within 1 s"):
        server.wait_for("/health_generate", seconds=1)
    assert server.process.poll() is not None and server.log.closed


def test_a_server_that_does_not_answer_in_time_is_ended(recorded):
    server = plain_server()
    with pytest.raises(UserError, match=r"was not answered within 1 s(.|\n)*its last words"):
        server.post("/generate", {"input_ids": [5]}, timeout=1)
    assert server.process.poll() is not None and server.log.closed


def test_a_server_that_dies_while_it_answers_is_reported_with_its_last_words(recorded):
    server = plain_server()
    threading.Timer(1, os.kill, (server.process.pid, signal.SIGKILL)).start()
    with pytest.raises(UserError, match=r"cut off.*exit status -9(.|\n)*its last words"):
        server.post("/generate", {"input_ids": [5]}, timeout=None)
    assert server.log.closed


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)", "raise ValueError"])
def test_it_ends_with_the_process_that_started_it_however_that_ends(recorded, end):
    program = f"""
        import os, signal, sys
        from paddock.engines.rollout.served import Server
        server = Server("plain_server", {{}}, {{}}, "key")
        server.wait_for("/health")
        print(server.process.pid, flush=True)
        {end}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True)
    pid = int(done.stdout.split()[-1])
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(pid)


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_seeds_fit_the_narrowest_type_that_a_version_keeps_them_in():
    assert parameters(SAMPLED, 2**63 - 1, 5)["sampling_seed"] == 2**31 - 1
    assert "sampling_seed" not in parameters(SAMPLED, None, 5)
    assert parameters(replace(SAMPLED, top_k=0), 1, 5)["top_k"] == -1
    assert parameters(replace(SAMPLED, ignore_eos=True), 1, 5)["stop_token_ids"] == []


def test_a_string_that_only_its_last_tokens_have_ends_no_response():
    """SGLang decodes them alone; a SentencePiece tokenizer, say, writes a response's first token without its space."""
    names = ["<pad>", "<eos>", *"abc"]
    backend = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tables = StopTables(PreTrainedTokenizerFast(tokenizer_object=backend))
    sampling, asked = replace(SAMPLED, stop=("ab",)), []
    answers = [([2, 4], "ab"), ([2], "ab"), ([3, 4, 4], None)]

    def post(path: str, body: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        asked.append((body["input_ids"], body["sampling_params"]["max_new_tokens"]))
        tokens, matched = answers[len(asked) - 1]
        reason = {"type": "length"} if matched is None else {"type": "stop", "matched": matched}
        return {"meta_info": {"finish_reason": reason, "output_token_logprobs": [[-0.5, token] for token in tokens]}}

    engine: Any = object.__new__(SGLangEngine)
    engine.server, engine.strings = SimpleNamespace(post=post), tables.of(sampling.stop, torch.device("cpu"))
    found = engine.respond(Request([5, 5], [7, 8], [3, 4], 0, 6), 8, 4, sampling, 1)
    assert asked == [([5, 5], 6), ([5, 5, 2, 4], 4), ([5, 5, 2, 4, 2], 3)]
    assert (found.tokens, found.stopped, found.key, found.row) == ([2, 4, 2, 3], True, 8, 4)
    assert found.log_probs == [-0.5] * 4


def test_the_server_has_a_tokenizer_if_there_are_stop_strings_and_bars_no_tokens(monkeypatch):
    assert opened(monkeypatch)["tokenizer"] is None
    model = "actor_rollout_ref.model.path=builtin:tiny"
    found = opened(monkeypatch, model, "actor_rollout_ref.rollout.stop=['2']")
    assert (Path(found["tokenizer"]) / "tokenizer.json").exists() and found["stop_tables"].made
    config = load(["actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.min_tokens=2"]).config
    assert "actor_rollout_ref.rollout.min_tokens" in [error.key for error in broken(config, Scope.TRAINING)]


def opened(monkeypatch: Any, *settings: str) -> dict[str, Any]:
    """What the engine is opened with."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(sglang, "SGLangEngine", lambda path, **kwargs: found.update(kwargs))
    config = load(["actor_rollout_ref.rollout.name=sglang", "trainer.device=cpu", *settings]).config
    sglang.open_engine(config, None)
    return found


def test_the_config_reaches_the_server(monkeypatch):
    rollout = "actor_rollout_ref.rollout"
    found = opened(
        monkeypatch,
        f"{rollout}.gpu_memory_utilization=0.5",
        f"{rollout}.enable_chunked_prefill=False",
        f"{rollout}.max_num_batched_tokens=4096",
        f"{rollout}.enable_prefix_caching=False",
        f"{rollout}.load_format=auto",
        f"{rollout}.multi_stage_wake_up=True",
        f"+{rollout}.engine_kwargs.sglang.attention_backend=ascend",
        "data.max_prompt_length=100",
        "data.max_response_length=28",
    )
    expected = {
        "mem_fraction_static": 0.5,
        "chunked_prefill_size": -1,
        "max_prefill_tokens": 4096,
        "disable_radix_cache": True,
        "load_format": "auto",
        "context_length": 128,
        "disable_cuda_graph": True,  # on a CPU
        "tp_size": 1,
    }
    assert found["arguments"] | expected == found["arguments"]
    assert found["extra"] == {"attention_backend": "ascend"} and found["staged_wake"]
    json.dumps(found["arguments"])  # as it travels


def test_what_cannot_be_honoured_is_refused():
    rollout = "actor_rollout_ref.rollout"
    for settings in (
        (f"{rollout}.logprobs_mode=raw_logprobs", f"{rollout}.temperature=0.7"),
        (f"{rollout}.scheduling_policy=priority",),
    ):
        with pytest.raises(UserError) as refused:
            require(load([f"{rollout}.name=sglang", *settings]).config, Scope.TRAINING)
        assert refused.value.key == settings[0].split("=")[0]


@pytest.mark.slow
def test_grpo_trains_with_it_and_a_resumed_run_samples_from_the_weights_it_stopped_with(tmp_path):
    train(tmp_path, "sglang", "trainer.total_training_steps=1", "trainer.save_freq=1", PYTHONPATH=str(RECORDED))
    two = ("trainer.total_training_steps=2", "trainer.save_freq=1")
    steps = train(tmp_path, "sglang", *two, PYTHONPATH=str(RECORDED))
    assert len(steps) == 2
    require_right_log_probs(steps)


@pytest.mark.slow
def test_ray_workers_have_a_server_each_or_share_one(tmp_path):
    pytest.importorskip("ray")
    size, two = "actor_rollout_ref.rollout.tensor_model_parallel_size", "trainer.n_gpus_per_node=2"
    for ranks in (1, 2):
        settings = ("trainer.total_training_steps=2", "trainer.save_freq=-1", two, f"{size}={ranks}")
        steps = train(tmp_path / str(ranks), "sglang", *settings, PYTHONPATH=str(RECORDED))
        assert len(steps) == 2
        require_right_log_probs(steps)
