"""Products on CUDA: which kernel multiplies a quantised matrix, what that costs in bytes, and what computes batch-invariant sums in place
of torch's kernels.

Imports Triton. Knows nothing of models or files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aengine.kernels.arrays import FLOAT8, as_tensor
from aengine.kernels.quantized import QuantizedRows, Rows, numbers_of
from aengine.kernels.quantizing import Float8Rows
from aengine.kernels.triton.code_products import FEW_ROWS, code_linear, product, row_sums, running_row_sums
from aengine.kernels.triton.codes import FLOATS, Codes
from aengine.layers.ops import Activations, LinearMethod

_ALIGNMENT = 16  # of both dimensions of a float8 matrix, which torch._scaled_mm asks for


class QuantizedLinears:
    """Makes linear layers of matrices that are quantised, as a whole or in part."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, quantize: Callable[[Tensor], Float8Rows] | None, invariant: bool = False
    ) -> None:
        """`dtype` is that of the activations. `quantize` makes them float8; None: the device has no products of float8. `invariant`: no
        order of sums depends on the number of tokens."""
        self._invariant = invariant
        self._dtype = dtype
        self._device = device
        self._quantize = quantize

    def on_host(self) -> QuantizedLinears:
        """That makes the same in host memory, where nothing multiplies with it."""
        return QuantizedLinears(self._dtype, torch.device("cpu"), self._quantize, self._invariant)

    def linear(self, parts: Sequence[Rows]) -> LinearMethod | None:
        """The matrix of the rows of all parts. None: no product reads any of them as it is."""
        method = self._method(parts)
        if method is not None or len(parts) == 1:
            return method
        methods = [self._method([part]) for part in parts]
        if not any(methods):
            return None
        return _Joined([method or self._plain(part) for method, part in zip(methods, parts, strict=True)])

    def experts(self, parts: Sequence[Rows], count: int) -> Codes | None:
        """The `count` matrices of the rows of all parts, one matrix after another. None: no product reads them as they are."""
        quantized = [part for part in parts if isinstance(part, QuantizedRows)]
        return Codes.of(quantized, count, self._device) if len(quantized) == len(parts) else None

    def _plain(self, part: Rows) -> LinearMethod:
        return _Plain(as_tensor(numbers_of(part)).to(self._device, self._dtype))

    def _method(self, parts: Sequence[Rows]) -> LinearMethod | None:
        quantized = [part for part in parts if isinstance(part, QuantizedRows)]
        if len(quantized) != len(parts):
            return None
        codes = Codes.of(quantized, 1, self._device)
        if codes is None:
            return None
        aligned = all(map(_is_float8, quantized)) and codes.out_features % _ALIGNMENT == 0
        if self._quantize is not None and aligned and self._dtype is torch.bfloat16:  # the dtype that every device has results in
            return _Float8(codes, self._quantize, self._invariant)
        return _WeightOnly(codes, self._dtype, self._quantize is not None, self._invariant)


def _is_float8(part: QuantizedRows) -> bool:
    """Whether torch._scaled_mm can multiply with it: float8 with one scale per row."""
    plain = part.offsets is None and part.order is None and part.table is None
    return plain and part.codes.dtype in (FLOAT8, torch.float8_e4m3fn) and part.scales.shape[1] == 1 and part.shape[1] % _ALIGNMENT == 0


class _Plain:
    takes_float8 = False

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.nbytes = weight.nbytes
        self.tensors, self.form = (weight,), None

    def __call__(self, x: Activations, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self._weight, bias)


class _WeightOnly:
    """Codes times activations as they are; times float8 ones, if the codes are float8 too and these are given."""

    def __init__(self, codes: Codes, dtype: torch.dtype, float8: bool, invariant: bool) -> None:
        """`float8`: the device has products of float8, which are of 32 columns at least. `invariant`: as of `QuantizedLinears`."""
        self._codes, self._invariant = codes, invariant
        self._dtype = dtype
        form = codes.format
        is_float8 = form.kind == FLOATS and form.bits == 8 and form.group_size % 32 == 0
        self.takes_float8 = float8 and is_float8 and dtype is torch.bfloat16
        self.nbytes = codes.nbytes
        self.tensors, self.form = codes.tensors, codes.form

    def __call__(self, x: Activations, bias: Tensor | None) -> Tensor:
        if isinstance(x, Float8Rows):
            return code_linear(x.codes, self._codes, bias, self._dtype, x.scales, self._invariant)
        return code_linear(x, self._codes, bias, self._dtype, invariant=self._invariant)


