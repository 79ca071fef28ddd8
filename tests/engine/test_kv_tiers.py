"""Engines whose KV outlives the pool: the same tokens as undisturbed, whatever happens to files, processes and weights."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import transformers
from hang_guard import HANG_SECONDS, let_others_run
from slow_cases import slow_but

from aengine import AsyncEngine, Completion, ConfigError, SamplingParams
from aengine.cache import PageChain, published_digest
from aengine.engine.tier_traffic import TierTraffic
from aengine.models.loading.hub import resolve_adapter

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
SIZES: dict[str, Any] = {"dtype": "float32", "device": "cpu", "page_size": 4, "max_num_seqs": 8, "threads": 1}
KINDS: dict[str, dict[str, Any]] = {
    "kernels": {},
    "int8": {"kv_cache_dtype": "int8", "dtype": "bfloat16"},
    "int4": {"kv_cache_dtype": "int4"},
    "windows": {"model": "windows"},
    "torch": {"attention_backend": "torch_native"},
    "torch-windows": {"attention_backend": "torch_native", "model": "windows"},
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2, "model": "windows"},
    "drafts": {"speculative": "draft", "speculative_model": "demo"},
}
PROMPTS = [[5 + (number * 31 + place * (7 + number)) % 300 for place in range(90 + 13 * number)] for number in range(6)]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def always_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the model computes."""
    monkeypatch.setattr(TierTraffic, "_is_worth", lambda *given: True)


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.Gemma3TextConfig(**sizes, vocab_size=400, num_hidden_layers=6, sliding_window=9, max_position_embeddings=512)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.15)
    folder = tmp_path_factory.mktemp("windowed")
    model.save_pretrained(folder)
    return str(folder)


def engine_of(kind: str, windowed: str, **options: Any) -> AsyncEngine:
    settings = {"model": "demo", "kv_cache_memory": 32 << 20, **SIZES, **KINDS[kind], **options}
    if settings["model"] == "windows":
        settings["model"] = windowed
    return AsyncEngine(settings.pop("model"), **settings)


async def generate_all(engine: AsyncEngine, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Completion]:
    outputs: dict[int, Completion] = {}

    async def run(number: int) -> None:
        outputs[number] = await engine.generate(list(prompts[number]), GREEDY)

    async with anyio.create_task_group() as group:
        for number in range(len(prompts)):
            group.start_soon(run, number)
    return [outputs[number] for number in range(len(prompts))]


