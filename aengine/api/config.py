"""`EngineConfig`: how an engine is set up. Validates what can be known without touching the model or the device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError
from aengine.api.fields import (
    MAX_UINT64,
    POSITIVE,
    Accepts,
    Aliases,
    Range,
    Size,
    check_fields,
    check_names,
    integer,
    is_integer,
    is_not,
    is_positive,
    one_of,
    text,
)

MOST_SEQS = 65536
DEFAULT_SEQS = 256
_FRACTION = Accepts(lambda value: is_positive(value) and value <= 1, "a number in (0, 1]")
_GRAPH_SIZES = Accepts(
    lambda sizes: isinstance(sizes, tuple) and sizes != () and all(is_integer(size, 1, MOST_SEQS) for size in sizes),
    f"one or more integers in [1, {MOST_SEQS}]",
)
_WEIGHTS = Accepts(
    lambda weights: isinstance(weights, Mapping) and all(isinstance(name, str) and is_positive(weights[name]) for name in weights),
    "a mapping from tenant to a finite number > 0",
)
ADAPTER_NAME = r"[A-Za-z0-9._:/-]{1,128}"
_ADAPTERS = Accepts(
    lambda paths: (
        isinstance(paths, Mapping)
        and all(
            isinstance(name, str) and re.fullmatch(ADAPTER_NAME, name) and isinstance(paths[name], str) and paths[name] for name in paths
        )
    ),
    f"a mapping from names that match {ADAPTER_NAME} to paths",
)
MOST_ADAPTERS = 1024
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
"""Other names of data types."""


TAKE_MODEL = ("draft", "eagle", "auto")
"""The values of `speculative` that `speculative_model` is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that is fixed for the life of an engine. Raises `ConfigError` naming every field that is out of range."""

    model: Annotated[str, text("a Hugging Face id, a directory, or 'demo'")]
    """A Hugging Face id (also id@revision), a local directory, or "demo" for the bundled model."""
    revision: Annotated[str | None, text(pattern=r"(?s).*")] = None
    """Branch, tag or commit of a Hugging Face id."""
    dtype: Annotated[str, Aliases(one_of("auto", "float32", "bfloat16", "float16"), DTYPE_ALIASES)] = "auto"
    """Data type of weights and KV cache: auto (the checkpoint's; on a CPU bfloat16 for float16, or float32 beside
    codes), float32 (also fp32, float), bfloat16 (bf16), float16 (fp16, half)."""
    device: Annotated[str, text("one of auto, cpu, cuda, cuda:N", r"auto|cpu|cuda(:[0-9]+)?")] = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:N."""
    threads: Annotated[int | None, integer(1, 1024)] = None
    """CPU threads of a step, on a CPU. Default: one per core, or OMP_NUM_THREADS, and 1 for models below 20 million parameters."""
    max_model_len: Annotated[int | None, integer(2)] = None
    """Longest prompt plus output in tokens. Default: the model's context."""
    max_num_seqs: Annotated[int | None, integer(1, MOST_SEQS)] = None
    """Most sequences that hold KV at once. Default: 256; fewer if max_num_batched_tokens is less, more if a graph size is larger."""
    max_num_batched_tokens: Annotated[int | None, integer(1)] = None
    """Most tokens computed in one step. Default: 512 on a CPU, so that a prompt does not delay other requests for long; 2048 on
    CUDA; at least max_num_seqs."""
    page_size: Annotated[int, one_of(1, 2, 4, 8, 16, 32, 64, 128, 256, words="a power of two in [1, 256]")] = 16
    """Tokens per KV page: a power of two, 1..256."""
    kv_cache_memory: Annotated[int | None, Size(1)] = None
    """Bytes of KV cache, or a size such as 8GB or 512MiB. Default: on CUDA what gpu_memory_utilization leaves; on a CPU 1 GiB, at most a
    quarter of the free memory."""
    gpu_memory_utilization: Annotated[float, _FRACTION] = 0.9
    """Fraction of the GPU's memory for weights, activations and KV cache together, in (0, 1]."""
    attention_backend: Annotated[str, one_of("auto", "cpu", "flashinfer", "triton", "torch_native")] = "auto"
    """auto, cpu (our own kernels, on a CPU), flashinfer (on CUDA), triton (our own kernels, on CUDA), torch_native."""
    kv_cache_dtype: Annotated[str, one_of("auto", "fp8", "int8", "int4")] = "auto"
    """auto (that of the weights), fp8 (e4m3, scaled as the checkpoint says, on CUDA), int8 or int4 (with a scale for each head of a token,
    on a CPU)."""
    quantization: Annotated[str, one_of("none", "int8", "int4", "fp8")] = "none"
    """What the weights of all linear layers become when they are loaded, unless the checkpoint has them quantised: none, int8 (one scale
    per row), int4 (one scale per 32 weights; the head in int8), fp8 (one scale per row). Activations are quantised, too, as they come: on a
    CPU with int8 and int4, on CUDA with fp8."""
    numerics: Annotated[str, one_of("fast", "canonical", "batch_invariant")] = "fast"
    """fast (the best instructions of the device), canonical (the same bits on every CPU from AVX2 and NEON up, and with every compiler;
    needs our CPU kernels, and multiplies bfloat16 as float32), batch_invariant (CUDA gives a request the same bits in any crowd and with
    its prompt in any chunks, as our CPU kernels always do; needs Triton, one device and a native model without recurrent layers)."""
    speculative: Annotated[str, one_of("off", "ngram", "draft", "eagle", "mtp", "auto")] = "off"
    """Where drafts come from: tokens that the model checks several of in one step, which changes no output. off, ngram (what followed the
    latest tokens where they stood in the prompt or the output before), draft (a smaller model), eagle (an EAGLE-3 head), mtp (layers of the
    checkpoint that predict tokens after the next), auto (ngram, and where that has none speculative_model if there is one, else mtp layers
    if there are any). In all but off, text that a grammar forces is a draft, too."""
    speculative_model: Annotated[str | None, text("a Hugging Face id, a directory, or a GGUF file")] = None
    """What proposes drafts: for draft a native model with the vocabulary of the model; for eagle a head that was trained for the model; for
    auto either of them, or None."""
    max_drafts: Annotated[int, integer(1, 16)] = 8
    """Most drafts of a sequence in one step; of text that a grammar forces there may be 16. How many there are is decided by what steps
    take and how often drafts are right."""
    eager: bool = False
    """On CUDA: launch every operation on its own instead of replaying captured graphs. Starts faster, runs slower."""
    graph_sizes: Annotated[tuple[int, ...] | None, _GRAPH_SIZES] = None
    """On CUDA: numbers of sequences for which decode steps are captured as graphs; a step uses the smallest that fits. Default: 1, 2, 4,
    8 to 256 by 8, then in coarser steps up to max_num_seqs, which is always one of them."""
    graph_tokens: Annotated[int, integer(0, 8192)] = 2048
    """On CUDA: steps with prompt tokens, up to this many tokens, run as pieces of graphs that are captured between the attention of two
    layers. 0: no such graphs."""
    load_format: Annotated[str, one_of("auto", "safetensors", "pt", "dummy")] = "auto"
    """auto (safetensors if there are any, else pt), safetensors, pt (PyTorch files: .bin, .pt, .pth), dummy (random weights, no download of
    weights)."""
    model_impl: Annotated[str, one_of("auto", "native", "transformers")] = "auto"
    """Whose code runs the model: auto (native where the model and all of its options are supported, else transformers), native (ours),
    transformers (slower, checked at the start)."""
    skip_self_check: bool = False
    """Serve a model that runs in the code of transformers without comparing its logits at the start with those of its own forward pass."""
    content_special_tokens: bool = False
    """Chats: special tokens that messages, tools or template_kwargs spell out are tokens, as those that the template writes are. Else they
    are text, so that nobody's text ends a turn or begins one."""
    tensor_parallel_size: Annotated[int, integer(1, 64)] = 1
    """Ranks that share every layer of the model; each is a process, but for the first, which is the engine's own."""
    tensor_parallel_mode: Annotated[str, one_of("exact", "fast")] = "exact"
    """exact (every dot product is computed whole on one rank, so that the tokens are those of one rank; four exchanges per layer), fast
    (products whose inputs are split are summed over the ranks, in their order; two exchanges per layer)."""
    pipeline_parallel_size: Annotated[int, integer(1, 64)] = 1
    """Stages that consecutive layers of the model are divided into, each on tensor_parallel_size ranks."""
    expert_parallel_size: Annotated[int, integer(1, 64)] = 1
    """Engines that share the experts of a model, each with requests of its own: every one holds a part of the experts and the rest of the
    model whole, and all compute every step together."""
    expert_parallel_rank: Annotated[int, integer(0, 63)] = 0
    """Which of these engines this is; the others join that of rank 0 at rank_address."""
    local_ranks: Annotated[int | None, integer(1, 4096)] = None
    """Ranks on this host, the engine's own included, which are the first. Default: all; 1 with a rank_address."""
    rank_address: Annotated[str | None, text("an address host:port", r".*:[0-9]{1,5}")] = None
    """host:port where the ranks of other hosts join, or the engines that share experts. What ranks send each other is not encrypted, so it
    should be a private network."""
    rank_secret_file: Annotated[str | None, text("a path")] = None
    """File with a secret of at least 16 bytes that those who join have, too."""
    max_images: Annotated[int, integer(0, 32)] = 32
    """Most images of a request, of models that take images. 0: none are taken, and their part of the model is never loaded."""
    image_max_tokens: Annotated[int | None, integer(16, 65536)] = None
    """Most tokens of an image, of models that take images of any size: larger ones are made smaller. Default: 1024 on a CPU, 4096 on
    CUDA."""
    image_cache_memory: Annotated[int, Size(0)] = 256 << 20
    """Bytes of host memory, or a size such as 1GB, for what images became, so that the next turn about one does not encode it again."""
    enable_prefix_cache: bool = True
    """Keep the KV of finished sequences while memory allows, and use it for requests that begin with the same tokens."""
    role: Annotated[str, one_of("both", "prefill", "decode")] = "both"
    """What a router sends this engine: long prompts up to their first token, what comes behind that and short prompts, or both. Replicas
    share KV by their kv_disk_path."""
    session_seconds: Annotated[float, POSITIVE] = 600.0
    """How long the prefix of a session's latest request is kept before other prefixes."""
    session_share: Annotated[float, Range(0.0, 1.0)] = 0.5
    """The most of the KV pool that the prefixes of sessions may have kept for them; beyond it the tenant that has most loses the one that
    was used longest ago. 0.0: none is kept before others."""
    host_kv_memory: Annotated[int, Size(0)] = 0
    """Bytes of host memory, or a size such as 8GB, for the KV of prefixes that leave the pool, from which they come back faster than they
    are computed; for GPUs. 0: none."""
    weights_cache: Annotated[str, text("auto, off or a path")] = "auto"
    """Where the weights of a model on a CPU are kept as the kernels read them, so that later starts map them and all processes share them:
    auto, which is a directory of the user's cache unless AENGINE_PACKED_WEIGHTS says another or off; a directory; or off."""
    weights_cache_size: Annotated[int, Size(0)] = 64 << 30
    """Most bytes, or a size such as 100GB, of the files in weights_cache; those that were used longest ago give way."""
    kv_disk_path: Annotated[str | None, text("a path")] = None
    """A directory in which the KV of prefixes is kept, also for later engines with the same model and settings, of one user. None: it is
    not."""
    kv_disk_size: Annotated[int, Size(0)] = 16 << 30
    """Most bytes, or a size such as 100GB, of the files below kv_disk_path; those that were used longest ago give way."""
    state_interval: Annotated[int | None, integer(0)] = None
    """The states of recurrent layers are kept after every so many tokens of a prompt, rounded up to whole pages, for requests that begin
    with the same tokens; 0: only near its end, and where prompts were seen to part. None: so many that they take half the memory of the
    KV."""
    max_queued_requests: Annotated[int | None, integer(1)] = 4096
    """Most sequences that wait for their first step; a request with n > 1 counts as n. A request that would exceed it is refused with
    QueueFullError, unless no other request waits. None: no limit."""
    max_queued_tokens: Annotated[int | None, integer(1)] = None
    """Most tokens, of prompts and known outputs, that wait for their first step. A request that would exceed it is refused, unless no
    other request waits. None: no limit."""
    tenant_weights: Annotated[Mapping[str, float], _WEIGHTS] = field(default_factory=dict)
    """Shares of tokens that tenants of one priority get while they compete; 1 for a tenant that is not named."""
    ageing_seconds: Annotated[float, POSITIVE] = 30.0
    """Waiting this long improves a request's priority by one, so that none starves."""
    max_logprobs: Annotated[int, integer(0)] = 20
    """Largest logprobs and prompt_logprobs that a request may ask for."""
    adapters: Annotated[Mapping[str, str], _ADAPTERS] = field(default_factory=dict)
    """Adapters that are loaded with the model, by the names that requests use: directories that PEFT wrote, Hugging Face ids, or
    "demo-lora"."""
    max_adapters: Annotated[int | None, integer(0, MOST_ADAPTERS)] = None
    """Most adapters that the sequences of one step use; more can be loaded. 0: none can be loaded. Default: with the CPU kernels
    max_num_seqs; else, where each takes memory, as many as `adapters` names, at most 8."""
    max_adapter_rank: Annotated[int, integer(1, 256)] = 64
    """Largest low rank of an adapter."""
    max_unread_tokens: Annotated[int, integer(1)] = 256
    """A request whose reader lags by more tokens than this is parked until the reader has caught up by half."""
    step_timeout: Annotated[float, POSITIVE] = 300.0
    """Seconds after which a step counts as hung: every stream then fails, and the engine is dead."""
    recorded_steps: Annotated[int, integer(0, 2**16)] = 256
    """How many of the latest steps are kept in memory, with the requests that they are of, for `AsyncEngine.save_recording`. 0: none."""
    recording_dir: str | None = None
    """A directory in which a file of these is written when a step fails or hangs, for `aengine-replay`. It holds the token ids
    of prompts and outputs. None: nothing is written."""
    seed: Annotated[int, integer(0, MAX_UINT64)] = 0
    """Seeds the random weights of load_format dummy. Requests without a seed get a random one, whatever this is."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        if self.speculative in ("draft", "eagle") and self.speculative_model is None:
            what = "a draft model" if self.speculative == "draft" else "an EAGLE-3 head"
            raise ConfigError.of("speculative_model", f"is missing: speculative {self.speculative!r} needs {what}")
        if self.speculative not in TAKE_MODEL and self.speculative_model is not None:
            raise ConfigError.of("speculative_model", f"is for speculative 'draft', 'eagle' or 'auto', not {self.speculative!r}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.num_seqs:
            accepted = f">= max_num_seqs ({self.num_seqs}): a step must hold one token of each sequence"
            raise ConfigError.of("max_num_batched_tokens", is_not(self.max_num_batched_tokens, accepted))
        if self.graph_sizes is not None and max(self.graph_sizes) > self.num_seqs:
            accepted = f"at most max_num_seqs ({self.num_seqs}): no step has more sequences"
            raise ConfigError.of("graph_sizes", is_not(self.graph_sizes, accepted))
        if self.adapters and self.max_adapters == 0:
            raise ConfigError.of("max_adapters", f"0 is too few: adapters names {len(self.adapters)}")
        self._check_experts()
        self._check_ranks()

    def _check_experts(self) -> None:
        size, rank = self.expert_parallel_size, self.expert_parallel_rank
        if rank >= size:
            raise ConfigError.of("expert_parallel_rank", is_not(rank, f"below expert_parallel_size ({size})"))
        if size == 1:
            return
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "local_ranks"):
            if (getattr(self, name) or 1) > 1:
                raise ConfigError.of(name, f"{getattr(self, name)} is not possible with expert_parallel_size {size}; choose 1")
        for name, other in (("rank_address", "rank_secret_file"), ("rank_secret_file", "rank_address")):
            if getattr(self, name) is None and getattr(self, other) is not None:  # a router gives its replicas both
                raise ConfigError.of(name, f"is missing: {size} engines share experts, and join rank 0 there with a secret")

    def _check_ranks(self) -> None:
        if self.expert_parallel_size > 1:
            return
        ranks, local = self.num_ranks, self.num_local_ranks
        if local > ranks:
            raise ConfigError.of("local_ranks", f"{local} is more than all ranks: tensor_parallel_size * pipeline_parallel_size is {ranks}")
        for name, value in (("rank_address", self.rank_address), ("rank_secret_file", self.rank_secret_file)):
            if value is None and local < ranks:
                raise ConfigError.of(name, f"is missing: {ranks - local} of {ranks} ranks are on other hosts")
            if value is not None and local == ranks:
                raise ConfigError.of(name, f"is for ranks of other hosts, but all {ranks} are on this one")

    @property
    def num_local_ranks(self) -> int:
        """`local_ranks`, or its default beside the other fields."""
        if self.local_ranks is not None:
            return self.local_ranks
        return 1 if self.rank_address is not None else self.num_ranks

    @property
    def num_ranks(self) -> int:
        """Processes that the model is divided over."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

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
