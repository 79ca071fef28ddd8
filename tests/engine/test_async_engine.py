"""The engine's promises about streams, cancellation, faults and its life cycle, under asyncio and trio."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from hang_guard import HANG_SECONDS
from oracle_engine import Ahead, OracleEngine, StepGate, idle, step_with_the_loop, until
from slow_cases import slow_but
from speculating import also_with_drafts

from aengine import (
    AsyncEngine,
    Completion,
    ConfigError,
    EngineDeadError,
    EngineStateError,
    FinishReason,
    InvalidRequestError,
    ModelLoadError,
    RequestIdInUseError,
    SamplingParams,
)
from aengine.api.outputs import NO_TOKEN
from aengine.engine.core import EngineCore
from aengine.engine.loading import LoadedModel
from aengine.models.sharding import random_weights

pytestmark = pytest.mark.anyio


async def test_a_stream_is_its_solo_run(speculation: bool) -> None:
    async with OracleEngine() as engine:
        stream = engine.stream([1, 2, 3], SamplingParams(seed=5, max_tokens=60, ignore_eos=True))
        tokens = [token async for token in stream]
        output, reason = engine.solo(5)
        assert [token.token_id for token in tokens] == output
        assert [token.finish_reason for token in tokens] == [None] * 59 + [reason]
        completion = stream.completion()
        assert completion.token_ids == tuple(output)
        assert completion.finish_reason is FinishReason.MAX_TOKENS
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 60)
        assert completion.text == "".join(token.text for token in tokens) == engine._core.serving.model.tokenizer.decode(output)
        assert [token async for token in stream] == []
        await stream.aclose()
        assert idle(engine)
        accepted, drafts = completion.usage.accepted_draft_tokens, completion.usage.draft_tokens
        assert 0 < accepted < drafts if speculation else drafts == 0


@also_with_drafts
async def test_finish_reasons() -> None:
    async with OracleEngine() as engine:
        seed = next(seed for seed in range(1000, 2000) if 7 in _output(engine, seed)[:60])
        completion = await engine.generate([seed % 50, seed // 50], SamplingParams(seed=seed))
        assert completion.finish_reason is FinishReason.EOS
        assert completion.token_ids[-1] == 7
        assert completion.stop_reason is None
        assert completion.text == engine._core.serving.model.tokenizer.decode(completion.token_ids[:-1])
        stop = completion.token_ids[1]
        stopped = await engine.generate([seed % 50, seed // 50], SamplingParams(seed=seed, stop_token_ids=(stop,)))
        assert stopped.finish_reason is FinishReason.STOP_TOKEN
        assert stopped.stop_reason == stop == stopped.token_ids[-1]
        full = await engine.generate([1], SamplingParams(seed=3, ignore_eos=True))
        assert full.finish_reason is FinishReason.CONTEXT_LENGTH
        assert len(full.token_ids) == 399


def _output(engine: OracleEngine, seed: int) -> list[int]:
    from kv_oracle import solo_run

    return solo_run(engine.request([seed % 50, seed // 50], SamplingParams(seed=seed, ignore_eos=True)), 50).output


@pytest.mark.quick_cases(1)
@also_with_drafts
@pytest.mark.parametrize("ahead", slow_but([Ahead.HOST], Ahead))
async def test_200_streams_50_cancelled(ahead: Ahead) -> None:
    rng = random.Random(1)
    cancelled = set(rng.sample(range(200), 50))
    lengths = [rng.randint(1, 60) for _ in range(200)]
    counts: dict[int, int] = {}
    async with OracleEngine(ahead=ahead, num_pages=300) as engine:

        async def read(i: int) -> None:
            params = SamplingParams(seed=i, max_tokens=lengths[i], ignore_eos=True)
            stop_after = rng.randint(0, lengths[i]) if i in cancelled else None
            async with engine.stream([1, 2, i % 50], params) as stream:
                got = []
                async for token in stream:
                    got.append(token.token_id)
                    if len(got) == stop_after:
                        break
            assert got == engine.solo(i)[0][: len(got)]
            counts[i] = len(got)

        async with anyio.create_task_group() as group:
            for i in range(200):
                group.start_soon(read, i)
        assert all(counts[i] == lengths[i] for i in range(200) if i not in cancelled)
        assert idle(engine)


@also_with_drafts
class TestLeaving:
    async def test_aclose_returns_when_the_pages_are_free(self) -> None:
        async with OracleEngine() as engine:
            stream = engine.stream([1] * 50, SamplingParams(seed=1, ignore_eos=True))
            await stream.__anext__()
            assert engine.stats().pages_used > 0
            await stream.aclose()
            assert idle(engine)

    async def test_break_and_drop(self) -> None:
        async with OracleEngine() as engine:
            async for _ in engine.stream([1], SamplingParams(seed=1, ignore_eos=True)):
                break
            gc.collect()
            await until(lambda: idle(engine))

    async def test_never_read(self) -> None:
        async with OracleEngine() as engine:
            engine.stream([1], SamplingParams(seed=1, ignore_eos=True))
            engine.stream("word " * 1000)  # is being tokenized
            gc.collect()
            await until(lambda: idle(engine))

    async def test_cancelled_task(self) -> None:
        async with OracleEngine() as engine:
            with anyio.CancelScope() as scope:
                async with engine.stream([1], SamplingParams(seed=1, ignore_eos=True)) as stream:
                    async for _ in stream:
                        scope.cancel()
                        await anyio.sleep_forever()
            assert idle(engine)

    async def test_cancelled_while_waiting_for_a_token(self) -> None:
        gate = threading.Event()
        async with OracleEngine() as engine:
            engine.runner.before_step = lambda plan: gate.wait()
            async with anyio.create_task_group() as group:

                async def read() -> None:
                    async for _ in engine.stream([1], SamplingParams(seed=1, ignore_eos=True)):
                        raise AssertionError("the step is held")

                group.start_soon(read)
                await until(lambda: any(state.waiter for state in engine._core.serving.registry._streams.values()))
                group.cancel_scope.cancel()
            gate.set()
            await until(lambda: idle(engine))

    async def test_cancel_by_id(self) -> None:
        async with OracleEngine() as engine:
            stream = engine.stream([1], SamplingParams(seed=1, ignore_eos=True), request_id="mine")
            first = await stream.__anext__()
            assert await engine.cancel("mine") is True
            assert idle(engine)
            assert await engine.cancel("mine") is False
            rest = [token async for token in stream]
            assert rest[-1].token_id == NO_TOKEN
            assert rest[-1].finish_reason is FinishReason.CANCELLED
            completion = stream.completion()
            assert completion.finish_reason is FinishReason.CANCELLED
            assert completion.token_ids == (first.token_id, *(token.token_id for token in rest[:-1]))
            assert completion.text == engine._core.serving.model.tokenizer.decode(completion.token_ids)

    async def test_cancel_takes_at_most_one_step(self) -> None:
        async with OracleEngine() as engine:
            stream = engine.stream([1], SamplingParams(seed=1, ignore_eos=True), request_id="mine")
            other = engine.stream([2], SamplingParams(seed=2, ignore_eos=True))
            await stream.__anext__()
            before = threading.Event()
            seen: list[int] = []

            def count(plan: object) -> None:
                if before.is_set():
                    seen.append(len(plan.rows))  # type: ignore[attr-defined]

            engine.runner.before_step = count  # type: ignore[assignment]
            stream._source.cancel()
            before.set()
            await stream.aclose()
            assert seen.count(2) <= 1
            await other.aclose()


async def test_request_ids() -> None:
    async with OracleEngine() as engine:
        stream = engine.stream([1], SamplingParams(seed=1, ignore_eos=True), request_id="a.b:c-1")
        with pytest.raises(RequestIdInUseError, match=r"request_id: 'a\.b:c-1' is in use"):
            engine.stream([1], request_id="a.b:c-1")
        with pytest.raises(InvalidRequestError, match="request_id"):
            engine.stream([1], request_id="no spaces")
        await stream.aclose()
        again = engine.stream([1], SamplingParams(seed=1, max_tokens=1), request_id="a.b:c-1")
        assert again.request_id == "a.b:c-1"
        await again.aclose()


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([50], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([True], {}, "prompt"),
        ([[1], [2]], {}, "prompt"),
        ([1, "a"], {}, "prompt"),
        (5, {}, "prompt"),
        (b"bytes", {}, "prompt"),
        ([1] * 400, {}, "prompt"),
        ([1], {"params": SamplingParams(max_tokens=400)}, "max_tokens"),
        ([1], {"params": SamplingParams(stop_token_ids=(50,))}, "stop_token_ids"),
        ([1], {"params": {"max_tokens": 4}}, "params"),
        ([1], {"priority": 101}, "priority"),
        ([1], {"priority": 1.0}, "priority"),
        ([1], {"timeout": 0}, "timeout"),
        ([1], {"timeout": float("nan")}, "timeout"),
        ([1], {"tenant": 5}, "tenant"),
        ([1], {"cache_salt": "x" * 129}, "cache_salt"),
        ([1], {"request_id": ""}, "request_id"),
    ],
)
async def test_bad_input_is_refused_and_the_others_go_on(prompt: object, options: dict[str, object], field: str) -> None:
    async with OracleEngine() as engine:
        other = engine.stream([1], SamplingParams(seed=1, max_tokens=100, ignore_eos=True))
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate(prompt, **options)  # type: ignore[arg-type]
        assert caught.value.field == field
        assert [token.token_id async for token in other] == engine.solo(1)[0]
        await other.aclose()
        assert idle(engine)


async def test_refusals_of_the_background_tokenizer() -> None:
    async with OracleEngine() as engine:
        for prompt in ("word " * 3000, [{"role": 1}]):
            stream = engine.stream(prompt)
            with pytest.raises(InvalidRequestError) as caught:
                await stream.started()
            assert caught.value.field == "prompt"
            with pytest.raises(InvalidRequestError):
                await stream.__anext__()
            with pytest.raises(StopAsyncIteration):
                await stream.__anext__()
            await stream.aclose()
        assert idle(engine)


@also_with_drafts
async def test_deadline() -> None:
    async with OracleEngine() as engine:
        gate = threading.Event()
        engine.runner.before_step = lambda plan: gate.wait() and None
        running = engine.stream([1], SamplingParams(seed=1, ignore_eos=True))
        late = engine.stream([2], SamplingParams(seed=2, ignore_eos=True), timeout=1e-9)
        await until(lambda: engine._core.serving.registry.num_submitted == 2)
        gate.set()
        tokens = [token async for token in late]
        assert tokens[-1].finish_reason is FinishReason.DEADLINE
        assert tokens[-1].token_id == NO_TOKEN
        await running.aclose()
        await late.aclose()
        assert idle(engine)


async def test_a_deadline_beyond_what_a_platform_can_wait() -> None:
    async with OracleEngine() as engine:
        mailbox: Any = engine._core.steps._mailbox
        waits: list[float | None] = []
        wait = mailbox.wait
        mailbox.wait = lambda timeout: waits.append(timeout) or wait(timeout)
        for timeout in (1e10, 1e300):
            before = len(waits)
            stream = engine.stream([1], SamplingParams(seed=1, ignore_eos=True, max_tokens=5), timeout=timeout)
            assert len([token async for token in stream]) == 5
            await until(lambda before=before: len(waits) > before)  # the step thread is idle
        assert len([token async for token in engine.stream([1], SamplingParams(seed=1, ignore_eos=True, max_tokens=5))]) == 5


@also_with_drafts
async def test_deadline_while_nothing_else_happens() -> None:
    """A parked request ends in time although no step runs."""
    async with OracleEngine(max_unread_tokens=1) as engine:
        stream = engine.stream([1], SamplingParams(seed=1, ignore_eos=True), timeout=0.2)
        with anyio.fail_after(HANG_SECONDS):
            await engine._core.serving.registry._streams[0].released.wait()
        tokens = [token async for token in stream]
        assert tokens[-1].finish_reason is FinishReason.DEADLINE


@pytest.mark.quick_cases(4)
@also_with_drafts
@pytest.mark.parametrize("ahead", list(Ahead))
async def test_a_stalled_reader_costs_no_steps(ahead: Ahead) -> None:
    async with OracleEngine(max_unread_tokens=8, ahead=ahead) as engine:
        step_with_the_loop(engine)
        stalled = engine.stream([1], SamplingParams(seed=1, max_tokens=300, ignore_eos=True))
        await until(lambda: engine.stats().parked == 1)
        await engine.generate([3], SamplingParams(seed=3, max_tokens=1, ignore_eos=True))  # what was reported before has arrived
        unread = len(stalled._source.items)
        assert 8 < unread < 8 + 20
        steps = engine.stats().steps
        other = await engine.generate([2], SamplingParams(seed=2, max_tokens=50, ignore_eos=True))
        assert other.token_ids == tuple(engine.solo(2)[0])
        assert engine.stats().steps <= steps + 51
        assert len(stalled._source.items) == unread
        assert engine.stats().parked == 1
        assert [token.token_id async for token in stalled] == engine.solo(1)[0]


async def test_one_reader_at_a_time() -> None:
    gate = threading.Event()
    async with OracleEngine() as engine:
        engine.runner.before_step = lambda plan: gate.wait() and None
        stream = engine.stream([1], SamplingParams(seed=1, max_tokens=2, ignore_eos=True))
        async with anyio.create_task_group() as group:
            group.start_soon(stream.__anext__)
            await until(lambda: stream._source.waiter is not None)
            with pytest.raises(EngineStateError, match="one reader at a time"):
                await stream.__anext__()
            gate.set()


class TestLifeCycle:
    async def test_states(self) -> None:
        engine = OracleEngine()
        with pytest.raises(EngineStateError, match="not started"):
            engine.stream([1])
        with pytest.raises(EngineStateError, match="not started"):
            await engine.cancel("one")
        with pytest.raises(EngineStateError, match="not started"):
            engine.model_info  # noqa: B018
        assert not engine.healthy
        await engine.start()
        assert engine.healthy
        with pytest.raises(EngineStateError, match="started before"):
            await engine.start()
        await engine.aclose()
        await engine.aclose()
        assert not engine.healthy
        assert engine.runner.closed.is_set()
        with pytest.raises(EngineStateError, match="closed"):
            engine.stream([1])

    @also_with_drafts
    async def test_closing_ends_streams(self) -> None:
        async with OracleEngine() as engine:
            stream = engine.stream([1], SamplingParams(seed=1, ignore_eos=True))
            waiting = engine.stream("word " * 250)
            await stream.__anext__()
        tokens = [token async for token in stream]
        assert tokens[-1].finish_reason is FinishReason.CANCELLED
        await waiting.aclose()

    async def test_never_started(self) -> None:
        engine = OracleEngine()
        await engine.aclose()
        with pytest.raises(EngineStateError):
            await engine.start()

    async def test_unknown_option(self) -> None:
        with pytest.raises(ConfigError, match="max_seqs: unknown option; there are model, "):
            AsyncEngine("demo", max_seqs=4)

    async def test_missing_model(self) -> None:
        engine = AsyncEngine("./no/such/model")
        with pytest.raises(ModelLoadError, match=r"model directory './no/such/model' does not exist"):
            await engine.start()
        await engine.aclose()

    @pytest.mark.parametrize("cancelled", [True, False])
    async def test_closed_while_it_starts(self, cancelled: bool) -> None:
        """Every `aclose()` waits for the thread that loads, whether `start()` was cancelled or not."""
        engine = OracleEngine()
        loading, gate = threading.Event(), threading.Event()
        load = engine._load

        def held(core: EngineCore) -> LoadedModel:
            loading.set()
            assert gate.wait(HANG_SECONDS)
            return load(core)

        engine._load = held  # type: ignore[method-assign]
        closed: list[bool] = []

        async def start(scope: anyio.CancelScope) -> None:
            with scope, pytest.raises(EngineStateError, match="closed while it was starting"):
                await engine.start()

        async def close() -> None:
            await engine.aclose()
            closed.append(engine.runner.closed.is_set() and not engine._core.steps._thread.is_alive())

        async with anyio.create_task_group() as group:
            group.start_soon(start, scope := anyio.CancelScope())
            await anyio.to_thread.run_sync(loading.wait)
            if cancelled:
                scope.cancel()
            for _ in range(3):
                group.start_soon(close)
            await anyio.wait_all_tasks_blocked()
            assert not closed
            gate.set()
        assert scope.cancelled_caught is cancelled
        assert closed == [True] * 3
        assert not engine.healthy

    async def test_closed_after_a_start_without_a_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        engine = OracleEngine()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await engine.start()
        with anyio.fail_after(HANG_SECONDS):
            await engine.aclose()

    @also_with_drafts
    async def test_closed_twice_at_a_time(self) -> None:
        engine = OracleEngine()
        await engine.start()
        gate = StepGate(engine)
        stream = engine.stream([1], SamplingParams(seed=1, ignore_eos=True))
        await anyio.to_thread.run_sync(gate.held.wait)
        closed: list[bool] = []

        async def close() -> None:
            await engine.aclose()
            closed.append(not engine._core.steps._thread.is_alive())

        async with anyio.create_task_group() as group:
            group.start_soon(close)
            group.start_soon(close)
            await anyio.wait_all_tasks_blocked()
            assert not closed
            gate.open()
        assert closed == [True] * 2
        assert [token.finish_reason async for token in stream][-1] is FinishReason.CANCELLED

    async def test_loading_is_left_between_two_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn: list[str] = []
        first, gate = threading.Event(), threading.Event()

        def draw(*args: Any) -> Iterator[Any]:
            for name, weight in random_weights(*args):
                drawn.append(name)
                first.set()
                assert gate.wait(HANG_SECONDS)
                yield name, weight

        monkeypatch.setattr("aengine.runner.setup.random_weights", draw)
        engine = AsyncEngine("demo", load_format="dummy")
        async with anyio.create_task_group() as group:
            group.start_soon(engine.start)
            await anyio.to_thread.run_sync(first.wait)
            group.cancel_scope.cancel()
        gate.set()
        await engine.aclose()
        assert len(drawn) == 1
        with pytest.raises(EngineStateError, match="not started"):
            engine.model_info  # noqa: B018

    async def test_other_thread(self) -> None:
        async with OracleEngine() as engine:

            def use() -> None:
                with pytest.raises(EngineStateError, match="running asyncio or trio"):
                    engine.stream([1])

            await anyio.to_thread.run_sync(use)

    async def test_two_engines(self) -> None:
        async with OracleEngine() as one, OracleEngine() as two:
            params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)
            results: dict[int, Completion] = {}

            async def run(i: int, engine: OracleEngine) -> None:
                results[i] = await engine.generate([1, 2], params)

            async with anyio.create_task_group() as group:
                group.start_soon(run, 1, one)
                group.start_soon(run, 2, two)
            assert results[1] == results[2]


class Boom(RuntimeError):
    pass


@pytest.mark.quick_cases(4)
@also_with_drafts
@pytest.mark.parametrize("ahead", list(Ahead))
async def test_death_of_the_step_thread_ends_every_stream(ahead: Ahead) -> None:
    async with OracleEngine(ahead=ahead) as engine:

        def fail(plan: object) -> None:
            if plan.step == 20:  # type: ignore[attr-defined]
                raise Boom("device lost")

        engine.runner.before_step = fail  # type: ignore[assignment]
        causes: list[BaseException | None] = []

        async def read(i: int) -> None:
            with pytest.raises(EngineDeadError, match="device lost") as caught:
                async for _ in engine.stream([1, i % 50], SamplingParams(seed=i, ignore_eos=True)):
                    pass
            causes.append(caught.value.__cause__)

        with anyio.fail_after(HANG_SECONDS):
            async with anyio.create_task_group() as group:
                for i in range(100):
                    group.start_soon(read, i)
        assert len(causes) == 100
        assert all(isinstance(cause, Boom) and cause.__traceback__ is not None for cause in causes)
        assert not engine.healthy
        with pytest.raises(EngineDeadError):
            engine.stream([1])
        assert await engine.cancel("unknown") is False

    @pytest.mark.parametrize("kind", [ValueError, MemoryError])
    async def test_start_raises_what_taking_the_model_over_raises(self, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*given: object) -> None:
            raise kind("of the loaded model")

        monkeypatch.setattr(EngineCore, "_serve", fail)
        engine = OracleEngine()
        with anyio.fail_after(HANG_SECONDS), pytest.raises(kind, match="of the loaded model"):
            await engine.start()
        assert engine.runner.closed.is_set()
        await engine.aclose()

    async def test_a_report_that_cannot_be_taken_ends_the_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with OracleEngine() as engine:
            monkeypatch.setattr(engine._core.serving.registry, "update", lambda updates: 1 // 0)
            with anyio.fail_after(HANG_SECONDS), pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await engine.generate([1, 2])

    @pytest.mark.parametrize("anyio_backend", ["asyncio"])
    async def test_nothing_of_a_closed_engine_waits_for_a_garbage_collection(self) -> None:
        """Collections are rare where much is alive, and each start leaves more than a MiB."""

        async def run() -> weakref.ref[AsyncEngine]:
            async with AsyncEngine("demo") as engine:
                await engine.generate([1, 2, 3], SamplingParams(max_tokens=2))
                return weakref.ref(engine)

        await run()
        gc.collect()
        gc.disable()
        try:
            num_files = len(os.listdir("/proc/self/fd"))
            engine = await run()
            assert (engine(), len(os.listdir("/proc/self/fd"))) == (None, num_files)
        finally:
            gc.enable()
