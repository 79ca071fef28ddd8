"""What runs on the nodes of a Ray cluster: actors that hold the programs of a replica, and end with them.

Knows nothing of how many there are, nor where. Imports neither torch nor what it runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from aengine.api.config import EngineConfig
from aengine.parallel.launch import FOLLOWER_MODULE, how_it_ended
from aengine.router.discovery import join_address
from aengine.router.processes import ReplicaProcess


def own_address() -> str:
    """The IP address by which the other nodes reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


class SecretFile:
    """A file in memory, which ends with this object. Its path is for this process and its children."""

    def __init__(self, text: str) -> None:
        self._fd = os.memfd_create("aengine-secret")
        os.write(self._fd, text.encode())
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def __del__(self) -> None:
        os.close(self._fd)


class ReplicaActor:
    """The server of a replica, with the ranks of its node."""

    async def reserve(self) -> str:
        """An address of this node, host:port, where the ranks of other nodes can join the replica."""
        host = own_address()
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            return join_address(host, free.getsockname()[1])

    async def start(self, name: str, engine: EngineConfig, token: str, ranks: tuple[int, str, str]) -> str:
        """Returns host:port of the server once it serves. Raises what starting it raises. `ranks`: how many are on this node; where the
        others join, and with which secret."""
        logging.basicConfig(level=logging.INFO, format="%(message)s")  # the lines of the server, to Ray's logs
        num_local, rank_address, secret = ranks
        if num_local < engine.num_ranks:
            self._secret = SecretFile(secret)
            engine = replace(engine, local_ranks=num_local, rank_address=rank_address, rank_secret_file=self._secret.path)
        self._process = ReplicaProcess(engine, token, name=name, host=own_address())
        return await self._process.start()

    async def wait(self) -> str:
        """How the server has ended, when it has."""
        return await self._process.wait()

    async def drain(self) -> None:
        """Returns when the server has drained and ended."""
        self._process.terminate()
        await self._process.wait()


class FollowerActor:
    """Ranks of a replica whose server runs on another node."""

    async def reserve(self) -> None:
        """Returns when the actor has its place."""

    async def run(self, driver: str, secret: str, ranks: Sequence[int]) -> str:
        """Runs `ranks`, which join the replica at `driver`, until the first of them ends. Returns how it ended."""
        kept = SecretFile(secret)
        command = [sys.executable, "-m", FOLLOWER_MODULE, f"--driver={driver}", f"--secret-file={kept.path}"]
        command += [f"--local-ranks={len(ranks)}", f"--parent-pid={os.getpid()}"]
        processes = [
            subprocess.Popen([*command, f"--rank={rank}", f"--local-rank={index}"], stdin=subprocess.DEVNULL)  # noqa: ASYNC220
            for index, rank in enumerate(ranks)
        ]
        ends = [asyncio.create_task(asyncio.to_thread(process.wait)) for process in processes]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ended = next(index for index, end in enumerate(ends) if end.done())
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
        return f"rank {ranks[ended]} {how_it_ended(ends[ended].result())}"
