"""Who may call over HTTP, what bytes are requests, what an error looks like, and what is recorded: with real connections."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import re
import ssl
import weakref
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from certificates import make_certificates
from fake_engine import INFO, FakeEngine, tokens
from grpc import aio
from hang_guard import HANG_SECONDS
from http_harness import Serving, raw, request_bytes, serving_http
from oracle_engine import until
from records_seen import Seen, watch

from aengine.api.outputs import EngineStats
from aengine.server.core.core import BindError
from aengine.server.http import connection as connections
from aengine.server.http import http_exchange as exchanges
from aengine.v1.model_service_pb2 import GetModelRequest
from aengine.v1.model_service_pb2_grpc import ModelServiceStub

pytestmark = pytest.mark.anyio

COMPLETE = {"prompt": "Once"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tokens("a", "b"))


async def answer(serve: Serving, *sent: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what comes back for bytes; of the last response."""
    async with raw(serve) as (reader, writer):
        for part in sent:
            writer.write(part)
            await writer.drain()
        return await read_response(reader)


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(head[0].split()[1]), headers, body


def reason(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


async def test_requests_of_all_shapes(engine: FakeEngine) -> None:
    async with serving_http(engine) as serve:
        path = "/v1/completions"
        whole = request_bytes(path, COMPLETE)
        head, _, body = whole.partition(b"\r\n\r\n")
        assert (await answer(serve, *(bytes([byte]) for byte in whole)))[0] == 200, "byte by byte"
        chunked = request_bytes(path).replace(b"content-length: 0", b"transfer-encoding: chunked")
        assert (await answer(serve, chunked, b"5\r\n" + body[:5] + b"\r\n", b"%x\r\n" % len(body[5:]) + body[5:] + b"\r\n0\r\n\r\n"))[
            0
        ] == 200
        status, headers, _ = await answer(serve, whole.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (status, headers["connection"]) == (200, "close")
        async with raw(serve) as (reader, writer):  # pipelined
            writer.write(whole * 2 + request_bytes("/v1/models", verb="GET"))
            assert [(await read_response(reader))[0] for _ in range(3)] == [200] * 3
        async with raw(serve) as (reader, writer):
            writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await read_response(reader))[0] == 200
        response = await serve.client.head("/v1/models")
        assert (response.status_code, response.content, int(response.headers["content-length"]) > 9) == (200, b"", True)


async def read_refusal(serve: Serving, *sent: bytes) -> tuple[int, str]:
    status, _, body = await answer(serve, *sent)
    return status, reason(body)


async def test_what_is_no_request_is_refused(engine: FakeEngine) -> None:
    async with serving_http(engine, max_message_bytes=2000) as serve:
        path, large = "/v1/completions", request_bytes("/v1/completions", b"x" * 2001)
        assert await read_refusal(serve, b"hello\r\n\r\n") == (400, "invalid_field")
        assert await read_refusal(serve, b"\x16\x03\x01 TLS") == (400, "invalid_field")
        assert await read_refusal(serve, request_bytes("/nothing")) == (404, "method_not_found")
        status, headers, _ = await answer(serve, request_bytes(path, verb="GET"))
        assert (status, headers["allow"]) == (405, "POST")
        assert await read_refusal(serve, large) == (413, "invalid_field")
        chunks = request_bytes(path).replace(b"content-length: 0", b"transfer-encoding: chunked") + b"7d1\r\n" + b"x" * 2001 + b"\r\n"
        assert await read_refusal(serve, chunks) == (413, "invalid_field")
        status, headers, _ = await answer(serve, large[: large.index(b"\r\n\r\n")] + b"\r\nexpect: 100-continue\r\n\r\n")
        assert (status, headers["connection"]) == (413, "close")
        async with raw(serve) as (reader, writer):  # the rest of the body is dropped, and the connection goes on
            writer.write(large)
            assert (await read_response(reader))[0] == 413
            writer.write(request_bytes(path, COMPLETE))
            assert (await read_response(reader))[0] == 200
        async with raw(serve) as (reader, writer):  # but not for ever
            writer.write(request_bytes(path).replace(b"content-length: 0", b"content-length: 100000000"))
            assert (await read_response(reader))[0] == 413
            while not reader.at_eof() and reader.exception() is None:
                writer.write(b"x" * 65536)
                await asyncio.sleep(0)


async def test_headers_have_bounds(engine: FakeEngine) -> None:
    async with serving_http(engine, max_metadata_bytes=4096) as serve:
        assert await read_refusal(serve, request_bytes("/v1/models", b"", "x: " + "y" * 5000, verb="GET")) == (431, "metadata_too_large")
        endless = b"GET / HTTP/1.1\r\nx: " + b"y" * (connections.MAX_HELD_BYTES + 1)
        assert await read_refusal(serve, endless) == (431, "metadata_too_large")


async def test_few_requests_wait_for_the_one_before_them(engine: FakeEngine) -> None:
    async with serving_http(engine) as serve, raw(serve) as (reader, writer):
        writer.write(request_bytes("/v1/completions", COMPLETE) + request_bytes("/v1/models", verb="GET") * 1000)
        statuses = re.findall(rb"HTTP/1.1 (\d+)", await reader.read())
        assert statuses == [b"200"] * (1 + connections.MAX_PIPELINED) + [b"429"]
        assert not engine.streams


async def test_what_comes_at_once_begins_in_one_turn_of_the_loop_after_another(engine: FakeEngine) -> None:
    loop, turns, began = asyncio.get_running_loop(), itertools.count(), []
    stream = engine.stream

    def spied(*given: Any, **fields: Any) -> Any:
        began.append(turn)
        return stream(*given, **fields)

    def tick() -> None:
        nonlocal turn, ticking
        turn, ticking = next(turns), loop.call_soon(tick)

    turn, ticking = next(turns), loop.call_soon(tick)
    engine.stream = spied  # type: ignore[method-assign]
    async with serving_http(engine) as serve, AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(raw(serve)) for _ in range(10)]
        for number, (_, writer) in enumerate(connections):
            writer.write(request_bytes("/v1/completions", {**COMPLETE, "request_id": f"mine-{number}"}))
        for reader, _ in connections:
            assert (await read_response(reader))[0] == 200
        assert (await serve.post("/v1/completions", {"prompt": ["a"] * 10})).status_code == 200
    ticking.cancel()
    assert len(set(began)) == len(began) == 20


