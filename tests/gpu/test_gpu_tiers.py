"""KV that leaves the device and comes back: tokens are those of an engine that keeps everything, with pages in host memory and in files."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hybrid_cases import CASES

from aengine import AsyncEngine, Completion, SamplingParams
from aengine.engine.tier_traffic import TierTraffic

pytestmark = pytest.mark.slow

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")], id="cuda"
)
HYBRIDS = ("qwen3.5-heads", "falcon-h1", "lfm2")
PAGE = 4
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=2)
PROMPTS = [[5 + (number * 31 + place * (7 + number)) % 160 for place in range(60 + 7 * number)] for number in range(6)]


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the model computes."""
    monkeypatch.setattr(TierTraffic, "_is_worth", lambda *given: True)


async def together(engine: AsyncEngine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(list(prompt), GREEDY) for prompt in prompts)))


def assert_same(token_ids: Sequence[int], known: Completion) -> None:
    """Up to where the best two tokens are as good as equal: how rows are cut into steps changes roundings on a device."""
    assert known.logprobs is not None
    for token_id, logprob in zip(token_ids, known.logprobs, strict=True):
        assert logprob.top_logprobs is not None
        best, second = logprob.top_logprobs.values()
        if best - second < 1e-4:
            break
        assert token_id == logprob.token_id


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("model", ["demo", *HYBRIDS])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_kv_comes_back(device: str, model: str, eager: bool, tmp_path: pathlib.Path) -> None:
    """From host memory, from files after a restart, and to a fork of what was loaded."""
    path = model
    if model != "demo":
        path = str(tmp_path / model)
        next(case for case in CASES if case.name == model).make().save_pretrained(path)
    settings: dict[str, Any] = {"dtype": "float32", "device": device, "eager": eager, "page_size": PAGE, "max_num_seqs": 32}

    longer = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=2)

    async def main() -> None:
        async with AsyncEngine(path, kv_cache_memory=32 << 20, **settings) as engine:
            expected = await together(engine)
            alone = await engine.generate(PROMPTS[3], longer)
        files = {"kv_disk_path": str(tmp_path / "kv")}
        for number, options in enumerate(({"host_kv_memory": 64 << 20}, files, files)):
            async with AsyncEngine(path, kv_cache_memory=32 << 20, **settings, **options) as engine:
                for again in range(3):
                    outputs = await together(engine)
                    for prompt, output, known in zip(PROMPTS, outputs, expected, strict=True):
                        assert_same(output.token_ids, known)
                        if again or number == 2:
                            assert output.usage.loaded_prompt_tokens >= len(prompt) - 16 - PAGE
                    await engine.flush_cache()
                async with engine.stream(PROMPTS[3], longer) as stream:
                    begun = [(await stream.__anext__()).token_id for _ in range(10)]
                    rest = [token.token_id async for token in stream.fork()]
                assert_same((*begun, *rest), alone)
                assert engine.stats().pages_used == 0

    asyncio.run(main())
