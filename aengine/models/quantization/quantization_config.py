"""`Quantization`: which modules of a checkpoint are quantised, and how, from the quantization_config of its config.json.

Owns the keys of that object. What transformers and vLLM read of them is followed; what concerns activations alone is not read.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.models.config.reader import ConfigReader
from aengine.models.quantization.packed import Awq, BitsAndBytes4, Gptq, Hqq, Mlx, Mxfp4, Nvfp4, PackQuantized, PlainCodes, Quanto
from aengine.models.quantization.scheme import EMBEDDING, LINEAR, Expression, Rule, Scheme, block_sizes, names_of, one_of, share_work
from aengine.models.text_part import read_text_config


@dataclass(frozen=True, slots=True)
class Quantization:
    method: str  # quant_method
    rules: tuple[Rule, ...]

    def scheme(self, module: str, kind: str = LINEAR) -> Scheme | None:
        """That of a module, by its name in the checkpoint and its kind, `LINEAR` or `EMBEDDING`; None: it is not quantised."""
        return next((rule.scheme for rule in self.rules if rule.applies(module, kind)), None)


def load_quantization(model_dir: pathlib.Path) -> Quantization | None:
    """Read the quantization of the model in `model_dir` from its config; None if no weights are quantised. Raises ModelLoadError."""
    return read_quantization(read_text_config(model_dir))


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Read the quantization of a config.json; None if no weights are quantised. Raises ModelLoadError naming the key whose value is not
    supported."""
    described = config.get("quantization_config")
    of_mlx = config.get("quantization") or described  # MLX writes the same under both names, without a method
    if isinstance(of_mlx, dict) and {"group_size", "bits"} <= of_mlx.keys() and "quant_method" not in of_mlx:
        described = {**of_mlx, "quant_method": "mlx"}
    if not described:
        return None
    if not isinstance(described, dict):
        raise ModelLoadError(f"quantization_config {described!r} in config.json is not an object")
    method = str(described.get("quant_method"))
    if method not in _METHODS:
        raise ModelLoadError(f"quantization_config is not supported (quant_method {method!r}); supported are {', '.join(_METHODS)}")
    defaults, read = _METHODS[method]
    rules = read(ConfigReader(described, defaults))
    share_work(rule.target for rule in rules if isinstance(rule.target, Expression))
    return Quantization(method, rules) if rules else None


def _mlx(reader: ConfigReader) -> tuple[Rule, ...]:
    """Read the rules of MLX: settings for all modules, and under the names of modules others, or false for none."""

    def scheme(part: ConfigReader) -> Mlx:
        one_of(part, "mode", "affine")
        return Mlx(one_of(part, "bits", 2, 3, 4, 5, 6, 8), part.positive("group_size"))

    of_modules = {key: value for key, value in reader.config.items() if isinstance(value, dict | bool)}
    rules = [
        Rule(key, scheme(_changed(reader, value)) if isinstance(value, dict) else scheme(reader) if value else None)
        for key, value in of_modules.items()
    ]
    return (*rules, Rule(LINEAR, scheme(reader)), Rule(EMBEDDING, scheme(reader)))


