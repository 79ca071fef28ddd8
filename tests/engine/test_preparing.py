"""What a request may do and cost before the step thread hears of it: its text is tokenized, its grammar compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
from hang_guard import HANG_SECONDS
from oracle_engine import OracleEngine, busy_worker, idle, until
from tokenizers import Regex, pre_tokenizers

from aengine import ContextLengthError, EngineStateError, FinishReason, InvalidRequestError, KVCapacityError, SamplingParams
from aengine.api.outputs import RequestState
from aengine.api.params import StructuredOutput
from aengine.engine import requests
from aengine.tokenizer import tokenizer
from aengine.tokenizer.tokenizer import PIECE_CHARACTERS

pytestmark = pytest.mark.anyio

PROMPT = [1, 2, 3]
SHORT = 0.05  # seconds


@pytest.fixture(autouse=True)
def _every_prompt_is_read_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "INLINE_ENTRIES", 1)
    monkeypatch.setattr(requests, "INLINE_CHARACTERS", 0)


def some(count: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=count, ignore_eos=True)


class TestDeadline:
    @pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
    async def test_it_ends_what_is_being_prepared(self, is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        async with OracleEngine() as engine:
            submitted: list[Future[Any]] = []
            submit = engine._core.workers.submit

            def noted(*work: Any) -> Future[Any]:
                submitted.append(submit(*work))
                return submitted[-1]

            monkeypatch.setattr(engine._core.workers, "submit", noted)
            with busy_worker(engine):
                stream = engine.stream(PROMPT, SamplingParams(n=2), timeout=SHORT, request_id="name")
                assert engine.request_info("name").state is RequestState.PREPARING  # type: ignore[union-attr]
                assert engine.stats().waiting == 2
                work = submitted[-1]
                if is_read:
                    await stream.started()
                    ends = [(token.index, token.token_id, token.finish_reason) async for token in stream]
                    assert ends == [(0, -1, FinishReason.DEADLINE), (1, -1, FinishReason.DEADLINE)]
                else:
                    await until(lambda: engine.request_info("name") is None)
                assert stream.info().state is RequestState.FINISHED
                assert engine.stats().waiting == 0
                assert work.cancelled(), "and never begun"
            assert idle(engine)

    async def test_it_ends_what_waits_for_a_grammar(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compiling: list[Future[Any]] = []

        def compile_for_ever(wanted: StructuredOutput) -> Future[Any]:
            compiling.append(Future())
            return compiling[-1]

        params = SamplingParams(structured_output=StructuredOutput(regex="a"))
        async with OracleEngine() as engine:
            monkeypatch.setattr(engine._core.serving.registry._grammars, "compile", compile_for_ever)
            late = engine.stream([1], params, timeout=SHORT)
            cancelled = engine.stream([1], params, timeout=HANG_SECONDS)
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
            assert not engine._core.serving.registry._preparations


class TestLongTexts:
    """The oracle has a context of 400 tokens, and the tokenizer of the bundled model."""

    @staticmethod
    @contextmanager
    def encoded(engine: OracleEngine) -> Iterator[list[int]]:
        """The lengths of the texts that the library is given."""
        lengths: list[int] = []
        codec = engine.tokenizer._codec
        encode = codec.encode

        def noted(text: str, add_special_tokens: bool) -> list[int]:
            lengths.append(len(text))
            return encode(text, add_special_tokens)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "encode", noted)
            yield lengths

    async def test_what_has_more_bytes_than_fit_is_not_tokenized(self) -> None:
        async with OracleEngine() as engine:
            for text, at_least in ((" " * 10_500_000, 164_063), ("é" * 5_000_000, 156_250), ("a b " * 20_000, 1250)):
                with self.encoded(engine) as lengths:
                    stream = engine.stream(text, timeout=HANG_SECONDS)
                    with pytest.raises(
                        ContextLengthError, match=rf"prompt: {at_least} tokens or more, for \d+ bytes of text, leave"
                    ) as caught:
                        await stream.started()
                assert (caught.value.limit, caught.value.got) == (400, at_least + 1)
                assert not lengths
            assert idle(engine)

    async def test_what_has_too_many_tokens_is_tokenized_no_further_than_that(self) -> None:
        async with OracleEngine(num_pages=50) as engine:
            with self.encoded(engine) as lengths, pytest.raises(ContextLengthError, match=r"prompt: \d+ tokens or more leave"):
                await engine.stream("a b " * 5000).started()
            assert lengths == [PIECE_CHARACTERS]
            with self.encoded(engine) as lengths, pytest.raises(ContextLengthError, match=r"prompt: \d+ tokens or more leave"):
                await engine.tokenize("a b " * 5000, for_prompt=True)
            assert lengths == [PIECE_CHARACTERS]
            assert len(await engine.tokenize("a b " * 5000)) > 5000
        async with OracleEngine(num_pages=51) as engine:
            with pytest.raises(KVCapacityError, match=r"prompt: 300 tokens leave no room for a new one in the KV cache of 200 tokens"):
                await engine.stream("!" * 300).started()
            asked = SamplingParams(max_tokens=205, seed=3, ignore_eos=True)
            with pytest.raises(KVCapacityError, match=r"max_tokens: 205 beside a prompt of 190 tokens"):
                await engine.generate([1] * 190, asked)
            clamped = await engine.generate([1] * 190, replace(asked, clamp_max_tokens=True))
            assert (len(clamped.token_ids), clamped.finish_reason) == (10, FinishReason.CONTEXT_LENGTH)

    async def test_what_is_cancelled_is_tokenized_no_further(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 10)
        async with OracleEngine() as engine:
            with self.encoded(engine) as lengths:
                cancelled = threading.Event()
                begun = threading.Event()
                encode = engine.tokenizer._codec.encode

                def wait(text: str, add_special_tokens: bool) -> list[int]:
                    begun.set()
                    assert cancelled.wait(HANG_SECONDS)
                    return encode(text, add_special_tokens)

                monkeypatch.setattr(engine.tokenizer._codec, "encode", wait)
                stream = engine.stream("a b " * 500)
                await anyio.to_thread.run_sync(begun.wait, HANG_SECONDS)
                await stream.aclose()
                cancelled.set()
                with pytest.raises(InvalidRequestError, match="token id"):  # what is not the oracle's
                    await engine.stream("a").started()
            assert lengths == [10, 1]

    async def test_what_is_not_tokenized_at_the_end_of_the_engine(self) -> None:
        async with OracleEngine() as engine, anyio.create_task_group() as tasks:

            async def wait() -> None:
                with pytest.raises(EngineStateError, match="the engine is closed"):
                    await engine.tokenize("a")

            with busy_worker(engine, workers=engine._core.serving.texts._workers):
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await engine.aclose()

    async def test_a_panic_fails_its_request_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with OracleEngine() as engine:
            core = engine.tokenizer._codec._encode._words._core  # type: ignore[attr-defined]
            core.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?:a|aa)+b"), "isolated")  # with too many ways to fail
            for inline in (1, 1000):
                monkeypatch.setattr(requests, "INLINE_CHARACTERS", inline)
                with pytest.raises(InvalidRequestError, match="prompt: the model's tokenizer fails on this text"):
                    await engine.stream("a" * 40 + "cb").started()
            assert (await engine.generate(PROMPT, some(1))).finish_reason is FinishReason.MAX_TOKENS
            assert idle(engine)

    async def test_short_ones_do_not_wait_for_long_ones(self) -> None:
        async with OracleEngine() as engine:
            with busy_worker(engine, size=requests.QUICK_CHARACTERS + 1):
                long = engine.stream("a" * (requests.QUICK_CHARACTERS + 1))
                assert (await engine.generate(PROMPT, some(1))).finish_reason is FinishReason.MAX_TOKENS
                assert long.info().state is RequestState.PREPARING
            with pytest.raises(ContextLengthError):
                await long.started()

    async def test_a_chat_of_too_many_messages_is_refused_before_it_is_read(self) -> None:
        async with OracleEngine() as engine:
            with pytest.raises(InvalidRequestError, match="prompt: 4097 messages are more than 4096"):
                engine.stream([{"role": "user", "content": "a"}] * 4097)
