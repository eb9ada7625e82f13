"""vLLM in this process, or spread by it over workers of its own: tokens in, tokens and their log-probs out.

The engine has a copy of the weights. `load_bucket` takes new ones, and remembers what it sent, so
that a layer which did not take them can be named. Under LoRA it reads the frozen weights itself, and `load_adapter`
gives it what is trained.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paddock.config.roles import RolloutConfig
from paddock.engines.rollout.base import Completion, EngineConfig, Request, Sampling
from paddock.engines.rollout.copies import WeightCopy, copy_keys, require_no_images, row_seeds
from paddock.errors import UserError
from paddock.models.load import model_folder

if TYPE_CHECKING:
    from paddock.engines.train.engine import Engine

KEY = "actor_rollout_ref.rollout"
ARGUMENTS = f"{KEY}.engine_kwargs.vllm"
OURS = frozenset({"model", "skip_tokenizer_init", "worker_extension_cls", "logprobs_mode", "enable_sleep_mode",
                  "enable_lora"})  # fmt: skip
"""Arguments that the adapter sets: other values would break it."""

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_HOST_IP": "127.0.0.1"}
"""Read by vLLM when it is imported; what the user has set wins. The KV cache of a CPU is in GiB."""

LAUNCHED = "external_launcher"
HEAD, TABLE = "lm_head.weight", "embed_tokens.weight"


RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of LoRA adapters that vLLM supports."""

SAME = {torch.float32: 1e-3, torch.bfloat16: 0.03, torch.float16: 0.03}
"""Largest |engine's sum - trainer's sum| of a matrix, divided by its norm, that rounding can explain."""


class WeightReceiver:
    """Extends vLLM's worker: vLLM makes it a base class of the worker, whose `model_runner` it uses."""

    model_runner: Any
    reload_weights: Any
    waiting: list[tuple[str, Tensor]]

    def paddock_receive(self, bucket: list[tuple[str, Tensor]], first: bool, last: bool) -> None:
        """Parameters are written in place; those of a CPU are packed for its kernels, and must all be loaded anew."""
        model = self.model_runner.get_model()
        if next(model.parameters()).device.type != "cpu":
            model.load_weights(iter(bucket))
            return
        self.waiting = bucket if first else self.waiting + bucket
        if last:
            self.reload_weights(weights_iterator=iter(self.waiting))
            self.waiting = []
            pack_tied_head(model)

    def paddock_layer_sums(self) -> dict[tuple[str, ...], float]:
        """The sum of each matrix, as the kernel that multiplies with it sees it, by the names it was loaded from."""
        return dict(layer_sums(self.model_runner.get_model()))


def pack_tied_head(model: Any) -> None:
    """Packs a tied head again: on a CPU a reload leaves its packed copy of the embedding's weights as it was."""
    head = getattr(model, "lm_head", None)
    if head is None or not model.config.tie_word_embeddings:
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


@torch.no_grad()
def layer_sums(model: Any) -> Iterator[tuple[tuple[str, ...], float]]:
    """A product with ones sums a matrix, packed copies of it too; a table that is only looked up is summed as it is."""
    packed = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        width = getattr(module, "input_size_per_partition", None)
        if hasattr(module, "num_embeddings_padded"):
            if not name.endswith("lm_head"):
                yield (f"{name}.weight",), module.weight.sum(dtype=torch.float64).item()
        elif width is not None and hasattr(module, "quant_method"):
            place, _, last = name.rpartition(".")
            parts = packed.get(last, [last])
            yield tuple(f"{place}.{part}.weight" for part in parts), product_sum(module, width)
    head = getattr(model, "lm_head", None)
    if head is not None:
        yield (HEAD,), product_sum(head, head.embedding_dim)


def product_sum(module: Any, width: int) -> float:
    some = next(module.parameters())
    ones = torch.ones(1, width, dtype=module.params_dtype, device=some.device)
    return module.quant_method.apply(module, ones).sum(dtype=torch.float64).item()


@dataclasses.dataclass(frozen=True)
class Sent:
    """Sums over a matrix as the trainer had it."""

    total: Tensor
    squares: Tensor


