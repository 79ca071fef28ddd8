"""`Router`: many engines as one, as its user sees it. Owns the life cycle, the requests by their ids, and what all replicas have alike: the
model, the adapters and the weights that were loaded through it.

For asyncio; everything runs in the loop that started it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from aengine.chat_prompts import ChatFields, ChatOptions, read_messages
from aengine.checks import check_names
from aengine.client import AsyncClient
from aengine.client.messages import read_prompt_ids
from aengine.config import EngineConfig
from aengine.errors import (
    AdapterNotFoundError,
    AEngineError,
    ConfigError,
    EngineStateError,
    FieldViolation,
    InvalidRequestError,
    NoReplicaError,
    RequestEndedError,
    RequestIdInUseError,
)
from aengine.loop_bridge import AsyncioEngine
from aengine.outputs import (
    AdapterInfo,
    Completion,
    DraftUsage,
    Embedding,
    EngineInfo,
    EngineStats,
    MemoryUse,
    ModelInfo,
    ReplicaInfo,
    ReplicaState,
    RequestInfo,
    RequestState,
    Timing,
    TokenizedText,
    Usage,
)
from aengine.params import EmbeddingParams, SamplingParams
from aengine.protocols import ServedEngine
from aengine.requests import OptionFields, Prompt, RequestOptions, check_params, form_of
from aengine.router.config import RouterConfig
from aengine.router.discovery import AddressSource, discover
from aengine.router.fleet import Fleet
from aengine.router.load import RoutedPrompt
from aengine.router.on_ray import ray_replicas
from aengine.router.prefixes import PagePrefix
from aengine.router.processes import run_replicas
from aengine.router.ray_config import RayConfig
from aengine.router.replica import Replica
from aengine.router.request import RoutedRequest, Tokenize
from aengine.served_stream import ServedStream
from aengine.stream_base import read_to_end

if TYPE_CHECKING:
    from typing_extensions import Unpack

GATHER_SECONDS = 2.0
"""How long a router that has a replica waits at its start for the others."""

T = TypeVar("T")
_log = logging.getLogger("aengine")


class RoutedStream(ServedStream):
    """The tokens of one request, from whatever replica has it."""

    _source: RoutedRequest

    def __del__(self) -> None:
        if hasattr(self, "_source"):
            self._source.drop()


@dataclass(frozen=True, slots=True)
class _Embedding:
    """One in flight."""

    request_id: str
    scope: anyio.CancelScope
    ended: asyncio.Event
    arrival: float  # by the wall clock, seconds since the epoch


_NO_CHAT: Mapping[str, Any] = {field.name: field.default for field in fields(ChatOptions)}
"""Options of prompts that are token ids."""


class _Phase(enum.Enum):
    NEW = enum.auto()
    STARTING = enum.auto()
    RUNNING = enum.auto()
    CLOSED = enum.auto()


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
    _model: ModelInfo
    _info: EngineInfo

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
        self._phase = _Phase.NEW
        self._requests: dict[str, RoutedRequest] = {}  # in flight, by id
        self._embeddings: dict[str, _Embedding] = {}  # the same
        self._adapters: dict[str, str] = {}  # loaded through the router: paths by name
        self._adapter_infos: dict[str, AdapterInfo] = {}  # all that there are
        self._weights: str | None = None  # the directory of the latest, where they were replaced through the router
        self._weights_version = 0  # how often that was done
        self._own_versions: dict[str, int] = {}  # what replicas, by name, call these weights
        self._changing: asyncio.Lock  # of adapters and weights
        self._stopped: asyncio.Event | None = None

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
        if self._phase is not _Phase.NEW:
            raise EngineStateError("the router was started before; make a new one")
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise EngineStateError("the router needs the event loop of asyncio; elsewhere use aengine.on_asyncio(router)") from None
        self._phase, self._stopped, self._changing = _Phase.STARTING, asyncio.Event(), asyncio.Lock()
        self._starting = anyio.CancelScope()
        try:
            with self._starting:
                await self._start()
            if self._starting.cancel_called:
                raise EngineStateError("the router was closed while it was starting")
        except BaseException:
            self._phase = _Phase.CLOSED
            await self._stop()
            raise
        self._phase = _Phase.RUNNING

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
        self._fleet = Fleet(self.config, token, self._prepare)
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
        phase, self._phase = self._phase, _Phase.CLOSED
        match phase:
            case _Phase.STARTING:
                self._starting.cancel()  # and `start()` stops it
            case _Phase.RUNNING:
                with anyio.CancelScope(shield=True):
                    await self._stop()
        if self._stopped is not None:
            await self._stopped.wait()

    async def _stop(self) -> None:
        assert self._stopped is not None
        with anyio.CancelScope(shield=True):
            requests = list(self._requests.values())
            for request in requests:
                request.cancel()
            for request in requests:
                await request.wait_released()
            if hasattr(self, "_fleet"):
                await self._fleet.aclose()
            if hasattr(self, "_following"):
                self._following.cancel()
                await asyncio.wait({self._following})
            close = getattr(self._source, "aclose", None)
            if close is not None:
                await close()
            self._stopped.set()

    async def wait_stopped(self) -> None:
        """Wait until the router is closed."""
        if self._stopped is None:
            raise EngineStateError("the router is not started")
        await self._stopped.wait()

    @property
    def healthy(self) -> bool:
        """Whether there is a replica that serves."""
        return self._phase is _Phase.RUNNING and bool(self._fleet.serving())

    @property
    def model_info(self) -> ModelInfo:
        """What is served, as the first replica said. Raises `EngineStateError` before `start()`."""
        if not hasattr(self, "_model"):
            raise EngineStateError("the router is not started")
        return self._model

    @property
    def engine_info(self) -> EngineInfo:
        """Of the first replica. Raises `EngineStateError` before `start()`."""
        if not hasattr(self, "_info"):
            raise EngineStateError("the router is not started")
        return self._info

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        self.model_info  # noqa: B018 - raises before `start()`
        return tuple(self._adapter_infos.values())

    # ---- requests ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> RoutedStream:
        """Submit a request at once; iterate the result for its tokens. See `AsyncEngine.stream` for the arguments; `logits_processors`
        cannot be sent."""
        return RoutedStream(self._open(prompt, params, RequestOptions.of(options, fields), few_messages=False))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion:
        """`stream()`, read to its end. Cancelling the caller cancels the request."""
        return await read_to_end(RoutedStream(self._open(prompt, params, RequestOptions.of(options, fields), few_messages=True)))

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
        ids, tokenize = self._read_prompt(prompt, options)
        request_id = self._free_id(options)
        embedding = self._embeddings[request_id] = _Embedding(request_id, anyio.CancelScope(), asyncio.Event(), time.time())
        try:
            with embedding.scope:
                found = ids if tokenize is None else await tokenize()
                assert found is not None
                return await self._embed(found, params, options)
        finally:
            del self._embeddings[request_id]
            embedding.ended.set()
        raise RequestEndedError("the embedding was not made: the request was cancelled")

    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream closes with FinishReason.CANCELLED. Returns when its pages are free: True if it was in flight."""
        self._check_running()
        request, embedding = self._requests.get(request_id), self._embeddings.get(request_id)
        if embedding is not None:
            embedding.scope.cancel()
            await embedding.ended.wait()
        return embedding is not None or (request is not None and await request.end())

    def request_info(self, request_id: str) -> RequestInfo | None:
        self._check_running()
        request, embedding = self._requests.get(request_id), self._embeddings.get(request_id)
        if embedding is not None:
            return RequestInfo(request_id, RequestState.RUNNING, Usage(), Timing(), embedding.arrival)
        return None if request is None else request.info()

    async def violations(self, prompt: Prompt, params: SamplingParams) -> list[FieldViolation]:
        self._check_running()
        try:
            self._check(prompt, params, RequestOptions())
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
        return _sum([replica.report.stats for replica in self._there()])

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
        return sum((await self._ask_all(lambda client: client.flush_cache())).values())

    async def pause(self, *, cancel: bool = False) -> int:
        return sum((await self._ask_all(lambda client: client.pause(cancel=cancel))).values())

    async def unpause(self) -> None:
        await self._ask_all(lambda client: client.unpause())

    async def sleep(self, level: int = 1, running: str = "park") -> MemoryUse:
        return _both((await self._ask_all(lambda client: client.sleep(level, running))).values())

    async def wake(self) -> MemoryUse:
        return _both((await self._ask_all(lambda client: client.wake())).values())

    async def update_weights(self, source: str, running: str = "keep") -> int:
        """As `AsyncEngine.update_weights`, from a directory that every replica can read; returns how often that was done. Replicas that
        come later get these weights, too. A request goes on only at replicas whose weights made its latest token."""
        self._check_running()
        async with self._changing:
            self._own_versions = await self._ask_all(lambda client: client.update_weights(source, running), some=True)
            self._weights, self._weights_version = source, self._weights_version + 1
            return self._weights_version

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """As `AsyncEngine.load_adapter`, from a directory that every replica can read. Replicas that come later get it, too."""
        self._check_running()
        async with self._changing:
            try:
                infos = await self._ask_all(lambda client: client.load_adapter(name, path))
            except AEngineError:
                if name not in self._adapter_infos:  # all have it or none
                    with suppress(AEngineError):
                        await self._ask_all(lambda client: _unload(client, name))
                raise
            self._adapters[name] = path
            for replica, info in infos.items():
                if (known := self._fleet.replicas.get(replica)) is not None:
                    known.adapters[name] = info.key
            self._adapter_infos[name] = info
            return info

    async def unload_adapter(self, name: str) -> None:
        self._check_running()
        async with self._changing:
            self._adapters.pop(name, None)
            await self._ask_all(lambda client: client.unload_adapter(name))
            self._adapter_infos.pop(name, None)

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _open(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, *, few_messages: bool) -> RoutedRequest:
        self._check_running()
        sent = check_params(params).with_seed()
        effective, ids, tokenize = self._check(prompt, sent, options)
        request_id = self._free_id(options)
        request = RoutedRequest(self._fleet, request_id, effective, sent, options, few_messages=few_messages, on_end=self._forget)
        self._requests[request_id] = request
        try:
            request.begin(ids, tokenize)
        except BaseException:
            self._forget(request)
            raise
        return request

    def _free_id(self, options: RequestOptions) -> str:
        """The id of a new request. Raises `RequestIdInUseError`."""
        request_id = options.request_id or uuid.uuid4().hex
        if request_id in self._requests or request_id in self._embeddings:
            raise RequestIdInUseError.of("request_id", f"{request_id!r} is the id of a request in flight")
        return request_id

    async def _embed(self, ids: Sequence[int], params: EmbeddingParams, options: RequestOptions) -> Embedding:
        plain = replace(options, request_id=None, **_NO_CHAT)
        pages = PagePrefix(ids, options.cache_salt or "", self._fleet.digest_salt)
        routed = RoutedPrompt(len(ids), pages.beginning, pages.digests, options.adapter)
        how = {"pooling": params.pooling, "normalize": params.normalize, "dimensions": params.dimensions}
        return await self._fleet.carry(routed, lambda client: client.embed(ids, plain, **how), options.timeout)  # type: ignore[arg-type]

    def _forget(self, request: RoutedRequest) -> None:
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]

    def _check(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> tuple[SamplingParams, Sequence[int] | None, Tokenize | None]:
        """The parameters with the model's defaults, and the ids of the prompt or what gives them. Raises `InvalidRequestError` for what
        shows without a replica."""
        if params.logits_processors:
            raise InvalidRequestError.of("logits_processors", "custom code cannot be sent to a server")
        ids, tokenize = self._read_prompt(prompt, options)
        return params.with_defaults_of(self._model.generation_defaults), ids, tokenize

    def _read_prompt(self, prompt: Prompt, options: RequestOptions) -> tuple[Sequence[int] | None, Tokenize | None]:
        """Its ids, or what gives them. Raises `InvalidRequestError`."""
        match form_of(prompt, options):
            case "token_ids":
                return read_prompt_ids(prompt), None  # type: ignore[arg-type]
            case "text":
                return None, lambda: self._ask(lambda client: client.prompt_ids(prompt, options))
            case "chat":
                messages = read_messages(prompt)  # type: ignore[arg-type]
                return None, lambda: self._ask(lambda client: client.prompt_ids(messages, options))

    def _check_running(self) -> None:
        if self._phase is not _Phase.RUNNING:
            raise EngineStateError("the router is closed" if self._phase is _Phase.CLOSED else "the router is not started")
        if asyncio.get_running_loop() is not self._loop:
            raise EngineStateError("the router belongs to another event loop")

    async def _ask(self, call: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Of any replica."""
        self._check_running()
        anywhere = RoutedPrompt(1, secrets.randbits(64), lambda naming: ())
        return await self._fleet.carry(anywhere, call)

    async def _ask_all(self, call: Callable[[AsyncClient], Awaitable[T]], *, some: bool = False) -> dict[str, T]:
        """Of all replicas that are connected; their answers by name. One that is lost meanwhile is left out, since it is prepared again.
        Raises what another one raises, when all have answered, and `NoReplicaError` if there is none. `some`: what one raises is raised
        only if no other has answered; else that one is lost."""
        self._check_running()
        replicas = [replica for replica in self._fleet.replicas.values() if replica.connected]
        answers = await asyncio.gather(*(replica.ask(call) for replica in replicas), return_exceptions=True)
        pairs = [(replica, answer) for replica, answer in zip(replicas, answers, strict=True) if replica.connected]
        found = {replica.name: answer for replica, answer in pairs if not isinstance(answer, BaseException)}
        for replica, answer in pairs:
            if isinstance(answer, BaseException):
                if not (some and found and isinstance(answer, AEngineError)):
                    raise answer
                replica.lose(answer)
        if not found:
            raise NoReplicaError("no replica serves")
        return found

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

    async def _prepare(self, replica: Replica, client: AsyncClient, info: EngineInfo) -> int:
        """Make a replica what the others are. Returns how many versions of weights it is behind."""
        model = client.model_info
        if not hasattr(self, "_model"):
            self._model, self._info = model, info
            self._adapter_infos = {adapter.name: adapter for adapter in await client.adapters()}
        for name in ("name", "vocab_size", "max_model_len", "hidden_size"):
            ours, theirs = getattr(self._model, name), getattr(model, name)
            if ours != theirs:
                raise ConfigError.of("backends", f"replica {replica.name} serves a model with {name} {theirs}, the others {ours}")
        if info.page_size != self._info.page_size:
            raise ConfigError.of("backends", f"replica {replica.name} has page_size {info.page_size}, the others {self._info.page_size}")
        if replica.has_served and model.output_head:
            await client.generate([0], SamplingParams(max_tokens=1))  # whether it computes
        async with self._changing:  # nothing is waited for behind this until the replica counts as connected
            there = {adapter.name: adapter.key for adapter in await client.adapters()}
            for name, path in self._adapters.items():
                if name not in there:
                    there[name] = (await client.load_adapter(name, path)).key
            replica.adapters.clear()
            replica.adapters.update(there)
            version = (await client.load()).weights_version
            if self._weights is None:
                return 0
            if self._own_versions.get(replica.name) != version:
                self._own_versions[replica.name] = version = await client.update_weights(self._weights)
            return self._weights_version - version


def _read_token(path: str) -> str:
    """Blocks. Raises `ConfigError`."""
    try:
        return Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("backend_token_file", f"cannot read {path}: {error}") from error


async def _unload(client: AsyncClient, name: str) -> None:
    with suppress(AdapterNotFoundError):
        await client.unload_adapter(name)


def _both(uses: Collection[MemoryUse]) -> MemoryUse:
    return MemoryUse(sum(use.before for use in uses), sum(use.after for use in uses))


def _sum(all_stats: Sequence[EngineStats]) -> EngineStats:
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


_COUNTS = (
    *("running", "waiting", "parked", "pages_used", "pages_total", "cached_tokens", "steps", "preemptions", "prompt_tokens"),
    *("cached_prompt_tokens", "completion_tokens", "uncomputed_tokens", "prefill_tokens_per_second"),
)
