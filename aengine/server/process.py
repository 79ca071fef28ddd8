"""The server as a process: the order of starting and stopping, and what signals do.

Owns signals, the event loop and the exit code; knows nothing of flags. The first SIGTERM or SIGINT drains, the second stops at once;
a drain that a client asked for is joined by the first signal. While the model loads, the first one leaves the loading between two
weights and exits with 0; what cannot be left there, a download or a compilation, is waited for. Once nothing but the engine is waited
for, a further signal ends the process as if it were not handled. SIGUSR1 puts the engine to sleep, SIGUSR2 wakes it.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import signal
from collections.abc import Coroutine
from typing import Any

from aengine.api.engine import ServedEngine
from aengine.api.errors import AEngineError, ConfigError, EngineDeadError
from aengine.api.runtime import switch_often
from aengine.server.app import Server
from aengine.server.config.options import ServerConfig
from aengine.server.config.settings import Settings

logger = logging.getLogger("aengine.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SLEEP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""The first puts the engine to sleep, the second wakes it."""


HEALTH_SECONDS = 0.2
"""How late health may say that an engine takes requests, or does so no more."""


class Sleeper:
    """Puts an engine to sleep and wakes it, in the order of the signals."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._changes: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def on_signal(self, number: int) -> None:
        self._changes.put_nowait(signal.Signals(number))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            number = await self._changes.get()
            sleeps = number is SLEEP_SIGNALS[0]
            try:
                memory = await (self._engine.sleep() if sleeps else self._engine.wake())
            except AEngineError as error:
                logger.warning("%s: %s", number.name, error)
            else:
                change = f"{memory.before >> 20} to {memory.after >> 20} MiB in use"
                logger.info("%s: the engine %s, %s", number.name, "sleeps" if sleeps else "is awake", change)


def make_engine(settings: Settings) -> ServedEngine:
    """One that is not started. What it is made of is imported with it: a router needs no torch."""
    if settings.router is not None:
        from aengine.router.router import Router

        if settings.router.ray:
            return Router.on_ray(settings.engine, ray=settings.ray, config=settings.router)
        return Router(settings.engine, config=settings.router)
    from aengine.engine.async_engine import AsyncEngine

    return AsyncEngine(settings.engine)


async def run(settings: Settings) -> int:
    """Serve until a signal or a request to drain; returns the exit code. Raises what starting raises, and `EngineDeadError`."""
    engine, config = make_engine(settings), settings.server
    server = Server(engine, config, settings.models)
    loop, signalled, halt = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def on_signal(number: int) -> None:
        logger.info("%s", signal.Signals(number).name)
        if signalled.is_set():
            halt.set()
        signalled.set()
        server.request_drain()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    sleeper = Sleeper(engine)
    for number in SLEEP_SIGNALS:
        loop.add_signal_handler(number, sleeper.on_signal, number)
    await server.start()
    dead: EngineDeadError | None = None
    background: list[asyncio.Task[None]] = []
    try:
        if not await _before(engine.start(), server.wait_drain_requested()):
            return 0
        gc.collect()
        gc.freeze()  # what is loaded stays: a collection that looks through it would hold up every stream for tens of milliseconds
        await server.set_serving()
        if config.exposed:
            logger.warning("%s can be reached from elsewhere, in plain text", config.host)
        if server.metrics_address is not None:
            logger.info("metrics at http://%s/metrics", server.metrics_address)
        if server.address:
            logger.info("aengine-grpc listening on %s (model %s)", server.address, server.core.backend.model_info.name)
        if server.http_address:
            scheme = "https" if config.tls else "http"
            logger.info("aengine-serve listening on %s://%s (model %s)", scheme, server.http_address, server.core.backend.model_info.name)
        background = [asyncio.create_task(_follow_health(server))]
        try:
            await _before(engine.wait_stopped(), server.wait_drain_requested())
        except EngineDeadError as error:
            dead = error  # for the calls that had no turn yet to find it out
            await server.set_serving(False)
            raise
        seconds = await server.wait_drain_requested()
        logger.info("draining %d requests, up to %g s", server.in_flight, seconds)
        await _before(server.drain(seconds), halt.wait())
        if server.in_flight:
            logger.warning("ending %d requests that are still under way", server.in_flight)
        return 0 if engine.healthy else 1
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await server.stop(dead)
        await sleeper.close()
        for number in (*_SIGNALS, *SLEEP_SIGNALS):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        await engine.aclose()


async def _follow_health(server: Server) -> None:
    """A router may lose all of its replicas, and get some back."""
    while True:
        await asyncio.sleep(HEALTH_SECONDS)
        await server.set_serving(server.core.engine.healthy)


def uses_uvloop(config: ServerConfig) -> bool:
    """Whether to use uvloop. Raises `ConfigError` where it must be used and is not installed."""
    installed = importlib.util.find_spec("uvloop") is not None
    if config.uvloop == "on" and not installed:
        raise ConfigError.of("uvloop", "'on' needs the package uvloop: pip install uvloop")
    return config.uvloop != "off" and installed


def run_process(settings: Settings) -> int:
    """`run()` in an event loop of its own."""
    switch_often()
    if uses_uvloop(settings.server):
        import uvloop

        return uvloop.run(run(settings))
    return asyncio.run(run(settings))


async def _before(work: Coroutine[Any, Any, object], stop: Coroutine[Any, Any, object]) -> bool:
    """Run `work`, or cancel it when `stop` comes first; returns whether it was done. Raises what `work` raises."""
    task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(stop)
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
        done = task.done()
    finally:
        task.cancel()
        waiter.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)
    if done:
        task.result()
    return done