@dataclasses.dataclass
class Drawing:
    """A response while it is drawn: its tokens so far, and where they are in the table of stop strings."""

    key: int
    row: int
    minimum: int
    state: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)

    def take(self, output: Any) -> None:
        tokens = list(output.token_ids)
        self.tokens += tokens
        self.log_probs += [place[token].logprob for place, token in zip(output.logprobs, tokens, strict=True)]


class VLLMEngine(WeightCopy):
    """See `RolloutEngine`. Every response is a request of its own, with a seed from (seed, step, row, first position).

    Log-probs are those that `logprobs_mode` names: of the raw logits, or after temperature and filters.
    """

    name = "vllm"

    def __init__(
        self,
        model: str,
        *,
        dtype: torch.dtype,
        device: str,
        arguments: dict[str, Any],
        extra: dict[str, Any] | None = None,
        adapter_rank: int = 0,
        **copy: Any,
    ):
        """`adapter_rank` above 0: it takes adapters of up to that rank beside the model's own weights. `copy`: further
        arguments of `WeightCopy`."""
        super().__init__(dtype=dtype, device=device, **copy)
        self.takes_adapter = adapter_rank > 0
        self.adapter: Any = None
        self.sent: dict[str, Sent] = {}
        self.requests = 0
        self.waiting: dict[str, Drawing] = {}
        """Responses in flight, by their requests' names in vLLM."""
        for name, value in (ENVIRONMENT | (ON_CPU if device == "cpu" else {})).items():
            os.environ.setdefault(name, value)
        own = {
            "model": model,
            "dtype": str(dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            "worker_extension_cls": f"{WeightReceiver.__module__}.{WeightReceiver.__name__}",
            "enable_sleep_mode": self.frees,
        }
        if self.takes_adapter:
            arguments = arguments | room_for_adapter(adapter_rank, arguments.get("load_format"))
        if device == "cpu":
            drop_left_memory()
        self.llm = start(own | arguments | launched_with_others(), extra or {})

    @property
    def core(self) -> Any:
        return self.llm.llm_engine

    @property
    def parallel(self) -> Any:
        return self.core.vllm_config.parallel_config

    def submit(self, requests: Iterable[Request]) -> None:
        requests, sampling = list(requests), self.sampling
        assert sampling is not None, "no session is open: resume comes first"
        require_no_images(requests, self.name)
        for request in requests:
            state = self.strings.begun(request) if self.strings else 0
            for key, row, seed in zip(request.keys, request.rows, row_seeds(request, sampling), strict=True):
                self.requests += 1
                name = f"paddock-{self.requests}"
                asked = parameters(sampling, seed, request.limit, request.minimum(sampling), self.parts)
                self.core.add_request(name, {"prompt_token_ids": request.tokens}, asked, lora_request=self.adapter)
                self.waiting[name] = Drawing(key, row, request.minimum(sampling), state)

    def advance(self, seconds: float | None = None) -> list[Completion]:
        deadline = None if seconds is None else time.monotonic() + seconds
        while self.waiting:
            finished = [completion for answer in self.core.step() if (completion := self.heard(answer))]
            if finished or (deadline is not None and time.monotonic() > deadline):
                return finished
        return []

    def heard(self, answer: Any) -> Completion | None:
        """Takes the tokens of an answer; returns the response if they end it, by a stop string before vLLM knows."""
        drawing = self.waiting.get(answer.request_id)
        if drawing is None:  # it was ended while the device drew on
            return None
        output, before = answer.outputs[0], len(drawing.tokens)
        drawing.take(output)
        end = None
        if self.strings:
            new, left = drawing.tokens[before:], max(0, drawing.minimum - before)
            drawing.state, end = self.strings.read(new, drawing.state, left)
        if end is None and not answer.finished:
            return None
        del self.waiting[answer.request_id]
        if not answer.finished:
            self.core.abort_request([answer.request_id])
        whole = len(drawing.tokens) if end is None else before + end
        stopped = end is not None or output.finish_reason == "stop"
        return Completion(
            drawing.row, drawing.tokens[:whole], drawing.log_probs[:whole], stopped=stopped, key=drawing.key
        )

    def pause(self) -> list[Completion]:
        """Ends the session. What is not finished goes on from its part, or begins again with the same seed."""
        if self.waiting:
            self.core.abort_request(list(self.waiting))
        parts = [
            Completion(part.row, part.tokens, part.log_probs, stopped=False, key=part.key, finished=False)
            for part in self.waiting.values()
            if self.parts and part.tokens
        ]
        self.sampling, self.waiting = None, {}
        return parts

    def load_bucket(self, bucket: list[tuple[str, Tensor]], first: bool, last: bool) -> None:
        self.sent = noted(bucket) if first else self.sent | noted(bucket)
        if self.parallel.distributed_executor_backend in ("mp", "ray"):
            # To another process a tensor travels through host memory; in this one it is the trainer's own.
            bucket = [(name, tensor.cpu()) for name, tensor in bucket]
        self.llm.collective_rpc("paddock_receive", args=(bucket, first, last))
        if last:
            self.begin_anew()

    def load_adapter(self, folder: Path) -> None:
        """Loads the adapter in this folder, as peft saves it, in place of the one before."""
        from vllm.lora.request import LoRARequest

        number = self.adapter.lora_int_id + 1 if self.adapter else 1
        if self.adapter:
            self.core.remove_lora(self.adapter.lora_int_id)
        self.adapter = LoRARequest(f"paddock-{number}", number, str(folder))
        try:
            self.core.add_lora(self.adapter)
        except (ValueError, RuntimeError) as error:
            raise UserError(
                f"vLLM does not take the adapter: {error}",
                key="actor_rollout_ref.model.target_modules",
                fix="actor_rollout_ref.model.lora.merge=True, which hands it merged weights",
            ) from error
        self.begin_anew()

    def release(self) -> None:
        self.llm.sleep(level=1 if self.takes_adapter else 2)

    def restore(self, part: str | None) -> None:
        self.llm.wake_up(tags=[part] if part else None)

    def drop_cache(self) -> None:
        self.llm.reset_prefix_cache()

    def differing_layers(self) -> list[str]:
        """Matrices that are not what was sent, the most different first; where vLLM's layout can be compared."""
        if self.parallel.distributed_executor_backend == LAUNCHED and self.parallel.world_size > 1:
            return []  # the other parts are in other processes
        held: dict[tuple[str, ...], float] = {}
        for sums in self.llm.collective_rpc("paddock_layer_sums"):
            for names, value in sums.items():
                held[names] = held.get(names, 0.0) + value
        sent = dict(self.sent)
        table = next((name for name in sent if name.endswith(TABLE)), None)
        if table is not None:
            sent.setdefault(HEAD, sent[table])
        far: dict[str, float] = {}
        for names, total in held.items():
            if all(name in sent for name in names):
                size = sum(sent[name].squares.item() for name in names) ** 0.5
                gap = abs(total - sum(sent[name].total.item() for name in names))
                far["+".join(names)] = gap / max(size, 1e-12)
        limit = SAME[self.dtype]
        return sorted((name for name in far if far[name] > limit), key=lambda name: -far[name])


def noted(bucket: list[tuple[str, Tensor]]) -> dict[str, Sent]:
    matrices = ((name, tensor) for name, tensor in bucket if tensor.ndim == 2)
    return {name: Sent(it.sum(dtype=torch.float64), it.float().square().sum()) for name, it in matrices}


def room_for_adapter(rank: int, load_format: str | None) -> dict[str, Any]:
    """The frozen weights are never sent: vLLM reads them where the trainer did."""
    if rank > RANKS[-1]:
        raise UserError(
            f"vLLM takes adapters of rank {RANKS[-1]} at most",
            key="actor_rollout_ref.model.lora_rank",
            value=rank,
            fix="actor_rollout_ref.model.lora.merge=True, which hands it merged weights",
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(size for size in RANKS if size >= rank),
        "load_format": "auto" if load_format == "dummy" else load_format,
    }


def launched_with_others() -> dict[str, Any]:
    """Returns the arguments with which vLLM joins the ranks that train, so that neighbours share an engine; else
    none."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return {}
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}  # each sees only its own device
    return {"distributed_executor_backend": LAUNCHED}


def drop_left_memory() -> None:
    """Removes shared memory that a killed run left: on a CPU, ranks of one engine talk through memory of a fixed name.

    Memory that is in use loses only its name.
    """
    if launched_with_others():
        for path in Path("/dev/shm").glob("-*-cpushm_*"):
            path.unlink(missing_ok=True)
        dist.barrier()


def start(own: dict[str, Any], extra: dict[str, Any]) -> Any:
    """`extra` is the user's: handed on as it is, unless vLLM or this adapter could not work with it."""
    from vllm import LLM, EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in extra:
        if name in OURS or name not in known:
            raise UserError(
                "is set by paddock" if name in OURS else "is no argument of the vLLM that is installed",
                key=f"{ARGUMENTS}.{name}",
                value=extra[name],
                fix=" or ".join(["leave it out", *difflib.get_close_matches(name, set(known) - OURS, n=1)]),
            )
    try:
        return LLM(**{**own, **extra})
    except (ValueError, TypeError, NotImplementedError) as error:
        guilty = next((name for name in extra if name in str(error)), None)
        raise UserError(
            f"vLLM refuses it: {error}",
            key=KEY if guilty is None else f"{ARGUMENTS}.{guilty}",
            value=extra.get(guilty) if guilty else None,
            fix=f"another value, or {KEY}.name=embedded",
        ) from error


def parameters(
    sampling: Sampling, seed: int | None, max_tokens: int, min_tokens: int = 0, as_drawn: bool = False
) -> Any:
    """`as_drawn`: tokens are told when they are drawn, as stop strings need it; else when the response is finished."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_k=max(sampling.top_k, 0),  # 0: all
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=seed,
        stop_token_ids=sorted(sampling.ends),
        ignore_eos=True,  # the model's own end is among the stop tokens, or is not meant to stop
        logprobs=0,
        detokenize=False,
        # It bars the model's own end too, which ends nothing if stop tokens are ignored.
        min_tokens=0 if sampling.ignore_eos else min(min_tokens, max_tokens),
        output_kind=RequestOutputKind.DELTA if sampling.stop or as_drawn else RequestOutputKind.FINAL_ONLY,
    )


def open_engine(config: EngineConfig, trainer: Engine | None) -> VLLMEngine:
    """Makes the engine as the config asks for it. Without a trainer beside it, it takes adapters merged."""
    group, device = config.actor_rollout_ref, config.trainer.device
    model, rollout = group.model, group.rollout
    arguments: dict[str, Any] = {
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.override_config),
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "pipeline_parallel_size": rollout.pipeline_model_parallel_size,
        "gpu_memory_utilization": rollout.gpu_memory_utilization / config.trainer.ranks_per_device,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "max_model_len": rollout.max_model_len or rollout.prompt_length + rollout.response_length,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager or device == "cpu",
        "load_format": rollout.load_format,
        "scheduling_policy": rollout.scheduling_policy,
        "disable_log_stats": rollout.disable_log_stats,
        "logprobs_mode": logprobs_mode(rollout),
    }
    if rollout.cudagraph_capture_sizes:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": list(rollout.cudagraph_capture_sizes)}
    return VLLMEngine(
        str(model_folder(str(model.path))),
        arguments=arguments,
        extra=dict(rollout.engine_kwargs.vllm),
        adapter_rank=trainer.adapters.rank if trainer and trainer.adapters and not model.lora.merge else 0,
        **copy_keys(group, config.data, device),
    )


def logprobs_mode(rollout: RolloutConfig) -> str:
    """vLLM's raw ones are before temperature and filters, its processed ones after both. Ours are between."""
    filtered = rollout.do_sample and (rollout.top_k > 0 or rollout.top_p < 1.0 or rollout.min_p > 0.0)
    return "raw_logprobs" if filtered or rollout.min_tokens else rollout.logprobs_mode
