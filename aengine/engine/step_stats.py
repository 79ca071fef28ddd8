"""What the step thread counts: steps, their times and sizes, tokens; and what of it other threads may read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aengine.api.outputs import EngineStats, Histogram
from aengine.scheduler.live_sequences import MovingRatio

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STEP_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


PUBLISH_SECONDS = 0.05
"""How old the published stats may become while steps bring tokens and nothing else."""

MEAN_OF_STEPS = 100
MEAN_OF_PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Identity:
    """What the engine computes with now."""

    fingerprint: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)  # it is made of
    since: float = 0.0  # seconds since the epoch


class StepStats:
    """To be filled and published by the step thread."""

    def __init__(self) -> None:
        self.completion_tokens = 0
        self.num_received = 0  # submissions
        self.published = EngineStats(), 0
        """The last stats that were published, and how many submissions they count. It is replaced as a whole, so any thread may read it."""
        self.identity = Identity()
        """As `published`."""
        self._published_at = 0.0  # when, on time.monotonic
        self._num_steps = 0
        self._seconds = Histogram(STEP_SECONDS)
        self._tokens = Histogram(STEP_TOKENS)
        self._mean_seconds = 0.0  # of the latest steps
        # Fades by tokens and not by steps, so that long chunks, which tell best how fast prompts are computed, are not soon outnumbered.
        self._prefill_rate = MovingRatio(MEAN_OF_PREFILL_TOKENS)

    def add_step(self, seconds: float, num_tokens: int, num_prefill: int) -> None:
        """`num_prefill`: those of the tokens that are of prompts, or computed again."""
        self._num_steps += 1
        self._seconds.observe(seconds)
        self._tokens.observe(num_tokens)
        self._mean_seconds += (seconds - self._mean_seconds) / min(self._num_steps, MEAN_OF_STEPS)
        if num_prefill:
            self._prefill_rate.add_sums(num_prefill, seconds, num_prefill)

    def are_old(self) -> bool:
        return time.monotonic() - self._published_at >= PUBLISH_SECONDS

    def publish(self, stats: EngineStats, *, paused: bool, sleep_level: int) -> None:
        """Publish the scheduler's `stats`, with what is counted here added, for other threads to read."""
        self._published_at = time.monotonic()
        stats = replace(
            stats,
            steps=self._num_steps,
            completion_tokens=self.completion_tokens,
            paused=paused,
            sleep_level=sleep_level,
            fingerprint=self.identity.fingerprint,
            weights_time=self.identity.since,
            mean_step_seconds=self._mean_seconds,
            prefill_tokens_per_second=self._prefill_rate.value,
            step_seconds=self._seconds.snapshot(),
            step_tokens=self._tokens.snapshot(),
        )
        self.published = stats, self.num_received
