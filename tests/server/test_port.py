"""How calls are accepted: floods, limits, and what nobody has a method for. What one client does there is nothing to the others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import AsyncExitStack

import grpc
import pytest
import v1_schema
from fake_engine import FakeEngine, tokens
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_harness import Serving, events_of, serving, stream_request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from hang_guard import HANG_SECONDS
from oracle_engine import until
from raw_h2 import GENERATION, RawCall, framed, raw_connection
from records_seen import Seen, watch

from aengine.server.grpc.services.engine_info import NEW, OLD
from aengine.server.telemetry.metrics import FIELDS
from aengine.v1.model_service_pb2 import GetModelRequest

pytestmark = pytest.mark.anyio

OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED = 0, 3, 8, 12
GET_MODEL = "/aengine.v1.ModelService/GetModel"
HEALTH = "/grpc.health.v1.Health/"


def reason_of(call: RawCall) -> tuple[str, bool]:
    """The reason of ErrorInfo, and whether the client may try again."""
    packed = status_pb2.Status.FromString(call.details)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert packed.details[0].Unpack(info)
    return info.reason, any(detail.Unpack(retry) for detail in packed.details)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """All that is logged beside the lines of calls."""
    return [record.getMessage() for record in caplog.records if not hasattr(record, FIELDS) and record.levelno >= logging.WARNING]


async def flood(serve: Serving, stack: AsyncExitStack, method: str, body: bytes, *, connections: int, each: int) -> list[RawCall]:
    """Begin so many calls, as good as at once: all of a connection's leave with one write."""
    calls = []
    for _ in range(connections):
        connection = await stack.enter_async_context(raw_connection(serve.server.address))
        calls += [await connection.call(method, body, flush=False) for _ in range(each)]
        await connection.flush()
    return calls


async def ended(calls: Iterable[RawCall]) -> Counter[int | None]:
    """How many ended with which status."""
    for call in calls:
        await call.wait_end()
    return Counter(call.status for call in calls)


@pytest.mark.slow
async def test_a_flood_of_calls_is_answered(engine: FakeEngine) -> None:
    """More than wait to be accepted by default, of which core would cancel some."""
    async with serving(engine) as serve, AsyncExitStack() as stack:
        calls = await flood(serve, stack, GET_MODEL, framed(b""), connections=2, each=1000)
        await asyncio.gather(*(serve.model.GetModel(GetModelRequest()) for _ in range(20)))
        assert await ended(calls) == {OK: 2000}


