"""Products with quantised matrices and activations in float8 in Triton, in the interpreter or on a GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from quantized_cases import Kind, magnitudes
from row_tensors import dequantized
from slow_cases import slow_but
from torch import Tensor
from triton_mode import DEVICES, INTERPRETED

from aengine.kernels.params import Activation, ExpertLinear
from aengine.kernels.quantizing import Float8Rows
from aengine.kernels.triton.code_products import code_linear, shared_depth
from aengine.kernels.triton.codes import Codes
from aengine.kernels.triton.experts import Grouping, grouped_linear
from aengine.kernels.triton.layer_ops import TritonOps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),  # the interpreter's
]
SOME = [
    Kind("int4", 32, "zero"),
    Kind("int4", 128, "any", ordered=True),
    Kind("e2m1", 32),
    Kind("table", 64),
    Kind("int8", None, ordered=True),
    Kind("uint8", 32, "any"),
    Kind("float8", 128),
]
CASES = [(kind, 3) for kind in SOME] + [(SOME[0], 1)]  # with numbers of rows
MORE_CASES = [
    (Kind(codes, group_size, offsets, ordered=number % 2 == 0), (0, 1, 20, 70)[number % 4])
    for number, (codes, group_size, offsets) in enumerate(
        product(("int4", "e2m1", "table", "int8", "uint8", "float8"), (16, 32, 48, 64, 96, 128, None), ("", "zero", "any"))
    )
    if codes in ("int8", "uint8", "float8") or group_size not in (16, 48)
]


def assert_near(actual: Tensor, expected: Tensor, bound: Tensor, eps: float) -> None:
    assert actual.shape == expected.shape
    assert ((actual.float() - expected).abs() <= eps * bound).all()


def packed(parts: list, matrices: int, device: str) -> Codes:
    codes = Codes.of(parts, matrices, torch.device(device))
    assert codes is not None
    return codes


@pytest.mark.parametrize(("kind", "rows"), slow_but(CASES, CASES + MORE_CASES), ids=str)
def test_products_are_those_of_the_dequantised_rows(device: str, kind: Kind, rows: int) -> None:
    """Rows and columns fill no block; the rows come in two parts. Within 1e-6 of what is added up. One program has the whole depth of 100
    columns, several share that of 200."""
    columns = 100 if rows == 1 else 200
    quantized = kind.rows(70, columns)
    bias, x = torch.randn(70), torch.randn(rows, columns)
    found = code_linear(x.to(device), packed([quantized[:30], quantized[30:]], 1, device), bias.to(device), torch.float32).cpu()
    weight = dequantized(quantized)
    assert_near(found, x @ weight.t() + bias, x.abs() @ magnitudes(quantized).t() + bias.abs(), 1e-6)


@pytest.mark.parametrize(
    ("kind", "rows", "dtype"),
    slow_but(
        [(SOME[0], 2, torch.bfloat16), (SOME[2], 2, torch.bfloat16), (SOME[4], 17, torch.bfloat16), (SOME[6], 2, torch.float16)],
        [(kind, rows, dtype) for kind in SOME for rows in (2, 17) for dtype in (torch.float16, torch.bfloat16)],
    ),
    ids=str,
)
@pytest.mark.usefixtures("bfloat16_arithmetic")
def test_products_of_narrow_activations(device: str, kind: Kind, rows: int, dtype: torch.dtype) -> None:
    """The depth is shared by several programs, again and again. Codes are exact in every dtype; numbers of a table are rounded to it, as
    is a result."""
    quantized = kind.rows(66, 264)
    x, codes = torch.randn(rows, 264).to(dtype), packed([quantized], 1, device)
    found = code_linear(x.to(device), codes, None, torch.float32).cpu()
    expected, bound = x.float() @ dequantized(quantized).t(), x.float().abs() @ magnitudes(quantized).t()
    assert_near(found, expected, bound, torch.finfo(dtype).eps / 2 if kind.codes == "table" else 1e-6)
    narrow = code_linear(x.to(device), codes, None, dtype).cpu()
    torch.testing.assert_close(narrow.float(), found, rtol=torch.finfo(dtype).eps, atol=0)
    assert shared_depth(rows, 66, codes.padded_features)[0] > 1
    assert not codes.arrivals.any()


def test_products_of_float8(device: str) -> None:
    """Both sides are float8: products of e4m3 are exact in float32. A GPU adds them up with 13 bits."""
    quantized = Kind("float8", 128).rows(40, 300)
    rows = Float8Rows.of(torch.randn(5, 300))
    codes = packed([quantized], 1, device)
    found = code_linear(rows.codes.to(device), codes, None, torch.float32, rows.scales.to(device)).cpu()
    x = rows.codes.float() * rows.scales
    assert_near(found, x @ dequantized(quantized).t(), x.abs() @ magnitudes(quantized).t(), 1e-6 if INTERPRETED else 1e-3)


@pytest.mark.parametrize("kind", slow_but([SOME[1], SOME[2]], SOME), ids=str)
@pytest.mark.parametrize("tokens", slow_but([5], [1, 5, 90]))
def test_experts(device: str, kind: Kind, tokens: int) -> None:
    """Each expert has columns in an order of its own; their rows come in parts that end anywhere."""
    experts, top_k = 3, 2
    each = [kind.rows(40, 200, seed) for seed in range(experts)]
    parts = each if kind.ordered else [each[0][:15], each[0][15:], *each[1:]]
    x, bias = torch.randn(tokens, 200), torch.randn(experts, 40)
    chosen = torch.rand(tokens, experts).topk(top_k).indices
    grouping = Grouping.of(chosen.to(device), experts)
    found = grouped_linear(x.to(device), ExpertLinear(packed(parts, experts, device), bias.to(device)), grouping, top_k).cpu()
    choices = chosen.flatten()
    of_choices = x.repeat_interleave(top_k, 0)
    weights, bounds = (torch.stack(matrices)[choices] for matrices in ([dequantized(one) for one in each], [*map(magnitudes, each)]))
    expected = (weights @ of_choices[:, :, None]).squeeze(-1) + bias[choices]
    assert_near(found, expected, (bounds @ of_choices.abs()[:, :, None]).squeeze(-1) + bias[choices].abs(), 1e-6)


def test_what_no_kernel_reads(device: str) -> None:
    of = torch.device(device)
    first = Kind("int4", 32).rows(8, 64)
    assert Codes.of([Kind("int4", 16).rows(8, 64)], 1, of) is None
    for other in (Kind("int4", 64), Kind("table", 32), Kind("uint8", 32), Kind("int4", 32, ordered=True)):
        assert Codes.of([first, other.rows(8, 64)], 1, of) is None
    assert Codes.of([first, Kind("int4", 32, ordered=True).rows(8, 64)], 2, of) is not None


def test_bytes(device: str) -> None:
    """4 bits each, and bfloat16 scales where these have them exactly; an offset that is a common zero point takes none."""
    codes = packed([Kind("int4", 32, "zero", scale_dtype=torch.bfloat16).rows(64, 256)], 1, device)
    assert (codes.format.zero, codes.offsets, codes.nbytes) == (8, None, 64 * 256 // 2 + 64 * 8 * 2)


@pytest.mark.parametrize("dtype", slow_but([torch.float16], [torch.float16, torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("size", slow_but([300], [1, 300, 1024]))
def test_float8_activations(device: str, dtype: torch.dtype, size: int) -> None:
    """What the fused operations store is what quantising their results gives, but for ties, and for roundings up to the next power of two:
    there the interpreter loses a bit."""
    ops = TritonOps()
    x, residual, weight = (torch.randn(shape).to(device, dtype) for shape in ((4, size), (4, size), (size,)))
    x[2] = 0
    total = residual.clone()
    normed_sum, expected_total = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    gate_up = torch.cat((x, residual), 1)
    for found, values in (
        (ops.float8(x), x),
        (ops.rms_norm_float8(x, None, weight, 1e-6), ops.rms_norm(x, weight, 1e-6)),
        (ops.rms_norm_float8(x, total, weight, 1e-6), normed_sum),
        *((ops.gated_float8(gate_up, activation), ops.gated(gate_up, activation)) for activation in Activation),
    ):
        expected = Float8Rows.of(values)
        torch.testing.assert_close(found.scales, expected.scales, rtol=0 if INTERPRETED else 2e-3, atol=0)
        if INTERPRETED:
            differ = found.codes.float() != expected.codes.float()
            carried = expected.codes.view(torch.uint8) & 7 == 0
            assert (differ & ~carried).float().mean() < 0.02
        else:
            wide = values.float()
            rounding = torch.maximum(wide.abs() / 16, found.scales / 512)  # half of the last place, and of the smallest number
            assert ((found.codes.float() * found.scales - wide).abs() <= 1.01 * rounding).all()
    assert torch.equal(total, expected_total)
    assert not len(ops.float8(x[:0]))
