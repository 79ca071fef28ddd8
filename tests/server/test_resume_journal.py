"""Resumable streams with a journal: what the next server makes of those that the one before had not ended, or had."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_harness import Serving, failure_of, serving
from oracle_engine import OracleEngine, StepGate, until

from aengine.server.core.calls_in_flight import Caller
from aengine.v1.generation_pb2 import GenerationEvent, GenerationSpec, OutputOptions, StreamOptions
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, ResumeGenerateRequest, StreamGenerateRequest

pytestmark = pytest.mark.anyio

HOLD = 20
"""The step at which the first server stands still."""


def request(request_id: str = "mine", *, n: int = 1, top_k: int | None = None, max_tokens: int = 40) -> StreamGenerateRequest:
    spec = GenerationSpec(output=OutputOptions(token_ids=True), stream=StreamOptions(resumable=True))
    spec.prompt.token_ids.ids.extend([3, 1, 4])
    spec.sampling.n = n
    spec.stopping.max_tokens, spec.stopping.ignore_eos = max_tokens, True
    if top_k is not None:
        spec.output.logprobs.top_k = top_k
    return StreamGenerateRequest(spec=spec, request_id=request_id)


async def begin(serve: Serving, asked: StreamGenerateRequest, count: int) -> list[GenerationEvent]:
    """The first events of a stream, which is left then."""
    call = serve.generation.StreamGenerate(asked)
    events = [(await anext(aiter(call))).event for _ in range(count)]
    call.cancel()
    return events


async def open_at_end(serve: Serving, gate: StepGate) -> None:
    """Let the engine go on once the server ends, which has what came until then."""
    await until(lambda: serve.server.resumables._closing)
    gate.open()


async def go_on(serve: Serving, events: list[GenerationEvent], name: str = "mine") -> list[GenerationEvent]:
    asked = ResumeGenerateRequest(request_id=name, resume_token=events[0].started.resume_token, next_event_number=len(events))
    return [*events, *[response.event async for response in serve.generation.ResumeGenerate(asked)]]


def tokens_of(events: list[GenerationEvent]) -> list[int]:
    assert [event.event_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert all(delta.num_tokens == 1 for delta in deltas), "events do not depend on what comes together"
    assert [delta.token_offset for delta in deltas] == list(range(len(deltas)))
    return [token_id for delta in deltas for token_id in delta.token_ids]


@pytest.mark.parametrize("top_k", [None, 1])
async def test_one_that_was_cut_goes_on_behind_what_is_known(tmp_path: Path, top_k: int | None) -> None:
    """With logprobs it is made again from its beginning."""
    async with OracleEngine() as engine:
        gate = StepGate(engine, at=HOLD)
        async with serving(engine, journal=str(tmp_path)) as serve:
            events = await begin(serve, request(top_k=top_k), 12)
            opening = asyncio.create_task(open_at_end(serve, gate))
        await opening
        async with serving(engine, journal=str(tmp_path)) as serve:
            opened = asyncio.ensure_future(go_on(serve, events))
            await until(lambda: serve.server.core.backend.streams.find("mine", Caller()))
            (stream,) = serve.server.core.backend.streams.find("mine", Caller())
            assert (stream.known_lengths[0] > 10) == (top_k is None)
            cut = await opened
            whole = [response.event async for response in serve.generation.StreamGenerate(_same(request(top_k=top_k), cut))]
    assert tokens_of(cut) == tokens_of(whole)
    assert len(tokens_of(cut)) == 40
    assert (cut[-1].finished.usage.completion_tokens, cut[-2].sequence_finished.num_tokens) == (40, 40)
    assert [event.delta.logprobs for event in cut] == [event.delta.logprobs for event in whole]


def _same(asked: StreamGenerateRequest, events: list[GenerationEvent]) -> StreamGenerateRequest:
    asked.spec.sampling.seed, asked.request_id = events[0].started.seed, "again"
    return asked


async def test_one_that_has_ended_is_read_again(tmp_path: Path) -> None:
    async with OracleEngine() as engine:
        async with serving(engine, journal=str(tmp_path)) as serve:
            events = await begin(serve, request(max_tokens=6), 3)
            whole = await go_on(serve, events)
            cancelled = await begin(serve, request("other", max_tokens=300), 3)
            await serve.generation.CancelRequests(CancelRequestsRequest(request_ids=["other"]))
            cancelled = await go_on(serve, cancelled, "other")
        async with serving(engine, journal=str(tmp_path)) as serve:
            assert await go_on(serve, whole[:1]) == whole
            assert await go_on(serve, cancelled[:1], "other") == cancelled, "one that was cancelled is not gone on with"


async def test_what_chance_orders_ends_with_the_process(tmp_path: Path) -> None:
    async with OracleEngine() as engine:
        async with serving(engine, journal=str(tmp_path)) as serve:
            events = await begin(serve, request(n=2), 4)
        async with serving(engine, journal=str(tmp_path)) as serve:
            with pytest.raises(aio.AioRpcError) as caught:
                await go_on(serve, events)
            assert failure_of(caught.value).reason == "REQUEST_NOT_FOUND"
            assert await serve.server.core.journal.unfinished("") == []


async def test_one_that_is_dropped_is_forgotten(tmp_path: Path) -> None:
    async with OracleEngine() as engine, serving(engine, journal=str(tmp_path)) as serve:
        asked = request(max_tokens=300)
        asked.spec.stream.retain.FromMilliseconds(1)
        await begin(serve, asked, 3)
        await until(lambda: not serve.server.in_flight)
        await asyncio.gather(*serve.server.resumables._saving)
        assert await serve.server.core.journal.list_answers("stream_", Caller()) == []


async def test_one_that_cannot_be_made_again_says_why(tmp_path: Path) -> None:
    async with OracleEngine() as engine:
        gate = StepGate(engine, at=HOLD)
        async with serving(engine, journal=str(tmp_path)) as serve:
            asked = request(max_tokens=300)
            events = await begin(serve, asked, 4)
            opening = asyncio.create_task(open_at_end(serve, gate))
        await opening
    smaller = OracleEngine()
    smaller.runner.max_model_len = 64
    async with smaller, serving(smaller, journal=str(tmp_path)) as serve:
        with pytest.raises(aio.AioRpcError) as caught:
            await go_on(serve, events)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "max_tokens" in (caught.value.details() or "")
