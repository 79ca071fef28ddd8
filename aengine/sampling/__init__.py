"""Logits to tokens. Knows nothing of models, pages or requests: rows, their parameters and positions are all it is told."""

from __future__ import annotations

from aengine.sampling.sampler import Sampler

__all__ = ["Sampler"]
