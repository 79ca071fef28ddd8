"""Models whose weights stay quantised on a GPU, against Transformers with the numbers that they stand for; and products of float8."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest
import torch
import transformers
from gpu_cases import ON_CPU, ON_CUDA, Case, Tolerance, params, save_small
from quantized_cases import Kind
from quantized_layouts import LAYOUTS
from quantized_models import rewrite
from row_tensors import dequantized
from slow_cases import slow_but
from test_gpu_families import assert_generates

from aengine.kernels.quantizing import Float8Rows, quantize_rows

FLOAT8 = Tolerance(worst=1.5, mean=0.15, same=0.7)  # of activations, too
SOME = ("gptq 4 bits, act-order", "fp8, blocks", "float-quantized, channels", "int-quantized, channels")


@pytest.mark.parametrize("case", params((ON_CPU[1], *ON_CUDA[1:])))
@pytest.mark.parametrize("layout", slow_but(["gptq 4 bits, act-order"], [*SOME, "awq", "nf4", "pack-quantized 4 bits, groups of 32"]))
def test_quantised_checkpoints(layout: str, case: Case, tmp_path: pathlib.Path) -> None:
    model = save_small("qwen3", tmp_path / "source", "float32")
    meant = rewrite(tmp_path / "source", tmp_path, LAYOUTS[layout])
    model.load_state_dict(meant, strict=False)
    if case.device == "cuda" and case.dtype == "bfloat16" and layout.startswith(("fp8", "float")):
        case = replace(case, tolerance=FLOAT8)
    assert_generates(model, case.runner(tmp_path), case)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("case", params(ON_CUDA[1:4]))
def test_weights_quantised_at_load(quantization: str, case: Case, tmp_path: pathlib.Path) -> None:
    """Transformers has the numbers that quantising makes."""
    model = save_small("qwen3", tmp_path, case.dtype)
    quantize_as_loaded(model, quantization)
    if quantization == "fp8" and case.dtype == "bfloat16":
        case = replace(case, tolerance=FLOAT8)
    assert_generates(model, case.runner(tmp_path, quantization=quantization), case)


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_quantises_as_the_host_does(quantization: str, dtype: torch.dtype) -> None:
    """Ties are frequent among bfloat16 numbers."""
    matrix = torch.randn(1000, 2056, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = quantize_rows(matrix, quantization)
    with torch.device("cuda"):
        found = quantize_rows(matrix.cuda(), quantization)
    assert torch.equal(found.scales.cpu(), expected.scales)
    assert torch.equal(found.codes.view(torch.uint8).cpu(), expected.codes.view(torch.uint8))


@torch.no_grad()
def quantize_as_loaded(model: transformers.PreTrainedModel, quantization: str) -> None:
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            head = "lm_head" in name
            weight.copy_(dequantized(quantize_rows(weight, "int8" if head and quantization == "int4" else quantization)))


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 130, 257])
@pytest.mark.parametrize("shape", [(512, 256), (1536, 4096)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs products of float8")
def test_float8_products(rows: int, shape: tuple[int, int], biased: bool) -> None:
    from aengine.kernels.triton.layer_ops import TritonOps
    from aengine.layers.linear import QuantizedLinears

    device = torch.device("cuda")
    part = quantize_rows(torch.randn(shape), "fp8")
    method = QuantizedLinears(torch.bfloat16, device, TritonOps().float8).linear([part])
    assert method is not None
    assert method.takes_float8
    x, bias = torch.randn(rows, shape[1], device=device).bfloat16(), torch.randn(shape[0], device=device).bfloat16() if biased else None
    of_rows = Float8Rows.of(x)
    expected = (of_rows.codes.float() * of_rows.scales) @ dequantized(part).to(device).t()
    if bias is not None:
        expected += bias.float()
    torch.testing.assert_close(method(x, bias).float(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (Kind("int4", 32, "zero", scale_dtype=torch.bfloat16), (6144, 4096)),
        (Kind("int4", 128, "any", scale_dtype=torch.float16), (4096, 12288)),
        (Kind("int4", 128, "any", ordered=True), (4096, 4096)),
        (Kind("e2m1", 32), (5760, 2880)),
        (Kind("table", 64), (4096, 4096)),
        (Kind("int8", None), (24576, 4096)),
        (Kind("float8", None), (4096, 4096)),
        (Kind("float8", 128), (4096, 4096)),
    ],
    ids=str,
)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_products_with_codes_at_the_shapes_of_models(kind: Kind, shape: tuple[int, int]) -> None:
    """One row and many, several times: programs share the depth of a product, and count who is done."""
    from aengine.kernels.triton.code_products import code_linear
    from aengine.kernels.triton.codes import Codes

    device, quantized = torch.device("cuda"), kind.rows(*shape)
    codes = Codes.of([quantized], 1, device)
    assert codes is not None
    weight = dequantized(quantized).to(device)
    if kind.codes == "table":
        weight = weight.bfloat16().float()
    for rows in (1, 2, 16, 17, 64, 300):
        x, bias = torch.randn(rows, shape[1], device=device).bfloat16(), torch.randn(shape[0], device=device).bfloat16()
        expected = x.double() @ weight.double().t() + bias.double()
        bound = 2e-2 if kind.codes == "table" else 5e-3
        for _ in range(3):
            found = code_linear(x, codes, bias, torch.bfloat16)
            assert (found.double() - expected).abs().max() < bound * expected.abs().max()
        assert not codes.arrivals.any()
