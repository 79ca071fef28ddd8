"""Unary calls of a client, whoever ends them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest
from hang_guard import HANG_SECONDS

from aengine.api.errors import EngineStateError
from aengine.client.client_config import ClientConfig
from aengine.client.link import Link, open_link
from aengine.v1.model_service_pb2 import GetModelRequest


@pytest.fixture
async def silent() -> AsyncIterator[Link]:
    """To a server that accepts connections and says nothing."""
    connections = []
    server = await asyncio.start_server(lambda *connection: connections.append(connection), "127.0.0.1", 0)
    link = await open_link(ClientConfig.of(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    yield link
    await link.channel.close()
    for _, writer in connections:
        writer.close()
    server.close()


@pytest.mark.anyio
class TestSilence:
    async def test_a_scope_gets_its_own_cancellation(self, silent: Link) -> None:
        with anyio.move_on_after(0.1) as scope:
            await silent.ask(silent.model.GetModel, GetModelRequest())
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError), anyio.fail_after(0.1):
            await silent.ask(silent.model.GetModel, GetModelRequest())

    async def test_a_task_is_cancelled(self, silent: Link) -> None:
        asking = asyncio.create_task(silent.ask(silent.model.GetModel, GetModelRequest()))
        await asyncio.wait([asking], timeout=0.1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError), anyio.fail_after(HANG_SECONDS):
            await asking

    async def test_a_closed_channel_is_no_cancellation(self, silent: Link) -> None:
        asking = asyncio.create_task(silent.ask(silent.model.GetModel, GetModelRequest()))
        await asyncio.wait([asking], timeout=0.1)
        await silent.channel.close()
        with pytest.raises(EngineStateError, match="the client is closed"), anyio.fail_after(HANG_SECONDS):
            await asking
