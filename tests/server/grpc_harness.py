"""A server on a free port of this machine, channels to it, and what a status says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import anyio
import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from hang_guard import HANG_SECONDS

from aengine import Router
from aengine.server.app import Server
from aengine.v1.generation_pb2 import GenerationEvent, GenerationSpec, StreamOptions
from aengine.v1.generation_service_pb2 import StreamGenerateRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub
from aengine.v1.model_service_pb2_grpc import ModelServiceStub


@dataclass
class Serving:
    server: Server
    channel: aio.Channel

    @property
    def generation(self) -> Any:
        return GenerationServiceStub(self.channel)

    @property
    def model(self) -> Any:
        return ModelServiceStub(self.channel)


OVER_A_ROUTER = ContextVar("OVER_A_ROUTER", default=False)
"""Whether `serving` puts a server of its own in front of the engine, and serves a router that sends its requests there."""


@asynccontextmanager
async def serving(engine: Any, *, limit: float | None = HANG_SECONDS, over_a_router: bool = False, **config: Any) -> AsyncIterator[Serving]:
    """A server and a channel to it; a test that takes longer than `limit` seconds with it hangs, and fails."""
    async with AsyncExitStack() as stack:
        if over_a_router or OVER_A_ROUTER.get():
            behind = await stack.enter_async_context(_started(engine))
            engine = await stack.enter_async_context(Router(backends=(behind.address,), connect_timeout=HANG_SECONDS))
        server = await stack.enter_async_context(_started(engine, **config))
        channel = await stack.enter_async_context(aio.insecure_channel(server.address))
        with anyio.fail_after(limit):
            yield Serving(server, channel)


@asynccontextmanager
async def _started(engine: Any, **config: Any) -> AsyncIterator[Server]:
    server = Server(engine, port=0, **config)
    await server.start()
    try:
        if engine.healthy:
            await server.set_serving()
        yield server
    finally:
        await server.stop()


def text_spec(text: str = "Once", **fields: Any) -> GenerationSpec:
    """With a delta for each token, unless `stream` says otherwise."""
    spec = GenerationSpec(**{"stream": StreamOptions(max_tokens_per_delta=1), **fields})
    spec.prompt.text = text
    return spec


def stream_request(text: str = "Once", *, request_id: str | None = None, **fields: Any) -> StreamGenerateRequest:
    return StreamGenerateRequest(spec=text_spec(text, **fields), request_id=request_id)


async def events_of(call: Any) -> list[GenerationEvent]:
    return [response.event async for response in call]


@dataclass
class Failure:
    """What a client learns from a call that failed."""

    code: grpc.StatusCode
    message: str
    reason: str
    info: dict[str, str]
    details: list[Message]
    metadata: dict[str, Any]

    @property
    def fields(self) -> list[str]:
        return [violation.field for detail in self.details for violation in getattr(detail, "field_violations", ())]


def failure_of(error: aio.AioRpcError) -> Failure:
    metadata = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    details: list[Message] = []
    for packed in status.details:
        detail = getattr(error_details_pb2, packed.type_url.rpartition(".")[2])()
        assert packed.Unpack(detail)
        details.append(detail)
    info = details[0]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert info.domain == "aengine"
    return Failure(error.code(), error.details() or "", info.reason, dict(info.metadata), details[1:], metadata)
