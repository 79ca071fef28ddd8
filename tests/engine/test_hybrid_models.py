"""Models with convolutions, recurrent states, or heads that differ by layer: whatever happens to a request, its tokens and their logprobs
are those of a run that nothing disturbed, bit by bit. What such a run says is compared with Transformers in
`tests/models/test_families.py`."""

from __future__ import annotations

import asyncio
import os
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from every_draft import use_every_draft
from family_cases import TINY, VOCAB, randomize
from hybrid_cases import CASES, DELTA, EXPERTS
from oracle_engine import until
from safetensors.torch import load_file, save_file
from slow_cases import slow_but

from aengine import AsyncEngine, Completion, SamplingParams
from aengine.api.errors import ConfigError
from aengine.engine.tier_traffic import TierTraffic

Facts = list[tuple[int, float]]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, detokenize=False, logprobs=0)
PAGE = 4
MEMORY = {
    **{"lfm2": 60_000, "lfm2-wide": 60_000, "qwen3.5": 110_000, "qwen3.5-heads": 240_000, "qwen3-next": 90_000},
    **{"granite-hybrid": 110_000, "falcon-h1": 130_000, "nemotron-h": 110_000, "kimi-linear": 200_000},
    **{"mamba": 150_000, "falcon-mamba": 150_000, "mamba2": 150_000, "jamba": 150_000, "minimax": 90_000},
    **{"gemma4": 15_000, "gemma4-experts": 55_000, "mimo-v2": 106_000},
}
"""Bytes of KV that hold one sequence of 64 tokens, and not two."""
QUICK = ("lfm2", "qwen3.5", "qwen3.5-heads", "falcon-h1", "gemma4")


@pytest.fixture(scope="module", params=slow_but(QUICK, MEMORY))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if os.environ.get("AENGINE_CPU_LEVEL") == "torch" and not request.param.startswith("lfm2"):
        pytest.skip("the products of torch depend on the number of rows, and states remember every bit")
    path = tmp_path_factory.mktemp(request.param, numbered=False)
    next(case for case in CASES if case.name == request.param).make().save_pretrained(path)
    return path


def engine_of(path: pathlib.Path, **options: Any) -> AsyncEngine:
    settings: dict[str, Any] = {"dtype": "bfloat16", "page_size": PAGE, "kv_cache_memory": 8 << 20, **options}
    return AsyncEngine(str(path), **settings)


def facts(completion: Completion) -> Facts:
    assert completion.logprobs is not None
    return [(each.token_id, each.logprob) for each in completion.logprobs]


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


async def run_all(engine: AsyncEngine, prompts: Sequence[Sequence[int]], params: SamplingParams = PARAMS) -> list[Facts]:
    return [facts(each) for each in await asyncio.gather(*(engine.generate(list(prompt), params) for prompt in prompts))]


async def alone(path: pathlib.Path, prompts: Sequence[Sequence[int]], **options: Any) -> list[Facts]:
    """Each whole, in one step, by itself, without a prefix."""
    async with engine_of(path, enable_prefix_cache=False, **options) as engine:
        return [facts(await engine.generate(list(prompt), PARAMS)) for prompt in prompts]


LENGTHS = (1, 2, 3, 4, 5, 8, 13, 16, 31, 40)


def keeps_states(model: pathlib.Path) -> bool:
    """Whether a prefix ends where there is a state of it."""
    return not model.name.startswith(("lfm2", "gemma4", "mimo"))


def test_batches_and_chunks(model: pathlib.Path) -> None:
    async def run() -> None:
        prompts = prompts_of(LENGTHS)
        expected = await alone(model, prompts)
        for most in (1, 3, 7, 64):
            async with engine_of(model, max_num_batched_tokens=most, max_num_seqs=min(most, 8)) as engine:
                assert await run_all(engine, prompts) == expected, most

    asyncio.run(run())


def test_prefixes_of_any_length(model: pathlib.Path) -> None:
    """Of each page end of a prompt and of what was generated behind it."""

    async def run() -> None:
        (first,) = prompts_of([30])
        async with engine_of(model) as engine:
            said = [token for token, _ in (await run_all(engine, [first]))[0]]
            whole = [*first, *said]
            prompts = [[*whole[:length], 7] for length in range(1, len(whole), 2)]
            expected = await alone(model, prompts)
            for prompt, known in zip(prompts, expected, strict=True):
                completion = await engine.generate(prompt, PARAMS)
                assert facts(completion) == known, len(prompt)
                if keeps_states(model):  # that one has found where prompts part, and left a state there
                    completion = await engine.generate(prompt, PARAMS)
                    assert facts(completion) == known, len(prompt)
                assert completion.usage.cached_prompt_tokens == (len(prompt) - 1) // PAGE * PAGE

    asyncio.run(run())


