"""Detects that a thread hangs: in a kernel that never returns, a driver call, a deadlock. Does not know what the thread does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def watchdog(limit: float, busy_since: Callable[[], float | None], on_hang: Callable[[float], None]) -> Iterator[None]:
    """While the context lasts, calls `on_hang(seconds)` once, from a thread of its own, when `busy_since()` (on time.monotonic, None while
    idle) lies more than `limit` seconds back."""
    ended = threading.Event()

    def watch() -> None:
        pause = limit
        while not ended.wait(pause):
            since = busy_since()
            busy = 0.0 if since is None else time.monotonic() - since
            if busy > limit:
                return on_hang(busy)
            pause = max(limit - busy, limit / 20)

    threading.Thread(target=watch, name="aengine-watchdog", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
