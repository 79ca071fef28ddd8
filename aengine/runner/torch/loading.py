"""The models that a `TorchExecutor` runs, with the attention backends below them: our torch decoder, or a model of transformers. The choice
of `LayerOps`, whose implementations are imported only where they are used."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from aengine.api.errors import ConfigError
from aengine.attention import AttentionBackend, select_backend
from aengine.attention.base import BackendUnavailableError
from aengine.kernels.arrays import array_dtype, as_tensor
from aengine.kernels.quantized import QuantizedRows, Rows, numbers_of
from aengine.kernels.quantizing import quantize_rows
from aengine.layers.adapters import AdapterOps, AdapterTable, TorchAdapterOps
from aengine.layers.collectives import Collectives, ExpertExchange
from aengine.layers.ops import LayerOps, TorchOps, run_once
from aengine.models.adapters import adapter_bytes, adapter_shapes
from aengine.models.fallback import FallbackSpec
from aengine.models.named_weights import NEVER_QUANTIZED, named_weights
from aengine.models.sharding import own, sharded_weights, vocab_bounds
from aengine.models.spec import ModelSpec
from aengine.models.torch.blocks import Weight
from aengine.models.torch.decoder import Decoder, ForwardBatch
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.memory import check_addition, check_memory, free_host_memory, pinned_bytes, quantized_bytes, show_bytes, weight_bytes
from aengine.runner.setup import ExecutorSetup
from aengine.runner.torch.device import free_cuda_memory

if TYPE_CHECKING:
    from aengine.layers.linear import QuantizedLinears


_log = logging.getLogger("aengine")


class TorchModel(Protocol):
    @property
    def head_shape(self) -> tuple[int, int]:
        """How many logits a token has, and hidden_size."""

    @property
    def weights(self) -> Sequence[Tensor]:
        """All weights, in any order; some may be of the same memory."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """The hidden states [T, hidden_size] of a step: normed and ready for the head, or of a stage but the last those for the next
        stage."""

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """[T, hidden_size] -> [m, vocab_size] as of `scaled_logits`, of the tokens `indices` [m] int32."""

    def head_product(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[m, hidden_size] -> [m, vocab_size] in the dtype of the weights, in `out` if it is given. `scaled_logits` makes logits of it; the
        order of a token's logits is the same."""

    def scaled_logits(self, product: Tensor) -> Tensor:
        """The logits of a `head_product`, which are not to be changed: float32 where the model scales or caps them, else the product as it
        is."""


def load_torch_model(
    setup: ExecutorSetup,
    check: Callable[[], object],
    target: TorchModel | None = None,
    collectives: Collectives | None = None,
    exchange: ExpertExchange | None = None,
) -> tuple[TorchModel, AttentionBackend, QuantizedLinears | None]:
    """Loads the model of a setup. Returns it, its attention backend, and what multiplies with quantised matrices, if there is such. `check`
    and errors are those of `build_executor`. `target`: the model of a draft head. `collectives` and `exchange`: those that `Decoder` takes.
    To be called on the stream of the steps."""
    spec = setup.spec
    backend = select_backend(setup.config.attention_backend, setup.attention())
    if setup.ranks is not None:
        setup.ranks.same(_kernel_facts(setup, backend))
    on_cpu = setup.torch_device.type == "cpu"
    available = free_host_memory() if on_cpu else free_cuda_memory(setup.torch_device, setup.config.gpu_memory_utilization)
    if isinstance(spec, FallbackSpec):
        check_memory(spec.num_parameters * setup.dtype.itemsize, backend.bytes_per_page(), setup.needs, setup.config, available)
        return _load_fallback(setup, spec, backend, check), backend, None
    spec = setup.native_spec
    ops = select_ops(backend.name, setup.torch_dtype, backend.spec.head_dim, setup.torch_device, setup.batch_invariant)
    linears = select_linears(ops, setup.torch_dtype, setup.torch_device, setup.batch_invariant)
    if linears is None and setup.config.quantization != "none":
        raise ConfigError.of("quantization", f"{setup.config.quantization!r} needs Triton")
    nbytes = sum(_weight_bytes(setup, linears is not None)) + _adapter_bytes(setup)
    check_memory(nbytes, backend.bytes_per_page(), setup.needs, setup.config, available)
    weights = fused(spec, setup.weights(check), setup.torch_dtype, setup.torch_device, linears, setup.config.quantization, setup.shard)
    kept = [weight.nbytes for weight in weights.values() if not isinstance(weight, Tensor)]
    if kept:
        _log.info("%d quantised matrices take %s", len(kept), show_bytes(sum(kept)))
    if spec.draft_head is None:
        table = _adapter_table(setup, ops)
        return Decoder(spec, weights, setup.num_positions, ops, collectives, table, setup.shard, exchange), backend, linears
    assert isinstance(target, Decoder), "models of transformers have no draft heads"
    head = Decoder(spec, {**target.shared_weights, **weights}, setup.max_model_len, ops)
    target.serve(head)
    return head, backend, linears


