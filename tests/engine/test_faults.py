"""Faults and limits of the engine: rows that cannot be built, steps that hang, queues that are full, readers that interleave."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import anyio
import pytest
from hang_guard import HANG_SECONDS
from oracle_engine import Ahead, OracleEngine, StepGate, idle, seeds_of, until
from slow_cases import slow_but
from speculating import also_with_drafts, demo

from aengine import (
    EngineDeadError,
    FinishReason,
    InvalidRequestError,
    QueueFullError,
    SamplingParams,
    StepHangError,
    StructuredOutput,
    TokenStream,
)
from aengine.api.params import LogitsProcessor
from aengine.engine import step_thread
from aengine.sampling.grammar import CompiledGrammar, GrammarError, GrammarMatcher
from aengine.scheduler.plan import RowsFailed, StepPlan
from aengine.tokenizer.codecs import ByteTexts

pytestmark = pytest.mark.anyio


class CannotBuild(RuntimeError):
    pass


@also_with_drafts
@pytest.mark.parametrize("ahead", list(Ahead))
async def test_a_row_that_fails_leaves_the_others_equal(ahead: Ahead) -> None:
    async with OracleEngine(ahead=ahead) as engine:
        rng = random.Random(5)
        errors: dict[int, CannotBuild] = {}
        may_fail = itertools.count()

        def fail_sometimes(plan: StepPlan) -> None:
            if len(plan.rows) > 1 and not plan.new_rows and next(may_fail) % 8 == 0:
                row = rng.choice(plan.rows.tolist())
                key = engine.runner.truth_of(row).request.key
                errors[key] = CannotBuild(f"request {key}")
                raise RowsFailed({row: errors[key]})

        engine.runner.before_launch = fail_sometimes

        async def read(i: int, stream: TokenStream) -> None:
            got = []
            failure = None
            try:
                async for token in stream:
                    got.append(token.token_id)
            except CannotBuild as error:
                failure = error
            assert failure is errors.get(i)
            assert got == engine.solo(i)[0][: len(got) if failure else None]
            await stream.aclose()

        await engine.pause()  # all wait before the first step, so that there are steps without new rows
        async with anyio.create_task_group() as group:
            for i in range(40):
                stream = engine.stream([i % 50, 1], SamplingParams(seed=i, max_tokens=40, ignore_eos=True))
                group.start_soon(read, i, stream)
            await until(lambda: engine.stats().waiting == 40)
            await engine.unpause()
        assert errors
        assert engine.healthy
        assert idle(engine)


@also_with_drafts
async def test_a_step_that_hangs_is_reported_and_ends_every_stream(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    engine = OracleEngine(step_timeout=0.2)
    await engine.start()
    engine.runner.before_step = lambda plan: gate.wait() and None
    with caplog.at_level(logging.CRITICAL, logger="aengine"), anyio.fail_after(HANG_SECONDS):
        with pytest.raises(EngineDeadError, match="a step hangs for") as caught:
            await engine.generate([1], SamplingParams(seed=1))
        assert isinstance(caught.value.__cause__, StepHangError)
        assert not engine.healthy
        with pytest.raises(EngineDeadError):
            await engine.wait_stopped()
        await engine.aclose()
    assert "before_step" in caplog.text, "the log shows where the thread is"
    gate.set()
    await anyio.to_thread.run_sync(engine._core.steps._thread.join)
    assert engine.runner.closed.is_set()


async def test_an_error_is_not_hidden_by_what_closing_raises_after_it(caplog: pytest.LogCaptureFixture) -> None:
    engine = OracleEngine()
    await engine.start()
    close = engine.runner.close

    def close_and_fail() -> None:
        close()
        raise RuntimeError("the device does not answer")

    def fail(plan: StepPlan) -> None:
        raise CannotBuild("a kernel failed")

    engine.runner.before_launch, engine.runner.close = fail, close_and_fail
    with pytest.raises(EngineDeadError, match="a kernel failed") as caught:
        await engine.generate([1], SamplingParams(seed=1))
    assert isinstance(caught.value.__cause__, CannotBuild)
    await engine.aclose()
    assert "closing a runner that has failed: RuntimeError: the device does not answer" in caplog.text
    assert "the step thread died: CannotBuild: a kernel failed" in caplog.text  # which servers do not tell their clients


class Panic(BaseException):
    """What Rust libraries raise is no Exception."""


class BrokenCodec:
    """A codec that cannot decode one id."""

    def __init__(self, codec: Any, bad_id: int, error: BaseException) -> None:
        self._codec = codec
        self._bad_id = bad_id
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self._bad_id in ids:
            raise self._error
        return str(self._codec.decode(ids, skip_special_tokens))

    def piece(self, token_id: int) -> str | None:
        if token_id == self._bad_id:
            raise self._error
        found: str | None = self._codec.piece(token_id)
        return found


@pytest.mark.quick_cases(4)
@also_with_drafts
@pytest.mark.parametrize("error", [ValueError("piece id is out of range"), Panic("piece id is out of range")])
@pytest.mark.parametrize("stop", [(), ("no such text",)], ids=["decoded when read", "decoded when generated"])
@pytest.mark.parametrize(("many", "by_token"), [(False, True), (True, False)])
async def test_text_that_cannot_be_decoded_fails_its_request_alone(
    stop: tuple[str, ...], error: BaseException, many: bool, by_token: bool
) -> None:
    async with OracleEngine() as engine:
        plain = {seed: SamplingParams(seed=seed, max_tokens=100, ignore_eos=True, detokenize=False) for seed in range(1, 6)}
        output = (await engine.generate([1, 2], plain.pop(1))).token_ids
        tokenizer: Any = engine.tokenizer
        tokenizer._codec = BrokenCodec(tokenizer._codec, bad_id := output[10], error)
        tokenizer._byte_texts = (ByteTexts(tokenizer._codec, False), ByteTexts(tokenizer._codec, True)) if by_token else None
        broken = engine.stream([1, 2], SamplingParams(seed=1, max_tokens=100, ignore_eos=True, stop=stop, n=2))
        others = {seed: engine.stream([1], params) for seed, params in plain.items()}
        got: list[int] = []

        async def read() -> None:
            while tokens := (await broken.read() if many else [await broken.__anext__()]):
                got.extend(token.token_id for token in tokens if token.index == 0)

        with anyio.fail_after(HANG_SECONDS):
            with pytest.raises(type(error) if isinstance(error, Exception) else RuntimeError, match="piece id is out of range"):
                await read()
            assert bad_id not in got
            assert got == list(output[: len(got)])
            assert broken.completion().finish_reason is FinishReason.ERROR
            for seed, other in others.items():
                assert [token.token_id async for token in other] == engine.solo(seed)[0]
            await until(lambda: idle(engine))
            await broken.aclose()
            assert (await engine.generate([3], SamplingParams(seed=9, max_tokens=2, detokenize=False))).token_ids


async def check_fails_behind(stream: TokenStream, error: type[Exception], ids: Sequence[int]) -> None:
    got: list[int] = []

    async def read() -> None:
        async for token in stream:
            got.append(token.token_id)

    with pytest.raises(error):
        await read()
    assert got == list(ids)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_processor_that_raises_fails_its_request_behind_the_tokens_before_it(speculation: bool) -> None:
    """All of these reach the reader, also where they come in one step with the one that fails."""
    prompt = "It is a truth universally"
    async with demo(dtype="float32") as engine:
        length = len(engine.tokenizer.encode(prompt))

        def raise_at(count: int) -> LogitsProcessor:
            def process(logits: Any, tokens: list[int]) -> None:
                if len(tokens) >= length + count:
                    raise CannotBuild("process")

            return process

        params = SamplingParams(seed=4, max_tokens=30, ignore_eos=True)
        whole = await engine.generate(prompt, params)
        other = engine.stream(prompt, params)
        for error in (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), anyio.get_cancelled_exc_class()("in a processor")):

            def raise_it(logits: Any, tokens: list[int], error: BaseException = error) -> None:
                raise error

            with pytest.raises(RuntimeError, match=f"^a logits processor raised {type(error).__name__}: ") as caught:
                await engine.generate(prompt, replace(params, logits_processors=(raise_it,)))
            assert caught.value.__cause__ is error
        streams = {count: engine.stream(prompt, replace(params, logits_processors=(raise_at(count),))) for count in range(5, 14)}
        for count, stream in streams.items():
            await check_fails_behind(stream, CannotBuild, whole.token_ids[:count])
        assert (stream.usage.accepted_draft_tokens > 0) == speculation
        assert [token.token_id async for token in other] == list(whole.token_ids)
        await until(lambda: idle(engine))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("count", [3, 6])
async def test_a_grammar_that_takes_too_much_fails_its_request_behind_the_tokens_before_it(
    count: int, speculation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = GrammarMatcher.fill

    def fail(matcher: GrammarMatcher, bits: Any) -> None:
        if matcher.num_tokens == count:
            raise GrammarError.of("structured_output", "takes too much")
        fill(matcher, bits)

    async with demo(dtype="float32") as engine:
        params = SamplingParams(seed=4, max_tokens=20, structured_output=StructuredOutput(regex="It is a truth universally [a-z]{40}"))
        whole = await engine.generate("It is", params)
        assert (whole.usage.accepted_draft_tokens > count) == speculation
        monkeypatch.setattr(CompiledGrammar, "try_out", lambda *given: True)
        monkeypatch.setattr(GrammarMatcher, "fill", fail)
        other = engine.stream("It is", SamplingParams(seed=5, max_tokens=30, ignore_eos=True))
        await check_fails_behind(engine.stream("It is", params), GrammarError, whole.token_ids[:count])
        assert len([token async for token in other]) == 30
        await until(lambda: idle(engine))


async def test_an_idle_engine_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the watchdog, which acts where it is busy for too long."""
    watched: list[Callable[[], float | None]] = []
    monkeypatch.setattr(step_thread, "watchdog", lambda limit, busy_since, on_hang: watched.append(busy_since) or nullcontext())
    async with OracleEngine() as engine:
        await until(lambda: watched)
        (busy_since,) = watched
        await until(lambda: busy_since() is None)
        gate = StepGate(engine)
        stream = engine.stream([1], SamplingParams(seed=1, max_tokens=2, ignore_eos=True))
        await until(gate.held.is_set)
        assert busy_since() is not None
        gate.open()
        assert [token.token_id async for token in stream] == engine.solo(1)[0]
        await until(lambda: busy_since() is None)


