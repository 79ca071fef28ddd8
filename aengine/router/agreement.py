"""`Agreement`: what all replicas have alike: the model, and the adapters and weights that were loaded through the router.

A replica that comes, or comes back, is given these before it serves. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from aengine.client import AsyncClient
from aengine.errors import AdapterNotFoundError, AEngineError, ConfigError
from aengine.outputs import AdapterInfo, EngineInfo, ModelInfo
from aengine.params import SamplingParams
from aengine.router.fleet import Fleet
from aengine.router.replica import Replica


class Agreement:
    """Made in a running loop."""

    def __init__(self) -> None:
        self.model: ModelInfo | None = None  # of the first replica, as the next two
        self.info: EngineInfo | None = None
        self.adapters: dict[str, AdapterInfo] = {}  # all that there are, by name
        self._paths: dict[str, str] = {}  # of adapters that were loaded through the router, by name
        self._weights: str | None = None  # the directory of the latest, where they were replaced through the router
        self._weights_version = 0  # how often that was done
        self._own_versions: dict[str, int] = {}  # what replicas, by name, call these weights
        self._changing = asyncio.Lock()  # a replica is prepared, or all are changed

    async def prepare(self, replica: Replica, client: AsyncClient, info: EngineInfo) -> int:
        """Make a replica what the others are. Returns how many versions of weights it is behind. Raises `ConfigError` for one that serves
        something else, and what its server raises."""
        model = client.model_info
        if self.model is None or self.info is None:
            self.model, self.info = model, info
            self._weights_version = (await client.load()).weights_version
            self.adapters = {adapter.name: adapter for adapter in await client.adapters()}
        for name in ("name", "vocab_size", "max_model_len", "hidden_size"):
            ours, theirs = getattr(self.model, name), getattr(model, name)
            if ours != theirs:
                raise ConfigError.of("backends", f"replica {replica.name} serves a model with {name} {theirs}, the others {ours}")
        if info.page_size != self.info.page_size:
            raise ConfigError.of("backends", f"replica {replica.name} has page_size {info.page_size}, the others {self.info.page_size}")
        if replica.has_served and model.output_head:
            await client.generate([0], SamplingParams(max_tokens=1))  # whether it computes
        async with self._changing:  # behind this nothing is waited for until the replica is connected, and so gets the next change
            there = {adapter.name: adapter.key for adapter in await client.adapters()}
            for name, path in self._paths.items():
                if name not in there:
                    there[name] = (await client.load_adapter(name, path)).key
            replica.adapters.clear()
            replica.adapters.update(there)
            if self._weights is None:
                return 0
            version = (await client.load()).weights_version
            if self._own_versions.get(replica.name) != version:
                self._own_versions[replica.name] = version = await client.update_weights(self._weights)
            return self._weights_version - version

    async def update_weights(self, fleet: Fleet, source: str, running: str) -> int:
        """As `Router.update_weights`."""
        async with self._changing:
            self._own_versions = await fleet.ask_all(lambda client: client.update_weights(source, running), some=True)
            self._weights, self._weights_version = source, self._weights_version + 1
            for name, version in self._own_versions.items():
                if (replica := fleet.replicas.get(name)) is not None:
                    replica.load.weights_behind = self._weights_version - version
            return self._weights_version

    async def load_adapter(self, fleet: Fleet, name: str, path: str) -> AdapterInfo:
        """As `Router.load_adapter`; all have it or none."""
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
        """As `Router.unload_adapter`."""
        async with self._changing:
            self._paths.pop(name, None)
            await fleet.ask_all(lambda client: client.unload_adapter(name))
            self.adapters.pop(name, None)


async def _unload(client: AsyncClient, name: str) -> None:
    with suppress(AdapterNotFoundError):
        await client.unload_adapter(name)
