"""Below the messages: frames, sizes, encodings, half-closed calls, pings, and the end of connections and of the server."""

from __future__ import annotations

import asyncio
import gzip
import signal
from collections.abc import Iterable

import grpc
import pytest
from fake_engine import FakeEngine, tokens
from grpc import aio
from grpc_harness import Serving, events_of, failure_of, serving, stream_request, text_spec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hang_guard import HANG_SECONDS
from oracle_engine import until
from raw_h2 import GENERATION, framed, raw_connection
from server_process import server_process
from slow_cases import slow_but

from aengine.server.config.options import ServerConfig
from aengine.v1.generation_pb2 import FINISH_REASON_MAX_TOKENS
from aengine.v1.generation_service_pb2 import GenerateRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.anyio

MAX_MESSAGE_BYTES = ServerConfig().max_message_bytes
STREAM = GENERATION + "StreamGenerate"
GOOD = framed(stream_request())
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


async def check_alive(serve: Serving, engine: FakeEngine) -> None:
    """The server answers as ever, and nothing is left of what came before."""
    health = health_pb2_grpc.HealthStub(serve.channel)
    status = (await health.Check(health_pb2.HealthCheckRequest())).status
    assert status == health_pb2.HealthCheckResponse.SERVING
    engine.script = tokens("a", "b")
    assert len(await events_of(serve.generation.StreamGenerate(stream_request()))) == 5
    await until(lambda: not engine.streams and serve.server.in_flight == 0)


OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 0, 3, 8, 12, 13, 14
ENHANCE_YOUR_CALM = 11  # of HTTP/2
GZIP = [("grpc-encoding", "gzip")]


@pytest.mark.parametrize("kind", slow_but(["StreamGenerate"], ["StreamGenerate", "Generate"]))
@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (GOOD, [], OK),
        (GOOD + b"\0\0", [], OK),
        (framed(gzip.compress(stream_request().SerializeToString()), compressed=True), GZIP, OK),
        (framed(stream_request(), compressed=True), [], INTERNAL),  # the flag, but no encoding
        (framed(b"neither", compressed=True), GZIP, INTERNAL),
        (framed(stream_request(), compressed=True), [("grpc-encoding", "snappy")], INTERNAL),
        (framed(b"\xff" * 20), [], INVALID_ARGUMENT),
        (framed(b"\x0a\x04\x12\x02\x0a\xff"), [], INVALID_ARGUMENT),  # a text that is not UTF-8
        (framed(b"\x0a\x7f\x12"), [], INVALID_ARGUMENT),  # longer than it is
        (None, [], INVALID_ARGUMENT),
        (b"", [], INVALID_ARGUMENT),
        (GOOD[:3], [], INVALID_ARGUMENT),
        (GOOD[:-1], [], INVALID_ARGUMENT),
        (b"\0\xff\xff\xff\xff" + b"x" * 100, [], RESOURCE_EXHAUSTED),
        (b"\0" + (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big") + b"x" * 100, [], RESOURCE_EXHAUSTED),
        (GOOD, [("grpc-timeout", "soon")], INTERNAL),
    ],
    ids=[
        "good", "more than a message", "compressed", "compressed without encoding", "not what its encoding says", "unknown encoding",
        "bad varint", "bad text", "bad length", "no body", "empty body", "part of a prefix", "part of a message", "4 GiB", "too long",
        "bad timeout",
    ],
)  # fmt: skip
async def test_what_is_sent_badly_gets_a_status(
    engine: FakeEngine, kind: str, body: bytes | None, headers: Iterable[tuple[str, str]], status: int
) -> None:
    engine.script = tokens("a", "b")
    async with serving(engine) as serve:
        async with raw_connection(serve.server.address) as connection:
            call = await connection.call(GENERATION + kind, body, headers=headers)
            await call.wait_end()
            assert call.status == status
            assert not connection.closed.is_set()
            assert (await (await connection.call(STREAM, GOOD)).events())[-1].HasField("finished")
        await check_alive(serve, engine)


