"""`EngineConfig`: how an engine is set up. Validates what can be known without touching the model or the device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aengine.checks import FieldChecks, check_names, is_integer, is_positive
from aengine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "cpu", "flashinfer", "triton", "torch_native")
KV_CACHE_DTYPES = ("auto", "fp8")
QUANTIZATIONS = ("none", "int8")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
MOST_SEQS = 65536
DEFAULT_SEQS = 256
MOST_GRAPH_TOKENS = 8192
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that is fixed for the life of an engine. Raises `ConfigError` naming every field that is out of range."""

    model: str
    """A Hugging Face id, a local directory, or "demo" for the bundled model."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id."""
    dtype: str = "auto"
    """Data type of weights and KV cache: auto (the checkpoint's), float32, bfloat16, float16."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:N."""
    threads: int | None = None
    """CPU threads of a step, on a CPU. Default: torch's (one per core), and 1 for models below 20 million parameters."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens. Default: the model's context."""
    max_num_seqs: int | None = None
    """Most sequences that hold KV at once. Default: 256; fewer if max_num_batched_tokens is less, more if a graph size is larger."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step. Default: 512 on a CPU, so that a prompt does not delay other requests for long; 2048 on
    CUDA; at least max_num_seqs."""
    page_size: int = 16
    """Tokens per KV page: a power of two, 1..256."""
    kv_cache_memory: int | None = None
    """Bytes of KV cache. Default: on CUDA what gpu_memory_utilization leaves; on a CPU 1 GiB, at most a quarter of the free memory."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory for weights, activations and KV cache together, in (0, 1]."""
    attention_backend: str = "auto"
    """auto, cpu (our own kernels, on a CPU), flashinfer (on CUDA), triton (our own kernels, on CUDA), torch_native."""
    kv_cache_dtype: str = "auto"
    """auto (that of the weights), fp8 (e4m3, scaled as the checkpoint says, on CUDA)."""
    quantization: str = "none"
    """none, int8 (weights and activations of all linear layers in 8 bits, on a CPU; activations are scaled as they come)."""
    eager: bool = False
    """On CUDA: launch every operation on its own instead of replaying captured graphs. Starts faster, runs slower."""
    graph_sizes: tuple[int, ...] | None = None
    """On CUDA: numbers of sequences for which decode steps are captured as graphs; a step uses the smallest that fits. Default: 1, 2, 4,
    8 to 256 by 8, then in coarser steps up to max_num_seqs, which is always one of them."""
    graph_tokens: int = 512
    """On CUDA: steps with prompt tokens, up to this many tokens, run as pieces of graphs that are captured between the attention of two
    layers. 0: no such graphs."""
    load_format: str = "auto"
    """auto, safetensors, dummy (random weights, no download of weights)."""
    enable_prefix_cache: bool = True
    """Keep the KV of finished sequences while memory allows, and use it for requests that begin with the same tokens."""
    max_queued_requests: int | None = 4096
    """Most sequences that wait for their first step; a request with n > 1 counts as n. A request that would exceed it is refused with
    QueueFullError, unless no other request waits. None: no limit."""
    max_queued_tokens: int | None = None
    """Most prompt tokens that wait for their first step. A request that would exceed it is refused, unless no other request waits. None:
    no limit."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of tokens that tenants of one priority get while they compete; 1 for a tenant that is not named."""
    ageing_seconds: float = 30.0
    """Waiting this long improves a request's priority by one, so that none starves."""
    max_logprobs: int = 20
    """Largest logprobs and prompt_logprobs that a request may ask for."""
    max_unread_tokens: int = 256
    """A request whose reader lags by more tokens than this is parked until the reader has caught up by half."""
    step_timeout: float = 300.0
    """Seconds after which a step counts as hung: every stream then fails, and the engine is dead."""
    seed: int = 0
    """Seeds the random weights of load_format dummy. Requests without a seed get a random one, whatever this is."""

    def __post_init__(self) -> None:
        check = FieldChecks(self)
        check.text("model", "a Hugging Face id, a directory, or 'demo'")
        if self.revision is not None and not isinstance(self.revision, str):
            check.refuse("revision", "a string")
        check.choice("dtype", DTYPES)
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            check.refuse("device", "one of auto, cpu, cuda, cuda:N")
        check.integer("threads", 1, 1024, optional=True)
        check.integer("max_model_len", 2, optional=True)
        check.integer("max_num_seqs", 1, MOST_SEQS, optional=True)
        check.integer("max_num_batched_tokens", 1, optional=True)
        if not is_integer(self.page_size, 1) or self.page_size not in PAGE_SIZES:
            check.refuse("page_size", "a power of two in [1, 256]")
        check.integer("kv_cache_memory", 1, optional=True)
        utilization = self.gpu_memory_utilization
        if not is_positive(utilization) or utilization > 1:
            check.refuse("gpu_memory_utilization", "a number in (0, 1]")
        check.choice("attention_backend", ATTENTION_BACKENDS)
        check.choice("kv_cache_dtype", KV_CACHE_DTYPES)
        check.flag("eager")
        sizes = self.graph_sizes
        if sizes is not None and not (isinstance(sizes, tuple) and sizes and all(is_integer(size, 1, MOST_SEQS) for size in sizes)):
            check.refuse("graph_sizes", f"one or more integers in [1, {MOST_SEQS}]")
        check.integer("graph_tokens", 0, MOST_GRAPH_TOKENS)
        check.choice("load_format", LOAD_FORMATS)
        check.choice("quantization", QUANTIZATIONS)
        check.flag("enable_prefix_cache")
        check.integer("max_queued_requests", 1, optional=True)
        check.integer("max_queued_tokens", 1, optional=True)
        check.integer("max_logprobs", 0)
        check.integer("max_unread_tokens", 1)
        check.positive("ageing_seconds")
        check.positive("step_timeout")
        weights = self.tenant_weights
        if not isinstance(weights, Mapping) or not all(isinstance(name, str) and is_positive(weight) for name, weight in weights.items()):
            check.refuse("tenant_weights", "a mapping from tenant to a finite number > 0")
        check.integer("seed", 0, 2**64 - 1)
        if not check.violations and self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.num_seqs:
            check.refuse("max_num_batched_tokens", f">= max_num_seqs ({self.num_seqs}): a step must hold one token of each sequence")
        if not check.violations and sizes is not None and max(sizes) > self.num_seqs:
            check.refuse("graph_sizes", f"at most max_num_seqs ({self.num_seqs}): no step has more sequences")
        check.finish(ConfigError)

    @property
    def num_seqs(self) -> int:
        """`max_num_seqs`, or its default beside the other fields."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        wanted = max((DEFAULT_SEQS, *(self.graph_sizes or ())))
        return min(wanted, self.max_num_batched_tokens or wanted)

    @classmethod
    def of(cls, model_or_config: str | EngineConfig, **overrides: Any) -> EngineConfig:
        """The config of a model name, or a config, with `overrides`; an unknown name is refused with the names there are."""
        check_names(cls, overrides)
        if isinstance(model_or_config, EngineConfig):
            return replace(model_or_config, **overrides)
        return cls(**{"model": model_or_config, **overrides})
