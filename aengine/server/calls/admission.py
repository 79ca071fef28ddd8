"""Which generations may begin, and how many there are. Owns the door that a drain closes; knows nothing of gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aengine.server.calls.errors import draining


class Admission:
    """Counts generations between their start and their end. To be used from one event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.closed = False  # whether new generations are refused
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Held by a generation while it lives. Raises `StatusError` (DRAINING) once closed."""
        if self.closed:
            raise draining()
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def close(self) -> None:
        """Refuse what has not begun."""
        self.closed = True

    async def wait_idle(self) -> None:
        """Return when there is no generation."""
        await self._idle.wait()
