"""A model's own defaults for generation: end-of-sequence ids and sampling parameters, from generation_config.json."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from aengine.errors import InvalidRequestError, ModelLoadError
from aengine.models.spec import ModelSpec, read_json, read_token_ids
from aengine.params import SamplingParams

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def load_generation(model_dir: pathlib.Path, spec: ModelSpec) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    """The end-of-sequence ids, and those of temperature, top_p, top_k, min_p and repetition_penalty that the model sets, as keyword
    arguments of `SamplingParams`.

    Reads `model_dir`/generation_config.json if there is one. If it has no end-of-sequence ids, those of config.json are taken.
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
    return eos or spec.eos_token_ids, sampling