async def test_a_connection_that_ended_is_no_garbage(engine: FakeEngine) -> None:
    async with serving_http(engine) as serve:
        gc.disable()
        try:
            async with raw(serve) as (reader, writer):
                writer.write(request_bytes("/v1/completions", COMPLETE))
                await read_response(reader)
                assert serve.server._http is not None
                (made,) = map(weakref.ref, serve.server._http._connections())
            await until(lambda: made() is None)
        finally:
            gc.enable()


async def test_errors_are_in_the_shape_of_openai(engine: FakeEngine) -> None:
    async with serving_http(engine) as serve:
        response = await serve.post("/v1/completions", {"prompt": 7, "temperature": 300, "tempo": 1, "suffix": "x"})
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "prompt")
        assert {one["field"] for one in error["violations"]} == {"prompt", "temperature", "tempo", "suffix"}
        response = await serve.post("/v1/completions", {"model": "gpt", **COMPLETE})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        engine.refusal = RuntimeError("a bug")
        response = await serve.post("/v1/completions", COMPLETE)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"], "a bug" in response.text) == (500, "server_error", "bug", False)
        assert error["incident_id"] in error["message"]


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    engine = FakeEngine([tokens("a", "b")[0], RuntimeError("a bug")])
    seen = Seen()
    async with serving_http(engine) as serve:
        watch(serve.server.core.observers, seen)
        response = await serve.post("/v1/completions", {**COMPLETE, "stream": True})
        first, last, end = response.text.split("\n\n")
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
        assert (json.loads(last.removeprefix("data: "))["error"]["code"], end) == ("bug", "")
    assert [(call.code, call.reason) for call in seen.calls] == [("500", "BUG")]


async def test_calls_are_recorded(engine: FakeEngine) -> None:
    seen = Seen()
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    async with serving_http(engine) as serve:
        watch(serve.server.core.observers, seen)
        response = await serve.post("/v1/completions", COMPLETE, headers={"x-request-id": "mine", "traceparent": trace})
        assert response.headers["x-request-id"] == "mine"
        await serve.events("/v1/completions", COMPLETE)
        await serve.client.get("/health")
        await serve.post("/v1/unknown", {})
    whole, stream, unknown = seen.calls
    assert (whole.method, whole.code, whole.request_id, whole.trace_id) == ("POST /v1/completions", "200", "mine", "a" * 32)
    assert (whole.messages_sent, whole.prompt_tokens, whole.completion_tokens) == (1, 3, 2)
    assert (stream.code, stream.messages_sent, stream.completion_tokens) == ("200", 2, 2)
    assert (unknown.method, unknown.code, unknown.reason) == ("other", "404", "METHOD_NOT_FOUND")
    assert whole.peer.startswith("ipv4:127.0.0.1:")


