"""Every failure reaches the client as a status code with details that a program can read."""

from __future__ import annotations

import asyncio
import logging
import pickle
import re
from pathlib import Path

import grpc
import pytest
from fake_engine import INFO, FakeEngine, tokens
from google.rpc import error_details_pb2
from grpc import aio
from grpc_harness import Failure, Serving, events_of, failure_of, serving, stream_request, text_spec
from hang_guard import HANG_SECONDS
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.api.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineStateError,
    FieldViolation,
    InvalidRequestError,
    KVCapacityError,
    NothingToChooseError,
    NoTokenizerError,
    QueueFullError,
    RequestIdInUseError,
)
from aengine.api.outputs import Token
from aengine.api.params import SamplingParams
from aengine.engine.requests import Limits
from aengine.server.core import errors
from aengine.server.grpc import status as statuses
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
        await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)
        assert serve.server.in_flight == 0


# ---- the mapping -------------------------------------------------------------------------------------------------------


OF_THE_ENGINE = (
    "INVALID_FIELD", "CONTEXT_LENGTH_EXCEEDED", "KV_CAPACITY", "REQUEST_ID_IN_USE", "NOTHING_TO_CHOOSE", "QUEUE_FULL", "NO_TOKENIZER",
    "NOT_READY", "ENGINE_DEAD",
)  # fmt: skip


def all_errors() -> list[Exception]:
    """One of each kind that has a reason of its own."""
    return [
        InvalidRequestError.of("a", "b"),
        ContextLengthError((FieldViolation("prompt", "x"),), 10, 20),
        KVCapacityError((FieldViolation("prompt", "x"),), 10, 20),
        RequestIdInUseError.of("request_id", "x"),
        NothingToChooseError.of("bad_words", "x"),
        *(errors.ServiceError(reason, "x") for reason in sorted(errors.REASONS) if reason not in ("BUG", *OF_THE_ENGINE)),
        *(kind("x") for kind in (QueueFullError, NoTokenizerError, EngineStateError, EngineDeadError, RuntimeError)),
    ]


def test_the_reasons_are_those_of_the_schema() -> None:
    """The comment of Error.reason lists them behind their codes."""
    source = (Path(__file__).resolve().parents[2] / "protos/aengine/v1/error.proto").read_text()
    comment = " ".join(line.strip(" /") for line in source.partition("string reason")[0].rpartition("uint32 code")[2].splitlines())
    documented = {
        (code, reason) for code, reasons in re.findall(r"([A-Z_]+): ([^.]*)\.", comment) for reason in re.findall(r"[A-Z_]{2,}", reasons)
    }
    failures = [errors.describe(error, answered=answered) for error in all_errors() for answered in (False, True)]
    assert {(statuses.code_of(failure).name, failure.reason) for failure in failures} == documented


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: getattr(error, "reason", type(error).__name__))
def test_a_message_tells_what_a_status_tells(error: Exception) -> None:
    for answered in (False, True):
        failure = errors.describe(error, answered=answered)
        status, told = statuses.to_status(failure), statuses.to_error(error, answered=answered)
        assert (told.code, told.reason) == (status.code, failure.reason)
        if failure.reason != "BUG":
            assert told.message == status.message
        assert bool(told.incident_id) == (failure.reason == "BUG")
        assert told.HasField("retry_delay") == (failure.reason in ("QUEUE_FULL", "TOO_MANY_CALLS", "NOT_READY", "DRAINING", "NO_REPLICA"))
        assert [(v.field, v.description) for v in told.field_violations] == [(v.field, v.description) for v in failure.violations]


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (
            ContextLengthError((FieldViolation("prompt", "x"),), 512, 600),
            grpc.StatusCode.INVALID_ARGUMENT,
            "CONTEXT_LENGTH_EXCEEDED",
        ),
        (KVCapacityError((FieldViolation("max_tokens", "too many"),), 512, 600), grpc.StatusCode.FAILED_PRECONDITION, "KV_CAPACITY"),
    ],
)
async def test_what_does_not_fit_says_how_much_would(engine: FakeEngine, error: Exception, code: grpc.StatusCode, reason: str) -> None:
    engine.refusal = error
    async with serving(engine) as serve:
        failure = await refusal(serve)
    assert (failure.code, failure.reason, failure.info) == (code, reason, {"limit": "512", "got": "600"})
    assert failure.fields == ["spec.prompt.text" if reason == "CONTEXT_LENGTH_EXCEEDED" else "spec.stopping.max_tokens"]


