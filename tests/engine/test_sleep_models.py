"""Models that sleep: the same tokens as undisturbed, and memory that is really given back."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from every_draft import use_every_draft
from oracle_engine import until
from slow_cases import slow_but

from aengine import AsyncEngine, SamplingParams

pytestmark = pytest.mark.anyio
SIZES = {"page_size": 4, "max_num_seqs": 24, "max_num_batched_tokens": 64, "dtype": "float32"}
KINDS: dict[str, dict[str, Any]] = {
    "kernels": {"kv_cache_memory": 6 << 20},  # requests are preempted
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8", "dtype": "bfloat16"},
    "draft": {"speculative": "draft", "speculative_model": "demo"},
    "torch": {"attention_backend": "torch_native"},
    "torch-draft": {"attention_backend": "torch_native", "speculative": "draft", "speculative_model": "demo"},
    "fallback": {"model_impl": "transformers"},
    "ranks": {"tensor_parallel_size": 2},
    "torch-ranks": {"tensor_parallel_size": 2, "attention_backend": "torch_native"},
    "stages": {"pipeline_parallel_size": 2},
}
CASES = [
    *slow_but([("kernels", 40, 3), ("torch", 16, 3)], [(kind, 40, 3) if kind != "torch" else (kind, 16, 3) for kind in KINDS]),
    *slow_but([], [("kernels", 200, 10), ("torch", 200, 10)]),
]


def params_of(seed: int) -> SamplingParams:
    processed = {"repetition_penalty": 1.2} if seed % 4 == 3 else {}
    return SamplingParams(seed=seed, temperature=(0.0, 0.9)[seed % 2], max_tokens=8 + seed % 17, ignore_eos=True, **processed)


async def outputs(engine: AsyncEngine, count: int, sleeps: int = 0) -> list[tuple[int, ...]]:
    """Of so many streams, during which the engine sleeps now and then."""
    found: list[tuple[int, ...]] = [()] * count

    async def run(seed: int) -> None:
        found[seed] = (await engine.generate([5 + seed % 7] * (1 + 3 * seed % 40), params_of(seed))).token_ids

    async with anyio.create_task_group() as group:
        for seed in range(count):
            group.start_soon(run, seed)
        for _ in range(sleeps):
            enough = engine.stats().completion_tokens + 12 * count // sleeps
            await until(lambda enough=enough: engine.stats().completion_tokens >= enough or all(found))  # type: ignore[misc]
            await engine.sleep()
            assert engine.stats().sleep_level == 1
            await engine.wake()
    return found


@pytest.mark.parametrize(("kind", "count", "sleeps"), CASES)
async def test_tokens_are_the_same(kind: str, count: int, sleeps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**SIZES, **KINDS[kind]}
    if "draft" in kind:
        use_every_draft(monkeypatch)
    async with AsyncEngine("demo", **options) as engine:
        expected = await outputs(engine, count)
        await engine.flush_cache()
        assert await outputs(engine, count, sleeps) == expected
