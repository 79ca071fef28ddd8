"""What runs on the nodes of a Ray cluster: actors that hold the programs of a replica, and end with them.

Knows nothing of how many there are, nor where. Imports neither torch nor what it runs.

A replica as actors of a Ray cluster: what it takes of which nodes, how it starts there, and how it ends. All that talks to Ray.

Actors and placement groups belong to the program that makes them: none has a name, and Ray ends them with it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import anyio
from anyio.to_thread import run_sync

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import AEngineError, ConfigError
from aengine.parallel.join import free_port, split_address
from aengine.parallel.launch import FOLLOWER_MODULE, how_it_ended
from aengine.router.discovery import join_address
from aengine.router.processes import ReplicaProcess
from aengine.router.router_config import RayConfig


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
        return join_address(host, free_port(host))

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


logger = logging.getLogger("aengine.router")

_REACHED_SECONDS = 10.0  # within which the head of the cluster answers
_CAUSE_SECONDS = 5.0
"""When a rank ends while the replica starts, the server says within this time what is wrong."""
_LOGGED_SECONDS = 30.0
"""How often it is logged that a replica waits for its place."""
_DRAIN_SECONDS = 60.0
"""A server that drains ends its requests by itself before that."""


class ReplicaEndedError(Exception):
    """A replica is gone, or part of it."""


@asynccontextmanager
async def connected_to_ray(address: str) -> AsyncIterator[ModuleType]:
    """The package, connected to a cluster. A connection that was there before is used, and stays. Raises `ConfigError`."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError.of("ray", "it needs the package ray: pip install ray") from error
    if ray.is_initialized():
        yield ray
        return
    try:
        if ":" in address:  # Ray itself would try for minutes
            with anyio.fail_after(_REACHED_SECONDS):
                await (await anyio.connect_tcp(*split_address(address))).aclose()
        # In a thread, since it takes seconds, and because it would take SIGTERM from the program.
        await run_sync(partial(ray.init, address, logging_level=logging.ERROR, log_to_driver=True))
    except (OSError, RuntimeError, ValueError) as error:  # TimeoutError is an OSError
        raise ConfigError.of("ray_address", f"there is no cluster at {address!r}: {error or 'it does not answer'}") from error
    try:
        yield ray
    finally:
        with anyio.CancelScope(shield=True):
            await run_sync(ray.shutdown)


@dataclass(frozen=True, slots=True)
class RayPlacement:
    """What each replica of `engine` takes of a cluster."""

    ray: ModuleType
    engine: EngineConfig
    bundles: tuple[range, ...]  # ranks that are together on one node
    cpus: int  # of a rank
    gpus: int  # of a rank

    @property
    def resources(self) -> list[dict[str, int]]:
        """That each bundle takes of its node, by Ray's names."""
        totals = [{"CPU": self.cpus * len(ranks), "GPU": self.gpus * len(ranks)} for ranks in self.bundles]
        return [{name: count for name, count in total.items() if count} for total in totals]

    @classmethod
    def of(cls, engine: EngineConfig, config: RayConfig, ray: ModuleType) -> RayPlacement:
        """The ranks of a stage are together on one node, or as many of them as `ranks_per_node`. A rank has a GPU where the cluster has any
        and the device allows it, else as many CPUs as threads. Raises `ConfigError`."""
        for name in ("local_ranks", "rank_address", "rank_secret_file"):
            if getattr(engine, name) is not None:
                raise ConfigError.of(name, "cannot be given with Ray, which places the ranks")
        if engine.device.startswith("cuda:"):
            raise ConfigError.of("device", f"{engine.device!r} cannot be given with Ray, which divides the devices; 'cuda' can")
        if engine.expert_parallel_size > 1:
            raise ConfigError.of("expert_parallel_size", f"{engine.expert_parallel_size} is not possible with Ray")
        size = config.ranks_per_node or engine.tensor_parallel_size
        if engine.tensor_parallel_size % size:
            raise ConfigError.of("ranks_per_node", f"{size} does not divide tensor_parallel_size ({engine.tensor_parallel_size})")
        bundles = tuple(range(first, first + size) for first in range(0, engine.num_ranks, size))
        if engine.device == "cuda" or (engine.device == "auto" and ray.cluster_resources().get("GPU")):
            return cls(ray, engine, bundles, 1, 1)
        threads = engine.threads or 1
        return cls(ray, replace(engine, threads=threads), bundles, threads, 0)

    @asynccontextmanager
    async def placed(self, name: str) -> AsyncIterator[PlacedReplica]:
        """A replica, whose actors end with the context."""
        placed = PlacedReplica(self, name)
        try:
            try:
                await run_sync(placed.make_actors)
            except self.ray.exceptions.RayError as error:
                raise ReplicaEndedError(str(error)) from error
            yield placed
        finally:
            placed.forget()
            with anyio.CancelScope(shield=True):
                await run_sync(placed.end_actors)


