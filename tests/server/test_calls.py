"""What holds for every call, whatever its kind: its ids, its record, how it fails, and what it may send."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine, tokens
from google.protobuf.wrappers_pb2 import StringValue
from grpc import aio
from grpc_harness import events_of, failure_of, serving, stream_request, text_spec
from hang_guard import HANG_SECONDS, growing
from oracle_engine import until
from raw_h2 import GENERATION, framed, raw_connection
from records_seen import Seen, watch

from aengine.api.errors import InvalidRequestError, QueueFullError
from aengine.api.outputs import Token
from aengine.server.config.options import ServerConfig
from aengine.server.core.auth import Authenticator
from aengine.server.core.calls_in_flight import CURRENT_CALL, CallsInFlight, Observers
from aengine.server.core.core import CallLife
from aengine.server.core.decoding import Decoding
from aengine.server.core.errors import ServiceError
from aengine.server.grpc import interceptor
from aengine.server.grpc.door import make_server
from aengine.server.grpc.interceptor import CallInterceptor
from aengine.v1.generation_service_pb2 import GenerateRequest
from aengine.v1.model_service_pb2 import GetModelRequest

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
STREAM = GENERATION + "StreamGenerate"


class Service:
    """All four kinds of methods. They say what they hear; "bytes" is answered in bytes, "fail" with an error, "wait" never."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.waiting = asyncio.Event()

    async def unary(self, request: StringValue, context: object) -> Any:
        return await self._answer(request)

    async def many(self, request: StringValue, context: object) -> AsyncIterator[Any]:
        try:
            yield StringValue(value="first")
            yield await self._answer(request)
        finally:
            self.closed.set()

    async def gather(self, requests: AsyncIterator[StringValue], context: object) -> Any:
        return StringValue(value="".join([(await self._answer(request)).value async for request in requests]))

    async def chat(self, requests: AsyncIterator[StringValue], context: object) -> AsyncIterator[Any]:
        try:
            async for request in requests:
                yield await self._answer(request)
        finally:
            self.closed.set()

    async def _answer(self, request: StringValue) -> Any:
        match request.value:
            case "bytes":
                return StringValue(value="BYTES").SerializeToString()
            case "fail":
                raise QueueFullError("no room")
            case "wait":
                self.waiting.set()
                await asyncio.Event().wait()
        return StringValue(value=request.value.upper())

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        coding: dict[str, Any] = {
            "request_deserializer": StringValue.FromString,
            "response_serializer": StringValue.SerializeToString,
        }
        return {
            "unary": grpc.unary_unary_rpc_method_handler(self.unary, **coding),
            "many": grpc.unary_stream_rpc_method_handler(self.many, **coding),
            "gather": grpc.stream_unary_rpc_method_handler(self.gather, **coding),
            "chat": grpc.stream_stream_rpc_method_handler(self.chat, **coding),
        }


class Client:
    def __init__(self, channel: aio.Channel, service: Service, seen: Seen, under_way: CallsInFlight) -> None:
        self.service = service
        self.seen = seen
        self.under_way = under_way
        coding: dict[str, Any] = {
            "request_serializer": StringValue.SerializeToString,
            "response_deserializer": StringValue.FromString,
        }
        self._stubs = {
            "unary": channel.unary_unary("/aengine.test/unary", **coding),
            "many": channel.unary_stream("/aengine.test/many", **coding),
            "gather": channel.stream_unary("/aengine.test/gather", **coding),
            "chat": channel.stream_stream("/aengine.test/chat", **coding),
        }

    def call(self, kind: str, text: str, **options: Any) -> Any:
        request: Any = StringValue(value=text)
        return self._stubs[kind](iter([request]) if kind in ("gather", "chat") else request, **options)

    async def answer(self, kind: str, text: str, **options: Any) -> list[str]:
        call = self.call(kind, text, **options)
        if kind in ("unary", "gather"):
            return [(await call).value]
        return [response.value async for response in call]