async def test_metrics_count_the_calls(engine: FakeEngine) -> None:
    engine.stats = EngineStats  # type: ignore[attr-defined]
    async with serving_http(engine) as serve:
        await serve.post("/v1/completions", COMPLETE)
        await serve.post("/v1/unknown", {})
        text = (await serve.client.get("/metrics")).text
    assert 'aengine_calls_total{code="200",method="POST /v1/completions"} 1.0' in text
    assert 'aengine_calls_total{code="404",method="other"} 1.0' in text
    assert 'aengine_calls_total{code="200",method="POST /v1/chat/completions"} 0.0' in text


async def test_tokens_decide_who_may_call(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("alice secret\n")
    seen = Seen()
    async with serving_http(engine, token_file=str(file)) as serve:
        watch(serve.server.core.observers, seen)

        async def status(path: str = "/v1/models", **headers: str) -> int:
            return (await serve.client.get(path, headers={name.replace("_", "-"): value for name, value in headers.items()})).status_code

        assert await status() == 401
        assert await status("/nowhere") == 401
        assert await status(authorization="Bearer wrong") == 401
        assert await status(authorization="Bearer secret") == 200
        assert await status(x_api_key="secret") == 200, "as Anthropic's clients send it"
        assert await status("/health") == 200
        # Nothing of a stranger's body is read.
        status_, headers, body = await answer(serve, request_bytes("/v1/completions").replace(b": 0", b": 1000"))
        assert (status_, headers["www-authenticate"], reason(body)) == (401, "Bearer", "no_credentials")
    assert [call.caller.name for call in seen.calls] == [None, None, None, "alice", "alice", None]


async def test_certificates_decide_too_and_change_without_a_restart(engine: FakeEngine, tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    seen = Seen()
    issued = files.authority.issue_cert("alice.example", common_name="alice")
    key, chain = tmp_path / "alice.key", tmp_path / "alice.pem"
    key.write_bytes(issued.private_key_pem.bytes())
    chain.write_bytes(issued.cert_chain_pems[0].bytes())

    def context(*, named: bool) -> ssl.SSLContext:
        made = ssl.create_default_context(cadata=files.authority.cert_pem.bytes().decode())
        if named:
            made.load_cert_chain(chain, key)
        return made

    async def served_name(serve: Serving) -> str:
        host, port = serve.address()
        _, writer = await asyncio.open_connection(host, port, ssl=context(named=True), server_hostname="localhost")
        found: Any = writer.get_extra_info("peercert")
        writer.close()
        return dict(part for parts in found["subject"] for part in parts)["commonName"]

    async with serving_http(engine, tls_client_ca=str(files.client_ca), **files.options) as serve:
        watch(serve.server.core.observers, seen)
        url = f"https://localhost:{serve.address()[1]}/v1/models"
        async with httpx2.AsyncClient(verify=context(named=True)) as client:
            assert (await client.get(url)).status_code == 200
        async with httpx2.AsyncClient(verify=context(named=False)) as client:
            with pytest.raises(httpx2.TransportError):
                await client.get(url)
        files.write(name="another")
        assert await served_name(serve) == "another"
        files.cert.write_text("nonsense")
        assert await served_name(serve) == "another"
    assert [call.caller.name for call in seen.calls] == ["alice"]


async def test_pages_of_other_origins_need_leave(engine: FakeEngine) -> None:
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with serving_http(engine) as serve:
        assert (await serve.client.options("/v1/completions", headers=preflight)).status_code == 403
    async with serving_http(engine, http_cors_origins=("https://a.example",)) as serve:
        response = await serve.client.options("/v1/completions", headers=preflight)
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "https://a.example")
        for path in ("/v1/models", "/nowhere"):
            response = await serve.client.get(path, headers={"origin": "https://a.example"})
            assert response.headers["access-control-allow-origin"] == "https://a.example"
        response = await serve.client.get("/v1/models", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_both_doors_serve_one_engine_and_a_port_in_use_is_refused(engine: FakeEngine) -> None:
    async with serving_http(engine, port=0, host="::1") as serve, aio.insecure_channel(serve.server.address) as channel:
        assert (await serve.client.get("/v1/models")).json()["data"][0]["id"] == INFO.name
        assert (await ModelServiceStub(channel).GetModel(GetModelRequest())).model.name == INFO.name
        with pytest.raises(BindError, match=r"cannot listen on \[::1\]:"):
            async with serving_http(engine, host="::1", http_port=serve.address()[1]):
                pass


async def test_calls_beyond_the_limit_are_refused() -> None:
    engine = FakeEngine()
    async with serving_http(engine, max_calls=1) as serve:
        task = asyncio.create_task(serve.post("/v1/completions", COMPLETE))
        stream = await engine.submitted.get()
        response = await serve.client.get("/v1/models")
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert (await serve.client.get("/health")).status_code == 200
        stream.push(tokens("a"))
        assert (await task).status_code == 200


async def test_drain_lets_what_runs_finish() -> None:
    engine = FakeEngine()
    async with serving_http(engine) as serve, raw(serve) as (reader, writer):
        task = asyncio.create_task(serve.post("/v1/completions", COMPLETE))
        stream = await engine.submitted.get()
        draining = asyncio.create_task(serve.server.drain(HANG_SECONDS))
        await until(lambda: serve.server.core.admission.closed)
        writer.write(request_bytes("/v1/completions", COMPLETE))
        status, headers, body = await read_response(reader)
        assert (status, reason(body), headers["connection"], headers["retry-after"]) == (503, "draining", "close", "1")
        assert await reader.read() == b""
        assert (await serve.client.get("/health")).status_code == 503
        stream.push(tokens("a"))
        response = await task
        assert response.json()["choices"][0]["text"] == "a"
        assert await draining


async def test_what_is_left_at_the_end_is_told() -> None:
    engine = FakeEngine()
    async with serving_http(engine) as serve, raw(serve) as (reader, writer), raw(serve) as (idle, _):
        task = asyncio.create_task(serve.post("/v1/completions", COMPLETE))
        await engine.submitted.get()
        writer.write(request_bytes("/v1/completions", {**COMPLETE, "stream": True}))
        (await engine.submitted.get()).push(tokens("a", "b")[:1])
        await reader.readuntil(b"}\n\n")
        await serve.server.stop()
        assert (await task).json()["error"]["code"] == "draining"
        rest = await reader.read()
        assert b'"code":"draining"' in rest
        assert rest.endswith(b"0\r\n\r\n")
        assert await idle.read() == b""
        assert not engine.streams


async def test_senders_and_readers_that_stand_still_are_ended() -> None:
    engine = FakeEngine()
    seen = Seen()
    async with serving_http(engine, stall_seconds=0.2) as serve:
        watch(serve.server.core.observers, seen)
        status, headers, body = await answer(serve, request_bytes("/v1/completions").replace(b": 0", b": 9"), b"{")
        assert (status, headers["connection"], reason(body)) == (408, "close", "sender_stalled")
        async with raw(serve) as (_, writer):
            writer.write(request_bytes("/v1/completions", {**COMPLETE, "stream": True}))
            stream = await engine.submitted.get()
            while not stream.closed.is_set():
                stream.push(tokens("x" * 60000, "y")[:1])
                await asyncio.sleep(0)
            await until(lambda: len(seen.calls) == 2)
    assert [(call.code, call.reason) for call in seen.calls] == [("408", "SENDER_STALLED"), ("408", "READER_STALLED")]


async def test_idle_connections_are_closed_and_silent_streams_have_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.server.http.door.CHECK_SECONDS", 0.02)
    monkeypatch.setattr(exchanges, "BEAT_SECONDS", 0.02)
    engine = FakeEngine()
    async with serving_http(engine) as serve, raw(serve) as (reader, writer), raw(serve) as (silent, _), raw(serve) as (slow, dripping):
        writer.write(request_bytes("/v1/completions", {**COMPLETE, "stream": True}))
        stream = await engine.submitted.get()
        monkeypatch.setattr(connections, "IDLE_SECONDS", 0.05)
        await reader.readuntil(b"\n:\n\n")
        assert await silent.read() == b""
        dripping.write(b"GET / HTTP/1.1\r\nx: ")
        while not slow.at_eof() and slow.exception() is None:
            dripping.write(b"y")
            await asyncio.sleep(0)
        with suppress(ConnectionError):
            assert await slow.read() == b"", "its headers never end"
        stream.push(tokens("a"))
        assert (await reader.readuntil(b"[DONE]\n\n")).count(b'"text":"a"') == 1
