"""Chats with images, by the small random model of each family: tokens and logprobs are those of transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hang_guard import let_others_run
from image_models import FAMILIES, Expected, Part, Reference, as_file, chat_of, picture
from PIL import Image

from aengine import AsyncEngine, Completion, InvalidRequestError, SamplingParams
from aengine.api.params import derive_seed

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
NUM_TOKENS = 6
STEPS = {"gemma3": 24, "gemma4 with images that see themselves": 80}
"""Tokens of a step, of models that compute all of an image in one."""
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=1, ignore_eos=True)
PICTURES = [picture(37, 91, 0), picture(120, 60, 1), picture(64, 64, 2), picture(99, 33, 3)]
CHATS: Sequence[Sequence[Part]] = [
    ["What is this? ", 0, " and why?"],
    [1, "hello there ", 2, "?"],
    ["only text"],
    [0, 1, 2, 3],
]
SIZES = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "page_size": 4, "kv_cache_memory": "32MiB", "max_num_seqs": 8}
Find = Callable[[str], Reference]


def check(output: Completion, expected: Expected, tolerance: float = 1e-4) -> None:
    assert output.usage.prompt_tokens == expected.num_prompt_tokens
    assert list(output.token_ids) == expected.token_ids
    assert output.logprobs is not None
    for token_id, logprob, row in zip(output.token_ids, output.logprobs, expected.logprobs, strict=True):
        assert abs(logprob.logprob - float(row[token_id])) < tolerance


async def run_all(engine: Any, chats: Sequence[Any], params: SamplingParams = GREEDY) -> list[Completion]:
    """All of them at the same time."""
    outputs: list[Completion | None] = [None] * len(chats)

    async def run(number: int) -> None:
        outputs[number] = await engine.generate(chats[number], params)

    async with anyio.create_task_group() as group:
        for number in range(len(chats)):
            group.start_soon(run, number)
    return [output for output in outputs if output is not None]


async def run_into(engine: AsyncEngine, chats: Sequence[Any], params: SamplingParams, outputs: list[Completion]) -> None:
    outputs += await run_all(engine, chats, params)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
async def test_tokens_are_those_of_transformers(model_type: str, reference: Find, anyio_backend: str) -> None:
    """Batched with text; again, with prefixes that are found; in chunks; from torch."""
    known = reference(model_type)
    expected = [known.generate(chat, PICTURES, NUM_TOKENS) for chat in CHATS]
    chats = [chat_of(chat, [Image.fromarray(pixels) for pixels in PICTURES]) for chat in CHATS]
    for backend, step in (("auto", 512), ("auto", STEPS.get(model_type, 9)), ("torch_native", max(STEPS.get(model_type, 9), 24))):
        async with AsyncEngine(str(known.folder), attention_backend=backend, max_num_batched_tokens=step, **SIZES) as engine:
            for output, wanted in zip(await run_all(engine, chats), expected, strict=True):
                check(output, wanted)
            again = await engine.generate(chats[0], GREEDY)
            check(again, expected[0])
            assert again.usage.cached_prompt_tokens >= again.usage.prompt_tokens - 36, "a page, or a step of recurrent states, is missing"
            assert again.usage.image_tokens > 0


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3", "llava_onevision"])
async def test_which_image_it_is_matters_and_not_its_file(model_type: str, reference: Find, anyio_backend: str) -> None:
    known = reference(model_type)
    files = [as_file(PICTURES[1]), as_file(PICTURES[3])]
    async with AsyncEngine(str(known.folder), max_num_batched_tokens=64, **SIZES) as engine:
        encoder = engine._started().model.images
        assert encoder is not None
        outputs = [await engine.generate(chat_of(["a", first, "b", second], files), GREEDY) for first, second in ((0, 1), (1, 0))]
        assert encoder.num_encoded == 2
        assert outputs[0].logprobs != outputs[1].logprobs, "two images were taken for each other"
        check(outputs[1], known.generate(["a", 3, "b", 1], PICTURES, NUM_TOKENS))
        others = [as_file(PICTURES[1], "WEBP", lossless=True), Image.fromarray(PICTURES[3])]
        same = await engine.generate(chat_of(["a", 0, "b", 1], others), GREEDY)
        assert encoder.num_encoded == 2, "an image was encoded again"
        assert same.token_ids == outputs[0].token_ids
        assert same.usage.cached_prompt_tokens >= same.usage.prompt_tokens - 8
        turned = [np.ascontiguousarray(PICTURES[1].reshape(120, 60, 3)), PICTURES[3]]
        turned_files = [as_file(pixels) for pixels in turned]  # the same bytes in other rows
        check(
            await engine.generate(chat_of(["a", 0, "b", 1], turned_files), GREEDY),
            known.generate(["a", 0, "b", 1], turned, NUM_TOKENS),
        )
        assert encoder.num_encoded == 3


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize(("num_frames", "fps"), [(1, 2.0), (6, 2.0), (5, 0.7)])
async def test_videos(model_type: str, num_frames: int, fps: float, reference: Find, anyio_backend: str) -> None:
    """Whole, in chunks, and beside an image; again without the encoder; another rate is another video."""
    known = reference(model_type)
    side = 28 if model_type == "qwen2_5_vl" else 32
    frames = [picture(3 * side, 2 * side, seed) for seed in range(num_frames)]
    expected = known.generate_after_video("what happens?", frames, fps, NUM_TOKENS)
    part = {"type": "video", "video": [as_file(frame) for frame in frames], "fps": fps}
    chat = [{"role": "user", "content": [part, {"type": "text", "text": "what happens?"}]}]
    for backend, step in (("auto", 512), ("auto", 9), ("torch_native", 24)):
        async with AsyncEngine(str(known.folder), attention_backend=backend, max_num_batched_tokens=step, **SIZES) as engine:
            outputs = await run_all(engine, [chat, chat_of(["x", 0], [Image.fromarray(PICTURES[0])])])
            check(outputs[0], expected)
            check(outputs[1], known.generate(["x", 0], PICTURES, NUM_TOKENS))
            check(await engine.generate(chat, GREEDY), expected)
            encoder = engine._started().model.images
            assert encoder is not None
            assert encoder.num_encoded == 2
            faster = {**part, "video": [Image.fromarray(frame) for frame in frames], "fps": 1.1 * fps}
            await engine.generate([{"role": "user", "content": [faster]}], GREEDY)
            assert encoder.num_encoded == 3


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"video": []}, "a video is a list of 1 to 256 frames"),
        ({"video": "clip.mp4"}, "a video is a list of 1 to 256 frames"),
        ({"video": [as_file(PICTURES[0])] * 257}, "a video is a list of 1 to 256 frames"),
        ({"video": [as_file(PICTURES[0])], "fps": 0}, "the fps of a video is 0, which is not a number in"),
        ({"video": [as_file(PICTURES[0]), b"x"]}, "image 0 is a video whose frame 1 "),
        ({"video": [as_file(PICTURES[0]), as_file(PICTURES[1])]}, "a video whose frames have different sizes, such as 120x60 and 37x91"),
        ({"video": ["https://host/a.png"]}, "image 0 is a video whose frame 0 cannot be read: No such file"),
    ],
)  # fmt: skip
async def test_videos_that_are_refused(part: dict[str, Any], why: str, reference: Find, anyio_backend: str) -> None:
    async with AsyncEngine(str(reference("qwen3_vl").folder), **SIZES) as engine:
        with pytest.raises(InvalidRequestError, match=why):
            await engine.generate([{"role": "user", "content": [{"type": "video", **part}]}], GREEDY)
        assert (await engine.generate("x", GREEDY)).token_ids


async def test_a_model_without_videos(reference: Find, anyio_backend: str) -> None:
    async with AsyncEngine(str(reference("gemma3").folder), **SIZES) as engine:
        with pytest.raises(InvalidRequestError, match="image 0 is a video, and the model takes no videos"):
            await engine.generate([{"role": "user", "content": [{"type": "video", "video": [as_file(PICTURES[0])]}]}], GREEDY)


async def test_preempted(reference: Find, anyio_backend: str) -> None:
    known = reference("qwen2_5_vl")
    expected = [known.generate(chat, PICTURES, 24) for chat in CHATS[:2]]
    chats = [chat_of(chat, [Image.fromarray(pixels) for pixels in PICTURES]) for chat in CHATS[:2]]
    few_pages = {**SIZES, "enable_prefix_cache": False, "kv_cache_memory": 110_000, "max_model_len": 96}
    async with AsyncEngine(str(known.folder), max_num_batched_tokens=64, **few_pages) as engine:
        await engine.pause()
        outputs: list[Completion] = []
        async with anyio.create_task_group() as group:
            group.start_soon(run_into, engine, chats, replace(GREEDY, max_tokens=24), outputs)
            while engine.stats().waiting < len(chats) or engine._started().registry.num_preparing:
                await let_others_run()
            await engine.unpause()
        for output, wanted in zip(outputs, expected, strict=True):
            check(output, wanted)
        assert engine.stats().preemptions > 0


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_5", "gemma3"])
async def test_forked(model_type: str, reference: Find, anyio_backend: str) -> None:
    known = reference(model_type)
    chat = chat_of(CHATS[1], [Image.fromarray(pixels) for pixels in PICTURES])
    drawn = SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    async with AsyncEngine(str(known.folder), max_num_batched_tokens=64, **SIZES) as engine:
        forks: list[list[int]] = [[], [], []]
        async for token in engine.stream(chat, replace(drawn, n=3)):
            forks[token.index].append(token.token_id)
        alone = [await engine.generate(chat, replace(drawn, seed=seed)) for seed in (5, derive_seed(5, 1), derive_seed(5, 2))]
        assert forks == [list(one.token_ids) for one in alone]
        stream = engine.stream(chat, replace(drawn, n=3))
        async for _ in stream:
            pass
        for at, index in ((0, 0), (3, 1), (7, 2)):  # of one that has ended, by its tokens and images
            assert [token.token_id async for token in stream.fork(at, index=index)] == forks[index][at:]
        running = engine.stream(chat, replace(drawn, max_tokens=30))
        first = [(await anext(running)).token_id for _ in range(5)]
        assert first == forks[0][:5]
        assert [token.token_id async for token in running.fork(3)][:5] == forks[0][3:]


async def test_speculation_looks_nothing_up_in_images(reference: Find, anyio_backend: str) -> None:
    known = reference("qwen2_5_vl")
    chat = ["abcabcabc ", 0, "abcabcabc ", 0, "abc"]
    expected = known.generate(chat, PICTURES, 24)
    params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=1, ignore_eos=True, presence_penalty=0.0)
    async with AsyncEngine(str(known.folder), speculative="ngram", max_num_batched_tokens=64, **SIZES) as engine:
        check(await engine.generate(chat_of(chat, [as_file(pixels) for pixels in PICTURES]), params), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif("AENGINE_EXECUTE_PTX" in os.environ, reason="transformers cannot load models on a device whose kernels are executed")
@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3", "mistral3"])
async def test_on_a_gpu(model_type: str, reference: Find, anyio_backend: str) -> None:
    """In graphs, but for the steps that compute an image's tokens. Towers have convolutions, which torch computes in tf32 there."""
    known = reference(model_type)
    chats = [chat_of(chat, [Image.fromarray(pixels) for pixels in PICTURES]) for chat in CHATS[:3]]
    sizes = {**SIZES, "device": "cuda", "attention_backend": "triton", "max_num_batched_tokens": 24, "graph_tokens": 16}
    async with AsyncEngine(str(known.folder), **sizes) as engine:
        for given, chat in zip(chats, CHATS, strict=False):
            check(await engine.generate(given, GREEDY), known.generate(chat, PICTURES, NUM_TOKENS), 1e-2)
