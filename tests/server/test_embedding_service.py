"""EmbeddingService and `AsyncClient.embed`, on the demo model: they give what the engine gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio
from grpc_harness import Failure, Serving, failure_of, serving
from hang_guard import growing
from http_harness import serving_http
from oracle_engine import idle, until

from aengine import AdapterNotFoundError, AsyncEngine, ContextLengthError, InvalidRequestError, RequestEndedError
from aengine.client import AsyncClient
from aengine.v1.embedding_service_pb2 import POOLING_LAST, POOLING_MEAN, EmbedRequest
from aengine.v1.embedding_service_pb2_grpc import EmbeddingServiceStub
from aengine.v1.generation_pb2 import ChatMessage, ChatPrompt, Prompt, TokenIds
from aengine.v1.generation_service_pb2 import CancelRequestsRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub
from aengine.v1.model_service_pb2 import GetModelRequest

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"], scope="module")]
TEXTS = [f"It is a truth universally acknowledged by {number} men" for number in range(20)]


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", dtype="float32", max_model_len=64, max_num_seqs=4, max_queued_requests=4) as engine:
        yield engine


@pytest.fixture
async def serve(engine: AsyncEngine) -> AsyncIterator[Serving]:
    async with serving(engine) as serve:
        yield serve


@pytest.fixture
def stub(serve: Serving) -> Any:
    return EmbeddingServiceStub(serve.channel)


async def failure(call: Any) -> Failure:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return failure_of(caught.value)


async def test_many_inputs_of_every_form(stub: Any, engine: AsyncEngine) -> None:
    """More than may wait in the engine."""
    messages = [{"role": "user", "content": "How do you do?"}]
    chat = ChatPrompt(messages=[ChatMessage(role="user", content="How do you do?")])
    inputs = [*(Prompt(text=text) for text in TEXTS), Prompt(token_ids=TokenIds(ids=[5] * 64)), Prompt(chat=chat)]
    found = await stub.Embed(EmbedRequest(inputs=inputs))
    assert found.model == "demo"
    expected = [await engine.embed(prompt) for prompt in (*TEXTS, [5] * 64, messages)]
    assert len(found.embeddings) == len(expected)
    for one, other in zip(found.embeddings, expected, strict=True):
        assert np.allclose(one.values, other.values, atol=1e-5)
        assert one.num_tokens == other.num_tokens
    cut = EmbedRequest(inputs=inputs[:1], pooling=POOLING_MEAN, normalize=False, dimensions=7)
    (one,) = (await stub.Embed(cut)).embeddings
    assert np.allclose(one.values, (await engine.embed(TEXTS[0], pooling="mean", normalize=False, dimensions=7)).values, atol=1e-5)
    assert not one.cached_tokens


async def test_what_is_refused(stub: Any, serve: Serving, engine: AsyncEngine) -> None:
    text = Prompt(text="so")
    model = (await serve.model.GetModel(GetModelRequest())).model
    assert (model.hidden_size, model.pooling) == (256, "last")
    cases: dict[str, EmbedRequest] = {
        "inputs": EmbedRequest(),
        "inputs[1]": EmbedRequest(inputs=[text, Prompt()]),
        "inputs[2].text": EmbedRequest(inputs=[text, text, Prompt(text="")]),
        "inputs[1].chat.messages[0].role": EmbedRequest(inputs=[text, Prompt(chat=ChatPrompt(messages=[ChatMessage(content="x")]))]),
        "inputs[0].chat.template_kwargs": EmbedRequest(inputs=[Prompt(chat=ChatPrompt(template_kwargs='{"messages": 1}'))]),
        "pooling": EmbedRequest(inputs=[text], pooling=9),  # type: ignore[arg-type]
        "dimensions": EmbedRequest(inputs=[text], dimensions=257),
        "priority": EmbedRequest(inputs=[text, text], priority=1000),
        "cache.salt": EmbedRequest(inputs=[text], cache={"salt": "x" * 129}),
    }
    cases["inputs[0].chat.template_kwargs"].inputs[0].chat.messages.add(role="user", content="x")
    for field, request in cases.items():
        failed = await failure(stub.Embed(request))
        assert (failed.code, failed.reason, failed.fields[:1]) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", [field])
    too_long = await failure(stub.Embed(EmbedRequest(inputs=[text, Prompt(token_ids=TokenIds(ids=[1] * 65))])))
    assert (too_long.reason, too_long.fields, too_long.info["got"]) == ("CONTEXT_LENGTH_EXCEEDED", ["inputs[1]"], "65")
    many = await failure(stub.Embed(EmbedRequest(inputs=[text] * 2049)))
    assert many.fields == ["inputs"]
    assert (await failure(stub.Embed(EmbedRequest(inputs=[text], model="other")))).reason == "MODEL_NOT_FOUND"
    assert (await failure(stub.Embed(EmbedRequest(inputs=[text], adapter="other")))).reason == "ADAPTER_NOT_FOUND"
    assert idle(engine)


async def test_an_answer_that_is_too_large_is_not_computed(engine: AsyncEngine) -> None:
    async with serving(engine, max_message_bytes=4096) as serve:
        steps = engine.stats().steps
        failed = await failure(EmbeddingServiceStub(serve.channel).Embed(EmbedRequest(inputs=[Prompt(text="so")] * 5)))
        assert (failed.reason, engine.stats().steps) == ("ANSWER_TOO_LARGE", steps)


async def test_a_call_that_ends_early(stub: Any, serve: Serving, engine: AsyncEngine) -> None:
    await engine.pause()
    request = EmbedRequest(inputs=[Prompt(text=text) for text in TEXTS], pooling=POOLING_LAST)
    call = stub.Embed(request)
    await until(lambda: engine.stats().waiting)
    assert serve.server.in_flight == 1
    call.cancel()
    await until(lambda: not serve.server.in_flight and not engine.stats().waiting)
    for timeout in growing(0.05):
        with pytest.raises(aio.AioRpcError) as late:
            await stub.Embed(request, timeout=timeout)
        if late.value.code() is not grpc.StatusCode.INTERNAL:  # which it is where it has not begun to read by then
            break
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not serve.server.in_flight)
    await engine.unpause()
    assert len((await stub.Embed(request)).embeddings) == len(TEXTS)
    serve.server.core.admission.closed = True
    assert (await failure(stub.Embed(request))).reason == "DRAINING"


async def test_the_client_gives_what_the_engine_gives(serve: Serving, engine: AsyncEngine) -> None:
    async with AsyncClient(serve.server.address) as client:
        assert (client.model_info.hidden_size, client.model_info.pooling) == (256, "last")
        options = {"pooling": "mean", "normalize": False, "dimensions": 9, "tenant": "a", "cache_salt": "b", "timeout": 60.0}
        for side in (client, engine):
            found = await side.embed(TEXTS[0], **options)
            assert found.values.dtype == np.float32
            assert np.allclose(found.values, (await engine.embed(TEXTS[0], **options)).values, atol=1e-5)
            cached = await side.embed([6] * 40)
            assert (cached.num_tokens, cached.cached_tokens) == (40, 0 if side is client else 32)
            messages = [{"role": "user", "content": "x"}]
            for fields, kind, name in (
                ({"prompt": [1] * 65}, ContextLengthError, "prompt"),
                ({"prompt": "so", "dimensions": 257}, InvalidRequestError, "dimensions"),
                ({"prompt": "so", "pooling": "label"}, InvalidRequestError, "pooling"),
                ({"prompt": "so", "adapter": "none"}, AdapterNotFoundError, "adapter"),
                ({"prompt": messages, "template_kwargs": {"messages": 1}}, InvalidRequestError, "template_kwargs"),
            ):
                with pytest.raises(kind) as refused:
                    await side.embed(**fields)
                assert refused.value.field == name
        with pytest.raises(InvalidRequestError, match=r"^request_id: an embedding has none"):
            await client.embed("so", request_id="a")
        await engine.pause()
        for side in (client, engine):
            with pytest.raises(RequestEndedError, match=r"its timeout passed$"):
                await side.embed("so", timeout=0.05)
        await engine.unpause()


async def test_an_embedding_belongs_to_its_caller(engine: AsyncEngine, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("a token-of-a\nb token-of-b\n")
    await engine.pause()
    async with serving_http(engine, port=0, token_file=str(tmp_path / "tokens")) as serve:
        body = {"input": "so", "request_id": "mine"}
        headers = {"authorization": "Bearer token-of-a"}
        answer = asyncio.create_task(serve.post("/v1/embeddings", body, headers=headers))
        await until(lambda: engine.stats().waiting)
        assert (await serve.post("/v1/embeddings", body, headers=headers)).status_code == 409
        async with aio.insecure_channel(serve.server.address) as channel:
            request = CancelRequestsRequest(request_ids=["mine"])
            for name, cancelled in (("b", []), ("a", ["mine"])):
                metadata = (("authorization", f"Bearer token-of-{name}"),)
                response = await GenerationServiceStub(channel).CancelRequests(request, metadata=metadata)
                assert list(response.cancelled_request_ids) == cancelled
        assert (await answer).status_code == 408
    await engine.unpause()
    assert idle(engine)


async def test_a_long_list_does_not_fill_a_short_queue() -> None:
    async with AsyncEngine("demo", kv_cache_memory=16 << 20, max_queued_requests=2) as engine, serving(engine) as serve:
        response = await EmbeddingServiceStub(serve.channel).Embed(EmbedRequest(inputs=[Prompt(text="so")] * 9))
        assert len(response.embeddings) == 9
