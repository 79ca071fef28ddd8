"""What an `AsyncClient` costs beside the model: `python -m tools.bench.clients`.

The server is a process of its own, with an engine that costs nothing. Prints the CPU time per token of the client and of the server, for
streams that have a call each and for streams that share one (`multiplex`), read by `async for` in a task each, or by `open()` and a
callback, as a router reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aengine.api.params import SamplingParams
from aengine.bench.report import table, write_json
from aengine.client import AsyncClient
from tools.bench.paced_server import PROMPT, paced_server
from tools.bench.serving import PACE, SECONDS, STREAMS, measure, under_way

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class ClientCost:
    """The least of several runs, in microseconds of CPU time per token."""

    calls: str
    reader: str
    pace: float | None  # steps per second; None: as many as the server's event loop keeps up with
    client: float
    server: float
    tokens_per_second: float


@asynccontextmanager
async def iterated(client: AsyncClient, count: int) -> AsyncIterator[None]:
    """So many `async for`."""

    async def read() -> None:
        while True:
            async for _ in client.stream(PROMPT, PARAMS):
                pass

    async with under_way([asyncio.create_task(read()) for _ in range(count)]):
        yield


@asynccontextmanager
async def called_back(client: AsyncClient, count: int) -> AsyncIterator[None]:
    """So many requests whose tokens are taken by a callback."""
    requests = [client.open(PROMPT, PARAMS) for _ in range(count)]

    def reader(pop: Callable[[], object]) -> Callable[[], None]:
        def read() -> None:
            while pop() is not None:
                pass

        return read

    for request in requests:
        request.waiter = reader(request.pop)
    try:
        yield
        if any(request.finished for request in requests):
            raise RuntimeError("a request has ended; measure for a shorter time")
    finally:
        for request in requests:
            request.cancel()
        for request in requests:
            await request.wait_released()


READERS: dict[str, Callable[[AsyncClient, int], AbstractAsyncContextManager[None]]] = {"async for": iterated, "callback": called_back}


async def cost(multiplex: bool, reader: str, pace: float | None, options: argparse.Namespace) -> ClientCost:
    @asynccontextmanager
    async def load(server: object) -> AsyncIterator[None]:
        async with AsyncClient(address, multiplex=multiplex) as client, READERS[reader](client, options.streams):
            yield

    with paced_server(options.streams, uvloop=False) as server:
        address = server.address
        cpu: list[float] = []
        before, after = await measure(
            server, load, options.streams, pace, options.seconds, on_measured=lambda: cpu.append(time.process_time())
        )
    tokens = after.tokens - before.tokens
    return ClientCost(
        "one for all" if multiplex else "one each",
        reader,
        pace,
        1e6 * (cpu[1] - cpu[0]) / tokens,
        1e6 * (after.cpu_seconds - before.cpu_seconds) / tokens,
        tokens / (after.seconds - before.seconds),
    )


async def _measure_all(options: argparse.Namespace) -> list[ClientCost]:
    found = []
    for pace in (None, PACE):
        for multiplex in (False, True):
            for reader in READERS:
                runs = [await cost(multiplex, reader, pace, options) for _ in range(options.repeats)]
                found.append(min(runs, key=lambda run: run.client))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.clients", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that one measurement takes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; the least counts (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=STREAMS, help="at a time (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    gc.freeze()
    costs = asyncio.run(_measure_all(options))
    print(f"{options.streams} streams: microseconds of CPU time per token")
    rows = [(one.calls, one.reader, one.pace or "free", one.tokens_per_second, one.client, one.server) for one in costs]
    print(table(("calls", "reader", "steps/s", "tokens/s", "client", "server"), rows))
    if options.json is not None:
        write_json(options.json, ["python", "-m", "tools.bench.clients", *sys.argv[1:]], {"costs": costs})


if __name__ == "__main__":
    main()
