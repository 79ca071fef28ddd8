"""gRPC on the real engine with the demo model: same answers as in process, nothing left behind."""

from __future__ import annotations

import asyncio
import random
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
import grpc
import pytest
from grpc import aio
from grpc_harness import Serving, events_of, failure_of, serving, stream_request, text_spec

from aengine import AsyncEngine, SamplingParams
from aengine.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE,
    ChatMessage,
    GenerationSpec,
    OutputOptions,
)
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, GenerateRequest, StreamGenerateRequest
from aengine.v1.model_service_pb2 import GetModelRequest

pytestmark = pytest.mark.anyio


@dataclass
class Demo:
    engine: AsyncEngine
    serve: Serving

    async def empty(self) -> None:
        """Return when nothing of any request is left in the engine."""
        with anyio.fail_after(10):
            while True:
                stats = self.engine.stats()
                if not (stats.running or stats.waiting or stats.parked or stats.pages_used):
                    return
                await anyio.sleep(0.005)


@pytest.fixture(scope="module")
async def demo() -> AsyncIterator[Demo]:
    async with AsyncEngine("demo", kv_cache_memory=64 * 1024 * 1024) as engine, serving(engine, limit=None) as serve:
        yield Demo(engine, serve)


def endless(**fields: object) -> StreamGenerateRequest:
    request = stream_request(**fields)  # type: ignore[arg-type]
    request.spec.stopping.ignore_eos = True
    return request


async def test_the_answer_is_that_of_the_engine(demo: Demo) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=24)
    direct = await demo.engine.generate("It is a truth universally", params)
    spec = text_spec("It is a truth universally", output=OutputOptions(token_ids=True))
    spec.sampling.temperature, spec.sampling.top_p, spec.sampling.seed, spec.stopping.max_tokens = 0.9, 0.9, 5, 24
    response = await demo.serve.generation.Generate(GenerateRequest(spec=spec))
    (sequence,) = response.sequences
    assert (sequence.text, tuple(sequence.token_ids), response.seed) == (direct.text, direct.token_ids, 5)
    assert response.usage.prompt_tokens == direct.usage.prompt_tokens == response.prompt.num_tokens
    events = await events_of(demo.serve.generation.StreamGenerate(StreamGenerateRequest(spec=spec)))
    assert "".join(event.delta.text for event in events) == direct.text
    assert tuple(token_id for event in events for token_id in event.delta.token_ids) == direct.token_ids
    assert [event.event_number for event in events] == list(range(len(events)))


async def test_token_ids_and_chats_are_prompts(demo: Demo) -> None:
    spec = GenerationSpec()
    spec.prompt.token_ids.ids.extend([10, 20, 30])
    spec.stopping.max_tokens = 2
    assert (await demo.serve.generation.Generate(GenerateRequest(spec=spec))).prompt.num_tokens == 3
    spec.prompt.chat.messages.append(ChatMessage(role="user", content="How do you do?"))
    assert (await demo.serve.generation.Generate(GenerateRequest(spec=spec))).prompt.num_tokens > 3


async def test_get_model_describes_the_demo(demo: Demo) -> None:
    model = (await demo.serve.model.GetModel(GetModelRequest())).model
    info = demo.engine.model_info
    assert (model.name, model.vocab_size, model.max_model_len) == ("demo", info.vocab_size, info.max_model_len)
    assert tuple(model.eos_token_ids) == info.eos_token_ids


async def test_what_the_engine_refuses_names_the_field_while_another_stream_goes_on(demo: Demo) -> None:
    other = demo.serve.generation.StreamGenerate(endless())
    await anext(aiter(other))
    vocab = demo.engine.model_info.vocab_size

    async def refused(spec: GenerationSpec) -> list[str]:
        with pytest.raises(aio.AioRpcError) as caught:
            await demo.serve.generation.Generate(GenerateRequest(spec=spec))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return failure_of(caught.value).fields

    spec = GenerationSpec()
    spec.prompt.token_ids.ids.append(vocab)
    assert await refused(spec) == ["spec.prompt.token_ids"]
    assert await refused(text_spec("It is a truth. " * 2000)) == ["spec.prompt.text"]
    spec = text_spec()
    spec.stopping.max_tokens = demo.engine.model_info.max_model_len
    assert await refused(spec) == ["spec.stopping.max_tokens"]
    spec = text_spec()
    spec.stopping.stop_token_ids.append(vocab)
    assert await refused(spec) == ["spec.stopping.stop_token_ids"]
    assert (await anext(aiter(other))).event.HasField("delta")
    other.cancel()
    await demo.empty()


async def test_a_crowd_with_cancellations_leaves_nothing(demo: Demo) -> None:
    rng = random.Random(0)
    leaves = {index: rng.randrange(1, 10) for index in range(0, 40, 4)}

    async def one(index: int) -> int:
        request = endless()
        request.spec.stopping.max_tokens = 10 + index % 7
        call = demo.serve.generation.StreamGenerate(request)
        count = 0
        async for response in call:
            count += response.event.delta.num_tokens
            if count == leaves.get(index):
                call.cancel()
                return count
        return count

    counts = await asyncio.gather(*map(one, range(40)))
    assert counts == [leaves.get(index, 10 + index % 7) for index in range(40)]
    await demo.empty()


@pytest.mark.parametrize("unary", [False, True])
async def test_the_deadline_ends_the_request(demo: Demo, unary: bool) -> None:
    spec = endless().spec
    stub = demo.serve.generation
    if unary:
        answer = stub.Generate(GenerateRequest(spec=spec), timeout=0.2)
    else:
        answer = events_of(stub.StreamGenerate(StreamGenerateRequest(spec=spec), timeout=0.2))
    with pytest.raises(aio.AioRpcError) as caught:
        await answer
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await demo.empty()


async def test_the_time_limit_is_a_result(demo: Demo) -> None:
    request = endless()
    request.spec.stopping.time_limit.nanos = 150_000_000
    events = await events_of(demo.serve.generation.StreamGenerate(request))
    assert events[-2].sequence_finished.finish.reason == FINISH_REASON_DEADLINE
    assert events[-1].finished.usage.completion_tokens == events[-2].sequence_finished.num_tokens > 0


async def test_cancel_requests_from_another_connection(demo: Demo) -> None:
    call = demo.serve.generation.StreamGenerate(endless(request_id="mine"))
    await anext(aiter(call))
    async with aio.insecure_channel(demo.serve.server.address) as channel:
        cancel = Serving(demo.serve.server, channel).generation.CancelRequests
        assert list((await cancel(CancelRequestsRequest(request_ids=["mine"]))).cancelled_request_ids) == ["mine"]
    events = await events_of(call)
    assert events[-2].sequence_finished.finish.reason == FINISH_REASON_CANCELLED
    await demo.empty()


async def test_a_killed_client_frees_its_request(demo: Demo) -> None:
    client = textwrap.dedent(f"""
        import grpc
        from aengine.v1.generation_service_pb2 import StreamGenerateRequest
        from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub
        request = StreamGenerateRequest.FromString({endless(request_id="doomed").SerializeToString()!r})
        for response in GenerationServiceStub(grpc.insecure_channel({demo.serve.server.address!r})).StreamGenerate(request):
            print("event", flush=True)
    """)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", client, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"event\n"
    process.kill()
    await process.wait()
    await demo.empty()
    assert await demo.engine.cancel("doomed") is False
