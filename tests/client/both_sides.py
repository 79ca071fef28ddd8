"""An engine, and how a test reaches it: as it is, or through a client, a channel and a server; the client has a call for each request,
or one for all, or it runs in another event loop; or through a router, which may be behind a server of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc_harness import serving

from aengine import AsyncEngine, EngineBase, Router, on_asyncio
from aengine.client import AsyncClient

LOCAL, REMOTE, SHARED, BRIDGED, ROUTED, BEHIND = "engine", "client", "multiplex", "bridge", "router", "behind"
SIDES = (LOCAL, REMOTE, SHARED, BRIDGED, ROUTED, BEHIND)
CALL_EACH = (REMOTE, BRIDGED, BEHIND)  # where a request has a gRPC call of its own


@asynccontextmanager
async def reached(side: str, engine: AsyncEngine, **overrides: Any) -> AsyncIterator[EngineBase]:
    """`engine`, which is started, from one side. `overrides` are the client's."""
    if side == LOCAL:
        yield engine
        return
    if side == ROUTED:
        async with serving(engine, limit=None) as serve, Router(backends=(serve.server.address,)) as router:
            yield router
        return
    options = {"multiplex": side == SHARED, **overrides}
    async with serving(engine, limit=None, over_a_router=side == BEHIND) as serve:
        client = AsyncClient(serve.server.address, **options)
        async with on_asyncio(client) if side == BRIDGED else client as other:
            yield other