def test_next_turns(model: pathlib.Path) -> None:
    """Prompts that go on from what was said before, and part from it a few tokens before its end."""

    async def run() -> None:
        (chat,) = prompts_of([18])
        async with engine_of(model) as engine:
            for turn in range(2):
                (expected,) = await alone(model, [chat])
                completion = await engine.generate(chat, PARAMS)
                assert facts(completion) == expected
                if turn:
                    assert completion.usage.cached_prompt_tokens >= len(chat) - 11 - 16 - PAGE, turn
                chat = [*chat, *(token for token, _ in expected[:-2]), *prompts_of([11])[0]]

    asyncio.run(run())


def test_forks(model: pathlib.Path) -> None:
    """Which go on from copies of a page, beside whole ones."""

    async def run() -> None:
        params, prompts = replace(PARAMS, n=3), prompts_of([6, 8, 21])
        found = []
        for options in ({}, {"max_num_seqs": 1, "enable_prefix_cache": False}):  # the latter computes each sequence whole
            async with engine_of(model, **options) as engine:
                completions = [await engine.generate(prompt, params) for prompt in prompts]
                found.append([facts(each) for one in completions for each in (one, *one.others)])
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]

    asyncio.run(run())


def test_preemption(model: pathlib.Path) -> None:
    async def run() -> None:
        prompts = prompts_of([9, 14, 18, 22, 25])
        expected = await alone(model, prompts)
        small: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 16, "max_model_len": 64, "max_unread_tokens": 4}
        async with engine_of(model, **small, kv_cache_memory=MEMORY[model.name]) as engine:
            slow = engine.stream(prompts[0], PARAMS)
            await until(lambda: engine.stats().parked > 0)
            assert await run_all(engine, prompts[1:]) == expected[1:]  # which need the pages of the one that nobody reads
            async for _ in slow:
                pass
            assert facts(slow.completion()) == expected[0]
            assert engine.stats().preemptions > 0

    asyncio.run(run())


