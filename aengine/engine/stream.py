"""`TokenStream`: what a user iterates. Owns what was read so far, and the promises about leaving a stream.

When the user lets go of it in any way, the request is cancelled. Must not know schedulers or threads.
"""

from __future__ import annotations

import sys
from types import TracebackType

import anyio

from aengine.answers import TWO_READERS, Answers
from aengine.engine.stream_state import StreamState, Waiter
from aengine.errors import EngineStateError
from aengine.outputs import Completion, FinishReason, RequestInfo, Timing, Token, Usage
from aengine.params import SamplingParams
from aengine.protocols import StreamProtocol


class TokenStream:
    """The tokens of one request, as they are generated: an async iterator and an async context manager.

    Letting go of it in any way (leaving its `async with`, `break` and dropping it, cancelling the task that reads it, `aclose()`)
    cancels the request. A stream has one reader at a time. A reader that lags by more than `max_unread_tokens` parks the request
    until it catches up. With n > 1 the tokens of the sequences come interleaved; `Token.index` tells which one a token belongs to.
    """

    def __init__(self, state: StreamState) -> None:
        self._state = state
        self._answers = Answers(state.params)
        self._failed = False  # the reader was told the error

    def __del__(self) -> None:
        state = getattr(self, "_state", None)
        if state is not None and not state.released.is_set():
            state.hooks.cancel(state)

    @property
    def request_id(self) -> str:
        return self._state.request_id

    @property
    def seed(self) -> int:
        """The seed in use: the given one, or the one that was drawn."""
        seed = self._state.params.seed
        assert seed is not None, "drawn at submission"
        return seed

    @property
    def effective_params(self) -> SamplingParams:
        """The parameters in use: what was given, with the defaults of model and engine, and the seed, filled in."""
        return self._state.params

    @property
    def usage(self) -> Usage:
        """Token counts so far; completion tokens are those that were read."""
        return Usage(self._state.prompt_tokens, self._state.cached_prompt_tokens, self._answers.num_tokens)

    @property
    def timing(self) -> Timing:
        """How long its phases took, so far."""
        return self._state.timing

    @property
    def gone(self) -> bool:
        """Whether nothing of the request is left in the engine: its pages are free, and so is its id."""
        return self._state.released.is_set()

    def info(self) -> RequestInfo:
        """How far the request has come, also when the engine has nothing of it any more."""
        return self._state.info()

    def completion(self) -> Completion:
        """What was read so far, as one answer; the whole answer once the iteration has ended. After `aclose()` a sequence whose end was
        not read was CANCELLED, and after the stream has raised its finish reason is ERROR."""
        wants_prompt = self._state.params.prompt_logprobs is not None
        return self._answers.completion(self.usage, self._state.prompt_logprobs if wants_prompt else None)

    async def started(self) -> None:
        """Wait until the prompt is tokenized and found valid. Raises what the stream would raise."""
        await self._state.ready.wait()
        if self._state.error is not None:
            raise self._state.error

    def cancel(self) -> None:
        """Cancel the request unless it has ended, without waiting. What there is of it can still be read, up to its end with
        FinishReason.CANCELLED."""
        if not self._state.released.is_set():
            self._state.hooks.cancel(self._state)

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; returns when its pages are free. Repeated calls do nothing.

        What was not read is dropped: whoever reads on gets the end of each sequence, with FinishReason.CANCELLED.
        """
        self._answers.cut(FinishReason.CANCELLED)
        self.cancel()
        self._state.drop(sorted(self._answers.open))
        if not self._state.released.is_set():
            with anyio.CancelScope(shield=True):  # bounded by one step
                await self._state.released.wait()

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        while (token := self._state.pop()) is None:
            if not self._goes_on():
                raise StopAsyncIteration
            await self._wait()
        self._answers.add(token)
        return token

    # ---- several tokens at a time --------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether everything was read, or the stream has raised."""
        return self._failed or not self._answers.open

    @property
    def is_started(self) -> bool:
        """Whether `started()` would return at once."""
        return self._state.ready.is_set() and self._state.error is None

    @property
    def unread(self) -> int:
        """How many tokens can be read without waiting."""
        return len(self._state.items)

    @property
    def has_news(self) -> bool:
        """Whether `take()` would bring tokens or raise."""
        return not self.ended and (bool(self._state.items) or self._state.error is not None)

    async def read(self, most: int = sys.maxsize) -> list[Token]:
        """Wait for at least one token; returns what is there, `most` tokens of it. Empty at the end of the stream."""
        while not (tokens := self.take(most)) and not self.ended:
            await self._wait()
        return tokens

    def take(self, most: int = sys.maxsize) -> list[Token]:
        """What can be read without waiting, `most` tokens of it. Raises the error that the stream failed with, after the tokens
        before it."""
        tokens: list[Token] = []
        while len(tokens) < most and (token := self._state.pop()) is not None:
            self._answers.add(token)
            tokens.append(token)
        if not tokens:
            self._goes_on()
        return tokens

    async def linger(self, count: int, seconds: float) -> None:
        """Wait until `count` tokens can be read without waiting, or nothing more will come, or `seconds` have passed."""
        state = self._state
        with anyio.move_on_after(seconds):
            while len(state.items) < count and not state.finished:
                await self._wait(cancels=False)

    def attach(self, waiter: Waiter | None) -> None:
        """Have `waiter` set whenever there is something new to take, in place of a reading task; None ends that."""
        self._check_unread()
        self._state.waiter = waiter

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        """With nothing to read: whether something may come. Raises the error that the stream failed with."""
        if self.ended:
            return False
        if self._state.error is not None:
            self._failed = True
            self._answers.cut(FinishReason.ERROR)
            raise self._state.error
        return True

    def _check_unread(self) -> None:
        if isinstance(self._state.waiter, anyio.Event):
            raise EngineStateError(TWO_READERS)

    async def _wait(self, *, cancels: bool = True) -> None:
        """For something new. `cancels`: cancelling the reading task cancels the request."""
        state = self._state
        if state.waiter is not None:
            raise EngineStateError(TWO_READERS)
        news = state.waiter = anyio.Event()
        try:
            await news.wait()
        except BaseException:  # the reading task is cancelled
            if cancels:
                state.hooks.cancel(state)
            raise
        finally:
            state.waiter = None


_CONFORMS: type[StreamProtocol] = TokenStream
