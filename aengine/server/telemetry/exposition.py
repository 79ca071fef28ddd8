"""Metrics as Prometheus reads them: names, help, labels, and the HTTP server that answers a scrape. Counts nothing itself.

A scrape is answered in a thread. It asks the event loop for a snapshot and waits a moment; a loop that is blocked or gone is told
by the age of the snapshot before, which is what the scrape then shows.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from aengine.errors import AEngineError
from aengine.histogram import HistogramSnapshot
from aengine.server.telemetry.metrics import Metrics, MetricsSnapshot

SNAPSHOT_SECONDS = 1.0
"""How long a scrape waits for the event loop."""


class MetricsBindError(AEngineError):
    """The address of the metrics cannot be bound."""


class MetricsCollector(Collector):
    """What a registry asks for families, from any thread but the loop's. Must be made in the event loop of `metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._latest = metrics.snapshot()

    def collect(self) -> Iterator[Metric]:
        snapshot = self._latest = self._snapshot()
        yield from families(snapshot, age=time.monotonic() - snapshot.taken)

    def describe(self) -> Iterator[Metric]:
        """The same families, for their names."""
        return families(self._latest, age=0.0)

    def _snapshot(self) -> MetricsSnapshot:
        """A new one, or the latest there is."""
        future: Future[MetricsSnapshot] = Future()
        try:
            self._loop.call_soon_threadsafe(self._answer, future)
        except RuntimeError:  # the loop is closed
            return self._latest
        try:
            return future.result(SNAPSHOT_SECONDS)
        except FutureTimeoutError:
            return self._latest if future.cancel() else future.result()

    def _answer(self, future: Future[MetricsSnapshot]) -> None:
        if not future.set_running_or_notify_cancel():
            return  # too late; what a snapshot takes is kept for the next
        try:
            future.set_result(self._metrics.snapshot())
        except Exception as error:
            future.set_exception(error)


class MetricsServer:
    """Serves `metrics` over HTTP, in plain text and without authentication. Must be made, used and closed in one event loop.

    It has a registry of its own, so that several can be in one process.
    """

    def __init__(self, metrics: Metrics, *, host: str, port: int) -> None:
        """`port`: 0 lets the system pick one."""
        self._host = host
        self._port = port
        self._registry = CollectorRegistry()
        self._registry.register(MetricsCollector(metrics))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._running: tuple[Any, threading.Thread] | None = None

    @property
    def address(self) -> str:
        """host:port; after `start()` with the port that the system picked for 0."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Open the port. Raises `MetricsBindError`."""
        try:  # in a thread, since binding may ask for the name of the address
            server, thread = await asyncio.to_thread(start_http_server, self._port, self._host, self._registry)
        except OSError as error:
            raise MetricsBindError(f"cannot serve metrics on {self.address}: {error.strerror or error}") from error
        self._running = server, thread
        self._port = server.server_port

    async def stop(self) -> None:
        """Close the port. Nothing happens where it is not open."""
        if self._running is not None:
            (server, thread), self._running = self._running, None
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            await asyncio.to_thread(thread.join)


def families(snapshot: MetricsSnapshot, *, age: float) -> Iterator[Metric]:
    """Every metric of ours. `age`: seconds since the snapshot was taken."""
    yield from _server_families(snapshot)
    yield from _generation_families(snapshot)
    yield from _engine_families(snapshot)
    yield from _loop_families(snapshot, age)


