"""Products by AMX on a model of its instructions, which runs on every CPU (`amx_model.h`): tiles, tails and the layout of panels."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess

import cpu_ops
import cpu_reference
import numpy as np
import pytest
import torch
from test_cpu_codes import draw
from torch import Tensor

from aengine.kernels.cpu.compiler import SOURCES, Level
from aengine.kernels.cpu.library import CpuKernels, Workspace, load_level
from aengine.kernels.cpu.ops import PackedLinear


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    here, path = pathlib.Path(__file__).parent, tmp_path_factory.mktemp("amx") / "products.so"
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-psabi", "-ffp-contract=off", "-DAENGINE_FUSED", f"-I{SOURCES}", f"-I{here}"]
    subprocess.run(["c++", *options, str(here / "amx_products.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(scope="module")
def portable() -> CpuKernels:
    """Packs: panels are the same at every level."""
    return load_level(Level.PORTABLE)


def multiply(library: ctypes.CDLL, x: Tensor, weight: PackedLinear, rows: list[int] | None = None, threads: int = 2) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 16)).contiguous()
    count = len(x) if rows is None else len(rows)
    listed = None if rows is None else np.array(rows, np.int32).ctypes.data_as(ctypes.c_void_p)
    out = torch.empty(count, weight.out_features)
    sizes = ctypes.c_int64(padded.shape[1]), ctypes.c_int64(len(x))
    library.amx_multiply(
        *(ctypes.c_void_p(padded.data_ptr()), *sizes, ctypes.byref(weight.c)),
        *(listed, ctypes.c_int64(count), ctypes.c_void_p(out.data_ptr()), threads),
    )
    return out


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("kind", "group_size", "depth"), [("signed4", 64, 192), ("zeros4", 128, 256), ("int4", 192, 192), ("int8", 64, 200)]
)
def test_codes(library: ctypes.CDLL, portable: CpuKernels, kind: str, group_size: int, depth: int, listed: bool) -> None:
    """In tiles, and where the last group is too short for them; of rows that lie apart, too."""
    torch.manual_seed(group_size)
    x = torch.randn(90, depth).bfloat16()
    packed = cpu_ops.packed_linear(portable, [draw(kind, 200, depth, group_size)], dtype=torch.bfloat16, threads=1)
    expected = cpu_ops.logits(Workspace(portable, 1), x, packed)
    rows = [*range(0, 90, 2)] if listed else None
    found = multiply(library, x, packed, rows)
    torch.testing.assert_close(found, expected if rows is None else expected[rows], rtol=1e-5, atol=1e-4)
    assert torch.equal(found[3:5], multiply(library, x[[6, 8]] if listed else x[3:5], packed))  # without tiles


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("depth", [1, 16, 33, 64, 130, 300, 1040])
@pytest.mark.parametrize("rows", [1, 6, 16, 17, 200])
def test_products(library: ctypes.CDLL, portable: CpuKernels, rows: int, depth: int, int8: bool) -> None:
    torch.manual_seed(depth)
    x, weight, bias = torch.randn(rows, depth).bfloat16(), (torch.randn(70, depth) / depth**0.5).bfloat16(), torch.randn(70)
    packed = cpu_ops.packed_linear(portable, [weight], dtype=torch.bfloat16, threads=1, int8=int8)
    packed.set_bias(cpu_ops.floats([bias]))
    expected = cpu_reference.int8_linear(x, weight, bias) if int8 else cpu_reference.linear(x, weight, bias)
    torch.testing.assert_close(multiply(library, x, packed), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("int8", [False, True])
def test_a_row_depends_neither_on_its_neighbours_nor_on_where_it_is(library: ctypes.CDLL, portable: CpuKernels, int8: bool) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(411, 330).bfloat16(), torch.randn(200, 330).bfloat16()
    packed = cpu_ops.packed_linear(portable, [weight], dtype=torch.bfloat16, threads=1, int8=int8)
    together = multiply(library, x, packed, threads=3)
    for first, count in [(0, 1), (7, 2), (300, 5), (17, 100)]:
        assert torch.equal(multiply(library, x[first : first + count], packed), together[first : first + count])
    listed = [400, 3, 3, *range(100, 130)]
    assert torch.equal(multiply(library, x, packed, listed), together[listed])


def test_an_infinity_stays_one(library: ctypes.CDLL, portable: CpuKernels) -> None:
    """What fills a tile beyond the depth is zero in activations, too: infinity times zero would be NaN."""
    x = torch.ones(2, 40).bfloat16()
    x[0, 20] = torch.inf
    packed = cpu_ops.packed_linear(portable, [torch.ones(3, 40).bfloat16()], dtype=torch.bfloat16, threads=1)
    assert multiply(library, x, packed, [0, 1]).tolist() == [[torch.inf] * 3, [40.0] * 3]