@pytest.mark.parametrize(
    ("prompt", "params", "kv_tokens", "kind", "field", "limit", "got"),
    [
        (512, {}, 10_000, ContextLengthError, "prompt", 512, 513),
        (500, {"max_tokens": 13}, 10_000, ContextLengthError, "max_tokens", 512, 513),
        (500, {"min_tokens": 13}, 10_000, ContextLengthError, "min_tokens", 512, 513),
        (512, {}, 64, ContextLengthError, "prompt", 512, 513),
        (64, {}, 64, KVCapacityError, "prompt", 64, 65),
        (60, {"max_tokens": 5}, 64, KVCapacityError, "max_tokens", 64, 65),
    ],
)
def test_the_engine_tells_what_can_never_fit(
    prompt: int, params: dict[str, int], kv_tokens: int, kind: type[InvalidRequestError], field: str, limit: int, got: int
) -> None:
    with pytest.raises(kind) as caught:
        Limits(INFO, kv_tokens, 20).check(SamplingParams(**params), prompt)  # type: ignore[arg-type]
    error = caught.value
    assert isinstance(error, ContextLengthError | KVCapacityError)
    assert (error.field, error.limit, error.got) == (field, limit, got)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.violations, copy.limit, copy.got) == (kind, error.violations, limit, got)
    moved = error.moved(lambda name: f"spec.{name}")
    assert (type(moved), moved.field, moved.limit) == (kind, f"spec.{field}", limit)  # type: ignore[attr-defined]


def test_what_fits_exactly_fits() -> None:
    Limits(INFO, 512, 20).check(SamplingParams(max_tokens=12), 500)


TEXTS = st.text(min_size=0, max_size=2000) | st.sampled_from(["\U0001f600" * 3000, "%" * 5000, "\0" * 5000, "x" * 100_000])


@given(texts=st.lists(TEXTS, min_size=1, max_size=100), request_id=st.just("r" * 128), debug=st.booleans())
@settings(max_examples=60, deadline=None)
def test_trailers_stay_below_8_kib(texts: list[str], request_id: str, debug: bool) -> None:
    """As HTTP/2 counts them, in base64 and percent-encoded; more makes clients drop the answer."""
    made = [
        InvalidRequestError([FieldViolation(text, text) for text in texts]),
        ContextLengthError([FieldViolation(text, text) for text in texts], 2**63, 2**63),
        errors.ServiceError("MODEL_NOT_FOUND", texts[-1], resource=("model", texts[0])),
        errors.request_not_found(texts[0]),
        QueueFullError(texts[0]),
        deep_bug(texts[0]),
    ]
    for error in made:
        status = statuses.to_status(errors.describe(error), debug=debug)
        message = "".join(chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in status.message.encode())
        trailers = {
            "grpc-status": "13",
            "grpc-message": message,
            "grpc-status-details-bin": "x" * (4 * ((status.ByteSize() + 2) // 3)),
            "x-request-id": request_id,
            "grpc-retry-pushback-ms": "1000",
        }
        assert sum(len(name) + len(value) + 32 for name, value in trailers.items()) < 8000


AWKWARD = [
    "",
    " ",
    "\n",
    "trailing ",
    "\tleading",
    "two\nlines",
    "a\0b",
    "\x85\u2028",
    "\u202e",
    "\ud800",
    "x" * 477 + "   " + "y" * 100,
    " " * 1000 + "late",
]


@pytest.mark.parametrize("text", AWKWARD, ids=lambda text: ascii(text[:12]))
def test_a_text_is_never_empty_and_always_one_clean_line(text: str) -> None:
    """Trailing space is lost on the way of a header, and a line more in a log is one that was forged."""
    for error in (InvalidRequestError([FieldViolation(text, text)]), QueueFullError(text), errors.request_not_found(text)):
        status, told = statuses.to_status(errors.describe(error)), statuses.to_error(error)
        texts = [status.message, told.message]
        texts += [part for violation in told.field_violations for part in (violation.field, violation.description)]
        for packed in status.details:
            for detail in (error_details_pb2.BadRequest(), error_details_pb2.ResourceInfo()):
                if packed.Unpack(detail):
                    texts += [part for one in getattr(detail, "field_violations", ()) for part in (one.field, one.description)]
                    texts += [detail.resource_name] if isinstance(detail, error_details_pb2.ResourceInfo) else []
        for told_text in texts:
            assert told_text
            assert told_text == told_text.strip()
            assert told_text.isprintable()
    if "late" in text:
        assert errors.describe(QueueFullError(text)).message == "late"


def deep_bug(text: str, depth: int = 30) -> Exception:
    try:
        if depth:
            raise deep_bug(text, depth - 1)
        raise RuntimeError(text)
    except RuntimeError as error:
        return error


async def test_tracebacks_are_for_a_server_that_was_told_to_tell_them(engine: FakeEngine) -> None:
    engine.refusal = KeyError("a secret")
    async with serving(engine, debug_errors=True) as serve:
        failure = await refusal(serve)
    (debug,) = failure.details
    assert isinstance(debug, error_details_pb2.DebugInfo)
    assert debug.detail.rstrip().endswith("KeyError: 'a secret'")
    async with serving(engine) as serve:
        assert (await refusal(serve)).details == []


async def test_the_largest_refusal_reaches_the_client_whole(engine: FakeEngine) -> None:
    engine.refusal = InvalidRequestError([FieldViolation("\U0001f600" * 500, "\U0001f600" * 5000) for _ in range(100)])
    async with serving(engine) as serve:
        failure = await refusal(serve)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert len(failure.fields) >= 2
