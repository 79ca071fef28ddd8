"""Every failure reaches the client as a status code with details that a program can read."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from fake_engine import FakeEngine, tokens
from google.rpc import error_details_pb2
from grpc import aio
from grpc_harness import Failure, Serving, events_of, failure_of, serving, stream_request, text_spec

from aengine.errors import EngineDeadError, FieldViolation, InvalidRequestError, QueueFullError
from aengine.outputs import Token
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, GenerateRequest, StreamGenerateRequest
from aengine.v1.model_service_pb2 import GetModelRequest

pytestmark = pytest.mark.anyio


async def refusal(serve: Serving, request: StreamGenerateRequest | None = None) -> Failure:
    """How a stream fails; the unary call must fail alike."""
    request = request or stream_request()
    failures = []
    for call in (
        events_of(serve.generation.StreamGenerate(request)),
        serve.generation.Generate(GenerateRequest(spec=request.spec, request_id=request.request_id or None)),
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        failures.append(failure_of(caught.value))
    streamed, unary = failures
    assert (streamed.code, streamed.reason, streamed.fields) == (unary.code, unary.reason, unary.fields)
    return streamed


async def test_all_bad_fields_are_named_while_another_stream_goes_on(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        other = serve.generation.StreamGenerate(stream_request())
        stream = await engine.submitted.get()
        request = stream_request(request_id="???")
        request.spec.sampling.temperature = float("nan")
        request.spec.sampling.top_p = 0
        request.spec.prompt.text = ""
        failure = await refusal(serve, request)
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert set(failure.fields) == {"request_id", "spec.sampling.temperature", "spec.sampling.top_p", "spec.prompt.text"}
        assert "spec.sampling.top_p: 0.0 is not in (0, 1]" in failure.message
        stream.push(tokens("a"))
        assert len(await events_of(other)) == 4


async def test_what_the_engine_refuses_is_an_invalid_argument(engine: FakeEngine) -> None:
    engine.refusal = InvalidRequestError([FieldViolation("prompt", "600 tokens are more than 511")])
    async with serving(engine) as serve:
        failure = await refusal(serve)
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["spec.prompt.text"])


async def test_huge_violations_fit_into_a_header(engine: FakeEngine) -> None:
    engine.refusal = InvalidRequestError([FieldViolation(f"field{i}", "x" * 100_000) for i in range(1000)])
    async with serving(engine) as serve:
        failure = await refusal(serve)
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.fields[0] == "field0"


async def test_a_full_queue_is_exhausted_with_a_retry_hint(engine: FakeEngine) -> None:
    engine.refusal = QueueFullError("4096 requests wait already")
    async with serving(engine) as serve:
        failure = await refusal(serve)
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert isinstance(failure.details[0], error_details_pb2.RetryInfo)
    assert failure.metadata["grpc-retry-pushback-ms"] == "1000"


async def test_a_request_id_in_use_already_exists(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        first = serve.generation.StreamGenerate(stream_request(request_id="mine"))
        await engine.submitted.get()
        failure = await refusal(serve, stream_request(request_id="mine"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
        engine.streams["mine"].push(tokens("a"))
        assert len(await events_of(first)) == 4


async def test_another_model_is_not_found(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        failure = await refusal(serve, stream_request(model="gpt"))
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        (resource,) = failure.details
        assert isinstance(resource, error_details_pb2.ResourceInfo)
        assert (resource.resource_type, resource.resource_name) == ("model", "gpt")
        with pytest.raises(aio.AioRpcError) as caught:
            await serve.model.GetModel(GetModelRequest(model="gpt"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        engine.script = tokens("a")
        assert len(await events_of(serve.generation.StreamGenerate(stream_request(model="fake")))) == 4


async def test_an_engine_that_loads_is_unavailable_with_a_retry_hint() -> None:
    async with serving(FakeEngine(running=False)) as serve:
        failure = await refusal(serve)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
        (retry,) = failure.details
        assert isinstance(retry, error_details_pb2.RetryInfo)
        assert retry.retry_delay.seconds == 1
        assert failure.metadata["grpc-retry-pushback-ms"] == "1000"
        for call in (serve.model.GetModel(GetModelRequest()), serve.generation.CancelRequests(CancelRequestsRequest(request_ids=["a"]))):
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert failure_of(caught.value).reason == "NOT_READY"


async def test_a_dead_engine_is_unavailable_before_and_aborted_after_the_first_event(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        engine.refusal = EngineDeadError("the step thread died")
        failure = await refusal(serve)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD")
        engine.refusal = None
        engine.script = [Token(0, 10, "a"), EngineDeadError("the step thread died")]
        with pytest.raises(aio.AioRpcError) as caught:
            await events_of(serve.generation.StreamGenerate(stream_request()))
        assert (failure_of(caught.value).code, failure_of(caught.value).reason) == (grpc.StatusCode.ABORTED, "ENGINE_DEAD")


async def test_a_bug_is_internal_and_told_only_to_the_log(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.refusal = KeyError("a secret")
    async with serving(engine) as serve:
        with caplog.at_level(logging.ERROR), pytest.raises(aio.AioRpcError) as caught:
            await events_of(serve.generation.StreamGenerate(stream_request()))
    failure = failure_of(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "BUG")
    assert "secret" not in str(caught.value)
    assert failure.info["incident_id"] in failure.message
    (record,) = [record for record in caplog.records if failure.info["incident_id"] in record.getMessage()]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


@pytest.mark.parametrize("count", [0, 1025])
async def test_cancel_requests_takes_1_to_1024_ids(engine: FakeEngine, count: int) -> None:
    async with serving(engine) as serve:
        with pytest.raises(aio.AioRpcError) as caught:
            await serve.generation.CancelRequests(CancelRequestsRequest(request_ids=["a"] * count))
    assert failure_of(caught.value).fields == ["request_ids"]


async def test_a_failed_stream_is_closed(engine: FakeEngine) -> None:
    engine.script = [RuntimeError("boom")]
    async with serving(engine) as serve:
        with pytest.raises(aio.AioRpcError):
            await serve.generation.Generate(GenerateRequest(spec=text_spec()))
        stream = engine.submitted.get_nowait()
        await asyncio.wait_for(stream.closed.wait(), 5)
        assert serve.server.in_flight == 0
