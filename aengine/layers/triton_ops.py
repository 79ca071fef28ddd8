"""`LayerOps` in our Triton kernels: for CUDA, wherever triton is installed. Knows nothing of models or batches."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.triton import layer_ops


class TritonOps:
    """Satisfies `LayerOps`. Sums and rotated heads are written where the arguments were."""

    name = "triton"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return layer_ops.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        layer_ops.add_rms_norm(x, residual, weight, eps)
        return x, residual

    def rotate(
        self,
        query: Tensor,
        key: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        layer_ops.rotate(query, key, cos_sin, positions, query_norm, key_norm, eps)
        return query, key

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return layer_ops.silu_mul(gate_up)
