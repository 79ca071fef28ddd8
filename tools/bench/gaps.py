"""How long streams over HTTP stand still: `python -m tools.bench.gaps`.

Each stream has a connection of its own. The server is a process of its own whose engine costs nothing and runs a given number of steps per
second; with `--replicas` it is a router in front of such ones; with `--address` it runs already, and its steps show in the gaps too. Prints
the time between two reads that brought something: over all streams, the longest of each, and over all once every stream has begun.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import ExitStack

import numpy as np

from aengine.bench.report import table
from tools.bench.paced_server import PROMPT, Pace, paced_server, router_server

STREAMS = 500
PACE = 20.0
"""Steps per second."""


async def reads_of(address: str, max_tokens: int) -> list[float]:
    """When the reads of one stream brought something, on time.monotonic."""
    fields = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": max_tokens}
    body = json.dumps(fields).encode()
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        reads: list[float] = []
        received = b""
        while b"[DONE]" not in received[-64:]:
            received = await reader.read(65536)
            if not received or b'"error"' in received:
                raise RuntimeError(f"a stream has ended: {received.decode()}")
            if b"data:" in received:
                reads.append(time.monotonic())
        return reads
    finally:
        writer.close()


async def measure(address: str, options: argparse.Namespace) -> list[list[float]]:
    return await asyncio.gather(*(reads_of(address, options.tokens) for _ in range(options.streams)))


async def measure_paced(options: argparse.Namespace) -> list[list[float]]:
    with ExitStack() as stack:
        servers = [stack.enter_context(paced_server(options.streams, uvloop=options.uvloop)) for _ in range(options.replicas or 1)]
        for server in servers:
            await server.tell(Pace(options.pace))
        if options.replicas:
            servers = [stack.enter_context(router_server([server.address for server in servers], uvloop=options.uvloop))]
        return await measure(servers[0].http_address, options)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gaps", description=__doc__)
    parser.add_argument("--streams", type=int, default=STREAMS, help="at a time (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of each (default: %(default)s)")
    parser.add_argument("--pace", type=float, default=PACE, help="steps per second (default: %(default)s)")
    parser.add_argument("--replicas", type=int, help="behind a router (default: none, and no router)")
    parser.add_argument("--uvloop", action="store_true", help="as the event loop of the servers")
    parser.add_argument("--address", help="HOST:PORT of a server that runs")
    options = parser.parse_args()
    work = measure(options.address, options) if options.address else measure_paced(options)
    found = asyncio.run(work)
    all_begun = max(reads[0] for reads in found)
    gaps = [1e3 * np.diff(reads) for reads in found]
    settled = [1e3 * np.diff([read for read in reads if read >= all_begun]) for reads in found]
    num_reads = sum(map(len, found))
    print(f"{options.streams} streams over HTTP, {num_reads} reads that brought something: milliseconds between two of a stream")
    rows = [
        (what, *(float(value) for value in np.percentile(values, (50, 99, 100))))
        for what, values in (
            ("all", np.concatenate(gaps)),
            ("longest of each", np.array([max(one, default=0.0) for one in gaps])),
            ("once all have begun", np.concatenate(settled)),
        )
        if len(values)
    ]
    print(table(("", "p50", "p99", "max"), rows))


if __name__ == "__main__":
    main()
