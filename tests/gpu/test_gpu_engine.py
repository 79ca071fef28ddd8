"""`AsyncEngine` on a device: streams beside each other, streams that are left, and that nothing is kept afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aengine import AsyncEngine, FinishReason, SamplingParams

pytestmark = pytest.mark.slow

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")], id="cuda"
)
SETTINGS: dict[str, Any] = {"max_num_seqs": 16, "kv_cache_memory": 4 << 20, "max_num_batched_tokens": 64}
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"


def holds_nothing(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return (stats.running, stats.waiting, stats.parked, stats.pages_used) == (0, 0, 0, 0)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_streams_and_cancellations_leave_nothing(device: str, eager: bool) -> None:
    async def read(engine: AsyncEngine, index: int) -> tuple[int, FinishReason | None]:
        """Every third is left in the middle, and every third cancelled by its id."""
        params = SamplingParams(temperature=0.0 if index % 2 else 0.8, seed=index, max_tokens=20 + index, ignore_eos=True)
        count, reason = 0, None
        async with engine.stream(PROMPT[: 10 + 2 * index], params, request_id=f"request-{index}") as stream:
            async for token in stream:
                count += token.token_id >= 0
                reason = token.finish_reason
                if count == 10 and index % 3 == 1:
                    break
                if count == 10 and index % 3 == 2:
                    await engine.cancel(f"request-{index}")
        return count, reason

    async def main() -> None:
        async with AsyncEngine("demo", device=device, eager=eager, **SETTINGS) as engine:
            assert engine.model_info.device.startswith(device)
            for _ in range(2):  # the second time prompts are found in the prefix cache
                ends = await asyncio.gather(*(read(engine, index) for index in range(40)))
                for index, (count, reason) in enumerate(ends):
                    match index % 3:
                        case 0:
                            assert (count, reason) == (20 + index, FinishReason.MAX_TOKENS)
                        case 1:
                            assert (count, reason) == (10, None)
                        case _:
                            assert count >= 10
                            assert reason in (FinishReason.CANCELLED, FinishReason.MAX_TOKENS)
                assert holds_nothing(engine)
            assert engine.stats().cached_prompt_tokens > 0
            await engine.flush_cache()
            assert engine.stats().cached_tokens == 0

    asyncio.run(main())


@pytest.mark.parametrize("speculative", ["ngram", "draft"])
@pytest.mark.parametrize("device", [CUDA])
def test_speculation_changes_no_stream(device: str, speculative: str) -> None:
    """In float32, where the width of a step hardly changes a token. The demo model is its own draft model."""

    async def texts(**options: Any) -> list[str]:
        settings = {"dtype": "float32", "max_num_seqs": 16, "kv_cache_memory": 8 << 20, **options}
        async with AsyncEngine("demo", device=device, **settings) as engine:
            params = [SamplingParams(temperature=0.7 * (seed % 2), seed=seed, max_tokens=60, ignore_eos=True) for seed in range(8)]
            found = await asyncio.gather(*(engine.generate(PROMPT * 3, each) for each in params))
            assert (engine.stats().draft_tokens > 0) is bool(options)
            return [one.text for one in found]

    model = {"speculative_model": "demo"} if speculative == "draft" else {}
    assert asyncio.run(texts(speculative=speculative, **model)) == asyncio.run(texts())


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_seeded_stream_is_the_same_alone_and_in_a_crowd(device: str) -> None:
    """In float32, where what a row gets hardly depends on the rows beside it; the noise does not depend on them at all."""

    async def main() -> None:
        async with AsyncEngine("demo", device=device, dtype="float32", max_num_seqs=16, kv_cache_memory=8 << 20) as engine:
            params = SamplingParams(temperature=0.8, seed=7, max_tokens=32, ignore_eos=True)
            alone = await engine.generate(PROMPT, params)
            others = [SamplingParams(temperature=1.0, seed=seed, max_tokens=10 + 5 * seed, ignore_eos=True) for seed in range(12)]
            crowd = await asyncio.gather(
                engine.generate(PROMPT, params), *(engine.generate(PROMPT[: 9 + i], p) for i, p in enumerate(others))
            )
            assert crowd[0].token_ids == alone.token_ids
            assert holds_nothing(engine)

    asyncio.run(main())
