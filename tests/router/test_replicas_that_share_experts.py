"""Child processes whose engines share experts: each serves, and where one is killed, all begin again."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from sharing_experts import REQUESTS, config_of, saved, shared_configs

from aengine import AsyncEngine, SamplingParams
from aengine.client import AsyncClient
from aengine.errors import AEngineError, ConfigError
from aengine.router.processes import run_replicas

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
TOKEN = "a-token-of-children"


def pids() -> dict[str, int]:
    """Of children that serve, by their index."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        for pid in (thread / "children").read_text().split():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "aengine.server.replica" in words:
                found[words[words.index("aengine.server.replica") + 2]] = int(pid)
    return found


async def serves(address: str, expected: list[tuple[int, ...]]) -> None:
    """All requests of `REQUESTS`, at the same time, get what they should."""
    async with AsyncClient(address, token=TOKEN) as client, anyio.create_task_group() as tasks:

        async def asks(index: int) -> None:
            assert (await client.generate(*REQUESTS[index])).token_ids == expected[index]

        for index in range(len(REQUESTS)):
            tasks.start_soon(asks, index)


async def read(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def answers(address: str) -> None:
    """As soon as it is back."""
    while True:
        try:
            async with AsyncClient(address, token=TOKEN, max_retries=0) as client:
                await client.generate([1], SamplingParams(max_tokens=1))
                return
        except AEngineError:
            await anyio.sleep(0.05)


@pytest.mark.slow
async def test_one_is_killed(tmp_path: Path) -> None:
    path = saved("qwen3-moe", tmp_path)
    async with AsyncEngine(config_of(path)) as engine:
        expected = [(await engine.generate(*request)).token_ids for request in REQUESTS]
    config = replace(shared_configs(path, 2)[0], load_format="safetensors")
    with anyio.fail_after(240):
        replicas: AsyncGenerator[frozenset[str], None] = run_replicas(config, 2, TOKEN)
        async with aclosing(replicas), AsyncExitStack() as stack:
            addresses = sorted(await anext(replicas))
            for address in addresses:
                await serves(address, expected)
            async with anyio.create_task_group() as tasks:
                for address in addresses:
                    tasks.start_soon(serves, address, expected)
            streams = []
            for address in addresses:
                client = await stack.enter_async_context(AsyncClient(address, token=TOKEN, max_retries=0))
                streams.append(client.stream([1, 2], SamplingParams(max_tokens=90, ignore_eos=True)))
                await anext(streams[-1])
            before = pids()
            os.kill(before["0"], signal.SIGKILL)
            for stream in streams:
                with pytest.raises(AEngineError):
                    await read(stream)
            while not (pids().keys() == before.keys() and not {*pids().values()} & {*before.values()}):
                await anyio.lowlevel.checkpoint()
            for address in addresses:
                await answers(address)
                await serves(address, expected)


async def test_as_many_as_share_experts(tmp_path: Path) -> None:
    config = config_of(tmp_path, expert_parallel_size=2, rank_address="127.0.0.1:1", rank_secret_file="secret")
    with pytest.raises(ConfigError, match="expert_parallel_size: 2 is neither 1 nor the number of replicas, 3"):
        await anext(run_replicas(config, 3, TOKEN))
