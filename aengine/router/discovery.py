"""Which addresses there are, over time: fixed ones, those of a name, those in a file. Knows nothing of what is there.

A source is an asynchronous iterator of sets of addresses; each set replaces the one before.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from aengine.api.errors import ConfigError
from aengine.client.client_config import ClientConfig
from aengine.router.router_config import DNS, FILE, split_name

RESOLVE_SECONDS = 5.0
"""Between two times that a name is resolved."""
READ_SECONDS = 1.0
"""Between two looks at a file."""

AddressSource = AsyncIterator[frozenset[str]]

_log = logging.getLogger("aengine")


async def discover(backends: Sequence[str]) -> AsyncGenerator[frozenset[str], None]:
    """The addresses of all `RouterConfig.backends`. Raises `ConfigError` for a file that cannot be read at first."""
    fixed = frozenset(one for one in backends if not one.startswith((FILE, DNS)))
    sources = [_source(one) for one in backends if one.startswith((FILE, DNS))]
    async for found in merged(sources):
        yield fixed.union(*found)


def _source(backend: str) -> AsyncGenerator[frozenset[str], None]:
    if backend.startswith(FILE):
        return read_file(Path(backend.removeprefix(FILE)))
    name = split_name(backend)
    assert name is not None, "checked by the configuration"
    return resolve(*name)


async def merged(sources: Sequence[AsyncGenerator[frozenset[str], None]]) -> AsyncGenerator[list[frozenset[str]], None]:
    """The latest set of each source, whenever one has a new one, from when all have one. Raises what a source raises."""
    latest: list[frozenset[str]] = []
    async with AsyncExitStack() as stack:
        for source in sources:
            stack.push_async_callback(source.aclose)
        for source in sources:
            latest.append(await anext(source))
        yield list(latest)
        pending: dict[asyncio.Task[frozenset[str]], int] = {}

        async def cancel_all() -> None:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

        stack.push_async_callback(cancel_all)

        def ask(index: int) -> None:
            pending[asyncio.ensure_future(anext(sources[index]))] = index

        for index in range(len(sources)):
            ask(index)
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                latest[index] = task.result()
                ask(index)
            yield list(latest)


async def resolve(host: str, port: int, seconds: float = RESOLVE_SECONDS) -> AsyncGenerator[frozenset[str], None]:
    """All addresses of a name. While it cannot be resolved, those that it had stay: none at first, as there may be no server yet."""
    last: frozenset[str] | None = None
    is_known = True
    while True:
        try:
            entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found, is_known = frozenset(join_address(str(sockaddr[0]), port) for *_, sockaddr in entries), True
        except OSError as error:
            found = last or frozenset()
            if is_known:
                is_known = False
                _log.warning("the name %s cannot be resolved: %s; the %d addresses known so far stay", host, error.strerror, len(found))
        if found != last:
            last = found
            yield found
        await asyncio.sleep(seconds)


async def read_file(path: Path, seconds: float = READ_SECONDS) -> AsyncGenerator[frozenset[str], None]:
    """The addresses in a file, one a line; # begins a comment. While it cannot be read, those that it had stay. Raises `ConfigError`
    (backends) if it cannot be read at first."""
    last: frozenset[str] | None = None
    seen: object = None
    while True:
        try:
            now = await asyncio.to_thread(_fingerprint, path)
            if now != seen:
                found = await asyncio.to_thread(_addresses, path)
                seen = now
                if found != last:
                    last = found
                    yield found
        except (OSError, ValueError) as error:
            wrong = error if isinstance(error, ConfigError) else ConfigError.of("backends", f"cannot read {path}: {error}")
            if last is None:
                raise wrong from error
            if seen != str(wrong):
                _log.error("%s; the addresses known so far stay", wrong)
                seen = str(wrong)  # which is said once; any later content is another one
        await asyncio.sleep(seconds)


def _fingerprint(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _addresses(path: Path) -> frozenset[str]:
    found = set()
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        address = line.partition("#")[0].strip()
        if address:
            try:
                ClientConfig(address=address)
            except ConfigError as error:
                raise ConfigError.of("backends", f"{path}, line {number}: {error.violations[0].description}") from error
            found.add(address)
    return frozenset(found)


def join_address(host: str, port: int) -> str:
    """The address host:port; `host` is put in brackets if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
