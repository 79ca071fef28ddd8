"""The moving averages of steps that routers go by."""

from __future__ import annotations

import pytest

from aengine.api.outputs import EngineStats
from aengine.cache import TierCounts
from aengine.engine.edges import StepStats


def published(stats: StepStats) -> EngineStats:
    stats.publish(EngineStats(), TierCounts(), paused=False, sleep_level=0)
    return stats.published[0]


def test_without_steps_nothing_is_known() -> None:
    stats = published(StepStats())
    assert (stats.mean_step_seconds, stats.prefill_tokens_per_second) == (0.0, 0.0)


def test_the_mean_of_steps_follows_the_latest() -> None:
    stats = StepStats()
    stats.add_step(0.1, 5, 0)
    stats.add_step(0.3, 5, 0)
    assert published(stats).mean_step_seconds == pytest.approx(0.2)
    for _ in range(1000):
        stats.add_step(0.5, 5, 0)
    assert published(stats).mean_step_seconds == pytest.approx(0.5, abs=1e-4)
    assert published(stats).prefill_tokens_per_second == 0.0


def test_the_rate_of_prompts_is_that_of_long_chunks() -> None:
    """Short chunks between decodes are slow for each token, and take no part without prompt tokens at all."""
    stats = StepStats()
    stats.add_step(0.1, 2000, 2000)
    for _ in range(1000):
        stats.add_step(0.05, 8, 0)
    assert published(stats).prefill_tokens_per_second == pytest.approx(20_000)
    stats.add_step(0.05, 9, 1)
    assert 10_000 < published(stats).prefill_tokens_per_second < 20_000
    for _ in range(50):
        stats.add_step(0.5, 4096, 4096)
    assert published(stats).prefill_tokens_per_second == pytest.approx(8192, rel=0.01)
