"""Requests that begin with output they have, over gRPC: as in the engine, and what their messages say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_harness import Serving, events_of, failure_of, serving, stream_request, text_spec
from known_cases import check_rests, requests
from oracle_engine import idle
from slow_cases import slow_but
from speculation_cases import CONTEXT

from aengine import AsyncEngine, InvalidRequestError
from aengine.client import AsyncClient
from aengine.v1.generation_pb2 import KnownOutput
from aengine.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": CONTEXT, "adapters": {"lora": "demo-lora"}}
    async with AsyncEngine("demo", kv_cache_memory=32 << 20, **options) as running:
        yield running


@pytest.fixture
async def serve(engine: AsyncEngine) -> AsyncIterator[Serving]:
    async with serving(engine, limit=None) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "count", "multiplex"), slow_but([(31, 30, False), (32, 20, True)], [(31, 30, False), (32, 20, True), (33, 150, False)])
)
async def test_random_requests(engine: AsyncEngine, serve: Serving, seed: int, count: int, multiplex: bool) -> None:
    """What one client has begun goes on at another."""
    pytest.importorskip("llguidance")
    address = serve.server.address
    async with AsyncClient(address) as begins, AsyncClient(address, multiplex=multiplex) as client:
        assert await check_rests(begins, client, requests(seed, count, remote=True), seed, 8) > count // 2
    assert idle(engine)


def spec_of(known: list[list[int] | None], **fields: Any) -> dict[str, Any]:
    outputs = [KnownOutput(token_ids=ids or (), ended=ids is None) for ids in known]
    return {"known_outputs": outputs, "sampling": {"n": len(known), "seed": 3}, "stopping": {"max_tokens": 6, "ignore_eos": True}, **fields}


async def test_events_count_the_whole_output(serve: Serving) -> None:
    fields = spec_of([[5, 6], None, []], output={"effective_params": True})
    events = await events_of(serve.generation.StreamGenerate(stream_request(**fields)))
    assert not events[0].started.effective_spec.known_outputs
    assert events[0].started.effective_spec.stopping.max_tokens == 6
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert [delta.token_offset for delta in deltas if delta.sequence_index == 0] == [2, 3, 4, 5]
    assert [delta.token_offset for delta in deltas if delta.sequence_index == 2] == [0, 1, 2, 3, 4, 5]
    ends = [event.sequence_finished for event in events if event.HasField("sequence_finished")]
    assert sorted((end.sequence_index, end.num_tokens) for end in ends) == [(0, 6), (2, 6)]
    assert events[-1].finished.usage.completion_tokens == 12
    whole = await serve.generation.Generate(GenerateRequest(spec=text_spec(**spec_of([[5, 6], None, []], output={"token_ids": True}))))
    assert [(one.num_tokens, len(one.token_ids), one.HasField("finish")) for one in whole.sequences] == [
        (6, 4, True),
        (0, 0, False),
        (6, 6, True),
    ]
    assert whole.usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("fields", "path", "reason"),
    [
        (spec_of([[5], [6]], sampling={"n": 3}), "spec.known_outputs", "2 entries are not one for each of 3 sequences"),
        (spec_of([[2**31]]), "spec.known_outputs", "from 2147483648 to 2147483648"),
        (spec_of([[4096]]), "spec.known_outputs", "token id 4096 is not in [0, 4095]"),
        (spec_of([[5] * 6]), "spec.known_outputs", "an entry of 6 tokens is not below max_tokens (6)"),
        (spec_of([None]), "spec.known_outputs", "every sequence has ended"),
        ({"known_outputs": [KnownOutput(token_ids=[5], ended=True)]}, "spec.known_outputs[0].token_ids", "must be empty"),
        (
            spec_of([[5]], stopping={"max_tokens": 6}, structured_output={"choices": {"values": ["yes"]}}),
            "spec.known_outputs",
            "does not match the grammar",
        ),
    ],
)
async def test_what_is_refused(serve: Serving, fields: dict[str, Any], path: str, reason: str) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(aio.AioRpcError) as refused:
        await events_of(serve.generation.StreamGenerate(stream_request(**fields)))
    failure = failure_of(refused.value)
    assert (failure.code, failure.fields[0]) == (grpc.StatusCode.INVALID_ARGUMENT, path)
    assert reason in str(refused.value)


async def test_a_client_names_the_field(serve: Serving) -> None:
    async with AsyncClient(serve.server.address) as client:
        with pytest.raises(InvalidRequestError) as refused:
            await client.generate([5], known_outputs=[[4096]])
        assert refused.value.field == "known_outputs"
        with pytest.raises(InvalidRequestError, match="known_outputs: an embedding has no output"):
            await client.embed([5], known_outputs=[[1]])


async def test_a_parsed_chat_is_refused(serve: Serving) -> None:
    request = stream_request(**spec_of([[5]], output={"chat": {}}))
    request.spec.prompt.chat.messages.add(role="user", content="a")
    with pytest.raises(aio.AioRpcError) as refused:
        await events_of(serve.generation.StreamGenerate(request))
    assert failure_of(refused.value).fields == ["spec.known_outputs"]
