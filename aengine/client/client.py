"""`AsyncClient`: an engine behind a gRPC server as its user sees it. Owns the life cycle and the set of active requests.

For asyncio. Everything here runs in the event loop that started the client. The modules beside this one know the messages of a request
(`messages`), its call with retries (`call`) or the call that it shares (`session`), and the tokens that come back (`active_request`).
"""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration

from aengine.aio.bridge import AsyncioEngine
from aengine.aio.life import AsyncioLife
from aengine.api.engine import EmbeddingFields
from aengine.api.errors import ConnectionLostError, EngineStateError, RequestEndedError, ServerError
from aengine.api.outputs import Embedding, ModelInfo
from aengine.api.params import EmbeddingParams, SamplingParams
from aengine.api.request import OptionFields, Prompt, RequestOptions, check_params
from aengine.client.active_request import ActiveRequest, Feed
from aengine.client.call import CallFeed, GenerationCall
from aengine.client.config import DEFAULT_ADDRESS, ClientConfig
from aengine.client.health import HealthWatch
from aengine.client.link import Link, open_link
from aengine.client.server_calls import ServerCalls
from aengine.client.session import MAX_SUBMIT_BYTES, Sessions
from aengine.v1.generation_pb2 import StreamOptions
from aengine.v1.generation_service_pb2 import CancelRequestsRequest, StreamGenerateRequest
from aengine.v1.model_service_pb2 import GetModelRequest
from aengine.wire.client_messages import read_model, write_embedding, write_request

EACH_TOKEN = StreamOptions()
FEW_MESSAGES = StreamOptions(max_tokens_per_delta=64, max_delay=Duration(nanos=100_000_000))
"""For `generate`, whose caller sees no single token."""


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
        return self.open(prompt, params, RequestOptions.of(options, fields), FEW_MESSAGES if whole else EACH_TOKEN)

    async def _embed(self, prompt: Prompt, options: RequestOptions | None, fields: OptionFields, wanted: EmbeddingFields) -> Embedding:
        link = self._running_link()
        options = RequestOptions.of(options, fields)
        request = write_embedding(prompt, EmbeddingParams(**wanted), options)
        try:
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

    def open(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        delivery: StreamOptions = EACH_TOKEN,
    ) -> ActiveRequest:
        """What is behind a stream, for programs that pass tokens on, such as a router: submitted at once, read by `pop()` when its `waiter`
        was called. Whoever opens it cancels it or reads it to its end. Raises what `stream()` raises."""
        self._life.check_running()
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
