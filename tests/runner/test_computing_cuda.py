"""Tests of a GPU on a device that is executed from PTX, in processes of their own."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
from ahead_of_time import compiling_environment
from slow_cases import NOT_IN_CI
from triton_mode import INTERPRETED

pytestmark = [pytest.mark.skipif(not INTERPRETED, reason="the tests run on the device where there is CUDA"), pytest.mark.slow]
_ROOT = pathlib.Path(__file__).parents[2]


def run_on_device(*command: str) -> str:
    environment = compiling_environment(str(pathlib.Path(__file__).parent)) | {"AENGINE_EXECUTE_PTX": "1"}
    done = subprocess.run([sys.executable, *command], cwd=_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["opt", "qwen3.5", "qwen3-moe", "lfm2", "jamba", "kimi-linear"])
@NOT_IN_CI
def test_a_family_against_transformers(name: str) -> None:
    """Greedy tokens and logits, with graphs and without."""
    test = f"tests/models/test_triton_families.py::test_on_a_gpu[{name}-cuda]"
    assert "1 passed" in run_on_device("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", test)


@NOT_IN_CI
def test_batch_invariant_numerics() -> None:
    test = "tests/models/test_triton_families.py::test_batch_invariant_numerics"
    assert "4 passed" in run_on_device("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", test)


@pytest.mark.skipif(not (find_spec("flashinfer") and shutil.which("nvcc")), reason="needs FlashInfer and nvcc")
def test_flashinfer_against_torch() -> None:
    """Steps of decodes and chunks, rows that are split, and graphs."""
    names = "ragged_steps and (mixed or decode or prefill or one_KV) or long_rows or graphs and plain"
    test = "tests/attention/test_flashinfer_gpu.py"
    options = "-q", "-m", "gpu", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=0"
    assert " passed" in run_on_device("-m", "pytest", *options, "-k", names, test)


_ENGINE = """
import asyncio
from computing_cuda import ComputingCuda
from aengine import AsyncEngine, SamplingParams

prompts = ["It is a truth", "The", "In a hole in the ground"]

async def texts(device):
    options = dict(dtype="float32", max_num_seqs=4, max_num_batched_tokens=16, graph_sizes=(1, 4), graph_tokens=16, kv_cache_memory=2 << 20)
    backend = "triton" if device == "cuda" else "torch_native"
    async with AsyncEngine("demo", device=device, attention_backend=backend, **options) as engine:
        assert engine.model_info.device.startswith(device)
        params = [SamplingParams(temperature=0.8 * (at % 2), seed=at, max_tokens=3 + 2 * at, ignore_eos=True) for at in range(3)]
        return [one.token_ids for one in await asyncio.gather(*map(engine.generate, prompts, params))]

expected = asyncio.run(texts("cpu"))
device = ComputingCuda()
with device.in_all_threads():
    found = asyncio.run(texts("cuda"))
assert found == expected, (found, expected)
print(device.replays, sorted(kernel.name for kernel, _ in device.kernels.executed.values()))
"""


@NOT_IN_CI
def test_an_engine_in_its_own_thread() -> None:
    """Its streams, of which one is drawn, are those of the same model on the CPU."""
    replays, kernels = run_on_device("-c", _ENGINE).split(" ", 1)
    assert int(replays) > 3
    assert all(name in kernels for name in ("decode_kernel", "prefill_kernel", "_draw_from_likeliest"))


_HAZARDS = """
import torch
from computing_cuda import ComputingCuda

with ComputingCuda().active():
    host = torch.ones(4, pin_memory=True)
    device = host.to("cuda", non_blocking=True)
    host.fill_(2.0)  # before it was copied
    back, event = torch.zeros(4, pin_memory=True), torch.cuda.Event()
    back.copy_(device, non_blocking=True)
    event.record()
    early = back.tolist()  # before the event
    event.synchronize()
    print(early, back.tolist())
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    graph.capture_begin()
    y = x + 1
    x.add_(10)
    graph.capture_end()
    graph.replay()
    graph.replay()
    print(x.tolist(), y.tolist())
"""


def test_the_device_is_as_late_as_it_may_be() -> None:
    assert run_on_device("-c", _HAZARDS).splitlines() == [
        f"{[0.0] * 4} {[2.0] * 4}",
        f"{[20.0] * 4} {[11.0] * 4}",
    ]