@asynccontextmanager
async def client() -> AsyncIterator[Client]:
    config = ServerConfig()
    seen, observers, under_way, service = Seen(), Observers(), CallsInFlight(config.max_calls, config.stall_seconds), Service()
    watch(observers, seen)
    life = CallLife(Authenticator(config), under_way, observers, config.max_metadata_bytes)
    server = make_server((CallInterceptor(config, life, Decoding(1 << 28, 1 << 28)),), ())
    server.add_registered_method_handlers("aengine.test", service.handlers())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Client(channel, service, seen, under_way)
    finally:
        await server.stop(None)


async def code_of(call: Any) -> grpc.StatusCode:
    """Of a call to its end; what comes before it is read, since gRPC tells the status only then."""
    with suppress(aio.AioRpcError, asyncio.CancelledError):
        if isinstance(call, aio.UnaryStreamCall | aio.StreamStreamCall):
            async for _ in call:
                pass
    code: grpc.StatusCode = await call.code()
    return code


KINDS = {"unary": ["A"], "many": ["first", "A"], "gather": ["A"], "chat": ["A"]}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_is_recorded_before_the_client_has_its_end(kind: str) -> None:
    async with client() as asking:
        assert await asking.answer(kind, "a") == KINDS[kind]
        (record,) = asking.seen.calls
        assert (record.method, record.code, record.reason) == (f"/aengine.test/{kind}", "OK", "")
        assert record.messages_sent == len(KINDS[kind])
        assert record.seconds > 0
        assert record.peer.startswith("ipv4:127.0.0.1:")
        assert len(asking.under_way) == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_an_exception_is_a_status_and_is_recorded(kind: str) -> None:
    async with client() as asking:
        with pytest.raises(aio.AioRpcError) as caught:
            await asking.answer(kind, "fail", metadata=(("x-request-id", "mine"),))
        failure = failure_of(caught.value)
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert failure.metadata["grpc-retry-pushback-ms"] == "1000"
        assert failure.metadata["x-request-id"] == "mine"
        (record,) = asking.seen.calls
        assert (record.code, record.reason, record.request_id) == (failure.code.name, "QUEUE_FULL", "mine")
        assert asking.service.closed.is_set() == (kind in ("many", "chat"))


@pytest.mark.parametrize("kind", ["unary", "many", "chat"])
async def test_answers_may_be_serialised_already(kind: str) -> None:
    async with client() as asking:
        assert (await asking.answer(kind, "bytes"))[-1] == "BYTES"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_leaves_is_recorded_once(kind: str) -> None:
    async with client() as asking:
        call = asking.call(kind, "wait")
        await asking.service.waiting.wait()  # before, the end of a stream of requests could be what the server sees
        assert len(asking.under_way) == 1
        call.cancel()
        assert await code_of(call) is grpc.StatusCode.CANCELLED
        await until(lambda: asking.seen.calls)
        (record,) = asking.seen.calls
        assert (record.code, record.reason) == ("CANCELLED", "")
        assert len(asking.under_way) == 0
        if kind == "many":
            assert asking.service.closed.is_set()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_that_passes_is_recorded_as_one(kind: str) -> None:
    for timeout in growing(0.2):
        async with client() as asking:
            with pytest.raises(aio.AioRpcError) as caught:
                await asking.answer(kind, "wait", timeout=timeout)
            if not asking.service.waiting.is_set():
                continue  # gRPC gives INTERNAL where it has not begun to read by then
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda asking=asking: asking.seen.calls)
            (record,) = asking.seen.calls
            if record.code == "CANCELLED":
                continue  # the client, whose clock began earlier, took the call back before the server's had run out
            assert (record.code, record.reason) == ("DEADLINE_EXCEEDED", "")
            break


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_can_be_ended_from_outside(kind: str) -> None:
    async with client() as asking:
        call = asking.call(kind, "wait")
        failing = asyncio.ensure_future(code_of(call))
        await until(lambda: len(asking.under_way) == 1)
        await asking.under_way.end_all(ServiceError("DRAINING", "the end"), 20)
        assert await failing is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "the end"
        assert [record.reason for record in asking.seen.calls] == ["DRAINING"]


