"""Several tokens in one delta: how they are put together, what waits for what, and that the answer is the same however they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
from event_fold import EventFold
from fake_engine import FakeEngine, FakeStream, tokens
from grpc import aio
from grpc_harness import events_of, serving, stream_request, text_spec
from hang_guard import HANG_SECONDS
from hypothesis import given, settings
from hypothesis import strategies as st
from speculating import demo, drafts_everywhere

from aengine import AsyncEngine
from aengine.api.outputs import FinishReason, Token
from aengine.server.grpc.generation.events import EventWriter, MessageGeneration
from aengine.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE,
    GenerationDelta,
    GenerationEvent,
    GenerationSpec,
    LogprobOptions,
    OutputOptions,
    StreamOptions,
)
from aengine.v1.generation_service_pb2 import GenerateRequest, GenerateResponse, StreamGenerateRequest
from aengine.wire.request import StreamPolicy
from aengine.wire.response import read_delta

pytestmark = pytest.mark.anyio


def policy(delta_tokens: int | None = None, delay_ms: int | None = None) -> StreamOptions:
    options = StreamOptions(max_tokens_per_delta=delta_tokens)
    if delay_ms is not None:
        options.max_delay.FromMilliseconds(delay_ms)
    return options


def folded(events: Sequence[GenerationEvent]) -> GenerateResponse:
    fold = EventFold()
    for event in events:
        fold.add(event)
    response = fold.response()
    response.ClearField("timing")
    return response


def deltas_of(events: Sequence[GenerationEvent]) -> list[GenerationDelta]:
    return [event.delta for event in events if event.HasField("delta")]


def check_stream(events: Sequence[GenerationEvent], most: int) -> None:
    """What every stream keeps to, whatever its tokens."""
    assert [event.event_number for event in events] == list(range(len(events)))
    lengths: dict[int, int] = {}
    ended: set[int] = set()
    said_last: set[int] = set()
    for event, following in zip(events, [*events[1:], None], strict=True):
        if event.HasField("delta"):
            delta = event.delta
            index = delta.sequence_index
            assert index not in ended
            assert delta.num_tokens <= most
            assert delta.num_tokens or delta.text or delta.chat_events
            assert delta.token_offset == lengths.get(index, 0)
            assert len(delta.token_ids) in (0, delta.num_tokens)
            assert sum(delta.text_lengths) in (0, len(delta.text.encode()))
            assert len(delta.text_lengths) in (0, len(delta.token_ids))
            columns = delta.logprobs
            assert len(columns.logprobs) == len(columns.ranks)
            assert len(columns.logprobs) in (0, delta.num_tokens)
            assert len(columns.top_token_ids) == len(columns.top_logprobs) == columns.top_k * len(columns.logprobs)
            lengths[index] = delta.token_offset + delta.num_tokens
            if delta.last:
                assert following is not None
                assert following.HasField("sequence_finished")
                assert following.sequence_finished.sequence_index == index
                said_last.add(index)
        elif event.HasField("sequence_finished"):
            finished = event.sequence_finished
            assert finished.sequence_index not in ended
            assert finished.num_tokens == lengths.get(finished.sequence_index, 0)
            ended.add(finished.sequence_index)
            assert finished.sequence_index in said_last or finished.finish.reason in (FINISH_REASON_CANCELLED, FINISH_REASON_DEADLINE)


# ---- the writer alone, over arbitrary tokens ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """What the engine says: every sequence to its end, mixed, in the pieces in which it is read."""

    num_sequences: int
    pieces: list[list[Token]]
    top_k: int | None

    @property
    def tokens(self) -> list[Token]:
        return [token for piece in self.pieces for token in piece]


OUTSIDE = (FinishReason.CANCELLED, FinishReason.DEADLINE)
INSIDE = (FinishReason.EOS, FinishReason.STOP_STRING, FinishReason.STOP_TOKEN, FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LENGTH)
TEXTS = ("", "a", "bc ", "\u00e9", "\U0001f600", "\u6f22\u5b57", "\ufffd")


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    num_sequences = draw(st.integers(1, 4))
    top_k = draw(st.sampled_from([None, 0, 3]))
    left = [draw(st.integers(1, 12)) for _ in range(num_sequences)]
    said: list[Token] = []
    while any(left):
        index = draw(st.sampled_from([i for i, count in enumerate(left) if count]))
        left[index] -= 1
        reason = None if left[index] else draw(st.sampled_from(OUTSIDE + INSIDE))
        text = draw(st.sampled_from(TEXTS))
        stop = "stop" if reason is FinishReason.STOP_STRING else None
        if reason in OUTSIDE:
            said.append(Token(index, -1, text, finish_reason=reason))
        elif top_k is None:
            said.append(Token(index, draw(st.integers(0, 300)), text, finish_reason=reason, stop_reason=stop))
        else:
            top = {len(said) * 10 + i: -0.5 * i for i in range(top_k)}
            said.append(Token(index, len(said), text, -0.25 * len(said), len(said) + 1, top, reason, stop))
    pieces = []
    while said:
        size = draw(st.integers(1, len(said)))
        pieces.append(said[:size])
        said = said[size:]
    return Script(num_sequences, pieces, top_k)


def written(pieces: Sequence[Sequence[Token]], delta_tokens: int, *, text: bool = True, token_ids: bool = True) -> list[GenerationEvent]:
    events: list[GenerationEvent] = []

    def new_event() -> GenerationEvent:
        events.append(GenerationEvent())
        return events[-1]

    generation = SimpleNamespace(
        spec=GenerationSpec(output=OutputOptions(text=text, token_ids=token_ids)),
        policy=StreamPolicy(delta_tokens),
        core=SimpleNamespace(note_tokens=lambda tokens: None, known_lengths=()),
        write_beginning=lambda started: None,
        write_end=lambda finished: finished.SetInParent(),
    )
    writer = EventWriter(cast(MessageGeneration, generation), new_event)
    writer.begin()
    for piece in pieces:
        writer.write(piece)
    writer.end_event()
    assert [event.event_number for event in events] == list(range(len(events)))
    return events


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(script=scripts(), delta_tokens=st.sampled_from([1, 2, 3, 7, 1024]), text=st.booleans(), token_ids=st.booleans())
def test_every_policy_folds_to_the_same_answer(script: Script, delta_tokens: int, text: bool, token_ids: bool) -> None:
    events = written(script.pieces, delta_tokens, text=text, token_ids=token_ids)
    check_stream(events, delta_tokens)
    assert folded(events) == folded(written([[token] for token in script.tokens], 1, text=text, token_ids=token_ids))
    response = folded(events)
    assert len(response.sequences) == script.num_sequences
    for index, sequence in enumerate(response.sequences):
        mine = [token for token in script.tokens if token.index == index]
        known = [token for token in mine if token.token_id >= 0]
        assert sequence.text == ("".join(token.text for token in mine) if text else "")
        assert list(sequence.token_ids) == ([token.token_id for token in known] if token_ids else [])
        assert sequence.num_tokens == len(known)
        if token_ids:
            read = [token for delta in deltas_of(events) if delta.sequence_index == index for token in read_delta(delta)]
            said = [(one.token_id, one.text if text else "") for one in mine if one.token_id >= 0 or (text and one.text)]
            assert [(token.token_id, token.text) for token in read] == said
        assert list(sequence.logprobs.logprobs) == ([] if script.top_k is None else [token.logprob for token in known])
        tops = [token.top_logprobs or {} for token in known]
        assert list(sequence.logprobs.top_token_ids) == [token_id for top in tops for token_id in top]
        assert (sequence.finish.stop_string == "stop") == (mine[-1].finish_reason is FinishReason.STOP_STRING)


@settings(max_examples=100, deadline=None)
@given(script=scripts(), delta_tokens=st.sampled_from([2, 3, 7, 1024]))
def test_what_comes_together_goes_together(script: Script, delta_tokens: int) -> None:
    """Of one piece, a sequence gets as few deltas as its tokens allow, and none of them waits for the next piece."""
    for piece in script.pieces:
        deltas = deltas_of(written([piece], delta_tokens))
        for index in {token.index for token in piece}:
            count = sum(token.index == index and token.token_id >= 0 for token in piece)
            mine = [delta for delta in deltas if delta.sequence_index == index and delta.num_tokens]
            assert len(mine) <= -(-count // delta_tokens)
            assert sum(delta.num_tokens for delta in mine) == count


# ---- what waits for what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delta_tokens", "sizes"), [(None, [7]), (1, [1] * 7), (3, [3, 3, 1]), (1024, [7])])
async def test_what_is_there_is_put_together(engine: FakeEngine, delta_tokens: int | None, sizes: list[int]) -> None:
    engine.script = tokens(*"abcdefg")
    async with serving(engine) as serve:
        request = stream_request(stream=policy(delta_tokens), output=OutputOptions(token_ids=True))
        events = await events_of(serve.generation.StreamGenerate(request))
    check_stream(events, delta_tokens or 64)
    assert [delta.num_tokens for delta in deltas_of(events)] == sizes
    assert "".join(delta.text for delta in deltas_of(events)) == "abcdefg"


class Lingering:
    """Notes how long streams are told to wait; they do until the test goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        self.over = asyncio.Event()

        async def linger(stream: FakeStream, count: int, seconds: float) -> None:
            self.calls.put_nowait((count, seconds))
            await self.over.wait()

        monkeypatch.setattr(FakeStream, "linger", linger)


