"""What a scrape shows, over real HTTP; and that documentation and dashboard tell of the same metrics."""

from __future__ import annotations

import asyncio
import json
import re
import socketserver
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest
from fake_engine import INFO, FakeEngine, tokens
from grpc import aio
from grpc_harness import events_of, serving, stream_request, text_spec
from hang_guard import HANG_SECONDS
from oracle_engine import OracleEngine, StepGate, until
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from speculating import drafts_everywhere

import aengine
from aengine import EngineDeadError, FinishReason, SamplingParams
from aengine.api.outputs import DraftSource, DraftUsage, EngineStats, HistogramSnapshot, LoadReport, ReplicaInfo, ReplicaState, Timing
from aengine.server.core.calls_in_flight import Admission, CallRecord, GenerationRecord
from aengine.server.core.core import Backend, BindError
from aengine.server.grpc.door import METHODS
from aengine.server.telemetry import metrics
from aengine.server.telemetry.metrics import LoopLag, Metrics, MetricsCollector, serve_metrics
from aengine.v1.generation_pb2 import GenerationSpec
from aengine.v1.generation_service_pb2 import GenerateRequest

pytestmark = pytest.mark.anyio

DOCS = Path(__file__).parents[2] / "docs"
GENERATE = "/aengine.v1.GenerationService/Generate"


class Scrape:
    """The samples of one scrape."""

    def __init__(self, families: Mapping[str, Metric]) -> None:
        self.families = families

    def __call__(self, name: str, /, **labels: str) -> float | None:
        """The value of a sample; None where there is none."""
        samples = (sample for family in self.families.values() for sample in family.samples)
        return next((sample.value for sample in samples if sample.name == name and sample.labels == labels), None)

    def sum(self, name: str) -> float:
        return sum(sample.value for family in self.families.values() for sample in family.samples if sample.name == name)


