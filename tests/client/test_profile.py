"""A profile of the next steps: by an engine, over gRPC, from a loop of its own; refused by a router and beside another one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from grpc_harness import serving
from oracle_engine import until

from aengine import AsyncEngine, EngineStateError, InvalidRequestError, Router, SamplingParams
from aengine.client import AsyncClient

pytestmark = pytest.mark.anyio
PARTS = {"take commands", "schedule", "launch", "compute", "commit", "report", "give tokens to streams"}


async def profiled(engine: Any, source: Any, steps: int) -> Counter[str]:
    """How many events each part has, of a profile by `source` while `engine` generates."""
    found: Counter[str] = Counter()
    async with anyio.create_task_group() as group:
        stream = engine.stream([5, 6, 7], SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0.0))

        async def read() -> None:
            async for _ in stream:
                pass

        group.start_soon(read)
        await until(lambda: engine.stats().running)
        trace = json.loads(await source.profile(steps))
        stream.cancel()
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in events)
    plans = [event["args"] for event in events if event["name"] == "schedule" and event["args"]["step"] is not None]
    assert [plan["step"] for plan in plans] == list(range(plans[0]["step"], plans[0]["step"] + len(plans)))
    assert {plan["sequences"] for plan in plans} == {1}
    found.update(event["name"] for event in events)
    return found


async def test_of_an_engine_and_over_grpc(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    async with AsyncEngine("demo", kv_cache_memory=32 << 20) as engine:
        tokens = {"token_file": str(tmp_path / "token"), "admin_token_file": str(tmp_path / "token")}
        async with serving(engine, **tokens) as serve, AsyncClient(serve.server.address, token="secret") as client:
            for source in (engine, client):
                found = await profiled(engine, source, 12)
                assert found.keys() == PARTS
                assert found["commit"] >= 12
                assert max(found.values()) < 40
            assert json.loads(await engine.profile(5, 0.01))["traceEvents"], "there are no steps: it ends in time"
            for wrong, field in (({"num_steps": 0}, "num_steps"), ({"num_steps": 10_001}, "num_steps"), ({"seconds": 601}, "seconds")):
                for source in (engine, client):
                    with pytest.raises(InvalidRequestError, match=field):
                        await source.profile(**wrong)
            async with anyio.create_task_group() as group:
                group.start_soon(engine.profile, 5, 60.0)
                await until(lambda: engine._profiled)
                for source in (engine, client):
                    with pytest.raises(EngineStateError, match="the engine is being profiled"):
                        await source.profile()
                group.cancel_scope.cancel()
            assert vars(engine._core.serving.registry).keys().isdisjoint({"update"}), "nothing is left of it"  # type: ignore[union-attr]
            async with Router(backends=(serve.server.address,), token="secret") as router:
                with pytest.raises(EngineStateError, match="profile one of its replicas"):
                    await router.profile()
