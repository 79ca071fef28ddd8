"""Models that sleep: the same tokens as undisturbed, and memory that is really given back."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
from every_draft import use_every_draft
from head_models import Drafting, eagle, mtp
from oracle_engine import until
from safetensors.torch import load_file, save_file
from slow_cases import slow_but

from aengine import AsyncEngine, EngineStateError, InvalidRequestError, ModelLoadError, SamplingParams
from aengine.models.loading.hub import resolve_model

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
    "torch-stages": {"pipeline_parallel_size": 2, "attention_backend": "torch_native"},
}
QUICK = [("kernels", 1, 40, 3), ("kernels", 2, 40, 3), ("torch", 1, 16, 3)]
LONG = [("kernels", 1, 200, 10), ("torch", 1, 200, 10), ("kernels", 2, 200, 10)]
OTHERS = [(kind, level, 8, 2) for kind in KINDS for level in (1, 2) if (kind, level) not in {("fallback", 2), ("torch", 1)}]
CASES = slow_but(QUICK, [*QUICK, *LONG, *OTHERS])


def params_of(seed: int) -> SamplingParams:
    processed = {"repetition_penalty": 1.2} if seed % 4 == 3 else {}
    return SamplingParams(seed=seed, temperature=(0.0, 0.9)[seed % 2], max_tokens=8 + seed % 17, ignore_eos=True, **processed)


async def outputs(engine: AsyncEngine, count: int, levels: Sequence[int] = ()) -> list[tuple[int, ...]]:
    """Of so many streams, during which the engine sleeps now and then."""
    found: list[tuple[int, ...]] = [()] * count

    async def run(seed: int) -> None:
        found[seed] = (await engine.generate([5 + seed % 7] * (1 + 3 * seed % 40), params_of(seed))).token_ids

    async with anyio.create_task_group() as group:
        for seed in range(count):
            group.start_soon(run, seed)
        for level in levels:
            enough = engine.stats().completion_tokens + 12 * count // len(levels)
            await until(lambda enough=enough: engine.stats().completion_tokens >= enough or all(found))  # type: ignore[misc]
            await engine.sleep(level)
            assert engine.stats().sleep_level == level
            await engine.wake()
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kind", "level", "count", "sleeps"), CASES)
async def test_tokens_are_the_same(kind: str, level: int, count: int, sleeps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**SIZES, **KINDS[kind]}
    if "draft" in kind:
        use_every_draft(monkeypatch)
    async with AsyncEngine("demo", **options) as engine:
        expected = await outputs(engine, count)
        await engine.flush_cache()
        assert await outputs(engine, count, [level] * sleeps) == expected


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_transformers_computes_cannot_be_read_again() -> None:
    async with AsyncEngine("demo", **SIZES, model_impl="transformers") as engine:
        with pytest.raises(InvalidRequestError, match="level: 2 is not possible"):
            await engine.sleep(2)
        await engine.sleep(1)
        with pytest.raises(InvalidRequestError, match="level: 2 is not possible"):
            await engine.sleep(2)
        await engine.wake()
        assert (await engine.generate([5], params_of(0))).token_ids


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("backend", slow_but(["auto"], ["auto", "torch_native"]))
async def test_weights_that_it_wakes_with(backend: str, tmp_path: pathlib.Path) -> None:
    """Those that it slept with are read from where they came from last; others have a version of their own."""
    demo = resolve_model("demo")
    tensors = {name: 1.1 * tensor for name, tensor in load_file(demo / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    async with AsyncEngine("demo", **SIZES, attention_backend=backend) as engine:

        async def found() -> tuple[int, tuple[int, ...]]:
            completion = await engine.generate([5, 6, 7], params_of(0))
            return engine.stats().weights_version, completion.token_ids

        _, first = await found()
        await engine.update_weights(tmp_path)
        _, second = await found()
        assert first != second
        await engine.sleep(2)
        for refused in (engine.update_weights(demo), engine.load_adapter("a", "demo-lora")):
            with pytest.raises(EngineStateError, match="sleeps"):
                await refused
        (tmp_path / "empty").mkdir()
        with pytest.raises(ModelLoadError):
            await engine.wake(tmp_path / "empty")
        assert engine.stats().sleep_level == 2
        await engine.wake()
        assert await found() == (1, second)
        await engine.sleep(1)
        await engine.wake(demo)
        assert await found() == (2, first)
        await engine.update_weights(tensors)
        await engine.sleep(2)
        with pytest.raises(EngineStateError, match="from memory"):
            await engine.wake()
        await engine.wake(tensors)
        assert await found() == (4, second)
        with pytest.raises(EngineStateError, match="awake"):
            await engine.wake(demo)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("level", slow_but([2], [1, 2]))
@pytest.mark.parametrize("backend", slow_but(["auto"], ["auto", "torch_native"]))
@pytest.mark.parametrize("make", [lambda path: eagle(path, own_ids=True), lambda path: mtp(path, "mimo")], ids=["eagle", "mtp"])
async def test_draft_heads(
    make: Callable[[pathlib.Path], Drafting], backend: str, level: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read embedding and output head of their model, or have their own."""
    use_every_draft(monkeypatch)
    drafting = make(tmp_path)
    async with AsyncEngine(str(drafting.model_dir), **SIZES, attention_backend=backend, **drafting.options) as engine:
        expected = await outputs(engine, 8)
        accepted = engine.stats().accepted_draft_tokens
        await engine.flush_cache()
        assert await outputs(engine, 8, [level] * 2) == expected
        assert engine.stats().accepted_draft_tokens >= 1.5 * accepted


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("backend", slow_but(["auto"], ["auto", "torch_native"]))
async def test_adapters(backend: str, level: int) -> None:
    async with AsyncEngine("demo", **SIZES, attention_backend=backend, adapters={"a": "demo-lora"}) as engine:

        async def of(adapter: str | None) -> tuple[int, ...]:
            return (await engine.generate("LOVE, n.", params_of(0), adapter=adapter)).token_ids

        expected = [await of(adapter) for adapter in (None, "a")]
        assert expected[0] != expected[1]
        stream = engine.stream("LOVE, n.", params_of(0), adapter="a")
        found = [(await stream.__anext__()).token_id]
        await engine.sleep(level)
        await engine.wake()
        assert tuple(found + [token.token_id async for token in stream]) == expected[1]
        assert [await of(adapter) for adapter in (None, "a")] == expected
