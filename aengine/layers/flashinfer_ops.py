"""`LayerOps` in FlashInfer's kernels, and in Triton's where FlashInfer has none. Knows nothing of models or batches.

Two of them round once where the models' own implementations round twice: the result of a norm is multiplied with the weight before it is
rounded, and the norm of a sum is computed before the sum is rounded.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from aengine.attention.flashinfer.library import building, load_flashinfer, require_kernels
from aengine.kernels.params import Activation
from aengine.kernels.triton.layer_ops import TritonOps
from aengine.layers.ops import run_once

_ALIGNMENT = 16  # bytes, of the halves of a gate_up row


class FlashInferOps(TritonOps):
    """Norms and SiLU * mul are FlashInfer's, but for norms with float32 weights and rows that are not aligned. It has no kernel that
    rotates heads with all that `rotate_and_write` joins, none of experts, and none for float8 with a scale per row.

    Construction builds and loads the kernels and runs each once. `library` stands in for the installed package in tests.
    """

    name = "flashinfer"

    def __init__(self, dtype: torch.dtype, head_dim: int, device: torch.device, library: ModuleType | None = None) -> None:
        """Raises BackendUnavailableError without kernels for activations of `dtype` and heads of `head_dim`, and where FlashInfer is
        missing or cannot be built."""
        require_kernels(dtype, head_dim)
        self._library = library or load_flashinfer(device)
        with building(self._library, "layers", device):
            run_once(self, dtype, head_dim, device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if _is_wider(weight, x):
            return super().rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._library.rmsnorm(input=x, weight=_of_dtype(weight, x), eps=eps, out=out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if _is_wider(weight, x):
            return super().add_rms_norm(x, _of_dtype(residual, x), weight, eps)
        self._library.fused_add_rmsnorm(input=x, residual=_of_dtype(residual, x), weight=_of_dtype(weight, x), eps=eps)
        return x, residual

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        size = gate_up.shape[-1] // 2
        if activation is not Activation.SILU or size * gate_up.dtype.itemsize % _ALIGNMENT:
            return super().gated(gate_up, activation)
        out = torch.empty((len(gate_up), size), dtype=gate_up.dtype, device=gate_up.device)
        self._library.silu_and_mul(input=gate_up, out=out)
        return out


def _is_wider(weight: Tensor, x: Tensor) -> bool:
    return weight.dtype == torch.float32 != x.dtype


def _of_dtype(tensor: Tensor, x: Tensor) -> Tensor:
    """`tensor`; raises TypeError if it has another dtype than `x`: the kernels would read its bytes as that dtype without an error."""
    if tensor.dtype != x.dtype:
        raise TypeError(f"weights and residuals must be {x.dtype} as the activations are, not {tensor.dtype}")
    return tensor
