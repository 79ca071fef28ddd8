"""How late the event loop wakes: a timer that measures itself. Knows nothing of who reads it.

Every stream of the server waits as long as the loop does, so this is where blocking code shows.
"""

from __future__ import annotations

import asyncio
import time

from aengine.histogram import Histogram

INTERVAL = 0.05
"""Seconds between two samples: 20 timers a second cost some hundred microseconds."""
LAG_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds."""


class LoopLag:
    """To be used from the loop that it measures."""

    def __init__(self, interval: float = INTERVAL) -> None:
        """`interval`: seconds between two samples."""
        self.seconds = Histogram(LAG_BOUNDS)  # by which the samples came late
        self._interval = interval
        self._max = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure the running loop, until `stop()`."""
        # The loop's own clock does not serve: uvloop's stands still while a callback runs.
        due = time.monotonic() + self._interval
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._sample, due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def take_max(self) -> float:
        """The latest sample, in seconds, since this was last asked for."""
        latest, self._max = self._max, 0.0
        return latest

    def _sample(self, due: float) -> None:
        lag = max(0.0, time.monotonic() - due)
        self.seconds.observe(lag)
        self._max = max(self._max, lag)
        self.start()
