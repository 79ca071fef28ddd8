"""What an operator does with a running engine, and what he sees: pause, flush, states, counters, timing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable

import anyio
import pytest
from hang_guard import HANG_SECONDS, let_others_run
from oracle_engine import Ahead, OracleEngine, StepGate, idle, step_with_the_loop, until
from speculating import also_with_drafts, demo, drafts_everywhere

from aengine import AsyncEngine, EngineDeadError, EngineStateError, FinishReason, SamplingParams, TokenStream
from aengine.api.outputs import RequestState, Timing
from aengine.engine import requests
from aengine.scheduler.plan import StepPlan

pytestmark = pytest.mark.anyio

TEXT = "!" * 8  # the ids of few texts are below the oracle's vocabulary size


@pytest.fixture(autouse=True)
def _every_text_is_tokenized_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "INLINE_CHARACTERS", 1)


def endless(seed: int) -> SamplingParams:
    """Until the context of 400 tokens is full."""
    return SamplingParams(seed=seed, ignore_eos=True)


def some(seed: int, count: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=count, ignore_eos=True)


async def ids_of(stream: TokenStream) -> list[int]:
    return [token.token_id async for token in stream]


@also_with_drafts
class TestPause:
    @pytest.mark.quick_cases(4)
    @pytest.mark.parametrize("ahead", list(Ahead))
    async def test_no_step_runs_and_nothing_is_lost(self, ahead: Ahead) -> None:
        async with OracleEngine(ahead=ahead) as engine:
            launched: list[int] = []
            gate = StepGate(engine, at=3)
            pass_gate = engine.runner.before_step

            def note(plan: StepPlan) -> None:
                launched.append(plan.step)
                pass_gate(plan)

            engine.runner.before_step = note
            running = engine.stream([1], endless(1))
            first = await running.__anext__()
            assert not engine.stats().paused
            await until(gate.held.is_set)
            async with anyio.create_task_group() as group:
                group.start_soon(engine.pause)
                await anyio.wait_all_tasks_blocked()
                gate.open()
            assert await engine.pause() == 0
            num_steps = len(launched)
            assert (engine.stats().paused, engine.stats().steps) == (True, num_steps)
            waiting = engine.stream([2], some(2, 30), request_id="waiting")
            text = engine.stream(TEXT, SamplingParams(max_tokens=1), request_id="text")
            await text.started()
            await engine.flush_cache()  # is answered after the submissions were taken
            assert {info.state for info in map(engine.request_info, ("waiting", "text")) if info} == {RequestState.WAITING}
            assert engine.stats().waiting == 2
            await text.aclose()
            assert (len(launched), engine.stats().running) == (num_steps, 1)
            await engine.unpause()
            assert await ids_of(waiting) == engine.solo(2)[0]
            assert [first.token_id, *await ids_of(running)] == engine.solo(1)[0]
            assert not engine.stats().paused
            await waiting.aclose()
            await running.aclose()
            assert idle(engine)

    @pytest.mark.parametrize("ahead", list(Ahead))
    async def test_it_returns_when_the_step_under_way_is_over(self, ahead: Ahead) -> None:
        async with OracleEngine(ahead=ahead) as engine:
            gate = StepGate(engine, at=3)
            stream = engine.stream([1], some(1, 20))
            await until(gate.held.is_set)
            paused: list[int] = []

            async def pause() -> None:
                await engine.pause()
                paused.append(engine.stats().steps)

            async with anyio.create_task_group() as group:
                group.start_soon(pause)
                group.start_soon(pause)
                await anyio.wait_all_tasks_blocked()
                assert paused == []
                gate.open()
            assert paused == [4, 4]
            await engine.unpause()  # one is enough
            assert await ids_of(stream) == engine.solo(1)[0]

    async def test_pausing_again_and_going_on_when_nothing_is_paused(self) -> None:
        async with OracleEngine() as engine:
            await engine.unpause()
            for _ in range(3):
                await engine.pause()
            assert engine.stats().paused
            await engine.unpause()
            await engine.unpause()
            assert (await engine.generate([1], some(1, 5))).token_ids == tuple(engine.solo(1)[0])
            assert not engine.stats().paused

    async def test_going_on_ends_a_pause_that_still_waits(self) -> None:
        async with OracleEngine() as engine:
            gate = StepGate(engine)
            stream = engine.stream([1], some(1, 5))
            await until(gate.held.is_set)
            async with anyio.create_task_group() as group:
                group.start_soon(engine.pause)
                await anyio.wait_all_tasks_blocked()
                await engine.unpause()
                gate.open()
            assert await ids_of(stream) == engine.solo(1)[0]

    async def test_a_caller_that_no_longer_waits(self) -> None:
        async with OracleEngine() as engine:
            gate = StepGate(engine)
            stream = engine.stream([1], some(1, 5))
            await until(gate.held.is_set)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(engine.pause)
                    await anyio.wait_all_tasks_blocked()
                    scope.cancel()
            assert not engine._core.commands._waiting
            gate.open()
            await engine.pause()
            await engine.unpause()
            assert await ids_of(stream) == engine.solo(1)[0]

    @pytest.mark.parametrize("ahead", list(Ahead))
    async def test_requests_can_be_cancelled_meanwhile(self, ahead: Ahead) -> None:
        async with OracleEngine(ahead=ahead) as engine:
            running = engine.stream([1], endless(1))
            cancelled = engine.stream([2], endless(2), request_id="mine")
            await running.__anext__()
            await cancelled.__anext__()
            await engine.pause()
            waiting = engine.stream([3], endless(3))
            steps = engine.stats().steps
            with anyio.fail_after(HANG_SECONDS):
                await running.aclose()
                await waiting.aclose()
                assert await engine.cancel("mine") is True
                assert [token.finish_reason async for token in cancelled][-1] is FinishReason.CANCELLED
            assert idle(engine)
            assert engine.stats().steps == steps

    @pytest.mark.quick_cases(1)
    async def test_deadlines_hold_meanwhile(self) -> None:
        async with OracleEngine() as engine:
            running = engine.stream([1], endless(1), timeout=0.5)
            reasons = [(await running.__anext__()).finish_reason]  # the deadline's, where that has passed already
            await engine.pause()
            waiting = engine.stream([2], endless(2), timeout=0.05)
            for stream in (waiting, running):
                with anyio.fail_after(HANG_SECONDS):
                    reasons += [token.finish_reason async for token in stream]
                assert reasons[-1] is FinishReason.DEADLINE
                await stream.aclose()
            assert idle(engine)

    @pytest.mark.parametrize("ahead", list(Ahead))
    async def test_it_can_cancel_what_is_in_flight(self, ahead: Ahead) -> None:
        async with OracleEngine(ahead=ahead, max_num_seqs=2) as engine:
            done = engine.stream([9], some(9, 2))
            await until(lambda: idle(engine))  # over, though nobody has read it
            streams = [engine.stream([i + 1], SamplingParams(seed=i, n=2, ignore_eos=True)) for i in range(3)]
            await streams[0].__anext__()
            streams.append(engine.stream(TEXT))
            assert await engine.pause(cancel=True) == 4
            assert idle(engine)
            for stream in streams:
                ends = [token.finish_reason async for token in stream if token.finish_reason is not None]
                assert set(ends) == {FinishReason.CANCELLED}
            assert await ids_of(done) == engine.solo(9)[0]
            assert await engine.pause(cancel=True) == 0
            await engine.unpause()
            assert (await engine.generate([5], some(5, 5))).token_ids == tuple(engine.solo(5)[0])

    async def test_closing_a_paused_engine(self) -> None:
        async with OracleEngine() as engine:
            running = engine.stream([1], endless(1))
            await running.__anext__()
            await engine.pause()
            waiting = engine.stream([2], endless(2))
            with anyio.fail_after(HANG_SECONDS):
                await engine.aclose()
        for stream in (running, waiting):
            assert [token.finish_reason async for token in stream][-1] is FinishReason.CANCELLED

    async def test_closing_while_a_pause_waits(self) -> None:
        async with OracleEngine() as engine:
            gate = StepGate(engine)
            stream = engine.stream([1], endless(1))
            await until(gate.held.is_set)
            ended: list[bool] = []

            async def pause() -> None:
                with contextlib.suppress(EngineStateError):  # told that it is closed, or that the step was over before
                    await engine.pause()
                ended.append(True)

            with anyio.fail_after(HANG_SECONDS):
                async with anyio.create_task_group() as group:
                    group.start_soon(pause)
                    await anyio.wait_all_tasks_blocked()
                    gate.open()
                    await engine.aclose()
            assert ended
        assert [token.finish_reason async for token in stream][-1] is FinishReason.CANCELLED

    @pytest.mark.parametrize("operation", [AsyncEngine.pause, AsyncEngine.flush_cache], ids=["pause", "flush_cache"])
    async def test_the_death_of_the_step_thread_ends_those_who_wait(self, operation: Callable[[AsyncEngine], Awaitable[int]]) -> None:
        async with OracleEngine() as engine:
            gate = StepGate(engine)
            hold = engine.runner.before_step

            def fail(plan: StepPlan) -> None:
                hold(plan)
                raise RuntimeError("device lost")

            engine.runner.before_step = fail
            stream = engine.stream([1], endless(1))
            await until(gate.held.is_set)
            errors: list[EngineDeadError] = []

            async def wait() -> None:
                with pytest.raises(EngineDeadError, match="device lost") as caught:
                    await operation(engine)
                errors.append(caught.value)

            with anyio.fail_after(HANG_SECONDS):
                async with anyio.create_task_group() as group:
                    for _ in range(2):
                        group.start_soon(wait)
                    await anyio.wait_all_tasks_blocked()
                    gate.open()
            assert len(errors) == 2
            for call in (operation(engine), stream.__anext__()):
                with pytest.raises(EngineDeadError):
                    await call


async def test_an_engine_that_does_not_run_cannot_be_operated() -> None:
    engine = OracleEngine()

    async def refused(match: str) -> None:
        with pytest.raises(EngineStateError, match=match):
            await engine.pause()
        with pytest.raises(EngineStateError, match=match):
            await engine.unpause()
        with pytest.raises(EngineStateError, match=match):
            await engine.flush_cache()
        with pytest.raises(EngineStateError, match=match):
            engine.request_info("mine")

    await refused("not started")
    async with engine:
        pass
    await refused("closed")


class TestFlush:
    async def test_pages_are_freed_and_the_prefix_is_gone(self) -> None:
        async with OracleEngine() as engine:
            prompt = [*range(40)]

            async def cached(seed: int) -> int:
                return (await engine.generate(prompt, some(seed, 2))).usage.cached_prompt_tokens

            assert [await cached(1), await cached(2)] == [0, 36]  # all pages of 4 but that of the last token
            held = engine.stats().cached_tokens
            assert held >= 40
            assert await engine.flush_cache() == held // 4
            assert engine.stats().cached_tokens == 0
            assert await engine.flush_cache() == 0
            assert [await cached(3), await cached(4)] == [0, 36]

    @pytest.mark.quick_cases(4)
    @also_with_drafts
    @pytest.mark.parametrize("ahead", list(Ahead))
    async def test_what_runs_is_unharmed(self, ahead: Ahead) -> None:
        """The runner checks every read of KV. Between the flushes requests come that share what they can."""
        async with OracleEngine(ahead=ahead, num_pages=200) as engine:
            prefix = [*range(30)]
            num_done = num_flushes = 0

            async def read(seed: int) -> None:
                nonlocal num_done
                while True:  # until there were some flushes
                    async with engine.stream([*prefix, seed], some(seed, 5 + seed)) as stream:
                        assert await ids_of(stream) == engine.solo(seed)[0]
                    if num_flushes > 3:
                        break
                num_done += 1

            with anyio.fail_after(HANG_SECONDS):
                async with anyio.create_task_group() as group:
                    for seed in range(40):
                        group.start_soon(read, seed)
                    while num_done < 40:
                        await engine.flush_cache()
                        num_flushes += 1
            assert idle(engine)
            await engine.flush_cache()
            assert (engine.stats().cached_tokens, engine.stats().pages_used) == (0, 0)


class TestRequestInfo:
    @also_with_drafts
    async def test_the_states_of_a_life(self) -> None:
        async with OracleEngine(max_unread_tokens=8) as engine:

            def state(request_id: str = "mine") -> RequestState | None:
                info = engine.request_info(request_id)
                return None if info is None else info.state

            assert state() is None
            gate = StepGate(engine)
            stream = engine.stream([1, 2, 3], endless(1), request_id="mine")
            await until(gate.held.is_set)
            text = engine.stream(TEXT, SamplingParams(max_tokens=1), request_id="text")
            assert state("text") is RequestState.PREPARING
            assert engine.request_info("text").usage.prompt_tokens == 0  # type: ignore[union-attr]
            late = engine.stream([4], endless(2), request_id="late")
            await text.started()
            assert (state("text"), state("late")) == (RequestState.WAITING, RequestState.WAITING)
            assert engine.request_info("text").usage.prompt_tokens == text.usage.prompt_tokens > 0  # type: ignore[union-attr]
            info = engine.request_info("late")
            assert info is not None
            assert (info.request_id, info.usage.prompt_tokens, info.usage.completion_tokens, info.timing) == ("late", 1, 0, Timing())
            for other in (text, late):
                other._source.cancel()
            step_with_the_loop(engine)
            gate.open()
            await text.aclose()
            await late.aclose()
            await stream.__anext__()
            await until(lambda: state() is RequestState.PARKED)
            info = engine.request_info("mine")
            assert info is not None
            assert info.usage.completion_tokens == 1 + stream.unread > 8  # read or not
            assert (info.usage.prompt_tokens, info.timing) == (3, stream.timing)
            while stream.unread > 4:
                await stream.__anext__()
            assert state() is RequestState.RUNNING
            await stream.aclose()
            assert state() is None

    async def test_finished_until_the_engine_lets_go(self) -> None:
        """One step ahead: the step after the last token of a request still has a row for it."""
        async with OracleEngine(ahead=Ahead.DEVICE) as engine:
            plain = (await engine.generate([1], some(1, 8))).token_ids
            last = plain.index(plain[6])
            await engine.pause()
            stream = engine.stream([1], SamplingParams(seed=1, ignore_eos=True, stop_token_ids=(plain[6],)), request_id="mine")
            other = engine.stream([2], endless(2))
            await engine.flush_cache()  # is answered after both were taken, so that they take the same steps
            gate = StepGate(engine, at=engine.stats().steps + last + 2)
            await engine.unpause()
            await until(gate.held.is_set)
            assert await ids_of(stream) == [*plain[: last + 1]]
            info = engine.request_info("mine")
            assert info is not None
            assert (info.state, info.usage.completion_tokens) == (RequestState.FINISHED, last + 1)
            gate.open()
            await stream.aclose()
            assert engine.request_info("mine") is None
            await other.aclose()


class TestCounters:
    @also_with_drafts
    @pytest.mark.parametrize("ahead", list(Ahead))
    async def test_they_add_up(self, ahead: Ahead) -> None:
        async with OracleEngine(ahead=ahead) as engine:
            prefix = [*range(20)]
            completions = [await engine.generate([*prefix, seed], some(seed, 3 + seed)) for seed in range(6)]
            abandoned = engine.stream([*prefix, 49], endless(49))
            await abandoned.__anext__()
            await abandoned.aclose()
            stats = engine.stats()
            usages = [*(completion.usage for completion in completions), abandoned.usage]
            assert stats.prompt_tokens == sum(usage.prompt_tokens for usage in usages) == 7 * 21
            assert stats.cached_prompt_tokens == sum(usage.cached_prompt_tokens for usage in usages) == 6 * 20
            num_read = sum(usage.completion_tokens for usage in usages)
            assert num_read <= stats.completion_tokens < num_read + 399
            assert sum(stats.step_seconds.counts) == sum(stats.step_tokens.counts) == stats.steps
            assert stats.step_seconds.total > 0
            assert stats.step_tokens.total == engine.runner.num_computed

    @pytest.mark.quick_cases(1)
    async def test_drafts_are_counted_by_drafter(self) -> None:
        usages = []
        with drafts_everywhere():  # of a model, and random ones under the name of another drafter
            async with demo() as engine:

                async def generate(seed: int) -> None:
                    usages.append((await engine.generate("It is a truth", some(seed, 40))).usage)

                async with anyio.create_task_group() as group:
                    for seed in range(3):
                        group.start_soon(generate, seed)
                stats = engine.stats()
        by_drafter = {one.drafter: one for one in stats.drafts}
        assert by_drafter.keys() == {"draft", "ngram"}
        for drafter, total in by_drafter.items():
            ours = [one for usage in usages for one in usage.drafts if one.drafter == drafter]
            assert [total.steps, total.drafted, total.accepted] == [
                sum(getattr(one, name) for one in ours) for name in ("steps", "drafted", "accepted")
            ]
            assert total.steps <= total.drafted <= engine.config.max_drafts * total.steps
        assert (
            by_drafter["draft"].accepted / by_drafter["draft"].drafted
            > 0.9
            > 0.1
            > by_drafter["ngram"].accepted / by_drafter["ngram"].drafted
        )
        for usage in usages:
            steps, accepted = (sum(getattr(one, name) for one in usage.drafts) for name in ("steps", "accepted"))
            assert (usage.accepted_draft_tokens, usage.acceptance_length) == (accepted, 1 + accepted / steps)
        assert stats.draft_tokens == sum(usage.draft_tokens for usage in usages)
        num_steps = 3 * 40 - stats.accepted_draft_tokens  # of a sequence, each of which brought one token more than were accepted
        assert stats.tokens_per_step == 3 * 40 / num_steps
        assert stats.acceptance_length > stats.tokens_per_step > 1.5

    @also_with_drafts
    async def test_preemption_counts_no_prompt_twice(self) -> None:
        async with OracleEngine(num_pages=1 + 60, max_num_seqs=4) as engine:
            await engine.pause()  # until all of them are there
            streams = [engine.stream([seed + 1], some(seed, 100)) for seed in range(4)]
            await engine.unpause()
            for stream in streams:
                assert len([token async for token in stream]) == 100
            stats = engine.stats()
            assert stats.preemptions > 0
            assert (stats.prompt_tokens, stats.completion_tokens) == (4, 400)
            assert stats.cached_prompt_tokens == 0  # what a preempted one finds again is its own

    async def test_a_request_that_never_began_is_not_counted(self) -> None:
        async with OracleEngine() as engine:
            await engine.pause()
            await engine.stream([1, 2, 3], endless(1)).aclose()
            assert (engine.stats().prompt_tokens, engine.stats().completion_tokens) == (0, 0)


class TestTiming:
    @also_with_drafts
    @pytest.mark.parametrize("ahead", list(Ahead))
    async def test_phases_follow_each_other(self, ahead: Ahead) -> None:
        async with OracleEngine(ahead=ahead) as engine:
            before = time.monotonic()
            stream = engine.stream([1, 2, 3], some(1, 20))
            seen: list[Timing] = []
            async for _ in stream:
                seen.append(stream.timing)
            total = time.monotonic() - before
            first = seen[0]
            assert first.queue is not None
            assert first.first_token is not None
            assert 0 <= first.queue <= first.first_token <= total
            assert {(timing.queue, timing.first_token) for timing in seen} == {(first.queue, first.first_token)}
            decodes = [timing.decode or 0.0 for timing in seen]
            assert decodes == sorted(decodes)
            assert first.first_token + decodes[-1] <= total
            assert stream.timing == seen[-1]
            await stream.aclose()
            assert stream.timing == seen[-1]

    async def test_the_queue_ends_where_the_first_step_begins(self) -> None:
        """Not where that step is over."""
        async with OracleEngine() as engine:
            gate = StepGate(engine)
            before = time.monotonic()
            stream = engine.stream([1], some(1, 2))
            assert stream.timing == Timing()
            await until(gate.held.is_set)
            at_step = time.monotonic()
            with anyio.fail_after(HANG_SECONDS):
                while time.monotonic() - at_step < 0.01:
                    await let_others_run()
            gate.open()
            await stream.__anext__()
            timing = stream.timing
            assert timing.queue is not None
            assert timing.first_token is not None
            assert timing.queue <= at_step - before
            assert timing.first_token - timing.queue >= 0.01

    async def test_a_request_that_never_began_has_none(self) -> None:
        async with OracleEngine() as engine:
            await engine.pause()
            stream = engine.stream([1], endless(1))
            await stream.aclose()
            assert stream.timing == Timing()
