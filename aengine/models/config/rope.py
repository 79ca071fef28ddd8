"""Reads the rotary part of a config.json, in its present form (`rope_parameters`) and the older one (`rope_theta`, `rope_scaling`).

Owns which keys each rope type may have. Other keys are refused by name, because a model would give other output without its scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from aengine.api.errors import ModelLoadError
from aengine.layers.rotary import RopeSpec, dynamic, llama3, unscaled, yarn
from aengine.models.config.reader import CONFIG_JSON, MOST_POSITIONS, ConfigReader, ConfigSource, NotNativeError, is_number

_DEFAULT_THETA = 10000.0
_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_MROPE_KEYS = frozenset({"mrope_section", "mrope_interleaved", "interleaved"})
"""Beside an mrope_section: which of a token's three positions rotates which part of a head. For text the three are equal."""
_INTERLEAVED = {"qwen3_vl": (24, 20, 20), "qwen3_5": (11, 11, 10)}
"""How the model types begin whose mrope_section is interleaved, whatever their config.json says -> the one that they have by default."""
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}
"""The first name of longrope, and the default one of a model that also takes images."""
_KEYS = {  # by rope type, beside the common ones
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate",
    "dynamic": "factor",
    "longrope": "factor original_max_position_embeddings attention_factor short_factor long_factor",
    "proportional": "",
}


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    max_position_embeddings: int,
    max_model_len: int | None = None,
    source: ConfigSource = CONFIG_JSON,
) -> tuple[RopeSpec, int]:
    """The rope of a config.json, and the longest context in tokens. Raises ModelLoadError naming what is not supported.

    The context is `max_position_embeddings`, or the original context times YaRN's factor if that is more.

    Two types depend on the length of sequences, and in `transformers` on that of the present one, which leaves the keys of earlier tokens
    as they were. Here all sequences have the rope of the longest: "longrope" has its long factors if `max_model_len` (None: the context)
    is more than the original context; "dynamic" is scaled for a `max_model_len` beyond `max_position_embeddings`, then the context.
    """
    try:
        rope, context = _read_rope(config, head_dim, max_position_embeddings, max_model_len, source)
    except (ArithmeticError, ValueError) as error:
        raise ModelLoadError(f"the rope parameters in {source.file} are out of range: {error}") from error
    rope = replace(rope, axes=_axes(config, len(rope.frequencies)))
    if not all(map(math.isfinite, (*rope.frequencies, rope.attention_factor))):
        raise ModelLoadError(f"the rope parameters in {source.file} are out of range: they make frequencies that are no numbers")
    if context > MOST_POSITIONS:
        raise ModelLoadError(f"the rope parameters in {source.file} are for {context} positions; supported are {MOST_POSITIONS}")
    return rope, context


def _axes(config: Mapping[str, Any], num_frequencies: int) -> tuple[int, ...]:
    """`RopeSpec.axes`: an mrope_section says how many frequencies each of the three positions has, one behind the other; or interleaved, as
    in Qwen3-VL and Qwen3.5, every third one, where the first position also has those that are left."""
    parameters, model_type = config.get("rope_scaling") or config.get("rope_parameters") or {}, config.get("model_type")
    interleaved = next((sections for name, sections in _INTERLEAVED.items() if str(model_type).startswith(name)), None)
    sections = parameters.get("mrope_section", interleaved) if isinstance(parameters, Mapping) else None
    if not isinstance(sections, list | tuple) or len(sections) != 3 or not all(isinstance(size, int) and size >= 0 for size in sections):
        return ()
    if interleaved is None:
        axes = tuple(axis for axis, size in enumerate(sections) for _ in range(size))
        return axes if len(axes) == num_frequencies else ()
    return tuple(number % 3 if number < 3 * sections[number % 3] else 0 for number in range(num_frequencies))


