"""A server without an engine that answers each call as the test tells it to, and notes what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from aengine.v1.admin_service_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from aengine.v1.engine_service_pb2 import GetLoadResponse, Load
from aengine.v1.engine_service_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from aengine.v1.generation_pb2 import FINISH_REASON_MAX_TOKENS, GenerationEvent
from aengine.v1.generation_service_pb2 import CancelRequestsResponse, ResumeGenerateResponse, SessionResponse, StreamGenerateResponse
from aengine.v1.generation_service_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from aengine.v1.model_service_pb2 import GetModelResponse, LayerGroup, Model
from aengine.v1.model_service_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from aengine.v1.tokenizer_service_pb2 import RenderChatResponse, TokenizeResponse
from aengine.v1.tokenizer_service_pb2_grpc import TokenizerServiceServicer, add_TokenizerServiceServicer_to_server

Context = Any
Answer = Callable[[Any, Context], AsyncIterator[Any]]


def whole_answer(ids: list[int], *, resume_token: bytes = b"") -> list[GenerationEvent]:
    """The events of an answer with these tokens, one delta each; texts are the ids in hexadecimal."""
    events = [GenerationEvent() for _ in range(len(ids) + 3)]
    for number, event in enumerate(events):
        event.event_number = number
    events[0].started.prompt.num_tokens = 1
    events[0].started.resume_token = resume_token
    for offset, token_id in enumerate(ids):
        delta = events[1 + offset].delta
        delta.token_offset, delta.num_tokens, delta.text = offset, 1, f"{token_id:x}"
        delta.token_ids.append(token_id)
        delta.last = offset == len(ids) - 1
    events[-2].sequence_finished.num_tokens = len(ids)
    events[-2].sequence_finished.finish.reason = FINISH_REASON_MAX_TOKENS
    events[-1].finished.usage.completion_tokens = len(ids)
    return events


def says(events: list[GenerationEvent], *, then: Callable[[Context], Awaitable[None]] | None = None) -> Answer:
    """Send `events`, then fail with what `then` does."""

    async def answer(request: Any, context: Context) -> AsyncIterator[GenerationEvent]:
        for event in events:
            yield event
        if then is not None:
            await then(context)

    return answer


def held_after(ids: list[int]) -> Answer:
    """Send these tokens, and never end."""

    async def answer(request: Any, context: Context) -> AsyncIterator[GenerationEvent]:
        for event in whole_answer([*ids, 0])[: 1 + len(ids)]:
            yield event
        await asyncio.Event().wait()

    return answer


def fails(
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
    *,
    reason: str = "",
    retry_seconds: float | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> Callable[[Context], Awaitable[None]]:
    """End the call with a status; `reason` and `retry_seconds` go into its details."""

    async def fail(context: Context) -> None:
        status = status_pb2.Status(code=code.value[0], message="as told")
        if reason:
            status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="aengine"))
        if retry_seconds is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(round(retry_seconds * 1000))
            status.details.add().Pack(retry)
        details = rpc_status.to_status(status)
        await context.abort(code, details.details, (*(details.trailing_metadata or ()), *metadata))

    return fail


class ScriptedServer(GenerationServiceServicer, ModelServiceServicer, EngineServiceServicer, TokenizerServiceServicer):
    """`answers` are those of StreamGenerate, ResumeGenerate and Session, in the order of the calls; a session's gets the iterator of its
    requests. `model`: more about the model. A chat is rendered as the number of its messages, a text tokenized as its length."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.calls: list[Any] = []  # requests of all methods
        self.metadata: list[dict[str, Any]] = []
        self.left = asyncio.Event()  # a client left a call before its end
        self.health = health.aio.HealthServicer()
        self.address = ""
        self.model = Model()

    async def StreamGenerate(self, request: Any, context: Context) -> AsyncIterator[StreamGenerateResponse]:
        async for event in self._answer(request, context):
            yield StreamGenerateResponse(event=event)

    async def ResumeGenerate(self, request: Any, context: Context) -> AsyncIterator[ResumeGenerateResponse]:
        async for event in self._answer(request, context):
            yield ResumeGenerateResponse(event=event)

    async def Session(self, requests: Any, context: Context) -> AsyncIterator[SessionResponse]:
        async for response in self._answer(requests, context):
            yield response

    async def CancelRequests(self, request: Any, context: Context) -> CancelRequestsResponse:
        self.calls.append(request)
        return CancelRequestsResponse(cancelled_request_ids=request.request_ids)

    async def GetModel(self, request: Any, context: Context) -> GetModelResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        groups = [LayerGroup(num_layers=5, window=128), LayerGroup(num_layers=1)]
        model = Model(
            name="scripted", architecture="NewForCausalLM", family="new", implementation="native", executor="cpu", dtype="bfloat16"
        )
        model.MergeFrom(
            Model(max_model_len=100, vocab_size=100, eos_token_ids=[7], num_parameters=3_000_000_000, num_active_parameters=1000)
        )
        model.MergeFrom(Model(kv_bytes_per_token=2048, state_bytes=1024, layer_groups=groups))
        model.MergeFrom(self.model)
        return GetModelResponse(model=model)

    async def RenderChat(self, request: Any, context: Context) -> RenderChatResponse:
        self.calls.append(request)
        return RenderChatResponse(text=str(len(request.chat.messages)))

    async def Tokenize(self, request: Any, context: Context) -> TokenizeResponse:
        return TokenizeResponse(token_ids=[len(request.text)])

    async def GetLoad(self, request: Any, context: Context) -> GetLoadResponse:
        load = Load(completion_tokens=10, running=2, waiting=3, parked=4, pages_used=5, pages_total=6)
        load.drafts.add(drafter="draft", steps=4, drafted=7, accepted=6)
        return GetLoadResponse(load=load)

    async def _answer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        self.calls.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            async for event in self.answers.pop(0)(request, context):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise


@asynccontextmanager
async def scripted(
    *answers: Answer,
    serving: bool = True,
    credentials: grpc.ServerCredentials | None = None,
    address: str = "127.0.0.1:0",
    admin: AdminServiceServicer | None = None,
) -> AsyncIterator[ScriptedServer]:
    script = ScriptedServer(*answers)
    server = aio.server(options=(("grpc.so_reuseport", 0),))
    add_GenerationServiceServicer_to_server(script, server)
    add_ModelServiceServicer_to_server(script, server)
    add_EngineServiceServicer_to_server(script, server)
    add_TokenizerServiceServicer_to_server(script, server)
    health_pb2_grpc.add_HealthServicer_to_server(script.health, server)
    if admin is not None:
        add_AdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    script.address = f"127.0.0.1:{port}"
    await set_serving(script, serving)
    await server.start()
    try:
        yield script
    finally:
        await server.stop(None)


async def set_serving(script: ScriptedServer, serving: bool) -> None:
    status = health_pb2.HealthCheckResponse
    await script.health.set("", status.SERVING if serving else status.NOT_SERVING)
