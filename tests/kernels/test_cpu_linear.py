"""Packed products, norms and heads of every level against plain float32."""

from __future__ import annotations

import cpu_ops
import cpu_reference
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aengine.kernels.cpu import library
from aengine.kernels.cpu.library import CpuKernels, Workspace
from aengine.kernels.cpu.ops import PackedLinear

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = st.tuples(
    st.sampled_from([0, 1, 2, 3, 5, 6, 7, 13, 40, 200]),  # rows
    st.one_of(st.integers(1, 300), st.sampled_from([64, 128, 640])),  # output columns, halved where they are gate and up
    st.one_of(st.integers(1, 200), st.sampled_from([16, 64, 512])),  # depth
)
COMMON = {
    "shape": SHAPES,
    "dtype": st.sampled_from(DTYPES),
    "with_bias": st.booleans(),
    "threads": st.sampled_from([1, 2, 4, 7]),
    "seed": st.integers(0, 1000),
}


def given_products(test):
    return settings(max_examples=40, deadline=None)(given(**COMMON)(test))


def draw(shape: tuple[int, int, int], dtype: torch.dtype, with_bias: bool, seed: int) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, columns, depth = shape
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, depth).to(dtype), (torch.randn(columns, depth) / depth**0.5).to(dtype)
    return x, weight, torch.randn(columns).to(dtype) if with_bias else None


