"""The families of models that run natively: one entry each, by the `model_type` of their config.json."""

from __future__ import annotations

from collections.abc import Mapping

from aengine.models.families import deepseek, gpt, layer_norm, llama, mixtures
from aengine.models.families.base import Family

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (*llama.FAMILIES, *layer_norm.FAMILIES, *gpt.FAMILIES, *mixtures.FAMILIES, *deepseek.FAMILIES)
}
