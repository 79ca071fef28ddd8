"""Quantised checkpoints in each public layout: what their numbers are, alone and as the weights of models."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re
from collections import defaultdict
from collections.abc import Callable
from operator import itemgetter

import numpy as np
import pytest
import torch
import transformers
from family_cases import TINY, randomize
from quantized_layouts import FEW_BITS, LAYOUTS, Layout, Tensors, gptq, mlx, mxfp4, pack_quantized, quanto
from quantized_models import LEFT_ALONE, MODELS, check_logits, plain, random_model, rewrite, rows_of
from row_tensors import dequantized
from safetensors.torch import load_file, save_file
from test_weights import CPU

from aengine.api.config import EngineConfig
from aengine.engine.loading import load_model
from aengine.kernels.arrays import BFLOAT16, as_tensor
from aengine.kernels.cpu.library import (
    BF16_PAIRS,
    FLOAT8_CODES,
    INT2_CODES,
    INT4_CODES,
    INT6_CODES,
    INT8_CODES,
    INT8_QUADS,
    Workspace,
    load_kernels,
)
from aengine.models.config.model_config import load_spec
from aengine.models.cpu.packed_weights import PackedWeights
from aengine.models.cpu.weight_packing import WeightPacking
from aengine.models.loading.hub import resolve_model
from aengine.models.loading.weights import stored_weights
from aengine.models.quantization.quantization_config import load_quantization
from aengine.runner.memory import quantized_bytes, weight_bytes
from aengine.runner.runner import ModelRunner
from aengine.runner.torch.loading import fused

ALL = {**LAYOUTS, **FEW_BITS}


def kept_bits(name: str, otherwise: int) -> int:
    return next((bits for bits in (2, 6) if f"{bits} bits" in name), otherwise)


@pytest.mark.parametrize(
    ("name", "shape"),
    [*itertools.product(LAYOUTS, [(40, 96), (8, 64), (72, 32)]), *itertools.product(FEW_BITS, [(32, 96), (64, 64), (96, 32)])],
)
def test_rows(name: str, shape: tuple[int, int]) -> None:
    layout = ALL[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[1].abs_()  # so that a zero point is 0
    tensors, expected = layout.write(weight)
    rows = rows_of(layout.config, tensors, shape)
    assert rows.shape == shape
    few = rows.codes.dtype == np.uint8 and rows.codes.max() < 16
    assert rows.bits == kept_bits(name, 4 if few else 8)
    torch.testing.assert_close(dequantized(rows), expected, rtol=1e-6, atol=2e-7)
    some = np.array([3, 0, 7])
    assert torch.equal(dequantized(rows[some]), dequantized(rows)[some])


@pytest.mark.parametrize("shape", [(32, 96), (16, 256), (12, 160), (8, 192)])
@pytest.mark.parametrize("kind", ["qint2", "qint4", "qint8", "qfloat8"])
def test_rows_of_quanto(kind: str, shape: tuple[int, int]) -> None:
    layout = quanto(kind, "model.layers.0.mlp.experts.0.up_proj")
    tensors, expected = layout.write(torch.randn(shape, generator=torch.Generator().manual_seed(2)))
    rows = rows_of(layout.config, tensors, shape)
    assert rows.bits == int(kind[-1])
    torch.testing.assert_close(dequantized(rows), expected, rtol=1e-6, atol=1e-7)


def test_a_model_of_quanto(tmp_path: pathlib.Path, models) -> None:
    """A file of its own says which modules are quantised."""
    source = models("qwen3_moe")
    names = [name.removesuffix(".weight") for name, tensor in load_file(source / "model.safetensors").items() if tensor.dim() == 2]
    layout = quanto("qint4", *(name for name in names if not any(word in f"{name}." for word in LEFT_ALONE)))
    meant = rewrite(source, tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    described = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quanto_qmap.json").write_text(json.dumps(described["modules"]))
    assert packed(tmp_path).linears["layers.0.qkv"].c.format == INT4_CODES
    check_logits(plain(source, tmp_path, meant), tmp_path, "auto")


def test_blocks_of_nf4_may_end_within_rows() -> None:
    layout = LAYOUTS["nf4"]
    tensors, expected = layout.write(torch.randn(6, 40))
    rows = rows_of(layout.config, tensors, (6, 40))
    assert rows.group_size == 8
    torch.testing.assert_close(dequantized(rows), expected)


def test_mxfp4_is_that_of_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    layout = mxfp4()
    tensors, expected = layout.write(torch.randn(3, 16, 64))
    rows = dequantized(rows_of(layout.config, tensors, (3, 16, 64)))
    assert torch.equal(rows, expected.reshape(48, 64))
    theirs = convert_moe_packed_tensors(tensors["_blocks"], tensors["_scales"], dtype=torch.float32)
    assert torch.equal(rows.view(3, 16, 64), theirs.transpose(1, 2))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """Folders of tiny random models, by a name in `MODELS`, made when they are asked for."""
    return functools.cache(lambda name: random_model(name, tmp_path_factory.mktemp(name)))


def load(folder: pathlib.Path) -> Tensors:
    return fused(load_spec(folder), stored_weights(load_spec(folder), folder, "auto", load_quantization(folder)), torch.float32, CPU)


EXPERTS = ("qwen3_moe", "deepseek_v3")
DENSE = tuple(MODELS.keys() - set(EXPERTS))


@pytest.mark.quick_cases(24)
@pytest.mark.parametrize(
    ("model", "name"), [(models[number % len(models)], name) for models in (EXPERTS, sorted(DENSE)) for number, name in enumerate(LAYOUTS)]
)
def test_checkpoints_have_the_weights_that_they_stand_for(tmp_path: pathlib.Path, models, model: str, name: str) -> None:
    meant = rewrite(models(model), tmp_path, LAYOUTS[name])
    found = load(tmp_path)
    (tmp_path / "config.json").write_text((models(model) / "config.json").read_text())
    save_file(meant, tmp_path / "model.safetensors")
    expected = load(tmp_path)
    assert found.keys() == expected.keys()
    for ours in found:
        torch.testing.assert_close(found[ours], expected[ours], rtol=1e-6, atol=1e-7)


def test_embedding_and_head(tmp_path: pathlib.Path, models) -> None:
    layout = pack_quantized(4, 32)
    group = {**layout.config["config_groups"]["group_0"], "targets": ["Linear", "Embedding"]}
    layout = Layout({**layout.config, "config_groups": {"all": group}, "ignore": []}, layout.write)
    meant = rewrite(models("qwen3_moe"), tmp_path, layout, ("norm",))
    found = load(tmp_path)
    torch.testing.assert_close(found["embedding.weight"], meant["model.embed_tokens.weight"])
    torch.testing.assert_close(found["head.weight"], meant["lm_head.weight"])
    torch.testing.assert_close(found["layers.0.router.weight"], meant["model.layers.0.mlp.gate.weight"])
    ModelRunner(EngineConfig(model=str(tmp_path), dtype="bfloat16", device="cpu", kv_cache_memory=1 << 20), tmp_path).close()


def test_experts_in_mxfp4(tmp_path: pathlib.Path) -> None:
    config = transformers.GptOssConfig(**{**TINY, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16, "num_hidden_layers": 2})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize(model, 1)
    layout, tensors = mxfp4(), {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")) and "experts" in name:
                stored, matrix = layout.write(parameter.transpose(1, 2))
                parameter.copy_(matrix.transpose(1, 2))
                tensors |= {name + ending: part for ending, part in stored.items()}
            else:
                tensors[name] = parameter.clone()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": ["GptOssForCausalLM"], "quantization_config": layout.config})
    )
    check_logits(model, tmp_path, "auto")


@pytest.fixture(scope="module")
def demo() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(resolve_model("demo"), dtype=torch.float32)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "backend"), [(name, ("auto", "torch_native")[number % 2]) for number, name in enumerate(LAYOUTS) if number % 3 == 0]
)
def test_logits_of_the_demo_model(tmp_path: pathlib.Path, demo, name: str, backend: str) -> None:
    meant = rewrite(resolve_model("demo"), tmp_path, LAYOUTS[name])
    demo.load_state_dict(meant | {"lm_head.weight": meant["model.embed_tokens.weight"]})
    check_logits(demo, tmp_path, backend)


OF_EXPERTS = (
    "int-quantized, channels",
    "pack-quantized 8 bits, asymmetric",
    "float-quantized, blocks",
    "mxfp4-pack-quantized",
    "awq",
    "nf4",
)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("model", "name"),
    [("gpt_neox", "gptq 4 bits, act-order"), ("deepseek_v3", "fp8, blocks"), *(("qwen3_moe", name) for name in OF_EXPERTS)],
)
def test_logits_of_families(tmp_path: pathlib.Path, models, model: str, name: str) -> None:
    check_logits(plain(models(model), tmp_path, rewrite(models(model), tmp_path, LAYOUTS[name])), tmp_path, "auto")


def packed(folder: pathlib.Path) -> PackedWeights:
    """The weights of a checkpoint as the CPU kernels have them in a bfloat16 model."""
    spec = load_spec(folder)
    weights = stored_weights(spec, folder, "auto", load_quantization(folder))
    return WeightPacking(Workspace(load_kernels(), 1), spec, BFLOAT16).pack(weights)


def named_as_dequantized(caplog) -> str:
    """The matrices that the log names as such."""
    found = [record.args[0] for record in caplog.records if "no kernel has a format" in record.msg]
    return found[0] if found else ""


CODES = (INT2_CODES, INT4_CODES, INT6_CODES, INT8_CODES, FLOAT8_CODES)


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("name", ALL)
def test_codes_stay_codes(tmp_path: pathlib.Path, models, caplog, name: str) -> None:
    """On the CPU a matrix, and all experts together, take the bytes of their codes, and of a scale and a zero point per group at most."""
    rewrite(models("qwen3_moe"), tmp_path, ALL[name])
    weights = packed(tmp_path)
    four = any(word in name for word in ("4 bits", "3 bits", "awq", "nf4", "mxfp4", "nvfp4", "version 2", "auto-round", "pack-quantized 4"))
    bits = kept_bits(name, 4 if four else 8)
    products = {stem: (weights.linears[f"layers.0.{stem}"], 1, 64) for stem in ("qkv", "output")}
    products |= {stem: (weights.grouped[f"layers.0.experts.{stem}"], 3, columns) for stem, columns in (("gate_up", 64), ("down", 32))}
    for stem, (product, count, columns) in products.items():
        first = product if count == 1 else product.linears[0]
        numbers = count * first.padded_features * columns
        assert first.c.format in CODES, stem
        assert 0 < product.nbytes - numbers * bits // 8 <= numbers // min(first.c.group_size, 32) * 8, stem
    assert not named_as_dequantized(caplog)


def test_experts_with_orders_of_their_own(tmp_path: pathlib.Path, models, caplog) -> None:
    """Act-order: the modules of an expert have an order, which experts need not share. Parts of one matrix with several are dequantised."""
    layout, calls = gptq(4, 16, symmetric=False, act_order=True), itertools.count()
    meant = rewrite(models("qwen3_moe"), tmp_path, Layout(layout.config, lambda weight: layout.write(weight, next(calls) // 3)))
    weights = packed(tmp_path)
    for stem in ("gate_up", "down"):
        experts = weights.grouped[f"layers.0.experts.{stem}"]
        assert experts.linears[0].c.format == INT4_CODES
        assert len({tuple(order) for order in experts.orders.tolist()}) == 3
    assert named_as_dequantized(caplog) == "layers.0.qkv"
    check_logits(plain(models("qwen3_moe"), tmp_path, meant), tmp_path, "auto")


def test_parts_of_several_settings(tmp_path: pathlib.Path, models, caplog) -> None:
    """A matrix is fused of modules; if those differ in bits or groups, it has the most bits and the smallest groups."""
    layout, eight = LAYOUTS["gptq 4 bits"], gptq(8, 16)
    config = {**layout.config, "dynamic": {r"+:.*\.[vo]_proj": {"bits": 8, "group_size": 16}}}
    calls = itertools.count()  # of the modules that are quantised v_proj is the last, o_proj the second of attention
    write = {10: eight.write, 12: eight.write}
    meant = rewrite(models("qwen3_moe"), tmp_path, Layout(config, lambda weight: write.get(next(calls), layout.write)(weight)))
    weights = packed(tmp_path)
    assert weights.linears["layers.0.output"].c.format == INT8_CODES
    qkv = weights.linears["layers.0.qkv"].c
    assert (qkv.format, qkv.group_size) == (INT8_CODES, 16)
    assert not named_as_dequantized(caplog)
    check_logits(plain(models("qwen3_moe"), tmp_path, meant), tmp_path, "auto")


@pytest.mark.parametrize("name", ["pack-quantized 4 bits, groups of 32", "gptq 4 bits, act-order", "fp8, blocks", "nf4"])
def test_heads_of_latent_attention_are_dequantised(tmp_path: pathlib.Path, models, caplog, name: str) -> None:
    """kv_b_proj is cut into key_up, which is transposed, and value_up."""
    meant = rewrite(models("deepseek_v3"), tmp_path, LAYOUTS[name])
    weights = packed(tmp_path)
    assert {weights.grouped[f"layers.0.{stem}"].linears[0].c.format for stem in ("key_up", "value_up")} == {BF16_PAIRS}
    assert {weights.linears[f"layers.0.{stem}"].c.format for stem in ("q_down", "q_up", "kv_down", "output")} <= set(CODES)
    assert not named_as_dequantized(caplog)
    check_logits(plain(models("deepseek_v3"), tmp_path, meant), tmp_path, "auto")


def test_a_tied_head_reads_the_codes_of_the_embedding(tmp_path: pathlib.Path, models) -> None:
    layout = pack_quantized(4, 32)
    group = {**layout.config["config_groups"]["group_0"], "targets": ["Linear", "Embedding"]}
    layout = Layout({**layout.config, "config_groups": {"all": group}, "ignore": []}, layout.write)
    meant = rewrite(models("cohere2"), tmp_path, layout, ("norm",))
    weights = packed(tmp_path)
    assert weights.linears["head"].c.format == INT4_CODES
    assert torch.equal(as_tensor(weights.tables["embedding"]), meant["model.embed_tokens.weight"].bfloat16())
    check_logits(plain(models("cohere2"), tmp_path, meant), tmp_path, "auto")


def test_a_model_of_mlx(tmp_path: pathlib.Path, models) -> None:
    """Its embedding is quantised too, one module has other bits, and its config stands under another name."""
    eight = mlx(8, 32)
    modules = {"model.layers.0.self_attn.q_proj": eight.config, "model.layers.0.mlp.down_proj": False}
    layout = mlx(4, 32, mode="affine", **modules)
    changed = ("layers.0.mlp.down", "norm")
    meant = rewrite(models("cohere2"), tmp_path, layout, changed)
    stored, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    module = "model.layers.0.self_attn.q_proj"
    parts, meant[f"{module}.weight"] = eight.write(load_file(models("cohere2") / "model.safetensors")[f"{module}.weight"].float())
    save_file(stored | {module + ending: part.contiguous() for ending, part in parts.items()}, tmp_path / "model.safetensors")
    config["quantization"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = packed(tmp_path)
    assert weights.linears["head"].c.format == INT4_CODES
    assert weights.linears["layers.0.qkv"].c.format == INT8_CODES
    assert weights.linears["layers.0.down"].c.format == BF16_PAIRS
    check_logits(plain(models("cohere2"), tmp_path, meant), tmp_path, "auto")


@pytest.mark.parametrize(
    ("options", "quantization"), [({}, "gptq"), ({"quantization": "int8"}, "gptq, int8"), ({"load_format": "dummy"}, "")]
)
def test_what_an_engine_says_of_it(tmp_path: pathlib.Path, models, options: dict, quantization: str) -> None:
    rewrite(models("gpt_neox"), tmp_path, LAYOUTS["gptq 4 bits"])
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", kv_cache_memory=1 << 20, **options)
    info = load_model(config, lambda: None).info
    assert info.quantization == quantization
    assert f" in float32 ({quantization}), " in info.describe() or not quantization


def test_what_a_checkpoint_leaves_alone_is_quantized_at_load(tmp_path: pathlib.Path) -> None:
    """And the memory of both is known before."""
    rewrite(resolve_model("demo"), tmp_path, LAYOUTS["gptq 4 bits"])
    config = EngineConfig(model=str(tmp_path), device="cpu", quantization="int8", kv_cache_memory=1 << 20)
    runner = ModelRunner(config, tmp_path)
    held = runner._executor._model._stack._weights.linears
    quantized = quantized_bytes(config, runner.spec, tmp_path)
    expected = weight_bytes(config, runner.spec, 2, quantized)
    runner.close()
    assert {held[name.removesuffix(".weight")].c.format for name in quantized} == {INT4_CODES}
    assert held["head"].c.format == INT8_QUADS
    for stem, linear in held.items():
        assert linear.nbytes == pytest.approx(expected["embedding.weight" if stem == "head" else f"{stem}.weight"], rel=0.1), (
            stem
        )  # zero points and g_idx of the file


def test_experts_of_mlx(tmp_path: pathlib.Path, models) -> None:
    """Those of a layer are one tensor."""
    layout = mlx(4, 32, **{"model.layers.0.mlp.gate": False})
    meant = rewrite(models("qwen3_moe"), tmp_path, layout)
    stored, stacked = {}, defaultdict(list)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if found := re.fullmatch(r"(.*)\.experts\.(\d+)(\..*)", name):
            stacked[f"{found[1]}.switch_mlp{found[3]}"].append((int(found[2]), tensor))
        else:
            stored[name] = tensor
    assert stacked
    stored |= {name: torch.stack([tensor for _, tensor in sorted(parts, key=itemgetter(0))]) for name, parts in stacked.items()}
    save_file(stored, tmp_path / "model.safetensors")
    assert packed(tmp_path).grouped["layers.0.experts.gate_up"].linears[0].c.format == INT4_CODES
    check_logits(plain(models("qwen3_moe"), tmp_path, meant), tmp_path, "auto")


def test_the_config_of_older_versions_of_modelopt(tmp_path: pathlib.Path, models) -> None:
    """It has a file of its own."""
    layout = FEW_BITS["modelopt nvfp4"]
    meant = rewrite(models("cohere2"), tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())
    described = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    described.pop("quant_method")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": described}))
    assert packed(tmp_path).linears["layers.0.down"].c.format == INT4_CODES
    check_logits(plain(models("cohere2"), tmp_path, meant), tmp_path, "auto")
