"""Engines that share the experts of a tiny model, and one that has them all."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import mixture_cases

from aengine import AsyncEngine, EngineConfig, SamplingParams
from aengine.parallel.join import free_port

CASES = {case.name: case for case in mixture_cases.CASES}
VOCAB = 199
CHILD = """
import anyio, json, sys
from aengine import AsyncEngine, EngineConfig

async def main():
    async with AsyncEngine(EngineConfig(**json.loads(sys.argv[1]))) as engine:
        print("ready", flush=True)
        await engine.wait_stopped()

anyio.run(main)
"""
"""The program of an engine that has no requests of its own."""


def saved(name: str, path: Path) -> Path:
    """A checkpoint of the model, and a secret beside it."""
    CASES[name].make().save_pretrained(path)
    (path / "secret").write_text("a secret of replicas")
    return path


def config_of(path: Path, **options: Any) -> EngineConfig:
    sizes = {"max_model_len": 100, "max_num_seqs": 6, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_memory": 1 << 20}
    numbers = {"dtype": "float32", "device": "cpu", "attention_backend": "torch_native", "threads": 1}
    return EngineConfig(**{"model": str(path), **numbers, **sizes, **options})


def shared_configs(path: Path, size: int, **options: Any) -> list[EngineConfig]:
    """Of each of `size` engines that share experts."""
    address = f"127.0.0.1:{free_port()}"
    group = {"expert_parallel_size": size, "rank_address": address, "rank_secret_file": str(path / "secret"), **options}
    return [config_of(path, **group, expert_parallel_rank=rank) for rank in range(size)]


@asynccontextmanager
async def sharing(path: Path, size: int, **options: Any) -> AsyncIterator[list[AsyncEngine]]:
    """`size` engines that serve, in this process."""
    engines = [AsyncEngine(each) for each in shared_configs(path, size, **options)]
    try:
        async with anyio.create_task_group() as starts:
            for engine in engines:
                starts.start_soon(engine.start)
        yield engines
    finally:
        async with anyio.create_task_group() as ends:
            for engine in engines:
                ends.start_soon(engine.aclose)


def environment() -> dict[str, str]:
    """In which a child finds this package."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([5, 9, 11], SamplingParams(max_tokens=30, temperature=0.0)),
    ([7] * 40, SamplingParams(max_tokens=12, temperature=0.8, seed=1)),
    ([3, 1, 4, 1, 5], SamplingParams(max_tokens=25, temperature=1.2, top_k=20, top_p=0.9, seed=2)),
    (list(range(60)), SamplingParams(max_tokens=5, temperature=0.0, logprobs=2)),
    ([100], SamplingParams(max_tokens=40, temperature=1.0, min_p=0.05, repetition_penalty=1.2, seed=3)),
    ([150, 151], SamplingParams(max_tokens=9, temperature=1.0, n=3, seed=4)),
    ([42] * 10, SamplingParams(max_tokens=20, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.5)),
]
"""Of several kinds of sampling, and lengths beyond a step."""
