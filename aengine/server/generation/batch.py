"""`BatchGenerate`: many requests in one call, each with a response of its own when it is whole.

All of them are submitted at once, and the engine orders them. Nothing is read from the engine while responses wait for the client, so the
requests of a client that does not read park.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from aengine.checks import shown
from aengine.errors import InvalidRequestError, RequestIdInUseError
from aengine.server.calls.errors import to_error
from aengine.server.generation.backend import Backend, require_model
from aengine.server.generation.chunks import in_chunks
from aengine.server.generation.source import submit
from aengine.v1.generation_service_pb2 import BatchGenerateRequest, BatchGenerateResponse, GenerateRequest

MAX_REQUESTS = 1024
FRAME_BYTES = 64
"""A bound on the bytes around a response in its message."""
MAX_UNSENT = 16
"""Responses that may wait for the client before the others are read no further."""
SUBMIT_AT_ONCE = 16
"""Requests that are submitted before the event loop gets its turn, at most;"""
SUBMIT_BYTES = 64 * 1024
"""and how large they may be together."""


async def batch_responses(
    backend: Backend, request: BatchGenerateRequest, deadline: float | None
) -> AsyncGenerator[BatchGenerateResponse, None]:
    """Responses in the order of their ends. `deadline`: of the call, on time.monotonic. Raises only where no request could be served;
    leaving cancels what runs."""
    requests = request.requests
    if not 1 <= len(requests) <= MAX_REQUESTS:
        raise InvalidRequestError.of("requests", f"{len(requests)} requests are not 1 to {MAX_REQUESTS}")
    require_model(backend.engine, "")
    with backend.admission.enter():  # until the last response was sent
        batch = _Batch(backend, deadline)
        try:
            await batch.submit(requests)
            for _ in requests:
                yield await batch.next()
        finally:
            await in_chunks(batch.tasks, _cancelled)


class _Batch:
    """The requests of one call and their responses."""

    def __init__(self, backend: Backend, deadline: float | None) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self._backend = backend
        self._deadline = deadline
        self._unsent: asyncio.Queue[BatchGenerateResponse] = asyncio.Queue()
        self._may_read = asyncio.Event()
        self._may_read.set()

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        named: dict[str, int] = {}  # by request id the first request that has it
        count = size = 0  # since the last turn
        for index, request in enumerate(requests):
            first = named.setdefault(request.request_id, index) if request.HasField("request_id") else index
            self.tasks.append(asyncio.create_task(self._serve(index, request, first)))
            count, size = count + 1, size + request.ByteSize()
            if count == SUBMIT_AT_ONCE or size >= SUBMIT_BYTES:
                await asyncio.sleep(0)
                count = size = 0

    async def next(self) -> BatchGenerateResponse:
        """The response that was whole first, of those not sent."""
        response = await self._unsent.get()
        if self._unsent.qsize() < MAX_UNSENT:
            self._may_read.set()
        return response

    async def _serve(self, index: int, request: GenerateRequest, first: int) -> None:
        response = BatchGenerateResponse(index=index)
        try:
            if first != index:
                raise RequestIdInUseError.of("request_id", f"{shown(request.request_id)} is in use by requests[{first}] of the batch")
            async with await submit(self._backend, request, self._deadline) as generation:
                await generation.complete(response.response, self._backend.max_message_bytes - FRAME_BYTES, self._may_read)
        except Exception as error:
            response = BatchGenerateResponse(index=index, error=to_error(error))
        self._unsent.put_nowait(response)
        if self._unsent.qsize() >= MAX_UNSENT:
            self._may_read.clear()


def _cancelled(task: asyncio.Task[None]) -> asyncio.Task[None]:
    task.cancel()
    return task
