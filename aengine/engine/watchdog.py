"""Detects that a thread hangs: in a kernel that never returns, a driver call, a deadlock. Does not know what the thread does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls `on_hang(seconds)` once, from a thread of its own, when `busy_since()` (on time.monotonic, None while idle) lies more
    than `limit` seconds back. Ends after that, or with `stop()`."""

    def __init__(self, limit: float, busy_since: Callable[[], float | None], on_hang: Callable[[float], None]) -> None:
        self._limit = limit
        self._busy_since = busy_since
        self._on_hang = on_hang
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="aengine-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        pause = self._limit
        while not self._stopped.wait(pause):
            since = self._busy_since()
            busy = 0.0 if since is None else time.monotonic() - since
            if busy > self._limit:
                self._on_hang(busy)
                return
            pause = max(self._limit - busy, self._limit / 20)