def fetch(address: str, path: str = "/metrics", accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://{address}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=HANG_SECONDS) as response:
        return str(response.read().decode())


def scrape_here(address: str, path: str = "/metrics") -> Scrape:
    """Blocks the event loop."""
    return Scrape({family.name: family for family in parse_text(fetch(address, path))})


async def scrape(address: str, path: str = "/metrics") -> Scrape:
    return await anyio.to_thread.run_sync(scrape_here, address, path)


async def scrape_until(address: str, condition: Callable[[Scrape], bool]) -> Scrape:
    with anyio.fail_after(HANG_SECONDS):
        while not condition(seen := await scrape(address)):
            pass
    return seen


def metrics_of(engine: Any, *, draining: bool = False) -> Metrics:
    admission = Admission()
    admission.in_flight, admission.closed = 3, draining
    return Metrics(Backend(engine, admission), range(4), {"OK": METHODS})


def exposed(metrics: Metrics) -> AbstractAsyncContextManager[str]:
    """The address of a metrics server."""
    return serve_metrics(metrics, "127.0.0.1", 0)


def call(method: str, code: str = "OK", **fields: Any) -> CallRecord:
    return CallRecord(method, "ipv4:127.0.0.1:40000", "id", code=code, **fields)


def generation(reason: FinishReason = FinishReason.CANCELLED, total: float = 1.0, **fields: Any) -> GenerationRecord:
    return GenerationRecord("id", finish_reason=reason, total_seconds=total, **fields)


@pytest.fixture(autouse=True)
def _servers_stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shutdown` waits until `serve_forever` looks again, which is every half a second."""
    monkeypatch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.01,))


@pytest.fixture
def idle_engine(engine: FakeEngine) -> FakeEngine:
    engine.stats = EngineStats  # type: ignore[method-assign]
    return engine


class TestCounts:
    async def test_calls_by_method_and_code(self, idle_engine: FakeEngine) -> None:
        metrics = metrics_of(idle_engine)
        for seconds in (0.003, 0.2):
            metrics.on_call_end(call(GENERATE, messages_sent=3, seconds=seconds))
        metrics.on_call_end(call(GENERATE, "RESOURCE_EXHAUSTED", reason="QUEUE_FULL", seconds=7000.0))
        metrics.on_call_end(call(GENERATE, "CANCELLED"))
        async with exposed(metrics) as address:
            seen = await scrape(address)
        method = "GenerationService/Generate"
        assert seen("aengine_calls_total", method=method, code="OK") == 2
        assert seen("aengine_calls_total", method=method, code="RESOURCE_EXHAUSTED") == 1
        assert seen("aengine_calls_total", method=method, code="CANCELLED") == 1
        assert seen("aengine_call_errors_total", reason="QUEUE_FULL") == 1
        assert seen.sum("aengine_call_errors_total") == 1
        assert seen("aengine_call_messages_sent_total", method=method) == 6
        assert seen("aengine_calls_total", method="EngineService/GetLoad", code="OK") == 0
        assert seen("aengine_call_seconds_bucket", method=method, le="0.005") == 2
        assert seen("aengine_call_seconds_bucket", method=method, le="0.25") == 3
        assert seen("aengine_call_seconds_bucket", method=method, le="1800.0") == 3
        assert seen("aengine_call_seconds_bucket", method=method, le="+Inf") == seen("aengine_call_seconds_count", method=method) == 4
        assert seen("aengine_call_seconds_sum", method=method) == pytest.approx(7000.203)
        assert seen("aengine_calls_in_flight") == 4

    async def test_clients_cannot_make_series(self, idle_engine: FakeEngine) -> None:
        metrics = metrics_of(idle_engine)
        for index in range(100):
            metrics.on_call_end(call(f"/aengine.v1.Service{index}/Nothing", "UNIMPLEMENTED"))
        async with exposed(metrics) as address:
            seen = await scrape(address)
        methods = {sample.labels["method"] for sample in seen.families["aengine_calls"].samples}
        assert methods == {*METHODS.values(), "other"}
        assert seen("aengine_calls_total", method="other", code="UNIMPLEMENTED") == 100

    async def test_every_method_of_the_schema_has_a_label(self) -> None:
        protos = Path(__file__).parents[2] / "protos" / "aengine" / "v1"
        rpcs = re.findall(r"^  rpc (\w+)\(", "".join(path.read_text() for path in protos.glob("*_service.proto")), re.MULTILINE)
        assert sorted(rpcs) == sorted(method.partition("/")[2] for method in METHODS.values())

    async def test_generations(self, idle_engine: FakeEngine) -> None:
        metrics = metrics_of(idle_engine)
        first = generation(FinishReason.EOS, timing=Timing(queue=0.02, first_token=0.3), total=2.0)
        second = generation(FinishReason.CANCELLED, timing=Timing(queue=0.5))
        for seconds, record in ((0.004, first), (0.004, first), (0.3, second)):
            record.inter_token_seconds.observe(seconds)
        for record in (first, second, generation(FinishReason.ERROR), generation()):
            metrics.on_generation_end(record)
        async with exposed(metrics) as address:
            seen = await scrape(address)
        counts = {reason.value: seen("aengine_generations_total", reason=reason.value) for reason in FinishReason}
        assert counts == {**dict.fromkeys(counts, 0), "eos": 1, "cancelled": 2, "error": 1}
        assert (seen("aengine_queue_seconds_count"), seen("aengine_queue_seconds_sum")) == (2, pytest.approx(0.52))
        assert (seen("aengine_queue_seconds_bucket", le="0.025"), seen("aengine_queue_seconds_bucket", le="0.5")) == (1, 2)
        assert (seen("aengine_time_to_first_token_seconds_count"), seen("aengine_time_to_first_token_seconds_sum")) == (1, 0.3)
        assert (seen("aengine_inter_token_seconds_bucket", le="0.005"), seen("aengine_inter_token_seconds_count")) == (2, 3)
        assert (seen("aengine_generation_seconds_count"), seen("aengine_generation_seconds_sum")) == (4, 5.0)
        assert seen("aengine_generations_in_flight") == 3

    async def test_what_the_engine_tells(self, engine: FakeEngine) -> None:
        exposed_as = {
            "running": "aengine_sequences_running",
            "waiting": "aengine_requests_waiting",
            "parked": "aengine_sequences_parked",
            "uncomputed_tokens": "aengine_uncomputed_tokens",
            "pages_used": "aengine_kv_pages_used",
            "pages_total": "aengine_kv_pages_capacity",
            "cached_tokens": "aengine_kv_cached_tokens",
            "steps": "aengine_steps_total",
            "preemptions": "aengine_preemptions_total",
            "prompt_tokens": "aengine_prompt_tokens_total",
            "cached_prompt_tokens": "aengine_cached_prompt_tokens_total",
            "completion_tokens": "aengine_completion_tokens_total",
            "loaded_tokens": "aengine_loaded_tokens_total",
            "saved_tokens": "aengine_saved_tokens_total",
            "host_kv_bytes": "aengine_kv_host_bytes",
            "disk_kv_bytes": "aengine_kv_disk_bytes",
        }
        counts = {field: index for index, field in enumerate(exposed_as, 1)}
        steps = HistogramSnapshot((0.1, 1.0), (3, 2, 1), 9.5)
        drafts = DraftUsage("ngram", steps=10, drafted=40, accepted=25), DraftUsage("grammar", steps=2, drafted=7, accepted=7)
        stats = EngineStats(drafts=drafts, paused=True, step_seconds=steps, step_tokens=HistogramSnapshot((8.0,), (5, 1), 40.0), **counts)  # type: ignore[arg-type]
        engine.stats = lambda: stats  # type: ignore[method-assign]
        async with exposed(metrics_of(engine, draining=True)) as address:
            seen = await scrape(address)
        assert {field: seen(name) for field, name in exposed_as.items()} == counts
        assert (seen("aengine_engine_up"), seen("aengine_engine_paused"), seen("aengine_draining")) == (1, 1, 1)
        assert [seen("aengine_step_seconds_bucket", le=le) for le in ("0.1", "1.0", "+Inf")] == [3, 5, 6]
        assert (seen("aengine_step_seconds_sum"), seen("aengine_step_tokens_sum"), seen("aengine_step_tokens_count")) == (9.5, 40, 6)
        for source in DraftSource:
            names = ("aengine_draft_steps_total", "aengine_draft_tokens_total", "aengine_accepted_draft_tokens_total")
            counts_of = {"ngram": [10, 40, 25], "grammar": [2, 7, 7]}.get(source.value, [0, 0, 0])
            assert [seen(name, drafter=source.value) for name in names] == counts_of
        labels = {"name": "fake", "architecture": INFO.architecture, "dtype": "float32", "device": INFO.device}
        assert seen("aengine_model_info", **labels) == 1
        assert seen("aengine_build_info", version=aengine.__version__) == 1


class TestScrapes:
    async def test_a_real_engine_through_its_life(self) -> None:
        engine = OracleEngine()
        async with exposed(metrics_of(engine)) as address:
            seen = await scrape(address)
            assert (seen("aengine_engine_up"), seen("aengine_kv_pages_capacity"), seen.families["aengine_model_info"].samples) == (0, 0, [])
            await engine.start()
            await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=4, ignore_eos=True))
            seen = await scrape(address)
            assert (seen("aengine_engine_up"), seen("aengine_kv_pages_capacity")) == (1, 999)
            assert (seen("aengine_prompt_tokens_total"), seen("aengine_completion_tokens_total")) == (3, 4)
            assert seen("aengine_steps_total") == seen("aengine_step_seconds_count") == seen("aengine_step_tokens_count") == 4
            assert seen("aengine_step_tokens_sum") == 6

            def fail(plan: object) -> None:
                raise ValueError("a broken step")

            engine.runner.before_step = fail
            with pytest.raises(EngineDeadError):
                await engine.generate([1], SamplingParams(seed=2))
            seen = await scrape(address)
            assert (seen("aengine_engine_up"), seen("aengine_completion_tokens_total")) == (0, 4)
            await engine.aclose()
            assert (await scrape(address))("aengine_engine_up") == 0

    async def test_drafts_of_a_real_engine(self) -> None:
        with drafts_everywhere():
            engine = OracleEngine()
            async with exposed(metrics_of(engine)) as address, engine:
                usage = (await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=40, ignore_eos=True))).usage
                seen = await scrape(address)
        (ngram,) = usage.drafts
        assert ngram.drafted > ngram.accepted > 0
        for name, count in (("draft_steps", ngram.steps), ("draft_tokens", ngram.drafted), ("accepted_draft_tokens", ngram.accepted)):
            assert seen(f"aengine_{name}_total", drafter="ngram") == seen.sum(f"aengine_{name}_total") == count

    async def test_an_engine_that_was_closed_before_its_start(self) -> None:
        engine = OracleEngine()
        await engine.aclose()
        async with exposed(metrics_of(engine)) as address:
            assert (await scrape(address))("aengine_engine_up") == 0

    async def test_a_blocked_loop_is_told_by_the_age_of_the_numbers(self, idle_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics, "SNAPSHOT_SECONDS", 0.05)
        told = metrics_of(idle_engine)
        async with exposed(told) as address:
            told.on_generation_end(generation(FinishReason.EOS))
            await scrape_until(address, lambda seen: seen("aengine_generations_total", reason="eos") == 1)
            told.on_generation_end(generation(FinishReason.EOS))
            seen = scrape_here(address)
            assert seen("aengine_generations_total", reason="eos") == 1
            age = seen("aengine_snapshot_age_seconds")
            assert age is not None
            assert age >= 0.05
            await scrape_until(address, lambda seen: seen("aengine_generations_total", reason="eos") == 2)

    def test_a_closed_loop_leaves_the_latest_numbers(self) -> None:
        async def collector() -> MetricsCollector:
            engine = FakeEngine()
            engine.stats = lambda: EngineStats(steps=5)  # type: ignore[method-assign]
            return MetricsCollector(metrics_of(engine))

        families = {family.name: family for family in asyncio.run(collector()).collect()}
        assert families["aengine_steps"].samples[0].value == 5

    async def test_a_step_that_takes_its_time_holds_up_no_scrape(self) -> None:
        async with OracleEngine() as engine, exposed(metrics_of(engine)) as address:
            gate = StepGate(engine)
            stream = engine.stream([1, 2], SamplingParams(seed=1, max_tokens=1, ignore_eos=True))
            try:
                await until(gate.held.is_set)
                assert (await scrape(address))("aengine_steps_total") == 0
            finally:
                gate.open()
            await stream.aclose()

    async def test_two_in_one_process(self, idle_engine: FakeEngine) -> None:
        one, two = metrics_of(idle_engine), metrics_of(idle_engine)
        one.on_generation_end(generation(FinishReason.EOS))
        async with exposed(one) as first, exposed(two) as second:
            assert (await scrape(first))("aengine_generations_total", reason="eos") == 1
            assert (await scrape(second))("aengine_generations_total", reason="eos") == 0

    async def test_one_metric_can_be_asked_for(self, idle_engine: FakeEngine) -> None:
        async with exposed(metrics_of(idle_engine)) as address:
            seen = await scrape(address, "/metrics?name[]=aengine_engine_up")
        assert list(seen.families) == ["aengine_engine_up"]

    async def test_openmetrics(self, idle_engine: FakeEngine) -> None:
        metrics = metrics_of(idle_engine)
        metrics.on_call_end(call(GENERATE))
        async with exposed(metrics) as address:
            text = await anyio.to_thread.run_sync(fetch, address, "/metrics", "application/openmetrics-text; version=1.0.0")
        names = {family.name for family in parse_openmetrics(text)}  # which is strict
        assert {"aengine_calls", "aengine_model", "aengine_step_seconds", "process_cpu_seconds"} <= names

    async def test_a_port_in_use_is_refused(self, idle_engine: FakeEngine) -> None:
        async with exposed(metrics_of(idle_engine)) as address:
            port = int(address.rpartition(":")[2])
            with pytest.raises(BindError, match=f"cannot serve metrics on {address}: .*in use"):
                async with serve_metrics(metrics_of(idle_engine), "127.0.0.1", port):
                    pass
            assert (await scrape(address))("aengine_engine_up") == 1

    async def test_a_stop_closes_the_port(self, idle_engine: FakeEngine) -> None:
        async with exposed(metrics_of(idle_engine)) as address:
            pass
        with pytest.raises(urllib.error.URLError):
            await scrape(address)


class TestServed:
    """Behind the real server."""

    async def test_what_calls_leave_behind(self, idle_engine: FakeEngine) -> None:
        idle_engine.script = tokens("a", "b", "c")
        async with serving(idle_engine, metrics_port=0) as serve:
            address = serve.server.metrics_address
            assert address is not None
            await events_of(serve.generation.StreamGenerate(stream_request()))
            await serve.generation.Generate(GenerateRequest(spec=text_spec()))
            with pytest.raises(aio.AioRpcError):
                await serve.generation.Generate(GenerateRequest())
            idle_engine.script = []
            left = serve.generation.StreamGenerate(stream_request())
            await left.read()
            seen = await scrape(address)
            assert (seen("aengine_calls_in_flight"), seen("aengine_generations_in_flight")) == (1, 1)
            left.cancel()
            seen = await scrape_until(address, lambda seen: seen("aengine_calls_in_flight") == 0)
        stream, unary = "GenerationService/StreamGenerate", "GenerationService/Generate"
        ended = {(sample.labels["method"], sample.labels["code"]): sample.value for sample in seen.families["aengine_calls"].samples}
        assert {key: count for key, count in ended.items() if count} == {
            (stream, "OK"): 1, (unary, "OK"): 1, (unary, "INVALID_ARGUMENT"): 1, (stream, "CANCELLED"): 1,
        }  # fmt: skip
        assert seen("aengine_call_errors_total", reason="INVALID_FIELD") == seen.sum("aengine_call_errors_total") == 1
        assert seen("aengine_call_messages_sent_total", method=stream) == 6 + 1
        assert seen("aengine_call_messages_sent_total", method=unary) == 1
        assert seen("aengine_call_seconds_count", method=stream) == 2
        counts = {reason: seen("aengine_generations_total", reason=reason) for reason in ("max_tokens", "cancelled")}
        assert counts == {"max_tokens": 2, "cancelled": 1}
        assert seen.sum("aengine_generations_total") == seen("aengine_generation_seconds_count") == 3
        assert seen("aengine_time_to_first_token_seconds_count") == seen("aengine_queue_seconds_count") == 2
        assert seen("aengine_generations_in_flight") == 0

    async def test_tokens_of_a_real_engine(self) -> None:
        async with OracleEngine() as engine, serving(engine, metrics_port=0) as serve:
            spec = GenerationSpec()
            spec.prompt.token_ids.ids.extend(range(10, 20))
            spec.sampling.seed = 1
            spec.stopping.max_tokens = 5
            spec.stopping.ignore_eos = True
            for _ in range(2):
                await serve.generation.Generate(GenerateRequest(spec=spec))
            seen = await scrape(serve.server.metrics_address or "")
        assert (seen("aengine_prompt_tokens_total"), seen("aengine_completion_tokens_total")) == (20, 10)
        assert seen("aengine_cached_prompt_tokens_total") == 8  # two full pages of the first
        assert seen("aengine_generations_total", reason="max_tokens") == 2
        assert seen("aengine_step_tokens_sum") == 10 + 4 + 2 + 4

    async def test_a_drain_is_seen_and_a_stop_ends_it_all(self, idle_engine: FakeEngine) -> None:
        async with serving(idle_engine, metrics_port=0) as serve:
            address = serve.server.metrics_address or ""
            assert (await scrape(address))("aengine_draining") == 0
            await serve.server.drain(0)
            assert (await scrape(address))("aengine_draining") == 1
        with pytest.raises(urllib.error.URLError):
            await scrape(address)  # the server is stopped

    async def test_the_lag_is_measured(self, idle_engine: FakeEngine) -> None:
        async with serving(idle_engine, metrics_port=0) as serve:
            await scrape_until(serve.server.metrics_address or "", lambda seen: (seen("aengine_event_loop_lag_seconds_count") or 0) > 0)

    async def test_without_a_port_there_are_none(self, idle_engine: FakeEngine) -> None:
        async with serving(idle_engine) as serve:
            assert serve.server.metrics_address is None


class TestLoopLag:
    async def test_a_blocked_loop_is_seen(self) -> None:
        lag = LoopLag(0.001)
        lag.start()
        time.sleep(0.06)  # noqa: ASYNC251 - it is what is measured
        await until(lambda: sum(lag.seconds.snapshot().counts))
        lag.stop()
        snapshot = lag.seconds.snapshot()
        assert sum(snapshot.counts[snapshot.bounds.index(0.05) + 1 :]) >= 1
        assert lag.take_max() >= 0.055
        assert lag.take_max() == 0

    async def test_it_ends(self) -> None:
        lag = LoopLag(0.0)
        lag.start()
        await until(lambda: sum(lag.seconds.snapshot().counts) > 3)
        lag.stop()
        before = lag.seconds.snapshot()
        for _ in range(10):
            await asyncio.sleep(0)
        assert lag.seconds.snapshot() == before
        lag.stop()


async def names_with_types_and_labels(engine: FakeEngine) -> dict[str, tuple[str, frozenset[str]]]:
    """Of everything that is exposed; those with labels have a sample each."""
    engine.behind = (ReplicaInfo("a:1", ReplicaState.SERVING, LoadReport(EngineStats())),)
    metrics = metrics_of(engine)
    metrics.on_call_end(call(GENERATE, "INTERNAL", reason="BUG"))
    async with exposed(metrics) as address:
        seen = await scrape(address)
    return {
        family.name + ("_total" if family.type == "counter" else ""): (
            family.type,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
        )
        for family in seen.families.values()
    }


async def test_the_documentation_has_them_all(idle_engine: FakeEngine) -> None:
    documented = {}
    for line in (DOCS / "metrics.md").read_text().splitlines():
        if line.startswith("| `"):
            name, kind, _unit, labels, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            documented[name.strip("`")] = kind, frozenset(re.findall(r"`(\w+)`", labels))
            assert meaning, name
    assert documented == await names_with_types_and_labels(idle_engine)


async def test_queries_and_dashboard_use_what_exists(idle_engine: FakeEngine) -> None:
    exposed_names = await names_with_types_and_labels(idle_engine)
    series = set()
    for name, (kind, _) in exposed_names.items():
        series |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    dashboard = json.loads((DOCS / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(expressions) > 20
    queries = [line for line in (DOCS / "metrics.md").read_text().splitlines() if re.match(r"    .*(aengine_|process_)\w+", line)]
    assert len(queries) > 8
    for expression in (*expressions, *queries):
        used = set(re.findall(r"\b(?:aengine|process|python)_\w+", expression))
        assert used, expression
        assert used <= series, expression
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert {name for expression in expressions for name in re.findall(r"\$(\w+)", expression)} <= {*variables, "__rate_interval"}
    assert dashboard["schemaVersion"] >= 39
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
