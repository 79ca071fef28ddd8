"""`BatchGenerate`: many requests in one call, each with a response of its own when it is whole.

All of them are submitted at once, and the engine orders them. Nothing is read from the engine while responses wait for the client, so the
requests of a client that does not read park.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from aengine.api.errors import InvalidRequestError, RequestIdInUseError
from aengine.api.fields import shown
from aengine.server.core.backend import Backend, in_chunks
from aengine.server.grpc.generation.source import submit_message
from aengine.server.grpc.status import to_error
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
    backend.require_model("")
    tasks: list[asyncio.Task[None]] = []
    unsent: asyncio.Queue[BatchGenerateResponse] = asyncio.Queue()  # whole, in the order of their ends
    may_read = asyncio.Event()
    may_read.set()

    async def serve(index: int, one: GenerateRequest, first: int) -> None:
        """`first`: the index of the first request of the batch with this request's id."""
        response = BatchGenerateResponse(index=index)
        try:
            if first != index:
                raise RequestIdInUseError.of("request_id", f"{shown(one.request_id)} is in use by requests[{first}] of the batch")
            async with await submit_message(backend, one, deadline) as generation:
                await generation.complete(response.response, backend.max_message_bytes - FRAME_BYTES, may_read)
        except Exception as error:
            response = BatchGenerateResponse(index=index, error=to_error(error))
        unsent.put_nowait(response)
        if unsent.qsize() >= MAX_UNSENT:
            may_read.clear()

    with backend.admission.enter():  # until the last response was sent
        try:
            named: dict[str, int] = {}  # by request id the first request that has it
            count = size = 0  # since the event loop last had its turn
            for index, one in enumerate(requests):
                first = named.setdefault(one.request_id, index) if one.HasField("request_id") else index
                tasks.append(asyncio.create_task(serve(index, one, first)))
                count, size = count + 1, size + one.ByteSize()
                if count == SUBMIT_AT_ONCE or size >= SUBMIT_BYTES:
                    await asyncio.sleep(0)
                    count = size = 0
            for _ in requests:
                response = await unsent.get()
                if unsent.qsize() < MAX_UNSENT:
                    may_read.set()
                yield response
        finally:
            await in_chunks(tasks, _cancelled)


def _cancelled(task: asyncio.Task[None]) -> asyncio.Task[None]:
    task.cancel()
    return task
