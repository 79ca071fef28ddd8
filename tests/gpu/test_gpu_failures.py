"""What fails in an engine on a device, what goes on, and what is left: steps without memory, errors of CUDA, engines that end."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_backends import backend_param
from hang_guard import HANG_SECONDS

from aengine import AsyncEngine, EngineDeadError, SamplingParams
from aengine.api.errors import InsufficientMemoryError
from aengine.runner.torch.executor import TorchExecutor

CPU, TRITON = pytest.param("torch_native", id="cpu"), backend_param("triton", id="triton")
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory": 8 << 20}


def make_engine(backend: str, **options: Any) -> AsyncEngine:
    device = "cpu" if backend == "torch_native" else "cuda"
    return AsyncEngine("demo", device=device, attention_backend=backend, **{**SETTINGS, **options})


def params(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.7 * (index % 2), seed=index, max_tokens=12, ignore_eos=True)


def fail_once(engine: AsyncEngine, after: int, fail: Callable[[Any], None]) -> Any:
    """Instead of launching the step behind so many. Returns the executor."""
    executor: Any = engine._core.serving.model.runner._executor  # type: ignore[attr-defined]
    launch, steps = executor.launch, iter(range(10**9))

    def launch_or_fail(step: Any) -> Any:
        if next(steps) == after:
            fail(executor)
        return launch(step)

    executor.launch = launch_or_fail
    return executor


def use_too_much(executor: Any) -> None:
    device = executor._setup.device
    if device.type == "cpu":  # whose allocator raises another error
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB. Including non-PyTorch memory, this process has")
    torch.empty(1 << 50, dtype=torch.uint8, device=device)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [CPU, TRITON])
def test_a_step_that_does_not_fit_fails_its_requests_alone(backend: str) -> None:
    async def main() -> None:
        async with make_engine(backend) as engine:
            expected = [await engine.generate(PROMPT, params(index)) for index in range(8)]
            fail_once(engine, 5, use_too_much)
            found = await asyncio.gather(*(engine.generate(PROMPT, params(index)) for index in range(8)), return_exceptions=True)
            failed = [one for one in found if isinstance(one, BaseException)]
            assert 0 < len(failed) <= 4
            for error in failed:
                assert isinstance(error, InsufficientMemoryError)
                assert str(error).startswith("the step does not fit into memory: CUDA out of memory. Tried to allocate")
                assert "PyTorch" not in str(error)
            again = await asyncio.gather(*(engine.generate(PROMPT, params(index)) for index in range(8)))
            for index, one in enumerate(expected):
                assert again[index].token_ids == one.token_ids
                assert found[index] in failed or found[index].token_ids == one.token_ids  # type: ignore[union-attr]
            assert engine.stats().pages_used == 0

    asyncio.run(main())


@pytest.mark.parametrize("backend", [CPU, TRITON])
def test_an_engine_that_died_holds_no_weights(backend: str) -> None:
    """Whoever keeps it, or its error; another one can be started."""

    def fail(executor: Any) -> None:
        weights = executor._model.model.weights  # which the error refers to, since it refers to this frame
        raise RuntimeError(f"the device does not answer, with {len(weights)} weights")

    async def main() -> None:
        engine = make_engine(backend)
        async with engine:
            executor = fail_once(engine, 3, fail)
            alive = list(map(weakref.ref, executor._model.model.weights))
            del executor
            with pytest.raises(EngineDeadError, match="the device does not answer") as caught:
                await engine.generate(PROMPT, params(0))
        gc.collect()
        assert alive
        assert not any(weight() is not None for weight in alive)
        assert isinstance(caught.value.__cause__, RuntimeError)
        async with make_engine(backend) as engine:
            assert len((await engine.generate(PROMPT, params(0))).token_ids) == 12

    asyncio.run(main())


@pytest.mark.parametrize("backend", [pytest.param("torch_native", id="cpu", marks=pytest.mark.slow), TRITON])
def test_engines_beside_each_other(backend: str) -> None:
    """One is loaded, and records its graphs, while another one computes."""

    async def texts(engine: AsyncEngine) -> list[str]:
        return [one.text for one in await asyncio.gather(*(engine.generate(PROMPT, params(index)) for index in range(4)))]

    async def main() -> None:
        async with make_engine(backend) as first:
            expected = await texts(first)

            async def go_on() -> None:
                while not second.healthy:
                    assert await texts(first) == expected

            second = make_engine(backend, max_num_seqs=24)
            await asyncio.gather(second.start(), go_on())
            assert await asyncio.gather(texts(first), texts(second)) == [expected, expected]
            await second.aclose()
            assert await texts(first) == expected

    asyncio.run(main())


@pytest.mark.parametrize("backend", [TRITON])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_an_engine_that_is_closed_gives_its_memory_back(backend: str, eager: bool) -> None:
    """All but what libraries keep for its stream, which are tens of megabytes."""

    async def main() -> tuple[int, int]:
        async with make_engine(backend, eager=eager, kv_cache_memory=256 << 20, max_model_len=1024, max_num_seqs=64) as engine:
            await engine.generate(PROMPT, params(0))
            return used()

    def used() -> tuple[int, int]:
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    gc.collect()
    torch.cuda.empty_cache()
    before, during, after = used(), asyncio.run(main()), used()
    for at_first, meanwhile, at_last in zip(before, during, after, strict=True):
        assert meanwhile - at_first > 240 << 20
        assert at_last - at_first < 100 << 20


@pytest.mark.parametrize("backend", [TRITON])
def test_a_model_that_does_not_fit_says_so_and_leaves_no_memory(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = make_engine(backend)
        with pytest.raises(InsufficientMemoryError, match="CUDA out of memory") as caught:
            await engine.start()
        assert torch.cuda.memory_allocated() - before < 8 << 20  # of 18 MB of weights
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        await engine.aclose()

    gc.collect()
    before = torch.cuda.memory_allocated()
    monkeypatch.setattr(TorchExecutor, "allocate", lambda executor, *given: use_too_much(executor))
    asyncio.run(main())


SCRIPT = """
import asyncio, json, os, torch
from aengine import AsyncEngine, EngineDeadError, SamplingParams

async def main():
    engine = AsyncEngine("demo", device="cuda", attention_backend="triton", dtype="float32", eager=True, kv_cache_memory=8 << 20)
    await engine.start()
    executor = engine._core.serving.model.runner._executor
    launch = executor.launch

    def launch_and_break(step):
        flight = launch(step)
        with executor._stream.enter_stream():
            torch._assert_async(torch.zeros(1, device=executor._setup.device))
        return flight

    executor.launch = launch_and_break
    try:
        await engine.generate("It is", SamplingParams(max_tokens=30, ignore_eos=True))
    except EngineDeadError as error:
        cause = type(error.__cause__).__name__ + ": " + str(error.__cause__)
    await engine.aclose()
    print(json.dumps({"cause": cause, "healthy": engine.healthy}), flush=True)

asyncio.run(main())
os._exit(0)  # the context of CUDA is lost, and so is what libraries release at the end
"""


@pytest.mark.parametrize("backend", [TRITON])
def test_an_error_of_a_kernel_ends_the_engine_with_its_cause(backend: str) -> None:
    """In a process of its own, in which nothing on the device works afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert "device-side assert" in told["cause"]
    assert not told["healthy"]
