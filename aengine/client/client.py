"""`AsyncClient`: an engine behind a gRPC server as its user sees it. Owns the life cycle and the set of active requests.

For asyncio. Everything here runs in the event loop that started the client. The modules beside this one know the messages of a request
(`messages`), its call with retries (`call`) or the call that it shares (`session`), and the tokens that come back (`active_request`).
"""

from __future__ import annotations

import asyncio
import enum
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from google.protobuf.duration_pb2 import Duration

from aengine.chat_prompts import ChatFields, ChatOptions
from aengine.client.active_request import ActiveRequest, Feed
from aengine.client.call import GenerationCall
from aengine.client.call_feed import CallFeed
from aengine.client.config import DEFAULT_ADDRESS, ClientConfig
from aengine.client.health import HealthWatch
from aengine.client.link import Link, open_link
from aengine.client.load_watch import watch_load
from aengine.client.messages import (
    read_adapter,
    read_engine_info,
    read_load,
    read_memory,
    read_model,
    read_replica,
    write_chat,
    write_embedding,
    write_mode,
    write_prompt,
    write_request,
    write_watch,
)
from aengine.client.prompt_ids import write_prompt_ids
from aengine.client.session import MAX_SUBMIT_BYTES, Sessions
from aengine.errors import ConnectionLostError, EngineStateError, RequestEndedError, ServerError
from aengine.loop_bridge import AsyncioEngine
from aengine.outputs import (
    AdapterInfo,
    Completion,
    Embedding,
    EngineInfo,
    EngineStats,
    LoadReport,
    MemoryUse,
    ModelInfo,
    ReplicaInfo,
    TokenizedText,
)
from aengine.params import EmbeddingParams, SamplingParams
from aengine.requests import OptionFields, Prompt, RequestOptions, check_params
from aengine.stream_base import StreamProtocol, read_to_end
from aengine.v1.admin_service_pb2 import (
    ContinueGenerationRequest,
    DrainRequest,
    FlushCacheRequest,
    LoadAdapterRequest,
    PauseGenerationRequest,
    PauseMode,
    SleepMode,
    SleepRequest,
    UnloadAdapterRequest,
    UpdateMode,
    UpdateWeightsRequest,
    WakeRequest,
)
from aengine.v1.engine_service_pb2 import GetLoadRequest, GetServerInfoRequest
from aengine.v1.generation_pb2 import GenerationSpec, StreamOptions
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, StreamGenerateRequest
from aengine.v1.model_service_pb2 import GetModelRequest
from aengine.v1.tokenizer_service_pb2 import DetokenizeRequest, RenderChatRequest, TokenizeRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

EACH_TOKEN = StreamOptions()
FEW_MESSAGES = StreamOptions(max_tokens_per_delta=64, max_delay=Duration(nanos=100_000_000))
"""For `generate`, whose caller sees no single token."""


class ClientStream(StreamProtocol):
    """The tokens of one request, as they come from the server.

    `aclose()` returns when the server has confirmed that the request is cancelled, or after some seconds. A reader that lags far behind
    parks the request on the server until it catches up. Cached prompt tokens and the timing are known at the end.
    """

    _source: ActiveRequest

    def __del__(self) -> None:
        if hasattr(self, "_source"):
            self._source.drop()


class _Phase(enum.Enum):
    NEW = enum.auto()
    STARTING = enum.auto()
    RUNNING = enum.auto()
    CLOSED = enum.auto()


