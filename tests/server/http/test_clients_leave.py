"""Clients that leave and clients that do not read, over HTTP: with the engine whose every token is known."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import pytest
from http_harness import Serving, raw, request_bytes, serving_http
from oracle_engine import OracleEngine, StepGate, step_with_the_loop, until
from oracle_requests import nothing_left, num_generated
from records_seen import Seen, watch
from slow_cases import slow_but

from aengine.server.http import connection, door

pytestmark = pytest.mark.anyio

MINE = "mine"


def body(seed: int = 1, *, prompt: tuple[int, ...] = (1, 2), stream: bool = True, max_tokens: int = 300) -> dict[str, object]:
    return {
        **{"prompt": list(prompt), "seed": seed, "ignore_eos": True, "max_tokens": max_tokens, "stream": stream},
        **{"return_token_ids": True, "request_id": f"{MINE}-{seed}"},
    }


async def ids_of(reader: asyncio.StreamReader) -> list[int]:
    """The ids of a stream up to its end."""
    text = (await reader.readuntil(b"data: [DONE]")).decode()
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [token_id for event in events for token_id in json.loads(event)["choices"][0]["token_ids"]]


IN_PROMPT, IN_OUTPUT = (tuple(i % 50 for i in range(256)), 1), ((1, 2), 5)  # a prompt, and the step that is held


def close(writer: asyncio.StreamWriter) -> None:
    writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


CASES = [(leave, at, stream) for leave in (close, reset) for at in (IN_PROMPT, IN_OUTPUT) for stream in (True, False)]


@pytest.mark.parametrize(
    ("leave", "at", "stream"), slow_but(lambda case: case in ((close, IN_PROMPT, True), (reset, IN_OUTPUT, False)), CASES)
)
async def test_a_client_that_leaves_is_noticed_at_once(
    leave: Callable[[asyncio.StreamWriter], object], at: tuple[tuple[int, ...], int], stream: bool
) -> None:
    prompt, step = at
    seen = Seen()
    async with OracleEngine() as engine, serving_http(engine) as serve:
        watch(serve.server.core.observers, seen)
        gate = StepGate(engine, at=step)
        async with raw(serve) as (_, writer):
            writer.write(request_bytes("/v1/completions", body(prompt=prompt, stream=stream, max_tokens=100)))
            await until(gate.held.is_set)
            leave(writer)
            await until(lambda: seen.calls or len(engine._core.steps._mailbox._commands))  # while the step is held
        gate.open()
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)
        assert engine.stats().completion_tokens <= step + 1
    (call,) = seen.calls
    assert (call.code, call.reason) == ("499", "")


async def connect(serve: Serving, window: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that takes at most about `window` bytes that nobody reads."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, serve.address())
    return await asyncio.open_connection(sock=made, limit=1 << 24)


async def test_a_client_that_does_not_read_parks_its_request_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "UNSENT_BYTES", 4096)
    monkeypatch.setattr(connection, "MAX_BUFFERED_BYTES", 4096)
    engine = OracleEngine(max_unread_tokens=8, num_pages=4000)
    engine.runner.max_model_len = 1100
    async with engine, serving_http(engine) as serve:
        step_with_the_loop(engine)
        reader, writer = await connect(serve, 4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request_bytes("/v1/completions", body(max_tokens=1000)))
        await until(lambda: engine.stats().parked == 1)
        others = 0
        num_tokens = -1
        while engine.stats().parked == 0 or num_tokens != num_generated(engine, f"{MINE}-1"):
            num_tokens = num_generated(engine, f"{MINE}-1")
            others += 1
            chunks = await serve.events("/v1/completions", body(100 + others, max_tokens=20))
            assert [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]] == engine.solo(100 + others)[0]
        assert num_tokens < 700, "what waits for the client is bounded"
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await ids_of(reader) == engine.solo(1)[0]
        writer.close()
        await until(lambda: nothing_left(engine))
