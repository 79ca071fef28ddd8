"""Quantised checkpoints that are not what they say, and schemes that are not read: one sentence that names the tensor or the key."""

from __future__ import annotations

import copy
import json
import pathlib
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from quantized_layouts import FEW_BITS, LAYOUTS, Layout, Tensors, awq, compressed, gptq, mxfp4, quanto
from safetensors.torch import save_file
from test_weights import CONFIG, CPU

from aengine.api.errors import ModelLoadError
from aengine.models.config.model_config import load_spec, read_spec
from aengine.models.loading.weights import stored_weights
from aengine.models.named_weights import named_weights
from aengine.models.quantization.quantization_config import load_quantization, read_quantization
from aengine.runner.torch.loading import fused

QWEN = {**CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16, "attention_bias": False}
GPT_OSS = {**QWEN, "architectures": ["GptOssForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 16}
UP = "model.layers.0.mlp.up_proj"
NESTED = {name: layout for name, layout in FEW_BITS.items() if name.startswith(("hqq", "torchao"))} | {"quanto": quanto("qint4", UP)}


def written(folder: pathlib.Path, layout: Layout, change: Callable[[Tensors], object], config: dict) -> None:
    """A random checkpoint in a layout, after a change to its tensors."""
    tensors: Tensors = {}
    torch.manual_seed(0)
    for weight in named_weights(read_spec(config)).values():
        for part in weight.parts:
            if part.source.endswith("_proj" if layout.config["quant_method"] == "mxfp4" else "_proj.weight"):
                matrix = torch.randn(part.matrix_shape)
                stored = layout.write(matrix)[0]
                tensors |= {part.source.removesuffix(".weight") + ending: tensor.contiguous() for ending, tensor in stored.items()}
            else:
                tensors[part.source] = torch.randn(part.shape)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": layout.config}))


def load(folder: pathlib.Path) -> Tensors:
    spec = load_spec(folder)
    return fused(spec, stored_weights(spec, folder, "auto", load_quantization(folder)), torch.float32, CPU)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def fill(name: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].fill_(value)


def nf4_state(**changes) -> Callable[[Tensors], object]:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [96, 64], **changes}
    return put(f"{UP}.weight.quant_state.bitsandbytes__nf4", torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8))


