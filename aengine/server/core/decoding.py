"""`Decoding`: large messages on their way in. Bounds how many bytes of them there are at a time, and gives back what they took.

A message is as many bytes as it is long, and its values some times as many. It counts from before it is decoded until its call is answered
or has ended. Knows nothing of forms of messages.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aengine.api.runtime import trim_heap
from aengine.server.core.errors import ServiceError

UNCOUNTED_BYTES = 64 * 1024
"""Messages up to here are decoded at once in the event loop: whatever they hold, that takes a few milliseconds."""
WAIT_SECONDS = 10.0
"""How long a call may wait for others to be answered."""
TRIM_BYTES = 16 * 1024 * 1024
TRIM_SECONDS = 0.5
"""So long after so many bytes of messages are gone the C library is asked to give back what it holds of them."""

T = TypeVar("T")


class Decoding:
    """To be used from one event loop."""

    def __init__(self, max_bytes: int, caller_max_bytes: int) -> None:
        """`max_bytes` of all calls, `caller_max_bytes` of one caller. A message of more waits until there is no other."""
        self._most, self._caller_most = max_bytes, caller_max_bytes
        self._held = 0
        self._by_caller: Counter[str] = Counter()
        self._waiting: deque[tuple[int, str, asyncio.Future[None]]] = deque()
        self._freed = 0
        self._trimming: asyncio.TimerHandle | None = None
        self._thread = ThreadPoolExecutor(1, "aengine-decoding")

    @property
    def held_bytes(self) -> int:
        return self._held

    async def take_room(self, num_bytes: int, caller: str) -> Callable[[], None]:
        """Wait until there is room for a message of `caller`; returns what gives it back, to be called once. Raises `ServiceError`
        (TOO_MANY_CALLS) where that takes too long."""
        if num_bytes <= UNCOUNTED_BYTES:
            return _nothing
        if self._waiting or not self._fits(num_bytes, caller):
            await self._wait(num_bytes, caller)
        else:
            self._add(num_bytes, caller)
        return lambda: self._give_back(num_bytes, caller)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do `work` in a thread, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def close(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _fits(self, num_bytes: int, caller: str) -> bool:
        own = self._by_caller[caller]
        return (not self._held or self._held + num_bytes <= self._most) and (not own or own + num_bytes <= self._caller_most)

    def _add(self, num_bytes: int, caller: str) -> None:
        self._held += num_bytes
        self._by_caller[caller] += num_bytes

    async def _wait(self, num_bytes: int, caller: str) -> None:
        waiter = (num_bytes, caller, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._admit()
        try:
            await asyncio.wait_for(asyncio.shield(waiter[2]), WAIT_SECONDS)
        except asyncio.TimeoutError:
            self._leave(waiter)
            raise ServiceError("TOO_MANY_CALLS", f"{self._held} bytes of messages have no answer yet, which leaves no room") from None
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _leave(self, waiter: tuple[int, str, asyncio.Future[None]]) -> None:
        """One that waits no longer, or whose turn has just come."""
        if waiter[2].done():
            self._give_back(*waiter[:2])
        else:
            self._waiting.remove(waiter)
            self._admit()

    def _admit(self) -> None:
        """Let in those that wait and fit, in their order, but for those whose caller has too much itself."""
        for waiter in tuple(self._waiting):
            num_bytes, caller, turn = waiter
            if self._fits(num_bytes, caller):
                self._waiting.remove(waiter)
                self._add(num_bytes, caller)
                turn.set_result(None)
            elif self._held and self._held + num_bytes > self._most:
                return

    def _give_back(self, num_bytes: int, caller: str) -> None:
        self._held -= num_bytes
        self._by_caller[caller] -= num_bytes
        if not self._by_caller[caller]:
            del self._by_caller[caller]
        self._admit()
        self._freed += num_bytes
        if self._freed >= TRIM_BYTES and self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        """In the thread, which has the GIL for none of it."""
        self._freed, self._trimming = 0, None
        self._thread.submit(trim_heap)


def _nothing() -> None:
    pass
