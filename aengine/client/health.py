"""How a server fares, followed in the background: `HealthWatch`, whether it reports that it serves, as long as the client lives; and its
load, the messages of WatchLoad as `LoadReport`s. Knows nothing of generations.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import anyio
import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from aengine.api.errors import AEngineError, EngineStateError, ServerError
from aengine.api.outputs import LoadReport
from aengine.client.failures import Backoff
from aengine.client.link import Link, result_of
from aengine.v1.engine_service_pb2 import WatchLoadRequest
from aengine.wire.client_messages import read_report

SERVING = health_pb2.HealthCheckResponse.SERVING


class HealthWatch:
    """Follows the health of the server of `link`. Made in a running loop; `stop()` ends it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.serving = False
        self._error: AEngineError | None = None  # why it does not serve, as far as that is known
        self._settled = asyncio.Event()  # it has reported SERVING, or never will
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait_serving(self, seconds: float) -> None:
        """Wait until it serves. Raises `EngineStateError`, `ConnectionLostError` or `ServerError` after `seconds`, or at once for what
        time does not change."""
        with anyio.move_on_after(seconds):
            await self._settled.wait()
        if not self.serving:
            raise self._error or self._not_serving()

    async def stop(self) -> None:
        self._task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({self._task})

    def _not_serving(self) -> AEngineError:
        return EngineStateError(f"the server at {self._link.config.address} is not serving")

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            call = self._link.health.Watch(health_pb2.HealthCheckRequest(), metadata=self._link.metadata)
            failure = None
            try:
                while (response := await call.read()) is not aio.EOF:
                    self.serving = response.status == SERVING
                    self._error = None if self.serving else self._not_serving()
                    if self.serving:
                        self._settled.set()
                    backoff.reset()
            except aio.AioRpcError as error:
                failure = self._link.failure(error)
                if failure.code is not grpc.StatusCode.UNAVAILABLE:
                    self._settled.set()
            finally:
                call.cancel()
            self.serving, self._error = False, failure.error if failure is not None else None
            await backoff.wait(failure)


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
