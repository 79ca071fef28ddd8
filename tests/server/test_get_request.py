"""GetRequest: what a request is doing, from its arrival until nothing of it is left."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
import pytest
from fake_engine import ARRIVAL, FakeEngine, tokens
from grpc import aio
from grpc_harness import events_of, failure_of, serving, stream_request
from oracle_engine import OracleEngine, StepGate, busy_worker, step_with_the_loop, until

from aengine import SamplingParams
from aengine.api.outputs import RequestState, Token
from aengine.server.core.calls_in_flight import Caller
from aengine.server.grpc.services.generation import STATES
from aengine.v1.generation_pb2 import GenerationSpec, StreamOptions
from aengine.v1.generation_service_pb2 import (
    REQUEST_STATE_FINISHED,
    REQUEST_STATE_PARKED,
    REQUEST_STATE_PREPARING,
    REQUEST_STATE_RUNNING,
    REQUEST_STATE_WAITING,
    GetRequestRequest,
    GetRequestResponse,
    ResumeGenerateRequest,
    StreamGenerateRequest,
)
from aengine.v1.generation_service_pb2 import RequestState as WireState

pytestmark = pytest.mark.anyio


async def get(serve: Any, request_id: str = "mine") -> GetRequestResponse:
    response: GetRequestResponse = await serve.generation.GetRequest(GetRequestRequest(request_id=request_id))
    return response


async def refused(serve: Any, request_id: str) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await get(serve, request_id)
    failure = failure_of(caught.value)
    return failure.code, failure.reason


async def reaches(serve: Any, state: WireState) -> GetRequestResponse:
    while (told := await get(serve)).state != state:
        pass
    return told


def test_every_state_has_its_name() -> None:
    assert set(STATES) == set(RequestState)
    for state, number in STATES.items():
        assert WireState.Name(number) == f"REQUEST_STATE_{state.name}"


async def test_what_is_told_of_a_request_under_way(engine: FakeEngine) -> None:
    engine.script = tokens("a", "b")[:1]
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request(request_id="mine"))
        for _ in range(2):
            await anext(aiter(call))
        told = await get(serve)
        assert (told.request_id, told.state, told.resumable, told.next_event_number) == ("mine", REQUEST_STATE_RUNNING, False, 0)
        assert (told.usage.prompt_tokens, told.usage.cached_prompt_tokens, told.usage.completion_tokens) == (3, 1, 1)
        assert told.arrival.ToNanoseconds() == ARRIVAL * 1e9
        engine.streams["mine"].push(tokens("a", "b")[1:])
        await events_of(call)
        assert await refused(serve, "mine") == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")


async def test_what_is_told_of_a_resumable_one(engine: FakeEngine) -> None:
    engine.script = tokens("a", "b")[:1]
    request = stream_request(request_id="mine", stream=StreamOptions(resumable=True, max_tokens_per_delta=1))
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(request)
        for _ in range(2):
            await anext(aiter(call))
        told = await get(serve)
        assert (told.state, told.resumable, told.next_event_number) == (REQUEST_STATE_RUNNING, True, 2)
        engine.streams["mine"].push(tokens("a", "b")[1:])
        await events_of(call)
        told = await get(serve)
        assert (told.state, told.resumable, told.next_event_number) == (REQUEST_STATE_FINISHED, True, 5)
        assert (told.usage.completion_tokens, told.arrival.ToNanoseconds()) == (2, ARRIVAL * 1e9)
        engine.script = []
        plain = serve.generation.StreamGenerate(stream_request(request_id="mine"))  # the name is free again
        await anext(aiter(plain))
        told = await get(serve)
        assert (told.state, told.resumable, told.next_event_number) == (REQUEST_STATE_RUNNING, False, 0)
        plain.cancel()
        await until(lambda: not serve.server.in_flight)


async def test_a_request_whose_prompt_is_being_prepared() -> None:
    async with OracleEngine() as engine, serving(engine) as serve:
        with busy_worker(engine, size=100_000):
            call = serve.generation.StreamGenerate(stream_request("x" * 100_000, request_id="mine"))
            await until(lambda: engine.request_info("mine") is not None)
            told = await get(serve)
            assert (told.state, told.usage.prompt_tokens) == (REQUEST_STATE_PREPARING, 0)
            call.cancel()
            await until(lambda: not serve.server.in_flight)


async def test_the_states_of_a_request_in_their_order() -> None:
    steps = threading.Semaphore(0)
    spec = GenerationSpec(stream=StreamOptions(resumable=True, max_tokens_per_delta=1))
    spec.prompt.token_ids.ids.extend([3, 1, 4])
    spec.sampling.seed, spec.stopping.max_tokens, spec.stopping.ignore_eos = 3, 300, True
    async with OracleEngine(max_unread_tokens=8) as engine, serving(engine) as serve:
        engine.runner.before_step = lambda plan: steps.acquire() and None
        before = time.time()
        call = serve.generation.StreamGenerate(StreamGenerateRequest(spec=spec, request_id="mine"))
        started = (await anext(aiter(call))).event.started
        told = await get(serve)
        assert (told.state, told.usage.prompt_tokens, told.usage.completion_tokens) == (REQUEST_STATE_WAITING, 3, 0)
        assert before - 1 <= told.arrival.ToNanoseconds() / 1e9 <= time.time() + 1
        steps.release()
        await anext(aiter(call))
        assert (await reaches(serve, REQUEST_STATE_RUNNING)).usage.completion_tokens == 1
        call.cancel()
        resumable = serve.server.resumables.find("mine", Caller())
        assert resumable is not None
        await until(lambda: not resumable.replay.has_reader)
        resumable.replay.ring._max_events = 16
        step_with_the_loop(engine)
        steps.release()  # for the step that waits
        parked = await reaches(serve, REQUEST_STATE_PARKED)
        assert parked.resumable
        assert parked.next_event_number < parked.usage.completion_tokens < 300
        assert parked.arrival == told.arrival
        rest = ResumeGenerateRequest(request_id="mine", resume_token=started.resume_token, next_event_number=2)
        await events_of(serve.generation.ResumeGenerate(rest))
        told = await reaches(serve, REQUEST_STATE_FINISHED)
        assert (told.usage.completion_tokens, told.next_event_number) == (300, 303)


async def test_a_request_of_the_embedding_program_is_known_too() -> None:
    async with OracleEngine() as engine, serving(engine) as serve:
        gate = StepGate(engine)
        async with engine.stream([3, 1, 4], SamplingParams(seed=1, max_tokens=5), request_id="mine"):
            told = await get(serve)
            assert (told.state, told.resumable) == (REQUEST_STATE_WAITING, False)
            gate.open()


async def test_one_that_is_over_in_the_engine_but_still_being_sent(engine: FakeEngine) -> None:
    """The engine may have forgotten it."""
    engine.script = [*[Token(0, 10, "x" * 100_000)] * 200, *tokens("end")]
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request(request_id="mine"))
        stream = await engine.submitted.get()
        await anext(aiter(call))
        del engine.streams["mine"]
        assert (await get(serve)).request_id == "mine"
        assert stream.unread > 0
        call.cancel()
        await stream.closed.wait()


async def test_who_is_unknown(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        assert await refused(serve, "nobody") == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        assert await refused(serve, "") == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