class PlacedReplica:
    """Actors that are one replica, or become one."""

    def __init__(self, placement: RayPlacement, name: str) -> None:
        self._placement = placement
        self._name = name
        self._ray = placement.ray
        self._actors: list[Any] = []  # one for each bundle; the first one has the server
        self._group: Any = None  # their placement group
        self._ends: list[asyncio.Task[str]] = []  # how a part of it has ended

    def make_actors(self) -> None:
        """Ask for them; Ray makes them where and as soon as there is room. May block."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self._placement.resources
        strategies: list[Any] = ["SPREAD"]  # replicas over nodes
        if len(resources) > 1:
            self._group = placement_group(resources, strategy="SPREAD")
            strategies = [PlacementGroupSchedulingStrategy(self._group, index) for index in range(len(resources))]
        for index, (takes, strategy) in enumerate(zip(resources, strategies, strict=True)):
            actor = self._ray.remote(FollowerActor if index else ReplicaActor)
            options = {"num_cpus": takes["CPU"], "num_gpus": takes.get("GPU", 0), "max_restarts": 0, "scheduling_strategy": strategy}
            self._actors.append(actor.options(**options).remote())

    async def start(self, token: str) -> str:
        """Returns the address of the server once it serves. Raises what starting it raises, and `ReplicaEndedError`."""
        server, *followers = self._actors
        placement = self._placement
        address = (await self._places())[0]
        secret = secrets.token_hex()
        start = server.start.remote(self._name, placement.engine, token, (len(placement.bundles[0]), address, secret))
        starting = asyncio.create_task(self._result(start))
        try:
            for actor, ranks in zip(followers, placement.bundles[1:], strict=True):
                self._ends.append(asyncio.create_task(self._result(actor.run.remote(address, secret, list(ranks)))))
            await asyncio.wait([starting, *self._ends], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                await asyncio.wait([starting], timeout=_CAUSE_SECONDS)
            if not starting.done():
                raise ReplicaEndedError(await self.wait())
            served_at = str(starting.result())
            self._ends.append(asyncio.create_task(self._result(server.wait.remote())))
            return served_at
        finally:
            starting.cancel()

    async def wait(self) -> str:
        """How the first part of it has ended, when it has. Raises `ReplicaEndedError`."""
        done, _ = await asyncio.wait(self._ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def drain(self) -> None:
        """Returns when its server has ended, which it does when its requests have, or after a time. Raises `ReplicaEndedError`."""
        with anyio.move_on_after(_DRAIN_SECONDS):
            await self._result(self._actors[0].drain.remote())

    def forget(self) -> None:
        """Nobody waits for its end any more."""
        for task in self._ends:
            if not task.cancel() and not task.cancelled():
                task.exception()  # so that nobody misses it

    def end_actors(self) -> None:
        """End the actors at once. May block."""
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        if self._group is not None:
            with suppress(self._ray.exceptions.RayError):
                remove_placement_group(self._group)

    async def _places(self) -> list[Any]:
        """Waits until all actors have their places. Returns what each reserved there."""
        reserving = asyncio.gather(*(self._result(actor.reserve.remote()) for actor in self._actors))
        try:
            while not (await asyncio.wait([reserving], timeout=_LOGGED_SECONDS))[0]:
                logger.info("%s waits for nodes with room for %s", self._name, self._placement.resources)
            return await reserving
        finally:
            reserving.cancel()

    async def _result(self, reference: Any) -> Any:
        """What a call returns. Raises what it raised, if that is an error of ours, and `ReplicaEndedError`."""
        errors = self._ray.exceptions
        try:
            return await asyncio.wrap_future(reference.future())
        except errors.RayTaskError as error:
            if isinstance(error.cause, AEngineError):
                raise error.cause from None
            raise ReplicaEndedError(f"{type(error.cause).__name__}: {error.cause}") from None
        except errors.RayError as error:
            raise ReplicaEndedError(str(error).partition("\n")[0]) from None
