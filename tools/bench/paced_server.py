"""A process that serves a `PacedEngine`, or a router of others, and tells what that cost it, and a process that asks for its health.

Apart from the client's process, so that the CPU time of each is its own. Owns both ends of the pipes between them.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from aengine.api.engine import EngineBase, ServedEngine
from aengine.api.params import SamplingParams
from aengine.api.runtime import switch_often
from aengine.bench.probes import loop_lag
from tools.bench.paced_engine import PacedEngine

PROMPT = tuple(range(3, 19))
BARE_SERVICE, BARE_METHOD = "aengine.bench", "Write"
BARE_MESSAGE = bytes(28)
"""As long as the message of a token."""
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
    tokens: int  # read of their streams, and bare messages sent
    under_way: int  # requests now, of which the engine holds pages, and bare calls
    lags: tuple[float, ...]  # milliseconds by which the event loop woke late, since this was last told


class PacedServer:
    """The process, as its client sees it."""

    def __init__(self, pipe: Connection, address: str, http_address: str, bare_address: str) -> None:
        """`bare_address`: of a server beside it that does nothing but write, to compare with."""
        self._pipe = pipe
        self.address = address
        self.http_address = http_address
        self.bare_address = bare_address

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
        yield PacedServer(pipe, *pipe.recv())
        pipe.send(Stop())


@contextmanager
def router_server(backends: Sequence[str], *, uvloop: bool) -> Iterator[PacedServer]:
    """A process that serves a router of the servers at these addresses. What it tells of tokens is what they reported last."""
    with _process(_serve_router, backends, uvloop) as pipe:
        yield PacedServer(pipe, *pipe.recv())
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
    _run(_run_server(pipe, lambda: PacedEngine(max_num_seqs)), uvloop)


def _serve_router(pipe: Connection, backends: Sequence[str], uvloop: bool) -> None:
    from aengine.router.router import Router

    _run(_run_server(pipe, lambda: Router(backends=tuple(backends))), uvloop)


def _run(work: Coroutine[Any, Any, None], uvloop: bool) -> None:
    os.environ["GRPC_VERBOSITY"] = "NONE"
    switch_often()  # as aengine-grpc does
    if uvloop:
        import uvloop as fast_loop

        fast_loop.run(work)
    else:
        asyncio.run(work)


async def _run_server(pipe: Connection, make_engine: Callable[[], ServedEngine]) -> None:
    from aengine.server.app import Server

    commands: asyncio.Queue[Any] = asyncio.Queue()
    asyncio.get_running_loop().add_reader(pipe.fileno(), lambda: commands.put_nowait(pipe.recv()))
    engine = make_engine()
    async with engine, loop_lag() as lags, AsyncExitStack() as consumers:
        server, bare = Server(engine, port=0, http_port=0, access_log=False), _BareServer()
        await server.start()
        await server.set_serving()
        bare_address = await bare.start()
        gc.collect()
        gc.freeze()  # as aengine-grpc does
        pipe.send((server.address, server.http_address, bare_address))
        while True:
            match await commands.get():
                case Pace(steps_per_second):
                    bare.steps_per_second = steps_per_second
                    if isinstance(engine, PacedEngine):
                        engine.runner.steps_per_second = steps_per_second
                case Consume(num_streams):
                    await consumers.aclose()
                    await consumers.enter_async_context(_consumers(engine, num_streams))
                case Measure():
                    stats, cpu_seconds = engine.stats(), time.process_time()
                    unread = engine.num_unread if isinstance(engine, PacedEngine) else 0
                    tokens = stats.completion_tokens - unread + bare.num_sent
                    under_way = stats.running + stats.parked + bare.num_calls
                    pipe.send(Figures(time.monotonic(), cpu_seconds, tokens, under_way, tuple(lags)))
                    lags.clear()
                case Stop():
                    break
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        await bare.stop()
        await server.stop()


class _BareServer:
    """What grpc.aio costs by itself: a handler that writes as many bytes as a token takes, at the pace of the engine."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.num_calls = 0
        self.steps_per_second: float | None = None
        handler: Any = grpc.unary_stream_rpc_method_handler(self._write)
        self._server = aio.server()
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BARE_SERVICE, {BARE_METHOD: handler}),))

    async def start(self) -> str:
        """Returns its address."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(None)

    async def _write(self, request: bytes, context: Any) -> None:
        self.num_calls += 1
        try:
            while True:
                pace = self.steps_per_second
                if pace is not None:
                    await asyncio.sleep(1 / pace - time.monotonic() % (1 / pace))  # all calls at the same moments
                await context.write(BARE_MESSAGE)
                self.num_sent += 1
        finally:
            self.num_calls -= 1


@asynccontextmanager
async def _consumers(engine: EngineBase, num_streams: int) -> AsyncIterator[None]:
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
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        times: list[float] = []
        while not pipe.poll(HEALTH_INTERVAL):
            start = time.perf_counter()
            stub.Check(health_pb2.HealthCheckRequest())
            times.append(1e3 * (time.perf_counter() - start))
        pipe.send(times)
