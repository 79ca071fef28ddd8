"""Counters and histograms of the server, and the families in which Prometheus reads them and the engine's. Knows nothing of HTTP.

Filled and read in the event loop: plain additions, no locks. `aengine.server.telemetry.metrics` brings the families to a scrape. A timer
measures how late the event loop wakes: every stream of the server waits as long as the loop does, so this is where blocking code shows.

The HTTP server that serves the metrics. Counts nothing itself, and knows no metric by name but the age of the others.

A scrape is served in a thread. It asks the event loop for the metrics as they are and waits a moment; of a loop that is blocked or gone
it shows the latest there are, with their age.

How log lines look, text or one JSON object a line, and the access log. What else is logged is up to the others.

A record may carry fields beside its message: `logger.info("call", extra={FIELDS: {"code": "OK"}})`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sized
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import asynccontextmanager
from datetime import datetime, timezone

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from aengine.api import VERSION
from aengine.api.errors import EngineStateError
from aengine.api.outputs import DraftSource, DraftUsage, FinishReason, Histogram, HistogramSnapshot, ReplicaState
from aengine.server.config.options import ServerConfig
from aengine.server.core.calls_in_flight import ITL_BOUNDS, CallRecord, GenerationRecord
from aengine.server.core.core import Backend, BindError, address_of

INTERVAL = 0.05
"""Seconds between two samples: 20 timers a second cost some hundred microseconds."""
LAG_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds."""


class LoopLag:
    """To be used from the loop that it measures."""

    def __init__(self, interval: float = INTERVAL) -> None:
        """`interval`: seconds between two samples."""
        self.seconds = Histogram(LAG_BOUNDS)  # by which the samples came late
        self._interval = interval
        self._max = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Measure the running loop, until `stop()`."""
        # The loop's own clock does not serve: uvloop's stands still while a callback runs.
        due = time.monotonic() + self._interval
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._sample, due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def take_max(self) -> float:
        """The latest sample, in seconds, since this was last asked for."""
        latest, self._max = self._max, 0.0
        return latest

    def _sample(self, due: float) -> None:
        lag = max(0.0, time.monotonic() - due)
        self.seconds.observe(lag)
        self._max = max(self._max, lag)
        self.start()


QUEUE_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds."""
TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Seconds."""
DURATION_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Seconds, of generations and of calls."""

OTHER_METHOD = "other"
"""The label of whatever else clients make up, so that they cannot make series."""


