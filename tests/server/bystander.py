"""A client that reads one stream after another, in a process of its own, and tells how long the server worked at most between two events.

    python bystander.py ADDRESS PID < a pipe that is closed when it is over

It prints "reading" with its first event, and at the end a JSON object: events, and the longest silence in seconds of the processor time of
the server, which is the process PID: that does not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from google.protobuf.duration_pb2 import Duration
from grpc import aio

from aengine.v1.generation_service_pb2 import StreamGenerateRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub


def processor_seconds(pid: str) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def read(address: str, pid: str) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, over.set)
    request = StreamGenerateRequest()
    spec = request.spec
    spec.prompt.text = "It is a truth universally"
    spec.stopping.ignore_eos = True
    spec.stopping.max_tokens = 400
    spec.stream.max_tokens_per_delta = 8  # a few words at a time, so that the client takes little of the machine
    spec.stream.max_delay.CopyFrom(Duration(nanos=10_000_000))
    longest = 0.0
    num_events = 0
    async with aio.insecure_channel(address) as channel:
        last = processor_seconds(pid)
        while not over.is_set():
            async for _ in GenerationServiceStub(channel).StreamGenerate(request):
                now = processor_seconds(pid)
                if num_events:
                    longest = max(longest, now - last)
                else:
                    print("reading", flush=True)
                last = now
                num_events += 1
    print(json.dumps({"events": num_events, "silence": longest}), flush=True)


if __name__ == "__main__":
    asyncio.run(read(*sys.argv[1:]))
