"""Replicas as child processes of this one: how one starts, which share of the host it gets, and that it is started again when it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError, ModelLoadError
from aengine.client.link import Backoff
from aengine.parallel.join import free_port
from aengine.parallel.launch import ChildProcess, how_it_ended

REPLICA = ("-m", "aengine.server.cli", "replica")
"""What Python runs in a child."""
LOOPBACK = "127.0.0.1"
KEPT_LINES = 20
"""Of a child's log, in errors."""
END_SECONDS = 10.0
"""After which a child that was asked to end is killed."""
_PREFIX, _KEPT = "AENGINE_", "AENGINE_CPU_LEVEL"  # variables of a program that serves; none of them is for its children, but this
_LISTENING = re.compile(r"aengine-grpc listening on (\S+) \(model ")

_log = logging.getLogger("aengine")


class ReplicaProcess:
    """One engine behind its gRPC server, as a process that ends with this one."""

    def __init__(
        self,
        engine: EngineConfig,
        token: str,
        *,
        name: str = "replica",
        host: str = LOOPBACK,
        port: int = 0,
        share: tuple[int, int] = (0, 1),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`token`: what its server demands with every call, and takes for that of an administrator. `share`: which one it is of how many
        that divide the cores. `environment`: replaces variables of this process."""
        self.name = name
        self._engine = engine
        self._token = token
        self._host, self._port = host, port
        self._share = share
        self._environment = dict(environment or {})
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._child: ChildProcess | None = None
        self._address: asyncio.Future[str] | None = None
        self._ended: asyncio.Future[str] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def start(self) -> str:
        """Run it; returns its address when it serves. Raises `ModelLoadError`, with its last lines, if it ends before that. To be called
        once."""
        loop = asyncio.get_running_loop()
        self._address, self._ended = loop.create_future(), loop.create_future()
        self._run()
        done, _ = await asyncio.wait({self._address, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        if self._address in done:
            return self._address.result()
        lines = "".join(f"\n  {line}" for line in self._lines)
        raise ModelLoadError(f"{self.name} {self._ended.result()} before it served" + (f"; its last lines:{lines}" if lines else ""))

    async def wait(self) -> str:
        """Wait until it has ended; returns how."""
        assert self._ended is not None, "started"
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Ask it to shut down gently."""
        if self._ended is not None and not self._ended.done() and self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """End the process at once. Does nothing if it has ended."""
        if self._ended is not None and not self._ended.done() and self._child is not None:
            self._child.kill()

    async def aclose(self) -> None:
        """End it, gently if that takes no more than END_SECONDS."""
        if self._ended is not None and self._child is not None:
            self.terminate()
            await asyncio.wait({self._ended}, timeout=END_SECONDS)
            self.kill()
            await self.wait()

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Files in memory: they end with the two processes, and no path leads to the token.
        secret = _memory_file(f"router {self._token}\n")
        settings = _memory_file(_toml({"server": self._server_options(secret), "engine": _given(self._engine)}))
        own = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX) or name == _KEPT}
        arguments = (str(os.getpid()), *map(str, self._share), f"--config=/proc/self/fd/{settings}")
        try:
            self._child = ChildProcess(
                [sys.executable, *REPLICA, *arguments],
                pass_fds=(secret, settings),
                environment={**own, **self._environment},
            )
        finally:
            os.close(secret)
            os.close(settings)
        loop = asyncio.get_running_loop()
        self._end_fd = os.pidfd_open(self._child.pid)
        loop.add_reader(self._child.output, self._on_output)
        loop.add_reader(self._end_fd, self._on_end)

    def _server_options(self, secret: int) -> dict[str, Any]:
        tokens = f"/proc/self/fd/{secret}"
        options: dict[str, Any] = {"host": self._host, "port": self._port, "token_file": tokens, "admin_token_file": tokens}
        options |= {"weights_roots": ["/"], "access_log": False}
        return options | ({} if self._host == LOOPBACK else {"insecure": True})

    def _on_output(self) -> None:
        assert self._child is not None
        assert self._address is not None
        lines, more = self._child.read_lines()
        for line in lines:
            self._lines.append(line)
            _log.info("%s: %s", self.name, line)
            if (found := _LISTENING.search(line)) and not self._address.done():
                self._address.set_result(found[1])
        if not more:
            asyncio.get_running_loop().remove_reader(self._child.output)

    def _on_end(self) -> None:
        assert self._child is not None
        assert self._ended is not None
        loop = asyncio.get_running_loop()
        code = self._child.ended(1.0)  # the kernel has said so
        self._on_output()
        loop.remove_reader(self._child.output)
        loop.remove_reader(self._end_fd)
        os.close(self._end_fd)
        self._child.release()
        self._ended.set_result(how_it_ended(code or 0))


