"""What comes back for bytes that no client should send, beside a stream that goes on."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress

import pytest
from fake_engine import FakeEngine, tokens
from hang_guard import HANG_SECONDS
from http_harness import Serving, raw, request_bytes, serving_http
from oracle_engine import until

from aengine.server.http import connection as connections
from aengine.server.http import http_exchange as exchanges

pytestmark = pytest.mark.anyio

HOST = b"host: localhost\r\n"
GET = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
MESSAGES = b"POST /v1/messages HTTP/1.1\r\n" + HOST
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"
LIMITS = {"max_message_bytes": 4096, "max_metadata_bytes": 4096}


def get(*lines: bytes, target: bytes = b"/v1/models", host: bytes = HOST, version: bytes = b"HTTP/1.1", verb: bytes = b"GET") -> bytes:
    return b"%b %b %b\r\n%b%b\r\n" % (verb, target, version, host, b"".join(line + b"\r\n" for line in lines))


CLOSED = 0  # the server closes
SENT: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "no Host": (get(host=b""), (400,)),
    "health without Host": (get(host=b"", target=b"/health"), (400,)),
    "health for a stranger": (get(b"origin: null", host=b"host: a.example\r\n", target=b"/health"), (200,)),
    "no Host in HTTP/1.0": (get(host=b"", version=b"HTTP/1.0"), (200, CLOSED)),
    "two Hosts": (get(b"host: localhost"), (400,)),
    "a Host that is none": (get(host=b"host: a b\r\n"), (400,)),
    "a Host with a path": (get(host=b"host: localhost/x\r\n"), (400,)),
    "an empty Host": (get(host=b"host: \r\n"), (403,)),
    "a stranger's Host": (get(host=b"host: evil.example\r\n"), (403,)),
    "a stranger's Host with our name in it": (get(host=b"host: localhost.evil.example\r\n"), (403,)),
    "a stranger's address as Host": (get(host=b"host: 10.0.0.1:80\r\n"), (403,)),
    "a Host of IPv6": (get(host=b"host: [::1]:8000\r\n"), (200,)),
    "another Host of IPv6": (get(host=b"host: [2001:db8::1]\r\n"), (403,)),
    "a Host in capitals with a dot": (get(host=b"host: LOCALHOST.:1\r\n"), (200,)),
    "a local subdomain": (get(host=b"host: app.localhost:1\r\n"), (200,)),
    "localhost.localdomain": (get(host=b"host: localhost.localdomain\r\n"), (200,)),
    "another address of loopback": (get(host=b"host: 127.8.9.10\r\n"), (200,)),
    "a page of another site": (get(b"origin: https://evil.example"), (403,)),
    "a page of nowhere": (get(b"origin: null"), (403,)),
    "a page of another port": (get(b"origin: http://localhost:3000"), (403,)),
    "our own page": (get(b"origin: http://localhost"), (200,)),
    "a blind POST of a page": (POST + b"origin: https://evil.example\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\n{}", (403,)),
    "no HTTP": (b"hello\r\n\r\n", (400, CLOSED)),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400, CLOSED)),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, CLOSED)),
    "HTTP/0.9": (b"GET /\r\n\r\n", (505, CLOSED)),
    "a version that is none": (get(version=b"HTTP/9.9"), (400, CLOSED)),
    "a verb in small letters": (get(verb=b"get"), (400, CLOSED)),
    "another verb": (get(verb=b"DELETE"), (405,)),
    "a tunnel": (b"CONNECT localhost:1 HTTP/1.1\r\n" + HOST + b"\r\n", (400, CLOSED)),
    "OPTIONS *": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", (404,)),
    "an absolute target": (get(target=b"http://localhost/v1/models"), (200,)),
    "a broken absolute target": (get(target=b"http://[::1/v1"), (400, CLOSED)),
    "no target": (b"GET  HTTP/1.1\r\n" + HOST + b"\r\n", (400, CLOSED)),
    "a path that does not exist": (get(target=b"/nothing"), (404,)),
    "a path with NUL": (get(target=b"/v1/models/%00"), (404,)),
    "a path that is not UTF-8": (get(target=b"/v1/models/%ff%fe"), (404,)),
    "a path that climbs": (get(target=b"/v1/models/../../etc/passwd"), (404,)),
    "a long target": (get(target=b"/" + b"x" * (connections.MAX_TARGET_BYTES + 1)), (414, CLOSED)),
    "an endless target": (b"GET /" + b"x" * 200_000, (414, CLOSED)),
    "a long query": (get(target=b"/v1/models?" + b"x" * connections.MAX_TARGET_BYTES), (414, CLOSED)),
    "a long header": (get(b"x: " + b"y" * 5000), (431,)),
    "many headers": (get(*[b"x%d: y" % number for number in range(200)]), (431,)),
    "endless headers": (b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 60_000, (431, CLOSED)),
    "a name with a space": (get(b"x y: z"), (400, CLOSED)),
    "a header without a name": (get(b": z"), (400, CLOSED)),
    "a folded header": (get(b"x: y", b" z"), (400, CLOSED)),
    "NUL in a header": (get(b"x: a\0b"), (400, CLOSED)),
    "lines that end with LF": (get().replace(b"\r\n", b"\n"), (400, CLOSED)),
    "empty lines before": (b"\r\n\r\n" + GET, (200,)),
    "two lengths": (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", (400, CLOSED)),
    "a negative length": (POST + b"content-length: -1\r\n\r\n", (400, CLOSED)),
    "a length beyond numbers": (POST + b"content-length: %d\r\n\r\n" % 10**30, (400, CLOSED)),
    "a length and chunks": (POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", (400, CLOSED)),
    "a body that is too large": (POST + b"content-length: 5000\r\n\r\n", (413,)),
    "chunks that are too large": (CHUNKED + b"1388\r\n" + b"x" * 5000 + b"\r\n0\r\n\r\n", (413,)),
    "a chunk without a size": (CHUNKED + b"zz\r\n", (400, CLOSED)),
    "a chunk with a negative size": (CHUNKED + b"-1\r\n", (400, CLOSED)),
    "a chunk beyond numbers": (CHUNKED + b"f" * 20 + b"\r\n", (400, CLOSED)),
    "a chunk that is longer than it says": (CHUNKED + b"1\r\n{}\r\n0\r\n\r\n", (400, CLOSED)),
    "gzip": (POST + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\n\x1f\x8b\x08", (415,)),
    "no coding by name": (POST + b"content-encoding: identity\r\ncontent-length: 1\r\n\r\n{", (400,)),
    "gzip of the transfer": (POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", (501,)),
    "gzip of the transfer alone": (POST + b"transfer-encoding: gzip\r\n\r\n", (501, CLOSED)),
    "no body": (POST + b"\r\n", (400,)),
    "a body that is not JSON": (POST + b"content-length: 2\r\n\r\n\xff\xfe", (400,)),
    "an upgrade": (get(b"connection: upgrade", b"upgrade: h2c") + GET, (200, 200)),
    "upgrades with bodies": (
        POST.replace(b"completions", b"models")
        + UPGRADE
        + b"content-length: 3\r\n\r\n[1]"
        + GET
        + POST.replace(b"completions", b"models")
        + UPGRADE
        + b"transfer-encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n"
        + GET,
        (405, 200, 405, 200),
    ),
    "a request and no request": (GET + b"hello\r\n\r\n", (200, 400, CLOSED)),
    "requests and a broken body": (GET * 3 + CHUNKED + b"zz\r\n" + GET, (200, 200, 200, 400, CLOSED)),
    "a broken body that nobody reads": (GET[:-2] + b"transfer-encoding: chunked\r\n\r\nzz\r\n", (200, CLOSED)),
    "more requests than may wait": (GET * 500, (*[200] * (connections.MAX_PIPELINED + 1), 429, CLOSED)),
    "requests of all kinds": (GET + get(target=b"/nothing") + POST + b"content-length: 1\r\n\r\n{" + get(host=b""), (200, 404, 400, 400)),
    "a request behind the last": (get(b"connection: close") + GET, (200, CLOSED)),
}
ANTHROPIC: dict[str, tuple[bytes, int, str]] = {
    "a path that does not exist": (
        MESSAGES.replace(b"messages", b"messages/batches") + b"content-length: 0\r\n\r\n",
        404,
        "not_found_error",
    ),
    "another verb": (MESSAGES.replace(b"POST", b"GET") + b"\r\n", 405, "invalid_request_error"),
    "a body that is too large": (MESSAGES + b"content-length: 5000\r\n\r\n", 413, "request_too_large"),
    "gzip": (MESSAGES + b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\nx", 415, "invalid_request_error"),
    "no Host": (MESSAGES.replace(HOST, b"") + b"\r\n", 400, "invalid_request_error"),
    "a broken body": (MESSAGES + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_request_error"),
    "broken headers": (MESSAGES + b"x y: z\r\n\r\n", 400, "invalid_request_error"),
    "a stranger's page": (MESSAGES + b"origin: null\r\n\r\n", 403, "permission_error"),
    "a long target": (MESSAGES.replace(b"messages", b"messages?" + b"x" * 9000) + b"\r\n", 414, "invalid_request_error"),
}


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return int(head.split()[1]), await reader.readexactly(int(length[1]) if length else 0)


async def answers(serve: Serving, sent: bytes, expected: tuple[int, ...]) -> tuple[int, ...]:
    """As many statuses as are expected."""
    found: list[int] = []
    async with raw(serve) as (reader, writer):
        writer.write(sent)
        for status in expected:
            if status != CLOSED:
                found.append((await asyncio.wait_for(read_response(reader), HANG_SECONDS))[0])
            else:
                found.append(len(await asyncio.wait_for(reader.read(), HANG_SECONDS)))
    return tuple(found)


async def test_every_kind_is_answered_and_disturbs_no_stream() -> None:
    engine = FakeEngine()
    async with serving_http(engine, **LIMITS) as serve, raw(serve) as (reader, writer):
        writer.write(request_bytes("/v1/completions", {"prompt": "Once", "stream": True}))
        stream = await engine.submitted.get()
        wrong = {}
        for name, (sent, expected) in SENT.items():
            try:
                found: object = await answers(serve, sent, expected)
            except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError) as error:
                found = repr(error)
            if found != expected:
                wrong[name] = (found, expected)
            stream.push(tokens("a", "b")[:1])
            await reader.readuntil(b"}\n\n")
        assert wrong == {}
        stream.push(tokens("b"))
        await reader.readuntil(b"[DONE]\n\n")
        assert await until_no_call(serve)


async def until_no_call(serve: Serving) -> bool:
    await until(lambda: not len(serve.server.core.calls))
    return True


async def test_errors_of_anthropics_paths_have_their_shape() -> None:
    async with serving_http(FakeEngine(), **LIMITS) as serve:
        for name, (sent, status, kind) in ANTHROPIC.items():
            async with raw(serve) as (reader, writer):
                writer.write(sent)
                found, body = await read_response(reader)
                told = json.loads(body)
                assert (found, told["type"], told["error"]["type"]) == (status, "error", kind), name


async def test_an_upgrade_is_ignored() -> None:
    body = b'{"prompt":"Once"}'
    async with serving_http(FakeEngine(tokens("a"))) as serve, raw(serve) as (reader, writer):
        for head, content in ((b"content-length: %d", body), (b"transfer-encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))):
            sent = POST + UPGRADE + (head % len(body) if b"%" in head else head) + b"\r\n\r\n" + content
            writer.write(sent[:-9])
            await writer.drain()
            writer.write(sent[-9:] + GET)
            assert [(await read_response(reader))[0] for _ in range(2)] == [200, 200]


async def test_hosts_and_origins_that_are_configured_may_call() -> None:
    engine = FakeEngine()
    proxied = get(b"origin: https://chat.example", host=b"host: chat.example\r\n")
    async with serving_http(engine, http_hosts=("Chat.example",), http_cors_origins=("https://app.example",)) as serve:
        assert await answers(serve, proxied, (200,)) == (200,)
        assert await answers(serve, get(b"origin: https://app.example"), (200,)) == (200,)
        assert await answers(serve, get(b"origin: https://other.example"), (403,)) == (403,)
    async with serving_http(engine, http_hosts=("*",), http_cors_origins=("*",)) as serve:
        assert await answers(serve, get(b"origin: null", host=b"host: a.example\r\n"), (200,)) == (200,)
    async with serving_http(engine, host="0.0.0.0", insecure=True) as serve:
        assert await answers(serve, proxied, (200,)) == (200,), "which names it has is not known"


async def test_connections_of_one_address_are_bounded() -> None:
    async with serving_http(FakeEngine(), max_connections_per_address=2) as serve:
        async with raw(serve) as (first, writer), raw(serve) as (second, other):
            for reader, sender in ((first, writer), (second, other)):
                sender.write(GET)
                assert (await read_response(reader))[0] == 200
            async with raw(serve) as (refused, _):
                assert (await read_response(refused))[0] == 429
                assert await refused.read() == b""
        assert serve.server._http is not None
        await until(lambda: not serve.server._http._connections())  # type: ignore[union-attr]
        assert await answers(serve, GET, (200,)) == (200,)


async def test_bodies_that_drip_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_http(FakeEngine()) as serve, raw(serve) as (reader, writer):
        monkeypatch.setattr(exchanges, "DRIP_SECONDS", 0.0)
        monkeypatch.setattr(exchanges, "MIN_BYTES_PER_SECOND", 1e9)
        writer.write(POST + b"content-length: 4000\r\n\r\n")
        while not reader._buffer:  # type: ignore[attr-defined]
            writer.write(b" ")
            await asyncio.sleep(0)
        assert (await read_response(reader))[0] == 408
        with suppress(ConnectionError):  # it may have sent more since
            assert await reader.read() == b""
