"""`AsyncClient`: an engine behind a gRPC server as its user sees it. Owns the life cycle and the set of active requests.

For asyncio. Everything here runs in the event loop that started the client. The modules beside this one know the messages of a request
(`messages`), its call with retries (`call`) or the call that it shares (`session`), and the tokens that come back (`active_request`).
"""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.duration_pb2 import Duration

from aengine.asyncio_life import AsyncioLife
from aengine.client.active_request import ActiveRequest, Feed
from aengine.client.call import GenerationCall
from aengine.client.call_feed import CallFeed
from aengine.client.config import DEFAULT_ADDRESS, ClientConfig
from aengine.client.health import HealthWatch
from aengine.client.link import Link, open_link
from aengine.client.messages import (
    read_model,
    write_embedding,
    write_request,
)
from aengine.client.server_calls import ServerCalls
from aengine.client.session import MAX_SUBMIT_BYTES, Sessions
from aengine.errors import ConnectionLostError, EngineStateError, RequestEndedError, ServerError
from aengine.loop_bridge import AsyncioEngine
from aengine.outputs import (
    Completion,
    Embedding,
    ModelInfo,
)
from aengine.params import EmbeddingParams, SamplingParams
from aengine.requests import OptionFields, Prompt, RequestOptions, check_params
from aengine.stream_base import StreamProtocol, read_to_end
from aengine.v1.generation_pb2 import StreamOptions
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, StreamGenerateRequest
from aengine.v1.model_service_pb2 import GetModelRequest

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

    _link: Link
    _health: HealthWatch
    _sessions: Sessions
    _model: ModelInfo

    def __init__(self, address_or_config: str | ClientConfig = DEFAULT_ADDRESS, **overrides: Any) -> None:
        """Raises `ConfigError` naming every field that is unknown or out of range. Connects to nothing yet."""
        self.config = ClientConfig.of(address_or_config, **overrides)
        self._connection = AsyncExitStack()  # what must be closed
        self._life = AsyncioLife("client", self._connection.aclose)
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
        return self._life.running and self._health.serving

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

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _open_feed(self, message: StreamGenerateRequest, options: RequestOptions, request: ActiveRequest) -> Feed:
        if self.config.multiplex and message.ByteSize() <= MAX_SUBMIT_BYTES:
            return self._sessions.submit(message, options.timeout, request, on_done=self._requests.pop)
        call = GenerationCall(self._link, message, timeout=options.timeout, id_is_random=options.request_id is None)
        return CallFeed(call, request, on_done=self._requests.pop)

    def _running_link(self) -> Link:
        self._check_running()
        return self._link

    def _check_running(self) -> None:
        self._life.check_running()

    async def _cancel_all(self) -> None:
        requests = list(self._requests)
        for request in requests:
            request.cancel()
        for request in requests:
            await request.wait_released()

    async def _connect(self) -> None:
        self._link = await open_link(self.config)
        self._connection.push_async_callback(self._link.channel.close)
        self._health = HealthWatch(self._link)
        self._connection.push_async_callback(self._health.stop)
        self._sessions = Sessions(self._link)
        self._connection.push_async_callback(self._sessions.aclose)
        await self._health.wait_serving(self.config.connect_timeout)
        self._model = read_model((await self._link.ask(self._link.model.GetModel, GetModelRequest())).model)
