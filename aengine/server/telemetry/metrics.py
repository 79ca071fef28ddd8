"""What the server counts, and one consistent snapshot of it and of the engine. Knows nothing of Prometheus or of HTTP.

`Metrics` is filled and read in the event loop: plain additions, no locks. How a snapshot becomes text, and how another thread gets
one, is `aengine.server.telemetry.exposition`'s.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aengine
from aengine.errors import EngineStateError
from aengine.histogram import Histogram, HistogramSnapshot
from aengine.outputs import EngineStats, FinishReason, ModelInfo
from aengine.server.calls.records import ITL_BOUNDS, CallRecord, GenerationRecord
from aengine.server.telemetry.loop_lag import LoopLag
from aengine.v1 import (
    admin_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    model_service_pb2,
    tokenizer_service_pb2,
)

if TYPE_CHECKING:
    from aengine.engine.async_engine import AsyncEngine

QUEUE_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds."""
TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Seconds."""
DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Seconds, of generations and of calls."""

METHODS: Mapping[str, str] = {
    f"/{service.full_name}/{method.name}": f"{service.name}/{method.name}"
    for file in (admin_service_pb2, engine_service_pb2, generation_service_pb2, model_service_pb2, tokenizer_service_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""The schema's methods, as gRPC calls them, and their labels."""
OTHER_METHOD = "other"
"""The label of whatever else clients make up, so that they cannot make series."""


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Everything that is exposed, at one moment."""

    taken: float  # on time.monotonic
    calls: Mapping[tuple[str, str], int]  # by method and code
    call_errors: Mapping[str, int]  # by reason
    messages_sent: Mapping[str, int]  # by method
    calls_in_flight: int
    call_seconds: Mapping[str, HistogramSnapshot]  # by method
    generations: Mapping[FinishReason, int]
    generations_in_flight: int
    queue_seconds: HistogramSnapshot
    first_token_seconds: HistogramSnapshot
    inter_token_seconds: HistogramSnapshot
    generation_seconds: HistogramSnapshot
    loop_lag_seconds: HistogramSnapshot
    loop_lag_max: float  # seconds, since the snapshot before
    engine_up: bool
    draining: bool
    engine: EngineStats
    model: ModelInfo | None  # None until it is loaded
    version: str  # of this package


class Metrics:
    """An `Observer` of everything that ends."""

    def __init__(
        self,
        engine: AsyncEngine,
        loop_lag: LoopLag,
        *,
        calls_in_flight: Callable[[], int],
        generations_in_flight: Callable[[], int],
        draining: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._loop_lag = loop_lag
        self._calls_in_flight = calls_in_flight
        self._generations_in_flight = generations_in_flight
        self._draining = draining
        # What can be is there from the start, at 0: a series that begins with its first event hides it from rate().
        self._calls: Counter[tuple[str, str]] = Counter({(method, "OK"): 0 for method in METHODS.values()})
        self._call_errors: Counter[str] = Counter()
        self._messages_sent: Counter[str] = Counter(dict.fromkeys(METHODS.values(), 0))
        self._call_seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(DURATION_BOUNDS))
        self._generations: Counter[FinishReason] = Counter(dict.fromkeys(FinishReason, 0))
        self._queue_seconds = Histogram(QUEUE_BOUNDS)
        self._first_token_seconds = Histogram(TTFT_BOUNDS)
        self._inter_token_seconds = Histogram(ITL_BOUNDS)
        self._generation_seconds = Histogram(DURATION_BOUNDS)

    def on_call_end(self, record: CallRecord) -> None:
        method = METHODS.get(record.method, OTHER_METHOD)
        self._calls[method, record.code.name] += 1
        if record.reason:
            self._call_errors[record.reason] += 1
        self._messages_sent[method] += record.messages_sent
        self._call_seconds[method].observe(record.seconds)

    def on_generation_end(self, record: GenerationRecord) -> None:
        self._generations[record.finish_reason] += 1
        if record.queue_seconds is not None:
            self._queue_seconds.observe(record.queue_seconds)
        if record.first_token_seconds is not None:
            self._first_token_seconds.observe(record.first_token_seconds)
        self._inter_token_seconds.merge(record.inter_token_seconds)
        self._generation_seconds.observe(record.total_seconds)

    def snapshot(self) -> MetricsSnapshot:
        """To be called in the event loop, like everything else here."""
        try:
            model = self._engine.model_info
        except EngineStateError:
            model = None
        return MetricsSnapshot(
            taken=time.monotonic(),
            calls=dict(self._calls),
            call_errors=dict(self._call_errors),
            messages_sent=dict(self._messages_sent),
            calls_in_flight=self._calls_in_flight(),
            call_seconds={method: histogram.snapshot() for method, histogram in self._call_seconds.items()},
            generations=dict(self._generations),
            generations_in_flight=self._generations_in_flight(),
            queue_seconds=self._queue_seconds.snapshot(),
            first_token_seconds=self._first_token_seconds.snapshot(),
            inter_token_seconds=self._inter_token_seconds.snapshot(),
            generation_seconds=self._generation_seconds.snapshot(),
            loop_lag_seconds=self._loop_lag.snapshot(),
            loop_lag_max=self._loop_lag.take_max(),
            engine_up=self._engine.healthy,
            draining=self._draining(),
            engine=self._engine.stats(),
            model=model,
            version=aengine.__version__,
        )
