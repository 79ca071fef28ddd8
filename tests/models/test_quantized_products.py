"""Models whose quantised weights stay quantised, as on a GPU: Triton's products in its interpreter, and those of float8 in torch."""

from __future__ import annotations

import logging
import pathlib

import pytest
import torch
from driver import Driver, record_logits
from family_cases import Case
from quantized_cases import Kind
from quantized_layouts import FEW_BITS, LAYOUTS
from quantized_models import rewrite
from row_tensors import dequantized
from slow_cases import slow_but
from torch import Tensor
from triton_mode import DEVICES  # before triton is imported

from aengine.api.config import EngineConfig
from aengine.kernels.arrays import FLOAT32, as_array, as_tensor
from aengine.kernels.quantized import QuantizedRows, Rows
from aengine.kernels.quantizing import Float8Rows, quantize_rows
from aengine.kernels.triton.layer_ops import TritonOps
from aengine.layers.linear import QuantizedLinears
from aengine.models.config.model_config import load_spec
from aengine.models.sharding import random_weights
from aengine.models.torch.blocks import same_form, tensors_of
from aengine.models.torch.decoder import Decoder
from aengine.runner.runner import ModelRunner
from aengine.runner.torch import loading
from aengine.runner.torch.loading import fused

pytestmark = pytest.mark.parametrize("device", DEVICES[:1])
CPU = torch.device("cpu")
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "n_shared_experts": 1, "num_hidden_layers": 2},
}
MODELS = {
    "qwen3": Case("qwen3", "Qwen3", {"num_hidden_layers": 1, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": Case(
        "qwen3_moe", "Qwen3Moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    ),
    "deepseek_v3": Case("deepseek_v3", "DeepseekV3", _LATENT),
    "cohere2": Case("cohere2", "Cohere2", {"num_hidden_layers": 1}),  # attention and MLP share a norm
}


def save(model: str, path: pathlib.Path) -> pathlib.Path:
    MODELS[model].make().save_pretrained(path)
    return path


def logits_of(folder: pathlib.Path, dtype: str = "float32") -> Tensor:
    """Of the last token of a prompt, and of the token after it."""
    options = {"dtype": dtype, "device": "cpu", "kv_cache_memory": 4 << 20, "max_num_seqs": 2, "attention_backend": "torch_native"}
    runner = ModelRunner(EngineConfig(model=str(folder), **options), folder)
    seen = record_logits(runner)
    Driver(runner).generate([list(range(5, 24))], 2)
    return torch.cat([step.float() for step in seen])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("model", "layout", "count"),
    slow_but(
        [("qwen3", "gptq 4 bits, act-order", 4), ("qwen3_moe", "awq", 4)],
        [
            ("qwen3", "gptq 4 bits, act-order", 4),
            ("qwen3_moe", "awq", 4),
            ("qwen3_moe", "gptq 4 bits, act-order", 4),
            ("qwen3", "gptq 2 bits", 4),
            ("qwen3_moe", "gptq 3 bits", 4),
            ("deepseek_v3", "fp8, blocks", 14),
            ("cohere2", "nf4", 4),
        ],
    ),
)
def test_logits(
    model: str,
    layout: str,
    count: int,
    device: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of the dequantised weights, to 1e-5 of the largest; and as many matrices are quantised as there should be."""
    rewrite(save(model, tmp_path / "source"), tmp_path, {**LAYOUTS, **FEW_BITS}[layout])
    counted: list[int] = []
    monkeypatch.setattr(loading, "check_memory", lambda weights, *others: counted.append(weights))
    expected = logits_of(tmp_path)
    monkeypatch.setattr(loading, "select_ops", lambda *given: TritonOps())
    with caplog.at_level(logging.INFO, "aengine"):
        found = logits_of(tmp_path)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert f"{count} quantised matrices take" in caplog.text
    assert counted[1] < counted[0], "memory is counted as it is kept"


def _multiplies_float8() -> bool:
    """torch on this CPU, with a scale per row of both sides."""
    codes, scales = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale_a=scales, scale_b=scales.t().contiguous(), out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError):
        return False
    return True


needs_float8 = pytest.mark.skipif(not _multiplies_float8(), reason="needs a torch that multiplies float8 on a CPU")


@needs_float8
@pytest.mark.parametrize("rows", [1, 21])
def test_products_of_float8(device: str, rows: int) -> None:
    """To the rounding of bfloat16, of two parts and a bias: few rows in Triton, many in torch."""
    parts = [quantize_rows(torch.randn(count, 128), "fp8") for count in (40, 24)]
    linears = QuantizedLinears(torch.bfloat16, CPU, Float8Rows.of)
    method = linears.linear(parts)
    assert method is not None
    assert method.takes_float8
    assert method.nbytes == 64 * 128 + 64 * 4
    x, bias = torch.randn(rows, 128).bfloat16(), torch.randn(64).bfloat16()
    of_rows = Float8Rows.of(x)
    weight = torch.cat([dequantized(part) for part in parts])
    expected = (of_rows.codes.float() * of_rows.scales) @ weight.t() + bias.float()
    torch.testing.assert_close(method(x, bias).float(), expected, rtol=1e-2, atol=2e-2)
    assert torch.equal(method(of_rows, bias), method(x, bias))


def test_products_of_float8_blocks(device: str) -> None:
    """In Triton; not for groups of 16, since a product takes 32 columns at least."""
    linears = QuantizedLinears(torch.bfloat16, CPU, Float8Rows.of)
    method = linears.linear([Kind("float8", 32).rows(40, 96)])
    assert method is not None
    assert method.takes_float8
    of_rows, bias = Float8Rows.of(torch.randn(3, 96)), torch.randn(40).bfloat16()
    expected = (of_rows.codes.float() * of_rows.scales) @ dequantized(Kind("float8", 32).rows(40, 96)).t() + bias.float()
    torch.testing.assert_close(method(of_rows, bias).float(), expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    for kind in (Kind("float8", 16), Kind("int8", 32)):
        method = linears.linear([kind.rows(40, 96)])
        assert method is not None
        assert not method.takes_float8


@needs_float8
@pytest.mark.parametrize("model", slow_but(["qwen3"], ["qwen3", "cohere2"]))
def test_logits_of_float8_products(device: str, model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations have 4 significant bits, which changes logits by some percent."""
    rewrite(save(model, tmp_path / "source"), tmp_path, LAYOUTS["float-quantized, channels"])
    expected = logits_of(tmp_path, "bfloat16")
    quantised: list[Tensor] = []

    def quantize(x: Tensor) -> Float8Rows:
        quantised.append(x)
        return Float8Rows.of(x)

    monkeypatch.setattr(loading, "select_linears", lambda *given: QuantizedLinears(torch.bfloat16, CPU, quantize))
    found = logits_of(tmp_path, "bfloat16")
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < 0.1, error
    # Norms and gated activations make float8 themselves: what is left is the outcome of attention.
    assert len(quantised) == 2 * {"qwen3": 1, "cohere2": 1}[model]


@pytest.mark.parametrize("quantization", slow_but(["int4"], ["int8", "int4", "fp8"]))
def test_weights_that_are_quantised_at_load(device: str, quantization: str, tmp_path: pathlib.Path) -> None:
    """All matrices but the embedding, beside which there is the quantised head that is tied to it."""
    spec = load_spec(save("qwen3", tmp_path))
    weights = dict(random_weights(spec, FLOAT32, 0))
    linears = QuantizedLinears(torch.float32, CPU, None)
    made = fused(spec, iter(weights.items()), torch.float32, CPU, linears, quantization)
    quantized = {name for name, weight in made.items() if not isinstance(weight, Tensor)}
    assert quantized == {"head.weight", *(f"layers.0.{name}.weight" for name in ("qkv", "output", "gate_up", "down"))}
    decoder, hidden = Decoder(spec, made, 4, TritonOps()), torch.randn(2, spec.hidden_size)
    out = torch.zeros(2, decoder.head_shape[0])
    assert torch.equal(decoder.head_product(hidden, out), made["head.weight"](hidden, None))
    assert torch.equal(out, decoder.head_product(hidden))
    for name, source, how in (
        ("layers.0.down.weight", "layers.0.down.weight", quantization),
        ("head.weight", "embedding.weight", "int8" if quantization == "int4" else quantization),
    ):
        (part,) = weights[source]
        x = torch.randn(2, part.shape[1])
        torch.testing.assert_close(made[name](x, None), x @ dequantized(quantize_rows(as_tensor(part), how)).t(), rtol=1e-5, atol=1e-5)


def test_parts_in_several_formats_are_multiplied_one_by_one(device: str) -> None:
    linears = QuantizedLinears(torch.float32, CPU, None)
    matrix = torch.randn(48, 64)
    parts = [quantize_rows(matrix[:16], "int4"), quantize_rows(matrix[16:32], "fp8"), as_array(matrix[32:])]
    method = linears.linear(parts)
    assert method is not None
    x, bias = torch.randn(3, 64), torch.randn(48)
    weight = torch.cat([dequantized(part) if isinstance(part, QuantizedRows) else as_tensor(part) for part in parts])
    torch.testing.assert_close(method(x, bias), x @ weight.t() + bias, rtol=1e-5, atol=1e-5)
    assert linears.linear([as_array(matrix)]) is None
    assert linears.experts(parts, 3) is None


@pytest.mark.parametrize("how", slow_but(["int4"], ["int8", "int4", "fp8"]))
def test_other_numbers_in_the_same_memory(device: str, how: str) -> None:
    def parts() -> list[Rows]:
        return [quantize_rows(torch.randn(count, 64), how) for count in (40, 24)]

    linears, x = QuantizedLinears(torch.float32, CPU, None), torch.randn(3, 64)
    method, other = linears.linear(parts()), linears.on_host().linear(parts())
    assert method is not None
    assert other is not None
    assert not torch.equal(method(x, None), other(x, None))
    assert same_form(method, other)
    for target, source in zip(tensors_of(method), tensors_of(other), strict=True):
        target.copy_(source)
    assert torch.equal(method(x, None), other(x, None))
    plain = linears.linear([quantize_rows(torch.randn(64, 64), "int8" if how == "int4" else "int4")])
    assert plain is not None
    assert not same_form(method, plain)
