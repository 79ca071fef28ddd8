"""Many things are done a few at a time, and the others have their turns in between."""

from __future__ import annotations

import asyncio
import gc

import pytest
from fake_engine import FakeEngine
from grpc_harness import Serving, serving, stream_request, text_spec
from oracle_engine import until
from session_client import SessionClient, begin, opening, submission

from aengine.api.errors import InvalidRequestError
from aengine.server.core.core import CHUNK_SIZE, in_chunks
from aengine.v1.generation_service_pb2 import BatchGenerateRequest, GenerateRequest

pytestmark = pytest.mark.anyio


class Turns:
    """Counts what happens between two turns of another task: `most`."""

    def __init__(self) -> None:
        self.count = self.most = 0
        self.ticking = asyncio.create_task(self._tick())

    def note(self) -> None:
        self.count += 1
        self.most = max(self.most, self.count)

    async def _tick(self) -> None:
        while True:
            self.count = 0
            await asyncio.sleep(0)


async def test_a_few_have_their_turn_and_then_the_others() -> None:
    turns = Turns()
    done: list[int] = []

    async def work(number: int) -> None:
        turns.note()
        await asyncio.sleep(0)
        done.append(number)
        if number % 2:
            raise RuntimeError("which nobody hears of")

    await in_chunks(range(3 * CHUNK_SIZE + 1), lambda number: asyncio.create_task(work(number)))
    assert sorted(done) == list(range(3 * CHUNK_SIZE + 1))
    assert turns.most == CHUNK_SIZE
    turns.ticking.cancel()


async def test_when_it_is_cancelled_none_is_forgotten() -> None:
    begun: list[int] = []
    turns = Turns()

    async def work(number: int) -> None:
        turns.note()
        begun.append(number)
        await asyncio.sleep(0)

    ending = asyncio.create_task(in_chunks(range(3 * CHUNK_SIZE), lambda number: asyncio.create_task(work(number))))
    await until(lambda: bool(begun))
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    await until(lambda: len(begun) == 3 * CHUNK_SIZE)
    assert sorted(begun) == list(range(3 * CHUNK_SIZE))
    assert turns.most == CHUNK_SIZE
    turns.ticking.cancel()


COUNT = 3 * CHUNK_SIZE


async def session(serve: Serving, engine: FakeEngine) -> object:
    client = SessionClient(serve)
    await begin(client, engine, *range(COUNT), credit=0)
    return client.call


async def batch(serve: Serving, engine: FakeEngine) -> object:
    return serve.generation.BatchGenerate(BatchGenerateRequest(requests=[GenerateRequest(spec=text_spec())] * COUNT))


@pytest.mark.parametrize("kind", [session, batch])
async def test_a_client_that_leaves_many_requests_holds_up_nobody(engine: FakeEngine, kind: object) -> None:
    async with serving(engine) as serve:
        call = await kind(serve, engine)  # type: ignore[operator]
        await until(lambda: len(engine.streams) == COUNT)
        turns = Turns()
        for stream in engine.streams.values():
            close = stream.aclose

            async def noted(close: object = close) -> None:
                turns.note()
                await close()  # type: ignore[operator]

            stream.aclose = noted  # type: ignore[method-assign]
        call.cancel()
        await until(lambda: not engine.streams and serve.server.in_flight == 0)
        assert 0 < turns.most <= CHUNK_SIZE
        turns.ticking.cancel()


@pytest.mark.slow
async def test_what_a_session_was_refused_is_kept_as_words_alone(engine: FakeEngine) -> None:
    """Not as exceptions, which hold the whole request: a client without credit could have 4,096 of them kept."""
    bad = stream_request("x" * 100_000)
    bad.spec.sampling.top_p = 7
    async with serving(engine) as serve:
        client = SessionClient(serve)
        await client.say(opening(0), *(submission(tag, bad) for tag in range(10)), submission(10, stream_request()))
        await engine.submitted.get()  # so they were all read
        gc.collect()
        kept = [one for one in gc.get_objects() if type(one) is InvalidRequestError]  # those of other modules' cases, too
        assert not [one for one in kept if "7.0 is not in" in str(one)]
        client.call.cancel()
