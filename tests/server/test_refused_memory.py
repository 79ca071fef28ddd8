"""Nothing of a refused call stays: neither objects until garbage is collected, nor memory."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress

import httpx2
import pytest
from fake_engine import FakeEngine
from grpc import aio
from grpc_harness import serving, stream_request
from hang_guard import HANG_SECONDS
from http_harness import serving_http
from oracle_engine import until
from server_process import server_process
from test_hostile import resident_bytes

from aengine.server.core import decoding
from aengine.server.core.calls_in_flight import Call, Caller
from aengine.server.core.decoding import Decoding
from aengine.server.core.errors import ServiceError
from aengine.v1.generation_service_pb2 import GenerateRequest

LARGE = 16 * 1024 * 1024 - 1024
CALLS = 48  # of the slow test
MAX_GROWTH = 100 << 20


@pytest.fixture
def kept() -> Iterator[Callable[[], list[str]]]:
    """What of the server garbage collection finds since the test has begun."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):  # compiles a template for an engine of a test before
            thread.join()
    gc.collect()
    before = set(map(id, gc.get_objects()))  # which tests before have left, and may let go meanwhile
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def found() -> list[str]:
        gc.collect()
        names = []
        for one in gc.garbage:
            if id(one) in before:
                continue
            if isinstance(one, types.FrameType) and "aengine/server" in one.f_code.co_filename:
                names.append(f"{one.f_code.co_filename}:{one.f_lineno}")
            elif type(one).__module__.startswith("aengine") and not isinstance(
                one, (type, Call, Caller)
            ):  # which gRPC keeps, without a message
                names.append(repr(type(one)))
        return names

    try:
        yield found
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


TEXT = "word " * 40_000
BODIES: list[bytes] = [
    *(
        json.dumps(body).encode()
        for body in ({"prompt": TEXT, "temperature": 300}, {"prompt": TEXT, "model": "x"}, {"prompt": {"a": TEXT}})
    ),
    json.dumps({"prompt": [7] * 600_000}).encode(),
    json.dumps({"messages": [{"role": "user", "content": TEXT}, 5], "input": 5, "prompt": 5, "max_tokens": 5}).encode(),
    b'{"prompt":' + b"[" * 100_000,
    b'{"prompt":' + b"[" * 10_000,
    json.dumps({"prompt": TEXT}).encode()[:-1],
    json.dumps({"prompt": TEXT}).encode() + b"\xff",
]


@pytest.mark.anyio
async def test_no_object_of_a_refused_body_stays(kept: Callable[[], list[str]]) -> None:
    engine = FakeEngine()
    async with serving_http(engine) as serve:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"):
            for body in BODIES:
                response = await serve.client.post(path, content=body)
                assert response.status_code in (400, 404), response.text
        await until(lambda: not len(serve.server.core.calls) and not serve.server.core.decoding.held_bytes)
        assert kept() == []


@pytest.mark.slow
@pytest.mark.anyio
async def test_no_object_of_a_refused_message_stays(kept: Callable[[], list[str]]) -> None:
    requests = [stream_request(TEXT, model="x"), stream_request(TEXT), stream_request("")]
    requests[1].spec.sampling.temperature = 300
    raws = [request.SerializeToString() for request in requests] + [b"\xff" * 100_000]
    async with serving(FakeEngine()) as serve:
        for method in ("Generate", "StreamGenerate", "BatchGenerate"):
            for raw in raws:
                with suppress(aio.AioRpcError):
                    await serve.channel.unary_stream(f"/aengine.v1.GenerationService/{method}")(raw).read()
        await until(lambda: not len(serve.server.core.calls) and not serve.server.core.decoding.held_bytes)
        assert kept() == []


def large_bodies() -> list[bytes]:
    text = b"word " * (LARGE // 5 - 100)
    return [
        b'{"prompt":[' + b"7," * 500_000 + b"7]}",
        b'{"prompt":[' + b"7," * (LARGE // 2 - 100) + b"7]}",
        b'{"prompt":"' + text + b'"}',
        b'{"temperature":300,"prompt":"' + text + b'"}',
        b'{"model":"x","prompt":"' + text + b'"}',
        b'{"prompt":' + b"[" * (LARGE - 100),
    ]


def large_messages() -> list[bytes]:
    text = "word " * (LARGE // 5 - 100)
    requests = [GenerateRequest() for _ in range(5)]
    requests[0].spec.prompt.token_ids.ids.extend([7] * (LARGE - 100))
    requests[1].spec.prompt.token_ids.ids.extend([7] * 4_000_000)
    for request in requests[2:]:
        request.spec.prompt.text = text
    requests[3].spec.sampling.temperature = 300
    requests[4].spec.model = "x"
    return [request.SerializeToString() for request in requests] + [b"\xff" * LARGE]


async def post_all(address: str, bodies: list[bytes], count: int) -> None:
    async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=None) as client:
        for index in range(count):
            response = await client.post("/v1/completions", content=bodies[index % len(bodies)])
            assert response.status_code in (400, 404), response.text


async def call_all(address: str, messages: list[bytes], count: int) -> None:
    async with aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        for index in range(count):
            with pytest.raises(aio.AioRpcError, match=r"INVALID_ARGUMENT|NOT_FOUND"):
                await channel.unary_unary("/aengine.v1.GenerationService/Generate")(messages[index % len(messages)])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_no_memory_of_refused_calls_stays() -> None:
    """Of either door, once every kind of refusal was there."""
    with server_process("--http-port", "0") as server:
        server.wait_for("aengine-serve listening on ")
        http_address = server.log[-1].partition("http://")[2].split()[0]
        ways: list[tuple[Callable[[str, list[bytes], int], Awaitable[None]], str, list[bytes]]] = [
            (post_all, http_address, large_bodies()),
            (call_all, server.address, large_messages()),
        ]
        for call, address, sent in ways:
            asyncio.run(call(address, sent, len(sent)))  # type: ignore[arg-type]
            before = resident_bytes(server)
            asyncio.run(call(address, sent, CALLS))  # type: ignore[arg-type]
            end = time.monotonic() + HANG_SECONDS
            while resident_bytes(server) - before > MAX_GROWTH and time.monotonic() < end:
                time.sleep(0.1)  # it is given back a little later
            assert resident_bytes(server) - before <= MAX_GROWTH


@pytest.mark.anyio
async def test_large_messages_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = Decoding(300_000, 200_000)
    first = await bounded.take_room(150_000, "a")
    assert await bounded.take_room(1000, "a") is await bounded.take_room(1000, "b"), "small ones do not count"
    own = asyncio.create_task(bounded.take_room(150_000, "a"))  # more than one caller may have
    other = await asyncio.wait_for(bounded.take_room(150_000, "b"), HANG_SECONDS)
    assert bounded.held_bytes == 300_000
    third = asyncio.create_task(bounded.take_room(100_000, "c"))
    await asyncio.sleep(0)
    assert not own.done()
    assert not third.done()
    other()
    (await third)()
    first()
    (await own)()
    huge = await bounded.take_room(10**9, "d")  # alone
    monkeypatch.setattr(decoding, "WAIT_SECONDS", 0.01)
    with pytest.raises(ServiceError, match="no answer yet"):
        await bounded.take_room(100_000, "e")
    cancelled = asyncio.create_task(bounded.take_room(100_000, "f"))
    await asyncio.sleep(0)
    cancelled.cancel()
    huge()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert bounded.held_bytes == 0
    bounded.close()
