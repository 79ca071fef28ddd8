"""Adapters of an engine: loaded, used and unloaded by name while requests go on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hang_guard import HANG_SECONDS
from oracle_engine import Ahead, OracleEngine, StepGate, busy_worker, idle, until
from slow_cases import slow_but

from aengine import EngineDeadError, EngineStateError, FinishReason, InvalidRequestError, SamplingParams
from aengine.api.errors import AdapterError, AdapterNotFoundError
from aengine.api.outputs import RequestState
from aengine.engine.edges import Apply
from aengine.runner.contract import Change, LoadAdapter, UnloadAdapter

pytestmark = pytest.mark.anyio
SHORT = SamplingParams(seed=1, max_tokens=5, ignore_eos=True)
LONG = SamplingParams(seed=2, ignore_eos=True)


class PrepareGate:
    """Holds the preparation of changes until it is opened for good; then it raises `error`, if there is one."""

    def __init__(self, engine: OracleEngine, error: Exception | None = None) -> None:
        self.held = threading.Event()
        self._open = threading.Event()
        self._error = error
        engine.runner.before_prepare = self._pass

    def open(self) -> None:
        self._open.set()

    def _pass(self, change: Change) -> None:
        self.held.set()
        assert self._open.wait(HANG_SECONDS), "the gate is never opened"
        if self._error is not None:
            raise self._error


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def violation(error: InvalidRequestError) -> tuple[str, str]:
    return error.field, error.violations[0].description


async def test_requests_name_them(folder: str) -> None:
    async with OracleEngine() as engine:
        assert engine.adapters == ()
        info = await engine.load_adapter("a", folder)
        assert (info.name, info.rank) == ("a", 8)
        await engine.load_adapter("b/1", folder)
        gate = StepGate(engine, at=2)
        streams = [
            engine.stream([1, 2, 3], SamplingParams(seed=seed, max_tokens=6), adapter=name) for seed, name in enumerate((None, "a", "b/1"))
        ]
        await until(gate.held.is_set)
        assert [(each.name, each.num_requests) for each in engine.adapters] == [("a", 1), ("b/1", 1)]
        gate.open()
        for seed, stream in enumerate(streams):
            assert [token.token_id async for token in stream if token.token_id >= 0] == engine.solo(seed)[0]
            await stream.aclose()
        assert engine.solo(0)[0] != engine.solo(1)[0] != engine.solo(2)[0]
        assert [each.num_requests for each in engine.adapters] == [0, 0]
        await engine.unload_adapter("a")
        assert engine.runner.applied == [LoadAdapter(1, "a", folder), LoadAdapter(2, "b/1", folder), UnloadAdapter(1)]
        await engine.load_adapter("a", folder)
        assert engine.runner.applied[-1] == LoadAdapter(3, "a", folder)
        await engine.generate([1], SHORT, adapter="a")


async def test_what_is_refused(folder: str) -> None:
    async with OracleEngine() as engine:
        for name in ("", "a b", "x" * 129, None, 7):
            with pytest.raises(InvalidRequestError) as caught:
                await engine.load_adapter(name, folder)  # type: ignore[arg-type]
            field, description = violation(caught.value)
            assert (field, description.endswith(" is not a string that matches [A-Za-z0-9._:/-]{1,128}")) == ("name", True)
        for path in ("", None):
            with pytest.raises(InvalidRequestError) as caught:
                await engine.load_adapter("a", path)  # type: ignore[arg-type]
            assert violation(caught.value) == ("path", f"{path!r} is not a path")
        with pytest.raises(AdapterError, match=r"^adapter directory '/nowhere' does not exist$"):
            await engine.load_adapter("a", "/nowhere")
        await engine.load_adapter("a", folder)
        with pytest.raises(InvalidRequestError) as caught:
            await engine.load_adapter("a", folder)
        assert violation(caught.value) == ("name", "'a' is loaded")
        with pytest.raises(AdapterNotFoundError) as unknown:
            engine.stream([1], SHORT, adapter="b")
        assert violation(unknown.value) == ("adapter", "'b' is not loaded; loaded adapters: a")
        with pytest.raises(AdapterNotFoundError) as unknown:
            await engine.unload_adapter("b")
        assert violation(unknown.value)[0] == "name"
        await engine.sleep()
        for change in (engine.load_adapter("c", folder), engine.unload_adapter("a")):
            with pytest.raises(EngineStateError, match="sleeps"):
                await change
        await engine.wake()
        await engine.load_adapter("c", folder)
        await engine.unload_adapter("a")
        assert idle(engine)


@pytest.mark.parametrize("error", [None, AdapterError("it is broken")])
async def test_requests_wait_for_one_that_is_being_loaded(folder: str, error: Exception | None) -> None:
    async with OracleEngine() as engine:
        gate = PrepareGate(engine, error)
        async with anyio.create_task_group() as group:

            async def load() -> None:
                with suppress(AdapterError):
                    await engine.load_adapter("a", folder)

            group.start_soon(load)
            await until(gate.held.is_set)
            assert engine.adapters == ()
            with pytest.raises(InvalidRequestError) as caught:
                await engine.load_adapter("a", folder)
            assert violation(caught.value) == ("name", "'a' is being loaded")
            with pytest.raises(AdapterNotFoundError) as unknown:
                await engine.unload_adapter("a")
            assert violation(unknown.value) == ("name", "'a' is being loaded")
            waiting = engine.stream([1, 2], SHORT, adapter="a", request_id="waiting")
            assert engine.request_info("waiting").state is RequestState.PREPARING  # type: ignore[union-attr]
            late = engine.stream([1, 2], LONG, adapter="a", timeout=0.01)
            assert [token.finish_reason async for token in late] == [FinishReason.DEADLINE]
            cancelled = engine.stream([1, 2], LONG, adapter="a", request_id="cancelled")
            assert await engine.cancel("cancelled")
            assert [token.finish_reason async for token in cancelled] == [FinishReason.CANCELLED]
            for _ in range(3):  # others go on
                await engine.generate([1, 2], SamplingParams(seed=9, max_tokens=5))
            waiting_too = engine.stream([1, 2], SamplingParams(seed=3, max_tokens=5), adapter="a")
            gate.open()
            if error is None:
                assert [token.token_id async for token in waiting_too if token.token_id >= 0] == engine.solo(3)[0]
                assert len([token async for token in waiting]) == 5
            else:
                for stream in (waiting, waiting_too):
                    with pytest.raises(AdapterError, match="it is broken"):
                        await stream.__anext__()
        assert [info.num_requests for info in engine.adapters] == ([] if error else [0])
        assert idle(engine)
        if error is not None:
            engine.runner.before_prepare = lambda change: None
            await engine.load_adapter("a", folder)  # the name is free


async def test_loading_goes_on_without_its_caller(folder: str) -> None:
    async with OracleEngine() as engine:
        gate = PrepareGate(engine)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.load_adapter, "a", folder)
            group.start_soon(engine.load_adapter, "b", folder)  # has not begun when it is cancelled
            await until(gate.held.is_set)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        stream = engine.stream([1, 2], SHORT, adapter="b")
        gate.open()
        assert len([token async for token in stream]) == 5
        await until(lambda: {info.name for info in engine.adapters} == {"a", "b"})


async def test_unloading_waits_for_users(folder: str) -> None:
    async with OracleEngine() as engine:
        await engine.load_adapter("a", folder)
        stream = engine.stream([1, 2], LONG, adapter="a")
        await stream.__anext__()
        with busy_worker(engine):
            preparing = engine.stream("!" * 2000, LONG, adapter="a")  # which counts as one
            async with anyio.create_task_group() as group:
                group.start_soon(engine.unload_adapter, "a")
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(AdapterNotFoundError) as refused:
                    engine.stream([1], SHORT, adapter="a")
                assert violation(refused.value) == ("adapter", "'a' is being unloaded; loaded adapters: none")
                with pytest.raises(InvalidRequestError) as caught:
                    await engine.load_adapter("a", folder)
                assert violation(caught.value) == ("name", "'a' is being unloaded")
                group.cancel_scope.cancel()  # it stays
            await engine.generate([1, 2], SHORT, adapter="a")
            async with anyio.create_task_group() as group:
                group.start_soon(engine.unload_adapter, "a")
                await anyio.wait_all_tasks_blocked()
                await preparing.aclose()
                await anyio.wait_all_tasks_blocked()
                assert engine.runner.adapters == {0, 1}
                await stream.aclose()
        assert (engine.adapters, engine.runner.adapters) == ((), {0})


async def test_an_unloading_that_is_cancelled_leaves_the_adapter(folder: str) -> None:
    """Wherever it waits: for another change, for its preparation, and for the step thread."""
    async with OracleEngine() as engine:
        for name in ("a", "b"):
            await engine.load_adapter(name, folder)
        gate = PrepareGate(engine)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.unload_adapter, "a")
            await until(gate.held.is_set)
            group.start_soon(engine.unload_adapter, "b")
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert [info.name for info in engine.adapters] == ["a", "b"]
        gate.open()
        await until(lambda: engine.runner.discarded == [UnloadAdapter(1)])
        step = StepGate(engine, at=1)
        stream = engine.stream([1, 2], SHORT, adapter="a")
        await until(step.held.is_set)
        async with anyio.create_task_group() as group:
            group.start_soon(engine.unload_adapter, "b")
            await until(lambda: any(isinstance(command, Apply) for command in engine._core.steps._mailbox._commands))
            group.cancel_scope.cancel()
        step.open()
        assert len([token async for token in stream]) == 5
        for name in ("a", "b"):
            await engine.generate([1, 2], SHORT, adapter=name)
        assert (engine.runner.adapters, engine.runner.discarded) == ({0, 1, 2}, [UnloadAdapter(1), UnloadAdapter(2)])
        for name in ("a", "b"):
            await engine.unload_adapter(name)
        assert (engine.adapters, engine.runner.adapters) == ((), {0})


@pytest.mark.parametrize("how", ["closed", "dead"])
async def test_all_that_wait_end_with_the_engine(folder: str, how: str) -> None:
    engine = OracleEngine()
    await engine.start()
    await engine.load_adapter("used", folder)
    user = engine.stream([1], LONG, adapter="used")
    await user.__anext__()
    gate = PrepareGate(engine)
    errors: list[Exception] = []

    async def fails(call: Callable[..., Any], *arguments: str) -> None:
        with pytest.raises(EngineDeadError if how == "dead" else EngineStateError) as caught:
            await call(*arguments)
        errors.append(caught.value)

    async with anyio.create_task_group() as group:
        group.start_soon(fails, engine.load_adapter, "a", folder)
        await until(gate.held.is_set)
        group.start_soon(fails, engine.load_adapter, "b", folder)
        group.start_soon(fails, engine.unload_adapter, "used")
        group.start_soon(fails, engine.sleep)
        waiting = engine.stream([1], SHORT, adapter="a")
        group.start_soon(fails, waiting.__anext__)
        await anyio.wait_all_tasks_blocked()
        if how == "dead":
            engine._core.steps.fail(RuntimeError("something broke"))
        else:
            await engine.aclose()
    assert len(errors) == 5
    gate.open()
    await engine.aclose()
    await user.aclose()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("ahead", "seed"), slow_but([(Ahead.HOST, 0), (Ahead.DEVICE, 1)], [(ahead, seed) for ahead in Ahead for seed in range(2)])
)
async def test_random_operations_of_many_users(folder: str, ahead: Ahead, seed: int) -> None:
    """No row has the pages of another adapter, or one that is not loaded."""
    choose = random.Random(seed)
    names = [f"n{i}" for i in range(5)]
    async with OracleEngine(ahead=ahead, num_pages=60, max_num_seqs=12, max_num_batched_tokens=32, max_adapters=3) as engine:
        seeds = iter(range(10_000))
        num_done = 0

        async def operate() -> None:
            nonlocal num_done
            for _ in range(40):
                name, drawn = choose.choice(names), choose.random()
                with suppress(InvalidRequestError):
                    if drawn < 0.2:
                        await engine.load_adapter(name, folder)
                    elif drawn < 0.35:
                        with anyio.move_on_after(choose.choice((0, 10))):
                            await engine.unload_adapter(name)
                    else:
                        request = next(seeds)
                        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9][: choose.randint(1, 9)]
                        params = SamplingParams(seed=request, max_tokens=choose.randint(1, 20))
                        stream = engine.stream(prompt, params, adapter=choose.choice((None, name, name)))
                        if choose.random() < 0.2:
                            await anyio.lowlevel.checkpoint()
                            await stream.aclose()
                        else:
                            assert [token.token_id async for token in stream if token.token_id >= 0] == engine.solo(request)[0]
                            num_done += 1

        async with anyio.create_task_group() as group:
            for _ in range(12):
                group.start_soon(operate)
        assert num_done > 20
        for info in engine.adapters:
            await engine.unload_adapter(info.name)
        assert engine.runner.adapters == {0}
        assert not engine._core.serving.adapters._used
        assert idle(engine)
