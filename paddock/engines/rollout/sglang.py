"""SGLang as a server of its own beside the trainer: tokens in, tokens and their log-probs out.

It speaks SGLang's own protocol (`/generate` with token ids, `/update_weights_from_tensor`, ...), not that of OpenAI.
A server rather than `sglang.Engine`: that one's end takes every child of this process with it.
"""

from __future__ import annotations

import base64
import difflib
import importlib
import io
import json
import os
import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paddock.core.device import shares_memory
from paddock.core.processes import from_everyone, subgroups
from paddock.engines.rollout.base import Completion, EngineConfig, Request, Sampling, joined
from paddock.engines.rollout.copies import WeightCopy, copy_keys, require_no_images, row_seeds
from paddock.engines.rollout.served import Server, arguments_of_this_server
from paddock.errors import UserError
from paddock.facts.machine import VISIBLE_DEVICES

if TYPE_CHECKING:
    from paddock.engines.train.engine import Engine

KEY = "actor_rollout_ref.rollout"
ARGUMENTS = f"{KEY}.engine_kwargs.sglang"
OURS = frozenset({"model_path", "host", "port", "skip_tokenizer_init", "enable_memory_saver", "dp_size", "nnodes"})
"""Arguments that the adapter sets: other values would break it."""

REFUSED = "paddock refuses:"
SEED_BITS = 31  # older versions keep seeds as int32
ROWS = 4  # of each matrix, that are remembered to compare
SAME = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest relative difference that rounding can explain."""


class SGLangEngine(WeightCopy):
    """See `CopyEngine`. Every response is a request of its own, with a seed from (seed, step, row, first position).

    SGLang draws by the seed with `enable_deterministic_inference` alone. It also ends a response at the model's own end
    tokens, where `Sampling` does not name them. Log-probs are those after temperature and before filters, which is what
    `Completion` asks for. SGLang looks for stop strings in its last tokens, as many as a string has when it is encoded:
    one that is spelt in more tokens it may miss, so every response is cut by the table of tokens.
    """

    name = "sglang"

    def __init__(
        self,
        model: str,
        *,
        dtype: torch.dtype,
        device: str,
        arguments: dict[str, Any],
        extra: dict[str, Any] | None = None,
        tokenizer: str | None = None,
        **copy: Any,
    ):
        """`tokenizer`: the folder of the tokenizer by which the server looks for stop strings. `copy`: further
        arguments of `WeightCopy`."""
        super().__init__(dtype=dtype, device=device, **copy)
        self.sent: dict[str, Tensor] = {}
        self.waiting: list[Request] = []
        self.threads: ThreadPoolExecutor | None = None
        self.asked: set[Future[Completion]] = set()
        own = {
            "model_path": model,
            "dtype": str(dtype).removeprefix("torch."),
            "device": device,
            "skip_tokenizer_init": tokenizer is None,
            "enable_memory_saver": self.frees,
        } | ({} if tokenizer is None else {"tokenizer_path": tokenizer})
        extra = extra or {}
        for name in [name for name in extra if name in OURS]:
            raise UserError("is set by paddock", key=f"{ARGUMENTS}.{name}", value=extra[name], fix="leave it out")
        asked: dict[str, Any] = own | arguments | extra
        self.at_once = int(asked["max_running_requests"])
        self.ranks = int(asked["tp_size"])
        self.server_ranks = ServerRanks.of(self.ranks * int(asked["pp_size"]), device)
        self.server: Server | None = None
        self.server_ranks.on_leader(lambda: self.open_server(asked, extra))

    def open_server(self, asked: dict[str, Any], extra: dict[str, Any]) -> None:
        self.server = start(asked, extra, self.server_ranks.environment)

    @property
    def open(self) -> Server:
        assert self.server is not None, "another rank speaks for this engine"
        return self.server

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        require_no_images(requests, self.name)
        self.waiting += requests

    def advance(self, seconds: float | None = None) -> list[Completion]:
        """Returns at once what has been answered; the first call of a session sends what waits."""
        return self.server_ranks.on_leader(lambda: self.answered(seconds))

    def answered(self, seconds: float | None) -> list[Completion]:
        assert self.sampling is not None, "no session is open: resume comes first"
        if self.threads is None:
            self.threads = ThreadPoolExecutor(self.at_once, thread_name_prefix="sglang")
        for request in self.waiting:
            for key, row, seed in zip(request.keys, request.rows, row_seeds(request, self.sampling), strict=True):
                self.asked.add(self.threads.submit(self.respond, request, key, row, self.sampling, seed))
        self.waiting = []
        done, self.asked = wait(self.asked, seconds, FIRST_COMPLETED)
        return [future.result() for future in done]

    def pause(self) -> list[Completion]:
        """Ends the session. What is not finished begins again when it is submitted again, with the same seed."""
        self.server_ranks.on_leader(self.end_requests)
        self.sampling, self.waiting = None, []
        return []

    def end_requests(self) -> None:
        threads, self.threads = self.threads, None
        if threads is None:
            return
        threads.shutdown(wait=False, cancel_futures=True)
        if self.asked and self.open.close.alive:
            self.open.post("/abort_request", {"abort_all": True})
        self.asked = set()
        threads.shutdown()

    def respond(self, request: Request, key: int, row: int, sampling: Sampling, seed: int | None) -> Completion:
        body = {
            "input_ids": request.tokens,
            "sampling_params": parameters(sampling, seed, request.limit),
            "return_logprob": True,
            "logprob_start_len": -1,  # none of the prompt's
            "stream": False,
        }
        answer = self.open.post("/generate", body, timeout=None)
        drawn = completion(key, row, answer, sampling)
        if self.strings is None:
            return drawn
        _, end = self.strings.read(drawn.tokens, self.strings.begun(request))
        if end is not None:
            return replace(drawn, tokens=drawn.tokens[:end], log_probs=drawn.log_probs[:end], stopped=True)
        if answer["meta_info"]["finish_reason"].get("matched") not in sampling.stop:
            return drawn
        # SGLang decodes the last tokens alone: it may see a string that the whole response has not.
        if len(drawn.tokens) == request.limit:
            return replace(drawn, stopped=False)
        rest = replace(request, keys=[key], rows=[row]).after(drawn)
        return joined(drawn, self.respond(rest, key, row, sampling, *row_seeds(rest, sampling)))

    def load_bucket(self, bucket: list[tuple[str, Tensor]], first: bool, last: bool) -> None:
        if first:
            self.sent = {}
        if self.server_ranks.leads:
            matrices = ((name, tensor) for name, tensor in bucket if tensor.ndim == 2)
            self.sent |= {name: tensor[:ROWS].to("cpu", torch.float32, copy=True) for name, tensor in matrices}
        self.server_ranks.on_leader(lambda: self.send(bucket))
        if last:
            self.begin_anew()

    def send(self, bucket: list[tuple[str, Tensor]]) -> None:
        parcel = base64.b64encode(packed(bucket)).decode()
        body = {"serialized_named_tensors": [parcel] * self.ranks, "flush_cache": False}
        answer = self.open.post("/update_weights_from_tensor", body)
        if not answer["success"]:
            raise self.open.error(f"new weights failed: {answer['message']}")

    def release(self) -> None:
        self.server_ranks.on_leader(lambda: self.open.post("/release_memory_occupation", {}))

    def restore(self, part: str | None) -> None:
        body: dict[str, Any] = {"tags": [part]} if part else {}
        self.server_ranks.on_leader(lambda: self.open.post("/resume_memory_occupation", body))

    def drop_cache(self) -> None:
        self.server_ranks.on_leader(lambda: self.open.post("/flush_cache", {}))

    def differing_layers(self) -> list[str]:
        """Returns matrices whose first rows differ, for families whose layers SGLang reads back under their names."""
        return self.server_ranks.on_leader(self.far_layers)

    def far_layers(self) -> list[str]:
        far: dict[str, float] = {}
        for name, rows in self.sent.items():
            try:
                there = self.open.call("POST", "/get_weights_by_name", {"name": name, "truncate_size": ROWS})
            except Exception:  # it has no way to read this layer: nothing is known
                continue
            theirs = torch.tensor(there)
            if theirs.shape == rows.shape:
                far[name] = ((theirs - rows).norm() / rows.norm().clamp(min=1e-12)).item()
        return sorted((name for name in far if far[name] > SAME[self.dtype]), key=lambda name: -far[name])

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


@dataclass(frozen=True)
class ServerRanks:
    """The ranks that share one SGLang server. Only the first one (`leads`) calls it; it broadcasts the result."""

    leads: bool
    group: dist.ProcessGroup | None
    environment: dict[str, str]

    @classmethod
    def of(cls, size: int, device: str) -> ServerRanks:
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return cls(True, None, {})
        first = dist.get_rank() // size * size
        variable = VISIBLE_DEVICES.get(device)
        everyones = from_everyone(variable and os.environ.get(variable))[first : first + size]
        devices = {variable: ",".join(everyones)} if variable and None not in everyones else {}
        return cls(dist.get_rank() == first, subgroups(size) if size > 1 else None, devices)

    def on_leader(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on the first rank and returns its result on every rank; an exception is raised on every rank."""
        result: Any = None
        failure: BaseException | None = None
        if self.leads:
            try:
                result = work()
            except Exception as error:
                failure = error
        if self.group is not None:
            box = [result, failure if self.leads else None]
            dist.broadcast_object_list(box, group=self.group, group_src=0)
            result, failure = box
        if failure is not None:
            raise failure
        return result