async def test_wait_stopped_returns_after_aclose() -> None:
    engine = OracleEngine()
    await engine.start()
    async with anyio.create_task_group() as group:
        group.start_soon(engine.wait_stopped)
        await engine.aclose()


class TestFullQueue:
    async def test_requests(self) -> None:
        gate = threading.Event()
        async with OracleEngine(max_queued_requests=3) as engine:
            engine.runner.before_step = lambda plan: gate.wait() and None
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            streams = [engine.stream([i + 1], SamplingParams(seed=i, max_tokens=2, ignore_eos=True)) for i in range(3)]
            with pytest.raises(QueueFullError, match="3 sequences wait already, and this request has 1; max_queued_requests is 3"):
                engine.stream([9], params)
            with pytest.raises(QueueFullError):
                engine.stream("long text " * 200, params)
            gate.set()
            for i, stream in enumerate(streams):
                assert [token.token_id async for token in stream] == engine.solo(i)[0]
            assert (await engine.generate([1], SamplingParams(seed=7, max_tokens=2, ignore_eos=True))).token_ids
            assert not engine._core.serving.registry._bound._waiting

    @also_with_drafts
    async def test_sequences(self) -> None:
        """Of a request with n > 1 each counts, also those that wait while others of it run."""
        async with OracleEngine(max_queued_requests=8, max_num_seqs=4) as engine:
            await engine.pause()
            first = engine.stream([1], SamplingParams(seed=1, n=6, max_tokens=2, ignore_eos=True))
            assert engine.stats().waiting == 6
            with pytest.raises(QueueFullError, match="6 sequences wait already, and this request has 3; max_queued_requests is 8"):
                engine.stream([2], SamplingParams(seed=2, n=3))
            second = engine.stream([3], SamplingParams(seed=3, n=2, max_tokens=2, ignore_eos=True))
            gate = StepGate(engine, at=2)  # the one before took three more, as the first one's prompt was there
            await engine.unpause()
            await anyio.to_thread.run_sync(gate.held.wait)
            await until(lambda: len(engine._core.serving.registry._bound._waiting) == 4)
            with pytest.raises(QueueFullError, match="4 sequences wait already, and this request has 5"):
                engine.stream([4], SamplingParams(seed=4, n=5))
            gate.open()
            for stream in (first, second):
                async for _ in stream:
                    pass
            large = engine.stream([5], SamplingParams(seed=5, n=100, max_tokens=1))  # alone it may be larger
            async for _ in large:
                pass
            assert not engine._core.serving.registry._bound._waiting

    async def test_a_refused_request_does_not_count(self) -> None:
        async with OracleEngine(max_queued_requests=2) as engine:
            await engine.pause()
            for _ in range(3):
                with pytest.raises(InvalidRequestError):
                    engine.stream([1] * 399, SamplingParams(max_tokens=100))
                with pytest.raises(InvalidRequestError):
                    engine.stream("a word that is not in its vocabulary")
            engine.stream([1], SamplingParams(seed=1))

    async def test_cancelled_ones_do_not_count(self) -> None:
        gate = threading.Event()
        async with OracleEngine(max_queued_requests=1) as engine:
            engine.runner.before_step = lambda plan: gate.wait() and None
            running = engine.stream([1], SamplingParams(seed=1, max_tokens=2, ignore_eos=True))
            gate.set()
            await running.aclose()
            again = engine.stream([2], SamplingParams(seed=2, max_tokens=2, ignore_eos=True))
            assert [token.token_id async for token in again] == engine.solo(2)[0]

    async def test_tokens(self) -> None:
        gate = threading.Event()
        async with OracleEngine(max_queued_tokens=100) as engine:
            engine.runner.before_step = lambda plan: gate.wait() and None
            first = engine.stream([1] * 101, SamplingParams(seed=1, max_tokens=2, ignore_eos=True))  # alone it may be longer
            with pytest.raises(QueueFullError, match=r"101 tokens wait already; 1 more would exceed max_queued_tokens \(100\)"):
                engine.stream([1])
            gate.set()
            assert [token.token_id async for token in first] == engine.solo(1)[0]


