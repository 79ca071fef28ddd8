"""What serving costs beside the model: `python -m tools.bench.serving`.

A server and its client are processes of their own; the engine is the real one, on a runner that costs nothing. Prints the server's CPU
time per token (in the kernel too) for streams of both doors and for a session, beside that of the same engine when it is read in its own
process and of gRPC when it does nothing but write; and how late event loop and health checks are under many streams.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio

from aengine.bench.report import table, write_json
from aengine.v1.generation_service_pb2 import SessionRequest, StreamGenerateRequest
from tools.bench.paced_engine import MAX_MODEL_LEN
from tools.bench.paced_server import BARE_METHOD, BARE_SERVICE, PROMPT, Consume, Figures, Pace, PacedServer, health_checks, paced_server

PACE = 100.0
"""Steps per second, where they are paced."""
OPENING_PACE = 5.0
"""While streams are opened: a server that is busy with those it has takes few new ones in a turn of its loop."""
STREAMS = 64
CROWD = 256
WARM_UP = 0.5
PATIENCE = 30.0
"""For a load to begin and to end."""
POLL = 0.01
SECONDS = 3.0
"""That one measurement takes."""
_SERVICE = "/aengine.v1.GenerationService/"

Load = Callable[[PacedServer], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The least of several runs."""

    load: str
    streams: int
    loop: str
    pace: float | None  # steps per second; None: as many as the event loop keeps up with
    microseconds: float  # of the server's CPU time per token
    client_microseconds: float  # of the CPU time of the process that reads; 0 in process
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Lateness:
    """Milliseconds."""

    what: str
    loop: str
    p50: float
    p99: float
    most: float
    tokens_per_second: float


def _request() -> StreamGenerateRequest:
    request = StreamGenerateRequest()
    request.spec.prompt.token_ids.ids.extend(PROMPT)
    request.spec.sampling.temperature = 0
    request.spec.stopping.ignore_eos = True
    return request


@asynccontextmanager
async def under_way(tasks: Sequence[asyncio.Task[None]]) -> AsyncIterator[None]:
    """Tasks that are not to end by themselves."""
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def streams(count: int) -> Load:
    """So many calls of StreamGenerate."""
    return _calls(count, lambda server: server.address, _SERVICE + "StreamGenerate", _request().SerializeToString())


def bare(count: int) -> Load:
    """So many calls of a handler that does nothing but write."""
    return _calls(count, lambda server: server.bare_address, f"/{BARE_SERVICE}/{BARE_METHOD}", b"")


def _calls(count: int, address_of: Callable[[PacedServer], str], method: str, request: bytes) -> Load:
    """On one connection. What comes is not decoded, so that the client costs little."""

    @asynccontextmanager
    async def load(server: PacedServer) -> AsyncIterator[None]:
        async with aio.insecure_channel(address_of(server)) as channel:
            stream: Any = channel.unary_stream(method)

            async def read() -> None:
                while True:
                    call = stream(request)
                    while await call.read() is not aio.EOF:
                        pass

            async with under_way([asyncio.create_task(read()) for _ in range(count)]):
                yield

    return load


def http_streams(count: int) -> Load:
    """So many streamed /v1/completions, each on a connection of its own, as HTTP/1.1 has it."""
    fields = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True, "max_tokens": MAX_MODEL_LEN - len(PROMPT)}
    body = json.dumps(fields).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    @asynccontextmanager
    async def load(server: PacedServer) -> AsyncIterator[None]:
        host, _, port = server.http_address.rpartition(":")

        async def read() -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(request)
                while received := await reader.read(65536):
                    if b"[DONE]" in received:
                        writer.write(request)
                raise RuntimeError("the server has closed a connection")
            finally:
                writer.close()

        async with under_way([asyncio.create_task(read()) for _ in range(count)]):
            yield

    return load


def session(count: int) -> Load:
    """One call of Session with so many requests."""

    @asynccontextmanager
    async def load(server: PacedServer) -> AsyncIterator[None]:
        async with aio.insecure_channel(server.address) as channel:

            async def read() -> None:
                call: Any = channel.stream_stream(_SERVICE + "Session")()
                opening = SessionRequest()
                opening.open.SetInParent()
                await call.write(opening.SerializeToString())
                for tag in range(count):
                    submission = SessionRequest()
                    submission.submit.tag = tag
                    submission.submit.request.CopyFrom(_request())
                    await call.write(submission.SerializeToString())
                while await call.read() is not aio.EOF:
                    pass
                raise RuntimeError("the session has ended; measure for a shorter time")

            async with under_way([asyncio.create_task(read())]):
                yield

    return load


def in_process(count: int) -> Load:
    """So many `async for` in the server's process."""

    @asynccontextmanager
    async def load(server: PacedServer) -> AsyncIterator[None]:
        await server.tell(Consume(count))
        try:
            yield
        finally:
            await server.tell(Consume(0))

    return load


IN_PROCESS, BARE = "in process", "bare gRPC"
LOADS: Mapping[str, Callable[[int], Load]] = {
    IN_PROCESS: in_process,
    BARE: bare,
    "streams": streams,
    "HTTP streams": http_streams,
    "session": session,
}


async def measure(
    server: PacedServer,
    load: Load,
    count: int,
    pace: float | None,
    seconds: float,
    warm_up: float = WARM_UP,
    on_measured: Callable[[], object] = lambda: None,
) -> tuple[Figures, Figures]:
    """The server's figures before and after `seconds` of `load` with `count` requests at `pace`, `warm_up` seconds after all have begun.
    `on_measured` is called with each."""
    await server.tell(Pace(None))
    await until_under_way([server], lambda number: number == 0)  # what is left of a load before
    await server.tell(Pace(OPENING_PACE))
    async with load(server):
        await until_under_way([server], lambda number: number == count)
        await server.tell(Pace(pace))
        await asyncio.sleep(warm_up)
        before = await server.measure()
        on_measured()
        await asyncio.sleep(seconds)
        after = await server.measure()
        on_measured()
        return before, after