async def test_the_first_token_never_waits_and_the_others_as_long_as_was_said(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lingering = Lingering(monkeypatch)
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request(stream=policy(4, 250)))
        stream = await engine.submitted.get()
        said = tokens(*"abcdefg")
        stream.push(said[:1])
        answers = aiter(call)
        assert (await anext(answers)).event.HasField("started")
        first = (await anext(answers)).event.delta
        assert (first.text, first.num_tokens, lingering.calls.qsize()) == ("a", 1, 0)
        stream.push(said[1:2])
        assert await lingering.calls.get() == (3, 0.25)  # three more would make a whole delta
        stream.push(said[2:])
        lingering.over.set()
        events = [response.event async for response in answers]
    assert [(delta.text, delta.token_offset, delta.last) for delta in deltas_of(events)] == [("bcde", 1, False), ("fg", 5, True)]
    assert lingering.calls.empty()  # the end waits for nothing


async def test_a_whole_delta_does_not_wait(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lingering = Lingering(monkeypatch)
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request(stream=policy(2, 1000)))
        stream = await engine.submitted.get()
        said = tokens(*"abcde")
        answers = aiter(call)
        await anext(answers)
        for piece, expected in ((said[:1], "a"), (said[1:3], "bc"), (said[3:], "de")):
            stream.push(piece)
            assert (await anext(answers)).event.delta.text == expected
        assert lingering.calls.empty()
        call.cancel()


