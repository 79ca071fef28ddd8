"""A process that serves a `PacedEngine` and tells what that cost it, and a process that asks for its health.

Apart from the client's process, so that the CPU time of each is its own. Owns both ends of the pipes between them.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from aengine.bench.paced_engine import PacedEngine
from aengine.bench.probes import loop_lag
from aengine.params import SamplingParams

PROMPT = tuple(range(3, 19))
HEALTH_INTERVAL = 0.02
"""Seconds between two health checks."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Run so many steps per second from now on; None: as many as there can be."""

    steps_per_second: float | None


@dataclass(frozen=True, slots=True)
class Consume:
    """Read so many streams in the server's own process, with `async for`; 0 ends those that are read."""

    num_streams: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Tell `Figures`."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the server's process, since its start."""

    seconds: float  # on time.monotonic
    cpu_seconds: float  # of all its threads, in the kernel too
    tokens: int  # generated
    steps: int
    under_way: int  # requests now, of which the engine holds pages
    lags: tuple[float, ...]  # milliseconds by which the event loop woke late, since this was last told


class PacedServer:
    """The process, as its client sees it."""

    def __init__(self, pipe: Connection, address: str) -> None:
        self._pipe = pipe
        self.address = address

    async def tell(self, command: Pace | Consume) -> None:
        self._pipe.send(command)

    async def measure(self) -> Figures:
        self._pipe.send(Measure())
        figures: Figures = await asyncio.to_thread(self._pipe.recv)
        return figures


@contextmanager
def paced_server(max_num_seqs: int, *, uvloop: bool) -> Iterator[PacedServer]:
    """A server process of its own. `uvloop`: which event loop it runs."""
    with _process(_serve, max_num_seqs, uvloop) as pipe:
        yield PacedServer(pipe, pipe.recv())
        pipe.send(Stop())


@contextmanager
def health_checks(address: str) -> Iterator[Connection]:
    """Ask for the server's health all the time. Send anything: then the milliseconds that the answers took are received."""
    with _process(_check_health, address) as pipe:
        yield pipe


@contextmanager
def _process(work: Any, *arguments: object) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")  # gRPC must not be forked
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        process.join(10)
    finally:
        process.terminate()
        ours.close()


def _serve(pipe: Connection, max_num_seqs: int, uvloop: bool) -> None:
    os.environ["GRPC_VERBOSITY"] = "NONE"
    if uvloop:
        import uvloop as fast_loop

        fast_loop.run(_run_server(pipe, max_num_seqs))
    else:
        asyncio.run(_run_server(pipe, max_num_seqs))


async def _run_server(pipe: Connection, max_num_seqs: int) -> None:
    from aengine.server.app import Server

    commands: asyncio.Queue[Any] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
    engine = PacedEngine(max_num_seqs)
    async with engine, loop_lag() as lags:
        server = Server(engine, port=0, access_log=False)
        await server.start()
        await server.set_serving()
        gc.collect()
        gc.freeze()  # as aengine-grpc does
        pipe.send(server.address)
        async with AsyncExitStack() as consumers:
            while True:
                match await commands.get():
                    case Pace(steps_per_second):
                        engine.runner.steps_per_second = steps_per_second
                    case Consume(num_streams):
                        await consumers.aclose()
                        await consumers.enter_async_context(_consumers(engine, num_streams))
                    case Measure():
                        stats = engine.stats()
                        taken, lags[:] = tuple(lags), ()
                        pipe.send(
                            Figures(
                                time.monotonic(),
                                time.process_time(),
                                stats.completion_tokens,
                                stats.steps,
                                stats.running + stats.parked,
                                taken,
                            )
                        )
                    case Stop():
                        break
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        await server.stop()


@asynccontextmanager
async def _consumers(engine: PacedEngine, num_streams: int) -> AsyncIterator[None]:
    async def consume() -> None:
        while True:
            async for _ in engine.stream(list(PROMPT), SamplingParams(temperature=0.0, ignore_eos=True)):
                pass

    tasks = [asyncio.create_task(consume()) for _ in range(num_streams)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _check_health(pipe: Connection, address: str) -> None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        times: list[float] = []
        while not pipe.poll(HEALTH_INTERVAL):
            start = time.perf_counter()
            stub.Check(health_pb2.HealthCheckRequest())
            times.append(1e3 * (time.perf_counter() - start))
        pipe.send(times)
