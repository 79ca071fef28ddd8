"""`CallFeed`: the task that reads the call of one request. Knows nothing of retries, which are the call's, nor of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress

import anyio

from aengine.client import active_request
from aengine.client.active_request import ActiveRequest, Feed
from aengine.client.call import GenerationCall
from aengine.errors import AEngineError


class CallFeed(Feed):
    """`on_done` is called with the request when the task has ended."""

    def __init__(self, call: GenerationCall, request: ActiveRequest, on_done: Callable[[ActiveRequest], object]) -> None:
        self._call = call
        self._request = request
        self._room = asyncio.Event()  # events are wanted
        self._room.set()
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: self._end())  # where it was cancelled from elsewhere, before it began or while it ran
        self._task.add_done_callback(lambda _: on_done(request))

    def hold(self, held: bool) -> None:
        if held:
            self._room.clear()
        else:
            self._room.set()

    def cancel(self) -> None:
        self._task.cancel()

    async def wait_released(self) -> None:
        if not self._task.done():
            with anyio.move_on_after(active_request.CLOSE_SECONDS, shield=True):
                await asyncio.wait({self._task})

    async def _run(self) -> None:
        request = self._request
        try:
            request.prompt_ids = await self._call.prompt_ids()
            async with aclosing(self._call.events()) as events:
                async for event in events:
                    request.add(event)
                    request.notify()
                    if not request.finished:  # else the task only has to close the call
                        await self._room.wait()
        except asyncio.CancelledError:
            with suppress(AEngineError), anyio.move_on_after(active_request.CLOSE_SECONDS):
                await self._call.cancel()
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        self._request.end(error)
        self._request.notify()
