"""`ServerCalls`: what a client asks of a server beside generations: what it is, how busy it is, texts, and what administrators do. Each is
one call that can be repeated.

`AsyncClient`: an engine behind a gRPC server as its user sees it. Owns the life cycle and the set of active requests.

For asyncio. Everything here runs in the event loop that started the client. The modules beside this one know the messages of a request
(`messages`), its call with retries (`call`) or the call that it shares (`session`), and the tokens that come back (`active_request`)."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from aengine.aio.bridge import AsyncioEngine, LoopBridge, asked, iterated
from aengine.aio.edge import AsyncioLife
from aengine.api.engine import EmbeddingFields, refuse_history, seeded
from aengine.api.errors import ConnectionLostError, EngineStateError, RequestEndedError, ServerError
from aengine.api.outputs import (
    AdapterInfo,
    Embedding,
    EngineInfo,
    EngineStats,
    KVPage,
    LoadReport,
    MemoryUse,
    ModelInfo,
    RenderedChat,
    ReplicaInfo,
    StoredKV,
    TokenizedText,
)
from aengine.api.params import EmbeddingParams, SamplingParams
from aengine.api.request import (
    ChatFields,
    ChatOptions,
    ForkPoint,
    NamedImage,
    OptionFields,
    ProfileOptions,
    Prompt,
    RequestOptions,
    form_of,
    images_of,
)
from aengine.client.active_request import ActiveRequest, Feed
from aengine.client.call import CallFeed, GenerationCall, named_images, write_named_prompt, write_prompt_ids
from aengine.client.client_config import DEFAULT_ADDRESS, ClientConfig
from aengine.client.link import HealthWatch, Link, every, exported, give_kv, open_link, watch_load
from aengine.client.session import MAX_SUBMIT_BYTES, Sessions
from aengine.v1.admin_service_pb2 import (
    ContinueGenerationRequest,
    DrainRequest,
    ExportKvRequest,
    FindKvRequest,
    FlushCacheRequest,
    KvPrefix,
    LoadAdapterRequest,
    PauseGenerationRequest,
    PauseMode,
    ProfileRequest,
    SleepMode,
    SleepRequest,
    UnloadAdapterRequest,
    UpdateMode,
    UpdateWeightsRequest,
    WakeRequest,
)
from aengine.v1.embedding_service_pb2 import StreamHiddenStatesRequest
from aengine.v1.engine_service_pb2 import GetLoadRequest, GetServerInfoRequest
from aengine.v1.generation_pb2 import GenerationSpec, StreamOptions
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, StreamGenerateRequest, TouchSessionRequest
from aengine.v1.model_service_pb2 import GetModelRequest
from aengine.v1.tokenizer_service_pb2 import DetokenizeRequest, RenderChatRequest, TextSpan, TokenizeRequest
from aengine.wire.request import write_chat, write_embedding, write_mode, write_prompt, write_request, write_watch
from aengine.wire.response import (
    read_adapter,
    read_engine_info,
    read_hidden_states,
    read_kv_pages,
    read_load,
    read_memory,
    read_model,
    read_replica,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ServerCalls(ABC):
    """All raise `EngineStateError` while the client does not run."""

    @abstractmethod
    def _running_link(self) -> Link:
        """The connection. Raises `EngineStateError` while the client does not run."""

    async def _ask(self, method: Callable[[Link], Any], request: Message) -> Any:
        link = self._running_link()
        return await link.ask(method(link), request)

    async def _change(self, method: Callable[[Any], Any], request: Message) -> Any:
        """`_ask` of an administrator, for what may take as long as a step, a request or the reading of a model: without a deadline."""
        link = self._running_link()
        return await link.ask(method(link.admin), request, None)

    # ---- what it is, how busy it is, texts -----------------------------------------------------------------------------

    async def engine_info(self) -> EngineInfo:
        """Return what limits requests on the server, and how its model is computed."""
        return read_engine_info(await self._ask(lambda link: link.engine.GetServerInfo, GetServerInfoRequest()))

    async def load(self) -> EngineStats:
        """How busy the server is. Histograms stay empty: those are for its metrics."""
        return read_load((await self._ask(lambda link: link.engine.GetLoad, GetLoadRequest())).load)

    async def watch_load(self, *, min_interval: float | None = None, digest_salt: bytes | None = None) -> AsyncGenerator[LoadReport, None]:
        """How busy the server is, now, whenever that changes and at least once a second; at most every `min_interval` seconds, 0.01 to 1
        (default 0.1). It has no end; close it when no more is wanted.

        With `digest_salt`, 8 to 64 secret bytes, also which pages of prompts are cached there, first all of them: by their
        `aengine.cache.published_digest`. For administrators, where the server asks who its callers are: else `ServerError`. Raises
        what a lost connection or a server that stops means to any call, and `EngineStateError` when the client is closed.
        """
        async with aclosing(watch_load(self._running_link(), write_watch(min_interval, digest_salt))) as reports:
            async for report in reports:
                yield report

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        for_prompt: bool = False,
        literals: Sequence[tuple[int, int]] = (),
        pair: str | None = None,
    ) -> list[int]:
        places = [TextSpan(start=start, end=end) for start, end in literals]
        request = TokenizeRequest(text=text, add_special_tokens=add_special_tokens, literals=places, pair=pair)
        return list((await self._ask(lambda link: link.tokenizer.Tokenize, request)).token_ids)

    async def prompt_ids(self, prompt: Prompt, options: ChatOptions | None = None) -> Sequence[int]:
        """The ids of a prompt, with the options of chats. Raises what `stream()` raises for the prompt."""
        spec = GenerationSpec()
        write_prompt(prompt, options or ChatOptions(), spec.prompt)
        return list(await write_prompt_ids(self._running_link(), spec))

    async def named_prompt(self, prompt: Prompt, options: ChatOptions | None = None) -> tuple[Sequence[int], Sequence[NamedImage]]:
        """The ids of a prompt, and its images with what they are called in the names of pages. Raises what `prompt_ids()` raises."""
        spec, options = GenerationSpec(), options or ChatOptions()
        refuse_history(options.keep_history)
        write_prompt(prompt, options, spec.prompt)
        ids, names = await write_named_prompt(self._running_link(), spec)
        images = images_of(prompt) if form_of(prompt, options) == "chat" else ()  # type: ignore[arg-type]
        return list(ids), named_images(images, names)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        request = DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._ask(lambda link: link.tokenizer.Detokenize, request)).text)

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """The ids that `tokenize` gives, with their pieces and places. Raises `InvalidRequestError`, of `with_pieces` where the tokenizer
        cannot tell places."""
        request = TokenizeRequest(text=text, add_special_tokens=add_special_tokens, with_pieces=True)
        found = await self._ask(lambda link: link.tokenizer.Tokenize, request)
        return TokenizedText(list(found.token_ids), list(found.pieces), list(found.start_offsets), list(found.end_offsets))

    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        """What each token stands for by itself, by its id."""
        ids = list(token_ids)
        found = await self._ask(lambda link: link.tokenizer.Detokenize, DetokenizeRequest(token_ids=ids, with_token_bytes=True))
        return dict(zip(ids, found.token_bytes, strict=True))

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, session: str | None = None, tenant: str = "", **fields: Unpack[ChatFields]
    ) -> RenderedChat:
        refuse_history(fields.get("keep_history", "text"))
        request = RenderChatRequest()
        write_chat(messages, ChatOptions(**fields), request.chat)
        found = await self._ask(lambda link: link.tokenizer.RenderChat, request)
        literals = tuple([(place.start, place.end) for place in found.literals])
        return RenderedChat(found.text, literals, named_images(images_of(messages), found.images))

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the server's adapters, which requests can name."""
        return tuple(map(read_adapter, (await self._ask(lambda link: link.model.GetModel, GetModelRequest())).model.adapters))

    # ---- KV, for administrators ----------------------------------------------------------------------------------------

    async def find_kv(self, token_ids: Sequence[int], *, cache_salt: str = "", adapter: str | None = None) -> StoredKV:
        """How much of a prompt's KV the server keeps, as `ServedEngine.find_kv` describes it."""
        request = FindKvRequest(prefix=KvPrefix(token_ids=token_ids, cache_salt=cache_salt, adapter=adapter or ""))
        found = await self._ask(lambda link: link.admin.FindKv, request)
        return StoredKV(found.identity, found.num_tokens)

    async def export_kv(
        self, token_ids: Sequence[int], *, identity: str, cache_salt: str = "", adapter: str | None = None, skip_tokens: int = 0
    ) -> AsyncGenerator[KVPage, None]:
        """That KV, page by page, as `ServedEngine.export_kv` describes it."""
        prefix = KvPrefix(token_ids=token_ids, cache_salt=cache_salt, adapter=adapter or "")
        request = ExportKvRequest(prefix=prefix, identity=identity, skip_tokens=skip_tokens)
        async with aclosing(exported(self._running_link(), request)) as parts, aclosing(read_kv_pages(parts)) as pages:
            async for page in pages:
                yield page

    async def import_kv(
        self, token_ids: Sequence[int], pages: AsyncIterable[KVPage], *, identity: str, cache_salt: str = "", adapter: str | None = None
    ) -> int:
        """Have the server keep KV, as `ServedEngine.import_kv` describes it. Raises what iterating `pages` raises, too."""
        prefix = ExportKvRequest(prefix=KvPrefix(token_ids=token_ids, cache_salt=cache_salt, adapter=adapter or ""), identity=identity)
        return await give_kv(self._running_link(), prefix, pages)

    # ---- for administrators: what may take long has no deadline but that of the caller ----------------------------------

    async def profile(self, num_steps: int = 100, seconds: float = 10.0) -> bytes:
        """Have the server time the parts of its next steps, as `ServedEngine.profile` describes it."""
        options = ProfileOptions(num_steps, seconds)
        request = ProfileRequest(num_steps=options.num_steps)
        request.time_limit.FromNanoseconds(round(options.seconds * 1e9))
        return bytes((await self._change(lambda admin: admin.Profile, request)).trace)

    async def flush_cache(self) -> int:
        """Have the server forget the cached prefixes that no request holds; returns how many pages that freed."""
        return int((await self._change(lambda admin: admin.FlushCache, FlushCacheRequest())).freed_pages)

    async def pause(self, *, cancel: bool = False) -> int:
        """Have the server stop computing; returns when no step runs. Requests are still accepted, and wait. With `cancel` the requests
        in flight are cancelled; returns how many those were."""
        mode = PauseMode.PAUSE_MODE_CANCEL if cancel else PauseMode.PAUSE_MODE_KEEP
        return int((await self._change(lambda admin: admin.PauseGeneration, PauseGenerationRequest(mode=mode))).cancelled_requests)

    async def unpause(self) -> None:
        """Have the server run steps again after a `pause()`."""
        await self._ask(lambda link: link.admin.ContinueGeneration, ContinueGenerationRequest())

    async def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Return the replicas of a router; none for a server that is no router."""
        response = await self._ask(lambda link: link.engine.GetLoad, GetLoadRequest())
        return tuple(map(read_replica, response.replicas))

    async def drain_replica(self, name: str) -> int:
        """Have a router send nothing more to a replica; returns how many requests go on elsewhere."""
        return int((await self._ask(lambda link: link.admin.Drain, DrainRequest(replica=name))).requests_in_flight)

    async def drain(self, grace: float | None = None) -> int:
        """Have the server shut down, within `grace` seconds (default: as it is configured); returns how many requests it has in flight."""
        request = DrainRequest()
        if grace is not None:
            request.grace.FromNanoseconds(round(grace * 1e9))
        return int((await self._ask(lambda link: link.admin.Drain, request)).requests_in_flight)

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter from the directory `path` on the server, as `AsyncEngine.load_adapter` describes it."""
        response = await self._change(lambda admin: admin.LoadAdapter, LoadAdapterRequest(name=name, path=path))
        return read_adapter(response.adapter)

    async def unload_adapter(self, name: str) -> None:
        """Have the server forget an adapter, when the requests that use it have ended."""
        await self._change(lambda admin: admin.UnloadAdapter, UnloadAdapterRequest(name=name))

    async def sleep(self, level: int = 1, running: str = "park") -> MemoryUse:
        """Have the server give memory back until `wake()`, as `AsyncEngine.sleep` describes it."""
        mode = write_mode(SleepMode, "SLEEP_MODE", "running", running)
        return read_memory((await self._change(lambda admin: admin.Sleep, SleepRequest(level=level, mode=mode))).memory)

    async def wake(self) -> MemoryUse:
        """End a sleep of the server; returns the memory in use before and after."""
        return read_memory((await self._change(lambda admin: admin.Wake, WakeRequest())).memory)

    async def update_weights(self, path: str, running: str = "keep", partial: bool = False) -> int:
        """Replace the weights by those of a directory on the server, as `AsyncEngine.update_weights` describes it; returns how often
        that was done."""
        mode = write_mode(UpdateMode, "UPDATE_MODE", "running", running)
        request = UpdateWeightsRequest(path=path, mode=mode, partial=partial)
        return int((await self._change(lambda admin: admin.UpdateWeights, request)).weights_version)


