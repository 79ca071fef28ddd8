"""Nonsense over HTTP, by seed: whatever a client sends, it is answered in JSON or cut off, nothing is kept of it, and the others go on."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from hostile_http import any_bytes, any_json
from http_harness import Serving, raw, serving_http
from oracle_engine import Ahead, OracleEngine, until
from oracle_requests import nothing_left
from slow_cases import slow_but

from aengine import AsyncEngine, SamplingParams

pytestmark = pytest.mark.anyio

AT_ONCE = 8
ANSWER_SECONDS = 0.05  # how long an attacker listens
BODIES = 100


class Engine(OracleEngine):
    """Takes any request, and computes a short one of its own instead: the oracle must know what comes."""

    seeds = itertools.count(10_000)

    def stream(self, prompt: Any, params: SamplingParams | None = None, *options: Any, **fields: Any) -> Any:
        max_tokens = 20 if params is None else min(20, params.max_tokens or 20)
        return super().stream([1, 2, 3], SamplingParams(seed=next(self.seeds), max_tokens=max_tokens, ignore_eos=True), *options, **fields)


@pytest.fixture(scope="module")
async def demo() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", kv_cache_memory=64 * 1024 * 1024) as engine:
        yield engine


@pytest.mark.parametrize("first", slow_but([0], range(0, 10 * BODIES, BODIES)))
async def test_a_body_that_is_nearly_right_has_an_answer(demo: AsyncEngine, first: int, caplog: pytest.LogCaptureFixture) -> None:
    async with serving_http(demo) as serve:

        async def post(number: int) -> int:
            path, body = any_json(random.Random(number))
            response = await serve.client.post(path, content=json.dumps(body).encode())
            if response.status_code == 200:
                assert not body.get("stream") or response.text.endswith("\n\n")
            else:
                error = response.json()["error"]
                assert (400 <= response.status_code < 500, error["message"] != "", isinstance(error["type"], str)) == (True, True, True)
                assert error["code"] != "invalid_field" or error["violations"], "what is wrong has a path"
            return response.status_code

        statuses = [
            status
            for start in range(0, BODIES, AT_ONCE)
            for status in await asyncio.gather(*map(post, range(first + start, first + start + AT_ONCE)))
        ]
        assert {200, 400} <= set(statuses)
        await until(lambda: nothing_left(demo) and serve.server.in_flight == 0 and len(serve.server.core.calls) == 0)  # type: ignore[arg-type]
    assert not complaints(caplog)


async def attack(rng: random.Random, serve: Serving) -> None:
    with suppress(OSError, asyncio.TimeoutError):  # the server may have ended it
        async with raw(serve) as (reader, writer):
            writer.write(any_bytes(rng))
            if rng.random() < 0.2:
                writer.write_eof()
            if rng.random() < 0.8:
                answer = await asyncio.wait_for(reader.read(), ANSWER_SECONDS)  # to the end, if the server ends it
                assert not answer or answer.startswith(b"HTTP/1.1 "), answer
                assert b"HTTP/1.1 5" not in answer.replace(b"HTTP/1.1 505", b"").replace(b"HTTP/1.1 501", b""), answer
            writer.transport.abort()


async def ask(serve: Serving) -> None:
    chunks = await serve.events("/v1/completions", {"prompt": [1, 2], "max_tokens": 5, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["completion_tokens"] == 5


async def check_unharmed(engine: Engine, serve: Serving, num_tasks: int) -> None:
    assert (await serve.client.get("/health")).status_code == 200
    await ask(serve)
    core = serve.server.core
    await until(lambda: nothing_left(engine) and serve.server.in_flight == 0 and len(core.calls) == 0 and not core.calls._apart)
    await until(lambda: not engine._core.steps._mailbox._commands and len(asyncio.all_tasks()) <= num_tasks)


def complaints(caplog: pytest.LogCaptureFixture) -> set[tuple[str, str]]:
    """What the log calls an error: nothing that a client sends is a fault of the server."""
    return {(record.name, record.getMessage()) for record in caplog.records if record.levelno >= logging.ERROR}


@pytest.mark.parametrize(("seed", "attacks"), slow_but([(0, 100)], [(0, 100), *((seed, 400) for seed in range(1, 5))]))
async def test_nonsense_harms_nobody(seed: int, attacks: int, caplog: pytest.LogCaptureFixture) -> None:
    rngs = [random.Random(f"{seed} {number}") for number in range(attacks)]
    async with Engine(ahead=list(Ahead)[seed % 3]) as engine, serving_http(engine) as serve:
        await check_unharmed(engine, serve, 1000)
        num_tasks = len(asyncio.all_tasks())

        async def attacker(number: int) -> None:
            for mine in rngs[number::AT_ONCE]:
                await attack(mine, serve)

        async def bystander() -> None:
            while True:
                await ask(serve)

        other = asyncio.ensure_future(bystander())
        await asyncio.gather(*map(attacker, range(AT_ONCE)))
        assert not other.done()
        other.cancel()
        await asyncio.wait([other])
        await check_unharmed(engine, serve, num_tasks)
    assert not complaints(caplog)