def _read_rope(
    config: Mapping[str, Any], head_dim: int, max_position_embeddings: int, max_model_len: int | None, source: ConfigSource
) -> tuple[RopeSpec, int]:
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise ModelLoadError(f"{key} {given!r} in {source.file} is not an object")
    parameters = {key: value for key, value in given.items() if value is not None}
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    rope_type = _OTHER_NAMES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    if not isinstance(rope_type, str) or rope_type not in _KEYS:
        raise NotNativeError(f"rope type {rope_type!r} in {source.file} is not supported; supported are {', '.join(_KEYS)}")
    of_images = _MROPE_KEYS if "mrope_section" in parameters else frozenset()
    unknown = sorted(set(parameters) - _COMMON_KEYS - of_images - set(_KEYS[rope_type].split()))
    if unknown:
        raise NotNativeError(f"rope parameter {unknown[0]!r} is not supported for rope type {rope_type!r}")

    def number(key: str, fallback: float | None = None) -> float:
        value = parameters.get(key, fallback)
        if value is None:
            raise ModelLoadError(f"rope type {rope_type!r} needs {source.name(key)!r} in {source.file}")
        if not is_number(value) or value <= 0:
            raise ModelLoadError(f"rope parameter {source.name(key)} {value!r} is not a positive number")
        return float(value)

    parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * number("partial_rotary_factor"))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        name = source.name("partial_rotary_factor")
        raise ModelLoadError(
            f"{name} {parameters['partial_rotary_factor']!r} rotates {rotary_dim} of a head's {head_dim} dimensions; "
            f"supported is an even number in [2, {head_dim}]"
        )
    parameters.setdefault("rope_theta", config.get("rope_theta") or _DEFAULT_THETA)
    theta = number("rope_theta")
    # A top-level original_max_position_embeddings overrides the one in the rope dict.
    if config.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    original = int(number("original_max_position_embeddings", max_position_embeddings))
    if original < 2:
        raise ModelLoadError(f"{source.name('original_max_position_embeddings')} {original} in {source.file} is less than 2")
    frequencies = unscaled(rotary_dim, theta)
    context = max_position_embeddings
    match rope_type:
        case "dynamic":
            context = max(context, min(max_model_len or context, int(context * number("factor"))))
            frequencies = dynamic(rotary_dim, theta, number("factor"), context / max_position_embeddings)
        case "longrope":
            kind = "long_factor" if (max_model_len or context) > original else "short_factor"
            factors = parameters.get(kind)
            if not isinstance(factors, list) or len(factors) != len(frequencies) or not all(is_number(x) and x > 0 for x in factors):
                raise ModelLoadError(f"rope parameter {source.name(kind)} {factors!r} is not a list of {len(frequencies)} positive numbers")
            factor = number("factor", max_position_embeddings / original)
            wider = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
            return RopeSpec.of(np.divide(frequencies, np.array(factors, np.float32)), number("attention_factor", wider)), context
        case "linear":
            frequencies = frequencies / number("factor")
        case "proportional":  # the others of all dimensions, which stand behind those, are not rotated
            rotated = unscaled(head_dim, theta)[: rotary_dim // 2]
            frequencies = np.pad(rotated, (0, head_dim // 2 - len(rotated)))
        case "llama3":
            frequencies = llama3(frequencies, number("factor"), number("low_freq_factor"), number("high_freq_factor"), original)
        case "yarn":
            factor = number("factor", max_position_embeddings / original)
            truncate = parameters.get("truncate", True)
            if not isinstance(truncate, bool):
                raise ModelLoadError(f"rope parameter truncate {truncate!r} is not true or false")
            frequencies = yarn(frequencies, theta, factor, number("beta_fast", 32.0), number("beta_slow", 1.0), original, truncate=truncate)
            mscales = [number(name) if parameters.get(name) else 0.0 for name in ("mscale", "mscale_all_dim")]
            attention_factor = number("attention_factor", _yarn_attention_factor(factor, *mscales))
            return RopeSpec.of(frequencies, attention_factor), max(max_position_embeddings, int(original * factor))
    return RopeSpec.of(frequencies), context


def read_ropes(reader: ConfigReader, head_dim: int, older: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, RopeSpec], int]:
    """The rope of each kind of layers, from `rope_parameters` by kind, and the longest context in tokens.

    `older`: the kinds, and for each the keys of a config in the older form as `read_rope` knows them.
    """
    given = reader.get("rope_parameters")
    if given is not None and not (isinstance(given, dict) and all(isinstance(given.get(kind), dict) for kind in older)):
        raise ModelLoadError(f"rope_parameters {given!r} in {reader.source.file} is not an object with {' and '.join(older)}")
    maximum = reader.positive("max_position_embeddings")
    forms = older if given is None else {kind: {"rope_parameters": given[kind]} for kind in older}
    ropes = {kind: read_rope(form, head_dim, maximum, reader.max_model_len, reader.source) for kind, form in forms.items()}
    return {kind: rope for kind, (rope, _) in ropes.items()}, max(context for _, context in ropes.values())


def _yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """YaRN's factor for cos and sin: 0.1 ln(factor) + 1, or the ratio of two such terms if there are mscale and mscale_all_dim."""

    def term(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return term(mscale) / term(mscale_all_dim) if mscale and mscale_all_dim else term(1.0)
