"""A client whose connection is cut wherever it hurts takes its stream up again, and gets every byte once."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from cutting_proxy import cutting_proxy
from grpc import aio
from grpc_harness import Serving, serving
from oracle_engine import OracleEngine, idle
from slow_cases import slow_but
from speculating import also_with_drafts

from aengine.v1.generation_pb2 import GenerationEvent, GenerationSpec, OutputOptions, StreamOptions
from aengine.v1.generation_service_pb2 import ResumeGenerateRequest, StreamGenerateRequest, StreamGenerateResponse

pytestmark = pytest.mark.anyio

SERVICE = "/aengine.v1.GenerationService/"
# A new connection at once, rather than after a time that an earlier failure doubled; and no request repeated behind our back.
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
NUM_TOKENS = 200
LEAD = 20
"""How many steps the engine may be ahead of the client, so that it still generates when the connection is cut."""


class Client:
    """Reads one stream to its end over `address`, with as many calls as it takes, each on a connection of its own."""

    def __init__(self, address: str, steps: threading.Semaphore) -> None:
        self._address = address
        self._steps = steps
        self.raw: list[bytes] = []
        self.num_starts = 0

    async def read(self, request: StreamGenerateRequest) -> list[GenerationEvent]:
        code = grpc.StatusCode.UNAVAILABLE
        while code is grpc.StatusCode.UNAVAILABLE:
            if self.raw:
                code = await self.call("ResumeGenerate", resumption(self.raw[0], len(self.raw)))
            else:  # nobody told the client how to resume
                self.num_starts += 1
                code = await self.call("StreamGenerate", request)
        assert code is grpc.StatusCode.OK
        return [event_of(raw) for raw in self.raw]

    async def call(self, method: str, request: Any) -> grpc.StatusCode:
        async with aio.insecure_channel(self._address, OPTIONS) as channel:
            call = channel.unary_stream(SERVICE + method, request_serializer=type(request).SerializeToString)(request)
            try:
                async for raw in call:
                    self.raw.append(raw)
                    self._steps.release()
            except aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK


def request_of(seed: int, delta_tokens: int = 1) -> StreamGenerateRequest:
    stream = StreamOptions(resumable=True, max_tokens_per_delta=delta_tokens)
    spec = GenerationSpec(output=OutputOptions(token_ids=True), stream=stream)
    spec.prompt.token_ids.ids.extend([3, 1, 4, 1, 5])
    spec.sampling.seed, spec.stopping.max_tokens, spec.stopping.ignore_eos = seed, NUM_TOKENS, True
    return StreamGenerateRequest(spec=spec)


def event_of(raw: bytes) -> GenerationEvent:
    return StreamGenerateResponse.FromString(raw).event


def resumption(first: bytes, number: int) -> ResumeGenerateRequest:
    started = event_of(first).started
    return ResumeGenerateRequest(request_id=started.request_id, resume_token=started.resume_token, next_event_number=number)


@pytest.fixture
def steps() -> threading.Semaphore:
    return threading.Semaphore(LEAD)


@pytest.fixture
async def oracle(steps: threading.Semaphore) -> AsyncIterator[OracleEngine]:
    async with OracleEngine() as engine:
        engine.runner.before_step = lambda plan: steps.acquire(timeout=0.002) and None  # a stream that was given up goes on alone
        yield engine


@pytest.fixture
async def serve(oracle: OracleEngine) -> AsyncIterator[Serving]:
    async with serving(oracle) as serve:
        yield serve
    assert idle(oracle)
    assert serve.server.in_flight == 0


async def check(serve: Serving, oracle: OracleEngine, client: Client, seed: int) -> None:
    """What `client` got is what the server keeps, byte for byte, and what the request generates alone."""
    again = Client(serve.server.address, threading.Semaphore())
    assert await again.call("ResumeGenerate", resumption(client.raw[0], 0)) is grpc.StatusCode.OK
    assert client.raw == again.raw
    events = [event_of(raw) for raw in client.raw]
    assert [event.event_number for event in events] == list(range(len(events)))
    assert [events[0].WhichOneof("event"), events[-1].WhichOneof("event")] == ["started", "finished"]
    assert [token_id for event in events for token_id in event.delta.token_ids] == oracle.solo(seed)[0]


@pytest.mark.slow
@pytest.mark.parametrize("points", slow_but([16], [16, 50]))
async def test_a_stream_cut_at_many_points_is_byte_exact(
    points: int, oracle: OracleEngine, serve: Serving, steps: threading.Semaphore
) -> None:
    async with cutting_proxy(serve.server.address) as proxy:
        client = Client(proxy.address, steps)
        whole = await client.read(request_of(1))
        length = proxy.num_bytes
    await check(serve, oracle, client, 1)
    draw = random.Random(50)
    starts = cuts = 0
    for point in (0, 1, length // 2, length - 1, length, *(draw.randrange(length) for _ in range(points - 5))):
        async with cutting_proxy(serve.server.address, [point]) as proxy:
            client = Client(proxy.address, steps)
            events = await client.read(request_of(1))
            starts, cuts = starts + client.num_starts, cuts + proxy.num_cuts
        await check(serve, oracle, client, 1)
        assert events[1:-1] == whole[1:-1]  # but for the first, which names the request, and the last, which tells its timing
    assert cuts >= points - 5  # a run may be a few bytes shorter than the first
    assert points + 2 <= starts < points + 10  # some were cut before the first event, most after it


@pytest.mark.slow
@also_with_drafts
async def test_a_stream_cut_again_and_again_is_byte_exact(oracle: OracleEngine, serve: Serving, steps: threading.Semaphore) -> None:
    draw = random.Random(8)
    for seed in range(2, 7):
        budgets = [draw.randrange(100, 700) for _ in range(40)]
        async with cutting_proxy(serve.server.address, budgets) as proxy:
            client = Client(proxy.address, steps)
            await client.read(request_of(seed, delta_tokens=4))
            assert proxy.num_cuts >= 5
        await check(serve, oracle, client, seed)