def start(arguments: dict[str, Any], extra: dict[str, Any], environment: dict[str, str]) -> Server:
    """`extra` is the user's: handed on as it is, unless SGLang could not work with it."""
    server = Server(__name__, arguments, environment, KEY)
    try:
        server.wait_for("/health_generate")
    except UserError as error:
        refusal = next((line for line in error.reason.splitlines() if line.startswith(REFUSED)), None)
        if refusal is None:
            raise
        name, near = json.loads(refusal.removeprefix(REFUSED))
        raise UserError(
            "is no argument of the SGLang that is installed",
            key=f"{ARGUMENTS}.{name}" if name in extra else KEY,
            value=arguments[name],
            fix=" or ".join(["leave it out", *near]) if name in extra else "another version of SGLang",
        ) from None
    except BaseException:
        server.close()
        raise
    return server


def packed(bucket: list[tuple[str, Tensor]]) -> bytes:
    """Packs tensors as SGLang unpacks them: handles of GPU memory if processes can share it, else the numbers."""
    if all(shares_memory(tensor.device) for _, tensor in bucket):
        buffer = io.BytesIO()
        ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(bucket)
        return buffer.getvalue()
    return pickle.dumps([(name, tensor.to("cpu", copy=True)) for name, tensor in bucket])  # not what it is a view of


