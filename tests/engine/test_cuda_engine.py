"""An engine on a CUDA device without numbers, from its start to its end: in which order things happen, in which threads, and what waits.

What comes of numbers is tested on a GPU: `tests/gpu`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import anyio
import pytest
import torch
from fake_cuda import FakeCuda
from triton_mode import INTERPRETED

from aengine import AsyncEngine, SamplingParams
from aengine.engine.step_thread import StepLoop
from aengine.models.loading.hub import resolve_model
from aengine.models.torch.decoder import Decoder
from aengine.runner.runner import ModelRunner

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(not INTERPRETED, reason="there is a device"), pytest.mark.slow]
PROMPT = "It is a truth universally acknowledged"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Active in the threads of engines that use a device."""
    fake, main, prepare = FakeCuda(), StepLoop._main, ModelRunner.prepare

    def main_on_device(loop: StepLoop) -> None:
        with fake.active():
            main(loop)

    def prepare_beside_device(runner: ModelRunner, change: Any) -> Any:
        with fake.in_this_thread():
            return prepare(runner, change)

    monkeypatch.setattr(StepLoop, "_main", main_on_device)
    monkeypatch.setattr(ModelRunner, "prepare", prepare_beside_device)
    monkeypatch.setattr(Decoder, "check_same_form", lambda *given: None)  # which takes a tensor without numbers for another kind
    return fake


def noting_threads(monkeypatch: pytest.MonkeyPatch, names: set[str]) -> None:
    """Of all threads that call functions which may wait for the driver of a device; and "pinned" once pinned memory was given back."""

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*given: Any, **named: Any) -> Any:
            names.add(threading.current_thread().name)
            return call(*given, **named)

        return wrapper

    active = FakeCuda.active

    def noted_as_pinned() -> None:
        names.add("pinned")

    @contextmanager
    def active_and_noted(fake: FakeCuda) -> Iterator[FakeCuda]:
        with active(fake), ExitStack() as stack:  # in this order, so that what is there at the end is what was there before
            for name in ("mem_get_info", "empty_cache", "memory_reserved", "current_stream", "is_available"):
                stack.enter_context(mock.patch.object(torch.cuda, name, noted(getattr(torch.cuda, name))))
            stack.enter_context(mock.patch.object(torch._C, "_host_emptyCache", noted_as_pinned, create=True))
            yield fake

    monkeypatch.setattr(FakeCuda, "active", active_and_noted)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_from_start_to_end(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    names: set[str] = set()
    noting_threads(monkeypatch, names)
    sizes = {"max_num_seqs": 4, "graph_sizes": (1, 4), "graph_tokens": 16}
    with caplog.at_level(logging.INFO, "aengine"):
        engine = AsyncEngine("demo", device="auto", attention_backend="triton", **sizes)
        await engine.start()
        assert (engine.model_info.device, engine.model_info.dtype) == ("cuda:0", "bfloat16")
        assert engine.engine_info.max_num_batched_tokens == 2048
        steps = [line.split(" in ")[0].split(":")[0] for line in caplog.messages if not line.startswith("loaded")]
        assert steps == [
            "attention backend",
            "layer ops",
            "recorded graphs of decode steps for 1..4 (2) sequences and of steps for 16..16 (1) tokens",
            "graphs are expected to take 0 bytes",
            "recorded graphs of decode steps for 1..4 (2) sequences and of steps for 16..16 (1) tokens",
            "every kind of step was tried",
            "Qwen3ForCausalLM",
            "demo",
        ]
        params = SamplingParams(max_tokens=6, ignore_eos=True)

        async def serve() -> None:
            fake.strict, replays = True, fake.replays
            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(engine.generate, PROMPT, params)
            fake.strict = False
            assert fake.replays > replays + 6

        await serve()
        for level in (1, 2):
            await engine.sleep(level)
            await engine.wake()
            await serve()
        assert await engine.update_weights(str(resolve_model("demo"))) == 1
        await serve()
        await engine.aclose()
    assert "aengine-step" in names
    assert "pinned" in names
    assert "MainThread" not in names
