"""An engine without a model: streams say what the test tells them to say, when it tells them. The API is that of AsyncEngine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import anyio

from aengine.api.errors import EngineStateError, FieldViolation, InvalidRequestError, RequestIdInUseError
from aengine.api.outputs import (
    AdapterInfo,
    Completion,
    DraftUsage,
    EngineInfo,
    EngineStats,
    FinishReason,
    LayerGroup,
    ModelInfo,
    RenderedChat,
    ReplicaInfo,
    RequestInfo,
    RequestState,
    Timing,
    Token,
    TokenLogprob,
    Usage,
)
from aengine.api.params import SamplingParams
from aengine.api.request import RequestOptions

INFO = ModelInfo(
    name="fake",
    architecture="FakeForCausalLM",
    max_model_len=512,
    vocab_size=1000,
    eos_token_ids=(1, 2),
    dtype="float32",
    num_parameters=7,
    chat_template=True,
    generation_defaults=SamplingParams(temperature=0.5, top_p=1.0, top_k=0, min_p=0.0),
    family="fake",
    executor="torch",
    num_active_parameters=5,
    kv_bytes_per_token=96,
    state_bytes=4096,
    layer_groups=(LayerGroup(2, 16), LayerGroup(1)),
)


ARRIVAL = 1_700_000_000.5
"""When every request arrives, seconds since the epoch."""


def tokens(*texts: str, reason: FinishReason = FinishReason.MAX_TOKENS) -> list[Token]:
    """One token per text, ids from 10; the last one ends the sequence."""
    last = len(texts) - 1
    stop = 10 + last if reason is FinishReason.STOP_TOKEN else None
    ends = {last: {"finish_reason": reason, "stop_reason": stop}}
    return [Token(0, 10 + i, text, **ends.get(i, {})) for i, text in enumerate(texts)]  # type: ignore[arg-type]


class FakeStream:
    receipt = None

    def __init__(self, engine: FakeEngine, request_id: str, call: dict[str, Any], seed: int) -> None:
        self.request_id = request_id
        self.call = call
        self.known_lengths = [len(ids or ()) for ids in call["known_outputs"] or [()] * call["params"].n]
        self.seed = seed
        self.closed = asyncio.Event()
        self._engine = engine
        self._items: asyncio.Queue[Token | Exception] = asyncio.Queue()
        self._tokens: list[Token] = []
        self._read = 0
        self._ended = False
        self._waiter: Any = None

    def push(self, items: Iterable[Token | Exception]) -> None:
        for item in items:
            self._items.put_nowait(item)
        if self._waiter is not None:
            self._waiter()

    @property
    def usage(self) -> Usage:
        return Usage(3, 1, self._read, drafts=self._engine.drafts)

    @property
    def effective_params(self) -> SamplingParams:
        params: SamplingParams = self.call["params"]
        return replace(params.with_defaults_of(INFO.generation_defaults), seed=self.seed)

    def completion(self) -> Completion:
        first, *others = (self._completion(index) for index in range(1 + max((token.index for token in self._tokens), default=0)))
        return replace(first, others=tuple(others))

    def _completion(self, index: int) -> Completion:
        mine = [token for token in self._tokens if token.index == index]
        return Completion(
            text="".join(token.text for token in mine),
            token_ids=tuple(token.token_id for token in mine if token.token_id >= 0),
            finish_reason=mine[-1].finish_reason if mine else None,
            stop_reason=mine[-1].stop_reason if mine else None,
            usage=self.usage,
            logprobs=tuple(
                TokenLogprob(token.token_id, token.logprob, token.rank or 0, token.top_logprobs or {})
                for token in mine
                if token.logprob is not None
            ),
            prompt_logprobs=self._engine.prompt_logprobs,
            weights_versions=tuple(token.weights_version for token in mine if token.token_id >= 0),
        )

    def info(self) -> RequestInfo:
        state = RequestState.FINISHED if self._ended else RequestState.RUNNING
        return RequestInfo(self.request_id, state, self.usage, self.timing, ARRIVAL)

    @property
    def gone(self) -> bool:
        return self._ended or self._engine.streams.get(self.request_id) is not self

    @property
    def is_started(self) -> bool:
        return True

    async def started(self) -> None:
        await asyncio.sleep(0)

    def cancel(self) -> None:
        self.push([Token(0, -1, "", finish_reason=FinishReason.CANCELLED)])

    async def aclose(self) -> None:
        self._engine.streams.pop(self.request_id, None)
        self.closed.set()

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __aiter__(self) -> FakeStream:
        return self

    @property
    def timing(self) -> Timing:
        return Timing(2e-9, 6e-9, 1e-9) if self._read else Timing()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def unread(self) -> int:
        return self._items.qsize()

    async def read(self, most: int = sys.maxsize) -> list[Token]:
        if self._ended:
            return []
        return [self._take(await self._items.get()), *self._take_tokens(most - 1)]

    @property
    def has_news(self) -> bool:
        return not self._items.empty()

    def attach(self, waiter: Any) -> None:
        self._waiter = waiter

    def take_tokens(self, most: int = sys.maxsize) -> list[Token]:
        tokens = self._take_tokens(most)
        if not tokens and self._items.qsize():
            self._take(self._items.get_nowait())  # raises it
        return tokens

    def _take_tokens(self, most: int) -> list[Token]:
        tokens = []
        while len(tokens) < most and self._items.qsize() and not isinstance(self._items._queue[0], Exception):  # type: ignore[attr-defined]
            tokens.append(self._take(self._items.get_nowait()))
        return tokens

    async def linger(self, count: int, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            while self._items.qsize() < count and not self._ended:  # noqa: ASYNC110 - a queue has no event for its length
                await asyncio.sleep(0)

    async def __anext__(self) -> Token:
        if self._ended:
            raise StopAsyncIteration
        return self._take(await self._items.get())

    def _take(self, item: Token | Exception) -> Token:
        if isinstance(item, Exception):
            raise item
        self._tokens.append(item)
        self._read += item.token_id >= 0
        self._ended = item.finish_reason is not None and self._items.empty()
        return item


class FakeEngine:
    """`script` is what every stream says; without it streams wait for `push`. `refusal` is raised by `stream()`."""

    def __init__(self, script: Iterable[Token | Exception] = (), *, running: bool = True) -> None:
        self.script = list(script)
        self.drafts: tuple[DraftUsage, ...] = ()
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.refusal: Exception | None = None
        self.running = running
        self.adapters: tuple[AdapterInfo, ...] = ()
        self.behind: tuple[ReplicaInfo, ...] = ()
        self.drained: list[str] = []
        self.streams: dict[str, FakeStream] = {}
        self.submitted: asyncio.Queue[FakeStream] = asyncio.Queue()

    @property
    def healthy(self) -> bool:
        return self.running

    @property
    def model_info(self) -> ModelInfo:
        if not self.running:
            raise EngineStateError("the engine is not started")
        return INFO

    def stats(self) -> EngineStats:
        return EngineStats()

    def watch_pages(self, salt: bytes, most: int) -> Any:
        raise InvalidRequestError.of("page_digests", "there is no cache")

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        return self.behind

    async def unpause(self) -> None:
        pass

    async def drain_replica(self, name: str) -> int:
        self.drained.append(name)
        return 3

    @property
    def engine_info(self) -> EngineInfo:
        return EngineInfo(max_num_seqs=8, page_size=16)

    async def render_chat(self, messages: Any, **fields: Any) -> RenderedChat:
        """No template: the texts of the messages."""
        return RenderedChat("".join(message["content"] for message in messages))

    async def tokenize(self, text: str, **fields: Any) -> list[int]:
        return list(text.encode())

    async def violations(self, prompt: Any, params: SamplingParams) -> list[FieldViolation]:
        return [FieldViolation("max_tokens", "too many")] if (params.max_tokens or 0) >= INFO.max_model_len else []

    def stream(self, prompt: Any, params: SamplingParams, options: RequestOptions | None = None, **fields: Any) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        options = RequestOptions.of(options, fields)  # type: ignore[arg-type]
        request_id = options.request_id or f"drawn-{len(self.streams)}"
        if request_id in self.streams:
            raise RequestIdInUseError((FieldViolation("request_id", f"{request_id!r} is in use"),))
        seed = 77 if params.seed is None else params.seed
        stream = FakeStream(self, request_id, {"prompt": prompt, "params": params, **asdict(options)}, seed)
        stream.push(self.script)
        self.streams[request_id] = stream
        self.submitted.put_nowait(stream)
        return stream

    def request_info(self, request_id: str) -> RequestInfo | None:
        stream = self.streams.get(request_id)
        return None if stream is None else stream.info()

    async def cancel(self, request_id: str) -> bool:
        stream = self.streams.get(request_id)
        if stream is None:
            return False
        stream.cancel()
        await stream.closed.wait()
        return True
