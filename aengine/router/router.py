"""`Router`: many engines as one, as its user sees it. Owns the life cycle and the requests by their ids, and sums up the statistics and the
memory of the replicas.

For asyncio; everything runs in the loop that started it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from aengine.aio.bridge import AsyncioEngine, ServedBridge
from aengine.aio.edge import AsyncioLife
from aengine.api.config import EngineConfig
from aengine.api.engine import EmbeddingFields, ServedEngine, refuse_history
from aengine.api.errors import AEngineError, ConfigError, EngineStateError, FieldViolation, InvalidRequestError, NoReplicaError
from aengine.api.fields import check_names
from aengine.api.outputs import (
    AdapterInfo,
    DraftUsage,
    Embedding,
    EngineInfo,
    EngineStats,
    MemoryUse,
    ModelInfo,
    RenderedChat,
    ReplicaInfo,
    ReplicaState,
    RequestInfo,
    TokenizedText,
)
from aengine.api.params import EmbeddingParams, SamplingParams
from aengine.api.request import ChatFields, OptionFields, Prompt, RequestOptions
from aengine.client import AsyncClient
from aengine.router.discovery import AddressSource, discover
from aengine.router.fleet import Fleet, FleetInfo, WeightsChange
from aengine.router.in_flight import RequestsInFlight
from aengine.router.processes import run_replicas
from aengine.router.ray_replicas import ray_replicas
from aengine.router.routed_request import RoutedRequest
from aengine.router.router_config import RayConfig, RouterConfig

if TYPE_CHECKING:
    from typing_extensions import Unpack


_COUNTS = (
    *("running", "waiting", "parked", "pages_used", "pages_total", "cached_tokens", "steps", "preemptions", "prompt_tokens"),
    *("cached_prompt_tokens", "completion_tokens", "uncomputed_tokens", "prefill_tokens_per_second"),
    *("loaded_tokens", "saved_tokens", "host_kv_bytes", "disk_kv_bytes", "sessions", "session_tokens", "loading"),
)


def total_memory(uses: Collection[MemoryUse]) -> MemoryUse:
    return MemoryUse(sum(use.before for use in uses), sum(use.after for use in uses))


def total_stats(all_stats: Collection[EngineStats]) -> EngineStats:
    """Counts add up, also the tokens a second; a step takes what it takes on average; paused and asleep is what all are."""
    if not all_stats:
        return EngineStats()
    total = {name: sum(getattr(stats, name) for stats in all_stats) for name in _COUNTS}
    drafts: dict[str, DraftUsage] = {}
    for one in (one for stats in all_stats for one in stats.drafts):
        drafts[one.drafter] = drafts.get(one.drafter, DraftUsage(one.drafter)).plus(one.drafted, one.accepted, one.steps)
    steps = [stats.mean_step_seconds for stats in all_stats if stats.mean_step_seconds]
    return EngineStats(
        **total,
        drafts=tuple(drafts.values()),
        paused=all(stats.paused for stats in all_stats),
        sleep_level=min(stats.sleep_level for stats in all_stats),
        weights_version=max(stats.weights_version for stats in all_stats),
        mean_step_seconds=sum(steps) / len(steps) if steps else 0.0,
    )


GATHER_SECONDS = 2.0
"""How long a router that has a replica waits at its start for the others."""

T = TypeVar("T")
_log = logging.getLogger("aengine")


class Router(AsyncioEngine, ServedEngine):
    """Many engines as one: each request is computed by one of several replicas, and goes on at another one if that is lost.

        async with Router("demo", replicas=2) as router:
            async for token in router.stream("It is a truth", SamplingParams(max_tokens=64)):
                print(token.text, end="", flush=True)

    With `replicas` these are processes of this host that each run the engine of `model_or_config`; with `backends` they are servers.
    `overrides` are fields of `RouterConfig`, and with `replicas` of `EngineConfig`. Streams go on where they were cut: their tokens and
    texts are those of one engine. A router is started once and belongs to the loop that started it.

    Beside the errors of an engine its methods raise `NoReplicaError` where no replica takes a request in time, and `PoisonRequestError`
    for a request that replicas die of.
    """

    bridge_class = ServedBridge

    def __init__(
        self,
        model_or_config: str | EngineConfig = "demo",
        *,
        config: RouterConfig | None = None,
        source: AddressSource | None = None,
        token: str | None = None,
        **overrides: Any,
    ) -> None:
        """`source`: the addresses of replicas, over time, in place of those that the configuration names; `token`: what those want. It is
        closed with the router. Raises `ConfigError` naming every field that is unknown or out of range. Starts nothing yet."""
        names = {field.name for field in fields(RouterConfig)}
        self.config = RouterConfig.of(config, **{name: value for name, value in overrides.items() if name in names})
        engine = {name: value for name, value in overrides.items() if name not in names}
        if self.config.replicas is None and engine:
            check_names(RouterConfig, engine)
        if source is None and self.config.replicas is None and not self.config.backends:
            raise ConfigError.of("replicas", "either replicas or backends must be given")
        self._engine = EngineConfig.of(model_or_config, **engine)
        self._source = source
        self._token = token
        self._life = AsyncioLife("router", self._stop)
        self._parts: _Parts | None = None  # from the moment that there are addresses of replicas

    @classmethod
    def on_ray(
        cls,
        model_or_config: str | EngineConfig = "demo",
        *,
        ray: RayConfig | None = None,
        config: RouterConfig | None = None,
        **overrides: Any,
    ) -> Router:
        """A router whose replicas are placed by Ray, in a cluster. They are started with it, replaced when they end, and as many as their
        queues ask for. `overrides` are fields of `RayConfig`, `RouterConfig` and `EngineConfig`. Raises `ConfigError`, as `start()` does
        where Ray or its cluster is not there."""
        own: dict[type, dict[str, Any]] = {RayConfig: {}, RouterConfig: {}, EngineConfig: {}}
        names = {field.name: kind for kind in (RayConfig, RouterConfig) for field in fields(kind)}
        for name, value in overrides.items():
            own[names.get(name, EngineConfig)][name] = value
        engine, token = EngineConfig.of(model_or_config, **own[EngineConfig]), secrets.token_hex(32)
        source = ray_replicas(engine, RayConfig.of(ray, **own[RayConfig]), token)
        return cls(engine, config=RouterConfig.of(config, **own[RouterConfig]), source=source, token=token)

    # ---- life cycle ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start or find the replicas, and wait until one serves. Raises `NoReplicaError` if none does within `connect_timeout`,
        `ModelLoadError` or `ConfigError`, and `EngineStateError` if the router is closed meanwhile."""
        await self._life.start(self._start)

    async def _start(self) -> None:
        token = self._token
        if token is None and self.config.backend_token_file is not None:
            token = await asyncio.to_thread(_read_token, self.config.backend_token_file)
        source = self._source
        if source is None and self.config.replicas is not None:
            token = token or secrets.token_hex(32)
            source = run_replicas(self._engine, self.config.replicas, token, self.config.prefill_replicas)
        elif source is None:
            source = discover(self.config.backends)
        self._source = source
        first = await anext(source)
        fleet_info = FleetInfo()
        fleet = Fleet(self.config, token, fleet_info.prepare)
        fleet.set_addresses(first)
        self._parts = _Parts(fleet, fleet_info, RequestsInFlight(fleet), asyncio.ensure_future(_follow(fleet, source)))
        with anyio.move_on_after(self.config.connect_timeout):
            while not fleet.serving():
                await fleet.wait_changed(self.config.connect_timeout)
        if not fleet.serving():
            errors = [f"{replica.name}: {replica.error}" for replica in fleet.replicas.values() if replica.error is not None]
            seconds = f"{self.config.connect_timeout:g} s"
            raise NoReplicaError("; ".join([f"no replica served within {seconds}", *errors]))
        with anyio.move_on_after(GATHER_SECONDS):
            for replica in list(fleet.replicas.values()):
                await replica.tried.wait()

    async def aclose(self) -> None:
        """Cancel the requests, disconnect, and end the replicas that are processes of this router. Returns when that is done, whoever else
        closes it."""
        await self._life.aclose(self._cancel_all)

    async def _cancel_all(self) -> None:
        if self._parts is not None:
            await self._parts.requests.aclose()

    async def _stop(self) -> None:
        if (parts := self._parts) is not None:
            await parts.requests.aclose()
            await parts.fleet.aclose()
            parts.following.cancel()
            await asyncio.wait({parts.following})
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()

    async def wait_stopped(self) -> None:
        """Wait until the router is closed."""
        await self._life.wait_closed()

    @property
    def healthy(self) -> bool:
        """Whether there is a replica that serves."""
        return self._life.running and self._parts is not None and bool(self._parts.fleet.serving())

    @property
    def model_info(self) -> ModelInfo:
        """What the newest generation of replicas serves. Raises `EngineStateError` before `start()`."""
        return self._known(None if self._parts is None else self._parts.fleet.model)

    @property
    def engine_info(self) -> EngineInfo:
        """What limits requests at a replica of the newest generation. Raises `EngineStateError` before `start()`."""
        return self._known(None if self._parts is None else self._parts.fleet.newest).info

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        parts = self._known(self._parts)
        self._known(parts.fleet.model)
        return tuple(parts.fleet_info.adapters.values())

    @staticmethod
    def _known(fact: T | None) -> T:
        if fact is None:
            raise EngineStateError("the router is not started")
        return fact

    # ---- requests ------------------------------------------------------------------------------------------------------

    def _open(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None, fields: OptionFields, *, whole: bool
    ) -> RoutedRequest:
        return self._running().requests.open(prompt, params, RequestOptions.of(options, fields), few_messages=whole)

    async def _embed(self, prompt: Prompt, options: RequestOptions | None, fields: OptionFields, wanted: EmbeddingFields) -> Embedding:
        return await self._running().requests.embed(prompt, EmbeddingParams(**wanted), RequestOptions.of(options, fields))

    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream closes with FinishReason.CANCELLED. Returns when its pages are free: True if it was in flight."""
        return await self._running().requests.cancel(request_id)

    def request_info(self, request_id: str) -> RequestInfo | None:
        return self._running().requests.info(request_id)

    async def violations(self, prompt: Prompt, params: SamplingParams) -> list[FieldViolation]:
        parts = self._running()
        try:
            parts.requests.check(prompt, params, RequestOptions())
        except InvalidRequestError as error:
            return list(error.violations)
        return []

    # ---- texts ---------------------------------------------------------------------------------------------------------

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        for_prompt: bool = False,
        literals: Sequence[tuple[int, int]] = (),
        pair: str | None = None,
    ) -> list[int]:
        options = {"add_special_tokens": add_special_tokens, "for_prompt": for_prompt}
        return await self._ask(lambda client: client.tokenize(text, **options, literals=literals, pair=pair))

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        return await self._ask(lambda client: client.locate(text, add_special_tokens=add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return await self._ask(lambda client: client.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        return await self._ask(lambda client: client.token_bytes(token_ids))

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, session: str | None = None, tenant: str = "", **fields: Unpack[ChatFields]
    ) -> RenderedChat:
        refuse_history(fields.get("keep_history", "text"))
        return await self._ask(lambda client: client.render_chat(messages, **fields))

    # ---- replicas ------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The sum of all replicas that are there; fingerprint and time of weights are those of the newest generation."""
        if self._parts is None:
            return total_stats([])
        fleet = self._parts.fleet
        there = (ReplicaState.SERVING, ReplicaState.DRAINING)
        total = total_stats([replica.report.stats for replica in fleet.replicas.values() if replica.state in there])
        newest = fleet.newest
        if newest is None:
            return total
        return replace(total, fingerprint=newest.load.stats.fingerprint, weights_time=newest.load.stats.weights_time)

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        return () if self._parts is None else self._parts.fleet.infos()

    async def drain_replica(self, name: str) -> int:
        """Send nothing more to a replica, until it was restarted, and have its requests go on elsewhere; returns how many those were.
        Streams that have begun stay where no other replica of its generation serves. Raises `InvalidRequestError` for a name that none
        has."""
        fleet = self._running().fleet
        replica = fleet.replicas.get(name)
        if replica is None:
            raise InvalidRequestError.of("replica", f"{name!r} is none of {', '.join(sorted(fleet.replicas)) or 'no replicas'}")
        return fleet.drain(replica)

    async def touch(self, session: str, tenant: str = "") -> int:
        return max(await self._ask_all(lambda client: client.touch(session, tenant)), default=0)

    async def profile(self, num_steps: int = 100, seconds: float = 10.0) -> bytes:
        raise EngineStateError("a router computes no steps: profile one of its replicas")

    async def flush_cache(self) -> int:
        return sum(await self._ask_all(lambda client: client.flush_cache()))

    async def pause(self, *, cancel: bool = False) -> int:
        return sum(await self._ask_all(lambda client: client.pause(cancel=cancel)))

    async def unpause(self) -> None:
        await self._ask_all(lambda client: client.unpause())

    async def sleep(self, level: int = 1, running: str = "park") -> MemoryUse:
        return total_memory(await self._ask_all(lambda client: client.sleep(level, running)))

    async def wake(self) -> MemoryUse:
        return total_memory(await self._ask_all(lambda client: client.wake()))

    async def update_weights(self, source: str, running: str = "keep", partial: bool = False) -> int:
        """Replace the weights by those of a directory that every replica can read, as `AsyncEngine.update_weights` describes it; returns
        how often that was done. Replicas that come later, and had the old ones, get these weights, too. A request goes on only at replicas
        of the generation that made its latest token, as long as there is one."""
        parts = self._running()
        return await parts.fleet_info.update_weights(parts.fleet, WeightsChange(source, partial), running)

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter from a directory that every replica can read, as `AsyncEngine.load_adapter` describes it. Replicas that come
        later get it, too."""
        parts = self._running()
        return await parts.fleet_info.load_adapter(parts.fleet, name, path)

    async def unload_adapter(self, name: str) -> None:
        parts = self._running()
        await parts.fleet_info.unload_adapter(parts.fleet, name)

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _running(self) -> _Parts:
        """The parts of a router that runs. Raises `EngineStateError` for one that does not."""
        self._life.check_running()
        return self._known(self._parts)

    async def _ask(self, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Make a call at any replica, and return its answer."""
        return await self._running().fleet.ask(call)

    async def _ask_all(self, call: Callable[[AsyncClient], Awaitable[T]]) -> Collection[T]:
        return (await self._running().fleet.ask_all(call)).values()


@dataclass(frozen=True)
class _Parts:
    """What a router has from its start on."""

    fleet: Fleet
    fleet_info: FleetInfo
    requests: RequestsInFlight
    following: asyncio.Future[None]


async def _follow(fleet: Fleet, source: AddressSource) -> None:
    """Take new addresses as they come."""
    try:
        async for addresses in source:
            fleet.set_addresses(addresses)
    except AEngineError as error:
        _log.error("addresses of replicas are no longer looked for: %s", error)


def _read_token(path: str) -> str:
    """Blocks. Raises `ConfigError`."""
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("backend_token_file", f"cannot read {path}: {error}") from error