def pack(kernels: CpuKernels, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, **options) -> PackedLinear:
    """In two parts, the second a view with gaps between its rows, to be packed without a copy."""
    cut = len(weight) // 3
    spaced = torch.empty(len(weight) - cut, weight.shape[1] + 5, dtype=weight.dtype)[:, : weight.shape[1]]
    spaced.copy_(weight[cut:])
    packed = cpu_ops.packed_linear(kernels, [weight[:cut], spaced], dtype=dtype, threads=2, **options)
    if bias is not None:
        packed.set_bias(cpu_ops.floats([bias[:cut], bias[cut:]]))
    return packed


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, atol: float = 1e-5) -> None:
    """bf16 results are float32 ones rounded once: half a unit in the last place of 8 bits, and then as much again."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=atol)


@pytest.mark.quick_cases(1)
@given_products
def test_linear(kernels: CpuKernels, shape, dtype, with_bias, threads, seed) -> None:
    x, weight, bias = draw(shape, dtype, with_bias, seed)
    workspace = Workspace(kernels, threads)
    packed = pack(kernels, weight, bias, dtype)
    expected = cpu_reference.linear(x, weight, bias)
    result = cpu_ops.linear(workspace, x, packed)
    assert result.dtype == dtype
    assert_close(result, expected, dtype)
    residual = torch.randn(expected.shape).to(dtype)
    assert_close(cpu_ops.add_linear(workspace, x, packed, residual), residual.float() + expected, dtype)
    scores = cpu_ops.logits(workspace, x, packed)
    assert scores.dtype == torch.float32
    assert scores.is_contiguous()
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(cpu_ops.argmax(workspace, x, packed), scores.argmax(-1))


@pytest.mark.quick_cases(1)
@given_products
def test_gated_linear(kernels: CpuKernels, shape, dtype, with_bias, threads, seed) -> None:
    rows, columns, depth = shape
    x, weight, bias = draw((rows, 2 * columns, depth), dtype, with_bias, seed)
    packed = pack(kernels, weight, bias, dtype, interleaved=True)
    result = cpu_ops.gated_linear(Workspace(kernels, threads), x, packed)
    assert result.shape == (rows, columns)
    assert_close(result, cpu_reference.gated_linear(x, weight, bias), dtype, atol=2e-5)


@pytest.mark.quick_cases(1)
@given_products
def test_int8_linear(kernels: CpuKernels, shape, dtype, with_bias, threads, seed) -> None:
    x, weight, bias = draw(shape, dtype, with_bias, seed)
    packed = pack(kernels, weight, bias, dtype, int8=True)
    workspace = Workspace(kernels, threads)
    scores = cpu_ops.logits(workspace, x, packed)
    expected = cpu_reference.int8_linear(x, weight, bias)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(cpu_ops.argmax(workspace, x, packed), scores.argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_packing_converts(kernels: CpuKernels, dtype: torch.dtype, source: torch.dtype, int8: bool) -> None:
    x, weight = torch.randn(5, 70).to(dtype), (torch.randn(90, 70) / 8).to(source)
    scores = cpu_ops.logits(Workspace(kernels, 1), x, cpu_ops.packed_linear(kernels, [weight], dtype=dtype, threads=1, int8=int8))
    stored = weight if int8 else weight.to(dtype)
    expected = cpu_reference.linear(x, stored)
    error = (scores - expected).norm() / expected.norm()
    assert error < (0.015 if int8 else 1e-6)  # int8: 1.1 % relative error per product


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(kernels: CpuKernels, dtype: torch.dtype, int8: bool) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(411, 130).to(dtype), torch.randn(200, 130).to(dtype)
    packed = cpu_ops.packed_linear(kernels, [weight], dtype=dtype, threads=2, int8=int8)
    together = cpu_ops.linear(Workspace(kernels, 3), x, packed)
    workspace = Workspace(kernels, 1)
    for first, count in [(0, 1), (7, 2), (100, 3), (200, 4), (300, 5), (5, 6), (17, 100)]:
        assert torch.equal(cpu_ops.linear(workspace, x[first : first + count], packed), together[first : first + count])


@pytest.mark.parametrize("int8", [False, True])
def test_nan_and_infinity_stay(kernels: CpuKernels, int8: bool) -> None:
    x = torch.randn(4, 64)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    packed = cpu_ops.packed_linear(kernels, [torch.randn(100, 64)], dtype=torch.float32, threads=1, int8=int8)
    finite = cpu_ops.linear(Workspace(kernels, 2), x, packed).isfinite().all(-1)
    assert finite.tolist() == [True, False, False, True]


def test_a_row_of_zeros(kernels: CpuKernels) -> None:
    weight = torch.randn(70, 64)
    weight[3] = 0
    packed = cpu_ops.packed_linear(kernels, [weight], dtype=torch.bfloat16, threads=1, int8=True)
    assert torch.equal(cpu_ops.linear(Workspace(kernels, 1), torch.zeros(2, 64).bfloat16(), packed), torch.zeros(2, 70).bfloat16())


@pytest.mark.parametrize("threads", [1, 4])
def test_argmax_of_ties_nans_and_infinities(kernels: CpuKernels, threads: int) -> None:
    """The logits of a row are the columns of the weight at the row's one."""
    special = [0.0, -0.0, 1.0, -1.0, torch.nan, torch.inf, -torch.inf]
    torch.manual_seed(0)
    choices = torch.tensor(special)
    weight = choices[torch.randint(0, len(special), (333, 16))].masked_fill(torch.rand(333, 16) < 0.7, -1.0)
    weight[:, 0], weight[:, 1], weight[:, 2] = -torch.inf, torch.nan, -3.0
    weight[:, 3] = torch.tensor([-0.0, 0.0] * 166 + [0.0])
    weight[:, 4], weight[70, 4], weight[200, 4] = 1.0, 2.0, 2.0
    rows = [weight[:, k] for k in range(16)]
    # A product with zeros would spread NaN and infinity over all rows, so each goes through a matrix of its own.
    workspace = Workspace(kernels, threads)
    for row in rows:
        matrix = torch.zeros(333, 16)
        matrix[:, 0] = row
        packed = cpu_ops.packed_linear(kernels, [matrix], dtype=torch.float32, threads=1)
        x = torch.zeros(1, 16)
        x[0, 0] = 1.0
        (token,) = cpu_ops.argmax(workspace, x, packed).tolist()
        best = int(row.argmax())
        assert token == (best if row[best] > -torch.inf else ~best)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    size=st.one_of(st.integers(1, 300), st.sampled_from([64, 1024])),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2, 7]),
)
def test_rms_norm(kernels: CpuKernels, rows: int, size: int, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(size)
    x, weight = torch.randn(rows, size).to(dtype), (torch.rand(size) + 0.5).to(dtype)
    assert_close(cpu_ops.rms_norm(Workspace(kernels, threads), x, weight, 1e-5), cpu_reference.rms_norm(x, weight, 1e-5), dtype)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 20),
    size=st.one_of(st.integers(1, 300), st.sampled_from([64, 1024])),
    offset=st.sampled_from([0.0, 30.0]),
    with_bias=st.booleans(),
    adds=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_layer_norm(kernels: CpuKernels, rows, size, offset, with_bias, adds, dtype) -> None:
    torch.manual_seed(size)
    x, weight, residual = (torch.randn(rows, size) + offset).to(dtype), torch.rand(size) + 0.5, torch.randn(rows, size).to(dtype)
    bias = torch.randn(size) if with_bias else None
    result = cpu_ops.norm(Workspace(kernels, 2), x, weight, bias, 0.1, library.LAYER_NORM, residual if adds else None)
    expected = F.layer_norm(x.float(), (size,), weight, bias, 0.1)
    if adds:
        expected = F.layer_norm((residual.float() + 0.7 * expected).to(dtype).float(), (size,), weight, bias, 0.1)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6 if adds else 2.0**-8}[dtype]
    torch.testing.assert_close(result.float(), expected, rtol=tolerance, atol=tolerance if adds else 5e-5)