async def test_without_a_delay_nothing_waits(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lingering = Lingering(monkeypatch)
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request(stream=policy(1024)))
        stream = await engine.submitted.get()
        answers = aiter(call)
        await anext(answers)
        for token in tokens(*"abc"):
            stream.push([token])
            assert (await anext(answers)).event.delta.text == token.text
        assert lingering.calls.empty()


async def test_what_waits_is_sent_before_the_error_that_follows(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lingering = Lingering(monkeypatch)
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request(stream=policy(8, 1000)))
        stream = await engine.submitted.get()
        answers = aiter(call)
        await anext(answers)
        stream.push(tokens("a", "b")[:1])
        await anext(answers)
        stream.push(tokens("b", "c")[:1])
        await lingering.calls.get()
        stream.push([*tokens("c", "d")[:1], RuntimeError("a bug")])
        lingering.over.set()
        assert (await anext(answers)).event.delta.text == "bc"
        with pytest.raises(aio.AioRpcError):
            await anext(answers)
        await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)


async def test_a_client_that_leaves_while_a_token_waits(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    lingering = Lingering(monkeypatch)
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request(stream=policy(8, 1000)))
        stream = await engine.submitted.get()
        answers = aiter(call)
        await anext(answers)
        stream.push(tokens("a", "b")[:1])
        await anext(answers)
        stream.push(tokens("b", "c")[:1])
        await lingering.calls.get()
        call.cancel()
        await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)
        assert serve.server.in_flight == 0


# ---- the engine with the demo model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["plain", "drafts"])
async def engine_of_demo(request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    with drafts_everywhere() if request.param == "drafts" else nullcontext():
        async with demo() as engine:
            yield engine


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("stops", [(), ("e", "no such thing")], ids=["max_tokens", "stop strings"])
async def test_the_unary_reply_whatever_the_policy(engine_of_demo: AsyncEngine, stops: tuple[str, ...]) -> None:
    """Several sequences with logprobs, mixed as the engine makes them."""
    spec = text_spec("It is a truth universally", output=OutputOptions(token_ids=True, logprobs=LogprobOptions(top_k=3)))
    spec.sampling.n, spec.sampling.seed, spec.sampling.temperature = 3, 7, 0.9
    spec.stopping.max_tokens, spec.stopping.min_tokens = 60, 10
    spec.stopping.stop_strings.extend(stops)
    async with serving(engine_of_demo) as serve:
        unary = await serve.generation.Generate(GenerateRequest(spec=spec, request_id="r"))
        unary.ClearField("timing")
        assert len(unary.sequences) == 3
        for delta_tokens, delay_ms in ((1, None), (2, 0), (4, 20), (16, 5), (1024, 100)):
            spec.stream.CopyFrom(policy(delta_tokens, delay_ms))
            events = await events_of(serve.generation.StreamGenerate(StreamGenerateRequest(spec=spec, request_id="r")))
            check_stream(events, delta_tokens)
            response = folded(events)
            num_accepted = sum(drafts.accepted for drafts in response.usage.drafts)
            assert (num_accepted > 0) == (engine_of_demo.config.speculative != "off")
            for answer in (unary, response):
                answer.usage.ClearField("cached_prompt_tokens")  # the first one found none
                answer.usage.ClearField("drafts")
            assert response.SerializeToString(deterministic=True) == unary.SerializeToString(deterministic=True)
            if delay_ms:
                assert len(deltas_of(events)) < unary.usage.completion_tokens
