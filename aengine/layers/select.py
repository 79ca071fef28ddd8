"""The choice of `LayerOps`. Implementations are imported only where they are used."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from aengine.attention.base import BackendUnavailableError
from aengine.layers.adapters import AdapterOps, TorchAdapterOps
from aengine.layers.ops import LayerOps, TorchOps, run_once

if TYPE_CHECKING:
    from aengine.layers.linear import QuantizedLinears

_log = logging.getLogger("aengine")


def select_ops(attention_backend: str, dtype: torch.dtype, head_dim: int, device: torch.device) -> LayerOps:
    """The ops that go with the attention backend of this name, with one log line that says which and why.

    `dtype` is that of the activations, `head_dim` that of their heads.
    """
    if device.type == "cpu":
        return TorchOps()
    ops, reason = _device_ops(attention_backend, dtype, head_dim, device)
    _log.info("layer ops: %s (%s)", ops.name, reason)
    return ops


def select_linears(ops: LayerOps, dtype: torch.dtype, device: torch.device) -> QuantizedLinears | None:
    """What multiplies with quantised matrices beside `ops`. None: nothing does, and they are to be dequantised."""
    if isinstance(ops, TorchOps):
        return None
    from aengine.layers.linear import QuantizedLinears

    float8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)  # torch._scaled_mm and Triton need it
    return QuantizedLinears(dtype, device, ops.float8 if float8 else None)


def select_adapter_ops(ops: LayerOps) -> AdapterOps:
    """What multiplies with the matrices of adapters beside `ops`."""
    if isinstance(ops, TorchOps):
        return TorchAdapterOps()
    from aengine.kernels.triton.adapters import TritonAdapterOps

    return TritonAdapterOps()


def _device_ops(attention_backend: str, dtype: torch.dtype, head_dim: int, device: torch.device) -> tuple[LayerOps, str]:
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

        ops = TritonOps()
        run_once(ops, dtype, head_dim, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:  # not installed, or no compiler for it
        return TorchOps(), f"several times slower; triton cannot run: {reason}"
    return ops, because