def tokens_of(outputs: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


async def test_a_session_that_is_touched_is_there_when_its_request_comes(tmp_path: pathlib.Path) -> None:
    async with engine_of("kernels", "", kv_disk_path=str(tmp_path), kv_cache_memory=4 << 20, session_share=0.0) as engine:
        first = await engine.generate(PROMPTS[5], GREEDY, session="a")
        for number in range(5):
            await engine.generate([3 + number, *PROMPTS[5]] * 2, GREEDY)
        history = [*PROMPTS[5], *first.token_ids]
        assert (await engine.generate([*history[:-2], 9], GREEDY, cache_salt="x")).usage.cached_prompt_tokens == 0
        before = engine.stats().loaded_tokens
        assert await engine.touch("a") == len(history)
        assert await engine.touch("b") == await engine.touch("a", "tenant") == 0
        while engine.stats().loaded_tokens == before:  # nobody waits for it
            await engine.generate([7], GREEDY)
        loaded = engine.stats().loaded_tokens
        again = await engine.generate([*history, 9], GREEDY, session="a")
        assert again.usage.cached_prompt_tokens == loaded - before > 100
        assert engine.stats().loaded_tokens == loaded
        assert again.usage.rewritten_tokens == 0


async def test_a_session_is_known_after_a_restart(tmp_path: pathlib.Path, anyio_backend: str) -> None:
    """Also where the process was killed, as long as the session would have been known to it."""
    code = f"""
import asyncio, pathlib, sys
sys.path[:0] = {sys.path!r}
from test_kv_tiers import GREEDY, PROMPTS, engine_of
async def main():
    async with engine_of("kernels", "", kv_disk_path={str(tmp_path)!r}, session_seconds=600.0) as engine:
        await engine.generate(PROMPTS[4], GREEDY, session="a", tenant="t")
        first = await engine.generate(PROMPTS[5], GREEDY, session="a", tenant="t", cache_salt="s")
        await engine.flush_cache()
        while not any(700 < path.stat().st_size < 1000 for path in pathlib.Path({str(tmp_path)!r}).glob("*/??/[!t]*")):
            pass  # until the second note is there
        print(list(first.token_ids), flush=True)
        await asyncio.sleep(3600)
asyncio.run(main())
"""
    (line,) = run_and_kill(code, 1)
    history = [*PROMPTS[5], *json.loads(line)]
    options: dict[str, Any] = {"kv_disk_path": str(tmp_path), "kv_cache_memory": 4 << 20}
    for seconds, known in ((600.0, True), (0.001, True), (600.0, False)):  # the second one notes a session that is soon over
        async with engine_of("kernels", "", session_seconds=seconds, **options) as engine:
            assert await engine.touch("a", "other") == await engine.touch("b", "t") == 0
            assert await engine.touch("a", "t") == (len(history) if known else 0)
            if known:
                while engine.stats().loaded_tokens < (len(history) - 1) // 4 * 4:
                    await engine.generate([7], GREEDY)
                output = await engine.generate([*history, 9], GREEDY, session="a", tenant="t", cache_salt="s")
                assert output.usage.cached_prompt_tokens == engine.stats().loaded_tokens == (len(history) - 1) // 4 * 4
                history += [9, *output.token_ids]


async def test_what_adapters_compute(tmp_path: pathlib.Path, anyio_backend: str) -> None:
    """It has names of its own, which are the same in every process, whatever the adapter is called and when it was loaded."""
    other = tmp_path / "other"
    shutil.copytree(resolve_adapter("demo-lora"), other)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 3 * config["lora_alpha"]}))
    tokens: list[dict[str, tuple[int, ...]]] = []
    for adapters in ({"a": "demo-lora", "b": str(other)}, {"first": str(other), "b": "demo-lora"}, {"a": "demo-lora", "b": str(other)}):
        async with engine_of("kernels", "", kv_disk_path=str(tmp_path / "kv"), adapters=adapters) as engine:
            found = {}
            for name in (*adapters, None):
                output = await engine.generate(PROMPTS[3], GREEDY, adapter=name)
                found["" if name is None else adapters[name]] = output.token_ids
                assert output.usage.loaded_prompt_tokens == ((len(PROMPTS[3]) - 1) // 4 * 4 if tokens else 0)
            tokens.append(found)
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(set(tokens[0].values())) == 3


def files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage(folder: pathlib.Path, rng: random.Random) -> None:
    """A quarter of the files, while an engine may remove some."""
    files = files_in(folder)
    for path in rng.sample(files, len(files) // 4):
        with suppress(FileNotFoundError):
            data = bytearray(path.read_bytes())
            match rng.randrange(4):
                case 0 if data:
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                    path.write_bytes(data)
                case 1:
                    os.truncate(path, rng.randrange(len(data) + 1))
                case 2:
                    path.write_bytes(rng.choice(files).read_bytes())
                case _:
                    path.unlink()


def run_and_kill(code: str, count: int) -> list[str]:
    """The first lines that a program prints, which is killed then."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(count)]
        child.send_signal(signal.SIGKILL)
    return lines


@pytest.mark.parametrize("kind", slow_but(["kernels", "torch-windows", "ranks"], KINDS))
async def test_a_restart_remembers(kind: str, windowed: str, tmp_path: pathlib.Path, anyio_backend: str) -> None:
    async with engine_of(kind, windowed) as engine:
        expected = tokens_of(await generate_all(engine))
    for number in range(3):
        async with engine_of(kind, windowed, kv_disk_path=str(tmp_path)) as engine:
            outputs = await generate_all(engine)
            assert tokens_of(outputs) == expected
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert output.usage.cached_prompt_tokens == (0 if number == 0 else (len(prompt) - 1) // 4 * 4)
                assert output.usage.loaded_prompt_tokens == output.usage.cached_prompt_tokens


async def test_loads_are_written_a_little_at_a_time(
    windowed: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> None:
    """Two columns and a half between two steps; also while nothing else happens."""
    async with engine_of("kernels", windowed, kv_disk_path=str(tmp_path)) as engine:
        expected = tokens_of(await generate_all(engine))
        column_bytes = engine.model_info.kv_bytes_per_token * 4
    monkeypatch.setattr("aengine.engine.tier_traffic._BYTES_AT_A_TIME", column_bytes * 5 // 2)
    async with engine_of("kernels", windowed, kv_disk_path=str(tmp_path)) as engine:
        for prompt, tokens in zip(PROMPTS[:2], expected, strict=False):
            output = await engine.generate(prompt, GREEDY)
            assert (output.token_ids, output.usage.cached_prompt_tokens) == (tokens, (len(prompt) - 1) // 4 * 4)
        assert tokens_of(await generate_all(engine)) == expected


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kind", slow_but(["kernels"], KINDS))
async def test_a_small_pool(kind: str, tier: str, windowed: str, tmp_path: pathlib.Path, anyio_backend: str) -> None:
    """It has room for two of the prompts."""
    async with engine_of(kind, windowed) as engine:
        expected = tokens_of(await generate_all(engine))
        pages = 2 * (len(PROMPTS[-1]) + 20) // 4 * len(engine.model_info.layer_groups)
        page_bytes = engine.model_info.kv_bytes_per_token * 4 // len(engine.model_info.layer_groups) // engine.config.num_ranks
    options: dict[str, Any] = {"host_kv_memory": 64 << 20} if tier == "host" else {"kv_disk_path": str(tmp_path)}
    async with engine_of(kind, windowed, kv_cache_memory=pages * page_bytes, max_model_len=240, **options) as engine:
        for number in range(4):
            outputs = [await engine.generate(prompt, GREEDY) for prompt in PROMPTS]
            assert tokens_of(outputs) == expected
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert output.usage.cached_prompt_tokens >= (0 if number == 0 else (len(prompt) - 1) // 4 * 4)
            assert tokens_of(await generate_all(engine)) == expected


@pytest.mark.parametrize("rounds", slow_but([2], [2, 30]))
async def test_files_that_are_broken(rounds: int, windowed: str, tmp_path: pathlib.Path, anyio_backend: str) -> None:
    rng = random.Random(rounds)
    async with engine_of("kernels", windowed) as engine:
        expected = tokens_of(await generate_all(engine))
    for _ in range(rounds):
        async with engine_of("kernels", windowed, kv_disk_path=str(tmp_path), host_kv_memory=1 << 16) as engine:
            for _ in range(3):
                damage(tmp_path, rng)
                assert tokens_of(await generate_all(engine)) == expected
                await engine.flush_cache()


async def test_engines_share_a_folder(windowed: str, tmp_path: pathlib.Path, anyio_backend: str) -> None:
    """At the same time."""
    async with engine_of("kernels", windowed) as engine:
        expected = tokens_of(await generate_all(engine))
    options = {"kv_disk_path": str(tmp_path), "kv_disk_size": 1 << 20}  # less than they write
    async with engine_of("kernels", windowed, **options) as first, engine_of("kernels", windowed, **options) as second:
        for _ in range(4):
            found: list[list[tuple[int, ...]]] = []

            async def run(engine: AsyncEngine, into: list[list[tuple[int, ...]]] = found) -> None:
                into.append(tokens_of(await generate_all(engine)))

            async with anyio.create_task_group() as group:
                group.start_soon(run, first)
                group.start_soon(run, second)
            assert found == [expected, expected]
            await first.flush_cache()
            await second.flush_cache()
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 1 << 20


@pytest.mark.parametrize("rounds", slow_but([2], [2, 20]))
async def test_engines_that_are_killed(rounds: int, windowed: str, tmp_path: pathlib.Path, anyio_backend: str) -> None:
    async with engine_of("kernels", windowed) as engine:
        expected = tokens_of(await generate_all(engine))
    code = f"""
import asyncio, sys
sys.path[:0] = {sys.path!r}
from test_kv_tiers import PROMPTS, TierTraffic, engine_of, generate_all
TierTraffic._is_worth = lambda *given: True
async def main():
    async with engine_of("kernels", "", kv_disk_path={str(tmp_path)!r}) as engine:
        while True:
            for prompt in PROMPTS:
                print((await generate_all(engine, [prompt]))[0].token_ids, flush=True)
            await engine.flush_cache()
asyncio.run(main())
"""
    rng = random.Random(rounds)
    for _ in range(rounds):
        assert run_and_kill(code, count := rng.randrange(1, 15)) == [f"{expected[number % len(PROMPTS)]}\n" for number in range(count)]
    async with engine_of("kernels", windowed, kv_disk_path=str(tmp_path)) as engine:
        outputs = await generate_all(engine)
        assert tokens_of(outputs) == expected
        assert outputs[0].usage.cached_prompt_tokens > 0


async def test_sleep_and_cancelling_while_pages_are_loaded(windowed: str, tmp_path: pathlib.Path, anyio_backend: str) -> None:
    async with engine_of("kernels", windowed, kv_disk_path=str(tmp_path)) as engine:
        expected = tokens_of(await generate_all(engine))
        for number in range(6):
            await engine.flush_cache()
            streams = [engine.stream(prompt, GREEDY) for prompt in PROMPTS]
            if number % 2:
                await engine.sleep(1 + number % 4 // 2)
                await engine.wake()
            for stream in streams[1::2]:
                await stream.aclose()
            for stream, tokens in list(zip(streams, expected, strict=True))[::2]:
                assert tuple([token.token_id async for token in stream]) == tokens
        assert engine.stats().pages_used == 0


@pytest.mark.parametrize("kind", ["windows", "stages"])
async def test_other_weights_have_other_files(kind: str, windowed: str, tmp_path: pathlib.Path, anyio_backend: str) -> None:
    """Weights of any rank: here those of the last layer, which the first of two stages does not have."""
    other = tmp_path / "other"
    model = transformers.AutoModelForCausalLM.from_pretrained(windowed)
    for parameter in model.model.layers[-1].parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(other)
    prompts = [[token % 390 for token in prompt] for prompt in PROMPTS]
    expected, paths = [], (windowed, str(other))
    for path in paths:
        async with engine_of(kind, path) as engine:
            expected.append(tokens_of(await generate_all(engine, prompts)))
    assert expected[0] != expected[1]
    for order in ((0, 1, 0, 1), (0, 0, 1)):  # the second one has at a version what the first one had at another
        async with engine_of(kind, windowed, kv_disk_path=str(tmp_path / "kv")) as engine:
            for version, which in enumerate(order):
                if version:
                    await engine.update_weights(paths[which])
                assert tokens_of(await generate_all(engine, prompts)) == expected[which]
    async with engine_of(kind, str(other), kv_disk_path=str(tmp_path / "kv")) as engine:
        assert tokens_of(await generate_all(engine, prompts)) == expected[1]


async def test_what_is_refused(windowed: str, tmp_path: pathlib.Path, anyio_backend: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kv_disk_path": str(file)}, "kv_disk_path: .* cannot be used: Not a directory|File exists"),
        ({"kv_disk_path": str(tmp_path), "enable_prefix_cache": False}, "kv_disk_path: it is not possible without enable_prefix_cache"),
        ({"kv_disk_path": str(tmp_path), "kv_disk_size": -5}, "kv_disk_size: -5 is not an integer >= 0"),
    ]
    for options, why in cases:
        with pytest.raises(ConfigError, match=why):
            async with engine_of("kernels", windowed, **options):
                pass


async def test_watchers_are_told_of_what_tiers_keep(tmp_path: pathlib.Path, anyio_backend: str) -> None:
    """Until they drop it, too; routers send requests there."""
    async with engine_of("kernels", "", host_kv_memory=8 << 20, kv_cache_memory=4 << 20) as engine:
        told: set[int] = set()
        async with aclosing(engine.watch_pages(b"12345678", 1 << 20)) as news:

            async def hear(condition: Callable[[], bool]) -> None:
                with anyio.fail_after(HANG_SECONDS):
                    while not condition():
                        change = await anext(news)
                        if change is not None:
                            told.update(change.added)
                            told.difference_update(change.removed)
                        await let_others_run()

            def of_prompt(number: int) -> set[int]:
                chain = PageChain(4)
                chain.extend(np.array([3 + number, *PROMPTS[5]] * 2, np.int32))
                return {published_digest(name, b"12345678") for name in chain.digests}

            for number in range(9):
                await engine.generate([3 + number, *PROMPTS[5]] * 2, GREEDY)
                await hear(lambda number=number: of_prompt(number) <= told)  # type: ignore[misc]
            assert engine.stats().pages_total < 3 * len(of_prompt(0)), "the pool has no room for three"
            assert of_prompt(5) <= told, "tiers have it"
            for _ in range(4):  # whenever something changes, some of what they have is looked at
                await engine.generate([9] * 9, GREEDY)
                await engine.flush_cache()
            await hear(lambda: not of_prompt(0) & told)
            assert of_prompt(8) <= told