PACKED, GPTQ, ACT_ORDER = "pack-quantized 4 bits, groups of 32", "gptq 4 bits", "gptq 4 bits, act-order"
MODULE = r"model\.layers\.0\.mlp\.up_proj"
FALSE = "the quantized weight of model.layers.0.mlp.up_proj is not what it should be: "
LIES: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "no scales": (PACKED, drop(f"{UP}.weight_scale"), rf"it lacks {UP}.weight_scale$"),
    "no codes": (GPTQ, drop(f"{UP}.qweight"), rf"it lacks {UP}.qweight$"),
    "no block scales": ("fp8, blocks", drop(f"{UP}.weight_scale_inv"), rf"it lacks {UP}.weight_scale_inv$"),
    "no order": (ACT_ORDER, drop(f"{UP}.g_idx"), rf"it lacks {UP}.g_idx$"),
    "codes of another width": (
        PACKED,
        put(f"{UP}.weight_packed", torch.zeros(96, 9).int()),
        r"up_proj.weight_packed \[96, 9\] instead of \[96, 8\]",
    ),
    "scales of other groups": (GPTQ, put(f"{UP}.scales", torch.zeros(4, 96)), r"up_proj.scales \[4, 96\] instead of \[2, 96\]"),
    "scales of other blocks": (
        "fp8, blocks",
        put(f"{UP}.weight_scale_inv", torch.ones(4, 3)),
        r"weight_scale_inv \[4, 3\] instead of \[4, 2\]",
    ),
    "zeros of symmetric numbers": (
        "int-quantized, channels",
        put(f"{UP}.weight_zero_point", torch.zeros(96, 1, dtype=torch.int8)),
        "zero_point",
    ),
    "other words": ("awq", put(f"{UP}.qzeros", torch.zeros(2, 12)), "up_proj.qzeros float32 instead of int32"),
    "scales of codes": (
        PACKED,
        put(f"{UP}.weight_scale", torch.ones(96, 2).int()),
        "weight_scale int32 instead of float32 or float16 or bfloat16",
    ),
    "codes of another dtype": (
        "fp8, blocks",
        put(f"{UP}.weight", torch.ones(96, 64).char()),
        "up_proj.weight int8 instead of float8_e4m3fn",
    ),
    "a weight beside the codes": (
        GPTQ,
        put(f"{UP}.weight", torch.ones(96, 64)),
        rf"it has unexpected {UP}.g_idx, {UP}.qweight, {UP}.qzeros, ",
    ),
    "a head in codes": (GPTQ, put("lm_head.weight", torch.zeros(11, 64).char()), r"dtypes other than float32, .*: lm_head.weight int8$"),
    "an order of other groups": (
        ACT_ORDER,
        put(f"{UP}.g_idx", torch.zeros(64).int()),
        rf"{FALSE}.g_idx does not have 32 columns in each of 2",
    ),
    "groups below 0": (ACT_ORDER, put(f"{UP}.g_idx", torch.arange(64).int() // 32 - 1), r"g_idx does not have 32 columns"),
    "a bias": (GPTQ, put(f"{UP}.bias", torch.ones(96)), rf"{FALSE}.bias is not zero, but the model has no bias there"),
    "another shape": (
        PACKED,
        put(f"{UP}.weight_shape", torch.tensor([64, 96])),
        rf"{FALSE}.weight_shape is \[64, 96\] instead of \[96, 64\]",
    ),
    "no state": (
        "nf4",
        put(f"{UP}.weight.quant_state.bitsandbytes__nf4", torch.ones(3).byte()),
        f"{FALSE}.*nf4 is not a JSON object with shape",
    ),
    "a state of another shape": ("nf4", nf4_state(shape=[64, 96]), rf"{FALSE}.*of nf4 and shape \[64, 96\] instead of \[96, 64\]"),
    "a state of other blocks": ("nf4", nf4_state(blocksize=32), f"{FALSE}.weight.absmax has 96 numbers for 192 blocks of 32"),
    "a state of no blocks": ("nf4", nf4_state(blocksize=0), f"{FALSE}.*has blocksize 0"),
    "a state with an offset that is no number": (
        "nf4, double",
        nf4_state(nested_blocksize=256, nested_offset=float("nan")),
        f"{FALSE}.*has nested_offset nan",
    ),
    "scales that are no numbers": (
        PACKED,
        fill(f"{UP}.weight_scale", float("nan")),
        rf"^{MODULE}.weight_scale in .*model\.safetensors has numbers that are not finite$",
    ),
    "infinite scales": (
        GPTQ,
        fill(f"{UP}.scales", float("inf")),
        rf"^{MODULE}.scales in .*model\.safetensors has numbers that are not finite$",
    ),
    "infinite block scales": (
        "fp8, blocks",
        fill(f"{UP}.weight_scale_inv", -float("inf")),
        rf"^{MODULE}.weight_scale_inv in .*model\.safetensors has numbers that are not finite$",
    ),
    "block scales of 8 bits that are no numbers": (
        "fp8, blocks",
        put(f"{UP}.weight_scale_inv", torch.full((4, 2), 255).byte().view(torch.float8_e8m0fnu)),
        rf"^{MODULE}.weight_scale_inv in .*model\.safetensors has numbers that are not finite$",
    ),
    "blocks without a largest number": (
        "nf4",
        fill(f"{UP}.weight.absmax", float("nan")),
        rf"^{MODULE}.weight.absmax in .*model\.safetensors has numbers that are not finite$",
    ),
    "a table of infinite numbers": (
        "nf4",
        fill(f"{UP}.weight.quant_map", float("inf")),
        rf"^{MODULE}.weight.quant_map in .*model\.safetensors has numbers that are not finite$",
    ),
    "4 bits that are 5": (
        "int-quantized 4 bits",
        fill(f"{UP}.weight", 8),
        f"{FALSE}.weight has numbers that are not from -8 to 7",
    ),
    "exponents that are no numbers": ("mxfp4-pack-quantized", fill(f"{UP}.weight_scale", 255), f"{FALSE}.weight_scale has 255"),
    "zero points of another width": (
        "pack-quantized 4 bits, asymmetric",
        put(f"{UP}.weight_zero_point", torch.zeros(96, 2).int()),
        r"weight_zero_point \[96, 2\] instead of \[12, 2\]",
    ),
    "no zero points": ("int-quantized 4 bits, asymmetric", drop(f"{UP}.weight_zero_point"), rf"it lacks {UP}.weight_zero_point$"),
    "no largest numbers": ("bitsandbytes int8", drop(f"{UP}.SCB"), rf"it lacks {UP}.SCB$"),
    "a state of blocks without end": ("nf4", nf4_state(blocksize=1 << 70), f"{FALSE}.*has blocksize 1180591620717411303424"),
    "scales that overflow": (
        "auto-round",
        put(f"{UP}.scales", torch.full((2, 96), 3e38)),
        f"{FALSE}a product of its scales has numbers that are not finite",
    ),
    "half of a state": ("nf4, double", nf4_state(), f"{FALSE}.*with shape, blocksize, nested_blocksize, nested_offset"),
}


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("case", LIES)
def test_files_that_lie(tmp_path: pathlib.Path, case: str) -> None:
    layout, change, message = LIES[case]
    written(tmp_path, LAYOUTS[layout], lambda tensors: None, QWEN)
    load(tmp_path)
    written(tmp_path, LAYOUTS[layout], change, QWEN)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_scales_of_mxfp4_that_are_no_numbers(tmp_path: pathlib.Path) -> None:
    experts = "model.layers.0.mlp.experts.down_proj"
    written(tmp_path, mxfp4(), lambda tensors: None, GPT_OSS)
    load(tmp_path)
    written(tmp_path, mxfp4(), lambda tensors: tensors[f"{experts}_scales"].fill_(255), GPT_OSS)
    with pytest.raises(ModelLoadError, match=f"the quantized weight of {experts} is not what it should be: _scales has 255"):
        load(tmp_path)
    written(tmp_path, mxfp4(), drop(f"{experts}_scales"), GPT_OSS)
    with pytest.raises(ModelLoadError, match=f"it lacks {experts}_scales$"):
        load(tmp_path)


def test_blocks_that_are_larger_than_the_matrix(tmp_path: pathlib.Path) -> None:
    layout = LAYOUTS["fp8, tensor"]

    def as_block(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, matrix = layout.write(weight)
        return {".weight": tensors[".weight"], ".weight_scale_inv": tensors[".weight_scale_inv"].view(1, 1)}, matrix

    written(tmp_path, layout, lambda tensors: None, QWEN)
    expected = load(tmp_path)
    written(tmp_path, Layout({**layout.config, "weight_block_size": [10**30, 10**30]}, as_block), lambda tensors: None, QWEN)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(tmp_path).items())


def spoil(tensors: Tensors, rng: random.Random) -> None:
    """One tensor of a module is missing, of another dtype or shape, or of random bytes."""
    name = rng.choice([name for name in tensors if "_proj" in name])
    tensor = tensors.pop(name)
    shape = [max(0, size + rng.choice([-1, 0, 1, 7])) for size in tensor.shape]
    dtype = rng.choice([torch.float32, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn])
    random_bytes = torch.frombuffer(bytearray(rng.randbytes(max(tensor.nbytes, 1))), dtype=torch.uint8)[: tensor.nbytes]
    others = [torch.ones(tensor.shape).to(dtype), torch.ones(shape).to(tensor.dtype), tensor.flatten(), random_bytes]
    kind = rng.randrange(5)
    if kind < 4:
        tensors[name] = others[kind] if kind < 3 else random_bytes.view(tensor.dtype).view(tensor.shape)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_random_lies(tmp_path: pathlib.Path, seed: int) -> None:
    """A spoiled checkpoint is read, or refused in one line that names the tensor or its module."""
    rng, messages = random.Random(seed), []
    for name in rng.sample(list(LAYOUTS), 12):
        written(tmp_path, LAYOUTS[name], lambda tensors: spoil(tensors, rng), QWEN)
        try:
            load(tmp_path)
        except ModelLoadError as error:
            messages.append(str(error))
    assert len(messages) > 4
    assert all("_proj" in message and "\n" not in message for message in messages)


def test_zero_biases_that_the_model_does_not_have(tmp_path: pathlib.Path) -> None:
    written(tmp_path, LAYOUTS[GPTQ], put(f"{UP}.bias", torch.zeros(96)), QWEN)
    load(tmp_path)


def test_modules_that_are_left_alone_without_being_listed(tmp_path: pathlib.Path) -> None:
    def plain(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.startswith(UP):
                del tensors[name]
        tensors[f"{UP}.weight"] = torch.full((96, 64), 0.5)

    written(tmp_path, LAYOUTS["awq"], plain, QWEN)
    assert load(tmp_path)["layers.0.gate_up.weight"][96:].eq(0.5).all()


def test_a_listed_module_is_plain(tmp_path: pathlib.Path) -> None:
    for layout, key, listed in [("awq", "modules_to_not_convert", "mlp"), (PACKED, "ignore", UP), (PACKED, "ignore", "re:.*mlp.up")]:
        described = LAYOUTS[layout]
        written(tmp_path, Layout({**described.config, key: [listed]}, described.write), lambda tensors: None, QWEN)
        with pytest.raises(ModelLoadError, match=rf"it lacks .*{UP}.weight"):
            load(tmp_path)


def test_other_settings_for_some_modules(tmp_path: pathlib.Path) -> None:
    """`dynamic` of GPTQModel, and groups of compressed-tensors: names decide before expressions, and those before kinds."""
    eight = gptq(8, 32)

    def change(tensors: Tensors) -> None:
        tensors.update({f"{UP}{ending}": tensor.contiguous() for ending, tensor in eight.write(torch.ones(96, 64))[0].items()})

    four = LAYOUTS[GPTQ]
    written(tmp_path, Layout({**four.config, "dynamic": {r"+:.*\.up_proj": {"bits": 8}}}, four.write), change, QWEN)
    torch.testing.assert_close(load(tmp_path)["layers.0.gate_up.weight"][96:], torch.ones(96, 64), rtol=0.01, atol=0)
    groups = {
        "kinds": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel"}},
        "expression": {"targets": [r"re:.*\.up_proj"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 48}},
        "name": {"targets": [UP], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
    }
    quantization = read_quantization({"quantization_config": {**compressed("pack-quantized"), "config_groups": groups}})
    assert quantization is not None
    sizes = [quantization.scheme(name).group_size for name in (UP, UP.replace("0", "1"), UP.replace("up", "down"))]
    assert sizes == [32, 48, None]
    assert quantization.scheme("lm_head") is None
    assert quantization.scheme("model.embed_tokens", "Embedding") is None


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def hqq(*, scale: object = None, **params: object) -> dict[str, object]:
    weights = {"nbits": 4, "group_size": 64, "axis": 1, **params}
    settings = {"weight_quant_params": weights, "scale_quant_params": scale, "zero_quant_params": None}
    return {"quant_method": "hqq", "quant_config": settings}


def torchao(kind: str, **data: object) -> dict[str, object]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": data}}}


CONFIGS = [
    (
        {"quant_method": "quip"},
        "quantization_config is not supported .quant_method 'quip'.; supported are compressed-tensors, gptq, awq, auto-round, fp8, ",
    ),
    ("gptq", "quantization_config 'gptq' in config.json is not an object"),
    ({"quant_method": "gptq", "bits": 5, "group_size": 32}, "bits 5 in quantization_config is not supported; supported are 2, 3, 4, 8"),
    ({"quant_method": "gptq", "bits": 4}, "lacks group_size"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0 in config.json is not a positive integer"),
    ({**gptq(4, 32).config, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' .* supported are gptq, gptq_v2"),
    ({**gptq(4, 32).config, "dynamic": {"+:(": {}}}, r"'\(\?:\(\)\.\*', which is not a regular expression"),
    ({**LAYOUTS["awq"].config, "version": "gemv_fast"}, "version 'gemv_fast' .* supported are gemm"),
    ({**LAYOUTS["awq"].config, "bits": 8}, "bits 8 .* supported are 4"),
    (hqq(axis=0), "axis 0 .* supported are 1"),
    (hqq(nbits=5), "nbits 5 .* supported are 2, 3, 4, 8"),
    (hqq(scale={"nbits": 8}), "scale_quant_params {'nbits': 8} .* supported are None"),
    ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type 'int4_weight_only' .* of a version of torchao that is not"),
    (torchao("Int4WeightOnlyConfig"), "_type 'Int4WeightOnlyConfig' .* supported are Int8WeightOnlyConfig"),
    (torchao("IntxWeightOnlyConfig", intx_packing_format={"_data": "OPAQUE_ATEN_AUTO"}), "_data 'OPAQUE_ATEN_AUTO' .* UNPACKED_TO_INT8"),
    (
        {"quant_method": "quanto", "modules": {"a": {"weights": "qfloat8_e5m2"}}},
        "weights 'qfloat8_e5m2' .* supported are qint4, qint2, qint8",
    ),
    ({**LAYOUTS["awq"].config, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert 'lm_head' .* not a list of names"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\] .* not a list of two positive integers"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' .* supported are e4m3"),
    ({"quant_method": "bitsandbytes"}, "none or both of load_in_4bit and load_in_8bit"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type 'nf3'"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16'"),
    (compressed("nvfp4-pack-quantized", **INT4), "group_0 of quantization_config is not supported: format 'nvfp4-pack-quantized' with"),
    (
        compressed("pack-quantized", **{**INT4, "num_bits": 3}),
        "group_0 .* type 'int', num_bits 3, strategy 'group', group_size 32 and symmetric True; supported formats are",
    ),
    (compressed("pack-quantized", **{**INT4, "strategy": "tensor_group"}), "strategy 'tensor_group'"),
    (compressed("pack-quantized", **{**INT4, "group_size": None}), "lacks group_size"),
    ({**compressed("pack-quantized", **INT4), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config is not supported"),
    ({**compressed("pack-quantized", **INT4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config or"),
]


@pytest.mark.parametrize(("described", "message"), CONFIGS)
def test_configs_that_are_not_read(described: object, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_spec({**QWEN, "quantization_config": described})


def objects(config: dict) -> Iterator[dict]:
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from objects(value)


def refusal(config: dict) -> str | None:
    try:
        read_quantization({"quantization_config": config})
    except ModelLoadError as error:
        return str(error)
    return None


WRONG = ("x", 5, 1.5, ["x"], [[]], {"other": 1}, True, [True, 2], -3, 0, float("nan"), 10**30, [0, 32], None)


@pytest.mark.parametrize("name", NESTED)
def test_objects_within_objects(name: str) -> None:
    """What is wrong anywhere in them is refused in one line, or not looked at; what lacks a key is refused by that."""
    config = copy.deepcopy(NESTED[name].config)
    for part in objects(config):
        for key, value in list(part.items()):
            for wrong in WRONG:
                part[key] = wrong
                assert "\n" not in (refusal(config) or "")
            part[key] = value


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_key_that_is_read(name: str) -> None:
    """A value of another type, or out of range, is refused by its key, or not looked at."""
    config = {**copy.deepcopy(LAYOUTS[name].config), "dynamic": {"+:a": {"bits": 4}}, "kv_cache_scheme": {"type": "float", "num_bits": 8}}
    for part in objects(config):
        for key, value in list(part.items()):
            for wrong in WRONG:
                part[key] = wrong
                message = refusal(config)
                named = message is None or key.strip("+:") in message or (isinstance(wrong, dict) and "other" in message)
                assert named, (key, wrong, message)
                assert "\n" not in (message or "")
            part[key] = value


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (QWEN, gptq(4, 48), r"self_attn.q_proj cannot be stored as quantization_config says: groups of 48 do not divide its 64 columns$"),
        (QWEN, awq(128), "groups of 128 do not divide its 64 columns$"),
        ({**GPT_OSS, "intermediate_size": 48}, mxfp4(), "experts.down_proj cannot be stored .* blocks of 32 do not divide its 48 columns$"),
        ({**QWEN, "intermediate_size": 68}, gptq(4, 64), r"mlp.gate_proj .*: 68 rows of 4 bits do not fill words of 32 bits"),
    ],
)
def test_shapes_that_a_format_cannot_have(tmp_path: pathlib.Path, config: dict, layout: Layout, message: str) -> None:
    save_file({"any": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": layout.config}))
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)