class Metrics:
    """Counts what has ended, and reads the rest when it is asked for."""

    def __init__(self, backend: Backend, calls: Sized, methods: Mapping[str, Mapping[str, str]]) -> None:
        """`calls`: those in flight; `methods`: for the code of a call that succeeded, what clients can call, and their labels."""
        self._methods = {method: label for labels in methods.values() for method, label in labels.items()}
        self.loop_lag = LoopLag()
        self._backend = backend
        self._engine = backend.engine
        self._admission = backend.admission
        self._calls_in_flight = calls
        # All known labels begin at 0: a series that begins with its first event hides it from rate().
        self._calls: Counter[tuple[str, str]] = Counter({(label, ok): 0 for ok, labels in methods.items() for label in labels.values()})
        self._call_errors: Counter[str] = Counter()
        self._messages_sent: Counter[str] = Counter(dict.fromkeys(self._methods.values(), 0))
        self._call_seconds: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(DURATION_BOUNDS))
        self._generations: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self._queue_seconds = Histogram(QUEUE_BOUNDS)
        self._first_token_seconds = Histogram(TTFT_BOUNDS)
        self._inter_token_seconds = Histogram(ITL_BOUNDS)
        self._generation_seconds = Histogram(DURATION_BOUNDS)

    def on_call_end(self, record: CallRecord) -> None:
        method = self._methods.get(record.method, OTHER_METHOD)
        self._calls[method, record.code] += 1
        if record.reason:
            self._call_errors[record.reason] += 1
        self._messages_sent[method] += record.messages_sent
        self._call_seconds[method].observe(record.seconds)

    def on_generation_end(self, record: GenerationRecord) -> None:
        self._generations[record.finish_reason.value] += 1
        if record.timing.queue is not None:
            self._queue_seconds.observe(record.timing.queue)
        if record.timing.first_token is not None:
            self._first_token_seconds.observe(record.timing.first_token)
        self._inter_token_seconds.merge(record.inter_token_seconds)
        self._generation_seconds.observe(record.total_seconds)

    def families(self) -> Iterator[Metric]:
        """Every metric of ours, as it is now. To be called in the event loop, like everything else here."""
        yield InfoMetricFamily("aengine_build", "What runs.", {"version": VERSION})
        calls = CounterMetricFamily("aengine_calls", "Calls that ended, by method and status code.", labels=("method", "code"))
        for key, count in self._calls.items():
            calls.add_metric(key, count)
        yield calls
        yield _counters("aengine_call_errors", "Calls that ended with an error, by its reason.", "reason", self._call_errors)
        yield _counters("aengine_call_messages_sent", "Messages sent to clients, by method.", "method", self._messages_sent)
        seconds = HistogramMetricFamily("aengine_call_seconds", "Seconds that a call took, by method.", labels=("method",))
        for method, histogram in self._call_seconds.items():
            seconds.add_metric((method,), _buckets(histogram), histogram.total)
        yield seconds
        yield GaugeMetricFamily("aengine_calls_in_flight", "Calls under way.", len(self._calls_in_flight))
        draining = "1 while new generations are refused because the server shuts down."
        yield GaugeMetricFamily("aengine_draining", draining, self._admission.closed)
        yield _counters("aengine_generations", "Generations that ended, by finish reason.", "reason", self._generations)
        in_flight = "Generations between their start and their end."
        yield GaugeMetricFamily("aengine_generations_in_flight", in_flight, self._admission.in_flight)
        yield _histogram("aengine_queue_seconds", "Seconds from arrival to the first step.", self._queue_seconds)
        yield _histogram("aengine_time_to_first_token_seconds", "Seconds from arrival to the first token.", self._first_token_seconds)
        yield _histogram("aengine_inter_token_seconds", "Seconds between tokens as they are sent.", self._inter_token_seconds)
        yield _histogram("aengine_generation_seconds", "Seconds from arrival to the end.", self._generation_seconds)
        yield from self._engine_families()
        lag = self.loop_lag
        yield _histogram("aengine_event_loop_lag_seconds", "Seconds by which the event loop wakes late.", lag.seconds)
        yield GaugeMetricFamily("aengine_event_loop_lag_max_seconds", "The most of it since the last scrape.", lag.take_max())

    def _engine_families(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        model = InfoMetricFamily("aengine_model", "What is served.", labels=("name", "architecture", "dtype", "device"))
        try:
            info = self._backend.model_info
        except EngineStateError:  # it is not loaded yet
            pass
        else:
            model.add_metric((), {"name": info.name, "architecture": info.architecture, "dtype": info.dtype, "device": info.device})
        yield model
        yield GaugeMetricFamily("aengine_engine_up", "1 while the engine takes requests.", self._engine.healthy)
        yield GaugeMetricFamily("aengine_engine_paused", "1 while the engine is paused.", stats.paused)
        yield GaugeMetricFamily("aengine_engine_sleep_level", "The level of its sleep; 0: it is awake.", stats.sleep_level)
        yield CounterMetricFamily("aengine_weights_updates", "How often the weights were replaced.", stats.weights_version)
        yield GaugeMetricFamily("aengine_sequences_running", "Sequences that are being computed.", stats.running)
        yield GaugeMetricFamily("aengine_requests_waiting", "Sequences that wait for their first step.", stats.waiting)
        yield GaugeMetricFamily("aengine_sequences_parked", "Sequences that wait for their readers.", stats.parked)
        yield GaugeMetricFamily(
            "aengine_uncomputed_tokens", "Tokens of sequences to compute before their next output.", stats.uncomputed_tokens
        )
        yield GaugeMetricFamily("aengine_kv_pages_used", "Pages of the KV cache that sequences hold.", stats.pages_used)
        yield GaugeMetricFamily("aengine_kv_pages_capacity", "Pages of the KV cache.", stats.pages_total)
        yield GaugeMetricFamily("aengine_kv_cached_tokens", "Tokens that only the prefix cache holds.", stats.cached_tokens)
        yield CounterMetricFamily("aengine_prompt_tokens", "Prompt tokens of requests that began.", stats.prompt_tokens)
        yield CounterMetricFamily("aengine_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", stats.cached_prompt_tokens)
        yield CounterMetricFamily("aengine_completion_tokens", "Tokens generated.", stats.completion_tokens)
        yield CounterMetricFamily("aengine_loaded_tokens", "Tokens whose KV came from a tier.", stats.loaded_tokens)
        yield CounterMetricFamily("aengine_saved_tokens", "Tokens whose KV was written to files.", stats.saved_tokens)
        yield GaugeMetricFamily("aengine_loading_sequences", "Waiting sequences whose prefix is being loaded.", stats.loading)
        yield GaugeMetricFamily("aengine_sessions", "Sessions that are known.", stats.sessions)
        yield GaugeMetricFamily("aengine_session_tokens", "Tokens whose KV is kept for sessions.", stats.session_tokens)
        yield GaugeMetricFamily("aengine_kv_host_bytes", "Bytes of KV in host memory beside the pool.", stats.host_kv_bytes)
        yield GaugeMetricFamily("aengine_kv_disk_bytes", "Bytes of KV in files.", stats.disk_kv_bytes)
        drafts = {source.value: DraftUsage(source.value) for source in DraftSource} | {one.drafter: one for one in stats.drafts}
        for name, text, count in (
            ("aengine_draft_steps", "Steps in which a sequence had drafts, by drafter.", "steps"),
            ("aengine_draft_tokens", "Draft tokens that were checked, by drafter.", "drafted"),
            ("aengine_accepted_draft_tokens", "Draft tokens that were right, by drafter.", "accepted"),
        ):
            yield _counters(name, text, "drafter", {drafter: getattr(one, count) for drafter, one in drafts.items()})
        yield CounterMetricFamily("aengine_steps", "Steps of the engine.", stats.steps)
        yield CounterMetricFamily("aengine_preemptions", "Sequences that gave way to others.", stats.preemptions)
        step_seconds = "Seconds of a step, to its commit from its launch or the commit before."
        yield from self._replica_families()
        yield _histogram("aengine_step_seconds", step_seconds, stats.step_seconds)
        yield _histogram("aengine_step_tokens", "Tokens computed in a step.", stats.step_tokens)

    def _replica_families(self) -> Iterator[Metric]:
        replicas = self._engine.replicas()
        for name, text, state in (
            ("aengine_replica_up", "1 while a replica gets requests.", ReplicaState.SERVING),
            ("aengine_replica_superseded", "1 while replicas of a newer generation get the requests.", ReplicaState.SUPERSEDED),
            ("aengine_replica_refused", "1 while a replica cannot be used.", ReplicaState.REFUSED),
        ):
            states = GaugeMetricFamily(name, text, labels=("replica",))
            for one in replicas:
                states.add_metric((one.name,), one.state is state)
            yield states
        generations = InfoMetricFamily(
            "aengine_replica_generation", "Replicas of one generation give the same tokens.", labels=("replica",)
        )
        for one in replicas:
            generations.add_metric((one.name,), {"generation": one.generation})
        yield generations
        for name, text, count in (
            ("aengine_replica_sequences_running", "Sequences that a replica computes.", "running"),
            ("aengine_replica_requests_waiting", "Sequences that wait at a replica for their first step.", "waiting"),
            ("aengine_replica_uncomputed_tokens", "Tokens of its sequences to compute before their next output.", "uncomputed_tokens"),
            ("aengine_replica_kv_pages_used", "Pages of the KV cache that sequences hold at a replica.", "pages_used"),
        ):
            gauge = GaugeMetricFamily(name, text, labels=("replica",))
            for one in replicas:
                gauge.add_metric((one.name,), getattr(one.report.stats, count))
            yield gauge
        for name, text, count in (
            ("aengine_replica_prompt_tokens", "Prompt tokens of requests that began at a replica.", "prompt_tokens"),
            ("aengine_replica_cached_prompt_tokens", "Those found in its prefix cache.", "cached_prompt_tokens"),
            ("aengine_replica_completion_tokens", "Tokens generated at a replica.", "completion_tokens"),
        ):
            counts = {one.name: getattr(one.report.stats, count) for one in replicas}
            yield _counters(name, text, "replica", counts)


def _counters(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def _histogram(name: str, text: str, histogram: Histogram | HistogramSnapshot) -> Metric:
    return HistogramMetricFamily(name, text, _buckets(histogram), histogram.total)


def _buckets(histogram: Histogram | HistogramSnapshot) -> list[tuple[str, float]]:
    """Counts up to each bound, as Prometheus has them."""
    buckets, count = [], 0
    for bound, more in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        count += more
        buckets.append((bound, float(count)))
    return buckets


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


FIELDS = "aengine_fields"
_PLAIN = re.compile(r"[\w./:@+\[\]%-]+", re.ASCII)

access_logger = logging.getLogger("aengine.access")


class TextFormatter(logging.Formatter):
    """`2026-11-21 02:12:46,272 INFO message name=value ...`; values with other characters than those of words are quoted."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return " ".join((line, *(f"{name}={_word(value)}" for name, value in getattr(record, FIELDS, {}).items())))


class JsonFormatter(logging.Formatter):
    """`{"time": "2026-11-21T02:12:46.272Z", "level": "INFO", "logger": "aengine.server", "message": ..., name: value, ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {"time": time, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_call(record: CallRecord) -> None:
    """A line of the access log, at level DEBUG for what is polled. Never holds a prompt, an output or a token of a caller."""
    level = logging.DEBUG if record.is_polled and not record.reason else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    fields: dict[str, object] = {
        "method": record.method,
        "code": record.code,
        "reason": record.reason,
        "ms": round(record.seconds * 1000, 1),
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "principal": record.caller.name,
        "peer": record.peer,
        "messages": record.messages_sent,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "draft_tokens": record.draft_tokens,
        "accepted_draft_tokens": record.accepted_draft_tokens,
    }
    # Fields that do not apply are left out.
    shown = {name: value for name, value in fields.items() if value or name in ("ms", "messages")}
    access_logger.log(level, "call", extra={FIELDS: shown})


def configure_logging(config: ServerConfig) -> None:
    """Send the log of the whole process to stderr, as the configuration says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.log_format == "json" else TextFormatter())
    handler.addFilter(is_fit)
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)


def is_fit(record: logging.LogRecord) -> bool:
    """Whether a record may be shown. gRPC reports metadata that are not UTF-8, tokens among them, with their bytes and a traceback."""
    raised = record.exc_info[1] if record.exc_info else None
    return not (record.name.startswith("grpc.") and isinstance(raised, UnicodeDecodeError))


def _word(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
