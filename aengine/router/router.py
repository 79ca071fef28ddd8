"""`Router`: many engines as one, as its user sees it. Owns the life cycle and the requests by their ids.

For asyncio; everything runs in the loop that started it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from aengine.asyncio_life import AsyncioLife
from aengine.chat_prompts import ChatFields
from aengine.checks import check_names
from aengine.client import AsyncClient
from aengine.config import EngineConfig
from aengine.errors import (
    AEngineError,
    ConfigError,
    EngineStateError,
    FieldViolation,
    InvalidRequestError,
    NoReplicaError,
)
from aengine.loop_bridge import AsyncioEngine
from aengine.outputs import (
    AdapterInfo,
    Completion,
    Embedding,
    EngineInfo,
    EngineStats,
    MemoryUse,
    ModelInfo,
    ReplicaInfo,
    ReplicaState,
    RequestInfo,
    TokenizedText,
)
from aengine.params import EmbeddingParams, SamplingParams
from aengine.protocols import ServedEngine
from aengine.requests import OptionFields, Prompt, RequestOptions
from aengine.router.agreement import Agreement
from aengine.router.config import RouterConfig
from aengine.router.discovery import AddressSource, discover
from aengine.router.fleet import Fleet
from aengine.router.in_flight import RequestsInFlight
from aengine.router.on_ray import ray_replicas
from aengine.router.processes import run_replicas
from aengine.router.ray_config import RayConfig
from aengine.router.replica import Replica
from aengine.router.totals import total_memory, total_stats
from aengine.served_stream import ServedStream
from aengine.stream_base import read_to_end

if TYPE_CHECKING:
    from typing_extensions import Unpack

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

    _fleet: Fleet
    _agreement: Agreement
    _requests: RequestsInFlight

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
            source = run_replicas(self._engine, self.config.replicas, token)
        elif source is None:
            source = discover(self.config.backends)
        self._source = source
        self._agreement = Agreement()
        self._fleet = Fleet(self.config, token, self._agreement.prepare)
        self._requests = RequestsInFlight(self._fleet, self._agreement)
        first = await anext(source)
        self._fleet.set_addresses(first)
        self._following = asyncio.ensure_future(self._follow(source))
        with anyio.move_on_after(self.config.connect_timeout):
            while not self._fleet.serving():
                await self._fleet.wait_changed(self.config.connect_timeout)
        if not self._fleet.serving():
            errors = [f"{replica.name}: {replica.error}" for replica in self._fleet.replicas.values() if replica.error is not None]
            seconds = f"{self.config.connect_timeout:g} s"
            raise NoReplicaError("; ".join([f"no replica served within {seconds}", *errors]))
        with anyio.move_on_after(GATHER_SECONDS):
            for replica in list(self._fleet.replicas.values()):
                await replica.tried.wait()

    async def aclose(self) -> None:
        """Cancel the requests, disconnect, and end the replicas that are processes of this router. Returns when that is done, whoever else
        closes it."""
        await self._life.aclose(self._cancel_all)

    async def _cancel_all(self) -> None:
        await self._requests.aclose()

    async def _stop(self) -> None:
        if hasattr(self, "_fleet"):
            await self._requests.aclose()
            await self._fleet.aclose()
        if hasattr(self, "_following"):
            self._following.cancel()
            await asyncio.wait({self._following})
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()

    async def wait_stopped(self) -> None:
        """Wait until the router is closed."""
        await self._life.wait_closed()

    @property
    def healthy(self) -> bool:
        """Whether there is a replica that serves."""
        return self._life.running and bool(self._fleet.serving())

    @property
    def model_info(self) -> ModelInfo:
        """What is served, as the first replica said. Raises `EngineStateError` before `start()`."""
        return self._known(self._agreement.model if hasattr(self, "_agreement") else None)

    @property
    def engine_info(self) -> EngineInfo:
        """Of the first replica. Raises `EngineStateError` before `start()`."""
        return self._known(self._agreement.info if hasattr(self, "_agreement") else None)

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        self._known(self.model_info)
        return tuple(self._agreement.adapters.values())

    @staticmethod
    def _known(fact: T | None) -> T:
        if fact is None:
            raise EngineStateError("the router is not started")
        return fact

    # ---- requests ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> ServedStream:
        """Submit a request at once; iterate the result for its tokens. See `AsyncEngine.stream` for the arguments; `logits_processors`
        cannot be sent."""
        self._check_running()
        return ServedStream(self._requests.open(prompt, params, RequestOptions.of(options, fields), few_messages=False))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion:
        """`stream()`, read to its end. Cancelling the caller cancels the request."""
        self._check_running()
        return await read_to_end(ServedStream(self._requests.open(prompt, params, RequestOptions.of(options, fields), few_messages=True)))

    async def embed(
        self,
        prompt: Prompt,
        options: RequestOptions | None = None,
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        **fields: Unpack[OptionFields],
    ) -> Embedding:
        self._check_running()
        options = RequestOptions.of(options, fields)
        params = EmbeddingParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
        return await self._requests.embed(prompt, params, options)

    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream closes with FinishReason.CANCELLED. Returns when its pages are free: True if it was in flight."""
        self._check_running()
        return await self._requests.cancel(request_id)

    def request_info(self, request_id: str) -> RequestInfo | None:
        self._check_running()
        return self._requests.info(request_id)

    async def violations(self, prompt: Prompt, params: SamplingParams) -> list[FieldViolation]:
        self._check_running()
        try:
            self._requests.check(prompt, params, RequestOptions())
        except InvalidRequestError as error:
            return list(error.violations)
        return []

    # ---- texts ---------------------------------------------------------------------------------------------------------

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, for_prompt: bool = False) -> list[int]:
        return await self._ask(lambda client: client.tokenize(text, add_special_tokens=add_special_tokens, for_prompt=for_prompt))

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        return await self._ask(lambda client: client.locate(text, add_special_tokens=add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return await self._ask(lambda client: client.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        return await self._ask(lambda client: client.token_bytes(token_ids))

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Unpack[ChatFields]) -> str:
        return await self._ask(lambda client: client.render_chat(messages, **fields))

    # ---- replicas ------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The sum of all replicas that are there."""
        return total_stats([replica.report.stats for replica in self._there()])

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        if not hasattr(self, "_fleet"):
            return ()
        return tuple(ReplicaInfo(one.name, one.state, one.report) for one in self._fleet.replicas.values())

    async def drain_replica(self, name: str) -> int:
        """Send nothing more to a replica, until it was restarted, and have its requests go on elsewhere; returns how many those were.
        Raises `InvalidRequestError` for a name that none has."""
        self._check_running()
        replica = self._fleet.replicas.get(name)
        if replica is None:
            raise InvalidRequestError.of("replica", f"{name!r} is none of {', '.join(sorted(self._fleet.replicas)) or 'no replicas'}")
        return replica.expel()

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

    async def update_weights(self, source: str, running: str = "keep") -> int:
        """As `AsyncEngine.update_weights`, from a directory that every replica can read; returns how often that was done. Replicas that
        come later get these weights, too. A request goes on only at replicas whose weights made its latest token."""
        self._check_running()
        return await self._agreement.update_weights(self._fleet, source, running)

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """As `AsyncEngine.load_adapter`, from a directory that every replica can read. Replicas that come later get it, too."""
        self._check_running()
        return await self._agreement.load_adapter(self._fleet, name, path)

    async def unload_adapter(self, name: str) -> None:
        self._check_running()
        await self._agreement.unload_adapter(self._fleet, name)

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        self._life.check_running()

    async def _ask(self, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Of any replica."""
        self._check_running()
        return await self._fleet.ask(call)

    async def _ask_all(self, call: Callable[[AsyncClient], Awaitable[T]]) -> Collection[T]:
        self._check_running()
        return (await self._fleet.ask_all(call)).values()

    def _there(self) -> Iterable[Replica]:
        if not hasattr(self, "_fleet"):
            return ()
        return [one for one in self._fleet.replicas.values() if one.state in (ReplicaState.SERVING, ReplicaState.DRAINING)]

    async def _follow(self, source: AddressSource) -> None:
        """Takes new addresses as they come."""
        try:
            async for addresses in source:
                self._fleet.set_addresses(addresses)
        except AEngineError as error:
            _log.error("addresses of replicas are no longer looked for: %s", error)


def _read_token(path: str) -> str:
    """Blocks. Raises `ConfigError`."""
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("backend_token_file", f"cannot read {path}: {error}") from error
