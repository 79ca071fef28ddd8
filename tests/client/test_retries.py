"""When a client asks again, when it takes a stream up again, and when it must not."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import anyio
import grpc
import pytest
from both_sides import REMOTE, reached
from cutting_proxy import cutting_proxy
from grpc_harness import serving
from hang_guard import HANG_SECONDS
from oracle_engine import OracleEngine, idle, until
from scripted_server import fails, says, scripted, whole_answer
from speculating import also_with_drafts

from aengine import (
    ConnectionLostError,
    EngineDeadError,
    EngineStateError,
    FinishReason,
    InvalidRequestError,
    RequestIdInUseError,
    SamplingParams,
    ServerError,
    Token,
)
from aengine.api.request import RequestOptions
from aengine.client import AsyncClient
from aengine.client.active_request import MAX_UNREAD_TOKENS
from aengine.client.link import FIRST_BACKOFF, LONGEST_BACKOFF, Backoff, Failure
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, ResumeGenerateRequest, StreamGenerateRequest

pytestmark = pytest.mark.anyio

IDS = [10, 11, 12]
UNAVAILABLE = fails()


async def ids_of(stream: Any) -> list[int]:
    with anyio.fail_after(HANG_SECONDS):
        return [token.token_id async for token in stream]


class TestBeforeTheFirstEvent:
    async def test_unavailable_is_asked_again(self) -> None:
        async with scripted(says([], then=UNAVAILABLE), says([], then=UNAVAILABLE), says(whole_answer(IDS))) as script:
            async with AsyncClient(script.address) as client:
                stream = client.stream("x")
                assert await ids_of(stream) == IDS
            assert len(script.calls) == 3
            assert script.calls[0] == script.calls[1] == script.calls[2]  # the seed too, and the name
            assert script.calls[0].request_id == stream.request_id
            assert script.calls[0].spec.sampling.seed == stream.seed

    async def test_nobody_needs_to_read_for_that(self) -> None:
        async with scripted(says([], then=UNAVAILABLE), says(whole_answer(IDS))) as script, AsyncClient(script.address) as client:
            stream = client.stream("x")
            await until(lambda: len(script.calls) == 2)
            assert await ids_of(stream) == IDS

    @pytest.mark.parametrize(
        ("reason", "kind"),
        [("", ConnectionLostError), ("NOT_READY", EngineStateError), ("DRAINING", EngineStateError), ("ENGINE_DEAD", EngineDeadError)],
    )
    async def test_only_so_often(self, reason: str, kind: type[Exception]) -> None:
        answers = [says([], then=fails(reason=reason, retry_seconds=0.01))] * 3
        async with scripted(*answers) as script, AsyncClient(script.address, max_retries=2) as client:
            with pytest.raises(kind, match="as told"):
                await ids_of(client.stream("x"))
            assert len(script.calls) == 3

    @pytest.mark.parametrize(
        "refusal",
        [
            fails(grpc.StatusCode.INTERNAL, reason="BUG"),
            fails(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", retry_seconds=0.01),
            fails(metadata=(("grpc-retry-pushback-ms", "-1"),)),
            fails(metadata=(("grpc-retry-pushback-ms", "soon"),)),
            fails(retry_seconds=3600.0),
        ],
    )
    async def test_not_what_the_server_does_not_want(self, refusal: Any) -> None:
        async with scripted(says([], then=refusal)) as script, AsyncClient(script.address) as client:
            with pytest.raises(Exception, match="as told"):
                await ids_of(client.stream("x"))
            assert len(script.calls) == 1

    async def test_remains_of_a_lost_call_are_cleared(self) -> None:
        """The server may have taken the request before the connection broke."""
        in_use = fails(grpc.StatusCode.ALREADY_EXISTS, reason="REQUEST_ID_IN_USE")
        answers = (says([], then=UNAVAILABLE), says([], then=in_use), says(whole_answer(IDS)))
        async with scripted(*answers) as script, AsyncClient(script.address) as client:
            stream = client.stream("x")
            assert await ids_of(stream) == IDS
            kinds = [type(call) for call in script.calls]
            assert kinds == [StreamGenerateRequest, StreamGenerateRequest, CancelRequestsRequest, StreamGenerateRequest]
            assert list(script.calls[2].request_ids) == [stream.request_id]

    async def test_a_name_that_was_given_may_be_that_of_another(self) -> None:
        in_use = says([], then=fails(grpc.StatusCode.ALREADY_EXISTS, reason="REQUEST_ID_IN_USE"))
        async with scripted(says([], then=UNAVAILABLE), in_use, in_use, in_use) as script, AsyncClient(script.address) as client:
            with pytest.raises(RequestIdInUseError) as caught:
                await ids_of(client.stream("x", request_id="given"))
            assert caught.value.field == "request_id"
            assert [type(call) for call in script.calls] == [StreamGenerateRequest] * 4


def test_waits_grow_and_heed_the_server() -> None:
    backoff = Backoff()
    waits = [backoff.next_seconds(None) for _ in range(2000)]
    assert FIRST_BACKOFF / 2 <= waits[0] <= FIRST_BACKOFF * 1.5
    assert LONGEST_BACKOFF / 2 <= min(waits[10:]) < max(waits[10:]) <= LONGEST_BACKOFF * 1.5
    told = Failure(ConnectionLostError("x"), grpc.StatusCode.UNAVAILABLE, 7.0)
    assert 7.0 <= backoff.next_seconds(told) <= 8.4
    assert told.temporary


class TestAfterTheFirstEvent:
    @pytest.mark.parametrize("count", [1, 2, 4])
    async def test_nothing_is_asked_again(self, count: int) -> None:
        async with scripted(says(whole_answer(IDS)[:count], then=UNAVAILABLE)) as script, AsyncClient(script.address) as client:
            stream = client.stream("x")
            with pytest.raises(ConnectionLostError, match=f"no connection to {script.address}: as told"):
                await ids_of(stream)
            # The last token waits for its end, which never came.
            assert stream.completion().token_ids == tuple(IDS[: min(count - 1, 2)])
            assert len(script.calls) == 1
            assert stream.completion().finish_reason is FinishReason.ERROR

    async def test_a_dead_engine(self) -> None:
        dead = fails(grpc.StatusCode.ABORTED, reason="ENGINE_DEAD")
        async with scripted(says(whole_answer(IDS)[:2], then=dead)) as script, AsyncClient(script.address, auto_resume=True) as client:
            with pytest.raises(EngineDeadError):
                await ids_of(client.stream("x"))

    async def test_what_comes_after_the_last_event_changes_nothing(self) -> None:
        async with scripted(says(whole_answer(IDS), then=UNAVAILABLE)) as script, AsyncClient(script.address) as client:
            stream = client.stream("x")
            assert await ids_of(stream) == IDS
            assert stream.completion().finish_reason is FinishReason.MAX_TOKENS

    @pytest.mark.parametrize("cut", ["start", "middle", "end"])
    async def test_gaps_repeats_and_early_ends_are_errors(self, cut: str) -> None:
        events = whole_answer(IDS)
        broken = {"start": events[1:], "middle": [*events[:3], *events[2:]], "end": events[:-1]}[cut]
        async with scripted(says(broken)) as script, AsyncClient(script.address) as client:
            stream = client.stream("x")
            if cut == "end":
                assert await ids_of(stream) == IDS  # its end is known; what is missing is what it took
                return
            with pytest.raises(ServerError, match="came where") as caught:
                await ids_of(stream)
            assert caught.value.code == "DATA_LOSS"

    async def test_a_stream_that_just_stops(self) -> None:
        async with scripted(says(whole_answer(IDS)[:3])) as script, AsyncClient(script.address) as client:
            with pytest.raises(ServerError, match="before its last event"):
                await ids_of(client.stream("x"))


class TestEventsOfOtherServers:
    async def test_without_last_the_end_is_a_token_of_its_own(self) -> None:
        events = whole_answer(IDS)
        events[3].delta.last = False
        async with scripted(says(events)) as script, AsyncClient(script.address) as client:
            tokens = [token async for token in client.stream("x")]
        assert tokens == [
            *(Token(0, token_id, f"{token_id:x}") for token_id in IDS),
            Token(0, -1, "", finish_reason=FinishReason.MAX_TOKENS),
        ]

    async def test_text_sits_on_the_last_token_of_a_delta(self) -> None:
        events = [whole_answer(IDS)[i] for i in (0, 1, 4, 5)]
        for number, event in enumerate(events):
            event.event_number = number
        delta = events[1].delta
        delta.token_ids[:], delta.num_tokens, delta.text, delta.last = IDS, 3, "abc", True
        async with scripted(says(events)) as script, AsyncClient(script.address) as client:
            tokens = [token async for token in client.stream("x")]
        assert [(token.token_id, token.text) for token in tokens] == [(10, ""), (11, ""), (12, "abc")]
        assert [token.finish_reason for token in tokens] == [None, None, FinishReason.MAX_TOKENS]

    async def test_unknown_events_are_skipped(self) -> None:
        events = whole_answer(IDS)
        for number, event in enumerate(events[2:], 3):
            event.event_number = number
        events.insert(2, type(events[0]).FromString(b"\x08\x02\xfa\x7d\x00"))  # number 2, and a field of the future
        async with scripted(says(events)) as script, AsyncClient(script.address) as client:
            assert await ids_of(client.stream("x")) == IDS


class TestResuming:
    @pytest.mark.quick_cases(2)
    @pytest.mark.parametrize("count", range(1, 6))
    async def test_a_cut_is_invisible(self, count: int) -> None:
        events = whole_answer(IDS, resume_token=b"secret")
        answers = [says(events[:count], then=UNAVAILABLE), says([], then=UNAVAILABLE), says(events[count:])]
        async with scripted(*answers) as script, AsyncClient(script.address, auto_resume=True, resume_timeout=20) as client:
            stream = client.stream("x")
            assert await ids_of(stream) == IDS
            first, *again = script.calls
            assert (first.spec.stream.resumable, first.spec.stream.retain.ToSeconds()) == (True, 20)
            request = ResumeGenerateRequest(request_id=stream.request_id, resume_token=b"secret", next_event_number=count)
            assert again == [request] * 2

    async def test_repeats_are_errors(self) -> None:
        events = whole_answer(IDS, resume_token=b"secret")
        answers = (says(events[:2], then=UNAVAILABLE), says(events[1:]))
        async with scripted(*answers) as script, AsyncClient(script.address, auto_resume=True) as client:
            with pytest.raises(ServerError, match="event 1 came where 2 was due"):
                await ids_of(client.stream("x"))

    async def test_a_request_that_is_gone(self) -> None:
        gone = fails(grpc.StatusCode.NOT_FOUND, reason="REQUEST_NOT_FOUND")
        events = whole_answer(IDS, resume_token=b"secret")
        answers = (says(events[:2], then=UNAVAILABLE), says([], then=gone))
        async with scripted(*answers) as script, AsyncClient(script.address, auto_resume=True) as client:
            with pytest.raises(ServerError) as caught:
                await ids_of(client.stream("x"))
            assert (caught.value.code, caught.value.reason) == ("NOT_FOUND", "REQUEST_NOT_FOUND")

    async def test_only_so_long(self) -> None:
        events = whole_answer(IDS, resume_token=b"secret")
        answers = [says(events[:2], then=UNAVAILABLE), *[says([], then=UNAVAILABLE)] * 50]
        async with scripted(*answers) as script, AsyncClient(script.address, auto_resume=True, resume_timeout=0.3) as client:
            with pytest.raises(ConnectionLostError):
                await ids_of(client.stream("x"))
            assert 2 <= len(script.calls) < 20

    async def test_leaving_ends_the_request_and_not_only_the_call(self) -> None:
        async with OracleEngine() as oracle, reached(REMOTE, oracle, auto_resume=True) as client:
            async for _ in client.stream([1], SamplingParams(seed=1, ignore_eos=True)):
                break
            await until(lambda: idle(oracle))
            async with client.stream([1], SamplingParams(seed=1, ignore_eos=True)) as stream:
                await stream.__anext__()
            assert idle(oracle)

    @pytest.mark.quick_cases(1)
    @also_with_drafts
    async def test_cuts_anywhere_in_a_real_connection(self) -> None:
        budgets = random.Random(7).sample(range(200, 9000), 12)
        params = SamplingParams(seed=5, max_tokens=300, ignore_eos=True)
        async with OracleEngine() as oracle, serving(oracle) as serve:
            async with cutting_proxy(serve.server.address, budgets) as proxy, AsyncClient(proxy.address, auto_resume=True) as client:
                while proxy.num_cuts < 5:
                    stream = client.stream([1, 2], params)
                    assert await ids_of(stream) == oracle.solo(5)[0]
                    assert stream.completion().text == oracle.tokenizer.decode(oracle.solo(5)[0])
            await until(lambda: idle(oracle))


async def test_a_reader_that_lags_holds_up_the_connection() -> None:
    ids = [10] * (3 * MAX_UNREAD_TOKENS)
    async with scripted(says(whole_answer(ids)), says(whole_answer(IDS))) as script, AsyncClient(script.address) as client:
        stream = client.stream("x")
        request = stream._source
        await until(lambda: len(request._tokens) == MAX_UNREAD_TOKENS + 1)
        assert await ids_of(client.stream("y")) == IDS  # which takes the loop around many times
        assert len(request._tokens) == MAX_UNREAD_TOKENS + 1
        assert await ids_of(stream) == ids


class TestLeaving:
    async def test_a_request_of_another_with_the_same_name_stays(self) -> None:
        """A given name counts as ours from the first event on."""

        async def silent(request: Any, context: Any) -> AsyncIterator[Any]:
            await anyio.sleep_forever()
            yield

        async with scripted(silent) as script, AsyncClient(script.address) as client:
            stream = client.stream("x", request_id="given")
            await until(lambda: len(script.calls) == 1)
            await stream.aclose()
            with anyio.fail_after(HANG_SECONDS):
                await script.left.wait()
            assert len(script.calls) == 1

    async def test_a_last_token_whose_end_does_not_come_is_not_lost(self) -> None:
        async def silent(request: Any, context: Any) -> AsyncIterator[Any]:
            for event in whole_answer(IDS)[:4]:
                yield event
            await anyio.sleep_forever()

        async with scripted(silent) as script:
            async with AsyncClient(script.address) as client:
                stream = client.stream("x")
                await until(lambda: 0 in stream._source._last)
            tokens = [token async for token in stream]
        assert [token.token_id for token in tokens] == [*IDS, -1]
        assert [token.finish_reason for token in tokens] == [None] * 3 + [FinishReason.CANCELLED]

    async def test_a_server_that_does_not_answer_is_not_waited_for_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aengine.client.active_request.CLOSE_SECONDS", 0.05)

        async def silent(request: Any, context: Any) -> AsyncIterator[Any]:
            yield whole_answer(IDS)[0]
            await anyio.sleep_forever()

        async with scripted(silent) as script, AsyncClient(script.address) as client:

            async def never(request: Any, context: Any) -> Any:
                await anyio.sleep_forever()

            script.CancelRequests = never  # type: ignore[method-assign]
            stream = client.stream("x")
            await stream.started()
            with anyio.fail_after(HANG_SECONDS):
                await stream.aclose()

    def test_what_cannot_travel(self) -> None:
        from aengine.wire.request import write_request

        for prompt, params, field in [
            ("x", SamplingParams(logits_processors=(lambda logits, ids: None,)), "logits_processors"),
            ([{"role": "user", "content": "a", "name": {1}}], SamplingParams(), "prompt"),
            ([{"role": "user", "content": [{"type": "text"}]}], SamplingParams(), "prompt"),
            ([{"role": "user"}], SamplingParams(), "prompt"),
            ("\ud800", SamplingParams(), "prompt"),
            ([2**32], SamplingParams(), "prompt"),
            ("x", SamplingParams(stop=("\ud800",)), "params"),
        ]:
            with pytest.raises(InvalidRequestError) as caught:
                write_request(prompt, params, RequestOptions())  # type: ignore[arg-type]
            assert caught.value.field == field