ACTIVATIONS = {
    library.SILU: F.silu,
    library.GELU: F.gelu,
    library.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    library.RELU: F.relu,
    library.RELU_SQUARED: lambda x: F.relu(x).square(),
    library.CLIPPED_SWIGLU: lambda x: x.clamp(max=7.0) * torch.sigmoid(1.702 * x.clamp(max=7.0)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_as_exact_as_float32(kernels: CpuKernels, activation: int) -> None:
    """Relative to float64, wherever results are not tiny. The activations of the columns of a weight."""
    inputs = torch.cat((torch.linspace(-12.0, 12.0, 4801), torch.tensor([-1e4, -87.0, -40.0, -1e-6, 0.0, 1e-20, 1e-3, 60.0, 90.0, 1e4])))
    weight, x = torch.zeros(len(inputs), 16), torch.zeros(1, 16)
    weight[:, 0], x[0, 0] = inputs, 1.0
    packed = cpu_ops.packed_linear(kernels, [weight], dtype=torch.float32, threads=1)
    result = cpu_ops.activated_linear(Workspace(kernels, 1), x, packed, activation)[0].double()
    exact = ACTIVATIONS[activation](inputs.double())
    torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-12)
    near = inputs.abs() < 3
    torch.testing.assert_close(result[near], exact[near], rtol=1.5e-6, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activated_products(kernels: CpuKernels, activation: int, dtype: torch.dtype) -> None:
    torch.manual_seed(activation)
    x, weight, bias = draw((7, 2 * 70, 40), dtype, True, activation)
    assert bias is not None
    weight, bias = 4 * weight, 4 * bias
    workspace = Workspace(kernels, 2)
    expected = ACTIVATIONS[activation](cpu_reference.linear(x, weight, bias))
    assert_close(cpu_ops.activated_linear(workspace, x, pack(kernels, weight, bias, dtype), activation), expected, dtype, atol=1e-4)
    gate, up = cpu_reference.linear(x, weight, bias).chunk(2, dim=-1)
    if activation == library.CLIPPED_SWIGLU:
        up = up.clamp(-7.0, 7.0) + 1.0
    packed = pack(kernels, weight, bias, dtype, interleaved=True)
    result = cpu_ops.activated_linear(workspace, x, packed, activation)
    assert_close(result, ACTIVATIONS[activation](gate) * up, dtype, atol=1e-3 if activation == library.RELU_SQUARED else 2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_capped_logits(kernels: CpuKernels, dtype: torch.dtype) -> None:
    x, weight, bias = draw((9, 130, 40), dtype, True, 0)
    scores = cpu_ops.logits(Workspace(kernels, 2), x, pack(kernels, weight, bias, dtype), 0.8)
    expected = torch.tanh(cpu_reference.linear(x, weight, bias) / 0.8) * 0.8
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=2e-6)


def test_extreme_gates(kernels: CpuKernels) -> None:
    gate = torch.tensor([-1e4, -200.0, -88.0, -1.0, 0.0, 1.0, 88.0, 1e4])
    weight = torch.zeros(16, 16)
    weight[:8, 0], weight[8:, 0] = gate, 1.0
    x = torch.zeros(1, 16)
    x[0, 0] = 1.0
    packed = cpu_ops.packed_linear(kernels, [weight], dtype=torch.float32, threads=1, interleaved=True)
    torch.testing.assert_close(cpu_ops.gated_linear(Workspace(kernels, 1), x, packed)[0], F.silu(gate), rtol=1e-6, atol=1e-30)


def test_what_is_refused(kernels: CpuKernels) -> None:
    workspace = Workspace(kernels, 1)
    packed = cpu_ops.packed_linear(kernels, [torch.randn(8, 16)], dtype=torch.float32, threads=1)
    with pytest.raises(ValueError, match=r"\(2, 15\)"):
        cpu_ops.linear(workspace, torch.randn(2, 15), packed)
    with pytest.raises(ValueError, match="bfloat16"):
        cpu_ops.linear(workspace, torch.randn(2, 16).bfloat16(), packed)
    with pytest.raises(ValueError, match="interleaved"):
        cpu_ops.logits(
            workspace,
            torch.randn(2, 16),
            cpu_ops.packed_linear(kernels, [torch.randn(8, 16)], dtype=torch.float32, threads=1, interleaved=True),
        )
    with pytest.raises(ValueError, match="interleaved"):
        cpu_ops.gated_linear(workspace, torch.randn(2, 16), packed)
    with pytest.raises(ValueError, match="contiguous columns"):
        cpu_ops.packed_linear(kernels, [torch.randn(16, 8).T], dtype=torch.float32, threads=1)
    with pytest.raises(ValueError, match="float16"):
        cpu_ops.packed_linear(kernels, [torch.randn(16, 8).half()], dtype=torch.float32, threads=1)
    with pytest.raises(ValueError, match="7 rows"):
        cpu_ops.packed_linear(kernels, [torch.randn(7, 8)], dtype=torch.float32, threads=1, interleaved=True)
    with pytest.raises(ValueError, match="threads 0"):
        Workspace(kernels, 0)
