"""Products with quantised matrices of every level against what the codes, scales and offsets say, in plain float32."""

from __future__ import annotations

import cpu_ops
import cpu_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aengine.kernels.cpu import ops
from aengine.kernels.cpu.library import CpuKernels, Workspace
from aengine.kernels.cpu.packing import PackedLinear, PackedLinears
from aengine.kernels.quantized import QuantizedRows

DTYPES = [torch.float32, torch.bfloat16]
NF4 = torch.linspace(-1.0, 1.0, 16).sign() * torch.linspace(-1.0, 1.0, 16).square()
KINDS = ["int4", "signed4", "zeros4", "minimum4", "table", "int8", "unsigned8", "minimum8", "float8"]
QUANTISED = [kind for kind in KINDS if kind not in ("table", "float8")]


def draw(
    kind: str, rows: int, columns: int, group_size: int, scale_dtype: torch.dtype = torch.float16, ordered: bool = False
) -> QuantizedRows:
    """Random codes of the kind, with scales that make weights of about 1."""
    groups = -(-columns // group_size)
    bits = 8 if kind.endswith("8") else 4
    signed = kind in ("signed4", "int8")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    codes = torch.randint(low, high, (rows, columns)).to(torch.int8 if signed else torch.uint8)
    if kind == "float8":
        codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = ((torch.rand(rows, groups) + 0.5) / (1.0 if kind in ("table", "float8") else 2.0 ** (bits - 1))).to(scale_dtype).float()
    offsets = None
    if kind in ("int4", "unsigned8"):
        offsets = scales * -(2.0 ** (bits - 1))
    elif kind == "zeros4":
        offsets = scales * -torch.randint(0, 16, scales.shape).float()
    elif kind.startswith("minimum"):
        offsets = -torch.rand(rows, groups)
    order = torch.randperm(columns) if ordered else None
    return QuantizedRows(codes, scales, group_size, bits, offsets, NF4 if kind == "table" else None, order)


def pack(kernels: CpuKernels, weight: QuantizedRows, dtype: torch.dtype, **options) -> PackedLinear:
    cut = len(weight) // 3
    return PackedLinear(kernels, [weight[:cut], weight[cut:]], dtype=dtype, threads=2, **options)


def assert_near(actual: Tensor, expected: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within what summing in float32 and another order may change: some units of the sum of magnitudes."""
    bound = 4e-6 * (x.float().abs() @ weight.abs().T) + 1e-6
    assert (actual.float() - expected).abs().le(bound).all()


SHAPES = {
    "rows": st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 13, 200]),
    "columns": st.one_of(st.integers(1, 200), st.sampled_from([64, 128])),
    "depth": st.one_of(st.integers(1, 300), st.sampled_from([16, 64, 512])),
    "group_size": st.sampled_from([16, 32, 48, 64, 128, 192, 256, 1000]),
    "scale_dtype": st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    "dtype": st.sampled_from(DTYPES),
    "ordered": st.booleans(),
    "threads": st.sampled_from([1, 2, 7]),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(KINDS), **SHAPES)
def test_float_activations(kernels: CpuKernels, kind, rows, columns, depth, group_size, scale_dtype, dtype, ordered, threads, seed) -> None:
    """The product is that of the dequantised matrix in float32."""
    torch.manual_seed(seed)
    weight, x = draw(kind, columns, depth, group_size, scale_dtype, ordered), torch.randn(rows, depth).to(dtype)
    packed = pack(kernels, weight, dtype, float32=True)
    bias = torch.randn(columns)
    packed.set_bias([bias])
    dense = weight.dequantized()
    scores = ops.logits(Workspace(kernels, threads), x, packed)
    assert_near(scores - bias, cpu_reference.linear(x, dense), x, dense)


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(QUANTISED), **SHAPES)
def test_quantised_activations(
    kernels: CpuKernels, kind, rows, columns, depth, group_size, scale_dtype, dtype, ordered, threads, seed
) -> None:
    """The product is that of the dequantised matrix with activations that were rounded to int8 in groups."""
    torch.manual_seed(seed)
    weight, x = draw(kind, columns, depth, group_size, scale_dtype, ordered), torch.randn(rows, depth).to(dtype)
    packed = pack(kernels, weight, dtype)
    rounded = cpu_reference.rounded_activations(x, packed.c.activation_group, weight.order)
    dense = weight.dequantized()
    scores = ops.logits(Workspace(kernels, threads), x, packed)
    assert_near(scores, cpu_reference.linear(rounded, dense), rounded, dense)