AS_THEY_COME = StreamOptions()
"""Each token at once; those that are there together share a message."""
FEW_MESSAGES = StreamOptions(max_tokens_per_delta=64, max_delay=Duration(nanos=100_000_000))
"""For `generate`, whose caller sees no single token."""


class ClientBridge(LoopBridge):
    """The bridge of an `AsyncClient`."""

    engine_info = asked(ServerCalls.engine_info)
    load = asked(ServerCalls.load)
    adapters = asked(ServerCalls.adapters)
    replicas = asked(ServerCalls.replicas)
    detokenize = asked(ServerCalls.detokenize)
    locate = asked(ServerCalls.locate)
    token_bytes = asked(ServerCalls.token_bytes)
    profile = asked(ServerCalls.profile)
    flush_cache = asked(ServerCalls.flush_cache)
    pause = asked(ServerCalls.pause)
    unpause = asked(ServerCalls.unpause)
    sleep = asked(ServerCalls.sleep)
    wake = asked(ServerCalls.wake)
    update_weights = asked(ServerCalls.update_weights)
    load_adapter = asked(ServerCalls.load_adapter)
    unload_adapter = asked(ServerCalls.unload_adapter)
    drain = asked(ServerCalls.drain)
    drain_replica = asked(ServerCalls.drain_replica)
    prompt_ids = asked(ServerCalls.prompt_ids)
    named_prompt = asked(ServerCalls.named_prompt)
    watch_load = iterated(ServerCalls.watch_load)
    find_kv = asked(ServerCalls.find_kv)
    export_kv = iterated(ServerCalls.export_kv)

    async def import_kv(
        self, token_ids: Sequence[int], pages: AsyncIterable[KVPage], *, identity: str, cache_salt: str = "", adapter: str | None = None
    ) -> int:
        """Have the server keep KV, when all its pages have come here."""
        held = [page async for page in pages]

        async def each() -> AsyncGenerator[KVPage, None]:
            for page in held:
                yield page

        give = partial(cast("AsyncClient", self._engine).import_kv, token_ids, identity=identity, cache_salt=cache_salt, adapter=adapter)
        return await self._running().call(lambda: give(pages=each()))


