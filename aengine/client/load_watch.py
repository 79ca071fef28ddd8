"""The load of a server as a stream: the messages of WatchLoad as `LoadReport`s. Knows nothing of generations."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from grpc import aio

from aengine.client.link import Link, result_of
from aengine.client.messages import read_report
from aengine.errors import ServerError
from aengine.outputs import LoadReport
from aengine.v1.engine_service_pb2 import WatchLoadRequest


async def watch_load(link: Link, request: WatchLoadRequest) -> AsyncGenerator[LoadReport, None]:
    """Without end; closing it cancels the call. Raises what the failed call means, and `EngineStateError` when the channel is closed."""
    call = link.engine.WatchLoad(request, metadata=link.metadata)
    try:
        while (response := await result_of(call.read())) is not aio.EOF:
            yield read_report(response)
        raise ServerError("the server ended the stream of its load", "DATA_LOSS")
    except aio.AioRpcError as error:
        raise link.failure(error).error from error
    finally:
        call.cancel()
