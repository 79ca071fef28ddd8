"""`aengine-grpc` with a model on several ranks: when one dies health flips, calls end, and the process says why."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_harness import stream_request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_process import server_process

from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def ranks_of(pid: int) -> list[int]:
    """The processes that a server has started."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


async def rest_of(call: AsyncIterator[object]) -> None:
    async for _ in call:
        pass


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_rank_dies() -> None:
    with server_process("--tensor-parallel-size", "2") as server:
        async with aio.insecure_channel(server.address) as channel:
            health = aiter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
            while (await anext(health)).status != SERVING:
                pass
            request = stream_request()
            request.spec.stopping.ignore_eos = True
            request.spec.stopping.max_tokens = 1000
            call = aiter(GenerationServiceStub(channel).StreamGenerate(request))
            await anext(call)
            (rank,) = ranks_of(server.process.pid)
            os.kill(rank, signal.SIGKILL)
            with pytest.raises(aio.AioRpcError, match="the engine is dead") as caught:  # why is for the log
                await rest_of(call)
            assert caught.value.code() is grpc.StatusCode.ABORTED
            assert (await anext(health)).status == NOT_SERVING
        assert await asyncio.to_thread(server.end) not in (0, -signal.SIGKILL)
        assert f"rank 1 (pid {rank}) was killed by SIGKILL" in "".join(server.log)