async def test_what_is_beyond_the_limit_is_refused_in_so_many_words(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()
    caplog.set_level(logging.INFO)
    async with serving(engine, max_calls=40) as serve, AsyncExitStack() as stack:
        watch(serve.server.core.observers, seen)
        bystander = serve.generation.StreamGenerate(stream_request(request_id="bystander"))
        stream = await engine.submitted.get()
        calls = await flood(serve, stack, GENERATION + "Generate", framed(stream_request()), connections=2, each=400)
        await until(lambda: sum(call.ended for call in calls) == 800 - 39)
        refused = [call for call in calls if call.ended]
        assert await ended(refused) == {RESOURCE_EXHAUSTED: 800 - 39}
        assert {reason_of(call) for call in refused} == {("TOO_MANY_CALLS", True)}
        assert all("40 calls are under way" in call.headers["grpc-message"] for call in refused)
        assert {(record.code, record.reason) for record in seen.calls} == {("RESOURCE_EXHAUSTED", "TOO_MANY_CALLS")}
        health = health_pb2_grpc.HealthStub(serve.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == HealthCheckResponse.SERVING
        for call in (call for call in calls if not call.ended):
            await call.reset()
        stream.push(tokens("a", "b"))
        assert len(await events_of(bystander)) == 5
        await until(lambda: not engine.streams)
        await serve.model.GetModel(GetModelRequest())  # there is room again
    assert len([record for record in caplog.records if hasattr(record, FIELDS)]) == 802
    assert not complaints(caplog)


async def test_health_watchers_are_counted_apart(engine: FakeEngine) -> None:
    async with serving(engine, max_calls=3) as serve, raw_connection(serve.server.address) as connection:
        watchers = [await connection.call(HEALTH + "Watch", framed(b"")) for _ in range(3)]
        for watcher in watchers:
            assert (await watcher.message(HealthCheckResponse)) == HealthCheckResponse(status=HealthCheckResponse.SERVING)
        refused = await connection.call(HEALTH + "Watch", framed(b""))
        await refused.wait_end()
        assert (refused.status, reason_of(refused)) == (RESOURCE_EXHAUSTED, ("TOO_MANY_CALLS", True))
        await serve.model.GetModel(GetModelRequest())


async def test_a_health_watcher_that_does_not_read_holds_up_nobody(engine: FakeEngine) -> None:
    """Neither other watchers nor the drain."""
    async with serving(engine) as serve, AsyncExitStack() as stack:
        closed, normal = [await stack.enter_async_context(raw_connection(serve.server.address, window=window)) for window in (0, 65535)]
        await closed.call(HEALTH + "Watch", framed(b""), greedy=False)
        await closed.ping()
        watcher = await normal.call(HEALTH + "Watch", framed(b""))
        assert await watcher.message(HealthCheckResponse) == HealthCheckResponse(status=HealthCheckResponse.SERVING)
        await serve.server.set_serving(False)
        assert await watcher.message(HealthCheckResponse) == HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
        assert await asyncio.wait_for(serve.server.drain(), HANG_SECONDS) is True


async def test_another_release_of_grpcio_serves_with_its_public_server(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aengine.server.grpc.door.KNOWN_RELEASES", "0.")
    async with serving(engine) as serve, raw_connection(serve.server.address) as connection:
        call = serve.generation.StreamGenerate(stream_request())
        (await engine.submitted.get()).push(tokens("a", "b"))
        assert len(await events_of(call)) == 5
        with pytest.raises(aio.AioRpcError) as caught:
            await serve.generation.Generate(stream_request(""))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        leaving = serve.generation.StreamGenerate(stream_request())
        await engine.submitted.get()
        leaving.cancel()
        await until(lambda: not engine.streams)
        unknown = await connection.call("/nothing", framed(b""))
        await unknown.wait_end()
        assert unknown.status == UNIMPLEMENTED
    (line,) = complaints(caplog)
    assert f"grpcio {grpc.__version__} is not one of 0.*" in line


PATHS = [
    b"/\xff\xfe",
    b"/aengine.v1.GenerationService/Generate\xff",
    b"/\x00",
    b"/a\n\tb",
    b"nothing",
    b"/grpc.health.v1.Health/Chec",
    b"/a/b",
]


@pytest.mark.parametrize("path", PATHS, ids=ascii)
async def test_a_path_that_is_no_method_ends_its_call_alone(engine: FakeEngine, path: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """One that is not UTF-8 would end grpc.aio's server."""
    caplog.set_level(logging.INFO)
    async with serving(engine) as serve, raw_connection(serve.server.address) as connection:
        bystander = serve.generation.StreamGenerate(stream_request())
        stream = await engine.submitted.get()
        for _ in range(2):
            call = await connection.call(path, framed(stream_request()))
            await call.wait_end()
            assert (call.status, reason_of(call)) == (UNIMPLEMENTED, ("METHOD_NOT_FOUND", False))
        stream.push(tokens("a"))
        assert len(await events_of(bystander)) == 4
    lines = [getattr(record, FIELDS) for record in caplog.records if hasattr(record, FIELDS)]
    assert [line["method"] for line in lines] == ["none", "none", GENERATION + "StreamGenerate"]
    assert not complaints(caplog)


def reflection(version: str) -> str:
    return f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"


METHODS = [*(HEALTH + name for name in ("Check", "List", "Watch")), reflection(OLD), reflection(NEW)]
BODIES = {"bad tag": b"\xff\xff", "bad length": b"\x0a\x7f", "no message": None}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_what_is_no_message_is_an_invalid_argument_of_every_method(
    engine: FakeEngine, body: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(engine) as serve, raw_connection(serve.server.address) as connection:
        for method in [*METHODS, *(f"/{name}" for name in v1_schema.methods())]:
            call = await connection.call(method, None if body is None else framed(body))
            await call.wait_end()
            if method.startswith("/aengine.v1.AdminService/"):
                assert reason_of(call) == ("ADMIN_ONLY", False)
            elif body is None and method in (reflection(OLD), reflection(NEW)):
                assert call.status == OK  # a stream of no requests
            else:
                assert (method, call.status, reason_of(call)) == (method, INVALID_ARGUMENT, ("INVALID_FIELD", False))
    assert not complaints(caplog)


@pytest.mark.parametrize(("entries", "size"), [(1, 20_000), (100, 1000), (3000, 1)])
async def test_metadata_over_the_limit_are_refused_before_settings_are_known(engine: FakeEngine, entries: int, size: int) -> None:
    """Core heeds the limit only of clients that have acknowledged its settings."""
    async with serving(engine) as serve, raw_connection(serve.server.address, ack_settings=False) as connection:
        call = await connection.call(GENERATION + "StreamGenerate", framed(stream_request()), headers=[("x-much", "y" * size)] * entries)
        await call.wait_end()
        assert call.status == RESOURCE_EXHAUSTED
        if "grpc-status-details-bin" in call.headers:  # core refuses some, the more the larger they are
            assert reason_of(call) == ("METADATA_TOO_LARGE", False)
        assert engine.submitted.empty()
        engine.script = tokens("a")
        fits = await connection.call(GENERATION + "StreamGenerate", framed(stream_request()), headers=[("x-fits", "y" * 15_000)])
        assert len(await fits.events()) == 4


async def test_a_reset_of_every_call_leaves_room(engine: FakeEngine) -> None:
    async with serving(engine, max_calls=10) as serve, raw_connection(serve.server.address) as connection:
        for _ in range(5):
            calls = [await connection.call(GENERATION + "Generate", framed(stream_request())) for _ in range(10)]
            await until(lambda: len(engine.streams) == 10)
            for call in calls:
                await call.reset()
            await until(lambda: not engine.streams and len(serve.server.core.calls) == 0)
        engine.script = tokens("a")
        assert len(await events_of(serve.generation.StreamGenerate(stream_request()))) == 4
