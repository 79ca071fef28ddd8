"""BatchGenerate: each request answered when it is whole, and failing alone; batches that are stored outlive their call and the server."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine, tokens
from grpc import aio
from grpc_harness import Serving, failure_of, serving, text_spec
from hang_guard import HANG_SECONDS
from oracle_engine import OracleEngine, StepGate, idle, until

from aengine.api.errors import QueueFullError
from aengine.api.outputs import FinishReason, Token
from aengine.server.core.batches import Answered, Batch
from aengine.server.core.calls_in_flight import Admission
from aengine.server.core.core import Backend
from aengine.server.core.journal import Journal, StoredAnswer
from aengine.server.grpc.generation.batch import MAX_REQUESTS, MAX_UNSENT, StoredBatches, batch_responses
from aengine.v1.generation_pb2 import FINISH_REASON_CANCELLED, GenerationSpec, OutputOptions, StreamOptions
from aengine.v1.generation_service_pb2 import (
    BatchGenerateRequest,
    BatchGenerateResponse,
    CancelRequestsRequest,
    DeleteBatchRequest,
    GenerateRequest,
)

pytestmark = pytest.mark.anyio


def batch(*request_ids: str | None, **fields: Any) -> BatchGenerateRequest:
    return BatchGenerateRequest(requests=[GenerateRequest(spec=text_spec(**fields), request_id=name) for name in request_ids])


def oracle_spec(seed: int, max_tokens: int) -> GenerationSpec:
    spec = GenerationSpec(output=OutputOptions(token_ids=True))
    spec.prompt.token_ids.ids.extend([3, 1, 4])
    spec.sampling.seed, spec.stopping.max_tokens, spec.stopping.ignore_eos = seed, max_tokens, True
    return spec


async def read(call: Any) -> BatchGenerateResponse:
    response: BatchGenerateResponse = await anext(aiter(call))
    return response


async def test_an_answer_that_is_too_large_fails_alone_and_as_soon_as_that_is_known(engine: FakeEngine) -> None:
    async with serving(engine, max_message_bytes=4096) as serve:
        call = serve.generation.BatchGenerate(batch("a", "b", "c"))
        streams = [await engine.submitted.get() for _ in range(3)]
        streams[0].push([Token(0, 10, "x" * 1000)] * 5)  # and it goes on
        failed = await read(call)
        assert (failed.index, failed.error.code, failed.error.reason) == (0, 8, "ANSWER_TOO_LARGE")
        await asyncio.wait_for(streams[0].closed.wait(), HANG_SECONDS)
        streams[1].push(tokens("\u00e9" * 2040))  # in its last bytes
        assert (await read(call)).error.reason == "ANSWER_TOO_LARGE"
        streams[2].push(tokens("x" * 3000))
        assert len((await read(call)).response.sequences[0].text) == 3000


async def test_answers_come_in_the_order_of_their_ends(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.BatchGenerate(batch("a", "b", "c", stream=StreamOptions(resumable=True)))
        streams = [await engine.submitted.get() for _ in range(3)]
        assert [stream.request_id for stream in streams] == ["a", "b", "c"]
        for index in (2, 0, 1):
            streams[index].push(tokens("x", str(index)))
            told = await read(call)
            assert (told.index, told.response.request_id, told.response.sequences[0].text) == (index, "abc"[index], f"x{index}")
        assert [response async for response in call] == []
        assert serve.server.in_flight == 0


async def test_an_answer_is_that_of_generate() -> None:
    async with OracleEngine() as engine, serving(engine) as serve:
        specs = [oracle_spec(seed, 10 + seed) for seed in range(100)]
        request = BatchGenerateRequest(requests=[GenerateRequest(spec=spec, request_id=f"r{i}") for i, spec in enumerate(specs)])
        answers = {told.index: told.response async for told in serve.generation.BatchGenerate(request)}
        assert sorted(answers) == list(range(100))
        for seed, answer in answers.items():
            assert list(answer.sequences[0].token_ids) == engine.solo(seed)[0]
        alone = await serve.generation.Generate(request.requests[7])
        for response in (alone, answers[7]):
            response.ClearField("timing")
            response.usage.ClearField("cached_prompt_tokens")
        assert alone == answers[7]
        assert idle(engine)


@pytest.mark.parametrize("count", [0, MAX_REQUESTS + 1])
async def test_too_few_and_too_many_are_refused(engine: FakeEngine, count: int) -> None:
    async with serving(engine) as serve:
        with pytest.raises(aio.AioRpcError) as caught:
            await read(serve.generation.BatchGenerate(batch(*[None] * count)))
    failure = failure_of(caught.value)
    assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["requests"])
    assert f"{count} requests are not 1 to 1024" in failure.message
    assert engine.submitted.empty()


@pytest.mark.slow
async def test_as_many_as_there_may_be(engine: FakeEngine) -> None:
    engine.script = tokens("a")
    async with serving(engine) as serve:
        requests = [GenerateRequest(spec=oracle_spec(seed, 1)) for seed in range(MAX_REQUESTS)]
        answers = [
            told.index
            async for told in serve.generation.BatchGenerate(BatchGenerateRequest(requests=requests))
            if told.HasField("response")
        ]
        assert sorted(answers) == list(range(MAX_REQUESTS))


async def test_what_fails_fails_alone(engine: FakeEngine) -> None:
    engine.script = tokens("fine")
    request = batch("a", "b", "c", "a")
    request.requests[1].spec.sampling.top_p = 2
    request.requests[2].spec.model = "other"
    async with serving(engine) as serve:
        told = {answer.index: answer async for answer in serve.generation.BatchGenerate(request)}
    assert told[0].response.sequences[0].text == "fine"
    errors = [(told[index].error.code, told[index].error.reason) for index in (1, 2, 3)]
    assert errors == [(3, "INVALID_FIELD"), (5, "MODEL_NOT_FOUND"), (6, "REQUEST_ID_IN_USE")]
    (violation,) = told[1].error.field_violations
    assert violation.field == "spec.sampling.top_p"
    assert "'a' is in use by requests[0] of the batch" in told[3].error.message


async def test_a_full_queue_refuses_what_is_too_much() -> None:
    async with OracleEngine(max_queued_requests=5) as engine, serving(engine) as serve:
        gate = StepGate(engine)
        requests = [GenerateRequest(spec=oracle_spec(seed, 5)) for seed in range(40)]
        call = serve.generation.BatchGenerate(BatchGenerateRequest(requests=requests))
        refused = await read(call)
        gate.open()
        told = [refused, *[answer async for answer in call]]
        full = [answer.error for answer in told if answer.HasField("error")]
        assert {(error.code, error.reason, error.retry_delay.seconds) for error in full} == {(8, "QUEUE_FULL", 1)}
        assert 5 <= len(told) - len(full) < 40
        assert sorted(answer.index for answer in told) == list(range(40))


async def test_an_error_in_the_middle_is_that_of_its_request(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.BatchGenerate(batch("a", "b"))
        first, second = [await engine.submitted.get() for _ in range(2)]
        first.push([*tokens("x", "y")[:1], QueueFullError("lost")])
        told = await read(call)
        assert (told.index, told.error.message, told.HasField("response")) == (0, "lost", False)
        second.push(tokens("z"))
        assert (await read(call)).response.sequences[0].text == "z"


async def test_one_of_them_can_be_cancelled(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.BatchGenerate(batch("a", "b"))
        _, other = [await engine.submitted.get() for _ in range(2)]
        await serve.generation.CancelRequests(CancelRequestsRequest(request_ids=["a"]))
        assert (await read(call)).response.sequences[0].finish.reason == FINISH_REASON_CANCELLED
        other.push(tokens("z"))
        assert (await read(call)).index == 1


async def test_a_client_that_leaves_cancels_all_of_them() -> None:
    async with OracleEngine() as engine, serving(engine) as serve:
        requests = [GenerateRequest(spec=oracle_spec(seed, 1 if seed == 0 else 390)) for seed in range(200)]
        call = serve.generation.BatchGenerate(BatchGenerateRequest(requests=requests))
        await read(call)
        call.cancel()
        await until(lambda: not serve.server.in_flight)
        assert idle(engine)


async def test_the_deadline_reaches_the_engine(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.BatchGenerate(batch("a"), timeout=HANG_SECONDS)
        stream = await engine.submitted.get()
        assert stream.call["timeout"] == pytest.approx(HANG_SECONDS, rel=0.1)
        stream.push([Token(0, -1, "", finish_reason=FinishReason.DEADLINE)])
        assert (await read(call)).error.reason == "DEADLINE_PASSED"


async def test_while_answers_wait_to_be_sent_nothing_more_is_read(engine: FakeEngine) -> None:
    """And all comes when the client reads on."""
    count = 4 * MAX_UNSENT
    admission = Admission()
    request = batch(*(f"r{index}" for index in range(count)))
    async with aclosing(batch_responses(Backend(engine, admission), request, None)) as responses:  # type: ignore[arg-type]
        reading = asyncio.create_task(anext(responses))
        streams = [await engine.submitted.get() for _ in range(count)]
        for stream in streams:
            stream.push(tokens("a", "b"))
        told = [await reading]
        await until(lambda: sum(stream.closed.is_set() for stream in streams) > MAX_UNSENT)
        for _ in range(100):  # turns of the loop, in which more would end
            await asyncio.sleep(0)
        assert sum(stream.closed.is_set() for stream in streams) <= MAX_UNSENT + 2
        told += [answer async for answer in responses]
    assert sorted(answer.index for answer in told) == list(range(count))
    assert admission.in_flight == 0


async def test_a_client_reads_on_after_a_pause(engine: FakeEngine) -> None:
    """Far more than the transport takes waits in the meantime."""
    engine.script = [*[Token(0, 10, "x" * 500_000)] * 2, *tokens("end")]
    count = 4 * MAX_UNSENT
    async with serving(engine) as serve:
        call = serve.generation.BatchGenerate(batch(*(f"r{index}" for index in range(count))))
        streams = [await engine.submitted.get() for _ in range(count)]
        await until(lambda: sum(stream.closed.is_set() for stream in streams) > MAX_UNSENT)
        told = [answer async for answer in call]
        assert sorted(answer.index for answer in told) == list(range(count))
        assert {len(answer.response.sequences[0].text) for answer in told} == {1_000_003}


async def test_a_drain_waits_for_a_batch_and_refuses_the_next(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.BatchGenerate(batch("a"))
        stream = await engine.submitted.get()
        draining = asyncio.create_task(serve.server.drain(HANG_SECONDS))
        await until(lambda: serve.server.core.admission.closed)
        with pytest.raises(aio.AioRpcError) as caught:
            await read(serve.generation.BatchGenerate(batch("b")))
        assert failure_of(caught.value).reason == "DRAINING"
        stream.push(tokens("x"))
        assert (await read(call)).response.sequences[0].text == "x"
        assert await draining


# ---- batches that are stored -----------------------------------------------------------------------------------------------


def stored(count: int, batch_id: str, **fields: Any) -> BatchGenerateRequest:
    specs = [oracle_spec(seed, 6) for seed in range(count)]
    return BatchGenerateRequest(requests=[GenerateRequest(spec=spec, **fields) for spec in specs], batch_id=batch_id)


async def all_of(call: Any) -> dict[int, list[int]]:
    """The tokens of the answers; each request has one."""
    told = [response async for response in call]
    assert len({one.index for one in told}) == len(told)
    return {one.index: list(one.response.sequences[0].token_ids) for one in told}


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    failure = failure_of(caught.value)
    return failure.code, failure.reason + "".join(failure.fields)


async def begin_stored(engine: OracleEngine, serve: Serving, gate: StepGate) -> None:
    """Begin a batch and leave its call."""
    call = serve.generation.BatchGenerate(stored(5, "mine"))
    reading = asyncio.create_task(read(call))
    await until(gate.held.is_set)
    reading.cancel()
    call.cancel()


async def test_a_batch_that_is_stored_goes_on_without_its_call_and_is_read_again(tmp_path: Path) -> None:
    async with OracleEngine() as engine, serving(engine, journal=str(tmp_path)) as serve:
        generate, gate = serve.generation.BatchGenerate, StepGate(engine)
        await begin_stored(engine, serve, gate)
        gate.open()
        again = await all_of(generate(BatchGenerateRequest(batch_id="mine")))
        assert sorted(again) == list(range(5))
        assert again == await all_of(generate(BatchGenerateRequest(batch_id="mine"))), "now of its entry"
        assert again == await all_of(generate(BatchGenerateRequest(requests=stored(5, "").requests)))
        assert await refused(read(generate(stored(1, "mine")))) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USEbatch_id")
        await serve.generation.DeleteBatch(DeleteBatchRequest(batch_id="mine"))
        gone = (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        assert await refused(read(generate(BatchGenerateRequest(batch_id="mine")))) == gone
        assert await refused(serve.generation.DeleteBatch(DeleteBatchRequest(batch_id="mine"))) == gone
        wrong = grpc.StatusCode.INVALID_ARGUMENT
        twice = read(generate(stored(2, "twice", request_id="same")))
        assert await refused(twice) == (wrong, "INVALID_FIELDrequests[1].request_id")
        assert await refused(serve.generation.DeleteBatch(DeleteBatchRequest())) == (wrong, "INVALID_FIELDbatch_id")
        assert await serve.server.core.journal.unfinished("") == []


async def test_one_that_is_deleted_ends(tmp_path: Path) -> None:
    async with OracleEngine() as engine, serving(engine, journal=str(tmp_path)) as serve:
        gate = StepGate(engine)
        await begin_stored(engine, serve, gate)
        deleting = asyncio.ensure_future(serve.generation.DeleteBatch(DeleteBatchRequest(batch_id="mine")))
        gate.open()
        await deleting
        assert idle(engine)
        assert await serve.server.core.journal.unfinished("") == []


async def test_the_next_server_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a client that asks before the server has found it."""
    unfinished, responses, asked = Journal.unfinished, StoredBatches.responses, asyncio.Event()

    async def late(self: Journal, start: str) -> list[StoredAnswer]:
        await asked.wait()
        for _ in range(100):  # turns of the loop, in which an answer that waits for nothing would come
            await asyncio.sleep(0)
        return await unfinished(self, start)

    def noted(self: StoredBatches, request: BatchGenerateRequest) -> Any:
        asked.set()
        return responses(self, request)

    monkeypatch.setattr(Journal, "unfinished", late)
    monkeypatch.setattr(StoredBatches, "responses", noted)
    async with OracleEngine() as engine:
        gate = StepGate(engine)
        async with serving(engine, journal=str(tmp_path)) as serve:
            await begin_stored(engine, serve, gate)
            gate.open()
        asked.clear()
        async with serving(engine, journal=str(tmp_path)) as serve:
            generate = serve.generation.BatchGenerate
            told, again = [await all_of(generate(BatchGenerateRequest(batch_id="mine"))) for _ in range(2)]
            assert told == again == await all_of(generate(BatchGenerateRequest(requests=stored(5, "").requests)))


async def test_what_is_begun_while_the_server_looks_for_others_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished, answer, may_look, served = Journal.unfinished, StoredBatches.answer, asyncio.Event(), Counter[int]()

    async def late(self: Journal, start: str) -> list[StoredAnswer]:
        await may_look.wait()
        return await unfinished(self, start)

    async def counted(self: StoredBatches, batch: Batch, index: int) -> Answered:
        served[index] += 1
        return await answer(self, batch, index)

    monkeypatch.setattr(Journal, "unfinished", late)
    monkeypatch.setattr(StoredBatches, "answer", counted)
    async with OracleEngine() as engine, serving(engine, journal=str(tmp_path)) as serve:
        gate = StepGate(engine)
        await begin_stored(engine, serve, gate)
        may_look.set()
        await until(serve.server._grpc._batches.batches._resuming.done)  # type: ignore[union-attr]
        gate.open()
        assert sorted(await all_of(serve.generation.BatchGenerate(BatchGenerateRequest(batch_id="mine")))) == list(range(5))
        assert served == dict.fromkeys(range(5), 1)