class AsyncClient(AsyncioEngine):
    """An LLM inference engine behind a server, used as if it were in this process.

        async with AsyncClient("127.0.0.1:50051") as client:
            async for token in client.stream("It is a truth", SamplingParams(max_tokens=64)):
                print(token.text, end="", flush=True)

    `address_or_config` is host:port or a `ClientConfig`; `overrides` are fields of `ClientConfig`. A client is started once and belongs
    to the loop that started it.

    Beside the errors of an engine its methods raise `ConnectionLostError` when the server cannot be reached, and `ServerError` when it
    fails for a reason of its own.
    """

    _link: Link
    _health: HealthWatch
    _sessions: Sessions
    _model: ModelInfo

    def __init__(self, address_or_config: str | ClientConfig = DEFAULT_ADDRESS, **overrides: Any) -> None:
        """Raises `ConfigError` naming every field that is unknown or out of range. Connects to nothing yet."""
        self.config = ClientConfig.of(address_or_config, **overrides)
        self._phase = _Phase.NEW
        self._connection = AsyncExitStack()  # what must be closed
        self._disconnected = asyncio.Event()
        self._requests: dict[ActiveRequest, None] = {}  # active, in the order of their submission

    # ---- life cycle ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect and wait until the server serves. Raises `ConnectionLostError` or `EngineStateError` if it does not within
        `connect_timeout`, `ConfigError` if a file cannot be read, or `ServerError`; and `EngineStateError` if the client is closed
        meanwhile."""
        if self._phase is not _Phase.NEW:
            raise EngineStateError("the client was started before; make a new one")
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise EngineStateError("the client needs the event loop of asyncio: use `async with`, or aengine.on_asyncio") from None
        self._phase = _Phase.STARTING
        self._connecting = anyio.CancelScope()
        try:
            with self._connecting:
                await self._connect()
            if self._connecting.cancel_called:
                raise EngineStateError("the client was closed while it was starting")
        except BaseException:
            await self._disconnect()
            raise
        self._phase = _Phase.RUNNING

    async def aclose(self) -> None:
        """Cancel the requests of this client, and disconnect. Returns when that is done, whoever else closes it. The server runs on."""
        phase, self._phase = self._phase, _Phase.CLOSED
        match phase:
            case _Phase.NEW:
                self._disconnected.set()
            case _Phase.STARTING:
                self._connecting.cancel()  # and `start()` disconnects
            case _Phase.RUNNING:
                requests = list(self._requests)
                for request in requests:
                    request.cancel()
                try:
                    for request in requests:
                        await request.wait_released()
                finally:
                    await self._disconnect()
        await self._disconnected.wait()

    @property
    def healthy(self) -> bool:
        """Whether the server reports that it serves."""
        return self._phase is _Phase.RUNNING and self._health.serving

    @property
    def model_info(self) -> ModelInfo:
        """What is served, as it was when the client started. Raises `EngineStateError` before `start()`."""
        if not hasattr(self, "_model"):
            raise EngineStateError("the client is not started")
        return self._model

    # ---- requests ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> ClientStream:
        """Submit a request at once; iterate the result for its tokens. See `AsyncEngine.stream` for the arguments.

        Raises `EngineStateError`, and `InvalidRequestError` for what can be checked without the server. What the server refuses is raised
        by the first iteration, and by `ClientStream.started()`. `logits_processors` cannot be sent.
        Numbers are sent with a precision of 32 bits.
        """
        return ClientStream(self.open(prompt, params, RequestOptions.of(options, fields)))

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion:
        """`stream()`, read to its end. Cancelling the caller cancels the request."""
        return await read_to_end(ClientStream(self.open(prompt, params, RequestOptions.of(options, fields), FEW_MESSAGES)))

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
        """As that of an engine, but for `request_id`, which is refused: an embedding ends with its call."""
        self._check_running()
        options = RequestOptions.of(options, fields)
        request = write_embedding(prompt, EmbeddingParams(pooling=pooling, normalize=normalize, dimensions=dimensions), options)
        try:
            (found,) = (await self._link.ask(self._link.embedding.Embed, request, options.timeout)).embeddings
        except ServerError as error:
            if error.code == "DEADLINE_EXCEEDED":
                raise RequestEndedError("the embedding was not made: its timeout passed") from error
            raise
        return Embedding(np.array(found.values, np.float32), found.num_tokens, found.cached_tokens)

    async def cancel(self, request_id: str) -> bool:
        """End a request, whoever sent it; its stream closes with FinishReason.CANCELLED. Returns when its pages are free: True if it
        was in flight."""
        self._check_running()
        try:
            response = await self._link.ask(self._link.generation.CancelRequests, CancelRequestsRequest(request_ids=[request_id]))
        except (ConnectionLostError, EngineStateError):
            own = next((request for request in self._requests if request.request_id == request_id and not request.finished), None)
            if own is None:
                raise
            own.cancel()  # a server that takes no calls any more still sees that a call is cancelled
            await own.wait_released()
            return True
        return request_id in response.cancelled_request_ids

    def open(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        delivery: StreamOptions = EACH_TOKEN,
    ) -> ActiveRequest:
        """What is behind a stream, for programs that pass tokens on, such as a router: submitted at once, read by `pop()` when its `waiter`
        was called. Whoever opens it cancels it or reads it to its end. Raises what `stream()` raises."""
        self._check_running()
        options = options or RequestOptions()
        params = check_params(params).with_seed()  # here, so that a second attempt has the same seed
        message = write_request(prompt, params, options)
        message.request_id = options.request_id or uuid.uuid4().hex
        message.spec.stream.CopyFrom(delivery)
        if self.config.auto_resume:
            message.spec.stream.resumable = True
            message.spec.stream.retain.FromNanoseconds(round(self.config.resume_timeout * 1e9))
        request = ActiveRequest(message.request_id, params, options, partial(self._open_feed, message, options))
        self._requests[request] = None
        return request

    # ---- beyond an engine's --------------------------------------------------------------------------------------------

    async def engine_info(self) -> EngineInfo:
        """What limits requests there."""
        self._check_running()
        return read_engine_info(await self._link.ask(self._link.engine.GetServerInfo, GetServerInfoRequest()))

    async def load(self) -> EngineStats:
        """How busy the server is. Histograms stay empty: those are for its metrics."""
        self._check_running()
        return read_load((await self._link.ask(self._link.engine.GetLoad, GetLoadRequest())).load)

    async def watch_load(self, *, min_interval: float | None = None, digest_salt: bytes | None = None) -> AsyncGenerator[LoadReport, None]:
        """How busy the server is, now, whenever that changes and at least once a second; at most every `min_interval` seconds, 0.01 to 1
        (default 0.1). It has no end; close it when no more is wanted.

        With `digest_salt`, 8 to 64 secret bytes, also which pages of prompts are cached there, first all of them: by their
        `aengine.cache.published_digest`. For administrators, where the server asks who its callers are: else `ServerError`. Raises
        what a lost connection or a server that stops means to any call, and `EngineStateError` when the client is closed.
        """
        self._check_running()
        async with aclosing(watch_load(self._link, write_watch(min_interval, digest_salt))) as reports:
            async for report in reports:
                yield report

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, for_prompt: bool = False) -> list[int]:
        self._check_running()
        request = TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._link.ask(self._link.tokenizer.Tokenize, request)).token_ids)

    async def prompt_ids(self, prompt: Prompt, options: ChatOptions | None = None) -> Sequence[int]:
        """The ids of a prompt, with the options of chats. Raises what `stream()` raises for the prompt."""
        self._check_running()
        spec = GenerationSpec()
        write_prompt(prompt, options or ChatOptions(), spec.prompt)
        return list(await write_prompt_ids(self._link, spec))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        self._check_running()
        request = DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._link.ask(self._link.tokenizer.Detokenize, request)).text)

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """The ids that `tokenize` gives, with their pieces and places. Raises `InvalidRequestError`, of `with_pieces` where the tokenizer
        cannot tell places."""
        self._check_running()
        request = TokenizeRequest(text=text, add_special_tokens=add_special_tokens, with_pieces=True)
        found = await self._link.ask(self._link.tokenizer.Tokenize, request)
        return TokenizedText(list(found.token_ids), list(found.pieces), list(found.start_offsets), list(found.end_offsets))

    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        """What each token stands for by itself, by its id."""
        self._check_running()
        ids = list(token_ids)
        found = await self._link.ask(self._link.tokenizer.Detokenize, DetokenizeRequest(token_ids=ids, with_token_bytes=True))
        return dict(zip(ids, found.token_bytes, strict=True))

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Unpack[ChatFields]) -> str:
        self._check_running()
        request = RenderChatRequest()
        write_chat(messages, ChatOptions(**fields), request.chat)
        return str((await self._link.ask(self._link.tokenizer.RenderChat, request)).text)

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """Those that requests can name."""
        self._check_running()
        return tuple(map(read_adapter, (await self._link.ask(self._link.model.GetModel, GetModelRequest())).model.adapters))

    # ---- for administrators --------------------------------------------------------------------------------------------

    async def flush_cache(self) -> int:
        """As `AsyncEngine.flush_cache`."""
        self._check_running()
        return int((await self._link.ask(self._link.admin.FlushCache, FlushCacheRequest())).freed_pages)

    async def pause(self, *, cancel: bool = False) -> int:
        """As `AsyncEngine.pause`."""
        self._check_running()
        mode = PauseMode.PAUSE_MODE_CANCEL if cancel else PauseMode.PAUSE_MODE_KEEP
        return int((await self._link.ask(self._link.admin.PauseGeneration, PauseGenerationRequest(mode=mode))).cancelled_requests)

    async def unpause(self) -> None:
        """As `AsyncEngine.unpause`."""
        self._check_running()
        await self._link.ask(self._link.admin.ContinueGeneration, ContinueGenerationRequest())

    async def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Those of a router."""
        self._check_running()
        response = await self._link.ask(self._link.engine.GetLoad, GetLoadRequest())
        return tuple(map(read_replica, response.replicas))

    async def drain_replica(self, name: str) -> int:
        """Have a router send nothing more to a replica; returns how many requests go on elsewhere."""
        self._check_running()
        return int((await self._link.ask(self._link.admin.Drain, DrainRequest(replica=name))).requests_in_flight)

    async def drain(self, grace: float | None = None) -> int:
        """Have the server shut down, within `grace` seconds (default: as it is configured); returns how many requests it has in flight."""
        self._check_running()
        request = DrainRequest()
        if grace is not None:
            request.grace.FromNanoseconds(round(grace * 1e9))
        return int((await self._link.ask(self._link.admin.Drain, request)).requests_in_flight)

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """As `AsyncEngine.load_adapter`; `path` is a directory on the server."""
        self._check_running()
        response = await self._link.ask(self._link.admin.LoadAdapter, LoadAdapterRequest(name=name, path=path))
        return read_adapter(response.adapter)

    async def unload_adapter(self, name: str) -> None:
        """As `AsyncEngine.unload_adapter`."""
        self._check_running()
        await self._link.ask(self._link.admin.UnloadAdapter, UnloadAdapterRequest(name=name))

    async def sleep(self, level: int = 1, running: str = "park") -> MemoryUse:
        """As `AsyncEngine.sleep`."""
        self._check_running()
        mode = write_mode(SleepMode, "SLEEP_MODE", "running", running)
        return read_memory((await self._link.ask(self._link.admin.Sleep, SleepRequest(level=level, mode=mode))).memory)

    async def wake(self) -> MemoryUse:
        """As `AsyncEngine.wake`."""
        self._check_running()
        return read_memory((await self._link.ask(self._link.admin.Wake, WakeRequest())).memory)

    async def update_weights(self, path: str, running: str = "keep") -> int:
        """As `AsyncEngine.update_weights`, from a directory on the server."""
        self._check_running()
        mode = write_mode(UpdateMode, "UPDATE_MODE", "running", running)
        return int((await self._link.ask(self._link.admin.UpdateWeights, UpdateWeightsRequest(path=path, mode=mode))).weights_version)

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _open_feed(self, message: StreamGenerateRequest, options: RequestOptions, request: ActiveRequest) -> Feed:
        if self.config.multiplex and message.ByteSize() <= MAX_SUBMIT_BYTES:
            return self._sessions.submit(message, options.timeout, request, on_done=self._requests.pop)
        call = GenerationCall(self._link, message, timeout=options.timeout, id_is_random=options.request_id is None)
        return CallFeed(call, request, on_done=self._requests.pop)

    def _check_running(self) -> None:
        if self._phase is not _Phase.RUNNING:
            raise EngineStateError("the client is closed" if self._phase is _Phase.CLOSED else "the client is not started")
        if asyncio.get_running_loop() is not self._loop:
            raise EngineStateError("the client belongs to another event loop")

    async def _connect(self) -> None:
        self._link = await open_link(self.config)
        self._connection.push_async_callback(self._link.channel.close)
        self._health = HealthWatch(self._link)
        self._connection.push_async_callback(self._health.stop)
        self._sessions = Sessions(self._link)
        self._connection.push_async_callback(self._sessions.aclose)
        await self._health.wait_serving(self.config.connect_timeout)
        self._model = read_model((await self._link.ask(self._link.model.GetModel, GetModelRequest())).model)

    async def _disconnect(self) -> None:
        """Close everything of the connection that is there."""
        self._phase = _Phase.CLOSED
        try:
            with anyio.CancelScope(shield=True):
                await self._connection.aclose()
        finally:
            self._disconnected.set()
