"""`Agreement`: what all replicas have alike: the adapters and weights that were loaded through the router.

A replica that comes, or comes back, is given these before it serves. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from aengine.api.errors import AdapterNotFoundError, AEngineError, ConnectionLostError
from aengine.api.outputs import AdapterInfo, EngineStats
from aengine.api.params import SamplingParams
from aengine.client import AsyncClient
from aengine.router.fleet import Fleet
from aengine.router.load import ReplicaLoad
from aengine.router.replica import Replica

_log = logging.getLogger("aengine")


class Agreement:
    """The adapters and weights that all replicas of a router have alike. To be made in a running loop."""

    def __init__(self) -> None:
        self.adapters: dict[str, AdapterInfo] = {}  # all that there are, by name
        self._paths: dict[str, str] = {}  # of adapters that were loaded through the router, by name
        self._weights: dict[str, str] = {}  # the directory whose weights replicas of a generation get when they come
        self._weights_version: int | None = None  # how often weights were replaced through the router; None: no replica has been there
        self._changing = asyncio.Lock()  # a replica is prepared, or all are changed

    async def prepare(self, fleet: Fleet, replica: Replica, client: AsyncClient, load: ReplicaLoad) -> None:
        """Make a replica what the others are. Raises what its server raises, unless no other one serves: then it serves as it is."""
        if replica.has_served and client.model_info.output_head:
            await client.generate([0], SamplingParams(max_tokens=1))  # whether it computes
        async with self._changing:  # behind this nothing is waited for until the replica is connected, and so gets the next change
            load.identify(await client.load())
            if self._weights_version is None:
                self._weights_version = load.stats.weights_version
            try:
                await self._give(client, load)
            except ConnectionLostError:
                raise
            except AEngineError as error:
                if fleet.serving():
                    raise
                _log.error("replica %s serves without what the router has loaded, as there is no other: %s", replica.name, error)
            there = {adapter.name: adapter for adapter in await client.adapters()}
            for name, adapter in there.items():
                self.adapters.setdefault(name, adapter)
            replica.adapters.clear()
            replica.adapters.update({name: adapter.key for name, adapter in there.items()})
            load.weights_behind = self._weights_version - load.stats.weights_version

    async def _give(self, client: AsyncClient, load: ReplicaLoad) -> None:
        source = self._weights.get(load.generation)
        if source is not None:
            load.identify((await _update(client, source, "keep"))[1])
        there = {adapter.name for adapter in await client.adapters()}
        for name, path in self._paths.items():
            if name not in there:
                await client.load_adapter(name, path)

    async def update_weights(self, fleet: Fleet, source: str, running: str) -> int:
        """Replace the weights at all connected replicas by those of the directory `source`, which replicas that come later with the old
        ones get, too; returns how often that was done. `running`: as of `AsyncEngine.update_weights`. Raises what `Fleet.ask_all` raises
        with `some`."""
        async with self._changing:
            befores = {replica.name: replica.load.generation for replica in fleet.replicas.values() if replica.connected}
            answers = await fleet.ask_all(lambda client: _update(client, source, running), some=True)
            self._weights_version = (self._weights_version or 0) + 1
            afters = set()
            for name, (version, stats) in answers.items():
                if (replica := fleet.replicas.get(name)) is None:
                    continue
                replica.load.weights_behind = self._weights_version - version
                replica.load.identify(stats)
                afters.add(replica.load.generation)
                fleet.replaced(befores[name], replica.load.generation)
            self._weights = dict.fromkeys({*self._weights, *befores.values()} - afters, source)
            return self._weights_version

    async def load_adapter(self, fleet: Fleet, name: str, path: str) -> AdapterInfo:
        """Load an adapter from the directory `path` at all connected replicas, and at those that come later. If one of them fails, its
        error is raised, and a new adapter is unloaded from the others."""
        async with self._changing:
            try:
                infos = await fleet.ask_all(lambda client: client.load_adapter(name, path))
            except AEngineError:
                if name not in self.adapters:
                    with suppress(AEngineError):
                        await fleet.ask_all(lambda client: _unload(client, name))
                raise
            self._paths[name] = path
            for replica_name, info in infos.items():
                if (replica := fleet.replicas.get(replica_name)) is not None:
                    replica.adapters[name] = info.key
                self.adapters[name] = info
            return self.adapters[name]

    async def unload_adapter(self, fleet: Fleet, name: str) -> None:
        """Unload an adapter at all connected replicas; those that come later do not get it. Raises what one of them raises."""
        async with self._changing:
            self._paths.pop(name, None)
            await fleet.ask_all(lambda client: client.unload_adapter(name))
            self.adapters.pop(name, None)


async def _update(client: AsyncClient, source: str, running: str) -> tuple[int, EngineStats]:
    """The version of the new weights, and what the replica then says."""
    version = await client.update_weights(source, running)
    return version, await client.load()


async def _unload(client: AsyncClient, name: str) -> None:
    with suppress(AdapterNotFoundError):
        await client.unload_adapter(name)