def _kernel_facts(setup: ExecutorSetup, backend: AttentionBackend) -> dict[str, str]:
    """What must be the same on all ranks, by name. Graphs of how many rows hold a step may follow from how a device divides its work, and
    collectives of a stage are of equally many rows on all of its ranks."""
    facts = {"attention backend": backend.name}
    if setup.torch_device.type == "cuda" and setup.shard.size > 1:
        facts["number of multiprocessors"] = str(torch.cuda.get_device_properties(setup.torch_device).multi_processor_count)
    return facts


def weights_on_host(
    setup: ExecutorSetup, weights: Iterable[tuple[str, Sequence[Rows]]], linears: QuantizedLinears | None, partial: bool
) -> dict[str, Weight]:
    """The weights of a native model as `load_torch_model` makes them, in host memory; pinned if the device is another. Raises
    InsufficientMemoryError before it takes the first, unless they are `partial`."""
    on_cpu = setup.torch_device.type == "cpu"
    of_each = _weight_bytes(setup, linears is not None)
    needed = sum(of_each if on_cpu else map(pinned_bytes, of_each))
    if not partial:
        check_addition("new weights need", needed, free_host_memory() // setup.num_local)
    host = torch.device("cpu")
    on_host = None if linears is None else linears.on_host()
    made = fused(setup.native_spec, weights, setup.torch_dtype, host, on_host, setup.config.quantization, setup.shard)
    for name, weight in made.items() if not on_cpu else ():
        if isinstance(weight, Tensor):
            made[name] = weight.pin_memory()  # and the other is given up
    return made


def _adapter_bytes(setup: ExecutorSetup) -> int:
    return adapter_bytes(setup.native_spec, setup.shard, setup.adapter_slots, setup.config.max_adapter_rank, setup.dtype.itemsize)


def _adapter_table(setup: ExecutorSetup, ops: LayerOps) -> AdapterTable | None:
    if not setup.adapter_slots:
        return None
    shapes, config = adapter_shapes(setup.native_spec, setup.shard), setup.config
    sizes = setup.adapter_slots, config.max_adapter_rank, setup.max_num_batched_tokens
    return AdapterTable(shapes, *sizes, setup.torch_dtype, setup.torch_device, select_adapter_ops(ops, setup.batch_invariant))


def _weight_bytes(setup: ExecutorSetup, quantized: bool) -> list[int]:
    """The bytes of each weight. `quantized`: whether those that are quantised, or are to be, stay so."""
    spec, config, itemsize = setup.native_spec, setup.config, setup.dtype.itemsize
    if not quantized:
        return [math.prod(part.shape) * itemsize for part in sharded_weights(spec, setup.shard).values()]
    stored = quantized_bytes(config, spec, setup.model_dir)
    beside_table = setup.shard.stage == 0 and spec.tied_head and ("embedding.weight" in stored or config.quantization != "none")
    table = len(own(vocab_bounds(spec, setup.shard), setup.shard)) * spec.hidden_size * itemsize if beside_table else 0
    return [*weight_bytes(config, spec, itemsize, stored, setup.shard).values(), table]


def _load_fallback(setup: ExecutorSetup, spec: FallbackSpec, backend: AttentionBackend, check: Callable[[], object]) -> TorchModel:
    from aengine.models.fallback.fallback_model import HeadlessModel, load_model
    from aengine.models.fallback.self_check import check_labels, check_model

    config = setup.config
    check()
    model = load_model(spec, setup.model_dir, config.load_format, setup.torch_dtype, setup.torch_device, config.seed, setup.digest)
    check()
    if config.skip_self_check:
        _log.warning("the self-check is skipped: nothing shows that the model computes what it does in transformers")
    else:
        begin = time.perf_counter()
        check_model(model, backend, spec.vocab_size, setup.max_model_len)
        if isinstance(model, HeadlessModel) and spec.labels:
            check_labels(model, spec.vocab_size, setup.max_model_len)
        _log.info("the self-check took %.2f s: in chunks and mixed steps the logits are those of transformers", time.perf_counter() - begin)
    return model


_log = logging.getLogger("aengine")


def select_ops(attention_backend: str, dtype: torch.dtype, head_dim: int, device: torch.device, invariant: bool = False) -> LayerOps:
    """The ops that go with the attention backend of this name, with one log line that says which and why.

    `dtype` is that of the activations, `head_dim` that of their heads. `invariant`: those of Triton alone, in whose results no order of
    sums depends on the number of tokens.
    """
    if device.type == "cpu":
        return TorchOps()
    ops, reason = _device_ops(attention_backend, dtype, head_dim, device, invariant)
    if invariant and isinstance(ops, TorchOps):
        raise ConfigError.of("numerics", f"'batch_invariant' needs Triton: {reason}")
    _log.info("layer ops: %s (%s)", ops.name, reason)
    return ops


def select_linears(ops: LayerOps, dtype: torch.dtype, device: torch.device, invariant: bool = False) -> QuantizedLinears | None:
    """What multiplies with quantised matrices beside `ops`, `invariant` or not as these. None: nothing does, and they are to be
    dequantised."""
    if isinstance(ops, TorchOps):
        return None
    from aengine.layers.linear import QuantizedLinears

    float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)  # torch._scaled_mm and Triton need it
    return QuantizedLinears(dtype, device, ops.float8 if float8 else None, invariant)


