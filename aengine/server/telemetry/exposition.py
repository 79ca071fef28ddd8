"""The HTTP server that serves the metrics. Counts nothing itself, and knows no metric by name but the age of the others.

A scrape is served in a thread. It asks the event loop for the metrics as they are and waits a moment; of a loop that is blocked or gone
it shows the latest there are, with their age.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from aengine.server.core.address import BindError, address_of
from aengine.server.telemetry.metrics import Metrics

SNAPSHOT_SECONDS = 1.0
"""How long a scrape waits for the event loop."""


class MetricsCollector(Collector):
    """Gives a registry its families, in any thread but the loop's. Must be made in the event loop of `metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._latest: list[Metric] = []
        self._taken = 0.0  # on time.monotonic
        self._take(Future())

    def collect(self) -> Iterator[Metric]:
        future: Future[None] = Future()
        try:
            self._loop.call_soon_threadsafe(self._take, future)
        except RuntimeError:  # the loop is closed
            return self.describe()
        try:
            future.result(SNAPSHOT_SECONDS)
        except FutureTimeoutError:
            if not future.cancel():  # it is being taken
                future.result()
        return self.describe()

    def describe(self) -> Iterator[Metric]:
        """The latest, which has all names."""
        yield from self._latest
        age = max(0.0, time.monotonic() - self._taken)
        yield GaugeMetricFamily("aengine_snapshot_age_seconds", "How old these numbers are: 0 unless the event loop is blocked.", age)

    def _take(self, future: Future[None]) -> None:
        if not future.set_running_or_notify_cancel():
            return  # too late; what reading takes away is left for the next scrape
        try:
            self._latest, self._taken = list(self._metrics.families()), time.monotonic()
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)


def registry_of(metrics: Metrics) -> CollectorRegistry:
    """`metrics` with those of the process. To be made in the event loop of `metrics`, and read in other threads."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(metrics))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


@asynccontextmanager
async def serve_metrics(metrics: Metrics, host: str, port: int) -> AsyncIterator[str]:
    """Serve `metrics` over HTTP, in plain text and without authentication, while the context lasts; its value is host:port. `port`: 0 lets
    the system pick one. Raises `BindError`. Several can be in one process: each has a registry of its own."""
    registry = registry_of(metrics)
    try:  # in a thread, since binding may ask for the name of the address
        server, thread = await asyncio.to_thread(start_http_server, port, host, registry)
    except OSError as error:
        raise BindError(f"cannot serve metrics on {address_of(host, port)}: {error.strerror or error}") from error
    try:
        yield address_of(host, server.server_port)
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join)
