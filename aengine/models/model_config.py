"""Reads config.json and generation_config.json of a model folder: which family it is, its `ModelSpec`, its end-of-sequence ids and its
sampling defaults. Follows the configuration classes of transformers, without importing transformers."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from aengine.errors import InvalidRequestError, ModelLoadError
from aengine.models.config_file import read_config
from aengine.models.config_reader import CONFIG_JSON, ConfigReader, NotNativeError, Source, read_token_ids
from aengine.models.families import FAMILIES
from aengine.models.families.base import Family
from aengine.models.json_file import read_json
from aengine.models.quantization.config import read_quantization
from aengine.models.spec import ModelSpec
from aengine.params import SamplingParams

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_spec(model_dir: pathlib.Path, max_model_len: int | None = None) -> ModelSpec:
    """The spec of the config.json in `model_dir`, or of that GGUF file. Raises ModelLoadError."""
    config, source = read_config(model_dir)
    return read_spec(config, max_model_len, source)


def read_spec(config: Mapping[str, Any], max_model_len: int | None = None, source: Source = CONFIG_JSON) -> ModelSpec:
    """The spec of a config.json, for sequences of up to `max_model_len` tokens, on which some ropes depend; None: of the model's context.

    `source`: what errors name. Raises ModelLoadError naming what is missing or not supported.
    """
    family = _family(config)
    read_quantization(config)  # so that one that is not supported is refused before any weight is looked for
    named = family.model_type, family.architecture
    return family.read(ConfigReader(config, family.defaults, family.keys, max_model_len, *named, source))


def _family(config: Mapping[str, Any]) -> Family:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelLoadError(f"architectures {architectures!r} in config.json is not a list of names")
    model_type = config.get("model_type")
    # A model without its head, as embeddings need none, is `Qwen3Model` for `Qwen3ForCausalLM`.
    names = {architectures[0], architectures[0].removesuffix("Model") + "ForCausalLM"} if architectures else set()
    for family in FAMILIES.values():
        if family.architecture in names if architectures else family.model_type == model_type:
            return family
    if architectures:
        raise NotNativeError(f"architecture {architectures[0]!r} has no native implementation")
    raise NotNativeError(f"config.json has no architectures, and its model_type {model_type!r} has no native implementation")


def load_generation(model_dir: pathlib.Path, eos_token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """The end-of-sequence ids, and those of temperature, top_p, top_k, min_p and repetition_penalty that the model sets, as keyword
    arguments of `SamplingParams`.

    Reads `model_dir`/generation_config.json if there is one. If it has no end-of-sequence ids, `eos_token_ids` are taken, those of
    config.json.
    Raises ModelLoadError for values out of range.
    """
    path = model_dir / "generation_config.json"
    config = read_json(path) if path.is_file() else {}
    sampling = {key: config[key] for key in _SAMPLING_KEYS if config.get(key) is not None}
    try:
        SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{path} has a value out of range: {error}") from error
    eos = read_token_ids(config.get("eos_token_id"), "eos_token_id")
    return eos or eos_token_ids, sampling