def parameters(sampling: Sampling, seed: int | None, max_tokens: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k if sampling.top_k > 0 else -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop_token_ids": sorted(sampling.ends),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        arguments["stop"] = list(sampling.stop)
    return arguments | ({} if seed is None else {"sampling_seed": seed >> (63 - SEED_BITS)})


def completion(key: int, row: int, answer: dict[str, Any], sampling: Sampling) -> Completion:
    about = answer["meta_info"]
    end = about["finish_reason"]
    if end["type"] == "abort":
        raise UserError(f"SGLang gave up a request: {end.get('message')}", key=KEY)
    log_probs = [place[0] for place in about["output_token_logprobs"]]
    tokens = [place[1] for place in about["output_token_logprobs"]]
    stopped = end["type"] == "stop" or tokens[-1] in sampling.ends  # at the last place its reason is the length
    return Completion(row, tokens, log_probs, stopped, key=key)


def serve() -> None:
    """Runs the SGLang server; called in its own process."""
    arguments = arguments_of_this_server()
    server_arguments = importlib.import_module("sglang.srt.server_args").ServerArgs
    known = [field.name for field in fields(server_arguments)]
    for name in arguments:
        if name not in known:
            print(REFUSED, json.dumps([name, difflib.get_close_matches(name, set(known) - OURS, n=1)]), flush=True)
            os._exit(2)
    checked = server_arguments(**arguments)
    importlib.import_module("sglang.srt.entrypoints.http_server").launch_server(checked)


if __name__ == "__main__":
    serve()


def open_engine(config: EngineConfig, trainer: Engine | None) -> SGLangEngine:
    """Opens the engine. Its log-probs are after temperature and before filters, as training needs them."""
    group, device = config.actor_rollout_ref, config.trainer.device
    model, rollout = group.model, group.rollout
    from paddock.models.load import model_folder, tokenizer_path  # the server's own process does without transformers

    arguments: dict[str, Any] = {
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": json.dumps(dict(model.override_config)),
        "tp_size": rollout.tensor_model_parallel_size,
        "pp_size": rollout.pipeline_model_parallel_size,
        "ep_size": rollout.expert_parallel_size,
        "mem_fraction_static": rollout.gpu_memory_utilization / config.trainer.ranks_per_device,
        "max_running_requests": rollout.max_num_seqs,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "chunked_prefill_size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "context_length": rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        "disable_radix_cache": not rollout.enable_prefix_caching,
        "disable_cuda_graph": rollout.enforce_eager or device == "cpu",
        "load_format": rollout.load_format,
        "random_seed": rollout.seed,
        "log_level": "error" if rollout.disable_log_stats else "info",
    }
    if rollout.cudagraph_capture_sizes:
        arguments["cuda_graph_bs"] = list(rollout.cudagraph_capture_sizes)
    return SGLangEngine(
        str(model_folder(str(model.path))),
        arguments=arguments,
        extra=dict(rollout.engine_kwargs.sglang),
        tokenizer=str(model_folder(tokenizer_path(model, config.data))) if rollout.stop else None,
        **copy_keys(group, config.data, device),
    )
