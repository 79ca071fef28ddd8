"""The torch decoder on two ranks, each with a device of its own: what it generates, and what comes of a rank that is killed or stopped."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal

import pytest
import torch
from attention_backends import backend_marks
from gpu_cases import BFLOAT16, FLOAT32, Case, save_small
from test_gpu_families import assert_generates

from aengine import AsyncEngine, EngineDeadError, SamplingParams
from aengine.api.errors import RankError
from aengine.models.loading.hub import resolve_model

TWO_DEVICES = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
CASES = [
    pytest.param(Case("cpu", "torch_native", "float32", FLOAT32, records=False), id="cpu", marks=pytest.mark.slow),
    pytest.param(Case("cuda", "torch_native", "float32", FLOAT32), id="float32", marks=TWO_DEVICES),
    pytest.param(Case("cuda", "triton", "bfloat16", BFLOAT16), id="graphs", marks=TWO_DEVICES),
    pytest.param(Case("cuda", "triton", "bfloat16", BFLOAT16, records=False), id="eager", marks=TWO_DEVICES),
    pytest.param(Case("cuda", "flashinfer", "bfloat16", BFLOAT16), id="flashinfer", marks=TWO_DEVICES + backend_marks("flashinfer")),
]
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=TWO_DEVICES)]
BACKENDS = {"cpu": "torch_native", "cuda": "triton"}


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_generate_what_transformers_would(case: Case, mode: str, tmp_path: pathlib.Path) -> None:
    model = save_small("qwen3", tmp_path, case.dtype)
    assert_generates(model, case.runner(tmp_path, tensor_parallel_size=2, tensor_parallel_mode=mode), case)


@pytest.mark.parametrize("case", CASES)
def test_two_stages_generate_what_transformers_would(case: Case, tmp_path: pathlib.Path) -> None:
    model = save_small("mistral-windowed", tmp_path, case.dtype)
    assert_generates(model, case.runner(tmp_path, pipeline_parallel_size=2), case)


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_sleep_and_take_new_weights(device: str) -> None:
    """Graphs are recorded again on all of them; drafts of a model that the first one has alone change nothing."""
    options = {"device": device, "attention_backend": BACKENDS[device], "dtype": "float32", "max_model_len": 1024}
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)

    async def main() -> None:
        async with AsyncEngine("demo", **options) as engine:
            expected = (await engine.generate("When", params)).token_ids
        drafts = {"speculative": "draft", "speculative_model": "demo"}
        async with AsyncEngine("demo", tensor_parallel_size=2, **drafts, **options) as engine:
            for level in (1, 2):
                assert (await engine.generate("When", params)).token_ids == expected
                await engine.sleep(level)
                await engine.wake()
            assert await engine.update_weights(str(resolve_model("demo"))) == 1
            assert (await engine.generate("When", params)).token_ids == expected

    asyncio.run(main())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("division", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_that_fails_is_named(device: str, division: str, how: signal.Signals) -> None:
    """Also while a kernel of this rank waits for it; another engine can use the devices afterwards."""
    options = {"device": device, "attention_backend": BACKENDS[device], "dtype": "float32", "max_model_len": 1024, division: 2}

    async def fail() -> None:
        async with AsyncEngine("demo", step_timeout=5.0, **options) as engine:
            stream = engine.stream("When", SamplingParams(max_tokens=1000, ignore_eos=True))
            await anext(stream)
            pid = await asyncio.to_thread(_follower)
            os.kill(pid, how)
            with pytest.raises(EngineDeadError) as caught:
                async for _ in stream:
                    pass
            if how is signal.SIGKILL:
                assert isinstance(caught.value.__cause__, RankError)
                assert caught.value.__cause__.rank == 1

    async def again() -> None:
        async with AsyncEngine("demo", **options) as engine:
            assert len((await engine.generate("When", SamplingParams(max_tokens=3, ignore_eos=True))).token_ids) == 3

    asyncio.run(fail())
    asyncio.run(again())


def _follower() -> int:
    """The process of the other rank."""
    children = [int(pid) for task in os.listdir("/proc/self/task") for pid in _children(task).split()]
    (pid,) = (pid for pid in children if b"aengine.runner.follower" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes())
    return pid


def _children(task: str) -> str:
    try:
        return pathlib.Path(f"/proc/self/task/{task}/children").read_text()
    except FileNotFoundError:  # the thread has ended
        return ""