class AsyncClient(ServerCalls, AsyncioEngine):
    """An LLM inference engine behind a server, used as if it were in this process.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for token in client.stream("It is a truth", SamplingParams(max_tokens=64)):
                print(token.text, end="", flush=True)

    `address_or_config` is host:port or a `ClientConfig`; `overrides` are fields of `ClientConfig`. A client is started once and belongs
    to the loop that started it.

    Beside the errors of an engine its methods raise `ConnectionLostError` when the server cannot be reached, and `ServerError` when it
    fails for a reason of its own.
    """

    bridge_class = ClientBridge

    def __init__(self, address_or_config: str | ClientConfig = DEFAULT_ADDRESS, **overrides: Any) -> None:
        """Raises `ConfigError` naming every field that is unknown or out of range. Connects to nothing yet."""
        self.config = ClientConfig.of(address_or_config, **overrides)
        self._connection = AsyncExitStack()  # what must be closed
        self._life = AsyncioLife("client", self._connection.aclose)
        self._parts: _Parts | None = None  # once there is a channel
        self._model: ModelInfo | None = None  # once the server has told it
        self._requests: dict[ActiveRequest, None] = {}  # active, in the order of their submission

    # ---- life cycle ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and wait until the server serves. Raises `ConnectionLostError` or `EngineStateError` if it does not within
        `connect_timeout`, `ConfigError` if a file cannot be read, or `ServerError`; and `EngineStateError` if the client is closed
        meanwhile."""
        await self._life.start(self._connect)

    async def aclose(self) -> None:
        """Cancel the requests of this client, and disconnect. Returns when that is done, whoever else closes it. The server runs on."""
        await self._life.aclose(self._cancel_all)

    @property
    def healthy(self) -> bool:
        """Whether the server reports that it serves."""
        return self._life.running and self._parts is not None and self._parts.health.serving

    @property
    def model_info(self) -> ModelInfo:
        """What is served, as it was when the client started. Raises `EngineStateError` before `start()`."""
        if self._model is None:
            raise EngineStateError("the client is not started")
        return self._model

    # ---- requests ------------------------------------------------------------------------------------------------------

    def _open(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None, fields: OptionFields, *, whole: bool
    ) -> ActiveRequest:
        return self.open(prompt, params, RequestOptions.of(options, fields), FEW_MESSAGES if whole else AS_THEY_COME)

    async def _embed(self, prompt: Prompt, options: RequestOptions | None, fields: OptionFields, wanted: EmbeddingFields) -> Embedding:
        link = self._running_link()
        options = RequestOptions.of(options, fields)
        params = EmbeddingParams(**wanted)
        request = write_embedding(prompt, params, options)
        try:
            if isinstance(request, StreamHiddenStatesRequest):
                pieces = await link.ask(partial(every, link.embedding.StreamHiddenStates), request, options.timeout)
                return read_hidden_states(pieces, params)
            (found,) = (await link.ask(link.embedding.Embed, request, options.timeout)).embeddings
        except ServerError as error:
            if error.code == "DEADLINE_EXCEEDED":
                raise RequestEndedError("the embedding was not made: its timeout passed") from error
            raise
        return Embedding(np.array(found.values, np.float32), found.num_tokens, found.cached_tokens)

    async def cancel(self, request_id: str) -> bool:
        """End a request, whoever sent it; its stream closes with FinishReason.CANCELLED. Returns when its pages are free: True if it
        was in flight."""
        link = self._running_link()
        try:
            response = await link.ask(link.generation.CancelRequests, CancelRequestsRequest(request_ids=[request_id]))
        except (ConnectionLostError, EngineStateError):
            own = next((request for request in self._requests if request.request_id == request_id and not request.finished), None)
            if own is None:
                raise
            own.cancel()  # a server that takes no calls any more still sees that a call is cancelled
            await own.wait_released()
            return True
        return request_id in response.cancelled_request_ids

    async def touch(self, session: str, tenant: str = "") -> int:
        link = self._running_link()
        RequestOptions(session=session, tenant=tenant)  # which checks them
        return int((await link.ask(link.generation.TouchSession, TouchSessionRequest(session=session, tenant=tenant))).num_tokens)

    def open(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        delivery: StreamOptions = AS_THEY_COME,
    ) -> ActiveRequest:
        """What is behind a stream, for programs that pass tokens on, such as a router: submitted at once, read by `pop()` when its `waiter`
        was called. Whoever opens it cancels it or reads it to its end. Raises what `stream()` raises."""
        self._life.check_running()
        options = options or RequestOptions()
        params = seeded(prompt, params)
        message = write_request(prompt, params, options)
        message.request_id = options.request_id or uuid.uuid4().hex
        message.spec.stream.CopyFrom(delivery)
        if self.config.auto_resume:
            message.spec.stream.resumable = True
            message.spec.stream.retain.FromNanoseconds(round(self.config.resume_timeout * 1e9))
        request = ActiveRequest(message.request_id, params, options, partial(self._open_feed, message, options), self._open_fork)
        self._requests[request] = None
        return request

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _open_fork(self, point: ForkPoint, params: SamplingParams, fields: OptionFields) -> ActiveRequest:
        return self.open(point, params, RequestOptions.of(None, fields))

    def _open_feed(self, message: StreamGenerateRequest, options: RequestOptions, request: ActiveRequest) -> Feed:
        parts = self._running()
        if self.config.multiplex and message.ByteSize() <= MAX_SUBMIT_BYTES:
            return parts.sessions.submit(message, options.timeout, request, on_done=self._requests.pop)
        call = GenerationCall(parts.link, message, timeout=options.timeout, id_is_random=options.request_id is None)
        return CallFeed(call, request, on_done=self._requests.pop)

    def _running_link(self) -> Link:
        return self._running().link

    def _running(self) -> _Parts:
        self._life.check_running()
        assert self._parts is not None, "started"
        return self._parts

    async def _cancel_all(self) -> None:
        requests = list(self._requests)
        for request in requests:
            request.cancel()
        for request in requests:
            await request.wait_released()

    async def _connect(self) -> None:
        link = await open_link(self.config)
        self._connection.push_async_callback(link.channel.close)
        self._parts = _Parts(link, HealthWatch(link), Sessions(link))
        self._connection.push_async_callback(self._parts.health.stop)
        self._connection.push_async_callback(self._parts.sessions.aclose)
        await self._parts.health.wait_serving(self.config.connect_timeout)
        self._model = read_model((await link.ask(link.model.GetModel, GetModelRequest())).model)


@dataclass(frozen=True)
class _Parts:
    """What a client has from its connection on."""

    link: Link
    health: HealthWatch
    sessions: Sessions
