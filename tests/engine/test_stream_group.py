"""Several tokens at a time: `read`, `take` and `linger` of a stream, and many streams read as a group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import anyio
import pytest
from oracle_engine import Ahead, OracleEngine, StepGate, idle, until
from speculating import also_with_drafts

from aengine import EngineDeadError, EngineStateError, FinishReason, InvalidRequestError, SamplingParams, Token, TokenStream
from aengine.api.outputs import RequestState
from aengine.api.stream_group import Reading, StreamGroup
from aengine.engine import requests
from aengine.scheduler.plan import RowsFailed, StepPlan

pytestmark = pytest.mark.anyio


class CannotBuildError(RuntimeError):
    pass


def some(seed: int, count: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=count, ignore_eos=True)


def endless(seed: int) -> SamplingParams:
    """Until the context of 400 tokens is full."""
    return SamplingParams(seed=seed, ignore_eos=True)


def ids(tokens: Sequence[Token]) -> list[int]:
    return [token.token_id for token in tokens]


def fail_at(engine: OracleEngine, step: int) -> None:
    """From step number `step` on no row can be built."""

    def fail(plan: StepPlan) -> None:
        if plan.step >= step:
            raise RowsFailed({int(row): CannotBuildError() for row in plan.rows})

    engine.runner.before_launch = fail


async def received(engine: OracleEngine, gate: StepGate, stream: TokenStream) -> int:
    """Wait until a step is held and all tokens before it, which are those of `stream`, have come; returns how many these are."""
    await until(gate.held.is_set)
    num_tokens: int = engine._core.steps.stats.completion_tokens
    await until(lambda: stream.info().usage.completion_tokens == num_tokens)
    return num_tokens


class TestReading:
    @also_with_drafts
    @pytest.mark.parametrize("most", [1, 3, 1000])
    async def test_reads_add_up_to_the_whole(self, most: int) -> None:
        async with OracleEngine() as engine, engine.stream([1], some(1, 40)) as stream:
            got: list[Token] = []
            while tokens := await stream.read(most):
                assert 1 <= len(tokens) <= most
                assert not (got and stream.ended and got[-1].finish_reason)
                got += tokens
            assert (ids(got), stream.ended, got[-1].finish_reason) == (engine.solo(1)[0], True, FinishReason.MAX_TOKENS)
            assert (await stream.read(), stream.take_tokens()) == ([], [])
            assert stream.completion().token_ids == tuple(ids(got))

    @also_with_drafts
    async def test_taking_does_not_wait(self) -> None:
        async with OracleEngine() as engine:
            gate = StepGate(engine, at=6)
            async with engine.stream([1], some(1, 40)) as stream:
                assert (stream.take_tokens(), stream.unread, stream.has_news) == ([], 0, False)
                count = await received(engine, gate, stream)
                tokens = stream.take_tokens(4)
                assert (len(tokens), stream.unread, stream.has_news) == (4, count - 4, True)
                tokens += stream.take_tokens()
                assert (len(tokens), stream.take_tokens(), stream.ended) == (count, [], False)
                gate.open()
                await until(lambda: stream.unread == 40 - count)
                tokens += stream.take_tokens()
                assert (ids(tokens), stream.ended, stream.has_news) == (engine.solo(1)[0], True, False)

    @also_with_drafts
    async def test_a_failure_comes_after_the_tokens_before_it(self) -> None:
        async with OracleEngine() as engine:
            fail_at(engine, 3)
            async with engine.stream([1], endless(1)) as stream:
                await until(lambda: stream.info().state is RequestState.FINISHED)
                count = stream.unread
                with pytest.raises(CannotBuildError):
                    await _drain(stream)
                assert stream.usage.completion_tokens == count >= 3
                assert (stream.ended, stream.take_tokens(), stream.has_news) == (True, [], False)

    @also_with_drafts
    async def test_a_closed_stream_gives_its_end(self) -> None:
        async with OracleEngine() as engine:
            stream = engine.stream([1], endless(1))
            await until(lambda: stream.unread)
            await stream.aclose()
            assert stream.take_tokens() == [Token(0, -1, "", finish_reason=FinishReason.CANCELLED)]
            assert (await stream.read(), stream.take_tokens(), stream.unread, stream.has_news) == ([], [], 0, False)
            assert idle(engine)

    @also_with_drafts
    async def test_cancelling_leaves_what_there_is(self) -> None:
        async with OracleEngine() as engine:
            gate = StepGate(engine, at=4)
            async with engine.stream([1], endless(1)) as stream:
                count = await received(engine, gate, stream)
                stream.cancel()
                gate.open()
                got: list[Token] = []
                while tokens := await stream.read():
                    got += tokens
                assert ids(got)[:count] == engine.solo(1)[0][:count]
                assert got[-1].finish_reason is FinishReason.CANCELLED
                await until(lambda: idle(engine))
                stream.cancel()  # does nothing any more

    @also_with_drafts
    async def test_lingering_ends_with_enough_tokens(self) -> None:
        async with OracleEngine() as engine:
            gate = StepGate(engine)
            async with engine.stream([1], endless(1)) as stream, anyio.create_task_group() as group:
                group.start_soon(stream.linger, 5, 3600)
                await anyio.wait_all_tasks_blocked()
                gate.open()
            assert stream.usage.completion_tokens == 0

    async def test_lingering_ends_with_the_stream(self) -> None:
        async with OracleEngine() as engine, engine.stream([1], some(1, 4)) as stream:
            await stream.linger(5, 3600)
            assert ids(stream.take_tokens()) == engine.solo(1)[0]
            await stream.linger(5, 3600)

    async def test_lingering_ends_with_a_failure(self) -> None:
        async with OracleEngine() as engine:
            fail_at(engine, 2)
            async with engine.stream([1], endless(1)) as stream:
                await stream.linger(5, 3600)
                assert len(stream.take_tokens()) >= 2

    @also_with_drafts
    async def test_lingering_ends_with_its_time_and_the_request_goes_on(self) -> None:
        async with OracleEngine() as engine:
            gate = StepGate(engine, at=2)
            async with engine.stream([1], some(1, 20)) as stream:
                await stream.linger(await received(engine, gate, stream) + 1, 0.01)
                gate.open()
                assert ids(await _drain(stream)) == engine.solo(1)[0]

    async def test_one_reader_at_a_time(self) -> None:
        async with OracleEngine() as engine:
            await engine.pause()
            async with engine.stream([1], endless(1)) as stream, anyio.create_task_group() as tasks:
                tasks.start_soon(stream.read)
                await anyio.wait_all_tasks_blocked()
                for reading in (stream.read, stream.__anext__, lambda: stream.linger(2, 1)):
                    with pytest.raises(EngineStateError, match="one reader at a time"):
                        await reading()
                group: StreamGroup[int] = StreamGroup()
                with pytest.raises(EngineStateError, match="one reader at a time"):
                    group.add_stream(1, stream)
                assert 1 not in group
                tasks.cancel_scope.cancel()
            async with engine.stream([2], endless(2)) as stream, StreamGroup[int]() as group:
                group.add_stream(1, stream)
                with pytest.raises(EngineStateError, match="one reader at a time"):
                    await stream.read()


async def _drain(stream: TokenStream) -> list[Token]:
    got: list[Token] = []
    while tokens := await stream.read():
        got += tokens
    return got


class TestGroup:
    @pytest.mark.parametrize("ahead", [ahead for ahead in Ahead if ahead is not Ahead.STAGES])
    async def test_one_reading_per_step_has_all_streams(self, ahead: Ahead, speculation: bool) -> None:
        """All requests take the same steps, where these are not of different rows, so whoever wakes finds something of each."""
        async with OracleEngine(ahead=ahead) as engine, StreamGroup[str]() as group:
            await engine.pause()
            seeds = {f"tag {seed}": seed for seed in range(16)}
            for tag, seed in seeds.items():
                group.add_stream(tag, engine.stream([seed], some(seed, 30)))
            assert [(reading.tag, reading.tokens) for reading in await group.read()] == [(tag, []) for tag in seeds]
            await engine.unpause()
            got: dict[str, list[int]] = {tag: [] for tag in seeds}
            while len(group):
                going = sorted(tag for tag in seeds if tag in group)
                readings = await group.read()
                assert sorted(reading.tag for reading in readings) == going
                for reading in readings:
                    assert speculation or len(reading.tokens) == len(readings[0].tokens)
                    got[reading.tag] += ids(reading.tokens)
            assert got == {tag: engine.solo(seed)[0] for tag, seed in seeds.items()}

    @pytest.mark.quick_cases(1)
    @also_with_drafts
    async def test_streams_of_different_lengths_come_and_go(self) -> None:
        async with OracleEngine(max_num_seqs=8) as engine, StreamGroup[int]() as group:
            got: dict[int, list[int]] = {}
            for seed in range(40):
                group.add_stream(seed, engine.stream([seed], some(seed, 1 + seed)))
                got[seed] = []
                for reading in group.take_readings():
                    got[reading.tag] += ids(reading.tokens)
            while len(group):
                for reading in await group.read():
                    assert reading.error is None
                    assert (reading.tag in group) == (not reading.stream.ended)
                    got[reading.tag] += ids(reading.tokens)
            assert got == {seed: engine.solo(seed)[0] for seed in got}
            assert group.take_readings() == []
            await until(lambda: idle(engine))

    @also_with_drafts
    async def test_what_is_not_taken_at_once_comes_next_time(self) -> None:
        async with OracleEngine() as engine, StreamGroup[int]() as group:
            stream = engine.stream([1], some(1, 10))
            group.add_stream(1, stream)
            await until(lambda: stream.unread == 10)
            sizes = [len(reading.tokens) for _ in range(3) for reading in await group.read(4)]
            assert (sizes, len(group), stream.ended) == ([4, 4, 2], 0, True)

    @also_with_drafts
    async def test_a_failure_comes_after_the_tokens_and_takes_its_stream_out(self) -> None:
        async with OracleEngine() as engine, StreamGroup[int]() as group:
            fail_at(engine, 3)
            stream = engine.stream([1], endless(1))
            await until(lambda: stream.info().state is RequestState.FINISHED)
            group.add_stream(1, stream)
            (before,), (failed,) = await group.read(), await group.read()
            assert (before.error, failed.tokens, type(failed.error)) == (None, [], CannotBuildError)
            assert ids(before.tokens) == engine.solo(1)[0][: len(before.tokens)]
            assert len(before.tokens) >= 3
            assert 1 not in group

    @also_with_drafts
    async def test_the_death_of_the_engine_reaches_every_stream(self) -> None:
        async with OracleEngine() as engine, StreamGroup[int]() as group:
            gate = StepGate(engine, at=2)
            for seed in range(8):
                group.add_stream(seed, engine.stream([seed], endless(seed)))
            await until(gate.held.is_set)

            def die(plan: StepPlan) -> None:
                raise MemoryError

            engine.runner.before_step = die
            gate.open()
            errors: dict[int, Exception | None] = {}
            while len(group):
                errors |= {reading.tag: reading.error for reading in await group.read() if reading.error}
            assert {type(error) for error in errors.values()} == {EngineDeadError}
            assert sorted(errors) == list(range(8))

    async def test_a_prompt_that_is_prepared_in_the_background(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(requests, "INLINE_CHARACTERS", 1)
        async with OracleEngine() as engine, StreamGroup[str]() as group:
            await engine.pause()
            group.add_stream("bad", engine.stream("!" * 5000, some(1, 1)))
            group.add_stream("good", engine.stream("!" * 8, some(2, 1)))
            assert group.take_readings() == []
            readings: dict[str, Reading[str]] = {}
            while len(readings) < 2:
                readings |= {reading.tag: reading for reading in await group.read()}
            assert isinstance(readings["bad"].error, InvalidRequestError)
            assert (readings["good"].error, readings["good"].tokens, readings["good"].stream.is_started) == (None, [], True)
            assert ("bad" in group, "good" in group) == (False, True)

    async def test_a_tag_is_used_once(self) -> None:
        async with OracleEngine() as engine, StreamGroup[int]() as group:
            first, second = engine.stream([1], endless(1)), engine.stream([2], endless(2))
            group.add_stream(1, first)
            with pytest.raises(ValueError, match="1 is in use"):
                group.add_stream(1, second)
            group.discard(1)
            group.discard(1)
            group.add_stream(1, second)
            assert group[1] is second
            assert ids(await _drain(first)) == engine.solo(1)[0]  # read on its own, as before
            assert all(reading.stream is second for reading in group.take_readings())

    async def test_waking_the_reader(self) -> None:
        group: StreamGroup[int] = StreamGroup()
        group.wake()
        await group.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.wait)
            await anyio.wait_all_tasks_blocked()
            group.wake()
        with anyio.move_on_after(0.01) as scope:
            await group.wait()
        assert scope.cancelled_caught

    @pytest.mark.quick_cases(4)
    @also_with_drafts
    @pytest.mark.parametrize("ahead", list(Ahead))
    async def test_all_leave_within_a_few_steps(self, ahead: Ahead) -> None:
        async with OracleEngine(ahead=ahead) as engine, anyio.create_task_group() as tasks:
            gate = StepGate(engine, at=5)
            group: StreamGroup[int] = StreamGroup()
            for seed in range(24):
                group.add_stream(seed, engine.stream([seed], endless(seed)))
            await until(gate.held.is_set)
            launched: list[int] = []
            hold = engine.runner.before_step
            engine.runner.before_step = lambda plan: (launched.append(plan.step), hold(plan))[1]
            tasks.start_soon(group.aclose)
            await anyio.wait_all_tasks_blocked()
            gate.open()
            await until(lambda: idle(engine))
            assert len(launched) <= 2
            assert len(group) == 0

    @also_with_drafts
    async def test_lagging_streams_park_and_go_on(self) -> None:
        async with OracleEngine(max_unread_tokens=8) as engine, StreamGroup[int]() as group:
            for seed in range(4):
                group.add_stream(seed, engine.stream([seed], some(seed, 60)))
            got: dict[int, list[int]] = {seed: [] for seed in range(4)}
            for turn in itertools.count():
                if turn % 5 == 0:
                    await until(lambda: engine.stats().running == 0)  # all of them parked, or over
                for reading in await group.read(3):
                    got[reading.tag] += ids(reading.tokens)
                if not len(group):
                    break
            assert got == {seed: engine.solo(seed)[0] for seed in got}
