"""`Flight`: one request under way, as a task of its own that moves events from the call to what has arrived.

Nothing here refers to the stream that the user holds, so that dropping that ends the flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

import anyio

from aengine.client.arrivals import Arrivals
from aengine.client.call import GenerationCall
from aengine.errors import AEngineError

CLOSE_SECONDS = 5.0
"""How long leaving a request may wait for the server to say that it let go of it."""


class Flight:
    """A request under way. `prepare` completes it before it is sent. To be made and used in one event loop, but for `drop`."""

    def __init__(self, request_id: str, arrivals: Arrivals, call: GenerationCall, prepare: Callable[[], Awaitable[None]] | None) -> None:
        self.request_id = request_id
        self.arrivals = arrivals
        self._let_go = False
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(_fly(arrivals, call, prepare))
        self._task.add_done_callback(lambda _: arrivals.close())  # one that is cancelled before it began runs no line

    @property
    def landed(self) -> bool:
        """Whether nothing of it is under way any more."""
        return self._task.done()

    def on_landed(self, callback: Callable[[Flight], None]) -> None:
        self._task.add_done_callback(lambda _: callback(self))

    def cancel(self) -> None:
        """Let go of the request; what was not read of it is not lost."""
        if not self._let_go and not self.arrivals.over:
            self._let_go = True
            self._task.cancel()

    def drop(self) -> None:
        """`cancel()` from any thread, also when the loop is gone."""
        if not self._task.done():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.cancel)

    async def land(self) -> None:
        """`cancel()`, and wait until nothing of it is under way; the wait is bounded and cannot be cancelled."""
        self.cancel()
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            await asyncio.wait({self._task})


async def _fly(arrivals: Arrivals, call: GenerationCall, prepare: Callable[[], Awaitable[None]] | None) -> None:
    try:
        if prepare is not None:
            await prepare()
        async with aclosing(call.events()) as events:
            async for event in events:
                arrivals.add(event)
                await arrivals.wait_room()
    except asyncio.CancelledError:
        arrivals.close()
        with suppress(AEngineError), anyio.move_on_after(CLOSE_SECONDS):
            await call.end()
    except Exception as error:
        arrivals.close(error)
