"""`StreamProtocol`: what every stream of tokens does for its user: iteration by one reader, the completion of what was read, cancellation.

Knows nothing of where tokens come from: an engine in this process, or a server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from aengine.errors import EngineStateError
from aengine.outputs import NO_TOKEN, Completion, DraftUsage, FinishReason, Timing, Token, TokenLogprob, Usage
from aengine.params import SamplingParams
from aengine.requests import RequestOptions

if TYPE_CHECKING:
    from typing_extensions import Self

TWO_READERS = "another task waits for this stream's next token; a stream has one reader at a time"


def end_from_outside(index: int, reason: FinishReason) -> Token:
    """What closes the sequence `index`."""
    return Token(index, NO_TOKEN, "", finish_reason=reason)


class Event(Protocol):
    """`anyio.Event`, or `asyncio.Event`, which costs less where the loop is known."""

    def set(self) -> object: ...

    def is_set(self) -> bool: ...

    async def wait(self) -> object: ...


class StreamSource(ABC):
    """A request and its unread tokens, as a stream needs them. A subclass adds the tokens."""

    def __init__(self, request_id: str, params: SamplingParams, options: RequestOptions, new_event: Callable[[], Event]) -> None:
        self.request_id = request_id
        self.params = params
        self.live_sequences = options.live_sequences(params.n)  # the indexes of those that get tokens
        self.num_known_tokens = options.num_known_tokens  # of their output
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.reasoning_tokens = 0
        self.drafts: dict[str, DraftUsage] = {}
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.new_event = new_event
        self.ready = new_event()  # set when the prompt is tokenized and valid, or the request has ended
        self.error: BaseException | None = None  # comes after the unread tokens
        self.waiter: Callable[[], object] | None = None  # called for new tokens and at the end: by a reader, or a `StreamGroup`

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
        return Usage(self.prompt_tokens, self.cached_prompt_tokens, completion_tokens, reasoning_tokens, drafts=drafts)

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

    @abstractmethod
    async def wait_released(self) -> None:
        """Wait until nothing of the request, which is cancelled or has ended, holds pages. The wait cannot be cancelled."""

    def notify(self) -> None:
        """There are new tokens, or the request has ended."""
        if self.waiter is not None:
            self.waiter()


class StreamProtocol:
    """The tokens of one request, as they are generated: an async iterator and an async context manager.

    Abandoning it in any way (leaving its `async with`, `break` and dropping it, cancelling the task that reads it, `aclose()`)
    cancels the request. It has one reader at a time: a second one gets `EngineStateError`, and the first reads on. With n > 1 the
    tokens of the sequences come interleaved; `Token.index` tells which one a token belongs to.
    """

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._open = set(source.live_sequences)  # sequences whose end was not read
        self._read: list[list[Token]] = [[] for _ in range(source.params.n)]  # by sequence
        self._num_read = 0  # of all sequences, without ends that are no tokens
        self._cut: FinishReason | None = None  # why sequences have no end, where nothing more is read
        self._failed = False  # the reader has got the error

    def __del__(self) -> None:
        if hasattr(self, "_source"):
            self._source.drop()

    @property
    def request_id(self) -> str:
        return self._source.request_id

    @property
    def seed(self) -> int:
        """The seed in use: the given one, or a random one."""
        seed = self._source.params.seed
        assert seed is not None, "set at submission"
        return seed

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
        return self._completion(0, tuple(self._completion(index, ()) for index in range(1, len(self._read))))

    async def started(self) -> None:
        """Wait until the prompt is tokenized and found valid. Raises what the stream would raise."""
        await self._source.ready.wait()
        if self._source.error is not None:
            raise self._source.error

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; returns when its pages are free. Repeated calls do nothing.

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

    # ---- for subclasses ------------------------------------------------------------------------------------------------

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

    async def _wait(self, *, cancels: bool = True) -> None:
        """For new tokens or the end. `cancels`: cancelling the reading task cancels the request. Raises `EngineStateError` where another
        task waits."""
        source = self._source
        if source.waiter is not None:
            raise EngineStateError(TWO_READERS)
        changed = source.new_event()
        source.waiter = changed.set
        try:
            await changed.wait()
        except BaseException:  # the reading task is cancelled
            if cancels:
                source.cancel()
            raise
        finally:
            source.waiter = None

    def _completion(self, index: int, others: tuple[Completion, ...]) -> Completion:
        params, tokens = self._source.params, self._read[index]
        last = tokens[-1] if tokens else None
        has_new_weights = last is not None and last.weights_version > 0  # it only grows
        return Completion(
            text="".join([token.text for token in tokens]),
            token_ids=tuple([token.token_id for token in tokens if token.token_id >= 0]),
            finish_reason=(last.finish_reason if last is not None else None) or (self._cut if index in self._open else None),
            stop_reason=last.stop_reason if last is not None else None,
            usage=self.usage,
            logprobs=None if params.logprobs is None else _logprobs(tokens),
            prompt_logprobs=None if params.prompt_logprobs is None else tuple(self._source.prompt_logprobs),
            others=others,
            weights_versions=tuple([token.weights_version for token in tokens if token.token_id >= 0]) if has_new_weights else (),
        )


async def read_to_end(stream: StreamProtocol) -> Completion:
    """All of the stream. Cancelling the caller cancels the request."""
    async with stream:
        async for _ in stream:
            pass
        return stream.completion()


def _logprobs(tokens: Sequence[Token]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token.token_id, token.logprob, token.rank or 0, token.top_logprobs or {})
        for token in tokens
        if token.logprob is not None
    )