def select_adapter_ops(ops: LayerOps, invariant: bool = False) -> AdapterOps:
    """What multiplies with the matrices of adapters beside `ops`, `invariant` or not as these."""
    if isinstance(ops, TorchOps):
        return TorchAdapterOps()
    from aengine.kernels.triton.adapters import TritonAdapterOps

    return TritonAdapterOps(invariant)


def _device_ops(attention_backend: str, dtype: torch.dtype, head_dim: int, device: torch.device, invariant: bool) -> tuple[LayerOps, str]:
    if attention_backend == "torch_native":
        return TorchOps(), "the reference, as its attention backend"
    because = "as the attention backend"
    if attention_backend == "flashinfer":
        try:
            from aengine.layers.flashinfer_ops import FlashInferOps

            return FlashInferOps(dtype, head_dim, device), because
        except (BackendUnavailableError, ImportError) as reason:  # the latter of triton
            because = f"not flashinfer: {reason}"
    try:
        from aengine.kernels.triton.layer_ops import TritonOps

        ops = TritonOps(invariant)
        run_once(ops, dtype, head_dim, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:  # not installed, or no compiler for it
        return TorchOps(), f"several times slower; triton cannot run: {reason}"
    return ops, because


_HEADS = {"embedding.weight": "head.weight"}  # of which a tied head is made


def fused(
    spec: ModelSpec,
    weights: Iterable[tuple[str, Sequence[Rows]]],
    dtype: torch.dtype,
    device: torch.device,
    linears: QuantizedLinears | None = None,
    quantization: str = "none",
    shard: Shard = WHOLE,
) -> dict[str, Weight]:
    """Each of `sharded_weights(spec, shard)` in its shape: a new tensor of `dtype` or float32 on `device`, or the one part if it is that.

    Matrices with quantised parts are what `linears` makes of them; what it makes nothing of is dequantised, which takes the memory of
    `dtype`. `quantization` is that of `EngineConfig`. The quantised head that is tied to an embedding is there beside it.
    """
    held, named = sharded_weights(spec, shard), named_weights(spec)
    tensors: dict[str, Weight] = {}
    for name, parts in weights:
        shape = held[name].shape
        ours = _HEADS.get(name, name) if spec.tied_head else name
        made = None if linears is None else _quantized(ours, shape, parts, linears, device, quantization)
        if made is not None:
            tensors[ours] = made
            if ours == name:
                continue
        wanted = torch.float32 if named[held[name].source_name].float32 else dtype
        first = parts[0]
        target = as_tensor(first) if len(parts) == 1 and isinstance(first, np.ndarray) and first.flags.c_contiguous else None
        if target is None or (target.dtype, target.device) != (wanted, device):
            target = torch.empty((sum(map(len, parts)), *first.shape[1:]), dtype=wanted, device=device)
            row = 0
            for part in parts:
                target[row : row + len(part)].copy_(as_tensor(numbers_of(part, array_dtype(wanted))))
                row += len(part)
        tensors[name] = target.view(shape)
    return tensors


def _quantized(
    name: str, shape: tuple[int, ...], parts: Sequence[Rows], linears: QuantizedLinears, device: torch.device, quantization: str
) -> Weight | None:
    """A matrix that is quantised in the checkpoint, or to be quantised; None for all others."""
    if not _may_be_quantized(name, shape):
        return None
    if quantization != "none":
        how = "int8" if quantization == "int4" and name == "head.weight" else quantization
        with device:
            parts = [quantize_rows(as_tensor(part).to(device), how) if isinstance(part, np.ndarray) else part for part in parts]
    if not any(isinstance(part, QuantizedRows) for part in parts):
        return None
    return linears.linear(parts) if len(shape) == 2 else linears.experts(parts, shape[0])


def _may_be_quantized(name: str, shape: tuple[int, ...]) -> bool:
    stem, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) > 1 and stem.rpartition(".")[2] not in (*NEVER_QUANTIZED, "embedding")