def test_drafts(model: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected ones leave inputs behind that nothing may see."""
    use_every_draft(monkeypatch)

    async def run() -> None:
        repeated = [prompt * 4 for prompt in prompts_of([5, 7, 10])]
        params = replace(PARAMS, allowed_token_ids=(5, 6), max_tokens=80)
        async with engine_of(model, speculative="off") as engine:
            expected = [(await run_all(engine, [prompt], params))[0] for prompt in repeated]
        for most in (9, 64):
            async with engine_of(model, speculative="ngram", max_num_batched_tokens=most, max_num_seqs=8) as engine:
                assert await run_all(engine, repeated, params) == expected
                stats = engine.stats()
                assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
                turn = [*repeated[0], *(token for token, _ in expected[0]), 7]
                completion = await engine.generate(turn, replace(params, max_tokens=9))
                assert completion.usage.cached_prompt_tokens >= len(turn) - 10 - PAGE  # what the last step checked was not computed again
                async with engine_of(model, enable_prefix_cache=False) as undisturbed:
                    assert facts(completion) == facts(await undisturbed.generate(turn, replace(params, max_tokens=9)))

    asyncio.run(run())


def test_sleep_in_between(model: pathlib.Path) -> None:
    async def run() -> None:
        prompts = prompts_of([9, 17])
        expected = await alone(model, prompts)
        async with engine_of(model) as engine:
            streams = [engine.stream(prompt, PARAMS) for prompt in prompts]
            for stream in streams:
                await stream.__anext__()
            await engine.sleep(1)
            await engine.wake()
            for stream, known in zip(streams, expected, strict=True):
                async for _ in stream:
                    pass
                assert facts(stream.completion()) == known

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_what_a_kv_cache_cannot_hold(model: pathlib.Path, kind: str) -> None:
    """Inputs of convolutions, where it does not hold the numbers of the model. States lie beside numbers of any kind."""
    refused = rf"^kv_cache_dtype: '{kind}' is not possible: Lfm2ForCausalLM keeps inputs of convolutions"
    has_convolutions = model.name.startswith("lfm2")
    if not has_convolutions:
        refused = rf"^kv_cache_dtype: '{kind}' needs device cuda$"

    async def run() -> None:
        if not has_convolutions and kind == "int8":
            prompts = prompts_of([9, 17])
            expected = await alone(model, prompts, kv_cache_dtype=kind)
            async with engine_of(model, kv_cache_dtype=kind, max_num_batched_tokens=7, max_num_seqs=2) as engine:
                assert await run_all(engine, prompts) == expected
            return
        with pytest.raises(ConfigError, match=refused):
            await engine_of(model, kv_cache_dtype=kind).start()

    asyncio.run(run())


@pytest.mark.parametrize("fused", [False, True])
def test_the_text_part_of_a_model_for_images(fused: bool, tmp_path: pathlib.Path) -> None:
    """With experts one by one, as Transformers stores them, or all of a layer together, as published."""
    sizes = {**TINY, **DELTA, "num_hidden_layers": 4, "tie_word_embeddings": False}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16}
    text = {**sizes, **EXPERTS, "rope_parameters": rope}
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).float().eval()
    randomize(model, 3)
    model.save_pretrained(tmp_path)
    if fused:
        file = tmp_path / "model.safetensors"
        weights = load_file(file)
        names = {name for name in weights if ".experts." in name}
        joined = {name: tensor for name, tensor in weights.items() if name not in names}
        for layer in sorted({name.split(".experts.")[0] for name in names}):
            numbers = range(EXPERTS["num_experts"])
            gates, ups, downs = (
                torch.stack([weights[f"{layer}.experts.{number}.{which}_proj.weight"] for number in numbers])
                for which in ("gate", "up", "down")
            )
            joined |= {f"{layer}.experts.gate_up_proj": torch.cat((gates, ups), 1), f"{layer}.experts.down_proj": downs}
        save_file(joined, file, metadata={"format": "pt"})
    (prompt,) = prompts_of([20])
    with torch.no_grad():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, 20:].tolist()

    async def run() -> None:
        async with engine_of(tmp_path, dtype="float32") as engine:
            assert engine.model_info.implementation == "native"
            assert "1 layer with KV" in engine.model_info.describe()
            assert engine.model_info.state_bytes > 3 * 4 * 4 * 16 * 32
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
            assert list((await engine.generate(prompt, params)).token_ids) == expected

    asyncio.run(run())


def test_states_alone_take_the_same_memory(tmp_path: pathlib.Path) -> None:
    """However long a sequence of a model without attention is."""
    next(case for case in CASES if case.name == "mamba").make().save_pretrained(tmp_path)

    async def run() -> None:
        used = []
        async with engine_of(tmp_path, enable_prefix_cache=False) as engine:
            assert engine.model_info.kv_bytes_per_token == 0
            for prompt in prompts_of([5, 90]):
                stream = engine.stream(prompt, PARAMS)
                await stream.__anext__()
                used.append(engine.stats().pages_used)
                await stream.aclose()
                await until(lambda: engine.stats().pages_used == 0)
        assert used[0] > 0
        assert max(used) - min(used) <= 1  # the page that the window of the latest token begins in

    asyncio.run(run())


def test_tiers_have_pages_and_states(model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts and of outputs: a later engine goes on where the one before it ended, bit by bit; and one whose pool is flushed."""
    monkeypatch.setattr(TierTraffic, "_is_worth", lambda *given: True)

    async def run() -> None:
        prompts = prompts_of([60, 40, 51])
        async with engine_of(model) as engine:
            expected = [await engine.generate(prompt, PARAMS) for prompt in prompts]
            turns = [[*prompt, *output.token_ids, 5, 6] for prompt, output in zip(prompts, expected, strict=True)]
            answers = [await engine.generate(turn, PARAMS) for turn in turns]
        disk = {"kv_disk_path": str(tmp_path)}
        for number, options in enumerate((disk, disk, {"host_kv_memory": 64 << 20})):
            async with engine_of(model, **options) as engine:
                for again in (False, True):
                    for prompt, output in zip(prompts, expected, strict=True):
                        found = await engine.generate(prompt, PARAMS)
                        assert facts(found) == facts(output)
                        if again or number == 1:
                            assert found.usage.cached_prompt_tokens >= len(prompt) - 16 - PAGE
                    await engine.flush_cache()
                if number == 0:
                    continue
                for turn, prompt, answer in zip(turns, prompts, answers, strict=True):
                    found = await engine.generate(turn, PARAMS)
                    assert facts(found) == facts(answer)
                    assert found.usage.cached_prompt_tokens > len(prompt)

    asyncio.run(run())
