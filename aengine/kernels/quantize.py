"""Quantising a matrix at load: to 4 bits in groups of 32 columns, or to int8 or float8 with one scale per row."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.quantized import QuantizedRows

INT4_GROUP = 32
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the step: cutting the largest numbers of a group off can lower its error
_CHUNK_ROWS = 4096


def quantize_rows(matrix: Tensor, quantization: str) -> QuantizedRows:
    """[rows, columns] of any float dtype -> "int4", "int8" or "fp8"."""
    quantize = {"int4": _int4, "int8": _int8, "fp8": _fp8}[quantization]
    chunks = [quantize(chunk.float()) for chunk in torch.split(matrix, _CHUNK_ROWS)]
    codes = torch.cat([codes.view(torch.uint8) for codes, _ in chunks]).view(chunks[0][0].dtype)  # not every dtype can be joined
    scales = torch.cat([scales for _, scales in chunks])
    return int4_rows(codes, scales) if quantization == "int4" else QuantizedRows(codes, scales, matrix.shape[1], bits=8)


def int4_rows(codes: Tensor, scales: Tensor) -> QuantizedRows:
    """Codes [rows, columns] of (code - 8) * scale."""
    return QuantizedRows(codes, scales, INT4_GROUP, bits=4, offsets=-8.0 * scales)


def _int4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0..15 of (code - 8) * scale: of several roundings of each group, each with its best bfloat16 scale, that of least squared
    error."""
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -columns % INT4_GROUP))
    groups = padded.view(rows, -1, INT4_GROUP)
    # The number of the largest magnitude becomes -8, the code of the largest magnitude, or is cut off there.
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8.0
    best = torch.full(groups.shape[:2], torch.inf)
    codes, scales = torch.zeros(groups.shape, dtype=torch.uint8), torch.zeros(groups.shape[:2])
    for shrink in _SHRINKS:
        found = torch.where(largest == 0, 0.0, groups / (largest * shrink)).round_().clamp_(-8, 7)
        # The scale of least squared error: sum (x - s q)^2 has its minimum at s = sum x q / sum q^2.
        scale = ((found * groups).sum(-1) / found.square().sum(-1).clamp(min=1.0)).bfloat16().float()
        error = (found * scale[..., None] - groups).square().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better[..., None], (found + 8).to(torch.uint8), codes)
        scales = torch.where(better, scale, scales)
    return codes.view(rows, -1)[:, :columns].contiguous(), scales


def _int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -127..127: the largest magnitude of a row becomes the largest."""
    scales = matrix.abs().amax(-1, keepdim=True) / 127
    return (matrix / torch.where(scales == 0, 1.0, scales)).round_().to(torch.int8), scales


def _fp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn with the largest magnitude of a row at the largest number."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = matrix.abs().amax(-1, keepdim=True) / largest
    return (matrix / torch.where(scales == 0, 1.0, scales)).clamp_(-largest, largest).to(torch.float8_e4m3fn), scales
