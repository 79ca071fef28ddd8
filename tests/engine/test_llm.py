"""`LLM`: an engine that is called without an event loop, from any thread."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hang_guard import HANG_SECONDS
from slow_cases import NOT_IN_CI

from aengine import LLM, AsyncEngine, Completion, EngineStateError, FinishReason, InvalidRequestError, ModelLoadError, SamplingParams
from aengine.api.engine import EngineBase

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(ignore_eos=True, temperature=0.0)
PROMPTS = ["It is a truth", "universally acknowledged", [5, 6, 7], "that a single man"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_num_seqs=8, kv_cache_memory="32MiB") as llm:
        yield llm


def running(llm: LLM) -> int:
    async def ask(engine: EngineBase) -> int:
        assert isinstance(engine, AsyncEngine)
        return engine.stats().running + engine.stats().waiting + engine.stats().parked

    return llm.call(ask)


def wait_until_idle(llm: LLM) -> None:
    for _ in range(100_000):
        if not running(llm):
            return
    raise AssertionError("requests still run")


def test_it_gives_what_the_engine_gives(llm: LLM) -> None:
    async def expected() -> list[tuple[int, ...]]:
        async with AsyncEngine("demo", max_num_seqs=8, kv_cache_memory="32MiB") as engine:
            return [(await engine.generate(prompt, GREEDY)).token_ids for prompt in PROMPTS]

    tokens = asyncio.run(expected())
    assert [each.token_ids for each in llm.generate(PROMPTS, GREEDY)] == tokens
    assert [llm.generate(prompt, GREEDY).token_ids for prompt in PROMPTS] == tokens
    assert [tuple(token.token_id for token in llm.stream(prompt, GREEDY)) for prompt in PROMPTS] == tokens
    several = llm.generate(PROMPTS[:2], [SamplingParams(max_tokens=3, temperature=0.0), GREEDY])
    assert [each.token_ids for each in several] == [tokens[0][:3], tokens[1]]
    assert llm.generate([], GREEDY) == []
    assert llm.model_info.max_model_len > 0


@pytest.mark.slow
@NOT_IN_CI
def test_more_than_wait_in_the_queue(llm: LLM) -> None:
    outputs = llm.generate([[5 + i % 90, 7] for i in range(5000)], SamplingParams(max_tokens=1, temperature=0.0))
    assert len(outputs) == 5000
    assert outputs[0].token_ids == outputs[90].token_ids
    many = llm.generate([[5 + i] for i in range(50)], SamplingParams(max_tokens=1, n=128))
    assert [len(each.others) for each in many] == [127] * 50


def test_chats_and_embeddings(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hello"}]
    one = llm.chat(chat, GREEDY)
    assert isinstance(one, Completion)
    two = llm.chat([chat, [*chat, {"role": "assistant", "content": "you"}, *chat]], GREEDY)
    assert isinstance(two, list)
    assert two[0].token_ids == one.token_ids
    assert two[1].usage.prompt_tokens > one.usage.prompt_tokens
    assert [each.num_tokens for each in llm.embed([[5, 6], [7]])] == [2, 1]
    assert llm.embed("hello").values.shape == (llm.model_info.hidden_size,)


def test_the_first_failure_cancels_the_others(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="token id 99999999"):
        llm.generate([[5], [6], [99999999]], ENDLESS)
    wait_until_idle(llm)
    with pytest.raises(InvalidRequestError, match="params: there are 1 of them for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequestError, match="request_id"):
        llm.generate(["a", "b"], GREEDY, request_id="one")
    with pytest.raises(TypeError, match="options"):
        LLM(AsyncEngine("demo"), dtype="float32")


def test_streams_that_are_left(llm: LLM) -> None:
    with llm.stream("It is", ENDLESS) as stream:
        begun = [next(stream).token_id for _ in range(3)]
        assert stream.usage.completion_tokens >= 3
        assert stream.request_id
    wait_until_idle(llm)
    dropped = llm.stream("It is", ENDLESS)
    assert next(dropped).token_id == begun[0]
    del dropped
    wait_until_idle(llm)
    stream = llm.stream("It is", GREEDY)
    assert next(stream).token_id == begun[0]
    assert stream.completion() == llm.generate("It is", GREEDY)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_cancels_what_runs(llm: LLM) -> None:
    """Ctrl-C, while the main thread waits; the engine goes on."""

    def interrupt() -> None:
        while running(llm) < 1:
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    async def pause(engine: EngineBase) -> None:
        assert isinstance(engine, AsyncEngine)
        await engine.pause()

    async def unpause(engine: EngineBase) -> None:
        assert isinstance(engine, AsyncEngine)
        await engine.unpause()

    for call in (lambda: llm.generate(["It is"] * 20, GREEDY), lambda: [*llm.stream("It is", GREEDY)]):
        llm.call(pause)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        thread.join()
        wait_until_idle(llm)
        llm.call(unpause)
    assert len(llm.generate("It is", GREEDY).token_ids) == 12


def test_several_threads(llm: LLM) -> None:
    found: list[tuple[int, ...]] = []
    threads = [threading.Thread(target=lambda: found.append(llm.generate("It is", GREEDY).token_ids)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert found == [llm.generate("It is", GREEDY).token_ids] * 16


def test_the_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["It is"] * 3, GREEDY)
    assert not capsys.readouterr().err
    llm.generate(["It is"] * 3, GREEDY, progress=True)
    assert "3/3" in (shown := capsys.readouterr().err)
    assert "tok/s" in shown


def test_a_completion_in_a_notebook(llm: LLM) -> None:
    output = llm.generate([10, 20], SamplingParams(max_tokens=5, temperature=0.0, logprobs=0, ignore_eos=True))
    assert "".join(output.token_texts) == output.text
    shown = output._repr_html_()
    assert shown.count("probability") == 5
    assert "2 + 5 tokens" in shown
    assert "probability" not in (plain := llm.generate("<b>", GREEDY))._repr_html_()
    assert "<b>" not in plain._repr_html_()


def test_it_ends_once_and_refuses_then() -> None:
    llm = LLM("demo", kv_cache_memory="8MiB")
    stream = llm.stream("It is", ENDLESS)

    async def inside(engine: EngineBase) -> None:
        with pytest.raises(EngineStateError, match="own event loop"):
            llm.generate("a")

    llm.call(inside)
    with stream:
        llm.close()
    llm.close()
    for call in (lambda: llm.generate("a"), lambda: llm.stream("a"), lambda: next(stream)):
        with pytest.raises(EngineStateError, match="closed"):
            call()
    with pytest.raises(ModelLoadError):
        LLM("/nowhere/at/all")


def test_calls_that_run_when_it_ends_are_told() -> None:
    """Whatever they had got to: none waits for ever."""
    llm = LLM("demo", kv_cache_memory="8MiB")
    ends: list[str] = []

    def call() -> None:
        try:
            while True:
                llm.call(lambda engine: engine.tokenize("text"))
                if llm.generate("It is", SamplingParams(max_tokens=3)).finish_reason is FinishReason.CANCELLED:
                    ends.append("cancelled")
                    return
        except EngineStateError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    llm.generate("It is", GREEDY)
    llm.close()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert len(ends) == 8


def test_it_may_be_collected_in_its_own_thread() -> None:
    """Where no reference is left but in a cycle, the thread that happens to collect it ends it."""
    llm = LLM("demo", kv_cache_memory="8MiB")
    held, threads = [llm], [each for each in threading.enumerate() if each.name == "aengine-llm"]
    del llm

    async def drop(engine: EngineBase) -> None:
        held.clear()

    ends = held[0]._end
    asyncio.run_coroutine_threadsafe(drop(held[0]._engine), held[0]._loop._loop).result(HANG_SECONDS)
    assert not ends.alive
    threads[-1].join(HANG_SECONDS)
    assert not threads[-1].is_alive()


@pytest.mark.slow
def test_a_program_may_end_while_a_stream_runs() -> None:
    code = (
        "from aengine import LLM, SamplingParams; llm = LLM('demo'); s = llm.stream('It', SamplingParams(ignore_eos=True)); print(next(s))"
    )
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS)
        assert (done.returncode, done.stderr) == (0, "")
