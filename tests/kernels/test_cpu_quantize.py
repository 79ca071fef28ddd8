"""Matrices become 4-bit codes as `quantize_rows` makes them, at every level that this CPU has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from row_tensors import dequantized, tensors

from aengine.kernels.arrays import as_array
from aengine.kernels.cpu.library import CpuKernels, Workspace
from aengine.kernels.cpu.packing import quantize_matrix
from aengine.kernels.quantized import INT4_GROUP
from aengine.kernels.quantizing import quantize_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 40, 96, 1040])
def test_int4_is_that_of_the_reference(kernels: CpuKernels, dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(columns)
    matrix = (torch.randn(37, columns + 3) * torch.logspace(-6, 3, 37)[:, None]).to(dtype)[:, :columns]  # not contiguous
    matrix[5], matrix[6, 0] = 0.0, -1.0
    found = tensors(quantize_matrix(Workspace(kernels, 2), as_array(matrix), "int4"))
    expected = quantize_rows(matrix, "int4")
    assert found.shape == (37, columns)
    assert torch.equal(found.scales, found.scales.bfloat16().float())
    assert torch.equal(found.offsets, -8.0 * found.scales)
    assert found.codes.max() <= 15
    errors = [(dequantized(rows) - matrix.float()).square() for rows in (found, expected)]
    by_group = [torch.nn.functional.pad(error, (0, -columns % INT4_GROUP)).view(37, -1, INT4_GROUP).sum(-1) for error in errors]
    worse = by_group[0] > 1.001 * by_group[1] + 1e-18  # where one of two codes that are equally near leads to another scale
    assert worse.float().mean() < 0.01
    assert (by_group[0] <= 1.1 * by_group[1] + 1e-18).all()
    assert (found.codes != expected.codes).float().mean() < 0.01
    assert torch.equal(dequantized(found)[5], torch.zeros(columns))


def test_float8_is_that_of_the_reference(kernels: CpuKernels) -> None:
    """Every float32 of few bits, and what lies between: all codes, ties, and numbers below the smallest."""
    numbers = np.arange(0, 1 << 32, 1 << 14, np.uint64).astype(np.uint32).view(np.float32)
    matrix = torch.from_numpy(np.clip(np.nan_to_num(numbers, posinf=0, neginf=0), -448, 448).reshape(-1, 2048).copy())
    matrix[:, 0] = 448.0  # the scale is 1
    for given in (matrix, torch.randn(300, 77), torch.zeros(2, 8)):
        found, expected = tensors(quantize_matrix(Workspace(kernels, 1), as_array(given), "fp8")), quantize_rows(given, "fp8")
        assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(found.scales, expected.scales)
