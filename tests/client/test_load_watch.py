"""`AsyncClient.watch_load` in front of a real server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from cutting_proxy import cutting_proxy
from grpc import aio
from grpc_harness import serving
from hang_guard import HANG_SECONDS
from oracle_engine import OracleEngine, StepGate

from aengine import EngineStateError, InvalidRequestError, SamplingParams, ServerError
from aengine.api.engine import ServedEngine
from aengine.api.outputs import LoadReport
from aengine.client import AsyncClient
from aengine.router.replica_load import CachedPrefixes, PageNaming, PagePrefix
from aengine.server.grpc.services.engine_info import MAX_DIGESTS
from aengine.v1.engine_service_pb2 import PageDigestOptions, WatchLoadRequest
from aengine.v1.engine_service_pb2_grpc import EngineServiceStub

pytestmark = pytest.mark.anyio

SALT = b"a secret of this client"


def four(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=4, ignore_eos=True)


async def until(reports: AsyncGenerator[LoadReport, None], wanted: Any) -> LoadReport:
    """The next report of which that is true."""
    async for report in reports:
        if wanted(report):
            return report
    raise AssertionError("the reports have an end")


async def test_reports_follow_what_the_engine_does() -> None:
    async with OracleEngine() as engine, serving(engine) as serve, AsyncClient(serve.server.address) as client:
        reports = client.watch_load(min_interval=0.01)
        first = await anext(reports)
        assert (first.stats, first.draining, first.pages) == (await client.load(), False, None)
        gate = StepGate(engine, at=1)
        running = asyncio.create_task(client.generate([1, 2, 3], four(1)))
        await asyncio.to_thread(gate.held.wait, HANG_SECONDS)
        waiting = asyncio.create_task(client.generate([5] * 70, four(2)))
        await until(reports, lambda report: report.stats.running == 1 and report.stats.waiting == 1)
        gate.open()
        await asyncio.gather(running, waiting)
        stats = (await until(reports, lambda report: report.stats.completion_tokens == 8)).stats
        assert stats.mean_step_seconds > 0
        assert stats.prefill_tokens_per_second > 0
        assert stats.uncomputed_tokens == 0
        await serve.server.drain(0)
        assert (await until(reports, lambda report: report.draining)).stats.running == 0
        await serve.server.stop()
        with pytest.raises(EngineStateError, match="shutting down"):
            await until(reports, lambda report: False)


async def test_a_watch_ends_with_its_client() -> None:
    async with OracleEngine() as engine, serving(engine) as serve:
        async with AsyncClient(serve.server.address) as client:
            reports = client.watch_load()
            await anext(reports)
            reading = asyncio.create_task(until(reports, lambda report: False))
            await asyncio.sleep(0)
        with pytest.raises(EngineStateError, match="closed"):
            await reading
        with pytest.raises(EngineStateError, match="closed"):
            await anext(client.watch_load())


async def test_a_cancelled_reader_is_cancelled() -> None:
    async with OracleEngine() as engine, serving(engine) as serve, AsyncClient(serve.server.address) as client:
        reports = client.watch_load()
        await anext(reports)
        reading = asyncio.create_task(until(reports, lambda report: False))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await reports.aclose()
        assert (await client.load()).running == 0


async def test_nothing_is_said_of_a_connection_that_is_lost_while_the_reader_leaves() -> None:
    unheard: list[Any] = []
    async with OracleEngine() as engine, serving(engine) as serve, cutting_proxy(serve.server.address) as proxy, AsyncExitStack() as stack:
        loop = asyncio.get_running_loop()
        stack.callback(loop.set_exception_handler, loop.get_exception_handler())
        loop.set_exception_handler(lambda loop, context: unheard.append(context))
        reports = (await stack.enter_async_context(AsyncClient(proxy.address))).watch_load()
        await anext(reports)
        before = asyncio.all_tasks()
        watching: asyncio.Task[LoadReport] = asyncio.ensure_future(anext(reports))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        (reading,) = asyncio.all_tasks() - before - {watching}
        reading.add_done_callback(lambda _: watching.cancel())
        del reading
        proxy.cut()
        with pytest.raises(asyncio.CancelledError):
            await watching
        gc.collect()
    assert unheard == []


@pytest.mark.parametrize("interval", [0.0, -1.0, 2.0, float("nan"), float("inf"), "soon", 1e300])
async def test_an_interval_out_of_range_is_refused(interval: Any) -> None:
    async with OracleEngine() as engine, serving(engine) as serve, AsyncClient(serve.server.address) as client:
        with pytest.raises(InvalidRequestError, match="min_interval"):
            await anext(client.watch_load(min_interval=interval))


async def test_cached_pages_are_told_as_a_router_names_them() -> None:
    async with OracleEngine() as engine, serving(engine) as serve, AsyncClient(serve.server.address) as client:
        prompt = list(range(30))
        digests = PagePrefix(prompt, "theirs", SALT).digests(PageNaming(engine.config.page_size))
        reports, known = client.watch_load(min_interval=0.01, digest_salt=SALT), CachedPrefixes()

        def applied(report: LoadReport) -> bool:
            if report.pages is not None:
                known.apply(report.pages)
            return report.pages is not None

        first = await until(reports, applied)
        assert first.pages is not None
        assert (first.pages.snapshot, first.pages.added, first.pages.removed) == (True, (), ())
        await engine.generate(prompt, four(1), cache_salt="theirs")
        await until(reports, lambda report: applied(report) and known.longest(digests) == 7)
        assert not known.longest(PagePrefix(prompt, "", SALT).digests(PageNaming(engine.config.page_size)))
        completion = await engine.generate(prompt, four(2), cache_salt="theirs")
        assert completion.usage.cached_prompt_tokens == 28
        assert await engine.flush_cache() > 0
        await until(reports, lambda report: applied(report) and not known.longest(digests))
        assert not len(known)


async def test_pages_are_told_to_administrators_alone(tmp_path: Path) -> None:
    """Of a server that asks who calls."""
    for name in ("users", "admins"):
        (tmp_path / name).write_text(f"token-of-{name}\n")
    tokens = {"token_file": str(tmp_path / "users"), "admin_token_file": str(tmp_path / "admins")}
    async with OracleEngine() as engine, serving(engine, **tokens) as serve:
        async with AsyncClient(serve.server.address, token="token-of-users") as user:
            assert (await anext(user.watch_load())).pages is None
            with pytest.raises(ServerError, match="page_digests") as refused:
                await anext(user.watch_load(digest_salt=SALT))
            assert (refused.value.code, refused.value.reason) == ("PERMISSION_DENIED", "ADMIN_ONLY")
        async with (
            AsyncClient(serve.server.address, token="token-of-admins") as admin,
            contextlib.aclosing(admin.watch_load(digest_salt=SALT)) as reports,
        ):
            await until(reports, lambda report: report.pages is not None)


async def test_who_has_no_cache_says_so() -> None:
    class Behind(OracleEngine):
        watch_pages = ServedEngine.watch_pages

    async with Behind() as engine, serving(engine) as serve, AsyncClient(serve.server.address) as client:
        with pytest.raises(InvalidRequestError, match="page_digests"):
            await anext(client.watch_load(digest_salt=SALT))
        assert (await anext(client.watch_load())).pages is None


async def test_options_of_digests_out_of_range_are_refused() -> None:
    async with OracleEngine() as engine, serving(engine) as serve, AsyncClient(serve.server.address) as client:
        for salt in (b"", b"1234567", b"x" * 65):
            with pytest.raises(InvalidRequestError, match=rf"page_digests\.salt: {len(salt)} bytes"):
                await anext(client.watch_load(digest_salt=salt))
        with pytest.raises(InvalidRequestError, match="digest_salt"):
            await anext(client.watch_load(digest_salt="12345678"))  # type: ignore[arg-type]
        for salt in (b"12345678", b"x" * 64):
            async with contextlib.aclosing(client.watch_load(min_interval=0.01, digest_salt=salt)) as reports:
                await until(reports, lambda report: report.pages is not None)
        stub: Any = EngineServiceStub(serve.channel)
        for most in (0, MAX_DIGESTS + 1):
            with pytest.raises(aio.AioRpcError, match=r"page_digests\.most"):
                await stub.WatchLoad(WatchLoadRequest(page_digests=PageDigestOptions(salt=SALT, most=most))).read()
