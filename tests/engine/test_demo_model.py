"""The whole engine on the bundled model, against Transformers."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import anyio
import pytest
import reference
import torch
from oracle_engine import DEMO_DIR, idle
from slow_cases import slow_but

from aengine import AsyncEngine, FinishReason, InvalidRequestError, SamplingParams
from aengine.api.outputs import LayerGroup
from aengine.tokenizer.tokenizer import Tokenizer

NUM_PROMPTS, NUM_TOKENS = 20, 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Passages of 5 to 120 tokens out of the model's own card."""
    text = (Path(DEMO_DIR) / "MODEL_CARD.md").read_text()
    ids = Tokenizer.load(DEMO_DIR).encode(text[text.index("## Samples") :])
    rng = random.Random(0)
    starts = [rng.randrange(len(ids) - 120) for _ in range(NUM_PROMPTS)]
    return [ids[start : start + rng.choice([5, 16, 17, 40, 120])] for start in starts]


@pytest.fixture(scope="session")
def greedy(prompts: list[list[int]]) -> list[list[int]]:
    """What Transformers generates, up to the first end-of-sequence id."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32)
    ends = model.generation_config.eos_token_id
    outputs = reference.greedy(model, prompts, NUM_TOKENS)
    return [output[: next((i + 1 for i, token in enumerate(output) if token in ends), None)] for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    ("at_once", "options"),
    slow_but(
        lambda case: case[0] or not case[1],
        product(
            [False, True], [{}, {"page_size": 1}, {"page_size": 64}, {"max_num_seqs": 16, "max_num_batched_tokens": 16}, {"threads": 2}]
        ),
    ),
    ids=map("-".join, product(["alone", "at-once"], ["page-16", "page-1", "page-64", "chunks-of-16", "two-threads"])),
)
async def test_greedy_equals_transformers(
    prompts: list[list[int]], greedy: list[list[int]], options: dict[str, int], at_once: bool
) -> None:
    results: dict[int, tuple[int, ...]] = {}

    async def run(i: int) -> None:
        results[i] = (await engine.generate(prompts[i], GREEDY)).token_ids

    async with AsyncEngine("demo", dtype="float32", kv_cache_memory=64 << 20, **options) as engine:
        if at_once:
            async with anyio.create_task_group() as group:
                for i in range(NUM_PROMPTS):
                    group.start_soon(run, i)
        else:
            for i in range(NUM_PROMPTS):
                await run(i)
    assert [list(results[i]) for i in range(NUM_PROMPTS)] == greedy


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_started_engine_tells_how_long_its_steps_are() -> None:
    for given, expected in (({"max_num_seqs": 600}, (600, 600)), ({"max_num_batched_tokens": 16}, (16, 16)), ({}, (256, 512))):
        engine = AsyncEngine("demo", kv_cache_memory=32 << 20, **given)  # type: ignore[arg-type]
        async with engine:
            assert (engine.config.max_num_seqs, engine.config.max_num_batched_tokens) == expected


@pytest.mark.quick_cases(1)
async def test_200_streams_exact_counts_and_50_cancelled() -> None:
    rng = random.Random(3)
    cancelled = set(rng.sample(range(200), 50))
    counts: dict[int, int] = {}
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:

        async def read(i: int) -> None:
            stop_after = rng.randint(0, 15) if i in cancelled else None
            async with engine.stream([i + 1, 5, 9], SamplingParams(max_tokens=8 + i % 16, ignore_eos=True, seed=i)) as stream:
                counts[i] = 0
                async for token in stream:
                    counts[i] += 1
                    if counts[i] == stop_after:
                        return
                    last = token
            assert last.finish_reason is FinishReason.MAX_TOKENS

        async with anyio.create_task_group() as group:
            for i in range(200):
                group.start_soon(read, i)
        assert all(counts[i] == 8 + i % 16 for i in range(200) if i not in cancelled)
        assert idle(engine)


@pytest.mark.quick_cases(1)
async def test_seeds_alone_and_in_a_crowd() -> None:
    params = SamplingParams(seed=11, max_tokens=24, temperature=0.9, top_p=0.95, top_k=50, ignore_eos=True)
    async with AsyncEngine("demo", dtype="float32", kv_cache_memory=32 << 20) as engine:
        alone = await engine.generate("The morning was", params)
        async with anyio.create_task_group() as group:
            for i in range(20):
                group.start_soon(engine.generate, "She had " * (i + 1), SamplingParams(max_tokens=20))
            crowded = await engine.generate("The morning was", params)
        assert crowded.token_ids == alone.token_ids
        drawn = engine.stream("The morning was", SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True))
        async for _ in drawn:
            pass
        again = await engine.generate("The morning was", SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True, seed=drawn.seed))
        assert again.token_ids == drawn.completion().token_ids


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_preemption_changes_nothing() -> None:
    """Greedy and seeded requests in a pool that holds two of them, against one that holds all."""
    bytes_per_page = 5 * 2 * 2 * 64 * 16 * 4  # layers, K and V, heads, head_dim, tokens, float32
    results: dict[tuple[int, int], tuple[int, ...]] = {}
    for num_pages in (17 + 16, 2000):
        async with AsyncEngine("demo", dtype="float32", max_model_len=256, kv_cache_memory=num_pages * bytes_per_page) as engine:

            async def run(i: int, engine: AsyncEngine = engine, num_pages: int = num_pages) -> None:
                params = SamplingParams(max_tokens=120, seed=i, temperature=0.0 if i % 2 else 0.9, ignore_eos=True)
                results[num_pages, i] = (await engine.generate("The morning was so fine " * (i + 1), params)).token_ids

            async with anyio.create_task_group() as group:
                for i in range(6):
                    group.start_soon(run, i)
            assert (engine.stats().preemptions > 0) == (num_pages < 2000)
    assert all(results[17 + 16, i] == results[2000, i] for i in range(6))


async def test_text_chat_and_model_info() -> None:
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:
        info = engine.model_info
        assert (info.name, info.architecture, info.vocab_size, info.max_model_len) == ("demo", "Qwen3ForCausalLM", 4096, 2048)
        assert (info.eos_token_ids, info.dtype, info.num_parameters) == ((4093, 4095), "bfloat16", 4_492_672)
        assert (info.family, info.implementation, info.num_active_parameters) == ("qwen3", "native", 4_492_672)
        assert (info.kv_bytes_per_token, info.layer_groups) == (2 * 5 * 2 * 64 * 2, (LayerGroup(5),))
        assert (info.generation_defaults.temperature, info.generation_defaults.top_p) == (0.8, 0.95)
        answer = await engine.generate(
            [{"role": "user", "content": "How do you do today?"}], SamplingParams(temperature=0.0, max_tokens=40)
        )
        assert answer.finish_reason is FinishReason.EOS
        assert answer.text
        assert "<|im_end|>" not in answer.text
        for prompt in ([4096], "word " * 3000, [1] * 2048):
            with pytest.raises(InvalidRequestError, match="prompt"):
                await engine.generate(prompt)
        assert idle(engine)
