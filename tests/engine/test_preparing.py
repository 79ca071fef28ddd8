"""What a request may do and cost before the step thread hears of it: its text is tokenized, its grammar compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from oracle_engine import OracleEngine, idle, until

from aengine import FinishReason, SamplingParams
from aengine.engine import prompts
from aengine.outputs import RequestState
from aengine.params import StructuredOutput

pytestmark = pytest.mark.anyio

PROMPT = [1, 2, 3]
SHORT = 0.05  # seconds


@pytest.fixture(autouse=True)
def _every_prompt_is_read_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "INLINE_ENTRIES", 1)


@contextmanager
def busy_worker(engine: OracleEngine) -> Iterator[None]:
    """Nothing is prepared before the end of the block."""
    may_go_on = threading.Event()
    engine._workers.submit(may_go_on.wait, 20)
    try:
        yield
    finally:
        may_go_on.set()


def some(count: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=count, ignore_eos=True)


class TestDeadline:
    @pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
    async def test_it_ends_what_is_being_prepared(self, is_read: bool) -> None:
        async with OracleEngine() as engine:
            with busy_worker(engine):
                stream = engine.stream(PROMPT, SamplingParams(n=2), timeout=SHORT, request_id="name")
                assert engine.request_info("name").state is RequestState.PREPARING  # type: ignore[union-attr]
                assert engine.stats().waiting == 1
                work = engine._registry._preparations[0].work
                if is_read:
                    await stream.started()
                    ends = [(token.index, token.token_id, token.finish_reason) async for token in stream]
                    assert ends == [(0, -1, FinishReason.DEADLINE), (1, -1, FinishReason.DEADLINE)]
                else:
                    await until(lambda: engine.request_info("name") is None)
                assert stream.info().state is RequestState.FINISHED
                assert engine.stats().waiting == 0
                assert work is not None
                assert work.cancelled(), "and never begun"
            assert idle(engine)

    async def test_it_ends_what_waits_for_a_grammar(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compiling: list[Future[Any]] = []

        def compile_for_ever(wanted: StructuredOutput) -> Future[Any]:
            compiling.append(Future())
            return compiling[-1]

        params = SamplingParams(structured_output=StructuredOutput(regex="a"))
        async with OracleEngine() as engine:
            monkeypatch.setattr(engine._registry._grammars, "compile", compile_for_ever)
            late = engine.stream([1], params, timeout=SHORT)
            cancelled = engine.stream([1], params, timeout=20)
            assert (await late.__anext__()).finish_reason is FinishReason.DEADLINE
            await cancelled.aclose()
            assert [future.cancelled() for future in compiling] == [True, True]
            assert idle(engine)

    async def test_it_ends_neither_what_is_handed_over_nor_what_follows_under_the_name(self) -> None:
        async with OracleEngine() as engine:
            with busy_worker(engine):
                dropped = engine.stream(PROMPT, some(3), timeout=SHORT, request_id="name")
                dropped.cancel()
                dropped.cancel()
                await dropped.aclose()
                kept = engine.stream(PROMPT, some(3), request_id="name")
                late = engine.stream(PROMPT, some(1, seed=2), timeout=SHORT)
                assert (await late.__anext__()).finish_reason is FinishReason.DEADLINE  # and so the first one's has passed as well
                assert engine.request_info("name") is not None
            assert [token.finish_reason async for token in kept] == [None, None, FinishReason.MAX_TOKENS]

    @pytest.mark.parametrize("timeout", [20, 1e300])
    async def test_it_is_left_to_the_step_thread_once_that_has_the_request(self, timeout: float) -> None:
        async with OracleEngine() as engine:
            completion = await engine.generate(PROMPT, some(1), timeout=timeout)
            assert completion.finish_reason is FinishReason.MAX_TOKENS
            assert not engine._registry._preparations
