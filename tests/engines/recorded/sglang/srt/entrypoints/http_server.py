"""The endpoints that the adapter uses, with SGLang's field names, answers and moods."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import pickle
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sglang.srt.server_args import ServerArgs

MEMORY = frozenset({"weights", "kv_cache"})
UNPICKLED = ("builtins.", "collections.", "copyreg.", "torch.", "multiprocessing.resource_sharer.")


@dataclass
class GenerateReqInput:
    input_ids: list[int]
    rid: str | None = None
    sampling_params: dict[str, Any] = field(default_factory=dict)
    return_logprob: bool = False
    logprob_start_len: int = -1
    stream: bool = False


@dataclass
class SamplingParams:
    max_new_tokens: int = 128
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise ValueError("temperature, top_p or min_p is out of range")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {self.top_k}.")
        if self.sampling_seed is not None:
            torch.tensor(self.sampling_seed, dtype=torch.int32)  # as older versions keep it


@dataclass
class UpdateWeightsFromTensorReqInput:
    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


@dataclass
class MemoryReqInput:
    tags: list[str] | None = None


@dataclass
class GetWeightsByNameReqInput:
    name: str
    truncate_size: int = 100


@dataclass
class AbortReq:
    rid: str = ""
    abort_all: bool = False


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not f"{module}.{name}".startswith(UNPICKLED):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class State:
    """One model, and who waits for it."""

    def __init__(self, args: ServerArgs):
        self.args = args
        config = AutoConfig.from_pretrained(args.model_path)
        for name, value in json.loads(args.json_model_override_args).items():
            setattr(config, name, value)
        torch.manual_seed(args.random_seed or 0)
        dtype = getattr(torch, args.dtype, None)
        if args.load_format == "dummy":
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(args.model_path, config=config, dtype=dtype)
        self.model.eval()
        self.ends = {config.eos_token_id} if isinstance(config.eos_token_id, int) else set(config.eos_token_id or ())
        self.tokenizer = None
        if not args.skip_tokenizer_init:
            self.tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_path or args.model_path)
        self.gone: set[str] = set()
        self.running = 0
        self.aborting = False
        self.prefixes: dict[tuple[int, ...], torch.Tensor] = {}
        self.turn = threading.Lock()

    @torch.no_grad()
    def next_logits(self, tokens: list[int]) -> torch.Tensor:
        """A radix cache may hold what was computed with weights that are gone."""
        with self.turn:
            if self.gone:
                raise RuntimeError(f"generation without {sorted(self.gone)}: illegal memory access")
            found = self.prefixes.get(tuple(tokens))
            if found is None:
                found = self.model(torch.tensor([tokens])).logits[0, -1].float()
                if not self.args.disable_radix_cache:
                    self.prefixes[tuple(tokens)] = found
            return found

    def generate(self, request: GenerateReqInput) -> dict[str, Any]:
        params = SamplingParams(**request.sampling_params)
        words = self.model.config.vocab_size
        if not request.input_ids or not all(0 <= token < words for token in request.input_ids):
            raise ValueError("input_ids are empty or out of the vocabulary")
        if len(request.input_ids) + params.max_new_tokens > (self.args.context_length or math.inf):
            raise ValueError(f"The input is longer than the model's context length ({self.args.context_length})")
        with self.turn:
            self.running += 1
        try:
            tokens, log_probs, reason = self.decode(request.input_ids, params)
        finally:
            with self.turn:
                self.running -= 1
                self.aborting &= self.running > 0
        about = {"id": request.rid or "0", "finish_reason": reason, "prompt_tokens": len(request.input_ids)}
        about |= {"completion_tokens": len(tokens), "cached_tokens": 0, "weight_version": "default"}
        if request.return_logprob:
            about["input_token_logprobs"] = []
            about["output_token_logprobs"] = [[*pair, None] for pair in zip(log_probs, tokens, strict=True)]
        return {"output_ids": tokens, "meta_info": about}

    def decode(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float], dict[str, Any]]:
        tokens: list[int] = []
        log_probs: list[float] = []
        while True:
            if self.aborting:
                return tokens, log_probs, {"type": "abort", "message": "Abort in waiting queue", "status_code": None}
            logits = self.next_logits(prompt + tokens)
            probs = (logits / (params.temperature or 1.0)).softmax(-1)
            token = int(logits.argmax()) if params.temperature == 0 else self.draw(probs, params, len(tokens))
            tokens.append(token)
            log_probs.append(probs[token].log().item())
            if len(tokens) >= params.max_new_tokens:  # before it looks for stop tokens
                return tokens, log_probs, {"type": "length", "length": params.max_new_tokens}
            if not params.ignore_eos and token in {*(params.stop_token_ids or ()), *self.ends}:
                return tokens, log_probs, {"type": "stop", "matched": token}
            if (string := self.matched(tokens, params.stop or [])) is not None:
                return tokens, log_probs, {"type": "stop", "matched": string}

    def matched(self, tokens: list[int], strings: list[str]) -> str | None:
        """Looks at the last tokens alone, one more than the longest string has when it is encoded."""
        if not strings:
            return None
        assert self.tokenizer is not None, "stop strings need a tokenizer: skip_tokenizer_init is set"
        most = max(len(self.tokenizer.encode(string, add_special_tokens=False)) for string in strings)
        tail = self.tokenizer.decode(tokens[-most - 1 :])
        return next((string for string in strings if string in tail), None)

    def draw(self, probs: torch.Tensor, params: SamplingParams, position: int) -> int:
        """Seeds count in deterministic inference alone."""
        falling, order = probs.sort(descending=True)
        keep = falling.cumsum(0) - falling <= params.top_p
        keep &= falling >= params.min_p * falling[0]
        if params.top_k > 0:
            keep[params.top_k :] = False
        generator = None
        if self.args.enable_deterministic_inference:
            seed = 42 if params.sampling_seed is None else params.sampling_seed
            generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
        return int(order[torch.multinomial(falling * keep, 1, generator=generator)])

    @torch.no_grad()
    def update_weights_from_tensor(self, request: UpdateWeightsFromTensorReqInput) -> dict[str, Any]:
        assert len(request.serialized_named_tensors) == self.args.tp_size, "a payload a rank"
        if "weights" in self.gone:
            return {"success": False, "message": "the weights' memory is released"}
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        for payload in request.serialized_named_tensors[:1]:
            for name, tensor in SafeUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load():
                if name not in own:
                    return {"success": False, "message": f"Failed to update parameter online: {name} is unknown"}
                own[name].copy_(tensor)
        if request.flush_cache:
            self.prefixes.clear()
        return {"success": True, "message": "Success"}

    @torch.no_grad()
    def release_memory_occupation(self, request: MemoryReqInput) -> None:
        assert self.args.enable_memory_saver, "memory saver is disabled"
        assert self.running == 0, "release_memory_occupation should be called only when server is idle."
        tags = set(request.tags or MEMORY)
        assert tags <= MEMORY and not tags & self.gone, f"{tags} of {self.gone}"
        self.gone |= tags
        self.prefixes.clear()
        if "weights" in tags:
            for param in self.model.parameters():
                param.zero_()

    def resume_memory_occupation(self, request: MemoryReqInput) -> None:
        tags = set(request.tags or MEMORY)
        assert tags <= self.gone, f"{tags} of {self.gone}"
        self.gone -= tags

    def get_weights_by_name(self, request: GetWeightsByNameReqInput) -> Any:
        tied = self.model.config.tie_word_embeddings and request.name == "lm_head.weight"
        name = "model.embed_tokens.weight" if tied else request.name
        return dict(self.model.named_parameters())[name].float()[: request.truncate_size].tolist()

    def abort_request(self, request: AbortReq) -> None:
        self.aborting = request.abort_all and self.running > 0

    def flush_cache(self) -> bool:
        if self.running == 0:
            self.prefixes.clear()
        return self.running == 0


POSTS: dict[str, type] = {
    "generate": GenerateReqInput,
    "update_weights_from_tensor": UpdateWeightsFromTensorReqInput,
    "release_memory_occupation": MemoryReqInput,
    "resume_memory_occupation": MemoryReqInput,
    "get_weights_by_name": GetWeightsByNameReqInput,
    "abort_request": AbortReq,
}


class Handler(BaseHTTPRequestHandler):
    state: State

    def log_message(self, *args: Any) -> None:
        pass

    def say(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path in ("/health", "/health_generate"):
            self.say(200, b"", "text/plain")
        elif self.path == "/get_server_info":
            self.say(200, json.dumps(dataclasses.asdict(self.state.args)).encode())
        else:
            self.say(404, b'{"detail": "Not Found"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = self.path.removeprefix("/")
        try:
            if path == "flush_cache":
                self.say(200 if self.state.flush_cache() else 400, b"Cache flushed.\n", "text/plain")
                return
            if path not in POSTS:
                self.say(404, b'{"detail": "Not Found"}')
                return
            strange = set(body) - {one.name for one in dataclasses.fields(POSTS[path])}
            if strange:
                raise ValueError(f"unknown fields: {sorted(strange)}")
            found = getattr(self.state, path)(POSTS[path](**body))
        except Exception as error:
            self.say(400, json.dumps({"error": {"message": f"{type(error).__name__}: {error}"}}).encode())
            return
        failed = isinstance(found, dict) and found.get("success") is False
        self.say(400 if failed else 200, json.dumps(found).encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def launch_server(server_args: ServerArgs) -> None:
    print("loading", server_args.model_path, flush=True)
    torch.set_num_threads(1)
    handler = type("Bound", (Handler,), {"state": State(server_args)})
    Server((server_args.host, server_args.port), handler).serve_forever()
