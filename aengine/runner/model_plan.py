"""What is loaded of a model, and how large. `plan_model` reads the checkpoint's config and checks the engine's against it, before any
weight is read; `plan_pool` sizes the KV pool once the weights are there. Loads and allocates nothing itself.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError, ModelLoadError
from aengine.api.runtime import num_cores
from aengine.kernels.arrays import BFLOAT16, FLOAT16, FLOAT32
from aengine.models.choice import AnySpec, find_spec, has_output_head, is_encoder, labels_of, parameter_counts, quantization_of
from aengine.models.config.model_config import load_generation
from aengine.models.loading.checkpoint import WeightsDigest, checkpoint_dtype
from aengine.models.loading.weights import grouped
from aengine.models.quantization.quantization_config import load_quantization
from aengine.models.sharding import check_replicas, check_shards
from aengine.models.spec import ModelSpec
from aengine.parallel.driver import DriverRanks
from aengine.parallel.expert_replicas import Replicas
from aengine.parallel.follower import FollowerRanks
from aengine.parallel.messages import Sizes
from aengine.parallel.shard import Shard
from aengine.runner.contract import Device, Executor
from aengine.runner.memory import check_host_pool, size_pool
from aengine.runner.setup import ExecutorSetup, with_draft_model

if TYPE_CHECKING:
    import torch

    from aengine.runner.torch.capture import Capture

    pass

_log = logging.getLogger("aengine")
CPU_TOKENS, ACCELERATOR_TOKENS = 512, 2048
"""Default max_num_batched_tokens."""
SINGLE_THREAD_PARAMETERS = 20_000_000
"""Parameters below which a second thread costs more in waiting than it saves in work."""
_DTYPES: dict[str, np.dtype[Any]] = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


@dataclass(frozen=True, slots=True)
class ModelPlan:
    setup: ExecutorSetup
    has_output_head: bool  # False: the embedding stands in its place
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]  # of generation_config.json


@dataclass(frozen=True, slots=True)
class PoolPlan:
    num_pages: int  # of each rank, the reserved page 0 included
    max_model_len: int  # tokens
    bytes_per_token: int  # of K and V, of all ranks and layers
    state_bytes: int  # of the recurrent state of a sequence, of all ranks and layers
    weights_digest: str  # of all ranks


def plan_model(
    config: EngineConfig,
    model_dir: pathlib.Path,
    device: Device,
    capture: Callable[[torch.device], Capture] | None,
    ranks: DriverRanks | FollowerRanks | None,
    replicas: Replicas | None,
) -> ModelPlan:
    """Parameters are those of `ModelRunner`. Raises ModelLoadError, or ConfigError for what this model or device cannot do."""
    on_cpu = device.type == "cpu"
    spec = find_spec(model_dir, config.model_impl, config.max_model_len)
    has_head = not is_encoder(spec) and not labels_of(spec)
    if isinstance(spec, ModelSpec):
        has_head = has_output_head(spec, model_dir, config.load_format)
    if isinstance(spec, ModelSpec) and not has_head:
        spec = replace(spec, tied_head=True)
    check_replicas(spec, config.expert_parallel_size)
    if config.expert_parallel_size > 1 and (not on_cpu or config.attention_backend == "cpu"):
        where = "attention_backend 'cpu'" if on_cpu else f"device {device.type}"
        raise ConfigError.of("expert_parallel_size", f"{config.expert_parallel_size} is not possible with {where}; choose 1")
    check_shards(spec, config.tensor_parallel_size, config.pipeline_parallel_size)
    if isinstance(spec, ModelSpec) and spec.convolutions and config.kv_cache_dtype != "auto":
        reason = f"{config.kv_cache_dtype!r} is not possible: {spec.architecture} keeps inputs of convolutions there; choose 'auto'"
        raise ConfigError.of("kv_cache_dtype", reason)
    eos_token_ids, sampling_defaults = load_generation(model_dir, spec.eos_token_ids)
    context = spec.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError.of("max_model_len", f"{config.max_model_len} is more than the model's context of {context} tokens")
    if not on_cpu and capture is None and not config.eager:
        from aengine.runner.torch.capture import CudaCapture  # imports torch

        capture = CudaCapture
    shard = Shard.of(config, 0)
    if ranks is not None and isinstance(spec, ModelSpec):
        shard = grouped(ranks.shard, spec, model_dir, config.load_format)
    setup = ExecutorSetup(
        config=config,
        spec=spec,
        model_dir=model_dir,
        dtype=_dtype(config, spec, model_dir, device),
        device=device,
        threads=_threads(config.threads if ranks is None else ranks.threads, spec),
        max_num_seqs=config.num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(config.num_seqs, CPU_TOKENS if on_cpu else ACCELERATOR_TOKENS),
        max_model_len=config.max_model_len or context,
        quantization=quantization_of(config, model_dir),
        capture=capture,
        shard=shard,
        ranks=ranks,
        replicas=replicas,
    )
    if is_encoder(spec):  # a prompt is computed in one step
        most = setup.max_num_batched_tokens
        if config.max_model_len is not None and config.max_model_len > most:
            reason = f"{config.max_model_len} is more than max_num_batched_tokens, {most}: a step has the whole prompt of an encoder"
            raise ConfigError.of("max_model_len", reason)
        setup = replace(setup, max_model_len=min(setup.max_model_len, most))
    setup = with_draft_model(setup)
    if replicas is None:  # each of these holds other experts; its files tell what it is a part of
        setup = replace(setup, digest=WeightsDigest())
    return ModelPlan(setup, has_head, eos_token_ids, sampling_defaults)


def plan_pool(setup: ExecutorSetup, executor: Executor) -> PoolPlan:
    """The sizes that all ranks and replicas agree on. Raises InsufficientMemoryError with the numbers."""
    config, requested_len = setup.config, setup.max_model_len
    bytes_per_page = of_all_ranks = executor.bytes_per_page()
    num_pages, max_model_len = size_pool(
        executor.kv_budget() if config.kv_cache_memory is None else config.kv_cache_memory,
        bytes_per_page,
        setup.needs,
        setup.max_num_seqs,
        requested_len,
        may_shorten=config.max_model_len is None,
    )
    if setup.device.type == "cpu":
        check_host_pool(config.kv_cache_memory, num_pages * bytes_per_page, setup.num_local)
    digest = "" if setup.digest is None else setup.digest.hexdigest()
    if setup.ranks is not None:
        agreed = setup.ranks.agree(Sizes(num_pages, max_model_len, bytes_per_page, digest))
        num_pages, max_model_len = agreed.num_pages, agreed.max_model_len
        of_all_ranks, digest = agreed.bytes_per_page, agreed.weights_digest
    if setup.replicas is not None:
        max_model_len = setup.replicas.agree(max_model_len)
    if max_model_len < requested_len:
        _log.warning("max_model_len lowered from %d to %d tokens: that is what the KV cache holds", requested_len, max_model_len)
    bytes_per_token = len(setup.groups.windows) * of_all_ranks // config.page_size if setup.spec.windows else 0
    return PoolPlan(num_pages, max_model_len, bytes_per_token, setup.state_pages * of_all_ranks, digest)


def _threads(threads: int | None, spec: AnySpec) -> int:
    """The number of threads of a step on a CPU: `threads` if given, else 1 for a small model, and for others one per core."""
    return threads or (1 if parameter_counts(spec)[0] < SINGLE_THREAD_PARAMETERS else num_cores())


def _dtype(config: EngineConfig, spec: AnySpec, model_dir: pathlib.Path, device: Device) -> np.dtype[Any]:
    """The dtype of weights and KV cache: the configured one, else that of config.json, else that of the checkpoint.

    Few CPUs compute in float16. There the weights of a float16 checkpoint become bfloat16; or float32 where most of them are codes, which
    keep their size in a native model, so that the others stay exact.
    """
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if spec.dtype is not None and spec.dtype not in _DTYPES:
        raise ModelLoadError(f"dtype {spec.dtype!r} in config.json is not supported; choose one of {', '.join(_DTYPES)}")
    if spec.dtype is not None:
        stored = _DTYPES[spec.dtype]
    else:
        stored = FLOAT32 if config.load_format == "dummy" else checkpoint_dtype(model_dir, config.load_format)
    if stored != FLOAT16 or device.type != "cpu":
        return stored
    has_codes = isinstance(spec, ModelSpec) and config.load_format != "dummy" and load_quantization(model_dir) is not None
    chosen = "float32" if has_codes else "bfloat16"
    _log.info("dtype %s for weights of float16, which CPUs are slow in; choose another one with dtype", chosen)
    return _DTYPES[chosen]
