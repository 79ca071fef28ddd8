"""What the generation RPCs send, over a real channel; the engine is a script."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest
from event_fold import EventFold
from fake_engine import ARRIVAL, FakeEngine, tokens
from grpc import aio
from grpc_harness import events_of, failure_of, serving, stream_request, text_spec
from hang_guard import HANG_SECONDS, growing

from aengine.api.outputs import DraftUsage, FinishReason, Token, TokenLogprob
from aengine.server.grpc.generation.events import MAX_PROMPT_LOGPROBS_BYTES
from aengine.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE,
    FINISH_REASON_STOP_STRING,
    FINISH_REASON_STOP_TOKEN,
    LogprobOptions,
    OutputOptions,
)
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, GenerateRequest, StreamGenerateRequest

pytestmark = pytest.mark.anyio


async def test_usage_tells_drafts_by_drafter(engine: FakeEngine) -> None:
    engine.script, engine.drafts = tokens("a"), (DraftUsage("grammar", 1, 4, 4), DraftUsage("mtp", 2, 5, 0))
    async with serving(engine) as serve:
        events = await events_of(serve.generation.StreamGenerate(stream_request()))
    assert [(one.drafter, one.steps, one.drafted, one.accepted) for one in events[-1].finished.usage.drafts] == [
        ("grammar", 1, 4, 4),
        ("mtp", 2, 5, 0),
    ]


async def test_a_stream_is_started_deltas_ends_finished(engine: FakeEngine) -> None:
    engine.script = tokens("a", "", "bc")
    async with serving(engine) as serve:
        events = await events_of(serve.generation.StreamGenerate(stream_request(request_id="mine", output=OutputOptions(token_ids=True))))
    assert [event.WhichOneof("event") for event in events] == ["started", *["delta"] * 3, "sequence_finished", "finished"]
    assert [event.event_number for event in events] == list(range(6))
    started, ended, finished = events[0].started, events[4].sequence_finished, events[5].finished
    deltas = [event.delta for event in events[1:4]]
    assert (started.request_id, started.model, started.prompt.num_tokens, started.seed) == ("mine", "fake", 3, 77)
    assert [(delta.text, list(delta.token_ids), delta.num_tokens, delta.token_offset) for delta in deltas] == [
        ("a", [10], 1, 0), ("", [11], 1, 1), ("bc", [12], 1, 2),
    ]  # fmt: skip
    assert (ended.num_tokens, ended.finish.WhichOneof("matched")) == (3, None)
    assert (finished.usage.prompt_tokens, finished.usage.cached_prompt_tokens, finished.usage.completion_tokens) == (3, 1, 3)
    timing = finished.timing
    assert timing.arrival.ToNanoseconds() == ARRIVAL * 1e9
    phases = (timing.queue, timing.prefill, timing.first_token, timing.decode)
    assert [phase.ToNanoseconds() for phase in phases] == [2, 4, 6, 1]  # as the engine tells them
    assert timing.total.ToNanoseconds() > 0


@pytest.mark.parametrize(
    "script",
    [
        tokens("a", "", "bc"),
        tokens("a", "", reason=FinishReason.STOP_TOKEN),
        [Token(0, 10, ""), Token(0, -1, "\ufffd", finish_reason=FinishReason.CANCELLED)],
        [Token(0, -1, "", finish_reason=FinishReason.DEADLINE)],
        [Token(1, 5, "x"), Token(0, 6, "y", finish_reason=FinishReason.EOS), Token(1, 7, "z", finish_reason=FinishReason.MAX_TOKENS)],
        [
            Token(1, 5, "x", finish_reason=FinishReason.STOP_STRING, stop_reason="stop 1"),
            Token(0, 6, "", finish_reason=FinishReason.STOP_STRING, stop_reason="stop 0"),
        ],
        [
            Token(1, 5, "x", logprob=-1.5, rank=2, top_logprobs={6: -0.5, 5: -1.5}),
            Token(0, 6, "y", logprob=-0.5, rank=1, top_logprobs={6: -0.5, 5: -1.5}, finish_reason=FinishReason.EOS),
            Token(1, 7, "z", logprob=-2.5, rank=9, top_logprobs={1: -0.25, 2: -0.5}, finish_reason=FinishReason.MAX_TOKENS),
        ],
    ],
    ids=["max_tokens", "stop_token", "cancelled", "deadline", "two sequences", "stop strings", "logprobs"],
)
async def test_the_unary_reply_is_the_fold_of_the_stream(engine: FakeEngine, script: list[Token]) -> None:
    engine.script = script
    async with serving(engine) as serve:
        for output in (OutputOptions(), OutputOptions(token_ids=True), OutputOptions(text=False)):
            spec = text_spec(output=output)
            unary = await serve.generation.Generate(GenerateRequest(spec=spec, request_id="r"))
            fold = EventFold()
            for event in await events_of(serve.generation.StreamGenerate(stream_request(request_id="r", output=output))):
                fold.add(event)
            assert unary.usage.completion_tokens == sum(sequence.num_tokens for sequence in unary.sequences)
            folded = fold.response()
            for response in (unary, folded):
                response.ClearField("timing")
            assert unary == folded
            for index, sequence in enumerate(unary.sequences):
                mine = [token for token in script if token.index == index]
                assert sequence.text == ("".join(token.text for token in mine) if output.text or not output.HasField("text") else "")
                ids = [token.token_id for token in mine if token.token_id >= 0]
                assert list(sequence.token_ids) == (ids if output.token_ids else [])
                assert sequence.num_tokens == len(ids)
                known = [token for token in mine if token.logprob is not None]
                assert sequence.HasField("logprobs") == bool(known)
                assert list(sequence.logprobs.logprobs) == [token.logprob for token in known]
                assert sequence.logprobs.top_k == (2 if known else 0)


async def test_a_stop_token_is_named(engine: FakeEngine) -> None:
    engine.script = tokens("a", "", reason=FinishReason.STOP_TOKEN)
    async with serving(engine) as serve:
        response = await serve.generation.Generate(GenerateRequest(spec=text_spec()))
    assert response.sequences[0].finish.reason == FINISH_REASON_STOP_TOKEN
    assert response.sequences[0].finish.stop_token_id == 11


async def test_a_stop_string_is_named_for_each_sequence(engine: FakeEngine) -> None:
    engine.script = [Token(index, 5, "x", finish_reason=FinishReason.STOP_STRING, stop_reason=f"stop {index}") for index in (1, 0)]
    async with serving(engine) as serve:
        response = await serve.generation.Generate(GenerateRequest(spec=text_spec()))
    ends = [(sequence.finish.reason, sequence.finish.stop_string) for sequence in response.sequences]
    assert ends == [(FINISH_REASON_STOP_STRING, "stop 0"), (FINISH_REASON_STOP_STRING, "stop 1")]


async def test_logprobs_travel_in_columns(engine: FakeEngine) -> None:
    engine.script = [
        Token(0, 5, "x", logprob=-1.5, rank=2, top_logprobs={6: -0.5, 5: -1.5}),
        Token(0, 6, "", logprob=0.0, rank=1, top_logprobs={}),
        Token(0, -1, "y", finish_reason=FinishReason.CANCELLED),
    ]
    async with serving(engine) as serve:
        events = await events_of(serve.generation.StreamGenerate(stream_request()))
    both, bare, closing = (event.delta for event in events[1:4])
    assert (list(both.logprobs.logprobs), list(both.logprobs.ranks), both.logprobs.top_k) == ([-1.5], [2], 2)
    assert (list(both.logprobs.top_token_ids), list(both.logprobs.top_logprobs)) == ([6, 5], [-0.5, -1.5])
    assert (list(bare.logprobs.logprobs), list(bare.logprobs.ranks), bare.logprobs.top_k) == ([0.0], [1], 0)
    assert not closing.HasField("logprobs")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("top_k", [0, 3])
async def test_logprobs_of_the_prompt_come_in_pieces_before_the_first_delta(engine: FakeEngine, top_k: int) -> None:
    count = 3 * MAX_PROMPT_LOGPROBS_BYTES // (9 * (1 + top_k))
    top = {2**31 - 1 - i: -0.25 * i for i in range(top_k)}  # ids as long as they get
    engine.prompt_logprobs = (None, *(TokenLogprob(0, -0.5 * (i % 64), 2**31 - 1, top) for i in range(1, count)))
    engine.script = tokens("a", "b")
    output = OutputOptions(prompt_logprobs=LogprobOptions(top_k=top_k))
    async with serving(engine) as serve:
        events = await events_of(serve.generation.StreamGenerate(stream_request(request_id="r", output=output)))
        unary = await serve.generation.Generate(GenerateRequest(spec=text_spec(output=output), request_id="r"))
        plain = await events_of(serve.generation.StreamGenerate(stream_request()))
    kinds = [event.WhichOneof("event") for event in events]
    pieces = [event.prompt_logprobs for event in events if event.HasField("prompt_logprobs")]
    assert kinds == ["started", *["prompt_logprobs"] * len(pieces), "delta", "delta", "sequence_finished", "finished"]
    assert len(pieces) == 4
    assert all(event.ByteSize() <= MAX_PROMPT_LOGPROBS_BYTES for event in events)
    offset = 0
    for piece in pieces:
        assert (piece.token_offset, piece.logprobs.top_k) == (offset, top_k)
        offset += len(piece.logprobs.logprobs)
    assert offset == count
    whole = unary.prompt_logprobs
    assert [math.isnan(whole.logprobs[0]), whole.ranks[0], *whole.top_token_ids[:top_k]] == [True, 0, *[0] * top_k]
    assert all(map(math.isnan, whole.top_logprobs[:top_k]))
    assert list(whole.logprobs[1:]) == [-0.5 * (i % 64) for i in range(1, count)]
    assert list(whole.ranks[1:]) == [2**31 - 1] * (count - 1)
    assert list(whole.top_token_ids[top_k:]) == [*top] * (count - 1)
    assert list(whole.top_logprobs[top_k:]) == [*top.values()] * (count - 1)
    fold = EventFold()
    for event in events:
        fold.add(event)
    assert fold.response().prompt_logprobs.SerializeToString() == whole.SerializeToString()  # bytes, for the NaN equals itself
    assert not any(event.HasField("prompt_logprobs") for event in plain)


async def test_the_parameters_in_use_are_told_if_asked_for(engine: FakeEngine) -> None:
    engine.script = tokens("a")
    async with serving(engine) as serve:
        for asked in (False, True):
            spec = text_spec(output=OutputOptions(effective_params=asked))
            spec.sampling.top_k = 5
            events = await events_of(serve.generation.StreamGenerate(StreamGenerateRequest(spec=spec)))
            unary = await serve.generation.Generate(GenerateRequest(spec=spec))
            effective = events[0].started.effective_spec
            assert events[0].started.HasField("effective_spec") == unary.HasField("effective_spec") == asked
            assert unary.effective_spec == effective
    assert (effective.sampling.temperature, effective.sampling.top_k, effective.sampling.seed) == (0.5, 5, 77)
    assert not effective.HasField("prompt")


async def test_a_generated_request_id_is_told(engine: FakeEngine) -> None:
    engine.script = tokens("a")
    async with serving(engine) as serve:
        events = await events_of(serve.generation.StreamGenerate(stream_request()))
    assert events[0].started.request_id == "drawn-0"


async def test_client_cancel_closes_the_stream(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request())
        stream = await engine.submitted.get()
        stream.push(tokens("a", "b")[:1])
        await anext(aiter(call))
        call.cancel()
        await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)
        assert serve.server.in_flight == 0


async def test_client_cancel_of_a_unary_call_closes_the_stream(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.Generate(GenerateRequest(spec=text_spec()))
        stream = await engine.submitted.get()
        call.cancel()
        await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)


async def test_a_client_that_does_not_read_is_noticed_when_it_leaves(engine: FakeEngine) -> None:
    """The server waits in a write, not for a token, when the client goes."""
    engine.script = [Token(0, 10, "x" * 100_000)] * 200
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request())
        stream = await engine.submitted.get()
        while stream._items.qsize() > 150:
            await anext(aiter(call))
        call.cancel()
        await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)
        assert stream._items.qsize() > 0


async def test_a_closed_channel_closes_the_stream(engine: FakeEngine) -> None:
    async with serving(engine) as serve, aio.insecure_channel(serve.server.address) as channel:
        call = type(serve)(serve.server, channel).generation.StreamGenerate(stream_request())
        stream = await engine.submitted.get()
        await channel.close()
        await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)
        del call


async def test_the_smaller_of_deadline_and_time_limit_reaches_the_engine(engine: FakeEngine) -> None:
    engine.script = tokens("a")
    async with serving(engine) as serve:
        for limit, deadline in ((None, None), (500, None), (500, 1000), (1000, 500), (None, 500)):
            request = stream_request()
            if limit is not None:
                request.spec.stopping.time_limit.seconds = limit
            await events_of(serve.generation.StreamGenerate(request, timeout=deadline))
            timeout = engine.submitted.get_nowait().call["timeout"]
            expected = min((seconds for seconds in (limit, deadline) if seconds is not None), default=None)
            assert timeout == (expected if expected is None else pytest.approx(expected, abs=100))


@pytest.mark.slow
async def test_the_grpc_deadline_is_an_error(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        for timeout in growing(0.2):
            with pytest.raises(aio.AioRpcError) as caught:
                await events_of(serve.generation.StreamGenerate(stream_request(), timeout=timeout))
            if not engine.submitted.empty():
                break
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(engine.submitted.get_nowait().closed.wait(), HANG_SECONDS)


async def test_an_engine_that_ends_first_for_the_grpc_deadline_ends_the_call_with_it(engine: FakeEngine) -> None:
    engine.script = [Token(0, -1, "", finish_reason=FinishReason.DEADLINE)]
    async with serving(engine) as serve:
        with pytest.raises(aio.AioRpcError) as caught:
            await serve.generation.Generate(GenerateRequest(spec=text_spec()), timeout=HANG_SECONDS)
    assert (failure_of(caught.value).code, failure_of(caught.value).reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_PASSED")


async def test_a_time_limit_is_a_result_also_with_a_later_deadline(engine: FakeEngine) -> None:
    engine.script = [Token(0, 10, "a"), Token(0, -1, "", finish_reason=FinishReason.DEADLINE)]
    request = GenerateRequest(spec=text_spec())
    request.spec.stopping.time_limit.seconds = 1
    async with serving(engine) as serve:
        response = await serve.generation.Generate(request, timeout=HANG_SECONDS)
    assert response.sequences[0].finish.reason == FINISH_REASON_DEADLINE
    assert response.sequences[0].text == "a"


async def test_cancel_requests_from_another_connection(engine: FakeEngine) -> None:
    async with serving(engine) as serve, aio.insecure_channel(serve.server.address) as other:
        call = serve.generation.StreamGenerate(stream_request(request_id="mine"))
        await engine.submitted.get()
        canceller = type(serve)(serve.server, other).generation
        response = await canceller.CancelRequests(CancelRequestsRequest(request_ids=["mine", "nobody"]))
        assert (list(response.cancelled_request_ids), list(response.unknown_request_ids)) == (["mine"], ["nobody"])
        events = await events_of(call)
        assert events[-2].sequence_finished.finish.reason == FINISH_REASON_CANCELLED
        assert events[-1].WhichOneof("event") == "finished"
        response = await canceller.CancelRequests(CancelRequestsRequest(request_ids=["mine"]))
        assert list(response.unknown_request_ids) == ["mine"]


async def test_streams_do_not_wait_for_each_other(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        silent = serve.generation.StreamGenerate(stream_request(request_id="silent"))
        await engine.submitted.get()
        engine.script = tokens("a")
        assert len(await events_of(serve.generation.StreamGenerate(stream_request()))) == 4
        engine.streams["silent"].push(tokens("b"))
        assert len(await events_of(silent)) == 4
