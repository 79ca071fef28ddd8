"""Weights in memory that was committed before they were read."""

from __future__ import annotations

import pathlib

import pytest
from driver import Driver
from fresh_process import run_fresh

from aengine.api.config import EngineConfig
from aengine.kernels.warm_memory import WarmMemory
from aengine.models.loading.hub import resolve_model
from aengine.runner.cpu import packed_loading as module
from aengine.runner.cpu.executor import CpuExecutor
from aengine.runner.cpu.packed_loading import warm_weights
from aengine.runner.runner import ModelRunner

MIB = 1 << 20
SIZE = 80 * MIB


@pytest.fixture
def model_dir(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Weights of `SIZE` bytes on a machine without CUDA."""
    for number in range(2):
        with open(tmp_path / f"model-{number}.safetensors", "wb") as file:
            file.truncate(SIZE // 2)
    (tmp_path / "other.safetensors").write_bytes(b"1")
    monkeypatch.setattr(module, "CUDA_DEVICE", tmp_path / "nvidiactl")
    return tmp_path


def warm_size(model_dir: pathlib.Path, **settings) -> int | None:
    warm = warm_weights(EngineConfig(model=str(model_dir), **settings), model_dir)
    if warm is None:
        return None
    with warm:
        return len(warm._bytes)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, SIZE),
        ({"device": "cpu"}, SIZE),
        ({"quantization": "int8"}, SIZE // 2),
        ({"dtype": "float32"}, SIZE * 2),
        ({"device": "cuda"}, None),
        ({"load_format": "dummy"}, None),
        ({"attention_backend": "torch_native"}, None),
    ],
)
def test_its_size(model_dir: pathlib.Path, settings: dict[str, str], size: int | None) -> None:
    assert warm_size(model_dir, **settings) == size


def test_not_where_a_gpu_may_be_used(model_dir: pathlib.Path) -> None:
    (model_dir / "nvidiactl").touch()
    assert warm_size(model_dir) is None
    assert warm_size(model_dir, device="cpu") == SIZE


@pytest.mark.parametrize(("free", "size"), [(2 * SIZE, SIZE), (2 * SIZE - 2, None)])
def test_not_more_than_half_of_what_is_free(model_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, free: int, size: int | None) -> None:
    monkeypatch.setattr(module, "free_host_memory", lambda: free)
    assert warm_size(model_dir) == size


def test_not_for_small_weights(model_dir: pathlib.Path) -> None:
    (model_dir / "model-0.safetensors").write_bytes(b"1")
    (model_dir / "model-1.safetensors").write_bytes(b"1")
    assert warm_size(model_dir) is None


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("size", [1, 3 * MIB, 64 * MIB])
def test_the_tokens_are_the_same(size: int) -> None:
    path = resolve_model("demo")
    settings = EngineConfig(model="demo", device="cpu", dtype="bfloat16", kv_cache_memory=8 * MIB)
    prompt = list(range(20, 60))
    expected = Driver(ModelRunner(settings, path)).generate([prompt], 32)
    with WarmMemory(size) as warm:
        runner = ModelRunner(settings, path, warm=warm)
        in_use = warm._taken
    assert Driver(runner).generate([prompt], 32) == expected
    if isinstance(runner._executor, CpuExecutor):
        assert (in_use > 0) == (size > 1)


@pytest.mark.slow
def test_an_engine_warms_memory_from_its_start_on() -> None:
    code = """
        import gc, sys
        import anyio
        from aengine import AsyncEngine, SamplingParams
        from aengine.runner.cpu import packed_loading

        seen = []

        def spy(config, model_dir):
            assert "torch" not in sys.modules
            packed_loading._LEAST_WARM = 1
            seen.append(warm_weights(config, model_dir))
            return seen[-1]

        warm_weights, packed_loading.warm_weights = packed_loading.warm_weights, spy

        async def main():
            async with AsyncEngine("demo", device="cpu") as engine:
                warm = seen[0]
                assert not warm._thread.is_alive()
                assert len(warm._bytes) == 0  # what was left has been given back
                assert gc.isenabled()
                completion = await engine.generate("It was a", SamplingParams(temperature=0.0, max_tokens=8))
                assert completion.usage.completion_tokens == 8

        anyio.run(main)
    """
    run_fresh(code)
