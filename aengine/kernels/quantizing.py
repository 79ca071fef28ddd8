"""Quantising tensors on their device: a matrix at load, to 4 bits in groups of 32 columns, or to int8 or float8 with one scale per row; and
activations to float8 with one scale per row, for products of 8-bit floats.

Every device makes the same codes and scales, so that weights which are read again, into host memory, are those that were loaded. Knows
nothing of files or of how a kernel packs the codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.kernels.quantized import INT4_GROUP, LARGEST, QuantizedRows, int4_rows


@dataclass(frozen=True, slots=True)
class Float8Rows:
    codes: Tensor  # [T, size] float8_e4m3fn
    scales: Tensor  # [T, 1] float32; value = code * scale

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def of(cls, x: Tensor) -> Float8Rows:
        """[T, size]: the largest magnitude of a row becomes `LARGEST`."""
        wide = x.float()
        largest = wide.abs().amax(-1, keepdim=True)
        scales = torch.where(largest == 0, 1.0, quotient(largest, LARGEST))
        return cls((wide / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales)


def quotient(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, the same on every device: CUDA multiplies by the inverse of a number that is no tensor, which may round otherwise."""
    return x / torch.full_like(x, divisor)


_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the step: cutting the largest numbers of a group off can lower its error
_CHUNK_ROWS = 4096


def quantize_rows(matrix: Tensor, quantization: str) -> QuantizedRows:
    """[rows, columns] of any float dtype -> "int4", "int8" or "fp8"."""
    quantize = {"int4": _int4, "int8": _int8, "fp8": _fp8}[quantization]
    chunks = [quantize(chunk.float()) for chunk in torch.split(matrix, _CHUNK_ROWS)]
    codes = torch.cat([codes.view(torch.uint8) for codes, _ in chunks]).view(chunks[0][0].dtype)  # not every dtype can be joined
    scales = torch.cat([scales for _, scales in chunks])
    return int4_rows(codes, scales) if quantization == "int4" else QuantizedRows(codes, scales, matrix.shape[1], bits=8)


def _int4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0..15 of (code - 8) * scale: of several roundings of each group, each with its best bfloat16 scale, that of least squared
    error."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % INT4_GROUP))
    groups = padded.view(rows, -1, INT4_GROUP).movedim(-1, 0).contiguous()
    # The number of the largest magnitude becomes -8, the code of the largest magnitude, or is cut off there.
    largest = groups.gather(0, groups.abs().argmax(0, keepdim=True)) / -8.0
    best = torch.full(groups.shape[1:], torch.inf)
    codes, scales = torch.zeros(groups.shape, dtype=torch.uint8), torch.zeros(groups.shape[1:])
    for shrink in _SHRINKS:
        found = torch.where(largest == 0, 0.0, groups / (largest * shrink)).round_().clamp_(-8, 7)
        # The scale of least squared error: sum (x - s q)^2 has its minimum at s = sum x q / sum q^2.
        scale = (_sum(found * groups) / _sum(found.square()).clamp(min=1.0)).bfloat16().float()
        error = _sum((found * scale - groups).square())
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, (found + 8).to(torch.uint8), codes)
        scales = torch.where(better, scale, scales)
    return codes.movedim(0, -1).reshape(rows, -1)[:, :columns].contiguous(), scales


def _sum(groups: Tensor) -> Tensor:
    """Over the first dimension, of INT4_GROUP numbers, in one order on every device."""
    while (half := len(groups) // 2) > 0:
        groups = groups[:half] + groups[half:]
    return groups[0]


def _int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -127..127: the largest magnitude of a row becomes the largest."""
    scales = quotient(matrix.abs().amax(-1, keepdim=True), 127)
    return (matrix / torch.where(scales == 0, 1.0, scales)).round_().to(torch.int8), scales


def _fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn with the largest magnitude of a row at the largest number."""
    scales = quotient(matrix.abs().amax(-1, keepdim=True), LARGEST)
    return (matrix / torch.where(scales == 0, 1.0, scales)).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales
