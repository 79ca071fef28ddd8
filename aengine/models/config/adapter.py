"""`AdapterConfig`: the adapter_config.json of an adapter, as PEFT writes it. Knows neither tensors nor models."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aengine.api.errors import AdapterError, ModelLoadError
from aengine.models.model_files import read_json
from aengine.models.quantization.expressions import Expression, share_work

CONFIG = "adapter_config.json"
_LARGEST_FILE = 1 << 20
_LARGEST_ALPHA = 1e9
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"})
_IGNORED = frozenset(
    {
        # Which modules have an adapter follows from the tensors.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
        # Of training and merging alone.
        *("lora_dropout", "fan_in_fan_out", "inference_mode", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type", "megatron_core", "qalora_group_size"),
    }
)
_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Those that leave the weights of the model as they are."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    path: pathlib.Path
    _rank: Any
    _alpha: Any
    _rank_stabilized: bool
    _ranks: Mapping[Expression, Any]
    _alphas: Mapping[Expression, Any]

    def rank(self, module: str, max_rank: int) -> int:
        """Return the rank of a module, by its name in the model of transformers. Raises AdapterError if it is not in 1 .. max_rank."""
        rank = _of(module, self._ranks, self._rank)
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= max_rank:
            raise AdapterError(f"r {_shown(rank)} of {module} in {self.path} is not an integer in 1 .. {max_rank}")
        return rank

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's matrices is multiplied by: alpha / r, or alpha / sqrt(r) (Kalajdzievski, "A Rank Stabilization
        Scaling Factor for Fine-Tuning with LoRA", 2023). Raises AdapterError for an alpha that is no number."""
        alpha = _of(module, self._alphas, self._alpha)
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= _LARGEST_ALPHA:
            raise AdapterError(
                f"lora_alpha {_shown(alpha)} of {module} in {self.path} is not a number in -{_LARGEST_ALPHA:g} .. {_LARGEST_ALPHA:g}"
            )
        return alpha / (math.sqrt(rank) if self._rank_stabilized else rank)


def read_adapter_config(folder: pathlib.Path) -> AdapterConfig:
    """Read the adapter_config.json of a directory. Raises AdapterError for a file that cannot be read, and for fields that change what a
    model computes in another way than by a sum of low-rank products, or that are unknown."""
    path = folder / CONFIG
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise AdapterError(f"{path} has more than {_LARGEST_FILE} bytes")
        config = read_json(path)
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror or error}") from error
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type {_shown(config.get('peft_type'))} in {path} is not supported; supported is LORA")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias {_shown(config['bias'])} in {path} is not supported; supported is none")
    how = config.get("init_lora_weights")
    if not any(how is one or (isinstance(how, str) and how == one) for one in _INITIALIZATIONS):
        raise AdapterError(
            f"init_lora_weights {_shown(how)} in {path} is not supported, since it changes the weights of the model; PEFT converts such"
            " adapters (path_initial_model_for_weight_conversion of save_pretrained)"
        )
    for field, value in config.items():
        if field not in _READ and field not in _IGNORED and value:
            what = "DoRA is not supported" if field == "use_dora" else "not supported"
            raise AdapterError(f"{field} {_shown(value)} in {path}: {what}; it must be absent, null or empty")
    rank_stabilized = config.get("use_rslora") or False
    if not isinstance(rank_stabilized, bool):
        raise AdapterError(f"use_rslora {_shown(rank_stabilized)} in {path} is not true or false")
    ranks, alphas = (_patterns(config, field, path) for field in ("rank_pattern", "alpha_pattern"))
    share_work([*ranks, *alphas])
    return AdapterConfig(path, config.get("r", 8), config.get("lora_alpha", 8), rank_stabilized, ranks, alphas)


def _patterns(config: Mapping[str, Any], field: str, path: pathlib.Path) -> dict[Expression, Any]:
    """By what the end of a module's name must match, in their order."""
    given = config.get(field) or {}
    if not isinstance(given, dict):
        raise AdapterError(f"{field} {_shown(given)} in {path} is not an object")
    found = {}
    for pattern, value in given.items():
        try:
            found[Expression(rf"(?:.*\.)?(?:{pattern})", f"{field} in {path}")] = value
        except ModelLoadError as error:
            raise AdapterError(str(error)) from error
    return found


def _of(module: str, patterns: Mapping[Expression, Any], default: Any) -> Any:
    try:
        return next((value for pattern, value in patterns.items() if pattern.matches(module)), default)
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
