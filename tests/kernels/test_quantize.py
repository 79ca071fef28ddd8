"""What is quantised at load is near the matrix it was made of."""

from __future__ import annotations

import pytest
import torch
from row_tensors import arrays, dequantized

from aengine.kernels.arrays import BFLOAT16, as_tensor
from aengine.kernels.quantized import INT4_GROUP, QuantizedRows
from aengine.kernels.quantizing import quantize_rows


@pytest.mark.parametrize(("quantization", "most"), [("int4", 0.09), ("fp8", 0.03)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_of_normal_weights(quantization: str, most: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(70, 200).to(dtype)
    rows = quantize_rows(matrix, quantization)
    assert rows.shape == matrix.shape
    error = (dequantized(rows) - matrix.float()).norm() / matrix.float().norm()
    assert error < most


@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_zeros_stay_zeros(quantization: str) -> None:
    matrix = torch.zeros(3, 100)
    matrix[1, 40] = 1.0
    rows = dequantized(quantize_rows(matrix, quantization))
    assert torch.equal(rows != 0, matrix != 0)


def test_int4_finds_numbers_that_4_bits_hold() -> None:
    """Integers of -8 to 7 times a scale, the whole range in each group, come back as they are."""
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (5, 4, INT4_GROUP)).float()
    codes[..., 0] = -8.0
    matrix = (codes * torch.tensor([0.5, 1.0, 0.25, -2.0])[:, None]).flatten(1)
    assert torch.equal(dequantized(quantize_rows(matrix, "int4")), matrix)


def test_many_rows_are_dequantized_as_few() -> None:
    """With offsets, in several dtypes, in another order of columns."""
    torch.manual_seed(0)
    order = torch.randperm(40)
    codes, scales, offsets = torch.randint(0, 16, (2500, 40), dtype=torch.uint8), torch.rand(2500, 3), torch.randn(2500, 3)
    rows = QuantizedRows(codes, scales, 16, 4, offsets, order=order)
    columns = torch.arange(40) // 16
    expected = torch.empty(2500, 40)
    expected[:, order] = codes * scales[:, columns] + offsets[:, columns]
    assert torch.equal(dequantized(rows), expected)
    assert torch.equal(as_tensor(arrays(rows).dequantized(BFLOAT16)), expected.bfloat16())
    assert torch.equal(dequantized(rows[2000:]), expected[2000:])
