"""What `EngineBase` promises, kept alike by the engine, a client, a router and a client of a router, in asyncio and in trio."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import pytest
from anyio.abc import TaskGroup
from both_sides import BRIDGED, CALL_EACH, LOCAL, ROUTED, SIDES, oracle_side
from grpc_loop import ASYNCIO
from hang_guard import HANG_SECONDS
from oracle_engine import OracleEngine, StepGate, idle, until
from slow_cases import slow_but
from speculating import also_with_drafts

from aengine import (
    Completion,
    ContextLengthError,
    EngineBase,
    EngineStateError,
    FinishReason,
    ForkPoint,
    InvalidRequestError,
    KVCapacityError,
    QueueFullError,
    RequestIdInUseError,
    SamplingParams,
    Token,
)
from aengine.engine.edges import Cancel
from aengine.scheduler.plan import RowsFailed, StepPlan

pytestmark = pytest.mark.anyio

ENDLESS = SamplingParams(seed=1, ignore_eos=True)
FORKED, SIXTY = [1, 2, 3, 4, 5, 6], SamplingParams(seed=9, max_tokens=60, ignore_eos=True)


@pytest.fixture(params=[pytest.param(ASYNCIO, id="asyncio"), "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=slow_but(SIDES[:-1], SIDES))
def side(request: pytest.FixtureRequest, anyio_backend: Any) -> str:
    if request.param == BRIDGED and anyio_backend == "trio":
        pytest.skip("in trio the client is bridged anyway")
    return str(request.param)


@dataclass
class Both:
    oracle: OracleEngine
    engine: EngineBase  # what is tested: the oracle itself, or a client of it


@pytest.fixture
async def both(side: str) -> AsyncIterator[Both]:
    async with both_of(side) as both:
        yield both


@asynccontextmanager
async def both_of(side: str, **config: Any) -> AsyncIterator[Both]:
    async with oracle_side(side, **config) as beside, beside.reach() as engine:
        yield Both(beside.oracle, engine)


class Running:
    """A function that runs in a task of its own; `wait` gives what it returns, or raises what it raises."""

    def __init__(self, group: TaskGroup, function: Callable[[], Awaitable[Any]]) -> None:
        self._function = function
        self._scope, self._ended = anyio.CancelScope(), anyio.Event()
        self._result: Any = None
        self._error: Exception | None = None
        self.cancelled = False
        group.start_soon(self._run)

    def cancel(self) -> None:
        self._scope.cancel()

    async def wait(self) -> Any:
        with anyio.fail_after(HANG_SECONDS):
            await self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result

    async def _run(self) -> None:
        try:
            with self._scope:
                self._result = await self._function()
            self.cancelled = self._scope.cancelled_caught
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()


def slow_down(oracle: OracleEngine) -> None:
    """The 399 tokens of ENDLESS take 2 s now."""
    oracle.runner.before_step = lambda plan: time.sleep(0.005)


async def tokens_of(stream: Any) -> list[Token]:
    with anyio.fail_after(HANG_SECONDS):
        return [token async for token in stream]


async def check_is_cancelled(oracle: OracleEngine, gate: StepGate) -> None:
    """The engine is told so before, or while a step is held, and goes no further."""
    await until(lambda: idle(oracle) or any(isinstance(command, Cancel) for command in [*oracle._core.steps._mailbox._commands]))
    gate.open()
    await until(lambda: idle(oracle))
    assert oracle.stats().completion_tokens < 100  # steps with drafts have some


def fail_every_row(plan: StepPlan) -> None:
    raise RowsFailed({row: ValueError("this row cannot be built") for row in plan.rows.tolist()})


async def refusal_of(engine: EngineBase, *args: Any, **options: Any) -> InvalidRequestError:
    """The engine may refuse at submission or when the stream is read."""
    with pytest.raises(InvalidRequestError) as caught, anyio.fail_after(HANG_SECONDS):
        async with engine.stream(*args, **options) as stream:
            await stream.started()
    return caught.value


@also_with_drafts
async def test_a_stream_is_its_solo_run(both: Both) -> None:
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
    stream = both.engine.stream([1, 2, 3], params, request_id="a:b")
    assert (stream.request_id, stream.seed) == ("a:b", 5)
    tokens = await tokens_of(stream)
    output, reason = both.oracle.solo(5)
    assert [token.token_id for token in tokens] == output
    assert [token.finish_reason for token in tokens] == [None] * 19 + [reason]
    assert [(token.index, token.logprob, token.rank, token.top_logprobs) for token in tokens] == [(0, None, None, None)] * 20
    completion = stream.completion()
    assert completion.token_ids == tuple(output)
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.MAX_TOKENS, None)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 20)
    assert completion.text == "".join(token.text for token in tokens) == both.oracle.tokenizer.decode(output)
    assert (completion.logprobs, completion.prompt_logprobs, completion.others) == (None, None, ())
    assert stream.timing.queue is not None
    assert await tokens_of(stream) == []
    await stream.aclose()
    assert idle(both.oracle)


async def test_generate_is_the_stream(both: Both) -> None:
    params = SamplingParams(seed=9, max_tokens=200, ignore_eos=True)
    stream = both.engine.stream([4, 4], params)
    await tokens_of(stream)
    completion = await both.engine.generate([4, 4], params)
    assert completion.usage.cached_prompt_tokens == stream.usage.cached_prompt_tokens
    assert completion == stream.completion()


@pytest.mark.parametrize("most", [1, 64])
async def test_generate_reads_however_few_tokens_may_wait(side: str, most: int) -> None:
    async with both_of(side, max_unread_tokens=most) as both:
        with anyio.fail_after(HANG_SECONDS):
            completion = await both.engine.generate([1], SamplingParams(seed=5, max_tokens=150, ignore_eos=True, n=2))
            one = await both.engine.generate([1], SamplingParams(seed=6, max_tokens=150, ignore_eos=True))
        assert [len(each.token_ids) for each in (completion, *completion.others)] == [150, 150]
        assert list(one.token_ids) == both.oracle.solo(6)[0][:150]


async def test_the_cached_part_of_a_prompt_is_told(both: Both) -> None:
    params = SamplingParams(seed=1, max_tokens=2, ignore_eos=True)
    prompt = list(range(20))
    assert (await both.engine.generate(prompt, params)).usage.cached_prompt_tokens == 0
    assert (await both.engine.generate(prompt, params)).usage.cached_prompt_tokens == 16
    assert (await both.engine.generate(prompt, params, cache_salt="other")).usage.cached_prompt_tokens == 0


@also_with_drafts
async def test_eos_and_stop_tokens(both: Both) -> None:
    ended = await both.engine.generate([8], SamplingParams(seed=2))
    output, reason = both.oracle.solo(2)
    assert reason is FinishReason.EOS
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids) == (reason, None, tuple(output))
    stop = output[3]
    stopped = await both.engine.generate([8], SamplingParams(seed=2, stop_token_ids=(stop,)))
    assert (stopped.finish_reason, stopped.stop_reason, stopped.token_ids[-1]) == (FinishReason.STOP_TOKEN, stop, stop)
    assert stopped.text == both.oracle.tokenizer.decode(stopped.token_ids[:-1])


@also_with_drafts
async def test_the_reason_comes_with_the_last_token(both: Both) -> None:
    output = both.oracle.tokenizer.decode(
        (await both.engine.generate([3], SamplingParams(seed=4, max_tokens=12, ignore_eos=True))).token_ids
    )
    stop = output[4:6]
    tokens = await tokens_of(both.engine.stream([3], SamplingParams(seed=4, max_tokens=12, ignore_eos=True, stop=("never", stop))))
    assert "".join(token.text for token in tokens) == output[: output.index(stop)]
    assert [token.finish_reason for token in tokens[:-1]] == [None] * (len(tokens) - 1)
    assert (tokens[-1].finish_reason, tokens[-1].stop_reason) == (FinishReason.STOP_STRING, stop)
    assert tokens[-1].token_id >= 0


@also_with_drafts
async def test_several_sequences(both: Both) -> None:
    params = SamplingParams(seed=11, n=3, max_tokens=6, ignore_eos=True)
    stream = both.engine.stream([2, 3], params)
    tokens = await tokens_of(stream)
    first = stream.completion()
    answers: list[Completion] = [first, *first.others]
    assert len(answers) == 3
    for index, answer in enumerate(answers):
        mine = [token for token in tokens if token.index == index]
        assert tuple(token.token_id for token in mine) == answer.token_ids
        assert [token.finish_reason for token in mine] == [None] * 5 + [FinishReason.MAX_TOKENS]
        assert answer.finish_reason is FinishReason.MAX_TOKENS
    assert len({answer.token_ids for answer in answers}) == 3
    assert stream.usage.completion_tokens == 18
    again = await both.engine.generate([2, 3], params)
    assert [(one.token_ids, one.text) for one in (again, *again.others)] == [(one.token_ids, one.text) for one in answers]


async def test_the_context_ends_an_answer(both: Both) -> None:
    full = await both.engine.generate([1], SamplingParams(seed=3, ignore_eos=True))
    assert (full.finish_reason, len(full.token_ids)) == (FinishReason.CONTEXT_LENGTH, 399)


async def test_requests_run_in_the_order_of_their_submission(both: Both, side: str) -> None:
    if side in CALL_EACH:
        pytest.skip("gRPC brings the calls of a connection in any order")
    gate = StepGate(both.oracle)
    blocker = both.engine.stream([1], ENDLESS)
    await anyio.to_thread.run_sync(gate.held.wait)
    params = SamplingParams(seed=1, max_tokens=1)
    names = [f"r{i}" for i in range(20)]
    streams = [both.engine.stream([1], params, request_id=name) for name in names]
    await until(lambda: len(both.oracle._core.serving.registry._by_id) == 21)
    assert list(both.oracle._core.serving.registry._by_id)[1:] == names
    gate.open()
    await blocker.aclose()
    for stream in streams:
        await stream.aclose()


class TestOptions:
    @also_with_drafts
    async def test_timeout(self, both: Both) -> None:
        slow_down(both.oracle)
        stream = both.engine.stream([1], ENDLESS, timeout=0.2)
        tokens = await tokens_of(stream)
        assert tokens[-1].finish_reason is stream.completion().finish_reason is FinishReason.DEADLINE
        assert len(tokens) < 390

    async def test_numpy_ids(self, both: Both) -> None:
        params = SamplingParams(seed=5, max_tokens=3, ignore_eos=True)
        known = await both.engine.generate([1, 2], params)
        assert await both.engine.generate(np.array([1, 2]), params) == known  # type: ignore[arg-type]

    async def test_a_name_is_free_again_after_the_end(self, both: Both) -> None:
        for _ in range(3):
            async with both.engine.stream([1], ENDLESS, request_id="again") as stream:
                await stream.__anext__()
        assert (await both.engine.generate([1], SamplingParams(seed=1, max_tokens=1), request_id="again")).token_ids


@also_with_drafts
class TestLeaving:
    async def test_aclose_returns_when_the_pages_are_free(self, both: Both) -> None:
        stream = both.engine.stream([1] * 50, ENDLESS)
        await stream.__anext__()
        assert both.oracle.stats().pages_used > 0
        await stream.aclose()
        assert idle(both.oracle)
        await stream.aclose()

    async def test_a_stream_that_is_closed_was_cancelled(self, both: Both) -> None:
        """Where its end was not read: in its completion, and for whoever reads on."""
        stream = both.engine.stream([1], SamplingParams(seed=1, n=3, ignore_eos=True))
        read = [await stream.__anext__() for _ in range(5)]
        await stream.aclose()
        completion = stream.completion()
        for index, one in enumerate((completion, *completion.others)):
            assert one.finish_reason is FinishReason.CANCELLED
            assert one.token_ids == tuple(token.token_id for token in read if token.index == index)
        ends = await tokens_of(stream)
        assert ends == [Token(index, -1, "", finish_reason=FinishReason.CANCELLED) for index in range(3)]
        assert stream.completion() == completion
        await stream.aclose()
        assert await tokens_of(stream) == []

    async def test_a_stream_that_was_read_keeps_its_end(self, both: Both) -> None:
        async with both.engine.stream([1], SamplingParams(seed=1, max_tokens=2, ignore_eos=True)) as stream:
            await tokens_of(stream)
        assert stream.completion().finish_reason is FinishReason.MAX_TOKENS

    @pytest.mark.quick_cases(1)
    async def test_closed_with_many_unread_tokens(self, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """So many that the client has stopped to take more."""
        monkeypatch.setattr("aengine.client.active_request.CLOSE_SECONDS", 2 * HANG_SECONDS)  # given to a server that does not answer
        async with both_of(side, max_unread_tokens=4000, num_pages=4000) as both:
            oracle, engine = both.oracle, both.engine
            stream = engine.stream([1], SamplingParams(seed=1, n=4, ignore_eos=True))
            await stream.started()
            await until(lambda: oracle.stats().completion_tokens == 4 * 399)
            with anyio.fail_after(HANG_SECONDS):
                await stream.aclose()
            assert stream.completion().finish_reason is FinishReason.CANCELLED
            assert stream.completion().token_ids == ()

    async def test_break_and_drop(self, both: Both) -> None:
        gate = StepGate(both.oracle, at=3)
        async for _ in both.engine.stream([1], ENDLESS):
            break
        gc.collect()
        await check_is_cancelled(both.oracle, gate)

    async def test_never_read(self, both: Both) -> None:
        gate = StepGate(both.oracle)
        stream = both.engine.stream([1], ENDLESS)
        await stream.started()
        assert not idle(both.oracle)
        del stream
        gc.collect()
        await check_is_cancelled(both.oracle, gate)

    async def test_dropped_at_once(self, both: Both) -> None:
        both.engine.stream([1], ENDLESS)
        stream = both.engine.stream([1], ENDLESS)
        await stream.aclose()
        with anyio.fail_after(HANG_SECONDS):
            await stream.started()
        gc.collect()
        await until(lambda: idle(both.oracle))

    async def test_cancelled_scope(self, both: Both) -> None:
        with anyio.CancelScope() as scope:
            async with both.engine.stream([1], ENDLESS) as stream:
                async for _ in stream:
                    scope.cancel()
                    await anyio.sleep_forever()
        assert idle(both.oracle)

    @pytest.mark.parametrize("whole", [False, True])
    async def test_cancelled_task_that_waits_for_a_token(self, both: Both, whole: bool) -> None:
        gate = StepGate(both.oracle, at=2)
        stream = both.engine.stream([1], ENDLESS)
        async with anyio.create_task_group() as group:
            reading = Running(group, lambda: both.engine.generate([1], ENDLESS) if whole else tokens_of(stream))
            await stream.started()
            await anyio.to_thread.run_sync(gate.held.wait)
            reading.cancel()
            gate.open()
            await reading.wait()
            assert reading.cancelled
        if whole:
            await stream.aclose()
        else:
            assert (await tokens_of(stream))[-1].finish_reason is FinishReason.CANCELLED
        await until(lambda: idle(both.oracle))

    async def test_closed_while_another_task_reads(self, both: Both) -> None:
        gate = StepGate(both.oracle, at=2)
        stream = both.engine.stream([1], ENDLESS)
        async with anyio.create_task_group() as group:
            reading = Running(group, lambda: tokens_of(stream))
            await anyio.to_thread.run_sync(gate.held.wait)
            gate.open()
            await stream.aclose()
            assert (await reading.wait())[-1] == Token(0, -1, "", finish_reason=FinishReason.CANCELLED)
        assert idle(both.oracle)

    async def test_a_second_reader_is_refused(self, both: Both) -> None:
        gate = StepGate(both.oracle, at=2)
        params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
        async with anyio.create_task_group() as group, both.engine.stream([1], params) as stream:
            reading = Running(group, lambda: tokens_of(stream))
            await until(gate.held.is_set)
            num_tokens = both.oracle._core.steps.stats.completion_tokens
            await until(lambda: stream.usage.completion_tokens == num_tokens)  # all that there are, so it waits
            with pytest.raises(
                EngineStateError, match="another task waits for this stream's next token; a stream has one reader at a time"
            ):
                await stream.__anext__()
            gate.open()
            assert [token.token_id for token in await reading.wait()] == both.oracle.solo(1)[0]

    async def test_a_slow_reader_parks_the_request(self, side: str) -> None:
        async with both_of(side, max_unread_tokens=4, num_pages=4000) as both:
            oracle, engine = both.oracle, both.engine
            stream = engine.stream([1], ENDLESS)
            await until(lambda: oracle.stats().parked or oracle.stats().completion_tokens >= 399)
            other = await engine.generate([2], SamplingParams(seed=2, max_tokens=3, ignore_eos=True))
            assert len(other.token_ids) == 3
            tokens = await tokens_of(stream)
            assert [token.token_id for token in tokens] == oracle.solo(1)[0]


@also_with_drafts
class TestCancelling:
    async def test_from_outside(self, both: Both) -> None:
        stream = both.engine.stream([1], ENDLESS, request_id="x")
        token = await stream.__anext__()
        assert token.token_id == both.oracle.solo(1)[0][0]
        assert await both.engine.cancel("x") is True
        assert both.oracle.stats().pages_used == 0
        tokens = await tokens_of(stream)
        assert tokens[-1] == Token(0, -1, tokens[-1].text, finish_reason=FinishReason.CANCELLED)
        assert stream.completion().finish_reason is FinishReason.CANCELLED
        assert await both.engine.cancel("x") is False
        assert await both.engine.cancel("never") is False

    async def test_all_sequences_close(self, both: Both) -> None:
        slow_down(both.oracle)
        stream = both.engine.stream([1], SamplingParams(seed=1, n=3, ignore_eos=True), request_id="x")
        await stream.__anext__()
        await both.engine.cancel("x")
        closing = [token for token in await tokens_of(stream) if token.finish_reason is not None]
        assert sorted((token.index, token.token_id) for token in closing) == [(0, -1), (1, -1), (2, -1)]
        assert {token.finish_reason for token in closing} == {FinishReason.CANCELLED}


class TestErrors:
    async def test_bad_requests_name_their_fields(self, both: Both) -> None:
        for args, options, fields in (
            (([],), {}, ["prompt"]),
            (("",), {}, ["prompt"]),
            (([50],), {}, ["prompt"]),
            (([-1],), {}, ["prompt"]),
            (([1.5],), {}, ["prompt"]),
            (([[1], [2, 3]],), {}, ["prompt"]),
            (([{"role": "user", "content": "a"}] * 4097,), {}, ["prompt"]),
            ((b"bytes",), {}, ["prompt"]),
            ((7,), {}, ["prompt"]),
            (([{"role": "user", "content": "no template"}],), {}, ["prompt"]),
            (([1], SamplingParams(logprobs=21)), {}, ["logprobs"]),
            (([1], SamplingParams(prompt_logprobs=21)), {}, ["prompt_logprobs"]),
            (([1], SamplingParams(stop_token_ids=(50,))), {}, ["stop_token_ids"]),
            (([1], SamplingParams(banned_token_ids=(50,))), {}, ["banned_token_ids"]),
            (([1], SamplingParams(logit_bias={50: 1.0})), {}, ["logit_bias"]),
            (([1], {"max_tokens": 4}), {}, ["params"]),
            (([1],), {"priority": 101, "tenant": "t" * 129}, ["priority", "tenant"]),
            (([1],), {"request_id": "a b", "timeout": 0}, ["request_id", "timeout"]),
            (([1],), {"cache_salt": 3}, ["cache_salt"]),
        ):  # fmt: skip
            error = await refusal_of(both.engine, *args, **options)
            assert (type(error), [violation.field for violation in error.violations]) == (InvalidRequestError, fields), args
            assert all(violation.description for violation in error.violations)
        await until(lambda: idle(both.oracle))

    async def test_a_list_is_counted_before_it_is_read(self, both: Both) -> None:
        error = await refusal_of(both.engine, ["never read"] * 5_000_000)
        assert isinstance(error, InvalidRequestError)
        assert str(error).startswith("prompt: 5000000 token")

    async def test_too_long(self, both: Both) -> None:
        error = await refusal_of(both.engine, [1] * 400)
        assert isinstance(error, ContextLengthError)
        assert (error.field, error.limit, error.got) == ("prompt", 400, 401)
        error = await refusal_of(both.engine, [1] * 10, SamplingParams(max_tokens=391))
        assert isinstance(error, ContextLengthError)
        assert (error.field, error.limit, error.got) == ("max_tokens", 400, 401)

    async def test_more_than_the_cache_holds(self, side: str) -> None:
        async with both_of(side, num_pages=10) as both:
            error = await refusal_of(both.engine, [1] * 41)
            assert isinstance(error, KVCapacityError)
            assert (error.field, error.limit, error.got) == ("prompt", 36, 42)  # a page is kept back

    async def test_a_name_in_use(self, both: Both) -> None:
        async with both.engine.stream([1], ENDLESS, request_id="mine") as stream:
            await stream.started()
            error = await refusal_of(both.engine, [1], ENDLESS, request_id="mine")
            assert isinstance(error, RequestIdInUseError)
            assert error.field == "request_id"
            assert (await stream.__anext__()).token_id >= 0  # the first is not disturbed
        assert idle(both.oracle)

    async def test_a_full_queue(self, side: str) -> None:
        async with both_of(side, max_queued_requests=1) as both:
            oracle, engine = both.oracle, both.engine
            gate = StepGate(oracle)
            waiting = engine.stream([1], ENDLESS)  # its first step is not over
            await anyio.to_thread.run_sync(gate.held.wait)
            try:
                with pytest.raises(QueueFullError, match="max_queued_requests is 1"), anyio.fail_after(HANG_SECONDS):
                    await tokens_of(engine.stream([1], ENDLESS))
            finally:
                gate.open()
            await waiting.aclose()

    @also_with_drafts
    async def test_a_stream_that_failed_says_so(self, both: Both) -> None:
        stream = both.engine.stream([1], ENDLESS)
        await stream.__anext__()
        assert stream.completion().finish_reason is None
        both.oracle.runner.before_launch = fail_every_row
        with pytest.raises(Exception, match=r"cannot be built|incident"), anyio.fail_after(HANG_SECONDS):
            await tokens_of(stream)
        assert stream.completion().finish_reason is FinishReason.ERROR
        await stream.aclose()
        assert stream.completion().finish_reason is FinishReason.ERROR
        assert await tokens_of(stream) == []

    async def test_an_error_is_told_again(self, both: Both) -> None:
        stream = both.engine.stream("word " * 500, ENDLESS)  # not in this vocabulary; long enough to be tokenized in the background
        for _ in range(2):
            with pytest.raises(InvalidRequestError):
                await stream.started()
        with pytest.raises(InvalidRequestError):
            await stream.__anext__()


class TestLifeCycle:
    @also_with_drafts
    async def test_closing_ends_streams(self, side: str) -> None:
        async with oracle_side(side) as beside:
            oracle = beside.oracle
            async with beside.reach() as engine:
                stream = engine.stream([1], ENDLESS)
                await stream.__anext__()
                late = engine.stream([1], ENDLESS)
                await engine.aclose()
            for one in (stream, late):
                assert (await tokens_of(one))[-1].finish_reason is FinishReason.CANCELLED
            with pytest.raises(EngineStateError, match="closed"):
                engine.stream([1])
            assert not engine.healthy
            await engine.aclose()
            if side != LOCAL:
                assert idle(oracle)

    async def test_starting_twice(self, both: Both) -> None:
        with pytest.raises(EngineStateError, match="started before"):
            await both.engine.start()
        assert both.engine.healthy


async def test_forks(both: Both, side: str) -> None:
    with anyio.fail_after(HANG_SECONDS):
        await _check_forks(both.engine, side)


async def test_sessions(both: Both) -> None:
    engine = both.engine
    with anyio.fail_after(HANG_SECONDS):
        first = await engine.generate(FORKED, SIXTY, session="a")
        assert await engine.touch("a") == 66
        assert await engine.touch("b") == await engine.touch("a", "x") == 0
        second = await engine.generate([*FORKED, *first.token_ids[:9]], SamplingParams(seed=3, max_tokens=5), session="a")
        assert second.usage.rewritten_tokens == 59 - 9
        with pytest.raises(InvalidRequestError, match="session: "):
            await engine.touch("")


async def _check_forks(engine: EngineBase, side: str) -> None:
    stream = engine.stream(FORKED, SIXTY, request_id="a")
    whole = [(await anext(stream)).token_id for _ in range(25)]
    forks = [stream.fork(11), stream.fork(request_id="b", tenant="x"), engine.fork("a", 3)]
    whole += [token.token_id async for token in stream]
    for at, fork in zip((11, 25, 3), forks, strict=True):
        assert [token.token_id async for token in fork] == whole[at:]
        assert fork.usage.completion_tokens == 60
        assert fork.seed == 9
        assert fork.completion().finish_reason is FinishReason.MAX_TOKENS
    assert forks[1].request_id == "b"
    other = await engine.generate(FORKED, SamplingParams(seed=4, max_tokens=30, ignore_eos=True))
    changed = await engine.generate(ForkPoint("a", 0), SamplingParams(seed=4, max_tokens=30, ignore_eos=True))
    assert changed.token_ids == other.token_ids
    with pytest.raises(InvalidRequestError, match="known_outputs"):
        await engine.fork("b").started()  # behind all
    for wrong in (ForkPoint("nobody"), ForkPoint("a", 61), ForkPoint("a", 1, 1)):
        with pytest.raises(InvalidRequestError):
            await engine.generate(wrong, SIXTY)

    stream = engine.stream(FORKED, SIXTY)
    read = [(await anext(stream)).token_id for _ in range(20)]
    stream.rewind(8)
    assert read[:8] + [token.token_id async for token in stream] == whole
    assert stream.completion().token_ids == tuple(whole)
    assert stream.usage.completion_tokens == 60
    await stream.aclose()
    assert stream.gone or side == ROUTED
