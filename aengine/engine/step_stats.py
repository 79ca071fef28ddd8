"""What the step thread counts: steps, their times and sizes, tokens. Knows nothing of who reads it."""

from __future__ import annotations

from aengine.histogram import Histogram
from aengine.outputs import EngineStats
from aengine.scheduler import SchedulerStats

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STEP_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


class StepStats:
    """To be filled by the step thread."""

    def __init__(self) -> None:
        self.completion_tokens = 0
        self._num_steps = 0
        self._seconds = Histogram(STEP_SECONDS)
        self._tokens = Histogram(STEP_TOKENS)

    def add_step(self, seconds: float, num_tokens: int) -> None:
        self._num_steps += 1
        self._seconds.observe(seconds)
        self._tokens.observe(num_tokens)

    def combined(self, stats: SchedulerStats, *, paused: bool) -> EngineStats:
        """Everything that the step thread knows, now."""
        return EngineStats(
            running=stats.running,
            waiting=stats.waiting,
            parked=stats.parked,
            pages_used=stats.pages_used,
            pages_total=stats.pages_total,
            cached_tokens=stats.cached_tokens,
            steps=self._num_steps,
            preemptions=stats.preemptions,
            prompt_tokens=stats.prompt_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            completion_tokens=self.completion_tokens,
            paused=paused,
            step_seconds=self._seconds.snapshot(),
            step_tokens=self._tokens.snapshot(),
        )
