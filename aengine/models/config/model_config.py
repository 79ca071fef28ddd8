"""Reads config.json and generation_config.json of a model folder: which family it is, its `ModelSpec`, its end-of-sequence ids and its
sampling defaults. Follows the configuration classes of transformers, without importing transformers."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aengine.api.errors import InvalidRequestError, ModelLoadError
from aengine.api.params import SamplingParams
from aengine.models.config.reader import CONFIG_JSON, ConfigReader, ConfigSource, NotNativeError, read_token_ids
from aengine.models.families import FAMILIES
from aengine.models.families.family import Family
from aengine.models.images import ImageInput, SeenWithin, read_image_input
from aengine.models.loading.hub import shortened
from aengine.models.loading.weights import has_own_head, open_weights, unlike_modules
from aengine.models.model_files import read_json
from aengine.models.quantization.quantization_config import read_quantization
from aengine.models.spec import Attention, ModelSpec
from aengine.models.text_part import read_config, text_config

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_spec(model_dir: pathlib.Path, max_model_len: int | None = None) -> ModelSpec:
    """The spec of the config.json in `model_dir`, or of that GGUF file. If it is that of a part, the weights there, if there are any, tell
    whether its head is tied, and whether it is stored as its family is. Raises ModelLoadError."""
    config, source = read_config(model_dir)
    spec = read_spec(config, max_model_len, source)
    if not spec.is_part:
        return spec
    try:
        checkpoint = open_weights(spec, model_dir)
    except ModelLoadError:  # it is raised where they are loaded
        return spec
    unlike = unlike_modules(spec, checkpoint)
    if unlike:
        raise NotNativeError(f"the text part of the checkpoint is not stored as a {spec.family}: it has no such {shortened(unlike)}")
    return replace(spec, tied_head=spec.tied_head and not has_own_head(spec, checkpoint))


def read_spec(config: Mapping[str, Any], max_model_len: int | None = None, source: ConfigSource = CONFIG_JSON) -> ModelSpec:
    """The spec of a config.json, for sequences of up to `max_model_len` tokens, on which some ropes depend; None: of the model's context.
    Of a model that takes images or audio as well it is that of the part for text alone.

    `source`: what errors name. Raises ModelLoadError naming what is missing or not supported.
    """
    names = _architectures(config)
    family, part = _family(names, config), None
    if family is None:
        part = text_config(config)
        family = _part_family(names, config, part)
    read_quantization(part or config)  # so that one that is not supported is refused before any weight is looked for
    named = family.model_type, family.architecture if part is None else (names or [family.architecture])[0]
    defaults = family.defaults if part is None else {**family.part_defaults, **family.defaults}
    try:
        spec = family.read(ConfigReader(part or config, defaults, family.keys, max_model_len, *named, source))
    except (OverflowError, RecursionError) as error:
        raise ModelLoadError(f"config.json has a number that is too large, or is nested too deeply: {error}") from error
    return spec if part is None else _with_images(_as_part(spec), read_image_input(config))


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"architectures {names!r} in config.json is not a list of names")
    return names


def _family(architectures: Sequence[str], config: Mapping[str, Any]) -> Family | None:
    """That of a model for text alone."""
    # A model without its head, as embeddings need none, is `Qwen3Model` for `Qwen3ForCausalLM`.
    names = {architectures[0], architectures[0].removesuffix("Model") + "ForCausalLM"} - {""} if architectures else set()
    folded = {name.casefold() for name in names}  # `MPTForCausalLM` in code of its own is `MptForCausalLM` in that of transformers
    model_type = config.get("model_type")
    for family in FAMILIES.values():
        if family.architecture.casefold() in folded if architectures else family.model_type == model_type:
            return family
    return None


def _part_family(architectures: Sequence[str], config: Mapping[str, Any], part: Mapping[str, Any] | None) -> Family:
    part_type = None if part is None else part.get("model_type")
    if isinstance(part_type, str) and part_type in FAMILIES:
        return FAMILIES[part_type]
    of_part = "" if part is None else f", nor has the model_type {part_type!r} of its text part"
    if architectures:
        raise NotNativeError(f"architecture {architectures[0]!r} has no native implementation{of_part}")
    model_type = config.get("model_type")
    raise NotNativeError(f"config.json has no architectures, and its model_type {model_type!r} has no native implementation{of_part}")


def _as_part(spec: ModelSpec) -> ModelSpec:
    """Whether a model around its text part scales and caps logits as that part does alone depends on its type."""
    capped = (spec.logit_scale != 1.0 or spec.logit_soft_cap) and not FAMILIES[spec.family].capped_as_part
    if spec.draft_head is not None or capped:
        raise NotNativeError(
            f"a text part of the model_type {spec.family!r} whose logits are scaled or capped has no native implementation"
        )
    return replace(spec, is_part=True)


def _with_images(spec: ModelSpec, images: ImageInput | None) -> ModelSpec:
    """The spec of a model that also takes images, as said."""
    if images is None or images.within is SeenWithin.NONE:
        return replace(spec, images=images)
    layers = list(spec.layers)
    for index, layer in enumerate(layers):
        if isinstance(layer.attention, Attention) and (images.within is SeenWithin.ALL or layer.attention.window is not None):
            layers[index] = replace(layer, attention=replace(layer.attention, within_images=True))
    return replace(spec, images=images, layers=tuple(layers))


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
