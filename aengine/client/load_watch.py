"""The load of a server as a stream: the messages of WatchLoad as `LoadReport`s. Knows nothing of generations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from grpc import aio

from aengine.client.link import Link
from aengine.client.messages import read_report
from aengine.errors import EngineStateError, ServerError
from aengine.outputs import LoadReport
from aengine.v1.engine_service_pb2 import WatchLoadRequest


async def watch_load(link: Link, request: WatchLoadRequest) -> AsyncGenerator[LoadReport, None]:
    """Without end; closing it cancels the call. Raises what the failed call means, and `EngineStateError` when the channel is closed."""
    call = link.engine.WatchLoad(request, metadata=link.metadata)
    reading: asyncio.Future[Any] | None = None
    try:
        while True:
            # In a task of its own: a closed channel shows as CancelledError, and must not be taken for a cancellation of this task.
            reading = asyncio.ensure_future(call.read())
            await asyncio.wait({reading})
            if reading.cancelled():
                raise EngineStateError("the client is closed")
            response = reading.result()
            if response is aio.EOF:
                raise ServerError("the server ended the stream of its load", "DATA_LOSS")
            yield read_report(response)
    except aio.AioRpcError as error:
        raise link.failure(error).error from error
    finally:
        call.cancel()
        if reading is not None:
            reading.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else may ask for it any more
