"""`ActiveRequest`: one request of a client, from its submission to its end: its events become tokens, ends of sequences, or an error.

Owns the order of the tokens and which of them are unread. Where the events come from is a `Feed`: a call of the request's own, or a
session that many share. Nothing here refers to the stream that the user holds, so that dropping the stream cancels the request.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from aengine.api.errors import ServerError
from aengine.api.outputs import NO_TOKEN, FinishReason, RequestInfo, RequestState, Timing, Token
from aengine.api.params import SamplingParams
from aengine.api.receipt import Receipt
from aengine.api.request import ForkPoint, OptionFields, RequestOptions
from aengine.api.runtime import UnreadBuffer
from aengine.api.stream import MOST_WAITING, StreamSource, end_from_outside
from aengine.v1 import generation_pb2
from aengine.wire.response import read_delta, read_drafts, read_finish, read_logprobs, read_timing

MAX_UNREAD_TOKENS = 1024
"""Unread tokens that a slow reader may have; with one more nothing is taken from the connection, and the server parks the request."""
CLOSE_SECONDS = 5.0
"""How long closing a request may wait for the server to confirm that it is cancelled."""


class Feed(ABC):
    """Where the events of one `ActiveRequest` come from. It calls `add_event`, `end_stream` and `notify` of the request."""

    @abstractmethod
    def hold(self, held: bool) -> None:
        """No further events are wanted for now, as the reader lags; or they are again."""

    @abstractmethod
    def cancel(self) -> None:
        """Have the server cancel the request, of which no event is wanted any more."""

    @property
    @abstractmethod
    def released(self) -> bool:
        """Whether `wait_released()` would return at once."""

    @abstractmethod
    async def wait_released(self) -> None:
        """Until the server has nothing of the request, which has ended or is cancelled; CLOSE_SECONDS from then on at most."""


class ActiveRequest(StreamSource):
    """Made and used in one event loop, but for `drop`. What reads it is told by `waiter` once for all events that came together.

    `open_feed` gives it its feed, which begins behind the loop's next turn.
    """

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        options: RequestOptions,
        open_feed: Callable[[ActiveRequest], Feed],
        open_fork: Callable[[ForkPoint, SamplingParams, OptionFields], StreamSource],
    ) -> None:
        super().__init__(request_id, params, options, open_fork, loop := asyncio.get_running_loop())
        self.most_waiting = MOST_WAITING
        self.acknowledged = False  # the server has begun it: the prompt is valid
        self.prompt_ids: Sequence[int] = ()  # where there are to be logprobs of them, which come without the ids
        self._tokens: UnreadBuffer[Token] = UnreadBuffer(MAX_UNREAD_TOKENS, self._hold)
        self._timing = Timing()
        self._receipt = ""
        self._finished = False
        self._num_events = 0  # that came, which is the number of the next
        self._open = set(self.live_sequences)  # sequences whose end has not come
        self._last: dict[int, Token] = {}  # the last tokens of sequences, until their ends have come
        self._num_tokens = self.num_known_tokens  # that came
        self.first_version: int | None = None  # of the weights that made the first token that came here; None: none came
        self._arrival_time = time.time()  # in seconds
        self._loop = loop
        self._feed = open_feed(self)

    # ---- used by the stream --------------------------------------------------------------------------------------------

    @property
    def timing(self) -> Timing:
        return self._timing

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def unread(self) -> int:
        return len(self._tokens)

    @property
    def gone(self) -> bool:
        return self._finished and self._feed.released

    def info(self) -> RequestInfo:
        """Return how far the request has come, as its events tell it: one that waits is told from one that runs by its first token."""
        if self._finished:
            state = RequestState.FINISHED
        elif not self.acknowledged:
            state = RequestState.PREPARING
        else:
            state = RequestState.RUNNING if self._num_tokens > self.num_known_tokens else RequestState.WAITING
        return RequestInfo(self.request_id, state, self.usage_with(self._num_tokens), self.timing, self._arrival_time)

    def pop(self) -> Token | None:
        return self._tokens.popleft()

    def cancel(self) -> None:
        """Cancel the request unless it has ended; its unread tokens stay, and sequences without an end are CANCELLED."""
        if not self._finished:
            self.end_stream()
            self._feed.cancel()
            self.notify()

    def drop(self) -> None:
        """Also when the loop is closed."""
        if not self._finished:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.cancel)

    def receipt_of(self, read: Sequence[Sequence[Token]]) -> Receipt | None:
        """The one that the server gave."""
        try:
            return Receipt.from_json(self._receipt) if self._receipt else None
        except ValueError as error:
            raise ServerError(f"the receipt {error}", "DATA_LOSS") from None

    def discard(self, indexes: Iterable[int]) -> None:
        self._tokens.replace([] if self.error is not None else [end_from_outside(index, FinishReason.CANCELLED) for index in indexes])

    async def wait_released(self) -> None:
        """Until the server has confirmed it, for CLOSE_SECONDS at most."""
        await self._feed.wait_released()

    # ---- used by the feed ----------------------------------------------------------------------------------------------

    def add_event(self, event: generation_pb2.GenerationEvent) -> None:
        """The next event. To be followed by `notify()`. Raises `ServerError` for what no server should send."""
        if event.event_number != self._num_events or self._finished:
            raise ServerError(f"event {event.event_number} came where {self._num_events} was due", "DATA_LOSS")
        self._num_events += 1
        match event.WhichOneof("event"):
            case "delta":
                self._add_delta(event.delta)
            case "sequence_finished":
                self._add_finish(event.sequence_finished)
            case "started":
                self.prompt_tokens = event.started.prompt.num_tokens
                if self.params.seed is None:  # it is that of the request that this is a fork of
                    self.params = replace(self.params, seed=event.started.seed)
                if event.started.num_known_tokens:
                    self.known_lengths = [event.started.num_known_tokens] * self.params.n
                    self._num_tokens = self.num_known_tokens
                self.prompt_logprobs = [None]
                self.acknowledged = True
                self.ready.set()
            case "prompt_logprobs":
                self._add_prompt(event.prompt_logprobs)
            case "finished":
                usage = event.finished.usage
                self.cached_prompt_tokens = usage.cached_prompt_tokens
                self.reasoning_tokens, self.image_tokens = usage.reasoning_tokens, usage.image_tokens
                self.rewritten_tokens, self.loaded_prompt_tokens = usage.rewritten_tokens, usage.loaded_prompt_tokens
                self.drafts = {one.drafter: one for one in read_drafts(usage.drafts)}
                self._timing = read_timing(event.finished.timing)
                self._receipt = event.finished.receipt
                self.end_stream()

    def end_stream(self, error: Exception | None = None) -> None:
        """Nothing more comes. To be followed by `notify()`. Sequences that have no end are cancelled, or the request has failed with
        `error`. Does nothing where it has ended."""
        if self._finished:
            return
        self._finished = True
        if self._open and error is not None:
            self.error = error
        else:
            for index in sorted(self._open):
                held = self._last.pop(index, None)
                end = end_from_outside(index, FinishReason.CANCELLED)
                self._tokens.extend([end] if held is None else [held, end])
        self.ready.set()

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _add_delta(self, delta: generation_pb2.GenerationDelta) -> None:
        index = delta.sequence_index
        if index not in self._open or index in self._last:
            raise ServerError(f"a delta of sequence {index}, which has ended or is not one of the request's", "DATA_LOSS")
        tokens = read_delta(delta)
        if self.first_version is None and tokens:
            self.first_version = tokens[0].weights_version
        if delta.last:
            self._last[index] = tokens.pop()  # it is read together with its end, as in the engine
        self._num_tokens += len(tokens) + delta.last
        self._tokens.extend(tokens)

    def _add_finish(self, end: generation_pb2.SequenceFinished) -> None:
        index = end.sequence_index
        if index not in self._open:
            raise ServerError(f"sequence {index} ends twice, or is not one of the request's", "DATA_LOSS")
        reason, stop_reason = read_finish(end.finish)
        last = self._last.pop(index, None) or Token(index, NO_TOKEN, "")
        self._open.discard(index)
        self._tokens.append(replace(last, finish_reason=reason, stop_reason=stop_reason))

    def _add_prompt(self, piece: generation_pb2.PromptLogprobs) -> None:
        ids = self.prompt_ids
        start, stop = piece.token_offset, piece.token_offset + len(piece.logprobs.logprobs)
        if stop > len(ids):
            raise ServerError(f"logprobs of {stop} tokens, where the prompt has {len(ids)}", "DATA_LOSS")
        self.prompt_logprobs[start:] = read_logprobs(ids[start:stop], piece.logprobs)

    def _hold(self, held: bool) -> None:
        self._feed.hold(held)
