"""Products with quantised matrices on CUDA: which of them multiplies a matrix, and what it costs in bytes.

Imports Triton. Knows nothing of models or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.arrays import FLOAT8, as_tensor
from aengine.kernels.quantized import QuantizedRows, Rows, numbers_of
from aengine.kernels.quantizing import Float8Rows
from aengine.kernels.triton.code_products import FEW_ROWS, code_linear
from aengine.kernels.triton.codes import FLOATS, Codes
from aengine.layers.ops import Activations, LinearMethod

_ALIGNMENT = 16  # of both dimensions of a float8 matrix, which torch._scaled_mm asks for


class QuantizedLinears:
    """Makes linear layers of matrices that are quantised, as a whole or in part."""

    def __init__(self, dtype: torch.dtype, device: torch.device, quantize: Callable[[Tensor], Float8Rows] | None) -> None:
        """`dtype` is that of the activations. `quantize` makes them float8; None: the device has no products of float8."""
        self._dtype = dtype
        self._device = device
        self._quantize = quantize

    def on_host(self) -> QuantizedLinears:
        """That makes the same in host memory, where nothing multiplies with it."""
        return QuantizedLinears(self._dtype, torch.device("cpu"), self._quantize)

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
            return _Float8(codes, self._quantize)
        return _WeightOnly(codes, self._dtype, self._quantize is not None)


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

    def __init__(self, codes: Codes, dtype: torch.dtype, float8: bool) -> None:
        """`float8`: the device has products of float8, which are of 32 columns at least."""
        self._codes = codes
        self._dtype = dtype
        form = codes.format
        is_float8 = form.kind == FLOATS and form.bits == 8 and form.group_size % 32 == 0
        self.takes_float8 = float8 and is_float8 and dtype is torch.bfloat16
        self.nbytes = codes.nbytes
        self.tensors, self.form = codes.tensors, codes.form

    def __call__(self, x: Activations, bias: Tensor | None) -> Tensor:
        if isinstance(x, Float8Rows):
            return code_linear(x.codes, self._codes, bias, self._dtype, x.scales)
        return code_linear(x, self._codes, bias, self._dtype)


class _Float8:
    """Both sides are float8, with one scale per row of each; results are bfloat16.

    Few rows are multiplied by our kernel: all that counts for them is how fast the matrix is read, and a matrix of a few thousand rows has
    too few tiles for that in a product which does not share its depth among programs.
    """

    takes_float8 = True

    def __init__(self, codes: Codes, quantize: Callable[[Tensor], Float8Rows]) -> None:
        self._codes = codes
        self._matrix = codes.words[0].view(torch.float8_e4m3fn)[:, : codes.in_features].t()
        self._scales = codes.scales[0].float()  # [1, out_features]
        self._quantize = quantize
        self.nbytes = codes.nbytes
        self.tensors, self.form = (*codes.tensors, self._scales), codes.form

    def __call__(self, x: Activations, bias: Tensor | None) -> Tensor:
        rows = x if isinstance(x, Float8Rows) else self._quantize(x)
        if len(rows) <= FEW_ROWS:
            return code_linear(rows.codes, self._codes, bias, torch.bfloat16, rows.scales)
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
