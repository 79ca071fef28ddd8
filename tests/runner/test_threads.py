"""The number of threads of one engine is its own."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest
import torch

from aengine import AsyncEngine, SamplingParams
from aengine.runner import model_plan
from aengine.runner.torch.device import set_thread_count


def numbers() -> list[int]:
    """What torch, OpenMP and, where there is one, MKL say of the thread that asks."""
    libraries = re.findall(r"(?:omp|mkl)_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())
    assert libraries
    return [torch.get_num_threads(), *map(int, libraries)]


def in_a_new_thread(work: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("set_before", [False, True])
def test_a_thread_has_its_own_number(set_before: bool) -> None:
    """Also where the host has chosen one, which torch gives to MKL in each thread."""

    def host() -> tuple[list[int], list[int], list[int]]:
        before = torch.get_num_threads()
        if set_before:
            torch.set_num_threads(before)

        def step() -> list[int]:
            set_thread_count(before + 2)
            torch.exp(torch.randn(300, 300)) @ torch.randn(300, 300)
            return numbers()

        return numbers(), in_a_new_thread(step), in_a_new_thread(numbers)

    own, step, later = in_a_new_thread(host)
    assert step == [own[0] + 2] * len(own)
    assert later == own


async def seen_by_steps(engine: AsyncEngine) -> tuple[int, int]:
    """The threads that torch takes in the step thread, and those of the kernels."""
    seen: list[int] = []

    def processor(tokens: object, logits: Any) -> Any:
        seen.append(torch.get_num_threads())
        return logits

    await engine.generate([1], SamplingParams(max_tokens=1, logits_processors=(processor,)))
    runner: Any = engine._core.serving.model.runner
    return seen[0], runner._executor._model.workspace.threads


def test_engines_leave_each_other_and_their_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        options = {"kv_cache_memory": 16 << 20}
        async with AsyncEngine("demo", threads=before + 2, **options) as many, AsyncEngine("demo", threads=before + 1, **options) as fewer:
            assert await seen_by_steps(many) == (before + 2,) * 2
            monkeypatch.setattr(model_plan, "SINGLE_THREAD_PARAMETERS", 0)  # so that it takes torch's number
            async with AsyncEngine("demo", **options) as default:
                assert await seen_by_steps(default) == (before,) * 2
            assert await seen_by_steps(fewer) == (before + 1,) * 2
            assert await seen_by_steps(many) == (before + 2,) * 2

    before, own = torch.get_num_threads(), numbers()
    asyncio.run(run())
    assert numbers() == own
    assert in_a_new_thread(numbers) == own