def _server_families(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    yield InfoMetricFamily("aengine_build", "What runs.", {"version": snapshot.version})
    calls = CounterMetricFamily("aengine_calls", "RPCs that ended, by method and status code.", labels=("method", "code"))
    for key, count in snapshot.calls.items():
        calls.add_metric(key, count)
    yield calls
    yield _counters("aengine_call_errors", "RPCs that ended with an error, by its reason.", "reason", snapshot.call_errors)
    yield _counters("aengine_call_messages_sent", "Messages sent to clients, by method.", "method", snapshot.messages_sent)
    seconds = HistogramMetricFamily("aengine_call_seconds", "Seconds that an RPC took, by method.", labels=("method",))
    for method, histogram in snapshot.call_seconds.items():
        seconds.add_metric((method,), _buckets(histogram), histogram.total)
    yield seconds
    yield GaugeMetricFamily("aengine_calls_in_flight", "RPCs under way.", snapshot.calls_in_flight)
    yield GaugeMetricFamily("aengine_draining", "1 while new generations are refused because the server shuts down.", snapshot.draining)


def _generation_families(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    finished = {reason.value: count for reason, count in snapshot.generations.items()}
    yield _counters("aengine_generations", "Generations that ended, by finish reason.", "reason", finished)
    yield GaugeMetricFamily(
        "aengine_generations_in_flight", "Generations between their start and their end.", snapshot.generations_in_flight
    )
    yield _histogram("aengine_queue_seconds", "Seconds from arrival to the first step.", snapshot.queue_seconds)
    yield _histogram("aengine_time_to_first_token_seconds", "Seconds from arrival to the first token.", snapshot.first_token_seconds)
    yield _histogram("aengine_inter_token_seconds", "Seconds between tokens as they are sent.", snapshot.inter_token_seconds)
    yield _histogram("aengine_generation_seconds", "Seconds from arrival to the end.", snapshot.generation_seconds)


def _engine_families(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    stats = snapshot.engine
    model = InfoMetricFamily("aengine_model", "What is served.", labels=("name", "architecture", "dtype", "device"))
    if snapshot.model is not None:
        info = snapshot.model
        model.add_metric((), {"name": info.name, "architecture": info.architecture, "dtype": info.dtype, "device": info.device})
    yield model
    yield GaugeMetricFamily("aengine_engine_up", "1 while the engine takes requests.", snapshot.engine_up)
    yield GaugeMetricFamily("aengine_engine_paused", "1 while the engine is paused.", stats.paused)
    yield GaugeMetricFamily("aengine_sequences_running", "Sequences that are being computed.", stats.running)
    yield GaugeMetricFamily("aengine_requests_waiting", "Sequences that wait for their first step.", stats.waiting)
    yield GaugeMetricFamily("aengine_sequences_parked", "Sequences that wait for their readers.", stats.parked)
    yield GaugeMetricFamily("aengine_kv_pages_used", "Pages of the KV cache that sequences hold.", stats.pages_used)
    yield GaugeMetricFamily("aengine_kv_pages_capacity", "Pages of the KV cache.", stats.pages_total)
    yield GaugeMetricFamily("aengine_kv_cached_tokens", "Tokens that only the prefix cache holds.", stats.cached_tokens)
    yield CounterMetricFamily("aengine_prompt_tokens", "Prompt tokens of requests that began.", stats.prompt_tokens)
    yield CounterMetricFamily("aengine_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", stats.cached_prompt_tokens)
    yield CounterMetricFamily("aengine_completion_tokens", "Tokens generated.", stats.completion_tokens)
    yield CounterMetricFamily("aengine_steps", "Steps of the engine.", stats.steps)
    yield CounterMetricFamily("aengine_preemptions", "Sequences that gave way to others.", stats.preemptions)
    yield _histogram("aengine_step_seconds", "Seconds of a step, to its commit from its launch or the commit before.", stats.step_seconds)
    yield _histogram("aengine_step_tokens", "Tokens computed in a step.", stats.step_tokens)


def _loop_families(snapshot: MetricsSnapshot, age: float) -> Iterator[Metric]:
    yield _histogram("aengine_event_loop_lag_seconds", "Seconds by which the event loop wakes late.", snapshot.loop_lag_seconds)
    yield GaugeMetricFamily("aengine_event_loop_lag_max_seconds", "The most of it since the last scrape.", snapshot.loop_lag_max)
    yield GaugeMetricFamily("aengine_snapshot_age_seconds", "How old these numbers are: 0 unless the event loop is blocked.", age)


def _counters(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def _histogram(name: str, text: str, histogram: HistogramSnapshot) -> Metric:
    return HistogramMetricFamily(name, text, _buckets(histogram), histogram.total)


def _buckets(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """Counts up to each bound, as Prometheus has them."""
    buckets, count = [], 0
    for bound, more in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        count += more
        buckets.append((bound, float(count)))
    return buckets
