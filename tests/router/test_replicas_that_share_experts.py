"""A router over child processes whose engines share experts: where one is killed all begin again, and requests go on."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from hang_guard import HANG_SECONDS
from sharing_experts import REQUESTS, config_of, saved

from aengine import AsyncEngine, Router
from aengine.api.errors import ConfigError
from aengine.router.processes import run_replicas

pytestmark = pytest.mark.anyio


def pids() -> dict[str, int]:
    """Of children that serve, by their index."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for pid in (thread / "children").read_text().split():
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if words[2:4] == ["aengine.server.cli", "replica"]:
                    found[words[5]] = int(pid)
    return found


@pytest.mark.slow
async def test_requests_go_on(tmp_path: Path) -> None:
    path = saved("qwen3-moe", tmp_path)
    async with AsyncEngine(config_of(path)) as engine:
        expected = [(await engine.generate(*request)).token_ids for request in REQUESTS]
    config = config_of(path, expert_parallel_size=2)
    killed, num_read = False, 0
    with anyio.fail_after(HANG_SECONDS):
        async with Router(config, replicas=2, wait_seconds=200) as router:
            before = pids()

            async def reads(index: int) -> None:
                nonlocal killed, num_read
                found = []
                async for token in router.stream(*REQUESTS[index]):
                    num_read += 1
                    if token.index == 0:
                        found.append(token.token_id)
                    if num_read > 30 and not killed:
                        killed = True
                        os.kill(before["0"], signal.SIGKILL)
                assert tuple(found) == expected[index]

            async with anyio.create_task_group() as tasks:
                for index in [*range(len(REQUESTS))] * 2:
                    tasks.start_soon(reads, index)
            after = pids()
            assert after.keys() == before.keys()
            assert not {*after.values()} & {*before.values()}, "the one that was not killed has ended, too"


async def test_as_many_as_share_experts(tmp_path: Path) -> None:
    config = config_of(tmp_path, expert_parallel_size=2)
    with pytest.raises(ConfigError, match="expert_parallel_size: 2 is neither 1 nor the number of replicas, 3"):
        await anext(run_replicas(config, 3, "a-token"))
