"""`TokenStream`: what every engine returns for a request: iteration by one reader, the completion of what was read, cancellation, and
reading several tokens at a time. It reads a `StreamSource`, which each kind of engine implements.

Knows nothing of where tokens come from: an engine in this process, a server, or the replicas of a router.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, final

import anyio

from aengine.api.errors import EngineStateError, InvalidRequestError
from aengine.api.outputs import NO_TOKEN, Completion, DraftUsage, FinishReason, RequestInfo, Timing, Token, TokenLogprob, Usage
from aengine.api.params import SamplingParams
from aengine.api.request import ForkPoint, OptionFields, RequestOptions
from aengine.api.runtime import ReadTokens

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from aengine.api.receipt import Receipt, ReceiptFacts

MOST_WAITING = 64
"""Unread tokens that a reader who wants all of them waits for at a time."""
TWO_READERS = "another task waits for this stream's next token; a stream has one reader at a time"


def end_from_outside(index: int, reason: FinishReason) -> Token:
    """Return the item that closes the sequence `index` when its end does not come from the engine. It has no token id and no text."""
    return Token(index, NO_TOKEN, "", finish_reason=reason)


class Event(Protocol):
    """`anyio.Event`, or `asyncio.Event`, which costs less where the loop is asyncio's."""

    def set(self) -> object: ...

    def is_set(self) -> bool: ...

    async def wait(self) -> object: ...


