"""Forks, rewinding and sessions are alike by the engine, a client, a router and a client of a router, in asyncio and in trio."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from both_sides import BRIDGED, ROUTED, SIDES, oracle_side
from grpc_loop import ASYNCIO
from hang_guard import HANG_SECONDS
from slow_cases import slow_but

from aengine import EngineBase, FinishReason, ForkPoint, InvalidRequestError, SamplingParams

pytestmark = pytest.mark.anyio
PROMPT = [1, 2, 3, 4, 5, 6]
PARAMS = SamplingParams(seed=9, max_tokens=60, ignore_eos=True)


@pytest.fixture(params=[pytest.param(ASYNCIO, id="asyncio"), "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=slow_but(SIDES[:-1], SIDES))
def side(request: pytest.FixtureRequest, anyio_backend: Any) -> str:
    if request.param == BRIDGED and anyio_backend == "trio":
        pytest.skip("in trio the client is bridged anyway")
    return str(request.param)


async def test_forks(side: str) -> None:
    async with oracle_side(side) as both, both.reach() as engine:
        with anyio.fail_after(HANG_SECONDS):
            await _check_forks(engine, side)


async def test_sessions(side: str) -> None:
    async with oracle_side(side) as both, both.reach() as engine:
        with anyio.fail_after(HANG_SECONDS):
            first = await engine.generate(PROMPT, PARAMS, session="a")
            assert await engine.touch("a") == 66
            assert await engine.touch("b") == await engine.touch("a", "x") == 0
            second = await engine.generate([*PROMPT, *first.token_ids[:9]], SamplingParams(seed=3, max_tokens=5), session="a")
            assert second.usage.rewritten_tokens == 59 - 9
            with pytest.raises(InvalidRequestError, match="session: "):
                await engine.touch("")


async def _check_forks(engine: EngineBase, side: str) -> None:
    stream = engine.stream(PROMPT, PARAMS, request_id="a")
    whole = [(await anext(stream)).token_id for _ in range(25)]
    forks = [stream.fork(11), stream.fork(request_id="b", tenant="x"), engine.fork("a", 3)]
    whole += [token.token_id async for token in stream]
    for at, fork in zip((11, 25, 3), forks, strict=True):
        assert [token.token_id async for token in fork] == whole[at:]
        assert fork.usage.completion_tokens == 60
        assert fork.seed == 9
        assert fork.completion().finish_reason is FinishReason.MAX_TOKENS
    assert forks[1].request_id == "b"
    other = await engine.generate(PROMPT, SamplingParams(seed=4, max_tokens=30, ignore_eos=True))
    changed = await engine.generate(ForkPoint("a", 0), SamplingParams(seed=4, max_tokens=30, ignore_eos=True))
    assert changed.token_ids == other.token_ids
    with pytest.raises(InvalidRequestError, match="known_outputs"):
        await engine.fork("b").started()  # behind all
    for wrong in (ForkPoint("nobody"), ForkPoint("a", 61), ForkPoint("a", 1, 1)):
        with pytest.raises(InvalidRequestError):
            await engine.generate(wrong, PARAMS)

    stream = engine.stream(PROMPT, PARAMS)
    read = [(await anext(stream)).token_id for _ in range(20)]
    stream.rewind(8)
    assert read[:8] + [token.token_id async for token in stream] == whole
    assert stream.completion().token_ids == tuple(whole)
    assert stream.usage.completion_tokens == 60
    await stream.aclose()
    assert stream.gone or side == ROUTED
