"""Hostile requests against a server with bounded memory, while another client reads on. Takes about half a minute."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hang_guard import HANG_SECONDS
from hostile_requests import hostile_request
from server_process import COMMAND, ServerProcess, server_process

REQUESTS = 300
ROUND = 60  # of them, between two looks at the memory
AT_ONCE = 8
DEADLINE = 3.0  # seconds, of each call
MEMORY_KIB = 5 << 20  # of address space; half of it is torch's libraries and the allocator's reserves
# A leak grows in every round; the largest answers so far, and what allocators keep of them, grow in some.
MAX_GROWTH = 32 << 20
MAX_SILENCE = 2.0  # seconds of the server's processor time
REFUSALS = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED"}
BOUNDED = ("bash", "-c", f'ulimit -v {MEMORY_KIB}; exec "$@"', "bash", *COMMAND)


def resident_bytes(server: ServerProcess) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


async def call(channel: aio.Channel, seed: int) -> str:
    """Make the call of a seed; returns what it ended with, a failure with what it says."""
    hostile = await asyncio.to_thread(hostile_request, seed)
    metadata = (("x-request-id", f"hostile-{seed}"),)
    try:
        if hostile.streams:
            async for _ in channel.unary_stream(hostile.method)(hostile.body, timeout=DEADLINE, metadata=metadata):
                pass
        else:
            await channel.unary_unary(hostile.method)(hostile.body, timeout=DEADLINE, metadata=metadata)
    except aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK: "


async def attack(server: ServerProcess, seeds: range) -> dict[int, str]:
    ends: dict[int, str] = {}
    left = iter(seeds)
    async with aio.insecure_channel(server.address, options=[("grpc.max_send_message_length", -1)]) as channel:

        async def attacker() -> None:
            for seed in left:
                ends[seed] = await call(channel, seed)

        await asyncio.gather(*[attacker() for _ in range(AT_ONCE)])
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    return ends


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_hostile_requests() -> None:
    with server_process(program=BOUNDED) as server:
        assert server.process.stderr is not None
        reader = threading.Thread(target=lambda: server.log.extend(server.process.stderr or ()), daemon=True)
        reader.start()
        command = [sys.executable, str(Path(__file__).parent / "bystander.py"), server.address, str(server.process.pid)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bystander:
            assert bystander.stdin is not None
            assert bystander.stdout is not None
            assert bystander.stdout.readline() == "reading\n"
            ends: dict[int, str] = {}
            resident = []
            for first in range(0, REQUESTS, ROUND):
                ends |= asyncio.run(attack(server, range(first, first + ROUND)))
                resident.append(resident_bytes(server))
            bystander.stdin.close()
            read = json.loads(bystander.stdout.readline())
        server.process.terminate()
        assert server.process.wait(HANG_SECONDS) == 0
        reader.join(HANG_SECONDS)
    log = "".join(server.log)
    print(Counter(end.partition(":")[0] for end in ends.values()), read, [f"{size >> 20} MiB" for size in resident])
    assert min(after - before for before, after in pairwise(resident)) < MAX_GROWTH
    assert read["silence"] < MAX_SILENCE
    for seed, end in ends.items():
        code, _, details = end.partition(": ")
        assert code == "OK" or (code in REFUSALS and details.strip()), f"seed {seed}: {end}"
    assert not re.search("Traceback|ERROR|CRITICAL|Exception", log)
    told = Counter(re.findall(r"request_id=hostile-(\d+)", log))
    # A message that is too large is refused before anyone reads whose it is.
    unheard = [seed for seed, end in ends.items() if not told[str(seed)] and "larger than max" not in end]
    assert unheard == []
    assert [seed for seed, times in told.items() if times > 1] == [], "a call has one line"