@pytest.mark.quick_cases(4)
@also_with_drafts
@pytest.mark.parametrize("workload", slow_but(range(4), range(12)))
async def test_any_interleaving_equals_the_solo_run(workload: int) -> None:
    """Submit, cancel, slow reads, parking and preemption in any order: each stream is its solo run, and every await ends."""
    rng = random.Random(workload)
    async with OracleEngine(
        num_pages=1 + rng.choice([120, 200, 1000]),
        page_size=rng.choice([1, 4]) if workload % 2 else 4,
        max_num_seqs=rng.choice([2, 8]),
        max_num_batched_tokens=rng.choice([8, 64]),
        max_unread_tokens=rng.choice([1, 8, 256]),
        ahead=list(Ahead)[workload % 3],
    ) as engine:
        prefixes = [[rng.randrange(50) for _ in range(30)] for _ in range(2)]
        num_done = 0

        async def use(i: int) -> None:
            nonlocal num_done
            prompt = [*rng.choice(prefixes)[: rng.randint(1, 30)], rng.randrange(50)]
            params = SamplingParams(seed=i, max_tokens=rng.randint(1, 60), ignore_eos=rng.random() < 0.7, n=rng.choice([1, 1, 1, 3]))
            behaviour = rng.choice(["read", "read", "slow", "leave", "cancel"])
            leave_after = rng.randint(0, 20)
            for _ in range(rng.randint(0, 30)):
                await anyio.lowlevel.checkpoint()
            got: list[list[int]] = [[] for _ in range(params.n)]
            async with engine.stream(prompt, params, request_id=f"r{i}", priority=rng.choice([0, 1]), tenant=rng.choice("ab")) as stream:
                async for token in stream:
                    if token.token_id >= 0:
                        got[token.index].append(token.token_id)
                    if behaviour == "slow":
                        for _ in range(rng.randint(0, 20)):
                            await anyio.lowlevel.checkpoint()
                    if sum(map(len, got)) == leave_after and behaviour == "leave":
                        break
                    if sum(map(len, got)) == leave_after and behaviour == "cancel":
                        await engine.cancel(f"r{i}")
            completion = stream.completion()
            for ids, one, seed in zip(got, (completion, *completion.others), seeds_of(params), strict=True):
                output, reason = engine.solo(seed)
                assert ids == output[: len(ids)]
                if behaviour in ("read", "slow"):
                    assert (ids, one.finish_reason) == (output, reason)
                elif behaviour == "cancel":
                    assert one.finish_reason in (FinishReason.CANCELLED, reason)
            num_done += 1

        with anyio.fail_after(HANG_SECONDS):
            async with anyio.create_task_group() as group:
                for i in range(40):
                    group.start_soon(use, i)
        assert num_done == 40
        assert idle(engine)