_WEIGHTS = {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": False}
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_DTYPES = {("int", 4): "int8", ("int", 8): "int8", ("float", 8): "float8_e4m3fn"}


def _compressed_tensors(reader: ConfigReader) -> tuple[Rule, ...]:
    """Read the rules of compressed-tensors (llm-compressor): groups of modules, each with the format of its weights; none if the KV cache
    alone is quantised."""
    _check_kv_cache(reader.part("kv_cache_scheme").config)
    if reader.part("sparsity_config").get("format", "dense") != "dense" or reader.part("transform_config").get("config_groups"):
        raise ModelLoadError("quantization_config with a sparsity_config or transform_config is not supported")
    rules: list[Rule] = []
    groups = reader.part("config_groups")
    for name in groups.config:
        group = groups.part(name)
        scheme = _compressed_scheme(name, group, group.get("format", reader.get("format")))
        rules += [Rule(target, scheme) for target in _targets(group, "targets")]
    # Names decide before regular expressions, and those before kinds of modules.
    rules.sort(key=lambda rule: 2 if rule.target in (LINEAR, EMBEDDING) else not isinstance(rule.target, str))
    return (*(Rule(target, None) for target in _targets(reader, "ignore")), *rules) if rules else ()


def _check_kv_cache(scheme: Mapping[str, Any]) -> None:
    described = (scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy", "tensor"), bool(scheme.get("dynamic")))
    if scheme and described != ("float", 8, "tensor", False):
        raise ModelLoadError(f"kv_cache_scheme {scheme} is not supported; supported are 8-bit floats with one stored scale per layer")


def _targets(reader: ConfigReader, key: str) -> list[str | Expression]:
    return [Expression(f"(?:{name[3:]}).*") if name.startswith("re:") else name for name in names_of(reader, key)]


def _compressed_scheme(name: str, group: ConfigReader, stored: Any) -> Scheme | None:
    if group.get("weights") is None:
        return None
    weights = ConfigReader(group.part("weights").config, _WEIGHTS)
    kind, bits, symmetric = one_of(weights, "type", "int", "float"), weights.positive("num_bits"), weights.flag("symmetric")
    strategy = one_of(weights, "strategy", *_STRATEGIES, fallback="tensor" if weights.get("group_size") is None else "group")
    one_of(weights, "dynamic", False)
    rows, columns = None if strategy == "tensor" else 1, None
    if strategy in ("group", "tensor_group"):
        columns = weights.positive("group_size")
    elif strategy == "block":
        rows, columns = block_sizes(weights, "block_structure")
    dtype, four = _DTYPES.get((kind, bits)), (kind, bits, rows, columns, symmetric)
    if strategy == "tensor_group":
        if stored == "nvfp4-pack-quantized" and four == ("float", 4, 1, 16, True):
            return Nvfp4(".weight_packed", ".weight_global_scale", divides=True)
    elif stored == "pack-quantized" and kind == "int" and bits in (4, 8) and rows == 1:
        return PackQuantized(bits, columns, symmetric, weights.get("actorder") in ("group", "dynamic", True))
    elif stored in (f"{kind}-quantized", "naive-quantized") and dtype is not None and (symmetric or kind == "int"):
        return PlainCodes(dtype, rows, columns, bits=bits, symmetric=symmetric)
    elif stored == "mxfp4-pack-quantized" and four == ("float", 4, 1, 32, True):
        return Mxfp4(".weight_packed", ".weight_scale")
    raise ModelLoadError(
        f"{name} of quantization_config is not supported: format {stored!r} with weights of type {kind!r}, num_bits {bits}, strategy"
        f" {strategy!r}, group_size {weights.get('group_size')} and symmetric {symmetric}; supported formats are {', '.join(_COMPRESSED)}"
    )


def _gptq(reader: ConfigReader) -> tuple[Rule, ...]:
    def scheme(**changes: Any) -> Gptq:
        part = _changed(reader, changes)
        return Gptq(one_of(part, "bits", 2, 3, 4, 8), _group_size(part), part.flag("desc_act"), 2 if version == "gptq_v2" else 1)

    version = one_of(reader, "checkpoint_format", "gptq", "gptq_v2")
    rules = [Rule("lm_head", None)] if not reader.flag("lm_head") else []
    dynamic = reader.part("dynamic")  # of GPTQModel: other settings for what matches, none for "-:"
    for key in dynamic.config:
        pattern = Expression(f"(?:{key[2:] if key[:2] in ('-:', '+:') else key}).*")
        rules.append(Rule(pattern, None if key[:2] == "-:" else scheme(**dynamic.part(key).config)))
    return (*rules, *_not_converted(reader), Rule(LINEAR, scheme()))


def _awq(reader: ConfigReader) -> tuple[Rule, ...]:
    one_of(reader, "bits", 4)
    version = one_of(reader, "version", "gemm", "GEMM", "gemv", "GEMV").lower()
    return (*_not_converted(reader), Rule(LINEAR, Awq(_group_size(reader), version)))


def _auto_round(reader: ConfigReader) -> tuple[Rule, ...]:
    """Read the rules of AutoRound: modules in the layouts of GPTQ or AWQ, in `extra_config` some with other settings; those of 16 bits
    are as they are."""
    packing = one_of(reader, "packing_format", *_PACKINGS)

    def scheme(part: ConfigReader) -> Scheme | None:
        if part.positive("bits") >= 16:
            return None
        version = _PACKINGS[packing]
        bits = one_of(part, "bits", *((4,) if version is None else (2, 3, 4, 8)))
        one_of(part, "data_type", "int")
        return Awq(_group_size(part)) if version is None else Gptq(bits, _group_size(part), False, version)

    changed = reader.part("extra_config")
    rules = []
    for key in changed.config:
        is_name = re.fullmatch(r"[\w.]+", key) is not None
        changes = changed.part(key).config
        rules.append(Rule(key if is_name else Expression(f".*(?:{key}).*"), scheme(_changed(reader, changes))))
    rules.sort(key=lambda rule: not isinstance(rule.target, str))  # names decide before expressions
    return (*rules, *_not_converted(reader), Rule(LINEAR, scheme(reader)))


_PACKINGS = {"auto_round:auto_gptq": 1, "auto_round": 2, "auto_round:gptqmodel": 2, "auto_round:auto_awq": None}
"""The version of GPTQ's layout; None: AWQ's."""


def _fp8(reader: ConfigReader) -> tuple[Rule, ...]:
    """Read the rules for float8 of DeepSeek, Qwen and transformers. One scale per tensor is called weight_scale, or weight_scale_inv as
    those of blocks are."""
    one_of(reader, "fmt", "e4m3")
    block = block_sizes(reader, "weight_block_size")
    return (*_not_converted(reader), Rule(LINEAR, PlainCodes("float8_e4m3fn", *block, ".weight_scale_inv", ".weight_scale")))


def _mxfp4(reader: ConfigReader) -> tuple[Rule, ...]:
    return (*_not_converted(reader), Rule(Expression(r".*\.mlp\.experts\..*"), Mxfp4()))


def _modelopt(reader: ConfigReader) -> tuple[Rule, ...]:
    """Read the rules of NVIDIA's ModelOpt: names of modules, with stars, that are left as they are."""
    algorithm = one_of(reader, "quant_algo", "FP8", "NVFP4")
    scheme = PlainCodes("float8_e4m3fn", None, None) if algorithm == "FP8" else Nvfp4(".weight", ".weight_scale_2", divides=False)
    names = [*names_of(reader, "ignore"), *names_of(reader, "exclude_modules")]
    patterns = [".*".join(map(re.escape, name.split("*"))) for name in names]
    return (*(Rule(Expression(rf"{pattern}(?:\..*)?"), None) for pattern in patterns), Rule(LINEAR, scheme))


def _bitsandbytes(reader: ConfigReader) -> tuple[Rule, ...]:
    four, eight = reader.flag("load_in_4bit"), reader.flag("load_in_8bit")
    if four == eight:
        raise ModelLoadError("quantization_config of bitsandbytes has none or both of load_in_4bit and load_in_8bit")
    if eight:  # LLM.int8() (Dettmers et al. 2022): SCB is the largest absolute value of a row
        not_read = (".weight_format",)
        return (*_not_converted(reader), Rule(LINEAR, PlainCodes("int8", 1, None, ".SCB", unit=1 / 127, not_read=not_read)))
    one_of(reader, "bnb_4bit_quant_storage", "uint8")
    kind = one_of(reader, "bnb_4bit_quant_type", "nf4", "fp4")
    return (*_not_converted(reader), Rule(LINEAR, BitsAndBytes4(kind, reader.flag("bnb_4bit_use_double_quant"))))


def _hqq(reader: ConfigReader) -> tuple[Rule, ...]:
    """Read the rules of HQQ: settings for all modules, or by the ends of their names."""

    def scheme(part: ConfigReader) -> Hqq:
        for name in ("scale_quant_params", "zero_quant_params"):
            one_of(part, name, None)
        weights = ConfigReader(part.part("weight_quant_params").config, {"axis": 1})
        one_of(weights, "axis", 1)
        return Hqq(one_of(weights, "nbits", 2, 3, 4, 8), None if weights.get("group_size") is None else weights.positive("group_size"))

    settings = reader.part("quant_config")
    left = _not_converted(reader)
    if "weight_quant_params" in settings.config:
        return (*left, Rule(LINEAR, scheme(settings)))
    return (*left, *(Rule(Expression(rf"(?:.*\.)?{re.escape(name)}"), scheme(settings.part(name))) for name in settings.config))


def _torchao(reader: ConfigReader) -> tuple[Rule, ...]:
    """Read the rules of torchao, whose configs are objects of a type and its data; one of them has others by names of modules."""
    if not isinstance(reader.get("quant_type"), dict):
        raise ModelLoadError(f"quant_type {reader.get('quant_type')!r} in quantization_config is of a version of torchao that is not read")
    default = reader.part("quant_type").part("default")
    rules = _not_converted(reader)
    if default.get("_type") in ("FqnToConfig", "ModuleFqnToConfig"):
        data = default.part("_data")
        by_name = data.part("fqn_to_config" if data.get("fqn_to_config") else "module_fqn_to_config")
        for name in sorted(by_name.config, key=lambda name: (name == "_default", name.startswith("re:"))):  # names decide first
            found = None if by_name.get(name) is None else _torchao_scheme(by_name.part(name))
            of_module = name.removesuffix(".weight")
            rules.append(Rule(Expression(name[3:]) if name.startswith("re:") else LINEAR if name == "_default" else of_module, found))
        return tuple(rules)
    scheme = _torchao_scheme(default)
    return (*rules, Rule(LINEAR, scheme), *([Rule(EMBEDDING, scheme)] if reader.flag("include_input_output_embeddings") else []))


def _torchao_scheme(config: ConfigReader) -> PlainCodes:
    """One of numbers of int8 or float8; others pack theirs for the kernels of one device."""
    kind, data = one_of(config, "_type", *_TORCHAO), config.part("_data")
    bits = 8
    if "Intx" in kind:
        one_of(data.part("intx_packing_format"), "_data", "UNPACKED_TO_INT8", fallback="UNPACKED_TO_INT8")
        bits = int(one_of(data.part("weight_dtype"), "_data", *(f"int{each}" for each in (2, 3, 4, 5, 6, 8)))[3:])
    key = "weight_granularity" if data.get("weight_granularity") else "granularity"
    if isinstance(both := data.get(key), list) and both:  # that of activations, and that of weights
        data = _changed(data, {key: both[-1]})
    part = data.part(key)
    rows: int | None = 1
    columns: int | None = None
    match one_of(part, "_type", "PerRow", "PerAxis", "PerTensor", "PerGroup", "PerBlock", fallback="PerRow"):
        case "PerTensor":
            rows = None
        case "PerGroup":
            columns = part.part("_data").positive("group_size")
        case "PerBlock":
            rows, columns = block_sizes(part.part("_data"), "block_size")
    dtype, symmetric = ("float8_e4m3fn", True) if "Float8" in kind else ("int8", None)
    names = "._weight_scale", "._weight_qdata", "._weight_zero_point"
    return PlainCodes(dtype, rows, columns, names[0], bits=bits, symmetric=symmetric, not_read=(), codes=names[1], zeros=names[2])


_TORCHAO = (
    *("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"),
    *("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"),
)


def _quanto(reader: ConfigReader) -> tuple[Rule, ...]:
    """Read the map of modules that Optimum Quanto writes."""
    integers = PlainCodes("int8", 1, None, ".weight._scale", codes=".weight._data")
    float8 = replace(integers, dtype="float8_e4m3fn")
    schemes = {"qint4": Quanto(4), "qint2": Quanto(2), "qint8": integers, "qfloat8": float8, "qfloat8_e4m3fn": float8}
    modules = reader.part("modules")
    return tuple(Rule(name, schemes[one_of(modules.part(name), "weights", *schemes)]) for name in modules.config)


_METHODS: Mapping[str, Any] = {
    "compressed-tensors": ({}, _compressed_tensors),
    "gptq": ({"checkpoint_format": "gptq"}, _gptq),
    "awq": ({"bits": 4, "version": "gemm"}, _awq),
    "auto-round": ({"packing_format": "auto_round", "data_type": "int"}, _auto_round),
    "fp8": ({"fmt": "e4m3"}, _fp8),
    "mxfp4": ({}, _mxfp4),
    "modelopt": ({}, _modelopt),
    "mlx": ({"mode": "affine"}, _mlx),
    "gguf": ({}, lambda reader: (Rule(LINEAR, None),)),  # each tensor of a GGUF file has its own type
    "hqq": ({}, _hqq),
    "torchao": ({}, _torchao),
    "quanto": ({}, _quanto),
    "bitsandbytes": ({"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "uint8"}, _bitsandbytes),
}
"""quant_method -> the values of absent keys, and the rules."""


def _changed(reader: ConfigReader, changes: Mapping[str, Any]) -> ConfigReader:
    return replace(reader, config={**reader.config, **changes})


def _not_converted(reader: ConfigReader) -> list[Rule]:
    """Rules for modules that are left as they are: names, or regular expressions, of one or several whole parts of a module's name."""
    names = [name for key in ("modules_to_not_convert", "llm_int8_skip_modules", "skip_modules") for name in names_of(reader, key)]
    return [Rule(Expression(rf"(?:.*\.)?(?:{name})(?:\..*)?"), None) for name in names]


def _group_size(reader: ConfigReader) -> int | None:
    """None: one group for the whole row, which is stored as -1."""
    return None if reader.get("group_size") == -1 else reader.positive("group_size")
