"""Streams of events that go on without their client, and that are read again: no byte differs, none is lost, none comes twice."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from chat_engine import ChatEngine
from http_harness import Serving, serving_http

from aengine import AsyncEngine
from aengine.api.errors import EngineDeadError

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "How is it?"}]
RETAIN = {"x-stream-retain": "600"}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "It is"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 40},
}


@pytest.fixture
async def serve() -> AsyncIterator[Serving]:
    async with AsyncEngine("demo", kv_cache_memory="32MiB") as engine, serving_http(engine) as serve:
        yield serve


def body_of(path: str, seed: int = 1, **fields: Any) -> dict[str, Any]:
    limit = {} if path == "/v1/messages" else {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 40}
    return {**PATHS[path], **limit, "seed": seed, "ignore_eos": True, "stream": True, **fields}


async def read_some(serve: Serving, path: str, body: dict[str, Any], num_bytes: int) -> tuple[str, bytes]:
    """The id of a stream, and its first bytes; then the connection is cut."""
    async with serve.client.stream("POST", path, json=body, headers=RETAIN) as response:
        assert response.status_code == 200
        found = b""
        async for piece in response.aiter_raw():
            found += piece
            if len(found) >= num_bytes:
                break
    return response.headers["x-stream-id"], found[:num_bytes]


def whole_events(data: bytes) -> tuple[bytes, int]:
    """The events that came whole, without comments, and the number of the last one; -1: there is none."""
    events = [event + b"\n\n" for event in data.split(b"\n\n")[:-1] if not event.startswith(b":")]
    return b"".join(events), int(re.match(rb"id: (\d+)\n", events[-1])[1]) if events else -1  # type: ignore[index]


@pytest.mark.parametrize("path", PATHS)
async def test_cut_anywhere(serve: Serving, path: str) -> None:
    """The events of all connections together are those of the stream as it is read later."""
    rng = random.Random(path)
    for seed in range(6):
        name, data = await read_some(serve, path, body_of(path, seed), rng.randrange(4000))
        found, last = whole_events(data)
        while True:
            headers = {"last-event-id": str(last)} if last >= 0 else {}
            limit = rng.randrange(1500)
            data = b""
            async with serve.client.stream("GET", f"/v1/streams/{name}", headers=headers) as response:
                assert (response.status_code, response.headers["x-stream-id"]) == (200, name)
                async for piece in response.aiter_raw():
                    data += piece
                    if len(data) >= limit and rng.random() < 0.5:
                        break
                else:
                    found += whole_events(data)[0]
                    break
            more, number = whole_events(data)
            found, last = found + more, max(last, number)
        again = (await serve.client.get(f"/v1/streams/{name}?from=0")).content
        assert found == again
        numbers = [int(number) for number in re.findall(rb"^id: (\d+)$", again, re.MULTILINE)]
        assert numbers == list(range(len(numbers)))
        part = (await serve.client.get(f"/v1/streams/{name}?from={len(numbers) - 2}")).content
        assert part == b"".join(event + b"\n\n" for event in again.split(b"\n\n")[-3:-1])


async def test_the_events_are_those_without_it(serve: Serving) -> None:
    body = body_of("/v1/chat/completions")
    plain = (await serve.post("/v1/chat/completions", body)).text
    kept = (await serve.client.post("/v1/chat/completions", json=body, headers=RETAIN)).text
    without = re.sub(r"^id: \d+\n", "", kept, flags=re.MULTILINE)
    texts = []
    for text in (plain, without):
        assert text.endswith("data: [DONE]\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
        texts.append("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks))
    assert texts[0] == texts[1] != ""
    whole = await serve.client.post("/v1/chat/completions", json={**body, "stream": False}, headers=RETAIN)
    assert whole.json()["choices"][0]["message"]["content"]
    assert "x-stream-id" not in whole.headers
    refused = await serve.client.post("/v1/chat/completions", json={**body, "temperature": -1}, headers=RETAIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    lines = await serve.client.post("/api/chat", json={"messages": MESSAGES, "options": {"num_predict": 2}}, headers=RETAIN)
    assert [json.loads(line)["done"] for line in lines.text.splitlines()][-1]
    tools = {**body, "tools": [{"type": "web_search"}]}
    assert "web_search" in (await serve.client.post("/v1/chat/completions", json=tools, headers=RETAIN)).headers["warning"]


async def test_it_goes_on_without_its_client(serve: Serving) -> None:
    """As far as it may, and ends when nobody has come for as long as it asked."""
    body = {**body_of("/v1/completions"), "max_tokens": 1500}
    name, _ = await read_some(serve, "/v1/completions", body, 1)
    text = (await serve.client.get(f"/v1/streams/{name}")).text
    assert text.count("data: ") == text.count("id: ")
    assert text.endswith("data: [DONE]\n\n")
    async with serve.client.stream("POST", "/v1/completions", json=body, headers={"x-stream-retain": "0.05"}) as response:
        name = response.headers["x-stream-id"]
        await response.aiter_raw().__anext__()
        engine = serve.server.core.engine
        assert isinstance(engine, AsyncEngine)
        await engine.pause()  # so that it does not come to its end
    while (await serve.client.get("/load")).json()["running"]:
        pass
    lost = await serve.client.get(f"/v1/streams/{name}")
    assert (lost.status_code, lost.json()["error"]["code"]) == (404, "request_not_found")


async def test_one_reader_at_a_time(serve: Serving) -> None:
    body = {**body_of("/v1/completions"), "max_tokens": 1500}
    async with serve.client.stream("POST", "/v1/completions", json=body, headers=RETAIN) as response:
        pieces = response.aiter_raw()
        await pieces.__anext__()
        async with httpx2.AsyncClient(base_url=serve.client.base_url, timeout=None) as client:
            text = (await client.get(f"/v1/streams/{response.headers['x-stream-id']}?from=0")).text
        assert text.endswith("data: [DONE]\n\n")
        rest = b"".join([piece async for piece in pieces])
        assert b"another reader has taken over" in rest or rest.endswith(b"data: [DONE]\n\n")


async def test_what_is_refused(serve: Serving) -> None:
    body = body_of("/v1/completions")
    for value in ("0", "-1", "601", "soon", "nan"):
        refused = await serve.client.post("/v1/completions", json=body, headers={"x-stream-retain": value})
        assert refused.status_code == 400
        assert f"x-stream-retain: '{value}' is not a number of seconds in (0, 600]" in refused.text
    name, _ = await read_some(serve, "/v1/completions", body, 10)
    assert (await serve.client.get("/v1/streams/unknown")).status_code == 404
    for query, headers, sentence in (
        ("?from=x", {}, "from: 'x' is not the number of an event"),
        ("", {"last-event-id": "1.5"}, "last-event-id: '1.5' is not the number of an event"),
        ("?from=99999", {}, "99999 is not yet known"),
    ):
        refused = await serve.client.get(f"/v1/streams/{name}{query}", headers=headers)
        assert refused.status_code == 400, refused.text
        assert sentence in refused.text


async def test_an_error_is_an_event() -> None:
    """Which comes again, too."""
    engine = ChatEngine("It is fine.")
    engine.script[2] = EngineDeadError("the step thread died")  # type: ignore[call-overload]
    async with serving_http(engine) as serve:
        body = {"messages": MESSAGES, "stream": True}
        response = await serve.client.post("/v1/chat/completions", json=body, headers=RETAIN)
        again = await serve.client.get(f"/v1/streams/{response.headers['x-stream-id']}?from=0")
        assert response.content == again.content
        last = response.text.strip().split("\n\n")[-1]
        assert re.fullmatch(r"id: \d+\ndata: \{\"error\":.*\}", last)


async def test_owners_alone_read(tmp_path: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("one first-token\ntwo second-token\n")
    async with AsyncEngine("demo", kv_cache_memory="32MiB") as engine, serving_http(engine, token_file=str(tokens)) as serve:
        first, second = ({"authorization": f"Bearer {token}"} for token in ("first-token", "second-token"))
        response = await serve.client.post("/v1/completions", json=body_of("/v1/completions"), headers={**RETAIN, **first})
        path = f"/v1/streams/{response.headers['x-stream-id']}?from=0"
        assert (await serve.client.get(path, headers=first)).content == response.content
        assert (await serve.client.get(path, headers=second)).status_code == 404
        assert (await serve.client.get(path)).status_code == 401
