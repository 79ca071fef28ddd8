"""What a drain looks like from outside: what watchers see, what is still taken, and how it is cut short."""

from __future__ import annotations

import asyncio
import json
import signal

import grpc
import pytest
from grpc import aio
from grpc_harness import events_of, stream_request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_process import server_process

from aengine.v1.admin_service_pb2 import DrainRequest
from aengine.v1.admin_service_pb2_grpc import AdminServiceStub
from aengine.v1.engine_service_pb2 import GetLoadRequest
from aengine.v1.engine_service_pb2_grpc import EngineServiceStub
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.anyio

Status = health_pb2.HealthCheckResponse


@pytest.mark.slow
async def test_a_drain_is_told_first_and_begins_after_the_delay() -> None:
    """Watchers hear of it while requests are still taken; the second signal ends the delay too."""
    with server_process("--drain-delay", "600", "--log-format", "json") as server:
        async with aio.insecure_channel(server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == Status.SERVING
            server.process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == Status.NOT_SERVING
            request = stream_request(request_id="late")
            request.spec.stopping.max_tokens = 3
            events = await events_of(GenerationServiceStub(channel).StreamGenerate(request, metadata=(("x-request-id", "late-call"),)))
            assert events[-1].HasField("finished")
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(aio.AioRpcError):
                await watch.read()
        assert await asyncio.to_thread(server.end) == 0
    lines = [json.loads(line) for line in "".join(server.log).splitlines()]
    (access,) = [line for line in lines if line["logger"] == "aengine.access"]
    assert (access["request_id"], access["code"], access["completion_tokens"]) == ("late-call", "OK", 3)
    assert [line["message"] for line in lines if line["message"].startswith("SIG")] == ["SIGTERM", "SIGTERM"]


@pytest.mark.slow
async def test_a_signal_joins_a_drain_that_was_asked_for(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Operators ask first and then send SIGTERM, as Kubernetes does: that must not end what runs."""
    tokens = tmp_path_factory.mktemp("tokens") / "admin"
    tokens.write_text("root let-me-in\n")
    with server_process("--admin-token-file", str(tokens)) as server:
        async with aio.insecure_channel(server.address) as channel:
            request = stream_request()
            request.spec.stopping.ignore_eos = True
            request.spec.stopping.max_tokens = 300
            call = GenerationServiceStub(channel).StreamGenerate(request)
            await anext(aiter(call))
            drain = DrainRequest()
            drain.grace.FromSeconds(600)
            drained = await AdminServiceStub(channel).Drain(drain, metadata=(("authorization", "Bearer let-me-in"),))
            assert drained.requests_in_flight == 1
            await asyncio.to_thread(server.wait_for, "draining 1 requests, up to 600 s")
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait_for, "SIGTERM")
            responses = [response async for response in call]
            assert await call.code() is grpc.StatusCode.OK
            assert responses[-1].event.finished.usage.completion_tokens == 300
        assert await asyncio.to_thread(server.end) == 0


@pytest.mark.slow
async def test_signals_put_the_engine_to_sleep_and_wake_it() -> None:
    with server_process() as server:
        async with aio.insecure_channel(server.address) as channel:
            server.process.send_signal(signal.SIGUSR1)
            await asyncio.to_thread(server.wait_for, "SIGUSR1: the engine sleeps")
            assert (await EngineServiceStub(channel).GetLoad(GetLoadRequest())).load.sleep_level == 1
            request = stream_request()
            request.spec.stopping.max_tokens = 3
            call = GenerationServiceStub(channel).StreamGenerate(request)  # waits
            server.process.send_signal(signal.SIGUSR2)
            assert (await events_of(call))[-1].HasField("finished")
            await asyncio.to_thread(server.wait_for, "SIGUSR2: the engine is awake")
            server.process.send_signal(signal.SIGUSR2)
            await asyncio.to_thread(server.wait_for, "SIGUSR2: the engine")  # which has nothing to wake from
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.end) == 0
