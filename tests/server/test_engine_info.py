"""What the server tells of itself and of its load, over a real channel."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from fake_engine import FakeEngine
from google.protobuf.duration_pb2 import Duration
from grpc import aio
from grpc_harness import Serving, failure_of, serving
from hang_guard import HANG_SECONDS
from oracle_engine import OracleEngine

import aengine
from aengine import SamplingParams
from aengine.api.outputs import DraftUsage, EngineStats, LoadReport, ReplicaInfo, ReplicaState
from aengine.client import AsyncClient
from aengine.server.grpc import door
from aengine.server.grpc.services import engine_info
from aengine.server.grpc.services.engine_info import EngineServicer
from aengine.server.telemetry.metrics import Metrics
from aengine.v1 import generation_pb2
from aengine.v1.engine_service_pb2 import GetLoadRequest, GetServerInfoRequest, Load, Ranks, Speculation, WatchLoadRequest
from aengine.v1.engine_service_pb2_grpc import EngineServiceStub

pytestmark = pytest.mark.anyio

NEVER = 1000.0


def stub(serve: Serving) -> Any:
    return EngineServiceStub(serve.channel)


def every(seconds: float) -> WatchLoadRequest:
    request = WatchLoadRequest()
    request.min_interval.FromNanoseconds(round(seconds * 1e9))
    return request


async def test_server_info() -> None:
    options: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 70, "page_size": 8, "max_logprobs": 3}
    async with OracleEngine(num_pages=31, max_queued_requests=11, max_queued_tokens=12, **options) as engine, serving(engine) as serve:
        info = await stub(serve).GetServerInfo(GetServerInfoRequest())
    assert (info.version, info.model, info.device) == (aengine.__version__, "oracle", engine.model_info.device)
    assert 0 <= time.time() - info.started.ToNanoseconds() / 1e9 < 24 * 3600
    assert not info.HasField("speculation")
    assert not info.HasField("ranks")
    limits = info.limits
    assert (limits.max_model_len, limits.max_num_seqs, limits.max_num_batched_tokens) == (400, 5, 70)
    assert (limits.max_queued_requests, limits.max_queued_tokens, limits.max_logprobs) == (11, 12, 3)
    assert (limits.max_message_bytes, limits.page_size, limits.num_pages) == (16 * 1024 * 1024, 8, 30)


async def test_speculation_is_told_where_it_is_on() -> None:
    async with OracleEngine(speculative="ngram", max_drafts=3) as engine, serving(engine) as serve:
        assert (await stub(serve).GetServerInfo(GetServerInfoRequest())).speculation == Speculation(mode="ngram", max_drafts=3)


async def test_ranks_are_told_where_there_are_several() -> None:
    async with OracleEngine(tensor_parallel_size=2, tensor_parallel_mode="fast") as engine, serving(engine) as serve:
        ranks = (await stub(serve).GetServerInfo(GetServerInfoRequest())).ranks
    assert ranks == Ranks(tensor_parallel_size=2, tensor_parallel_mode="fast", pipeline_parallel_size=1)


async def test_no_limit_is_0() -> None:
    async with OracleEngine(max_queued_requests=None) as engine, serving(engine) as serve:
        limits = (await stub(serve).GetServerInfo(GetServerInfoRequest())).limits
    assert (limits.max_queued_requests, limits.max_queued_tokens) == (0, 0)


async def test_before_the_start_there_is_a_load_but_no_info() -> None:
    async with serving(OracleEngine()) as serve:
        assert (await stub(serve).GetLoad(GetLoadRequest())).load == Load()
        with pytest.raises(aio.AioRpcError) as caught:
            await stub(serve).GetServerInfo(GetServerInfoRequest())
    failure = failure_of(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")


async def test_every_field_of_the_load(engine: FakeEngine) -> None:
    names = [field.name for field in Load.DESCRIPTOR.fields if field.name not in ("draining", "drafts")]
    counts: dict[str, Any] = {name: index for index, name in enumerate(names, 1)} | {
        "paused": True,
        "fingerprint": "abc",
        "role": "prefill",
    }
    drafts = DraftUsage("ngram", 1, 5, 4), DraftUsage("grammar", 2, 3, 0)
    stats = EngineStats(**counts, drafts=drafts)
    engine.stats = lambda: stats  # type: ignore[method-assign]
    counts["drafts"] = [generation_pb2.DraftUsage(**dataclasses.asdict(one)) for one in drafts]
    async with serving(engine) as serve:
        assert (await stub(serve).GetLoad(GetLoadRequest())).load == Load(**counts)
        await serve.server.drain(0)
        assert (await stub(serve).GetLoad(GetLoadRequest())).load == Load(**counts, draining=True)


async def test_the_replicas_of_a_router(engine: Any) -> None:
    """Each with its load, here and in the metrics."""
    busy = LoadReport(EngineStats(running=3, waiting=2, prompt_tokens=7, pages_used=5), draining=True)
    idle = LoadReport(EngineStats())
    engine.behind = (
        ReplicaInfo("a:1", ReplicaState.DRAINING, busy, "abc", "it drains"),
        ReplicaInfo("b:1", ReplicaState.SERVING, idle, "abc"),
        ReplicaInfo("c:1", ReplicaState.SUPERSEDED, idle, "def", "replicas of a newer generation serve"),
    )
    engine.stats = EngineStats
    async with serving(engine) as serve, AsyncClient(serve.server.address) as client:
        assert await client.replicas() == engine.behind
        families = {family.name: family for family in Metrics(serve.server.core.backend, (), {}).families()}
    generations = {one.labels["replica"]: one.labels["generation"] for one in families["aengine_replica_generation"].samples}
    assert generations == {"a:1": "abc", "b:1": "abc", "c:1": "def"}
    samples = {name: {one.labels["replica"]: one.value for one in families[name].samples} for name in families if "replica" in name}
    assert samples["aengine_replica_up"] == {"a:1": 0, "b:1": 1, "c:1": 0}
    assert samples["aengine_replica_superseded"] == {"a:1": 0, "b:1": 0, "c:1": 1}
    assert samples["aengine_replica_refused"] == {"a:1": 0, "b:1": 0, "c:1": 0}
    assert samples["aengine_replica_requests_waiting"] == {"a:1": 2, "b:1": 0, "c:1": 0}
    assert samples["aengine_replica_prompt_tokens"] == {"a:1": 7, "b:1": 0, "c:1": 0}


async def test_a_watcher_hears_of_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_info, "MAX_INTERVAL_SECONDS", NEVER)  # so that nothing but a change is a reason to speak
    async with OracleEngine() as engine, serving(engine) as serve:
        watch = stub(serve).WatchLoad(every(0.01))
        stats = engine.stats()
        idle = {"pages_total": 999, "fingerprint": stats.fingerprint, "weights_time": stats.weights_time}
        assert stats.fingerprint == engine.engine_info.fingerprint != ""
        assert (await watch.read()).load == Load(**idle)
        await engine.pause()
        assert (await watch.read()).load == Load(**idle, paused=True)
        await engine.unpause()
        assert (await watch.read()).load == Load(**idle)
        await engine.update_weights("others")
        load = (await watch.read()).load
        assert load.weights_version == 1
        assert load.fingerprint not in ("", stats.fingerprint)
        assert load.weights_time > stats.weights_time
        await engine.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=2, ignore_eos=True))
        load = (await watch.read()).load
        while load.running or load.completion_tokens < 2:
            load = (await watch.read()).load
        assert (load.prompt_tokens, load.completion_tokens, load.steps) == (3, 2, 2)
        await serve.server.drain(0)
        assert (await watch.read()).load.draining


async def test_a_watcher_hears_something_though_nothing_changes(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    engine.stats = EngineStats  # type: ignore[method-assign]
    monkeypatch.setattr(engine_info, "MAX_INTERVAL_SECONDS", 0.05)
    async with serving(engine) as serve:
        watch = stub(serve).WatchLoad(every(0.05))
        assert [(await watch.read()).load for _ in range(3)] == [Load()] * 3


async def test_a_watcher_is_told_no_more_often_than_it_wants_and_a_stop_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_info, "MAX_INTERVAL_SECONDS", NEVER)
    async with OracleEngine() as engine, serving(engine) as serve:
        watch = stub(serve).WatchLoad(every(NEVER))
        await watch.read()
        for _ in range(30):  # long enough for a watcher that looks more often
            await engine.pause()
            assert (await stub(serve).GetLoad(GetLoadRequest())).load.paused
            await engine.unpause()
            await engine.flush_cache()
            assert not (await stub(serve).GetLoad(GetLoadRequest())).load.paused
        await asyncio.wait_for(serve.server.stop(), HANG_SECONDS)
        with pytest.raises(aio.AioRpcError) as caught:
            await watch.read()
    failure = failure_of(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


async def test_a_watch_ends_when_its_client_leaves(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    ended = asyncio.Event()

    class Servicer(EngineServicer):
        async def WatchLoad(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
            try:
                async for response in super().WatchLoad(request, context):
                    yield response
            finally:
                ended.set()

    monkeypatch.setattr(door, "EngineServicer", Servicer)
    engine.stats = EngineStats  # type: ignore[method-assign]
    async with serving(engine) as serve:
        watch = stub(serve).WatchLoad(WatchLoadRequest())
        await watch.read()
        watch.cancel()
        await asyncio.wait_for(ended.wait(), HANG_SECONDS)


@pytest.mark.parametrize(
    "interval",
    [
        Duration(),
        Duration(nanos=9_999_999),
        Duration(seconds=1, nanos=1),
        Duration(seconds=-1),
        Duration(seconds=1, nanos=-5 * 10**8),
        Duration(seconds=-1, nanos=2 * 10**9 - 1),
    ],
)
async def test_an_interval_out_of_range_is_refused(engine: FakeEngine, interval: Duration) -> None:
    async with serving(engine) as serve:
        with pytest.raises(aio.AioRpcError) as caught:
            await stub(serve).WatchLoad(WatchLoadRequest(min_interval=interval)).read()
    failure = failure_of(caught.value)
    assert (failure.code, failure.reason, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", ["min_interval"])
    assert "is not in [0.01, 1] s" in failure.message or "are no duration" in failure.message


@pytest.mark.parametrize("seconds", [0.01, 1.0])
async def test_an_interval_at_the_bounds_is_accepted(engine: FakeEngine, seconds: float) -> None:
    engine.stats = EngineStats  # type: ignore[method-assign]
    async with serving(engine) as serve:
        assert (await stub(serve).WatchLoad(every(seconds)).read()).load == Load()