@pytest.mark.parametrize("path", [GENERATION + "Nothing", "/aengine.v1.Nothing/Generate", "/", "nothing"])
async def test_an_unknown_method(engine: FakeEngine, path: str) -> None:
    async with serving(engine) as serve:
        async with raw_connection(serve.server.address) as connection:
            call = await connection.call(path, GOOD)
            await call.wait_end()
            assert call.status == UNIMPLEMENTED
        await check_alive(serve, engine)


async def test_a_get_is_no_call(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        async with raw_connection(serve.server.address) as connection:
            call = await connection.call(STREAM, GOOD, replaced=[(":method", "GET")])
            await call.wait_end()
            assert call.reset_code is not None or call.headers.get(":status") != "200" or call.status not in (None, OK)
        assert engine.submitted.empty()
        await check_alive(serve, engine)


class TestSizes:
    @pytest.mark.parametrize("size", [4 * 1024 * 1024 + 1, MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + 1])
    async def test_of_requests(self, engine: FakeEngine, size: int) -> None:
        """Above what gRPC takes by default, and to the byte."""
        engine.script = tokens("a")
        request = GenerateRequest(spec=text_spec("x" * size))
        request.spec.prompt.text = "x" * (2 * size - request.ByteSize())
        assert request.ByteSize() == size
        async with serving(engine) as serve:
            async with aio.insecure_channel(serve.server.address, options=UNLIMITED) as channel:
                call = GenerationServiceStub(channel).Generate(request)
                if size <= MAX_MESSAGE_BYTES:
                    assert (await call).sequences[0].text == "a"
                    assert engine.submitted.get_nowait().call["prompt"] == request.spec.prompt.text
                else:
                    with pytest.raises(aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert engine.submitted.empty()
            await check_alive(serve, engine)

    @pytest.mark.parametrize("unary", [False, True])
    @pytest.mark.parametrize("size", [5 * 1024 * 1024, MAX_MESSAGE_BYTES])
    async def test_of_answers(self, engine: FakeEngine, size: int, unary: bool) -> None:
        engine.script = tokens("x" * size, "b")
        async with serving(engine) as serve:
            async with aio.insecure_channel(serve.server.address, options=UNLIMITED) as channel:
                stub = GenerationServiceStub(channel)
                if unary:
                    answer = asyncio.ensure_future(stub.Generate(GenerateRequest(spec=text_spec())))
                else:
                    answer = asyncio.ensure_future(events_of(stub.StreamGenerate(stream_request())))
                if size < MAX_MESSAGE_BYTES:
                    response = await answer
                    text = response.sequences[0].text if unary else "".join(event.delta.text for event in response)
                    assert len(text) == size + 1
                else:  # with what is around it, it is longer than that
                    with pytest.raises(aio.AioRpcError) as caught:
                        await answer
                    failure = failure_of(caught.value)
                    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ANSWER_TOO_LARGE")
            await check_alive(serve, engine)

    async def test_of_metadata(self, engine: FakeEngine) -> None:
        engine.script = tokens("a")
        async with serving(engine) as serve:
            async with raw_connection(serve.server.address) as connection:
                await connection.ping()  # the server's limits are known once its settings are
                for size, status in ((8 * 1024, OK), (64 * 1024, RESOURCE_EXHAUSTED), (1024, OK)):
                    pieces = [(f"x-{i}", "y" * 1024) for i in range(size // 1024)]
                    call = await connection.call(STREAM, GOOD, headers=pieces)
                    await call.wait_end()
                    assert call.status == status
                assert not connection.closed.is_set()
            assert engine.submitted.qsize() == 2
            await check_alive(serve, engine)


class TestHalfClosed:
    @pytest.mark.parametrize("kind", ["StreamGenerate", "Generate"])
    async def test_an_open_half_of_the_client_is_no_hindrance(self, engine: FakeEngine, kind: str) -> None:
        """One message is all there is to say, whether or not the client says so."""
        engine.script = tokens("a", "b")
        async with serving(engine) as serve:
            async with raw_connection(serve.server.address) as connection:
                call = await connection.call(GENERATION + kind, GOOD, end=False)
                await call.wait_end()
                assert call.status == OK
            await check_alive(serve, engine)

    async def test_a_message_in_many_pieces(self, engine: FakeEngine) -> None:
        engine.script = tokens("a", "b")
        async with serving(engine) as serve, raw_connection(serve.server.address) as connection:
            call = await connection.call(STREAM, end=False)
            for i, byte in enumerate(GOOD):
                await call.send(bytes([byte]), end=i == len(GOOD) - 1)
            assert len(await call.events()) == 5

    @pytest.mark.parametrize("body", [None, GOOD[:-1]], ids=["nothing", "part of a message"])
    async def test_a_call_without_its_message_holds_up_nothing(self, engine: FakeEngine, body: bytes | None) -> None:
        async with serving(engine) as serve, raw_connection(serve.server.address) as connection:
            call = await connection.call(STREAM, body, end=False)
            await connection.ping()
            await check_alive(serve, engine)
            assert not call.ended
            assert await serve.server.drain(HANG_SECONDS) is True
            await serve.server.stop()
            await connection.closed.wait()
            assert call.ended


class TestPings:
    """During a call in which nothing is sent for long; the interval is scaled down."""

    async def test_those_that_keep_the_interval_are_welcome(self, engine: FakeEngine) -> None:
        async with serving(engine, min_ping_interval=0.02) as serve, raw_connection(serve.server.address) as connection:
            call = await connection.call(STREAM, GOOD)
            stream = await engine.submitted.get()
            for _ in range(10):
                await connection.ping()
                await asyncio.sleep(0.025)
            assert (connection.num_pongs, connection.goaway) == (10, None)
            stream.push(tokens("a"))
            assert (await call.events())[-1].HasField("finished")

    async def test_those_that_do_not_end_the_connection(self, engine: FakeEngine) -> None:
        async with serving(engine, min_ping_interval=60.0) as serve:
            async with raw_connection(serve.server.address) as connection:
                call = await connection.call(STREAM, GOOD)
                stream = await engine.submitted.get()
                for _ in range(20):
                    await connection.ping()
                assert connection.closed.is_set()
                assert connection.goaway == ENHANCE_YOUR_CALM
                assert call.ended
                await stream.closed.wait()
            await check_alive(serve, engine)

    async def test_all_are_welcome_without_strikes(self, engine: FakeEngine) -> None:
        async with serving(engine, max_ping_strikes=0) as serve, raw_connection(serve.server.address) as connection:
            for _ in range(50):
                await connection.ping()
            assert (connection.num_pongs, connection.goaway) == (50, None)

    async def test_a_client_that_does_not_answer_them_is_dead(self, engine: FakeEngine) -> None:
        """Its host is gone without a word: its request ends all the same."""
        async with serving(engine, keepalive_time=0.05, keepalive_timeout=0.5) as serve:
            async with raw_connection(serve.server.address) as connection:
                await connection.call(STREAM, GOOD)
                stream = await engine.submitted.get()
                await connection.fall_silent()
                await stream.closed.wait()
            await check_alive(serve, engine)


class TestEnds:
    async def test_a_client_that_goes_away_gently_gets_what_it_asked_for(self, engine: FakeEngine) -> None:
        """GOAWAY says that it will ask for nothing more."""
        async with serving(engine) as serve:
            async with raw_connection(serve.server.address) as connection:
                call = await connection.call(STREAM, GOOD)
                stream = await engine.submitted.get()
                await call.event()
                await connection.write(b"\0\0\x08\x07\0\0\0\0\0" + bytes(8))
                await connection.ping()
                stream.push(tokens("a", "b"))
                assert [event.delta.text for event in await call.events() if event.HasField("delta")] == ["a", "b"]
                assert call.status == OK
            await check_alive(serve, engine)

    async def test_a_drain_lets_streams_end_and_then_says_goodbye(self, engine: FakeEngine) -> None:
        async with serving(engine) as serve, raw_connection(serve.server.address) as connection:
            call = await connection.call(STREAM, GOOD)
            stream = await engine.submitted.get()
            await call.event()
            draining = asyncio.ensure_future(serve.server.drain(HANG_SECONDS))
            await asyncio.sleep(0)
            refused = await connection.call(STREAM, GOOD)
            await refused.wait_end()
            assert refused.status == UNAVAILABLE
            assert "grpc-retry-pushback-ms" in refused.headers
            stream.push(tokens("a"))
            assert (await call.events())[-1].HasField("finished")
            assert call.status == OK
            assert await draining is True
            await serve.server.stop()
            await connection.closed.wait()
            assert connection.goaway == 0

    @pytest.mark.quick_cases(4)
    @pytest.mark.parametrize("attempt", range(8))
    async def test_a_server_that_stops_ends_its_streams_with_a_status(self, engine: FakeEngine, attempt: int) -> None:
        """Also those that it sends the headers of at that moment."""
        async with serving(engine) as serve, raw_connection(serve.server.address) as connection:
            calls = [await connection.call(STREAM, framed(stream_request(request_id=f"r{i}"))) for i in range(5)]
            for _ in calls:
                await engine.submitted.get()
            await serve.server.stop()
            for call in calls:
                await call.wait_end()
                assert call.status == UNAVAILABLE
            await until(lambda: not engine.streams and serve.server.in_flight == 0)

    async def test_an_answer_that_is_complete_is_not_lost_with_its_connection(self, engine: FakeEngine) -> None:
        """The client closes as soon as it has the last event."""
        engine.script = tokens("a", "b")
        async with serving(engine) as serve:
            for _ in range(10):
                async with raw_connection(serve.server.address) as connection:
                    call = await connection.call(STREAM, GOOD)
                    events = [await call.event() for _ in range(5)]
                    assert events[-1] is not None
                    assert events[-1].HasField("finished")
            await check_alive(serve, engine)


@pytest.mark.slow
async def test_sigterm_under_load_loses_nothing_that_was_accepted() -> None:
    """Clients ask again and again: what was begun is whole, what comes too late is told so before its first event."""
    with server_process("--drain-seconds", "30") as server:
        async with aio.insecure_channel(server.address) as channel:
            stub = GenerationServiceStub(channel)
            num_whole = 0
            late: list[aio.AioRpcError] = []
            under_way = asyncio.Event()

            async def client(number: int) -> None:
                nonlocal num_whole
                request = stream_request()
                request.spec.stopping.ignore_eos = True
                request.spec.stopping.max_tokens = 20 + number
                while True:
                    events = []
                    try:
                        async for response in stub.StreamGenerate(request):
                            events.append(response.event)
                    except aio.AioRpcError as error:
                        assert not events, "it was accepted"
                        late.append(error)
                        return
                    assert events[-2].sequence_finished.finish.reason == FINISH_REASON_MAX_TOKENS
                    assert events[-1].finished.usage.completion_tokens == 20 + number
                    num_whole += 1
                    if num_whole >= 32:
                        under_way.set()

            clients = [asyncio.ensure_future(client(number)) for number in range(32)]
            await asyncio.wait_for(under_way.wait(), HANG_SECONDS)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(asyncio.gather(*clients), HANG_SECONDS)
            assert {error.code() for error in late} == {grpc.StatusCode.UNAVAILABLE}, {(error.code(), error.details()) for error in late}
        assert await asyncio.to_thread(server.end) == 0
        assert not any("still under way" in line for line in server.log)
