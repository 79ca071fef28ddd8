"""`BatchGenerate`: many requests in one call, each with a response of its own when it is whole.

All of them are submitted at once, and the engine orders them. Nothing is read from the engine while responses wait for the client, so the
requests of a client that does not read park. Batches that are stored do without their call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from aengine.api.errors import InvalidRequestError, RequestIdInUseError
from aengine.api.fields import shown
from aengine.server.core.batches import PRIORITY, Answered, Batch, Batches
from aengine.server.core.calls_in_flight import Caller, current_caller
from aengine.server.core.core import Backend, in_chunks
from aengine.server.core.errors import ServiceError, clip, describe
from aengine.server.core.journal import Journal, StoredAnswer, pack, unpack
from aengine.server.grpc.generation.events import submit_message
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

    with backend.admission.enter_generation():  # until the last response was sent
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


START = "calls_"
MAX_ID_BYTES = 256


class StoredBatches:
    """Batches that a client names. Each is an entry of the journal, and has its responses when it has ended."""

    def __init__(self, journal: Journal, backend: Backend) -> None:
        self._journal, self._backend = journal, backend
        self.batches = Batches(journal, backend, self, START)

    def responses(self, request: BatchGenerateRequest) -> AsyncGenerator[Any, None]:
        """Begin the batch, or read the one of this id where there are no requests. The messages are serialised."""
        return self._begin(request) if request.requests else self._read(_name_of(request.batch_id, current_caller()), request.batch_id)

    async def delete(self, batch_id: str) -> None:
        """End and forget a batch. Raises `ServiceError` (REQUEST_NOT_FOUND)."""
        name = _name_of(batch_id, current_caller())
        if (batch := await self.batches.find(name)) is not None:
            await self.batches.stop_batch(batch, "cancelled")
        elif await self._journal.get_answer(name, current_caller()) is None:
            raise _unknown(batch_id)
        await self._journal.delete_answer(name)

    async def _begin(self, request: BatchGenerateRequest) -> AsyncGenerator[Any, None]:
        requests, named = request.requests, dict[str, int]()
        if len(requests) > MAX_REQUESTS:
            raise InvalidRequestError.of("requests", f"{len(requests)} requests are not 1 to {MAX_REQUESTS}")
        for index, one in enumerate(requests):
            if one.HasField("request_id") and (first := named.setdefault(one.request_id, index)) != index:
                raise InvalidRequestError.of(f"requests[{index}].request_id", f"{shown(one.request_id)} is that of requests[{first}]")
            if not one.spec.HasField("priority"):
                one.spec.priority = PRIORITY
        self._backend.require_model("")
        caller = current_caller()
        name = _name_of(request.batch_id, caller)
        if name in self.batches.running or await self._journal.get_answer(name, caller) is not None:
            raise RequestIdInUseError.of("batch_id", f"{shown(request.batch_id)} is that of a batch which is stored")
        entry = StoredAnswer(name, caller.name, time.time(), False, b"{}", b"")
        try:
            await self.batches.begin(entry, caller, [one.SerializeToString() for one in requests])
        except OSError as error:
            raise ServiceError("NOT_READY", f"the batch cannot be stored: {error}") from error
        async for response in self._read(name, request.batch_id):
            yield response

    async def _read(self, name: str, batch_id: str) -> AsyncGenerator[Any, None]:
        seen: set[int] = set()
        if (batch := await self.batches.find(name)) is not None:
            async for index, answer in self.batches.answers(batch):
                seen.add(index)
                yield answer
            if batch.task is not None:
                await asyncio.wait((batch.task,))
        if (stored := await self._journal.get_answer(name, current_caller())) is None:
            raise _unknown(batch_id)
        if not stored.ended:
            raise ServiceError("NOT_READY", f"batch {clip(batch_id)!r} does not run yet")
        for index, answer in enumerate(unpack(stored.answer)):
            if index not in seen and answer:
                yield answer

    async def answer(self, batch: Batch, index: int) -> Answered:
        """Serve a request of a batch."""
        response = BatchGenerateResponse(index=index)
        try:
            async with await submit_message(self._backend, GenerateRequest.FromString(batch.requests[index])) as generation:
                await generation.complete(response.response, self._backend.max_message_bytes - FRAME_BYTES)
        except Exception as error:
            failure = describe(error)
            if failure.may_pass is not None:
                return Answered(False, b"", failure.may_pass)
            return Answered(False, BatchGenerateResponse(index=index, error=to_error(error)).SerializeToString())
        return Answered(True, response.SerializeToString())

    async def finish(self, batch: Batch, answers: Sequence[bytes | None]) -> StoredAnswer:
        """The entry of a batch that has ended, with its responses."""
        return replace(batch.entry, answer=pack([answer or b"" for answer in answers]))

    def expiry(self, batch: Batch) -> float | None:
        """Never."""
        return None


def _name_of(batch_id: str, caller: Caller) -> str:
    if not 1 <= len(batch_id.encode()) <= MAX_ID_BYTES:
        raise InvalidRequestError.of("batch_id", f"{clip(batch_id)!r} has not 1 to {MAX_ID_BYTES} bytes")
    return START + blake2b(f"{caller.name or ''}\0{batch_id}".encode(), digest_size=16).hexdigest()


def _unknown(batch_id: str) -> ServiceError:
    return ServiceError("REQUEST_NOT_FOUND", f"no batch {clip(batch_id)!r} is stored", resource=("batch", batch_id))