async def run_replicas(engine: EngineConfig, count: int, token: str, num_prefill: int = 0) -> AsyncGenerator[frozenset[str], None]:
    """The addresses of `count` replicas on this host, from when all serve. One that ends is started again, at the same address if that is
    free. Closing ends them all. Those that share experts end and start together. Raises `ModelLoadError` if one ends before it has served
    at all, and `ConfigError` for another number of them than share experts. `num_prefill`: of the first of them, that compute prompts for
    the others; 0: all do both."""
    if engine.expert_parallel_size not in (1, count):
        raise ConfigError.of("expert_parallel_size", f"{engine.expert_parallel_size} is neither 1 nor the number of replicas, {count}")
    with _meeting(engine) as engine:
        async with aclosing(_run_all(engine, count, token, num_prefill)) as changes:
            async for addresses in changes:
                yield addresses


@contextmanager
def _meeting(engine: EngineConfig) -> Iterator[EngineConfig]:
    """With a place where those meet that share experts, if they have none."""
    if engine.expert_parallel_size == 1 or engine.rank_address is not None:
        yield engine
        return
    with tempfile.NamedTemporaryFile() as secret:
        secret.write(secrets.token_hex().encode())
        secret.flush()
        yield replace(engine, rank_address=f"{LOOPBACK}:{free_port()}", rank_secret_file=secret.name)


async def _run_all(engine: EngineConfig, count: int, token: str, num_prefill: int) -> AsyncGenerator[frozenset[str], None]:
    addresses: dict[int, str] = {}
    changed: asyncio.Queue[None] = asyncio.Queue()
    engines = [engine] * count
    if num_prefill:
        engines = [replace(engine, role="prefill" if index < num_prefill else "decode") for index in range(count)]
    keepers = [asyncio.ensure_future(_keep(one, index, count, token, addresses, changed)) for index, one in enumerate(engines)]
    try:
        while True:
            change = asyncio.ensure_future(changed.get())
            try:
                await asyncio.wait({change, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
            for keeper in keepers:
                if keeper.done():
                    keeper.result()  # they only end with an error
            if len(addresses) == count:
                yield frozenset(addresses.values())
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)


async def _keep(engine: EngineConfig, index: int, count: int, token: str, addresses: dict[int, str], changed: asyncio.Queue[None]) -> None:
    """Runs one replica for ever. Raises `ModelLoadError` if it never serves."""
    environment, backoff, port = _devices(engine, index, count), Backoff(), 0
    if engine.expert_parallel_size > 1:
        engine = replace(engine, expert_parallel_rank=index)
    while True:
        process = ReplicaProcess(engine, token, name=f"replica {index}", port=port, share=(index, count), environment=environment)
        try:
            address = await process.start()
            port = int(address.rpartition(":")[2])
            if addresses.get(index) != address:
                addresses[index] = address
                changed.put_nowait(None)
            backoff.reset()
            how = await process.wait()
        except ModelLoadError as error:
            if index not in addresses:
                raise
            how, port = str(error), 0  # the port may be taken by now
        finally:
            await asyncio.shield(asyncio.ensure_future(process.aclose()))
        _log.warning("replica %d (%s) %s; it is started again", index, addresses[index], how)
        await backoff.wait(None)


def _devices(engine: EngineConfig, index: int, count: int) -> dict[str, str]:
    """Which GPUs a replica sees, where there are any and the engine takes what there is."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    if engine.device not in ("auto", "cuda") or given == "" or not visible:
        return {}
    each = len(visible) // count
    own = visible[each * index : each * (index + 1)] if each else [visible[index % len(visible)]]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def _memory_file(text: str) -> int:
    """A file descriptor."""
    fd = os.memfd_create("aengine", 0)
    os.write(fd, text.encode())
    return fd


def _given(engine: EngineConfig) -> dict[str, Any]:
    """The fields that are not None."""
    return {field.name: value for field in fields(engine) if (value := getattr(engine, field.name)) is not None}


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines.extend(f"{key} = {_toml_value(value)}" for key, value in table.items())
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(one)}" for key, one in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
