"""AdminService over a real channel on the demo model. Who may call it is tested elsewhere: here everyone may."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from fake_engine import FakeEngine
from google.protobuf.duration_pb2 import Duration
from grpc import aio
from grpc_harness import stream_request, text_spec
from hang_guard import HANG_SECONDS

from aengine import AsyncEngine, InvalidRequestError
from aengine.server.core.calls_in_flight import Admission
from aengine.server.core.core import Backend
from aengine.server.core.journal import Journal
from aengine.server.core.resume import ResumableStreams
from aengine.server.grpc.generation.batch import StoredBatches
from aengine.server.grpc.services.admin import AdminServicer
from aengine.server.grpc.services.generation import GenerationServicer
from aengine.v1.admin_service_pb2 import (
    PAUSE_MODE_CANCEL,
    PAUSE_MODE_KEEP,
    SLEEP_MODE_CANCEL,
    SLEEP_MODE_PARK,
    ContinueGenerationRequest,
    DrainRequest,
    FlushCacheRequest,
    LoadAdapterRequest,
    PauseGenerationRequest,
    SleepRequest,
    UpdateWeightsRequest,
    WakeRequest,
)
from aengine.v1.admin_service_pb2_grpc import AdminServiceStub, add_AdminServiceServicer_to_server
from aengine.v1.generation_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_MAX_TOKENS
from aengine.v1.generation_service_pb2 import GenerateRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub, add_GenerationServiceServicer_to_server

pytestmark = pytest.mark.anyio


class Streaming(GenerationServicer):
    """grpc.aio by itself, without the server's interceptor, tells a stream by its being a generator function."""

    async def StreamGenerate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        async for response in super().StreamGenerate(request, context):
            yield response


@dataclass
class Administered:
    engine: AsyncEngine
    admin: Any
    generation: Any
    graces: list[float | None] = field(default_factory=list)  # of the drains