@pytest.mark.parametrize("kind", ["many", "chat"])
async def test_a_call_that_is_ended_while_its_headers_are_sent_is_told_why(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC takes no status in that moment."""
    send_headers = interceptor._send_headers

    async def ended_meanwhile(call: interceptor.Call, context: interceptor.Context) -> None:
        asyncio.get_running_loop().call_soon(call.end_with, ServiceError("DRAINING", "the end"))
        await send_headers(call, context)

    monkeypatch.setattr(interceptor, "_send_headers", ended_meanwhile)
    async with client() as asking:
        call = asking.call(kind, "a")
        assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "the end"
        assert [record.reason for record in asking.seen.calls] == ["DRAINING"]


async def test_a_request_id_is_the_clients_or_drawn_and_always_echoed(engine: FakeEngine) -> None:
    async with serving(engine) as serve:

        async def echoed(*given: str, model: str = "") -> str:
            call = serve.model.GetModel(GetModelRequest(model=model), metadata=tuple(("x-request-id", value) for value in given))
            return str(dict(await call.trailing_metadata())["x-request-id"])

        for good in ("a", "A-Z.0_9:x", "x" * 128):
            assert await echoed(good) == good
            assert await echoed(good, model="unknown") == good
        drawn = {await echoed(), await echoed("two words"), await echoed("x" * 129), await echoed("a/b"), await echoed("a", "b")}
        drawn.add(await echoed(model="unknown"))
        assert len(drawn) == 6
        assert all(uuid.UUID(value) for value in drawn)
        engine.script = tokens("a")
        call = serve.generation.StreamGenerate(stream_request(), metadata=(("x-request-id", "streamed"),))
        await events_of(call)
        assert dict(await call.trailing_metadata())["x-request-id"] == "streamed"
        for key in ("x-request-id", "grpc-status-details-bin"):
            assert key not in dict(await call.initial_metadata())


async def test_records_have_the_trace_of_the_call(engine: FakeEngine) -> None:
    seen = Seen()
    async with serving(engine) as serve:
        watch(serve.server.core.observers, seen)
        good = ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01")
        for metadata in ((good,), (("traceparent", "nonsense"),), ()):
            await serve.model.GetModel(GetModelRequest(), metadata=metadata)
    assert [record.trace_id for record in seen.calls] == [TRACE, None, None]


async def test_a_call_counts_the_tokens_of_its_generations(engine: FakeEngine) -> None:
    seen = Seen()
    async with serving(engine) as serve:
        watch(serve.server.core.observers, seen)
        engine.script = tokens("a", "b")
        await events_of(serve.generation.StreamGenerate(stream_request()))
        await serve.model.GetModel(GetModelRequest())
    assert [(record.prompt_tokens, record.completion_tokens) for record in seen.calls] == [(3, 2), (0, 0)]
    assert CURRENT_CALL.get() is None


async def test_an_observer_that_fails_disturbs_nothing(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def on_call_end(self, record: object) -> None:
            raise RuntimeError("broken")

        on_generation_end = on_call_end

    seen = Seen()
    async with serving(engine) as serve:
        watch(serve.server.core.observers, Broken())
        watch(serve.server.core.observers, seen)
        engine.script = tokens("a")
        assert len(await events_of(serve.generation.StreamGenerate(stream_request()))) == 4
    assert (len(seen.calls), len(seen.generations)) == (1, 1)
    assert caplog.text.count("an observer failed") == 2


async def test_health_is_not_recorded(engine: FakeEngine) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    seen = Seen()
    async with serving(engine) as serve:
        watch(serve.server.core.observers, seen)
        await health_pb2_grpc.HealthStub(serve.channel).Check(health_pb2.HealthCheckRequest())
    assert seen.calls == []


# ---- what does not fit -------------------------------------------------------------------------------------------------


async def test_metadata_over_the_limit_fails_its_call_alone(engine: FakeEngine) -> None:
    async with serving(engine, max_metadata_bytes=16 * 1024) as serve:
        await serve.model.GetModel(GetModelRequest(), metadata=(("x-fits", "x" * 15_000),))
        for size in (17_000, 19_000, 64 * 1024):
            call = serve.model.GetModel(GetModelRequest(), metadata=(("x-much", "x" * size),))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await serve.model.GetModel(GetModelRequest())


@pytest.mark.parametrize("method", ["Generate", "StreamGenerate"])
async def test_a_message_over_the_limit_fails_its_call_alone(engine: FakeEngine, method: str) -> None:
    engine.script = tokens("a")
    async with serving(engine, max_message_bytes=4096) as serve:
        for text, code in (("x" * 3900, grpc.StatusCode.OK), ("x" * 4100, grpc.StatusCode.RESOURCE_EXHAUSTED), ("x", grpc.StatusCode.OK)):
            request = GenerateRequest(spec=text_spec(text)) if method == "Generate" else stream_request(text)
            assert await code_of(getattr(serve.generation, method)(request)) is code


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\x7f"])
async def test_what_is_not_a_message_is_an_invalid_argument(engine: FakeEngine, body: bytes) -> None:
    seen = Seen()
    async with serving(engine) as serve, raw_connection(serve.server.address) as connection:
        watch(serve.server.core.observers, seen)
        for method in (GENERATION + "Generate", STREAM):
            call = await connection.call(method, framed(body))
            await call.wait_end()
            assert call.status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        call = await connection.call(STREAM)  # no message at all
        await call.wait_end()
        assert call.status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert [record.reason for record in seen.calls] == ["INVALID_FIELD"] * 3


async def test_a_stalled_reader_is_recorded_and_told(engine: FakeEngine) -> None:
    seen = Seen()
    engine.script = [Token(0, 10, "x" * 100), *tokens("y")]
    async with serving(engine, stall_seconds=0.2) as serve, raw_connection(serve.server.address, window=0) as connection:
        watch(serve.server.core.observers, seen)
        call = await connection.call(STREAM, framed(stream_request(request_id="r")), greedy=False)
        stream = await engine.submitted.get()
        await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)
        await call.open()
        await call.wait_end()
        assert call.status == grpc.StatusCode.ABORTED.value[0]
        assert re.search("has not read for 0.2 s", call.headers["grpc-message"])
    assert [(record.code, record.reason) for record in seen.calls] == [("ABORTED", "READER_STALLED")]


async def test_only_a_message_that_waits_counts_as_stalled() -> None:
    """Not one that was written since, and not a call that has nothing to say."""
    under_way = CallsInFlight(1, 10.0)
    async with client() as asking:
        call = asking.call("chat", "wait")
        await until(lambda: len(asking.under_way) == 1)
        (found,) = asking.under_way._calls
        under_way.add_call(found)
        under_way.check(0.0)
        under_way.check(100.0)
        assert found.error is None
        found.waits = "READER_STALLED"
        under_way.check(200.0)
        found.messages_sent += 1
        under_way.check(209.0)  # another message than the one before
        under_way.check(218.0)
        assert found.error is None
        under_way.check(219.0)
        assert found.error is not None
        assert await code_of(call) is grpc.StatusCode.ABORTED


def test_refusals_of_a_request_keep_their_kind_when_fields_are_renamed() -> None:
    error = InvalidRequestError.of("a", "is wrong")
    assert isinstance(error, InvalidRequestError)
    assert [violation.field for violation in error.moved(lambda name: f"spec.{name}").violations] == ["spec.a"]
