"""Which generations may begin, and how many are under way. Owns the door that a drain closes; knows nothing of gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aengine.server.calls.errors import draining


class Admission:
    """Counts generations between their start and their end. To be used from one event loop."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def closed(self) -> bool:
        """Whether new generations are refused."""
        return self._closed

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Held by a generation while it lives. Raises `StatusError` (DRAINING) once closed."""
        if self._closed:
            raise draining()
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def close(self) -> None:
        """Refuse what has not begun."""
        self._closed = True

    async def wait_idle(self) -> None:
        """Return when no generation is under way."""
        await self._idle.wait()