@asynccontextmanager
async def administered(engine: AsyncEngine) -> AsyncIterator[Administered]:
    admission, graces = Admission(), []
    server = aio.server()
    add_AdminServiceServicer_to_server(AdminServicer(engine, admission, graces.append), server)
    backend = Backend(engine, admission)
    batches = StoredBatches(Journal(None, 1 << 20, 60.0), backend)
    add_GenerationServiceServicer_to_server(Streaming(backend, ResumableStreams(), batches), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with anyio.fail_after(HANG_SECONDS):
                yield Administered(engine, AdminServiceStub(channel), GenerationServiceStub(channel), graces)
    finally:
        await server.stop(None)


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", kv_cache_memory=64 * 1024 * 1024) as running:
        yield running


def unending(request_id: str) -> Any:
    request = stream_request("It is a truth", request_id=request_id)
    request.spec.stopping.max_tokens, request.spec.stopping.ignore_eos = 200, True
    return request


async def test_a_drain_of_a_replica_leaves_the_server_alone() -> None:
    router, graces = FakeEngine(), list[float | None]()
    admin: Any = AdminServicer(router, Admission(), graces.append)  # type: ignore[arg-type]
    assert (await admin.Drain(DrainRequest(replica="a:1"), None)).requests_in_flight == 3
    with pytest.raises(InvalidRequestError, match="grace: cannot be combined with replica"):
        await admin.Drain(DrainRequest(replica="a:1", grace=Duration(seconds=1)), None)
    assert (router.drained, graces) == (["a:1"], [])


async def test_the_prefix_cache_is_emptied(engine: AsyncEngine) -> None:
    async with administered(engine) as serve:
        await serve.generation.Generate(GenerateRequest(spec=text_spec("It is a truth universally acknowledged. " * 8)))
        await serve.admin.PauseGeneration(PauseGenerationRequest())
        cached = engine.stats().cached_tokens
        assert cached > 0
        freed = (await serve.admin.FlushCache(FlushCacheRequest())).freed_pages
        assert (freed * engine.config.page_size, engine.stats().cached_tokens) == (cached, 0)
        assert (await serve.admin.FlushCache(FlushCacheRequest())).freed_pages == 0
        await serve.admin.ContinueGeneration(ContinueGenerationRequest())


@pytest.mark.parametrize("mode", [None, PAUSE_MODE_KEEP])
async def test_a_pause_holds_requests_and_they_go_on(engine: AsyncEngine, mode: int | None) -> None:
    async with administered(engine) as serve:
        running = serve.generation.StreamGenerate(unending("running"))
        await anext(aiter(running))
        answer = await serve.admin.PauseGeneration(PauseGenerationRequest(mode=mode))
        assert (answer.cancelled_requests, engine.stats().paused) == (0, True)
        steps = engine.stats().steps
        waiting = serve.generation.StreamGenerate(unending("waiting"))
        await anext(aiter(waiting))  # accepted
        await serve.admin.FlushCache(FlushCacheRequest())  # goes through the step thread, which takes no step for it
        assert engine.stats().steps == steps
        await serve.admin.ContinueGeneration(ContinueGenerationRequest())
        await serve.admin.ContinueGeneration(ContinueGenerationRequest())  # nothing is paused any more
        for stream in (running, waiting):
            *_, ended, _ = [response.event async for response in stream]
            assert (ended.sequence_finished.finish.reason, ended.sequence_finished.num_tokens) == (FINISH_REASON_MAX_TOKENS, 200)
        assert not engine.stats().paused


async def test_a_pause_that_cancels_ends_what_is_in_flight(engine: AsyncEngine) -> None:
    async with administered(engine) as serve:
        streams = [serve.generation.StreamGenerate(unending(f"number-{index}")) for index in range(2)]
        for stream in streams:
            await anext(aiter(stream))
        answer = await serve.admin.PauseGeneration(PauseGenerationRequest(mode=PAUSE_MODE_CANCEL))
        assert (answer.cancelled_requests, engine.stats().paused, engine.stats().pages_used) == (2, True, 0)
        for stream in streams:
            *_, ended, _ = [response.event async for response in stream]
            assert ended.sequence_finished.finish.reason == FINISH_REASON_CANCELLED
        await serve.admin.ContinueGeneration(ContinueGenerationRequest())
        assert (await serve.generation.Generate(GenerateRequest(spec=unending("later").spec))).usage.completion_tokens == 200


async def test_a_drain_is_asked_for_with_its_grace(engine: AsyncEngine) -> None:
    async with administered(engine) as serve:
        assert (await serve.admin.Drain(DrainRequest())).requests_in_flight == 0
        stream = serve.generation.StreamGenerate(unending("running"))
        await anext(aiter(stream))
        for grace in (Duration(), Duration(seconds=1, nanos=500_000_000)):
            assert (await serve.admin.Drain(DrainRequest(grace=grace))).requests_in_flight == 1
        assert serve.graces == [None, 0.0, 1.5]
        stream.cancel()


@pytest.mark.parametrize("grace", [Duration(seconds=-1), Duration(nanos=-1), Duration(seconds=1, nanos=-5), Duration(nanos=2 * 10**9)])
async def test_a_grace_below_zero_is_refused(engine: AsyncEngine, grace: Duration) -> None:
    graces: list[float | None] = []
    with pytest.raises(InvalidRequestError, match=r"grace: (-.* s is not 0 s or more|.* are no duration)"):
        await AdminServicer(engine, Admission(), graces.append).Drain(DrainRequest(grace=grace), None)  # type: ignore[arg-type]
    assert graces == []


async def test_an_unknown_mode_is_refused(engine: AsyncEngine) -> None:
    request = PauseGenerationRequest.FromString(b"\x08\x07")
    with pytest.raises(InvalidRequestError, match=r"mode: 7 is none of 1 \(PAUSE_MODE_KEEP\)"):
        await AdminServicer(engine, Admission(), lambda grace: None).PauseGeneration(request, None)  # type: ignore[arg-type]
    assert not engine.stats().paused


@pytest.mark.parametrize("mode", [SLEEP_MODE_PARK, SLEEP_MODE_CANCEL])
async def test_the_engine_sleeps_and_wakes(engine: AsyncEngine, mode: Any) -> None:
    async with administered(engine) as serve:
        call = serve.generation.StreamGenerate(unending(f"sleeper {mode}".replace(" ", "-")))
        await anext(aiter(call))
        slept = await serve.admin.Sleep(SleepRequest(mode=mode))
        assert 0 < slept.memory.bytes_after <= slept.memory.bytes_before
        assert engine.stats().sleep_level == 1
        await serve.admin.Wake(WakeRequest())
        finish = [response async for response in call][-2].event.sequence_finished.finish.reason
        assert finish == (FINISH_REASON_CANCELLED if mode == SLEEP_MODE_CANCEL else FINISH_REASON_MAX_TOKENS)
        assert engine.stats().sleep_level == 0


@pytest.mark.parametrize(("request_", "field"), [(SleepRequest(level=3), "level"), (SleepRequest(mode=9), "mode")])  # type: ignore[arg-type]
async def test_a_sleep_that_there_is_not(engine: AsyncEngine, request_: SleepRequest, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await AdminServicer(engine, Admission(), lambda grace: None).Sleep(request_, None)  # type: ignore[arg-type]
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize("name", ["link", "inside", "loop", "above", "nul", "empty"])
async def test_nothing_outside_of_the_roots_is_loaded(engine: AsyncEngine, tmp_path: Path, name: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "inside" / "deeper").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("x")
    (root / "link").symlink_to(outside)
    (root / "inside" / "deeper" / "adapter_config.json").symlink_to(outside / "secret")
    (root / "loop").symlink_to(root / "loop")
    paths = {"above": f"{root}/../outside", "nul": f"{root}/a\0b", "empty": ""}
    admin = AdminServicer(engine, Admission(), lambda grace: None, [str(root)])
    for request, call in ((LoadAdapterRequest(name="a"), admin.LoadAdapter), (UpdateWeightsRequest(), admin.UpdateWeights)):
        request.path = paths.get(name, str(root / name))
        with pytest.raises(InvalidRequestError) as caught:
            await call(request, None)  # type: ignore[operator]
        assert caught.value.field == "path"


async def test_links_within_the_roots_are_followed(engine: AsyncEngine, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_text("{}")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "adapter_config.json").symlink_to("../blobs/1")
    admin = AdminServicer(engine, Admission(), lambda grace: None, [str(tmp_path)])
    assert await admin._read_path(str(tmp_path / "snapshot")) == str(tmp_path / "snapshot")