class _Float8:
    """Both sides are float8, with one scale per row of each; results are bfloat16.

    Few rows are multiplied by our kernel: all that counts for them is how fast the matrix is read, and a matrix of a few thousand rows has
    too few tiles for that in a product which does not share its depth among programs.
    """

    takes_float8 = True

    def __init__(self, codes: Codes, quantize: Callable[[Tensor], Float8Rows], invariant: bool) -> None:
        self._codes, self._invariant = codes, invariant
        self._matrix = codes.words[0].view(torch.float8_e4m3fn)[:, : codes.in_features].t()
        self._scales = codes.scales[0].float()  # [1, out_features]
        self._quantize = quantize
        self.nbytes = codes.nbytes
        self.tensors, self.form = (*codes.tensors, self._scales), codes.form

    def __call__(self, x: Activations, bias: Tensor | None) -> Tensor:
        rows = x if isinstance(x, Float8Rows) else self._quantize(x)
        if self._invariant or len(rows) <= FEW_ROWS:
            return code_linear(rows.codes, self._codes, bias, torch.bfloat16, rows.scales, self._invariant)
        return torch._scaled_mm(
            rows.codes,
            self._matrix,
            scale_a=rows.scales,
            scale_b=self._scales,
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,  # sums of 13 bits and more within a tensor core, as most engines do: codes have 4
        )


class _Joined:
    """Matrices whose rows follow each other, each in a form of its own."""

    def __init__(self, methods: Sequence[LinearMethod]) -> None:
        self._methods = methods
        self.takes_float8 = all(method.takes_float8 for method in methods)
        self.nbytes = sum(method.nbytes for method in methods)
        self.tensors = tuple(tensor for method in methods for tensor in method.tensors)
        self.form = tuple((type(method), len(method.tensors), method.form) for method in methods)

    def __call__(self, x: Activations, bias: Tensor | None) -> Tensor:
        out = torch.cat([method(x, None) for method in self._methods], dim=-1)
        return out if bias is None else out.add_(bias)


def _multiply(
    x: Tensor, matrix: Tensor, out_dtype: torch.dtype | None = None, *, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`aten.mm` and `aten.bmm`, or these plus a bias."""
    result = x.new_empty((*x.shape[:-1], matrix.shape[-1]), dtype=out_dtype) if out is None else out
    whole = result if result.stride(-1) == 1 or not result.numel() else torch.empty_like(result, memory_format=torch.contiguous_format)
    if x.dim() == 3:
        product(x, matrix, bias, whole)
    else:
        product(x.unsqueeze(0), matrix.unsqueeze(0), bias, whole.unsqueeze(0))
    return result if whole is result else result.copy_(whole)


def _add_product(bias: Tensor, x: Tensor, matrix: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor | None = None) -> Tensor:
    if (beta, alpha) != (1, 1):
        raise NotImplementedError("factors of a batch-invariant product")
    return _multiply(x, matrix, bias=bias, out=out)


def _sum(x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """`aten.sum` over some dimensions."""
    dims = sorted({one % x.dim() for one in dim or range(x.dim())})
    kept = [one for one in range(x.dim()) if one not in dims]
    rows = x.permute(*kept, *dims).reshape(*(x.shape[one] for one in kept), -1)
    sums = row_sums(rows.reshape(-1, rows.shape[-1]), dtype or x.dtype)
    return sums.view([1 if one in dims else x.shape[one] for one in range(x.dim())] if keepdim else rows.shape[:-1])


def _running_sum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """`aten.cumsum` over the last dimension."""
    if dim % x.dim() != x.dim() - 1:
        raise NotImplementedError("a batch-invariant cumsum over another dimension than the last")
    rows = x.reshape(-1, x.shape[-1])
    return running_row_sums(rows, dtype or x.dtype).view(x.shape)


def _mean(x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    sums = _sum(x, dim, keepdim, dtype=torch.float32 if x.dtype.itemsize < 4 else x.dtype)
    return (sums / (x.numel() // max(sums.numel(), 1))).to(dtype or x.dtype)


_aten = torch.ops.aten
_INVARIANT: Mapping[Any, Callable[..., Tensor]] = {
    _aten.mm.default: _multiply,
    _aten.mm.out: _multiply,
    _aten.mm.dtype: _multiply,
    _aten.bmm.default: _multiply,
    _aten.bmm.out: _multiply,
    _aten.bmm.dtype: _multiply,
    _aten.addmm.default: _add_product,
    _aten.addmm.out: _add_product,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.dim: _mean,
    _aten.cumsum.default: _running_sum,
}
_REFUSED = {
    *(_aten.baddbmm, _aten.addbmm, _aten.addmv, _aten.mv, _aten.dot, _aten._scaled_mm, _aten._softmax, _aten._log_softmax, _aten.logsumexp),
    *(_aten.var, _aten.var_mean, _aten.std, _aten.linalg_vector_norm, _aten.native_layer_norm, _aten.native_group_norm),
    *(_aten.convolution, _aten.prod),
}


class BatchInvariance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, in its thread, sums that torch computes on CUDA are in an order that does not depend on the number of rows: products are
    `product`, sums `row_sums`. What has no such kernel raises NotImplementedError. Elementwise operations, and sums of integers, are
    torch's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        first = next((one for one in args if isinstance(one, Tensor)), None)
        if first is not None and first.is_cuda and first.is_floating_point():
            ours = _INVARIANT.get(func)
            if ours is not None:
                with self:
                    return ours(*args, **kwargs)
            if func.overloadpacket in _REFUSED:
                raise NotImplementedError(f"{func} has no batch-invariant kernel")
        made = NotImplemented
        if func.namespace == "aten":
            with self:
                made = func.decompose(*args, **kwargs)  # in inference mode, what consists of others comes as a whole
        return func(*args, **kwargs) if made is NotImplemented else made
