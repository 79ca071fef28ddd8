"""Logits to tokens. Knows rows, their parameters and positions, and nothing of models, pages or requests."""

from __future__ import annotations

from aengine.sampling.logprobs import DeviceLogprobs, join, token_logprobs
from aengine.sampling.sampler import SampledTokens, Sampler

__all__ = ["DeviceLogprobs", "SampledTokens", "Sampler", "join", "token_logprobs"]