async def until_under_way(servers: Sequence[PacedServer], condition: Callable[[int], bool]) -> None:
    """`condition`: of how many requests are under way at all of them."""
    give_up = time.monotonic() + PATIENCE
    under_way = -1
    while not condition(under_way):
        if time.monotonic() > give_up:
            raise RuntimeError(f"the load does not begin or end: {under_way} requests are under way")
        await asyncio.sleep(POLL)
        under_way = sum([(await server.measure()).under_way for server in servers])


def _note_cpu_time(cpu_times: list[float]) -> None:
    cpu_times.append(time.process_time())


def _rate(before: Figures, after: Figures) -> float:
    """Tokens per second."""
    return (after.tokens - before.tokens) / (after.seconds - before.seconds)


def _cost(before: Figures, after: Figures) -> float:
    """Microseconds per token."""
    return 1e6 * (after.cpu_seconds - before.cpu_seconds) / (after.tokens - before.tokens)


async def token_costs(loop: str, count: int, options: argparse.Namespace) -> list[TokenCost]:
    """Costs of `count` streams."""
    found: list[TokenCost] = []
    for pace in options.paces:
        runs: dict[str, list[TokenCost]] = {name: [] for name in options.loads}
        for _ in range(options.repeats):  # one after the other, so that what else the machine does is shared
            for name in options.loads:
                cpu_times: list[float] = []
                with paced_server(count, uvloop=loop == "uvloop") as server:
                    before, after = await measure(
                        server, LOADS[name](count), count, pace, options.seconds, on_measured=functools.partial(_note_cpu_time, cpu_times)
                    )
                tokens = after.tokens - before.tokens
                client = 0.0 if name == IN_PROCESS else 1e6 * (cpu_times[1] - cpu_times[0]) / tokens
                runs[name].append(TokenCost(name, count, loop, pace, _cost(before, after), client, _rate(before, after)))
        found += [min(costs, key=lambda cost: cost.microseconds) for costs in runs.values()]
    return found


async def lateness(loop: str, options: argparse.Namespace) -> list[Lateness]:
    """Of the quietest run."""
    runs: list[list[Lateness]] = []
    for _ in range(options.repeats):
        with paced_server(CROWD, uvloop=loop == "uvloop") as server, health_checks(server.address) as checks:
            before, after = await measure(server, streams(CROWD), CROWD, PACE, options.seconds)
            checks.send("stop")
            rate = _rate(before, after)
            times = await asyncio.to_thread(checks.recv)
            runs.append([_lateness("event loop", loop, after.lags, rate), _lateness("health check", loop, times, rate)])
    return min(runs, key=lambda run: run[0].p99)


def _lateness(what: str, loop: str, times: Sequence[float], rate: float) -> Lateness:
    p50, p99 = (float(value) for value in np.percentile(times, (50, 99)))
    return Lateness(what, loop, p50, p99, max(times), rate)


def _loops() -> Iterator[str]:
    yield "asyncio"
    if importlib.util.find_spec("uvloop") is not None:
        yield "uvloop"
    else:
        print("uvloop is not installed: measured without it", file=sys.stderr)


async def _measure_all(options: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"tokens": [], "lateness": []}
    for loop in options.loops or _loops():
        for count in options.streams:
            figures["tokens"] += await token_costs(loop, count, options)
        if options.lateness:
            figures["lateness"] += await lateness(loop, options)
    return figures


def _pace(text: str) -> float | None:
    return None if text == "free" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.serving", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that one measurement takes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; the least counts (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--streams", type=int, nargs="+", default=[STREAMS], help="requests at a time (default: %(default)s)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="(default: all)")
    parser.add_argument("--loops", nargs="+", choices=("asyncio", "uvloop"), help="event loops of the server (default: those installed)")
    parser.add_argument("--paces", type=_pace, nargs="+", default=[None, PACE], help=f"steps per second, or free (default: free {PACE:g})")
    parser.add_argument("--no-lateness", dest="lateness", action="store_false", help="do not measure how late loop and health checks are")
    options = parser.parse_args()
    figures = asyncio.run(_measure_all(options))
    costs: list[TokenCost] = figures["tokens"]
    base = {(cost.streams, cost.loop, cost.pace): cost.microseconds for cost in costs if cost.load == IN_PROCESS}
    print("microseconds of the server's CPU time per token, those beyond reading in process, and those of the client")
    rows = []
    for cost in costs:
        in_process = None if cost.load == BARE else base.get((cost.streams, cost.loop, cost.pace))  # there is no engine in bare gRPC
        beyond = "" if in_process is None else cost.microseconds - in_process
        pace = cost.pace or "free"
        rows.append((cost.load, cost.streams, cost.loop, pace, cost.tokens_per_second, cost.microseconds, beyond, cost.client_microseconds))
    print(table(("load", "streams", "loop", "steps/s", "tokens/s", "us/token", "beyond", "client"), rows))
    if options.lateness:
        print(f"\n{CROWD} streams at {PACE:g} steps/s: milliseconds that the event loop is late, and that a health check takes")
        late = [(late.what, late.loop, late.tokens_per_second, late.p50, late.p99, late.most) for late in figures["lateness"]]
        print(table(("", "loop", "tokens/s", "p50", "p99", "max"), late))
    if options.json is not None:
        write_json(options.json, ["python", "-m", "tools.bench.serving", *sys.argv[1:]], figures)


if __name__ == "__main__":
    main()
