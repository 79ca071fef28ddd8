"""Chats that the server parses: the same messages as `stream_chat` makes, however the answer comes."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from event_fold import EventFold
from fake_engine import FakeEngine, tokens
from grpc import aio
from grpc_harness import Serving, events_of, failure_of, serving
from outputs import OUTPUTS, TOOLS, Output
from session_client import SessionClient, cancellation, opening, submission
from test_coalescing import check_stream, deltas_of, policy

from aengine import AsyncEngine, FinishReason, SamplingParams
from aengine.chat import ChatFormat, ChatMessage, stream_chat
from aengine.v1 import generation_pb2 as messages
from aengine.v1.generation_service_pb2 import BatchGenerateRequest, GenerateRequest, ResumeGenerateRequest, StreamGenerateRequest
from aengine.v1.sampling_pb2 import Reasoning, StructuredOutput

pytestmark = pytest.mark.anyio

SMALL = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"], "additionalProperties": False}
SMALL_TOOLS = [{"type": "function", "function": {"name": name, "parameters": SMALL}} for name in ("weather", "now")]


@pytest.fixture(scope="module")
async def demo() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", kv_cache_memory=64 * 1024 * 1024) as engine:
        yield engine


@pytest.fixture(scope="module")
async def serve(demo: AsyncEngine) -> AsyncIterator[Serving]:
    async with serving(demo, limit=None) as serve:
        yield serve


def chat_spec(text: str, tools: Sequence[Any] = (), *, format: ChatFormat | None = None, **chat: Any) -> messages.GenerationSpec:
    spec = messages.GenerationSpec()
    spec.prompt.chat.messages.add(role="user", content=text)
    spec.prompt.chat.tools.extend(map(json.dumps, tools))
    spec.output.chat.CopyFrom(messages.ChatOutputOptions(**chat))
    if format is not None:
        spec.output.chat.format.CopyFrom(messages.ChatFormat(calls=format.calls, reasoning=format.reasoning))
    return spec


def seen(message: messages.AssistantMessage | ChatMessage) -> tuple[Any, ...]:
    """What is in it, without the ids of calls, which are random."""
    return message.content, message.reasoning, [(call.name, call.arguments, call.complete) for call in message.tool_calls]


def folded(events: Sequence[messages.GenerationEvent]) -> list[tuple[Any, ...]]:
    fold = EventFold()
    for event in events:
        fold.add(event)
    return [seen(sequence.message) for sequence in fold.response().sequences]


async def answers(serve: Serving, spec: messages.GenerationSpec) -> AsyncIterator[list[tuple[Any, ...]]]:
    """The messages of all sequences, by every call that generates."""
    for delta_tokens in (1, 3):
        spec.stream.CopyFrom(policy(delta_tokens))
        events = await events_of(serve.generation.StreamGenerate(StreamGenerateRequest(spec=spec)))
        check_stream(events, delta_tokens)
        yield folded(events)
    request = GenerateRequest(spec=spec)
    yield [seen(sequence.message) for sequence in (await serve.generation.Generate(request)).sequences]
    async for response in serve.generation.BatchGenerate(BatchGenerateRequest(requests=[request])):
        yield [seen(sequence.message) for sequence in response.response.sequences]
    session = SessionClient(serve)
    await session.say(opening(), submission(1, StreamGenerateRequest(spec=spec)))
    yield folded((await session.finish())[1])


def pieces(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.choices(range(len(text) + 1), k=len(text) // 3 + 1))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


async def test_every_format_however_it_is_cut_into_tokens(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        for output in OUTPUTS:
            engine.script = tokens(*pieces(output.text, random.Random(output.name)))
            await check_output(serve, engine, output)


async def check_output(serve: Serving, engine: FakeEngine, output: Output) -> None:
    prompt = "<think>" if output.opened else "Hi"
    spec = chat_spec(prompt, TOOLS, format=output.format)
    async with stream_chat(engine, [{"role": "user", "content": prompt}], tools=TOOLS, format=output.format) as stream:  # type: ignore[arg-type]
        async for _ in stream:
            pass
    async for answer in answers(serve, spec):
        assert answer == [seen(stream.message)], output.name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("choice", ["required", "now"])
async def test_calls_of_a_model(serve: Serving, demo: AsyncEngine, choice: str) -> None:
    spec = chat_spec("How is it in Bath?", SMALL_TOOLS, tool_choice=choice, parallel_tool_calls=False)
    spec.sampling.seed, spec.stopping.max_tokens = 3, 400
    chat = [{"role": "user", "content": "How is it in Bath?"}]
    params = SamplingParams(seed=3, max_tokens=400)
    async with stream_chat(demo, chat, params, tools=SMALL_TOOLS, tool_choice=choice, parallel_tool_calls=False) as stream:
        async for _ in stream:
            pass
    assert [call.complete for call in stream.message.tool_calls] == [True]
    async for answer in answers(serve, spec):
        assert answer == [seen(stream.message)]


async def test_each_sequence_has_its_own_message(serve: Serving) -> None:
    spec = chat_spec("How is it in Bath?", format=ChatFormat("hermes", "think"))
    spec.sampling.seed, spec.sampling.n, spec.sampling.temperature, spec.stopping.max_tokens = 3, 3, 1.0, 20
    whole = await serve.generation.Generate(GenerateRequest(spec=spec))
    texts = [sequence.text for sequence in whole.sequences]
    assert len(set(texts)) == 3
    async for answer in answers(serve, spec):
        assert answer == [(text, "", []) for text in texts]
    spec.output.text = False
    (whole, *_) = [await serve.generation.Generate(GenerateRequest(spec=spec))]
    assert [(sequence.text, sequence.message.content) for sequence in whole.sequences] == [("", text) for text in texts]


@pytest.mark.slow
async def test_a_resumed_stream_repeats_its_events(serve: Serving) -> None:
    spec = chat_spec("How is it in Bath?", SMALL_TOOLS, tool_choice="required")
    spec.sampling.seed, spec.stopping.max_tokens, spec.stream.resumable = 3, 400, True
    call = serve.generation.StreamGenerate(StreamGenerateRequest(spec=spec))
    events = [(await call.read()).event for _ in range(4)]
    started = events[0].started
    call.cancel()
    resume = ResumeGenerateRequest(request_id=started.request_id, resume_token=started.resume_token, next_event_number=len(events))
    events += await events_of(serve.generation.ResumeGenerate(resume))
    resume.next_event_number = 0
    assert events == await events_of(serve.generation.ResumeGenerate(resume))  # with the same ids
    (message,) = folded(events)
    assert message[2]


async def test_what_was_held_back_comes_at_an_end_from_outside(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        session = SessionClient(serve)
        await session.say(opening(), submission(1, StreamGenerateRequest(spec=chat_spec("Hi", TOOLS, format=ChatFormat("hermes")))))
        stream = await engine.submitted.get()
        stream.push(tokens("So <tool", "")[:1])
        await session.read_until(1, "delta")
        await session.say(cancellation(1))
        events = (await session.finish())[1]
    first, last = deltas_of(events)
    assert [event.content for event in (*first.chat_events, *last.chat_events)] == ["So", " <tool"]
    assert (last.num_tokens, last.text, last.last) == (0, "", True)
    assert events[-2].sequence_finished.finish.reason == messages.FINISH_REASON_CANCELLED


async def test_without_being_asked_for_nothing_is_parsed(engine: FakeEngine) -> None:
    engine.script = tokens("<tool_call>", '{"name": "now"}</tool_call>', reason=FinishReason.EOS)
    spec = chat_spec("Hi", TOOLS)
    spec.output.ClearField("chat")
    async with serving(engine) as serve:
        events = await events_of(serve.generation.StreamGenerate(StreamGenerateRequest(spec=spec)))
        assert not any(delta.chat_events for delta in deltas_of(events))
        (sequence,) = (await serve.generation.Generate(GenerateRequest(spec=spec))).sequences
        assert not sequence.HasField("message")


@pytest.mark.parametrize(
    ("chat", "fields", "paths"),
    [
        ({"tool_choice": "required"}, {}, ["spec.output.chat.tool_choice"]),
        ({"tool_choice": "now", "max_reasoning_tokens": 3}, {"tools": SMALL_TOOLS, "priority": 200}, ["spec.priority"]),
        (
            {"tool_choice": "other"},
            {"tools": TOOLS, "stream": policy(5000)},
            ["spec.stream.max_tokens_per_delta", "spec.output.chat.tool_choice"],
        ),
        ({"max_reasoning_tokens": 3}, {}, ["spec.output.chat.max_reasoning_tokens"]),
        ({"max_reasoning_tokens": 2**31}, {}, ["spec.output.chat.max_reasoning_tokens"]),
        ({"format": messages.ChatFormat(reasoning="think")}, {"reasoning": Reasoning(closing="x", opened=True)}, ["spec.reasoning"]),
        (
            {"format": messages.ChatFormat(calls="x", reasoning="y")},
            {},
            ["spec.output.chat.format.calls", "spec.output.chat.format.reasoning"],
        ),
        ({}, {"prompt": messages.Prompt(text="Hi")}, ["spec.output.chat"]),
        ({"tool_choice": "now"}, {"tools": SMALL_TOOLS, "structured_output": StructuredOutput(regex="a")}, ["spec.structured_output"]),
        ({"tool_choice": "f"}, {"tools": [{"name": "f", "parameters": {"type": "object", "not": {}}}]}, ["spec.prompt.chat.tools"]),
        ({"tool_choice": "f"}, {"tools": [{"name": "f", "parameters": {"minProperties": -1}}]}, ["spec.prompt.chat.tools"]),
    ],
)
async def test_refusals_have_the_paths_of_the_message(
    serve: Serving, chat: dict[str, Any], fields: dict[str, Any], paths: list[str]
) -> None:
    spec = chat_spec("Hi", fields.pop("tools", ()), **chat)
    spec.MergeFrom(messages.GenerationSpec(**fields))
    with pytest.raises(aio.AioRpcError) as caught:
        await serve.generation.Generate(GenerateRequest(spec=spec))
    assert failure_of(caught.value).fields == paths


async def test_a_chat_that_is_too_long_is_refused_before_it_is_tokenized(serve: Serving) -> None:
    for text in ("word " * 100_000, "word " * 10_000):
        with pytest.raises(aio.AioRpcError, match=r"tokens or more, .*leave no room|tokens or more leave no room") as caught:
            await serve.generation.Generate(GenerateRequest(spec=chat_spec(text)))
        failure = failure_of(caught.value)
        assert (failure.reason, failure.fields) == ("CONTEXT_LENGTH_EXCEEDED", ["spec.prompt.chat"])
