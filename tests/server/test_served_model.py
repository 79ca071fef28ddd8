"""gRPC on the real engine with the demo model: same answers as in process, nothing left behind."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
import grpc
import pytest
from event_fold import EventFold
from grpc import aio
from grpc_harness import Serving, events_of, failure_of, serving, stream_request, text_spec
from hang_guard import HANG_SECONDS, growing

from aengine import AsyncEngine, SamplingParams
from aengine.api.outputs import TokenLogprob
from aengine.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE,
    FINISH_REASON_EOS,
    FINISH_REASON_STOP_STRING,
    ChatMessage,
    GenerationSpec,
    LogprobOptions,
    OutputOptions,
    TokenLogprobs,
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
        with anyio.fail_after(HANG_SECONDS):
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


def columns(entries: tuple[TokenLogprob | None, ...], top_k: int) -> TokenLogprobs:
    nothing = TokenLogprob(0, math.nan, 0, {})
    message = TokenLogprobs(top_k=top_k)
    for entry in (entry or nothing for entry in entries):
        message.logprobs.append(entry.logprob)
        message.ranks.append(entry.rank)
        message.top_token_ids.extend(entry.top_logprobs or [0] * top_k)
        message.top_logprobs.extend(entry.top_logprobs.values() or [math.nan] * top_k)
    return message


async def test_several_sequences_with_logprobs_are_those_of_the_engine(demo: Demo) -> None:
    prompt = "It is a truth universally acknowledged"
    params = SamplingParams(temperature=0.9, seed=5, n=3, max_tokens=12, presence_penalty=0.5, logprobs=3, prompt_logprobs=2)
    direct = await demo.engine.generate(prompt, params)
    output = OutputOptions(token_ids=True, logprobs=LogprobOptions(top_k=3), prompt_logprobs=LogprobOptions(top_k=2))
    spec = text_spec(prompt, output=output)
    spec.sampling.temperature, spec.sampling.seed, spec.sampling.n, spec.sampling.presence_penalty = 0.9, 5, 3, 0.5
    spec.stopping.max_tokens = 12
    unary = await demo.serve.generation.Generate(GenerateRequest(spec=spec, request_id="r"))
    assert len(unary.sequences) == 3
    for sequence, answer in zip(unary.sequences, (direct, *direct.others), strict=True):
        assert (sequence.text, tuple(sequence.token_ids)) == (answer.text, answer.token_ids)
        assert answer.logprobs is not None
        assert sequence.logprobs == columns(answer.logprobs, 3)
    assert direct.prompt_logprobs is not None
    assert len(direct.prompt_logprobs) == unary.prompt.num_tokens > 2
    assert unary.prompt_logprobs.SerializeToString() == columns(direct.prompt_logprobs, 2).SerializeToString()

    fold, indices = EventFold(), []
    for event in await events_of(demo.serve.generation.StreamGenerate(StreamGenerateRequest(spec=spec, request_id="r"))):
        fold.add(event)
        indices += [event.delta.sequence_index] if event.HasField("delta") else []
    assert indices != sorted(indices)  # the sequences are generated together
    folded = fold.response()
    for response in (unary, folded):
        for name in ("timing", "usage"):  # the second one found the prompt in the cache
            response.ClearField(name)
    assert unary.SerializeToString() == folded.SerializeToString()


async def test_a_stop_string_over_the_border_of_tokens_ends_the_text_before_it(demo: Demo) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    prompt = "It is a truth universally"
    pieces = [token.text async for token in demo.engine.stream(prompt, params)]
    border = next(i for i in range(4, len(pieces)) if len(pieces[i - 1]) > 1 and len(pieces[i]) > 1)
    stop = pieces[border - 1][-1] + pieces[border][:2]
    text = "".join(pieces)
    for include in (False, True):
        spec = text_spec(prompt)
        spec.sampling.temperature = 0
        spec.stopping.max_tokens, spec.stopping.include_stop_in_output = 24, include
        spec.stopping.stop_strings.extend(["not to be found", stop])
        for shown in (True, False):
            spec.output.text = shown
            (sequence,) = (await demo.serve.generation.Generate(GenerateRequest(spec=spec))).sequences
            assert (sequence.finish.reason, sequence.finish.stop_string) == (FINISH_REASON_STOP_STRING, stop)
            assert sequence.text == (text[: text.index(stop) + include * len(stop)] if shown else "")
            assert sequence.num_tokens <= border + 1
    await demo.empty()


async def test_min_tokens_delay_a_stop_string(demo: Demo) -> None:
    spec = text_spec("It is a truth universally")
    spec.sampling.temperature = 0
    spec.stopping.max_tokens, spec.stopping.min_tokens = 12, 12
    spec.stopping.stop_strings.append("e")
    (sequence,) = (await demo.serve.generation.Generate(GenerateRequest(spec=spec))).sequences
    assert sequence.num_tokens == 12
    assert "e" in sequence.text


async def test_only_allowed_and_never_banned_ids_are_chosen(demo: Demo) -> None:
    spec = text_spec(output=OutputOptions(token_ids=True))
    spec.sampling.allowed_token_ids.extend([40, 50, 60, 70])
    spec.sampling.logit_bias[50] = -100
    spec.sampling.seed = 3
    spec.stopping.max_tokens = 16
    (sequence,) = (await demo.serve.generation.Generate(GenerateRequest(spec=spec))).sequences
    assert set(sequence.token_ids) <= {40, 60, 70}
    del spec.sampling.allowed_token_ids[:]
    spec.sampling.logit_bias[50] = 100
    spec.sampling.logit_bias[60] = 100
    spec.sampling.banned_token_ids.append(60)
    (sequence,) = (await demo.serve.generation.Generate(GenerateRequest(spec=spec))).sequences
    assert set(sequence.token_ids) == {50}


async def test_structured_output_is_one_of_the_choices(demo: Demo) -> None:
    spec = text_spec("Is it true?")
    spec.structured_output.choices.values.extend(["yes", "no, not at all", "perhaps"])
    spec.sampling.n, spec.sampling.seed = 4, 1
    response = await demo.serve.generation.Generate(GenerateRequest(spec=spec))
    assert {sequence.text for sequence in response.sequences} <= {"yes", "no, not at all", "perhaps"}
    assert {sequence.finish.reason for sequence in response.sequences} == {FINISH_REASON_EOS}


async def test_the_effective_spec_tells_what_was_used(demo: Demo) -> None:
    spec = text_spec(output=OutputOptions(effective_params=True))
    spec.stopping.max_tokens = 1
    answer = await demo.serve.generation.Generate(GenerateRequest(spec=spec))
    defaults = demo.engine.model_info.generation_defaults
    assert answer.effective_spec.sampling.seed == answer.seed
    assert answer.effective_spec.sampling.temperature == pytest.approx(1.0 if defaults.temperature is None else defaults.temperature)
    assert (answer.effective_spec.sampling.repetition_penalty, answer.effective_spec.stopping.max_tokens) == (1.0, 1)


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
    spec = text_spec()
    spec.sampling.logit_bias[vocab] = 1
    assert await refused(spec) == ["spec.sampling.logit_bias"]
    most = demo.engine.config.max_logprobs
    spec = text_spec(output=OutputOptions(logprobs=LogprobOptions(top_k=most + 1)))
    assert await refused(spec) == ["spec.output.logprobs.top_k"]
    for kind in ("json_schema", "regex"):
        spec = text_spec()
        setattr(spec.structured_output, kind, "[(")
        assert await refused(spec) == [f"spec.structured_output.{kind}"]
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


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("unary", [False, True])
async def test_the_deadline_ends_the_request(demo: Demo, unary: bool) -> None:
    spec = endless().spec
    stub = demo.serve.generation
    for timeout in growing(0.2):
        if unary:
            answer = stub.Generate(GenerateRequest(spec=spec), timeout=timeout)
        else:
            answer = events_of(stub.StreamGenerate(StreamGenerateRequest(spec=spec), timeout=timeout))
        with pytest.raises(aio.AioRpcError) as caught:
            await answer
        if caught.value.code() is not grpc.StatusCode.INTERNAL:  # which it is where it has not begun to read by then
            break
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await demo.empty()


async def test_the_time_limit_is_a_result(demo: Demo) -> None:
    request = endless()
    request.spec.stopping.time_limit.nanos = 200_000_000
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


async def test_all_violations_are_named_at_once(demo: Demo) -> None:
    request = stream_request(request_id="?")
    spec = request.spec
    spec.sampling.temperature = -1
    spec.sampling.allowed_token_ids.extend([1, 2**32 - 1])
    spec.sampling.logit_bias[4096] = 1
    spec.stopping.stop_token_ids.append(4096)
    spec.stopping.max_tokens = 5000
    spec.stopping.time_limit.nanos = 2 * 10**9
    spec.output.logprobs.top_k = 1000
    spec.structured_output.regex = "(a"
    with pytest.raises(aio.AioRpcError) as caught:
        await events_of(demo.serve.generation.StreamGenerate(request))
    failure = failure_of(caught.value)
    assert failure.reason == "INVALID_FIELD"
    assert set(failure.fields) == {
        "request_id", "spec.sampling.temperature", "spec.sampling.allowed_token_ids", "spec.sampling.logit_bias",
        "spec.stopping.stop_token_ids", "spec.stopping.max_tokens", "spec.stopping.time_limit", "spec.output.logprobs.top_k",
        "spec.structured_output.regex",
    }  # fmt: skip
    request = stream_request(output=OutputOptions(logprobs=LogprobOptions(top_k=1000)), structured_output={"regex": "(a"})
    with pytest.raises(aio.AioRpcError) as caught:
        await events_of(demo.serve.generation.StreamGenerate(request))
    assert failure_of(caught.value).fields == ["spec.output.logprobs.top_k", "spec.structured_output.regex"]
