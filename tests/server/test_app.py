"""The server around the services: health, reflection, options, drain, bind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from fake_engine import INFO, FakeEngine, tokens
from grpc import aio
from grpc._cython import cygrpc
from grpc_harness import events_of, failure_of, serving, stream_request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hang_guard import HANG_SECONDS

from aengine.api.errors import EngineDeadError
from aengine.api.outputs import EngineStats
from aengine.server.app import Server
from aengine.server.config.options import ServerConfig
from aengine.server.core.core import BindError
from aengine.server.grpc.door import MAX_PENDING_CALLS, SERVICES, channel_options
from aengine.v1.generation_service_pb2 import CancelRequestsRequest
from aengine.v1.model_service_pb2 import GetModelRequest

pytestmark = pytest.mark.anyio

Status = health_pb2.HealthCheckResponse


def test_core_knows_every_channel_option() -> None:
    options = channel_options(ServerConfig(max_connection_age=60.0, max_connection_age_grace=600.0))
    binary = Path(cygrpc.__file__).read_bytes()
    assert [key for key, _ in options if key.encode() + b"\0" not in binary] == []
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in binary  # the check can fail


def test_every_limit_is_told_to_core() -> None:
    config = ServerConfig(
        max_message_bytes=5000,
        max_metadata_bytes=6000,
        max_concurrent_streams=7,
        max_connection_age=8.0,
        max_connection_age_grace=9.0,
        keepalive_time=0.01,
        keepalive_timeout=1e9,
        min_ping_interval=1e-9,
        max_ping_strikes=0,
    )
    assert dict(channel_options(config)) == {
        "grpc.so_reuseport": 0,
        "grpc.max_receive_message_length": 5000,
        "grpc.max_send_message_length": 5000,
        "grpc.max_metadata_size": 6000,
        "grpc.absolute_max_metadata_size": 6000,
        "grpc.http2.min_ping_interval_without_data_ms": 1,
        "grpc.http2.max_ping_strikes": 0,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.keepalive_time_ms": 10,
        "grpc.keepalive_timeout_ms": 2**31 - 1,
        "grpc.http2.ping_timeout_ms": 2**31 - 1,
        "grpc.max_concurrent_streams": 7,
        "grpc.server.max_pending_requests": MAX_PENDING_CALLS,
        "grpc.server.max_pending_requests_hard_limit": MAX_PENDING_CALLS,
        "grpc.max_connection_age_ms": 8000,
        "grpc.max_connection_age_grace_ms": 9000,
    }
    assert not {"grpc.max_connection_age_ms", "grpc.max_connection_age_grace_ms"} & dict(channel_options(ServerConfig())).keys()


async def test_get_model(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        for name in ("", "fake"):
            model = (await serve.model.GetModel(GetModelRequest(model=name))).model
            assert (model.name, model.architecture, model.max_model_len, model.vocab_size) == ("fake", "FakeForCausalLM", 512, 1000)
            assert (list(model.eos_token_ids), model.dtype, model.num_parameters, model.has_chat_template) == ([1, 2], "float32", 7, True)
            assert (model.family, model.implementation, model.executor) == ("fake", "native", "torch")
            assert (model.num_active_parameters, model.kv_bytes_per_token, model.state_bytes) == (5, 96, 4096)
            assert [(group.num_layers, group.HasField("window"), group.window) for group in model.layer_groups] == [
                (2, True, 16),
                (1, False, 0),
            ]
            defaults = model.generation_defaults
            assert (defaults.temperature, defaults.top_p, defaults.HasField("top_k"), defaults.top_k) == (0.5, 1.0, True, 0)
            assert not defaults.HasField("seed")
    assert INFO.generation_defaults.seed is None


async def test_health_follows_the_engine() -> None:
    async with serving(FakeEngine(running=False)) as serve:
        health = health_pb2_grpc.HealthStub(serve.channel)
        for name in ("", *SERVICES):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == Status.NOT_SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[0]))
        assert (await watch.read()).status == Status.NOT_SERVING
        await serve.server.set_serving()
        assert (await watch.read()).status == Status.SERVING
        for name in ("", *SERVICES):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == Status.SERVING
        await serve.server.drain(0)
        assert (await watch.read()).status == Status.NOT_SERVING
        await serve.server.set_serving()
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == Status.NOT_SERVING


async def test_a_port_in_use_is_refused(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        port = int(serve.server.address.rpartition(":")[2])
        with pytest.raises(BindError, match=f"cannot listen on 127.0.0.1:{port}"):
            await Server(engine, port=port).start()


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        watch = health_pb2_grpc.HealthStub(serve.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == Status.SERVING
        call = serve.generation.StreamGenerate(stream_request(request_id="mine"))
        stream = await engine.submitted.get()
        draining = asyncio.create_task(serve.server.drain(HANG_SECONDS))
        assert (await watch.read()).status == Status.NOT_SERVING
        with pytest.raises(aio.AioRpcError) as caught:
            await events_of(serve.generation.StreamGenerate(stream_request()))
        failure = failure_of(caught.value)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        # What runs can still be cancelled or described.
        response = await serve.generation.CancelRequests(CancelRequestsRequest(request_ids=["nobody"]))
        assert list(response.unknown_request_ids) == ["nobody"]
        assert not draining.done()
        stream.push(tokens("a"))
        assert len(await events_of(call)) == 4
        assert await draining is True


async def test_a_drain_that_takes_too_long_ends_the_rest_with_unavailable(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request())
        stream = await engine.submitted.get()
        assert await serve.server.drain(0.05) is False
        await serve.server.stop()
        with pytest.raises(aio.AioRpcError) as caught:
            await events_of(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)


async def test_a_health_watcher_does_not_hold_up_the_stop(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        watch = health_pb2_grpc.HealthStub(serve.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        assert await serve.server.drain(HANG_SECONDS) is True
        await asyncio.wait_for(serve.server.stop(), HANG_SECONDS)
        assert (await watch.read()).status == Status.NOT_SERVING
        with pytest.raises(aio.AioRpcError):
            await watch.read()


async def test_a_drain_is_asked_for_once(engine: FakeEngine) -> None:
    async with serving(engine, drain_seconds=7.0) as serve:
        waiting = asyncio.create_task(serve.server.wait_drain_requested())
        impatient = asyncio.create_task(serve.server.wait_drain_requested())
        await asyncio.sleep(0)
        impatient.cancel()  # which leaves the other one waiting
        serve.server.request_drain(3.0)
        serve.server.request_drain(9.0)
        assert await waiting == 3.0
        assert await serve.server.wait_drain_requested() == 3.0
    async with serving(engine, drain_seconds=7.0) as serve:
        serve.server.request_drain()
        assert await serve.server.wait_drain_requested() == 7.0


@pytest.mark.parametrize(
    ("reason", "code", "told"),
    [
        (None, grpc.StatusCode.UNAVAILABLE, "DRAINING"),
        (EngineDeadError("the step thread died"), grpc.StatusCode.ABORTED, "ENGINE_DEAD"),
    ],
    ids=["drained", "dead"],
)
async def test_a_stop_ends_calls_with_what_a_client_can_read(
    engine: FakeEngine, reason: Exception | None, code: grpc.StatusCode, told: str
) -> None:
    async with serving(engine) as serve:
        call = serve.generation.StreamGenerate(stream_request())
        stream = await engine.submitted.get()
        await anext(aiter(call))
        await serve.server.stop(reason)
        with pytest.raises(aio.AioRpcError) as caught:
            await events_of(call)
        failure = failure_of(caught.value)
        assert (failure.code, failure.reason) == (code, told)
        await asyncio.wait_for(stream.closed.wait(), HANG_SECONDS)


async def test_a_server_that_did_not_start_leaves_nothing_open(engine: FakeEngine) -> None:
    async with serving(engine) as serve:
        port = int(serve.server.address.rpartition(":")[2])
        engine.stats = EngineStats  # type: ignore[attr-defined]
        failed = Server(engine, port=port, metrics_port=0)
        with pytest.raises(BindError):
            await failed.start()
        assert failed.metrics_address is not None
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*failed.metrics_address.split(":"))


async def test_ipv6_is_listened_on(engine: FakeEngine) -> None:
    async with serving(engine, host="::1") as serve:
        assert serve.server.address.startswith("[::1]:")
        await serve.model.GetModel(GetModelRequest())
