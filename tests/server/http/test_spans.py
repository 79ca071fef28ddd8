"""Spans for OpenTelemetry, as a collector gets them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from chat_engine import ChatEngine
from http_harness import serving_http

from aengine import AsyncEngine
from aengine.server.telemetry.tracing import tracing_of_environment

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="the extra otel is not installed")
pytestmark = pytest.mark.anyio

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the parts of the messages that it got."""
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            got.extend(trace_service.ExportTraceServiceRequest.FromString(body).resource_spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(one) for one in found.values] if kind == "array_value" else found


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: value_of(one.value) for one in span.attributes}


async def test_a_call_and_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (address, got):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "temperature": 0.5, "ignore_eos": True, "seed": 3}
        async with AsyncEngine("demo", max_num_seqs=2) as engine, serving_http(engine) as serve:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
            await serve.post("/v1/chat/completions", body, headers=headers)
            await serve.post("/v1/chat/completions", {**body, "temperature": -1})
            await serve.client.get("/metrics")
    spans = {span.name: span for part in got for scope in part.scope_spans for span in scope.spans if span.trace_id.hex() == TRACE}
    others = [span for part in got for scope in part.scope_spans for span in scope.spans if span.trace_id.hex() != TRACE]
    assert {one.key: value_of(one.value) for one in got[0].resource.attributes}["service.name"] == "aengine"
    call = spans["POST /v1/chat/completions"]
    (chat,) = (span for name, span in spans.items() if name.startswith("chat "))
    assert set(spans) == {call.name, chat.name, "queue", "prefill", "decode"}
    assert (call.parent_span_id.hex(), chat.parent_span_id) == (PARENT, call.span_id)
    assert {spans[name].parent_span_id for name in ("queue", "prefill", "decode")} == {chat.span_id}
    assert (attributes(call)["aengine.request_id"], attributes(call)["aengine.status"]) == ("mine", "200")
    said = attributes(chat)
    assert (said["gen_ai.usage.output_tokens"], said["gen_ai.request.max_tokens"], said["gen_ai.request.temperature"]) == (9, 9, 0.5)
    assert (said["gen_ai.response.finish_reasons"], said["gen_ai.request.seed"]) == (["max_tokens"], 3)
    times = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    total = sum(said[f"gen_ai.latency.{name}"] for name in times)
    assert 0 < total <= said["gen_ai.latency.e2e"] + 1e-3
    assert said["gen_ai.latency.time_to_first_token"] < said["gen_ai.latency.e2e"]
    starts = [span.start_time_unix_nano / 1e9 for span in (call, chat, spans["queue"])]
    assert all(one <= other + 0.01 for one, other in pairwise(starts)), "they come from two clocks"
    (refused,) = others
    told = attributes(refused)
    assert (told["error.type"], told["aengine.status"], refused.parent_span_id) == ("INVALID_FIELD", "400", b"")


async def test_a_collector_that_is_not_there_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    async with serving_http(ChatEngine("Fine.")) as serve:
        assert (await serve.post("/v1/responses", {"input": "x"})).status_code == 200


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "True"}, ""),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is 'zipkin', and otlp, console and none are possible"),
    ],
)
def test_without_an_exporter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, environment: dict[str, str], said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tracing_of_environment() is None
    assert said in caplog.text if said else not caplog.records
