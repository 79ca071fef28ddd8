"""`AsyncClient.watch_load` in front of a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from grpc_harness import serving
from oracle_engine import OracleEngine, StepGate

from aengine import EngineStateError, InvalidRequestError, SamplingParams
from aengine.client import AsyncClient
from aengine.outputs import LoadReport

pytestmark = pytest.mark.anyio


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
        await asyncio.to_thread(gate.held.wait, 20)
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
            client.watch_load()


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


@pytest.mark.parametrize("interval", [0.0, -1.0, 2.0, float("nan"), float("inf"), "soon", 1e300])
async def test_an_interval_out_of_range_is_refused(interval: Any) -> None:
    async with OracleEngine() as engine, serving(engine) as serve, AsyncClient(serve.server.address) as client:
        with pytest.raises(InvalidRequestError, match="min_interval"):
            await anext(client.watch_load(min_interval=interval))
