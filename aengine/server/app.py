"""The server as a whole: the core, its doors, metrics, and the order of starting and stopping.

Does not own the engine: it is started and closed by the caller, so that a server can be put on an engine that also serves others in the
same process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any

from aengine.api.engine import ServedEngine
from aengine.server.config.options import ModelChoice, ServerConfig
from aengine.server.core.core import Core
from aengine.server.core.errors import draining
from aengine.server.core.model_pool import ModelPool
from aengine.server.core.resume import ResumableStreams
from aengine.server.telemetry.metrics import Metrics, log_call, registry_of, serve_metrics
from aengine.server.telemetry.tracing import tracing_of_environment

END_SECONDS = 0.5
"""How long the last errors may take to reach the clients."""

# A client may ask again as soon as it has its response. Refused calls end with UNAVAILABLE, but those that reach gRPC while it shuts
# down with CANCELLED; so a server that has become idle goes on refusing for this long.
REFUSE_SECONDS = 0.1


class Server:
    """Serves `engine` over gRPC, HTTP or both. Must be made, used and closed in one event loop.

    `start()` opens the ports with health NOT_SERVING; `set_serving()` follows once the engine is started. `drain()` refuses new
    generations and waits for those that run; `stop()` ends what is left with DRAINING and closes the ports.
    """

    def __init__(
        self, engine: ServedEngine, config: ServerConfig | None = None, models: Sequence[ModelChoice] = (), **overrides: Any
    ) -> None:
        """`models`: others, whose engines the server makes, starts and closes. `overrides` are fields of `ServerConfig`. Raises
        `ConfigError`."""
        self.config = config = ServerConfig.of(config, **overrides)
        limits: dict[str, Any] = {"memory": config.models_memory, "keep_alive": config.models_keep_alive}
        self._models = ModelPool(engine, models, aliases=config.model_aliases, **limits) if models else None
        self.core = Core(engine, self.config, self._models)
        if self.config.access_log:
            self.core.observers.on_call_end.append(log_call)
        self.metrics_address: str | None = None  # host:port of the metrics, once started; None without them
        self._running = AsyncExitStack()  # what `stop()` ends beside the doors
        self._drain_grace: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._drains = False
        self._grpc = self._http = None
        journal = None if self.config.journal is None else self.core.journal
        self.resumables = ResumableStreams(journal)  # the generations of both doors that outlive their calls
        # What a door is made of is imported with it.
        if self.config.port is not None:
            from aengine.server.grpc.door import GrpcFrontend

            self._grpc = GrpcFrontend(self.core, self.resumables, self.request_drain)
        if self.config.http_port is not None:
            from aengine.server.http.door import HttpFrontend  # loads what speaks HTTP

            self._http = HttpFrontend(self.core, self.resumables)
        self._doors = [door for door in (self._grpc, self._http) if door is not None]

    @property
    def address(self) -> str:
        """host:port of gRPC; after `start()` with the port that the system picked for 0. Empty without gRPC."""
        return "" if self._grpc is None else self._grpc.address

    @property
    def http_address(self) -> str:
        """host:port of HTTP; after `start()` with the port that the system picked for 0. Empty without HTTP."""
        return "" if self._http is None else self._http.address

    @property
    def in_flight(self) -> int:
        """The number of generations that have not ended."""
        return self.core.admission.in_flight

    async def start(self) -> None:
        """Open the doors. Raises `BindError`, or `ConfigError` for files that cannot be used."""
        core = self.core
        try:
            await asyncio.to_thread(core.authenticator.load)
            metrics = Metrics(core.backend, core.calls, {door.ok: door.methods for door in self._doors})
            if self.config.metrics_port is not None:
                server = serve_metrics(metrics, self.config.metrics_host, self.config.metrics_port)
                self.metrics_address = await self._running.enter_async_context(server)
            if self._http is not None or self.config.metrics_port is not None:
                core.metrics = registry_of(metrics)
                metrics.loop_lag.start()
                self._running.callback(metrics.loop_lag.stop)
                core.observers.on_call_end.append(metrics.on_call_end)
                core.observers.on_generation_end.append(metrics.on_generation_end)
            if (tracing := tracing_of_environment()) is not None:
                tracing.observe(core.observers)
                self._running.push_async_callback(asyncio.to_thread, tracing.close)
            await core.journal.open_file()
            await self.resumables.open_journal()
            for door in self._doors:
                await door.start()
        except BaseException:
            await self.stop()
            raise
        watching = asyncio.create_task(core.calls.watch(), name="aengine-stalled-calls")
        self._running.callback(watching.cancel)

    async def set_serving(self, serving: bool = True) -> None:
        """Say, and notify health watchers, whether the engine can take requests. Ignored once draining."""
        if not self._drains:
            self.core.serving = serving
            if serving and self._models is not None:
                self._models.start()
            if serving:
                self.resumables.resume()
            if self._grpc is not None:
                self._grpc.set_serving(serving)
            if self._http is not None and serving:
                self._http.begin_serving()

    def request_drain(self, grace: float | None = None) -> None:
        """Ask whoever runs the server to shut it down, as a signal does: `wait_drain_requested()` returns. `grace`: how long requests
        may still run, in seconds; None: the configuration's `drain_seconds`. Only the first call counts."""
        if not self._drain_grace.done():
            self._drain_grace.set_result(self.config.drain_seconds if grace is None else grace)

    async def wait_drain_requested(self) -> float:
        """Wait for `request_drain()`; returns the grace in seconds."""
        return await asyncio.shield(self._drain_grace)

    async def drain(self, seconds: float | None = None) -> bool:
        """Shut down gently; returns whether all generations finished.

        Notifies health watchers, waits for `drain_delay`, refuses new generations, and waits up to `seconds` for those that run. None:
        the configuration's `drain_seconds`.
        """
        self._drains, self.core.serving, admission = True, False, self.core.admission
        if self._grpc is not None:
            self._grpc.announce_drain()
        await asyncio.sleep(self.config.drain_delay)
        admission.closed = True
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(admission.idle.wait(), self.config.drain_seconds if seconds is None else seconds)
            await asyncio.sleep(REFUSE_SECONDS)
        return not admission.in_flight

    async def stop(self, reason: Exception | None = None) -> None:
        """Close the doors; calls in flight end with `reason`. None: DRAINING."""
        self.core.admission.closed = True
        if len(self.core.calls):
            await self.core.calls.end_all(reason or draining(), END_SECONDS)
            await asyncio.sleep(REFUSE_SECONDS)
        for door in self._doors:
            await door.stop()
        await self.core.journal.close_file()
        if self._models is not None:
            await self._models.aclose()
        self.core.decoding.close()
        await self._running.aclose()
