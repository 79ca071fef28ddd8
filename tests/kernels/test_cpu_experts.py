"""Experts, their routing and products per head, of every level, against plain float32."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import cpu_ops
import cpu_reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aengine.kernels.cpu.library import NO_BUFFER, SIGMOID, SOFTMAX, CExpertsOp, CHeadsOp, CpuKernels, Workspace

DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Layer:
    """The weights of a layer of experts: those of the checkpoint and packed ones."""

    kernels: CpuKernels
    dtype: torch.dtype
    num_experts: int = 8
    top_k: int = 2
    hidden: int = 48
    intermediate: int = 40
    shared: int = 0  # width of the shared expert
    shared_gate: bool = False
    biases: bool = False
    int8: bool = False
    sigmoid: bool = False
    correction: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    normalize: bool = False
    scaling: float = 1.0
    scaled: bool = False  # each expert by a number of its own

    def __post_init__(self) -> None:
        experts, hidden, inner = self.num_experts, self.hidden, self.intermediate
        self.router = torch.randn(experts, hidden) / 4
        self.router_bias = torch.randn(experts) / 2 if self.biases else None
        self.bias = torch.randn(experts) / 2 if self.correction else None
        self.gate_up, self.down = self._random(experts, 2 * inner, hidden), self._random(experts, hidden, inner)
        self.gate_up_bias = self._random(experts, 2 * inner, 1)[..., 0] if self.biases else None
        self.down_bias = self._random(experts, hidden, 1)[..., 0] if self.biases else None
        self.shared_gate_up, self.shared_down = self._random(2 * self.shared, hidden), self._random(hidden, self.shared)
        self.gate = torch.randn(1, hidden) / 4
        self.expert_scale = torch.rand(experts) + 0.5
        self._pack()

    def _random(self, *shape: int) -> Tensor:
        return (torch.randn(shape) / max(shape[-1], 1) ** 0.5).to(self.dtype)

    def _pack(self) -> None:
        experts, options = self.num_experts, {"dtype": self.dtype, "threads": 2, "int8": self.int8}
        parts = [self.router, self.gate] if self.shared_gate else [self.router]
        self._router = cpu_ops.packed_linear(self.kernels, parts, dtype=self.dtype, threads=2, float32=True)
        self._gate_up = cpu_ops.packed_linears(self.kernels, [self.gate_up.flatten(0, 1)], experts, interleaved=True, **options)
        self._down = cpu_ops.packed_linears(self.kernels, in_parts(self.down.flatten(0, 1)), experts, **options)
        if self.biases:
            self._router.set_bias(cpu_ops.floats([self.router_bias]))
            self._gate_up.set_biases(cpu_ops.floats([self.gate_up_bias.flatten()]))
            self._down.set_biases(cpu_ops.floats(in_parts(self.down_bias.flatten())))
        pointers = [ctypes.addressof(self._router.c), self.bias.data_ptr() if self.correction else None]
        pointers += [self.expert_scale.data_ptr() if self.scaled else None]
        pointers += [ctypes.addressof(self._gate_up.c), ctypes.addressof(self._down.c)]
        if self.shared:
            self._shared_gate_up = cpu_ops.packed_linear(self.kernels, [self.shared_gate_up], interleaved=True, **options)
            self._shared_down = cpu_ops.packed_linear(self.kernels, [self.shared_down], **options)
        pointers += [ctypes.addressof(one.c) for one in (self._shared_gate_up, self._shared_down)] if self.shared else [None, None]
        sizes = (self.num_experts, self.top_k, self.num_groups, self.top_groups, self.group_top)
        options = (SIGMOID if self.sigmoid else SOFTMAX, self.normalize, self.shared_gate)
        self.op = CExpertsOp(*pointers, *sizes, self.scaling, *options, chosen=NO_BUFFER, multiplier=1.0)

    def expected(self, x: Tensor) -> Tensor:
        chosen, weights = self.routed(x)
        out = cpu_reference.experts(x, chosen, weights, self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        if not self.shared:
            return out
        shared = cpu_reference.linear(cpu_reference.gated_linear(x, self.shared_gate_up).to(self.dtype), self.shared_down)
        return out + shared * (cpu_reference.linear(x, self.gate).sigmoid() if self.shared_gate else 1.0)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights = cpu_reference.route(
            cpu_reference.linear(x, self.router, self.router_bias),
            self.top_k,
            sigmoid=self.sigmoid,
            correction=self.bias,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_top=self.group_top,
            normalize=self.normalize,
            scaling=self.scaling,
        )
        return chosen, weights * self.expert_scale[chosen] if self.scaled else weights


ROUTERS = {
    "mixtral": {"normalize": True},
    "qwen2-moe": {"shared": 72, "shared_gate": True},
    "olmoe": {"top_k": 5},
    "gemma4": {"normalize": True, "scaled": True, "num_experts": 12, "top_k": 3},
    "gpt-oss": {"normalize": True, "biases": True},
    "deepseek-v2": {"num_groups": 4, "top_groups": 2, "shared": 16, "scaling": 2.5, "num_experts": 12, "top_k": 4},
    "deepseek-v3": {
        **{"sigmoid": True, "correction": True, "num_groups": 4, "top_groups": 2, "group_top": 2, "shared": 24},
        **{"normalize": True, "num_experts": 16, "top_k": 3, "scaling": 1.5},
    },
    "glm-4-moe": {"sigmoid": True, "correction": True, "shared": 24, "normalize": True},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(kernels: CpuKernels, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(kernels, dtype, **ROUTERS[name])
    for rows in (1, 2, 7, 300):
        x, residual = torch.randn(rows, layer.hidden).to(dtype), torch.randn(rows, layer.hidden).to(dtype)
        result = cpu_ops.experts(Workspace(kernels, 2), x, layer.op, residual)
        assert_close(result, residual.float() + layer.expected(x), dtype)
    layer.op.multiplier = 0.25
    result = cpu_ops.experts(Workspace(kernels, 2), x, layer.op, residual)
    assert_close(result, residual.float() + 0.25 * layer.expected(x), dtype)


@pytest.mark.quick_cases(1)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 3, 8, 50]),
    experts=st.integers(1, 90),
    hidden=st.integers(1, 150),
    intermediate=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2, 4, 7]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_shapes_of_experts(kernels: CpuKernels, rows, experts, hidden, intermediate, dtype, threads, seed, data) -> None:
    torch.manual_seed(seed)
    top_k = data.draw(st.integers(1, min(experts, 9)))
    layer = Layer(kernels, dtype, num_experts=experts, top_k=top_k, hidden=hidden, intermediate=intermediate)
    x, residual = torch.randn(rows, hidden).to(dtype), torch.randn(rows, hidden).to(dtype)
    result = cpu_ops.experts(Workspace(kernels, threads), x, layer.op, residual)
    assert_close(result, residual.float() + layer.expected(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_experts(kernels: CpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(kernels, dtype, hidden=256, intermediate=128, shared=64, int8=True)
    x = torch.randn(40, 256).to(dtype)
    expected = layer.expected(x)
    result = cpu_ops.experts(Workspace(kernels, 2), x, layer.op)
    assert (result.float() - expected).norm() / expected.norm() < 0.03  # 1.1 % relative error per product


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(kernels: CpuKernels, dtype: torch.dtype, int8: bool) -> None:
    torch.manual_seed(1)
    layer = Layer(kernels, dtype, num_experts=6, top_k=3, shared=24, int8=int8)
    x, residual = (torch.randn(411, layer.hidden).to(dtype) for _ in range(2))
    together = cpu_ops.experts(Workspace(kernels, 3), x, layer.op, residual)
    workspace = Workspace(kernels, 1)
    for first, count in [(0, 1), (7, 2), (100, 3), (300, 5), (17, 100)]:
        part = slice(first, first + count)
        assert torch.equal(cpu_ops.experts(workspace, x[part], layer.op, residual[part]), together[part])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_not_a_number_stays_in_its_row(kernels: CpuKernels, bad: float) -> None:
    torch.manual_seed(2)
    for options in ROUTERS.values():
        layer = Layer(kernels, torch.float32, **options)
        x = torch.randn(9, layer.hidden)
        expected = cpu_ops.experts(Workspace(kernels, 2), x, layer.op)
        x[4] = bad
        result = cpu_ops.experts(Workspace(kernels, 2), x, layer.op)
        assert not result[4].isfinite().any()
        others = torch.arange(9) != 4
        assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "width", "out_width", "copied"), [(3, 32, 48, 16), (5, 16, 70, 0), (2, 144, 128, 10)])
def test_heads(kernels: CpuKernels, dtype: torch.dtype, num_heads: int, width: int, out_width: int, copied: int) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(num_heads, out_width, width) / width**0.5).to(dtype)
    packed = cpu_ops.packed_linears(kernels, in_parts(weight.flatten(0, 1)), num_heads, dtype=dtype, threads=2)
    for rows in (1, 9, 200):
        x = torch.randn(rows, num_heads, copied + width).to(dtype)
        end = 7 + num_heads * (copied + out_width)
        padded = -(-end // 16) * 16
        before = torch.full((rows, padded + 1), 3.0, dtype=dtype)
        op = CHeadsOp(ctypes.addressof(packed.c), num_heads, copied, copied, copied + width, 7 + copied, copied + out_width)
        out = cpu_ops.multiply_heads(Workspace(kernels, 3), x.flatten(1), op, before)
        assert torch.equal(out[:, :7], before[:, :7])
        assert torch.equal(out[:, padded], before[:, padded])
        assert not out[:, end:padded].any()
        heads = out[:, 7:end].view(rows, num_heads, -1)
        assert torch.equal(heads[..., :copied], x[..., :copied])
        assert_close(heads[..., copied:], torch.einsum("mhi,hoi->mho", x[..., copied:].float(), weight.float()), dtype)


@pytest.mark.parametrize("int8", [False, True])
def test_packing_converts_what_the_kernels_do_not_pack(some_kernels: CpuKernels, int8: bool) -> None:
    """Parts in float16, and parts of several dtypes."""
    rows = torch.randn(3 * 20, 32).half()
    for parts in (in_parts(rows), [rows[:25].bfloat16(), rows[25:]]):
        packed = cpu_ops.packed_linears(some_kernels, parts, 3, dtype=torch.bfloat16, threads=1, int8=int8)
        for linear, matrix in zip(packed.linears, torch.cat([part.bfloat16() for part in parts]).split(20), strict=True):
            alone = cpu_ops.packed_linear(some_kernels, [matrix], dtype=torch.bfloat16, threads=1, int8=int8)
            assert linear.arrays.keys() == alone.arrays.keys()
            assert all((array == alone.arrays[name]).all() for name, array in linear.arrays.items())


def in_parts(rows: Tensor) -> list[Tensor]:
    """Cut where no matrix ends."""
    return list(rows.split(max(1, len(rows) // 3 + 1)))


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """In bf16 the gated activations are rounded too."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)
