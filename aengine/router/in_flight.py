"""The requests of a router in flight, by id: streams and embeddings. Owns what is checked here, and how a prompt becomes ids.

Ids make routing by prefixes exact, and are what a request goes on behind at another replica.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields

import anyio

from aengine.api.dataclass import dataclass
from aengine.api.engine import not_forkable
from aengine.api.errors import InvalidRequestError, RequestEndedError, RequestIdInUseError
from aengine.api.outputs import Embedding, ModelInfo, RequestInfo, RequestState, Timing, Usage
from aengine.api.params import EmbeddingParams, SamplingParams
from aengine.api.request import NO_OUTPUT, ForkPoint, OptionFields, Prompt, RequestOptions, check_params, form_of, read_messages
from aengine.api.runtime import Remembered
from aengine.router.fleet import Fleet
from aengine.router.replica_load import PagePrefix, RoutedPrompt
from aengine.router.routed_request import RoutedRequest, Tokenize
from aengine.router.work import OtherTextsError, RequestProgress
from aengine.wire.request import read_prompt_ids


@dataclass(frozen=True, slots=True)
class _Embedding:
    """One embedding that is in flight."""

    request_id: str
    scope: anyio.CancelScope
    ended: asyncio.Event
    arrival: float  # by the wall clock, seconds since the epoch


class RequestsInFlight:
    """The streams and embeddings in flight of a router that is started."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._streams: dict[str, RoutedRequest] = {}
        self._ended: Remembered[str, RequestProgress] = Remembered()  # of streams, which can be forked
        self._embeddings: dict[str, _Embedding] = {}

    @property
    def _model(self) -> ModelInfo:
        model = self._fleet.model
        assert model is not None, "a replica has served"
        return model

    async def embed(self, prompt: Prompt, params: EmbeddingParams, options: RequestOptions) -> Embedding:
        """Compute the embedding of a prompt at some replica. Raises `InvalidRequestError`, `RequestIdInUseError`, `NoReplicaError`, and
        `RequestEndedError` if it is cancelled or its timeout passes."""
        ids, tokenize = self._read_prompt(prompt, options)
        request_id = self._free_id(options)
        embedding = self._embeddings[request_id] = _Embedding(request_id, anyio.CancelScope(), asyncio.Event(), time.time())
        try:
            with embedding.scope:
                while True:
                    (found, _), texts = ((ids, ()), None) if tokenize is None else await tokenize()
                    assert found is not None
                    with suppress(OtherTextsError):
                        return await self._embed(found, texts, params, options)
        finally:
            del self._embeddings[request_id]
            embedding.ended.set()
        raise RequestEndedError("the embedding was not made: the request was cancelled")

    async def cancel(self, request_id: str) -> bool:
        """End a request. Returns when its pages are free: True if it was in flight."""
        request, embedding = self._streams.get(request_id), self._embeddings.get(request_id)
        if embedding is not None:
            embedding.scope.cancel()
            await embedding.ended.wait()
        return embedding is not None or (request is not None and await request.end_request())

    def info(self, request_id: str) -> RequestInfo | None:
        """How far a request has come; None for one that is not in flight."""
        request, embedding = self._streams.get(request_id), self._embeddings.get(request_id)
        if embedding is not None:
            return RequestInfo(request_id, RequestState.RUNNING, Usage(), Timing(), embedding.arrival)
        return None if request is None else request.info()

    async def aclose(self) -> None:
        """Cancel all requests; returns when their pages are free."""
        requests, embeddings = list(self._streams.values()), list(self._embeddings.values())
        for request in requests:
            request.cancel()
        for embedding in embeddings:
            embedding.scope.cancel()
        for request in requests:
            await request.wait_released()
        for embedding in embeddings:
            await embedding.ended.wait()

    def open(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions, *, few_messages: bool) -> RoutedRequest:
        sent = check_params(params)
        if isinstance(prompt, ForkPoint):
            prompt, sent, options = self._forked(prompt, sent, options)
        sent = sent.with_seed()
        effective, ids, tokenize = self.check(prompt, sent, options)
        request_id = self._free_id(options)
        request = RoutedRequest(
            self._fleet, request_id, effective, sent, options, self._open_fork, few_messages=few_messages, on_gone=self._forget
        )
        self._streams[request_id] = request
        try:
            request.begin(ids, tokenize)
        except BaseException:
            self._forget(request)
            raise
        return request

    def _open_fork(self, point: ForkPoint, params: SamplingParams, fields: OptionFields) -> RoutedRequest:
        return self.open(point, params, RequestOptions.of(None, fields), few_messages=False)

    def _forked(
        self, point: ForkPoint, params: SamplingParams, options: RequestOptions
    ) -> tuple[Sequence[int], SamplingParams, RequestOptions]:
        """A fork as a request with known outputs: ids, parameters, and options with the output. Raises `InvalidRequestError`."""
        form_of(point, options)
        stream = self._streams.get(point.request_id)
        source = self._ended.find(point.request_id) if stream is None else stream.progress
        if source is None or source.ids is None:
            raise not_forkable(point.request_id, is_known=source is not None)
        if point.same_params:
            params = source.sent.of_sequence(point.index, params)
        return source.ids, params, options.of_fork(source.own_options, source.output(point), params.n)

    def _free_id(self, options: RequestOptions) -> str:
        """The id of a new request. Raises `RequestIdInUseError`."""
        request_id = options.request_id or uuid.uuid4().hex
        if request_id in self._streams or request_id in self._embeddings:
            raise RequestIdInUseError.of("request_id", f"{request_id!r} is the id of a request in flight")
        return request_id

    async def _embed(self, ids: Sequence[int], texts: str | None, params: EmbeddingParams, options: RequestOptions) -> Embedding:
        plain = options.for_ids(request_id=None)
        pages = PagePrefix(ids, options.cache_salt or "", self._fleet.digest_salt)
        routed = RoutedPrompt(len(ids), pages.beginning, pages.digests, options.adapter, texts=texts)
        how = {field.name: getattr(params, field.name) for field in fields(params)}
        found: tuple[Embedding, str] = await self._fleet.carry(
            routed,
            lambda client: client.embed(ids, plain, **how),
            options.timeout,
        )
        return found[0]

    def _forget(self, request: RoutedRequest) -> None:
        if self._streams.get(request.request_id) is request:
            del self._streams[request.request_id]
            self._ended.remember(request.request_id, request.progress, request.progress.num_bytes)

    def check(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> tuple[SamplingParams, Sequence[int] | None, Tokenize | None]:
        """The parameters with the model's defaults, and the ids of the prompt or what gives them. Raises `InvalidRequestError` for what
        shows without a replica."""
        if params.logits_processors:
            raise InvalidRequestError.of("logits_processors", "custom code cannot be sent to a server")
        ids, tokenize = self._read_prompt(prompt, options)
        return params.with_defaults_of(self._model.generation_defaults), ids, tokenize

    def _read_prompt(self, prompt: Prompt, options: RequestOptions) -> tuple[Sequence[int] | None, Tokenize | None]:
        """The ids of a prompt, or what gives them. Raises `InvalidRequestError`."""
        form = form_of(prompt, options)
        if form == "fork":
            raise InvalidRequestError.of("prompt", f"it is a fork, and {NO_OUTPUT}")
        if form != "token_ids" and not self._model.tokenizer:
            raise InvalidRequestError.of("prompt", f"a {form} needs a tokenizer, and this model has none; give token ids")
        match form:
            case "token_ids":
                return read_prompt_ids(prompt), None  # type: ignore[arg-type]
            case "text":
                return None, lambda: self._fleet.ask_any(lambda client: client.named_prompt(prompt, options))
            case "chat":
                read_messages(prompt)  # type: ignore[arg-type]
                return None, lambda: self._fleet.ask_any(lambda client: client.named_prompt(prompt, options))
