"""A server with an HTTP port on this machine, clients of it, and raw connections to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2
from hang_guard import HANG_SECONDS

from aengine.server.app import Server


@dataclass
class Serving:
    server: Server
    client: httpx2.AsyncClient

    async def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        return await self.client.post(path, json=body, **more)

    async def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The data of all events of a stream, which ends with [DONE]."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        found = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert found.pop() == "[DONE]"
        return [json.loads(data) for data in found]

    def address(self) -> tuple[str, int]:
        host, _, port = self.server.http_address.rpartition(":")
        return host.strip("[]"), int(port)


@asynccontextmanager
async def serving_http(engine: Any, *, limit: float | None = HANG_SECONDS, **config: Any) -> AsyncIterator[Serving]:
    """A test that takes longer than `limit` seconds with it hangs, and fails."""
    server = Server(engine, **{"port": None, "http_port": 0, **config})
    await server.start()
    try:
        if engine.healthy:
            await server.set_serving()
        async with httpx2.AsyncClient(base_url=f"http://{server.http_address}", timeout=None) as client:
            with anyio.fail_after(limit):
                yield Serving(server, client)
    finally:
        await server.stop()


@asynccontextmanager
async def raw(serve: Serving) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection without a client."""
    reader, writer = await asyncio.open_connection(*serve.address())
    try:
        yield reader, writer
    finally:
        writer.close()


def request_bytes(path: str, body: bytes | Mapping[str, Any] = b"", *headers: str, verb: str = "POST") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{verb} {path} HTTP/1.1", "host: localhost", f"content-length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content
