"""`GenerationCall`: one request on its way to the server and the events that come back; `CallFeed`: the task that reads it.

Owns when a call is made again (no event has come yet) and when a stream is resumed (the request was marked resumable). The reader of the
events sees one sequence of them without gaps. A request with logprobs of its prompt needs the prompt as ids first, by the server, as these
come without the ids. Knows nothing of tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import anyio
import grpc
from grpc import aio

from aengine.api.errors import AEngineError, EngineDeadError, InvalidRequestError, RequestIdInUseError, ServerError
from aengine.api.request import NamedImage
from aengine.client import active_request
from aengine.client.active_request import ActiveRequest, Feed
from aengine.client.link import Backoff, Failure, Link
from aengine.v1.generation_pb2 import GenerationEvent, GenerationSpec
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, ResumeGenerateRequest, StreamGenerateRequest
from aengine.v1.tokenizer_service_pb2 import ImageNames, RenderChatRequest, TokenizeRequest
from aengine.wire.names import field_of, images_in
from aengine.wire.request import write_token_ids


def needs_prompt_ids(spec: GenerationSpec) -> bool:
    return spec.output.HasField("prompt_logprobs")


def named_images(images: Sequence[Any], names: Iterable[ImageNames]) -> tuple[NamedImage, ...]:
    """The images of a chat with what a server has called them."""
    return tuple([NamedImage(image, one.token_id, tuple(one.names)) for image, one in zip(images, names, strict=False)])


async def write_prompt_ids(link: Link, spec: GenerationSpec) -> Sequence[int]:
    """Have the server turn the prompt of `spec` into ids, and put them in its place. Raises `AEngineError`."""
    return (await write_named_prompt(link, spec))[0]


async def write_named_prompt(link: Link, spec: GenerationSpec) -> tuple[Sequence[int], Sequence[ImageNames]]:
    """What `write_prompt_ids` does; returns the names of the prompt's images, too."""
    prompt, names = spec.prompt, list[ImageNames]()
    try:
        match prompt.WhichOneof("content"):
            case "text":
                write_token_ids((await link.ask(link.tokenizer.Tokenize, TokenizeRequest(text=prompt.text))).token_ids, prompt)
            case "chat":
                rendered = await link.ask(link.tokenizer.RenderChat, RenderChatRequest(chat=prompt.chat))
                write_token_ids(rendered.token_ids, prompt, images_in(prompt.chat))
                names = list(rendered.images)
    except InvalidRequestError as error:
        raise error.moved(lambda field: field_of(f"spec.prompt.{field}")) from error
    return prompt.token_ids.ids, names


DEADLINE_GRACE = 10.0
"""Seconds beyond the time limit of a request until its call is given up: by then the server has ended it, or is stuck."""


class GenerationCall:
    """One request. `timeout`: its time limit in seconds. `id_is_random`: nobody else can have a request with that id."""

    def __init__(self, link: Link, request: StreamGenerateRequest, *, timeout: float | None, id_is_random: bool) -> None:
        self._link = link
        self._request = request
        self._deadline = None if timeout is None else time.monotonic() + timeout + DEADLINE_GRACE
        self._id_is_random = id_is_random
        self._num_events = 0  # that came, which is the number of the next
        self._resume_token = b""
        self._backoff = Backoff()

    @property
    def request_id(self) -> str:
        return self._request.request_id

    async def prompt_ids(self) -> Sequence[int]:
        """Return the prompt's ids if its logprobs are asked for, else none. To be called before `events()`. Raises `AEngineError`."""
        spec = self._request.spec
        return await write_prompt_ids(self._link, spec) if needs_prompt_ids(spec) else ()

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Raises `AEngineError`. Closing it cancels the call."""
        call = self._submit()
        while True:
            try:
                async with aclosing(self._read(call)) as events:
                    async for event in events:
                        yield event
                return
            except aio.AioRpcError as error:
                failure = self._link.failure(error)
            call = await (self._resume(failure) if self._num_events else self._submit_again(failure))

    async def cancel(self) -> None:
        """Have the server cancel the request; returns when it has released it. Raises `AEngineError`."""
        if self._num_events or self._id_is_random:  # else the id may be that of another request
            await self._link.ask(self._link.generation.CancelRequests, CancelRequestsRequest(request_ids=[self.request_id]))

    async def _read(self, call: Any) -> AsyncGenerator[GenerationEvent, None]:
        is_last = False
        try:
            while (response := await call.read()) is not aio.EOF:
                event: GenerationEvent = response.event
                self._num_events += 1
                self._backoff.reset()
                if event.HasField("started"):
                    self._resume_token = event.started.resume_token
                is_last = event.HasField("finished")
                yield event
            if not is_last:
                raise ServerError("the stream ended before its last event", "DATA_LOSS")
        except aio.AioRpcError:
            if not is_last:
                raise
        finally:
            call.cancel()

    def _submit(self) -> Any:
        return self._link.generation.StreamGenerate(self._request, timeout=self._remaining(), metadata=self._link.metadata)

    async def _submit_again(self, failure: Failure) -> Any:
        """Raises the failure's error unless it is safe to try again."""
        # A connection that broke before the first event may have left the request on the server.
        is_own = isinstance(failure.error, RequestIdInUseError) and self._backoff.count > 0
        if not (failure.temporary or is_own) or self._backoff.count >= self._link.config.max_retries:
            raise failure.error
        await self._backoff.wait(failure)
        if is_own:
            await self.cancel()
        return self._submit()

    async def _resume(self, failure: Failure) -> Any:
        """Raises the failure's error unless the request may still be there."""
        is_lost = failure.code is grpc.StatusCode.UNAVAILABLE and not isinstance(failure.error, EngineDeadError)
        if not (self._resume_token and is_lost) or self._backoff.seconds > self._link.config.resume_timeout:
            raise failure.error
        await self._backoff.wait(failure)
        request = ResumeGenerateRequest(request_id=self.request_id, resume_token=self._resume_token, next_event_number=self._num_events)
        return self._link.generation.ResumeGenerate(request, timeout=self._remaining(), metadata=self._link.metadata)

    def _remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())


class CallFeed(Feed):
    """`on_done` is called with the request when the task has ended."""

    def __init__(self, call: GenerationCall, request: ActiveRequest, on_done: Callable[[ActiveRequest], object]) -> None:
        self._call = call
        self._request = request
        self._room = asyncio.Event()  # events are wanted
        self._room.set()
        self._task = asyncio.get_running_loop().create_task(self._run())
        # Where it was cancelled from elsewhere, before it began or while it ran: gRPC cancels calls for reasons of its own.
        self._task.add_done_callback(lambda _: self._end(ServerError("the call was cancelled", "CANCELLED")))
        self._task.add_done_callback(lambda _: on_done(request))

    def hold(self, held: bool) -> None:
        if held:
            self._room.clear()
        else:
            self._room.set()

    def cancel(self) -> None:
        self._task.cancel()

    @property
    def released(self) -> bool:
        return self._task.done()

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
                    request.add_event(event)
                    request.notify()
                    if not request.finished:  # else the task only has to close the call
                        await self._room.wait()
        except asyncio.CancelledError:
            with suppress(AEngineError), anyio.move_on_after(active_request.CLOSE_SECONDS):
                await self._call.cancel()
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._request.end_stream(error)
        self._request.notify()
