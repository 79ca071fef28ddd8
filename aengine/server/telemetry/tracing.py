"""Spans of calls and generations for OpenTelemetry, where its exporter is set up by the environment.

Owns what a span is called and what it says. The spans of a call and of its generations are made of the records of their ends, so that
nothing is done while tokens come. Needs the packages of the extra `otel`; what exports has a thread of its own.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from aengine.api.outputs import FinishReason
from aengine.server.core.calls_in_flight import CURRENT_CALL, CallRecord, GenerationRecord, Observers

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_log = logging.getLogger("aengine")


def tracing_of_environment() -> Tracing | None:
    """What writes spans, if `OTEL_TRACES_EXPORTER` is otlp or console, or an `OTEL_EXPORTER_OTLP_ENDPOINT` is set. None, with a line in the
    log, where the packages lack."""
    kind = os.environ.get("OTEL_TRACES_EXPORTER", "otlp" if any(map(os.environ.get, _ENDPOINTS)) else "none").strip().lower()
    if kind == "none" or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if kind not in ("otlp", "console"):
        _log.warning("no spans are written: OTEL_TRACES_EXPORTER is %r, and otlp, console and none are possible", kind)
        return None
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

        exporter: SpanExporter = ConsoleSpanExporter()
        if kind == "otlp":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        return Tracing(BatchSpanProcessor(exporter))
    except ImportError as error:
        _log.warning("no spans are written: pip install 'aengine-llm[otel]' (%s)", error)
        return None


class Tracing:
    """Writes the spans of a server. `observe` adds it to what is called with the records."""

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor`: gets the spans."""
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = Resource.create() if os.environ.get("OTEL_SERVICE_NAME") else Resource.create({SERVICE_NAME: "aengine"})
        self._provider: TracerProvider = TracerProvider(resource=named)  # of its own: the process may have another one
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("aengine")
        self._extract = TraceContextTextMapPropagator().extract
        self._open: dict[int, Span] = {}  # of calls that have not ended, by identity

    def observe(self, observers: Observers) -> None:
        observers.on_call_end.append(self.on_call_end)
        observers.on_generation_end.append(self.on_generation_end)

    def close(self) -> None:
        """Export what waits. Blocks."""
        self._provider.shutdown()

    def on_call_end(self, record: CallRecord) -> None:
        from opentelemetry.trace import Status, StatusCode

        if record.is_polled:
            self._open.pop(id(record), None)
            return
        span = self._open.pop(id(record), None) or self._begin_call(record)
        span.set_attribute("aengine.status", record.code)
        if record.reason:
            span.set_attribute("error.type", record.reason)
            span.set_status(Status(StatusCode.ERROR, record.reason))
        span.end(_nanoseconds(time.monotonic()))

    def on_generation_end(self, record: GenerationRecord) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        call, context = CURRENT_CALL.get(), None
        if call is not None:
            if id(call) not in self._open and not call.code:
                self._open[id(call)] = self._begin_call(call)
            parent = self._open.get(id(call))
            context = self._context(call) if parent is None else set_span_in_context(parent)
        begin, timing = record.start, record.timing
        span = self._tracer.start_span(f"chat {record.model}".strip(), context, start_time=_nanoseconds(begin), attributes=_said(record))
        if record.finish_reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR))
        inner, end = set_span_in_context(span), begin + record.total_seconds
        first = None if timing.first_token is None else begin + timing.first_token
        phases = [("queue", begin, end if timing.queue is None else begin + timing.queue)]
        if timing.queue is not None:
            phases.append(("prefill", begin + timing.queue, end if first is None else first))
        if first is not None:
            phases.append(("decode", first, first + (timing.decode or 0.0)))
        for name, since, until in phases:
            self._tracer.start_span(name, inner, start_time=_nanoseconds(since)).end(_nanoseconds(until))
        span.end(_nanoseconds(end))

    def _begin_call(self, record: CallRecord) -> Span:
        from opentelemetry.trace import SpanKind

        attributes = {"aengine.request_id": record.request_id, "network.peer.address": record.peer}
        begin = _nanoseconds(record.start)
        return self._tracer.start_span(record.method, self._context(record), SpanKind.SERVER, attributes, start_time=begin)

    def _context(self, record: CallRecord) -> Any:
        """Return the context of the span that the client is at, if it has sent one."""
        return None if record.traceparent is None else self._extract({"traceparent": record.traceparent})


def _said(record: GenerationRecord) -> dict[str, Any]:
    """The attributes of a generation: those of the semantic conventions, and the latencies that vLLM and SGLang have beside them."""
    usage, timing, params = record.usage, record.timing, record.params
    said: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "aengine",
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": (record.finish_reason.value,),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_prompt_tokens,
        "gen_ai.latency.e2e": record.total_seconds,
        "gen_ai.latency.time_in_queue": timing.queue,
        "gen_ai.latency.time_to_first_token": timing.first_token,
        "gen_ai.latency.time_in_model_decode": timing.decode,
    }
    if timing.queue is not None and timing.first_token is not None:
        said["gen_ai.latency.time_in_model_prefill"] = timing.first_token - timing.queue
        said["gen_ai.latency.time_in_model_inference"] = timing.first_token - timing.queue + (timing.decode or 0.0)
    if params is not None:
        said |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.stop_sequences": tuple(params.stop) or None,
        }
    return {name: value for name, value in said.items() if value is not None}


def _nanoseconds(moment: float) -> int:
    """A moment on time.monotonic, since 1970."""
    return time.time_ns() + int((moment - time.monotonic()) * 1e9)
