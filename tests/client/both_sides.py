"""An engine, and how a test reaches it: as it is, or through a client, a channel and a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc_harness import serving

from aengine import AsyncEngine, EngineProtocol
from aengine.client import AsyncClient

LOCAL, REMOTE = "engine", "client"
SIDES = (LOCAL, REMOTE)


@asynccontextmanager
async def reached(side: str, engine: AsyncEngine, **overrides: Any) -> AsyncIterator[EngineProtocol]:
    """`engine`, which is started, from one side. `overrides` are the client's."""
    if side == LOCAL:
        yield engine
        return
    async with serving(engine, limit=None) as serve, AsyncClient(serve.server.address, **overrides) as client:
        yield client
