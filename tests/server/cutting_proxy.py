"""A TCP proxy that cuts connections after a given number of bytes, wherever in a frame that is, or holds back what a server sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager


class CuttingProxy:
    """Each connection is cut when the server has sent as many bytes as the next of `budgets` says; without one it is left alone."""

    def __init__(self, target: str, budgets: Iterable[int] = ()) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._budgets = iter(budgets)
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""
        self.num_bytes = 0  # that the server sent, on all connections
        self.num_cuts = 0
        self.flows = asyncio.Event()  # what the server sends comes through
        self.flows.set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    def stop(self) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """All connections that there are."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        budget = next(self._budgets, None)
        try:
            from_server, to_server = await asyncio.open_connection(*self._target)
        except OSError:  # the server is gone
            to_client.transport.abort()
            return
        writers = {to_client, to_server}
        self._writers |= writers
        try:
            await asyncio.gather(_forward(from_client, to_server), self._receive(from_server, to_client, budget))
        except ConnectionError:
            pass  # one of the two has left, or the connection was cut
        finally:
            self._writers -= writers
            for writer in writers:
                writer.transport.abort()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int | None) -> None:
        """From the server to the client, until one of them leaves or the budget is spent."""
        while budget != 0 and (piece := await reader.read(65536 if budget is None else budget)):
            await self.flows.wait()
            self.num_bytes += len(piece)
            writer.write(piece)
            await writer.drain()
            if budget is not None:
                budget -= len(piece)
        self.num_cuts += budget == 0
        raise ConnectionAbortedError


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(65536):
        writer.write(piece)
        await writer.drain()
    raise ConnectionAbortedError


@asynccontextmanager
async def cutting_proxy(target: str, budgets: Iterable[int] = ()) -> AsyncIterator[CuttingProxy]:
    proxy = CuttingProxy(target, budgets)
    await proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
