"""An engine that sleeps gives memory back, and goes on afterwards as if nothing had been."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import anyio
import pytest
from hang_guard import HANG_SECONDS
from oracle_engine import Ahead, OracleEngine, StepGate, idle, until
from speculating import also_with_drafts

from aengine import (
    AsyncEngine,
    EngineDeadError,
    EngineStateError,
    FinishReason,
    InsufficientMemoryError,
    InvalidRequestError,
    SamplingParams,
)
from aengine.api.outputs import MemoryUse
from aengine.runner.contract import Change, NewWeights, Prepared

pytestmark = pytest.mark.anyio


def some(seed: int, count: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=count, ignore_eos=True)


@pytest.mark.quick_cases(4)
@also_with_drafts
@pytest.mark.parametrize("ahead", list(Ahead))
async def test_requests_go_on_exactly(ahead: Ahead) -> None:
    """Of the oracle's pages only those that were to be kept have their content afterwards. Several sequences of a request share some."""
    async with OracleEngine(ahead=ahead, num_pages=120, max_num_seqs=8) as engine:
        outputs: dict[int, tuple[int, ...]] = {}

        async def run(seed: int) -> None:
            prompt = [1, 2, 3, 4] * (seed % 5) + [seed % 40]
            completion = await engine.generate(prompt, SamplingParams(seed=seed, max_tokens=20 + seed, n=1 + seed % 3, ignore_eos=True))
            outputs[seed] = completion.token_ids

        async with anyio.create_task_group() as group:
            for seed in range(1, 25):
                group.start_soon(run, seed)
            for number in range(6):
                steps = engine.stats().steps + 3
                await until(lambda steps=steps: engine.stats().steps > steps or len(outputs) == 24)  # type: ignore[misc]
                level = 1 + number % 2
                assert await engine.sleep(level) == MemoryUse(100, 100 - level)
                assert engine.stats().sleep_level == level
                assert await engine.wake() == MemoryUse(100 - level, 100)
        assert outputs == {seed: tuple(engine.solo(seed)[0]) for seed in range(1, 25)}
        assert idle(engine)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ahead", [Ahead.NEVER, Ahead.HOST])
async def test_while_it_sleeps(ahead: Ahead) -> None:
    """No step runs; requests wait, are cancelled, and end at their deadlines."""
    async with OracleEngine(ahead=ahead) as engine:
        gate = StepGate(engine, at=3)
        running = engine.stream([1], some(1, 30))
        cancelled, late = engine.stream([2], some(2, 300), request_id="cancelled"), engine.stream([3], some(3, 300), timeout=0.2)
        await until(gate.held.is_set)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.sleep)
            await anyio.wait_all_tasks_blocked()
            gate.open()
        num_steps = engine.stats().steps
        assert engine.healthy
        waiting = engine.stream([4], some(4, 9))
        assert await engine.cancel("cancelled")
        assert [token.finish_reason async for token in cancelled][-1] is FinishReason.CANCELLED
        assert [token.finish_reason async for token in late][-1] is FinishReason.DEADLINE
        assert (engine.stats().steps, engine.stats().waiting, engine.stats().running) == (num_steps, 1, 1)
        await engine.wake()
        assert [token.token_id async for token in waiting] == engine.solo(4)[0]
        assert [token.token_id async for token in running] == engine.solo(1)[0]
        assert engine.stats().sleep_level == 0
        assert idle(engine)


async def test_requests_can_be_cancelled_first_or_forbid_it() -> None:
    async with OracleEngine() as engine:
        gate = StepGate(engine, at=2)
        stream = engine.stream([1], some(1, 300))
        with pytest.raises(EngineStateError, match="forbid the sleep: 1"):
            await engine.sleep(running="refuse")
        gate.open()
        await engine.sleep(running="cancel")
        assert [token.finish_reason async for token in stream][-1] is FinishReason.CANCELLED
        assert (engine.stats().sleep_level, engine.runner.asleep) == (1, 1)
        await engine.sleep(2, running="refuse")
        await engine.wake()
        assert (await engine.generate([2], some(2, 5))).token_ids == tuple(engine.solo(2)[0])


