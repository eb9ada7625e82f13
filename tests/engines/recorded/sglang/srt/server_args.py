"""Arguments of the server: those of SGLang's that a trainer may set."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ServerArgs:
    model_path: str
    skip_tokenizer_init: bool = False
    tokenizer_path: str | None = None
    load_format: str = "auto"
    trust_remote_code: bool = False
    context_length: int | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    dtype: str = "auto"
    mem_fraction_static: float | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int = 16384
    schedule_policy: str = "fcfs"
    device: str | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    nnodes: int = 1
    random_seed: int | None = None
    watchdog_timeout: float = 300
    log_level: str = "info"
    json_model_override_args: str = "{}"
    attention_backend: str | None = None
    sampling_backend: str | None = None
    disable_radix_cache: bool = False
    cuda_graph_bs: list[int] | None = None
    disable_cuda_graph: bool = False
    enable_memory_saver: bool = False
    enable_deterministic_inference: bool = False

    def __post_init__(self) -> None:
        assert self.load_format in ("auto", "dummy", "safetensors"), f"load_format {self.load_format} is unknown"
