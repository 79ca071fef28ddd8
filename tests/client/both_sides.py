"""An engine, and how a test reaches it: as it is, or through a client, a channel and a server; the client has a call for each request,
or one for all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc_harness import serving

from aengine import AsyncEngine, EngineProtocol
from aengine.client import AsyncClient

LOCAL, REMOTE, SHARED = "engine", "client", "multiplex"
SIDES = (LOCAL, REMOTE, SHARED)


@asynccontextmanager
async def reached(side: str, engine: AsyncEngine, **overrides: Any) -> AsyncIterator[EngineProtocol]:
    """`engine`, which is started, from one side. `overrides` are the client's."""
    if side == LOCAL:
        yield engine
        return
    options = {"multiplex": side == SHARED, **overrides}
    async with serving(engine, limit=None) as serve, AsyncClient(serve.server.address, **options) as client:
        yield client
