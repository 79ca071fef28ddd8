"""The families of models that run natively: one entry each, by the `model_type` of their config.json."""

from __future__ import annotations

from collections.abc import Mapping

from aengine.models.families import deepseek, gemma, gpt, hybrids, llama, mamba, mixtures, recurrent, variants
from aengine.models.families.family import Family

_MODULES = (llama, variants, gemma, gpt, mixtures, mamba, recurrent, hybrids, deepseek)
FAMILIES: Mapping[str, Family] = {family.model_type: family for module in _MODULES for family in module.FAMILIES}