async def test_levels_pauses_and_what_is_repeated() -> None:
    async with OracleEngine() as engine:
        assert await engine.wake() == MemoryUse(100, 100)
        assert [(await engine.sleep(level)).after for level in (1, 1, 2, 1)] == [99, 99, 98, 98]
        await engine.pause()
        await engine.wake()
        assert (engine.stats().paused, engine.stats().sleep_level) == (True, 0)
        await engine.sleep()
        await engine.unpause()
        stream = engine.stream([1], some(1, 5))
        await engine.flush_cache()
        assert (engine.stats().paused, engine.stats().sleep_level, engine.stats().steps) == (False, 1, 0)
        await engine.wake()
        assert [token.token_id async for token in stream] == engine.solo(1)[0]
        for level, running in ((0, "park"), (1, "stop")):
            with pytest.raises(InvalidRequestError, match="is not"):
                await engine.sleep(level, running)


async def test_too_little_memory_to_wake() -> None:
    async with OracleEngine() as engine:
        stream = engine.stream([1], some(1, 9))
        first = await stream.__anext__()
        await engine.sleep()
        engine.runner.too_little_memory = True
        for _ in range(2):
            with pytest.raises(InsufficientMemoryError, match="to wake"):
                await engine.wake()
            assert engine.stats().sleep_level == 1
        engine.runner.too_little_memory = False
        await engine.wake()
        assert [first.token_id, *[token.token_id async for token in stream]] == engine.solo(1)[0]


@pytest.mark.parametrize("change", [lambda engine: engine.sleep(), lambda engine: engine.wake()], ids=["sleep", "wake"])
async def test_closing_an_engine_that_sleeps_or_is_about_to(change: Callable[[AsyncEngine], Awaitable[MemoryUse]]) -> None:
    async with OracleEngine() as engine:
        await engine.sleep()
        stream = engine.stream([1], some(1, 300))
        async with anyio.create_task_group() as group:
            group.start_soon(engine.aclose)
            await anyio.lowlevel.checkpoint()
            with pytest.raises(EngineStateError, match="closed"):
                await change(engine)
        assert [token.finish_reason async for token in stream][-1] is FinishReason.CANCELLED
        assert engine.runner.closed.is_set()


@pytest.mark.parametrize("ending", ["cancel", "close"])
async def test_waking_that_is_cancelled_while_weights_are_read(ending: str) -> None:
    """Or the engine is closed. Nothing waits for what is read."""
    begun, may_go_on = threading.Event(), threading.Event()

    def wait(change: Change) -> None:
        begun.set()
        assert may_go_on.wait(HANG_SECONDS)

    async with OracleEngine() as engine:
        await engine.sleep(2)
        stream = engine.stream([1], some(1, 9))
        engine.runner.before_prepare = wait
        async with anyio.create_task_group() as group:

            async def wake() -> None:
                with pytest.raises(EngineStateError, match="closed"):
                    await engine.wake()

            group.start_soon(wake)
            await until(begun.is_set)
            assert engine.stats().sleep_level == 2
            if ending == "close":
                await engine.aclose()
                may_go_on.set()
            else:
                group.cancel_scope.cancel()
        may_go_on.set()
        if ending == "close":
            assert [token.finish_reason async for token in stream][-1] is FinishReason.CANCELLED
            return
        assert engine.stats().sleep_level == 2
        await engine.wake()
        assert engine.runner.discarded == [NewWeights(None)]
        assert [token.token_id async for token in stream] == engine.solo(1)[0]


async def test_waking_that_is_cancelled_when_weights_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used, and it is known where they came from."""
    begun, may_go_on, asked = threading.Event(), threading.Event(), list[Change]()
    async with OracleEngine() as engine:
        engine.runner.before_prepare = asked.append
        usual = engine.runner.wake

        def wake(prepared: Prepared | None) -> None:
            begun.set()
            assert may_go_on.wait(HANG_SECONDS)
            usual(prepared)

        monkeypatch.setattr(engine.runner, "wake", wake)
        await engine.sleep(2)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.wake, "new")
            await until(begun.is_set)
            group.cancel_scope.cancel()
            may_go_on.set()
        await until(lambda: engine.stats().weights_version == 1)
        await engine.sleep(2)
        await engine.wake()
        assert asked == [NewWeights("new")] * 2


async def test_an_engine_that_dies_when_it_is_about_to_sleep() -> None:
    async with OracleEngine() as engine:
        gate = StepGate(engine, at=2)
        stream = engine.stream([1], some(1, 300))
        await until(gate.held.is_set)

        async def sleep() -> None:
            with anyio.fail_after(HANG_SECONDS), pytest.raises(EngineDeadError, match="the device is gone"):
                await engine.sleep(running="cancel")

        async with anyio.create_task_group() as group:
            group.start_soon(sleep)
            await anyio.wait_all_tasks_blocked()
            engine._core.steps.fail(RuntimeError("the device is gone"))
            gate.open()
        with pytest.raises(EngineDeadError):
            _ = [token async for token in stream]