class _AsyncioWait:
    """An event that one task waits for on asyncio: a third of the cost of `asyncio.Event`, of which every token would need one."""

    __slots__ = ("_future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[None] = loop.create_future()

    def set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        await self._future


class StreamSource(ABC):
    """A request and its unread tokens, as its stream needs them. A subclass adds the tokens. `params` are those in use: what was given,
    with the seed, and with the defaults of the engine and the model where these are known."""

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        options: RequestOptions,
        open_fork: Callable[[ForkPoint, SamplingParams, OptionFields], StreamSource],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        """`loop`: of asyncio, in which it is read; None on trio."""
        self._request_id = request_id
        self._open_fork = open_fork
        self.params = params
        self.live_sequences = options.live_sequences(params.n)  # the indexes of those that get tokens
        self.known_lengths = [len(ids or ()) for ids in options.known_outputs or [()] * params.n]  # of the output of each sequence
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.reasoning_tokens = 0
        self.image_tokens = 0
        self.rewritten_tokens = 0
        self.loaded_prompt_tokens = 0
        self.drafts: dict[str, DraftUsage] = {}
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.loop = loop
        self.most_waiting = 1  # unread tokens that a reader who wants all may wait for, without the request being parked for them
        self.new_event: Callable[[], Event] = anyio.Event if loop is None else asyncio.Event
        self.ready = self.new_event()  # set when the prompt is tokenized and valid, or the request has ended
        self.error: BaseException | None = None  # comes after the unread tokens
        self.wants_receipt = options.receipt
        self.receipt_facts: Callable[[int], ReceiptFacts] | None = None  # by weights_version, where a receipt is asked for
        self.waiter: Callable[[], object] | None = None  # called for new tokens and at the end: by a reader, or a `StreamGroup`

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def num_known_tokens(self) -> int:
        """The number of tokens of their output that the sequences had already, together."""
        return sum(self.known_lengths)

    @property
    @abstractmethod
    def timing(self) -> Timing: ...

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether no token will be added, and usage and timing are final."""

    def usage_with(self, completion_tokens: int) -> Usage:
        reasoning_tokens = min(self.reasoning_tokens, completion_tokens)  # which may be those that were read
        drafts = tuple(self.drafts.values())
        return Usage(
            self.prompt_tokens,
            self.cached_prompt_tokens,
            completion_tokens,
            reasoning_tokens,
            self.image_tokens,
            self.rewritten_tokens,
            self.loaded_prompt_tokens,
            drafts=drafts,
        )

    def receipt_of(self, read: Sequence[Sequence[Token]]) -> Receipt | None:
        """The receipt of the request, which has ended; None where none was asked for. `read`: all tokens of each sequence."""
        if self.receipt_facts is None:
            return None
        from aengine.api.receipt import Receipt  # few requests have one

        return Receipt.of(self.request_id, self.params, self.receipt_facts, read)

    @property
    @abstractmethod
    def unread(self) -> int:
        """The number of tokens that `pop()` has."""

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Whether nothing is left of the request where it ran: its pages are free, and so is its id."""

    @abstractmethod
    def info(self) -> RequestInfo:
        """How far the request has come, also once it is `gone`."""

    async def wait_started(self) -> None:
        """Wait until the prompt is tokenized and found valid. Raises what the stream would raise."""
        await self.ready.wait()
        if self.error is not None:
            raise self.error

    @abstractmethod
    def pop(self) -> Token | None:
        """The next unread token; None if there is none, also because the request failed."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the request unless it has ended. Its unread tokens stay."""

    def drop(self) -> None:
        """`cancel()` by the destructor of a stream: in any thread and in the middle of anything."""
        self.cancel()

    @abstractmethod
    def discard(self, indexes: Iterable[int]) -> None:
        """Replace the unread tokens by the ends of the sequences `indexes`, with FinishReason.CANCELLED. Nothing follows them."""

    def fork(self, point: ForkPoint, params: SamplingParams, fields: OptionFields) -> StreamSource:
        """Submit a request that goes on from a place in this one."""
        return self._open_fork(point, params, fields)

    def give_way(self, successor: StreamSource) -> None:
        """Cancel the request, in whose place the `successor`, a fork of it, goes on."""
        self.cancel()

    @abstractmethod
    async def wait_released(self) -> None:
        """Wait until nothing of the request, which is cancelled or has ended, holds pages. The wait cannot be cancelled."""

    def notify(self) -> None:
        """There are new tokens, or the request has ended."""
        if self.waiter is not None:
            self.waiter()


@final
class TokenStream:
    """The tokens of one request, as they are generated: an async iterator and an async context manager.

    Abandoning it in any way (leaving its `async with`, `break` and dropping it, cancelling the task that reads it, `aclose()`)
    cancels the request. A reader that lags parks the request where it runs until it catches up (`EngineConfig.max_unread_tokens`).
    It has one reader at a time: a second one gets `EngineStateError`, and the first reads on. With n > 1 the tokens of the sequences
    come interleaved; `Token.index` tells which one a token belongs to.
    """

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._open = set(source.live_sequences)  # sequences whose end was not read
        self._read = [ReadTokens(index) for index in range(source.params.n)]
        self._num_read = 0  # of all sequences, without ends that are no tokens; since the last `rewind`
        self._num_known = source.num_known_tokens  # before what was read
        self._cut: FinishReason | None = None  # why sequences have no end, where nothing more is read
        self._failed = False  # the reader has got the error

    def __del__(self) -> None:
        self._source.drop()

    @property
    def request_id(self) -> str:
        return self._source.request_id

    @property
    def seed(self) -> int:
        """The seed in use: the given one, or a random one. Raises `EngineStateError` where a server has not told it yet."""
        seed = self._source.params.seed
        if seed is None:
            raise EngineStateError("the seed of the request that this is a fork of is known once the stream has started()")
        return seed

    @property
    def known_lengths(self) -> Sequence[int]:
        """How many tokens of their output the sequences had already, by index."""
        return self._source.known_lengths

    @property
    def usage(self) -> Usage:
        """Token counts so far; completion tokens are those that were read, and those of known_outputs."""
        return self._source.usage_with(self._source.num_known_tokens + self._num_read)

    @property
    def timing(self) -> Timing:
        """How long its phases took, as far as that is known."""
        return self._source.timing

    @property
    def ended(self) -> bool:
        """Whether everything was read, or the stream has raised."""
        return self._failed or (not self._open and self._source.finished)

    def completion(self) -> Completion:
        """What was read so far; the whole output, but for known_outputs, once the iteration has ended. After `aclose()` a sequence whose
        end was not read was CANCELLED, and after the stream has raised its finish reason is ERROR."""
        whole = self._completion(0, tuple(self._completion(index, ()) for index in range(1, len(self._read))))
        return whole if (receipt := self.receipt) is None else replace(whole, receipt=receipt)

    @property
    def receipt(self) -> Receipt | None:
        """What `aengine-replay` derives every token from again, once all was read; None before, or where none was asked for."""
        source = self._source
        if not source.wants_receipt or self._failed or not self.ended:
            return None
        skipped = source.known_lengths[0] - self._num_known if len(self._read) == 1 else 0  # what a `rewind` went back behind
        return source.receipt_of([tokens[max(0, skipped) :] for tokens in self._read])

    @property
    def effective_params(self) -> SamplingParams:
        """The parameters in use: what was given, with the seed, and with the defaults of model and engine where these are known."""
        return self._source.params

    @property
    def gone(self) -> bool:
        """Whether the engine has forgotten the request: its pages are free, and so is its id."""
        return self._source.gone

    def info(self) -> RequestInfo:
        """How far the request has come, also when the engine has nothing of it any more."""
        return self._source.info()

    async def started(self) -> None:
        """Wait until the prompt is tokenized and found valid. Raises what the stream would raise."""
        await self._source.wait_started()

    def cancel(self) -> None:
        """Cancel the request unless it has ended, without waiting. Its unread tokens can still be read, up to its end with
        FinishReason.CANCELLED."""
        self._source.cancel()

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; returns when its pages are free, or some seconds after a server was asked that does
        not answer. Repeated calls do nothing.

        Unread tokens are dropped: further reading gives the end of each sequence, with FinishReason.CANCELLED.
        """
        self._cut = self._cut or FinishReason.CANCELLED
        self._source.cancel()
        self._source.discard(sorted(self._open))
        await self._source.wait_released()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        while (token := self._pop()) is None:
            if not self._goes_on():
                raise StopAsyncIteration
            await self._wait()
        return token

    # ---- forks ---------------------------------------------------------------------------------------------------------

    def fork(
        self,
        at: int | None = None,
        params: SamplingParams | None = None,
        *,
        index: int = 0,
        then: Sequence[int] = (),
        **fields: Unpack[OptionFields],
    ) -> TokenStream:
        """A stream of its own that goes on behind the first `at` tokens of the output of the sequence `index`, those of known_outputs
        included, and then the token ids `then`; `at` None: behind what was read. Nothing is computed again that is still in memory, and
        this stream goes on as it is.

        It brings what a request with these known_outputs brings: with the same parameters, which is what None stands for, that is what
        this one has brought or will bring; give another seed for something else. `fields`: as of `EngineBase.stream`; what is not given
        is as of this request. Raises `InvalidRequestError` (at, index), and what `EngineBase.stream` raises.
        """
        return TokenStream(self._fork(at, params, index, then, fields))

    def rewind(self, to: int, params: SamplingParams | None = None, **fields: Unpack[OptionFields]) -> None:
        """Go back behind the first `to` tokens of the output, no more than were read: what comes next is what `fork(to, params)` would
        bring, in place of what was unread, and counts as of this stream. The request has another id from here on; `fields` may name it.

        Raises what `fork` raises, and `InvalidRequestError` (to) with n > 1; then nothing has changed.
        """
        old = self._source
        if old.params.n > 1:
            raise InvalidRequestError.of("to", "a stream of several sequences (n) cannot go back; fork one of them")
        most = old.num_known_tokens + self._num_read
        if not self._num_known <= to <= most:
            raise InvalidRequestError.of("to", f"{to} is not in [{self._num_known}, {most}], behind tokens that were read")
        self._source = self._fork(to, params, 0, (), fields)
        self._source.waiter, old.waiter = old.waiter, None
        old.give_way(self._source)
        self._read[0].cut(to - self._num_known)
        self._num_read, self._open, self._cut, self._failed = 0, {0}, None, False

    def _fork(self, at: int | None, params: SamplingParams | None, index: int, then: Sequence[int], fields: OptionFields) -> StreamSource:
        source = self._source
        if index not in source.live_sequences:
            raise InvalidRequestError.of("index", f"{index} is no sequence of the request that has tokens")
        if at is None:
            at = self._num_known if source.params.n == 1 else source.known_lengths[index]
            at += sum(token_id >= 0 for token_id in self._read[index].ids)
        params = source.params.of_sequence(index) if params is None else params.with_seed()
        forked = source.fork(ForkPoint(self.request_id, at, index, then), params, fields)
        forked.known_lengths = [at + len(then)] * params.n
        return forked

    # ---- several tokens at a time --------------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether `started()` would return at once."""
        return self._source.ready.is_set() and self._source.error is None

    @property
    def unread(self) -> int:
        """How many tokens can be read without waiting."""
        return self._source.unread

    @property
    def has_news(self) -> bool:
        """Whether `take()` would bring tokens or raise."""
        return not self.ended and (self._source.unread > 0 or self._source.error is not None)

    async def read(self, most: int = sys.maxsize) -> list[Token]:
        """Wait for at least one token; returns what is there, `most` tokens of it. Empty at the end of the stream."""
        while not (tokens := self.take_tokens(most)) and not self.ended:
            await self._wait()
        return tokens

    def take_tokens(self, most: int = sys.maxsize) -> list[Token]:
        """What can be read without waiting, `most` tokens of it. Raises the error that the stream failed with, after the tokens
        before it."""
        tokens: list[Token] = []
        while len(tokens) < most and (token := self._pop()) is not None:
            tokens.append(token)
        if not tokens:
            self._goes_on()
        return tokens

    async def linger(self, count: int, seconds: float) -> None:
        """Wait until `count` tokens can be read without waiting, or nothing more will come, or `seconds` have passed."""
        source = self._source
        with anyio.move_on_after(seconds):
            while source.unread < count and not source.finished:
                await self._wait(count, cancels=False)

    def attach(self, waiter: Callable[[], object] | None) -> None:
        """Have `waiter` called whenever there is something new to take, in place of a reading task; None ends that."""
        if waiter is not None and self._source.waiter is not None:
            raise EngineStateError(TWO_READERS)
        self._source.waiter = waiter

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _pop(self) -> Token | None:
        token = self._source.pop()
        if token is not None:
            self._read[token.index].append(token)
            self._num_read += token.token_id >= 0  # an end from outside has no token
            if token.finish_reason is not None:
                self._open.discard(token.index)
        return token

    def _goes_on(self) -> bool:
        """With nothing to read: whether something may come. Raises the error that the request failed with."""
        if self.ended:
            return False
        if self._source.error is not None:
            self._failed = True
            self._cut = self._cut or FinishReason.ERROR
            raise self._source.error
        return True

    async def _wait(self, count: int = 1, *, cancels: bool = True) -> None:
        """For something new, or for `count` unread tokens or the end. `cancels`: cancelling the reading task cancels the request. Raises
        `EngineStateError` where another task waits."""
        source = self._source
        if source.waiter is not None:
            raise EngineStateError(TWO_READERS)
        changed = anyio.Event() if source.loop is None else _AsyncioWait(source.loop)

        def note() -> None:
            if source.unread >= count or source.finished:
                changed.set()

        source.waiter = changed.set if count == 1 else note
        try:
            await changed.wait()
        except BaseException:  # the reading task is cancelled
            if cancels:
                source.cancel()
            raise
        finally:
            self._source.waiter = None

    def _completion(self, index: int, others: tuple[Completion, ...]) -> Completion:
        params, tokens = self._source.params, self._read[index]
        last = tokens[-1] if tokens else None
        has_new_weights = last is not None and last.weights_version > 0  # it only grows
        return Completion(
            text="".join(tokens.texts),
            token_ids=tuple([token_id for token_id in tokens.ids if token_id >= 0]),
            finish_reason=(last.finish_reason if last is not None else None) or (self._cut if index in self._open else None),
            stop_reason=last.stop_reason if last is not None else None,
            usage=self.usage,
            logprobs=None if params.logprobs is None else _logprobs(tokens),
            prompt_logprobs=None if params.prompt_logprobs is None else tuple(self._source.prompt_logprobs),
            others=others,
            weights_versions=tuple([token.weights_version for token in tokens if token.token_id >= 0]) if has_new_weights else (),
            token_texts=() if params.logprobs is None else tuple([token.text for token in tokens if token.token_id >= 0]),
        )


StreamProtocol = TokenStream  # the name from when each kind of engine had streams of its own


async def read_to_end(stream: TokenStream) -> Completion:
    """All of the stream. Cancelling the caller cancels the request."""
    source = stream._source
    async with stream:
        while not stream.ended:
            if not stream.take_tokens():  # nobody sees a single token, so no task has to wake for each
                await stream._wait(source.most_waiting)
        return stream.completion()


def _logprobs(tokens: Sequence[Token]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token.token_id, token.logprob, token.rank or 0, token.top_logprobs or {})
        for token in tokens
        if token.logprob is not None
    )
