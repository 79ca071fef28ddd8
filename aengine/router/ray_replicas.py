"""Replicas in a Ray cluster: they are counted, watched, replaced and ended here.

`ray_replicas` yields the addresses of their servers, which is all that a router has to know of them. Does not talk to Ray itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import anyio

from aengine.api.config import EngineConfig
from aengine.api.errors import AEngineError, ConfigError, ModelLoadError
from aengine.api.outputs import EngineStats
from aengine.client.client import AsyncClient
from aengine.client.link import Backoff
from aengine.router.ray_placement import PlacedReplica, RayPlacement, ReplicaEndedError, connected_to_ray
from aengine.router.router_config import RayConfig, Scale, next_scale

logger = logging.getLogger("aengine.router")

POLL_SECONDS = 1.0
"""How often a replica is asked for its load."""
HANG_SECONDS = 30.0
"""A replica that does not answer for so long is replaced."""


async def ray_replicas(engine: EngineConfig, config: RayConfig, token: str) -> AsyncIterator[frozenset[str]]:
    """Starts replicas of `engine` in a Ray cluster and yields the addresses, host:port, of those that serve, each time that they change.
    Their servers take calls with `token` alone. They end when this is closed, or when the program ends, however it does.

    Raises `ConfigError` where Ray or its cluster is not there, and what is wrong with a replica as long as none has served: `ConfigError`,
    `ModelLoadError`.
    """
    async with connected_to_ray(config.ray_address) as ray:
        deployment = _Deployment(RayPlacement.of(engine, config, ray), config, token)
        running = asyncio.create_task(deployment.run(), name="aengine-ray-replicas")
        running.add_done_callback(lambda _: deployment.changed.set())
        known: frozenset[str] = frozenset()
        try:
            while not running.done():
                await deployment.changed.wait()
                deployment.changed.clear()
                if deployment.addresses != known:
                    known = deployment.addresses
                    yield known
            running.result()
        finally:
            running.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([running])


class _Replica:
    """One of the replicas that there should be, whichever actors it is at the moment."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address: str | None = None  # while it serves
        self.load: EngineStats | None = None  # while it serves
        self.retires = False  # it is one too many

    @property
    def work(self) -> int:
        """Sequences that it has; -1: it does not serve."""
        return -1 if self.load is None else self.load.running + self.load.parked + self.load.waiting


class _Deployment:
    """Keeps as many replicas in a Ray cluster as there should be."""

    def __init__(self, placement: RayPlacement, config: RayConfig, token: str) -> None:
        self.changed = asyncio.Event()  # `addresses` have; cleared by who reads them
        self._placement = placement
        self._config = config
        self._token = token
        self._replicas: dict[_Replica, asyncio.Task[None]] = {}
        self._num_started = 0
        self._served = False  # any of them

    @property
    def addresses(self) -> frozenset[str]:
        """The addresses, host:port, of the replicas that serve."""
        return frozenset(replica.address for replica in self._replicas if replica.address is not None)

    async def run(self) -> None:
        """Keep replicas until it is cancelled. Raises what is wrong with a replica as long as none has served."""
        scale = Scale(self._config.min_replicas)
        rows = self._placement.engine.num_seqs
        try:
            while True:
                self._adjust(scale.replicas)
                done, _ = await asyncio.wait(self._replicas.values(), timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for replica in [replica for replica, task in self._replicas.items() if task in done]:
                    task = self._replicas.pop(replica)
                    if not task.cancelled():
                        task.result()
                loads = [replica.load for replica in self._replicas if replica.load is not None and not replica.retires]
                before, scale = scale.replicas, next_scale(scale, loads, rows, self._config, time.monotonic())
                if scale.replicas != before:
                    waiting = sum(load.waiting for load in loads)
                    logger.info("%d replicas instead of %d; %d sequences wait", scale.replicas, before, waiting)
        finally:
            for task in self._replicas.values():
                task.cancel()
            await asyncio.gather(*self._replicas.values(), return_exceptions=True)

    def _adjust(self, wanted: int) -> None:
        """Start those that are missing, or let those go that have the least work."""
        staying = sorted((replica for replica in self._replicas if not replica.retires), key=lambda replica: replica.work)
        for replica in staying[: max(0, len(staying) - wanted)]:
            replica.retires = True
            if replica.address is None:
                self._replicas[replica].cancel()
        for _ in range(wanted - len(staying)):
            self._num_started += 1
            replica = _Replica(f"replica {self._num_started}")
            self._replicas[replica] = asyncio.create_task(self._keep(replica), name=f"aengine-ray-{replica.name}")

    async def _keep(self, replica: _Replica) -> None:
        """Run it, again where it ends, until it has retired."""
        backoff = Backoff()
        while not replica.retires:
            try:
                async with self._placement.placed(replica.name) as placed:
                    await self._live(replica, placed, await placed.start(self._token), backoff)
            except ReplicaEndedError as error:
                logger.warning("%s is lost: %s", replica.name, error)
            except AEngineError as error:
                if isinstance(error, ConfigError | ModelLoadError) and not self._served:
                    raise
                logger.error("%s does not start: %s", replica.name, error)
            if not replica.retires:
                await backoff.wait(None)

    async def _live(self, replica: _Replica, placed: PlacedReplica, address: str, backoff: Backoff) -> None:
        """Watch a replica that serves, until it has retired. Raises `ReplicaEndedError` if it ends or does not answer any more."""
        async with AsyncClient(address, token=self._token) as client:
            logger.info("%s serves at %s", replica.name, address)
            backoff.reset()
            self._served = True
            replica.address, replica.load = address, EngineStats()
            self.changed.set()
            ended, answered = asyncio.create_task(placed.wait()), time.monotonic()
            try:
                while not replica.retires:
                    with suppress(AEngineError), anyio.move_on_after(POLL_SECONDS):
                        replica.load = await client.load()
                        answered = time.monotonic()
                    if time.monotonic() - answered > HANG_SECONDS:
                        raise ReplicaEndedError(f"it has not answered for {HANG_SECONDS:g} s")
                    if (await asyncio.wait([ended], timeout=POLL_SECONDS))[0]:
                        raise ReplicaEndedError(ended.result())
            finally:
                ended.cancel()
                replica.address = replica.load = None
                self.changed.set()
        logger.info("%s drains", replica.name)
        await placed.drain()
