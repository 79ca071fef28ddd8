"""The quantization_config of compressed-tensors (llm-compressor): groups of modules, each with the format of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aengine.api.errors import ModelLoadError
from aengine.models.config.reader import ConfigReader
from aengine.models.quantization.expressions import Expression
from aengine.models.quantization.packed import PackQuantized
from aengine.models.quantization.plain_codes import PlainCodes
from aengine.models.quantization.rules import EMBEDDING, LINEAR, Rule, block_sizes, names_of, one_of
from aengine.models.quantization.scheme import Scheme
from aengine.models.quantization.tables import Mxfp4

_DEFAULTS = {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": False}
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_DTYPES = {("int", 4): "int8", ("int", 8): "int8", ("float", 8): "float8_e4m3fn"}


def read_rules(reader: ConfigReader) -> tuple[Rule, ...]:
    """None if the KV cache alone is quantised. Raises ModelLoadError."""
    _check_kv_cache(reader.part("kv_cache_scheme").config)
    if reader.part("sparsity_config").get("format", "dense") != "dense" or reader.part("transform_config").get("config_groups"):
        raise ModelLoadError("quantization_config with a sparsity_config or transform_config is not supported")
    rules: list[Rule] = []
    groups = reader.part("config_groups")
    for name in groups.config:
        group = groups.part(name)
        scheme = _scheme(name, group, group.get("format", reader.get("format")))
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


def _scheme(name: str, group: ConfigReader, stored: Any) -> Scheme | None:
    if group.get("weights") is None:
        return None
    weights = ConfigReader(group.part("weights").config, _DEFAULTS)
    kind, bits, symmetric = one_of(weights, "type", "int", "float"), weights.positive("num_bits"), weights.flag("symmetric")
    strategy = one_of(weights, "strategy", *_STRATEGIES, fallback="tensor" if weights.get("group_size") is None else "group")
    one_of(weights, "dynamic", False)
    rows, columns = None if strategy == "tensor" else 1, None
    if strategy == "group":
        columns = weights.positive("group_size")
    elif strategy == "block":
        rows, columns = block_sizes(weights, "block_structure")
    dtype = _DTYPES.get((kind, bits))
    if stored == "pack-quantized" and kind == "int" and bits in (4, 8) and rows == 1:
        return PackQuantized(bits, columns, symmetric, weights.get("actorder") in ("group", "dynamic", True))
    if stored in (f"{kind}-quantized", "naive-quantized") and dtype is not None and (symmetric or kind == "int"):
        return PlainCodes(dtype, rows, columns, bits=bits, symmetric=symmetric)
    if stored == "mxfp4-pack-quantized" and (kind, bits, rows, columns, symmetric) == ("float", 4, 1, 32, True):
        return Mxfp4(".weight_packed", ".weight_scale")
    raise ModelLoadError(
        f"{name} of quantization_config is not supported: format {stored!r} with weights of type {kind!r}, num_bits {bits}, strategy"
        f" {strategy!r}, group_size {weights.get('group_size')} and symmetric {symmetric}; supported formats are {', '.join(_FORMATS)}"
    )
