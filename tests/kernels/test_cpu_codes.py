"""Products with quantised matrices of every level against what the codes, scales and offsets say, in plain float32."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import cpu_ops
import cpu_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_tensors import arrays, dequantized
from torch import Tensor

from aengine.kernels.arrays import data_address
from aengine.kernels.cpu.library import INT8_CODES, NO_BUFFER, SOFTMAX, CExpertsOp, CpuKernels, Workspace
from aengine.kernels.cpu.ops import PackedLinear
from aengine.kernels.cpu.packing import are_packable
from aengine.kernels.quantized import QuantizedRows, in_one_format

DTYPES = [torch.float32, torch.bfloat16]
NF4 = torch.linspace(-1.0, 1.0, 16).sign() * torch.linspace(-1.0, 1.0, 16).square()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TABLES = {"table": NF4, "fp4": torch.cat((E2M1, -E2M1)), "steps4": torch.arange(-8.0, 8.0), "wide4": torch.arange(16.0) * 16 - 120}
FEW_BITS = ["zero2", "minimum2", "zero6", "minimum6"]
KINDS = ["int4", "signed4", "zeros4", "minimum4", *TABLES, "int8", "unsigned8", "minimum8", "float8", *FEW_BITS]
QUANTISED = [kind for kind in KINDS if kind not in ("table", "float8")]


def draw(
    kind: str, rows: int, columns: int, group_size: int, scale_dtype: torch.dtype = torch.float16, ordered: bool = False
) -> QuantizedRows:
    """Random codes of the kind, with scales that make weights of about 1."""
    groups = -(-columns // group_size)
    bits = int(kind[-1]) if kind[-1].isdigit() else 4
    signed = kind in ("signed4", "int8")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    codes = torch.randint(low, high, (rows, columns)).to(torch.int8 if signed else torch.uint8)
    if kind == "float8":
        codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    table = TABLES.get(kind)
    largest = float(table.abs().max()) if table is not None else 1.0 if kind == "float8" else 2.0 ** (bits - 1)
    scales = ((torch.rand(rows, groups) + 0.5) / largest).to(scale_dtype).float()
    offsets = None
    if kind in ("int4", "unsigned8", "zero2", "zero6"):
        offsets = scales * -(2.0 ** (bits - 1))
    elif kind == "zeros4":
        offsets = scales * -torch.randint(0, 16, scales.shape).float()
    elif kind.startswith("minimum"):
        offsets = -torch.rand(rows, groups)
    order = torch.randperm(columns) if ordered else None
    return QuantizedRows(codes, scales, group_size, bits, offsets, table, order)


def pack(kernels: CpuKernels, weight: QuantizedRows, dtype: torch.dtype, **options) -> PackedLinear:
    cut = len(weight) // 3
    return cpu_ops.packed_linear(kernels, [weight[:cut], weight[cut:]], dtype=dtype, threads=2, **options)


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
    packed.set_bias(cpu_ops.floats([bias]))
    dense = dequantized(weight)
    scores = cpu_ops.logits(Workspace(kernels, threads), x, packed)
    assert_near(scores - bias, cpu_reference.linear(x, dense), x, dense)


def with_factors(weight: QuantizedRows, groups: int, dtype: torch.dtype, seed: int) -> QuantizedRows:
    """The same codes, with scales and offsets that are multiples of factors of so many groups."""
    generator = torch.Generator().manual_seed(seed)
    count = weight.scales.shape[1]

    def factored(numbers: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if numbers is None:
            return None, None
        factors = (numbers.abs().amax() / 64 * torch.rand(len(numbers), -(-count // groups), generator=generator)).to(dtype).float()
        factors[::5] = 0
        multiples = torch.randint(-128, 128, numbers.shape, generator=generator).float()
        return multiples * factors.repeat_interleave(groups, 1)[:, :count], factors

    (scales, factors), (offsets, offset_factors) = factored(weight.scales), factored(weight.offsets)
    return replace(weight, scales=scales, offsets=offsets, factors=factors, offset_factors=offset_factors)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([kind for kind in KINDS if kind != "float8"]),
    float32=st.booleans(),
    groups=st.sampled_from([1, 2, 8, 16]),
    super_groups=st.integers(1, 3),
    **{name: SHAPES[name] for name in ("rows", "columns", "dtype", "threads", "seed", "scale_dtype")},
)
def test_scales_that_are_multiples_of_factors(
    kernels: CpuKernels, kind, float32, groups, super_groups, rows, columns, dtype, threads, seed, scale_dtype
) -> None:
    torch.manual_seed(seed)
    size = 16 if groups == 16 else 32
    depth = size * groups * super_groups
    weight = with_factors(draw(kind, columns, depth, size), groups, scale_dtype, seed)
    x = torch.randn(rows, depth).to(dtype)
    packed = pack(kernels, weight, dtype, float32=float32)
    assert packed.c.groups_per_factor == groups
    rounded = x.float() if packed.c.float_activations else cpu_reference.rounded_activations(x, packed.c.activation_group, None)
    dense = dequantized(weight)
    scores = cpu_ops.logits(Workspace(kernels, threads), x, packed)
    assert_near(scores, cpu_reference.linear(rounded, dense), rounded, dense)


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
    dense = dequantized(weight)
    scores = cpu_ops.logits(Workspace(kernels, threads), x, packed)
    assert_near(scores, cpu_reference.linear(rounded, dense), rounded, dense)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kernels: CpuKernels, kind: str) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(411, 130), draw(kind, 200, 130, 32)
    packed = pack(kernels, weight, torch.float32)
    together = cpu_ops.linear(Workspace(kernels, 3), x, packed)
    workspace = Workspace(kernels, 1)
    for first, count in [(0, 1), (7, 2), (100, 3), (200, 4), (300, 5), (5, 6), (17, 100)]:
        assert torch.equal(cpu_ops.linear(workspace, x[first : first + count], packed), together[first : first + count])


@pytest.mark.parametrize("float32", [False, True])
def test_nan_and_infinity_stay_in_their_rows(kernels: CpuKernels, float32: bool) -> None:
    x = torch.randn(4, 64)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    packed = pack(kernels, draw("int4", 100, 64, 32), torch.float32, float32=float32)
    result = cpu_ops.linear(Workspace(kernels, 2), x, packed)
    assert result[[0, 3]].isfinite().all()
    assert not result[[1, 2]].isfinite().any()


def test_interleaved_codes(kernels: CpuKernels) -> None:
    torch.manual_seed(2)
    weight, x = draw("zeros4", 2 * 70, 96, 32), torch.randn(5, 96) / 10
    packed = pack(kernels, weight, torch.float32, interleaved=True, float32=True)
    expected = cpu_reference.gated_linear(x, dequantized(weight))
    torch.testing.assert_close(cpu_ops.gated_linear(Workspace(kernels, 2), x, packed), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int4", "zeros4", "table", "fp4", "int8"])
@pytest.mark.parametrize("ordered", [False, True])
def test_experts_of_codes(kernels: CpuKernels, kind: str, ordered: bool) -> None:
    """The grouped products of experts, which are of several matrices, as those of each matrix by itself; also if the columns of each are in
    an order of their own."""
    torch.manual_seed(3)
    experts, hidden, inner, workspace = 6, 64, 48, Workspace(kernels, 2)
    gate_up, down = draw(kind, experts * 2 * inner, hidden, 32), draw(kind, experts * hidden, inner, 16)
    options = {"dtype": torch.float32, "threads": 2}
    gate_ups, downs = [gate_up[:100], gate_up[100:]], [down]
    if ordered:
        gate_ups, downs = in_orders(gate_up, experts), in_orders(down, experts)
    packed_gate_up = cpu_ops.packed_linears(kernels, gate_ups, experts, interleaved=True, **options)
    packed_down = cpu_ops.packed_linears(kernels, downs, experts, **options)
    assert (packed_gate_up.orders is not None, packed_down.orders is not None) == (ordered, ordered)
    router = torch.randn(experts, hidden)
    packed_router = cpu_ops.packed_linear(kernels, [router], **options)
    pointers = [
        ctypes.addressof(packed_router.c),
        None,
        None,
        ctypes.addressof(packed_gate_up.c),
        ctypes.addressof(packed_down.c),
        None,
        None,
    ]
    op = CExpertsOp(*pointers, experts, 2, 1, 1, 1, 1.0, SOFTMAX, True, False, chosen=NO_BUFFER, multiplier=1.0)
    if ordered:
        op.gate_up_orders, op.down_orders = data_address(packed_gate_up.orders), data_address(packed_down.orders)
    x = torch.randn(37, hidden) / 10
    chosen, weights = cpu_reference.route(cpu_reference.linear(x, router), 2, normalize=True)
    expected = torch.zeros(37, hidden)
    for expert in range(experts):
        first, second = (torch.arange(size) if not ordered else order(expert, size) for size in (hidden, inner))
        gated = cpu_ops.gated_linear(workspace, x[:, first].contiguous(), packed_gate_up.linears[expert])
        share = (weights * (chosen == expert)).sum(-1, keepdim=True)
        expected += share * cpu_ops.linear(workspace, gated[:, second].contiguous(), packed_down.linears[expert])
    result = cpu_ops.experts(workspace, x, op)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_tables_of_integers_take_quantised_activations(kernels: CpuKernels) -> None:
    """The numbers of MXFP4 are halves, those of Q4_0 the integers from -8 on; nf4 has no such unit."""
    packed = {kind: pack(kernels, draw(kind, 70, 64, 32), torch.float32).c for kind in TABLES}
    assert {kind: (c.float_activations, c.table is None, c.zero) for kind, c in packed.items() if kind != "table"} == {
        "fp4": (0, False, 12),
        "steps4": (0, True, 8),
        "wide4": (0, False, 120),
    }
    assert packed["table"].float_activations == 1


def order(expert: int, columns: int) -> torch.Tensor:
    return torch.randperm(columns, generator=torch.Generator().manual_seed(expert))


def in_orders(matrices: QuantizedRows, count: int) -> list[QuantizedRows]:
    """The rows of each of `count` matrices, in an order of its columns."""
    parts = zip(range(count), torch.arange(len(matrices)).chunk(count), strict=True)
    return [replace(matrices[rows], order=order(number, matrices.shape[1])) for number, rows in parts]


def test_orders_within_a_matrix_are_one(kernels: CpuKernels) -> None:
    halves = in_orders(draw("int4", 64, 64, 32), 4)
    assert are_packable(halves, 4)
    assert not are_packable(halves, 2)
    assert not are_packable(halves)
    with pytest.raises(ValueError, match="differ in the order of columns"):
        cpu_ops.packed_linears(kernels, halves, 2, dtype=torch.float32, threads=1)


def test_bytes_in_memory(kernels: CpuKernels) -> None:
    """A 4-bit matrix with a 16-bit scale per 32 columns takes 4.5 bits per weight."""
    for scale_dtype in (torch.bfloat16, torch.float16):
        packed = pack(kernels, draw("int4", 128, 1024, 32, scale_dtype), torch.bfloat16)
        assert packed.nbytes == 128 * 1024 * 9 // 16


def test_parts_of_several_formats(kernels: CpuKernels) -> None:
    """They have the bits of the widest, and groups that all of theirs are made of."""
    torch.manual_seed(0)
    parts = [draw("int4", 40, 192, 32), draw("zero6", 24, 192, 48), draw("wide4", 9, 192, 64), draw("int8", 30, 192, 16)]
    x = torch.randn(7, 192)
    packed = cpu_ops.packed_linear(kernels, in_one_format([*map(arrays, parts)]), dtype=torch.float32, threads=1, float32=True)
    assert (packed.c.format, packed.c.group_size) == (INT8_CODES, 16)
    dense = torch.cat([dequantized(part) for part in parts])
    assert_near(cpu_ops.logits(Workspace(kernels, 2), x, packed), cpu_reference.linear(x, dense), x, dense)


def test_what_is_refused(kernels: CpuKernels) -> None:
    options = {"dtype": torch.float32, "threads": 1}
    with pytest.raises(ValueError, match="groups of 40 columns"):
        cpu_ops.packed_linear(kernels, [draw("int4", 8, 80, 40)], **options)
    with pytest.raises(ValueError, match="differ in columns, bits, group size"):
        cpu_ops.packed_linear(kernels, [draw("int4", 8, 64, 32), draw("int4", 8, 64, 16)], **options)
    with pytest.raises(ValueError, match="order of columns"):
        cpu_ops.packed_linear(kernels, [draw("int4", 8, 64, 32, ordered=True) for _ in range(2)], **options)
    with pytest.raises(ValueError, match="quantised parts and others"):
        cpu_ops.packed_linear(kernels, [draw("int4", 8, 64, 32), torch.randn(8, 64)], **options)
