"""Perplexity of models on a text: `aengine-bench quality`. Every figure comes from `prompt_logprobs`, so it is what users get.

The text that comes with the package is chapters 1 to 5 of Herman Melville's Moby-Dick (1851), which is in the public domain. The demo model
was not trained on it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aengine.api.config import EngineConfig
from aengine.api.params import SamplingParams
from aengine.bench.probes import start_up_log
from aengine.engine.async_engine import AsyncEngine

HELD_TEXT = Path(__file__).with_name("held_text.txt")
HEADER = ("model", "quantization", "KV cache", "tokens", "perplexity", "rise %", "+- %", "same top 1 %")


@dataclass(frozen=True, slots=True)
class Windows:
    """Prompts of `size` tokens, the next one `stride` further on. In each the tokens are scored that the one before did not have, so that
    a token sees at least size - stride tokens before it, but for those of the first prompt."""

    size: int
    stride: int

    def __post_init__(self) -> None:
        if not 1 <= self.stride < self.size:
            raise ValueError(f"--stride: {self.stride} is not in [1, {self.size - 1}], below --window")


@dataclass(frozen=True, slots=True)
class Scores:
    """The logprobs of all tokens of a text but the first, which nothing predicts, and the most likely tokens in their places."""

    token_ids: tuple[int, ...]  # of the whole text
    logprobs: NDArray[np.float64]  # [tokens - 1], natural
    top_ids: NDArray[np.int64]  # [tokens - 1], the most likely token in the place of each
    start_up: Sequence[str]  # what the engine logged


@dataclass(frozen=True, slots=True)
class Quality:
    """One configuration. The last three figures are against the first configuration; None where the tokens are not the same ones."""

    model: str
    quantization: str
    kv_cache_dtype: str
    tokens: int
    perplexity: float
    rise: float | None  # of the perplexity, as a fraction
    rise_error: float | None  # standard error of that, from the differences of the tokens' logprobs
    same_top: float | None  # share of places with the same most likely token
    start_up: Sequence[str]

    @classmethod
    def of(cls, config: EngineConfig, name: str, scores: Scores, first: Scores) -> Quality:
        rise = rise_error = same_top = None
        if scores.token_ids == first.token_ids:
            lost = first.logprobs - scores.logprobs
            rise = math.expm1(lost.mean())
            rise_error = float((1 + rise) * lost.std() / math.sqrt(len(lost)))
            same_top = float((scores.top_ids == first.top_ids).mean())
        perplexity = math.exp(-scores.logprobs.mean())
        which = (name, config.quantization, config.kv_cache_dtype, len(scores.logprobs))
        return cls(*which, perplexity, rise, rise_error, same_top, scores.start_up)

    @property
    def cells(self) -> Sequence[object]:
        """The cells of one row of the table with `HEADER`."""
        shares = ("-" if share is None else f"{100 * share:.2f}" for share in (self.rise, self.rise_error, self.same_top))
        return (self.model, self.quantization, self.kv_cache_dtype, self.tokens, f"{self.perplexity:.3f}", *shares)


async def score_text(config: EngineConfig, text: str, windows: Windows, num_tokens: int | None) -> Scores:
    """The scores of a text, or of its first tokens. Raises what the engine raises, and ValueError for a text of fewer than two tokens."""
    engine = AsyncEngine(config)
    with start_up_log() as log:
        await engine.start()
    try:
        ids = tuple(engine.tokenizer.encode(text))[:num_tokens]
        if len(ids) < 2:
            raise ValueError(f"a text of {len(ids)} tokens has none to predict")
        starts = range(0, max(1, len(ids) - windows.size + windows.stride), windows.stride)
        scored = await asyncio.gather(*(_score(engine, ids[start : start + windows.size]) for start in starts))
    finally:
        await engine.aclose()
    fresh = [pairs if start == 0 else pairs[windows.size - windows.stride - 1 :] for start, pairs in zip(starts, scored, strict=True)]
    logprobs, top_ids = np.concatenate(fresh).T
    return Scores(ids, logprobs, top_ids.astype(np.int64), log)


async def _score(engine: AsyncEngine, prompt: Sequence[int]) -> NDArray[np.float64]:
    """[tokens - 1, 2]: the logprob of each token but the first, and the id of the most likely one there."""
    async with engine.stream(list(prompt), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)) as stream:
        async for _ in stream:
            pass
        entries = stream.completion().prompt_logprobs or ()
    return np.array([(entry.logprob, next(iter(entry.top_logprobs))) for entry in entries if entry is not None])
